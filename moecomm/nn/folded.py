"""A layer on the ranks of a ParallelFolding: its communicator, and which parts of which experts a rank holds.

Experts are spread over the ranks of the group "etp-ep", and each is split over its ETP ranks. To the
communicator the parts are experts: it has E ETP of them and K ETP choices a token, and its rank number i
holds those from i L on, L = E / EP. A token's row goes once to each rank that holds a part of one of its
experts, and the combine sums what the parts give, as it does for several experts.

Example: 4 experts, EP 2, ETP 2, default order, so rank = etp + 2 ep. Rank 1 (etp 1, ep 0) holds the second
parts of experts 0 and 1, as the communicator's experts 2 and 3. Expert 1 is sent to 1 and 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.kernels.quantize import QUANTUM
from moecomm.nn.balance_sums import SequenceSums, StepCounts
from moecomm.nn.config import MoEConfig
from moecomm.nn.expert_parts import ExpertPart
from moecomm.parallel import ParallelFolding
from moecomm.types import Group

LAYER = "etp-ep"
"""The ranks that hold a layer's experts once, in all their parts."""
STAGE = "tp-cp-dp"
"""The ranks of a pipeline stage."""
SEQUENCE = "tp-cp"
"""The ranks that hold parts of the same sequences."""


def make_communicator(
    config: MoEConfig, folding: ParallelFolding, *, max_tokens: int, **options: Any
) -> Communicator:
    """See MoELayer.make_communicator."""
    require_fit(config, folding)
    make_groups(folding)
    return Communicator(
        folding.group(LAYER), **_sizes(config, folding), max_tokens=max_tokens, dtype=config.dtype, **options
    )


def make_groups(folding: ParallelFolding) -> None:
    """Makes the process groups of a layer, on all ranks of the job together, so that none is made on the
    ranks of one pipeline stage alone later."""
    folding.group(LAYER)
    if folding.tp > 1:
        folding.group("dp-cp")  # sync_gradients
    if folding.pp > 1:
        folding.group(STAGE)


def require_fit(config: MoEConfig, folding: Any) -> None:
    """Raises InvalidArgument for a config whose experts a folding cannot hold, and for what is no folding."""
    if not isinstance(folding, ParallelFolding):
        raise InvalidArgument(f"folding is {folding!r}, must be a moecomm.parallel.ParallelFolding or None")
    if config.num_experts % folding.ep:
        raise InvalidArgument(
            f"num_experts is {config.num_experts}, must be a multiple of the folding's ep={folding.ep}"
        )
    unit = QUANTUM if config.expert_precision == "fp8" else 1
    if config.ffn_hidden % (unit * folding.etp):
        raise InvalidArgument(
            f"ffn_hidden is {config.ffn_hidden}, must be a multiple of {unit * folding.etp}, for each of the "
            f"folding's etp={folding.etp} parts of an expert to have whole columns"
            + (f", {unit} at a time with expert_precision='fp8'" if unit > 1 else "")
        )


def require_communicator(config: MoEConfig, folding: ParallelFolding, comm: Communicator) -> None:
    """Raises InvalidArgument for a communicator that is not of these ranks, or not of this layer's sizes."""
    ranks = (0,) if comm.group is None else tuple(dist.get_process_group_ranks(comm.group))
    own = folding.group_of(LAYER, dist.get_rank() if dist.is_initialized() else 0)
    way = "build it with MoELayer.make_communicator(config, folding, max_tokens=...)"
    if ranks != own:
        raise InvalidArgument(
            f"comm has ranks {ranks}, must have {own}, those of folding.group({LAYER!r}): {way}"
        )
    for name, wanted in _sizes(config, folding).items():
        if getattr(comm, name) != wanted:
            raise InvalidArgument(
                f"comm.{name} is {getattr(comm, name)}, must be {wanted}, for experts in etp={folding.etp} "
                f"parts: {way}"
            )


def _sizes(config: MoEConfig, folding: ParallelFolding) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts * folding.etp,
        "hidden": config.hidden,
        "top_k": config.top_k * folding.etp,
    }


def held_by(config: MoEConfig, folding: ParallelFolding) -> tuple[int, ExpertPart]:
    """Returns this rank's first expert and its part of each."""
    place = folding.coordinates(dist.get_rank())
    return place.ep * (config.num_experts // folding.ep), ExpertPart(place.etp, folding.etp)


def ids_of_parts(config: MoEConfig, folding: ParallelFolding, comm: Communicator) -> Tensor | None:
    """Returns (E + 1, ETP) int32: the communicator's ids of an expert's parts, and -1 in the last row, which
    id -1 selects; None where experts are whole."""
    if folding.etp == 1:
        return None
    count = config.num_experts // folding.ep
    ids = torch.full((config.num_experts + 1, folding.etp), -1, dtype=torch.int32, device="cpu")
    for number, rank in enumerate(folding.group_of(LAYER, dist.get_rank())):
        place = folding.coordinates(rank)
        held = torch.arange(number * count, (number + 1) * count, dtype=torch.int32, device="cpu")
        ids[place.ep * count : (place.ep + 1) * count, place.etp] = held
    return ids.to(comm.device)


def require_experts_in_node_order(config: MoEConfig, ids: Tensor | None, comm: Communicator) -> None:
    """Raises InvalidArgument unless each node holds an equal run of experts in all their parts, as
    limit_nodes takes it."""
    if ids is None:
        return
    per_node = comm.num_experts // comm.nodes
    nodes = ids[:-1].cpu() // per_node
    wanted = torch.arange(config.num_experts, device="cpu") // (config.num_experts // comm.nodes)
    if not bool((nodes == wanted.unsqueeze(1)).all()):
        raise InvalidArgument(
            f"limit_nodes is {config.limit_nodes}, must be None where the parts of an expert lie on several "
            "of the nodes: choose an order of the folding in which etp is inside a node, or pass `nodes`"
        )


def balance_ranks(
    config: MoEConfig, folding: ParallelFolding | None, group: Group | None
) -> StepCounts | None:
    """Returns the ranks with which this one computes the balancing loss; None: alone. `group`: those of
    aux_loss="global" without a folding."""
    if config.aux_loss == "sequence" and folding is not None and folding.size(SEQUENCE) > 1:
        return SequenceSums(folding.group(SEQUENCE))
    if config.aux_loss != "global" or not dist.is_initialized():
        return None
    if folding is not None and folding.pp > 1:
        group = folding.group(STAGE)
    group = dist.group.WORLD if group is None else group
    return StepCounts(group) if group is not None and dist.get_world_size(group) > 1 else None
