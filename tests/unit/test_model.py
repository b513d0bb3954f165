"""The cost model: traffic against loops over tokens and all choices, time against worked examples and the
pages."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench import group_limits
from bench.costmodel import (
    MACHINES,
    MODELS,
    Machine,
    Shape,
    Traffic,
    count,
    expected,
    expected_owners,
    fit,
    plots,
    predict,
)
from bench.costmodel.__main__ import main
from moecomm import Communicator, InvalidArgument, InvalidRouting

ROOT = Path(__file__).resolve().parents[2]

# The example of `predict`.
EXAMPLE = Shape(
    nodes=2,
    ranks_per_node=2,
    tokens=1000,
    hidden=512,
    top_k=1,
    experts=4,
    put_bytes=51200,
    rows_per_command=1,
)
ROUND = Machine(
    node_GBps=100,
    memory_GBps=1000,
    reduce_GBps=20,
    dispatch_fixed_us=10,
    combine_fixed_us=20,
    nic_GBps=10,
    nic_latency_us=5,
    proxy_us=2,
    staging_GBps=50,
)


def shape_of(**fields: Any) -> Shape:
    sizes: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "tokens": 7, "hidden": 64, "top_k": 2}
    return Shape(**{**sizes, "experts": 8, **fields})


# -- traffic -------------------------------------------------------------------------------------------------


def all_choices(shape: Shape) -> list[tuple[int, ...]]:
    """Every choice of experts that random routing can make, as often as it makes it."""
    if shape.num_groups is None or shape.topk_groups is None:
        return list(itertools.combinations(range(shape.experts), shape.top_k))
    size = shape.experts // shape.num_groups
    return [
        choice
        for groups in itertools.combinations(range(shape.num_groups), shape.topk_groups)
        for choice in itertools.combinations(
            [group * size + i for group in groups for i in range(size)], shape.top_k
        )
    ]


def test_expected_owners_worked_example() -> None:
    shape = Shape(nodes=8, ranks_per_node=1, tokens=1, hidden=8, top_k=8, experts=256)
    assert expected_owners(shape, 8) == pytest.approx(
        8 * (1 - math.comb(224, 8) / math.comb(256, 8)), rel=1e-12
    )
    assert expected_owners(shape, 8) == pytest.approx(5.29, abs=0.005)
    limited = dataclasses.replace(shape, num_groups=8, topk_groups=4)
    assert expected_owners(limited, 8) == pytest.approx(3.63, abs=0.005)
    with pytest.raises(InvalidArgument, match="owners is 3, must be a divisor of experts=256"):
        expected_owners(shape, 3)


def slow_count(shape: Shape, ids: list[npt.NDArray[np.int64]]) -> dict[str, float]:
    """Every field of Traffic by loops over tokens: who holds what, and who takes it from whom."""
    ranks, local, share = shape.ranks, shape.ranks_per_node, shape.experts // shape.ranks
    names = [field.name for field in dataclasses.fields(Traffic)]
    of_rank = {name: [0] * ranks for name in names}
    pulled, served = [0] * ranks, [0] * ranks
    to_node: dict[tuple[int, int], int] = {}
    nodes_touched = ranks_touched = tokens = 0
    for home, own in enumerate(ids):
        for choice in own.tolist():
            tokens += 1
            owners = [expert // share for expert in choice if expert >= 0]
            nodes_touched += len({owner // local for owner in owners})
            ranks_touched += len(set(owners))
            for owner in owners:
                of_rank["expert_rows"][owner] += 1
                of_rank["foreign_expert_rows"][owner] += owner != home
            for owner in set(owners):
                of_rank["needed_rows"][owner] += 1
                of_rank["foreign_rows"][owner] += owner != home
                # Where the row lies when `owner` takes it: at home, or with home's rail peer in its node.
                holder = owner // local * local + home % local
                if holder != owner:
                    pulled[owner] += 1
                    served[holder] += 1
                if owner // local != home // local:
                    of_rank["relay_rows"][holder] += 1
                elif owner != home:
                    of_rank["home_rows"][home] += 1
            for node in {owner // local for owner in owners} - {home // local}:
                of_rank["sent_rows"][home] += 1
                of_rank["home_rows"][home] += 1
                of_rank["received_rows"][node * local + home % local] += 1
                to_node[home, node] = to_node.get((home, node), 0) + 1
    for (home, node), rows in to_node.items():
        of_rank["sent_puts"][home] += math.ceil(rows / shape.chunk_rows(shape.wire_row_bytes))
        peer = node * local + home % local
        of_rank["returned_puts"][peer] += math.ceil(rows / shape.chunk_rows(shape.row_bytes))
    found: dict[str, float] = {name: max(values) for name, values in of_rank.items()}
    found["link_rows"] = max(*pulled, *served)
    found["nodes_per_token"] = nodes_touched / max(tokens, 1)
    found["ranks_per_token"] = ranks_touched / max(tokens, 1)
    return found


@pytest.mark.parametrize(("nodes", "local"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (2, 7)])
def test_counts_equal_loops(nodes: int, local: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = nodes * local * 2
    top_k = min(4, experts)
    shape = shape_of(
        nodes=nodes, ranks_per_node=local, experts=experts, top_k=top_k, put_bytes=400, wire="fp8"
    )
    ids = [
        np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        if (tokens := int(rng.integers(0, 30)))
        else np.empty((0, top_k), dtype=np.int64)
        for _ in range(nodes * local)
    ]
    for own in ids:
        own[rng.random(own.shape) < 0.2] = -1
    assert dataclasses.asdict(count(shape, ids)) == pytest.approx(slow_count(shape, ids), rel=1e-12)


@pytest.mark.parametrize("groups", [(None, None), (4, 2), (2, 1)])
def test_expected_is_the_mean_of_counts(groups: tuple[int | None, int | None]) -> None:
    """Every rank brings every choice once: then each rank has exactly the expected rows."""
    shape = shape_of(experts=8, top_k=2, num_groups=groups[0], topk_groups=groups[1], put_bytes=1)
    choices = np.array(all_choices(shape))
    shape = dataclasses.replace(shape, tokens=len(choices))
    want, got = dataclasses.asdict(expected(shape)), dataclasses.asdict(count(shape, [choices] * 4))
    assert got == pytest.approx(want, rel=1e-12)


def test_no_tokens() -> None:
    shape = shape_of(tokens=0)
    nothing = {field.name: 0.0 for field in dataclasses.fields(Traffic)}
    assert dataclasses.asdict(count(shape, np.empty((4, 0, 2), dtype=np.int32))) == nothing
    assert expected(shape).sent_puts == 0
    assert predict(ROUND, shape).dispatch.seconds == pytest.approx(10e-6 + 7e-6 + 576 / 10e9)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        (np.zeros((3, 5, 2), dtype=int), InvalidArgument, "ids are of 3 ranks, must be of 4"),
        (np.zeros((4, 5, 3), dtype=int), InvalidArgument, r"ids of rank 0 .* top_k=2\)"),
        (np.zeros((4, 5, 2)), InvalidArgument, "ids of rank 0 are float64"),
        ([np.array([[0, 1]])] * 3 + [np.array([[0, 8]])], InvalidRouting, r"ids of rank 3 are 0 \.\. 8"),
        ([np.array([[0, 1]])] * 3 + [np.array([[-2, 0]])], InvalidRouting, r"ids of rank 3 are -2"),
        ([np.array([[3, 3]])] * 4, InvalidRouting, "rank 0 name an expert twice"),
    ],
)
def test_refuses_ids(ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        count(shape_of(), ids)


# -- sizes ---------------------------------------------------------------------------------------------------


def test_row_of_fp8_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "data_formats.md").read_text()
    shape = shape_of(hidden=7168, wire="fp8")
    assert f"and takes {shape.wire_row_bytes}" in page
    assert f"the {shape.row_bytes} bytes in bfloat16" in page
    # Where whole lines would be longer than the row as it is: a multiple of 16.
    assert shape_of(hidden=64, wire="fp8").wire_row_bytes == 128
    assert shape_of(hidden=48, wire="fp8").wire_row_bytes == 64


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (3, 2048), (512, 7168), (1024, 2048), (1024, 7168)])
def test_rows_of_a_put_are_those_of_the_window(tokens: int, hidden: int, wire: str | None) -> None:
    shape = shape_of(tokens=tokens, hidden=hidden, wire=wire)
    plan = Communicator.memory_plan(
        ranks=shape.ranks,
        ranks_per_node=shape.ranks_per_node,
        num_experts=shape.experts,
        hidden=hidden,
        top_k=shape.top_k,
        max_tokens=tokens,
        device="cpu",
    )
    (staging,) = [size for name, _, size in plan.sections if name == "staging"]
    rows = shape.chunk_rows(shape.wire_row_bytes)
    assert staging == -(-16 * rows * shape.row_bytes // 4096) * 4096
    assert rows == shape.chunk_rows(shape.row_bytes)


def test_rows_of_a_put_are_those_of_gpus() -> None:
    # The page's D is what memory_plan() has on CUDA (tests/docs).
    said = re.search(r"D = (\d+), F = ", (ROOT / "docs" / "memory.md").read_text())
    shape = shape_of(tokens=4096, hidden=7168)
    assert said and shape.chunk_rows(shape.row_bytes) == int(said[1]) == -(-(1 << 20) // shape.row_bytes)


def test_puts_of_ids_and_weights() -> None:
    # 1 MiB of ids and as much of weights, and one token more of each.
    whole = shape_of(tokens=1 << 17)
    more = dataclasses.replace(whole, tokens=whole.tokens + 1)
    assert (whole.metadata_puts, more.metadata_puts) == (3, 5)
    assert dataclasses.replace(more, with_weights=False).metadata_puts == 3
    assert dataclasses.replace(whole, put_bytes=1 << 19).metadata_puts == 5


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"nodes": 0}, "nodes"),
        ({"ranks_per_node": 2.0}, "ranks_per_node"),
        ({"tokens": -1}, "tokens"),
        ({"hidden": True}, "hidden"),
        ({"put_bytes": 0}, "put_bytes"),
        ({"rows_per_command": 0}, "rows_per_command"),
        ({"experts": 6}, "experts"),
        ({"top_k": 9}, "top_k"),
        ({"wire": "fp4"}, "wire"),
        ({"num_groups": 2}, "topk_groups"),
        ({"topk_groups": 2}, "topk_groups"),
        ({"num_groups": 3, "topk_groups": 1}, "num_groups"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_groups"),
        ({"num_groups": 8, "topk_groups": 1}, "top_k"),
    ],
)
def test_refuses_shapes(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^Shape\.{name} is .*, must be "):
        shape_of(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"nic_GBps": 0.0}, "nic_GBps"),
        ({"put_rate": -1.0}, "put_rate"),
        ({"memory_GBps": math.nan}, "memory_GBps"),
        ({"nic_latency_us": -1.0}, "nic_latency_us"),
        ({"proxy_us": math.inf}, "proxy_us"),
        ({"nic_share": 1.1}, "nic_share"),
    ],
)
def test_refuses_machines(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^Machine\.{name} is .*, must be "):
        dataclasses.replace(ROUND, **fields)


# -- time ----------------------------------------------------------------------------------------------------


def test_worked_example_of_a_dispatch() -> None:
    found = predict(ROUND, EXAMPLE).dispatch
    stages = {stage.name: stage.seconds * 1e6 for stage in found.stages}
    assert stages == pytest.approx(
        {
            "fixed": 10,
            "latency": 7,
            "metadata": 0.8576,
            "staging": 10.24,
            "wire": 51.2,
            "plan": 0.08,
            "pull": 5.12,
        }
    )
    assert found.seconds * 1e6 == pytest.approx(70.5936)
    assert (found.row_bytes, found.sent_bytes, found.puts) == (512000, 520576, 13)
    assert found.link_bytes == 512000
    assert found.bottleneck == "NIC"
    assert found.stage("pull").bound == "node links"


def test_worked_example_of_a_combine() -> None:
    """The same rows backwards: 750 foreign expert rows are read and 750 partial sums stored at 20 GB/s, the
    relay adds 500 partial sums up to 500 rows, and 250 + 500 rows and 1000 results pass through the home's
    memory.
    """
    found = predict(ROUND, EXAMPLE).combine
    stages = {stage.name: stage.seconds * 1e6 for stage in found.stages}
    assert stages == pytest.approx(
        {
            "fixed": 20,
            "latency": 7,
            "records": 0.0576,
            "reduce": 76.8,
            "relay sum": 1.024,
            "staging": 10.24,
            "wire": 51.2,
            "home sum": 1.792,
        }
    )
    assert found.seconds * 1e6 == pytest.approx(27.0576 + 76.8 + (1.024 + 10.24 + 51.2 + 1.792) / 10)
    assert (found.row_bytes, found.sent_bytes, found.puts) == (512000, 512576, 11)
    assert found.bottleneck == "reduce"


@pytest.mark.parametrize(
    ("machine", "shape", "dispatch", "combine"),
    [
        ({"put_rate": 1e4}, {}, "put rate", "put rate"),
        ({"command_rate": 5e6}, {}, "command rate", "command rate"),
        ({"command_rate": 5e6}, {"rows_per_command": 100}, "NIC", "reduce"),
        ({"command_rate": 5e6}, {"rows_per_command": None}, "NIC", "reduce"),
        ({"command_rate": 1e4}, {"rows_per_command": None}, "command rate", "command rate"),
        ({"nic_half_bytes": 1e6}, {}, "NIC", "NIC"),
        ({"nic_GBps": 1000, "reduce_GBps": 5000, "staging_GBps": 500}, {}, "fixed cost", "fixed cost"),
        ({"node_GBps": 4, "reduce_GBps": 5000}, {}, "node links", "node links"),
        ({"memory_GBps": 10}, {}, "memory", "memory"),
        ({"staging_GBps": 5}, {}, "staging", "staging"),
        ({"nic_latency_us": 100}, {}, "latency", "latency"),
        ({"ranks_per_nic": 2}, {}, "NIC", "NIC"),
    ],
)
def test_names_what_holds_it(
    machine: dict[str, float], shape: dict[str, Any], dispatch: str, combine: str
) -> None:
    found = predict(dataclasses.replace(ROUND, **machine), dataclasses.replace(EXAMPLE, **shape))
    assert (found.dispatch.bottleneck, found.combine.bottleneck) == (dispatch, combine)


def test_one_node_is_the_formula_of_the_memory_page() -> None:
    """docs/memory.md has constants from measurements, and times by its formula for 2 to 8 GPUs: the model of
    one node says the same, and "h200" has about these constants.
    """
    page = (ROOT / "docs" / "memory.md").read_text()
    constants = {
        name: float(match[1])
        for name, pattern in {
            "node_GBps": r"\b([\d.]+) GB/s, what stores from SMs",
            "dispatch_fixed_us": r"([\d.]+) us \(dispatch\)",
            "combine_fixed_us": r"([\d.]+) us \(combine\)",
            "reduce_GBps": r"\b26 blocks at ([\d.]+) GB/s each",
        }.items()
        if (match := re.search(pattern, page))
    }
    constants["reduce_GBps"] *= 26
    machine = MACHINES["h200"]
    for name, value in constants.items():
        assert getattr(machine, name) == pytest.approx(value, rel=0.05), name
    lines = re.findall(
        r"^\| (\d) \| (\d+) \| [\d.]+ \| \d+ MB \| (\d+) us \| [^|]* \| (\d+) us \|", page, re.MULTILINE
    )
    assert len(constants) == len(lines) == 4
    for gpus, experts, dispatch_us, combine_us in lines:
        shape = Shape(
            nodes=1, ranks_per_node=int(gpus), tokens=4096, hidden=7168, top_k=8, experts=int(experts)
        )
        found = predict(dataclasses.replace(machine, **constants), shape)
        assert found.dispatch.seconds * 1e6 == pytest.approx(int(dispatch_us), abs=1)
        # The model adds the last chunk's sum at the home, which the page's formula leaves out.
        assert found.combine.seconds * 1e6 == pytest.approx(int(combine_us), abs=3)
        assert found.dispatch.puts == found.combine.puts == found.dispatch.sent_bytes == 0


# -- fit -----------------------------------------------------------------------------------------------------


def test_fit_worked_example() -> None:
    sizes = [7 << 10, 64 << 10, 1 << 20]
    rates = [2.3, 6.0, 7.2]
    line = fit(sizes, [size / (rate * 1e9) for size, rate in zip(sizes, rates, strict=True)])
    assert line.each_s * 1e6 == pytest.approx(2.1, abs=0.05)
    assert line.GBps == pytest.approx(7.36, abs=0.005)
    assert line.half_bytes == pytest.approx(15700, abs=50)
    machine = MACHINES["h200-tcp"]
    assert (machine.nic_GBps, machine.nic_half_bytes) == pytest.approx((line.GBps, line.half_bytes), rel=2e-3)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([], []),
        ([5], [1.0]),
        ([5, 5], [1.0, 2.0]),
        ([5, 6], [1.0]),
        ([5, 6], [1.0, 0.0]),
        ([5, 6], [1.0, math.nan]),
        ([1, 1000], [1.0, 0.5]),
    ],
)
def test_fit_refuses(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(InvalidArgument):
        fit(sizes, times)


# -- program -------------------------------------------------------------------------------------------------


def test_program_prints_a_line_a_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "1,8,64", "--model", "deepseek-v3", "--nic", "25", "--set", "nic_share=1"]) == 0
    out, err = capsys.readouterr()
    title, *lines = out.splitlines()
    assert title.split()[:2] == ["nodes", "ranks"]
    assert [line.split()[:2] for line in lines] == [["1", "8"], ["8", "64"]]
    machine = dataclasses.replace(MACHINES["h200"], nic_GBps=25, nic_share=1)
    found = predict(machine, Shape(nodes=8, ranks_per_node=8, tokens=4096, **MODELS["deepseek-v3"]))
    assert lines[1].split()[6] == f"{found.dispatch.seconds * 1e6:.0f}"
    assert err == "64 nodes: Shape.experts is 256, must be a multiple of the 512 ranks\n"


def test_page_has_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "model.md").read_text()
    found = re.search(r"    python -m bench\.costmodel (.*)\n\n```\n(.*?)```", page, re.DOTALL)
    assert found, "docs/model.md has no output of the program"
    assert main(found[1].split()) == 0
    assert capsys.readouterr().out == found[2]


def test_page_has_the_numbers_of_the_machine() -> None:
    page, machine = (ROOT / "docs" / "model.md").read_text(), MACHINES["h200"]
    assert f"| node links | {machine.node_GBps} GB/s |" in page
    assert f"| memory | {machine.memory_GBps:.0f} GB/s " in page
    assert f"| reduce | 26 * {machine.reduce_GBps / 26:.0f} GB/s |" in page
    assert f"{machine.dispatch_fixed_us} us dispatch, {machine.combine_fixed_us} us combine" in page
    assert f"| {machine.proxy_us} us |" in page
    assert f"| commands | {machine.command_rate / 1e6:.0f} M/s" in page
    assert f"| NIC | {machine.nic_GBps:.0f} GB/s |" in page
    assert f"| share of it | {machine.nic_share} |" in page
    assert f"| latency | {machine.nic_latency_us:.0f} us |" in page
    assert f"{machine.put_rate / 1e6:.0f} M/s a proxy, half of the rate at {machine.nic_half_bytes}" in page


def test_program_limits_nodes_and_prints_stages(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--nodes",
        "16",
        "--experts",
        "512",
        "--topk",
        "6",
        "--hidden",
        "1024",
        "--wire",
        "fp8",
        "-l",
        "4",
    ]
    assert main([*flags, "--no-groups", "--stages", "-b", "64"]) == 0
    plain = capsys.readouterr().out
    assert main([*flags, "--limit-nodes", "2", "--stages"]) == 0
    limited = capsys.readouterr().out
    touched = [float(re.search(r"needs ([\d.]+) nodes", text)[1]) for text in (plain, limited)]  # type: ignore[index]
    assert touched[0] > 4
    assert touched[1] <= 2
    assert "16 nodes x 4 ranks, 64 tokens" in plain
    assert all(name in plain for name in ("metadata", "relay sum", "home sum"))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nodes", "1;2"], "--nodes 1;2: expected numbers"),
        (["--set", "speed=3"], "--set speed=3: no rate 'speed'"),
        (["--set", "nic_GBps=fast"], "'fast' is no number"),
        (["--nic", "-1"], "Machine.nic_GBps is -1.0, must be above 0"),
        (["--machine", "abacus"], "invalid choice"),
    ],
)
def test_program_refuses(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_program_has_nothing_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "0,3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "0 nodes: Shape.nodes is 0" in err


# -- table and pictures of the page --------------------------------------------------------------------------


def test_limits_counted_from_a_router(capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """The table's program on a small job: no token passes its limit, and what is sent shrinks with it."""
    found = {
        limit: group_limits.counted(8, limit, groups, local=2, tokens=64, seed=seed)
        for limit, groups in group_limits.limits(8, [3, 2, 8]).items()
    }
    assert list(found) == ["no limit", "4 of 8 groups", "3 of 8 nodes", "2 of 8 nodes"]
    assert [found[limit].most_nodes for limit in list(found)[1:]] == [4, 3, 2]
    sent = [each.sent_bytes for each in found.values()]
    assert sent == sorted(sent, reverse=True) and sent[0] > 1.5 * sent[-1]
    cells = group_limits.lines(list(found.values()))
    assert cells[0][-1] == "100%"
    assert int(cells[-1][-1].rstrip("%")) < 60

    assert group_limits.main(["--nodes", "2", "--limits", "1", "-l", "1", "-b", "16"]) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("| nodes | routing |")
    assert [line.split(" | ")[1] for line in lines] == ["no limit", "4 of 8 groups", "1 of 2 nodes"]
    assert lines[-1].split(" | ")[4] == "1"


