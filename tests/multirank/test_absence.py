"""Without a timeout of the caller's, a rank that lives and has not begun the operation has longer than one
that hangs within it."""

import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moecomm
from tests import oracle
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import Caught, catch
from tests.multirank.harness import NO_GPUS, no_shared_memory_left, run_ranks

CASE = Case(tokens=(5, 3, 6), num_experts=12, hidden=8, top_k=2)
TIMEOUT = 2.0
"""What these communicators have for the default timeout."""


def _build(absence: float, timeout: float | None = None) -> Any:
    from moecomm.setup import checks

    with (
        mock.patch.object(checks, "DEFAULT_TIMEOUT", TIMEOUT),
        mock.patch.object(checks, "DEFAULT_ABSENCE", absence, create=True),
    ):
        comm = moecomm.Communicator(
            num_experts=12, hidden=8, top_k=2, max_tokens=6, dtype=torch.float32, timeout=timeout
        )
    dist.barrier()
    return comm


def _away(rank: int, world_size: int, seconds: float, absence: float, timeout: float | None) -> Any:
    with _build(absence, timeout) as comm:
        found: Any = oracle.play(comm, CASE, rank)
        if rank == 1:
            time.sleep(seconds)
        caught = catch(lambda: found.extend(oracle.play(comm, CASE, rank)))
        return caught or found


@pytest.mark.parametrize("per_node", [3, pytest.param(1, marks=needs_fabric)])
def test_a_rank_that_is_away_between_operations_is_waited_for(per_node: int) -> None:
    environment = NO_GPUS | {"MOECOMM_RANKS_PER_NODE": str(per_node)}
    with no_shared_memory_left():
        results = run_ranks(3, _away, TIMEOUT + 1.0, 40.0, None, environment=environment)
    oracle.assert_none(results)


@pytest.mark.parametrize(("seconds", "absence", "timeout"), [(4.5, 3.0, None), (3.0, 40.0, 1.5)])
def test_the_longer_wait_has_a_limit_and_a_given_timeout_is_one(
    seconds: float, absence: float, timeout: float | None
) -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _away, seconds, absence, timeout)
    for rank in (0, 2):
        caught = results[rank]
        assert isinstance(caught, Caught) and caught.name == "PeerTimeout", caught
        assert all(word in caught.text for word in ("rank 1", "not begun", "checkpoint", "timeout")), caught
    waited = f"waited {timeout or absence:.6f} s in vain"
    assert any(waited in results[rank].text for rank in (0, 2)), results


def _hangs_within(rank: int, world_size: int) -> Caught | None:
    """Rank 1 waits for rank 2 in a call, and hangs there when that one comes."""
    comm = _build(40.0)
    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(2 * TIMEOUT))
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    if rank == 2:
        time.sleep(1.0)
    x, ids = torch.ones(2, 8), torch.tensor([[0, 4], [5, 9]])
    begin = time.monotonic()
    caught = catch(lambda: (comm.dispatch(x, ids), comm.dispatch(x, ids)))
    if rank == 0:
        assert caught is not None and time.monotonic() - begin < 10.0, caught
    dist.barrier()
    return caught


def test_a_rank_that_hangs_within_an_operation_is_late_at_the_timeout() -> None:
    with no_shared_memory_left():
        results = run_ranks(3, _hangs_within)
    for rank in (0, 2):
        caught = results[rank]
        assert caught is not None and caught.name == "PeerTimeout" and "rank 1" in caught.text, caught
