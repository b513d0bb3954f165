"""Operations in parts, by the experts of each rank, so that the products of one part can run while the rows
of others travel.

With `parts` of L local experts, expert l is in part l * parts // L. A token's row comes with the first part
that needs it, and is put to all of its places; so when a part has been received, the rows of its experts and
of those of the parts before are complete. On the way back a rank's sum for a token leaves with the last part
that one of its experts here is in. Rows cross once, as in one part, and all results have the same bits.

Another rank's mistake is raised by the call that starts an operation, or by one of its parts.

Between the calls for one operation there must be none for another of the same communicator, or the operation
is given up: its results are worth nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moecomm.backends import Backend
from moecomm.errors import InvalidArgument
from moecomm.types import DispatchOutput


class _InParts:
    """Counts the calls of an operation, one for each part."""

    def __init__(self, backend: Backend, name: str, parts: int) -> None:
        self._backend, self._name, self.parts = backend, name, parts
        self.done = 0
        """Parts so far."""

    def _next(self) -> int:
        if self.done == self.parts:
            raise InvalidArgument(f"{self._name} had all of its {self.parts} parts, expected no further call")
        self.done += 1
        return self.done - 1


class DispatchInParts(_InParts):
    """A dispatch under way, from `Communicator.begin_dispatch`."""

    def __init__(
        self,
        backend: Backend,
        begun: Any,
        parts: int,
        finish: Callable[[Any, tuple[int, ...]], DispatchOutput],
    ) -> None:
        super().__init__(backend, "the dispatch", parts)
        self._begun, self._finish = begun, finish
        self._output: DispatchOutput | None = None
        self.ends: tuple[int, ...] = ()
        """After the first `receive`: the ends of the rows of each part's experts."""

    def receive(self) -> None:
        """Receives the next part, on the current stream, which has to be the one of the first. The first time
        the host waits for the number of rows. Raises what a dispatch raises."""
        if self._next() > 0:
            self._backend.run("moecomm dispatch part", lambda: self._backend.receive_part(self._begun))
            return
        raw = self._backend.run("moecomm dispatch part", lambda: self._backend.finish_dispatch(self._begun))
        self.ends = self._backend.part_ends(self._begun)
        self._output = self._finish(raw, self.ends)

    @property
    def output(self) -> DispatchOutput:
        """The result, of which the rows of parts that were received are there. No part of autograd."""
        if self._output is None:
            raise InvalidArgument("the dispatch has no output yet, expected a receive() before")
        return self._output


class RedispatchInParts(_InParts):
    """Rows along a kept handle, under way; from `Communicator.begin_redispatch`."""

    def __init__(self, backend: Backend, begun: Any, parts: int) -> None:
        super().__init__(backend, "the redispatch", parts)
        self._begun = begun
        self._rows_PH: torch.Tensor | None = None

    def receive(self) -> None:
        """As that of a dispatch; the host waits for nothing."""
        backend, begun = self._backend, self._begun
        if self._next() > 0:
            backend.run("moecomm redispatch part", lambda: backend.receive_part(begun))
        else:
            self._rows_PH = backend.run("moecomm redispatch part", lambda: backend.finish_redispatch(begun))

    @property
    def rows(self) -> torch.Tensor:
        """(P, H), of which those of parts that were received are there."""
        if self._rows_PH is None:
            raise InvalidArgument("the redispatch has no rows yet, expected a receive() before")
        return self._rows_PH


class CombineInParts(_InParts):
    """A combine under way, from `Communicator.begin_combine`."""

    def __init__(
        self, backend: Backend, begun: Any, ends: tuple[int, ...], check: Callable[[Any, int], None]
    ) -> None:
        super().__init__(backend, "the combine", len(ends))
        self._begun, self._ends, self._check = begun, ends, check
        self._result: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def send(self, rows: torch.Tensor) -> None:
        """Sends what the rows of the next part's experts complete, on the current stream, which has to be the
        one of the first part.

        rows: (ends[part] - ends[part - 1], H) in the communicator's dtype. Raises InvalidArgument, on this
        rank only, for others; the part can be sent again.
        """
        part = self.done
        if part < self.parts:
            self._check(rows, self._ends[part] - (self._ends[part - 1] if part > 0 else 0))
        self._next()
        self._result = self._backend.run(
            "moecomm combine part", lambda: self._backend.send_part(self._begun, rows)
        )

    @property
    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """After the last part: (T, H), and the gradients (T, K) of routing weights if there are."""
        if self._result is None:
            raise InvalidArgument(
                f"the combine has had {self.done} of {self.parts} parts, expected all before its result"
            )
        return self._result