def test_page_has_the_table_of_limits() -> None:
    page = (ROOT / "docs" / "model.md").read_text()
    found = re.search("<!-- group limits -->\n(.*?)<!-- /group limits -->", page, re.DOTALL)
    assert found, "docs/model.md has no table of limits"
    title, _, *lines = found[1].splitlines()
    assert title == f"| {' | '.join(group_limits.TITLES)} |"
    assert len(lines) > 10
    for line in lines:
        nodes, limit, counted, by_expected, most, *_ = line.strip("| ").split(" | ")
        groups = group_limits.limits(int(nodes), [4, 2])[limit]
        shape = Shape(nodes=int(nodes), ranks_per_node=8, tokens=1024, **MODELS["deepseek-v3"])
        shape = dataclasses.replace(shape, num_groups=groups[0], topk_groups=groups[1])
        assert by_expected == f"{expected(shape).nodes_per_token:.2f}"
        assert float(counted) == pytest.approx(float(by_expected), rel=0.1)
        if limit.endswith("nodes"):
            assert int(most) <= int(limit.split()[0])


def test_pictures_are_those_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs" / "model.md").read_text()
    names = re.findall(r"\(results/(model-\w+)\.svg\)", page)
    assert sorted(names) == sorted(plots.FIGURES)
    assert plots.main(["--into", str(tmp_path)]) == 0
    assert "model-nodes.svg" in capsys.readouterr().out
    for name in names:
        text = (tmp_path / f"{name}.svg").read_text()
        assert text.startswith("<?xml")
        assert "predicted" in text
