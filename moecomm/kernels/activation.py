"""The activation of the experts' feed-forward networks, times the routing weight, differentiable:

    z[p, f] = weights[p] * act(inner[p])[f]

A token's result is the sum over its experts of weight * (act(x W_in) W_out), so the weight may be applied
before the second product. Then the combine needs no weights, and the backward no combined rows.

Forward and backward are each one pass over memory on CUDA tensors (csrc/kernels/experts/activation.cu), and a
few torch operations elsewhere. Both compute in float32 (float64 for float64) and round once.

Shape letters here: P rows, B rows of a block, L groups, F columns of the result ("ffn width"), I of `inner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.functional import silu

import moecomm._C as _C
from moecomm.arguments import require_ends, weight_dtype
from moecomm.compiled import outside_graph
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import loading
from moecomm.kernels.first_order import first_order
from moecomm.setup.memory_plan import CUDA_DTYPES, NATIVE_DTYPES

INPUTS = {"swiglu": 2, "swiglu_interleaved": 2, "swiglu_clamped": 2, "gelu": 1}
"""The ratio I / F of each activation."""
INTERLEAVED = ("swiglu_interleaved", "swiglu_clamped")
"""The activations with gates in the even columns and up values in the odd ones."""
_ALPHA, _LIMIT = 1.702, 7.0
"""The factor in the sigmoid and the limit of values in swiglu_clamped, as in gpt-oss."""


@outside_graph
def weighted_activation(
    inner_PI: Tensor, weights_P: Tensor | None = None, ends_L: Tensor | None = None, *, activation: str
) -> Tensor:
    """Returns z_PF of inner's dtype, differentiable in `inner_PI` and `weights_P`.

    inner: bfloat16, float16, float32; float64 except on CUDA. weights: float32 (float64 for float64 inner);
    without them all are 1. ends: int32 cumulative ends of groups of rows, on inner's device; the host does
    not wait. Rows from ends[-1] on, and their gradients, are unspecified on CUDA tensors, zero elsewhere.
    activation: as in MoEConfig; swiglu (arXiv 2002.05202), the exact gelu (arXiv 1606.08415). Raises
    InvalidArgument; Unsupported for CUDA tensors of float64, and where this build has no CUDA part. A graph
    of torch.compile ends before a call.
    """
    return _Activation.apply(inner_PI, weights_P, ends_L, activation)  # type: ignore[no-untyped-call]


def activate(inner_PI: Tensor, weights_P: Tensor | None, ends_L: Tensor | None, activation: str) -> Tensor:
    """Computes `weighted_activation` without autograd. Not for torch.compile."""
    width = _width(inner_PI, weights_P, ends_L, activation)
    z_PF = inner_PI.new_empty(inner_PI.shape[0], width)
    if inner_PI.is_cuda:
        _launch("activation", inner_PI, weights_P, ends_L, width, activation, z_PF)
        return z_PF
    for block in _blocks(inner_PI):
        value_BF = _value(_parts(inner_PI[block], activation), activation)
        z_PF[block] = _weigh(value_BF, weights_P, block)
    _zero_others(z_PF, ends_L)
    return z_PF


def activate_backward(
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    need_weights: bool,
    need_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the backward of `weighted_activation`: (grad_inner_PI, grad_weights_P, z_PF). Not for
    torch.compile.

    grad_weights[p] is the sum over f of grad_z[p, f] * act(inner[p])[f], in the weights' dtype and an order
    that depends on F and the dtype alone; z has the bits of the forward. Results that are not needed are
    empty.
    """
    width = _width(inner_PI, weights_P, ends_L, activation, grad_z_PF)
    grad_inner_PI, grad_weights_P, z_PF = results = _new_gradients(inner_PI, width, need_weights, need_z)
    if inner_PI.is_cuda:
        grad_z_PF = grad_z_PF.contiguous()
        _launch("activation_backward", inner_PI, weights_P, ends_L, width, activation, grad_z_PF, *results)
        return results
    exact = weight_dtype(inner_PI.dtype)
    for block in _blocks(inner_PI):
        parts = _parts(inner_PI[block], activation)
        grad_BF = grad_z_PF[block].contiguous().to(exact)
        scaled_BF = grad_BF if weights_P is None else grad_BF * weights_P[block, None]
        grad_parts = _split(grad_inner_PI[block], activation)
        value_BF = _gradients_and_value(grad_parts, scaled_BF, parts, activation)
        if need_weights:
            grad_weights_P[block] = (grad_BF * value_BF).sum(dim=1)
        if need_z:
            z_PF[block] = _weigh(value_BF, weights_P, block)
    for result in results:
        _zero_others(result, ends_L)
    return results


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Loads the activation's kernels for a dtype onto a CUDA device; see `loading.prepare`. Raises
    Unsupported for a dtype without kernels."""
    if device.type == "cuda" and dtype not in CUDA_DTYPES:
        raise Unsupported(
            f"the activation of {dtype} on {device} has no kernels, expected "
            f"{', '.join(map(str, CUDA_DTYPES))}: use float32 there, or the CPU for float64"
        )
    loading.prepare("activation", device, dtype)


# -- arguments ---------------------------------------------------------------------------------------------


def _width(
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    grad_z_PF: Tensor | None = None,
) -> int:
    """Checks shapes, dtypes and devices and returns F."""
    if activation not in INPUTS:
        raise InvalidArgument(f"activation is {activation!r}, expected one of {', '.join(INPUTS)}")
    if inner_PI.dtype not in NATIVE_DTYPES:
        raise InvalidArgument(
            f"inner is {inner_PI.dtype}, expected one of {', '.join(map(str, NATIVE_DTYPES))}"
        )
    inputs = INPUTS[activation]
    if inner_PI.dim() != 2 or inner_PI.shape[1] < inputs or inner_PI.shape[1] % inputs != 0:
        raise InvalidArgument(
            f"inner has shape {tuple(inner_PI.shape)}, expected (rows, {'2F' if inputs == 2 else 'F'}) for "
            f"{activation}, with F at least 1"
        )
    rows, width = inner_PI.shape[0], inner_PI.shape[1] // inputs
    if weights_P is not None:
        _require("weights", weights_P, (rows,), weight_dtype(inner_PI.dtype), inner_PI.device)
    if ends_L is not None:
        require_ends(ends_L, inner_PI.device, "inner")
    if grad_z_PF is not None:
        _require("grad_z", grad_z_PF, (rows, width), inner_PI.dtype, inner_PI.device)
    return width


def _require(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if value.dim() != len(shape) or tuple(value.shape) != shape:
        raise InvalidArgument(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    if value.dtype != dtype:
        raise InvalidArgument(f"{name} is {value.dtype}, expected {dtype}")
    if value.device != device:
        raise InvalidArgument(f"{name} is on {value.device}, expected {device}, where inner is")


def _new_gradients(
    inner_PI: Tensor, width: int, need_weights: bool, need_z: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous tensors for the backward's results, empty ones for those that are not needed."""
    rows = inner_PI.shape[0]
    return (
        inner_PI.new_empty(inner_PI.shape),
        inner_PI.new_empty(rows if need_weights else 0, dtype=weight_dtype(inner_PI.dtype)),
        inner_PI.new_empty((rows, width) if need_z else (0,)),
    )


