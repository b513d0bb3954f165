"""Bad arguments of the calls of compat/deep_ep: one after the other, everything else as it should be."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat_path import COMPAT  # noqa: F401  # puts deep_ep on the path

# isort: split
from deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from deep_ep.hybrid_ep_buffer import indices_to_map

from moecomm.errors import CapacityExceeded, InvalidArgument, MoecommError, PeerTimeout
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

TOKENS, HIDDEN, EXPERTS, TOP_K, MOST = 6, 128, 8, 2, 8
Call = tuple[Callable[..., Any], dict[str, Any]]


def _calls(seed: int) -> dict[str, Call]:
    """Calls of all buffers by name, with arguments that go together."""
    generator, group = torch.Generator().manual_seed(seed), dist.group.WORLD
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    buffer, elastic = Buffer(group), ElasticBuffer(group, num_max_tokens_per_rank=MOST)
    hybrid = HybridEPBuffer(group, HIDDEN, MOST, EXPERTS)
    _, _, counts, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    routed = {"x": x, "topk_idx": ids, "topk_weights": weights}
    known = {"num_tokens_per_expert": counts, "is_token_in_rank": in_rank}
    by_map = dict(zip(("routing_map", "probs"), indices_to_map(ids, weights, TOKENS, EXPERTS), strict=True))
    rows, _, row_weights, _, handle, _ = buffer.dispatch(**routed, **known)
    e_rows, _, e_weights, e_handle, _ = elastic.dispatch(**routed, num_experts=EXPERTS)
    h_rows, h_probs, _, h_handle = hybrid.dispatch(hidden=x, **by_map)
    p_rows, p_probs, _, _, p_handle = hybrid.dispatch_with_permute(hidden=x, **by_map, pad_multiple=4)
    sent = {"topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}
    slots, _, slot_handle, *_ = buffer.low_latency_dispatch(x, **sent, use_fp8=False)
    stats = {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS // group.size(), dtype=torch.int32)}
    sizes = {"num_experts": EXPERTS, "num_max_tokens_per_rank": MOST, "expert_alignment": 4, **stats}
    unblocked = {"num_permuted_tokens": 64, "pad_multiple": 4, "non_blocking": True}
    bias, by_ids = (
        torch.randn(TOKENS, HIDDEN, generator=generator),
        {"topk_idx": ids, "topk_weights": weights},
    )
    back, again = {"bias": bias, "topk_weights": row_weights}, {"topk_weights": e_weights}
    return {
        "layout": (buffer.get_dispatch_layout, {"topk_idx": ids, "num_experts": EXPERTS}),
        "dispatch": (buffer.dispatch, {**routed, **known, "expert_alignment": 4}),
        "of worst": (buffer.dispatch, {**routed, **known, "num_worst_tokens": MOST}),
        "without ids": (buffer.dispatch, {"x": x, **known}),
        "along": (buffer.dispatch, {"x": x, "handle": handle}),
        "combine": (buffer.combine, {"x": rows, "handle": handle, **back}),
        "elastic": (elastic.dispatch, {**routed, **sizes, "num_sms": 0}),
        "expanded": (elastic.dispatch, {**routed, **sizes, "do_expand": True, "do_cpu_sync": False}),
        "elastic along": (elastic.dispatch, {"x": x, "handle": e_handle, "topk_weights": weights}),
        "elastic back": (elastic.combine, {"x": e_rows, "handle": e_handle, "bias": bias, **again}),
        "hybrid": (hybrid.dispatch, {"hidden": x, **by_map}),
        "hybrid by ids": (hybrid.dispatch, {"hidden": x, **by_ids, "num_of_experts": EXPERTS}),
        "hybrid along": (hybrid.dispatch, {"hidden": x, "probs": by_map["probs"], "handle": h_handle}),
        "hybrid back": (hybrid.combine, {"hidden": h_rows, "probs": h_probs, "handle": h_handle}),
        "permute": (hybrid.dispatch_with_permute, {"hidden": x, **by_map, **unblocked}),
        "unpermute": (
            hybrid.combine_with_unpermute,
            {"hidden": p_rows, "probs": p_probs, "handle": p_handle},
        ),
        "map": (indices_to_map, {**by_ids, "num_of_tokens": TOKENS, "num_of_experts": EXPERTS}),
        "slots": (buffer.low_latency_dispatch, {"x": x, **sent, **stats, "use_fp8": False}),
        "slots back": (
            buffer.low_latency_combine,
            {"x": slots, **by_ids, "handle": slot_handle, "out": torch.empty(TOKENS, HIDDEN)},
        ),
    }


def _bad(value: Any) -> Iterator[Any]:
    yield from (None, "a", -1, 0, 3, 1.5, True, [1], object(), (1, 2))
    if isinstance(value, Tensor):
        yield from (value.int() if value.is_floating_point() else value.float(), value[:2])
        yield from (value.flatten()[:4], value.unsqueeze(0), torch.empty(0), torch.tensor(1.0))
        yield from (value.to(torch.complex64), value.to("meta"))
        if value.dim() == 2:
            yield from (value.t(), value[:, :1])


CUT = {
    "combine": ("topk_weights", "bias"),
    "elastic": ("cumulative_local_expert_recv_stats",),
    "expanded": ("cumulative_local_expert_recv_stats",),
    "slots": ("cumulative_local_expert_recv_stats",),
    "elastic back": ("topk_weights",),
    "without ids": ("is_token_in_rank",),
    "hybrid": ("routing_map", "probs"),
    "hybrid along": ("probs",),
    "hybrid back": ("hidden", "probs"),
    "permute": ("routing_map", "probs"),
    "unpermute": ("hidden", "probs"),
    "slots back": ("x", "topk_weights", "out"),
}


@on_ranks(2)
def test_an_error_of_one_rank(rank: int, size: int, seed: int) -> None:
    """All ranks raise the error, which names the argument as the caller does, and the next call works."""
    calls = _calls(seed)
    for call, name in ((call, name) for call, names in CUT.items() for name in names):
        function, good = calls[call]
        with pytest.raises(InvalidArgument, match=f"{name} "):
            function(**good | ({name: good[name][:-1]} if rank else {}))
        function(**good)
    function, good = calls["expanded"]
    twice = {name: good[name].repeat(2, 1) for name in ("x", "topk_idx", "topk_weights")}
    with pytest.raises(InvalidArgument, match="at most num_max_tokens_per_rank = 8"):
        function(**good | (twice if rank else {}))
    function(**good)


@on_ranks(2, MOECOMM_TIMEOUT="1")
def test_a_new_buffer_after_an_error(rank: int, size: int, seed: int) -> None:
    """It has a communicator of its own where an error has ended that of an older buffer."""
    ids, counts = torch.arange(4).unsqueeze(1), torch.ones(4, dtype=torch.int32)
    good = {"x": torch.ones(4, 8), "topk_idx": ids, "num_tokens_per_expert": counts}
    old, new = Buffer(dist.group.WORLD), Buffer(dist.group.WORLD)
    old.dispatch(**good)
    if rank:
        with pytest.raises(PeerTimeout):
            old.dispatch(**good)
    dist.barrier()
    rows, *_ = new.dispatch(**good)
    assert len(rows) == 4


@on_ranks(2, MOECOMM_TIMEOUT="1")
def test_a_rank_that_does_not_make_the_first_dispatch(rank: int, size: int, seed: int) -> None:
    """The other has an error by the deadline, and a new buffer works: the process group is still in step."""
    ids, counts = torch.arange(4).unsqueeze(1), torch.ones(4, dtype=torch.int32)
    good = {"x": torch.ones(4, 8), "topk_idx": ids, "num_tokens_per_expert": counts}
    if rank == 0:
        with pytest.raises(PeerTimeout, match="rank 1 did not come"):
            Buffer(dist.group.WORLD).dispatch(**good)
    dist.barrier()
    rows, *_ = Buffer(dist.group.WORLD).dispatch(**good)
    assert len(rows) == 4


@on_ranks(1)
def test_bad_arguments(rank: int, size: int, seed: int) -> list[str]:
    """A typed error refuses each, and names it where it is no tensor at all; the buffer stays usable."""
    found = []
    for call, (function, good) in _calls(seed).items():
        kinds = inspect.signature(function).parameters
        for name, value in good.items():
            for bad in _bad(value):
                what = f"{call}: {name}={bad if not isinstance(bad, Tensor) else tuple(bad.shape)}"
                try:
                    function(**{**good, name: bad})
                    typed = str(kinds[name].annotation).startswith(("Tensor", "int"))
                    if typed and isinstance(bad, (str, list)):
                        found.append(f"{what} was taken")
                except (MoecommError, NotImplementedError) as error:
                    if isinstance(bad, str) and not isinstance(value, bool) and name not in str(error):
                        found.append(f"{what}: {error}")
                except Exception as error:
                    found.append(f"{what}: {type(error).__name__}: {error}")
        for _ in range(2):  # after too few rows, of which the next call tells
            try:
                function(**good)
                break
            except CapacityExceeded:
                pass
        else:
            found.append(f"{call} cannot be called any more")
    return found
