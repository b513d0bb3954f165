"""The search of the protocol's model: it finds nothing wrong, and each mutant it finds."""

from __future__ import annotations

import pytest

from tests.protocol.model import MUTANTS, QUICK, Protocol, Violation, search


@pytest.mark.parametrize(("protocol", "states"), QUICK.values(), ids=QUICK.keys())
def test_every_state_is_right(protocol: Protocol, states: int) -> None:
    assert search(protocol) == states


@pytest.mark.parametrize(("mutant", "found"), MUTANTS.values(), ids=MUTANTS.keys())
def test_mutants_are_found(mutant: Protocol, found: str) -> None:
    with pytest.raises(Violation, match=found) as caught:
        search(mutant)
    assert caught.value.trace, "the way there is told"
