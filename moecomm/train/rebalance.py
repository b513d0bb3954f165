"""Exchanges experts between ranks, so that all ranks get about as many rows.

Experts have no order: if two of them change places, with their rows of the router, the model is the same. So
an expert with many tokens may go to a rank whose experts have few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moecomm.arguments import require_number
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.nn.layer import MoELayer
from moecomm.parallel.shards import awaits_average
from moecomm.train.agreement import agree
from moecomm.train.model_parts import ModelParts, local
from moecomm.train.optimizer_state import require_own_parameters
from moecomm.train.replicas import backends_of, find_replicas, model_group
from moecomm.types import AnyGroup, Group

ABOUT = "ranks would exchange experts otherwise"
"""The beginning of the error of ranks that differ (`agree`)."""


class Rebalanced(NamedTuple):
    """The result of `rebalance_experts` for a layer."""

    order: list[int]
    """order[e]: the former number of the expert that is number e now."""
    before: float
    """Rows of the busiest rank over the mean of all ranks, by the loads that were given."""
    after: float
    """The same with the experts' new places."""


@torch.no_grad()
def rebalance_experts(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    loads: Sequence[Tensor] | None = None,
    group: AnyGroup | None = None,
    *,
    tolerance: float = 0.02,
) -> dict[str, Rebalanced]:
    """Exchanges experts between the ranks of each MoELayer until none has more than (1 + tolerance) times the
    mean number of rows, or no exchange of two experts brings it nearer. Every rank of the group calls it,
    between two optimizer steps.

    With an expert go its parameters, gradients and states of the optimizers; the router's rows, balancing
    biases and counts are permuted alike on all ranks. Tensors change in place. The model computes what it
    computed before (but of experts with equal scores for a token a router may choose another one), and a
    state dict is that of the model with the new numbers of its experts.

    Args:
        model: has the MoELayers. Others than those whose experts are spread over ranks stay as they are.
        optimizers: all that have the parameters of experts and routers.
        loads: for each MoELayer, in the order of `model.modules()`, (E,) tokens of this rank that chose each
            expert, over many microbatches if possible, or means of them; None: those of the last forward.
        group: all ranks that bring tokens to a step; None: all ranks, or those of the pipeline stage.
        tolerance: at least 0, the same on all ranks.

    Returns what was done by the name of each layer in which experts have moved; the same on all ranks.

    Before anything has moved it raises, on all ranks: Unsupported for layers that share weights, with experts
    that are sharded by FSDP2 or split over ETP ranks, and with routers that choose groups of experts first
    (num_groups), choose by number (force_balanced) or have other parameters than weight and bias, for buffers
    of parametrizations, and for states that have no part for each expert (Adafactor's); InvalidArgument for
    loads that are no (E,) numbers of at least 0, gradients that are put off or that FSDP2 has not averaged
    yet, and optimizers with parameters outside of the model; MismatchedArguments if ranks hold other
    gradients or states, or have frozen other experts.
    """
    parts = ModelParts(model)
    spread = parts.spread_layers
    held: list[Movable] = []

    def hold(states: States) -> Iterator[Movable]:
        given = _loads_of(parts.layers, loads)
        own = [
            each for layer in spread for part in (layer.experts, layer.router) for each in part.parameters()
        ]
        if len(set(own)) < len(own):
            raise Unsupported("MoELayers share experts or routers, which would have to move for both of them")
        for layer in spread:
            name, of_experts = parts.modules[layer], parts.shares_of(layer).spread
            _refuse(name, layer, of_experts.values())
            experts = [*of_experts.items(), *layer.experts.named_buffers()]
            yield Movable(name, layer.comm.group, given[layer], experts, tensors_of(layer.router), states)

    check = partial(check_moves, held, hold, optimizers, parts.named.values(), tolerance)
    if not spread:
        check()
        return {}
    over = model_group(parts.layers, group)
    agree(over, parts.device, ABOUT, check)
    find_replicas(parts.layers, over)  # refuses a group that lacks ranks of a layer
    done = exchange(held, over, tolerance)
    for layer in spread:
        if moved := done.get(parts.modules[layer]):
            layer.last_tokens_per_expert = layer.last_tokens_per_expert[moved.order]
    return done


def check_moves(
    held: list[Movable],
    hold: Callable[[States], Iterable[Movable]],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    parameters: Iterable[Tensor],
    tolerance: float,
) -> list[str]:
    """Fills `held` with what `hold` returns for the optimizers' states of the model's `parameters`. Returns
    words that all ranks must have alike. Raises what `rebalance_experts` says."""
    bound = require_number("tolerance", tolerance, lambda number: number >= 0, "at least 0")
    held.extend(hold(_states_of(optimizers, parameters)))
    if awaits_average(each for movable in held for each in (*movable.of_experts, *movable.of_router)):
        raise InvalidArgument(
            "FSDP2 has gradients of routers that it has not averaged yet (set_requires_gradient_sync("
            "False)), whose rows would stay where they are: call this after the step's last backward"
        )
    return [f"tolerance {bound}", *(words for movable in held for words in movable.words)]


