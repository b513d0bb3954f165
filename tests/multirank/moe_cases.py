"""One step of a MoELayer on every rank, and the same step by the dense reference on all ranks' tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecomm import Communicator, Work
from moecomm.nn import MoEConfig, MoELayer, is_expert_parameter, sync_gradients
from tests.moe_reference import reference_moe

SIZES: dict[str, Any] = {"hidden": 16, "ffn_hidden": 8, "num_experts": 12, "top_k": 3, "init_std": 0.4}
TOKENS = {1: [9], 2: [6, 0], 3: [6, 0, 9], 4: [3, 9, 0, 6]}
"""Per number of ranks: unequal, one rank without tokens, multiples of SEQ_LEN."""
SEQ_LEN = 3
NAMES = {
    "router.weight": "router",
    "router.expert_bias_E": "bias",
    "experts.w_in": "w_in",
    "experts.w_out": "w_out",
    "shared.w_in": "shared_in",
    "shared.w_out": "shared_out",
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

    layer: dict[str, Any] = field(default_factory=dict)
    """How it runs: arguments of MoELayer."""
    defer: bool = False
    """The experts' weights get their gradients after the backward."""

    def with_dtype(self, dtype: torch.dtype) -> Case:
        return replace(self, dtype=dtype)


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
    layer = MoELayer(config, max_tokens=max(counts) + 2, **case.layer)
    layer.defer_weights = case.defer
    layer.loss_scale = case.loss_scale
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
    if case.defer:
        assert all(parameter.grad is None for parameter in layer.experts.parameters())
    layer.backward_weights()
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

    def poisoned_rows(x: Any, handle: Any) -> Any:
        rows = redispatch(x, handle)
        rows.data[ends[handle.plan] :] = float("nan")
        return rows

    ends: dict[Any, int] = {}
    comm.dispatch, comm.redispatch = poisoned, poisoned_rows  # type: ignore[method-assign, assignment]


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


def groups_of(rank: int, world_size: int, ep: int) -> tuple[Any, Any]:
    """(ranks that share out the experts, ranks that hold the same ones) of this rank; all ranks must call."""
    mine: list[Any] = [None, None]
    blocks = [list(range(first, first + ep)) for first in range(0, world_size, ep)]
    columns = [list(range(first, world_size, ep)) for first in range(ep)]
    for kind, members in enumerate((blocks, columns)):
        for ranks in members:
            group = dist.new_group(ranks)
            if rank in ranks:
                mine[kind] = group
    return mine[0], mine[1]
