"""An operation on a CUDA communicator's own stream, beside the caller's stream. A Work refers to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from moecomm.backends.base import RawDispatch

if TYPE_CHECKING:
    from moecomm.backends.cuda import CudaBackend

Result = TypeVar("Result")
Finished = TypeVar("Finished")


class SideWork(Generic[Result, Finished]):
    """One operation of CudaBackend.launch. `begin` and `complete` are called with the backend's lock held."""

    def __init__(
        self,
        owner: CudaBackend,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
    ) -> None:
        self._owner, self._gpu, self._name, self._side = owner, owner._gpu, name, owner.stream
        self._begin, self._complete, self._finish = begin, complete, finish
        self._begun: Any = None
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None

    def begin(self) -> bool:
        """Runs the first half, or the whole operation if it is not split; keeps an error for `wait`. Returns
        whether there was none."""
        self._step(self._begin, "_result" if self._complete is None else "_begun")
        self._done = self._complete is None or self._error is not None
        return self._error is None

    def complete(self) -> None:
        """Runs the second half, unless it has run."""
        if self._owner._unfinished is self:
            self._owner._unfinished = None
        if not self._done:
            self._done = True
            begun, self._begun = self._begun, None
            assert self._complete is not None
            self._step(partial(self._complete, begun), "_result")

    def _step(self, operation: Callable[[], Any], target: str) -> None:
        with self._gpu.on(self._side):
            try:
                setattr(self, target, self._owner.run_now(self._name, operation))
                self._event = self._side.record_event()
            except BaseException as error:  # the caller of wait() gets errors of every kind
                self._error = error
                if not isinstance(error, Exception):  # Ctrl-C is also raised now
                    raise
                with suppress(RuntimeError):  # in a capture that has failed
                    self._event = self._side.record_event()

    def wait(self) -> Finished:
        """Completes the operation and returns what `finish` makes of the result, or raises the error, without
        keeping it (`_raise_again` in types.py says why). The device may still compute the result."""
        self._owner.settle(self)
        error = self._error
        try:
            if isinstance(error, Exception):
                self._error = None
            if error is not None:
                raise error
            with self._gpu.on(self._side):  # the backward runs on the stream of the forward
                return self._finish(self._result)
        finally:
            del error

    def join(self) -> None:
        """Makes the current stream wait for the operation."""
        if self._error is not None:
            return
        caller = self._gpu.stream()
        assert self._event is not None
        caller.wait_event(self._event)
        for tensor in _tensors(self._result):
            tensor.record_stream(caller)

    def is_completed(self) -> bool:
        """Returns True when the device is done. If it is done with the first half, runs the second half."""
        if self._error is None and self._event is not None and not self._event.query():
            return False
        if self._done:
            return True
        self._owner.settle(self)
        return self._error is not None or self._event is None or self._event.query()


def _tensors(result: Any) -> list[Tensor]:
    """Returns the tensors in the result of an operation."""
    if isinstance(result, Tensor):
        return [result]
    found: tuple[Tensor | None, ...]
    if isinstance(result, RawDispatch):
        index = () if result.expert_index is None else result.expert_index[:2]
        found = (result.tokens_PH, result.scales, result.weights, result.topk_idx_PK, *index)
        found += (result.plan.blob,)
    else:
        found = result  # gradients of a dispatch, possibly None
    return [each for each in found if each is not None]