def exchange(held: Sequence[Movable], over: Group | None, tolerance: float) -> dict[str, Rebalanced]:
    """Does what `rebalance_experts` does with what this rank holds of each layer's experts. The loads are
    summed over the ranks of `over`, which call this together."""
    total = torch.cat([each.load_E for each in held])
    dist.all_reduce(total, group=over)
    done = {}
    for each, load_E in zip(held, total.cpu().split([len(each.load_E) for each in held]), strict=True):
        ranks = dist.get_world_size(each.group)
        order = exchanged(load_E, ranks, float(tolerance))
        before, after = (float(way.view(ranks, -1).sum(1).max()) for way in (load_E, load_E[order]))
        if after < before:
            each.move(order)
            mean = float(load_E.sum()) / ranks
            done[each.name] = Rebalanced(order, before / mean, after / mean)
    return done


def exchanged(load_E: Tensor, ranks: int, tolerance: float) -> list[int]:
    """Returns the numbers of the experts in their new order, of which each rank has an equal part. The
    busiest rank and the least busy one exchange the two experts that bring them nearest to each other, again
    and again.

    Example: loads [5, 4, 1, 2] of experts on two ranks give [3, 1, 2, 0]: 9 and 3 rows become 6 and 6."""
    order, load_E = list(range(len(load_E))), load_E.double()
    least = tolerance * float(load_E.sum()) / ranks
    while True:
        load_RL = load_E[order].view(ranks, -1)
        rows = load_RL.sum(1)
        busy, idle = int(rows.argmax()), int(rows.argmin())
        apart = float(rows[busy] - rows[idle])
        moves = load_RL[busy].unsqueeze(1) - load_RL[idle]
        first, second = divmod(int((moves - apart / 2).abs().argmin()), load_RL.shape[1])
        moved = float(moves[first, second])
        # Each exchange brings the two nearer by a least amount: so it ends, and no weights travel for little.
        if rows[busy] <= rows.mean() + least or not min(moved, apart - moved) > least / 4:
            return order
        one, other = busy * load_RL.shape[1] + first, idle * load_RL.shape[1] + second
        order[one], order[other] = order[other], order[one]


class Movable:
    """What a rank holds of a layer's experts and of its router, and what moves with it. Raises Unsupported as
    `rebalance_experts` says."""

    def __init__(
        self,
        name: str,
        group: Group | None,
        load_E: Tensor,
        experts: Sequence[tuple[str, Tensor]],
        router: Sequence[tuple[str, Tensor]],
        states: States,
    ) -> None:
        """group: the ranks that share out the experts, in their order. load_E: this rank's tokens, float64.
        experts, router: names and tensors, whose first dimensions are this rank's experts, and all."""
        self.name, self.group, self.load_E = name, group, load_E
        if load_E.is_cuda and backends_of(group).get("cuda", "gloo") == "gloo":
            raise Unsupported(f"the process group of {name} has no NCCL, by which experts on GPUs travel")
        self._local = len(load_E) // dist.get_world_size(group)
        self.of_experts = [
            local(part)
            for own, each in experts
            for part in _parts(f"{name}.experts.{own}", each, states, self._local)
        ]
        self.of_router = [
            part for own, each in router for part in _parts(f"{name}.router.{own}", each, states, len(load_E))
        ]
        # Plain tensors of a router are permuted by each rank alone.
        together = (*self.of_experts, *(each for each in self.of_router if isinstance(each, DTensor)))
        self.words = [f"{name}: {each.dtype} {tuple(each.shape)}" for each in together]
        self.words += [f"{name}: trained {own}" for own, each in experts if each.requires_grad]

    def move(self, order: list[int]) -> None:
        """Gives the experts the numbers of `order`, on all ranks of the group together."""
        own, rank = self._local, dist.get_rank(self.group)
        transfers: list[dist.P2POp] = []
        arrived: list[tuple[Tensor, Tensor]] = []
        for place, expert in enumerate(order):
            to, of = place // own, expert // own
            if place == expert or rank not in (to, of):
                continue
            for tensor in self.of_experts:
                part = tensor[expert % own if of == rank else place % own].contiguous()
                if to == rank:
                    part = part.clone()
                    arrived.append((tensor[place % own], part))
                if to != of:  # as bytes: NCCL lacks some dtypes
                    way, peer = (dist.isend, to) if of == rank else (dist.irecv, of)
                    bytes_ = part.view(-1).view(torch.uint8)
                    transfers.append(dist.P2POp(way, bytes_, group=self.group, group_peer=peer))
        # All ranks of a group of NCCL have to be in the first exchange there.
        dist.all_reduce(torch.zeros(1, device=self.load_E.device), group=self.group)
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        for target, part in arrived:
            target.copy_(part)
        for tensor in self.of_router:
            _permute(tensor, order)


