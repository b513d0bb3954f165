"""The communicator of a layer: its ranks, also under a ParallelFolding, and each rank's experts or parts.

The ranks of the group "etp-ep" hold the experts. Each expert is split into ETP parts, on ETP of these ranks.
The communicator takes each part for an expert: it has E * ETP experts and K * ETP choices per token, and its
rank i holds L = E / EP of these experts, from i * L on. A token's row goes once to each rank that holds a
part of one of its experts. The combine sums the results of all parts as if each part were an expert.
`config` is a MoEConfig, here typed Any because its package, moecomm.nn, imports this one.

Example: 4 experts, EP 2, ETP 2, so rank = etp + 2 ep. Rank 1 (etp 1, ep 0) holds the second
parts of experts 0 and 1; the communicator numbers these 2 and 3. A choice of expert 1 is sent as 1 and 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument, announced_as
from moecomm.kernels.parameters import ExpertPart
from moecomm.parallel.folding import ParallelFolding
from moecomm.types import AnyGroup

LAYER = "etp-ep"
"""The ranks that together hold a layer's experts once, with all parts."""
STAGE = "tp-cp-dp"
"""The ranks of a pipeline stage."""
SEQUENCE = "tp-cp"
"""The ranks that hold parts of the same sequences."""


def build_communicator(
    config: Any, group: AnyGroup | None, folding: ParallelFolding | None, *, max_tokens: Any, **options: Any
) -> Communicator:
    """Builds the communicator of a layer on `group`, or on the ranks of a folding."""
    if folding is not None:
        with told(group, folding, None):
            require_fit(config, folding)
        make_groups(folding)
        group = folding.group(LAYER)
    sizes = _sizes(config, 1 if folding is None else folding.etp)
    return Communicator(group, **sizes, max_tokens=max_tokens, dtype=config.dtype, **options)


@contextlib.contextmanager
def told(group: AnyGroup | None, folding: Any, comm: Any) -> Iterator[None]:
    """A context for checks before a layer's communicator is built. All ranks raise an error of one rank; if
    `comm` is given or `folding` has another type, that rank alone does."""
    try:
        yield
    except Exception as error:
        if comm is not None or not (folding is None or isinstance(folding, ParallelFolding)):
            raise
        if folding is not None:
            make_groups(folding)
            group = folding.group(LAYER)
        Communicator(group, num_experts=0, hidden=0, top_k=0, max_tokens=0, _error=announced_as(error))


def make_groups(folding: ParallelFolding) -> None:
    """Makes the process groups that a layer uses, on all ranks of the job: on their first use the ranks of
    one pipeline stage might be alone."""
    folding.group(LAYER)
    if folding.tp > 1:
        folding.group("dp-cp")  # sync_gradients
    if folding.pp > 1:
        folding.group(STAGE)


def require_fit(config: Any, folding: Any) -> None:
    """Raises InvalidArgument if `folding` is no ParallelFolding, or cannot hold the experts of the config."""
    if not isinstance(folding, ParallelFolding):
        raise InvalidArgument(f"folding is {folding!r}, must be a moecomm.parallel.ParallelFolding or None")
    if config.num_experts % folding.ep:
        raise InvalidArgument(
            f"num_experts is {config.num_experts}, must be a multiple of the folding's ep={folding.ep}"
        )
    if config.ffn_hidden % folding.etp:
        raise InvalidArgument(
            f"ffn_hidden is {config.ffn_hidden}, must be a multiple of the folding's etp={folding.etp}, for "
            "each of its parts of an expert to have whole columns"
        )


