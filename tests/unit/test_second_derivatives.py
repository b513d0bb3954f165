"""Second derivatives through moecomm are refused, and not left out; on one rank."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import moecomm
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, SharedExperts

H, T = 16, 12


def _layer(**options: bool) -> Callable[[Tensor], Tensor]:
    config = MoEConfig(hidden=H, ffn_hidden=24, num_experts=4, top_k=2, dtype=torch.float64)
    return MoELayer(config, max_tokens=T, overlap=OverlapConfig(**options))


def _shared() -> Callable[[Tensor], Tensor]:
    sizes = {"hidden": H, "ffn_hidden": 24, "num_experts": 4, "top_k": 2, "num_shared_experts": 1}
    return SharedExperts(MoEConfig(**sizes, activation="gelu", dtype=torch.float64))


def _operations() -> Callable[[Tensor], Tensor]:
    comm = moecomm.Communicator(
        num_experts=4, hidden=H, top_k=2, max_tokens=T, dtype=torch.float64, device="cpu"
    )
    weights_TK, ids_TK = torch.rand(T, 4, dtype=torch.float64).topk(2)

    def through(x_TH: Tensor) -> Tensor:
        out = comm.dispatch(x_TH, ids_TK, weights_TK)
        return comm.combine(out.tokens, out.handle, weights=out.weights)

    return through


@pytest.mark.parametrize("way", ["layer", "in order", "operations", "shared"])
@pytest.mark.parametrize("linear", [True, False])
def test_a_gradient_penalty_is_refused(way: str, linear: bool, seed: int) -> None:
    """The gradient that reaches a layer has no graph if the loss is linear in the layer's result, and torch
    itself then refuses nothing."""
    torch.manual_seed(seed)
    ways = {"layer": _layer, "operations": _operations, "shared": _shared}
    model = _layer(overlap=False) if way == "in order" else ways[way]()
    x_TH, head_H = torch.randn(T, H, dtype=torch.float64, requires_grad=True), torch.randn(H).double()
    score_T = model(x_TH) @ head_H
    score = (score_T if linear else score_T.tanh()).sum()
    with pytest.raises(moecomm.Unsupported, match="create_graph=True in a backward through moecomm"):
        torch.autograd.grad(score, x_TH, create_graph=True)
    model(x_TH).sum().backward()  # as ever
    assert x_TH.grad is not None


def test_of_what_comes_after_a_layer_they_are_right(seed: int) -> None:
    torch.manual_seed(seed)
    model, head = _layer(), torch.nn.Linear(H, 1, dtype=torch.float64)
    x_TH = torch.randn(T, H, dtype=torch.float64)
    loss = head(model(x_TH)).square().sum()
    (first,) = torch.autograd.grad(loss, head.weight, create_graph=True)
    first.sum().backward(inputs=[head.weight])
    y_TH = model(x_TH).detach()
    torch.testing.assert_close(head.weight.grad, 2 * (y_TH @ torch.ones(H, 1).double()).t() @ y_TH)
