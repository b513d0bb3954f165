"""Choices of experts that come from outside the router: kept ones of a forward that is computed again, ones
that are replayed, and none for padding. One rank, beside a plain mixture of experts in torch."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, keep_plans, load_balancing_loss

SIZES: dict[str, Any] = {"hidden": 16, "num_experts": 4, "top_k": 2, "dtype": torch.float64}
CONFIG: dict[str, Any] = {**SIZES, "ffn_hidden": 8, "init_std": 0.5, "activation": "gelu"}
TOKENS = 20


@pytest.fixture
def comm() -> Iterator[moecomm.Communicator]:
    with moecomm.Communicator(**SIZES, max_tokens=64, device="cpu") as made:
        yield made


class Experts(nn.Module):
    """The same experts as a module of one's own."""

    def __init__(self, like: MoELayer) -> None:
        super().__init__()
        self.w_in, self.w_out = (nn.Parameter(each.detach().clone()) for each in like.experts.parameters())

    def forward(self, rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
        groups = torch.tensor_split(rows_PH, offsets_L[:-1].cpu().long())
        pairs = zip(groups, self.w_in, self.w_out, strict=True)
        return torch.cat([nn.functional.gelu(rows @ w_in) @ w_out for rows, w_in, w_out in pairs])


def plain(layer: MoELayer, x_TH: Tensor, topk_idx_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's result and the weights of the choices, in torch alone; -1 is no choice."""
    config = layer.config
    scores_TE = x_TH @ layer.router.weight.t()
    is_one_TK = topk_idx_TK >= 0
    scores_TE = scores_TE.sigmoid() if config.score_function == "sigmoid" else scores_TE.softmax(dim=-1)
    rows = [
        [scores_TE[t, e] if one else scores_TE.new_zeros(()) for e, one in zip(ids, ones, strict=True)]
        for t, (ids, ones) in enumerate(zip(topk_idx_TK.tolist(), is_one_TK.tolist(), strict=True))
    ]
    weights_TK = torch.stack([torch.stack(row) for row in rows])
    if config.normalize_topk or (not config.pre_softmax and config.score_function == "softmax"):
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True).clamp(min=1e-30)
    every_TEH = torch.stack(
        [
            nn.functional.gelu(x_TH @ w_in) @ w_out
            for w_in, w_out in zip(layer.experts.w_in, layer.experts.w_out, strict=True)
        ],
        dim=1,
    )
    chosen_TKH = every_TEH.gather(1, topk_idx_TK.clamp(min=0)[..., None].expand(-1, -1, x_TH.shape[1]))
    y_TH = (weights_TK.unsqueeze(-1) * chosen_TKH).sum(dim=1)
    if layer.shared is not None:
        y_TH = y_TH + nn.functional.gelu(x_TH @ layer.shared.w_in) @ layer.shared.w_out
    return y_TH, weights_TK


def gradients(layer: MoELayer) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


# -- a forward that is computed again ----------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "nothing kept": {"overlap": OverlapConfig(keep="nothing")},
    "in order": {"overlap": OverlapConfig(overlap=False)},
    "own experts": {"own": True},
    "fixed buffers": {"capacity_factor": 4.0, "pad_to_capacity": True},
    "dropped by weight": {"capacity_factor": 0.8},
    "bias that was updated": {"bias_update_rate": 0.01, "score_function": "sigmoid"},
    "compiled": {"compiled": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_computed_again_takes_the_first_choice(
    comm: moecomm.Communicator, way: str, seed: int
) -> None:
    """Three experts' scores are equal but for the input's first column, which is minus a millionth first
    and plus that then: enough for another choice."""
    options = dict(WAYS[way])
    overlap, own, compiled = (options.pop(k, None) for k in ("overlap", "own", "compiled"))
    torch.manual_seed(seed)
    config = MoEConfig(**{**CONFIG, "pre_softmax": "score_function" not in options, **options})
    layer = MoELayer(config, comm, overlap=None if own else overlap)
    if own:
        layer = MoELayer(config, comm, experts=Experts(layer))
    shift_H = 1e-6 * torch.eye(16, dtype=torch.float64)[0]
    with torch.no_grad():
        layer.router.weight[1:3] = layer.router.weight[0]
        layer.router.weight[:3, 0] = torch.tensor([-1.0, 1.0, 0.0])
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    x_TH[:, 0] = (torch.arange(TOKENS) % 3 == 0) * 0.5
    x_TH.requires_grad_()
    factor_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    routings: list[Any] = []
    layer.router.register_forward_hook(lambda _module, _inputs, routing: routings.append(routing))
    off = iter([-1, 1])
    if compiled:
        torch._dynamo.reset()
        layer.compile(backend="aot_eager")

    def shifted(x_TH: Tensor) -> Tensor:
        return x_TH + next(off) * shift_H

    y_TH = checkpoint(lambda x: layer(shifted(x)), x_TH, use_reentrant=False, context_fn=keep_plans(layer))
    if layer.router.expert_bias_E is not None:
        layer.router.expert_bias_E += torch.tensor([0.5, -0.5, 0.5, -0.5])
    (y_TH * factor_TH).sum().backward()
    assert len(routings) == 2
    first = routings[0]
    assert all(torch.equal(first.topk_idx_TK, each.topk_idx_TK) for each in routings)
    with torch.no_grad():  # the case would show nothing without another choice
        alone = layer.router(x_TH + shift_H)
    assert not torch.equal(alone.topk_idx_TK.sort().values, first.topk_idx_TK.sort().values)
    found = gradients(layer)
    layer.zero_grad()
    y_TH, _ = plain(layer, x_TH, first.topk_idx_TK.long())
    (y_TH * factor_TH).sum().backward()
    for name, wanted in gradients(layer).items():
        assert_close(found[name], wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()), msg=name)


class Turning(nn.Module):
    """A router of one's own that chooses other experts each time."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.turn = router, 0

    def forward(self, x_TH: Tensor, seq_len: int | None = None, **given: Any) -> Any:
        self.turn += 1
        ids_TK = torch.tensor([[self.turn % 4, (self.turn + 1) % 4]]).expand(x_TH.shape[0], -1)
        return self.router(x_TH, topk_idx=ids_TK)


def turn(router: nn.Module, inputs: Any, routing: Any) -> Any:
    """Chooses the next experts, as a forward hook."""
    return dataclasses.replace(routing, topk_idx_TK=(routing.topk_idx_TK + 1) % 4)


@pytest.mark.parametrize("way", ["router", "hook"])
def test_another_choice_of_the_second_time_is_refused(
    comm: moecomm.Communicator, way: str, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**CONFIG), comm)
    if way == "router":
        layer.router = Turning(layer.router)
    else:
        layer.router.register_forward_hook(turn)
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    y_TH = checkpoint(layer, x_TH, use_reentrant=False, context_fn=keep_plans(layer))
    with pytest.raises(moecomm.InvalidArgument, match="chose other experts when a checkpoint"):
        y_TH.sum().backward()
    layer(x_TH).sum().backward()


# -- replay and padding ------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "softmax after": {},
    "softmax before": {"pre_softmax": True, "num_shared_experts": 1},
    "sigmoid, normalised": {"score_function": "sigmoid", "normalize_topk": True},
    "in order": {"pre_softmax": True, "overlap": OverlapConfig(overlap=False)},
}


def layer_of(comm: moecomm.Communicator, kind: str, seed: int, **more: Any) -> MoELayer:
    options = {**KINDS[kind], **more}
    torch.manual_seed(seed)
    overlap = options.pop("overlap", None)
    return MoELayer(MoEConfig(**{**CONFIG, **options}), comm, overlap=overlap)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_choices(comm: moecomm.Communicator, kind: str, seed: int) -> None:
    """Tokens with given experts, with one or none of them given, and gradients of the scores now."""
    layer = layer_of(comm, kind, seed, z_loss_coef=0.0)
    x_TH = torch.randn(4, 5, 16, dtype=torch.float64).requires_grad_()
    factor_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    own_TK = layer.router(x_TH.flatten(0, 1)).topk_idx_TK.long()
    topk_idx = torch.stack([torch.randperm(4)[:2] for _ in range(TOKENS)])
    topk_idx[::3] = -1
    topk_idx[1, 1] = -1
    wanted_TK = torch.where((topk_idx < 0).all(dim=1, keepdim=True), own_TK, topk_idx)
    y = layer(x_TH, topk_idx=topk_idx.view(4, 5, 2).to(torch.int32))
    (y.flatten(0, 1) * factor_TH).sum().backward()
    counts = torch.bincount(wanted_TK[wanted_TK >= 0], minlength=4)
    assert layer.last_tokens_per_expert.tolist() == counts.tolist()
    found, grad = gradients(layer), x_TH.grad
    x_TH.grad = None
    layer.zero_grad()
    wanted_TH, weights_TK = plain(layer, x_TH.flatten(0, 1), wanted_TK)
    (wanted_TH * factor_TH).sum().backward()
    assert_close(y.flatten(0, 1), wanted_TH)
    assert_close(grad, x_TH.grad)
    assert_close(found, gradients(layer))
    routing = layer.router(x_TH.flatten(0, 1), topk_idx=topk_idx)
    assert_close(routing.topk_weights_TK, weights_TK.detach())


def test_choices_of_one_layer_are_those_of_another_with_drops(comm: moecomm.Communicator, seed: int) -> None:
    """What a hook sees before drops is what is replayed: drops are the same then."""
    layer, other = (
        layer_of(comm, "sigmoid, normalised", seed + k, capacity_factor=0.7, drop_policy="position")
        for k in (0, 1)
    )
    seen: list[Any] = []
    layer.router.register_forward_hook(lambda _module, _inputs, routing: seen.append(routing))
    other.router.register_forward_hook(lambda _module, _inputs, routing: seen.append(routing))
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    layer(x_TH)
    assert (seen[0].topk_idx_TK == -1).any() and (seen[0].chosen_TK >= 0).all()
    other(x_TH, topk_idx=seen[0].chosen_TK)
    assert torch.equal(seen[0].topk_idx_TK, seen[1].topk_idx_TK)


LOSSES: dict[str, Any] = {"aux_loss_coef": 0.3, "z_loss_coef": 0.2}


def losses_of(layer: MoELayer, x_TH: Tensor, ids_TK: Tensor, lengths: list[int]) -> Tensor:
    """Both losses, sequence by sequence, of tokens that all count."""
    logits_TE = x_TH @ layer.router.weight.t()
    sigmoid = layer.config.score_function == "sigmoid"
    probs_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(dim=-1)
    probs_TE = probs_TE / probs_TE.sum(dim=1, keepdim=True)
    parts = []
    for probs, ids in zip(probs_TE.split(lengths), ids_TK.split(lengths), strict=True):
        if len(probs):
            share_E = torch.bincount(ids.flatten(), minlength=4) / ids.numel()
            parts.append(4 * (share_E * probs.mean(dim=0)).sum())
    squares_T = torch.logsumexp(logits_TE, dim=1) ** 2
    return 0.3 * sum(parts) / len(parts) + 0.2 * squares_T.mean()


@pytest.mark.parametrize("aux_loss", ["batch", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["rows", "checkpoint", "keep_plans"])
def test_padding(comm: moecomm.Communicator, kind: str, aux_loss: str, way: str, seed: int) -> None:
    """Padded sequences give what their tokens alone give, and padding the shared experts' result."""
    layer = layer_of(comm, kind, seed, aux_loss=aux_loss, **LOSSES, bias_update_rate=0.1)
    lengths = [5, 2, 0, 4]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    x = torch.randn(4, 5, 16, dtype=torch.float64).requires_grad_()
    factor = torch.randn(4, 5, 16, dtype=torch.float64)
    run: Any = layer
    if way != "rows":
        options = {"context_fn": keep_plans(layer)} if way == "keep_plans" else {}
        run = functools.partial(checkpoint, layer, use_reentrant=False, **options)
    y = run(x, mask=mask)
    (y * factor).sum().backward()
    found, grad, loads = gradients(layer), x.grad, layer.router.load_E
    x.grad = None
    layer.zero_grad()
    ids_TK = layer.router(x[mask]).topk_idx_TK.long()
    assert loads.tolist() == torch.bincount(ids_TK.flatten(), minlength=4).tolist()
    wanted_TH, _ = plain(layer, x[mask], ids_TK)
    losses = losses_of(layer, x[mask], ids_TK, lengths if aux_loss == "sequence" else [len(ids_TK)])
    rest = 0 * x[~mask].sum()
    assert_close(y[mask], wanted_TH)
    if layer.shared is not None:
        rest_TH = nn.functional.gelu(x[~mask] @ layer.shared.w_in) @ layer.shared.w_out
        assert_close(y[~mask], rest_TH)
        rest = (rest_TH * factor[~mask]).sum()
    else:
        assert not y[~mask].any()
    ((wanted_TH * factor[mask]).sum() + losses + rest).backward()
    assert_close(sum(layer.last_losses.values()), losses.detach())
    assert_close(grad, x.grad)
    assert_close(found, gradients(layer))


def test_padding_takes_no_place_of_a_capacity(comm: moecomm.Communicator, seed: int) -> None:
    layer = layer_of(comm, "softmax before", seed, capacity_factor=1.0, drop_policy="position")
    with torch.no_grad():
        layer.router.weight[:2, 0] += 20.0
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    x_TH[:, 0] = 1.0  # all want experts 0 and 1, which have 10 places each
    mask = torch.arange(TOKENS) % 2 == 0
    kept = layer.router(x_TH, mask=mask).topk_idx_TK >= 0
    assert kept[mask].all() and not kept[~mask].any()


def test_packed_sequences(comm: moecomm.Communicator, seed: int) -> None:
    layer = layer_of(comm, "softmax before", seed, aux_loss="sequence", **LOSSES)
    lengths = [5, 1, 0, 9, 5]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    (layer(x_TH, cu_seqlens=cu_seqlens) * 0).sum().backward()
    found = layer.router.weight.grad
    layer.router.weight.grad = None
    losses = losses_of(layer, x_TH, layer.router(x_TH).topk_idx_TK.long(), lengths)
    losses.backward()
    assert_close(sum(layer.last_losses.values()), losses.detach())
    assert_close(found, layer.router.weight.grad)


def test_tokens_past_the_last_sequence_are_of_none(seed: int) -> None:
    torch.manual_seed(seed)
    probs, idx = torch.rand(6, 3).softmax(dim=1), torch.randint(0, 3, (6, 1))
    packed = load_balancing_loss(probs, idx, cu_seqlens=torch.tensor([0, 2, 4]))
    assert_close(packed, load_balancing_loss(probs[:4], idx[:4], 2))


@pytest.mark.parametrize("starts", [[0, 9, 4, 20], [2, 20], [-1, 20], [0, 21]])
def test_wrong_sequences_that_the_host_cannot_see_give_nan(starts: list[int], seed: int) -> None:
    """The loss and its gradients are NaN, as on GPUs: in some models only the gradients are used."""
    probs, ends = torch.rand(20, 3).softmax(dim=1), torch.tensor([0, 20])
    idx = torch.randint(0, 3, (20, 1))
    loss = torch.compile(load_balancing_loss, backend="eager")
    assert_close(loss(probs, idx, cu_seqlens=ends), load_balancing_loss(probs, idx))
    probs.requires_grad_()
    found = loss(probs, idx, cu_seqlens=torch.tensor(starts))
    found.backward()
    assert found.isnan() and probs.grad is not None and probs.grad.isnan().any()


IDS = torch.zeros(TOKENS, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mask": torch.ones(TOKENS)}, r"mask is torch\.float32, must be torch\.bool"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask has shape \(3,\), must be \(20,\)"),
        ({"mask": [True] * TOKENS}, "mask is list, expected a torch.Tensor"),
        ({"topk_idx": IDS.double()}, r"topk_idx is torch\.float64, must be torch\.int32 or torch\.int64"),
        ({"topk_idx": IDS[:, :1]}, r"topk_idx has shape \(20, 1\), must be \(20, 2\)"),
        ({"cu_seqlens": torch.ones(2)}, r"cu_seqlens is torch\.float32, must be torch\.int32 or"),
        ({"cu_seqlens": IDS}, r"cu_seqlens has shape \(20, 2\), must be \(sequences \+ 1,\)"),
        ({"cu_seqlens": torch.tensor([0, 9, 4, 20])}, r"cu_seqlens\[2\] is 4, must be from 9 to 20"),
        ({"cu_seqlens": torch.tensor([2, 20])}, r"cu_seqlens\[0\] is 2, must be from 0 to 0"),
        ({"cu_seqlens": torch.tensor([0, 21])}, r"cu_seqlens\[1\] is 21, must be from 0 to 20"),
        ({"cu_seqlens": torch.tensor([0, 20]), "seq_len": 5}, "seq_len is 5, must be None with cu_seqlens"),
        ({"topk_idx": IDS + torch.tensor([0, 9])}, r"topk_idx\[0, 1\] is 9, expected -1"),
        ({"topk_idx": IDS - torch.tensor([0, 2])}, r"topk_idx\[0, 1\] is -2, expected -1"),
        ({"topk_idx": IDS - torch.tensor([0, 1 << 40])}, r"topk_idx\[0, 1\] is -2147483648"),
        ({"topk_idx": IDS}, "may name an expert once"),
    ],
)
def test_refuses(comm: moecomm.Communicator, given: dict[str, Any], text: str, seed: int) -> None:
    layer = layer_of(comm, "softmax before", seed, aux_loss="sequence", **LOSSES)
    x_TH = torch.randn(TOKENS, 16, dtype=torch.float64)
    with pytest.raises(moecomm.InvalidArgument, match=text):
        layer(x_TH, **given)
    assert layer(x_TH).isfinite().all()


def test_sequences_of_rows_have_one_length(comm: moecomm.Communicator, seed: int) -> None:
    """A seq_len within the sequences of (B, S, H) was once passed over."""
    layer = layer_of(comm, "softmax before", seed, aux_loss="sequence", **LOSSES)
    x_BSH = torch.randn(2, TOKENS // 2, 16, dtype=torch.float64)
    with pytest.raises(moecomm.InvalidArgument, match=r"seq_len is 5, must be None or 10 for x of shape"):
        layer(x_BSH, 5)
    assert torch.equal(layer(x_BSH), layer(x_BSH, 10))