def require_communicator(config: Any, folding: ParallelFolding | None, comm: Communicator) -> None:
    """Raises InvalidArgument if the communicator's ranks, sizes or dtype are not those of the layer."""
    way = "build it with MoELayer.make_communicator(config, folding, max_tokens=...)"
    if folding is not None:
        ranks = (0,) if comm.group is None else tuple(dist.get_process_group_ranks(comm.group))
        own = folding.group_of(LAYER, dist.get_rank() if dist.is_initialized() else 0)
        if ranks != own:
            raise InvalidArgument(
                f"comm has ranks {ranks}, must have {own}, those of folding.group({LAYER!r}): {way}"
            )
    sizes = _sizes(config, 1 if folding is None else folding.etp)
    for name, wanted in (sizes | {"dtype": config.dtype}).items():
        if (found := getattr(comm, name)) != wanted:
            bound = f"the config's {name}={wanted}"
            if folding is not None:
                bound = f"{wanted}, for experts in etp={folding.etp} parts: {way}"
            raise InvalidArgument(f"comm.{name} is {found}, must be {bound}")


def _sizes(config: Any, etp: int) -> dict[str, Any]:
    return {"num_experts": config.num_experts * etp, "hidden": config.hidden, "top_k": config.top_k * etp}


def held_by(config: Any, folding: ParallelFolding) -> tuple[int, ExpertPart]:
    """Returns this rank's first expert, and which part of each of its experts it holds."""
    place = folding.coordinates(dist.get_rank())
    return place.ep * (config.num_experts // folding.ep), ExpertPart(place.etp, folding.etp)


def ids_of_parts(config: Any, folding: ParallelFolding, comm: Communicator) -> Tensor | None:
    """Returns (E + 1, ETP) int32: the communicator's ids of each expert's parts. The last row has -1, so that
    an index of -1 selects no part. None if experts are not split."""
    if folding.etp == 1:
        return None
    parts = torch.arange(config.num_experts * folding.etp, dtype=torch.int32, device="cpu")
    of_ranks = parts.view(folding.ep, folding.etp, -1)  # the parts that each rank of LAYER holds
    ids = of_ranks.transpose(1, 2).reshape(-1, folding.etp)
    return torch.cat((ids, torch.full_like(ids[:1], -1))).to(comm.device)


def require_parts_within_nodes(config: Any, folding: ParallelFolding | None, comm: Communicator) -> None:
    """Raises InvalidArgument unless each node holds all parts of its experts, as limit_nodes assumes."""
    per_node = comm.size // comm.nodes
    if folding is not None and per_node % folding.etp:
        raise InvalidArgument(
            f"limit_nodes is {config.limit_nodes}, must be None where the parts of an expert lie on several "
            f"nodes: make the folding's etp={folding.etp} a divisor of a node's {per_node} ranks, or pass "
            "`nodes`"
        )


def expert_group(group: AnyGroup | None, mesh: DeviceMesh | None, ep_dim: str | None) -> AnyGroup | None:
    """Returns `group`, or dimension `ep_dim` of `mesh`; raises InvalidArgument if arguments do not fit."""
    if mesh is None:
        if ep_dim is not None:
            raise InvalidArgument(f"ep_dim is {ep_dim!r}, must be None without a mesh")
        return group
    if group is not None:
        raise InvalidArgument("group and mesh are both given, one of them must be None")
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(f"mesh is {mesh!r}, must be a DeviceMesh")
    if ep_dim is None and mesh.ndim == 1:
        return mesh
    if ep_dim not in (mesh.mesh_dim_names or ()):
        raise InvalidArgument(
            f"ep_dim is {ep_dim!r}, must be the dimension of the mesh over which the experts are spread, one "
            f"of {mesh.mesh_dim_names}"
        )
    return mesh[ep_dim]


def require_folding(config: Any, folding: ParallelFolding, group: Any, experts: Any) -> None:
    """Raises InvalidArgument for a folding that does not fit the other arguments of a layer."""
    require_fit(config, folding)
    if group is not None:
        raise InvalidArgument("group (or mesh) is given by folding, must be None when folding is passed")
    if experts is not None and folding.etp > 1:
        raise InvalidArgument(
            f"folding.etp is {folding.etp}, must be 1 with experts of one's own, which moecomm cannot split"
        )
