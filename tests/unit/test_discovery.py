"""The report of `python -m moecomm` on GPUs and the network, with stand-ins for torch's view of GPUs, for the
driver and for libfabric."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _C
from moecomm.device import cuda_driver
from moecomm.env import Env
from moecomm.errors import Unsupported
from moecomm.setup import discovery
from tests.fake_cuda import FakeDriver, Result


def _give(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    info = SimpleNamespace(name="Fake GPU", total_memory=8 << 30, multi_processor_count=4, major=9, minor=0)
    load = cuda_driver.load
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: info)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: True)
    monkeypatch.setattr(cuda_driver, "load", lambda: load(fake))
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: None)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ({}, "memory as file descriptors (ranks of this host)"),
        ({"posix_fd": False}, "memory as nothing that other processes can map"),
    ],
)
def test_handle_types(monkeypatch: pytest.MonkeyPatch, offers: dict[str, Any], expected: str) -> None:
    _give(monkeypatch, FakeDriver(gpus=[0, 1], **offers))
    facts = dict(discovery.gpus())
    assert facts["GPU 0 shares"].startswith(expected)
    assert facts["GPU 1 shares"].startswith(expected)


def test_a_driver_that_fails_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("cuInit", "cuDeviceGetCount", "cuDeviceGetUuid"):
        _give(monkeypatch, FakeDriver(failing={call: (1, Result.CUDA_ERROR_NOT_INITIALIZED)}))
        assert "GPU 0" in dict(discovery.gpus())
        monkeypatch.undo()


def test_a_host_without_dev_shm_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise Unsupported("statvfs /dev/shm: No such file or directory")

    monkeypatch.setattr(_C, "shm_available_bytes", missing)
    assert dict(discovery.processors())["/dev/shm"] == "none: statvfs /dev/shm: No such file or directory"


def _cuda_lines(ranks: int) -> list[str]:
    return [fact for _, fact in discovery.transports(ranks) if fact.endswith(", CUDA tensors")]


def test_transports_of_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, FakeDriver())
    reached = "NVLink/PCIe peer access: CUDA symmetric memory, CUDA tensors"
    assert _cuda_lines(3) == [reached, "the same GPU: CUDA symmetric memory, CUDA tensors"]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: False)
    assert _cuda_lines(2) == ["none: GPU 0 and GPU 1 have no peer access to each other, CUDA tensors"]
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: "some package is missing")
    assert _cuda_lines(2) == ["none: some package is missing, CUDA tensors"]


def test_cuda_bindings_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert cuda_driver.bindings_version() is None
    assert "pip install cuda-bindings" in dict(discovery.versions())["cuda-bindings"]


def test_what_is_left_out_says_what_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "fabric_missing", lambda: "no headers: apt-get install libfabric-dev")
    monkeypatch.setattr(_C, "cuda_version", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    nodes, gpus = discovery.left_out()
    assert nodes == "links between nodes: left out, no headers: apt-get install libfabric-dev"
    assert gpus.startswith("GPUs: left out, ") and "CMAKE_ARGS=-DMOECOMM_CUDA=ON" in gpus
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, gpus = discovery.left_out()
    assert "put nvcc on PATH" in gpus
    monkeypatch.setattr(_C, "fabric_missing", lambda: None)
    monkeypatch.setattr(_C, "cuda_version", "13.0")
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: None)
    assert list(discovery.left_out()) == []


def test_no_libfabric_is_a_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "fabric_missing", lambda: "libfabric is not here: apt-get install libfabric1")
    facts = dict(discovery.fabric())
    assert facts["libfabric"] == "libfabric is not here: apt-get install libfabric1"
    assert facts["between nodes"].startswith("nothing")
    peers = dict(discovery.transports(4, 2))
    assert "shared memory" in peers["rank 1"]
    assert "apt-get install libfabric1" in peers["rank 2"] and "by way of" not in peers["rank 3"]


def _give_network(monkeypatch: pytest.MonkeyPatch, opened: Any) -> None:
    monkeypatch.setattr(_C, "fabric_missing", lambda: None)
    monkeypatch.setattr(_C, "fabric_version", lambda: "9.9")
    monkeypatch.setattr(_C, "fabric_offers", lambda: "tcp (eth0), shm")
    monkeypatch.setattr(discovery, "_open_network", opened)
    for name in ("PROVIDER", "INTERFACE", "LANES"):
        monkeypatch.delenv(f"MOECOMM_FABRIC_{name}", raising=False)
    monkeypatch.delenv("MOECOMM_RANKS_PER_NODE", raising=False)


def test_the_network_and_what_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(env: Env) -> tuple[str, str]:
        asked.append((env.fabric_provider, env.fabric_interface, env.fabric_lanes))
        return "some network", "192.0.2.9"

    _give_network(monkeypatch, opened)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = dict(discovery.fabric())
    assert facts["libfabric"] == "9.9"
    assert facts["fabric providers"] == "tcp (eth0), shm"
    assert facts["between nodes"] == "some network"
    assert facts["control links"].startswith("TCP on 192.0.2.9")
    monkeypatch.setenv("MOECOMM_FABRIC_PROVIDER", "tcp")
    monkeypatch.setenv("MOECOMM_FABRIC_INTERFACE", "eth0")
    assert dict(discovery.fabric())["between nodes"] == (
        "some network, as MOECOMM_FABRIC_PROVIDER=tcp and MOECOMM_FABRIC_INTERFACE=eth0 ask"
    )
    monkeypatch.setenv("MOECOMM_FABRIC_LANES", "3")
    assert "MOECOMM_FABRIC_LANES=3 ask" in dict(discovery.fabric())["between nodes"]
    assert asked == [(None, None, None), ("tcp", "eth0", None), ("tcp", "eth0", 3)]
