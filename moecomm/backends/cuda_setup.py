"""The steps in which all ranks build their CUDA backends together, and the release of one backend."""

from __future__ import annotations

from typing import Any

import moecomm._C as _C
from moecomm.backends.base import warn_of_thread
from moecomm.backends.order import ends_by_error
from moecomm.device.cuda_device import CudaDevice
from moecomm.env import read_env
from moecomm.errors import InvalidArgument, MoecommError, OutOfMemory, Unsupported
from moecomm.setup.handshake import GroupInfo, check_host_room, connect, handshake
from moecomm.setup.memory_plan import MemoryPlan
from moecomm.setup.rendezvous import Rendezvous


def meet(
    rendezvous: Rendezvous, arguments: dict[str, Any], error: MoecommError | None, gpu: CudaDevice
) -> GroupInfo:
    """Checks that arguments agree (`setup.handshake.handshake`), and that each rank has its own GPU."""
    group_info = handshake(rendezvous, arguments, error, lambda: {"gpu": gpu.uuid()})
    seen: dict[str, int] = {}
    for rank, message in enumerate(group_info.messages):
        other = seen.setdefault(message["gpu"], rank)
        if other != rank:
            raise InvalidArgument(
                f"device of ranks {other} and {rank} is the same GPU ({message['gpu']}), expected one "
                "for each rank: call torch.cuda.set_device(local_rank) first, or pass device"
            )
    return group_info


def check_room(rendezvous: Rendezvous, group_info: GroupInfo, memory: MemoryPlan, gpu: CudaDevice) -> None:
    """Raises OutOfMemory on all ranks if a GPU or a host lacks room for `memory`."""
    needed = memory.committed_bytes

    def look() -> dict[str, Any]:
        try:
            return {"available": gpu.free_bytes(needed)}
        except RuntimeError as error:  # of CUDA; only a MoecommError can be told to other ranks
            raise Unsupported(f"the GPU does not answer: {error}") from error

    if memory.host_bytes:
        check_host_room(rendezvous, group_info, memory.host_bytes)
    messages = rendezvous.step("construction: memory", look)
    for rank, message in enumerate(messages):
        available = int(message["available"])
        if needed > available:
            raise OutOfMemory(
                f"the window needs {needed} bytes of device memory, {available} are free on the GPU of "
                f"rank {rank}; lower max_tokens or hidden, free some there, or set "
                "MOECOMM_WHOLE_SOURCES=0 on all ranks, which takes less where ranks outnumber top_k",
                needed=needed,
                available=available,
            )


def connect_gpus(
    rendezvous: Rendezvous,
    group_info: GroupInfo,
    shape: _C.DeviceShape,
    memory: MemoryPlan,
    device: int,
    num_sms: int,
) -> tuple[_C.DeviceCommunicator, Any]:
    """Returns the native communicator, connected to those of the other ranks, and its window."""
    from moecomm.setup.symmetric_memory import SymmetricMemory

    arguments = group_info.messages[0]["arguments"]
    # The window is zeroed before any rank continues, so that zeroing cannot erase a signal.
    window = SymmetricMemory(
        rendezvous, memory.total_bytes, device, ranks=group_info.nodes.local_ranks(rendezvous.rank)
    )
    try:
        native = connect(
            rendezvous,
            group_info,
            lambda: _C.DeviceCommunicator(
                shape=shape,
                rank=rendezvous.rank,
                timeout=rendezvous.timeout,
                absence=rendezvous.absence,
                num_sms=num_sms,
                device=device,
                host_ranks=group_info.host_ranks(rendezvous.rank),
                first_epoch=arguments["MOECOMM_FIRST_EPOCH"],
                sums=getattr(_C.WireFormat, arguments["combine_wire"] or "same"),
                gradients=getattr(_C.WireFormat, arguments["gradient_wire"] or "same"),
            ),
            list(window.bases),
        )
    except BaseException:
        window.close()
        raise
    env = read_env()
    if env.fused_tokens is not None:
        native.fuse_up_to(env.fused_tokens)
    if env.log == "launch":
        native.log_launches()
    return native, window


def release(gpu: CudaDevice, native: _C.DeviceCommunicator, window: Any) -> None:
    """Closes the native communicator, then frees its window. Keeps the window if the network may still use
    it. Within a capture of a CUDA graph, which freeing would invalidate, the window stays until a later
    call of this function.

    This waits for the GPU. After Ctrl-C in a wait, or if an uncaught exception ends the interpreter, it first
    tells kernels to stop waiting, since the other ranks may never come."""
    if native.interrupted or ends_by_error():
        native.stop_waiting()
    capturing = False
    try:
        with gpu.current():
            capturing = gpu.capturing()
            if not capturing:
                gpu.synchronize()
    except RuntimeError:
        pass  # the context is no longer usable; memory and names are released all the same
    finally:
        if not native.close():
            _left_behind.append(window)
            warn_of_thread()
        elif capturing:
            _after_captures.append((native, window))
        else:
            window.close()
            while _after_captures:
                _after_captures.pop()[1].close()


_left_behind: list[Any] = []
"""Windows that the network may still use; they stay until the process ends."""
_after_captures: list[tuple[Any, Any]] = []
"""Communicators that were closed during a capture, with their windows; a later `release` frees them."""
