"""Clock and power of this rank's GPU while calls run, asked of NVML by a thread that keeps no time.

NVML is the library behind nvidia-smi. Power is the one of the moment (NVML_FI_DEV_POWER_INSTANT): what
nvidia-smi shows first is a mean over the last second, which is longer than a call.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from .timing import mean_over_ranks

_PERIOD_S = 0.003
_SM_CLOCK, _POWER_INSTANT = 1, 186  # nvmlClockType_t, and the id of a field


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


assert ctypes.sizeof(_FieldValue) == 40


class _Sample(NamedTuple):
    at: float  # perf_counter
    mhz: float
    watts: float  # NaN: the driver does not say


class _Gpu:
    """NVML's handle of a GPU. Raises OSError where there is no NVML, or it does not know the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        status = self._library.nvmlInit_v2()
        if status == 0:
            status = self._library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle))
        if status:
            raise OSError(f"NVML gives status {status} for {uuid.decode()}")

    def sample(self) -> _Sample:
        """The clock of the SMs and the power now."""
        clock, power = ctypes.c_uint(), _FieldValue(field=_POWER_INSTANT)
        status = self._library.nvmlDeviceGetClockInfo(self._handle, _SM_CLOCK, ctypes.byref(clock))
        mhz = float("nan") if status else float(clock.value)
        status = self._library.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(power))
        failed = status or power.status
        # Milliwatts, of unsigned int: the lower half of the union on a little-endian host.
        watts = float("nan") if failed else (power.value & 0xFFFFFFFF) * 1e-3
        return _Sample(time.perf_counter(), mhz, watts)


class Telemetry:
    """Samples a GPU within `with`; `keep` puts those of the last seconds with a path and phase."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = _Gpu(device)
        self._kept: dict[tuple[str, str], list[_Sample]] = defaultdict(list)
        self._latest: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._latest.append(self._gpu.sample())

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def keep(self, key: tuple[str, str], seconds: float) -> None:
        """Keeps the samples of a call that took so many seconds and has just ended; drops earlier ones."""
        latest, self._latest = self._latest, []
        begun = time.perf_counter() - seconds
        self._kept[key] += [each for each in latest if each.at >= begun]

    def medians(self, key: tuple[str, str]) -> dict[str, float | None]:
        """The median clock and power of a path's phase, mean over the ranks; None where a rank has no sample.
        All ranks call it together."""
        samples = self._kept.get(key) or [_Sample(0, float("nan"), float("nan"))]
        means = mean_over_ranks([float(np.median(each)) for each in list(zip(*samples, strict=True))[1:]])
        mhz, watts = (None if np.isnan(each) else each for each in means)
        return {"sm_mhz": mhz, "power_W": watts}
