"""The low-latency calls of compat/deep_ep's Buffer, on CPU ranks: against loops over all ranks' tokens,
and in the order in which servers call them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import CommunicatorClosed, InvalidArgument, InvalidRouting, Unsupported
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_deep_ep import Buffer, _experts, _refused, _tokens
from tests.ranks import device, on_cpu

# isort: split
from deep_ep.operations import by_columns

pool = own_pool()

HIDDEN, TOP_K, MOST = 128, 3, 9


def _batch(rank: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H) rows that bfloat16 holds exactly and that tell their rank and token, ids, weights."""
    tokens, generator = _tokens(rank), torch.Generator().manual_seed(seed + rank)
    ids_TK = torch.rand(tokens, _experts(size), generator=generator).topk(TOP_K).indices
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.3] = -1
    x_TH = torch.randint(-8, 8, (tokens, HIDDEN), generator=generator) * 16.0 + rank
    weights_TK = torch.rand(tokens, TOP_K, generator=generator)
    return x_TH.to(device(), torch.bfloat16), ids_TK.to(device()), weights_TK.to(device())


def _wanted(rank: int, size: int, seed: int) -> list[Tensor]:
    """The rows of each local expert, by source rank, then token."""
    batches = [_batch(source, size, seed) for source in range(size)]
    local = _experts(size) // size
    return [
        torch.cat([x_TH[(ids_TK == e).any(1)] for x_TH, ids_TK, _ in batches])
        for e in range(rank * local, rank * local + local)
    ]


def _rows_same(rows_LNH: Tensor, counts_L: Tensor, wanted: list[Tensor], name: str) -> None:
    assert counts_L.tolist() == [len(each) for each in wanted] and counts_L.dtype == torch.int32, name
    for e, each in enumerate(wanted):
        assert torch.equal(rows_LNH[e, : len(each)], each), f"{name}: expert {e}"


@on_ranks("most_ranks")
def test_a_dispatch_and_its_combine(rank: int, size: int, seed: int) -> None:
    """Rows, counts and sums, by each way to wait for them; one rank has no token."""
    buffer = Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=3)
    (x, ids, weights), wanted = _batch(rank, size, seed), _wanted(rank, size, seed)
    chosen = weights.masked_fill(ids < 0, 0.0)
    stats, times = torch.ones(len(wanted), dtype=torch.int32, device=x.device), 0
    for waits in ({}, {"async_finish": True}, {"return_recv_hook": True}):
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, MOST, _experts(size), cumulative_local_expert_recv_stats=stats, use_fp8=False, **waits
        )
        _wait(waits, event, hook)
        times += 1
        _rows_same(rows, counts, wanted, str(waits))
        assert rows.shape == (len(wanted), size * MOST, HIDDEN)
        assert tuple(handle)[2:] == (MOST, HIDDEN, _experts(size))
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
            out = torch.empty_like(x) if zero_copy else None
            strided = rows.transpose(0, 1).contiguous().transpose(0, 1)
            given = torch.full_like(rows, torch.nan) if zero_copy else strided
            counted = ids if zero_copy else ids.clone()
            if not zero_copy and len(ids):
                counted[0] = -1
            y, event, hook = buffer.low_latency_combine(
                given, counted, weights, handle, zero_copy=zero_copy, out=out, **waits
            )
            _wait(waits, event, hook)
            sums = chosen.masked_fill(counted < 0, 0.0).sum(1, keepdim=True) * x.float()
            assert torch.allclose(y.float(), sums, rtol=0.02, atol=1e-3), f"sums {waits} {zero_copy}"
            assert out is None or y.data_ptr() == out.data_ptr()
    assert stats.tolist() == [1 + times * len(each) for each in wanted], f"stats {stats}"


def _wait(waits: dict[str, bool], event: Any, hook: Any) -> None:
    if "return_recv_hook" in waits:
        hook()
        assert event.event is None
    elif waits:
        event.current_stream_wait()
    assert (hook is None) is ("return_recv_hook" not in waits)


