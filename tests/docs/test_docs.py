"""The documentation says what is so: the example runs, numbers are the program's, links lead somewhere."""

import doctest
import math
import os
import re
import shlex
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moecomm
from docs.draw_folding import main as folding_program
from moecomm import _C
from moecomm.parallel import ParallelFolding
from moecomm.setup.devices import why_no_cuda
from tests import reference
from tests.fabric import needs_fabric
from tests.multirank.harness import NO_GPUS
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
EXAMPLE: dict[str, Any] = {"hidden": 7168, "top_k": 8, "max_tokens": 4096}  # of the memory page
FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil}  # of its formulas
PAGE_BYTES = 4096

needs_cuda_part = pytest.mark.skipif(
    not hasattr(_C, "DeviceShape"), reason="the extension was built without its CUDA part"
)


def plan_of(
    ranks: int, experts: int, per_node: int | None = None, device: str = "cpu", **sizes: Any
) -> moecomm.MemoryPlan:
    """The plan of EXAMPLE's sizes, but for these."""
    given = {"num_experts": experts, "ranks_per_node": per_node, **EXAMPLE, **sizes}
    return moecomm.Communicator.memory_plan(ranks=ranks, device=device, **given)


def readme_example() -> tuple[int, str]:
    """(ranks, program) of the README's marked example."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example: (\d+) ranks -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, "README.md has no marked example"
    return int(found[1]), found[2]


def readme_example_on_gpus() -> str:
    """The same program with the head that the README has for GPUs."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- example: head on GPUs -->\n((?:    .*\n|\n)+)", text)
    assert found, "README.md has no head for GPUs"
    head = "".join(line[4:] or "\n" for line in found[1].splitlines(keepends=True))
    _, program = readme_example()
    return head + program[program.index("out = ") :]


def test_readme_example_runs(tmp_path: Path) -> None:
    ranks, program = readme_example()
    assert len(program.splitlines()) <= 20
    run_example(tmp_path / "example.py", program, ranks)


@needs_fabric
def test_readme_example_runs_between_nodes(tmp_path: Path) -> None:
    """The README's example also runs with the settings of its command for emulated nodes."""
    ranks, program = readme_example()
    found = re.search(
        r"<!-- example: nodes -->\n    (MOECOMM_\w+)=(\d+) torchrun .*--nproc-per-node (\d+) example.py\n",
        (ROOT / "README.md").read_text(),
    )
    assert found, "README.md has no marked command for several nodes"
    assert (found[1], int(found[3])) == ("MOECOMM_RANKS_PER_NODE", ranks)
    assert int(found[2]) < ranks
    said = "print(f'{comm.nodes} nodes\\n', end='', flush=True)\n"
    program = program.replace("comm.close()\n", said + "comm.close()\n")
    text = run_example(tmp_path / "example.py", program, ranks, {found[1]: found[2]})
    assert text.count(f"{ranks // int(found[2])} nodes") == ranks


def test_readme_example_on_gpus_is_the_same_program() -> None:
    program = readme_example_on_gpus()
    compile(program, "README.md", "exec")
    names = re.compile(r"^(?:\w+, )?\w+(?= = )", re.MULTILINE)
    assert names.findall(program) == names.findall(readme_example()[1])


