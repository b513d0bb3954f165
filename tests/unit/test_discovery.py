"""What `python -m moecomm` says of GPUs, with stand-ins for torch's view of them and for the driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm import _C, cuda_driver, discovery
from tests.fake_cuda import FakeDriver, Result


def _give(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, *, reach: bool = True, count: int = 2) -> None:
    info = SimpleNamespace(name="Fake GPU", total_memory=8 << 30, multi_processor_count=4, major=9, minor=0)
    load = cuda_driver.load
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: info)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: reach)
    monkeypatch.setattr(cuda_driver, "load", lambda: load(fake))
    monkeypatch.setattr(cuda_driver, "bindings_version", lambda: "13.0.0")
    monkeypatch.setattr(_C, "cuda_version", "13.0")


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ({}, "memory as file descriptors (ranks of this host)"),
        ({"fabric": True}, "memory as file descriptors (ranks of this host) and fabric handles"),
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


def _cuda_lines(ranks: int) -> list[str]:
    return [fact for _, fact in discovery.transports(ranks) if fact.endswith(", CUDA tensors")]


def test_transports_of_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, FakeDriver())
    reached = "NVLink/PCIe peer access: CUDA symmetric memory, CUDA tensors"
    assert _cuda_lines(3) == [reached, "the same GPU: CUDA symmetric memory, CUDA tensors"]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: False)
    assert _cuda_lines(2) == ["none: GPU 0 and GPU 1 have no peer access to each other, CUDA tensors"]
    monkeypatch.setattr(cuda_driver, "bindings_version", lambda: None)
    assert "pip install cuda-bindings" in _cuda_lines(2)[0]
    monkeypatch.setattr(_C, "cuda_version", None)
    assert "the CUDA part is not built" in _cuda_lines(2)[0]


def test_no_gpu_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _cuda_lines(4) == []


def test_cuda_bindings_are_named_with_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "bindings_version", lambda: "13.0.3")
    assert dict(discovery.versions())["cuda-bindings"] == "13.0.3"


def test_cuda_bindings_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert cuda_driver.bindings_version() is None
    assert "pip install cuda-bindings" in dict(discovery.versions())["cuda-bindings"]
