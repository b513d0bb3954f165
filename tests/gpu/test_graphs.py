"""Fixed capacity inside torch.cuda.graph: routing and counts change between replays, nothing else has to.

`Captured` holds static inputs and a graph of dispatch, experts and combine; `load` puts the inputs of another
job there. Token counts change by ids: a token whose ids are all -1 is not there.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.cases import Inputs
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job, settled_error
from tests.multirank.catching import catch, require
from tests.multirank.on_ranks import on_ranks
from tests.oracle import Oracle, opened

pytestmark = pytest.mark.usefixtures("cuda_only")


class Captured:
    """A CUDA graph of dispatch, the answer of the experts, and combine, on inputs at fixed addresses."""

    def __init__(self, comm: Any, job: Job, rank: int, capacity: int) -> None:
        self.comm, self.job, self.rank, self.capacity = comm, job, rank, capacity
        device = comm.device
        known = Oracle(job, rank, device)
        self.x_TH = known.own.x_TH.clone()
        self.ids_TK = known.own.ids_TK.clone()
        self.weights_TK = known.own.weights_TK.clone()
        self.factor_P = torch.ones(capacity, 1, device=device, dtype=job.torch_dtype)
        self.graph, (self.out, self.y_TH) = harness.captured(self.step)

    def step(self) -> tuple[Any, torch.Tensor]:
        out = self.comm.dispatch(
            self.x_TH,
            self.ids_TK,
            self.weights_TK,
            layout=self.job.layout,
            alignment=self.job.alignment,
            capacity=self.capacity,
        )
        rows_PH = out.tokens * self.factor_P
        weights = out.weights if self.job.layout == "expert" else None
        return out, self.comm.combine(rows_PH, out.handle, weights=weights)

    def load(self, known: Oracle) -> None:
        self.x_TH.copy_(known.own.x_TH)
        self.ids_TK.copy_(known.own.ids_TK)
        self.weights_TK.copy_(known.own.weights_TK)
        self.factor_P.fill_(float("nan"))
        self.factor_P[: known.kept, 0] = known.factor_P(self.rank)[: known.kept]

    def check(self, known: Oracle) -> list[str]:
        known.check_dispatch(self.out)
        known.check_combine("combine", self.y_TH, weighted=self.job.layout == "expert")
        return known.problems


class AtCapacity(Oracle):
    """An oracle with a capacity of the graph's own, whatever the job needs."""

    def __init__(self, job: Job, rank: int, device: torch.device, capacity: int) -> None:
        super().__init__(job, rank, device)
        self.capacity = capacity
        self.kept = min(self.mine.needed, capacity)


def _with_room(job: Job, rank: int, device: torch.device, count: int) -> tuple[list[AtCapacity], int]:
    """Oracles of the job with other seeds, and the capacity that has room for all of them."""
    jobs = [replace(job, seed=job.seed + i) for i in range(count)]
    capacity = max(max(Oracle(each, rank, device).needed) for each in jobs)
    return [AtCapacity(each, rank, device, capacity) for each in jobs], capacity


ROUTINGS = ("uniform", "holes", "skewed", "one-rank", "empty", "one-expert")


def _replays(rank: int, world_size: int, job: Job, share: float, steps: int) -> tuple[list[str], int]:
    """`share` of the rows that uniform routing needs is the capacity. Returns problems and overflows seen."""
    with harness.communicator(**job.communicator) as comm:
        device = comm.device
        capacity = int(share * max(Oracle(job, rank, device).needed))
        captured = Captured(comm, job, rank, capacity)
        harness.settled_error(comm)
        problems, overflows = [], 0
        for step in range(steps):
            now = replace(job, seed=job.seed + step, routing=ROUTINGS[step % len(ROUTINGS)])
            known = AtCapacity(now, rank, device, capacity)
            captured.load(known)
            harness.poison(1 << 20)
            captured.graph.replay()
            problems += captured.check(known)
            needed = max(known.needed)
            error = settled_error(comm)
            if (error is not None) != (needed > capacity) or (error and error.needed != needed):
                problems.append(
                    f"rank {rank}, step {step}: {needed} rows of {capacity}, check() said {error}"
                )
            overflows += error is not None
            if problems:
                break
        return problems, overflows


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_routing_changes_between_replays(pool: Pools, size: int, layout: str, seed: int) -> None:
    job = Job.on(
        size,
        (64, 0, 50, 33),
        experts=8,
        hidden=256,
        top_k=4,
        layout=layout,
        alignment=8 if layout == "expert" else 1,
        seed=seed,
    )
    results = pool(size)(_replays, job, 1.2, 36)
    harness.assert_none([problems for problems, _ in results])