@pytest.mark.skipif(why_no_cuda() is not None or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_readme_example_runs_on_gpus(tmp_path: Path) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")}
    run_example(tmp_path / "example.py", readme_example_on_gpus(), 2, visible)


def run_example(path: Path, program: str, ranks: int, environment: Mapping[str, str] = NO_GPUS) -> str:
    """Runs `program` from `path` on `ranks` ranks of torchrun, checks its output and returns it."""
    checks = "assert all(each.grad.abs().sum() > 0 for each in (x, experts)) and y.shape == x.shape\n"
    path.write_text(program.replace("comm.close()\n", checks + "comm.close()\n"))
    text = run_program(path, torchrun=ranks, environment=environment).out
    said = re.findall(r"rank (\d+): 64 tokens, (\d+) rows", text)
    assert sorted(int(rank) for rank, _ in said) == list(range(ranks)), text
    assert sum(int(rows) for _, rows in said) == ranks * 64 * 2
    return text


def test_memory_page_has_the_numbers_of_the_plan() -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    plan = plan_of(4, 64)
    for number in (plan.committed_bytes, plan.total_bytes):
        assert f"**{number:,}**".replace(",", " ") in page
    for name, _, _ in plan.sections:
        assert f"| {name} |" in page


def formulas(title: str) -> dict[str, tuple[int, str]]:
    """(copies, bytes of one copy as an expression) of each section in the table below a title of the memory
    page. Factors stand side by side there: "4 M K"."""
    found = {}
    for name, copies, formula, *_ in table_rows(part("memory.md", title))[1:]:
        tokens = re.findall(r"\w+|[-+*/(),]", formula)
        text = tokens[0]
        for before, token in pairwise(tokens):
            factor = before not in (*FUNCTIONS, *"(,+-*/") and token not in (*"),+-*/",)
            text += f" * {token}" if factor else token
        found[name] = (int(copies), text)
    return found


def letters(
    ranks: int, per_node: int, sizes: dict[str, Any], dtype: torch.dtype, most_put: int = 4 << 20
) -> dict[str, Any]:
    """Returns the values of the memory page's letters; `most_put` differs between CPU and CUDA."""
    tokens, top_k, row = sizes["max_tokens"], sizes["top_k"], sizes["hidden"] * dtype.itemsize
    weight = 8 if dtype == torch.float64 else 4
    put_bytes = min(max(tokens * row // 16, 512 << 10), most_put)
    put_rows = min(-(-put_bytes // row), tokens)
    return {
        "R": ranks,
        "L": per_node,
        "N": ranks // per_node,
        "M": tokens,
        "K": top_k,
        "H": sizes["hidden"],
        "b": dtype.itemsize,
        "w": weight,
        "D": put_rows,
        "F": -(-tokens // put_rows) + -(-weight * tokens * top_k // 2**20),
        **FUNCTIONS,
    }


def in_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def sizes_of(plan: moecomm.MemoryPlan) -> dict[str, list[int]]:
    """Bytes of each copy of each section."""
    taken: dict[str, list[int]] = {}
    for name, _, size in plan.sections:
        taken.setdefault(name, []).append(size)
    return taken


@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes", "dtype"),
    [
        (4, 4, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16),
        (4, 2, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16),
        (6, 3, {"hidden": 40, "top_k": 2, "max_tokens": 70000}, torch.float64),
        (7, 1, {"hidden": 2048, "top_k": 3, "max_tokens": 65}, torch.float32),
        (482, 1, {"hidden": 8, "top_k": 3, "max_tokens": 65}, torch.float32),
        (1024, 8, {"hidden": 7168, "top_k": 8, "max_tokens": 128}, torch.bfloat16),
    ],
)
def test_memory_page_has_the_formulas_of_the_plan(
    ranks: int, per_node: int, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    plan = plan_of(ranks, ranks * 4, per_node, **sizes, dtype=dtype)
    values = letters(ranks, per_node, sizes, dtype)
    values["C"] = values["D"]
    expected = formulas("Memory")
    if ranks > per_node:
        expected |= formulas("With several nodes")
    if per_node == 1:
        del expected["partial sums"]
    taken = sizes_of(plan)
    assert taken == {
        name: [in_pages(eval(text, values))] * copies for name, (copies, text) in expected.items()
    }
    input_rows = sum(taken["input rows"])
    assert plan.total_bytes - plan.committed_bytes == input_rows


def test_memory_page_has_the_example_of_two_nodes() -> None:
    plan = plan_of(4, 64, 2)
    rows = table_rows(part("memory.md", "A worked example of two nodes"))[1:]
    assert number(next(row for row in rows if "taken at once" in row[0])[2]) == plan.committed_bytes
    check_example([row for row in rows if not row[0].startswith("**")], plan)


def check_example(rows: list[list[str]], plan: moecomm.MemoryPlan) -> None:
    """(section, one copy, all copies) of a worked example against the plan, and the sums in them."""
    taken = sizes_of(plan)
    assert {name: number(all_copies) for name, _, all_copies in rows} == {
        name: sum(sizes) for name, sizes in taken.items()
    }
    for name, one_copy, all_copies in rows:
        formula, _, result = one_copy.rpartition(" = ")
        if formula:
            assert eval(re.sub(r"(?<=\d) (?=\d)", "", formula), dict(FUNCTIONS)) == number(result), name
        assert in_pages(number(result)) * len(taken[name]) == number(all_copies), name


def test_memory_page_has_the_windows_of_more_nodes() -> None:
    rows = table_rows(part("memory.md", "How it grows with the nodes"))[1:]
    assert {int(row[0]) for row in rows} >= {2, 16, 128}
    for row in rows:
        nodes, ranks, tokens = map(int, row[:3])
        plan = plan_of(ranks, ranks, ranks // nodes, max_tokens=tokens)
        relayed = sum(size for name, _, size in plan.sections if name == "relay rows")
        assert row == [
            *(f"{nodes}", f"{ranks}", f"{tokens}"),
            *(f"{plan.committed_bytes / 2**20:.1f}", f"{relayed / 2**20:.1f}"),
            f"{plan.committed_bytes * ranks / nodes / 2**30:.1f}",
        ]


def table_rows(text: str) -> list[list[str]]:
    """The cells of every line of a table."""
    lines = (line.strip() for line in text.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def part(page: str, title: str, level: int = 6) -> str:
    """Returns the text below a title, up to the next title of this level or above."""
    text = (ROOT / "docs" / page).read_text()
    end = rf"(?=^#{{1,{level}}} |\Z)"
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?){end}", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no part {title!r}"
    return found[1]


def page_text(page: str) -> str:
    """A page as one line."""
    return " ".join((ROOT / "docs" / page).read_text().split())


def number(cell: str) -> int:
    return int(cell.strip("* ").replace(" ", ""))


@needs_cuda_part
@pytest.mark.parametrize("wire", [None, "fp8"])
def test_memory_page_has_the_numbers_of_the_plan_on_cuda(wire: str | None) -> None:
    plan = plan_of(4, 256, device="cuda", wire=wire)
    *sections, total = table_rows(part("memory.md", "A worked example on CUDA"))[1:]
    assert number(total[2]) == plan.total_bytes == plan.committed_bytes
    check_example(sections, plan)


@needs_cuda_part
def test_memory_page_has_the_example_of_two_nodes_on_cuda() -> None:
    plan = plan_of(4, 256, 2, "cuda")
    *sections, total, host = table_rows(part("memory.md", "A worked example of two nodes on CUDA"))[1:]
    assert number(total[2]) == plan.total_bytes == plan.committed_bytes
    assert number(host[2]) == plan.host_bytes
    check_example(sections, plan)
    values = letters_on_cuda(4, 2, 256, EXAMPLE, torch.bfloat16, None)
    said = re.search(r"D = (\d+), F = (\d+), P = (\d+), Q = (\d+):", page_text("memory.md"))
    assert said and [int(value) for value in said.groups()] == [values[name] for name in "DFPQ"]


def letters_on_cuda(
    ranks: int, per_node: int, experts: int, sizes: dict[str, Any], dtype: torch.dtype, wire: str | None
) -> dict[str, Any]:
    """Returns the values of the page's letters on CUDA."""
    values = letters(ranks, per_node, sizes, dtype, most_put=1 << 20)
    tokens, top_k, row = sizes["max_tokens"], sizes["top_k"], sizes["hidden"] * dtype.itemsize
    others, owners, pieces = ranks // per_node - 1, min(per_node, top_k), lambda size: -(-size // 2**20)
    # Tokens of a chunk, by the tokens of a call; the most chunks that one of up to `tokens` makes.
    ends = [(min(bound, tokens), size) for bound, size in ((1024, 1), (4096, 2), (16384, 4))]
    chunks = max(-(-end // size) for end, size in [*ends, (tokens, 8 if tokens > 16384 else 4)])
    counts = -(-4 * (experts + ranks) // 16) * 16
    packed = sizes["hidden"] + 4 * -(-sizes["hidden"] // 128)
    in_lines = -(-packed // 128) * 128
    fp8_row = in_lines if in_lines <= row else -(-packed // 16) * 16
    # Bytes of a token's rows of all sources that are staged and have room, which come as they are or in fp8.
    staged = [(ranks - 1, row), (0, 0) if wire is None else (ranks, fp8_row)]
    room_for_all = max(sources * size * (sources <= 8 and others == 0) for sources, size in staged)
    values |= {
        "E": experts,
        "C": chunks,
        "c": counts,
        "r": row if wire is None else fp8_row,
        "s": room_for_all,
    }
    if others > 0:
        room = tokens * min(per_node + others, top_k) // (others * owners)
        commands = 1 + pieces(counts + 8 * tokens * top_k) + pieces(4 * tokens) + -(-tokens // values["D"])
        commands += 2 * pieces(values["w"] * tokens * top_k)
        values["P"] = tokens if room >= tokens else min(max(room // 8 * 8, 64), tokens)
        values["Q"] = max(4096, 1 << (4 * others * commands - 1).bit_length())
    return values


@needs_cuda_part
@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes", "dtype", "wire"),
    [
        (4, 4, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16, None),
        (4, 4, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16, "fp8"),
        (72, 72, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16, "fp8"),
        (4, 4, {"hidden": 7168, "top_k": 2, "max_tokens": 4096}, torch.bfloat16, None),
        (9, 9, {"hidden": 7168, "top_k": 1, "max_tokens": 4096}, torch.bfloat16, "fp8"),
        (4, 2, {"hidden": 7168, "top_k": 8, "max_tokens": 4096}, torch.bfloat16, "fp8"),
        (6, 3, {"hidden": 40, "top_k": 2, "max_tokens": 70000}, torch.float32, None),
        (7, 1, {"hidden": 2048, "top_k": 3, "max_tokens": 65}, torch.float32, None),
        (482, 1, {"hidden": 16, "top_k": 3, "max_tokens": 10000}, torch.bfloat16, "fp8"),
        (1024, 8, {"hidden": 7168, "top_k": 8, "max_tokens": 128}, torch.bfloat16, None),
        (1000, 4, {"hidden": 7168, "top_k": 8, "max_tokens": 16384}, torch.bfloat16, None),
    ],
)
def test_memory_page_has_the_formulas_of_the_plan_on_cuda(
    ranks: int, per_node: int, sizes: dict[str, Any], dtype: torch.dtype, wire: str | None
) -> None:
    """The window section by section; of the host memory all of it, since the plan tells no more."""
    experts = ranks * 4
    plan = plan_of(ranks, experts, per_node, "cuda", **sizes, dtype=dtype, wire=wire)
    values = letters_on_cuda(ranks, per_node, experts, sizes, dtype, wire)

    def sections(title: str) -> dict[str, list[int]]:
        return {
            name: [in_pages(eval(text, values))] * copies for name, (copies, text) in formulas(title).items()
        }

    expected, host = sections("On CUDA"), 0
    if ranks > per_node:
        expected |= sections("CUDA windows with several nodes")
        host = sum(map(sum, sections("Pinned host memory").values()))
    assert sizes_of(plan) == expected
    assert plan.host_bytes == host


@needs_cuda_part
def test_memory_page_has_the_windows_of_more_nodes_on_cuda() -> None:
    rows = table_rows(part("memory.md", "How both grow with the nodes"))[1:]
    assert {int(row[0]) for row in rows} >= {1, 2, 16, 128}
    for row in rows:
        nodes, ranks, tokens = map(int, row[:3])
        plan = plan_of(ranks, max(256, ranks), ranks // nodes, "cuda", max_tokens=tokens)
        partial = sum(sizes_of(plan).get("partial sums", []))
        in_mib = [f"{size / 2**20:.1f}" for size in (plan.total_bytes, partial, plan.host_bytes)]
        assert row[3:] == [*in_mib, f"{plan.host_bytes * ranks / nodes / 2**30:.1f}"]


def test_formats_page_has_the_values_of_the_reference() -> None:
    rows = table_rows(part("data_formats.md", "Example"))[1:]
    x, _, data, bits, back = zip(*rows, strict=True)
    values = np.array([[float(cell) for cell in x]])
    quantised, scales = reference.quantised(values)
    assert scales.tolist() == [[2.0**-6]]
    np.testing.assert_array_equal(quantised[0], [float(cell) for cell in data])
    stored = torch.from_numpy(quantised[0]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert stored.tolist() == [int(cell, 16) for cell in bits]
    arrived = reference.through_wire(values, "float32")[0]
    np.testing.assert_array_equal(arrived, [float(cell) for cell in back])
    assert (abs(arrived - values[0]) <= reference.wire_error_bound(values, "float32")[0]).all()


def test_routing_page_has_the_rows_of_a_dispatch() -> None:
    """The worked example on one rank that has all experts: the rows of the page's two ranks, joined."""
    page = (ROOT / "docs" / "routing.md").read_text()
    rows = [re.search(rf"\| rank {rank} \|((?: [a-e-] \|)+)", page) for rank in range(2)]
    shown = [cell for row in rows if row for cell in re.findall(r"[a-e-]", row[1])]
    tokens = re.findall(r"\| ([a-e]) \| rank \d, token \d \| (\d), (\d) \|", page)
    ids_TK = torch.tensor([[int(first), int(second)] for _, first, second in tokens])
    x_TH = torch.arange(1.0, len(tokens) + 1).unsqueeze(1).expand(-1, 4).contiguous()
    with moecomm.Communicator(
        num_experts=4, hidden=4, top_k=2, max_tokens=8, dtype=torch.float32, device="cpu"
    ) as comm:
        out = comm.dispatch(x_TH, ids_TK, alignment=4)
    assert ["-abcde"[int(value)] for value in out.tokens[:, 0]] == shown


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a page: each line as its cells by the titles of their columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        titles, *rows = table_rows(block)
        found.append([dict(zip(titles, row, strict=True)) for row in rows])
    return found


def test_readme_speed_table_is_from_the_results_page() -> None:
    """The README may leave columns out; what it shows of a run stands in one line of one table."""
    mark = "results on GPUs"
    found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, f"README.md has no table marked {mark!r}"
    (shown,) = tables(found[1])
    measured = [row for table in tables(part("results.md", "GPUs", level=2)) for row in table]
    assert {"cuda-dispatch", "cuda-combine"} <= {row["run"] for row in shown}
    for row in shown:
        assert {"run", "us", "of ceiling"} <= row.keys()
        assert any(row.items() <= line.items() for line in measured), f"docs/results.md has no line {row}"


def test_records_are_few_and_each_stands_on_a_page() -> None:
    """The results page shows what lies in results/ (tests/unit/test_bench_results.py); others are linked."""
    records = list((ROOT / "docs" / "results").rglob("*"))
    assert sum(path.suffix == ".json" for path in records) <= 120
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    }
    for path in records:
        on_results_page = path.suffix == ".json" and path.parent.name == "results"
        assert path.is_dir() or on_results_page or path in linked, f"no page shows {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_of_files_lead_somewhere(page: Path) -> None:
    """Links to files and to titles, and paths of this repository in backticks, but for what runs make."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md|)#([^)]+)\)", text):
        titles = anchors(page.parent / target if target else page)
        assert anchor in titles, f"{page.name} links to {target}#{anchor}, and no title there is called so"
    for target in re.findall(r"`((?:moecomm|csrc|bench|tests|examples|docs)/[\w./-]*)`", text):
        assert (ROOT / target).exists(), f"{page.name} names {target}, which is not there"


def anchors(page: Path) -> set[str]:
    """Names that the titles of a page have in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_architecture_names_functions_that_are_in_these_files() -> None:
    """ "`Class.method` in `file`", also with several names: each is called or defined there."""
    page = page_text("architecture.md")
    found = re.findall(r"((?:`[\w.:]+`(?:, | and ))*`[\w.:]+`) in `((?:moecomm|csrc)/[\w./]+)`", page)
    assert len(found) >= 10
    for names, file in found:
        for name in re.findall(r"`([\w.:]+)`", names):
            last = re.split(r"::|\.", name)[-1]
            assert re.search(rf"(class |\b){last}\(", (ROOT / file).read_text()), f"{file} has no {name}"


def test_every_environment_variable_is_documented() -> None:
    named = set(re.findall(r"MOECOMM_[A-Z_]+", (ROOT / "moecomm" / "env.py").read_text()))
    page = (ROOT / "docs" / "architecture.md").read_text()
    documented = set(re.findall(r"^\| `(MOECOMM_[A-Z_]+)`", page, re.MULTILINE))
    assert named and named == documented


def shown_commands() -> list[tuple[str, str]]:
    """(arguments, output) of each command that the page on folding shows."""
    page = (ROOT / "docs" / "folding.md").read_text()
    found = re.findall(
        r"^    \$ python docs/draw_folding\.py (.*)\n((?:    .*\n|\n(?=    ))*)", page, re.MULTILINE
    )
    return [(arguments, textwrap.dedent(output)) for arguments, output in found]


@pytest.mark.parametrize(("arguments", "output"), shown_commands())
def test_folding_page_shows_what_its_commands_print(
    capsys: pytest.CaptureFixture[str], arguments: str, output: str
) -> None:
    assert folding_program(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == output


def test_folding_page_says_what_python_answers() -> None:
    assert len(shown_commands()) == 2
    page = ROOT / "docs" / "folding.md"
    failed, tried = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert (failed, tried) == (0, 7)


def test_folding_page_has_the_published_mappings() -> None:
    rows = table_rows(part("folding.md", "Published mappings"))[1:]
    for world, tp, cp, dp, pp, etp, ep, edp in ([int(cell) for cell in row[1:9]] for row in rows):
        folding = ParallelFolding(world_size=world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
        assert (folding.dp, folding.edp) == (dp, edp)
