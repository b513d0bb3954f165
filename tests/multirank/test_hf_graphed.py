"""Trainers of transformers that replay forwards and backwards, by a recorder that runs them again."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments, set_seed

from moecomm import InvalidArgument, Unsupported
from moecomm.graphs import GraphedStep
from moecomm.transformers import Graphed, graphed
from moecomm.transformers.experts import LocalExperts
from tests.multirank.conftest import own_pool
from tests.multirank.hf_models import (
    EXPERTS,
    batch_of,
    gradients_of,
    load_over,
    load_parallel,
    ratios_of,
    saved_once,
    train_by,
)
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_transformers import _train, folders
from tests.played import Played

__all__ = ["folders"]  # a fixture
pool = own_pool()
ADAPTERS: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}


class GraphedTrainer(Graphed, Trainer):  # type: ignore[misc]
    recorder = Played()
    last: Any = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        GraphedTrainer.last = self


def _load(folder: Path, size: int) -> Any:
    return load_over(size, folder, "moecomm")


@pytest.mark.parametrize(
    ("size", "family", "adapters", "headroom"),
    [
        pytest.param(1, "qwen3_moe", {}, 1.25, id="alone"),
        pytest.param(1, "gpt_oss", ADAPTERS, 0.1, id="alone, adapters"),
        pytest.param(2, "qwen3_moe", {}, 9.0, id="rows fit"),
        pytest.param(2, "gpt_oss", {}, 0.4, id="rows do not fit"),
        pytest.param(2, "qwen3_moe", ADAPTERS, 0.4, id="adapters, rows do not fit"),
    ],
)
@on_ranks("size")
def test_losses(
    rank: int, size: int, family: str, adapters: dict[str, Any], headroom: float, folders: Path, seed: int
) -> None:
    """They are those of the plain Trainer, with accumulation where a rank is alone, and where all rows fit
    with gradient checkpointing."""
    folder, losses, weights = saved_once(folders, family), [], []
    # Not Adam, whose first steps take the sign of a gradient: rounding may turn one that is all but zero.
    options: dict[str, Any] = {"learning_rate": 0.1, "optim": "sgd", "save_strategy": "no", "max_steps": 4}
    options["gradient_accumulation_steps"] = passes = 3 - size
    options["gradient_checkpointing"] = headroom == 9.0
    options["gradient_checkpointing_kwargs"] = {"use_reentrant": False, "preserve_rng_state": False}
    given = functools.partial(GraphedStep, headroom=headroom)
    for trainer in (Trainer, GraphedTrainer):
        set_seed(seed % 2**32)
        with mock.patch.object(graphed, "GraphedStep", given):
            kind = trainer, TrainingArguments
            model, found = _train(kind, _load(folder, size), folders / "out", seed, adapters, **options)
        losses.append(torch.tensor(found))
        weights.append([each.detach() for each in model.parameters() if each.requires_grad])
    assert len(losses[0]) == 4
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    step = GraphedTrainer.last.graphed_step
    assert step.replays == 4 * passes - 1
    assert (step.overflows > 0) == (headroom < 1 and size > 1), step.report()


@on_ranks(1)
def test_batches_of_another_shape(rank: int, size: int, folders: Path, seed: int) -> None:
    """They run as usual, among batches that are replayed; labels that are left out count as they do."""
    folder, losses = saved_once(folders, "qwen3_moe"), []
    rows = [torch.randint(3, 96, (12 + 2 * (n % 4 == 3),)) for n in range(8)]
    data = [{"input_ids": row, "labels": row.where(row > 3 * n, -100)} for n, row in enumerate(rows)]
    for kind in (Trainer, GraphedTrainer):
        set_seed(0)
        given = {"model": _load(folder, 1), "train_dataset": data}
        options = {"per_device_train_batch_size": 1, "num_train_epochs": 2, "save_strategy": "no"}
        losses.append(train_by((kind, TrainingArguments), folders / "out", given, **options)[1])
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    assert len(losses[0]) == 16
    assert 4 <= GraphedTrainer.last.graphed_step.replays <= 12  # of one of the shapes


def _forward_backward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


@on_ranks(2)
def test_evaluation_between_steps(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """FSDP2 keeps the gathered weights of a forward without backward, which no replay drops: they have to be
    gone before each."""
    folder, tokens = saved_once(folders, "qwen3_moe"), batch_of(rank, seed)
    model = _load(folder, 2).train()

    class Replays(Played):
        def record(self, run: Any) -> Any:
            def replay() -> Any:
                assert all(isinstance(each, DTensor) for each in model.parameters()), "weights are gathered"
                return run()

            return replay

    _forward_backward(model, tokens)
    wanted = gradients_of(model)
    step = None
    for _ in range(3):
        model.zero_grad()
        with torch.no_grad():
            model.eval()(tokens)
        assert not all(isinstance(each, DTensor) for each in model.parameters())
        model.train()
        if step is None:
            given = functools.partial(_forward_backward, model)
            step = GraphedStep(given, model, headroom=9.0, recorder=Replays())
        step(tokens)
    ratios = ratios_of(gradients_of(model), wanted)
    return [f"{name}: {ratio:.1e}" for name, ratio in ratios.items() if ratio > 1e-5]


@on_ranks(4)
def test_copies_of_experts(rank: int, size: int, folders: Path, seed: int) -> None:
    """If the rows of a step do not fit on some ranks, all ranks run the step again, also those of the other
    copy, whose rows fit: FSDP2 gathers weights over all ranks."""
    model = load_parallel(saved_once(folders, "qwen3_moe"), "moecomm", fsdp_size=4, ep_size=2).train()
    tokens = batch_of(rank, seed)
    losses = [_forward_backward(model, tokens)]
    step = GraphedStep(functools.partial(_forward_backward, model), model, headroom=9.0, recorder=Played())
    losses.append(step(tokens))
    # Not by too little headroom: on the CPU a dispatch would end the step of its ranks, and leave the others.
    read = step._overflow_check.read
    with mock.patch.object(step._overflow_check, "read", lambda rows: read(99 if rank >= 2 else rows)):
        losses.append(step(tokens))
    assert step.overflows == 1
    assert torch.allclose(losses[0], torch.stack(losses[1:]))


@on_ranks(1)
def test_parameters_that_moved(rank: int, size: int, folders: Path, seed: int) -> None:
    model, tokens = _load(saved_once(folders, "qwen3_moe"), 1).train(), batch_of(0, seed)
    _forward_backward(model, tokens)
    step = GraphedStep(functools.partial(_forward_backward, model), model, recorder=Played())
    step(tokens)
    weight = model.lm_head.weight
    kept, weight.data = weight.data, weight.data.clone()
    with pytest.raises(InvalidArgument, match=r"shape \(96, 32\) lies in other memory than captured"):
        step(tokens)
    weight.data = kept
    step(tokens)


@on_ranks(1)
def test_another_model_and_longer_batches(rank: int, size: int, folders: Path, seed: int) -> None:
    """train() makes another model (model_init) while the first one's graph is there; a batch longer than the
    one before it, for which a communicator in a graph may lack room, is not captured."""
    folder, results = saved_once(folders, "qwen3_moe"), []
    data = [
        {"input_ids": row, "labels": row} for row in (torch.randint(3, 96, (n,)) for n in (9, 40, 40, 40))
    ]
    for kind in (Trainer, GraphedTrainer):
        given = {"model_init": lambda: _load(folder, 1), "train_dataset": data}
        options: dict[str, Any] = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "optim": "sgd"}
        options |= {"learning_rate": 0.1, "train_sampling_strategy": "sequential", "save_strategy": "no"}
        made, _ = train_by((kind, TrainingArguments), folders / "out", given, **options)
        of_call = [[each.detach() for each in made.model.parameters()]]
        made.train()
        of_call.append([each.detach() for each in made.model.parameters()])
        results.append(of_call)
        assert kind is Trainer or made.graphed_step.replays == 2
    for plain, graphed_weights in zip(*results, strict=True):
        for one, other in zip(plain, graphed_weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class WithPairs(Trainer):
    """A Trainer whose batches have a list of tensors; the loss is multiplied by the mean of the first."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        factors = inputs.pop("factors")
        return super().compute_loss(model, inputs, *rest, **options) * factors[0].mean()


