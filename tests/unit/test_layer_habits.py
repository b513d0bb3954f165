"""What programs do with a layer: compile it, load its weights, put other tensors in their place, leave steps
out. One rank, so that gradients can be compared with those of the plain way."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moecomm
from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    backward_weights,
    is_expert_parameter,
    keep_plans,
    set_loss_scale,
)
from moecomm.train import drift

SIZES: dict[str, Any] = {"hidden": 16, "num_experts": 4, "top_k": 2}
CONFIG = MoEConfig(**SIZES, ffn_hidden=8, init_std=0.5)
WITH_LOSS: dict[str, Any] = {
    "aux_loss": "batch",
    "aux_loss_coef": 500.0,
    "capacity_factor": 2.0,
    "pad_to_capacity": True,
}


@pytest.fixture
def comm() -> Iterator[moecomm.Communicator]:
    with moecomm.Communicator(**SIZES, max_tokens=64, device="cpu", dtype=torch.float32) as made:
        yield made


def made(comm: moecomm.Communicator, seed: int, **changes: Any) -> MoELayer:
    overlap = changes.pop("overlap", OverlapConfig())
    torch.manual_seed(seed)
    return MoELayer(dataclasses.replace(CONFIG, **changes), comm, overlap=overlap)


def gradients(layer: MoELayer, run: Any, x_TH: Tensor) -> list[Tensor | None]:
    layer.zero_grad()
    x_TH = x_TH.clone().requires_grad_()
    run(x_TH).square().sum().backward()
    return [x_TH.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("breaks", ["load", "hook"])
def test_a_graph_that_breaks_in_the_routing_keeps_gradients(
    comm: moecomm.Communicator, breaks: str, seed: int
) -> None:
    """The balancing biases' count of choices, and a hook that looks at numbers, end a graph."""
    layer = made(comm, seed, bias_update_rate=0.001 if breaks == "load" else 0.0)
    if breaks == "hook":
        seen: list[list[int]] = []
        layer.router.register_forward_hook(
            lambda module, given, out: seen.append(out.tokens_per_expert_E.tolist())
        )
    x_TH = torch.randn(8, 16)
    want = gradients(layer, layer, x_TH)
    counted = layer.router.load_E.clone() if breaks == "load" else None
    torch._dynamo.reset()
    found = gradients(layer, torch.compile(layer, backend="eager"), x_TH)
    for one, other in zip(found, want, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)
    if counted is not None:
        assert torch.equal(layer.router.load_E, 2 * counted) and counted.sum() == 16


@pytest.mark.parametrize("main_grad", [False, True])
def test_weights_that_are_put_in_keep_their_mark(
    comm: moecomm.Communicator, main_grad: bool, seed: int
) -> None:
    layer = made(comm, seed, main_grad=main_grad)
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    layer.load_state_dict(state)
    layer(torch.randn(4, 16)).sum().backward()
    w_in = layer.experts.w_in
    assert is_expert_parameter(w_in) and (w_in.grad is None) == main_grad
    assert not main_grad or w_in.main_grad.abs().sum() > 0
    experts = GroupedExperts(dataclasses.replace(CONFIG, main_grad=main_grad), device="meta")
    assert all(map(is_expert_parameter, experts.to_empty(device="cpu").parameters()))


def test_deferred_gradients_of_other_tensors_go_to_these(comm: moecomm.Communicator, seed: int) -> None:
    layer = made(comm, seed, overlap=OverlapConfig(defer_weights=True))
    others = {name: each.detach().clone().requires_grad_() for name, each in layer.named_parameters()}
    functional_call(layer, others, (torch.randn(4, 16),)).sum().backward()
    layer.backward_weights()
    assert layer.experts.w_in.grad is None and others["experts.w_in"].grad is not None


def test_deferred_gradients_of_a_cast(comm: moecomm.Communicator, seed: int) -> None:
    """Another tensor in each of two microbatches, of one parameter."""
    layer, parts = made(comm, seed), [torch.randn(8, 16) for _ in range(2)]
    found = []
    for defer in (False, True):
        layer.overlap = OverlapConfig(defer_weights=defer)
        wide = layer.experts.w_in.detach().double().requires_grad_()
        for part in parts:
            functional_call(layer, {"experts.w_in": wide.float()}, (part,)).square().sum().backward()
        assert layer.has_pending_weights == defer
        layer.backward_weights()
        assert wide.grad is not None
        found.append(wide.grad)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4)


