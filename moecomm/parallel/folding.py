"""Parallel folding: one world of ranks in two grids, that of attention and that of the experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh

from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument
from moecomm.parallel import meshes
from moecomm.parallel.fitting import DEFAULT_ORDER, grids, require_fit, smallest_world
from moecomm.parallel.grid import Grid
from moecomm.types import Group


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The place of a rank in the dense grid (tp, cp, dp, pp) and in the expert grid (etp, ep, edp, pp).

    Attributes:
        tp, cp, dp: place within the group of that name.
        etp, ep, edp: the same in the expert grid.
        pp: pipeline stage, the same in both.
    """

    tp: int
    cp: int
    dp: int
    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelFolding:
    """Lays out the ranks of a job twice: TP x CP x DP x PP for attention and everything dense, and ETP x EP x
    EDP x PP for the experts (docs/folding.md).

    Rank arithmetic alone, of a world of any size; it needs no process group and no GPU. Only `group`,
    `dense_mesh` and `expert_mesh` use torch.distributed.

    A set of dimensions is named by a string, joined by "-" as in `order`: "ep", "dp-cp", "etp-ep". All names
    are of one grid: tp, cp, dp, pp or etp, ep, edp, pp. In which order they stand has no meaning.

    Ranks have the places that Megatron-Core's initialize_model_parallel gives them with the same sizes and
    the same `order`. There, however, ETP is TP unless it is set.

    Attributes:
        world_size: W, ranks of the job.
        tp: tensor-parallel size of attention.
        cp: context-parallel size.
        pp: pipeline stages, of attention and experts alike.
        ep: expert-parallel size: the ranks over which the experts of a layer are spread.
        etp: tensor-parallel size of an expert.
        order: the dimensions from the innermost, whose ranks are neighbours, to the outermost: each of tp,
            cp, ep, dp and pp once. The dense grid leaves ep out; the expert grid leaves cp out and reads tp
            as etp and dp as edp.

    Raises:
        InvalidArgument: a size is no positive integer, or does not divide what is left of the world; `order`
            has other names, or gives attention and experts different pipeline groups.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        require_fit(asdict(self))

    @property
    def dp(self) -> int:
        """DP = W / (TP * CP * PP): the ranks of a data-parallel group of attention."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """EDP = W / (ETP * EP * PP): the ranks that hold the same part of the same experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def smallest_world(self) -> int:
        """The fewest ranks on which these sizes fit, PP * lcm(TP * CP, ETP * EP); a world is a multiple."""
        return smallest_world(asdict(self))

    @cached_property
    def _grids(self) -> tuple[Grid, Grid]:
        return grids(asdict(self))

    def size(self, dims: str) -> int:
        """Returns the ranks of a group over a set of dimensions."""
        grid, names = self._parse(dims)
        return math.prod(size for name, size in zip(grid.names, grid.sizes, strict=True) if name in names)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the place of a rank in both grids."""
        require_integer("rank", rank, 0, self.world_size - 1)
        dense, expert = self._grids
        return Coordinates(**{**dense.coordinates(rank), **expert.coordinates(rank)})

    def rank_of(self, **place: int) -> int:
        """Returns the rank at a place of one grid, such as tp=1, dp=3 or ep=5, pp=2; a dimension that is left
        out counts as 0."""
        grid = self._grid_of(place, "place", place)
        for name, at in place.items():
            require_integer(name, at, 0, self.size(name) - 1)
        return grid.rank_of(place)

    def groups(self, dims: str) -> tuple[tuple[int, ...], ...]:
        """Returns all groups over a set of dimensions, by their first ranks; ranks ascend in each."""
        grid, names = self._parse(dims)
        return grid.groups(names)

    def group_of(self, dims: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group over a set of dimensions which `rank` is in, ascending."""
        require_integer("rank", rank, 0, self.world_size - 1)
        grid, names = self._parse(dims)
        return grid.group_of(names, rank)

    def group(self, dims: str) -> Group:
        """Returns this rank's process group over a set of dimensions.

        It is made on first use, which is a collective call: all ranks of the job make the same groups of
        equal foldings in the same order. It is kept until torch.distributed.destroy_process_group(), for
        every folding that is equal. Each set of dimensions has a process group of its own, even where two
        have the same ranks, so that their collectives do not wait for each other.

        Raises:
            InvalidArgument: torch.distributed is not initialized, or has another number of ranks.
            MismatchedArguments: on all ranks, where they make different groups.
            PeerTimeout: a rank did not come within MOECOMM_TIMEOUT (docs/architecture.md), or 60 seconds.
            PeerLost: the store of torch.distributed is gone.
        """
        grid, names = self._parse(dims)
        name = "-".join(each for each in grid.names if each in names)
        return meshes.group(self, self.world_size, name, lambda: grid.groups(names))

    def dense_mesh(self, device_type: str) -> DeviceMesh:
        """Returns the dense grid as a DeviceMesh with dimensions pp, dp, cp and tp, the outermost first; in
        another `order` they stand in that order, reversed.

        Its groups are those of `group`. It is made and kept as they are, and raises the same errors.
        device_type: "cuda" or "cpu", without an index.
        """
        return self._mesh(self._grids[0], device_type)

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Returns the expert grid as a DeviceMesh with dimensions pp, edp, ep and etp, the outermost first,
        as `dense_mesh` does the dense grid."""
        return self._mesh(self._grids[1], device_type)

    def _mesh(self, grid: Grid, device_type: str) -> DeviceMesh:
        return meshes.mesh(self, self.world_size, grid, device_type, self.group)

    def _parse(self, dims: str) -> tuple[Grid, list[str]]:
        """Returns the grid that a set of dimensions is of, and their names."""
        names = dims.split("-") if isinstance(dims, str) else []
        return self._grid_of(names, "dims", dims), names

    def _grid_of(self, names: Iterable[str], argument: str, given: object) -> Grid:
        found = list(names)
        for grid in self._grids:
            if found and set(found) <= set(grid.names) and len(set(found)) == len(found):
                return grid
        dense, expert = ("-".join(grid.names) for grid in self._grids)
        raise InvalidArgument(
            f"{argument} is {given!r}, expected dimensions of one grid, each once: some of {dense} (dense) "
            f"or of {expert} (experts)"
        )
