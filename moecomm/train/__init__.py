"""Training with experts that are spread over ranks: gradients and their norm, balancing,
DistributedDataParallel and FSDP2, checkpoints, recomputation along kept plans.

The names can also be imported from `moecomm.nn`.
"""

from __future__ import annotations

from moecomm.train.balance import update_expert_bias
from moecomm.train.checkpoint import sharded_state
from moecomm.train.data_parallel import fully_shard_experts, prepare_ddp
from moecomm.train.gradients import (
    backward_weights,
    clip_grad_norm,
    mark_synchronized,
    set_loss_scale,
    sync_gradients,
)
from moecomm.train.kept_plans import keep_plans

__all__ = [
    "backward_weights",
    "clip_grad_norm",
    "fully_shard_experts",
    "keep_plans",
    "mark_synchronized",
    "prepare_ddp",
    "set_loss_scale",
    "sharded_state",
    "sync_gradients",
    "update_expert_bias",
]
