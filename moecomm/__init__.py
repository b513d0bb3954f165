"""moecomm: expert-parallel dispatch and combine. `Communicator` is the runtime, `moecomm.nn` the layers on
it."""

from moecomm.backends import available_devices
from moecomm.communicator import Communicator
from moecomm.errors import (
    CapacityExceeded,
    CommunicatorClosed,
    InvalidArgument,
    InvalidRouting,
    InvalidSchedule,
    MismatchedArguments,
    MoecommError,
    OutOfMemory,
    PeerLost,
    PeerTimeout,
    PoolExceeded,
    Unsupported,
)
from moecomm.memory import MemoryPlan
from moecomm.types import DispatchOutput, Handle, Work
from moecomm.version import __version__

__all__ = [
    "CapacityExceeded",
    "Communicator",
    "CommunicatorClosed",
    "DispatchOutput",
    "Handle",
    "InvalidArgument",
    "InvalidRouting",
    "InvalidSchedule",
    "MemoryPlan",
    "MismatchedArguments",
    "MoecommError",
    "OutOfMemory",
    "PeerLost",
    "PeerTimeout",
    "PoolExceeded",
    "Unsupported",
    "Work",
    "__version__",
    "available_devices",
]
