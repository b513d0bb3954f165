"""Models of Megatron-Core, their tokens carried by moecomm and by its own dispatchers, on the CPU, where
examples/megatron_cpu.py stands in for the GPU that it asks for."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecomm.errors import InvalidArgument, Unsupported
from tests.examples.conftest import EXAMPLES  # puts the examples on the path
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

import megatron_cpu
import train_megatron

assert train_megatron.__file__.startswith(str(EXAMPLES))

pool = own_pool()
LAYERS = 2
OPTIONS = {
    "layers": LAYERS,
    "hidden": 32,
    "capacity": None,
    "recompute": "none",
    "overlap": False,
    "dtype": "float32",
}


@contextlib.contextmanager
def _megatron(size: int) -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # what a schedule of an earlier test has left
    megatron_cpu.without_transformer_engine()
    with megatron_cpu.without_gpu():
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
        yield


def _model(dispatcher: str, size: int, **changes: Any) -> Any:
    """A model of the example with other options, and other fields of Megatron-Core's configuration."""
    own = {name: changes.pop(name) for name in list(changes) if name in OPTIONS}
    options = SimpleNamespace(**{**OPTIONS, "dispatcher": dispatcher, **own})
    config = train_megatron.configure(options, size)
    for name, value in changes.items():
        setattr(config, name, value)
    return train_megatron.build(config, dispatcher).train()


def _gradients(model: Any) -> dict[str, Tensor]:
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def _batch(windows: int, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(train_megatron.VOCABULARY, (windows, 17), generator=generator)
    places_BS, later = (
        torch.arange(16).expand(windows, 16),
        torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1),
    )
    return (ids_BS[:, :-1], places_BS, later), ids_BS[:, 1:]


def _step(model: Any, windows: int, seed: int, call: Any = None) -> dict[str, Tensor]:
    inputs, labels = _batch(windows, seed)
    loss = (call or model)(*inputs, labels=labels).mean()
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model)}


def _differences(what: str, wanted: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    """The tensors that differ by more than 1e-5 of the largest element."""
    if wanted.keys() != got.keys():
        return [f"{what}: {wanted.keys() ^ got.keys()}"]
    found = []
    for name, each in wanted.items():
        far = (got[name] - each).abs().max() / each.abs().max().clamp(1e-6)
        if not far < 1e-5:
            found.append(f"{what}, {name}: {far}")
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"capacity": 0.5, "moe_token_drop_policy": "probs"},
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
        {"moe_shared_expert_intermediate_size": 16},
        {"recompute": "moe"},
        {"recompute": "full", "capacity": 1.0},
    ],
    ids=["dropless", "capacity", "sigmoid top-3", "shared expert", "recompute moe", "recompute all"],
)
@on_ranks(2)
def test_as_its_own(rank: int, size: int, changes: dict[str, Any], seed: int) -> list[str]:
    """The loss and every gradient are those of Megatron-Core's two dispatchers, for batches that grow."""
    from moecomm.megatron import TokenDispatcher

    with _megatron(size):
        models = {each: _model(each, size, **changes) for each in ("alltoall", "allgather", "moecomm")}
        found = []
        for number, windows in enumerate([2, 1, 5]):
            with mock.patch.object(
                TokenDispatcher, "token_dispatch", autospec=True, side_effect=TokenDispatcher.token_dispatch
            ) as dispatch:
                steps = {
                    each: _step(model, windows, seed + 10 * number + rank) for each, model in models.items()
                }
            ours = steps.pop("moecomm")
            for name, wanted in steps.items():
                found += _differences(f"step {number}, {name}", wanted, ours)
            assert dispatch.call_count == LAYERS * (2 if "recompute" in changes else 1), f"step {number}"
        return found


