"""The forward and the backward of a layer's experts, with their dispatches and combines.

Rows are expert-major: one per (token, expert). For a row p of expert e and token t, with input x, routing
weight w and the gradient dy of the result:
    h = x W_in[e]    z = w act(h)    y_t = sum over p of z W_out[e]
    dz = dy_t W_out[e]^T    dh = w dz act'(h)    dw = <dz, act(h)>    dx_t = sum over p of dh W_in[e]^T
    dW_out[e] = sum of z^T dy_t    dW_in[e] = sum of x^T dh
With w applied before the second product, no backward needs that product's result, and dy travels unchanged.

    stream   forward                             backward
    comm     dispatch              combine      dispatch_grad                         combine_grad
    compute  shared    fc1, fc2                 shared_grad    fc2_dgrad, fc2_wgrad,                fc1_wgrad
                                                               fc1_dgrad

"fc1", the first product, ends with the activation, "fc2_dgrad" with the activation's backward; both apply the
routing weights. fc2_wgrad comes before fc1_dgrad, so that the rows of dispatch_grad are freed early. A
transfer with nothing to overlap runs on the caller's stream, which costs the host less.

For autograd a forward is one function, _Keep, and without gradients none. If hooks handle the tensors that
autograd saves, it is two: _Keep saves tensors and runs the backward, _Finish returns the result. So
torch.utils.checkpoint can stop its recomputation before the result. With `keep_plans` a recomputation follows
the first forward's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from moecomm.autograd.deferred import Operands, Pending
from moecomm.autograd.in_place import gradient_to_add_to, is_wanted, parameter_of
from moecomm.backends.opened import call_or_tell
from moecomm.communicator import Communicator
from moecomm.device.cuda_device import CudaDevice
from moecomm.kernels.activation import activate, activate_backward
from moecomm.kernels.first_order import first_order
from moecomm.kernels.outside_autocast import without_autocast
from moecomm.kernels.products import Products
from moecomm.nn.config import Keep
from moecomm.nn.experts import shared_gates
from moecomm.nn.router import Choices
from moecomm.overlap import SideStream, Stages
from moecomm.overlap.stages import COMM
from moecomm.types import DispatchOutput, Handle


class Weights(NamedTuple):
    """Weights and biases of the local experts: w_in (L, H, I), w_out (L, F, H), b_in (L, I), b_out (L, H);
    of the shared experts: shared_in (H, F' or 2F'), shared_out (F', H), shared_gate (H,). None: absent."""

    w_in: Tensor
    w_out: Tensor
    shared_in: Tensor | None
    shared_out: Tensor | None
    shared_gate: Tensor | None = None
    b_in: Tensor | None = None
    b_out: Tensor | None = None


class Plans(NamedTuple):
    """The dispatches of a layer's forwards, in order, that a checkpoint with `keep_plans` keeps."""

    states: list[DispatchState]
    choices: list[Choices]
    again: bool
    """True while the forwards are being recomputed."""


class PassContext(NamedTuple):
    """The arguments of a forward or backward pass of the experts, apart from tensors with gradients."""

    comm: Communicator
    topk_idx_TK: Tensor
    activation: str
    products: Products
    layer: Any = None
    """The MoELayer, whose number distinguishes its dispatches from those of other layers; None if the experts
    belong to another kind of layer."""
    capacity: int | None = None
    keep: Keep = "all"
    keep_shared: bool = False
    waits_on_host: bool = False
    """True: after a pass that used the communicator's stream the host waits for the device (`wait_on_host`),
    so that memory that both streams used is free again at once."""
    deferred: list[Pending] | None = None
    """The list of deferred weight gradients to which the backward adds; None: it computes them at once."""
    recorded: dict[str, Stages] | None = None
    """Where the pass stores its measured stages, as "forward" or "backward"; None: nothing is measured."""
    seen: Callable[[DispatchOutput], None] | None = None
    """A function of a GraphedStep, called with the dispatch's output; or None."""
    gradient_scale: float = 1.0
    """Factor of the gradients of the experts' weights and biases, unless they are deferred."""

    def stages(self) -> Stages:
        """Returns the Stages of a new pass, which measure times if the pass is recorded."""
        return Stages(self.comm.device, record=self.recorded is not None)

    def wait_on_host(self, side: SideStream) -> None:
        """Waits for the current stream if `waits_on_host` and `side.separate` hold; never in a capture."""
        if self.waits_on_host and side.separate:
            gpu = CudaDevice(self.comm.device.index)
            if not gpu.capturing():
                gpu.stream().synchronize()


# -- forward -----------------------------------------------------------------------------------------------


class DispatchState(NamedTuple):
    """The result of a dispatch without its rows. Rows can be sent again along its plan, `handle`."""

    handle: Handle
    weights_P: Tensor
    groups: Tensor
    """The groups of rows in the form that the products take; the last element is the number of rows."""


class Forward:
    """One forward: `start` keeps what a backward needs, and `result` returns y. With the state of an earlier
    dispatch both follow its plan: `start` computes only what a backward needs, `result` the rest."""

    x_TH: Tensor
    topk_weights_TK: Tensor
    weights: Weights
    in_two = False  # True: _Finish returns y, and _Keep a placeholder that nothing reads
    keeps = True  # False: no backward follows

    def __init__(self, context: PassContext, state: DispatchState | None) -> None:
        self.context, self._state = context, state
        self._rows_PH: Tensor | None = None
        self._inner_PI: Tensor | None = None
        self._z_PF: Tensor | None = None
        self._shared_inner_TI: Tensor | None = None
        self._y_TH: Tensor | None = None

    def start(self, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights) -> None:
        """Computes the whole forward, or, along a kept plan, only the tensors that a backward needs."""
        self.x_TH, self.topk_weights_TK, self.weights = x_TH, topk_weights_TK, weights
        with without_autocast(x_TH.device.type):
            if self._state is None:
                self._y_TH = call_or_tell(self.context.comm, self._run)
            else:
                call_or_tell(self.context.comm, self._again)

    def result(self) -> Tensor:
        """Returns y (T, H), computing it if needed."""
        if self._y_TH is not None:
            return self._y_TH
        with without_autocast(self.x_TH.device.type):
            return call_or_tell(self.context.comm, self._finish)

    @property
    def dispatched(self) -> bool:
        """True once the rows are dispatched: an error after that is not the dispatch's."""
        return self._state is not None

    @property
    def state(self) -> DispatchState:
        """The state of the dispatch, which must have run."""
        assert self._state is not None
        return self._state

    def _run(self) -> Tensor:
        """Runs the forward and returns y (T, H)."""
        context, weights, comm = self.context, self.weights, self.context.comm
        has_shared = weights.shared_in is not None
        stages = context.stages()
        side = SideStream(comm, wanted=has_shared)
        tokens = (self.x_TH, context.topk_idx_TK, self.topk_weights_TK)
        out: DispatchOutput | None = None
        shared_TH: Tensor | None = None

        with side, stages("dispatch_send", stream=COMM, communicates=True):
            if context.capacity is None and has_shared:
                receive = comm.begin_dispatch(*tokens, _layer=context.layer)
            else:
                out = comm.dispatch(*tokens, capacity=context.capacity, _layer=context.layer)
        if has_shared:
            with stages("shared"):
                self._shared_fc1()
                shared_TH = self._shared_fc2()
            if not context.keep_shared:
                self._shared_inner_TI = None
        if out is None:  # the host waits for the number of rows after it has issued the shared experts' work
            with side.receiving(), stages("dispatch_receive", stream=COMM, communicates=True):
                out = receive(directly=side.separate)
        assert out.weights is not None
        self._state = state = DispatchState(out.handle, out.weights, context.products.groups_of(out))
        side.join(out.tokens, state.weights_P, state.groups)
        if context.seen is not None:
            context.seen(out)
        self._rows_PH = out.tokens

        with stages("fc1"):
            inner_PI, z_PF = self._fc1()
        if context.keep == "all" and self.keeps:
            self._inner_PI = inner_PI
        del inner_PI
        with stages("fc2"):
            expert_rows_PH = self._fc2(z_PF)
        del z_PF
        with stages("combine", stream=COMM, communicates=True):
            y_TH = comm.combine(expert_rows_PH, out.handle)
        if shared_TH is not None:
            y_TH.add_(shared_TH)
        if context.recorded is not None:
            context.recorded["forward"] = stages
        context.wait_on_host(side)
        return y_TH

    def _again(self) -> None:
        """Recomputes the tensors that `kept` returns, along the plan of the earlier dispatch."""
        context, comm = self.context, self.context.comm
        has_shared = self.weights.shared_in is not None and context.keep_shared
        stages = context.stages()
        side = SideStream(comm, wanted=has_shared and context.keep != "nothing")
        if context.keep != "nothing":
            with side, stages("dispatch_again", stream=COMM, communicates=True):
                self._rows_PH = context.comm.redispatch(self.x_TH, self.state.handle)
        if has_shared:
            with stages("shared_again"):
                self._shared_fc1()
        side.join(self._rows_PH)
        if context.keep == "all":
            with stages("fc1_again"):
                self._inner_PI, self._z_PF = self._fc1()
        context.wait_on_host(side)

    def _finish(self) -> Tensor:
        """Computes y (T, H) from what `_again` has recomputed."""
        if self.context.keep == "nothing":
            self._rows_PH = self.context.comm.redispatch(self.x_TH, self.state.handle)
        z_PF, self._z_PF = self._z_PF, None
        if z_PF is None:
            _, z_PF = self._fc1()
        y_TH = self.context.comm.combine(self._fc2(z_PF), self.state.handle)
        if self.weights.shared_in is None:
            return y_TH
        if not self.context.keep_shared:
            self._shared_fc1()
        return y_TH.add_(self._shared_fc2())

    def kept(self, need_in: bool) -> tuple[Tensor | None, ...]:
        """Returns what a backward needs besides the weights (None if it does not): x, the experts' rows,
        their routing weights and groups, the first products of the shared experts and of the experts.
        `need_in`: whether w_in needs a gradient."""
        keep, state = self.context.keep, self.state
        needs_x = self.weights.shared_in is not None or keep == "nothing"
        needs_rows = keep != "nothing" and (need_in or keep == "rows")
        x_TH = self.x_TH if needs_x else None
        rows_PH = self._rows_PH if needs_rows else None
        return x_TH, rows_PH, state.weights_P, state.groups, self._shared_inner_TI, self._inner_PI

    def _fc1(self) -> tuple[Tensor, Tensor]:
        assert self._rows_PH is not None
        return self.context.products.gated_mm(
            self._rows_PH,
            self.weights.w_in,
            self.state.groups,
            self.state.weights_P,
            activation=self.context.activation,
            bias_LI=self.weights.b_in,
        )

    def _fc2(self, z_PF: Tensor) -> Tensor:
        weights, state = self.weights, self.state
        return self.context.products.grouped_mm(
            z_PF, weights.w_out, state.groups, bias_LB=weights.b_out, weights_P=state.weights_P
        )

    def _shared_fc1(self) -> None:
        assert self.weights.shared_in is not None
        self._shared_inner_TI = self.x_TH @ self.weights.shared_in

    def _shared_fc2(self) -> Tensor:
        inner_TI = self._shared_inner_TI
        assert inner_TI is not None and self.weights.shared_out is not None
        gates_T = shared_gates(self.x_TH, self.weights.shared_gate)
        return activate(inner_TI, gates_T, None, self.context.activation) @ self.weights.shared_out


# -- backward ----------------------------------------------------------------------------------------------


def _backward(ctx: Any, grad_y_TH: Tensor) -> tuple[Tensor | None, ...]:
    """Runs the backward of `_Keep` from the state in `ctx`, and returns gradients in the order of the inputs
    of `_Keep`."""
    context: PassContext = ctx.context
    comm, products, handle = context.comm, context.products, ctx.handle
    if context.layer is not None:
        context.layer._unsynchronized = True
    count = len(Weights._fields)
    saved: tuple[Any, ...] = ctx.saved_tensors
    w_in, w_out, shared_in, shared_out, shared_gate, b_in, b_out = saved[:count]  # Weights
    x_TH, rows_PH, weights_P, groups, shared_inner_TI, inner_PI = saved[count:]  # Forward.kept
    _, need_x, need_weights, need_in, need_out, *need_shared, need_b_in, need_b_out = ctx.needs_input_grad
    has_shared = shared_in is not None and (need_x or any(need_shared))
    needs_tokens = need_x or need_weights
    weights_now, scale = context.deferred is None, context.gradient_scale
    stages = context.stages()
    grad_x_TH = grad_weights_TK = grad_in_LHI = grad_out_LFH = grad_b_in_LI = grad_b_out_LH = None
    grad_shared: tuple[Tensor | None, ...] = (None, None, None, None)

    # Rows travel to the experts while the shared experts' gradients are computed.
    side = SideStream(comm, wanted=has_shared)
    with side, stages("dispatch_grad", stream=COMM, communicates=True):
        if context.keep == "nothing":
            rows_PH = comm.redispatch(x_TH, handle)
        grad_rows_PH = comm.redispatch(grad_y_TH, handle, gradients=True)
    if has_shared:
        if shared_inner_TI is None:
            with stages("shared_again"):
                shared_inner_TI = x_TH @ shared_in
        with stages("shared_grad"):
            shared = (shared_in, shared_out, shared_gate)
            grad_shared = _shared_backward(
                grad_y_TH, x_TH, shared, shared_inner_TI, context.activation, need_x, *need_shared
            )
    side.join(grad_rows_PH, rows_PH if context.keep == "nothing" else None)

    into_in, into_out = (
        gradient_to_add_to(ctx, number) if products.adds else None for number in (W_IN, W_OUT)
    )
    if context.keep != "all":
        with stages("fc1_again"):
            inner_PI = products.grouped_mm(rows_PH, w_in, groups, bias_LB=b_in)
    with stages("fc2_dgrad"):
        grad_inner_PI, grad_weights_P, z_PF = products.gated_mm_dgrad(
            grad_rows_PH,
            w_out,
            groups,
            inner_PI,
            weights_P,
            activation=context.activation,
            need_weights=need_weights,
            need_z=need_out,
        )
        if grad_weights_P is not None and b_out is not None:
            grad_weights_P.add_(products.bias_weights_grad(grad_rows_PH, b_out, groups))
        if need_b_in:
            grad_b_in_LI = products.bias_grad(grad_inner_PI, groups, scale=scale)
        if need_b_out:
            grad_b_out_LH = products.bias_grad(grad_rows_PH, groups, weights_P, scale=scale)
    del inner_PI, saved
    if context.deferred is not None and (need_in or need_out):
        count = grad_inner_PI.shape[0]
        of_in = of_out = None
        if need_in and is_wanted(ctx, W_IN):
            of_in = Operands(parameter_of(ctx, W_IN, w_in), rows_PH, grad_inner_PI)
        if z_PF is not None and is_wanted(ctx, W_OUT):
            of_out = Operands(parameter_of(ctx, W_OUT, w_out), z_PF, grad_rows_PH)
        if of_in is not None or of_out is not None:
            context.deferred.append(Pending(products, groups, count, of_in, of_out))
    if z_PF is not None and weights_now:
        with stages("fc2_wgrad"):
            grad_out_LFH = products.grouped_mm_wgrad(z_PF, grad_rows_PH, groups, into=into_out, scale=scale)
    del z_PF, grad_rows_PH

    if needs_tokens:
        with stages("fc1_dgrad"):
            grad_expert_rows_PH = products.grouped_mm_dgrad(grad_inner_PI, w_in, groups)
        with stages("combine_grad", stream=COMM, communicates=True):
            grad_x_TH, grad_weights_TK = comm.dispatch_backward(
                grad_expert_rows_PH, handle, grad_weights=grad_weights_P
            )
    if need_in and weights_now:
        with stages("fc1_wgrad"):
            grad_in_LHI = products.grouped_mm_wgrad(rows_PH, grad_inner_PI, groups, into=into_in, scale=scale)

    grad_shared_x_TH, *grad_shared_weights = grad_shared
    if grad_x_TH is not None and grad_shared_x_TH is not None:
        grad_x_TH.add_(grad_shared_x_TH)
    if context.recorded is not None:
        context.recorded["backward"] = stages
    context.wait_on_host(side)
    return (
        None,
        grad_x_TH if need_x else None,
        grad_weights_TK,
        grad_in_LHI,
        grad_out_LFH,
        *grad_shared_weights,
        grad_b_in_LI,
        grad_b_out_LH,
    )


W_IN, W_OUT = 2, 3
"""The positions of the experts' weights among the inputs of `_Keep`."""


def _shared_backward(
    grad_y_TH: Tensor,
    x_TH: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    inner_TI: Tensor,
    activation: str,
    need_x: bool,
    need_in: bool,
    need_out: bool,
    need_gate: bool,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x and of the weights shared_in, shared_out and shared_gate."""
    shared_in, shared_out, shared_gate = weights
    gates_T = shared_gates(x_TH, shared_gate)
    needs_gates = shared_gate is not None and (need_x or need_gate)
    grad_inner_TI, grad_gates_T, z_TF = activate_backward(
        grad_y_TH @ shared_out.t(), inner_TI, gates_T, None, activation, needs_gates, need_out
    )
    grad_x_TH = grad_inner_TI @ shared_in.t() if need_x else None
    grad_gate_H: Tensor | None = None
    if needs_gates:
        assert gates_T is not None and shared_gate is not None
        grad_logits_T = torch.ops.aten.sigmoid_backward(grad_gates_T, gates_T).to(x_TH.dtype)
        if grad_x_TH is not None:
            grad_x_TH.addr_(grad_logits_T, shared_gate)
        grad_gate_H = x_TH.t() @ grad_logits_T if need_gate else None
    return (
        grad_x_TH,
        x_TH.t() @ grad_inner_TI if need_in else None,
        z_TF.t() @ grad_y_TH if need_out else None,
        grad_gate_H,
    )


# -- autograd and checkpoints ------------------------------------------------------------------------------


# If torch.compile gives up on a forward, it compiles the functions called there, but must not compile this.
@_disable_dynamo
def run_experts(
    context: PassContext, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights, plans: Plans | None
) -> Tensor:
    """Returns (T, H): the sum over a token's experts of weight * expert(x), plus the shared experts' result.
    Differentiable once. x_TH: in the weights' dtype; topk_weights_TK: float32 (float64 for float64 rows);
    plans: those of the layer within a checkpoint with `keep_plans`."""
    state = plans.states.pop(0) if plans is not None and plans.again and plans.states else None
    forward = Forward(context, state)
    y_TH = run_forward(forward, x_TH, topk_weights_TK, weights)
    if plans is not None and not plans.again:
        plans.states.append(forward.state)
    return y_TH


def run_forward(forward: Forward, x_TH: Tensor, topk_weights_TK: Tensor, weights: Weights) -> Tensor:
    """Returns the result of `run_experts`, computed by `forward`, a Forward that has not run."""
    if not torch.is_grad_enabled():  # a function of autograd would take the host 20 us all the same
        forward.keeps = False
        forward.start(x_TH, topk_weights_TK, weights)
        return forward.result()
    forward.in_two = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    kept_TH: Tensor = _Keep.apply(forward, x_TH, topk_weights_TK, *weights)  # type: ignore[no-untyped-call]
    # One function if possible: a second one takes the host 30 us.
    return _Finish.apply(forward, kept_TH) if forward.in_two else kept_TH  # type: ignore[no-untyped-call]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, x_TH: Tensor, topk_weights_TK: Tensor, *weights: Tensor | None
    ) -> Tensor:
        w_in, w_out, *others = weights
        assert w_in is not None and w_out is not None
        forward.start(x_TH, topk_weights_TK, Weights(w_in, w_out, *others))
        ctx.context, ctx.handle = forward.context, forward.state.handle
        ctx.save_for_backward(*weights, *forward.kept(ctx.needs_input_grad[3]))
        return x_TH.new_empty(()).expand(x_TH.shape) if forward.in_two else forward.result()

    @staticmethod
    @_disable_dynamo  # see moecomm/autograd/functions.py
    @first_order
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_y_TH)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, placeholder_TH: Tensor) -> Tensor:
        return forward.result()

    @staticmethod
    def backward(ctx: Any, grad_y_TH: Tensor) -> tuple[None, Tensor]:
        return None, grad_y_TH
