"""The base class of `Communicator` that holds the backend: checks, counters, stream, and `close()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from moecomm.arguments import require_integer, waited
from moecomm.backends.base import Backend
from moecomm.errors import CommunicatorClosed, MoecommError, known_to_all

Own = TypeVar("Own", bound="_Opened")


class _Opened:
    """A base class of `Communicator`: holds the backend until `close()`."""

    _backend: Backend | None
    device: torch.device
    max_tokens: int

    def empty_input(self, num_tokens: int) -> torch.Tensor:
        """Returns an uninitialised (num_tokens, H) tensor whose dispatch costs no extra copy: on the CPU it
        is in the window; on CUDA it is an ordinary tensor, since rows are sent directly from any tensor.

        CPU: at most two such tensors can be alive at a time; their memory is allocated by the first call.
        Fill the tensor, dispatch it, delete it, and call this again: the call waits until all ranks have read
        the previous contents. Writing to a tensor that was dispatched races with ranks that still read it. A
        forked child does not have this memory, and ends with SIGSEGV if it accesses it.

        Raises:
            InvalidArgument: num_tokens is above max_tokens.
            OutOfMemory: two such tensors are alive, or /dev/shm is full.
            PeerTimeout, PeerLost: CPU: a rank has not read the previous contents; the communicator can't be
                used any more.
        """
        backend = self._open()
        require_integer("num_tokens", num_tokens, 0, self.max_tokens)
        return backend.run("moecomm empty_input", lambda: backend.empty_input(num_tokens))

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error` on this rank, where alone it was found. All other ranks raise InvalidArgument, or
        OutOfMemory, in their present or next operation, instead of waiting until their deadline; the text
        names this rank, and the type of `error` if theirs is not that. The communicator stays usable."""
        try:
            try:
                self._open().announce(error)
            except MoecommError as raised:
                if raised is not error and raised.__cause__ is not error:
                    raise
            raise error
        finally:
            del error  # the error's traceback has this frame, and with it what the failed part has held

    def check(self) -> None:
        """Raises CapacityExceeded, once, if a dispatch since the last check left rows out on any rank, and
        PeerTimeout or PeerLost if it has ended the communicator. All ranks get the same result without
        communication. On the CPU the call waits for operations with `async_op` or in another thread.

        On CUDA it also raises InvalidRouting and MismatchedArguments that the device has found. It only reads
        what the device has reported by now: synchronize the stream first to be sure of all operations so far.
        """
        self._open().check()

    def stats(self) -> dict[str, Any]:
        """Returns the counters since construction or `reset_stats()`.

        dispatch_calls, dispatch_seconds, combine_calls, combine_seconds (of each kind of transfer, forward
        and backward), wait_seconds (the part of these seconds spent waiting for peers), late_seconds (a list:
        how long this rank waited for each rank to begin operations; a slow rank has the largest entry on all
        other ranks; waits for several ranks overlap), rows_in (tokens brought), rows_out (rows received),
        bytes_wire (row bytes between ranks, counted at the owner of the experts), bytes_staged (row bytes
        that dispatches copied for other ranks of the node, as `x` was not from `empty_input`; 0 on CUDA),
        plans_made, plans_reused, network_puts, network_bytes, network_row_bytes (messages, bytes, and bytes
        of rows sent to other nodes).

        On CUDA the seconds are the kernels' times by the GPU's clock, and host_wait_seconds is how long the
        host waited for row counts; replays of a graph count. The call waits for a small copy from the device.
        """
        return self._open().stats()

    def reset_stats(self) -> None:
        """Sets all counters of `stats()` to zero."""
        self._open().reset_stats()

    def last_phases(self) -> dict[str, dict[str, float]]:
        """Returns when the last operation of each kind passed its phases on this GPU, in seconds after the
        operation's last block began: {"dispatch": ..., "combine": ...}. The backward of combine counts as a
        dispatch, the backward of dispatch as a combine.

        "announced": this rank has told all ranks which operation it runs (a dispatch after counting its ids,
        before it sends its tokens' routes); "agreed": all ranks are known to run the same; "planned": a
        dispatch has the plan of arriving rows; "sent": this rank's last row, or sum, is sent; "ended". They
        pass in this order, except "sent", which may pass at any time; a single kernel for few tokens
        announces, sends and agrees concurrently. Phases are left out that an operation has not passed yet
        (synchronize the stream first), or had passed before its last block began. Operations in replays of a
        graph count. The call waits for a small copy from the device.

        Raises Unsupported on the CPU.
        """
        return self._open().last_phases()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream on which operations with async_op=True run; None on the CPU."""
        return self._open().stream

    def close(self) -> None:
        """Waits for running operations, on CUDA for all work on the GPU, and frees the window. CPU: an
        operation, with `async_op` or of another thread, that still waits for other ranks after a second
        raises CommunicatorClosed; so does one that waits where a signal's handler calls this. Peers that
        still wait for this rank get PeerLost. With several nodes, warns (RuntimeWarning) if the network
        library blocks its thread for more than `timeout` and 3 s: then the thread and the window stay until
        the process ends.

        Calling it again does nothing. Leaving a `with` block and garbage collection also close it; the
        backward of earlier calls needs the communicator open.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Backend:
        if self._backend is None:
            raise CommunicatorClosed("the communicator is closed")
        return self._backend

    def _shared(self, backend: Backend, *arrays: Any) -> tuple[Any, ...]:
        """Returns arrays as tensors that share their memory, None as None; tells all ranks of errors."""
        try:
            return tuple(shared_tensor(each, self.device) for each in arrays)
        except Exception as error:
            backend.announce(error)


def shared_tensor(value: Any, device: torch.device) -> Any:
    """Returns an array that can share its memory (CuPy, numpy, JAX) as a tensor. Returns a tensor as `waited`
    does, and anything else unchanged, for a later check to refuse.

    With DLPack the array's library orders its own stream before torch's current one. An object with only
    `__cuda_array_interface__` is assumed to be ready for the current stream.
    """
    if value is None or isinstance(value, torch.Tensor):
        return waited(value)
    try:
        if hasattr(value, "__dlpack__"):
            return from_dlpack(value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None and device.type == "cuda":
            tensor = torch.as_tensor(value, device=device)
            if tensor.numel() == 0 or tensor.data_ptr() == interface["data"][0]:
                return tensor  # otherwise it was on another GPU, and torch has copied it
    except (BufferError, RuntimeError, TypeError, ValueError):
        pass
    return value


def call_or_tell(comm: _Opened, part: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls `part`, a module or function of a layer, and returns its result. If `part` or its hooks raise an
    exception on this rank alone, the other ranks are told of it."""
    try:
        return part(*arguments, **options)
    except Exception as error:
        if known_to_all(error):
            raise
        comm.refuse(error)
