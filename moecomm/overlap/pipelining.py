"""Merged microbatches in the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.pipelining.schedules import OVERLAP_F_B

from moecomm.errors import InvalidArgument
from moecomm.overlap.blocks import AnyBlock
from moecomm.overlap.merged import Microbatch, forward_backward


class MergedStage(nn.Module):
    """A pipeline stage of blocks, whose microbatches can be merged.

        stage = PipelineStage(MergedStage(blocks), index, num_stages, device)

    A forward computes the blocks node by node, and so does the backward that its result leads to, with the
    bits of the blocks by themselves. `merge_stages` merges a forward with a backward where the schedule says
    so. With gradients disabled the blocks are called one after the other.

    Args:
        blocks: as in `forward_backward`; those that are modules are this module's children.
    """

    def __init__(self, blocks: Iterable[AnyBlock]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)
        for number, block in enumerate(self._blocks):
            if isinstance(block, nn.Module):
                self.add_module(str(number), block)
        self._computed: Microbatch | None = None
        """The microbatch whose forward `merge_stages` has computed for the next call."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the blocks."""
        if not torch.is_grad_enabled():
            for block in self._blocks:
                x = block(x)
            return x
        microbatch, self._computed = self._computed, None
        if microbatch is None:
            microbatch = forward_backward(self._blocks, x)
        assert microbatch is not None
        source = x if x.requires_grad else x.new_empty(0, dtype=torch.float32).requires_grad_()
        y: Tensor = _Whole.apply(microbatch, source)  # type: ignore[no-untyped-call]
        return y


class _Whole(torch.autograd.Function):
    """A microbatch's forward and backward as one operation of the graph that the schedule makes."""

    @staticmethod
    def forward(ctx: Any, microbatch: Microbatch, source: Tensor) -> Tensor:
        ctx.microbatch = microbatch
        return microbatch.output.detach()

    @staticmethod
    @_disable_dynamo  # see moecomm/autograd/functions.py
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        microbatch: Microbatch = ctx.microbatch
        if microbatch._merged:
            microbatch.output.grad = grad  # for the backward that is about to be computed
            return None, None
        forward_backward((), None, microbatch, grad)
        return None, microbatch.input_grad


def merge_stages(schedule: Any) -> None:
    """Makes a schedule merge the forward and the backward of each OVERLAP_F_B action.

        schedule = ScheduleDualPipeV([stage, last_stage], num_microbatches, loss_fn)
        moecomm.overlap.merge_stages(schedule)

    schedule: of torch.distributed.pipelining, with such actions (ScheduleDualPipeV has them, and a CSV file
    may), whose stages' modules are `MergedStage`s of one input and one output. Actions of one pass alone run
    as ever; of a backward that is split one part computes all of it. Raises InvalidArgument.
    """
    register = getattr(schedule, "register_custom_function", None)
    if register is None:
        raise InvalidArgument(
            f"schedule is {type(schedule).__name__}, must be one whose actions can be replaced "
            "(register_custom_function), such as ScheduleDualPipeV"
        )
    for stage in schedule._stages:
        if not isinstance(stage.submod, MergedStage):
            raise InvalidArgument(
                f"the module of stage {stage.stage_index} is {type(stage.submod).__name__}, must be a "
                "MergedStage"
            )
    register(OVERLAP_F_B, _forward_beside_backward)


def _forward_beside_backward(action: Any, context: Any) -> None:
    """Does what the schedule does for the two actions, with their computation merged. torch has no public
    names for this (as of 2.13)."""
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    ahead, behind = action.sub_actions
    front, back = stages[ahead.stage_index], stages[behind.stage_index]
    number, earlier = ahead.microbatch_index, behind.microbatch_index

    for stage, received, at, neighbour in (
        (front, schedule.fwd_recv_ops, number, -1),
        (back, schedule.bwd_recv_ops, earlier, 1),
    ):
        end = stage.is_first if neighbour < 0 else stage.is_last
        if not end and stage.stage_index + neighbour not in stages:
            for work in received.pop((stage.stage_index, at)):
                work.wait()

    # The stage's backward ends at the module's output, whose gradient is kept there.
    outputs, _ = back.fwd_cache[earlier]
    microbatch = outputs[0].grad_fn.microbatch
    microbatch._merged = True
    schedule.backward_counter[back.stage_index] += 1
    last = schedule.backward_counter[back.stage_index] == schedule._n_microbatches
    back.backward_one_chunk(
        earlier, loss=schedule._maybe_get_loss(back, earlier), full_backward=True, last_backward=last
    )

    (x,) = context.arg_mbs[number] if front.is_first else front._retrieve_recv_activations(number)
    front.submod._computed = forward_backward(front.submod._blocks, x, microbatch)
    back.bwd_cache[earlier] = (microbatch.input_grad,)
    if back.stage_index - 1 in stages:
        before = stages[back.stage_index - 1]
        before.set_local_bwd_input(back.get_local_bwd_output(earlier), earlier)

    output = front.forward_one_chunk(number, context.arg_mbs[number], context.kwarg_mbs[number])
    schedule._maybe_compute_loss(front, output, context.target_mbs, number)
    if front.stage_index + 1 in stages:
        stages[front.stage_index + 1].set_local_fwd_input(output, number)
