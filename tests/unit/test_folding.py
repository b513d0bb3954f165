"""Parallel folding: its arithmetic against plain numpy and against a published mapping worked out by hand,
what it refuses, and its drawing."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from docs.draw_folding import main
from moecomm.parallel import ParallelFolding
from tests import seeds
from tests.multirank.catching import refused

Arguments = dict[str, Any]
SIZES = ("tp", "cp", "pp", "ep", "etp")
GRIDS = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
SMALL = st.sampled_from([1, 1, 2, 3, 4, 5])


def groups_in_numpy(arguments: Arguments, grid: str, chosen: Collection[str]) -> list[list[int]]:
    """The groups over `chosen` dimensions of a grid, by reshaping and transposing the row of all ranks."""
    size = {name: arguments[name] for name in SIZES}
    size["dp"] = arguments["world_size"] // (size["tp"] * size["cp"] * size["pp"])
    size["edp"] = arguments["world_size"] // (size["etp"] * size["ep"] * size["pp"])
    axes = GRIDS[grid][::-1]
    ranks = np.arange(arguments["world_size"]).reshape([size[name] for name in axes])
    left = [axis for axis, name in enumerate(axes) if name not in chosen]
    taken = [axis for axis, name in enumerate(axes) if name in chosen]
    found: list[list[int]] = (
        ranks.transpose(left + taken).reshape(math.prod(ranks.shape[i] for i in left), -1).tolist()
    )
    return found


def fits(arguments: Arguments) -> bool:
    """Are DP and EDP whole?"""
    world, pp = arguments["world_size"], arguments["pp"]
    dense, experts = arguments["tp"] * arguments["cp"], arguments["etp"] * arguments["ep"]
    return not (world % (pp * dense) or world % (pp * experts))


@st.composite
def fitting(draw: st.DrawFn) -> Arguments:
    found: Arguments = {name: draw(SMALL, name) for name in SIZES}
    experts = found["etp"] * found["ep"]
    least = found["pp"] * math.lcm(found["tp"] * found["cp"], experts)
    found["world_size"] = least * draw(st.integers(1, 3), "times the smallest world")
    return found


# -- properties ----------------------------------------------------------------------------------------------
@hypothesis_seed(seeds.base())
@settings(max_examples=80, deadline=None)
@given(arguments=fitting(), backwards=st.booleans())
def test_groups_are_those_of_numpy_and_part_the_world(arguments: Arguments, backwards: bool) -> None:
    folding = ParallelFolding(**arguments)
    world = arguments["world_size"]
    for grid, names in GRIDS.items():
        for chosen in (some for count in range(1, 5) for some in combinations(names, count)):
            dims = "-".join(reversed(chosen) if backwards else chosen)
            groups = folding.groups(dims)
            assert [list(group) for group in groups] == groups_in_numpy(arguments, grid, chosen)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            assert {len(group) for group in groups} == {folding.size(dims)}
            for group in groups[:3]:
                assert all(folding.group_of(dims, rank) == group for rank in group[:3])


@hypothesis_seed(seeds.base())
@settings(max_examples=80, deadline=None)
@given(arguments=fitting())
def test_sizes_fill_the_world_and_coordinates_are_places_in_groups(arguments: Arguments) -> None:
    folding = ParallelFolding(**arguments)
    world = arguments["world_size"]
    assert folding.tp * folding.cp * folding.dp * folding.pp == world
    assert folding.etp * folding.ep * folding.edp * folding.pp == world
    assert (folding.size("dp"), folding.size("edp")) == (folding.dp, folding.edp)
    for rank in range(world):
        place = dataclasses.asdict(folding.coordinates(rank))
        for names in GRIDS.values():
            for name in names:
                assert folding.group_of(name, rank)[place[name]] == rank


@hypothesis_seed(seeds.base())
@settings(max_examples=400, deadline=None)
@given(
    sizes=st.fixed_dictionaries(dict.fromkeys(SIZES, SMALL | st.integers(1, 12))),
    times=st.integers(1, 3) | st.none(),
    world=st.integers(1, 200),
)
def test_a_refusal_names_the_argument(sizes: dict[str, int], times: int | None, world: int) -> None:
    """A world size of `times` times the smallest one is accepted; other sizes may be refused."""
    if times is not None:
        world = times * sizes["pp"] * math.lcm(sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"])
    arguments = {"world_size": world, **sizes}
    if fits(arguments):
        folding = ParallelFolding(**arguments)
        for group in folding.groups("pp"):
            assert [folding.coordinates(rank).pp for rank in group] == list(range(len(group)))
        return
    text = refused(lambda: ParallelFolding(**arguments)).text
    argument = text.split(" is ")[0]
    assert text.startswith(f"{argument} is {arguments[argument]!r}, ")
    assert times is None
    larger = int(text.rpartition(" ")[2])
    assert fits({**arguments, "world_size": larger})


@hypothesis_seed(seeds.base())
@settings(max_examples=60, deadline=None)
@given(arguments=fitting())
def test_the_smallest_world_is_the_smallest(arguments: Arguments) -> None:
    least = ParallelFolding(**arguments).smallest_world
    assert [world for world in range(1, least + 1) if fits({**arguments, "world_size": world})] == [least]
    dense, expert = arguments["tp"] * arguments["cp"], arguments["etp"] * arguments["ep"]
    if max(dense, expert) % min(dense, expert) == 0:
        assert least == arguments["pp"] * max(dense, expert)


# -- a published mapping -------------------------------------------------------------------------------------
def test_a_published_mapping() -> None:
    """Megatron-LM, megatron/core/transformer/moe/README.md, for the method of arXiv 2504.14960: TP4 CP2 DP8
    PP4, ETP1 EP64 EDP1, in Megatron-Core's default order. Worked out by hand: no number below
    was computed by the product."""
    folding = ParallelFolding(world_size=256, tp=4, cp=2, pp=4, ep=64, etp=1)
    assert (folding.dp, folding.edp) == (8, 1)
    # Stage 1 has the ranks 64..127; 70 = 64 + 2 + 4 * 1 + 8 * 0.
    groups: dict[tuple[str, int], Sequence[int]] = {
        ("tp", 70): (68, 69, 70, 71),
        ("cp", 70): (66, 70),
        ("tp-cp", 70): (64, 65, 66, 67, 68, 69, 70, 71),
        ("dp", 70): (70, 78, 86, 94, 102, 110, 118, 126),
        ("pp", 70): (6, 70, 134, 198),
        ("ep", 70): range(64, 128),
        ("ep", 255): range(192, 256),
        ("etp", 70): (70,),
        ("edp", 70): (70,),
    }
    for (dims, rank), ranks in groups.items():
        assert folding.group_of(dims, rank) == tuple(ranks), (dims, rank)
        assert tuple(ranks) in folding.groups(dims)


# -- refusals ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["world_size", *SIZES])
@pytest.mark.parametrize("value", [0, -1, True, "2", 2.0, None, 2**31], ids=repr)
def test_sizes_that_are_no_positive_integers_are_refused(name: str, value: Any) -> None:
    begins = f"{name} is {value!r}, expected an integer from 1"
    refused(lambda: ParallelFolding(**{"world_size": 8, name: value}), begins=begins)


FOLDING = ParallelFolding(world_size=16, tp=2, cp=2, pp=2, ep=4)


@pytest.mark.parametrize(
    "dims",
    ["", "xp", "tp-ep", "tp-tp", "tp cp", "tp,cp", "TP", "cp-edp", "-tp", None, 3, ("tp", "cp")],
    ids=repr,
)
def test_dimensions_of_no_grid_are_refused(dims: Any) -> None:
    calls = (FOLDING.groups, FOLDING.size, FOLDING.group, lambda dims: FOLDING.group_of(dims, 0))
    for call in calls:
        begins = f"dims is {dims!r}, expected dimensions of one grid, each once: some of "
        refused(partial(call, dims), begins=begins)


@pytest.mark.parametrize("rank", [-1, 16, True, 1.0, "1"], ids=repr)
def test_ranks_out_of_the_world_are_refused(rank: Any) -> None:
    for call in (FOLDING.coordinates, lambda rank: FOLDING.group_of("tp", rank)):
        refused(partial(call, rank), begins=f"rank is {rank!r}, expected an integer from 0 to 15")


def test_process_groups_need_an_initialized_torch_distributed() -> None:
    for call in (partial(FOLDING.group, "ep"), partial(FOLDING.dense_mesh, "cpu")):
        refused(call, begins="world_size is 16, and torch")


def test_a_folding_is_a_frozen_value() -> None:
    FOLDING.groups("ep")  # what it remembers of itself is no part of the value
    assert ParallelFolding(world_size=16, tp=2, cp=2, pp=2, ep=4) == FOLDING
    assert len({FOLDING, dataclasses.replace(FOLDING), dataclasses.replace(FOLDING, ep=2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        FOLDING.tp = 4  # type: ignore[misc]


# -- drawing -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--world", "256", "--ep", "48"], "ep is 48, expected a divisor of world_size / (pp * etp) = 256"),
        (["--world", "0"], "world_size is 0, expected an integer from 1"),
        (["--world", "8", "--rank", "8"], "rank is 8, expected an integer from 0 to 7"),
        (["--world", "8", "--pp", "2", "--stage", "2"], "--stage is 2, expected an integer from 0 to 1"),
        (["--world", "8", "--gpus-per-node", "0"], "--gpus-per-node is 0, expected an integer from 1"),
        (["--world", "8.5"], "argument --world: invalid int value: '8.5'"),
        ([], "the following arguments are required: --world"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_bad_command_ends_with_status_2_and_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert f"draw_folding.py: error: {says}" in err and "Traceback" not in err and out == ""
