"""Parameters of experts: their marks, their initial values, their parts (expert tensor parallelism), and
adapters."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.func import functional_call

from moecomm.errors import InvalidArgument
from moecomm.kernels.activation import INPUTS, INTERLEAVED

_MARK = "moecomm_expert_parallel"
AVERAGED_BY_DDP = "moecomm_averaged_by_ddp"
"""The attribute that `prepare_ddp` sets on parameters of experts: the hook that averages their gradients."""
DIVIDED = "moecomm_divided"
"""The attribute that `fully_shard_experts` sets on parameters that it does not shard. A hook divides their
gradients, which nothing has to average afterwards."""
_MOST_THREADS = 16
"""The most threads that draw the initial weights of experts."""


def mark_expert_parameter(parameter: nn.Parameter) -> None:
    """Marks a parameter for `is_expert_parameter`; call it for your own experts, as GroupedExperts does for
    its parameters. Raises InvalidArgument for what is no tensor, such as a module."""
    if not isinstance(parameter, Tensor):
        raise InvalidArgument(f"parameter is {type(parameter).__name__}, must be an nn.Parameter")
    setattr(parameter, _MARK, True)


def is_expert_parameter(parameter: Tensor) -> bool:
    """Returns True for a parameter of this rank's experts, False for one that all ranks share.

    `parameter` must come from a model's `parameters()`, a call that also marks the parameters of
    parametrizations."""
    return getattr(parameter, _MARK, False)


def ranks_of_shards(parameter: DTensor) -> tuple[int, ...]:
    """Returns the ranks over which a parameter is sharded, ascending."""
    return tuple(sorted(int(rank) for rank in parameter.device_mesh.mesh.flatten()))


def mixed_shards_error(name: str, ranks: Sequence[int], held: str | None) -> InvalidArgument:
    """Returns the error for experts that fully_shard has sharded over ranks with different experts. held:
    those of this rank, in words."""
    return InvalidArgument(
        f"{name} is sharded over ranks {list(ranks)} by fully_shard: this rank holds {held}, and others hold "
        "others. Call moecomm.nn.fully_shard_experts(model) first, then fully_shard for the rest of the model"
    )


@torch.no_grad()
def init_shared_weight(weight: Tensor, std: float) -> None:
    """Fills a weight that all ranks have, or this rank's shard of it, with normal numbers from torch's
    default CPU generator, so that it starts the same on every device. A weight on the meta device is left
    alone."""
    if weight.is_meta:
        return
    local, here = _shard_of(weight)
    drawn = nn.init.normal_(torch.empty(weight.shape, dtype=weight.dtype, device="cpu"), std=std)
    local.copy_(drawn[here])


def init_expert_weights(
    weight_LAB: Tensor, *, seed: int, name: str, first_expert: int, std: float, part: ExpertPart, split: Split
) -> None:
    """Fills weight[l], or its part or shard, with normal numbers that depend on (seed, name, first_expert +
    l) alone, so that a model starts the same at every EP and ETP size. A weight on the meta device is left
    alone."""
    if weight_LAB.is_meta:
        return
    shape = list(weight_LAB.shape)
    shape[0], shape[split.dim] = 1, shape[split.dim] * part.of
    local_LAB, (experts_here, *columns_here) = _shard_of(weight_LAB.detach())
    first_expert += experts_here.start

    def draw(local: int) -> Tensor:
        key = f"{seed}:{name}:{first_expert + local}".encode()
        generator = torch.Generator("cpu")
        generator.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
        whole_1AB = torch.normal(0.0, std, shape, generator=generator, dtype=torch.float32, device="cpu")
        return part.take(whole_1AB, split)[0][tuple(columns_here)]

    # Each expert has its own generator, so threads can draw in parallel; few experts are in memory at a time.
    at_once = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    experts = list(local_LAB)
    with ThreadPoolExecutor(at_once) as threads:
        for start in range(0, len(experts), at_once):
            some = range(start, min(start + at_once, len(experts)))
            for local, drawn_AB in zip(some, threads.map(draw, some), strict=True):
                experts[local].copy_(drawn_AB)


def _shard_of(weight: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Returns this rank's shard of a weight, and its position in the weight; for a plain tensor all of it."""
    if not isinstance(weight, DTensor):
        return weight, tuple(slice(0, size) for size in weight.shape)
    shape, offsets = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    here = tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
    return weight.to_local(), here


