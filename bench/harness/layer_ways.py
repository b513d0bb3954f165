"""The ways through a layer that are timed: moecomm's, its parts alone, and the baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, nn

import moecomm
from moecomm.nn import ActivationPool, GraphedStep, MoEConfig, MoELayer, Routing
from moecomm.overlap import interleave

from . import layer_reference as named
from .layer_case import Experts, LayerCase
from .layer_options import (
    BASELINE,
    COMM,
    COMPUTE,
    FIXED,
    FP8_ANEW,
    FP8_COMPUTE,
    FP8_OVERLAPPED,
    FP8_WAYS,
    GRAPH,
    GRAPH_WAYS,
    GRAPHED,
    INTERLEAVED,
    OVERLAPPED,
    PLAIN,
    SERIAL,
    TUNED,
    LayerOptions,
)
from .layer_presets import Preset
from .paths import NotRun
from .plain_layer import PlainLayer, swiglu_experts
from .product import Captured

Keep = Literal["all", "rows", "nothing"]
_PLACEHOLDER_FFN, _PLACEHOLDER_FP8 = 1, 16
_POOL_MORE = 64 << 20  # for pages that are not full


@dataclass(frozen=True, kw_only=True)
class Way:
    """`forward` and `step`, which is forward and backward, are what is timed; a step returns its result and
    gradients by the names of layer_reference.

    `before` runs, untimed, before each timed call; `settle` waits, and raises what the device has found.
    `layer` records timelines. `waited` gives the seconds that all steps so far have waited for the GPU, where
    they wait at all (`blocks`) and that is known.
    """

    name: str
    forward: Callable[[], object]
    step: Callable[[], dict[str, Tensor]]
    before: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    computes: bool = True
    layer: MoELayer | None = None
    blocks: bool = False
    waited: Callable[[], float] | None = None
    keeps_memory: bool = False  # its memory is there before a step, too
    note: str = ""
    fp8: bool = False  # its products are: another bound for what they give


Make = Callable[[], Way]


class _FixedRouting(nn.Module):
    """In the place of a router: the routing that the case has, so that no way's time has a router in it."""

    def __init__(self, case: LayerCase) -> None:
        super().__init__()
        self._routing = Routing(
            topk_idx_TK=case.topk_idx_TK,
            topk_weights_TK=case.weights_TK,
            scores_TE=torch.empty(0, case.preset.experts, device=case.device),
            losses={},
            tokens_per_expert_E=torch.zeros(case.preset.experts, dtype=torch.int64, device=case.device),
        )

    def forward(self, x_TH: Tensor, seq_len: int | None = None) -> Routing:
        return self._routing


def communicator(options: LayerOptions, preset: Preset) -> moecomm.Communicator:
    """Over the default group, for every point of a preset."""
    return moecomm.Communicator(
        num_experts=preset.experts,
        hidden=preset.hidden,
        top_k=preset.topk,
        max_tokens=options.most_tokens,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        num_sms=options.num_sms if options.device == "cuda" else options.threads,
        timeout=timedelta(seconds=options.timeout),
    )


def make_layer(
    comm: moecomm.Communicator,
    case: LayerCase,
    *,
    overlap: bool,
    keep: Keep = "all",
    capacity: int | None = None,
    parts: int = 1,
    fp8: bool = False,
) -> MoELayer:
    """A layer with the case's routing and experts, whose weights all layers share."""
    config = MoEConfig(
        hidden=case.preset.hidden,
        # A layer draws its weights on the CPU, which would take minutes: they are put in afterwards.
        ffn_hidden=_PLACEHOLDER_FP8 if fp8 else _PLACEHOLDER_FFN,
        num_experts=case.preset.experts,
        top_k=case.preset.topk,
        pre_softmax=True,
        dtype=case.dtype,
        expert_precision="fp8" if fp8 else None,
    )
    beside = case.options.beside_sms
    layer = MoELayer(config, comm, overlap=overlap, keep=keep, beside_sms=beside)
    experts: Experts = case.experts
    layer.experts.w_in, layer.experts.w_out = experts.w_in, experts.w_out
    layer.add_module("router", _FixedRouting(case))
    layer.capacity = capacity
    return layer.eval()


