"""The CUDA driver API through cuda-python (package cuda-bindings), loaded when first needed.

Follows the CUDA Driver API reference, "Device Management", "Context Management", "Primary Context
Management" and "Virtual Memory Management".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moecomm.errors import Unsupported


class DriverError(Exception):
    """A driver call failed; the text names the call and says why. The caller turns it into a MoecommError."""

    def __init__(self, text: str, *, code: Any) -> None:
        super().__init__(text)
        self.code = code
        """The CUresult, or None if the call could not be made."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The identity of a GPU, and the ways to share its memory."""

    name: str
    uuid: str
    """The UUID as nvidia-smi -L prints it; the same in all processes, for any CUDA_VISIBLE_DEVICES."""
    bus_id: str
    """The PCI address, domain:bus:device.function."""
    virtual_memory: bool
    """True if cuMemCreate and cuMemMap work."""
    posix_fd: bool
    """True if memory can be passed to processes of this host as file descriptors."""

    def __str__(self) -> str:
        return f"{self.name} ({self.bus_id}, {self.uuid})"


class Driver:
    """Makes driver calls by name and checks every result."""

    def __init__(self, api: Any) -> None:
        """`api`: the module cuda.bindings.driver, or something with the same functions and enums."""
        self.api = api
        result = api.CUresult
        self._gone = (
            result.CUDA_ERROR_DEINITIALIZED,
            result.CUDA_ERROR_NOT_INITIALIZED,
            result.CUDA_ERROR_CONTEXT_IS_DESTROYED,
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """Makes a call and returns its values besides the CUresult: None, a value, or a tuple of several.
        Raises DriverError."""
        try:
            code, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:  # libcuda is missing, or lacks this call
            raise DriverError(f"{name}: {error}", code=None) from error
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{name}: {self._describe(code)}", code=code)
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def free(self, name: str, *arguments: Any) -> None:
        """Makes a call that frees something. An error becomes a RuntimeWarning, so that later frees still
        run, or is ignored if the driver is gone (end of the process)."""
        try:
            self.call(name, *arguments)
        except DriverError as error:
            if error.code not in self._gone:
                warnings.warn(f"moecomm could not free GPU memory: {error}", RuntimeWarning, stacklevel=2)

    def out_of_memory(self, error: DriverError) -> bool:
        """Returns True if the call failed for lack of memory."""
        return bool(error.code == self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY)

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """A context that makes `context` current on this thread, and restores the previous one."""
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def gpu(self, device: Any) -> Gpu:
        """Returns a device's identity and how it can share memory. device: a result of cuDeviceGet."""
        # The call that distinguishes MIG instances has the plain name in CUDA 13, and ends in _v2 in CUDA 12.
        uuid_call = "cuDeviceGetUuid_v2" if hasattr(self.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        octets = bytes(self.call(uuid_call, device).bytes)

        def offers(what: str) -> bool:
            attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{what}_SUPPORTED")
            return bool(self.call("cuDeviceGetAttribute", attribute, device))

        return Gpu(
            name=_text(self.call("cuDeviceGetName", 128, device)),
            uuid=f"GPU-{uuid.UUID(bytes=octets)}",
            bus_id=_text(self.call("cuDeviceGetPCIBusId", 32, device)),
            virtual_memory=offers("VIRTUAL_MEMORY_MANAGEMENT"),
            posix_fd=offers("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
        )

    def devices(self) -> list[Any]:
        """Returns the devices that this process may use, by ordinal."""
        return [self.call("cuDeviceGet", i) for i in range(self.call("cuDeviceGetCount"))]

    def _describe(self, code: Any) -> str:
        texts = [getattr(self.api, call)(code)[1] for call in ("cuGetErrorName", "cuGetErrorString")]
        if not all(texts):
            return f"error {int(code)}"
        return f"{_text(texts[0])} ({_text(texts[1])})"


def load(api: Any = None) -> Driver:
    """Returns the driver, initialised (cuInit). `api`: as in Driver; None: the module of cuda-bindings.
    Raises Unsupported: the package is missing, or this machine has no usable driver."""
    if api is None:
        try:
            api = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise Unsupported(
                "CUDA tensors need cuda-bindings 12.8 or newer, which cannot be imported "
                f"({error}): pip install cuda-bindings"
            ) from error
    driver = Driver(api)
    try:
        driver.call("cuInit", 0)
    except DriverError as error:
        raise Unsupported(f"no usable CUDA driver: {error}") from error
    return driver


def bindings_version() -> str | None:
    """Returns the version of cuda-bindings; None if it cannot be imported. Needs no driver."""
    try:
        importlib.import_module("cuda.bindings.driver")
        return importlib.metadata.version("cuda-bindings")
    except ImportError:  # includes PackageNotFoundError
        return None


def _text(buffer: bytes) -> str:
    """Returns a buffer's text, up to the terminating zero, since some calls return the whole buffer."""
    return buffer.split(b"\0")[0].decode(errors="replace")
