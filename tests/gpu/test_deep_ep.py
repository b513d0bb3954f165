"""The module deep_ep of compat/deep_ep on GPUs: the tests of the CPU ranks, and what GPUs alone have."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.gpu import harness
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_deep_ep import (  # noqa: F401
    Buffer,
    ElasticBuffer,
    _experts,
    test_a_dispatch_and_its_combine,
    test_bad_calls,
    test_elastic_buffer,
    test_later_batches,
)
from tests.multirank.test_deep_ep_hybrid import (  # noqa: F401
    test_bad_calls_of_hybrid,
    test_fp8,
    test_larger_batches,
    test_with_permute,
    test_without_permute,
)
from tests.multirank.test_deep_ep_low_latency import test_a_dispatch_and_its_combine as test_low_latency  # noqa: F401
from tests.multirank.test_deep_ep_low_latency import test_bad_calls as test_bad_calls_of_low_latency  # noqa: F401
from tests.multirank.test_deep_ep_low_latency import test_two_batches_at_once  # noqa: F401


@pytest.mark.usefixtures("cuda_only")
@on_ranks("most_ranks")
def test_fp8_and_streams(rank: int, size: int, seed: int) -> list[str]:
    """Rows in fp8 arrive as they were sent; twenty operations that are all ordered by events alone."""
    buffer, experts = Buffer(dist.group.WORLD), _experts(size)
    generator = torch.Generator().manual_seed(seed + rank)
    ids = torch.rand(300, experts, generator=generator).topk(2).indices.to(harness.device())
    weights = torch.rand(300, 2, generator=generator).to(ids.device)
    x = torch.randn(300, 256, generator=generator).to(ids.device, torch.bfloat16)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
    options = {"topk_idx": ids, "topk_weights": weights, "num_tokens_per_expert": per_expert}
    scales = x.float().view(300, 2, 128).abs().amax(2).clamp(min=1e-4) / 448
    data = (x.float().view(300, 2, 128) / scales.unsqueeze(2)).view(300, 256).to(torch.float8_e4m3fn)
    rows, *_ = buffer.dispatch(x, **options)
    (values, factors), *_ = buffer.dispatch((data, scales), **options)
    elastic = ElasticBuffer(dist.group.WORLD)
    tma = {"num_experts": experts, "use_tma_aligned_col_major_sf": True}
    (same, columns), *_ = elastic.dispatch((data, scales), ids, weights, **tma)
    assert torch.equal(same.view(torch.uint8), values.view(torch.uint8)) and torch.equal(columns, factors)
    assert columns.stride() == (1, -(-len(columns) // 4) * 4)
    *_, plan, _ = buffer.dispatch(x, **options)
    *_, wide, _ = elastic.dispatch(x, ids, weights, num_experts=experts, do_expand=True)
    (wanted, wanted_scales), *_ = elastic.dispatch((data, scales), ids, num_experts=experts, do_expand=True)
    for (again, its_scales), (first, first_scales) in (
        (buffer.dispatch((data, scales), handle=plan)[0], (values, factors)),
        (elastic.dispatch((data, scales), handle=wide)[0], (wanted, wanted_scales)),
    ):
        assert torch.equal(again.view(torch.uint8), first.view(torch.uint8))
        assert torch.equal(its_scales, first_scales)
    for expands in (False, True):  # on another stream, with weights and scales by columns
        asked = {**tma, "do_expand": expands}
        (first, columns), _, its_weights, plan, _ = elastic.dispatch((data, scales), ids, weights, **asked)
        del asked["num_experts"], asked["do_expand"]
        asked |= {"handle": plan, "async_with_compute_stream": True}
        (again, its_columns), _, weights_again, _, event = elastic.dispatch(
            (data, scales), topk_weights=weights, **asked
        )
        event.current_stream_wait()
        assert torch.equal(again.view(torch.uint8), first.view(torch.uint8)) and len(first)
        assert torch.equal(its_columns, columns) and its_columns.stride() == columns.stride()
        assert torch.equal(weights_again, its_weights)
    near = (values.float().view(-1, 2, 128) * factors.unsqueeze(2)).view(-1, 256)
    found = [] if torch.allclose(near, rows.float(), rtol=0.07, atol=0.01) else ["fp8"]

    y, wanted = x.clone(), x.clone()
    ranks_T1 = in_rank.sum(1, keepdim=True)
    for _ in range(20):
        event = Buffer.capture()
        got, _, _, _, handle, event = buffer.dispatch(y, previous_event=event, async_finish=True, **options)
        back, _, event = buffer.combine(got, handle, previous_event=event, async_finish=True)
        event.current_stream_wait()
        y = (back / ranks_T1.clamp(min=1)).to(torch.bfloat16)
        wanted = ((wanted * ranks_T1) / ranks_T1.clamp(min=1)).to(torch.bfloat16)
    return found if torch.allclose(y, wanted, rtol=0.02, atol=0.01) else [*found, "operations on streams"]


COLUMNS, MOST = 1024, 40


@pytest.mark.usefixtures("cuda_only")
@on_ranks("most_ranks")
def test_slots_in_fp8(rank: int, size: int, seed: int) -> list[str]:
    """Rows in fp8 with each kind of scales, whose memory is by columns, beside the same rows in bfloat16."""
    buffer, experts = Buffer(dist.group.WORLD, low_latency_mode=True), _experts(size)
    generator, found = torch.Generator().manual_seed(seed + rank), []
    ids = torch.rand(MOST - rank, experts, generator=generator).topk(3).indices.to(harness.device())
    x = torch.randn(len(ids), COLUMNS, generator=generator).to(ids.device, torch.bfloat16)
    call = (x, ids, MOST, experts)
    rows, counts, *_ = buffer.low_latency_dispatch(*call, use_fp8=False)
    for rounds, packs in ((False, False), (True, False), (True, True)):
        (data, scales), fp8_counts, *_ = buffer.low_latency_dispatch(
            *call, round_scale=rounds, use_ue8m0=packs
        )
        name = f"round_scale={rounds}, use_ue8m0={packs}"
        blocks = COLUMNS // 128
        assert scales.shape[2] == blocks // (4 if packs else 1) and scales.stride(1) == 1, name
        if packs:
            exponents = scales.contiguous().view(torch.uint8).int()
            scales = (exponents << 23).view(torch.float32)
        for e, count in enumerate(counts.tolist()):
            values, factors = data[e, :count].float(), scales[e, :count].contiguous()
            near = (values.view(-1, blocks, 128) * factors.unsqueeze(2)).view(-1, COLUMNS)
            assert torch.allclose(near, rows[e, :count].float(), rtol=0.07, atol=0.02), f"{name}: expert {e}"
            if rounds and int((factors.view(torch.int32) & 0x7FFFFF).abs().sum()):
                found.append(f"{name}: a scale that is no power of two")
        assert torch.equal(counts, fp8_counts), f"{name}: counts"
    return found


@pytest.mark.usefixtures("cuda_only")
@on_ranks("most_ranks")
def test_slots_in_a_graph(rank: int, size: int, seed: int) -> None:
    """A graph of a dispatch, experts and a combine, replayed with other tokens and choices."""
    buffer, experts = Buffer(dist.group.WORLD, low_latency_mode=True), _experts(size)
    generator = torch.Generator().manual_seed(seed + rank)
    where = harness.device()
    x = torch.zeros(MOST, COLUMNS, dtype=torch.bfloat16, device=where)
    ids = torch.zeros(MOST, 3, dtype=torch.int64, device=where)
    weights = torch.zeros(MOST, 3, device=where)
    factors_E = torch.arange(1, experts + 1, device=where) / experts

    def layer(hooked: bool) -> torch.Tensor:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, MOST, experts, use_fp8=False, return_recv_hook=hooked
        )
        if hook is not None:
            hook()
        local_L = factors_E.view(size, -1)[rank].bfloat16()
        rows = rows * local_L.view(-1, 1, 1)
        y, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=hooked)
        if hook is not None:
            hook()
        return y

    def fill() -> torch.Tensor:
        ids.copy_(torch.rand(MOST, experts, generator=generator).topk(3).indices)
        x.copy_(torch.randn(MOST, COLUMNS, generator=generator))
        weights.copy_(torch.rand(MOST, 3, generator=generator))
        return (weights * factors_E[ids]).sum(1, keepdim=True) * x.float()

    for hooked in (False, True):
        fill()
        graph, y = harness.captured(partial(layer, hooked), warm_ups=1)
        for turn in range(3):
            wanted = fill()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.allclose(y.float(), wanted, rtol=0.03, atol=0.03), (hooked, turn)