def test_deferred_gradients_of_saved_copies(comm: moecomm.Communicator, seed: int) -> None:
    """Hooks of saved tensors give back copies of the weights, as save_on_cpu does on GPUs."""
    layer, x_TH, found = made(comm, seed), torch.randn(8, 16), []
    for defer in (False, True):
        layer.overlap = OverlapConfig(defer_weights=defer)
        layer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            y_TH = layer(x_TH)
        y_TH.square().sum().backward()
        layer.backward_weights()
        found.append([layer.experts.w_in.grad, layer.experts.w_out.grad])
    assert_close(*found)


def test_deferred_gradients_are_for_parameters_alone(comm: moecomm.Communicator, seed: int) -> None:
    """Weights that are computed from parameters get no gradient so, and are refused before a row is sent."""
    layer = made(comm, seed, overlap=OverlapConfig(defer_weights=True))
    x_TH, refusal = torch.randn(4, 16), "defer_weights is True and experts.w_in is computed"
    with pytest.raises(moecomm.InvalidArgument, match=refusal):
        functional_call(layer, {"experts.w_in": layer.experts.w_in * 2}, (x_TH,))
    parametrize.register_parametrization(layer.experts, "w_in", torch.nn.Softplus())
    with pytest.raises(moecomm.InvalidArgument, match=refusal):
        layer(x_TH)
    with torch.no_grad():
        layer(x_TH)
    layer.experts.parametrizations.w_in.original.requires_grad_(False)
    layer(x_TH).sum().backward()
    layer.backward_weights()
    assert layer.experts.w_out.grad is not None


def test_deferred_gradients_are_those_that_a_backward_is_for(comm: moecomm.Communicator, seed: int) -> None:
    layer = made(comm, seed, overlap=OverlapConfig(defer_weights=True))
    x_TH = torch.randn(6, 16).requires_grad_()
    layer(x_TH).sum().backward(inputs=[x_TH])
    torch.autograd.grad(layer(x_TH).sum(), [x_TH, layer.experts.w_in], allow_unused=True)
    assert not layer.has_pending_weights
    layer(x_TH).sum().backward(inputs=[layer.experts.w_in])
    layer.backward_weights()
    assert layer.experts.w_in.grad is not None and layer.experts.w_out.grad is None


def test_a_step_that_is_left_out_leaves_nothing(comm: moecomm.Communicator, seed: int) -> None:
    layer = made(comm, seed, overlap=OverlapConfig(defer_weights=True))
    layer(torch.full((4, 16), torch.nan)).sum().backward()
    backward_weights(layer, drop=True)
    layer.zero_grad()
    layer(torch.randn(4, 16)).sum().backward()
    backward_weights(layer)
    assert layer.experts.w_in.grad.isfinite().all() and layer.experts.w_in.grad.abs().sum() > 0


def test_choices_are_counted_once_for_several_backwards(comm: moecomm.Communicator, seed: int) -> None:
    layer = made(comm, seed, bias_update_rate=0.001, aux_loss="batch", aux_loss_coef=0.01)
    set_loss_scale(layer, 1.0)
    y_TH = layer(torch.randn(8, 16))
    y_TH[:4].sum().backward(retain_graph=True)
    y_TH[4:].sum().backward()
    assert layer.router.load_E.sum() == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # of float16 autocast can make no bfloat16
