"""One step of a MoELayer on every rank, and the same step by the dense reference on all ranks' tokens; and a
layer on the rank's device, which has to give the same in whatever way it runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moecomm import Communicator, Work
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    OverlapConfig,
    fully_shard_experts,
    is_expert_parameter,
    prepare_ddp,
    sync_gradients,
)
from tests.moe_reference import reference_moe
from tests.ranks import communicator, device, on_cpu, synchronize

SIZES: dict[str, Any] = {"hidden": 16, "ffn_hidden": 8, "num_experts": 12, "top_k": 3, "init_std": 0.4}
TOKENS = {1: [9], 2: [6, 0], 3: [6, 0, 9], 4: [3, 9, 0, 6]}
"""Per number of ranks: unequal, one rank without tokens, multiples of SEQ_LEN."""
SEQ_LEN = 3
NAMES = {
    "router.weight": "router",
    "router.bias": "router_bias",
    "router.expert_bias_E": "bias",
    "experts.w_in": "w_in",
    "experts.w_out": "w_out",
    "experts.b_in": "b_in",
    "experts.b_out": "b_out",
    "shared.w_in": "shared_in",
    "shared.w_out": "shared_out",
    "shared.w_gate": "shared_gate",
}


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    reentrant: bool | None = None
    """None: without torch.utils.checkpoint, else its use_reentrant."""
    sequences: bool = False
    """Give the tokens as (B, S, H)."""
    loss_scale: float = 1.0
    poison_tail: bool = False
    """Put NaN in the received rows that the communicator leaves unspecified."""

    def with_dtype(self, dtype: torch.dtype) -> Case:
        return replace(self, dtype=dtype)


class LinearThenMoE(nn.Module):
    """A model with a part that is the same on all ranks, `first`, and one that is not, `moe`; a norm between
    them if it is given."""

    def __init__(
        self, moe: MoELayer, norm: nn.Module | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.first = nn.Linear(SIZES["hidden"], SIZES["hidden"], dtype=dtype)
        self.norm = norm
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.moe(h if self.norm is None else self.norm(h))
        return y


class OwnExperts(nn.Module):
    """A matrix for each expert from `first` on, in a submodule, behind a norm if there is one."""

    def __init__(self, first: int, count: int, norm: nn.Module | None = None) -> None:
        super().__init__()
        experts, hidden = SIZES["num_experts"], SIZES["hidden"]
        generator = torch.Generator().manual_seed(7)
        weight_EHH = torch.randn(experts, hidden, hidden, generator=generator, dtype=torch.float64) * 0.3
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(weight_EHH[first : first + count].clone())
        self.norm = norm

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        rows_PH = rows_PH if self.norm is None else self.norm(rows_PH)
        parts, begin = [], 0
        for local, end in enumerate(offsets_L.tolist()):
            parts.append(torch.tanh(rows_PH[begin:end] @ self.inner.weight[local]))
            begin = end
        return torch.cat([*parts, rows_PH[begin:]])


def tokens_of(rank: int, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """x (T, H) and the factors of its output in the loss."""
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    pair = torch.randn(2, count, SIZES["hidden"], generator=generator, dtype=torch.float64).to(dtype)
    return pair[0], pair[1]


def layer_step(rank: int, world_size: int, case: Case, seed: int) -> dict[str, Any]:
    """Forward, backward and synchronised gradients of this rank, all as float64."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "dtype": case.dtype, **case.options})
    counts = TOKENS[world_size]
    layer = MoELayer(config, max_tokens=max(counts) + 2)
    layer.loss_scale = case.loss_scale
    fill_biases(layer)
    if layer.router.expert_bias_E is not None:
        layer.router.expert_bias_E.copy_(torch.randn(config.num_experts) * 0.1)
    if case.poison_tail:
        poison_tail(layer.comm)
    x, factor = tokens_of(rank, counts[rank], case.dtype, seed)
    x.requires_grad_()
    shaped = x.view(-1, SEQ_LEN, config.hidden) if case.sequences else x
    if case.reentrant is None:
        y = layer(shaped, SEQ_LEN)
    else:
        y = checkpoint(layer, shaped, SEQ_LEN, use_reentrant=case.reentrant)
    assert y.shape == shaped.shape
    assert y.dtype == x.dtype
    (y.view_as(x) * factor).sum().backward()
    sync_gradients(layer)
    layer.comm.close()
    record = "experts._extra_state"  # of which experts are here
    state = {name: tensor.double() for name, tensor in layer.state_dict().items() if name != record}
    assert x.grad is not None
    return {
        "y": y.detach().view_as(x).double(),
        "x.grad": x.grad.double(),
        "losses": {name: loss.item() for name, loss in layer.last_losses.items()},
        "load": layer.last_tokens_per_expert.tolist(),
        "counted": None if layer.router.load_E is None else layer.router.load_E.tolist(),
        "state": state,
        "grads": {n: p.grad.double() for n, p in layer.named_parameters() if p.grad is not None},
        "experts": [n for n, p in layer.named_parameters() if is_expert_parameter(p)],
    }


