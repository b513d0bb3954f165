"""HybridEPBuffer of the module deep_ep, on CPU ranks: its own calls, and Megatron-Core, which calls it."""

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import InvalidArgument, InvalidRouting, Unsupported
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_deep_ep import (
    HIDDEN,
    _disagree,
    _experts,
    _refused,
    _routing,
    _same,
    _tokens,
)

# isort: split
from deep_ep import HybridEPBuffer
from deep_ep.hybrid_ep_buffer import indices_to_map
from deep_ep.maps import ids_of

pool = own_pool()


def _buffer(size: int) -> HybridEPBuffer:
    return HybridEPBuffer(dist.group.WORLD, HIDDEN, max_num_of_tokens_per_rank=4, num_local_experts=3)


def _batches(size: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Returns for each rank its rows, ids and weights, and the map and probs that loops make of them."""
    made = []
    for source in range(size):
        x, ids, weights = _routing(source, size, seed, _tokens(source))
        probs = torch.zeros(len(x), _experts(size), device=x.device)
        map_TE = torch.zeros_like(probs, dtype=torch.bool)
        for token, k in (ids >= 0).nonzero().tolist():
            map_TE[token, ids[token, k]] = True
            probs[token, ids[token, k]] = weights[token, k]
        made.append((x, ids, weights, map_TE, probs))
    return made


def _near(sums: Tensor, x: Tensor, times_T: Tensor) -> None:
    assert torch.allclose(sums, x * times_T.unsqueeze(1), rtol=5e-6, atol=1e-6), f"sums of {len(x)} tokens"


def _permuted(batches: Any, rank: int, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and probs that this rank gets, by expert, then source, then token, padded; rows of each expert."""
    x, *_, probs = batches[0]
    rows, factors, counts = [x[:0]], [probs[:0, 0]], []
    for expert in range(rank * 3, rank * 3 + 3):
        before = sum(map(len, rows))
        for each_x, _, _, each_map, each_probs in batches:
            for token in each_map[:, expert].nonzero().flatten().tolist():
                rows.append(each_x[token, None]), factors.append(each_probs[token, expert, None])
        counts.append(sum(map(len, rows)) - before)
        rows.append(x.new_zeros(-counts[-1] % pad, HIDDEN)), factors.append(x.new_zeros(-counts[-1] % pad))
    return torch.cat(rows), torch.cat(factors), torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize(("given", "pad"), [("map", None), ("map", 4), ("ids", 4)])
@on_ranks("most_ranks")
def test_with_permute(rank: int, size: int, given: str, pad: int | None, seed: int) -> None:
    """Every value against loops; along a handle; a fixed number of rows, with and without room for all."""
    buffer, batches, experts, align = _buffer(size), _batches(size, seed), _experts(size), pad or 1
    x, ids, weights, map_TE, probs = batches[rank]
    made = indices_to_map(ids, weights, len(x), experts)
    rows, factors, counts = _permuted(batches, rank, align)
    padded = (counts.long() + align - 1) // align * align
    by_map, by_ids = {"routing_map": map_TE}, {"topk_idx": ids, "num_of_experts": experts}
    way = {"hidden": x, "pad_multiple": pad, **(by_map if given == "map" else by_ids)}
    with_probs = {**way, **({"probs": probs} if given == "map" else {"topk_weights": weights})}
    got, got_probs, scales, got_counts, handle = buffer.dispatch_with_permute(**with_probs, scaling_factor=x)
    plain, none, _, _, _ = buffer.dispatch_with_permute(**way, num_of_experts_per_rank=3)
    along, nothing, _, along_counts, same = buffer.dispatch_with_permute(
        hidden=x.neg(), handle=handle, pad_multiple=pad, num_permuted_tokens=got_counts.sum()
    )
    again, again_probs, _, again_counts, _ = buffer.dispatch_with_permute(
        hidden=x, handle=handle, probs=probs * 2
    )
    sums, back = buffer.combine_with_unpermute(hidden=rows, probs=factors, handle=handle, pad_multiple=pad)
    _near(sums, x, map_TE.sum(1))
    _same(map=(made[0], map_TE), probs=(made[1], probs), rows=(got, rows), plain=(plain, rows))
    _same(factors=(got_probs, factors), counts=(got_counts, padded), real=(handle[7], counts))
    _same(along=(along, -rows), along_counts=(along_counts, padded), again=(again, rows))
    _same(again_probs=(again_probs, factors * 2), back=(back, probs))
    _same(again_counts=(again_counts, padded))
    _same(flag=(handle[10], torch.zeros(1, dtype=torch.int32)))
    facts = (len(handle), handle[8], handle[9].pad_multiple, same is handle, none, nothing, scales)
    assert facts == (11, len(x), pad or 0, True, None, None, None), facts
    for room in (4, 36 * size):
        fixed, fixed_probs, _, fits, bounded = buffer.dispatch_with_permute(
            **with_probs, num_permuted_tokens=room, non_blocking=True
        )
        ones, _ = buffer.combine_with_unpermute(hidden=torch.ones_like(fixed), handle=bounded)
        total = torch.stack([bounded[7].sum(), ones[:, 0].sum().long()])
        dist.all_reduce(total)
        kept, real = min(room, len(rows)), (factors != 0)[:room].sum().cpu()
        _same(fixed=(fixed[:kept], rows[:kept]), factors=(fixed_probs[:kept], factors[:kept]))
        _same(fits=(fits.cumsum(0), padded.cumsum(0).clamp(max=room)), back=(total[1], total[0]))
        flag = torch.tensor([len(rows) > room], dtype=torch.int32)
        _same(flag=(bounded[-1], flag), really=(bounded[7].sum(), real))
        assert len(fixed) == room, f"{len(fixed)} rows of {room}"
    once_more, *_ = buffer.dispatch_with_permute(**way)
    _same(once_more=(once_more, rows))


@on_ranks("most_ranks")
def test_without_permute(rank: int, size: int, seed: int) -> None:
    """Rows by source rank, then token; probs stand in the columns of the rank's experts."""
    buffer, batches, mine = _buffer(size), _batches(size, seed), slice(rank * 3, rank * 3 + 3)
    x, ids, weights, map_TE, probs = batches[rank]
    rows, local_map, factors = (
        torch.cat([part[each[3][:, mine].any(1)] for each in batches for part in [each[which]]])
        for which in (0, 3, 4)
    )
    outside = torch.ones_like(factors[0], dtype=torch.bool)
    outside[mine] = False
    factors = factors.masked_fill(outside, 0.0)
    by_ids = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": _experts(size)}
    for way in ({"routing_map": map_TE, "probs": probs}, by_ids):
        got, got_probs, _, handle = buffer.dispatch(x, **way)
        sums, back = buffer.combine(got, got_probs, handle)
        along, none, _, _ = buffer.dispatch(x, handle=handle)
        again, again_probs, _, _ = buffer.dispatch(x, handle=handle, **by_ids)
        _near(sums, x, map_TE.view(len(x), size, 3).any(2).sum(1))
        _same(back=(back, probs))
        _same(rows=(got, rows), probs=(got_probs, factors), along=(along, rows))
        _same(again=(again, rows), again_probs=(again_probs, factors))
        number = torch.tensor([len(rows)], dtype=torch.int32)
        _same(number=(handle[3], number), local=(handle[4], local_map[:, mine]))
        assert (len(handle), handle[5], none) == (7, len(x), None), none


@pytest.mark.parametrize("told", [0, 2])
@on_ranks("most_ranks")
def test_larger_batches(rank: int, size: int, told: int, seed: int) -> None:
    """More tokens, and tokens of one rank with more experts than any before: handles of both still work."""
    buffer, experts, kept = _buffer(size), _experts(size), []
    config = buffer.configurer.buffer_config
    config.num_of_experts_per_token = told
    for tokens, most in ((3, 1), (40, 1), (5, 2), (6, experts), (2, 1)):
        x, _, _ = _routing(rank, size, seed, tokens)
        map_TE = torch.arange(experts, device=x.device).eq(1).repeat(tokens, 1)
        map_TE[-1, : most if rank == size - 1 else 1] = True
        map_TE[0] &= tokens > 3  # a token without experts
        rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=map_TE)
        kept.append((x, map_TE, rows, handle))
    assert config.max_num_of_tokens_per_rank == 48, config
    for x, map_TE, rows, handle in kept:
        sums, _ = buffer.combine_with_unpermute(hidden=rows, handle=handle)
        _near(sums, x, map_TE.sum(1))


