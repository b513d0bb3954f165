"""The search of the model of the pipe that makes sums: it finds nothing wrong, and each mutant it finds."""

from __future__ import annotations

import pytest

from tests.protocol.pipe import MUTANTS, QUICK, Pipe, Violation, search


@pytest.mark.parametrize(("pipe", "states"), QUICK.values(), ids=QUICK.keys())
def test_every_state_is_right(pipe: Pipe, states: int) -> None:
    assert search(pipe) == states


@pytest.mark.parametrize(("mutant", "found"), MUTANTS.values(), ids=MUTANTS.keys())
def test_mutants_are_found(mutant: Pipe, found: str) -> None:
    with pytest.raises(Violation, match=found) as caught:
        search(mutant)
    assert caught.value.trace, "the way there is told"
