"""What vLLM, SGLang and DeepSpeed do with compat/deep_ep, on CPU ranks: their calls and arguments, in their
order, and what they read of the results. Rows and sums are compared with a layer of simple experts that knows
the tokens of all ranks."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_deep_ep import _experts, _needs, _same, _tokens
from tests.ranks import device

# isort: split
import deep_ep
from deep_ep import Buffer, ElasticBuffer

pool = own_pool()

HIDDEN, TOP_K, MOST = 128, 3, 12
Options = dict[str, Any]
SIZES: Options = {"num_max_tokens_per_rank": MOST, "hidden": HIDDEN, "num_topk": TOP_K}


class _Case:
    """A layer: the tokens of all ranks, simple experts, and what a rank of them has to see.

    Attributes:
        batches: of each rank (T, H) rows in bfloat16, (T, K) ids and weights. Rank 1 has no token.
        scales_EH: what tells the experts apart.
    """

    def __init__(self, rank: int, size: int, seed: int, top_k: int = TOP_K) -> None:
        self.rank, self.size, self.experts, self.local = rank, size, _experts(size), _experts(size) // size
        generator = torch.Generator().manual_seed(seed)
        self.scales_EH = (torch.rand(self.experts, HIDDEN, generator=generator) + 0.5).to(device())
        self.batches: list[tuple[Tensor, Tensor, Tensor]] = []
        for tokens in map(_tokens, range(size)):
            x_TH = torch.randn(tokens, HIDDEN, generator=generator).to(device(), torch.bfloat16)
            ids_TK = torch.rand(tokens, self.experts, generator=generator).topk(top_k).indices.to(device())
            self.batches.append((x_TH, ids_TK, torch.rand(tokens, top_k, generator=generator).to(device())))

    @property
    def mine(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.batches[self.rank]

    @property
    def scales_LH(self) -> Tensor:
        return self.scales_EH.view(self.size, -1, HIDDEN)[self.rank]

    def output(self) -> Tensor:
        """(T, H): this rank's tokens after the layer."""
        return _mixed(*self.mine, self.scales_EH)

    def by_rank(self, rows: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        """What this rank makes of rows that have come once, with ids and weights of (P, K), in the order of
        their ranks and tokens."""
        x, ids, factors = (torch.cat(each) for each in zip(*self.batches, strict=True))
        here = (ids >= 0) & (ids // self.local == self.rank)
        arrive, ids = here.any(1), torch.where(here, ids - self.rank * self.local, -1)
        _same(rows=(rows, x[arrive]), idx=(idx, ids[arrive]))
        _same(weights=(weights, factors.masked_fill(~here, 0.0)[arrive]))
        return _mixed(rows, idx, weights, self.scales_LH).to(rows.dtype)

    def by_expert(self, rows: Tensor, spans: Any, weights: Tensor | None) -> Tensor:
        """The same of rows that have come for each expert, between the places in `spans`. Elsewhere the rows
        that it makes are NaN: no combine may read them."""
        x, ids, factors = (torch.cat(each) for each in zip(*self.batches, strict=True))
        assert len(spans) == self.local, spans
        made = torch.full_like(rows, torch.nan)
        for e, (start, end) in enumerate(spans):
            chosen, got = ids == self.rank * self.local + e, rows[start:end]
            _same(rows=(got, x[chosen.any(1)]))
            y = (got.float() * self.scales_LH[e]).sin()
            if weights is not None:
                _same(weights=(weights[start:end], factors[chosen]))
                y = y * weights[start:end].unsqueeze(1)
            made[start:end] = y.to(rows.dtype)
        return made

    def counts(self, alignment: int = 1) -> list[int]:
        """The rows of the local experts, rounded up."""
        ids = torch.cat([ids.flatten() for _, ids, _ in self.batches])
        each = [int((ids == self.rank * self.local + e).sum()) for e in range(self.local)]
        return [-(-n // alignment) * alignment for n in each]


def _mixed(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, scales_EH: Tensor) -> Tensor:
    """(T, H): the weighted sums of what the experts make of each row; an id -1 adds nothing."""
    parts_TKH = (x_TH.float().unsqueeze(1) * scales_EH[ids_TK.clamp(min=0)]).sin()
    return (parts_TKH * (weights_TK * (ids_TK >= 0)).unsqueeze(2)).sum(1)


def _near(**pairs: tuple[Tensor, Tensor]) -> None:
    """Asserts that results differ by no more than bfloat16 rounds."""
    for name, (a, b) in pairs.items():
        assert torch.allclose(a.float(), b, rtol=0.02, atol=0.02), name


def _wait(event: Any, expected: bool) -> None:
    """Waits as servers do, who look at `event.event`."""
    assert (event.event is not None) is expected
    if event.event is not None:
        event.current_stream_wait()


def _layout(buffer: Buffer, ids: Tensor, experts: int, **options: Any) -> tuple[Options, Any]:
    """The arguments of a dispatch that come from `get_dispatch_layout`, and its event."""
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, experts, **options)
    counts: Options = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node}
    return {**counts, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}, event


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_vllm_high_throughput(rank: int, size: int, overlapped: bool, seed: int) -> None:
    """DeepEPHTAll2AllManager and DeepEPHTPrepareAndFinalize: a batch alone, or two that overlap."""
    how: Options = {"num_nvl_bytes": 1 << 30, "num_rdma_bytes": 0, "low_latency_mode": False}
    buffer = Buffer(group=dist.group.WORLD, **how, num_qps_per_rank=1, explicitly_destroy=True)
    known = size in (2, 4, 8)  # it has no configs for other numbers of ranks
    plain: Options = {"allocate_on_comm_stream": False}
    sent, back = [], []
    for half in range(1 + overlapped):
        case = _Case(rank, size, seed + half)
        x, ids, weights = case.mine
        plain["previous_event"] = buffer.capture() if overlapped else None
        layout, _ = _layout(buffer, ids, case.experts, async_finish=False, **plain)
        given = {**layout, "handle": None, "topk_idx": ids, "topk_weights": weights, "expert_alignment": 1}
        given["config"] = Buffer.get_dispatch_config(size) if known else None
        sent.append((case, buffer.dispatch(x=x, **given, async_finish=not overlapped, **plain)))
    for case, (rows, idx, factors, counts, handle, event) in sent:
        _wait(event, not overlapped)
        assert idx is not None and factors is not None
        first = rank * case.local
        ids = torch.where(idx == -1, case.experts - 1 if first == 0 else 0, idx + first)
        expert_map = torch.full((case.experts,), -1, device=ids.device)
        expert_map[first : first + case.local] = torch.arange(case.local, device=ids.device)
        reduced = case.by_rank(rows, expert_map[ids], factors)
        assert counts == case.counts()
        plain["previous_event"] = buffer.capture() if overlapped else None
        given = {"handle": handle, "topk_weights": None, "async_finish": not overlapped, **plain}
        given["config"] = Buffer.get_combine_config(size) if known else None
        back.append((case, buffer.combine(x=reduced, **given)))
    for case, (combined, _, event) in back:
        _wait(event, not overlapped)
        output = torch.full_like(case.mine[0], torch.nan)
        _near(output=(output.copy_(combined, non_blocking=True), case.output()))
    buffer.destroy()


@pytest.mark.parametrize("weighted_input", [False, True])
@on_ranks("most_ranks")
def test_vllm_low_latency(rank: int, size: int, weighted_input: bool, seed: int) -> None:
    """DeepEPLLAll2AllManager and DeepEPLLPrepareAndFinalize, with experts at other places than their ids say;
    weighted_input is apply_router_weight_on_input, for one expert a token."""
    case = _Case(rank, size, seed, 1 if weighted_input else TOP_K)
    sizes = {"hidden": HIDDEN, "num_ranks": size, "num_experts": case.experts}
    memory = Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=MOST, **sizes)
    how: Options = {"low_latency_mode": True, "num_qps_per_rank": case.local, "allow_mnnvl": False}
    how |= {"allow_nvlink_for_low_latency_mode": True, "explicitly_destroy": True, "enable_shrink": False}
    buffer = Buffer(group=dist.group.WORLD, num_nvl_bytes=1 << 30, num_rdma_bytes=memory, **how)
    if weighted_input:
        case.batches = [(x * w.to(x.dtype), ids, torch.ones_like(w)) for x, ids, w in case.batches]
    x, ids, weights = case.mine
    wanted = case.output()
    place_E = torch.randperm(case.experts, generator=torch.Generator().manual_seed(seed)).to(ids.device)
    case.batches = [(each, place_E[i], w) for each, i, w in case.batches]
    case.scales_EH = case.scales_EH[place_E.argsort()]
    for later in (True, False):
        options: Options = {"use_fp8": False, "round_scale": False, "use_ue8m0": False}
        options |= {"async_finish": False, "return_recv_hook": True}
        sent = buffer.low_latency_dispatch(x, place_E[ids], MOST, case.experts, **options)
        rows, counts, handle, _, hook = sent
        assert hook is not None
        hook()
        spans = [(e * size * MOST, e * size * MOST + n) for e, n in enumerate(counts.tolist())]
        made = case.by_expert(rows.view((-1, HIDDEN)), spans, None)
        output, made = torch.full_like(x, torch.nan), made.view((case.local, -1, HIDDEN))
        options = {"async_finish": False, "zero_copy": False, "return_recv_hook": later, "out": output}
        _, _, hook = buffer.low_latency_combine(made, place_E[ids], weights, handle, **options)
        assert (hook is not None) is later
        if hook is not None:
            hook()
        _near(output=(output, wanted))
    buffer.destroy()


@pytest.mark.parametrize("graphed", [False, True], ids=["prefill", "decode"])
@on_ranks("most_ranks")
def test_vllm_version_2(rank: int, size: int, graphed: bool, seed: int) -> None:
    """DeepEPV2All2AllManager and DeepEPV2PrepareAndFinalize: rows by expert, or by rank without a wait."""
    how: Options = {"allow_hybrid_mode": True, "prefer_overlap_with_compute": False}
    how |= {"allow_multiple_reduction": False, "num_cpu_timeout_secs": 1800, "num_gpu_timeout_secs": 1800}
    how |= {"use_fp8_dispatch": False, "explicitly_destroy": True}
    buffer = ElasticBuffer(group=dist.group.WORLD, **SIZES, **how)
    case = _Case(rank, size, seed)
    assert buffer.get_theoretical_num_sms(num_experts=case.experts, num_topk=TOP_K) > 0
    x, ids, weights = case.mine
    most = min(1 << (max(map(_tokens, range(size))) - 1).bit_length(), MOST) if graphed else None
    options: Options = {
        "do_expand": not graphed,
        "do_cpu_sync": not graphed,
        "async_with_compute_stream": False,
    }
    given: Options = {"topk_idx": ids, "topk_weights": weights, "num_experts": case.experts}
    got = buffer.dispatch(x=x, **given, num_max_tokens_per_rank=most, **options)
    rows, idx, factors, handle, event = got
    _wait(event, False)
    assert factors is not None
    counts, ends_R = handle.num_recv_tokens_per_expert_list, handle.psum_num_recv_tokens_per_scaleup_rank
    if graphed:
        assert counts == [] and most is not None and len(rows) == size * most
        assert idx is not None and ends_R is not None
        made, real = torch.full_like(rows, torch.nan), int(ends_R[-1])
        made[:real] = case.by_rank(rows[:real], idx[:real], factors[:real])
    else:
        assert idx is None and counts == case.counts()
        ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
        made = case.by_expert(rows, [*pairwise(ends)], factors)
    for later in (True, False):
        options = {"async_with_compute_stream": later, "allocate_on_comm_stream": later}
        combined, _, event = buffer.combine(x=made, handle=handle, topk_weights=None, **options)
        _wait(event, later)
        _near(output=(combined, case.output()))
    buffer.destroy()


@pytest.mark.parametrize("later", [True, False])
@on_ranks("most_ranks")
def test_sglang(rank: int, size: int, later: bool, seed: int) -> None:
    """DeepEPDispatcher in mode "auto": a batch by the normal calls, two by the low-latency ones, one by the
    normal ones again, on one buffer. later: `async_finish` and `return_recv_hook`, as its layers ask for."""
    numbers = {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8, "num_max_nvl_chunked_recv_tokens": 128}
    config = deep_ep.Config(**numbers) if later else None
    configs = (config or Buffer.get_dispatch_config(size), config or Buffer.get_combine_config(size))
    nvl = max(each.get_nvl_buffer_size_hint(2 * HIDDEN, size) for each in configs)
    rdma = max(each.get_rdma_buffer_size_hint(2 * HIDDEN, size) for each in configs)
    rdma = max(rdma, Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, size, _experts(size)))
    queues = max(config.num_sms if config else Buffer.num_sms, _experts(size) // size)
    how: Options = {"low_latency_mode": True, "num_qps_per_rank": queues}
    buffer = Buffer(dist.group.WORLD, nvl, rdma, **how, allow_mnnvl=True, use_fabric=True)
    for step, normal in enumerate((True, False, False, True)):
        case = _Case(rank, size, seed + step)
        for _, ids_TK, _ in case.batches:
            ids_TK[-1:] = -1  # padding
        x, ids, weights = case.mine
        ids = ids.to(torch.int32).to(torch.int64)
        if normal:
            before: Options = {"previous_event": Buffer.capture() if later else None, "async_finish": later}
            layout, event = _layout(buffer, ids, case.experts, **before, allocate_on_comm_stream=later)
            before = {"previous_event": event, "async_finish": later, "allocate_on_comm_stream": later}
            options: Options = {"topk_idx": ids, "topk_weights": weights, "expert_alignment": 128}
            got = buffer.dispatch(x, **options, **layout, **before, config=config)
            rows, idx, factors, counts, handle, event = got
            _wait(event, later)
            assert idx is not None and factors is not None and handle is not None
            made = case.by_rank(rows, idx, factors)
            assert counts == case.counts(128)
            before["previous_event"] = Buffer.capture() if later else None
            combined, _, event = buffer.combine(made, handle, **before, config=config)
            _wait(event, later)
        else:
            if step == 1 and buffer.low_latency_mode:
                buffer.clean_low_latency_buffer(MOST, HIDDEN, case.experts)
            assert buffer.group_size == size
            waits: Options = {"async_finish": not later, "return_recv_hook": later}
            sent = buffer.low_latency_dispatch(x, ids, MOST, case.experts, use_fp8=False, **waits)
            rows, counts_L, slots, event, hook = sent
            assert (hook is not None) is later
            (hook or event.current_stream_wait)()
            spans = [(e * size * MOST, e * size * MOST + n) for e, n in enumerate(counts_L.tolist())]
            made = case.by_expert(rows.flatten(0, 1), spans, None)
            given: Options = {"topk_idx": ids, "topk_weights": weights, "handle": slots}
            back = buffer.low_latency_combine(x=made.view_as(rows), **given, **waits)
            combined, event, hook = back
            assert (hook is not None) is later
            (hook or event.current_stream_wait)()
        _near(**{f"output {step}": (combined, case.output())})


@pytest.mark.parametrize("kind", ["decode", "prefill", "prefill by rank"])
@on_ranks("most_ranks")
def test_sglang_version_2(rank: int, size: int, kind: str, seed: int) -> None:
    """DeepEPv2Dispatcher: groups of 128 rows; a rank without tokens sends one of zeros where it waits."""
    how: Options = {"allow_hybrid_mode": False, "sl_idx": 0, "prefer_overlap_with_compute": False}
    buffer = ElasticBuffer(dist.group.WORLD, **SIZES, use_fp8_dispatch=False, **how)
    case, waits, expanded = _Case(rank, size, seed), kind != "decode", kind != "prefill by rank"
    if waits:
        x, ids = torch.zeros(1, HIDDEN, dtype=torch.bfloat16), torch.arange(TOP_K).unsqueeze(0)
        zeros = x.to(device()), ids.to(device()), torch.zeros(1, TOP_K, device=device())
        case.batches = [batch if len(batch[0]) else zeros for batch in case.batches]
    x, ids, weights = case.mine
    options: Options = {"num_sms": 0, "use_tma_aligned_col_major_sf": False, "do_cpu_sync": waits}
    options |= {"num_experts": case.experts, "num_max_tokens_per_rank": MOST, "expert_alignment": 128}
    got = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **options, do_expand=expanded)
    rows, idx, factors, handle, event = got
    _wait(event, False)
    assert factors is not None
    ends = [0, *handle.psum_num_recv_tokens_per_expert.tolist()]
    if expanded:
        assert idx is None and factors.shape == (len(rows),)
        spans = [(-(-before // 128) * 128, end) for before, end in pairwise(ends)]
        made = case.by_expert(rows, spans, factors)
        combined, _, event = buffer.combine(made, handle=handle, topk_weights=None)
    else:
        assert idx is not None and handle.psum_num_recv_tokens_per_scaleup_rank is not None
        real = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
        made = case.by_rank(rows[:real], idx[:real], factors[:real])
        assert [end - before for before, end in pairwise(ends)] == case.counts(128)
        combined, _, event = buffer.combine(made, handle=handle, topk_weights=factors[:real])
    _wait(event, False)
    _near(output=(combined, case.output()))


@on_ranks("most_ranks")
def test_deepspeed(rank: int, size: int, seed: int) -> None:
    """AutoEP's DeepEPExchange and what its layer does with it: forwards, recomputed, and backwards."""
    how: Options = {"num_allocated_qps": 16, "allow_hybrid_mode": True, "explicitly_destroy": True}
    buffer = ElasticBuffer(dist.group.WORLD, **SIZES, use_fp8_dispatch=False, **how)
    case = _Case(rank, size, seed)
    some: Options = {"num_sms": 12, "num_qps": buffer.get_theoretical_num_qps(12)}
    x, ids, weights = case.mine
    given: Options = {"topk_idx": ids.to(deep_ep.topk_idx_t), "topk_weights": weights.float()}
    options: Options = {"num_experts": case.experts, "do_expand": True, "expert_alignment": 1, **some}
    rows, _, factors, handle, _ = buffer.dispatch(x, **given, **options)
    assert factors is not None and len(rows) == len(factors) == handle.num_expanded_tokens
    rows.requires_grad_(), factors.requires_grad_()
    ends = [0, *handle.psum_num_recv_tokens_per_expert.tolist()]
    made = case.by_expert(rows, [*pairwise(ends)], factors)
    y, _, _ = buffer.combine(made, handle=handle, num_sms=12)
    along: Options = {"handle": handle, "num_sms": 12, "do_expand": handle.do_expand}
    again, _, factors_again, _, _ = buffer.dispatch(x, topk_weights=weights.float(), **along)
    grad_y = x.sign()
    grad_made, *_ = buffer.dispatch(grad_y, **along)
    same, *_ = buffer.dispatch(grad_y, handle=handle, **some)
    _same(again=(again, rows), factors=(factors_again, factors), same=(same, grad_made))
    grad_rows, grad_factors = torch.autograd.grad(made, (rows, factors), grad_made)
    given = {"topk_weights": grad_factors.contiguous(), "num_sms": 12}
    grad_x, grad_weights, _ = buffer.combine(grad_rows.contiguous(), handle=handle, **given)
    buffer.destroy()

    inputs = x.float().requires_grad_(), weights.clone().requires_grad_()
    wanted = _mixed(inputs[0], ids, inputs[1], case.scales_EH)
    grads = torch.autograd.grad(wanted, inputs, grad_y.float())
    assert grad_weights is not None
    _near(y=(y, wanted), x=(grad_x, grads[0]), weights=(grad_weights, grads[1]))


@_needs("deepspeed")
@_needs("transformers")
@on_ranks("most_ranks")
def test_deepspeed_itself(rank: int, size: int, seed: int) -> list[str]:
    """DeepSpeed's own layer with `comm_backend` "deepep", unchanged, beside the block of transformers that it
    replaces, also with checkpointing. Its barrier is left out: its own process groups are not there."""
    from deepspeed.module_inject import auto_ep, auto_ep_comm, auto_ep_config, auto_ep_layer
    from torch.utils.checkpoint import checkpoint
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": _experts(size)}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, initializer_range=0.3)).to(torch.bfloat16)
    section = {"enabled": True, "autoep_size": size, "use_grouped_mm": False, "comm_backend": "deepep"}
    config = auto_ep_config.parse_autoep_config({**section, "comm_max_tokens_per_rank": MOST})
    spec, block = auto_ep.AutoEP(model, config).ep_parser()[0], model.model.layers[0].mlp
    layer = auto_ep_layer.AutoEPMoELayer(spec, block, size, rank, config)
    layer.ep_group = dist.group.WORLD
    x = torch.randn(1, _tokens(rank), 64, generator=torch.Generator().manual_seed(seed + rank)).bfloat16()
    results: list[tuple[Tensor, ...]] = []
    with mock.patch.object(auto_ep_layer.dist, "barrier") as barrier:
        for forward in (block, layer, lambda each: checkpoint(layer, each, use_reentrant=False)):
            inputs = x.clone().requires_grad_()
            gate = block.gate if not results else layer.router.gate
            y = forward(inputs)
            grads = torch.autograd.grad(y.float().square().sum(), (inputs, gate.weight))
            results.append((y.detach(), *grads))
    barrier.assert_called_once()  # when the layer made its buffer
    auto_ep_comm.destroy_exchanges(layer)
    names, (wanted, *found) = ("y", "x", "gate"), results
    return [
        f"{name} {at}"
        for at, each in enumerate(found)
        for name, a, b in zip(names, each, wanted, strict=True)
        if a.numel() and float((a - b).abs().max()) > 0.05 * float(b.abs().max())
    ]
