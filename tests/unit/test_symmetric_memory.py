"""Symmetric memory over a stand-in for the CUDA driver, one rank: what is called, freed, and raised."""

import ast
import ctypes
import gc
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from moecomm.device import cuda_driver
from moecomm.errors import OutOfMemory, Unsupported
from moecomm.setup import symmetric_memory
from moecomm.setup.rendezvous import Rendezvous
from moecomm.setup.symmetric_memory import SymmetricMemory
from tests.fake_cuda import GRANULARITY, FakeDriver, Result


def _build(fake: FakeDriver, size: int = 1000, device: int = 0) -> SymmetricMemory:
    return SymmetricMemory(Rendezvous(None, 5.0), size, device, api=fake)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_mapped_zero_and_rounded_up() -> None:
    fake = FakeDriver()
    memory = _build(fake, GRANULARITY + 1)
    assert memory.bytes == 2 * GRANULARITY
    (base,) = memory.bases
    assert fake.mappings == {base: memory.bytes}
    assert ctypes.string_at(base, memory.bytes) == bytes(memory.bytes)
    ctypes.memset(base, 7, memory.bytes)
    assert not fake.handles, "the mapping keeps the memory; handles are for construction only"
    assert not fake.stack, "the context that was current is so again"
    memory.close()
    assert not fake.alive()


def test_close_frees_in_order_and_once() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    fake.log.clear()
    memory.close()
    assert fake.names() == [
        *("cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent"),
        *("cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"),
    ]
    assert memory.bases == []
    memory.close()
    assert len(fake.log) == 6


def test_memory_is_zeroed_before_it_is_shared() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    names = fake.names()
    assert names.index("cuMemsetD8") < names.index("cuCtxSynchronize")
    assert names.index("cuCtxSynchronize") < names.index("cuMemExportToShareableHandle")
    memory.close()


def test_garbage_collection_frees() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    assert fake.alive()
    del memory
    gc.collect()
    assert not fake.alive()


def test_a_driver_that_is_gone_is_not_reported() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    fake.torn_down = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.close()


def test_what_cannot_be_freed_is_a_warning_and_the_rest_is_freed() -> None:
    fake = FakeDriver(failing={"cuMemAddressFree": (1, Result.CUDA_ERROR_INVALID_VALUE)})
    memory = _build(fake)
    with pytest.warns(RuntimeWarning, match="cuMemAddressFree: CUDA_ERROR_INVALID_VALUE"):
        memory.close()
    assert fake.alive() == {"reservations": 1}


def test_a_forked_child_leaves_the_driver_alone() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    fake.log.clear()
    child = os.fork()
    if child == 0:
        memory.close()
        os._exit(len(fake.log))
    assert os.waitpid(child, 0)[1] == 0
    memory.close()
    assert not fake.alive()


CONSTRUCTION = [
    *("cuInit", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceGetAttribute", "cuDeviceGetName"),
    *("cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity", "cuDeviceGetCount"),
    *("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuCtxPushCurrent", "cuMemsetD8"),
    *("cuCtxSynchronize", "cuMemExportToShareableHandle"),
]


@pytest.mark.parametrize("call", CONSTRUCTION)
def test_an_error_of_any_call_is_typed_and_frees_everything(call: str) -> None:
    which = 2 if call == "cuDeviceGetAttribute" else 1
    fake = FakeDriver(failing={call: (which, Result.CUDA_ERROR_NOT_SUPPORTED)})
    before = _descriptors()
    with pytest.raises(Unsupported, match=rf"{call}: CUDA_ERROR_NOT_SUPPORTED \(not supported\)"):
        _build(fake)
    assert not fake.alive()
    assert _descriptors() == before


def test_every_call_of_construction_is_in_the_list_above() -> None:
    fake = FakeDriver()
    memory = _build(fake)
    made = set(fake.names()) - {"cuCtxPopCurrent", "cuMemRelease"}
    memory.close()
    assert made == set(CONSTRUCTION)


def test_memory_that_torch_can_give_back_is_used() -> None:
    fake = FakeDriver(failing={"cuMemCreate": (1, Result.CUDA_ERROR_OUT_OF_MEMORY)})
    memory = _build(fake)
    assert fake.counts["cuMemCreate"] == 2
    memory.close()


class NoLibrary(FakeDriver):
    def cuInit(self, flags: int) -> tuple[Any, ...]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")


NO_CONTEXT = {"cuDevicePrimaryCtxRetain": (1, Result.CUDA_ERROR_OUT_OF_MEMORY)}


@pytest.mark.parametrize(
    ("fake", "device", "kind", "says"),
    [
        (FakeDriver(failing=NO_CONTEXT), 0, OutOfMemory, "GPU 0"),
        (FakeDriver(posix_fd=False), 0, Unsupported, r"Fake GPU .* rank 0 cannot share memory as file desc"),
        (FakeDriver(), 3, Unsupported, "GPU 3: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        (NoLibrary(), 0, Unsupported, r"no usable CUDA driver: cuInit: Failed to dlopen libcuda\.so\.1"),
    ],
    ids=["no memory for a context", "no file descriptors", "no such device", "no driver"],
)
def test_what_cannot_be_is_told(fake: FakeDriver, device: int, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        _build(fake, device=device)
    assert not fake.alive()


def test_the_device_is_the_one_asked_for() -> None:
    fake = FakeDriver(gpus=[4, 2])
    memory = _build(fake, device=1)
    created = next(entry for entry in fake.log if entry[0] == "cuMemCreate")
    assert created[2].location.id == 1
    memory.close()


def test_without_cuda_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(Unsupported, match="pip install cuda-bindings"):
        SymmetricMemory(Rendezvous(None, 5.0), 1, 0)


def test_facts_of_a_gpu() -> None:
    driver = cuda_driver.load(FakeDriver(gpus=[7]))
    gpu = driver.gpu(driver.devices()[0])
    assert str(gpu) == "Fake GPU (0000:07:00.0, GPU-07070707-0707-0707-0707-070707070707)"
    assert gpu.virtual_memory and gpu.posix_fd


def test_the_real_bindings_have_every_name_used() -> None:
    """The real bindings have all calls, structs and enums; the fake's parameters compare the signatures."""
    api = pytest.importorskip("cuda.bindings.driver")
    for module in (cuda_driver, symmetric_memory):
        file = Path(module.__file__)
        for node in ast.walk(ast.parse(file.read_text())):
            name = None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value if node.value.isidentifier() and node.value.startswith("cu") else None
                name = None if name == "cuDeviceGetUuid_v2" else name
            elif isinstance(node, ast.Attribute) and node.attr.startswith("CU"):
                name = node.attr
                if isinstance(node.value, ast.Attribute) and node.value.attr.startswith("CU"):
                    assert hasattr(getattr(api, node.value.attr), name), f"{node.value.attr}.{name}"
                    continue
                if name.startswith(("CU_", "CUDA_")):
                    continue  # of an enum that a local variable stands for
            assert name is None or hasattr(api, name), f"{file.name} uses {name}"


def test_importing_the_package_does_not_load_the_bindings() -> None:
    """The bindings load the driver library, and an installation for the CPU has neither."""
    for module in ("moecomm.setup.symmetric_memory", "moecomm.device.cuda_driver", "moecomm.setup.discovery"):
        importlib.import_module(module)
    tree = ast.parse(Path(cuda_driver.__file__).read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in imported if name.startswith("cuda")]
