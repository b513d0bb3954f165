"""Clock and power of this rank's GPU while calls run, asked of NVML by a thread that keeps no time.

NVML is the library behind nvidia-smi. Power is the one of the moment (NVML_FI_DEV_POWER_INSTANT): what
nvidia-smi shows first is a mean over the last second, which is longer than a call.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict

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


class Telemetry:
    """Samples a GPU within `with`; `keep` puts those of the last seconds with a path and phase. Raises
    OSError where there is no NVML, or it does not know the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._gpu = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        status = self._nvml.nvmlInit_v2()
        status = status or self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._gpu))
        if status:
            raise OSError(f"NVML gives status {status} for {uuid.decode()}")
        self._kept: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
        self._latest: list[tuple[float, float, float]] = []  # when, by perf_counter; MHz; W
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def _run(self) -> None:
        clock, power = ctypes.c_uint(), _FieldValue(field=_POWER_INSTANT)
        while not self._stop.wait(_PERIOD_S):
            status = self._nvml.nvmlDeviceGetClockInfo(self._gpu, _SM_CLOCK, ctypes.byref(clock))
            mhz = float("nan") if status else float(clock.value)
            status = self._nvml.nvmlDeviceGetFieldValues(self._gpu, 1, ctypes.byref(power))
            # Milliwatts, of unsigned int: the lower half of the union on a little-endian host.
            watts = float("nan") if status or power.status else (power.value & 0xFFFFFFFF) * 1e-3
            self._latest.append((time.perf_counter(), mhz, watts))

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()

    def keep(self, key: tuple[str, str], seconds: float) -> None:
        """Keeps the samples of a call that took so many seconds and has just ended; drops earlier ones."""
        latest, self._latest = self._latest, []
        begun = time.perf_counter() - seconds
        self._kept[key] += [each for each in latest if each[0] >= begun]

    def medians(self, key: tuple[str, str]) -> dict[str, float | None]:
        """The median clock and power of a path's phase, mean over the ranks; None where a rank has no sample.
        All ranks call it together."""
        samples = np.array(self._kept.get(key) or [(0, np.nan, np.nan)])
        mhz, watts = mean_over_ranks(np.median(samples[:, 1:], axis=0).tolist())
        return {"sm_mhz": None if np.isnan(mhz) else mhz, "power_W": None if np.isnan(watts) else watts}
