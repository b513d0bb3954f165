"""Clock and power of a GPU: NVML as a library that a test plays."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.harness import telemetry

GPU = torch.device("cuda", 0)


class Nvml:
    """The calls that telemetry makes; every sample is a watt more than the one before."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.watts = status, 400
        self.uuid = b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.uuid = uuid
        return self.status

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, clock: Any) -> int:
        clock._obj.value = 1755
        return 0

    def nvmlDeviceGetFieldValues(self, handle: Any, count: int, values: Any) -> int:
        assert (count, values._obj.field) == (1, 186)
        self.watts += 1
        values._obj.value = self.watts * 1000
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    played = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: played)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-1"))
    monkeypatch.setattr(telemetry, "mean_over_ranks", lambda values: values)
    return played


def test_samples_of_a_call_are_those_while_it_ran(nvml: Nvml) -> None:
    with telemetry.Telemetry(GPU) as watched:
        assert nvml.uuid == b"GPU-ab-1"
        while nvml.watts < 404:
            time.sleep(0.001)
        begun = time.perf_counter()
        before = nvml.watts
        while nvml.watts < before + 5:
            time.sleep(0.001)
        watched.keep(("path", "step"), time.perf_counter() - begun)
    found = watched.medians(("path", "step"))
    assert found["sm_mhz"] == 1755 and found["power_W"] is not None
    assert before < found["power_W"] <= nvml.watts
    assert watched.medians(("path", "another")) == {"sm_mhz": None, "power_W": None}


def test_a_gpu_that_nvml_does_not_know_is_an_error(nvml: Nvml) -> None:
    nvml.status = 6
    with pytest.raises(OSError, match="NVML gives status 6 for GPU-ab-1"):
        telemetry.Telemetry(GPU)
