"""The activation of the experts' feed-forward networks with the routing weight inside, differentiable:

    z[p, f] = weights[p] * act(inner[p])[f]

As a token's result is the sum over its experts of weight * (act(x W_in) W_out), the weight may as well be
applied before the second product: then the combine needs no weights, and the backward not what it combined.

Each way is one pass over memory on CUDA tensors (csrc/kernels/experts/activation.cu), and a few torch
operations elsewhere. Both compute in float32 (float64 for float64) and round once. They are torch operators,
moecomm::weighted_activation and moecomm::weighted_activation_backward, which torch.compile takes as they are.

Shape letters here: P rows, F columns of the result ("ffn width"), I columns of `inner`, L groups of rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from moecomm import _C
from moecomm.arguments import require_ends, weight_dtype
from moecomm.device.cuda_device import CudaDevice, no_kernels
from moecomm.errors import InvalidArgument, Unsupported
from moecomm.setup.memory_plan import CUDA_DTYPES, NATIVE_DTYPES

Tensor = torch.Tensor

INPUTS = {"swiglu": 2, "swiglu_interleaved": 2, "swiglu_clamped": 2, "gelu": 1}
"""The ratio I / F of each activation."""
INTERLEAVED = ("swiglu_interleaved", "swiglu_clamped")
"""The activations whose gates are in the even columns and up values in the odd ones."""
_ALPHA, _LIMIT = 1.702, 7.0
"""The constants of swiglu_clamped, those of gpt-oss."""


def weighted_activation(
    inner_PI: Tensor, weights_P: Tensor | None = None, ends_L: Tensor | None = None, *, activation: str
) -> Tensor:
    """Returns z_PF of inner's dtype, differentiable in `inner_PI` and `weights_P`.

    activation: "swiglu", silu of the first half of a row times its second half (arXiv 2002.05202), I = 2F;
    "swiglu_interleaved", silu of the even columns times the odd ones; "swiglu_clamped", the one of gpt-oss:
    with the even columns as gate, at most 7, and the odd ones as up, from -7 to 7, gate * sigmoid(1.702 gate)
    * (up + 1); "gelu", the exact one (arXiv 1606.08415), I = F. inner: bfloat16, float16, float32; not on
    CUDA float64.
    weights: float32, float64 for float64 inner; None: 1. ends: int32 inclusive ends of groups of rows, on the
    same device; rows from ends[-1] on are not real. On CUDA tensors these are neither read nor written, so
    that they come out unspecified and get an unspecified gradient; elsewhere both are zero. The host does not
    wait for `ends`.

    Raises InvalidArgument; Unsupported for CUDA tensors of float64, and where this build has no CUDA part.
    """
    z_PF: Tensor = torch.ops.moecomm.weighted_activation(inner_PI, weights_P, ends_L, activation)
    return z_PF


def weighted_activation_backward(
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    *,
    activation: str,
    need_weights: bool,
    need_z: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (grad_inner_PI, grad_weights_P, z_PF) of a `weighted_activation` with these arguments.

    With need_weights, grad_weights[p] is the sum over f of grad_z[p, f] * act(inner[p])[f], of the weights'
    dtype; it is added up in an order that depends on F and the dtype alone. With need_z, z is the forward's
    result again, the same bits. What is not needed is None. Errors are those of `weighted_activation`.
    """
    grad_inner_PI, grad_weights_P, z_PF = torch.ops.moecomm.weighted_activation_backward(
        grad_z_PF, inner_PI, weights_P, ends_L, activation, need_weights, need_z
    )
    return grad_inner_PI, grad_weights_P if need_weights else None, z_PF if need_z else None


def weighted_activation_into(
    z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None = None,
    ends_L: Tensor | None = None,
    *,
    activation: str,
) -> None:
    """Computes `weighted_activation` into a contiguous tensor of the caller. Not differentiable, and unknown
    to torch.compile, whose operators take the host twice as long."""
    _forward(inner_PI, weights_P, ends_L, activation, z_PF)