@on_ranks(1)
def test_batches_with_lists(rank: int, size: int, folders: Path, seed: int) -> None:
    """They run as usual: a graph would keep the first list's tensors."""
    folder, losses = saved_once(folders, "qwen3_moe"), []
    tokens = batch_of(0, seed)
    for kind in (WithPairs, type("GraphedPairs", (Graphed, WithPairs), {"recorder": Played()})):
        given = {
            "model": _load(folder, 1),
            "train_dataset": [1.0, 2.0, 3.0, 4.0],
            "data_collator": lambda rows: {
                "input_ids": tokens,
                "labels": tokens,
                "factors": [torch.tensor([1.0, rows[0]])],
            },
        }
        options: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": 4, "save_strategy": "no"}
        options["remove_unused_columns"] = False
        made, found = train_by((kind, TrainingArguments), folders / "out", given, **options)
        losses.append(found)
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)
    assert len(losses[0]) == 4 and made.graphed_step is None


@on_ranks(1)
def test_an_optimizer_with_modes(rank: int, size: int, folders: Path, seed: int) -> None:
    """Evaluation puts it into its other mode; a replay does not bring it back, so the Trainer has to."""
    modes: list[bool] = []

    class WithModes(torch.optim.SGD):
        trains = False

        def train(self) -> None:
            self.trains = True

        def eval(self) -> None:
            self.trains = False

    class Replays(Played):
        def record(self, run: Any) -> Any:
            def replay() -> Any:
                modes.append(optimizer.trains)
                return run()

            return replay

    model = _load(saved_once(folders, "qwen3_moe"), 1)
    optimizer = WithModes(model.parameters(), lr=0.1)
    row = torch.arange(3, 12)
    data = [{"input_ids": row, "labels": row}] * 8
    kind = type("Replayed", (GraphedTrainer,), {"recorder": Replays()})
    given = {"model": model, "train_dataset": data, "eval_dataset": data, "optimizers": (optimizer, None)}
    options: dict[str, Any] = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    train_by((kind, TrainingArguments), folders / "out", given, save_strategy="no", **options)
    assert modes == [True] * 3