# -- on CUDA tensors ---------------------------------------------------------------------------------------


def _launch(
    name: str,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    width: int,
    activation: str,
    *others: Tensor,
) -> None:
    """Launches a kernel of the extension on the current stream of inner's device. Empty tensors count as
    absent."""
    if inner_PI.dtype not in CUDA_DTYPES:
        prepare(inner_PI.device, inner_PI.dtype)  # raises Unsupported
    loading.loaded("activation", inner_PI.device.index, inner_PI.dtype).launch(
        getattr(_C, name),
        inner_PI.contiguous(),
        None if weights_P is None else weights_P.contiguous(),
        None if ends_L is None else ends_L.contiguous(),
        0 if ends_L is None else ends_L.shape[0],
        inner_PI.shape[0],
        width,
        NATIVE_DTYPES[inner_PI.dtype],
        getattr(_C.Activation, activation),
        *others,
    )


# -- elsewhere ---------------------------------------------------------------------------------------------


_BLOCK = 2**17
"""Values of `inner` that are processed together, so few that each torch operation finds the result of the
previous operation in the cache."""


def _blocks(inner_PI: Tensor) -> Iterator[slice]:
    """Returns slices that divide all rows, also those past the last group. The last bits that torch computes
    depend on where a vector of values ends, so the slices must not depend on the number of grouped rows."""
    rows, step = inner_PI.shape[0], max(1, _BLOCK // inner_PI.shape[1])
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _zero_others(result: Tensor, ends_L: Tensor | None) -> None:
    """Sets the rows past the last group to zero, whatever they contain."""
    if ends_L is not None:
        result[int(ends_L[-1]) :].zero_()


def _split(inner_PI: Tensor, activation: str) -> tuple[Tensor, ...]:
    """Returns views of the gates and the up values in `inner`, or `inner` if it has only one part."""
    if activation == "gelu":
        return (inner_PI,)
    if activation in INTERLEAVED:
        return inner_PI.unflatten(1, (-1, 2)).unbind(2)
    return inner_PI.unflatten(1, (2, -1)).unbind(1)


def _parts(inner_PI: Tensor, activation: str) -> tuple[Tensor, ...]:
    """Returns the results of `_split` in the dtype of the computation."""
    return _split(inner_PI.contiguous().to(weight_dtype(inner_PI.dtype)), activation)


def _weigh(value_BF: Tensor, weights_P: Tensor | None, block: slice) -> Tensor:
    """Multiplies `value`, in place, by the weights of its rows."""
    return value_BF if weights_P is None else value_BF.mul_(weights_P[block, None])


def _value(parts: tuple[Tensor, ...], activation: str) -> Tensor:
    """Returns act(inner) from the parts of `inner`, before rounding."""
    if activation == "gelu":
        return _share_below(parts[0]).mul_(parts[0])
    if activation == "swiglu_clamped":
        gate_BF, up_BF = _clamped(*parts)
        return (_ALPHA * gate_BF).sigmoid_().mul_(gate_BF).mul_(up_BF)
    return silu(parts[0]).mul_(parts[1])


def _gradients_and_value(
    results: tuple[Tensor, ...], grad_BF: Tensor, parts: tuple[Tensor, ...], activation: str
) -> Tensor:
    """Writes the gradients of the parts of `inner` to `results`, and returns act(inner)."""
    if activation == "gelu":
        (inner_BF,) = parts
        below_BF = _share_below(inner_BF)
        density_BF = torch.exp(-0.5 * inner_BF * inner_BF) / math.sqrt(2 * math.pi)
        results[0].copy_((below_BF + inner_BF * density_BF).mul_(grad_BF))
        return below_BF.mul_(inner_BF)
    grad_gate_BF, grad_up_BF = results
    if activation == "swiglu_clamped":
        gate_BF, up_BF = _clamped(*parts)
        share_BF = (_ALPHA * gate_BF).sigmoid_()
        silu_BF = gate_BF * share_BF
        slope_BF = share_BF * (1 + _ALPHA * gate_BF * (1 - share_BF))
        # No gradient beyond a limit, as with clamp.
        grad_gate_BF.copy_((grad_BF * up_BF * slope_BF).where(parts[0] <= _LIMIT, 0.0))
        grad_up_BF.copy_((grad_BF * silu_BF).where(parts[1].abs() <= _LIMIT, 0.0))
        return silu_BF.mul_(up_BF)
    gate_BF, up_BF = parts
    silu_BF = silu(gate_BF)
    grad_gate_BF.copy_(torch.ops.aten.silu_backward(grad_BF * up_BF, gate_BF))
    grad_up_BF.copy_(grad_BF * silu_BF)
    return silu_BF.mul_(up_BF)


def _clamped(gate_BF: Tensor, up_BF: Tensor) -> tuple[Tensor, Tensor]:
    return gate_BF.clamp(max=_LIMIT), up_BF.clamp(-_LIMIT, _LIMIT) + 1


def _share_below(inner_BF: Tensor) -> Tensor:
    """Returns the normal distribution function of `inner`, by which gelu multiplies `inner`."""
    # erfc stays precise for very negative numbers, where 1 + erf loses all precision.
    return 0.5 * torch.erfc(inner_BF * -math.sqrt(0.5))


# -- gradients ---------------------------------------------------------------------------------------------


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inner_PI: Tensor, weights_P: Tensor | None, ends_L: Tensor | None, activation: str
    ) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(inner_PI, weights_P, ends_L)
        return activate(inner_PI, weights_P, ends_L, activation)

    @staticmethod
    @_disable_dynamo  # kernels take addresses
    @first_order
    def backward(ctx: Any, grad_z_PF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        need_inner, need_weights = ctx.needs_input_grad[:2]
        inner_PI, weights_P, ends_L = ctx.saved_tensors
        grad_inner_PI, grad_weights_P, _ = activate_backward(
            grad_z_PF, inner_PI, weights_P, ends_L, ctx.activation, need_weights, False
        )
        return grad_inner_PI if need_inner else None, grad_weights_P if need_weights else None, None, None
