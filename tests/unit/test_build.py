"""Choices of CMake: what it builds on a machine, by what it finds there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.executable).parent  # cmake and ninja of the environment, before those of the system
SEARCHED = f"{BESIDE}{os.pathsep}{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=SEARCHED)
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.skipif(
    CMAKE is None or shutil.which("ninja", path=SEARCHED) is None,
    reason="configures a build: cmake or ninja is missing",
)


def _configure(folder: Path, *settings: str, gpus: str = "", nvcc: bool = False) -> tuple[int, str]:
    """(exit status, output) of cmake where nvidia-smi lists GPUs of these capabilities."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    smi = tools / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{gpus}'\n" if gpus else "#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDACXX", "CUDAARCHS")}
    path = [str(tools), str(BESIDE), "/usr/bin", "/bin"]
    if nvcc and NVCC:
        path.insert(0, str(Path(NVCC).parent))
    environment["PATH"] = os.pathsep.join(path)
    command: list[str | Path] = [str(CMAKE), "-S", ROOT, "-B", folder / "build", "-G", "Ninja"]
    command += ["-DMOECOMM_PYTHON=OFF", *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_what_is_left_out_is_said_with_what_adds_it(tmp_path: Path) -> None:
    hidden = ("-DCMAKE_FIND_ROOT_PATH=/nonexistent", "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY")
    cache = ("-UMOECOMM_FABRIC_INCLUDE",)
    code, said = _configure(tmp_path, "-DMOECOMM_FABRIC=AUTO", *cache, *hidden, gpus="9.0\\n")
    assert code == 0, said
    assert "left out, no libfabric headers; apt-get install -y libfabric-dev adds them" in said
    assert "CUDA kernels: left out, no CUDA compiler" in said
    code, said = _configure(tmp_path, "-DMOECOMM_FABRIC=ON", *cache, *hidden)
    assert code != 0 and "MOECOMM_FABRIC=ON, but there is no <rdma/fabric.h>" in said


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="for a machine without a GPU")
def test_other_gpus_leave_kernels_out(tmp_path: Path) -> None:
    code, said = _configure(tmp_path, "-DMOECOMM_FABRIC=OFF", gpus="8.0\\n12.0\\n", nvcc=True)
    assert code == 0 and "CUDA kernels: left out, no GPU of compute capability 9.0 or 10.x" in said, said


@pytest.mark.skipif(NVCC is None, reason="asks nvcc what it knows, and there is none")
def test_kernels_are_for_the_gpus_here_or_for_all(tmp_path: Path) -> None:
    def architectures(*settings: str, gpus: str = "") -> list[str]:
        code, said = _configure(tmp_path, "-DMOECOMM_FABRIC=OFF", *settings, gpus=gpus, nvcc=True)
        found = re.search(r"CUDA kernels: on, toolkit \S+, architectures (\S+)", said)
        assert code == 0 and found, said
        return found[1].split(";")

    assert architectures(gpus="9.0\\n9.0\\n8.0\\n12.0\\n") == ["90a"]
    every = architectures("-DMOECOMM_CUDA=ON")
    assert every[:1] == ["90a"] and set(every[1:]) <= {"100"}
