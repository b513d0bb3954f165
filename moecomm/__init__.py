"""moecomm: expert-parallel dispatch and combine. `Communicator` is the runtime, `moecomm.nn` has layers.

Attributes:
    __version__: the version of the installed package.
"""

import importlib

import torch.distributed

from moecomm.communicator import Communicator
from moecomm.errors import (
    CapacityExceeded,
    CommunicatorClosed,
    InvalidArgument,
    InvalidRouting,
    MismatchedArguments,
    MoecommError,
    OutOfMemory,
    PeerLost,
    PeerTimeout,
    Unsupported,
)
from moecomm.setup.devices import available_devices
from moecomm.setup.memory_plan import MemoryPlan
from moecomm.setup.version import __version__
from moecomm.types import DispatchOutput, Handle, Work

if not torch.distributed.is_initialized():
    # When torch.distributed.nn.functional is imported, its functions take the default group of that moment as
    # a default argument; torch._dynamo imports this module in the first backward or optimizer. A group held
    # there outlives destroy_process_group(), and so do gloo's threads, which abort the process if they are
    # running when the interpreter ends. So this imports the module before there is a group (docs/errors.md).
    importlib.import_module("torch.distributed.nn.functional")

__all__ = [
    "CapacityExceeded",
    "Communicator",
    "CommunicatorClosed",
    "DispatchOutput",
    "Handle",
    "InvalidArgument",
    "InvalidRouting",
    "MemoryPlan",
    "MismatchedArguments",
    "MoecommError",
    "OutOfMemory",
    "PeerLost",
    "PeerTimeout",
    "Unsupported",
    "Work",
    "__version__",
    "available_devices",
]