def weighted_activation_backward_into(
    grad_inner_PI: Tensor,
    grad_weights_P: Tensor | None,
    z_PF: Tensor | None,
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    *,
    activation: str,
) -> None:
    """Computes `weighted_activation_backward` into contiguous tensors of the caller, parts of larger ones for
    example; None for a result that is not needed. Unknown to torch.compile."""
    width = _width(inner_PI, weights_P, ends_L, activation, grad_z_PF)
    rows, dtype, device = inner_PI.shape[0], inner_PI.dtype, inner_PI.device
    _require_result("grad_inner", grad_inner_PI, tuple(inner_PI.shape), dtype, device)
    need_weights, need_z = grad_weights_P is not None, z_PF is not None
    if need_weights:
        _require_result("grad_weights", grad_weights_P, (rows,), weight_dtype(dtype), device)
    if need_z:
        _require_result("z", z_PF, (rows, width), dtype, device)
    results = (grad_inner_PI, grad_weights_P, z_PF)
    if _has_kernel(inner_PI):
        grad_z_PF = grad_z_PF.contiguous()
        _launch("activation_backward", inner_PI, weights_P, ends_L, width, activation, grad_z_PF, *results)
        return
    found = _backward_by_torch(grad_z_PF, inner_PI, weights_P, ends_L, activation, need_weights, need_z)
    for result, value in zip(results, found, strict=True):
        if result is not None:
            result.copy_(value)


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    """Loads the kernels for a dtype onto a CUDA device; does nothing elsewhere, nor a second time. The first
    use does this too. But loading may wait for kernels under way, and those of a communicator may wait for
    other ranks, so a program that runs both side by side calls this first.
    """
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        _prepare(index, dtype)


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


