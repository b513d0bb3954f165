"""The tree of errors and what each carries."""

import pytest

import moecomm
from moecomm import _C, errors

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


@pytest.mark.parametrize("error", [moecomm.MoecommError, *NATIVE.values()])
def test_tree(error: type[Exception]) -> None:
    assert issubclass(error, RuntimeError) and issubclass(error, moecomm.MoecommError) and error.__doc__
    assert getattr(moecomm, error.__name__) is getattr(errors, error.__name__) is error
    assert error.__name__ in moecomm.__all__


def test_what_else_they_are() -> None:
    assert issubclass(moecomm.InvalidArgument, ValueError)
    assert issubclass(moecomm.InvalidRouting, moecomm.InvalidArgument)
    assert issubclass(moecomm.MismatchedArguments, moecomm.InvalidArgument)
    assert issubclass(moecomm.OutOfMemory, MemoryError)
    assert not issubclass(moecomm.PeerLost, moecomm.PeerTimeout)
    assert not issubclass(moecomm.PeerTimeout, moecomm.PeerLost)


def test_every_native_kind_has_a_type() -> None:
    assert set(NATIVE) == {name for name in _C.ErrorKind.__members__ if name != "none"}


@pytest.mark.parametrize("name", NATIVE)
def test_from_native(name: str) -> None:
    kind = int(getattr(_C.ErrorKind, name))
    error = errors.from_native(kind, "text", 1, 2, "combine", 9, 8, 70, 50)
    assert type(error) is NATIVE[name] and str(error) == "text" and errors.kind_of(error) == name
    if isinstance(error, moecomm.CapacityExceeded):
        assert (error.needed, error.capacity) == (70, 50)
    if isinstance(error, moecomm.OutOfMemory):
        assert (error.needed, error.available) == (70, 50)
    if isinstance(error, (moecomm.PeerTimeout, moecomm.PeerLost)):
        assert (error.rank, error.peer, error.phase, error.expected, error.seen) == (1, 2, "combine", 9, 8)


def test_the_runtime_raises_these_types() -> None:
    """Errors cross the border of the extension as the Python types."""
    shape = _C.WindowShape(ranks=2, top_k=1, hidden=4, max_tokens=1, dtype=_C.DType.float32, ranks_per_node=2)
    lonely = _C.Communicator(shape=shape, rank=0, num_experts=2, threads=1, timeout=1.0, host_ranks=2)
    lonely.unlink()
    with pytest.raises(moecomm.CommunicatorClosed, match="not connected"):
        lonely.check()
