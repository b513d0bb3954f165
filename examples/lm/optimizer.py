"""AdamW (arXiv 1711.05101) for weights and moments of float32 or bfloat16, with arithmetic in float32.

torch's fused update takes tensors of one dtype. Float32 ones it gets as they are. Of others it gets float32
copies of a slice at a time, so that what is needed beside weights, gradients and moments does not grow with
the model.

A bfloat16 weight has a float32 master, of which it is the nearest bfloat16. The master is not kept: the
optimizer has what is left of its bits, 16 a weight, as a signed difference:

    master      0x3F80A123                  1.0049...
    weight      0x3F81                      1.0078125, rounded up
    remainder   0x3F80A123 - 0x3F810000     -24285

Weights and states may be DTensors, of FSDP2 and of tensor parallelism: a rank updates its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SLICE = 1 << 23  # elements that are float32 copies at a time


class AdamW(torch.optim.Optimizer):
    """AdamW of parameters in float32 or bfloat16.

    State of a parameter: `step`, float32; `exp_avg` and `exp_avg_sq`, of its shape; and with a bfloat16
    parameter `remainder`, int16 of its shape. As a state dict they go on with the same bits.
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
        """Updates the parameters that have a gradient. closure: of torch's optimizers, and not taken here."""
        assert closure is None
        for group in self.param_groups:
            parts = [self._part(p) for p in group["params"] if p.grad is not None]
            if not parts:
                continue
            torch._foreach_add_([part.step for part in parts], 1.0)
            parts = [part for part in parts if part.weight.numel()]  # some ranks may have no shard
            plain = [part for part in parts if part.is_float32]
            _update([part[:4] for part in plain], [part.step for part in plain], group)
            for slices in _slices([part for part in parts if not part.is_float32]):
                _update_slices(slices, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads copies of what `state_dict` returned, with their dtypes; torch's own would give each the
        parameter's."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            given = state_dict["state"].get(number, {})
            self.state[parameter] = {name: each.to(parameter.device).clone() for name, each in given.items()}

    def _part(self, parameter: Tensor) -> _Part:
        """Returns what there is of a parameter on this rank; its state is made the first time."""
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
    """Yields lists of slices, of at most SLICE elements together, that agree in their dtypes."""
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
    """Updates slices by way of float32 copies."""
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
    """Returns tensors of one dtype as float32: themselves, if they are."""
    if tensors[0].dtype == torch.float32:
        return tensors
    copies = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _master(part: _Part) -> Tensor:
    """Returns the float32 weights: those of the parameter itself, or a bfloat16 one's masters."""
    if part.remainder is None:
        return part.weight
    bits = part.weight.view(torch.int16).to(torch.int32).mul_(1 << 16)
    return bits.add_(part.remainder).view(torch.float32)


def _set_master(part: _Part, master: Tensor) -> None:
    """Writes a master's bits into weight and remainder; of two bfloat16 numbers that are equally near the
    weight is that of the larger magnitude."""
    if part.remainder is None:
        return
    bits = master.view(torch.int32)
    nearest = bits.bitwise_right_shift(15).add_(1).bitwise_right_shift_(1)
    # A NaN of which all bits are set would become zero.
    nearest = torch.minimum(nearest, bits.bitwise_right_shift(31).bitwise_or_(0x7FFF), out=nearest)
    part.weight.view(torch.int16).copy_(nearest)
    part.remainder.copy_(torch.sub(bits, nearest.mul_(1 << 16), out=nearest))


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