@pytest.mark.parametrize("overlap", [True, False])
def test_a_backward_within_autocast_changes_nothing(overlap: bool, dtype: torch.dtype, seed: int) -> None:
    options: dict[str, Any] = {"num_shared_experts": 1, "shared_gate": True, "bias": True, "dtype": dtype}
    with moecomm.Communicator(**SIZES, max_tokens=64, device="cpu", dtype=dtype) as comm:
        layer, found = made(comm, seed, **options, overlap=OverlapConfig(overlap=overlap)), []
        x_TH = torch.randn(8, 16)
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                found.append(gradients(layer, layer, x_TH))
    for one, other in zip(*found, strict=True):  # the router's sums may run in another order
        assert_close(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


class Product(torch.nn.Module):
    """A parametrization with a product, which autocast would round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.right = torch.nn.Parameter(torch.randn(width, width))

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ self.right


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parametrization_within_autocast_is_exact(
    comm: moecomm.Communicator, overlap: bool, seed: int
) -> None:
    layer = made(comm, seed, num_shared_experts=1, overlap=OverlapConfig(overlap=overlap))
    for module in (layer.experts, layer.shared):
        parametrize.register_parametrization(module, "w_in", Product(16))
    x_TH = torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found_TH = layer(x_TH)
    assert torch.equal(found_TH, layer(x_TH))


@pytest.mark.parametrize("name", ["experts", "shared"])
def test_modules_in_the_place_of_experts_are_refused(
    comm: moecomm.Communicator, name: str, seed: int
) -> None:
    layer = made(comm, seed, num_shared_experts=1)
    kept = getattr(layer, name)
    setattr(layer, name, torch.nn.Sequential(kept))
    with pytest.raises(moecomm.InvalidArgument, match=f"layer.{name} is Sequential.*parametrize"):
        layer(torch.zeros(4, 16))
    setattr(layer, name, kept)
    assert layer(torch.zeros(4, 16)).shape == (4, 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(comm: moecomm.Communicator, dtype: torch.dtype, seed: int) -> None:
    layer = made(comm, seed)
    with pytest.raises(moecomm.InvalidArgument, match="x is torch"):
        layer(torch.zeros(4, 16).to(dtype))
    assert layer(torch.zeros(4, 16)).shape == (4, 16)


@pytest.mark.parametrize("part", ["router", "experts", "shared"])
def test_weights_without_values_are_refused(comm: moecomm.Communicator, part: str, seed: int) -> None:
    """A start on the meta device without to_empty: torch multiplies by such weights, to any numbers."""
    layer = made(comm, seed, num_shared_experts=1)
    getattr(layer, part).to("meta")
    with pytest.raises(
        moecomm.InvalidArgument, match=rf"{part}\.w.* is on meta, must have values: call .*to_empty"
    ):
        layer(torch.randn(4, 16))
    getattr(layer, part).to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(4, 16)).isfinite().all()


def test_another_default_device_and_dtype(comm: moecomm.Communicator, seed: int) -> None:
    layer, x_TH = made(comm, seed), torch.randn(4, 16)
    want_TH = layer(x_TH)
    torch.set_default_device("meta")
    try:
        found_TH = layer(x_TH)
        found_TH.sum().backward()
    finally:
        torch.set_default_device(None)
    assert torch.equal(found_TH, want_TH)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            twin = made(comm, seed)
            twin_TH = twin(x_TH)
            twin_TH.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(twin.experts.w_in, layer.experts.w_in) and torch.equal(twin_TH, want_TH)
        assert torch.equal(twin.router.weight.grad, layer.router.weight.grad)


@pytest.mark.parametrize("way", ["pickle", "frozen copy"])
def test_main_grad_survives(comm: moecomm.Communicator, way: str, seed: int) -> None:
    layer = made(comm, seed, main_grad=True)
    if way == "pickle":
        layer.experts = pickle.loads(pickle.dumps(layer.experts))
    else:
        layer.experts.requires_grad_(False)
        layer = copy.deepcopy(layer)
        layer(torch.randn(6, 16)).sum()
        assert not hasattr(layer.experts.w_in, "main_grad")  # which would be memory for nothing
        layer.experts.requires_grad_(True)
    layer(torch.randn(6, 16)).square().sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad is None and weight.main_grad.abs().sum() > 0


@pytest.mark.parametrize("way", ["plain", "in order", "checkpoint", "keep_plans"])
def test_the_loss_scale_is_that_of_the_backward(comm: moecomm.Communicator, way: str, seed: int) -> None:
    layer = made(comm, seed, **WITH_LOSS, overlap=OverlapConfig(overlap=way != "in order"))
    run: Any = layer
    if way not in ("plain", "in order"):
        options = {"context_fn": keep_plans(layer)} if way == "keep_plans" else {}
        run = functools.partial(checkpoint, layer, use_reentrant=False, **options)
    x_TH, found = torch.randn(8, 16), []
    for before in (5.0, 1.0):
        layer.zero_grad()
        layer.loss_scale = before
        y_TH = run(x_TH)
        set_loss_scale(layer, 5.0)
        y_TH.square().sum().backward()
        found.append(layer.router.weight.grad)
    torch.testing.assert_close(*found)
    assert isinstance(layer.loss_scale, float) and layer.loss_scale == 5.0


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "much", "2", True, None])
def test_what_is_no_loss_scale(comm: moecomm.Communicator, scale: Any, seed: int) -> None:
    layer = made(comm, seed, **WITH_LOSS)
    layer.loss_scale = 3.0
    with pytest.raises(moecomm.InvalidArgument, match=r"loss_scale is .*, must be a finite number"):
        set_loss_scale(layer, scale)
    assert layer.loss_scale == 3.0


def test_the_loss_scale_belongs_to_a_layer_and_to_no_state(comm: moecomm.Communicator, seed: int) -> None:
    layer = made(comm, seed, dtype=torch.float32)
    layer.loss_scale = 1 / 3
    twin = copy.deepcopy(layer).to(torch.bfloat16)
    layer.loss_scale = 2
    assert (twin.loss_scale, layer.loss_scale) == (1 / 3, 2.0)
    assert not any("scale" in name for name in (*layer.state_dict(), *dict(layer.named_buffers())))


def save_products(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    if operator.namespace == "aten" and "mm" in operator.__name__:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shared", [0, 1])
def test_selective_checkpoints_save_products(
    comm: moecomm.Communicator, overlap: bool, shared: int, seed: int
) -> None:
    layer = made(
        comm,
        seed,
        overlap=OverlapConfig(overlap=overlap),
        bias=True,
        activation="swiglu_clamped",
        num_shared_experts=shared,
    )
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    run = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    x_TH = torch.randn(8, 16)
    want, found = (gradients(layer, each, x_TH) for each in (layer, run))
    for one, other in zip(found, want, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows_PH, self.weight, offs=offsets_L)


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("way", ["plain", "in order", "own experts", "hook", "first layer"])
def test_a_result_may_be_changed_in_place(
    comm: moecomm.Communicator, way: str, shape: tuple[int, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    config = dataclasses.replace(CONFIG, aux_loss="batch", aux_loss_coef=0.1)
    overlap = OverlapConfig(overlap=way != "in order")
    layer = MoELayer(config, comm, overlap=overlap, experts=Own() if way == "own experts" else None)
    if way == "hook":
        layer.experts.register_forward_hook(lambda *_: None)
    layer.router.requires_grad_(way != "first layer")

    def forward(x_TH: Tensor) -> Tensor:
        # The losses are attached to the result, where the routing weights have no gradient.
        return layer(x_TH.detach() if way == "first layer" else x_TH)

    x_TH = torch.randn(shape)
    want, found = (
        gradients(layer, run, x_TH) for run in (lambda x: forward(x) + x, lambda x: forward(x).add_(x))
    )
    for one, other in zip(found, want, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_the_checksum_of_a_router_on_a_gpu_is_one_call_late(
    comm: moecomm.Communicator, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """tests/gpu/test_layer.py has the real thing."""
    layer, place = made(comm, seed), torch.device("cpu")
    monkeypatch.setattr(drift, "bits_of", lambda weight: SimpleNamespace(is_cuda=True, value=weight[0, 0]))
    monkeypatch.setattr(drift, "_on_host", lambda bits: (bits.value.detach().clone(), None))

    def next_bits(value: float) -> tuple[float, bool]:
        layer.router.weight.data[0, 0] = value
        bits, earlier = drift.router_bits([layer], place) or (torch.tensor(torch.nan), False)
        return bits.item(), earlier

    assert [next_bits(value) for value in (1, 2, 3)] == [(1, False), (1, True), (2, True)]
    drift.forget_bits([layer])
    assert [next_bits(value) for value in (4, 5)] == [(4, False), (4, True)]
