"""A GraphedStep whose graph is the step itself equals plain steps, bit for bit, whether it overflows or not.

CUDA graphs have tests/gpu/test_graphed_step.py; here is all that is around them: what is undone, what ranks
agree upon, what is counted.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecomm import Communicator
from moecomm.nn import (
    ActivationPool,
    GraphedStep,
    MoEConfig,
    MoELayer,
    keep_plans,
    sync_gradients,
    update_expert_bias,
)
from tests.multirank.conftest import Pools
from tests.multirank.harness import RankPool
from tests.played import Played

HIDDEN, TOKENS, LAYERS = 16, 12, 3
PAGE = 4096


@pytest.fixture(scope="module")
def pools(pool: Pools) -> dict[int, RankPool]:
    return {size: pool(size) for size in (1, 2, 3)}


class Model(nn.Module):
    """Dropout before each layer; the second under a checkpoint; a buffer that each forward changes."""

    def __init__(self, comm: Communicator, config: MoEConfig, keep: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoELayer(config, comm, keep=keep) for _ in range(LAYERS))
        self.register_buffer("forwards", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("never", torch.ones(3))

    def forward(self, x_TH: Tensor) -> Tensor:
        self.forwards += 1
        for number, layer in enumerate(self.layers):

            def block(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return x + layer(nn.functional.dropout(x, 0.25))

            if number == 1:
                x_TH = checkpoint(block, x_TH, use_reentrant=False, context_fn=keep_plans)
            else:
                x_TH = block(x_TH)
        return x_TH


@dataclass(frozen=True)
class Case:
    headroom: float = 1.25
    pool_bytes: tuple[int, ...] = (1 << 20,) * 3
    """Of each rank; 0: no pool."""
    keep: str = "all"
    accumulate: int = 1
    """Calls between two updates."""
    capacity_factor: float | None = None
    steps: int = 6


def config_of(case: Case, world_size: int) -> MoEConfig:
    return MoEConfig(
        hidden=HIDDEN,
        ffn_hidden=8,
        num_experts=4 * world_size,
        top_k=2,
        dtype=torch.float64,
        num_shared_experts=1,
        bias_update_rate=0.01,
        aux_loss="batch",
        aux_loss_coef=0.1,
        jitter=0.01,
        init_std=0.4,
        capacity_factor=case.capacity_factor,
    )


def batch(rank: int, step: int, seed: int) -> Tensor:
    """Every third step all tokens of all ranks are nearly the same, so that all want the same experts."""
    generator = torch.Generator().manual_seed(seed + 100 * step + rank)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    if step % 3 == 1:
        same = torch.Generator().manual_seed(seed + step)
        x_TH = 1e-3 * x_TH + torch.randn(HIDDEN, generator=same, dtype=torch.float64)
    return x_TH


def communicator_for(config: MoEConfig) -> Communicator:
    return Communicator(
        num_experts=config.num_experts,
        hidden=HIDDEN,
        top_k=config.top_k,
        max_tokens=TOKENS,
        dtype=config.dtype,
        device="cpu",
        timeout=20,
    )


def build(rank: int, world_size: int, case: Case, seed: int) -> tuple[Model, Model]:
    """Two models alike on one communicator."""
    torch.manual_seed(seed)
    config = config_of(case, world_size)
    model = Model(communicator_for(config), config, case.keep)
    return model, copy.deepcopy(model)


def forward_backward(model: Model) -> Callable[[Tensor], dict[str, Tensor]]:
    def step(x_TH: Tensor) -> dict[str, Tensor]:
        y_TH = model(x_TH.mul_(1.25))  # in place: a second run has to begin with what was given
        loss = y_TH.square().mean()
        loss.backward()
        return {"loss": loss, "y": y_TH}

    return step


def state_of(model: Model) -> dict[str, Tensor]:
    """Parameters, their gradients, buffers (also those that are not saved), and what layers saw."""
    found = {name: each.detach() for name, each in model.named_parameters()}
    found |= {f"{n}.grad": each.grad for n, each in model.named_parameters() if each.grad is not None}
    found |= dict(model.named_buffers())
    for number, layer in enumerate(model.layers):
        found |= {f"{number} {name}": loss for name, loss in layer.last_losses.items()}
        found[f"{number} tokens"] = layer.last_tokens_per_expert
    return found


def differences(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> list[str]:
    if got.keys() != want.keys():
        return [f"{what}: {sorted(got.keys() ^ want.keys())} is in one of them only"]
    return [f"{what}: {name} differs" for name in want if not torch.equal(got[name], want[name])]


def most_rows(model: Model, world_size: int) -> int:
    """Returns the most rows that a rank got in a layer, in the last step without a graph."""
    found = 0
    for layer in model.layers:
        tokens_E = layer.last_tokens_per_expert.clone()
        dist.all_reduce(tokens_E)
        found = max(found, int(tokens_E.view(world_size, -1).sum(dim=1).max()))
    return found


def pool_of(rank: int, case: Case) -> ActivationPool | None:
    size = case.pool_bytes[rank]
    return ActivationPool("cpu", size, page_bytes=PAGE) if size else None


def plain_and_graphed(rank: int, world_size: int, case: Case, seed: int) -> dict[str, Any]:
    """Steps of both, with updates in between; what differs, and what was counted."""
    model, twin = build(rank, world_size, case, seed)
    first, second = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin))

    def update_of(each: Model, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def update() -> None:
            sync_gradients(each)
            optimizer.step()
            update_expert_bias(each)
            optimizer.zero_grad()

        return update

    pool = pool_of(rank, case)
    whole_steps = case.accumulate == 1
    step = GraphedStep(
        forward_backward(model),
        model,
        pool=pool,
        headroom=case.headroom,
        update=update_of(model, first) if whole_steps else None,
        recorder=Played(),
    )
    plain, update = forward_backward(twin), update_of(twin, second)
    problems, overflowed, rows = [], [], []
    torch.manual_seed(seed + rank)
    for number in range(case.steps):
        x_TH = batch(rank, number, seed)
        random = torch.get_rng_state()
        before = step.overflows
        got = step(x_TH)
        overflowed.append(step.overflows > before)
        after = torch.get_rng_state()
        torch.set_rng_state(random)
        if not torch.equal(x_TH, batch(rank, number, seed)):
            problems.append(f"step {number}: the caller's input was written")
        want = plain(x_TH)
        problems += differences(got, {n: t.detach() for n, t in want.items()}, f"step {number}")
        rows.append(most_rows(twin, world_size))
        if not torch.equal(after, torch.get_rng_state()):
            problems.append(f"step {number}: the RNG went on differently")
        if whole_steps:
            update()
        problems += differences(state_of(model), state_of(twin), f"step {number}")
        if not whole_steps and number % case.accumulate == case.accumulate - 1:
            update()
            update_of(model, first)()
        if any(layer.pool is not None or layer.capacity is not None for layer in model.layers):
            problems.append(f"step {number}: capacity or pool stayed in a layer")
    result = {
        "problems": [f"rank {rank}, {text}" for text in problems],
        "overflowed": overflowed,
        "rows": rows,
        "counts": (step.replays, step.overflows),
        "needed": step.last_needed,
        "report": step.report(),
        "capacities": step.capacities,
        "left": None if pool is None else pool.use().held,
    }
    model.layers[0].comm.close()
    return result


CASES = {
    "room for all": Case(headroom=100.0),
    "rows overflow": Case(),
    "rows overflow, one row a token": Case(headroom=0.5),
    "no pool": Case(pool_bytes=(0, 0, 0)),
    "rows kept": Case(keep="rows"),
    "nothing kept": Case(keep="nothing"),
    "the pool of one rank overflows": Case(headroom=100.0, pool_bytes=(PAGE, 1 << 20, 1 << 20)),
    "accumulated": Case(accumulate=3),
    "accumulated, the pool overflows": Case(accumulate=2, headroom=100.0, pool_bytes=(PAGE,) * 3),
    "with drops of its own": Case(capacity_factor=0.7),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_plain_steps(case: Case, ranks: int, pools: dict[int, RankPool], seed: int) -> None:
    results = pools[ranks](plain_and_graphed, case, seed)
    found = [text for result in results for text in result["problems"]]
    assert not found, "\n".join(found[:10])
    assert all(result["overflowed"] == results[0]["overflowed"] for result in results), "ranks disagree"
    for result in results:
        assert result["counts"] == (case.steps, sum(result["overflowed"]))
        if not result["overflowed"][-1]:  # else it may have ended in the middle
            assert result["left"] in (0, None)
    overflowed, needed = results[0]["overflowed"], results[0]["needed"]
    assert all(result["needed"][::2] == needed[::2] for result in results) if needed else True
    if case is CASES["room for all"]:
        assert not any(overflowed) and needed is None
    capacity = results[0]["capacities"][0]
    if case.pool_bytes[0] != PAGE and case.capacity_factor is None:
        assert overflowed == [rows > capacity for rows in results[0]["rows"]]
    if case.headroom == 0.5:
        assert all(overflowed)
    if needed is not None and needed.rows:
        assert needed.rows > needed.capacity == capacity
        assert f"{needed.rows} rows of {needed.capacity}" in results[0]["report"]
    if case.pool_bytes[0] == PAGE:
        assert all(overflowed) and needed.rows == 0 and needed.bytes > PAGE
        assert f"{needed.bytes} bytes" in results[0]["report"]
    worst = ranks * TOKENS * 2
    assert all(rows <= worst for rows in results[0]["capacities"])


def buffers_after_an_early_end(rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Steps whose first layer gets a balanced routing or none; the last always has the same experts."""
    config = config_of(Case(), world_size)
    comm = communicator_for(config)
    torch.manual_seed(seed)
    model = nn.Sequential(MoELayer(config, comm), MoELayer(config, comm))
    with torch.no_grad():
        model[0].router.weight.copy_(torch.eye(config.num_experts, HIDDEN))
    model[1].router.expert_bias_E[:2] = 100.0
    twin = copy.deepcopy(model)
    axes = 4 * torch.eye(HIDDEN, dtype=torch.float64)
    one = torch.arange(TOKENS) % config.num_experts
    other = (one + config.num_experts // 2) % config.num_experts
    all_alike, balanced = (axes[0] + axes[1]).expand(TOKENS, HIDDEN), axes[one] + axes[other]

    def run(each: nn.Module) -> Callable[[Tensor], Tensor]:
        def step(x_TH: Tensor) -> Tensor:
            loss = each(x_TH).square().sum()
            loss.backward()
            return loss

        return step

    step, plain = GraphedStep(run(model), model, headroom=1.0, recorder=Played()), run(twin)
    found: dict[str, Any] = {"different": [], "fullest": [], "capacity": step.capacities[0]}
    for x_TH in (all_alike, balanced):
        step(x_TH)
        plain(x_TH)
        found["different"] += [
            name
            for (name, got), want in zip(model.named_buffers(), twin.buffers(), strict=True)
            if not torch.equal(got, want)
        ]
        tokens_RE = [layer.last_tokens_per_expert.view(world_size, -1) for layer in twin]
        found["fullest"].append([world_size * int(each.sum(dim=1).max()) for each in tokens_RE])
    found["overflows"] = step.overflows
    comm.close()
    return found


def test_buffers_after_runs_that_ended_early(pools: dict[int, RankPool], seed: int) -> None:
    """The runs before the recording ended in the first layer's overflow, before any load_E was written. The
    second step writes them all before its overflow is known, and has to be undone."""
    for found in pools[2](buffers_after_an_early_end, seed):
        (first, _), (fits, last) = found["fullest"]
        assert first > found["capacity"] >= fits and last > found["capacity"]
        assert found["overflows"] == 2
        assert not found["different"]


def needed_is_enough(rank: int, world_size: int, seed: int) -> list[Any]:
    """The bytes that an overflow names are the least that suffice."""
    case = Case(headroom=100.0)
    found: list[Any] = []
    model, _ = build(rank, world_size, case, seed)
    x_TH = batch(rank, 0, seed)
    size = PAGE
    for _ in range(3):
        torch.manual_seed(seed + rank)
        pool = ActivationPool("cpu", size, page_bytes=PAGE)
        step = GraphedStep(forward_backward(model), model, pool=pool, headroom=100.0, recorder=Played())
        step(x_TH)
        found.append((size, step.last_needed))
        if step.last_needed is None:
            break
        size = step.last_needed.bytes - PAGE * len(found[:-1])
    model.layers[0].comm.close()
    return found


def test_needed_bytes_suffice(pools: dict[int, RankPool], seed: int) -> None:
    for found in pools[2](needed_is_enough, seed):
        assert len(found) == 2, found
        (_, first), (size, second) = found
        assert first.bytes == size and second is None


def with_own_gradients(rank: int, world_size: int, seed: int, overflows: bool) -> list[str]:
    """Gradients that the caller has put there stay his tensors, and are added to."""
    case = Case(headroom=0.5 if overflows else 100.0)
    model, twin = build(rank, world_size, case, seed)
    own = []
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        own.append(ours.grad)
    step = GraphedStep(forward_backward(model), model, headroom=case.headroom, recorder=Played())
    problems = []
    torch.manual_seed(seed + rank)
    for number in range(3):
        random = torch.get_rng_state()
        step(batch(rank, number, seed))
        torch.set_rng_state(random)
        forward_backward(twin)(batch(rank, number, seed))
        problems += differences(state_of(model), state_of(twin), f"step {number}")
        if any(p.grad is not each for p, each in zip(model.parameters(), own, strict=True)):
            problems.append(f"step {number}: another tensor is in the place of a gradient")
    if (step.overflows > 0) != overflows:
        problems.append(f"{step.overflows} overflows")
    model.layers[0].comm.close()
    return problems


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_of_the_caller(pools: dict[int, RankPool], overflows: bool, seed: int) -> None:
    for problems in pools[2](with_own_gradients, seed, overflows):
        assert not problems, problems


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def errors_and_warnings(rank: int, world_size: int, seed: int) -> dict[str, Any]:
    case = Case(headroom=0.5)
    model, _ = build(rank, world_size, case, seed)
    x_TH = batch(rank, 0, seed)
    handler = _Warnings()
    logging.getLogger("moecomm").addHandler(handler)
    step = GraphedStep(
        forward_backward(model), model, headroom=0.5, report_every=3, recorder=Played(), warmup=1
    )
    for _ in range(5):
        step(x_TH)
    texts: dict[str, str] = {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
            texts[name] = ""
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    refused("shape", lambda: step(x_TH[1:]))
    refused("count", lambda: step(x_TH, x_TH))
    refused("no tensor", lambda: step(3))
    grads = [each.grad for each in model.parameters()]
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
    refused("step", lambda: other(x_TH))
    same = all(
        p.grad is g and g is not None and torch.equal(g, v)
        for p, g, v in zip(model.parameters(), grads, values, strict=True)
    )
    broken.clear()

    def replaces(x_TH: Tensor) -> Tensor:
        model.forwards = model.forwards + 1
        return forward_backward(model)(x_TH)["loss"]

    refused("buffer", lambda: GraphedStep(replaces, model, recorder=Played())(x_TH))
    returns = GraphedStep(lambda x: [model(x).sum().backward(), 3], model, recorder=Played())
    refused("result", lambda: returns(x_TH))
    refused("input", lambda: GraphedStep(breaks, model, recorder=Played())(x_TH.clone().requires_grad_()))
    logging.getLogger("moecomm").removeHandler(handler)
    model.layers[0].comm.close()
    return {"texts": texts, "warnings": handler.texts, "same": same, "counts": (step.replays, step.overflows)}


def test_errors_and_warnings(pools: dict[int, RankPool], seed: int) -> None:
    for found in pools[2](errors_and_warnings, seed):
        assert found["counts"] == (5, 5) and found["same"]
        assert len(found["warnings"]) == 2, found["warnings"]
        assert "1 run again without graph" in found["warnings"][0]
        assert "4 run again without graph" in found["warnings"][1]
        parts = {
            "shape": "InvalidArgument: input 0 is torch.float64 (11, 16)",
            "count": "InvalidArgument: 2 inputs",
            "no tensor": "InvalidArgument: input 0 is int",
            "step": "KeyError",
            "buffer": "InvalidArgument: step_fn puts another tensor in the place of buffer forwards",
            "result": "InvalidArgument: step_fn returned int",
            "input": "InvalidArgument: input 0 requires a gradient",
        }
        for name, text in parts.items():
            assert found["texts"][name].startswith(text), found["texts"][name]
