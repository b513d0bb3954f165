"""The small searches of the protocol's model find nothing wrong, and each mutant is found."""

import pytest

from tests.protocol.model import MUTANTS, QUICK, Protocol, Violation, search

SMALL = {name: each for name, each in QUICK.items() if each[1] < 20_000}


@pytest.mark.parametrize(("protocol", "states"), SMALL.values(), ids=SMALL.keys())
def test_every_state_is_right(protocol: Protocol, states: int) -> None:
    assert search(protocol) == states


@pytest.mark.parametrize(("mutant", "found"), MUTANTS.values(), ids=MUTANTS.keys())
def test_mutants_are_found(mutant: Protocol, found: str) -> None:
    with pytest.raises(Violation, match=found) as caught:
        search(mutant)
    assert caught.value.trace, "the way there is told"
