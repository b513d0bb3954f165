"""AdamW (arXiv 1711.05101) for float32 or bfloat16 weights and moments, with arithmetic in float32.

torch's fused update takes tensors of one dtype, and updates float32 tensors directly. On GPUs a kernel that
torch.compile makes updates large tensors of other dtypes, reading and writing everything once. For all others
torch's update gets float32 copies of one slice at a time, so that the additional memory does not grow with
the model.

A bfloat16 weight is the nearest bfloat16 to a float32 master. Instead of the master the optimizer keeps the
remaining 16 bits per weight, as a signed difference:

    master      0x3F80A123                  1.0049...
    weight      0x3F81                      1.0078125, rounded up
    remainder   0x3F80A123 - 0x3F810000     -24285

Weights and states may be DTensors, of FSDP2 and of tensor parallelism: a rank updates its own shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SLICE = 1 << 23  # elements with float32 copies at a time
KERNEL_ROW = 1024  # a kernel takes tensors as rows of this length, which tells it that they are aligned
KERNEL_LEAST = 1 << 18  # least elements of a tensor for which a kernel pays off
KERNEL_ROWS = (1 << 31) // KERNEL_ROW - 1  # rows that a kernel takes at a time: its indices have 32 bits


class AdamW(torch.optim.Optimizer):
    """AdamW for parameters in float32 or bfloat16.

    State of a parameter: `step`, float32; `exp_avg` and `exp_avg_sq`, of its shape; for a bfloat16 parameter
    also `remainder`, int16 of its shape. A state dict restores the same bits.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: torch.dtype = torch.float32,
    ) -> None:
        """moments: the dtype in which both are kept."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moments = moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient. closure: for torch's interface; must be None."""
        assert closure is None
        for group in self.param_groups:
            parts = [self._part(p) for p in group["params"] if p.grad is not None]
            if not parts:
                continue
            torch._foreach_add_([part.step for part in parts], 1.0)
            parts = [part for part in parts if part.weight.numel()]  # some ranks may have no shard
            plain = [part for part in parts if part.is_float32]
            _update([part[:4] for part in plain], [part.step for part in plain], group)
            others = [part for part in parts if not part.is_float32]
            _update_by_kernel([part for part in others if part.has_kernel], group)
            for slices in _slices([part for part in others if not part.has_kernel]):
                _update_slices(slices, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads copies of the result of `state_dict`, keeping their dtypes; torch's own version would give
        each the parameter's."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            given = state_dict["state"].get(number, {})
            self.state[parameter] = {name: each.to(parameter.device).clone() for name, each in given.items()}

    def _part(self, parameter: Tensor) -> _Part:
        """Returns this rank's part of a parameter; makes its state the first time."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._moments)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._moments)
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        assert parameter.grad is not None
        remainder = state.get("remainder")
        return _Part(
            _local(parameter),
            _local(parameter.grad).contiguous(),
            _local(state["exp_avg"]),
            _local(state["exp_avg_sq"]),
            None if remainder is None else _local(remainder),
            state["step"],
        )


class _Part(NamedTuple):
    """A parameter, or a slice of it, with its gradient and its state."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainder: Tensor | None
    step: Tensor

    @property
    def is_float32(self) -> bool:
        return all(tensor.dtype == torch.float32 for tensor in self[:4])

    @property
    def has_kernel(self) -> bool:
        elements = self.weight.numel()
        return self.weight.is_cuda and elements >= KERNEL_LEAST and elements % KERNEL_ROW == 0

    def slices(self) -> Iterator[_Part]:
        """Yields slices of at most SLICE elements."""
        for begin in range(0, self.weight.numel(), SLICE):
            weight, grad, exp_avg, exp_avg_sq = (_flat(tensor, begin) for tensor in self[:4])
            remainder = None if self.remainder is None else _flat(self.remainder, begin)
            yield _Part(weight, grad, exp_avg, exp_avg_sq, remainder, self.step)


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: Tensor, begin: int) -> Tensor:
    return tensor.view(-1)[begin : begin + SLICE]


