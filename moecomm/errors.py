"""The errors that moecomm raises. A caller can recover from each. Broken invariants are assertions.

After `PeerTimeout` and `PeerLost` ranks are out of step: the communicator refuses further work with that
error, and a new communicator has to be built. Every other error leaves it as usable as before, on all ranks.
"""

from __future__ import annotations

from typing import Any, TypeVar


class MoecommError(RuntimeError):
    """Base class of all errors that moecomm raises on purpose."""

    _is_known_to_all = True
    """False for an error that one rank has found alone, while the others go on."""


class InvalidArgument(MoecommError, ValueError):
    """An argument has the wrong type, shape, dtype, device or value; the text names it, its value and the
    bound.

    In a call that all ranks make, every rank raises it; on other ranks the text names the rank at fault.
    """

    _is_known_to_all = False  # until an operation raises it


class InvalidRouting(InvalidArgument):
    """`topk_idx` has an expert id out of range, or an id twice in a token, or a dtype that is no integer."""


class MismatchedArguments(InvalidArgument):
    """Ranks differ in the operation that they called, or in an argument that must be equal on all ranks."""


class CapacityExceeded(MoecommError):
    """A dispatch needed more rows on some rank than its fixed capacity; rows past the capacity were left out.

    Attributes:
        needed: rows that the fullest rank would have needed.
        capacity: rows that there was room for.
        rank: the fullest rank.
    """

    def __init__(self, text: str, *, needed: int = 0, capacity: int = 0, rank: int = -1) -> None:
        super().__init__(text)
        self.needed, self.capacity, self.rank = needed, capacity, rank


class CommunicatorClosed(MoecommError):
    """The communicator was closed, or was never connected."""


class OutOfMemory(MoecommError, MemoryError):
    """A window or an output does not fit.

    Attributes:
        needed: bytes that were requested.
        available: bytes that were free, 0 if unknown.
    """

    def __init__(self, text: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(text)
        self.needed, self.available = needed, available


class _PeerError(MoecommError):
    def __init__(
        self, text: str, *, rank: int = -1, peer: int = -1, phase: str = "", expected: int = 0, seen: int = 0
    ) -> None:
        super().__init__(text)
        self.rank, self.peer, self.phase, self.expected, self.seen = rank, peer, phase, expected, seen


class PeerTimeout(_PeerError):
    """A peer did not arrive before the deadline.

    Attributes:
        rank: the rank that waited.
        peer: the rank that it waited for.
        phase: what `rank` was doing.
        expected: epoch (number of the operation) that `rank` waited for; 0 during construction.
        seen: last epoch that the peer has begun. If it equals `expected`, the peer has not finished sending.
    """


class PeerLost(_PeerError):
    """A peer's process has ended, or it closed the communicator, while it was still needed. Attributes as
    `PeerTimeout`."""


_Peer = TypeVar("_Peer", bound=_PeerError)


def of_peer(kind: type[_Peer], text: str, rank: int, phase: str, peer: int = -1) -> _Peer:
    """Returns the PeerTimeout or PeerLost (`kind`) that `rank` raises in `phase` about `peer`."""
    return kind(f"rank {rank}, {phase}: {text}", rank=rank, peer=peer, phase=phase)


class Unsupported(MoecommError):
    """This build, machine or combination of arguments is not supported; the text says what would be."""


# The keys are the names of ErrorKind in csrc/common/error.hpp.
_KINDS: dict[str, type[MoecommError]] = {
    "invalid_argument": InvalidArgument,
    "invalid_routing": InvalidRouting,
    "mismatched_arguments": MismatchedArguments,
    "capacity_exceeded": CapacityExceeded,
    "closed": CommunicatorClosed,
    "out_of_memory": OutOfMemory,
    "peer_timeout": PeerTimeout,
    "peer_lost": PeerLost,
    "unsupported": Unsupported,
}


def kind_of(error: MoecommError) -> str:
    """Returns the runtime's name for the type of `error`."""
    return next(name for name, error_type in _KINDS.items() if type(error) is error_type)


def known_to_all(error: Exception) -> bool:
    """Returns whether all ranks know of `error`, because an operation has raised it. False for what one rank
    alone finds: an InvalidArgument, OutOfMemory for an output, or an error that is no MoecommError."""
    return isinstance(error, MoecommError) and error._is_known_to_all


def announced_as(error: Exception) -> MoecommError:
    """Returns what all ranks are told when this rank finds `error` before an operation: `error` itself, if
    operations raise its type; MismatchedArguments for CapacityExceeded, which other ranks have raised in
    check() before; else OutOfMemory (if memory ran out) or InvalidArgument, with the text of `error`."""
    if type(error) in (InvalidArgument, InvalidRouting, MismatchedArguments, OutOfMemory, Unsupported):
        assert isinstance(error, MoecommError)
        return error
    name = type(error).__name__
    if isinstance(error, CapacityExceeded):
        return MismatchedArguments(
            f"{error}; this rank raises CapacityExceeded for that now, in place of a dispatch, and others "
            "have called check() before: call it on all ranks or on none"
        )
    try:
        text = f"{name}: {error}"
    except Exception:  # raised by the error's own __str__
        text = name
    short = isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text
    return OutOfMemory(text) if short else InvalidArgument(text)


def to_message(error: MoecommError) -> dict[str, Any]:
    """Returns `error` as JSON values for the other ranks; from_message() reads them."""
    facts = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {"kind": kind_of(error), "text": str(error), "facts": facts}


def from_message(message: dict[str, Any], rank: int) -> MoecommError:
    """Returns the error that `rank` sent by `to_message`; its text names the rank."""
    return _KINDS[message["kind"]](f"rank {rank}: {message['text']}", **message["facts"])


def from_native(
    kind: int,
    text: str,
    rank: int,
    peer: int,
    phase: str,
    expected: int,
    seen: int,
    needed: int,
    available: int,
) -> MoecommError:
    """Returns the exception for an error of the C++ runtime (csrc/common/error.hpp)."""
    import moecomm._C as _C

    error_type = _KINDS[_C.ErrorKind(kind).name]
    facts: dict[str, Any] = {}
    if issubclass(error_type, _PeerError):
        facts = {"rank": rank, "peer": peer, "phase": phase, "expected": expected, "seen": seen}
    elif error_type is CapacityExceeded:
        facts = {"needed": needed, "capacity": available, "rank": rank}
    elif error_type is OutOfMemory:
        facts = {"needed": needed, "available": available}
    return error_type(text, **facts)
