"""DeepEP's events, on CUDA events; on CPU tensors operations are done when they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.errors import InvalidArgument


class EventHandle:
    """An event on the stream that is current when it is made."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(stream or torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event, as the calls of a Buffer take and return it. As a context, `with event:`, it makes the
    current stream wait at the end.

    Attributes:
        event: an EventHandle, or None.
        extra_tensors: kept alive as long as this object is.
        results: what `wait` returns: the results of a call with defer_epilogue=True, else None.
    """

    results: Any = None
    hook_after_wait: Callable[[], None] | None = None
    _release = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def wait(self, release_handle: bool = False) -> Any:
        """Calls `current_stream_wait`, and returns `results`, which the event then no longer holds."""
        self.current_stream_wait(release_handle)
        results, self.results = self.results, None
        return results

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, and runs the registered hook.

        Raises InvalidArgument without an event: the call that returned it had async_finish=False."""
        if self.event is None:
            raise InvalidArgument("this EventOverlap has no event: a call returns one with async_finish=True")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Makes the next `current_stream_wait` call a function at its end."""
        if self.hook_after_wait is not None:
            raise InvalidArgument("a hook is registered already, expected one for each wait")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release)
        self._release = False