# -- parts of experts under expert tensor parallelism ------------------------------------------------------
# Part p of P has F / P of the F inner columns, from p F / P on. These are columns of both halves of a w_in
# (H, 2F) with gates in its first half, pairs of columns of an interleaved w_in, and rows of w_out (F, H). An
# expert's result is the sum of its parts' results. So b_out is added once: part 0 alone has it.
#
# Example: F = 4, P = 2. If the columns of w_in are g0 g1 g2 g3 u0 u1 u2 u3 (halves), part 1 has g2 g3 u2 u3;
# if they are g0 u0 g1 u1 g2 u2 g3 u3 (interleaved), part 1 has g2 u2 g3 u3.


class Split(NamedTuple):
    """How parts divide one dimension of a weight."""

    dim: int
    """The dimension of the (E, ...) tensor of all experts."""
    blocks: int
    """The number of equal blocks in that dimension; each part has a share of every block."""


class ExpertPart(NamedTuple):
    """One of the equal parts into which experts are split: part `number` of `of`, counted from 0."""

    number: int = 0
    of: int = 1

    def take(self, whole: Tensor, split: Split | None) -> Tensor:
        """Returns this part's share of a weight of whole experts, (E, ...) for any E; without a split, the
        weight itself."""
        if split is None or self.of == 1:
            return whole
        shares = whole.unflatten(split.dim, (split.blocks, self.of, -1))
        return shares.select(split.dim + 1, self.number).flatten(split.dim, split.dim + 1)


def splits_of(activation: str) -> dict[str, Split | None]:
    """Returns how parts divide each parameter of GroupedExperts; None: it is not divided."""
    halves = 1 if activation in INTERLEAVED else INPUTS[activation]
    return {"w_in": Split(2, halves), "w_out": Split(1, 1), "b_in": Split(1, halves), "b_out": None}


# -- parameters that are added to experts ------------------------------------------------------------------
# For example by torch.nn.utils.parametrize. A parameter with a part for each of this rank's experts has the
# number of experts as its first dimension, but so may another parameter by chance. So the parametrization is
# run with random numbers: a part for one expert changes the weight of that expert alone.


_SAID = "_moecomm_per_expert"
"""The attribute of a module that says, by name, which of its parameters have a part for each expert."""


def mark_adapter(module: nn.Module, *, per_expert: bool) -> None:
    """Declares whether the parameters of a module within a layer's experts (a parametrization) have a part
    for each expert (True) or are the same on all ranks (False). Call it if moecomm raises InvalidArgument
    since it cannot tell: the first dimension is the number of this rank's experts, perhaps by chance. Copies
    of the module keep the declaration."""
    for each in module.modules():
        setattr(each, _SAID, dict.fromkeys(each._parameters, per_expert))
        for parameter in each._parameters.values():
            if parameter is not None and not per_expert:
                setattr(parameter, _MARK, False)


def has_part_for_each(experts: nn.Module, local: int, name: str, parameter: Tensor) -> bool | None:
    """Returns whether a parameter that was added to the experts as `name` has a part for each of this
    rank's `local` experts; None if that cannot be told."""
    if parameter.dim() == 0 or parameter.shape[0] != local:
        return False
    path, _, leaf = name.rpartition(".")
    module = experts.get_submodule(path)
    known: dict[str, bool] = getattr(module, _SAID, {})
    if leaf in known:
        return known[leaf]
    if isinstance(parameter, DTensor):  # `fully_shard_experts` has checked these before
        return True
    found = None
    if path.startswith("parametrizations.") and local > 1:
        _, weight, *inner = name.split(".")
        found = _changes_own_alone(experts.get_submodule(f"parametrizations.{weight}"), ".".join(inner))
    if found is not None:
        setattr(module, _SAID, {**known, leaf: found})
    return found


def _changes_own_alone(parametrization: nn.Module, name: str) -> bool | None:
    """Returns whether the weight of expert 0 depends on part 0 of a parameter and on no other part; None if
    the weight cannot be computed, or depends on no part."""
    values: dict[str, Any] = dict(parametrization.named_parameters())
    device = values[name].device
    if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            # torch.manual_seed would seed the generators of all GPUs.
            generator = torch.Generator(device).manual_seed(0)
            for each, value in values.items():
                if value.is_floating_point():
                    random = torch.empty_like(value).normal_(generator=generator)
                    values[each] = random.requires_grad_(each == name)
            first = functional_call(parametrization, values, ())[0]
            (found,) = torch.autograd.grad(
                first, values[name], torch.empty_like(first).normal_(generator=generator), allow_unused=True
            )
    except Exception:  # a user's module may reject these inputs with any error
        return None
    used = [] if found is None else found.reshape(len(found), -1).any(1).tolist()
    return not any(used[1:]) if any(used) else None
