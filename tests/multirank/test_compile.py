"""torch.compile over several ranks: the same numbers as without, gradients included, at every dtype."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig
from moecomm.shared import LayerCommunicators
from tests.multirank.on_ranks import on_ranks


def train_layer(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    seed: int,
    autocast: bool = False,
    dynamic: bool | None = None,
) -> list[str]:
    """Lists the differences between a step of a model and of the same model compiled, in bits unless within
    autocast. The layer runs outside of the compiled graphs."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    config = MoEConfig(**{"hidden": 16, "ffn_hidden": 24, "num_experts": 6, "top_k": 2} | options)
    layer = MoELayer(config, max_tokens=8)
    parts = [layer] if autocast else [torch.nn.Linear(16, 16), layer]
    model = torch.nn.Sequential(*parts).to(layer.comm.device)
    fast = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    x_TH, found = torch.randn(8, 16, device=layer.comm.device), []
    for call in (model, fast):
        model.zero_grad()
        x_TH = x_TH.detach().requires_grad_()
        with torch.autocast(x_TH.device.type, torch.bfloat16, enabled=autocast):
            y_TH = call(x_TH)
        assert not autocast or y_TH.dtype is torch.float32
        y_TH.square().sum().backward()
        gradients = {name: getattr(each, "main_grad", each.grad) for name, each in model.named_parameters()}
        found.append({"y": y_TH.detach(), "x": x_TH.grad, **gradients})
        for each in layer.experts.parameters() if config.main_grad else ():
            each.main_grad = None
    layer.comm.close()
    plain, compiled = found
    assert all(want is not None and want.any() for want in plain.values())
    alike = partial(torch.allclose, rtol=1e-5, atol=1e-6) if autocast else torch.equal
    return [f"rank {rank}: {name} differs" for name in plain if not alike(compiled[name], plain[name])]


FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}
AUX_LOSS = {"num_shared_experts": 1, "aux_loss": "batch", "aux_loss_coef": 0.1}
WITHIN_AUTOCAST = {**AUX_LOSS, "shared_gate": True, "router_bias": True, "bias": True, "init_std": 0.3}
LAYERS: dict[str, dict[str, Any]] = {
    "fixed": {**FIXED, **AUX_LOSS, "dtype": torch.bfloat16},
    "biases and main_grad": {
        "dtype": torch.bfloat16,
        "activation": "swiglu_clamped",
        "bias": True,
        "main_grad": True,
    },
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@on_ranks(1)
def test_a_compiled_layer_trains(rank: int, world_size: int, options: dict[str, Any], seed: int) -> list[str]:
    return train_layer(rank, world_size, options, seed)


@on_ranks(1)
def test_sizes_that_are_not_known(rank: int, world_size: int, seed: int) -> list[str]:
    return train_layer(rank, world_size, FIXED, seed, dynamic=True)


@on_ranks(1)
def test_autocast_stays_out_of_the_backward(rank: int, world_size: int, seed: int) -> list[str]:
    return train_layer(rank, world_size, WITHIN_AUTOCAST, seed, True)


@on_ranks(2)
def test_checkpoints_around_compiled_dropless_layers(rank: int, world_size: int, seed: int) -> list[str]:
    """Lists the gradients in which two layers differ that are compiled, each within a checkpoint. Each routes
    otherwise, and in every step."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    config = MoEConfig(hidden=16, ffn_hidden=16, num_experts=4, top_k=2, init_std=0.3)
    layers = [MoELayer(config, max_tokens=32) for _ in range(2)]
    every = [parameter for layer in layers for parameter in layer.parameters()]
    inputs = [
        torch.randn(20, 16, generator=torch.Generator().manual_seed(seed + 9 * rank + n)) for n in range(2)
    ]
    found = []
    for compiled in (False, True):
        for number, each in enumerate(inputs):
            x_TH = leaf_TH = each.clone().requires_grad_()
            for layer in layers:
                if compiled and number == 0:
                    layer.compile(backend="aot_eager")
                x_TH = checkpoint(layer, x_TH, use_reentrant=False) if compiled else layer(x_TH)
            x_TH.square().sum().backward()
            found.append([leaf_TH.grad, *(parameter.grad for parameter in every)])
            for parameter in every:
                parameter.grad = None
    for layer in layers:
        layer.comm.close()
    steps = zip(found[:2], found[2:], strict=True)
    return [
        f"step {step}, gradient {number}"
        for step, both in enumerate(steps)
        for number, (want, got) in enumerate(zip(*both, strict=True))
        if not torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    ]


@on_ranks(2)
def test_graphs_do_not_depend_on_the_routing(rank: int, world_size: int, seed: int) -> None:
    """Counts the graphs after each of some calls without a capacity, at once and with async_op."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    comm = moecomm.Communicator(num_experts=4, hidden=16, max_tokens=64, top_k=2, dtype=torch.float32)

    def step(x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        work = comm.dispatch(x_TH, ids_TK, async_op=True)
        first = comm.dispatch(x_TH, ids_TK)
        y_TH = comm.combine(written(first) * (1 + 0 * first.tokens_per_expert.sum()), first.handle)
        second = work.wait()
        return y_TH + comm.combine(written(second), second.handle)

    def written(out: moecomm.DispatchOutput) -> torch.Tensor:
        rows_P1 = torch.arange(out.tokens.shape[0])[:, None]
        return torch.where(rows_P1 < out.offsets[-1], out.tokens, 0)

    compiled, counts = torch.compile(step, backend="aot_eager"), []
    for number in range(5):
        generator = torch.Generator().manual_seed(seed + 7 * number + rank)
        x_TH = torch.randn(20, 16, generator=generator)
        ids_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
        assert torch.allclose(compiled(x_TH, ids_TK), 4 * x_TH, rtol=1e-4, atol=1e-5)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    comm.close()
    assert counts[0] > 0 and counts == counts[:1] * len(counts)


@on_ranks(1)
def test_a_whole_graph_is_refused(rank: int, world_size: int) -> None:
    torch._dynamo.reset()
    layer = MoELayer(MoEConfig(hidden=16, ffn_hidden=8, num_experts=2, top_k=2), max_tokens=4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of the graphs"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.zeros(4, 16))
    with pytest.raises(moecomm.Unsupported, match="outside of the graphs"):
        torch.export.export(layer, (torch.zeros(4, 16),), strict=False)
    layer.comm.close()
    x, ids = torch.zeros(4, 16), torch.tensor([[0, 1]] * 4)
    shared = LayerCommunicators(dist.group.WORLD, 2).of(x, 2)

    class Dispatched(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return shared.dispatch(x, ids, None)[1].tokens

    with pytest.raises(moecomm.Unsupported, match="outside of the graphs"):
        torch.export.export(Dispatched(), (x,), strict=False)


def _poison() -> None:
    """Fills memory that torch's allocator is about to hand out with numbers that no gradient has."""
    kept = [torch.full((size,), 1e30) for size in (4, 8, 16, 32, 64, 128, 256) for _ in range(8)]
    del kept


def _moe(kind: str, comm: moecomm.Communicator) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[Any]]:
    """Returns a function of tokens (4, 16) and its parameters."""
    weights_TK = torch.rand(4, 2).requires_grad_()
    ids_TK = torch.tensor([[0, 4, 5, 1], [1, 2, 0, 3]]).t()
    config = MoEConfig(hidden=16, ffn_hidden=24, num_experts=6, top_k=2, num_shared_experts=1)
    layer = MoELayer(config, comm, overlap=OverlapConfig(overlap=kind != "in order"))

    def low(x_TH: torch.Tensor) -> torch.Tensor:
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        return comm.combine(out.tokens * 2, out.handle, weights=out.weights)

    def begun(x_TH: torch.Tensor) -> torch.Tensor:
        out = comm.begin_dispatch(
            x_TH.detach().t().contiguous().t(), ids_TK, weights_TK.t().contiguous().t()
        )()
        y_TH = comm.combine(out.tokens, out.handle, weights=out.weights)
        return y_TH * weights_TK[:, :1]

    function = {"low": low, "begun": begun, "outside": torch.compiler.disable(layer)}.get(kind, layer)
    return function, [weights_TK] if function in (low, begun) else [*layer.parameters()]


@pytest.mark.parametrize(
    ("kind", "summed"),
    [("dropless", False), ("in order", True), ("outside", True), ("low", False), ("begun", True)],
)
@on_ranks(1)
def test_a_step_with_its_backward(
    rank: int, world_size: int, kind: str, summed: bool, seed: int
) -> list[str]:
    """Lists the gradients in which a training step differs that torch.compile has with its backward, and the
    operations of the backend that it traces. The gradient of the layer's result is not contiguous."""
    torch.manual_seed(seed)
    x_TH, w_AB = torch.randn(4, 16).requires_grad_(), torch.randn(32, 5)
    found = set()

    def loss(y_TH: torch.Tensor) -> torch.Tensor:
        return y_TH.sum() if summed else (torch.cat([y_TH, x_TH], 1) @ w_AB).square().sum()

    def watch(backend: Any, name: str) -> None:
        operation = getattr(backend, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                found.add(f"{name} is traced")
            return operation(*arguments, **options)

        setattr(backend, name, watched)

    with moecomm.Communicator(
        num_experts=6, hidden=16, top_k=2, max_tokens=4, dtype=torch.float32, device="cpu"
    ) as comm:
        moe, parameters = _moe(kind, comm)
        for name in ("begin_dispatch", "redispatch", "combine"):
            watch(comm._open(), name)

        def step() -> None:
            loss(moe(x_TH)).backward()

        grads = []
        for call in (step, torch.compile(step, backend="aot_eager")):
            for each in (x_TH, *parameters):
                each.grad = None
            _poison()
            call()
            grads.append([each.grad for each in (x_TH, *parameters)])
        torch._dynamo.reset()
        for place, (want, got) in enumerate(zip(*grads, strict=True)):
            if want is not None and not torch.allclose(got, want, rtol=1e-5, atol=1e-5):
                found.add(f"gradient {place} differs")
    return sorted(found)
