"""The base of `Communicator` that holds the backend: its errors, counters and stream, and `close()`."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from moecomm.arguments import require_integer
from moecomm.backends.arrays import shared_tensor
from moecomm.backends.base import Backend
from moecomm.errors import CommunicatorClosed, MoecommError

Own = TypeVar("Own", bound="_Opened")


class _Opened:
    """The base of `Communicator`, which documents it: holds the backend until `close()`."""

    _backend: Backend | None
    device: torch.device
    max_tokens: int

    def empty_input(self, num_tokens: int) -> torch.Tensor:
        """Returns an uninitialised (num_tokens, H) tensor whose dispatch costs no extra copy: on the CPU it
        lies in the window; on CUDA it is like any other, as rows go out from wherever they are.

        CPU: at most two such tensors can be alive at a time; their memory is taken at the first call. Fill
        it, dispatch it, let go of it, and ask for another: asking waits until all ranks have read what was
        there before. Writing to one that was dispatched races with ranks that are still reading. A forked
        child has not got its memory, and ends with SIGSEGV where it touches it.

        Raises:
            InvalidArgument: more than max_tokens.
            OutOfMemory: two are alive already, or /dev/shm is full.
            PeerTimeout, PeerLost: CPU: a rank does not read what was there before; the communicator can't be
                used any more.
        """
        backend = self._open()
        require_integer("num_tokens", num_tokens, 0, self.max_tokens)
        return backend.run("moecomm empty_input", lambda: backend.empty_input(num_tokens))

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error` on this rank and, in the operation that they call instead, InvalidArgument, or
        OutOfMemory, on all other ranks, which learn which rank it was, and of what kind the error is where
        that is another one. A layer calls it for an error that it finds on its rank alone: a plain exception
        would leave the other ranks waiting until their deadline. The communicator stays usable."""
        try:
            self._open().announce(error)
        except MoecommError as raised:
            if raised is not error and raised.__cause__ is not error:
                raise
        raise error

    def check(self) -> None:
        """Raises CapacityExceeded, once, if a dispatch since the last check left rows out on any rank, and
        PeerTimeout or PeerLost if that has ended the communicator. All ranks come to the same verdict
        without talking.

        On CUDA it also raises InvalidRouting and MismatchedArguments that the device has found. It looks at
        what the device has reported by now and waits for nothing: synchronize the stream first to be sure of
        all operations so far.
        """
        self._open().check()

    def stats(self) -> dict[str, Any]:
        """Returns the counters since construction or `reset_stats()`.

        dispatch_calls, dispatch_seconds, combine_calls, combine_seconds (of each kind of transfer, forward
        and backward), wait_seconds (of both, waiting for peers), late_seconds (a list: how long this rank
        waited for each rank to begin operations, so that one that holds the others up has the largest on all
        ranks but its own; waits for several pass at the same time), rows_in (tokens brought), rows_out (rows
        got), bytes_wire (row bytes that crossed between ranks, counted at the owner of the experts),
        bytes_staged (row bytes of dispatches that were copied for other ranks of the node, since they were
        not from `empty_input`; 0 on CUDA), plans_made, plans_reused, network_puts, network_bytes,
        network_row_bytes (messages, bytes, and bytes of rows sent to other nodes).

        On CUDA the seconds are those of the kernels, by the GPU's clock, and host_wait_seconds is what the
        host waited for row counts; replays of a graph count. Asking waits for a small copy from the device.
        """
        return self._open().stats()

    def reset_stats(self) -> None:
        """Sets all counters of `stats()` to zero."""
        self._open().reset_stats()

    def last_phases(self) -> dict[str, dict[str, float]]:
        """Returns when the last operation of each kind passed its phases on this GPU, in seconds after its
        last block began: {"dispatch": ..., "combine": ...}, the backward of combine counted as a dispatch
        and that of dispatch as a combine.

        "announced": this rank tells all ranks what it does; a dispatch, in one kernel or in two, does so
        when its ids have been counted, before the routes of its tokens have gone out; "agreed": all ranks
        are known to do the same; "planned": the plan of what arrives here is made; "sent": the last of this
        rank's rows, or sums, has been sent; "ended". One kernel for few tokens announces, sends and agrees
        side by side, so that any of these may be first; else each comes after the one before, but for
        "sent", which is at any time. A phase that an operation does not have is left out ("planned" of all
        but dispatches), and so are those that it has yet to pass: synchronize the stream before. Operations
        in replays of a graph count. Asking waits for a small copy from the device.

        Raises Unsupported on the CPU.
        """
        return self._open().last_phases()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The CUDA stream that operations with async_op=True run on; None on the CPU."""
        return self._open().stream

    def close(self) -> None:
        """Waits for operations under way, on CUDA for all work on the GPU, and lets go of the window. CPU: an
        operation of `async_op` that still waits for other ranks in a second raises CommunicatorClosed.
        Peers that still wait for this rank get PeerLost. RuntimeWarning if, between nodes, the network's
        library does not let its thread go within `timeout` and 3 s: that and the window are left to the
        process.

        Calling it again does nothing. Leaving a `with` block and garbage collection do the same; the
        backward of earlier calls needs the communicator open.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Backend:
        if self._backend is None:
            raise CommunicatorClosed("the communicator is closed")
        return self._backend

    def _shared(self, backend: Backend, *arrays: Any) -> list[Any]:
        """Returns arrays as tensors of the same memory, None as None."""
        try:
            return [shared_tensor(each, self.device) for each in arrays]
        except Exception as error:
            backend.announce(error)
