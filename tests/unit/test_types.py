"""The types of the public surface."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import moecomm
from moecomm import types


@pytest.mark.parametrize("kind", [moecomm.DispatchOutput, moecomm.Handle, moecomm.MemoryPlan])
def test_results_are_frozen_and_named(kind: type) -> None:
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))


def _handle() -> moecomm.Handle:
    return moecomm.Handle(plan=None, owner=0, layout="expert", num_tokens=3, num_rows=5)


def test_a_handle_cannot_be_changed() -> None:
    handle = _handle()
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.num_rows = 6
    # Handles hold plans, which compare by identity: two dispatches never share one by accident.
    assert handle != _handle() and handle == handle


def _view(first: int, name: str) -> torch.Tensor:
    return torch.tensor([first + types.PLAN_VIEWS.index(name)])


def test_views_of_the_plan_are_made_when_asked_for() -> None:
    def out(handle: Any = None) -> moecomm.DispatchOutput:
        return types.build(
            moecomm.DispatchOutput,
            tokens=torch.zeros(0, 4),
            weights=None,
            handle=handle,
            expert_handle=handle,
            plan_views=functools.partial(_view, 7),
        )

    held = out(_handle())  # which can be copied, and not pickled
    for each in (held, copy.copy(held), pickle.loads(pickle.dumps(out())), dataclasses.replace(held)):
        assert [int(getattr(each, name)) for name in types.PLAN_VIEWS] == [7, 8, 9, 10, 11]
        assert each.offsets is each.offsets and each.topk_idx is None
    assert "offsets=tensor([8])" in repr(out())
    with pytest.raises(dataclasses.FrozenInstanceError):
        out().offsets = torch.zeros(1)  # type: ignore[misc]
    assert not hasattr(out(), "offset") and not hasattr(types.build(moecomm.DispatchOutput), "offsets")


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_says_why_it_cannot_be_copied(take: Callable[[Any], Any]) -> None:
    with moecomm.Communicator(
        num_experts=2, hidden=16, top_k=1, max_tokens=4, dtype=torch.float32, device="cpu"
    ) as comm:
        out = comm.dispatch(torch.ones(2, 16), torch.tensor([[0], [1]]))
        with pytest.raises(TypeError, match="its plan belongs to the communicator that made it"):
            take(out.handle)