@on_ranks(2)
def test_fp8(rank: int, size: int, seed: int) -> None:
    """On GPUs fp8 rows and scales arrive as they were, also along a handle; CPUs refuse them."""
    x, ids, _ = _routing(rank, size, seed, 6)
    data = torch.randint(0, 120, (6, 256), dtype=torch.uint8, device=x.device)
    scales, way = torch.rand(6, 2, device=x.device), {"topk_idx": ids, "num_of_experts": _experts(size)}
    permute = functools.partial(_buffer(size).dispatch_with_permute, hidden=data)
    _refused(InvalidArgument, "scaling_factor", lambda: permute(**way))
    if not x.is_cuda:
        _refused(Unsupported, "fp8", lambda: permute(scaling_factor=scales, **way))
        return
    rows, _, factors, _, handle = permute(scaling_factor=scales, **way)
    again, _, again_factors, _, _ = permute(scaling_factor=scales, handle=handle)
    values, got = (
        (each.view(torch.float8_e4m3fn).float().view(-1, 2, 128) * scale.unsqueeze(2)).view(-1, 256)
        for each, scale in ((data, scales), (rows, factors))
    )
    wanted, *_ = permute(**{"hidden": values, **way})
    _same(rows=(got, wanted), again=(again, rows), again_factors=(again_factors, factors))


