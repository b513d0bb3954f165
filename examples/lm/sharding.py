"""FSDP2: weights, gradients and optimizer state in shards; a rank has whole weights only while it needs them.

A weight is sharded over the ranks that would otherwise hold equal copies (docs/folding.md):

    matrices of the model               the ranks of the pipeline stage, TP x CP x DP
    matrices that TP has split          DP x CP
    experts                             EDP
    norms, biases and sinks             none, as they are small; nor experts that a rank alone has:
                                        `sync_gradients` averages the gradients of both

Each block is a unit: gathered for its forward, freed, and gathered again for its backward. Its experts, its
shared experts and the matrices that TP has split are units within it. While a block computes, the next one is
gathered. Gradients of microbatches add up, and the last one's backward scatters their sums.

Pipeline schedules alternate between microbatches, so that no block is finished before the step is. There
everything is gathered before the first microbatch, and gradients are scattered after the last:
`Sharding.step`. In between a rank has all weights and gradients of its stage.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lm.model import Transformer
from lm.options import Options
from lm.precision import EXPERTS
from moecomm.nn import SharedExperts, fully_shard_experts, is_expert_parameter
from moecomm.parallel import ParallelFolding


class Sharding:
    """Shards a model in place, on all ranks of the job together; its attention must be split before."""

    def __init__(
        self,
        model: Transformer,
        options: Options,
        folding: ParallelFolding,
        device: torch.device,
        mesh: DeviceMesh | None,
    ) -> None:
        """mesh: as returned by `lm.parallel.split_attention`."""
        self._model: Any = model
        self._by_step = folding.pp > 1
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else None
        by_unit = {} if self._by_step else {"param_dtype": dtype}  # otherwise `precision.compute` casts
        narrow = options.weights == "bfloat16"
        of_experts = MixedPrecisionPolicy(**by_unit, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False
        )
        _shard(model, folding, device, mesh, policy, of_experts)
        self._units: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
        for unit in self._units:
            if device.type == "cpu":
                unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        if self._by_step:
            self._remove_hooks()
        else:
            _gather_ahead(model)

    def _remove_hooks(self) -> None:
        # torch 2.13 has no public names for this and for what `step` does. Its own pipelines use these.
        for unit in self._units:
            state = unit._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
        self._model._get_fsdp_state()._lazy_init()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A context for forwards and backwards of a step's microbatches. Afterwards `grad` has the shards."""
        if self._by_step:
            self._gather()
        yield
        if self._by_step:
            self._model._get_fsdp_state()._root_post_backward_final_callback()

    def begin(self, *, last: bool) -> None:
        """Begins a microbatch. last: whether it is the step's last one."""
        if not self._by_step:
            self._model.set_requires_gradient_sync(last)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context for forwards without a backward."""
        if self._by_step:
            self._gather()
        yield
        for unit in self._units:
            unit.reshard()

    def _gather(self) -> None:
        for unit in self._units:
            unit.unshard()


def _shard(
    model: Transformer,
    folding: ParallelFolding,
    device: torch.device,
    split: DeviceMesh | None,
    policy: MixedPrecisionPolicy,
    of_experts: MixedPrecisionPolicy,
) -> None:
    """Makes the units, the inner ones first."""
    stage = DeviceMesh.from_group(folding.group("tp-cp-dp"), device.type, mesh_dim_names=("stage",))
    experts = {p for part in model.modules() if isinstance(part, EXPERTS) for p in part.parameters()}
    whole = {p for p in model.parameters() if p.ndim < 2 and p not in experts}
    dense: dict[str, Any] = {"mesh": stage, "mp_policy": policy, "ignored_params": whole}

    def place(parameter: nn.Parameter) -> Shard:
        """Shards by expert, or by row if the ranks would get different numbers of experts."""
        by_row = parameter.shape[0] % folding.edp and folding.etp == 1
        return Shard(1 if by_row and parameter.shape[1] % folding.edp == 0 else 0)

    if folding.edp > 1:
        fully_shard_experts(model, routers=False, mp_policy=of_experts, shard_placement_fn=place)
    else:
        whole |= set(filter(is_expert_parameter, model.parameters()))
    for part in list(model.modules()):
        if isinstance(part, SharedExperts):
            fully_shard(part, mesh=stage, mp_policy=of_experts)
    if split is not None:
        _shard_attention(model, folding, split["dp_cp"], dense)
    for block in model.own_blocks():
        fully_shard(block, **dense)
    for name in () if model.config.tied else ("embedding", "head"):
        if hasattr(model, name):  # a pipeline stage may lack it
            fully_shard(getattr(model, name), **dense)
    fully_shard(model, **dense)  # the embedding, if it is also the output matrix: whole during a microbatch
    for part in (*model.own_blocks()[-1:], getattr(model, "head", None)):
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False)  # its backward follows immediately


def _shard_attention(
    model: Transformer, folding: ParallelFolding, mesh: DeviceMesh, dense: dict[str, Any]
) -> None:
    """Makes units of the matrices that TP has split, and of the products of latents, which it has not."""
    # A module that TP has split returns a view; FSDP2 warns, but a block only adds to it out of place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    for block in model.own_blocks():
        attention = block.attention
        split = {parameter for parameter in attention.parameters() if isinstance(parameter, DTensor)}
        for part in attention.children():
            if any(p.ndim >= 2 and p not in split for p in part.parameters()):
                fully_shard(part, **dense)
        if mesh.size() == 1:
            dense["ignored_params"] |= split
            continue
        unit = fully_shard(attention, **{**dense, "mesh": mesh})
        # Gradients already include the tokens of all TP ranks, and are averaged over the stage.
        unit.set_gradient_divide_factor(float(folding.size("tp-cp-dp")))


def _gather_ahead(model: Transformer) -> None:
    """Gathers the next block while one computes. torch alone does so only as far as the host runs ahead of
    the GPU, but the host waits in a layer with experts."""
    blocks = [
        [part for part in block.modules() if isinstance(part, FSDPModule)] for block in model.own_blocks()
    ]
    for units, following in itertools.pairwise(blocks):
        units[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(units[::-1])
    if isinstance(model.embedding, FSDPModule):
        model.embedding.set_modules_to_forward_prefetch(blocks[0])
    if isinstance(model.head, FSDPModule):
        blocks[-1][0].set_modules_to_forward_prefetch([model.head])
