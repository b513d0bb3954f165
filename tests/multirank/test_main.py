"""`python -m moecomm`: the report alone, and tried out between the ranks of torchrun."""

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import moecomm
from moecomm.__main__ import main
from tests.fabric import needs_fabric
from tests.multirank.conftest import Pools
from tests.programs import run_program

REPORT = ("-m", "moecomm")


def _report(rank: int, world_size: int, ranks: int, environment: dict[str, str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), mock.patch.dict(os.environ, environment):
        assert main(["-g", str(ranks)]) == 0
    return said.getvalue()


def test_the_report_names_versions_host_gpus_network_and_transports(pool: Pools) -> None:
    (said,) = pool(1)(_report, 3, {})
    lines = [line.split(maxsplit=1) for line in said.splitlines()]
    assert ["moecomm", moecomm.__version__] in lines
    for title in ("versions", "host", "GPUs", "network", "transports"):
        assert any(words[0] == title for words in lines), said
    assert any(words[0] == "cuda-bindings" for words in lines), said
    assert "transports of 3 ranks on this host" in said
    assert "rank 0 (itself)" in said
    for peer in (1, 2):
        assert any(line.split()[:2] == ["rank", str(peer)] for line in said.splitlines())
    assert said.count("shared memory (POSIX, /dev/shm)") == 2


def test_a_reader_that_has_enough_ends_it_without_a_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, *REPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as report:
        assert report.stdout is not None and report.stderr is not None
        report.stdout.close()
        assert report.stderr.read() == ""
        assert report.wait(120) == 0


def test_ranks_of_torchrun_try_their_transport() -> None:
    done = run_program(*REPORT, torchrun=2)
    assert "transports of 2 ranks (tried: works)" in done.out
    assert done.out.count("versions\n") == 1


def _facts(pool: Pools, ranks: int, **environment: str) -> dict[str, str]:
    """Returns the facts of the report by name; the names are padded to 18 columns."""
    (said,) = pool(1)(_report, ranks, environment)
    lines = [line for line in said.splitlines() if line.startswith("  ")]
    return {line[2:20].strip(): line[21:] for line in lines}


@needs_fabric
def test_nodes_emulated_on_a_host_are_told_apart(pool: Pools) -> None:
    facts = _facts(pool, 4, MOECOMM_RANKS_PER_NODE="2", MOECOMM_FABRIC_PROVIDER="shm")
    assert facts["between nodes"].startswith("shm on ")
    assert "as MOECOMM_FABRIC_PROVIDER=shm asks" in facts["between nodes"]
    assert facts["rank 1"].startswith("shared memory (POSIX, /dev/shm)")
    network = facts["between nodes"].partition(",")[0]
    assert facts["rank 2"].startswith(f"node 1: {network}, CPU tensors")
    assert facts["rank 3"].startswith(f"node 1: {network} by way of rank 2, CPU tensors")


@needs_fabric
def test_a_provider_that_is_not_there_is_said_and_not_raised(pool: Pools) -> None:
    facts = _facts(pool, 2, MOECOMM_RANKS_PER_NODE="1", MOECOMM_FABRIC_PROVIDER="no-such")
    assert facts["between nodes"].startswith("nothing: fabric provider 'no-such' cannot be used here")
    assert facts["rank 1"].startswith("node 1: none: fabric provider 'no-such' cannot be used here")
    assert "shm" in facts["fabric providers"]


def test_ranks_that_do_not_fill_their_nodes_are_said_and_not_raised(pool: Pools) -> None:
    facts = _facts(pool, 4, MOECOMM_RANKS_PER_NODE="3")
    assert facts["none"].startswith("ranks_per_node is 3 for 4 ranks")


@needs_fabric
def test_ranks_of_torchrun_try_the_network() -> None:
    network = {"MOECOMM_RANKS_PER_NODE": "1", "MOECOMM_FABRIC_PROVIDER": "tcp"}
    done = run_program(*REPORT, torchrun=2, environment=network)
    assert "transports of 2 ranks on 2 nodes (tried: works)" in done.out
    assert "  rank 1             node 1: " in done.out


def test_an_error_between_nodes_is_a_line_a_rank() -> None:
    """A provider that is nowhere, and with no libfabric at all its absence, is what each rank says."""
    network = {"MOECOMM_RANKS_PER_NODE": "1", "MOECOMM_FABRIC_PROVIDER": "no-such"}
    done = run_program(*REPORT, torchrun=2, environment=network, code=1)
    assert "tried: works" not in done.out
    said = [line for line in done.err.splitlines() if line.startswith(("rank 0: ", "rank 1: "))]
    assert len(said) == 2 and all("no-such" in line or "libfabric" in line for line in said), done.err
    assert "moecomm/__main__.py" not in done.err, "the errors came with stack traces"


def test_a_bad_number_of_ranks_is_one_line() -> None:
    done = run_program(*REPORT, "-g", "0", code=2)
    assert "--ranks is 0, expected at least 1" in done.err