@on_ranks("most_ranks")
def test_bad_calls_of_hybrid(rank: int, size: int, seed: int) -> None:
    """Each is refused, in a sentence, and the buffer goes on."""
    buffer, experts = _buffer(size), _experts(size)
    x, ids, weights = _routing(rank, size, seed, 4)
    map_TE, probs = indices_to_map(ids, weights, 4, experts)
    plain, permute = buffer.dispatch, functools.partial(buffer.dispatch_with_permute, hidden=x)
    rows, _, _, handle = plain(x, routing_map=map_TE)
    *_, permuted = permute(routing_map=map_TE)
    wrong = torch.full_like(ids, experts) if rank == size - 1 else ids
    unpermute = buffer.combine_with_unpermute
    _refused(InvalidArgument, "none is given", lambda: plain(x))
    _refused(InvalidArgument, "num_of_experts", lambda: plain(x, topk_idx=ids))
    _refused(InvalidArgument, "multiple", lambda: plain(x, topk_idx=ids, num_of_experts=experts + 1))
    _refused(InvalidArgument, "routing_map has", lambda: permute(routing_map=map_TE[1:]))
    _refused(InvalidArgument, "routing_map is", lambda: permute(routing_map=map_TE.int()))
    _refused(InvalidArgument, "probs", lambda: permute(routing_map=map_TE, probs=probs[:, 1:]))
    of_float64, rows_wanted = {"probs": probs.double()}, {"num_permuted_tokens": torch.tensor(8)}
    _refused(InvalidArgument, "probs is", lambda: permute(routing_map=map_TE, **of_float64))
    _refused(InvalidArgument, "num_permuted", lambda: permute(routing_map=map_TE, **rows_wanted))
    _refused(InvalidRouting, "topk_idx", lambda: permute(topk_idx=wrong, num_of_experts=experts))
    _refused(InvalidArgument, "multiple", lambda: permute(routing_map=map_TE, non_blocking=True))
    _refused(InvalidArgument, "9999", lambda: permute(handle=permuted, num_permuted_tokens=9999))
    _refused(InvalidArgument, "call of dispatch", lambda: buffer.combine(x, None, permuted))
    _refused(InvalidArgument, "_with_permute", lambda: unpermute(hidden=x, handle=handle))
    _refused(InvalidArgument, "NoneType", lambda: buffer.combine(x))
    _refused(InvalidArgument, "topk_idx", lambda: indices_to_map(ids, None, 3, experts))
    _refused(InvalidArgument, "group", lambda: HybridEPBuffer(None, HIDDEN, 4, 1))
    if not x.is_cuda:
        again = functools.partial(plain, x, routing_map=map_TE)
        _disagree(rank, again, lambda: buffer.combine(rows, handle=handle))
    sums, _ = buffer.combine(rows, handle=handle)
    _near(sums, x, map_TE.view(4, size, -1).any(2).sum(1))


