"""Refusals of GraphedStep, and its messages. Steps are in tests/multirank/test_graphed_step.py."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from moecomm import Communicator, InvalidArgument, Unsupported
from moecomm.graphs.graphed_step import Needed
from moecomm.nn import GraphedStep, MoEConfig, MoELayer, OverlapConfig
from tests.played import Played, step_of

CONFIG = MoEConfig(hidden=16, ffn_hidden=8, num_experts=4, top_k=2, dtype=torch.float64)


def communicator() -> Communicator:
    return Communicator(
        num_experts=4, hidden=16, top_k=2, max_tokens=20, dtype=torch.float64, device="cpu", timeout=20
    )


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with communicator() as made:
        yield made


@pytest.fixture
def model(comm: Communicator) -> nn.Module:
    return nn.Sequential(MoELayer(CONFIG, comm), MoELayer(CONFIG, comm))


def test_graphs_are_of_gpus(model: nn.Module) -> None:
    with pytest.raises(Unsupported, match="the model is on cpu: a step is captured on a GPU only"):
        GraphedStep(step_of(model), model)


def test_a_model_needs_a_layer() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(InvalidArgument, match="model has no MoELayer"):
        GraphedStep(step_of(model), model, recorder=Played())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"warmup": 0}, "warmup is 0, expected an integer from 1"),
        ({"warmup": 1.5}, "warmup is 1.5, expected an integer from 1"),
        ({"headroom": 0.0}, "headroom is 0.0, must be more than 0"),
        ({"headroom": float("nan")}, "headroom is nan"),
        ({"headroom": "1.5"}, "headroom is '1.5', must be more than 0"),
        ({"model": None}, "model is NoneType, must be an nn.Module"),
    ],
)
def test_bad_arguments(model: nn.Module, change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        GraphedStep(step_of(model), **{"model": model, "recorder": Played(), **change})


def test_communicators_of_several_groups(model: nn.Module) -> None:
    another = object()
    with communicator() as other:
        other._group = lambda: another  # type: ignore[assignment, return-value]
        both = nn.Sequential(model, MoELayer(CONFIG, other))
        with pytest.raises(InvalidArgument, match="several groups: pass one that has all ranks"):
            GraphedStep(step_of(both), both, recorder=Played())


def test_capacities_and_report(model: nn.Module) -> None:
    """20 tokens with 2 experts each, all on one rank: 40 rows by balance, and at worst."""
    assert GraphedStep(step_of(model), model, headroom=math.inf, recorder=Played()).capacities == (40, 40)
    step = GraphedStep(step_of(model), model, headroom=0.5, recorder=Played())
    assert step.capacities == (20, 20)
    assert step.report() == "0 replayed steps, 0 run again without graph"
    step(torch.ones(20, 16, dtype=torch.float64))
    assert (step.replays, step.overflows) == (1, 1)
    assert step.last_needed == Needed(rows=40, capacity=20)
    assert step.report() == (
        "1 replayed steps, 1 run again without graph (100.0%); the last needed 40 rows of 20 (headroom 0.5)"
    )
    assert all(layer.capacity is None for layer in model)  # type: ignore[union-attr]


def test_a_capacity_of_the_layer_bounds_that_of_the_graph(comm: Communicator) -> None:
    config = replace(CONFIG, capacity_factor=0.5, pad_to_capacity=True)
    model = nn.Sequential(MoELayer(config, comm))
    assert model[0].capacity == 20  # 4 experts with 5 tokens each
    step = GraphedStep(step_of(model), model, headroom=10.0, recorder=Played())
    assert step.capacities == (20,)
    for _ in range(3):
        step(torch.randn(20, 16, dtype=torch.float64))
    assert step.overflows == 0 and model[0].capacity == 20


def test_gradients_put_off_beyond_a_step_are_refused(comm: Communicator) -> None:
    model = nn.Sequential(MoELayer(CONFIG, comm, overlap=OverlapConfig(defer_weights=True)))
    step = GraphedStep(step_of(model), model, recorder=Played())
    with pytest.raises(InvalidArgument, match=r"call moecomm\.nn\.backward_weights\(model\) within it"):
        step(torch.randn(4, 16, dtype=torch.float64))
    assert not model[0].has_pending_weights


def test_parameters_are_those_trained_at_the_first_call(model: nn.Module) -> None:
    weight, x_TH = model[1].experts.w_in, torch.randn(4, 16, dtype=torch.float64)
    step_of(model)(x_TH)
    want, weight.grad = weight.grad, None
    weight.requires_grad_(False)
    step = GraphedStep(step_of(model), model, headroom=9.0, recorder=Played())
    weight.requires_grad_(True)
    step(x_TH)
    assert torch.equal(weight.grad, want)
    weight.requires_grad_(False)
    with pytest.raises(InvalidArgument, match=r"has requires_grad=False, must have True, as captured"):
        step(x_TH)
    weight.requires_grad_(True)
    model.eval()
    with pytest.raises(InvalidArgument, match=r"model\.training is False, must be True, as captured"):
        step(x_TH)


class SameMemory(Played):
    """Replays write gradients into the tensors of the first one, as CUDA graphs do."""

    def record(self, run: Any) -> Any:
        first = run()

        def replay() -> Any:
            again = run()
            for old, new in zip(first.grads, again.grads, strict=True):
                old.copy_(new)
            return again._replace(grads=first.grads)

        return replay


def test_gradients_add_up_in_views_of_the_graph(model: nn.Module) -> None:
    step = GraphedStep(step_of(model), model, headroom=9.0, recorder=SameMemory())
    xs, weight = torch.randn(2, 4, 16, dtype=torch.float64), model[1].experts.w_in
    for x_TH in xs:
        step_of(model)(x_TH)
    want = weight.grad
    model.zero_grad()
    for x_TH in xs:
        step(x_TH)
        weight.grad = weight.grad.detach()
    assert_close(weight.grad, want, rtol=1e-9, atol=0)


def test_buffers_are_put_back_after_an_error_in_the_first_step(comm: Communicator) -> None:
    model = nn.Sequential(MoELayer(replace(CONFIG, bias_update_rate=0.01), comm))
    runs = []

    def step(x_TH: Tensor) -> Tensor:
        loss = step_of(model)(x_TH)
        runs.append(loss)
        if len(runs) == 2:
            raise ZeroDivisionError
        return loss

    graphed = GraphedStep(step, model, recorder=Played(), warmup=3)
    with pytest.raises(ZeroDivisionError):
        graphed(torch.randn(4, 16, dtype=torch.float64))
    assert not model[0].router.load_E.any()