def _step(case: LayerCase, forward: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Forward and backward of a whole layer."""
    return _backward(case, forward())


def _backward(case: LayerCase, y_TH: Tensor) -> dict[str, Tensor]:
    inputs = (case.x_TH, case.weights_TK, case.experts.w_in, case.experts.w_out)
    dx_TH, dweights_TK, dw_in, dw_out = torch.autograd.grad(y_TH, inputs, case.dy_TH)
    # Detached, so that what the forward has kept goes with this call.
    return {
        named.Y: y_TH.detach(),
        named.DX: dx_TH,
        named.DWEIGHTS: dweights_TK,
        named.DW_IN: dw_in,
        named.DW_OUT: dw_out,
    }


def compute_way(name: str, comm: moecomm.Communicator, case: LayerCase, *, fp8: bool = False) -> Way:
    """The experts alone, as moecomm.nn has them, on rows that are here already."""
    experts = make_layer(comm, case, overlap=False, fp8=fp8).experts

    def forward() -> Tensor:
        rows_PH: Tensor = experts(case.rows_PH, case.offsets_L, case.weights_P, has_tail=False)
        return rows_PH

    def step() -> dict[str, Tensor]:
        out_PH = forward()
        inputs = (case.rows_PH, case.weights_P, experts.w_in, experts.w_out)
        drows_PH, dweights_P, dw_in, dw_out = torch.autograd.grad(out_PH, inputs, case.dy_PH)
        return {
            named.ROWS_OUT: out_PH.detach(),
            named.DROWS: drows_PH,
            named.DROW_WEIGHTS: dweights_P,
            named.DW_IN: dw_in,
            named.DW_OUT: dw_out,
        }

    return Way(name=name, forward=forward, step=step, fp8=fp8)


def plain_compute_way(case: LayerCase) -> Way:
    """The experts alone in torch. The weights multiply at home, in a plain framework: here the gradient comes
    multiplied already."""
    w_in, w_out = case.experts.w_in, case.experts.w_out

    def forward() -> Tensor:
        return swiglu_experts(case.rows_PH, w_in, w_out, case.offsets_L)

    def step() -> dict[str, Tensor]:
        out_PH = forward()
        inputs = (case.rows_PH, w_in, w_out)
        drows_PH, dw_in, dw_out = torch.autograd.grad(out_PH, inputs, case.weighted_dy_PH)
        return {
            named.PLAIN_ROWS_OUT: out_PH.detach(),
            named.DROWS: drows_PH,
            named.DW_IN: dw_in,
            named.DW_OUT: dw_out,
        }

    return Way(name=PLAIN, forward=forward, step=step)


def communication_way(comm: moecomm.Communicator, case: LayerCase) -> Way:
    """The four transfers of a step and nothing between them: experts hand back what they get."""

    def move() -> tuple[moecomm.DispatchOutput, Tensor]:
        out = comm.dispatch(case.x_TH.detach(), case.topk_idx_TK, case.weights_TK.detach())
        return out, comm.combine(out.tokens, out.handle)

    def step() -> dict[str, Tensor]:
        out, y_TH = move()
        dy_PH = comm.redispatch(case.dy_TH, out.handle)
        dx_TH, dweights_TK = comm.dispatch_backward(dy_PH, out.handle, grad_weights=out.weights)
        assert dweights_TK is not None
        return {
            named.MOVED: out.tokens,
            named.MOVED_Y: y_TH,
            named.MOVED_DY: dy_PH,
            named.MOVED_DX: dx_TH,
            named.MOVED_DWEIGHTS: dweights_TK,
        }

    return Way(
        name=COMM,
        forward=move,
        step=step,
        before=case.fresh_ids,
        settle=_settle(comm, case),
        computes=False,
        blocks=True,
        waited=_waited(comm),
    )


def layer_way(
    name: str,
    comm: moecomm.Communicator,
    case: LayerCase,
    *,
    overlap: bool = True,
    keep: Keep = "all",
    capacity: int | None = None,
    parts: int = 1,
    fp8: bool = False,
    anew: bool = False,
) -> Way:
    """A MoELayer as a training loop calls it, behind its router. `anew`: its weights are others each time."""
    layer = make_layer(comm, case, overlap=overlap, keep=keep, capacity=capacity, parts=parts, fp8=fp8)

    def forward() -> Tensor:
        y_TH: Tensor = layer(case.x_TH)
        return y_TH

    def before() -> None:
        case.fresh_ids()
        if anew:
            layer.experts.forget_quantized()

    return Way(
        name=name,
        forward=forward,
        step=lambda: _step(case, forward),
        before=before,
        settle=_settle(comm, case),
        layer=layer if overlap else None,
        blocks=capacity is None,
        waited=_waited(comm),
        note="" if capacity is None else f"{capacity} rows",
        fp8=fp8,
    )


def graph_way(comm: moecomm.Communicator, case: LayerCase) -> Way:
    """The layer with a fixed number of rows, replayed from a graph of its forward and one of its step."""
    fixed = layer_way(FIXED, comm, case, capacity=case.capacity)
    forward, step = Captured(lambda: _detached(fixed.forward())), Captured(fixed.step)
    return Way(
        name=GRAPH,
        forward=forward.replay,
        step=step.replay,
        before=case.fresh_ids,
        settle=fixed.settle,
        keeps_memory=True,
        note=fixed.note,
    )


def interleaved_way(comm: moecomm.Communicator, case: LayerCase) -> Way:
    """The backward of the forward before, and beside it the layer's forward: of two microbatches."""
    layer = make_layer(comm, case, overlap=True)
    earlier: list[Tensor] = []

    def forward() -> Tensor:
        y_TH: Tensor = layer(case.x_TH)
        return y_TH

    def before() -> None:
        case.fresh_ids()
        earlier[:] = [forward()]

    def step() -> dict[str, Tensor]:
        earlier_TH = earlier.pop() if earlier else forward()
        results, y_TH = interleave(lambda: _backward(case, earlier_TH), forward)
        return {**results, named.Y: y_TH.detach()}

    return Way(
        name=INTERLEAVED,
        forward=forward,
        step=step,
        before=before,
        settle=_settle(comm, case),
        blocks=True,  # and nobody knows how long: two threads wait
    )


def graphed_way(comm: moecomm.Communicator, case: LayerCase) -> Way:
    """The layer as GraphedStep runs it; its forward alone has no pool, as there is nothing to keep."""
    layer = make_layer(comm, case, overlap=True)
    experts, item, headroom = layer.experts, case.dtype.itemsize, case.options.headroom
    a_row = (case.preset.hidden + 2 * case.preset.ffn) * item

    def step() -> dict[str, Tensor]:
        results = _step(case, lambda: layer(case.x_TH))
        # Where a backward leaves them, and GraphedStep does.
        experts.w_in.grad, experts.w_out.grad = results.pop(named.DW_IN), results.pop(named.DW_OUT)
        return results

    def replay() -> dict[str, Tensor]:
        results: dict[str, Tensor] = graphed()
        assert experts.w_in.grad is not None and experts.w_out.grad is not None
        results |= {named.DW_IN: experts.w_in.grad, named.DW_OUT: experts.w_out.grad}
        experts.w_in.grad = experts.w_out.grad = None
        return results

    pool = ActivationPool(case.device, case.capacity * a_row + _POOL_MORE)
    graphed = GraphedStep(step, layer, pool=pool, headroom=headroom)
    forward = GraphedStep(lambda: _detached(layer(case.x_TH)), layer, headroom=headroom)
    return Way(
        name=GRAPHED,
        forward=forward,
        step=replay,
        before=case.fresh_ids,
        settle=_settle(comm, case),
        blocks=True,
        keeps_memory=True,
        note=f"{graphed.capacities[0]} rows",
    )


def baseline_way(case: LayerCase, *, tuned: bool) -> Way:
    """The layer of a plain framework."""
    layer = PlainLayer(case.preset.experts, tuned=tuned)

    def forward() -> Tensor:
        return layer.forward(
            case.x_TH, case.topk_idx_TK, case.weights_TK, case.experts.w_in, case.experts.w_out
        )

    return Way(
        name=TUNED if tuned else BASELINE,
        forward=forward,
        step=lambda: _step(case, forward),
        before=case.fresh_ids,
        blocks=True,
        note="nccl" if case.device.type == "cuda" else "gloo",
    )


def keep_name(keep: str) -> str:
    """What overlapped is called that keeps this."""
    return OVERLAPPED if keep == "all" else f"{OVERLAPPED}, keep {keep}"


def parts_name(parts: int) -> str:
    """What overlapped is called whose rows travel in so many parts."""
    return OVERLAPPED if parts == 1 else f"{OVERLAPPED}, {parts} parts"


def makers(comm: moecomm.Communicator, case: LayerCase, *, graphs: bool) -> dict[str, Make]:
    """How each wanted way is made, by its name, in the order of the table; `graphs`: those around replay."""
    made: dict[str, Make] = {
        COMPUTE: lambda: compute_way(COMPUTE, comm, case),
        PLAIN: lambda: plain_compute_way(case),
        COMM: lambda: communication_way(comm, case),
        SERIAL: lambda: layer_way(SERIAL, comm, case, overlap=False),
        OVERLAPPED: lambda: layer_way(OVERLAPPED, comm, case),
        **{
            keep_name(keep): _keeping(comm, case, keep)
            for keep in ("rows", "nothing")
            if keep in case.options.keeps and not graphs
        },
        **{
            parts_name(parts): _in_parts(comm, case, parts)
            for parts in case.options.parts
            if parts > 1 and not graphs
        },
        INTERLEAVED: lambda: interleaved_way(comm, case),
        FP8_COMPUTE: lambda: compute_way(FP8_COMPUTE, comm, case, fp8=True),
        FP8_OVERLAPPED: lambda: layer_way(FP8_OVERLAPPED, comm, case, fp8=True),
        FP8_ANEW: lambda: layer_way(FP8_ANEW, comm, case, fp8=True, anew=True),
        FIXED: lambda: layer_way(FIXED, comm, case, capacity=case.capacity),
        GRAPH: lambda: graph_way(comm, case),
        GRAPHED: lambda: graphed_way(comm, case),
        BASELINE: lambda: baseline_way(case, tuned=False),
        TUNED: lambda: baseline_way(case, tuned=True),
    }
    wanted = GRAPH_WAYS if graphs else case.options.ways
    kept = ("all" in case.options.keeps and 1 in case.options.parts) or graphs
    return {
        name: make
        for name, make in made.items()
        if (name in wanted and (kept or name != OVERLAPPED))
        or (OVERLAPPED in wanted and name.startswith(f"{OVERLAPPED}, "))
    }


def _keeping(comm: moecomm.Communicator, case: LayerCase, keep: Keep) -> Make:
    return lambda: layer_way(keep_name(keep), comm, case, keep=keep)


def _in_parts(comm: moecomm.Communicator, case: LayerCase, parts: int) -> Make:
    return lambda: layer_way(parts_name(parts), comm, case, parts=parts)


def why_not(name: str, device: torch.device) -> NotRun | None:
    """Why a way cannot be on this device."""
    if name in (GRAPH, GRAPHED) and device.type != "cuda":
        return NotRun(name, "CUDA graphs are of GPUs")
    if name in FP8_WAYS and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            return NotRun(name, f"needs compute capability 9.0, this is {major}.{minor}")
    return None


def _detached(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result.detach()


def _waited(comm: moecomm.Communicator) -> Callable[[], float]:
    return lambda: comm.stats().get("host_wait_seconds", 0.0)


def _settle(comm: moecomm.Communicator, case: LayerCase) -> Callable[[], None]:
    def settle() -> None:
        if case.device.type == "cuda":
            torch.cuda.synchronize()
        comm.check()

    return settle