@on_ranks(2)
def test_ids_that_change_in_inference_mode(rank: int, size: int, seed: int) -> None:
    """They have no version by which a change is noticed, so the handle has the ids of the dispatch."""
    with torch.inference_mode():
        x, ids, weights, _, probs = (each.clone() for each in _batches(size, seed)[rank])
        given = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": _experts(size)}
        rows, factors, _, _, handle = _buffer(size).dispatch_with_permute(hidden=x, **given)
        ids.fill_(-1)
        _, back = _buffer(size).combine_with_unpermute(hidden=rows, probs=factors, handle=handle)
        assert torch.equal(back, probs)


SIGNATURES = {
    "__init__": """group hidden_dim max_num_of_tokens_per_rank num_local_experts use_fp8=False
        num_sms_dispatch_api=None num_sms_combine_api=None num_sms_preprocessing_api=None
        num_blocks_permute=None num_blocks_unpermute=None load_cached_kernels=False use_shared_buffer=True
        enable_custom_allgather=False num_of_hybrid_ep_ranks_per_nvlink_domain=None use_mnnvl=None""",
    "update_template_config": """hidden_dim=None num_of_tokens_per_rank=None num_local_experts=None
        pad_multiple=None use_fp8=None fuse_permute_dispatch=False kwargs""",
    "dispatch": """hidden scaling_factor=None topk_idx=None topk_weights=None num_of_experts=None probs=None
        routing_map=None num_dispatched_tokens_tensor=None num_dispatched_tokens=None handle=None""",
    "combine": "hidden probs=None handle=None",
    "dispatch_with_permute": """* hidden topk_idx=None topk_weights=None num_of_experts_per_rank=None
        num_of_experts=None use_fp8=None routing_map=None probs=None scaling_factor=None
        num_permuted_tokens=None pad_multiple=None handle=None non_blocking=False fuse_permute_dispatch=False
        num_dispatched_tokens=None use_host_meta=None""",
    "combine_with_unpermute": """* hidden probs=None handle=None pad_multiple=None
        fuse_unpermute_combine=False num_dispatched_tokens=None""",
    "empty_jit_cache": "",
}
"""The arguments of DeepEP's HybridEPBuffer in its order (deep_ep/hybrid_ep_buffer.py at 94a9f8f), * where all
are keywords."""


def test_ids_of_a_map() -> None:
    """A token with more experts than K gets the id E, which every dispatch refuses."""
    map_TE = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool()
    assert ids_of(map_TE, 3).tolist() == [[1, 3, -1], [-1, -1, -1], [0, 1, 2]]
    assert ids_of(map_TE, 2).tolist() == [[1, 3], [-1, -1], [4, 1]]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found = list(inspect.signature(getattr(HybridEPBuffer, name)).parameters.values())[1:]
    written = ["*"] if found and all(each.kind is each.KEYWORD_ONLY for each in found) else []
    written += [each.name + ("" if each.default is each.empty else f"={each.default}") for each in found]
    assert written == SIGNATURES[name].split()
