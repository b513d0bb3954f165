"""Parallel folding: one set of ranks in two grids, one for attention and one for the experts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh

from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument
from moecomm.parallel import meshes
from moecomm.parallel.grid import Grid
from moecomm.types import Group

_DENSE = ("tp", "cp", "dp", "pp")
_EXPERT = ("etp", "ep", "edp", "pp")
# In this order sizes are divided out of world_size; the size of the last is what is left.
_DIVIDED = (("pp", "tp", "cp", "dp"), ("pp", "etp", "ep", "edp"))


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The position of a rank, within the group of each name.

    Attributes:
        tp, cp, dp: in the dense grid.
        etp, ep, edp: in the expert grid.
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

    It is only rank arithmetic, for any number of ranks, and needs no process group or GPU. Only `group`,
    `dense_mesh` and `expert_mesh` use torch.distributed.

    A set of dimensions is named by a string, joined by "-": "ep", "dp-cp", "etp-ep". All names must be of one
    grid: tp, cp, dp, pp or etp, ep, edp, pp. Their order does not matter.

    The first dimension of a grid is the innermost: its ranks are neighbours. Ranks have the positions that
    Megatron-Core's initialize_model_parallel gives them for the same sizes and its default order,
    tp-cp-ep-dp-pp. In Megatron-Core, however, ETP defaults to TP, here to 1.

    Attributes:
        world_size: W, ranks of the job.
        tp: tensor-parallel size of attention.
        cp: context-parallel size.
        pp: pipeline stages, of attention and experts alike.
        ep: expert-parallel size: the ranks over which the experts of a layer are spread.
        etp: tensor-parallel size of an expert.

    Raises:
        InvalidArgument: a size is not a positive integer, or does not divide the remaining ranks.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require_integer(name, value, 1)
        for *sizes, rest in _DIVIDED:
            left, divided = self.world_size, ""
            for name in sizes:
                size = getattr(self, name)
                if left % size:
                    whole = f"world_size / ({divided})" if divided else "world_size"
                    raise InvalidArgument(
                        f"{name} is {size}, expected a divisor of {whole} = {left}, for {rest.upper()} = "
                        f"world_size / ({' * '.join(sizes)}) to be a whole number. These sizes fit "
                        f"a world_size that is a multiple of {self.smallest_world}"
                    )
                left //= size
                divided += f" * {name}" if divided else name

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
        """The fewest ranks for these sizes, PP * lcm(TP * CP, ETP * EP); world_size is a multiple of it."""
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)

    @cached_property
    def _grids(self) -> tuple[Grid, Grid]:
        """The dense and the expert grid, like Megatron-Core's two RankGenerators."""
        dense, expert = (Grid(names, tuple(getattr(self, n) for n in names)) for names in (_DENSE, _EXPERT))
        return dense, expert

    def size(self, dims: str) -> int:
        """Returns the number of ranks in a group over a set of dimensions."""
        _, names = self._parse(dims)
        return math.prod(getattr(self, name) for name in names)

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the position of a rank in both grids."""
        require_integer("rank", rank, 0, self.world_size - 1)
        dense, expert = self._grids
        return Coordinates(**{**dense.coordinates(rank), **expert.coordinates(rank)})

    def groups(self, dims: str) -> tuple[tuple[int, ...], ...]:
        """Returns all groups over a set of dimensions, ordered by first rank; ranks ascend within each."""
        grid, names = self._parse(dims)
        return grid.groups(names)

    def group_of(self, dims: str, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group over a set of dimensions that contains `rank`, ascending."""
        require_integer("rank", rank, 0, self.world_size - 1)
        grid, names = self._parse(dims)
        return grid.group_of(names, rank)

    def group(self, dims: str) -> Group:
        """Returns this rank's process group over a set of dimensions.

        It is made on first use, which is a collective call: all ranks of the job must make the same groups of
        equal foldings in the same order. Equal foldings share it until
        torch.distributed.destroy_process_group(). Each set of dimensions has a separate process group, even
        if another set has the same ranks, so that collectives of the two do not wait for each other.

        Raises:
            InvalidArgument: torch.distributed is not initialized, or has another number of ranks.
            MismatchedArguments: on all ranks, if they make different groups.
            PeerTimeout: a rank did not call within MOECOMM_TIMEOUT (docs/architecture.md), or 60 seconds.
            PeerLost: the store of torch.distributed is gone.
        """
        grid, names = self._parse(dims)
        name = "-".join(each for each in grid.names if each in names)
        return meshes.group(self, name)

    def dense_mesh(self, device_type: str) -> DeviceMesh:
        """Returns the dense grid as a DeviceMesh with dimensions pp, dp, cp and tp, outermost first.

        It has the process groups that `group` returns, and is made and kept like them, with the same errors.
        device_type: "cuda" or "cpu", without an index.
        """
        return meshes.mesh(self, self._grids[0], device_type)

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """Returns the expert grid as a DeviceMesh with dimensions pp, edp, ep and etp, outermost first; see
        `dense_mesh`."""
        return meshes.mesh(self, self._grids[1], device_type)

    def _parse(self, dims: str) -> tuple[Grid, list[str]]:
        """Returns the grid to which a set of dimensions belongs, and their names."""
        names = dims.split("-") if isinstance(dims, str) else []
        for grid in self._grids:
            if names and set(names) <= set(grid.names) and len(set(names)) == len(names):
                return grid, names
        raise InvalidArgument(
            f"dims is {dims!r}, expected dimensions of one grid, each once: some of {'-'.join(_DENSE)} "
            f"(dense) or of {'-'.join(_EXPERT)} (experts)"
        )
