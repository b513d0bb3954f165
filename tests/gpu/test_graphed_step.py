"""GraphedStep on GPUs: captured steps and overflowed ones equal eager dropless steps, dropout included;
thousands of replays. On the CPU backend the graph is the step itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm.nn import GraphedStep
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_graphed_step import Case, Model, check_steps, forward_backward, plain_and_graphed
from tests.ranks import gathered

OPTIONS: dict[str, Any] = {
    "hidden": 256,
    "ffn_hidden": 192,
    "top_k": 3,
    "dtype": torch.bfloat16,  # torch's grouped product of others looks at offsets on the host
    "init_std": 0.05,
    "bias_update_rate": 0.001,
    "jitter": 0.0,
}


def case_of(seed: int, options: dict[str, Any] | None = None, **more: Any) -> Case:
    sizes = {"tokens": 256, "layers": 2, "experts": 8, "headroom": 1.2, "steps": 9}
    ends = {"update": None, "synced": False}
    return Case(seed, options={**OPTIONS, **(options or {})}, **{**sizes, **ends, **more})


KINDS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "rows kept": {"keep": "rows"},
    "nothing kept": {"keep": "nothing"},
    "checkpoints": {"checkpointed": (0, 1)},
    "by nccl": {"nccl": True},
    "gelu, no shared experts": {"options": {"activation": "gelu", "num_shared_experts": 0}},
    "accumulated": {"accumulate": 3},
    "growing": {"grows": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_dropless_steps(pool: Pools, size: int, kind: str, seed: int) -> None:
    case = case_of(seed, **KINDS[kind])
    results = pool(size)(plain_and_graphed, case)
    check_steps(case, results)
    overflowed, report = results[0]["overflowed"], results[0]["report"]
    if size > 1:
        assert any(overflowed) and not all(overflowed), report
    else:
        assert not any(overflowed), "one rank has all rows whatever the routing"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("nccl", [False, True], ids=["", "nccl"])
@pytest.mark.parametrize("size", [1, 2])
def test_updates_between_steps(pool: Pools, size: int, nccl: bool, kind: str, seed: int) -> None:
    case = case_of(seed, nccl=nccl, synced=nccl, update=kind, steps=7)
    results = pool(size)(plain_and_graphed, case)
    check_steps(case, results)
    assert size == 1 or 0 < sum(results[0]["overflowed"]) < 7, results[0]["report"]


@on_ranks("most_ranks")
def test_thousands_of_replays(rank: int, world_size: int, seed: int) -> None:
    """The same inputs again and again give the same bits, whatever lies between them."""
    case, replays = case_of(seed, tokens=160), 30 if harness.on_cpu() else 2000
    model = case.model(world_size)
    step = case.step(model)
    batches = [case.batch(rank, number) for number in range(7)]
    first: dict[int, Tensor] = {}
    for number in range(replays):
        index = number * 5 % 7
        torch.manual_seed(case.seed + rank + index)
        model.zero_grad()
        got = step(batches[index])
        weight_grad = model.layers[0].experts.w_in.grad
        marks = torch.stack([got["loss"], got["y"].float().sum(), weight_grad.float().abs().sum()])
        known = first.setdefault(index, marks)
        if number % 20 < 7:
            assert torch.equal(known, marks), f"replay {number}: {marks.tolist()}, at first {known.tolist()}"
    assert gathered((step.replays, step.overflows)) == [(replays, step.overflows)] * world_size
    # Two of the seven batches overflow where there are several ranks.
    share = step.overflows / replays
    assert (0.2 < share < 0.4) if world_size > 1 else share == 0, share
    del step
    model.layers[0].comm.close()


def _slow_step(case: Case, model: Model, headroom: float) -> GraphedStep:
    """A step behind which the device sleeps."""
    run = forward_backward(model)

    def slow(x_TH: Tensor) -> dict[str, Tensor]:
        result = run(x_TH)
        torch.cuda._sleep(1 << 29)  # a quarter of a second
        return result

    return GraphedStep(slow, model, headroom=headroom, group=case.group())


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("nccl", [False, True], ids=["", "nccl"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_call_waits_for_the_last_dispatch_and_no_more(
    rank: int, world_size: int, nccl: bool, seed: int
) -> None:
    """But for the first call, which waits for the step, calls return while the device is at work on it."""
    case = case_of(seed, nccl=nccl)
    model = case.model(world_size)
    step = _slow_step(case, model, headroom=100.0)
    for number in range(3):
        step(case.batch(rank, number))
        assert number == 0 or not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        model.zero_grad()
    del step
    model.layers[0].comm.close()


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("nccl", [False, True], ids=["", "nccl"])
@on_ranks(2)
def test_a_call_hears_of_its_own_overflow(rank: int, world_size: int, nccl: bool, seed: int) -> None:
    """The overflows after each of several calls that begin while the step before is under way. Every third
    batch overflows, the second one at first."""
    case = case_of(seed, nccl=nccl)
    model = case.model(world_size)
    step = _slow_step(case, model, headroom=case.headroom)
    batches, found = [case.batch(rank, number) for number in range(7)], []
    for x_TH in batches:
        step(x_TH)
        model.zero_grad()
        found.append(step.overflows)
    torch.cuda.synchronize()
    del step
    model.layers[0].comm.close()
    assert found == [0, 1, 1, 1, 2, 2, 2]