@on_ranks(2)
def test_recompute_by_torch(rank: int, size: int, seed: int) -> list[str]:
    """A model that torch.utils.checkpoint computes again, up to what its backward needs, has the gradients of
    one that is computed once, and does the next step as well."""
    with _megatron(size):
        model = _model("moecomm", size)
        wanted = _step(model, 3, seed + rank)

        def again(*inputs: Any, **labels: Any) -> Any:
            return checkpoint(model, *inputs, **labels, use_reentrant=False)

        twice = [_step(model, 3, seed + rank, again) for _ in range(2)]
        return [each for got in twice for each in _differences("checkpoint", wanted, got)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"capacity": 0.5}, {"moe_shared_expert_intermediate_size": 16}],
    ids=["dropless", "capacity", "shared expert"],
)
@on_ranks(2)
def test_overlapped_microbatches(rank: int, size: int, changes: dict[str, Any], seed: int) -> list[str]:
    """Megatron-Core's 1F1B schedule runs the parts of one microbatch's forward between those of another's
    backward, and frees what it takes a dispatch and experts not to need again."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def losses_and_gradients(dispatcher: str, overlap: bool) -> dict[str, Tensor]:
        model = _model(dispatcher, size, **changes)
        # Its configuration takes this for bfloat16 alone, in which nothing could be compared.
        model.config.overlap_moe_expert_parallel_comm = overlap
        text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(seed + rank))
        losses = get_forward_backward_func()(
            forward_step_func=train_megatron.forward_step,
            data_iterator=train_megatron.windows(text, torch.device("cpu"), seed),
            model=model,
            num_microbatches=4,
            seq_length=train_megatron.SEQUENCE,
            micro_batch_size=train_megatron.WINDOWS,
        )
        return {"loss": torch.stack(losses), **_gradients(model)}

    # Small, so that moecomm's tensors are torch's to free.
    with _megatron(size), mock.patch.multiple(train_megatron, WINDOWS=2, SEQUENCE=16):
        wanted = losses_and_gradients("alltoall", overlap=False)
        found = []
        for dispatcher, overlap in (("alltoall", True), ("moecomm", False), ("moecomm", True)):
            what = f"{dispatcher}, {overlap=}"
            found += _differences(what, wanted, losses_and_gradients(dispatcher, overlap))
        return found


class _Parts:
    """The parts of one batch's way through a dispatcher, with experts that weigh their rows alone."""

    def __init__(self, dispatcher: Any, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._own, self._x = dispatcher, torch.randn(tokens, 2, 32, generator=generator)
        scores = torch.rand(2 * tokens, train_megatron.EXPERTS, generator=generator)
        self._going = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
        self._going &= scores > 0.8  # some were dropped
        self._probs = scores * self._going

    def preprocess(self) -> None:
        self._sent = self._own.dispatch_preprocess(self._x, self._going, self._probs)

    def dispatch(self) -> None:
        rows, _, weights = self._own.dispatch_postprocess(*self._own.token_dispatch(*self._sent))
        more = torch.tensor(len(rows)) - self._going.sum()
        dist.all_reduce(more)
        assert not more, f"{more} rows of tokens that were dropped"
        self._rows = self._own.combine_preprocess(rows * weights.unsqueeze(1))

    def combine(self) -> list[str]:
        y = self._own.combine_postprocess(self._own.token_combine(self._rows))
        wanted = self._x * self._probs.sum(1).view(*y.shape[:2], 1)
        return [] if torch.allclose(y, wanted, rtol=1e-5, atol=1e-6) else [f"{(y - wanted).abs().max()}"]


@on_ranks(2)
def test_two_batches_in_one_layer(rank: int, size: int, seed: int) -> list[str]:
    """A batch may be preprocessed while another is on its way. Two that are both on their way are an error on
    all ranks, and the next batch goes through."""
    with _megatron(size):
        own = _model("moecomm", size).decoder.layers[0].mlp.token_dispatcher
        one, two = (_Parts(own, tokens, seed + rank) for tokens in (4, 6))
        one.preprocess()
        one.dispatch()
        two.preprocess()
        found = one.combine()
        two.dispatch()
        found += two.combine()
        one.preprocess()
        two.preprocess()
        two.dispatch()
        with pytest.raises(Unsupported, match="layer 1: token_dispatch finds nothing of its batch"):
            one.dispatch()
        two.combine()
        one, two = (_Parts(own, 5, seed + rank + each) for each in (0, 2))
        for each in one, two:
            each.preprocess()
            each.dispatch()
        found += two.combine()
        with pytest.raises(Unsupported, match="layer 1: token_combine finds nothing of its batch"):
            one.combine()
        one.preprocess()
        one.dispatch()
        return found + one.combine()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}, "pad_expert_input"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is 'local', must be 'none'"),
        (
            {"moe_token_dispatcher_type": "flex", "overlap_moe_expert_parallel_comm": True},
            "moe_token_dispatcher_type is 'flex', must be 'alltoall'",
        ),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(
    rank: int, size: int, changes: dict[str, Any], says: str, seed: int
) -> None:
    from moecomm.megatron import use_moecomm

    with _megatron(size):
        model = _model("alltoall", size)
        for name, value in changes.items():
            setattr(model.config, name, value)
        layer = model.decoder.layers[0].mlp
        before = layer.token_dispatcher
        with pytest.raises(Unsupported, match=f"layer 1: .*{says}"):
            use_moecomm(model)
        with pytest.raises(InvalidArgument, match="model is list"):
            use_moecomm([model])  # type: ignore[arg-type]
        assert layer.token_dispatcher is before
        dist.barrier()