@pytest.mark.parametrize("size", [2, 4])
def test_overflow_in_some_replays(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(64,) * size, num_experts=8 * size, hidden=256, top_k=4, seed=seed)
    results = pool(size)(_replays, job, 0.8, 24)
    harness.assert_none([problems for problems, _ in results])
    assert {overflows for _, overflows in results} == {results[0][1]}
    assert 0 < results[0][1] < 24, "some replays overflow, others do not"


@on_ranks("most_ranks")
def test_thousands_of_replays(rank: int, world_size: int, seed: int) -> list[str]:
    """Replays without a pause, the inputs swapped on the device in between; one in a hundred is checked."""
    job = Job(tokens=(40,) * world_size, num_experts=4 * world_size, hidden=128, top_k=2, seed=seed)
    replays = 3000
    with harness.communicator(**job.communicator) as comm:
        device = comm.device
        knowns, capacity = _with_room(job, rank, device, 7)
        captured = Captured(comm, job, rank, capacity)
        problems = []
        for step in range(replays):
            known = knowns[step * 5 % 7]
            captured.load(known)
            captured.graph.replay()
            if step % 100 == 99:
                problems += captured.check(known)
                known.problems = []
                if problems:
                    break
        error = settled_error(comm)
        return problems + ([f"rank {rank}: {error}"] if error else [])


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_two_captured_layers_with_gemms(rank: int, world_size: int, seed: int) -> None:
    """Two layers with GEMMs around them in one graph, on one communicator; the same done eagerly is equal."""
    job = Job(tokens=(128,) * world_size, num_experts=4 * world_size, hidden=256, top_k=2, seed=seed)
    steps = 12
    with harness.communicator(**job.communicator) as comm:
        device, kind = comm.device, job.torch_dtype
        gen = torch.Generator(device).manual_seed(job.seed)
        knowns = [Oracle(replace(job, seed=job.seed + i), rank, device) for i in range(steps)]
        capacity = max(max(each.needed) for each in knowns) + 8
        into, out_of = (
            [
                torch.randn(job.hidden, job.hidden, generator=gen, device=device).to(kind) / 16
                for _ in range(2)
            ]
            for _ in range(2)
        )
        static = Inputs(
            x_TH=knowns[0].own.x_TH.clone(),
            ids_TK=knowns[0].own.ids_TK.clone(),
            weights_TK=knowns[0].own.weights_TK.clone(),
        )

        def step() -> torch.Tensor:
            y_TH = static.x_TH
            handles = []
            for layer in range(2):
                out = comm.dispatch(
                    y_TH @ into[layer], static.ids_TK.roll(layer, 0), static.weights_TK, capacity=capacity
                )
                handles.append(out.handle)
                rows_PH = torch.relu(out.tokens @ out_of[layer])
                y_TH = y_TH + comm.combine(rows_PH, out.handle, weights=out.weights)
            # The handle of the first layer serves again after the second layer's operations. Both layers
            # have the same rows for each expert, so the rows that are there are the same ones.
            return y_TH + comm.combine(out.tokens * 0.5, handles[0]) * 0.25

        graph, y_TH = harness.captured(step)
        for i, known in enumerate(knowns):
            for name in ("x_TH", "ids_TK", "weights_TK"):
                getattr(static, name).copy_(getattr(known.own, name))
            graph.replay()
            captured_TH = y_TH.clone()
            # GEMMs may differ in a bit.
            assert torch.allclose(captured_TH, step(), rtol=2e-2, atol=1e-2), f"step {i}"
            graph.replay()
            assert torch.equal(captured_TH, y_TH), f"step {i}: the second replay differs from the first"


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_a_captured_training_step(rank: int, world_size: int, seed: int) -> None:
    """Forward and backward in one graph; gradients equal those of eager steps, replay after replay."""
    job = Job(tokens=(100,) * world_size, num_experts=4 * world_size, hidden=256, top_k=2, seed=seed)
    with harness.communicator(**job.communicator) as comm:
        device = comm.device
        knowns, capacity = _with_room(job, rank, device, 6)
        x_TH = knowns[0].own.x_TH.clone().requires_grad_()
        weights_TK = knowns[0].own.weights_TK.clone().requires_grad_()
        ids_TK, grad_TH = knowns[0].own.ids_TK.clone(), knowns[0].grad_y(rank).clone()

        def step() -> tuple[torch.Tensor, ...]:
            out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=capacity)
            y_TH = comm.combine(out.tokens * 2, out.handle, weights=out.weights)
            return y_TH, *torch.autograd.grad(y_TH, [x_TH, weights_TK], grad_TH)

        graph, static = harness.captured(step)
        with torch.no_grad():
            for i, known in enumerate(knowns):
                x_TH.copy_(known.own.x_TH)
                ids_TK.copy_(known.own.ids_TK)
                weights_TK.copy_(known.own.weights_TK)
                grad_TH.copy_(known.grad_y(rank))
                graph.replay()
                captured = [each.clone() for each in static]
                with torch.enable_grad():
                    eager = step()
                for name, left, right in zip(("y", "dx", "dw"), captured, eager, strict=True):
                    assert torch.equal(left, right), f"step {i}: {name} of the replay differs"


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_beside_nccl_on_another_stream(rank: int, world_size: int, seed: int) -> list[str]:
    """Replays on one stream while another runs NCCL all_reduce: both finish, both are right."""
    job = Job(tokens=(512,) * world_size, num_experts=8 * world_size, hidden=1024, top_k=4, seed=seed)
    steps = 60
    group = harness.nccl()
    with harness.communicator(**{**job.communicator, "num_sms": 32}) as comm:
        device = comm.device
        knowns, capacity = _with_room(job, rank, device, 5)
        dist.all_reduce(torch.ones(1, device=device), group=group)  # NCCL's own set-up, before the capture
        torch.cuda.synchronize()
        captured = Captured(comm, job, rank, capacity)
        side = torch.cuda.Stream()
        totals = [torch.full((1 << 20,), float(rank + 1), device=device) for _ in range(steps)]
        side.wait_stream(torch.cuda.current_stream())
        problems = []
        for step in range(steps):
            with torch.cuda.stream(side):
                dist.all_reduce(totals[step], group=group)
            known = knowns[step % 5]
            captured.load(known)
            captured.graph.replay()
            if step % 10 == 9:
                problems += captured.check(known)
                known.problems = []
        torch.cuda.synchronize()
        want = world_size * (world_size + 1) / 2
        problems += [
            f"rank {rank}: all_reduce {i}" for i, t in enumerate(totals) if not bool((t == want).all())
        ]
        return problems