@on_ranks(2)
def test_refusals(rank: int, size: int, folders: Path, seed: int) -> None:
    folder = saved_once(folders, "qwen3_moe")
    model, tokens = _load(folder, 2), batch_of(0, seed)

    forward_backward = functools.partial(_forward_backward, model)
    with pytest.raises(InvalidArgument, match="no experts of transformers that moecomm has run: call it"):
        GraphedStep(forward_backward, model, recorder=Played())
    forward_backward(tokens)
    with pytest.raises(Unsupported, match="the model is on cpu: a step is captured on a GPU only"):
        GraphedStep(forward_backward, model)
    step = GraphedStep(forward_backward, model, recorder=Played())
    with (
        mock.patch.object(LocalExperts, "has_plain_weights", return_value=False),
        pytest.raises(Unsupported, match="Qwen3MoeExperts, which runs its own forward"),
    ):
        step(tokens)

    options: dict[str, Any] = {"max_steps": 1, "save_strategy": "no"}
    for kind, more, text in (
        (type("OnGpus", (GraphedTrainer,), {"recorder": None}), {}, "the model is on cpu: a step is"),
        (GraphedTrainer, {"gradient_accumulation_steps": 2}, "_steps=2 on 2 ranks, must be 1"),
        (GraphedTrainer, {"torch_empty_cache_steps": 1}, "a graph cannot free memory"),
    ):
        with pytest.raises(Unsupported, match=text):
            _train((kind, TrainingArguments), model, folders / "out", seed, {}, **options, **more)
    trainer = mock.Mock(is_deepspeed_enabled=False, is_fsdp_enabled=False)
    trainer.args = TrainingArguments(str(folders / "out"), use_cpu=True, optim="adalomo")
    with pytest.raises(Unsupported, match="optim='adalomo', which changes weights within the backward"):
        graphed._require_one_step(trainer, model, Played())
