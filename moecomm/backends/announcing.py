"""What goes wrong on one rank between the call of an operation and the runtime's part in it is announced to
all ranks in place of the operation, so that they stay in step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from moecomm.backends.base import Backend
from moecomm.errors import CapacityExceeded, InvalidArgument, announced_as, kind_of

Result = TypeVar("Result")


class Announcing(ABC):
    """What the backends share: how an operation fails."""

    _announced = True
    """True from when the runtime has the operation, which sees to it that all ranks learn of its errors."""

    @abstractmethod
    def _announce(self, kind: str, text: str) -> None:
        """Tells all ranks of an error of this one, in the place of an operation."""

    def _whole(self, operation: Callable[[], Result]) -> Result:
        """Runs an operation, checks and copies of its arguments included. What it raises before it has set
        `_announced` is announced, as `announced_as` has it. All ranks know of an InvalidArgument then."""
        self._announced = False
        try:
            return operation()
        except Exception as error:
            told: Exception = error
            if not self._announced:
                self._announced = True
                told = typed = announced_as(error)
                self._announce(kind_of(typed), str(typed).encode(errors="replace").decode())
            if isinstance(told, InvalidArgument):
                told._is_known_to_all = True
            if told is error or isinstance(error, CapacityExceeded):
                raise
            raise told from error


def announce(backend: Backend, error: Exception) -> NoReturn:
    """Raises `error`, found before its operation could begin, on all ranks in place of the operation."""

    def operation() -> NoReturn:
        backend.ready()
        raise error

    backend.run("moecomm refuse", operation)


def memory_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's elements; 0 if there are none. Raises InvalidArgument for a tensor
    with elements and no memory."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise InvalidArgument(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}, which the operation has made, has no "
            "memory, expected a call outside of FakeTensorMode and of other modes that make such tensors"
        )
    return address
