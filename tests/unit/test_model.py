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


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (3, 2048), (512, 7168), (1024, 7168)])
def test_rows_of_a_put_are_those_of_the_window(tokens: int, hidden: int) -> None:
    shape = shape_of(tokens=tokens, hidden=hidden)
    plan = Communicator.memory_plan(
        ranks=4, ranks_per_node=2, num_experts=8, hidden=hidden, top_k=2, max_tokens=tokens, device="cpu"
    )
    (staging,) = [size for name, _, size in plan.sections if name == "staging"]
    assert staging == -(-16 * shape.chunk_rows(shape.row_bytes) * shape.row_bytes // 4096) * 4096


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


# -- program -------------------------------------------------------------------------------------------------


def test_page_has_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "model.md").read_text()
    found = re.search(r"    python -m bench\.costmodel (.*)\n\n```\n(.*?)```", page, re.DOTALL)
    assert found, "docs/model.md has no output of the program"
    assert main(found[1].split()) == 0
    assert capsys.readouterr().out == found[2]


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
