"""A GraphedStep equals plain steps, whether it overflows or not: what is undone, what ranks agree upon, what
is counted. On the CPU its graph is the step itself, and equal is bit for bit; tests/gpu/test_graphed_step.py
runs the same body with CUDA graphs.

The layers of a model stand side by side on one input, so that a last bit in one does not change the routing
of another.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecomm import PeerLost
from moecomm.nn import (
    GraphedStep,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    backward_weights,
    keep_plans,
    mark_synchronized,
    sync_gradients,
    update_expert_bias,
)
from tests import ranks
from tests.multirank.catching import refused
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks
from tests.played import Played, step_of

TOKENS = 12
OPTIONS: dict[str, Any] = {
    "hidden": 16,
    "ffn_hidden": 8,
    "top_k": 2,
    "num_shared_experts": 1,
    "bias_update_rate": 0.01,
    "aux_loss": "batch",
    "aux_loss_coef": 0.1,
    "jitter": 0.01,
    "init_std": 0.4,
    "dtype": torch.float64,
}


@dataclass(frozen=True)
class Case:
    seed: int = 0
    tokens: int = TOKENS
    layers: int = 3
    experts: int = 4
    """Of each rank."""
    headroom: float = 1.25
    grows: bool = False
    keep: Any = "all"
    checkpointed: tuple[int, ...] = ()
    """Which layers."""
    update: str | None = "adamw"
    """The optimizer; None: gradients are set to zero instead of an update."""
    accumulate: int = 1
    """Calls between two updates."""
    synced: bool = True
    """An update sums gradients over ranks and moves biases."""
    nccl: bool = False
    """The ranks agree by NCCL, else by gloo."""
    steps: int = 6
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, world_size: int) -> MoEConfig:
        return MoEConfig(**{**OPTIONS, "num_experts": self.experts * world_size, **self.options})

    def communicator(self, world_size: int) -> Any:
        config = self.config(world_size)
        sizes = {name: getattr(config, name) for name in ("num_experts", "hidden", "top_k", "dtype")}
        return ranks.communicator(**sizes, max_tokens=self.tokens)

    def model(self, world_size: int) -> Model:
        torch.manual_seed(self.seed)
        return Model(self.config(world_size), self.communicator(world_size), self).to(ranks.device())

    def batch(self, rank: int, step: int) -> Tensor:
        """Every third step all tokens of all ranks are nearly the same, so that all want the same experts."""
        generator = torch.Generator().manual_seed(self.seed + 100 * step + rank)
        config = self.config(1)
        x_TH = torch.randn(self.tokens, config.hidden, generator=generator, dtype=torch.float64)
        if step % 3 == 1:
            same = torch.Generator().manual_seed(self.seed + step)
            x_TH = 1e-3 * x_TH + 4 * torch.randn(config.hidden, generator=same, dtype=torch.float64)
        return x_TH.to(ranks.device(), config.dtype)

    def group(self) -> Any:
        from tests.gpu.harness import nccl

        return nccl() if self.nccl else None

    def step(self, model: Model, **arguments: Any) -> Any:
        return GraphedStep(
            forward_backward(model),
            model,
            headroom=self.headroom,
            grows=self.grows,
            group=self.group(),
            recorder=Played() if ranks.on_cpu() else None,
            **arguments,
        )

    def optimizer(self, model: Model) -> torch.optim.Optimizer:
        if self.update == "sgd":
            return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
        rate = 1e-2 if ranks.on_cpu() else 1e-4
        return torch.optim.AdamW(model.parameters(), lr=rate, capturable=not ranks.on_cpu())


class Model(nn.Module):
    """Dropout after each layer, and a buffer that each forward changes."""

    def __init__(self, config: MoEConfig, comm: Any, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MoELayer(config, comm, overlap=OverlapConfig(keep=case.keep)) for _ in range(case.layers)
        )
        self.checkpointed = case.checkpointed
        self.register_buffer("forwards", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("never", torch.ones(3))

    def forward(self, x_TH: Tensor) -> Tensor:
        self.forwards += 1
        y_TH = x_TH
        for number, layer in enumerate(self.layers):
            if number in self.checkpointed:
                # A capture cannot preserve the state of the RNG, which the jitter needs.
                options = {"context_fn": keep_plans(layer), "preserve_rng_state": ranks.on_cpu()}
                out_TH = checkpoint(layer, x_TH, use_reentrant=False, **options)
            else:
                out_TH = layer(x_TH)
            y_TH = y_TH + nn.functional.dropout(out_TH, 0.2)
        return y_TH


def forward_backward(model: Model) -> Callable[[Tensor], dict[str, Tensor]]:
    def step(x_TH: Tensor) -> dict[str, Tensor]:
        y_TH = model(x_TH.mul_(1.25))  # in place: a second run has to begin with what was given
        loss = y_TH.to(torch.promote_types(y_TH.dtype, torch.float32)).square().mean()
        (loss * 100).backward()
        return {"loss": loss, "y": y_TH}

    return step


def random_state() -> Tensor:
    return torch.get_rng_state() if ranks.on_cpu() else torch.cuda.get_rng_state()


def set_random_state(state: Tensor) -> None:
    (torch.set_rng_state if ranks.on_cpu() else torch.cuda.set_rng_state)(state)


def state_of(model: Model) -> dict[str, Tensor]:
    """Parameters, their gradients, buffers (also those that are not saved), and what layers saw."""
    found = {name: each.detach() for name, each in model.named_parameters()}
    found |= {f"{n}.grad": each.grad for n, each in model.named_parameters() if each.grad is not None}
    found |= dict(model.named_buffers())
    for number, layer in enumerate(model.layers):
        found |= {f"{number} {name}": loss.detach() for name, loss in layer.last_losses.items()}
        found[f"{number} tokens"] = layer.last_tokens_per_expert
    return found


def differences(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> list[str]:
    """Numbers of bfloat16 are within some roundings of the largest of their tensor, others equal."""
    if got.keys() != want.keys():
        return [f"{what}: {sorted(got.keys() ^ want.keys())} is in one of them only"]
    rough = any(each.dtype == torch.bfloat16 for each in want.values())
    problems = []
    for name, value in want.items():
        if not rough or not value.dtype.is_floating_point:
            good = torch.equal(got[name], value)
        else:
            off = (value.float() - got[name].float()).abs()
            bound = 8 * torch.finfo(torch.bfloat16).eps * value.float().abs().amax() if value.numel() else 0
            good = bool((off <= bound).all())
        if not good:
            problems.append(f"{what}: {name} differs")
    return problems


def most_rows(model: Model, world_size: int) -> list[int]:
    """Returns the most rows that each rank got in a layer, in the last step without a graph."""
    found = [0] * world_size
    for layer in model.layers:
        tokens_E = layer.last_tokens_per_expert.cpu().clone()
        dist.all_reduce(tokens_E)
        found = list(map(max, found, tokens_E.view(world_size, -1).sum(dim=1).tolist()))
    return found


def plain_and_graphed(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Steps of both, with updates in between; what differs, and what was counted."""
    model = case.model(world_size)
    twin = copy.deepcopy(model)
    first, second = case.optimizer(model), case.optimizer(twin)

    def update_of(each: Model, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def update() -> None:
            if case.synced:
                sync_gradients(each, case.group())
            else:
                mark_synchronized(each)
            optimizer.step()
            if case.synced:
                update_expert_bias(each, case.group())
            optimizer.zero_grad()

        return update

    update, update_twin = update_of(model, first), update_of(twin, second)
    step = case.step(model)
    plain = forward_backward(twin)
    problems, overflowed, rows = [], [], []
    torch.manual_seed(case.seed + rank)
    for number in range(case.steps):
        x_TH, what = case.batch(rank, number), f"rank {rank}, step {number}"
        random, before = random_state(), step.overflows
        got = step(x_TH)
        overflowed.append(step.overflows > before)
        after = random_state()
        set_random_state(random)
        if not torch.equal(x_TH, case.batch(rank, number)):
            problems.append(f"{what}: the caller's input was written")
        want = plain(x_TH)
        problems += differences(got, {name: each.detach() for name, each in want.items()}, what)
        rows.append(most_rows(twin, world_size))
        if not torch.equal(after, random_state()):
            problems.append(f"{what}: the RNG went on differently")
        problems += differences(state_of(model), state_of(twin), what)
        if any(layer.capacity is not None for layer in model.layers):
            problems.append(f"{what}: the capacity stayed in a layer")
        if number % case.accumulate == case.accumulate - 1:
            for each, updated in ((model, update), (twin, update_twin)):
                (updated if case.update else each.zero_grad)()
            with torch.no_grad():  # so that a step's difference is not that of all before it
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    ours.copy_(theirs)
        if problems:
            break
    ranks.synchronize()
    result = {
        "problems": problems,
        "overflowed": overflowed,
        "rows": rows,
        "counts": (step.replays, step.overflows),
        "needed": step.last_needed,
        "report": step.report(),
        "capacities": step.capacities,
        "captures": step.captures,
    }
    del step
    model.layers[0].comm.close()
    return result


def check_steps(case: Case, results: list[dict[str, Any]]) -> None:
    """What every rank found is right, and the same where ranks have to agree."""
    found = [text for result in results for text in result["problems"]]
    assert not found, "\n".join(found[:10])
    first = results[0]
    for result in results:
        assert result["overflowed"] == first["overflowed"], "ranks disagree"
        assert result["counts"] == (case.steps, sum(result["overflowed"]))
        assert result["needed"] == first["needed"]
        assert result["capacities"] == first["capacities"]
    needed, capacity = first["needed"], min(first["capacities"])
    if needed is not None:
        assert needed.rows > needed.capacity
        assert case.grows or needed.capacity == capacity
        assert f"{needed.rows} rows of {needed.capacity}" in first["report"]


SECOND = Case(checkpointed=(1,))
CASES = {
    "room for all": replace(SECOND, headroom=100.0),
    "rows overflow": SECOND,
    "rows overflow, one row a token": replace(SECOND, headroom=0.5),
    "nothing kept": replace(SECOND, keep="nothing"),
    "accumulated": replace(SECOND, accumulate=3),
    "accumulated, one row a token": replace(SECOND, accumulate=2, headroom=0.5),
    "with drops of its own": replace(SECOND, options={"capacity_factor": 0.7}),
}


ALONE = ("room for all", "accumulated, one row a token")
"""One rank has all rows whatever the routing."""


@pytest.mark.parametrize(("name", "size"), [*((name, 3) for name in CASES), *((name, 1) for name in ALONE)])
def test_equals_plain_steps(name: str, size: int, pool: Pools, seed: int) -> None:
    case = replace(CASES[name], seed=seed)
    results = pool(size)(plain_and_graphed, case)
    check_steps(case, results)
    overflowed, needed = results[0]["overflowed"], results[0]["needed"]
    capacity = results[0]["capacities"][0]
    assert capacity <= size * TOKENS * 2
    if name == "room for all":
        assert not any(overflowed) and needed is None
    if case.headroom == 0.5:
        assert all(overflowed)
    rows = results[0]["rows"]
    if name != "with drops of its own":
        assert overflowed == [max(each) > capacity for each in rows]


@pytest.mark.parametrize("headroom", [0.5, 1.25])
def test_grows_until_rows_fit(headroom: float, pool: Pools, seed: int) -> None:
    """A step overflows where it needs more rows than steps before it have made room for."""
    case = replace(SECOND, seed=seed, headroom=headroom, grows=True, steps=9)
    results = pool(3)(plain_and_graphed, case)
    check_steps(case, results)
    first, balanced, at_worst = results[0], TOKENS * 2, 3 * TOKENS * 2
    capacity, captures, expected = math.ceil(headroom * balanced), 1, []
    for rows in map(max, first["rows"]):
        expected.append(rows > capacity)
        captures += len(expected) > 1 and expected[-2]
        if rows > capacity:
            capacity = math.ceil(min(at_worst, max(1.0, headroom) * (rows / balanced) * TOKENS * 2))
    assert first["overflowed"] == expected and any(expected), first
    assert set(first["capacities"]) == {capacity}
    assert first["captures"] == captures and (captures == 1 or f"{captures} captures" in first["report"])


@on_ranks(2)
def test_buffers_after_runs_that_ended_early(rank: int, world_size: int, seed: int) -> None:
    """The runs before the recording ended in the first layer's overflow, before any load_E was written. The
    second step writes them all before its overflow is known, and has to be undone. Steps whose first layer
    gets a balanced routing or none; the last always has the same experts."""
    config, comm = Case().config(world_size), Case().communicator(world_size)
    torch.manual_seed(seed)
    model = nn.Sequential(MoELayer(config, comm), MoELayer(config, comm))
    with torch.no_grad():
        model[0].router.weight.copy_(torch.eye(config.num_experts, config.hidden))
    model[1].router.expert_bias_E[:2] = 100.0
    twin = copy.deepcopy(model)
    axes = 4 * torch.eye(config.hidden, dtype=torch.float64)
    one = torch.arange(TOKENS) % config.num_experts
    other = (one + config.num_experts // 2) % config.num_experts
    all_alike, balanced = (axes[0] + axes[1]).expand(TOKENS, config.hidden), axes[one] + axes[other]

    step, plain = GraphedStep(step_of(model), model, headroom=1.0, recorder=Played()), step_of(twin)
    fullest = []
    for x_TH in (all_alike, balanced):
        step(x_TH)
        plain(x_TH)
        torch.testing.assert_close([*model.buffers()], [*twin.buffers()], rtol=0, atol=0)
        tokens_RE = [layer.last_tokens_per_expert.view(world_size, -1) for layer in twin]
        fullest.append([world_size * int(each.sum(dim=1).max()) for each in tokens_RE])
    comm.close()
    (first, _), (fits, last) = fullest
    assert first > step.capacities[0] >= fits and last > step.capacities[0]
    assert step.overflows == 2


@on_ranks(2)
def test_gradients_put_off_by_a_run_that_ended_early(rank: int, world_size: int, seed: int) -> None:
    """The first microbatch has put weights' gradients off when the second one overflows: the run without
    graph has its own. So has the step after an error of the caller's."""
    case = Case(seed=seed, options={"jitter": 0.0})
    config, comm = case.config(world_size), case.communicator(world_size)
    torch.manual_seed(seed)
    model = nn.Sequential(MoELayer(config, comm, overlap=OverlapConfig(defer_weights=True)))
    with torch.no_grad():
        model[0].router.weight.copy_(torch.eye(config.num_experts, config.hidden))
    twin, breaks = copy.deepcopy(model), []

    def run(each: nn.Module) -> Callable[..., Tensor]:
        def step(*microbatches: Tensor) -> Tensor:
            for x_TH in microbatches:
                loss = each(x_TH).square().sum()
                loss.backward()
                if breaks:
                    raise KeyError("of the caller")
            backward_weights(each)
            return loss

        return step

    axes = 4 * torch.eye(config.hidden, dtype=torch.float64)
    one = torch.arange(TOKENS) % config.num_experts
    balanced = axes[one] + axes[(one + config.num_experts // 2) % config.num_experts]
    all_alike = (axes[0] + axes[1]).expand(TOKENS, config.hidden)
    step, plain = GraphedStep(run(model), model, headroom=1.0, recorder=Played()), run(twin)
    step(balanced, balanced)
    breaks.append(True)
    refused(lambda: step(balanced, balanced), name="KeyError")
    breaks.clear()
    plain(balanced, balanced)
    for second in (balanced, all_alike):
        step(balanced, second)
        plain(balanced, second)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    comm.close()
    assert step.overflows == 1


@pytest.mark.parametrize("overflows", [False, True])
@on_ranks(2)
def test_gradients_of_the_caller(rank: int, world_size: int, overflows: bool, seed: int) -> list[str]:
    """Gradients that the caller has put there stay his tensors, and are added to."""
    case = replace(SECOND, seed=seed, headroom=0.5 if overflows else 100.0)
    model = case.model(world_size)
    twin = copy.deepcopy(model)
    own = []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        own.append(ours.grad)
    step = case.step(model)
    problems = []
    torch.manual_seed(seed + rank)
    for number in range(3):
        random = torch.get_rng_state()
        step(case.batch(rank, number))
        torch.set_rng_state(random)
        forward_backward(twin)(case.batch(rank, number))
        problems += differences(state_of(model), state_of(twin), f"step {number}")
        assert all(p.grad is each for p, each in zip(model.parameters(), own, strict=True)), f"step {number}"
    assert (step.overflows > 0) == overflows, f"{step.overflows} overflows"
    model.layers[0].comm.close()
    return problems


@on_ranks(2)
def test_errors_and_warnings(rank: int, world_size: int, seed: int) -> None:
    case = replace(SECOND, seed=seed, headroom=0.5)
    model, x_TH = case.model(world_size), case.batch(rank, 0)
    larger = replace(case, grows=True).step(model)
    larger(x_TH.clone())  # captured anew by the next call, of which all else has to be as before
    refused(lambda: larger(x_TH[1:]), begins="input 0 is torch.float64 (11, 16)")
    refused(lambda: larger(x_TH, x_TH), begins="2 inputs")
    larger(x_TH.clone())
    assert larger.captures == 2
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moecomm").addHandler(handler)
    step = case.step(model, warmup=1)
    for _ in range(5):
        step(x_TH)
    logging.getLogger("moecomm").removeHandler(handler)
    assert (step.replays, step.overflows) == (5, 5)
    assert len(warnings) == 1, warnings
    assert "1 run again without graph" in warnings[0]
    refused(lambda: step(x_TH[1:]), begins="input 0 is torch.float64 (11, 16)")
    refused(lambda: step(x_TH, x_TH), begins="2 inputs")
    refused(lambda: step(3), begins="input 0 is int")
    broken: list[bool] = []

    def breaks(x_TH: Tensor) -> Tensor:
        result = forward_backward(model)(x_TH)
        if broken:
            raise KeyError("of the caller")
        return result["loss"]

    other = GraphedStep(breaks, model, headroom=100.0, recorder=Played())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    grads = [each.grad for each in model.parameters()]
    other(x_TH)
    values = [None if each is None else each.clone() for each in grads]
    broken.append(True)
    refused(lambda: other(x_TH), name="KeyError")
    for p, g, v in zip(model.parameters(), grads, values, strict=True):
        assert p.grad is g and g is not None and torch.equal(g, v)
    broken.clear()

    def replaces(x_TH: Tensor) -> Tensor:
        model.forwards = model.forwards + 1
        return forward_backward(model)(x_TH)["loss"]

    def fresh(step_fn: Callable[[Tensor], Any], x_TH: Tensor = x_TH) -> Any:
        return GraphedStep(step_fn, model, recorder=Played())(x_TH)

    begins = "step_fn puts another tensor in the place of buffer forwards"
    refused(lambda: fresh(replaces), begins=begins)
    refused(lambda: fresh(lambda x: [model(x).sum().backward(), 3]), begins="step_fn returned int")
    leaf = x_TH.clone().requires_grad_()
    refused(lambda: fresh(breaks, leaf), begins="input 0 requires a gradient")
    model.layers[0].comm.close()


@on_ranks(2)
def test_results_and_errors_that_come_late(rank: int, world_size: int, seed: int) -> None:
    """A result on the host is copied when the step has written it. Where ranks cannot agree, because one is
    gone, the error is the one that the device finds behind the last dispatch. Calls that return, and fail,
    while the step is still at work: what `_wait` waits for comes with it."""
    case = replace(SECOND, seed=seed, headroom=100.0)
    model = case.model(world_size)
    comm, result, failed = model.layers[0].comm, torch.zeros(()), []

    def run(x_TH: Tensor) -> Tensor:
        forward_backward(model)(x_TH)
        return result.zero_()

    def lost() -> None:
        if failed:
            raise PeerLost("rank 1 is gone", rank=1, phase="combine")

    def refuse(rows: int) -> Any:
        raise RuntimeError("connection closed by peer")

    step = GraphedStep(run, model, headroom=100.0, recorder=Played())
    step._wait = lambda: result.fill_(3.0)  # type: ignore[method-assign]
    assert step(case.batch(rank, 0)).item() == 3.0
    comm.check = lost
    step._wait = lambda: failed.append(True)  # type: ignore[method-assign]
    step._overflow_check.read = refuse  # type: ignore[method-assign]
    refused(lambda: step(case.batch(rank, 1)), name="PeerLost")
    del comm.check
    comm.close()