def fill_biases(layer: MoELayer) -> None:
    """Gives the experts' biases, and the router's, which start as zeros, random numbers of torch's default
    generator."""
    first, count = layer.experts.first_expert, layer.experts.num_local_experts
    for bias in (layer.experts.b_in, layer.experts.b_out):
        if bias is not None:
            of_all = torch.randn(layer.config.num_experts, bias.shape[1], dtype=torch.float64)
            bias.data.copy_(of_all[first : first + count])
    if layer.router.bias is not None:
        layer.router.bias.data.copy_(torch.randn(layer.config.num_experts))


def poison_tail(comm: Communicator) -> None:
    dispatch, redispatch = comm.dispatch, comm.redispatch

    def poison(out: Any) -> Any:
        end = int(out.offsets[-1])
        assert out.tokens.shape[0] > end, "the case leaves no tail"
        out.tokens.data[end:] = out.weights.data[end:] = float("nan")
        ends[out.handle.plan] = end
        return out

    def poisoned(*args: Any, **options: Any) -> Any:
        result = dispatch(*args, **options)
        if not isinstance(result, Work):
            return poison(result)
        return Work(lambda: poison(result.wait()), result.is_completed)

    def poisoned_rows(x: Any, handle: Any, **options: Any) -> Any:
        rows = redispatch(x, handle, **options)
        rows.data[ends[handle.plan] :] = float("nan")
        return rows

    ends: dict[Any, int] = {}
    comm.dispatch, comm.redispatch = poisoned, poisoned_rows  # type: ignore[method-assign, assignment]


