"""The module deep_ep of compat/deep_ep on GPUs: the tests of the CPU ranks, and what GPUs alone have."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.test_deep_ep import (
    Buffer,
    _experts,
    test_a_dispatch_and_its_combine,
    test_bad_calls,
    test_elastic_buffer,
    test_gradients_of_experts,
    test_later_batches,
)
from tests.multirank.test_deep_ep_hybrid import (
    test_bad_calls_of_hybrid,
    test_fp8,
    test_larger_batches,
    test_with_permute,
    test_without_permute,
)

__all__ = [
    "test_a_dispatch_and_its_combine",
    "test_bad_calls",
    "test_bad_calls_of_hybrid",
    "test_elastic_buffer",
    "test_fp8",
    "test_gradients_of_experts",
    "test_larger_batches",
    "test_later_batches",
    "test_with_permute",
    "test_without_permute",
]


def _fp8_and_streams(rank: int, size: int, seed: int) -> list[str]:
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


@pytest.mark.usefixtures("cuda_only")
def test_fp8_and_streams(pool: Pools, most_ranks: int, seed: int) -> None:
    for found in pool(most_ranks)(_fp8_and_streams, seed):
        assert found == []
