"""Merged microbatches have the same bits as one after the other: outputs, gradients of inputs and of weights;
and an error in a node is one on all ranks, after which everything goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.testing import assert_close

from moecomm import Communicator, InvalidArgument
from moecomm.nn import GraphedStep, MoEBlock, MoEConfig, MoELayer, OverlapConfig, TopKRouter, prepare_ddp
from moecomm.overlap import Block, Stages, forward_backward, run_microbatches
from tests.multirank.catching import Caught, catch
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import SIZES, TOKENS
from tests.played import Played
from tests.ranks import communicator, device, on_cpu, synchronize

FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}
SHARED = {"num_shared_experts": 1}


class Attention(nn.Module):
    """Stands for attention and its norms: (residual, normed)."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        self.dropout = dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + F.dropout(self.mix(self.norm(x)), self.dropout)
        return residual, F.rms_norm(residual, residual.shape[-1:])


class Dense(nn.Module):
    """A layer without experts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mix(x))


class Nodes(nn.Module):
    """A block of callables for its nodes, differentiated by autograd."""

    def __init__(self, config: MoEConfig, comm: Any) -> None:
        super().__init__()
        self.before = Attention(config.hidden)
        self.router = TopKRouter(config, device=comm.device)
        self.expert = nn.Linear(config.hidden, config.hidden)
        self.comm = comm
        self.block = Block(comm, self.attention, self.dispatch, self.experts, self.combine)

    def attention(self, x: Tensor) -> tuple[Tensor, ...]:
        residual, h = self.before(x)
        routing = self.router(h)
        return residual, h, routing.topk_idx_TK, routing.topk_weights_TK

    def dispatch(self, h: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
        out = self.comm.dispatch(h, ids, weights)
        return out.tokens, out.weights, out.handle

    def experts(self, rows: Tensor, weights: Tensor, handle: Any) -> tuple[Any, ...]:
        return F.gelu(self.expert(rows)), weights, handle

    def combine(self, rows: Tensor, weights: Tensor, handle: Any) -> Tensor:
        return self.comm.combine(rows, handle, weights=weights)


@dataclass(frozen=True)
class Case:
    """Microbatches through blocks: E with experts, D dense, N of nodes as callables, P with experts and not
    cut into nodes."""

    blocks: str = "E"
    microbatches: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    overlap: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False
    dropout: float = 0.0
    sequences: bool = False
    """Give the tokens as (B, S, H)."""
    frozen: tuple[str, ...] = ()
    """Ends of the names of parameters that are not trained; "x": inputs need no gradient."""
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    empty: tuple[int, ...] = ()
    """Microbatches without tokens, on all ranks."""


@dataclass
class Step:
    """A model and its microbatches on this rank."""

    blocks: list[Any]
    model: nn.Module
    x: list[Tensor]
    factors: list[Tensor]
    comm: Any
    autocast: bool

    def loss(self, y: Tensor, number: int) -> Tensor:
        return (y.float() * self.factors[number]).sum()

    def one_after_the_other(self) -> list[Tensor]:
        losses = []
        for number, y in enumerate(self.x):
            with self.cast():
                for block in self.blocks:
                    y = block(y)
                loss = self.loss(y, number)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def merged(self, merge_ends: bool = False) -> list[Tensor]:
        with self.cast():
            return run_microbatches(self.blocks, self.x, self.loss, merge_ends=merge_ends)

    def cast(self) -> torch.autocast:
        return torch.autocast(device().type, torch.bfloat16, enabled=self.autocast)

    def seen(self, run: Callable[[], list[Tensor]], seed: int = 0) -> dict[str, Tensor | None]:
        """Runs the step and returns all that it has computed."""
        for each in (*self.model.parameters(), *self.x):
            each.grad = None
        torch.manual_seed(seed)
        losses = run()
        layers = [each for each in self.model.modules() if isinstance(each, MoELayer)]
        for layer in layers:
            layer.backward_weights()
        found: dict[str, Tensor | None] = {f"loss {number}": each for number, each in enumerate(losses)}
        found |= {f"x {number}": each.grad for number, each in enumerate(self.x)}
        found |= {name: each.grad for name, each in self.model.named_parameters()}
        for number, layer in enumerate(layers):
            found |= {f"{name} of layer {number}": each for name, each in layer.last_losses.items()}
            if layer.router.load_E is not None:
                found[f"load of layer {number}"] = layer.router.load_E.clone()
                layer.router.load_E.zero_()
        return {name: None if each is None else each.clone() for name, each in found.items()}


def build(rank: int, world_size: int, case: Case, seed: int) -> Step:
    torch.manual_seed(seed)
    sizes = SIZES if on_cpu() else {**SIZES, "hidden": 256, "ffn_hidden": 192, "init_std": 0.05}
    config = MoEConfig(**{**sizes, "dtype": case.dtype, **case.options})
    tokens = TOKENS[world_size]
    comm = communicator(
        num_experts=config.num_experts,
        hidden=config.hidden,
        top_k=config.top_k,
        max_tokens=max(*tokens, 1) + 2,
        dtype=config.dtype,
    )
    blocks: list[Any] = []
    owners: list[nn.Module] = []
    for kind in case.blocks:
        if kind == "D":
            owner = block = Dense(config.hidden)
        elif kind == "N":
            owner = Nodes(config, comm)
            block = owner.block
        else:
            layer = MoELayer(config, comm, overlap=OverlapConfig(**case.overlap))
            before = Attention(config.hidden, case.dropout)
            owner = block = MoEBlock(before, layer, recompute=case.recompute)
        blocks.append(block.forward if kind == "P" else block)
        owners.append(owner.to(device(), case.dtype))
    model = nn.ModuleList(owners)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(case.frozen or ("-",)))
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    shape = (-1, 3, config.hidden) if case.sequences else (-1, config.hidden)
    pairs = [
        torch.randn(2, tokens[rank], config.hidden, generator=generator) for _ in range(case.microbatches)
    ]
    for number in case.empty:
        pairs[number] = pairs[number][:, :0]
    x = [each[0].to(device(), case.dtype).view(shape) for each in pairs]
    for each in x:
        each.requires_grad_("x" not in case.frozen)
    factors = [each[1].to(device()).view(shape) for each in pairs]
    return Step(blocks, model, x, factors, comm, case.autocast)


def unequal(want: dict[str, Tensor | None], got: dict[str, Tensor | None], what: str) -> list[str]:
    """Lists what does not have the same bits."""
    assert want.keys() == got.keys()
    problems = []
    for name, value in want.items():
        other = got[name]
        same = value is other if value is None or other is None else torch.equal(value, other)
        if not same:
            problems.append(f"{what}: {name}")
    return problems


def compare(rank: int, world_size: int, case: Case, seed: int, ends: Sequence[bool]) -> list[str]:
    step = build(rank, world_size, case, seed)
    want = step.seen(step.one_after_the_other, seed)
    assert any(each is not None for name, each in want.items() if not name.startswith("l"))
    problems = []
    for merge_ends in ends:
        got = step.seen(partial(step.merged, merge_ends), seed)
        problems += unequal(want, got, f"rank {rank}, merge_ends={merge_ends}")
    problems += unequal(want, step.seen(step.one_after_the_other, seed), f"rank {rank}, again")
    synchronize()
    step.comm.close()
    return problems


LOSSES = {"aux_loss": "batch", "aux_loss_coef": 0.3, "z_loss_coef": 0.1, "bias_update_rate": 0.1}
CASES = {
    **{f"{count} microbatches": Case(microbatches=count) for count in (1, 2, 3, 4)},
    "two layers, shared experts": Case("EE", 3, SHARED),
    "three layers and dense ones": Case("DEDEED", 4, {**SHARED, **LOSSES}),
    "dense layers alone": Case("DD", 3),
    "losses": Case("EE", 3, LOSSES),
    "bfloat16": Case("EE", 3, SHARED, dtype=torch.bfloat16),
    "microbatches without tokens": Case("EDE", 4, {**SHARED, **LOSSES}, empty=(0, 2)),
    "no tokens at all": Case("EE", 2, FIXED, empty=(0, 1)),
    "autocast": Case("EDE", 3, SHARED, autocast=True),
    "autocast, recomputed": Case("EDE", 3, SHARED, autocast=True, recompute=True),
    "sequences": Case("EE", 3, {**SHARED, "aux_loss": "sequence", "aux_loss_coef": 0.1}, sequences=True),
    "rows kept": Case("EE", 3, SHARED, overlap={"keep": "rows"}),
    "nothing kept": Case("EE", 3, SHARED, overlap={"keep": "nothing", "keep_shared": False}),
    "recomputed": Case("EDE", 3, {**SHARED, **LOSSES, "jitter": 0.1}, recompute=True, dropout=0.2),
    "recomputed, nothing kept": Case("EE", 4, overlap={"keep": "nothing"}, recompute=True),
    "capacity": Case("EE", 3, {**SHARED, **FIXED}),
    "capacity, rows kept, recomputed": Case("EE", 3, FIXED, overlap={"keep": "rows"}, recompute=True),
    "weights later": Case("EE", 3, SHARED, overlap={"defer_weights": True}),
    "recorded": Case("E", 3, SHARED, overlap={"record": True}),
    "gelu": Case("E", 3, {"activation": "gelu"}),
    "shared experts with a gate": Case("EE", 3, {**SHARED, "shared_gate": True, "router_bias": True}),
    "callables": Case("NN", 4),
    "not cut": Case("PEPE", 3, SHARED),
    "callables and layers": Case("NEDN", 3, SHARED),
    "no gradients of inputs": Case("EE", 3, frozen=("x",)),
    "experts frozen": Case("EE", 3, SHARED, frozen=("w_in", "w_out")),
    "attention and router frozen": Case("EE", 3, frozen=("x", "router.weight", "mix.weight", "mix.bias")),
}
RANDOM = ("recomputed",)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_after_the_other(pool: Pools, name: str, most_ranks: int, seed: int) -> None:
    ends = (False,) if name in RANDOM else (False, True)
    for size in (1, most_ranks) if name == "two layers, shared experts" else (min(2, most_ranks),):
        assert pool(size)(compare, CASES[name], seed, ends) == [[]] * size


def graphed(rank: int, world_size: int, seed: int) -> list[str]:
    """A merged step in a GraphedStep equals one that is not in a graph."""
    dtype = (
        torch.float32 if on_cpu() else torch.bfloat16
    )  # a capture takes torch's products in bfloat16 alone
    step = build(rank, world_size, Case("EDE", 3, SHARED, dtype=dtype), seed)

    def run(*x: Tensor) -> list[Tensor]:
        return run_microbatches(step.blocks, x, step.loss)

    x = [each.detach() for each in step.x]
    for each in step.x:
        each.requires_grad_(False)
    graph = GraphedStep(run, step.model, headroom=0.5, recorder=Played() if on_cpu() else None)
    problems = []
    for number in range(3):
        now = [each * (1 + number) for each in x]
        want = step.seen(partial(run, *now))
        got = step.seen(partial(graph, *now))
        problems += unequal(want, got, f"rank {rank}, step {number}")
    del graph
    step.comm.close()
    return problems


def test_a_graphed_step(pool: Pools, seed: int) -> None:
    assert pool(2)(graphed, seed) == [[], []]


def language_model(rank: int, world_size: int, seed: int) -> list[str]:
    """From token ids to the cross-entropy: embedding and head are blocks."""
    step = build(rank, world_size, Case("EDE", 3, {**SHARED, **LOSSES}), seed)
    hidden = step.x[0].shape[-1]
    embed, head = nn.Embedding(32, hidden).to(device()), nn.Linear(hidden, 32).to(device())
    step.blocks = [embed, *step.blocks, head]
    step.model = nn.ModuleList([embed, step.model, head])
    step.x = list(torch.randint(32, (3, 6 - rank), device=device()))
    step.loss = lambda y, number: F.cross_entropy(y, step.x[number].roll(-1)) / 3  # type: ignore[method-assign]
    want = step.seen(step.one_after_the_other)
    assert want["0.weight"] is not None and want["0.weight"].any()
    problems = []
    for merge_ends in (False, True):
        problems += unequal(want, step.seen(partial(step.merged, merge_ends)), f"rank {rank}")
    step.comm.close()
    return problems


def test_a_language_model(pool: Pools, seed: int) -> None:
    assert pool(2)(language_model, seed) == [[], []]


def chunks(rank: int, world_size: int, seed: int) -> None:
    """Microbatches that are parts of one tensor, made of something else; and a record of what ran."""
    step = build(rank, world_size, Case("DE", 2), seed)
    tokens, found = torch.cat([each.detach() for each in step.x]), []
    for merged in (False, True):
        step.x[:] = (torch.tanh(leaf := tokens.clone().requires_grad_())).chunk(2)
        if merged:
            stages = Stages(device(), record=True)
            run_microbatches(step.blocks, step.x, step.loss, stages=stages)
        else:
            for number, x in enumerate(step.x):
                step.loss(step.blocks[1](step.blocks[0](x)), number).backward(retain_graph=True)
        found.append(leaf.grad)
    assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    timeline = stages.timeline()
    names = [span.name for span in timeline.spans]
    for microbatch in ("0", "1"):
        nodes = ("blocks[0]", "blocks[1] attention", "fc1", "fc2", "combine", "loss")
        assert all(f"{node} of F{microbatch}" in names for node in nodes), names
        nodes = ("blocks[1] after", "dispatch_grad", "fc2_dgrad", "combine_grad", "blocks[0]")
        assert all(f"{node} of B{microbatch}" in names for node in nodes), names
    step.comm.close()


def test_chunks_and_a_record(pool: Pools, seed: int) -> None:
    pool(1)(chunks, seed)


def test_three_ranks_one_without_tokens(pool: Pools, most_ranks: int, seed: int) -> None:
    case = Case("EDE", 4, {**SHARED, **LOSSES})
    assert pool(most_ranks)(compare, case, seed, (False, True)) == [[]] * most_ranks


# -- pairs, order, memory ------------------------------------------------------------------------------------


def pairs(rank: int, world_size: int, seed: int) -> list[str]:
    """Pairs by hand: gradients given, and left by a loss of the output; forward and backward alone."""
    step = build(rank, world_size, Case("EDE", 3, SHARED), seed)
    want = step.seen(step.one_after_the_other)

    def by_hand() -> list[Tensor]:
        earlier, losses = None, []
        for number, x in enumerate(step.x):
            grad = None if earlier is None or number == 2 else earlier.output.grad
            new = forward_backward(step.blocks, x, earlier, grad)
            if earlier is not None:
                step.x[number - 1].grad = earlier.input_grad
            assert new is not None and new.input_grad is None
            loss = step.loss(new.output, number)
            loss.backward()
            losses.append(loss.detach())
            earlier = new
        assert forward_backward(step.blocks, None, earlier) is None
        step.x[-1].grad = earlier.input_grad
        return losses

    problems = unequal(want, step.seen(by_hand), f"rank {rank}")
    assert forward_backward(step.blocks, None) is None and run_microbatches(step.blocks, [], step.loss) == []
    step.comm.close()
    return problems


def test_pairs_by_hand(pool: Pools, seed: int) -> None:
    assert pool(2)(pairs, seed) == [[], []]


def issued(rank: int, world_size: int, seed: int) -> list[str]:
    """What a pair issues, in its order."""
    step = build(rank, world_size, Case("EE", 2, SHARED), seed)
    log: list[str] = []

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            log.append(name)
            return call(*args, **options)

        return run

    comm = step.comm
    first = forward_backward(step.blocks, step.x[0])
    assert first is not None
    begin = comm.begin_dispatch
    comm.begin_dispatch = lambda *args, **options: logged(
        "receive", logged("dispatch", begin)(*args, **options)
    )
    for name in ("combine", "redispatch", "dispatch_backward"):
        setattr(comm, name, logged(name, getattr(comm, name)))
    own = threading.get_ident()
    for block in step.blocks:
        block.before.mix.weight.register_hook(
            lambda _: None if threading.get_ident() == own else log.append("another thread")
        )
        block.before.forward = logged("attention", block.before.forward)
        products = block.layer.experts.products
        for name in ("gated_mm", "gated_mm_dgrad", "grouped_mm_wgrad"):
            setattr(products, name, logged(name, getattr(products, name)))
    forward_backward(step.blocks, step.x[1], first, step.factors[0])
    comm.close()
    return log


def test_one_fixed_order(pool: Pools, seed: int) -> None:
    """Each transfer of one microbatch is followed by the node of the other that lies beside it, and autograd
    computes on the thread that issues it."""
    experts_backward = ["gated_mm_dgrad", "grouped_mm_wgrad"]
    block = [
        *("redispatch", "attention"),
        *("dispatch", *experts_backward, "receive"),
        *("dispatch_backward", "grouped_mm_wgrad", "gated_mm"),
        "combine",  # and the backward of the attention
    ]
    assert pool(2)(issued, seed) == [block * 2] * 2


def held(rank: int, world_size: int, seed: int) -> list[bool]:
    """Borders hold no tensors that their graphs do not need; after the backward nothing is left."""
    step = build(rank, world_size, Case("DE", 1), seed)
    seen: list[weakref.ref[Tensor]] = []

    def doubled(x: Tensor) -> Tensor:
        y = 2 * x
        seen.append(weakref.ref(y))
        return y

    def before(x: Tensor) -> tuple[Tensor, Tensor]:
        residual = doubled(x)
        return residual, F.rms_norm(residual, residual.shape[-1:])

    def after(residual: Tensor, y: Tensor) -> Tensor:
        seen.extend((weakref.ref(residual), weakref.ref(y)))
        return residual + y

    blocks = [doubled, MoEBlock(before, step.blocks[1].layer, after), doubled]
    microbatch = forward_backward(blocks, step.x[0])
    assert microbatch is not None
    # rms_norm keeps the residual, as it does without cuts.
    alive = [each() is None for each in (seen[0], *seen[2:-1])]
    assert seen[1]() is not None and seen[-1]() is None
    forward_backward((), None, microbatch, step.factors[0])
    assert all(each() is None for each in seen) and microbatch._experts == []
    step.comm.close()
    return alive


def test_what_borders_hold(pool: Pools, seed: int) -> None:
    assert pool(1)(held, seed) == [[True] * 3]


# -- errors --------------------------------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Fails in the pass that it is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: str) -> Tensor:
        ctx.fails = fails
        if fails == "forward":
            raise ZeroDivisionError("in the middle")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails == "backward":
            raise ZeroDivisionError("in the middle")
        return grad, None


def broken(rank: int, world_size: int, where: str, fails: str, ranks: list[int], seed: int) -> Any:
    """An exception in a node; the same blocks compute the same afterwards."""
    step = build(rank, world_size, Case("EDE", 3, SHARED), seed)
    want = step.seen(step.one_after_the_other)
    blocks, loss = list(step.blocks), step.loss
    calls = {"left": 2}  # the second microbatch's, beside another one

    def fail(x: Tensor) -> Tensor:
        calls["left"] -= 1
        return Broken.apply(x, fails if rank in ranks and calls["left"] == 0 else "never")

    last = step.blocks[2]
    if where == "attention":
        blocks[2] = MoEBlock(lambda x: last.before(fail(x)), last.layer)
    elif where == "after":
        blocks[2] = MoEBlock(last.before, last.layer, lambda residual, y: residual + fail(y))
    elif where == "dense":
        blocks[1] = lambda x: step.blocks[1](fail(x))
    elif where == "loss":
        loss = lambda y, number: step.loss(fail(y), number)  # noqa: E731
    else:
        products = last.layer.experts.products
        plain = products.gated_mm_dgrad

        def dgrad(*args: Any, **options: Any) -> Any:
            calls["left"] -= 1
            if rank in ranks and calls["left"] == 0:
                raise ZeroDivisionError("in the middle")
            return plain(*args, **options)

        products.gated_mm_dgrad = dgrad
    caught = catch(lambda: run_microbatches(blocks, step.x, loss))
    if where == "experts":
        products.gated_mm_dgrad = plain
    problems = unequal(want, step.seen(step.merged), f"rank {rank}")
    step.comm.close()
    return problems, caught


PLACES = {
    ("attention", "forward"): "blocks[2] attention (forward)",
    ("attention", "backward"): "blocks[0] after, blocks[1], blocks[2] attention (backward)",
    ("after", "forward"): "blocks[2] after (forward)",
    ("after", "backward"): "blocks[2] after, loss (backward)",
    ("dense", "forward"): "blocks[1] (forward)",
    ("loss", "forward"): "loss (forward)",
    ("loss", "backward"): "blocks[2] after, loss (backward)",
    ("experts", "backward"): "blocks[2] experts (backward)",
}


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one rank", "all ranks"])
@pytest.mark.parametrize(("where", "fails"), PLACES, ids=str)
def test_an_exception_in_a_node(pool: Pools, where: str, fails: str, ranks: list[int], seed: int) -> None:
    results = pool(2)(broken, where, fails, ranks, seed)
    place = PLACES[where, fails]
    for rank, (problems, caught) in enumerate(results):
        assert problems == [] and caught is not None and caught.name == "InvalidArgument"
        text = f"{place}: ZeroDivisionError: in the middle"
        assert caught.text == text if rank in ranks else f"rank 1: {text}" in caught.text, caught.text


def misfit(rank: int, world_size: int, change: str, seed: int) -> Caught | None:
    """A border that does not fit, on rank 0 alone."""
    step = build(rank, world_size, Case("EE", 2), seed)
    first, second = step.blocks
    blocks: list[Any] = [first, second]
    loss: Callable[..., Any] = step.loss
    if rank == 0:
        if change == "one value":
            blocks[1] = MoEBlock(lambda x: second.before(x)[0], second.layer)
        elif change == "residual":
            blocks[1] = MoEBlock(lambda x: (x[:1], x), second.layer)
        elif change == "hidden":
            blocks[1] = MoEBlock(lambda x: (x[:, :8], x[:, :8]), second.layer)
        elif change == "integers":
            blocks[1] = MoEBlock(lambda x: (x, x.int()), second.layer)
        elif change == "no tensor":
            blocks.insert(1, lambda x: None)
        elif change == "loss":
            loss = lambda y, number: y  # noqa: E731
        elif change == "too many tokens":
            blocks[1] = MoEBlock(lambda x: (x.repeat(9, 1), x.repeat(9, 1)), second.layer)
    caught = catch(lambda: run_microbatches(blocks, step.x, loss))
    assert catch(step.merged) is None
    step.comm.close()
    return caught


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("one value", "blocks[1] attention (forward): before must return a tuple (residual, h)"),
        ("residual", "blocks[1] attention (forward): before returned a residual of shape (1, "),
        ("hidden", "blocks[1] attention (forward): x has shape"),
        ("integers", "blocks[1] attention (forward): before must return a tuple"),
        ("no tensor", "blocks[1] (forward): it returned NoneType, must return one tensor"),
        ("loss", "loss (forward): it returned a tensor of shape"),
        ("too many tokens", "blocks[1] dispatch (forward): x has 54 tokens"),
    ],
)
def test_borders_that_do_not_fit(pool: Pools, change: str, says: str, seed: int) -> None:
    own, other = pool(2)(misfit, change, seed)
    for caught in (own, other):
        assert caught is not None and caught.name == "InvalidArgument", caught
    assert own.text.startswith(says)
    assert says.partition(": ")[2] in other.text and "rank 0" in other.text, other.text


def bad_pairs(rank: int, world_size: int, seed: int) -> list[str]:
    step = build(rank, world_size, Case("E", 2), seed)
    texts = []

    def run(*args: Any) -> None:
        def call() -> None:
            forward_backward(step.blocks, *args)
            synchronize()
            step.comm.check()  # what another rank has refused, without a wait of the host in the pass

        found = catch(call)
        assert found is not None and found.name == "InvalidArgument"
        texts.append(found.text)

    def forward() -> Any:
        return forward_backward(step.blocks, step.x[0])

    run(None, forward())
    run(None, forward(), step.factors[0][:1])
    run(step.x[1], forward(), step.factors[0].double() if on_cpu() else step.factors[0].half())
    microbatch = forward()
    forward_backward((), None, microbatch, step.factors[0])
    run(step.x[1], microbatch, step.factors[0])
    with torch.no_grad():
        run(step.x[0])
    assert catch(step.merged) is None
    step.comm.close()
    return texts


def test_pairs_that_do_not_go(pool: Pools, seed: int) -> None:
    says = (
        "grad is None",
        "grad is a tensor of shape (1, ",
        "must be like the output",
        "earlier has had its backward",
        "gradients are disabled",
    )
    for texts in pool(2)(bad_pairs, seed):
        assert len(texts) == len(says)
        assert all(part in text for part, text in zip(says, texts, strict=True)), texts


def test_weights_computed_from_parameters_hand_gradients_on(seed: int) -> None:
    """Experts in bfloat16 whose parameters are float32: one cast for all microbatches of a step."""
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, "dtype": torch.bfloat16, "num_shared_experts": 1})
    sizes = {name: getattr(config, name) for name in ("num_experts", "hidden", "top_k", "dtype")}
    layer = MoELayer(config, Communicator(**sizes, max_tokens=8, device="cpu")).float()
    block = MoEBlock(lambda x: (x, x.tanh()), layer)
    x = torch.randn(3, 6, config.hidden)

    def in_order() -> None:
        for each in x:
            block(each).square().sum().backward()

    def merged() -> None:
        run_microbatches([block], list(x), lambda y, number: y.square().sum())

    found = []
    for step in (in_order, merged):
        weights = {
            f"layer.{name}": each.bfloat16() if name.endswith(("w_in", "w_out")) else each
            for name, each in layer.named_parameters()
        }
        layer.zero_grad()
        ran = _Runs(block, step)
        functional_call(ran, {f"block.{name}": each for name, each in weights.items()}, ())
        found.append({name: each.grad.clone() for name, each in layer.named_parameters()})
    layer.comm.close()
    assert found[0]["experts.w_in"].dtype == torch.float32 and found[0]["experts.w_in"].any()
    assert unequal(*found, "merged") == []


class _Runs(nn.Module):
    """A block and what is done with it."""

    def __init__(self, block: MoEBlock, run: Callable[[], None]) -> None:
        super().__init__()
        self.block, self.run = block, run

    def forward(self) -> None:
        self.run()


def refused(rank: int, world_size: int, why: str, seed: int) -> Caught | None:
    step = build(rank, world_size, Case("E", 2, SHARED), seed)
    layer = step.blocks[0].layer
    if why == "ddp":
        prepare_ddp(step.model)
    elif why == "hook":
        layer.shared.w_in.register_post_accumulate_grad_hook(lambda parameter: None)
    elif why == "fsdp":
        fully_shard(layer.shared)
    elif why == "in order":
        layer.overlap = OverlapConfig(overlap=False)
    elif why == "own experts":
        own = MoELayer(layer.config, step.comm, experts=nn.Linear(4, 4))
        step.blocks[0] = MoEBlock(step.blocks[0].before, own)
    caught = catch(step.merged)
    assert all(parameter.grad is None for parameter in step.model.parameters())
    step.comm.close()
    return caught


@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("ddp", "w_in of the layer has hooks (DistributedDataParallel with prepare_ddp has them)"),
        ("hook", "shared_in of the layer has hooks"),
        ("fsdp", "shared_in of the layer is sharded by fully_shard"),
        ("in order", "layer has overlap=False"),
        ("own experts", "layer has experts of one's own"),
    ],
)
def test_layers_that_cannot_be_cut(pool: Pools, why: str, says: str, seed: int) -> None:
    for caught in pool(2)(refused, why, seed):
        assert caught is not None and caught.name == "InvalidArgument"
        assert caught.text.startswith(f"blocks[0] attention (forward): {says}")


def no_blocks(rank: int, world_size: int, seed: int) -> None:
    step = build(rank, world_size, Case("E"), seed)
    layer: Any = step.blocks[0].layer
    with pytest.raises(InvalidArgument, match="before is int, must be a module or a function"):
        MoEBlock(1, layer)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="layer is Linear, must be a MoELayer"):
        MoEBlock(torch.relu, nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="combine is NoneType, must be callable"):
        Block(step.comm, torch.relu, torch.relu, torch.relu, None)  # type: ignore[arg-type]
    step.comm.close()


def test_what_is_no_block(pool: Pools, seed: int) -> None:
    pool(1)(no_blocks, seed)
