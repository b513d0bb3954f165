"""Balancing losses that are of several ranks' tokens, beside plain torch on all of them, and configs that
ranks compare."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moecomm.nn import (
    GraphedStep,
    MoEConfig,
    MoELayer,
    keep_plans,
    set_loss_scale,
    sync_gradients,
    update_expert_bias,
)
from moecomm.parallel import ParallelFolding
from tests.multirank.catching import catch, refused
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

EXPERTS, HIDDEN, TOP_K = 4, 16, 2
CONFIG = MoEConfig(
    hidden=HIDDEN,
    ffn_hidden=8,
    num_experts=EXPERTS,
    top_k=TOP_K,
    dtype=torch.float64,
    init_std=0.5,
    pre_softmax=True,
    aux_loss_coef=0.7,
    aux_loss="sequence",
)


def plain_loss(weight_EH: Tensor, sequences: list[Tensor], counted: list[Tensor] | None = None) -> Tensor:
    """The mean over sequences of E * sum of f_e P_e, with f of the tokens in `counted`, if given."""
    losses = []
    for number, x_TH in enumerate(sequences):
        if not len(x_TH):
            continue
        logits_TE = x_TH @ weight_EH.t()
        ids_TK = (x_TH if counted is None else counted[number]) @ weight_EH.detach().t()
        ids_TK = ids_TK.topk(TOP_K, dim=1).indices
        share_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS) / ids_TK.numel()
        losses.append(EXPERTS * (share_E * logits_TE.softmax(dim=1).mean(dim=0)).sum())
    return CONFIG.aux_loss_coef * sum(losses) / len(losses)


def run_by(way: str, layer: MoELayer) -> Any:
    """The layer, within torch.utils.checkpoint where `way` says so."""
    if way not in ("checkpoint", "keep_plans", "reentrant"):
        return layer
    options = {"context_fn": keep_plans(layer)} if way == "keep_plans" else {}
    return partial(checkpoint, layer, use_reentrant=way == "reentrant", **options)


# -- parts of sequences ------------------------------------------------------------------------------------

FOLDINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp 2": (2, {"cp": 2, "ep": 2}),
    "tp 2, etp 2": (2, {"tp": 2, "etp": 2}),
    "cp 2, experts whole": (2, {"cp": 2}),
    "tp 2, cp 2": (4, {"tp": 2, "cp": 2, "ep": 4}),
    "two sets of sequences": (4, {"cp": 2, "ep": 4}),
    "two stages": (4, {"cp": 2, "ep": 2, "pp": 2}),
}
PARTS = [4, 1, 0, 3]
"""Tokens of each sequence on the ranks that share it."""
LENGTHS = [[3, 1, 0], [2, 0, 0], [0, 0, 0], [1, 4, 0]]
"""The same of packed sequences; the last has no tokens at all."""


def parts_of(rank: int, folding: ParallelFolding, packed: bool, seed: int) -> list[list[Tensor]]:
    """For each rank with parts of this rank's sequences, those parts."""
    together = folding.group_of("tp-cp", rank)
    generator = torch.Generator().manual_seed(seed + together[0])
    lengths = LENGTHS if packed else [[tokens] * 3 for tokens in PARTS]

    def draw(tokens: int) -> Tensor:
        return torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) + (tokens > 2)

    return [[draw(tokens) for tokens in own] for own in lengths[: len(together)]]