@on_ranks("most_ranks")
def test_two_batches_at_once(rank: int, size: int, seed: int) -> None:
    """Two halves of a batch as servers overlap them: each one's hook is called after the other has begun."""
    buffer, at = Buffer(dist.group.WORLD, low_latency_mode=True), []
    for half in (0, 1):
        x, ids, weights = _batch(rank, size, seed + half)
        sent = buffer.low_latency_dispatch(x, ids, MOST, _experts(size), use_fp8=False, return_recv_hook=True)
        at.append((x, ids, weights, sent))
    back = []
    for half, (x, ids, weights, (rows, counts, handle, _, hook)) in enumerate(at):
        hook()
        _rows_same(rows, counts, _wanted(rank, size, seed + half), f"half {half}")
        y, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
        back.append((y, hook, weights.masked_fill(ids < 0, 0.0).sum(1, keepdim=True) * x.float()))
    for y, hook, sums in back:
        hook()
        assert torch.allclose(y.float(), sums, rtol=0.02, atol=1e-3), "sums"


@pytest.mark.filterwarnings("ignore:.*_stats is ignored")
@on_ranks("most_ranks")
def test_bad_calls(rank: int, size: int, seed: int) -> None:
    """Each is refused, in a sentence, and the Buffer goes on."""
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    x, ids, weights = _batch(rank, size, seed)
    experts, plain = _experts(size), {"use_fp8": False}
    send = buffer.low_latency_dispatch
    rows, _, handle, _, _ = send(x, ids, MOST, experts, **plain)
    wrong = torch.full_like(ids, experts) if rank == size - 1 else ids
    twice = {"async_finish": True, "return_recv_hook": True}
    back = buffer.low_latency_combine
    status = torch.ones(size, dtype=torch.int32, device=x.device)
    buffer.low_latency_query_mask_buffer(status)
    buffer.low_latency_update_mask_buffer(0, False)
    buffer.low_latency_clean_mask_buffer()
    buffer.clean_low_latency_buffer(MOST, HIDDEN, experts)
    assert status.tolist() == [0] * size, status
    _refused(InvalidArgument, "use_ue8m0", lambda: send(x, ids, MOST, experts, use_ue8m0=True))
    _refused(InvalidArgument, "multiple of 128", lambda: send(x[:, :64], ids, MOST, experts))
    _refused(InvalidArgument, "one at most", lambda: send(x, ids, MOST, experts, **twice, **plain))
    _refused(InvalidArgument, "one at most", lambda: back(rows, ids, weights, handle, **twice))
    _refused(InvalidArgument, "handle is tuple", lambda: back(rows, ids, weights, tuple(handle)))
    _refused(InvalidArgument, "zero_copy", lambda: back(rows, ids, weights, handle, zero_copy=True))
    _refused(InvalidArgument, "x has shape", lambda: back(rows[0], ids, weights, handle))
    _refused(NotImplementedError, "masked", lambda: buffer.low_latency_update_mask_buffer(1, True))
    if on_cpu():
        _refused(Unsupported, "fp8", lambda: send(x, ids, MOST, experts))
        # On GPUs the device reports them later.
        few = weights[:, :1] if rank == size - 1 else weights
        _refused(InvalidArgument, "topk_weights has shape", lambda: back(rows, ids, few, handle))
        _refused(InvalidRouting, f"{experts}", lambda: send(x, wrong, MOST, experts, **plain))
        many = x.new_zeros(MOST + 1 if rank == 0 else 0, HIDDEN)
        bad = ids.new_zeros(len(many), TOP_K)
        bad[:] = torch.arange(TOP_K)
        _refused(InvalidArgument, f"{MOST + 1} tokens", lambda: send(many, bad, MOST, experts, **plain))
    costs = torch.zeros(size, dtype=torch.int64, device=x.device)
    rows, _, handle, _, _ = send(x, ids, MOST, experts, dispatch_wait_recv_cost_stats=costs, **plain)
    buffer.destroy()
    y, _, _ = back(rows, ids, weights, handle, use_logfmt=True, combine_wait_recv_cost_stats=costs)
    sums = weights.masked_fill(ids < 0, 0.0).sum(1, keepdim=True) * x.float()
    assert torch.allclose(y.float(), sums, rtol=0.02, atol=1e-3), "the handle does not go on"
    _refused(CommunicatorClosed, "destroyed", lambda: send(x, ids, MOST, experts, **plain))


@pytest.mark.parametrize("shape", [(7, 3), (8, 1), (2, 5, 3), (0, 3)])
def test_scales_by_columns(shape: tuple[int, ...]) -> None:
    """Values stay, columns are contiguous and begin at multiples of 16 bytes."""
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(5))
    found = by_columns(scales)
    assert torch.equal(found, scales)
    assert shape[-2] == 0 or found.stride()[-2:] == (1, -(-shape[-2] // 4) * 4)
