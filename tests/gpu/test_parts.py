"""Operations in parts: the bits of those in one part, and rows there when their part has been received."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import moecomm
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.oracle import Job, Oracle, generator


def _ends(known: Oracle, parts: int) -> list[int]:
    """By the definition: where the rows of the last expert of each part end."""
    local = known.job.num_experts // known.job.size
    last = [max(e for e in range(local) if e * parts // local == part) for part in range(parts)]
    return [int(known.mine.ends[e]) for e in last]


class Parts:
    """One rank's operations on a job, each beside the same in one part."""

    def __init__(self, comm: Any, job: Job, rank: int, parts: int) -> None:
        self.comm, self.parts = comm, parts
        self.known = Oracle(job, rank, comm.device)
        self.problems: list[str] = []
        self.who = f"rank {rank}, {parts} parts, {job.routing}"
        own = self.known.own
        harness.poison(32 << 20)
        self.out = self._receive(
            "dispatch", comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=parts)
        )

    def _say(self, what: str, good: bool) -> None:
        if not good:
            self.problems.append(f"{self.who}: {what}")

    def _receive(self, what: str, begun: Any) -> Any:
        """All parts; rows are looked at on the device as soon as they are said to be there."""
        seen = []
        for _ in range(self.parts):
            begun.receive()
            result = begun.output if what == "dispatch" else begun.rows
            seen.append((result.tokens if what == "dispatch" else result).clone())
        if what == "dispatch":
            self.ends = begun.ends
            self._say("ends", list(begun.ends) == _ends(self.known, self.parts))
        for end, rows in zip(self.ends, seen, strict=True):
            self._say(f"{what}: rows up to {end}", torch.equal(rows[:end], seen[-1][:end]))
        return result

    def check_dispatch(self) -> None:
        self.known.check_dispatch(self.out)
        plain = self.known.dispatch(self.comm)
        for name in ("tokens", "weights", "offsets", "tokens_per_expert", "overflow"):
            self._say(f"dispatch: {name}", torch.equal(getattr(plain, name), getattr(self.out, name)))

    def check_redispatch(self) -> None:
        x_TH = self.known.own.x_TH * 3
        plain = self.comm.redispatch(x_TH, self.out.handle)
        harness.poison(32 << 20)
        again = self._receive("redispatch", self.comm.begin_redispatch(x_TH, self.out.handle))
        self._say("redispatch", torch.equal(plain, again))

    def check_combine(self, with_weights: bool) -> None:
        out, what = self.out, f"combine{' with gradients of weights' if with_weights else ''}"
        gen = generator(self.comm.device, self.known.job.seed, 9)
        whole = torch.randn(out.tokens.shape, generator=gen, device=self.comm.device, dtype=out.tokens.dtype)
        grads = torch.rand(len(whole), generator=gen, device=self.comm.device) if with_weights else None
        plain = self.comm.dispatch_backward(whole, out.handle, grad_weights=grads)
        begun = self.comm.begin_combine(out.handle, grad_weights=grads)
        for first, end in itertools.pairwise((0, *self.ends)):
            begun.send(whole[first:end].clone())
        self._say(what, torch.equal(plain[0], begun.result[0]))
        if with_weights:
            self._say(f"{what}: gradients", torch.equal(plain[1], begun.result[1]))

    def all(self) -> list[str]:
        self.check_dispatch()
        self.check_combine(False)
        self.check_redispatch()
        self.check_combine(True)
        harness.synchronize()
        return self.problems + self.known.problems


def _play(rank: int, world_size: int, jobs: list[Job]) -> list[str]:
    problems = []
    with harness.communicator(**jobs[0].communicator) as comm:
        for job in jobs:
            for parts in sorted({1, 2, 3, comm.most_parts}):
                if parts <= comm.most_parts:
                    problems += Parts(comm, job, rank, parts).all()
        comm.check()
    return problems


ROUTINGS = ["uniform", "holes", "skewed", "one-rank", "one-expert", "empty"]