@on_ranks("most_ranks")
def test_dropless_in_a_capture_is_refused(rank: int, world_size: int, seed: int) -> list[str]:
    """It says what is needed; the communicator stays usable."""
    job = Job(tokens=(16,) * world_size, num_experts=2 * world_size, hidden=64, top_k=2, seed=seed)
    with opened(job, rank) as (comm, known):
        known.dispatch(comm)
        torch.cuda.synchronize()
        caught = []
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                caught.append(catch(lambda: known.dispatch(comm)))
        except RuntimeError as error:  # an empty capture may be one for torch
            print(error)
        torch.cuda.synchronize()
        require(caught[0], "capacity")
        return oracle.play(comm, job, rank)


@on_ranks("most_ranks")
def test_graphs_come_and_go(rank: int, world_size: int, seed: int) -> list[str]:
    """Graphs come and go, eager work in between: the epochs of the communicator run on."""
    job = Job(tokens=(48,) * world_size, num_experts=4 * world_size, hidden=128, top_k=2, slack=0, seed=seed)
    problems = []
    with harness.communicator(**job.communicator) as comm:
        for turn in range(4):
            known = Oracle(replace(job, seed=job.seed + turn), rank, comm.device)
            capacity = max(known.needed)
            captured = Captured(comm, known.job, rank, capacity)
            for _ in range(3):
                captured.load(known)
                captured.graph.replay()
                problems += captured.check(known)
                known.problems = []
            del captured
            eager = Oracle(replace(known.job, slack=None), rank, comm.device)
            eager.check_dispatch(eager.dispatch(comm))
            problems += eager.problems
    return problems