@pytest.mark.parametrize(("world_size", "arguments"), FOLDINGS.values(), ids=FOLDINGS)
@on_ranks()
def test_loss_over_parts_of_sequences(
    rank: int, world_size: int, arguments: dict[str, Any], seed: int
) -> None:
    folding = ParallelFolding(world_size=world_size, **arguments)
    stage = folding.group_of("tp-cp-dp", rank)
    place = folding.group_of("tp-cp", rank).index(rank)
    torch.manual_seed(seed)
    layer = MoELayer(CONFIG, folding=folding, max_tokens=24)
    weight_EH = layer.router.weight.detach().clone().requires_grad_()
    for way in ("rows", "seq_len", "packed", "checkpoint", "keep_plans", "compiled"):
        packed = way == "packed"
        own = parts_of(rank, folding, packed, seed)[place]
        run = run_by(way, layer)
        if way == "compiled":
            torch._dynamo.reset()
            run = torch.compile(layer, backend="eager")
        if packed:
            ends = torch.tensor([0, *(len(part) for part in own)]).cumsum(0)
            # A row of padding behind, which is in no sequence's part.
            x = torch.cat((*own, torch.randn(1, HIDDEN, dtype=torch.float64)))
            mask = torch.arange(len(x)) < len(x) - 1
            y = run(x, cu_seqlens=ends, mask=mask)
        elif way == "seq_len":
            y = run(torch.cat(own), len(own[0]) or None)
        else:
            y = run(torch.stack(own))
        (y * 0).sum().backward()
        sync_gradients(layer)
        # One process with all sequences: those of each set of ranks are a microbatch, of a mean over these.
        losses = {}
        for other in stage:
            first = folding.group_of("tp-cp", other)[0]
            parts = parts_of(other, folding, packed, seed)
            losses[first] = plain_loss(weight_EH, [torch.cat(each) for each in zip(*parts, strict=True)])
        assert_close(layer.last_losses["aux_loss"], losses[folding.group_of("tp-cp", rank)[0]].detach())
        (wanted,) = torch.autograd.grad(sum(losses.values()) / len(losses), weight_EH)
        assert_close(layer.router.weight.grad, wanted, msg=way)
        layer.zero_grad()
    layer.comm.close()


@on_ranks(2)
def test_one_rank_refuses(rank: int, world_size: int) -> None:
    """A rank with other numbers of sequences, one that refuses its tokens, one whose router raises, and a
    graph that is not told of these ranks."""
    layer = MoELayer(CONFIG, folding=ParallelFolding(world_size=world_size, cp=2, ep=2), max_tokens=24)
    x = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    other_ids = torch.full((2, 3, TOP_K), 3 * rank - 1)
    says = f"rank {rank} has parts of {1 + rank} sequences"
    refused(lambda: layer(x[: 1 + rank]), says, name="MismatchedArguments")
    refused(lambda: layer(x[..., : HIDDEN - rank]), "x has shape")
    refused(lambda: layer(x, topk_idx=other_ids), name="InvalidRouting")
    hook = layer.router.register_forward_pre_hook(lambda *_: [][0]) if rank == 1 else None
    raised = catch(lambda: layer(x))
    assert raised is not None and "IndexError" in raised.text + raised.name, raised
    recorder: Any = object()
    refused(lambda: GraphedStep(lambda x: x, layer, recorder=recorder), "pass a group that has all ranks")
    if hook is not None:
        hook.remove()
    (layer(x) * 0).sum().backward()
    assert layer.router.weight.grad is not None
    layer.comm.close()


# -- all tokens of a step ----------------------------------------------------------------------------------

TOKENS = [5, 0, 7, 3]