def _slices(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Yields lists of slices with the same dtypes, of at most SLICE elements in total per list."""
    found: list[_Part] = []
    for part in parts:
        for each in part.slices():
            same = not found or _dtypes(found[0]) == _dtypes(each)
            if not same or sum(one.weight.numel() for one in found) + each.weight.numel() > SLICE:
                yield found
                found = []
            found.append(each)
    if found:
        yield found


def _dtypes(part: _Part) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in part]


def _update_slices(parts: list[_Part], group: dict[str, Any]) -> None:
    """Updates slices through float32 copies."""
    columns = [list(column) for column in zip(*(part[:4] for part in parts), strict=True)]
    masters = [_master(part) for part in parts]
    copies = [masters, *(_as_float32(column) for column in columns[1:])]
    _update(list(zip(*copies, strict=True)), [part.step for part in parts], group)
    for part, master in zip(parts, masters, strict=True):
        _set_master(part, master)
    for column, copy in zip(columns[2:], copies[2:], strict=True):
        if copy is not column:
            torch._foreach_copy_(column, copy)


def _as_float32(tensors: list[Tensor]) -> list[Tensor]:
    """Returns tensors of one dtype as float32, without a copy if they are."""
    if tensors[0].dtype == torch.float32:
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _master(part: _Part) -> Tensor:
    """Returns the float32 weights: the parameter itself, or the masters of a bfloat16 one."""
    if part.remainder is None:
        return part.weight
    return _joined(part.weight.view(torch.int16), part.remainder)


def _set_master(part: _Part, master: Tensor) -> None:
    """Stores a master's bits in weight and remainder."""
    if part.remainder is not None:
        _split(master, part.weight.view(torch.int16), part.remainder)


def _joined(high: Tensor, remainder: Tensor) -> Tensor:
    """Returns the masters of weights whose bits are `high`."""
    return high.to(torch.int32).mul_(1 << 16).add_(remainder).view(torch.float32)


def _split(master: Tensor, high: Tensor, remainder: Tensor) -> None:
    """Stores masters as bits of weights and remainders. Where two bfloat16 numbers are equally near, the
    weight is the larger in magnitude."""
    bits = master.view(torch.int32)
    nearest = bits.bitwise_right_shift(15).add_(1).bitwise_right_shift_(1)
    # A NaN whose bits are all set would become zero.
    nearest = torch.minimum(nearest, bits.bitwise_right_shift(31).bitwise_or_(0x7FFF))
    high.copy_(nearest)
    remainder.copy_(bits.sub(nearest.mul_(1 << 16)))


def _update_by_kernel(parts: list[_Part], group: dict[str, Any]) -> None:
    """Updates each part by one kernel; parts of 2^31 elements and more by several. All its arguments except
    constants are on the GPU, so that no step compiles again or waits."""
    if not parts:
        return
    kernel, (beta1, beta2), lr = _compiled_update(), group["betas"], group["lr"]
    steps = torch.stack([part.step for part in parts]).double()
    sizes = (lr / (1 - beta1**steps)).float()
    roots = (1 - beta2**steps).sqrt().float()
    kept = torch.full_like(sizes, 1 - lr * group["weight_decay"])
    for part, *numbers in zip(parts, sizes, roots, kept, strict=True):
        weight, grad, exp_avg, exp_avg_sq, remainder = (
            None if tensor is None else tensor.view(-1, KERNEL_ROW) for tensor in part[:5]
        )
        assert weight is not None
        bits = weight if remainder is None else weight.view(torch.int16)
        for start in range(0, len(bits), KERNEL_ROWS):
            rows = slice(start, start + KERNEL_ROWS)
            tensors = bits, grad, exp_avg, exp_avg_sq, remainder
            some = (None if each is None else each[rows] for each in tensors)
            kernel(*some, *numbers, beta1, beta2, group["eps"])


@functools.cache
def _compiled_update() -> Callable[..., None]:
    return torch.compile(_update_one)


def _update_one(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor | None,
    size: Tensor,
    root: Tensor,
    kept: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Does torch's fused update of one tensor. weight: with a remainder, its bits as int16. size: the
    learning rate divided by the first moment's correction. root: the root of the second moment's correction.
    kept: the factor of a weight after weight decay."""
    master = weight if remainder is None else _joined(weight, remainder)
    gradient = grad.float()
    first = exp_avg.float() * beta1 + gradient * (1 - beta1)
    second = exp_avg_sq.float() * beta2 + gradient * gradient * (1 - beta2)
    master = master * kept - size * first / (second.sqrt() / root + eps)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    if remainder is None:
        weight.copy_(master)
    else:
        _split(master, weight, remainder)


def _update(tensors: list[Any], steps: list[Tensor], group: dict[str, Any]) -> None:
    """Does torch's fused update of float32 (weight, gradient, exp_avg, exp_avg_sq)."""
    if not tensors:
        return
    weights, grads, exp_avgs, exp_avg_sqs = map(list, zip(*tensors, strict=True))
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
