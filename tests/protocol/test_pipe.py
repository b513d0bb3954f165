"""The searches of the models of the pipes that make sums and that move rows find nothing wrong, and they find
each mutant.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol import move, pipe
from tests.protocol.states import Violation

MODELS = {"sums": pipe, "rows": move}


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, module in MODELS.items() for name in module.QUICK]
)
def test_every_state_is_right(model: str, name: str) -> None:
    module: Any = MODELS[model]
    small, states = module.QUICK[name]
    assert module.search(small) == states


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, module in MODELS.items() for name in module.MUTANTS]
)
def test_mutants_are_found(model: str, name: str) -> None:
    module: Any = MODELS[model]
    mutant, found = module.MUTANTS[name]
    with pytest.raises(Violation, match=found) as caught:
        module.search(mutant)
    assert caught.value.trace, "the way there is told"
