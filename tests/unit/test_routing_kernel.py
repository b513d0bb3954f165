"""The router by one kernel, with torch in the kernel's place; tests/gpu runs the same with the kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.kernels import routing
from moecomm.nn import MoEConfig, MoELayer, keep_plans
from moecomm.nn import router as router_module
from moecomm.nn.router import TopKRouter

KINDS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax": {"pre_softmax": True, "scaling_factor": 0.5},
    "normalized": {"pre_softmax": True, "normalize_topk": True, "router_bias": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, normalized, balanced": {
        "score_function": "sigmoid",
        "normalize_topk": True,
        "scaling_factor": 2.5,
        "bias_update_rate": 0.001,
    },
    "balanced softmax": {"bias_update_rate": 0.001},
    "losses": {"aux_loss": "batch", "aux_loss_coef": 0.3, "z_loss_coef": 0.2},
    "losses by sequence": {
        "score_function": "sigmoid",
        "normalize_topk": True,
        "aux_loss": "sequence",
        "aux_loss_coef": 0.3,
    },
}


def weights_of(logits_TE: Tensor, ids_TK: Tensor, rule: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    scores, normalize, scale = rule
    softmax, sigmoid = logits_TE.softmax(1), logits_TE.sigmoid()
    scores_TE = sigmoid if scores == "sigmoid" else softmax
    if scores == "chosen_softmax":
        weights_TK = logits_TE.gather(1, ids_TK.long()).softmax(1)
    else:
        weights_TK = scores_TE.gather(1, ids_TK.long())
        if normalize:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return weights_TK * scale, scores_TE


def by_torch(name: str, logits_TE: Tensor, *given: Any) -> None:
    """Stands in for a kernel: computes the same results by torch."""
    if name == "routes":
        _, _, biases_E, _, _, top_k, kind, normalize, scale, *results = given
        ids_TK, weights_TK, out_TE, _, counts_E = results
        rule = (kind, normalize, scale)
        scores_TE = weights_of(logits_TE, ids_TK.zero_(), rule)[1]
        by_TE = logits_TE if kind == "chosen_softmax" or biases_E is None else scores_TE
        by_TE = by_TE if biases_E is None else by_TE + biases_E
        order_TE = by_TE.sort(dim=1, descending=True, stable=True).indices
        ids_TK.copy_(order_TE[:, :top_k])
        weights_TK.copy_(weights_of(logits_TE, ids_TK, rule)[0])
        out_TE.copy_(scores_TE)
        counts_E.copy_(ids_TK.flatten().long().bincount(minlength=counts_E.shape[0]))
        return
    *_, kind, normalize, scale, ids_TK, of_weights, of_scores, of_logits, grad_TE, _ = given
    with torch.enable_grad():
        logits = logits_TE.detach().double().requires_grad_()
        made = weights_of(logits, ids_TK, (kind, normalize, scale))
        pairs = [(a, b) for a, b in zip(made, (of_weights, of_scores), strict=True) if b is not None]
        total = sum(((a * b).sum() for a, b in pairs), start=logits.sum() * 0)
        grad_TE.copy_(torch.autograd.grad(total, logits)[0] + (0 if of_logits is None else of_logits))


def routed(router: TopKRouter, x_TH: Tensor, grad_TK: Tensor, seq_len: int | None) -> dict[str, Tensor]:
    """The results and gradients of a forward and backward."""
    router.zero_grad()
    x_TH = x_TH.detach().clone().requires_grad_()
    found = router(x_TH, seq_len)
    # As a layer: gradients of weights, of losses through scores and logits, or of both.
    total = (found.topk_weights_TK * grad_TK).sum() + sum(found.losses.values())
    total.backward()
    grads = {name: each.grad for name, each in router.named_parameters() if each.grad is not None}
    results = {
        "ids": found.topk_idx_TK,
        "weights": found.topk_weights_TK.detach(),
        "scores": found.scores_TE.detach(),
        "counts": found.tokens_per_expert_E,
    }
    return {
        **results,
        **{name: each.detach() for name, each in found.losses.items()},
        "x": x_TH.grad,
        **grads,
    }


def _without_near_ties(router: TopKRouter, x_TH: Tensor, cut: int) -> Tensor:
    """Replaces tokens for which roundings, `cut` times those of float32, may decide the choice by a token for
    which they do not."""
    config, bias_E = router.config, router.expert_bias_E
    logits_TE = x_TH.double() @ router.weight.detach().double().t()
    if router.bias is not None:
        logits_TE = logits_TE + router.bias.detach()
    chosen_first = config.score_function == "softmax" and not config.pre_softmax
    scores_TE = logits_TE.sigmoid() if config.score_function == "sigmoid" else logits_TE.softmax(1)
    by_TE = (logits_TE if chosen_first else scores_TE) + (0 if bias_E is None else bias_E)
    best_TK = by_TE.topk(min(config.top_k + 1, config.num_experts), dim=1).values
    size_TK = best_TK[:, 1:].abs() + float(bias_E is not None or chosen_first)
    close_T = (best_TK[:, :-1] - best_TK[:, 1:] < 3e-6 * cut * size_TK).any(1)
    if close_T.any():
        x_TH[close_T] = x_TH[~close_T][0]
    return x_TH


def check_router(
    kind: dict[str, Any],
    experts: int,
    top_k: int,
    tokens: int,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    weights: torch.dtype = torch.float32,
) -> None:
    """The kernel against the operations of torch. weights: the dtype of the router's own."""
    torch.manual_seed(seed)
    config = MoEConfig(hidden=64, ffn_hidden=8, num_experts=experts, top_k=top_k, dtype=dtype, **kind)
    router = TopKRouter(config, device=device)
    with torch.no_grad():
        router.weight.normal_(std=0.1)  # larger logits saturate a sigmoid, whose gradient then has few bits
        if router.bias is not None:
            router.bias.normal_(std=0.1)
        if router.expert_bias_E is not None:
            router.expert_bias_E.normal_(std=0.1)
    router.to(weights)
    # Tensor cores cut off what they add, where other units round it.
    cut = 4 if device == "cuda" and dtype is torch.bfloat16 else 1
    x_TH = _without_near_ties(router, torch.randn(tokens + 8, 64, device=device).to(dtype), cut)[:tokens]
    grad_TK = torch.randn(tokens, top_k, device=device)
    seq_len = tokens // 3 if kind.get("aux_loss") == "sequence" and tokens else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_module, "routes_here", lambda *given: False)
        wanted = routed(router, x_TH, grad_TK, seq_len)
    found = routed(router, x_TH, grad_TK, seq_len)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        if value.is_floating_point():
            scale = float(value.float().abs().max()) if value.numel() else 1.0
            roundings = torch.finfo(value.dtype).eps * 32 * (cut if value.dtype is torch.float32 else 1)
            torch.testing.assert_close(found[name], value, rtol=0, atol=roundings * scale, msg=name)
        else:
            assert torch.equal(found[name], value), name


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch in place of the kernel, also on CPU tensors; returns what was launched."""
    launched: list[str] = []

    def launch(name: str, *given: Any) -> None:
        launched.append(name)
        by_torch(name, *given)

    class Scores:
        softmax, chosen_softmax, sigmoid = "softmax", "chosen_softmax", "sigmoid"

    monkeypatch.setattr(routing, "_launch", launch)
    monkeypatch.setattr(routing._C, "Scores", Scores, raising=False)
    monkeypatch.setattr(router_module, "routes_here", lambda *given: given[1].dtype is not torch.float64)
    return launched


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_against_torch(kind: str, weights: torch.dtype, kernel: list[str], seed: int) -> None:
    check_router(KINDS[kind], 24, 3, 30, seed, weights=weights)
    assert kernel == ["routes", "routes_backward"]


@pytest.mark.parametrize("kind", ["softmax of the chosen", "sigmoid, normalized, balanced", "losses"])
@pytest.mark.parametrize("keep", [False, True], ids=["chosen again", "kept plans"])
def test_checkpoints(kind: str, keep: bool, kernel: list[str], seed: int) -> None:
    """A layer that is computed again, with its own choice or with that of the first time."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden": 16, "ffn_hidden": 8, "num_experts": 6, "top_k": 2}
    comm = moecomm.Communicator(num_experts=6, hidden=16, top_k=2, max_tokens=20, dtype=torch.float32)
    layer = MoELayer(MoEConfig(**sizes, dtype=torch.float32, **KINDS[kind]), comm)
    x_TH = torch.randn(20, 16, requires_grad=True)
    found = []
    for way in ("plain", "checkpoint"):
        layer.zero_grad()
        context = {"context_fn": keep_plans(layer)} if keep else {}
        y_TH = layer(x_TH) if way == "plain" else checkpoint(layer, x_TH, use_reentrant=False, **context)
        y_TH.square().sum().backward()
        found.append([y_TH.detach(), *(each.grad.clone() for each in layer.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    again = [] if keep else ["routes"]
    assert kernel == ["routes", "routes_backward", "routes", *again, "routes_backward"]
    comm.close()


def test_what_goes_by_torch(kernel: list[str]) -> None:
    """Drops, groups of experts, noise, given choices, padding and float64."""
    x_TH = torch.randn(6, 16)
    base: dict[str, Any] = {"hidden": 16, "ffn_hidden": 8, "num_experts": 8, "top_k": 2}
    for more, given in (
        ({"capacity_factor": 1.0}, {}),
        ({"num_groups": 4, "topk_groups": 2}, {}),
        ({"jitter": 0.1}, {}),
        ({"force_balanced": True}, {}),
        ({"dtype": torch.float64}, {}),
        ({}, {"mask": torch.ones(6, dtype=torch.bool)}),
        ({}, {"topk_idx": torch.zeros(6, 2, dtype=torch.int64) + torch.arange(2)}),
    ):
        config = MoEConfig(**{"dtype": torch.float32, **base, **more})
        TopKRouter(config)(x_TH, **given)
        assert kernel == [], (more, given)
    TopKRouter(MoEConfig(dtype=torch.float32, **base, jitter=0.1)).eval()(x_TH)
    assert kernel == ["routes"]
