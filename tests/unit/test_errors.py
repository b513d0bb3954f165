"""The tree of errors and what each carries."""

from __future__ import annotations

import pytest

import moecomm
from moecomm import _C, errors

PARENTS = {
    "MoecommError": RuntimeError,
    "InvalidArgument": errors.MoecommError,
    "InvalidRouting": errors.InvalidArgument,
    "MismatchedArguments": errors.InvalidArgument,
    "CapacityExceeded": errors.MoecommError,
    "CommunicatorClosed": errors.MoecommError,
    "OutOfMemory": errors.MoecommError,
    "PeerTimeout": errors.MoecommError,
    "PeerLost": errors.MoecommError,
    "Unsupported": errors.MoecommError,
}


@pytest.mark.parametrize("name", PARENTS)
def test_tree(name: str) -> None:
    error = getattr(moecomm, name)
    assert issubclass(error, PARENTS[name]) and name in moecomm.__all__
    assert getattr(errors, name) is error and error.__doc__


def test_what_else_they_are() -> None:
    assert issubclass(moecomm.InvalidArgument, ValueError)
    assert issubclass(moecomm.OutOfMemory, MemoryError)
    assert not issubclass(moecomm.PeerLost, moecomm.PeerTimeout)
    assert not issubclass(moecomm.PeerTimeout, moecomm.PeerLost)


NATIVE = {
    "invalid_argument": moecomm.InvalidArgument,
    "invalid_routing": moecomm.InvalidRouting,
    "mismatched_arguments": moecomm.MismatchedArguments,
    "capacity_exceeded": moecomm.CapacityExceeded,
    "closed": moecomm.CommunicatorClosed,
    "out_of_memory": moecomm.OutOfMemory,
    "peer_timeout": moecomm.PeerTimeout,
    "peer_lost": moecomm.PeerLost,
    "unsupported": moecomm.Unsupported,
}


def test_every_native_kind_has_a_type() -> None:
    assert set(NATIVE) == {name for name in _C.ErrorKind.__members__ if name != "none"}


@pytest.mark.parametrize("name", NATIVE)
def test_from_native(name: str) -> None:
    kind = int(getattr(_C.ErrorKind, name))
    error = errors.from_native(kind, "text", 1, 2, "combine", 9, 8, 70, 50)
    assert type(error) is NATIVE[name] and str(error) == "text"
    if isinstance(error, moecomm.CapacityExceeded):
        assert (error.needed, error.capacity) == (70, 50)
    if isinstance(error, moecomm.OutOfMemory):
        assert (error.needed, error.available) == (70, 50)
    if isinstance(error, (moecomm.PeerTimeout, moecomm.PeerLost)):
        assert (error.rank, error.peer, error.phase, error.expected, error.seen) == (1, 2, "combine", 9, 8)


@pytest.mark.parametrize(
    "name", ["invalid_argument", "invalid_routing", "mismatched_arguments", "closed", "unsupported"]
)
def test_kinds_that_ranks_tell_each_other_keep_their_type(name: str) -> None:
    assert errors.kind_of(NATIVE[name]("text")) == name


def test_the_runtime_raises_these_types() -> None:
    """Errors cross the border of the extension as the Python types."""
    shape = _C.WindowShape(ranks=2, top_k=1, hidden=4, max_tokens=1, dtype=_C.DType.float32, ranks_per_node=2)
    lonely = _C.Communicator(shape=shape, rank=0, num_experts=2, threads=1, timeout=1.0, host_ranks=2)
    lonely.unlink_window()
    with pytest.raises(moecomm.CommunicatorClosed, match="not connected"):
        lonely.check()
