"""A Trainer that replays forwards and backwards from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moecomm.errors import Unsupported
from moecomm.graphs import GraphedStep
from moecomm.graphs.recorder import Recorder, require_gpu

_ITEMS = "num_items_in_batch"


class Graphed:
    """Lets a Trainer replay the forward and backward of its batches from a CUDA graph (`GraphedStep`), so
    that the GPU does not wait for Python.

        class Trainer(moecomm.transformers.Graphed, transformers.Trainer): ...

    moecomm runs the model's experts: the model was loaded with `ep_implementation="moecomm"` or
    `experts_implementation="moecomm"`. The first batch that has the shape of the batch before it is captured,
    and further batches of this shape are replayed. All others run as usual; if only some of the ranks that
    share experts have such a batch, the ranks raise MismatchedArguments, or PeerTimeout. `compute_loss` must
    not read values on the host, and what Python decides in it, by the number of the step for example, stays
    as it was at the capture. Gradient checkpointing needs `preserve_rng_state=False`, and no `keep_plans`.
    List this class before the Trainer.

    Training raises Unsupported, on all ranks, on a CPU, under DistributedDataParallel, DataParallel,
    DeepSpeed and accelerate's FSDP, with gradient_accumulation_steps above 1 on several ranks, with an
    optimizer that changes weights within the backward (lomo, layerwise), and with torch_empty_cache_steps.

    Attributes:
        graphed_step: the GraphedStep; None before the first capture. Set it to None after a change to the
            model that replays would not see: the next batch is captured anew.
        recorder: the recorder of the GraphedStep; None: CUDA graphs.
    """

    graphed_step: GraphedStep | None = None
    recorder: Recorder | None = None
    _ran: Any = None
    _kind: tuple[Any, ...] = ()

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        trainer: Any = self
        plain: Callable[..., Tensor] = super().training_step  # type: ignore[misc]
        _require_one_step(trainer, model, self.recorder)
        if self._ran is not model:  # the first batch; or train() has made another model (model_init)
            self._ran, self.graphed_step, self._kind = model, None, ()
        given = {**trainer._prepare_inputs(inputs), _ITEMS: num_items_in_batch}
        if isinstance(num_items_in_batch, int):  # else it would be a constant of the graph
            given[_ITEMS] = torch.tensor(num_items_in_batch, device=trainer.args.device)
        constants = trainer.current_gradient_accumulation_steps, trainer.compute_loss_func is None
        kind = (*constants, *((name, _kind_of(each)) for name, each in given.items()))
        if kind != self._kind:
            if self.graphed_step is None:
                self._kind = kind
            return plain(model, inputs, num_items_in_batch)
        model.train()  # this and the next, which evaluations undo, replays do not
        if callable(train := getattr(trainer.optimizer, "train", None)):
            train()
        if self.graphed_step is None:

            def step_fn(*values: Any) -> Tensor:
                batch = dict(zip(given, values, strict=True))
                return plain(model, batch, batch.pop(_ITEMS))

            self.graphed_step = GraphedStep(step_fn, model, grows=True, recorder=self.recorder)
        loss: Tensor = self.graphed_step(*given.values())
        return loss


def _require_one_step(trainer: Any, model: Any, recorder: Recorder | None) -> None:
    """Raises Unsupported unless forward and backward of a batch can be one graph."""
    accumulates = trainer.args.gradient_accumulation_steps
    if recorder is None:
        require_gpu(trainer.args.device)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise Unsupported("Graphed with DeepSpeed or accelerate's FSDP: load the model by distributed_config")
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        how = "load the model by distributed_config, or start one process on one GPU, without torchrun"
        raise Unsupported(f"Graphed with {type(model).__name__}: {how}")
    optim = trainer.args.optim
    if "lomo" in optim or "layerwise" in optim:
        raise Unsupported(f"Graphed with optim={optim.value!r}, which changes weights within the backward")
    if trainer.args.torch_empty_cache_steps is not None:
        raise Unsupported("Graphed with torch_empty_cache_steps, must be None: a graph cannot free memory")
    if accumulates > 1 and trainer.args.world_size > 1:
        raise Unsupported(
            f"Graphed with gradient_accumulation_steps={accumulates} on {trainer.args.world_size} ranks, "
            "must be 1: FSDP2 keeps gradients back between batches, outside of the graph"
        )


def _kind_of(value: Any) -> Any:
    """Returns what has to be equal for a batch to be replayed: a tensor's shape and dtype, or the value; of
    lists of tensors, which a graph would keep, something that equals nothing."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value if value is None or isinstance(value, (str, int, float)) else object()