def unsharded(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; all ranks call together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrapped(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """The model under "ddp" or "fsdp" with these options, or as it is."""
    if how == "ddp":
        return DistributedDataParallel(prepare_ddp(model), **options)
    if how == "fsdp":
        fully_shard_experts(model, **options)
        fully_shard(model, **options)
    return model


def whole(results: list[dict[str, Any]], kind: str) -> dict[str, Tensor]:
    """Tensors of the full model from all ranks' parts: experts joined, the rest from rank 0."""
    first = results[0]
    joined = {n: torch.cat([r[kind][n] for r in results]) for n in first["experts"]}
    return {**first[kind], **joined}


def reference_step(results: list[dict[str, Any]], case: Case, seed: int) -> dict[str, Any]:
    """Computes what the ranks should have found, from their weights and the same tokens, in float64."""
    world_size = len(results)
    weights = {
        NAMES[n]: t.clone().requires_grad_(n != "router.expert_bias_E")
        for n, t in whole(results, "state").items()
    }
    ys, x_grads, losses, loads = [], [], [], []
    for rank, count in enumerate(TOKENS[world_size]):
        x, factor = (t.double() for t in tokens_of(rank, count, case.dtype, seed))
        x.requires_grad_()
        want = reference_moe(x, weights, {**SIZES, **case.options}, SEQ_LEN)
        objective = (want.y * factor).sum() + case.loss_scale * sum(want.losses.values())
        if count:
            objective.backward()
        ys.append(want.y.detach())
        x_grads.append(x.grad if x.grad is not None else torch.zeros_like(x))
        losses.append({name: loss.item() for name, loss in want.losses.items()})
        loads.append(want.load)
    grads = {n: weights[NAMES[n]].grad for n in results[0]["grads"]}
    mean = {
        n: g / world_size if g is not None else torch.zeros_like(weights[NAMES[n]]) for n, g in grads.items()
    }
    return {"y": ys, "x.grad": x_grads, "losses": losses, "load": loads, "grads": mean}


@functools.cache
def group_of(*members: int) -> Any:
    """The group of these ranks, made once a process; all ranks must call. The thread of a gloo group wakes up
    a hundred times a second as long as the process lives: hundreds of them would cost more than the tests."""
    return dist.new_group(members)


def groups_of(rank: int, world_size: int, ep: int) -> tuple[Any, Any]:
    """(ranks that share out the experts, ranks that hold the same ones) of this rank; all ranks must call."""
    mine: list[Any] = [None, None]
    blocks = [range(first, first + ep) for first in range(0, world_size, ep)]
    columns = [range(first, world_size, ep) for first in range(ep)]
    for kind, members in enumerate((blocks, columns)):
        for ranks in members:
            group = group_of(*ranks)
            if rank in ranks:
                mine[kind] = group
    return mine[0], mine[1]


# -- in whatever way it runs ---------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "in order": {"overlap": False},
    "overlapped": {},
    "rows kept": {"keep": "rows"},
    "nothing kept": {"keep": "nothing"},
    "nothing kept, of the shared experts neither": {"keep": "nothing", "keep_shared": False},
    "weights later": {"defer_weights": True},
    "nothing kept, weights later": {"keep": "nothing", "defer_weights": True},
}


@dataclass(frozen=True)
class LayerCase:
    """A layer on the rank's device and inputs for it; on the CPU it is small."""

    tokens: tuple[int, ...]
    seed: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    num_sms: int | None = None
    """The SMs of the communicator's operations. With few of them products leave these alone."""
    reentrant: bool | None = None
    poison_tail: bool = False

    @property
    def config(self) -> MoEConfig:
        sizes = SIZES if on_cpu() else {**SIZES, "hidden": 256, "ffn_hidden": 192, "init_std": 0.05}
        return MoEConfig(**{**sizes, "dtype": self.dtype, "num_shared_experts": 1, **self.options})

    def layer(self, where: str | None = None) -> Any:
        torch.manual_seed(self.seed)
        config = self.config
        comm = communicator(
            num_experts=config.num_experts,
            hidden=config.hidden,
            top_k=config.top_k,
            max_tokens=max(*self.tokens, 1) + 2,
            dtype=config.dtype,
            num_sms=self.num_sms,
            device=where or device(),
        )
        if self.poison_tail:
            poison_tail(comm)
        layer = MoELayer(config, comm)
        fill_biases(layer)
        return layer

    def input(self, rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """x and the gradient of y, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step * 10 + rank)
        pair = torch.randn(2, self.tokens[rank], self.config.hidden, generator=generator)
        return pair[0].to(self.dtype), pair[1].to(self.dtype)

    def input_here(self, rank: int, step: int = 0) -> tuple[Tensor, ...]:
        return tuple(each.to(device()) for each in self.input(rank, step))


def run_layer(
    layer: Any, x: Tensor, grad: Tensor, way: dict[str, Any], reentrant: bool | None = None
) -> dict[str, Tensor]:
    """Runs one forward and backward; returns the output, all gradients, losses and the experts' load."""
    layer.overlap = OverlapConfig(**{"record": layer.overlap.record, **way})
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
    y.backward(grad)
    if layer.overlap.defer_weights:
        assert layer.experts.w_in.grad is None and layer.experts.w_out.grad is None
    layer.backward_weights()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    seen = {"load": layer.last_tokens_per_expert, **layer.last_losses}
    return {"y": y.detach(), "x": x.grad, **grads, **{name: each.detach() for name, each in seen.items()}}


def differences(left: dict[str, Tensor], right: dict[str, Tensor], what: str) -> list[str]:
    """Lists values that differ: gradients of the router and of x by some roundings, all else by a bit.

    Autograd chooses the order in which gradients from several places are summed."""
    problems = []
    for name, value in left.items():
        other = right[name]
        if name != "x" and not name.startswith("router."):
            good = torch.equal(value, other)
        else:
            scale = float(value.float().abs().max()) if value.numel() else 0.0
            roundings, scale = (32, max(scale, 1.0)) if on_cpu() else (8, scale)
            bound = roundings * torch.finfo(left["x"].dtype).eps * scale
            good = bool(((value - other).double().abs() <= bound).all())
        if not good:
            problems.append(f"{what}: {name}")
    return problems


def change_weights(layer: Any, factor: float) -> None:
    """Changes the experts' weights in place, so that what is cached of them has to be made again."""
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.mul_(factor)


def check_ways(rank: int, world_size: int, case: LayerCase) -> list[str]:
    """Every way gives the same bits in the output, the losses and the gradients of the experts."""
    layer, problems = case.layer(), []
    for step in range(2 if on_cpu() else 3):
        x, grad = case.input_here(rank, step)
        found = {name: run_layer(layer, x, grad, way, case.reentrant) for name, way in WAYS.items()}
        found["again"] = run_layer(layer, x, grad, {}, case.reentrant)
        for name, each in found.items():
            problems += differences(found["overlapped"], each, f"rank {rank}, step {step}, {name}")
        change_weights(layer, 1.5)
    synchronize()
    layer.comm.close()
    return problems
