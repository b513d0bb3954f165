"""The cost model: traffic against loops over all choices, time against worked examples and the pages."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.costmodel import (
    MACHINES,
    MODELS,
    Machine,
    Shape,
    expected,
    expected_owners,
    predict,
)
from bench.costmodel.__main__ import main
from moecomm import Communicator, InvalidArgument

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
    node_GBps=100, memory_GBps=1000, reduce_GBps=20, dispatch_fixed_us=10, combine_fixed_us=20, nic_GBps=10,
    nic_latency_us=5, proxy_us=2, staging_GBps=50,
)  # fmt: skip


def shape_of(**fields: Any) -> Shape:
    sizes: dict[str, Any] = {"nodes": 2, "ranks_per_node": 2, "tokens": 7, "hidden": 64, "top_k": 2}
    return Shape(**{**sizes, "experts": 8, **fields})


# -- traffic -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("groups", [(None, None), (4, 2), (2, 1)])
def test_expected_is_the_mean_of_all_choices(groups: tuple[int | None, int | None]) -> None:
    """Every rank brings every choice once: then each has exactly the expected rows."""
    count, chosen = groups[0] or 1, groups[1] or 1
    size = 8 // count
    choices = [
        choice
        for some in itertools.combinations(range(count), chosen)
        for choice in itertools.combinations([g * size + i for g in some for i in range(size)], 2)
    ]
    shape = shape_of(num_groups=groups[0], topk_groups=groups[1], put_bytes=1, tokens=len(choices))
    total: Any = Counter()
    for home, choice in itertools.product(range(4), choices):
        owners, node = [expert // 2 for expert in choice], home // 2
        nodes = {owner // 2 for owner in owners}
        total["expert_rows"] += len(owners)
        total["foreign_expert_rows"] += sum(owner != home for owner in owners)
        for owner in set(owners):
            total["needed_rows"] += 1
            total["foreign_rows"] += owner != home
            # Where the row lies when `owner` takes it: at home, or with home's rail peer in its node.
            total["link_rows"] += owner % 2 != home % 2
            total["relay_rows"] += owner // 2 != node
            total["home_rows"] += owner // 2 == node and owner != home
        total.update(
            dict.fromkeys(("sent_rows", "home_rows", "sent_puts", "returned_puts"), len(nodes - {node}))
        )
        total["nodes_per_token"] += len(nodes) / len(choices)
        total["ranks_per_token"] += len(set(owners)) / len(choices)
    mean = {name: value / 4 for name, value in total.items()}
    assert dataclasses.asdict(expected(shape)) == pytest.approx(mean, rel=1e-12)


def test_no_tokens() -> None:
    shape = shape_of(tokens=0)
    assert expected(shape).sent_puts == expected(shape).needed_rows == 0
    assert predict(ROUND, shape).dispatch.seconds == pytest.approx(10e-6 + 7e-6 + 576 / 10e9)


# -- sizes ---------------------------------------------------------------------------------------------------


def test_row_of_fp8_is_that_of_the_page() -> None:
    page = (ROOT / "docs" / "data_formats.md").read_text()
    shape = shape_of(hidden=7168, wire="fp8")
    assert f"and takes {shape.wire_row_bytes}" in page
    assert f"the {shape.row_bytes} bytes in bfloat16" in page
    # Where whole lines would be longer than the row as it is: a multiple of 16.
    assert shape_of(hidden=64, wire="fp8").wire_row_bytes == 128
    assert shape_of(hidden=48, wire="fp8").wire_row_bytes == 64


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (3, 2048), (512, 7168), (1024, 7168)])
def test_rows_of_a_put_are_those_of_the_window(tokens: int, hidden: int) -> None:
    shape = shape_of(tokens=tokens, hidden=hidden)
    plan = Communicator.memory_plan(
        ranks=4, ranks_per_node=2, num_experts=8, hidden=hidden, top_k=2, max_tokens=tokens, device="cpu"
    )
    (staging,) = [size for name, _, size in plan.sections if name == "staging"]
    assert staging == -(-16 * shape.chunk_rows(shape.row_bytes) * shape.row_bytes // 4096) * 4096


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
    assert dataclasses.replace(whole, put_bytes=1 << 19).metadata_puts == 5


@pytest.mark.parametrize(
    ("whole", "name", "fields"),
    [
        (EXAMPLE, "nodes", {"nodes": 0}),
        (EXAMPLE, "tokens", {"tokens": -1}),
        (EXAMPLE, "hidden", {"hidden": True}),
        (EXAMPLE, "experts", {"experts": 6}),
        (EXAMPLE, "top_k", {"top_k": 9}),
        (EXAMPLE, "wire", {"wire": "fp4"}),
        (EXAMPLE, "topk_groups", {"num_groups": 2}),
        (EXAMPLE, "num_groups", {"num_groups": 3, "topk_groups": 1}),
        (EXAMPLE, "topk_groups", {"num_groups": 2, "topk_groups": 3}),
        (EXAMPLE, "top_k", {"num_groups": 4, "topk_groups": 1, "top_k": 2}),
        (ROUND, "nic_GBps", {"nic_GBps": 0.0}),
        (ROUND, "nic_latency_us", {"nic_latency_us": -1.0}),
        (ROUND, "proxy_us", {"proxy_us": math.inf}),
        (ROUND, "nic_share", {"nic_share": 1.1}),
    ],
)
def test_refuses_shapes_and_machines(whole: Shape | Machine, name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{type(whole).__name__}\.{name} is .*, must be "):
        dataclasses.replace(whole, **fields)


# -- time ----------------------------------------------------------------------------------------------------


def test_worked_example_of_a_dispatch() -> None:
    found = predict(ROUND, EXAMPLE).dispatch
    stages = {stage.name: stage.seconds * 1e6 for stage in found.stages}
    assert stages == pytest.approx({
        "fixed": 10, "latency": 7, "metadata": 0.8576, "staging": 10.24, "wire": 51.2, "plan": 0.08,
        "pull": 5.12,
    })  # fmt: skip
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
    assert stages == pytest.approx({
        "fixed": 20, "latency": 7, "records": 0.0576, "reduce": 76.8, "relay sum": 1.024, "staging": 10.24,
        "wire": 51.2, "home sum": 1.792,
    })  # fmt: skip
    assert found.seconds * 1e6 == pytest.approx(27.0576 + 76.8 + (1.024 + 10.24 + 51.2 + 1.792) / 10)
    assert (found.row_bytes, found.sent_bytes, found.puts) == (512000, 512576, 11)
    assert found.bottleneck == "reduce"


@pytest.mark.parametrize(
    ("machine", "shape", "dispatch", "combine"),
    [
        ({"put_rate": 1e4}, {}, "put rate", "put rate"),
        ({"command_rate": 5e6}, {}, "command rate", "command rate"),
        ({"command_rate": 5e6}, {"rows_per_command": None}, "NIC", "reduce"),
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
    one node says the same, and "h200" has about these rates. Its fixed costs are those of version 0.1.0.
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
    for name in ("node_GBps", "reduce_GBps"):
        assert getattr(machine, name) == pytest.approx(constants[name], rel=0.05), name
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


# -- program -------------------------------------------------------------------------------------------------


def test_program_prints_a_line_a_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--nodes 1,8,64 --model deepseek-v3 --set nic_GBps=25 --set nic_share=1"
    assert main(flags.split()) == 0
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


def test_program_limits_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nodes", "16", "--model", "kimi-k2", "--wire", "fp8", "-l", "4", "-b", "64"]
    assert main([*flags, "--no-groups"]) == 0
    plain = capsys.readouterr().out
    assert main([*flags, "--limit-nodes", "2"]) == 0
    limited = capsys.readouterr().out
    touched = [float(text.splitlines()[1].split()[2]) for text in (plain, limited)]
    assert touched[0] > 4 and touched[1] <= 2
    shape = Shape(nodes=16, ranks_per_node=4, tokens=64, wire="fp8", **MODELS["kimi-k2"])
    assert all(
        name in str(predict(MACHINES["h200"], shape))
        for name in ("16 nodes x 4 ranks, 64 tokens", "home sum")
    )


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--nodes", "1;2"], "--nodes 1;2: expected numbers"),
        (["--set", "speed=3"], "--set speed=3: no rate 'speed'"),
        (["--set", "nic_GBps=fast"], "'fast' is no number"),
        (["--set", "nic_GBps=-1"], "Machine.nic_GBps is -1.0, must be above 0"),
        (["--machine", "abacus"], "invalid choice"),
    ],
)
def test_program_refuses(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


# -- table and pictures of the page --------------------------------------------------------------------------


def test_page_has_the_table_of_limits() -> None:
    page = (ROOT / "docs" / "model.md").read_text().partition("### Limited nodes")[2]
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == 15
    whole = 0.0
    for nodes, limit, needed, sent, puts, share in lines:
        chosen, _, groups = limit.removesuffix(" groups").removesuffix(" nodes").partition(" of ")
        limits = (int(groups), int(chosen)) if groups else (None, None)
        shape = Shape(nodes=int(nodes), ranks_per_node=8, tokens=1024, **MODELS["deepseek-v3"])
        found = expected(dataclasses.replace(shape, num_groups=limits[0], topk_groups=limits[1]))
        whole = whole if groups else found.sent_rows
        assert needed == f"{found.nodes_per_token:.2f}" and puts == f"{found.sent_puts:.0f}"
        assert sent == f"{found.sent_rows * shape.row_bytes / 1e6:.1f}"
        assert share == f"{found.sent_rows / whole:.0%}"
