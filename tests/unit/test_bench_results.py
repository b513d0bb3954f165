"""The benchmark's tables and its page, without ranks: from rows and records that are made up."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from bench.harness import machine, node_results, options, report, results, scaling
from bench.harness.machine import Gpus
from bench.harness.record import Missing, Row, document

pytestmark = pytest.mark.usefixtures("bench_on_cpu")


def _row(path: str, seconds: float, wrong: int | None = 0) -> Row:
    return Row(
        path=path,
        dtype="float32",
        tokens=64,
        size_bytes=4096,
        useful_bytes=16384,
        remote_bytes=4096,
        time_s=seconds,
        min_s=seconds / 2,
        algbw_GBps=1.5,
        busbw_GBps=None if path == "memcpy" else 0.5,
        wrong=wrong,
        note="",
        samples_s=(seconds,),
    )


def test_the_comparison_shows_ratio_and_share_of_the_ceiling() -> None:
    rows = [_row("moecomm", 100e-6), _row("memcpy", 60e-6), _row("gloo", 450e-6)]
    last = report.comparison(rows).splitlines()[-1].split()
    assert last == ["64", "float32", "100.0", "450.0", "4.50x", "60.0", "60%"]
    assert report.comparison(rows[:1]) == ""


def test_a_baseline_that_did_not_run_is_a_line_with_its_reason() -> None:
    absent = Missing(
        path="gloo", dtype="float32", tokens=64, experts=8, topk=2, num_sms=None, reason="OSError: no"
    )
    given = options.parse("dispatch", ["--device", "cpu"])
    assert report.table_row(absent, given) == "# 64 float32 gloo: n/a: OSError: no"
    rows = [_row("moecomm", 1e-4), dataclasses.replace(_row("moecomm", 2e-4), tokens=128), _row("gloo", 3e-4)]
    assert report.comparison(rows).splitlines()[-1].split() == ["128", "float32", "200.0", "n/a", "-"]


def test_gpu_rows_say_their_sms_and_host_time() -> None:
    given = options.parse("dispatch", ["--device", "cuda", "-g", "2"])
    row = dataclasses.replace(_row("moecomm", 1e-4), sms=24, host_s=15e-6)
    assert report.table_row(row, given).split()[-3:] == ["24", "15.0", "0"]
    assert report.table_row(_row("nccl", 1e-4), given).split()[-3:] == ["-", "-", "0"]


def test_the_comparison_of_variants_names_them() -> None:
    rows = [
        dataclasses.replace(_row(path, seconds), experts=32, topk=4, num_sms=sms)
        for sms in (8, None)
        for path, seconds in (("moecomm", 2e-4), ("memcpy", 9e-5), ("sm-push", 1e-4))
    ]
    lines = [line.split() for line in report.comparison(rows).splitlines()[-2:]]
    assert [line[:4] for line in lines] == [["32", "4", "-", "8"], ["32", "4", "-", "auto"]]
    assert lines[0][-2:] == ["100.0", "50%"]  # sm-push is the ceiling where it ran


def test_the_footer_gives_the_verdict() -> None:
    assert "0 OK" in report.footer([_row("moecomm", 1e-3)])
    assert "3 FAILED" in report.footer([_row("moecomm", 1e-3), _row("gloo", 1e-3, wrong=3)])
    assert "not checked" in report.footer([_row("moecomm", 1e-3, wrong=None)])


def test_the_results_page_shows_every_run_with_its_command() -> None:
    given = options.parse("dispatch", ["--device", "cpu", "--baselines"])
    record = document(given, [_row("moecomm", 1e-3), _row("memcpy", 8e-4), _row("gloo", 4e-3)], {})
    lines = results.cpu_lines({"some-run": record})
    assert lines == [["some-run", "64", "float32", "1.00", "1.50", "4.00x", "-", "0.80", "80%", "0"]]
    table = results.summary({"some-run": record}).splitlines()
    assert len({len(line) for line in table}) == 1
    assert len({line.count("|") for line in table}) == 1
    part = results.cpu_part({"some-run": record}, "python bench/run_all.py --write")
    assert "python bench/dispatch_perf.py --device cpu --baselines" in part
    assert results.summary({"some-run": record}) in part


GPUS = Gpus(("A GPU",) * 2, 1 << 34, 132, 50 << 20, "580.1", "NV18")


def _gpu_record(
    monkeypatch: pytest.MonkeyPatch, flags: str, rows: list[Row], missing: tuple[Missing, ...] = ()
) -> dict[str, object]:
    monkeypatch.setattr(machine, "describe_gpus", lambda: GPUS)
    monkeypatch.setattr(machine, "versions", lambda device: {"python": "3", "torch": "2", "nccl": "2.28"})
    given = options.parse("dispatch", ["--device", "cuda", "-g", "2", *flags.split()])
    return document(given, rows, {}, missing)


def test_the_gpu_part_shows_shares_of_the_ceiling_and_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = dataclasses.replace(_row("moecomm", 500e-6), sms=24, host_s=12e-6, experts=256, topk=8)
    push = dataclasses.replace(_row("sm-push", 450e-6), sms=64, experts=256, topk=8, note="best of 9, 64 SMs")
    nccl = dataclasses.replace(_row("nccl", 2000e-6), experts=256, topk=8)
    copy = dataclasses.replace(_row("memcpy", 100e-6), experts=256, topk=8)
    absent = Missing(
        path="torch-symm", dtype="float32", tokens=64, experts=256, topk=8, num_sms=None, reason="no NVSHMEM"
    )
    record = _gpu_record(monkeypatch, "--capacity auto --graph", [own, push, nccl, copy], (absent,))
    records = {"cuda-dispatch": record}
    (line,) = results.gpu_lines(records)
    assert line[:4] == ["cuda-dispatch", "64", "float32, top-8 of 256, graph", "500.0"]
    assert line[4:] == ["0.5", "90.0%", "0.5", "24", "12.0", "4.00x", "-", "-", "0"]
    paths = {line[1]: line for line in results.path_lines(records)}
    assert paths["sm-push"][-1] == "64 SMs, best of 9, 64 SMs"
    assert paths["memcpy"][-2:] == ["3.0", "on one GPU, read + written"]
    part = results.gpu_part(records, "python bench/run_all.py", {})
    assert "- cuda-dispatch: torch-symm n/a: no NVSHMEM" in part
    assert "2 x A GPU (132 SMs, 16 GiB), links NV18, driver 580.1" in part


def test_a_sweep_gets_a_table_of_its_own_and_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        dataclasses.replace(_row(path, 1e-4), tokens=tokens)
        for tokens in (1, 2, 4, 8)
        for path in ("moecomm", "sm-push")
    ]
    record = _gpu_record(monkeypatch, "-b 1 -e 8", rows)
    assert results.pictured(record)
    assert not results.pictured(_gpu_record(monkeypatch, "", rows[:2]))
    part = results.gpu_part({"sweep": record}, "x", {"sweep": "sweep.svg"})
    assert "### sweep" in part and "![sweep](results/sweep.svg)" in part


# -- the model of how time grows ---------------------------------


def _growth(gpus: int, experts: int, fixed_us: float, rate: float) -> dict[str, Any]:
    """A record in which the model holds, but that 3 GPUs take a tenth longer."""
    rows = []
    for tokens in (8, 4096):
        sent = scaling.needing(gpus, experts, 8) * tokens * 14336
        slower = 1.1 if gpus == 3 else 1.0
        for path, seconds in (
            ("moecomm", slower * (fixed_us * 1e-6 + sent / rate)),
            ("sm-push", sent / rate),
        ):
            row = dataclasses.asdict(_row(path, seconds))
            row |= {"tokens": tokens, "size_bytes": tokens * 14336, "remote_bytes": round(gpus * sent)}
            rows.append(row | {"experts": experts, "topk": 8, "dtype": "bfloat16"})
    return {"ranks": gpus, "rows": rows}


def test_the_other_ranks_that_need_a_token() -> None:
    assert scaling.needing(2, 2, 1) == 0.5
    assert scaling.needing(4, 4, 4) == 3.0
    # 2 experts of 4: of the 6 pairs one is wholly on this rank, so 5 of 6 tokens go to the other.
    assert scaling.needing(2, 4, 2) == pytest.approx(5 / 6)
    assert scaling.needing(4, 256, 8) == pytest.approx(3 * (1 - math.comb(192, 8) / math.comb(256, 8)))


def test_the_model_is_fitted_to_the_most_gpus_and_held_against_fewer() -> None:
    records = {
        f"cuda-dispatch-on-{gpus}": _growth(gpus, experts, 50.0, 347e9)
        for gpus, experts in ((4, 256), (2, 256), (3, 255))
    }
    model = scaling.fit(records["cuda-dispatch-on-4"])
    assert model.fixed_s == pytest.approx(50e-6, rel=1e-3) and model.rate == pytest.approx(347e9, rel=1e-3)
    lines = scaling.lines(records)
    assert [line[:4] for line in lines] == [
        ["dispatch", str(gpus), str(tokens), str(experts)]
        for gpus, experts in ((2, 256), (3, 255), (4, 256))
        for tokens in (8, 4096)
    ]
    assert all(len(line) == len(scaling.TITLES) for line in lines)
    assert [line[-1] for line in lines] == ["1.00", "1.00", "1.10", "1.10", "1.00", "1.00"]
    # As in docs/memory.md: 2.71 other ranks, 159 MB, 509 us.
    assert lines[-1][4:8] == ["2.71", "159.17", "508.7", "508.7"]
    assert scaling.constants(records) == ["dispatch: 50.0 us and 347.0 GB/s, from 4 GPUs"]


def test_without_a_ceiling_there_is_no_model() -> None:
    record = _growth(2, 256, 50.0, 347e9)
    record["rows"] = [row for row in record["rows"] if row["path"] == "moecomm"]
    assert scaling.lines({"cuda-combine-on-2": record}) == []
    assert scaling.lines({"cuda-dispatch-fp8-on": record}) == []


def test_runs_on_fewer_gpus_say_so_and_are_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "-g 3 -b 8 -e 4096 -f 512 --experts 255 --topk 8 --capacity auto"
    record = _gpu_record(monkeypatch, flags, []) | {"rows": _growth(3, 255, 50.0, 347e9)["rows"]}
    monkeypatch.setattr(machine, "describe_gpus", lambda: dataclasses.replace(GPUS, names=("A GPU",) * 4))
    for each in record["rows"]:
        each |= {"num_sms": None, "sms": None, "host_s": None, "zipf": None}
    records = {"cuda-dispatch-on-3": record}
    assert results.gpu_lines(records)[0][2] == "bfloat16, top-8 of 255, fixed, 3 GPUs"
    part = results.gpu_part(records, "x", {})
    assert "### Several numbers of GPUs" in part and "### cuda-dispatch-on-3" not in part
    assert results.table(scaling.TITLES, scaling.lines(records)) in part
    assert "- dispatch: 55.1 us and 347.0 GB/s, from 3 GPUs" in part


# -- between nodes -----------------------------------------------

RAW = {
    "provider": "net", "version": "1.17", "bytes": 65536, "in_flight": 32, "gb_per_s": 1.5,
    "gb_per_s_min": 1.25, "gb_per_s_max": 1.75, "messages_per_s": 22888,
}  # fmt: skip
RATE = {
    "kind": "rows", "producers": 2, "commands_a_put": 64, "commands_per_s": 6.4e6, "commands_per_s_min": 5e6,
    "commands_per_s_max": 7e6, "puts_per_s": 1e5,
}  # fmt: skip


def _node_record(flags: str, own_s: float, sent: int, missing: tuple[Missing, ...] = ()) -> dict[str, Any]:
    given = options.parse("dispatch", ["-g", "2", "--ranks-per-node", "1", *flags.split()])
    own = dataclasses.replace(
        _row("moecomm", own_s), experts=32, topk=4, sent_bytes=sent + 100, sent_row_bytes=sent, sent_puts=6,
        least_bytes=sent, least_puts=4, wire_GBps=sent / 2 / own_s / 1e9,
    )  # fmt: skip
    others = [
        dataclasses.replace(_row(path, seconds, None if "fabric" in path else 0), experts=32, topk=4)
        for path, seconds in (
            ("fabric", 1e-3),
            ("fabric-cold", 1.25e-3),
            ("gloo", 12e-3),
            ("gloo-rows", 3e-3),
        )
    ]
    return document(given, [own, *others], {}, missing)


def _native_record(name: str, line: dict[str, Any]) -> dict[str, Any]:
    whole = document(options.parse("dispatch", []), [], {})
    kept = {key: whole[key] for key in ("time", "git", "hardware", "versions")}
    return kept | {"program": name, "command": f"{name} --both", "lines": [line]}


def test_runs_between_nodes_are_shown_beside_the_ceiling_and_what_had_to_be_sent() -> None:
    (line,) = node_results.lines({"nodes-dispatch-2x1-tcp": _node_record("", 2e-3, 2_000_000)}, "cpu")
    assert len(line) == len(node_results.titles("cpu"))
    shown = dict(zip(node_results.titles("cpu"), line, strict=True))
    assert shown["case"] == "4096, float32, top-4 of 32"
    # A million bytes a rank: in 2 ms, and in the 1 ms that the provider would take.
    assert (shown["ms"], shown["wire GB/s"], shown["fabric GB/s"], shown["of ceiling"]) == (
        "2.00", "0.50", "1.00", "50%",
    )  # fmt: skip
    assert (shown["cold GB/s"], shown["of cold"]) == ("0.80", "62%")
    assert (shown["one GB/s"], shown["of one"], shown["lanes"]) == ("-", "-", "1")
    assert (shown["memcpy ms"], shown["sent / least"], shown["puts / least"]) == ("-", "1.000", "1.50")
    assert (shown["than gloo"], shown["than gloo-tuned"], shown["than gloo-rows"]) == ("6.00x", "-", "1.50x")


def test_what_a_limit_on_nodes_saves_is_shown_beside_the_run_without() -> None:
    records = {
        "nodes-dispatch-2x1-tcp": _node_record("", 2e-3, 2_000_000),
        "nodes-dispatch-2x1-tcp-limit": _node_record("--limit-nodes 1", 1e-3, 999_925),
        "nodes-combine-2x1-tcp-limit": _node_record("--limit-nodes 1", 1e-3, 500_000),  # its pair did not run
    }
    (line,) = node_results.limit_lines(records)
    assert line == [
        "nodes-dispatch-2x1-tcp-limit", "1 of 2",
        "1.00", "2.00", "50%", "6", "6", "0%", "1.00", "2.00", "2.00x",
    ]  # fmt: skip
    assert node_results.lines(records, "cpu")[1][2].endswith("at most 1 of 2 nodes")


def test_the_part_between_nodes_keeps_machines_apart() -> None:
    absent = Missing(
        path="gloo-tuned", dtype="float32", tokens=64, experts=32, topk=4, num_sms=None, reason="OSError: no"
    )
    records = {
        "nodes-dispatch-2x1-tcp": _node_record("", 2e-3, 2_000_000, (absent,)),
        "nodes-raw-tcp": _native_record("fabric_raw", RAW),
        "nodes-proxy": _native_record("proxy_rate", RATE),
    }
    alone = node_results.part(records, "python bench/run_all.py --nodes --write")
    assert "## Between nodes" in alone and "### Machine" not in alone
    assert "net (libfabric 1.17)" in alone and "1.500" in alone and "22888" in alone
    proxy = results.table(node_results._PROXY_TITLES, node_results.proxy_lines(records))
    assert "a row each" in proxy and "6.40" in proxy and proxy in alone
    assert "fabric_raw --both" in alone and "--ranks-per-node 1" not in records["nodes-proxy"]["command"]
    assert "- nodes-dispatch-2x1-tcp: gloo-tuned n/a: OSError: no" in alone
    other = _native_record("proxy_rate", RATE | {"commands_per_s": 12.34e6})
    both = node_results.part(records | {"nodes-proxy.big": other}, "x")
    first, second = both.split("### Machine 2")
    assert "### Machine 1" in first and "6.40" in first and "12.34" not in first
    assert "12.34" in second and "nodes-dispatch" not in second
    page = results.renewed(results.renewed("", "cpu", "of the CPU"), "nodes", alone)
    assert page.index("## Between nodes") < page.index("of the CPU")


def test_the_parts_of_the_page_are_renewed_one_by_one() -> None:
    page = results.renewed("", "cpu", "of the CPU\n")
    both = results.renewed(page, "cuda", "of GPUs\n")
    assert both.index("of GPUs") < both.index("of the CPU")
    again = results.renewed(both, "cpu", "new\n")
    assert "of GPUs" in again and "new" in again and "of the CPU" not in again
