"""Description of the machine that was measured: processor, memory, versions, commit. It goes into the header
and the JSON file.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from .options import available_cores

_ROOT = Path(__file__).resolve().parents[2]
_DEFAULT_CACHE = 32 << 20  # where the system does not say how large its last-level cache is


def describe_gpus() -> dict[str, Any]:
    """The GPUs that torch sees, and what joins them."""
    import torch

    properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return {
        "names": [each.name for each in properties],
        "memory_bytes": properties[0].total_memory,
        "sms": properties[0].multi_processor_count,
        "l2_bytes": int(getattr(properties[0], "L2_cache_size", 0)),
        "driver": _tool("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"),
        "links": _links(),
    }


def _links() -> str:
    """The connection of GPU 0 with GPU 1 in nvidia-smi's terms: NV18 are 18 NVLinks."""
    for line in _tool("nvidia-smi", "topo", "-m").splitlines():
        words = line.split()
        if words[:1] == ["GPU0"] and len(words) > 2:
            return words[2]
    return ""


def _tool(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe() -> dict[str, Any]:
    """The host's hardware, without its name."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "last_level_cache_bytes": _last_level_cache(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    sizes = [0]
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes) or _DEFAULT_CACHE


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions of Python and of the packages whose speed is compared; on GPUs of CUDA and NCCL, too."""
    found = {"python": platform.python_version()}
    for package in ("moecomm", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    if device == "cuda":
        import torch

        found["torch"] = torch.__version__
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def git_commit() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it); (None, None) outside a git checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit, bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True, timeout=20
    ).stdout.strip()
