"""The module deep_ep of compat/deep_ep, on CPU ranks: its own calls, and callers written for DeepEP."""

import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat_path import COMPAT

# isort: split
import deep_ep
from deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from deep_ep.handle import DispatchHandle
from deep_ep.utils import EventHandle, EventOverlap

from moecomm.errors import CommunicatorClosed, InvalidArgument, InvalidRouting, MismatchedArguments
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks
from tests.ranks import device

pool = own_pool()


def _needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


HIDDEN, TOP_K = 8, 3


def _tokens(rank: int) -> int:
    return (5, 0, 9)[rank % 3]


def _experts(size: int) -> int:
    return 3 * size


def _routing(rank: int, size: int, seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, H) rows, (T, K) ids of which some are -1, and weights, which differ everywhere."""
    generator = torch.Generator().manual_seed(seed + rank)
    ids_TK = torch.rand(tokens, _experts(size), generator=generator).topk(TOP_K).indices
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.3] = -1
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    made = x_TH, ids_TK, torch.rand(tokens, TOP_K, generator=generator)
    return tuple(each.to(device()) for each in made)  # type: ignore[return-value]


def _layout(buffer: Buffer, ids_TK: Tensor) -> dict[str, Tensor | None]:
    experts = _experts(buffer.group_size)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids_TK, experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": in_rank,
    }


def _same(**pairs: tuple[Any, Any]) -> None:
    for name, (found, wanted) in pairs.items():
        assert found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted.cpu()), name


def _near(**pairs: tuple[Tensor, Tensor]) -> None:
    for name, (found, wanted) in pairs.items():
        assert torch.allclose(found, wanted, rtol=5e-6, atol=1e-6), name


@on_ranks("most_ranks")
def test_a_dispatch_and_its_combine(rank: int, size: int, seed: int) -> None:
    """Every value, against loops over all ranks' tokens; one rank has no token."""
    buffer, each_rank = Buffer(dist.group.WORLD, 1 << 20), _experts(size) // size
    batches = [_routing(source, size, seed, _tokens(source)) for source in range(size)]
    x, ids, weights = batches[rank]
    layout = _layout(buffer, ids)
    config = Buffer.get_dispatch_config(size)
    rows, idx, received, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, expert_alignment=4, config=config, **layout
    )
    wanted_rows, wanted_idx, wanted_weights, ends = [], [], [], []
    for source_x, source_ids, source_weights in batches:
        here = source_ids // each_rank == rank
        for token in range(len(source_x)):
            if here[token].any():
                wanted_rows.append(source_x[token])
                wanted_idx.append(torch.where(here[token], source_ids[token] - rank * each_rank, -1))
                wanted_weights.append(torch.where(here[token], source_weights[token], 0.0))
        ends.append(len(wanted_rows))
    stacked = torch.stack(wanted_idx)
    _same(
        rows=(rows, torch.stack(wanted_rows)),
        idx=(idx, stacked),
        weights=(received, torch.stack(wanted_weights)),
        counts=(
            torch.tensor(counts),
            torch.tensor([-(-int((stacked == e).sum()) // 4) * 4 for e in range(each_rank)]),
        ),
        matrix=(handle[0][:, rank], torch.tensor(ends, dtype=torch.int32)),
        per_expert=(
            layout["num_tokens_per_expert"],
            torch.tensor([(ids == e).sum() for e in range(_experts(size))], dtype=torch.int32),
        ),
        in_rank=(
            handle[4],
            torch.stack([((ids // each_rank == r) & (ids >= 0)).any(1) for r in range(size)], dim=1),
        ),
        per_rank=(layout["num_tokens_per_rank"], handle[4].sum(0, dtype=torch.int32)),
    )
    again, *nothing, _ = buffer.dispatch(x, handle=handle, config=config)
    _same(again=(again, rows))
    fixed, fixed_idx, _, none, _, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_worst_tokens=40, **layout
    )
    _same(fixed=(fixed[: len(rows)], rows), fixed_idx=(fixed_idx[: len(rows)], idx))
    assert len(fixed) == 40 and none == [] and int(fixed_idx[len(rows) :].max()) == -1
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    detached, _, factors, *_ = buffer.dispatch(leaves[0], topk_idx=ids, topk_weights=leaves[1], **layout)
    assert not detached.requires_grad and not factors.requires_grad
    plain, no_idx, no_weights, plain_counts, _, _ = buffer.dispatch(x, expert_alignment=4, **layout)
    _same(plain=(plain, rows))
    assert (no_idx, no_weights, plain_counts) == (None, None, counts)
    assert all(each is None for each in nothing)

    ranks_T1 = handle[4].sum(1, keepdim=True)
    sums, back, _ = buffer.combine(rows, handle, topk_weights=received, config=config)
    unweighted, none, _ = buffer.combine(rows, handle, bias=(x, x))
    _near(sums=(sums, x * ranks_T1), bias=(unweighted, x * ranks_T1 + 2 * x))
    if not x.is_cuda:  # GPUs have no such rows
        whole = x.double() / 3
        double, *_, of_double, _ = buffer.dispatch(whole, topk_idx=ids, **layout)
        sums, *_ = buffer.combine(double, of_double, bias=whole)
        assert torch.allclose(sums, whole * ranks_T1 + whole, rtol=1e-14, atol=0), "sums in another precision"
    _same(back=(back, weights.masked_fill(ids < 0, 0.0)))
    assert none is None and event.event is None, "weights or an event that none asked for"


@on_ranks("most_ranks")
def test_later_batches(rank: int, size: int, seed: int) -> None:
    """A larger batch after a smaller one, handles that outlive it, and received rows that the caller frees,
    as Megatron-Core's 1F1B schedule does; with events."""
    buffer = Buffer(dist.group.WORLD)
    kept = []
    for tokens in (3, 70, 4):
        x, ids, weights = _routing(rank, size, seed, tokens)
        before = EventOverlap(EventHandle())
        rows, _, _, _, handle, event = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            previous_event=before,
            async_finish=True,
            allocate_on_comm_stream=True,
            **_layout(buffer, ids),
        )
        event.current_stream_wait()
        kept.append((x, rows.clone(), handle))
        rows.untyped_storage().resize_(0)
    for x, rows, handle in kept:
        y, _, event = buffer.combine(rows, handle, previous_event=Buffer.capture(), async_finish=True)
        with event:
            pass
        _near(sums=(y, x * handle[4].sum(1, keepdim=True)))
    layout = _layout(buffer, ids)  # with a number of rows the host does not wait, so there is room for it
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, num_worst_tokens=200 * size, **layout)
    assert handle.comm.max_tokens >= 200


def _refused(error: type[Exception], words: str, call: Any) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


def _disagree(rank: int, dispatch: Any, combine: Any) -> None:
    """Checks that every rank raises at once where one calls another operation, and that none waits for the
    others to agree on a size."""
    _refused(MismatchedArguments, "disagree on the operation", combine if rank else dispatch)


@on_ranks("most_ranks")
def test_bad_calls(rank: int, size: int, seed: int) -> None:
    """Each is refused, in a sentence, and the Buffer goes on."""
    buffer = Buffer(group=dist.group.WORLD, explicitly_destroy=True)
    x, ids, weights = _routing(rank, size, seed, 4)
    layout = _layout(buffer, ids)
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    wrong = torch.full_like(ids, _experts(size)) if rank == size - 1 else ids
    per_expert = layout["num_tokens_per_expert"]
    _refused(InvalidArgument, "topk_idx is torch.float32", lambda: _layout(buffer, ids.float()))
    assert not _layout(buffer, torch.full_like(ids, _experts(size)))["num_tokens_per_expert"].any()
    _refused(InvalidArgument, "num_tokens_per_expert", lambda: buffer.dispatch(x, topk_idx=ids))
    _refused(InvalidArgument, "topk_idx", lambda: buffer.dispatch(x, num_tokens_per_expert=per_expert))
    _refused(InvalidArgument, "one kind", lambda: buffer.dispatch(x, handle=handle, topk_idx=ids))
    _refused(InvalidArgument, "x is list", lambda: buffer.dispatch([x, x], topk_idx=ids, **layout))
    _refused(InvalidArgument, "handle is tuple", lambda: buffer.combine(x, ()))
    _refused(InvalidArgument, "rows", lambda: buffer.combine(x[:, :4].contiguous(), handle))
    _refused(InvalidRouting, f"{_experts(size)}", lambda: buffer.dispatch(x, topk_idx=wrong, **layout))
    _refused(InvalidArgument, "multiple", lambda: buffer.get_dispatch_layout(ids, size + 1))
    _refused(InvalidArgument, "even", lambda: Buffer.set_num_sms(3))
    _refused(InvalidArgument, "no event", EventOverlap(None).current_stream_wait)
    _refused(InvalidArgument, "explicitly_destroy", Buffer(dist.group.WORLD).destroy)
    _refused(InvalidArgument, "group", lambda: Buffer(None))
    _refused(NotImplementedError, "comm", lambda: Buffer(None, comm=object()))
    _refused(InvalidArgument, "recv_tokens", lambda: deep_ep.Config(num_max_nvl_chunked_recv_tokens=2))
    rows, *_ = buffer.dispatch(x, handle=handle)
    if not x.is_cuda:  # GPUs tell of it later
        again = functools.partial(buffer.dispatch, x, topk_idx=ids, **layout)
        _disagree(rank, again, lambda: buffer.combine(rows, handle))
    y, _, _ = buffer.combine(rows, handle)
    _near(sums=(y, x * handle[4].sum(1, keepdim=True)))
    buffer.destroy()
    _refused(CommunicatorClosed, "destroyed", lambda: buffer.dispatch(x, handle=handle))
    _refused(
        CommunicatorClosed,
        "destroyed",
        lambda: buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout),
    )


@on_ranks("most_ranks")
def test_elastic_buffer(rank: int, size: int, seed: int) -> None:
    """Version 2: the compact layout has what version 1 brings, the expanded one a row for each expert."""
    batches = [_routing(source, size, seed, _tokens(source)) for source in range(size)]
    (x, ids, weights), experts, local = batches[rank], _experts(size), _experts(size) // size
    buffer, plain = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=9), Buffer(dist.group.WORLD)
    rows, idx, received, counts, _, _ = plain.dispatch(
        x, topk_idx=ids, topk_weights=weights, expert_alignment=4, **_layout(plain, ids)
    )
    stats = torch.ones(local, dtype=torch.int32, device=x.device)
    options = {"topk_idx": ids, "topk_weights": weights, "num_experts": experts, "expert_alignment": 4}
    got, got_idx, got_weights, handle, event = buffer.dispatch(
        x, cumulative_local_expert_recv_stats=stats, **options
    )
    here = torch.cat([each_ids - rank * local for _, each_ids, _ in batches])
    real_L = torch.tensor([int((here == e).sum()) for e in range(local)], dtype=torch.int32)
    aligned_L = torch.tensor(counts, dtype=torch.int32)
    ends_L = aligned_L.cumsum(0, dtype=torch.int32)
    _same(
        rows=(got, rows),
        idx=(got_idx, idx),
        weights=(got_weights, received),
        psum=(handle.psum_num_recv_tokens_per_expert, ends_L),
        stats=(stats, real_L + 1),
        sources=(handle.psum_num_recv_tokens_per_scaleup_rank[-1:], torch.tensor([len(rows)]).int()),
        kept=(handle.topk_idx, ids),
    )
    assert handle.num_recv_tokens_per_expert_list == counts and event.event is None
    again, *nothing, same, _ = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    _, _, weights_again, *_ = buffer.dispatch(x, topk_weights=weights * 2, handle=handle)
    fixed, fixed_idx, _, without, _ = buffer.dispatch(x, do_cpu_sync=False, **options)
    _same(
        again=(again, rows),
        weights_again=(weights_again, received * 2),
        fixed=(fixed[: len(rows)], rows),
        fixed_idx=(fixed_idx[: len(idx)], idx),
    )
    assert nothing == [None, None] and same is handle and not without.num_recv_tokens_per_expert_list
    assert len(fixed) == 9 * size and (len(rows) == len(fixed) or int(fixed_idx[len(rows) :].max()) == -1)
    later = {"async_with_compute_stream": True, "defer_epilogue": True}
    bias = {"topk_weights": received, "bias": x}
    sums, back, _ = buffer.combine(rows, handle, **bias)
    sums_later, back_later, _ = buffer.combine(rows, handle, **bias, **later).wait()
    rows_later, idx_later, *_ = buffer.dispatch(x, **options, **later).wait()
    _same(
        sums_later=(sums_later, sums),
        back_later=(back_later, back),
        rows_later=(rows_later, rows),
        idx_later=(idx_later, idx),
        along_later=(buffer.dispatch(x, handle=handle, **later).wait()[0], rows),
    )

    wide, no_idx, factors, expanded, event = buffer.dispatch(
        x, do_expand=True, previous_event=buffer.capture(), async_with_compute_stream=True, **options
    )
    event.current_stream_wait()
    starts, wanted = [0, *ends_L.tolist()], []
    for e in range(local):
        mine = [
            (row, each_weights[token, k])
            for each_x, each_ids, each_weights in batches
            for token, row in enumerate(each_x)
            for k in range(TOP_K)
            if each_ids[token, k] == rank * local + e
        ]
        padding = (torch.zeros_like(x[:1].sum(0)), torch.zeros((), device=x.device))
        wanted += mine + [padding] * (counts[e] - len(mine))
    _same(
        wide=(wide, torch.stack([row for row, _ in wanted]) if wanted else wide[:0]),
        factors=(factors, torch.stack([factor for _, factor in wanted]) if wanted else factors[:0]),
        ends=(expanded.psum_num_recv_tokens_per_expert, torch.tensor(starts[:-1]).int() + real_L),
        real=(expanded.num_unaligned_recv_tokens_per_expert, real_L),
    )
    worst, *_ = buffer.dispatch(x, do_expand=True, do_cpu_sync=False, **options)
    wide_again, _, factors_again, *_ = buffer.dispatch(x, topk_weights=weights * 2, handle=expanded)
    _same(
        worst=(worst[: len(wide)], wide),
        wide_again=(wide_again, wide),
        factors_again=(factors_again, factors * 2),
    )
    many, factors_back, _ = buffer.combine(wide, expanded, topk_weights=factors)
    chosen_TK = ids >= 0
    ranks_T1 = (
        torch.stack([((ids // local == r) & chosen_TK).any(1) for r in range(size)]).sum(0).unsqueeze(1)
    )
    _near(sums=(sums, x * ranks_T1 + x), many=(many, x * chosen_TK.sum(1, keepdim=True)))
    kept = weights.masked_fill(~chosen_TK, 0.0)
    _same(back=(back, kept), factors_back=(factors_back, kept))
    _refused(InvalidArgument, "num_experts", lambda: buffer.dispatch(x, ids))
    _refused(InvalidArgument, "one kind", lambda: buffer.dispatch(x, ids, handle=handle))
    _refused(InvalidArgument, "handle is None", lambda: buffer.combine(rows, None))
    other = DispatchHandle.__new__(DispatchHandle)
    _refused(InvalidArgument, "expected the EPHandle", lambda: buffer.dispatch(x, handle=other))
    _refused(InvalidArgument, "async", lambda: buffer.combine(rows, handle, defer_epilogue=True))
    *_, given, _ = buffer.dispatch(x, ids.clone(), weights, num_experts=experts, do_handle_copy=False)
    given.topk_idx[:] = -1
    changed = {"topk_weights": weights, "handle": given}
    _refused(InvalidArgument, "was changed", lambda: buffer.dispatch(x, **changed))
    few = {"num_max_tokens_per_rank": 1}  # fewer than there are
    small = ElasticBuffer(dist.group.WORLD, **few, explicitly_destroy=True)
    for kind in ({}, {"do_expand": True}):
        _, _, sent, along, _ = small.dispatch(x, **options, **kind)
        _same(sent_again=(small.dispatch(x, topk_weights=weights, handle=along)[2], sent))
    small.destroy()
    _refused(CommunicatorClosed, "destroyed", lambda: small.dispatch(x, handle=along))
    if not x.is_cuda:  # GPUs have no such rows
        whole = {"x": x.double(), "topk_weights": weights.double()}
        _, _, sent, along, _ = buffer.dispatch(topk_idx=ids, num_experts=experts, **whole)
        _same(double_again=(buffer.dispatch(handle=along, **whole)[2], sent))
    unsized = ElasticBuffer(dist.group.WORLD)
    _refused(
        InvalidArgument,
        "num_max_tokens_per_rank is 0",
        lambda: unsized.dispatch(x, do_cpu_sync=False, **options),
    )
    assert no_idx is None, "ids of expanded rows"


@_needs("torchtitan")
@on_ranks(2)
def test_torchtitan(rank: int, size: int, seed: int) -> list[str]:
    """torchtitan 0.3's own functions for version 2, which it registers for CUDA tensors, on CPU tensors: the
    compact layout with its gradients, the expanded one without."""
    from torchtitan.distributed.deepep import deepep

    x, ids, weights = _routing(rank, size, seed, 6)
    scales_EH = torch.randn(_experts(size), HIDDEN, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_(), weights.requires_grad_()
    going = (weights * (ids >= 0)).unsqueeze(2)
    wanted = ((x.unsqueeze(1) * scales_EH[ids.clamp(min=0)]).sin() * going).sum(1)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), (x, weights))

    library = torch.library.Library("deepep", "IMPL")
    library.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    library.impl("combine", deepep._combine_op_impl, "CPU")
    deepep.get_buffer(dist.group.WORLD, hidden=HIDDEN, num_max_tokens_per_rank=6, num_topk=TOP_K)
    scores = weights.masked_fill(ids < 0, 0.0)

    def layer(static: bool) -> Tensor:
        local = len(scales_EH) // size
        rows, counts_L, state = deepep.dispatch_tokens(
            x, ids.clamp(min=0), scores, local, len(scales_EH), num_tokens_per_rank=6, cudagraphable=static
        )
        counts_L = counts_L.long()
        mine_LH = scales_EH[rank * local : (rank + 1) * local]
        by_row = mine_LH.repeat_interleave(counts_L, 0)
        padded = torch.cat([by_row, by_row.new_zeros(len(rows) - len(by_row), HIDDEN)])
        y = deepep.combine_tokens((rows * padded).sin(), state)
        deepep.sync_combine()
        return y

    y = layer(static=False)
    grads = torch.autograd.grad(y.square().sum(), (x, weights))
    with torch.no_grad():
        expanded = layer(static=True)
    pairs = {
        "y": (y, wanted),
        "x": (grads[0], wanted_grads[0]),
        "weights": (grads[1], wanted_grads[1]),
        "expanded": (expanded, wanted.detach()),
    }
    return [name for name, pair in pairs.items() if not torch.allclose(*pair, rtol=1e-4, atol=1e-5)]


DROPS = {"capacity": 0.5}
PADDED = {"capacity": 1.0, "moe_pad_expert_input_to_capacity": True}


@_needs("megatron")
@pytest.mark.parametrize(
    ("backend", "changes"),
    [("deepep", {}), ("deepep", DROPS), ("hybridep", {}), ("hybridep", DROPS), ("hybridep", PADDED)],
)
@on_ranks(2)
def test_megatron_core(rank: int, size: int, backend: str, changes: dict[str, Any], seed: int) -> list[str]:
    """Megatron-Core's own flexible dispatcher, unchanged, with its functions of autograd, beside its
    all-to-all. Each layer calls a combine twice: in its forward, and in the backward of its dispatch."""
    from megatron.core.transformer.moe import fused_a2a

    from tests.multirank import test_megatron as megatron

    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    fused_a2a.reset_hybrid_ep_buffer()
    owner, name = (Buffer, "combine") if backend == "deepep" else (HybridEPBuffer, "combine_with_unpermute")
    counted = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
    with megatron._megatron(size), counted as combine:
        models = (megatron._model("alltoall", size, **changes, **each) for each in ({}, flex))
        steps = [megatron._step(each, 2, seed + rank) for each in models]
    assert combine.call_count == 2 * megatron.LAYERS
    return megatron._differences(backend, *steps)


ELASTIC = {
    "__init__": "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
    "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx "
    "num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
    "allow_hybrid_mode allow_multiple_reduction",
    "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
    "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event previous_event_before_epilogue "
    "async_with_compute_stream allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand "
    "do_zero_padding use_tma_aligned_col_major_sf",
    "combine": "x handle topk_weights bias num_sms num_qps previous_event previous_event_before_epilogue "
    "async_with_compute_stream allocate_on_comm_stream",
    "barrier": "use_comm_stream with_cpu_sync sequential",
    "get_theoretical_num_sms": "num_experts num_topk",
    "get_theoretical_num_qps": "num_sms",
}
"""The arguments of DeepEP's ElasticBuffer in its order (deep_ep/buffers/elastic.py at dd758ca)."""
SIGNATURES = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config previous_event "
    "async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish allocate_on_comm_stream",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 "
    "async_finish return_recv_hook",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
    "return_recv_hook out combine_wait_recv_cost_stats",
    "low_latency_update_mask_buffer": "rank_to_mask mask",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "get_next_low_latency_combine_buffer": "handle",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "set_num_sms": "new_num_sms",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
}
"""The arguments of DeepEP's Buffer in its order (deep_ep/buffers/legacy.py at dd758ca)."""


@pytest.mark.parametrize(
    ("kind", "name"), [*((Buffer, name) for name in SIGNATURES), *((ElasticBuffer, name) for name in ELASTIC)]
)
def test_signatures(kind: type, name: str) -> None:
    found = [each for each in inspect.signature(getattr(kind, name)).parameters if each != "self"]
    wanted = (SIGNATURES if kind is Buffer else ELASTIC)[name].split()
    assert found[: len(wanted)] == wanted


def test_events_before_an_operation() -> None:
    """An event for the epilogue does not replace the current stream; one for the operation does."""
    buffer, first, epilogue = ElasticBuffer.__new__(ElasticBuffer), EventHandle(), EventHandle()
    assert buffer._before(None, None) == [] == buffer._before(EventOverlap(None), None)
    assert buffer._before(first, None) == [first]
    assert buffer._before(EventOverlap(first), epilogue) == [first, epilogue]
    captured, last = buffer._before(None, epilogue)
    assert last is epilogue and isinstance(captured, EventHandle) and captured is not epilogue


def test_other_names() -> None:
    import deep_ep_cpp

    assert deep_ep_cpp.EventHandle is EventHandle and deep_ep_cpp.Config is deep_ep.Config
    assert deep_ep.topk_idx_t is torch.int64 and deep_ep.EventOverlap is EventOverlap
    assert deep_ep.EPBuffer is ElasticBuffer
    config = deep_ep.Config(num_sms=24, num_max_nvl_chunked_send_tokens=8)
    assert (config.num_sms, config.get_nvl_buffer_size_hint(14336, 8)) == (24, 0)


def test_beside_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take the place of a DeepEP that is installed."""
    versions = {"deep_ep": "1.2.1"}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise deep_ep.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(deep_ep.metadata, "version", version)
    with pytest.raises(ImportError, match=r"DeepEP 1\.2\.1 .*pip uninstall deep_ep"):
        deep_ep._refuse_beside_deep_ep()


def test_as_a_package(tmp_path: Path) -> None:
    """The package works when pip has installed it, imported from elsewhere."""
    pytest.importorskip("scikit_build_core")
    where = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*where, "-q", "--target", tmp_path, COMPAT], check=True)
    told = "import deep_ep, deep_ep_cpp; print(deep_ep.__file__, deep_ep_cpp.Config())"
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, "-c", told]
    found = subprocess.run(asked, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"{tmp_path}/deep_ep/__init__.py Config(num_sms=20"), found.stdout
