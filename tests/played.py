"""A recorder for GraphedStep that records nothing: each replay runs the step; and a step."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Played:
    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        return run


def step_of(model: Any) -> Callable[[Tensor], Tensor]:
    """A forward and a backward of the model, whose loss is the sum of squares."""

    def step(x_TH: Tensor) -> Tensor:
        loss: Tensor = model(x_TH).square().sum()
        loss.backward()
        return loss

    return step