States = dict[Tensor, dict[tuple[str, int], Any]]
"""Maps a parameter to its states, by their names and the number of the optimizer that has them."""


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _states_of(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]
) -> States:
    """Returns the states of all parameters. Raises InvalidArgument for what is no optimizer, and for one with
    parameters that are not the model's."""
    every = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    own, states = set(parameters), States()
    for number, each in enumerate(every):
        if not isinstance(each, torch.optim.Optimizer):
            raise InvalidArgument(f"optimizers has a {type(each).__name__}, must have optimizers of torch")
        require_own_parameters(each, own, "copies of experts, in float32 for example, would stay behind")
        within = getattr(each, "optim", each)  # of a ZeroRedundancyOptimizer: it has this rank's states
        for parameter, state in within.state.items():
            if isinstance(parameter, Tensor):
                states.setdefault(parameter, {}).update({(key, number): one for key, one in state.items()})
    return states


def _loads_of(layers: Sequence[MoELayer], loads: Sequence[Tensor] | None) -> dict[MoELayer, Tensor]:
    """Returns each layer's load on its device, in float64."""
    given: list[Tensor] = [layer.last_tokens_per_expert for layer in layers]
    if loads is not None:
        try:
            given = [torch.as_tensor(each).double() for each in loads]
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"loads has no tensors of numbers: {error}") from None
    wanted = [(layer.config.num_experts,) for layer in layers]
    if (found := [tuple(each.shape) for each in given]) != wanted:
        raise InvalidArgument(f"loads have shapes {found}, must have {wanted}, one for each MoELayer")
    if loads is not None and not all(bool(((each >= 0) & each.isfinite()).all()) for each in given):
        raise InvalidArgument("loads have a number that is negative or not finite")
    return {
        layer: each.to(layer.comm.device, torch.float64) for layer, each in zip(layers, given, strict=True)
    }


def _parts(name: str, tensor: Tensor, states: States, experts: int) -> Iterator[Tensor]:
    """Yields a parameter or buffer, its gradients, and its states in optimizers that are not one number for
    all experts. All have `experts` in their first dimension, of a DTensor those of this rank or of all."""
    whole = [("", tensor), (".grad", tensor.grad), (".main_grad", getattr(tensor, "main_grad", None))]
    state = [
        (f"'s {key}", each)
        for (key, _), each in states.get(tensor, {}).items()
        if not isinstance(each, Number | str)
        and not (isinstance(each, Tensor) and each.numel() == 1 and each.shape != tensor.shape)
    ]
    for key, each in whole + state:
        if each is None:
            continue
        # Other subclasses, such as states in 8 bits, may refuse to be indexed, or give copies.
        indexed = isinstance(each, Tensor) and not is_traceable_wrapper_subclass(each)
        shape = tuple(each.shape) if indexed or isinstance(each, DTensor) else None
        if shape is None or experts not in (*shape[:1], *local(each).shape[:1]):
            kind = f"is a {type(each).__name__}" if shape is None else f"has shape {shape}"
            raise Unsupported(
                f"{name}{key} {kind}, must be a tensor with the {experts} experts in its first dimension, so "
                "that one can be moved"
            )
        yield each


def _refuse(name: str, layer: MoELayer, of_experts: Iterable[Tensor]) -> None:
    if layer.has_pending_weights:
        raise InvalidArgument(
            f"{name} has gradients of experts' weights that are still put off: call "
            "moecomm.nn.backward_weights(model) before"
        )
    own = {each for each, _ in layer.router.named_parameters()}
    if not own or own - {"weight", "bias"}:
        raise Unsupported(
            f"{name}.router has the parameters {sorted(own)}, must have weight, and may have bias: others do "
            "not tell how to renumber experts"
        )
    if any(isinstance(each, DTensor) for each in of_experts):
        raise Unsupported(f"{name} has experts that FSDP2 has sharded: these stay where they are")
    if layer.folding is not None and layer.folding.etp > 1:
        raise Unsupported(
            f"{name} has experts split over {layer.folding.etp} ETP ranks: these stay where they are"
        )
    if inner := [own for own, _ in layer.experts.named_buffers() if "parametrizations." in own]:
        raise Unsupported(f"{name}.experts.{inner[0]} is a buffer, and may be of each expert or of all")
    if layer.config.force_balanced:
        raise Unsupported(f"{name} has force_balanced=True: tokens go to numbers, whichever expert has one")
    if layer.config.num_groups is not None:
        raise Unsupported(f"{name} chooses groups of experts (num_groups), in which each expert has to stay")


def _permute(tensor: Tensor, order: list[int]) -> None:
    """Gives row e the values of row order[e]; for a DTensor all its ranks call together."""
    if isinstance(tensor, DTensor):
        whole = tensor.full_tensor()[order]
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
    else:
        tensor.copy_(tensor[order])
