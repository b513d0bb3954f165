"""Environment variables."""

import dataclasses
import re
from datetime import timedelta

import pytest

import moecomm
from moecomm import InvalidArgument
from moecomm.env import Env, read_env


def test_nothing_is_said() -> None:
    assert read_env({}) == Env()
    assert set(dataclasses.asdict(Env()).values()) == {None}
    empty = [f"MOECOMM_{field.name.upper()}" for field in dataclasses.fields(Env)]
    assert read_env({"PATH": "/bin", **dict.fromkeys(empty, "")}) == Env()


def test_values() -> None:
    environ = {"MOECOMM_TIMEOUT": "2.5", "MOECOMM_THREADS": "3", "MOECOMM_RANKS_PER_NODE": "8"}
    assert read_env(environ) == Env(timeout=2.5, threads=3, ranks_per_node=8)
    environ = {"MOECOMM_FABRIC_PROVIDER": "tcp;ofi_rxm", "MOECOMM_FABRIC_INTERFACE": "eth0"}
    assert read_env(environ) == Env(fabric_provider="tcp;ofi_rxm", fabric_interface="eth0")
    assert read_env({"MOECOMM_FABRIC_LANES": "4"}) == Env(fabric_lanes=4)
    assert read_env({"MOECOMM_FIRST_EPOCH": str(2**62)}) == Env(first_epoch=2**62)
    assert read_env({"MOECOMM_FUSED_TOKENS": "0"}) == Env(fused_tokens=0)
    assert read_env({"MOECOMM_WHOLE_SOURCES": "0"}) == Env(whole_sources=0)
    assert read_env({"MOECOMM_LOG": "launch"}) == Env(log="launch")


REFUSED = {
    "TIMEOUT": ("soon", "0", "-1", "nan", "inf", "1e10"),
    "THREADS": ("1.5", "0", "4097"),
    "RANKS_PER_NODE": ("two", "1.5", "-4", str(2**31)),
    "FABRIC_LANES": ("many", "0", "65"),
    "FIRST_EPOCH": ("0", str(2**62 + 1)),
    "FUSED_TOKENS": ("-1", str(2**63)),
    "WHOLE_SOURCES": ("-1",),
    "LOG": ("all",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    for value in REFUSED[name]:
        with pytest.raises(InvalidArgument) as caught:
            read_env({f"MOECOMM_{name}": value})
        assert f"MOECOMM_{name} is {value!r}" in str(caught.value)
        assert ("an integer" in str(caught.value)) == (name not in ("TIMEOUT", "LOG"))
        most = re.search(r" to (\d+)$", str(caught.value))  # the bound in all its digits is taken
        assert name == "LOG" or (most and read_env({f"MOECOMM_{name}": most[1]}))


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_TIMEOUT", "7.5")

    def timeout(**arguments: object) -> float:
        with moecomm.Communicator(
            num_experts=1, hidden=8, top_k=1, max_tokens=1, device="cpu", **arguments
        ) as comm:
            return comm.timeout

    assert timeout() == 7.5
    assert timeout(timeout=3) == 3.0
    assert timeout(timeout=timedelta(minutes=2)) == 120.0
    for bound in (1e-3, 1e9):  # the bounds are those of the variable
        assert timeout(timeout=bound) == read_env({"MOECOMM_TIMEOUT": str(bound)}).timeout == bound
    for beyond in (0.9e-3, 1.1e9, timedelta(0), float("nan")):
        with pytest.raises(InvalidArgument, match=r"timeout is .*, expected 0\.001 to 1e9 seconds"):
            timeout(timeout=beyond)
    monkeypatch.delenv("MOECOMM_TIMEOUT")
    assert timeout() == 60.0