@pytest.mark.parametrize("way", ["", "checkpoint", "keep_plans"])
@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
@on_ranks()
def test_loss_over_all_tokens_of_a_step(rank: int, world_size: int, ep: int, way: str, seed: int) -> None:
    """Two steps of three microbatches: f_e is of the step's choices so far, on all ranks; P_e of the rank's
    tokens of the microbatch."""
    torch.manual_seed(seed)
    folding = ParallelFolding(world_size=world_size, ep=ep)
    layer = MoELayer(replace(CONFIG, aux_loss="global"), folding=folding, max_tokens=24)
    weight_EH = layer.router.weight.detach().clone().requires_grad_()
    set_loss_scale(layer, 1 / 3)
    run = run_by(way, layer)
    for number in range(2):
        seen, wanted = torch.zeros(0, HIDDEN, dtype=torch.float64), torch.zeros_like(weight_EH)
        for microbatch in range(3):
            generator = torch.Generator().manual_seed(seed + 3 * number + microbatch)
            every = [
                torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64) + 0.5 * microbatch
                for tokens in TOKENS[:world_size]
            ]
            seen = torch.cat((seen, *every))
            (run(every[rank].requires_grad_()) * 0).sum().backward()
            losses = [plain_loss(weight_EH, [x], [seen]) if len(x) else 0 * weight_EH.sum() for x in every]
            assert_close(layer.last_losses["aux_loss"], losses[rank].detach())
            (grad,) = torch.autograd.grad(sum(losses) / (3 * world_size), weight_EH)
            wanted += grad
        with torch.no_grad():  # what is no training counts for itself
            layer.eval()
            layer(every[rank])
            alone = torch.cat(every)
            if len(every[rank]):
                assert_close(
                    layer.last_losses["aux_loss"], plain_loss(weight_EH, [every[rank]], [alone]).detach()
                )
            layer.train()
        sync_gradients(layer)
        assert_close(layer.router.weight.grad, wanted)
        layer.zero_grad()
        update_expert_bias(layer)
    layer.comm.close()


@pytest.mark.parametrize("at_once", [False, True])
@on_ranks(2)
def test_forwards_before_the_first_backward(rank: int, world_size: int, at_once: bool, seed: int) -> None:
    """Under a checkpoint their counts are those of the first pass, not of the second: that comes after the
    backward of another forward."""
    torch.manual_seed(seed + rank)
    layer = MoELayer(replace(CONFIG, aux_loss="global"), max_tokens=8)
    parts = [torch.randn(5 + rank, HIDDEN, dtype=torch.float64) + k for k in range(2)]
    found = {}

    def step(way: str) -> None:
        ys = [(run_by(way, layer)(x.requires_grad_()) * 0).sum() for x in parts]
        last = layer.last_losses["aux_loss"]
        for y in [ys[0] + ys[1]] if at_once else ys:
            y.backward()
        assert layer.last_losses["aux_loss"] is last
        found[way] = layer.router.weight.grad

    for way in ("", "checkpoint", "keep_plans"):
        step(way)
        layer.zero_grad()
        update_expert_bias(layer)
        assert_close(found[way], found[""])
    refused(partial(step, "reentrant"), "pass use_reentrant=False")
    layer.comm.close()


# -- configs -----------------------------------------------------------------------------------------------

DIFFERENT: dict[str, dict[str, Any]] = {
    "ffn_hidden": {"ffn_hidden": 16},
    "activation": {"activation": "gelu"},
    "normalize_topk": {"normalize_topk": True},
    "scaling_factor": {"scaling_factor": 2.5},
    "num_shared_experts": {"num_shared_experts": 1},
    "z_loss_coef": {"z_loss_coef": 1e-3},
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_ranks_with_other_configs_are_told(rank: int, world_size: int, given: bool) -> None:
    """Configs are compared where a layer builds its communicator, and in the forward with one that is
    `given`."""
    x_TH = torch.randn(2, HIDDEN, dtype=torch.float64)
    with MoELayer(CONFIG, max_tokens=8).comm as comm:
        build = partial(MoELayer, comm=comm) if given else partial(MoELayer, max_tokens=8)
        for name, options in DIFFERENT.items():
            config = replace(CONFIG, **options) if rank == world_size - 1 else CONFIG
            where = "MoEConfig" if given else f"ranks disagree on MoEConfig.{name}: rank 0 has "
            call = partial(build(config), x_TH) if given else partial(build, config)
            refused(call, where, name="MismatchedArguments")
        # What says how a rank computes may differ.
        layer = build(replace(CONFIG, products="torch" if rank else None))
        layer(x_TH).sum().backward()
        layer.comm.close()
