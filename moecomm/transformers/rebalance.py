"""Exchanges the experts of a transformers model between ranks, so that all ranks get about as many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moecomm.arguments import require_module
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.train.agreement import agree
from moecomm.train.rebalance import ABOUT, Movable, Rebalanced, States, check_moves, exchange, tensors_of
from moecomm.transformers.implementation import MoecommEP

_ROUTERS = ("gate", "router")
"""The names that transformers' blocks give their routers, beside their `experts`."""
_TRIED = 64
"""Tokens by which a router is asked whether its rows are its experts'."""


@torch.no_grad()
def rebalance_experts(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    tolerance: float = 0.02,
) -> dict[str, Rebalanced]:
    """Does for a model that runs by `ep_implementation="moecomm"` what `moecomm.train.rebalance_experts` does
    for MoELayers, by the choices of the last forward. All ranks call it, between two optimizer steps.

    Returns what was done by the names of blocks whose experts have moved. `save_pretrained` writes the model
    with the new numbers of its experts; as a whole it is the model that it was.

    Before anything has moved it raises, on all ranks, Unsupported for experts of which other ranks have
    copies, adapters on experts or routers, and routers whose rows are not their experts' alone, such as those
    that choose groups of experts first; InvalidArgument before the first forward. Other arguments, errors:
    `moecomm.train.rebalance_experts`.
    """
    require_module(model)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()  # an evaluation leaves the outermost unit unsharded
    runs = ((name, getattr(each, "moecomm", None)) for name, each in model.named_modules())
    found = [(name, each) for name, each in runs if isinstance(each, MoecommEP)]
    if not found:
        raise InvalidArgument('model has no experts that run by ep_implementation="moecomm"')
    held: list[Movable] = []
    routers: list[nn.Module] = []

    def hold(states: States) -> Iterator[Movable]:
        for name, ep in found:
            routers.append(_router_beside(model, name))
            yield _movable(name, ep, routers[-1], states)

    device = next(model.parameters()).device
    agree(None, device, ABOUT, partial(check_moves, held, hold, optimizers, model.parameters(), tolerance))
    whole = [dict(_whole(router)) for router in routers]  # all ranks gather, whatever they find

    def check_routers() -> list[str]:
        for each, router, tensors in zip(held, routers, whole, strict=True):
            _require_own_rows(each.name, router, tensors, len(each.load_E))
        return []

    agree(None, device, ABOUT, check_routers)
    return exchange(held, None, tolerance)


def _router_beside(model: nn.Module, name: str) -> nn.Module:
    """Returns the router in the block of the experts of this name."""
    block, _, own = name.rpartition(".")
    beside = dict(model.get_submodule(block).named_children())
    for each in _ROUTERS:
        if own == "experts" and each in beside:
            return beside[each]
    raise Unsupported(f"{name} has no router beside it, or has adapters: its experts stay where they are")


def _movable(name: str, ep: MoecommEP, router: nn.Module, states: States) -> Movable:
    block = name.rpartition(".")[0]
    if ep.ep_mesh.size() < dist.get_world_size():
        raise Unsupported(f"{block} has experts of which other ranks have copies: these stay where they are")
    if (ids_TK := ep.local.last_ids_TK) is None:
        raise InvalidArgument(f"{block} has not run: call rebalance_experts after a forward")
    load_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=ep.num_experts).double()
    group, experts = ep.ep_mesh.get_group(), ep.experts
    return Movable(block, group, load_E, tensors_of(experts), tensors_of(router), states)


def _whole(router: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, each in tensors_of(router):
        yield name, each.full_tensor() if isinstance(each, DTensor) else each


def _require_own_rows(block: str, router: nn.Module, tensors: dict[str, Tensor], experts: int) -> None:
    """Raises Unsupported unless the router chooses the same experts for some tokens, by their new numbers, if
    all experts change their places."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(experts, generator=generator).tolist()
    moved = {name: each[order] for name, each in tensors.items()}
    weight = max(tensors.values(), key=lambda each: each.dim())
    x_TH = torch.randn(_TRIED, weight.shape[-1], generator=generator).to(weight)
    try:
        before_TE = _weights_of(router, tensors, x_TH, experts)
        after_TE = _weights_of(router, moved, x_TH, experts)
    except Exception as error:
        raise Unsupported(f"the router of {block} cannot be tried by itself: {error!r}") from error
    if not torch.allclose(after_TE, before_TE[:, order], rtol=1e-2, atol=1e-3):
        raise Unsupported(
            f"the router of {block} chooses by more than a row for each expert, such as groups of experts: "
            "these stay where they are"
        )


def _weights_of(router: nn.Module, tensors: dict[str, Tensor], x_TH: Tensor, experts: int) -> Tensor:
    """Returns the weights (T, E) that a router with these tensors gives to each expert, 0 where it chooses
    others."""
    results = torch.func.functional_call(router, tensors, (x_TH,))
    ids_TK = next(each for each in results if isinstance(each, Tensor) and not each.is_floating_point())
    weights_TK = next(each for each in results if each.shape == ids_TK.shape and each.is_floating_point())
    none_TE = torch.zeros(len(x_TH), experts, device=x_TH.device)
    return none_TE.scatter_(1, ids_TK.long(), weights_TK.float())