@pytest.mark.parametrize("wire", [None, "fp8"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_same_bits_as_in_one_part(pool: Pools, size: int, wire: str | None, seed: int) -> None:
    if wire == "fp8" and harness.on_cpu():
        pytest.skip("fp8 is for CUDA tensors")
    jobs = [
        Job(
            tokens=(700, 0, 333, 64)[:size],
            num_experts=11 * size,
            hidden=1040,
            top_k=4,
            wire=wire,
            routing=routing,
            seed=seed + i,
        )
        for i, routing in enumerate(ROUTINGS)
    ]
    harness.assert_none(pool(size)(_play, jobs))


@pytest.mark.parametrize("size", [2, 4])
def test_many_rows(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(4096, 4000, 3000, 4096)[:size], num_experts=64 * size, hidden=2048, top_k=8, seed=seed)
    jobs = [job] if harness.on_cpu() else [job, Job(**{**job.__dict__, "seed": seed + 1})] * 3
    harness.assert_none(pool(size)(_play, jobs))


def _mistakes(rank: int, world_size: int, job: Job) -> list[str]:
    """Wrong numbers of parts, calls too many, and operations that are given up; the communicator goes on."""
    problems = []
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        own = known.own
        for parts in (0, comm.most_parts + 1, "two"):
            with pytest.raises(moecomm.InvalidArgument, match="parts is"):
                comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=parts)
        with pytest.raises(moecomm.InvalidArgument, match="x has"):
            comm.begin_dispatch(own.x_TH[:, :-8], own.ids_TK, own.weights_TK, parts=2)
        begun = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=2)
        with pytest.raises(moecomm.InvalidArgument, match="no output yet"):
            _ = begun.output
        begun.receive()
        begun.receive()
        with pytest.raises(moecomm.InvalidArgument, match="all of its 2 parts"):
            begun.receive()
        out = begun.output
        whole = known.dispatch(comm)
        for begin in (comm.begin_combine, lambda handle: comm.begin_redispatch(own.x_TH, handle)):
            with pytest.raises(moecomm.InvalidArgument, match="in one piece"):
                begin(whole.handle)
        combined = comm.begin_combine(out.handle)
        with pytest.raises(moecomm.InvalidArgument, match="0 of 2 parts"):
            _ = combined.result
        with pytest.raises(moecomm.InvalidArgument, match="rows has shape"):
            combined.send(torch.cat([out.tokens, out.tokens[:1]]))
        combined.send(out.tokens[: begun.ends[0]])
        with pytest.raises(moecomm.InvalidArgument, match="1 of 2 parts"):
            _ = combined.result
        combined.send(out.tokens[begun.ends[0] :])
        with pytest.raises(moecomm.InvalidArgument, match="all of its 2 parts"):
            combined.send(out.tokens)
        harness.synchronize()
        comm.check()
        known.check_dispatch(out)
        problems += known.problems
    return problems


@pytest.mark.parametrize("size", [1, 2])
def test_mistakes(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(64, 50)[:size], num_experts=4 * size, hidden=64, top_k=3, seed=seed)
    harness.assert_none(pool(size)(_mistakes, job))


def _disagree(rank: int, world_size: int, job: Job) -> list[str]:
    """Ranks that begin an operation in different parts all learn it, and go on."""
    with harness.communicator(**job.communicator) as comm:
        own = Oracle(job, rank, comm.device).own
        begun = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=2 if rank == 0 else 3)
        with pytest.raises(moecomm.MismatchedArguments, match="disagree on parts"):
            begun.receive()
        return Parts(comm, job, rank, 2).all()


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_disagree_on_parts(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(64, 50, 3, 0)[:size], num_experts=8 * size, hidden=64, top_k=3, seed=seed)
    harness.assert_none(pool(size)(_disagree, job))


def _given_up(rank: int, world_size: int, job: Job) -> list[str]:
    """What is begun and not completed is given up by the next operation, on all ranks alike or not."""
    problems = []
    with harness.communicator(**job.communicator) as comm:
        own = Oracle(job, rank, comm.device).own
        for step in range(6):
            out = Parts(comm, job, rank, 3).out
            if step % 3 == 0:
                begun = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=3)
            elif step % 3 == 1:
                begun = comm.begin_redispatch(own.x_TH, out.handle)
            else:
                begun = comm.begin_combine(out.handle)
            ends = (0, *out.handle.part_ends)
            for part in range((step + rank) % 3):
                if step % 3 == 2:
                    begun.send(out.tokens[ends[part] : ends[part + 1]])
                else:
                    begun.receive()
            problems += Parts(comm, job, rank, 2).all()
        harness.synchronize()
        comm.check()
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_given_up_harms_nobody(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(600, 64, 333, 5)[:size], num_experts=8 * size, hidden=512, top_k=4, seed=seed)
    harness.assert_none(pool(size)(_given_up, job))


def _beside_products(rank: int, world_size: int, job: Job) -> list[str]:
    """Parts on one stream, products that take all SMs on another, which wait for each part."""
    problems: list[str] = []
    with harness.communicator(**job.communicator) as comm:
        known = Oracle(job, rank, comm.device)
        own, parts = known.own, min(4, comm.most_parts)
        want = known.dispatch(comm)
        products = torch.cuda.Stream()
        busy = torch.randn(4096, 4096, device=comm.device, dtype=torch.bfloat16)
        for _ in range(10):
            harness.poison(32 << 20)
            products.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(products):
                for _ in range(4):
                    busy = busy @ busy * 1e-3
            begun = comm.begin_dispatch(own.x_TH, own.ids_TK, own.weights_TK, parts=parts)
            doubled = None
            for part in range(parts):
                begun.receive()
                if doubled is None:
                    doubled = torch.full_like(begun.output.tokens, float("nan"))
                first, end = (0, *begun.ends)[part], begun.ends[part]
                products.wait_event(torch.cuda.current_stream().record_event())
                with torch.cuda.stream(products):
                    doubled[first:end] = begun.output.tokens[first:end] * 2
                    busy = busy @ busy * 1e-3
            torch.cuda.current_stream().wait_stream(products)
            if not torch.equal(doubled, want.tokens * 2):
                problems.append(f"rank {rank}: rows that a product has read were not there")
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_beside_products(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(4096,) * size, num_experts=32 * size, hidden=4096, top_k=8, seed=seed)
    harness.assert_none(pool(size)(_beside_products, job))