def _require_result(
    name: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    assert value is not None
    _require(name, value, shape, dtype, device)
    if not value.is_contiguous():
        raise InvalidArgument(f"{name} is not contiguous, must be")


# -- what runs ---------------------------------------------------------------------------------------------


def _forward(
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    z_PF: Tensor | None = None,
) -> Tensor:
    width = _width(inner_PI, weights_P, ends_L, activation)
    if z_PF is not None:
        _require_result("z", z_PF, (inner_PI.shape[0], width), inner_PI.dtype, inner_PI.device)
    if not _has_kernel(inner_PI):
        found_PF = _forward_by_torch(inner_PI, weights_P, ends_L, activation)
        return found_PF if z_PF is None else z_PF.copy_(found_PF)
    if z_PF is None:
        z_PF = inner_PI.new_empty(inner_PI.shape[0], width)
    _launch("activation", inner_PI, weights_P, ends_L, width, activation, z_PF)
    return z_PF


def _backward(
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    need_weights: bool,
    need_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = _width(inner_PI, weights_P, ends_L, activation, grad_z_PF)
    if not _has_kernel(inner_PI):
        return _backward_by_torch(grad_z_PF, inner_PI, weights_P, ends_L, activation, need_weights, need_z)
    grads = _new_gradients(inner_PI, width, need_weights, need_z)
    grad_z_PF = grad_z_PF.contiguous()
    _launch("activation_backward", inner_PI, weights_P, ends_L, width, activation, grad_z_PF, *grads)
    return grads


def _new_gradients(
    inner_PI: Tensor, width: int, need_weights: bool, need_z: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns contiguous tensors for the results of the backward; a result that is not needed gets an empty
    one."""
    rows = inner_PI.shape[0]
    return (
        inner_PI.new_empty(inner_PI.shape),
        inner_PI.new_empty(rows if need_weights else 0, dtype=weight_dtype(inner_PI.dtype)),
        inner_PI.new_empty((rows, width) if need_z else (0,)),
    )


# -- on CUDA tensors ---------------------------------------------------------------------------------------


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def _gpu(index: int) -> CudaDevice:
    if not hasattr(_C, "activation"):
        raise no_kernels(f"inner is on cuda:{index}")
    return CudaDevice(index)


@functools.cache
def _prepare(index: int, dtype: torch.dtype) -> None:
    if dtype not in CUDA_DTYPES:
        raise Unsupported(
            f"the activation of {dtype} on cuda:{index} has no kernels, expected "
            f"{', '.join(map(str, CUDA_DTYPES))}: use float32 there, or the CPU for float64"
        )
    with _gpu(index).current():
        _C.prepare_activation(NATIVE_DTYPES[dtype])


def _launch(
    name: str,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    width: int,
    activation: str,
    *others: Tensor | None,
) -> None:
    """Puts a kernel of the extension on the current stream of inner's device. Empty tensors and None get
    address 0, which the kernel takes as absent."""
    gpu = _gpu(inner_PI.device.index)
    _prepare(gpu.index, inner_PI.dtype)
    inner_PI = inner_PI.contiguous()
    weights_P = None if weights_P is None else weights_P.contiguous()
    ends_L = None if ends_L is None else ends_L.contiguous()
    gpu.launch(
        getattr(_C, name),
        inner_PI.data_ptr(),
        0 if weights_P is None else weights_P.data_ptr(),
        0 if ends_L is None else ends_L.data_ptr(),
        0 if ends_L is None else ends_L.shape[0],
        inner_PI.shape[0],
        width,
        NATIVE_DTYPES[inner_PI.dtype],
        getattr(_C.Activation, activation),
        *(0 if each is None or not each.numel() else each.data_ptr() for each in others),
    )


# -- elsewhere ---------------------------------------------------------------------------------------------


def _forward_by_torch(
    inner_PI: Tensor, weights_P: Tensor | None, ends_L: Tensor | None, activation: str
) -> Tensor:
    value_PF, _ = _value_and_slopes(inner_PI, activation)
    return _real(_weighted(value_PF, weights_P).to(inner_PI.dtype), ends_L)


def _backward_by_torch(
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    need_weights: bool,
    need_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, exact = inner_PI.dtype, weight_dtype(inner_PI.dtype)
    value_PF, slopes = _value_and_slopes(inner_PI, activation)
    grad_PF = grad_z_PF.contiguous().to(exact)
    scaled_PF = _weighted(grad_PF, weights_P)
    grads = [(scaled_PF * slope_PF).to(dtype) for slope_PF in slopes]
    grad_inner_PI = torch.stack(grads, dim=_inputs_dim(activation)).flatten(1)
    grad_weights_P, z_PF = inner_PI.new_empty(0, dtype=exact), inner_PI.new_empty(0)
    if need_weights:
        grad_weights_P = _real((grad_PF * value_PF).sum(dim=1), ends_L)
    if need_z:
        z_PF = _real(_weighted(value_PF, weights_P).to(dtype), ends_L)
    return _real(grad_inner_PI, ends_L), grad_weights_P, z_PF


def _value_and_slopes(inner_PI: Tensor, activation: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns act(inner), not yet rounded, and its derivatives with respect to the parts of `inner`."""
    inner_PI = inner_PI.contiguous().to(weight_dtype(inner_PI.dtype))
    if activation != "gelu":
        dim = _inputs_dim(activation)
        gate_PF, up_PF = inner_PI.unflatten(1, (2, -1) if dim == 1 else (-1, 2)).unbind(dim)
        if activation == "swiglu_clamped":
            return _clamped(gate_PF, up_PF)
        share_PF = gate_PF.sigmoid()
        silu_PF = gate_PF * share_PF
        return silu_PF * up_PF, (up_PF * (share_PF * (1 + gate_PF * (1 - share_PF))), silu_PF)
    # erfc keeps its precision for very negative numbers, where 1 + erf has lost all of it.
    below_PF = 0.5 * torch.erfc(inner_PI * -math.sqrt(0.5))
    density_PF = torch.exp(-0.5 * inner_PI * inner_PI) / math.sqrt(2 * math.pi)
    return inner_PI * below_PF, (below_PF + inner_PI * density_PF,)


def _clamped(raw_gate_PF: Tensor, raw_up_PF: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    gate_PF, up_PF = raw_gate_PF.clamp(max=_LIMIT), raw_up_PF.clamp(-_LIMIT, _LIMIT) + 1
    share_PF = (_ALPHA * gate_PF).sigmoid()
    silu_PF = gate_PF * share_PF
    slope_PF = up_PF * (share_PF * (1 + _ALPHA * gate_PF * (1 - share_PF)))
    # As clamp has it: no gradient beyond a limit.
    gate_slope_PF = slope_PF.where(raw_gate_PF <= _LIMIT, 0.0)
    return silu_PF * up_PF, (gate_slope_PF, silu_PF.where(raw_up_PF.abs() <= _LIMIT, 0.0))


def _inputs_dim(activation: str) -> int:
    """Returns the dimension of gate and up in `inner`: 1 for (P, 2, F), 2 for the interleaved (P, F, 2)."""
    return 2 if activation in INTERLEAVED else 1


def _weighted(value_PF: Tensor, weights_P: Tensor | None) -> Tensor:
    return value_PF if weights_P is None else value_PF * weights_P.unsqueeze(1)


def _real(value: Tensor, ends_L: Tensor | None) -> Tensor:
    """Returns `value` with rows that are not real set to zero, whatever they hold."""
    if ends_L is None:
        return value
    real_P = torch.arange(value.shape[0], device=value.device) < ends_L[-1]
    return value.where(real_P if value.dim() == 1 else real_P.unsqueeze(1), 0.0)


# -- what a trace sees, and gradients ----------------------------------------------------------------------


def _fake_forward(
    inner_PI: Tensor, weights_P: Tensor | None, ends_L: Tensor | None, activation: str
) -> Tensor:
    return inner_PI.new_empty(inner_PI.shape[0], _width(inner_PI, weights_P, ends_L, activation))


def _fake_backward(
    grad_z_PF: Tensor,
    inner_PI: Tensor,
    weights_P: Tensor | None,
    ends_L: Tensor | None,
    activation: str,
    need_weights: bool,
    need_z: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = _width(inner_PI, weights_P, ends_L, activation, grad_z_PF)
    return _new_gradients(inner_PI, width, need_weights, need_z)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    inner_PI, weights_P, ends_L, ctx.activation = inputs
    ctx.save_for_backward(inner_PI, weights_P, ends_L)


def _gradients(ctx: Any, grad_z_PF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    inner_PI, weights_P, ends_L = ctx.saved_tensors
    need_inner, need_weights = ctx.needs_input_grad[:2]
    grad_inner_PI, grad_weights_P, _ = torch.ops.moecomm.weighted_activation_backward(
        grad_z_PF, inner_PI, weights_P, ends_L, ctx.activation, need_weights, False
    )
    return grad_inner_PI if need_inner else None, grad_weights_P if need_weights else None, None, None


_library = torch.library.Library("moecomm", "FRAGMENT")
_ARGUMENTS = "Tensor inner, Tensor? weights, Tensor? ends, str activation"
_library.define(f"weighted_activation({_ARGUMENTS}) -> Tensor")
_library.define(
    f"weighted_activation_backward(Tensor grad_z, {_ARGUMENTS}, bool need_weights, bool need_z) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.impl("weighted_activation", _forward, "CompositeExplicitAutograd")
_library.impl("weighted_activation_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("moecomm::weighted_activation", _fake_forward, lib=_library)
torch.library.register_fake("moecomm::weighted_activation_backward", _fake_backward, lib=_library)
torch.library.register_autograd("moecomm::weighted_activation", _gradients, setup_context=_keep, lib=_library)
