"""A whole training step in CUDA graphs, without dropping tokens: the graph has room for slightly more rows
than balanced routing needs, and a step that needs more is run again without graphs."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from moecomm.arguments import require_integer, require_number
from moecomm.communicator import Communicator
from moecomm.errors import CapacityExceeded, InvalidArgument
from moecomm.graphs.overflow_check import OverflowCheck
from moecomm.graphs.recorder import CudaRecorder, Recorder, require_gpu
from moecomm.nn.layer import MoELayer, layers_of
from moecomm.nn.router import rows_at_worst
from moecomm.types import AnyGroup, DispatchOutput, Group, as_group

_log = logging.getLogger(__name__)
_REPORT_EVERY = 100
"""The number of overflows from one that is logged to the next one; the first is logged."""


class Needed(NamedTuple):
    """The last step that ran again: the rows needed, on the rank that needed most, and the capacity."""

    rows: int
    """Rows that the largest dispatch of the step needed."""
    capacity: int
    """The smallest capacity of any layer, in rows."""


class GraphedExperts(Protocol):
    """The attributes by which a GraphedStep uses a MoELayer, or the experts of a model of transformers."""

    comm: Communicator
    capacity: int | None
    """The rows that a dispatch has room for; None: as many as arrive."""
    _dispatch_seen: Any
    """A function that is called with the DispatchOutput of each dispatch; or None."""
    _waits_on_host: bool


class _Done(NamedTuple):
    """The results of one run of the step."""

    output: Any
    grads: list[Tensor | None]
    seen: list[tuple[dict[str, Tensor], Tensor]]
    """last_losses and last_tokens_per_expert of each MoELayer."""


class _Before(NamedTuple):
    """Gradients and RNG states from before a step; the graph itself copies the buffers."""

    grads: list[Tensor | None]
    """Gradients before the step; copies where they lie in the graph's memory, which a replay overwrites."""
    are_own: list[bool]
    """True for each gradient in the memory of the graph."""
    random: tuple[Tensor, Tensor | None]


class GraphedStep:
    """Runs `step_fn(*inputs)`, a forward and backward of `model`, as the replay of a CUDA graph.

        step = GraphedStep(forward_backward, model)
        for tokens in batches:
            loss = step(tokens)
            optimizer.step()
            optimizer.zero_grad()

    The model has MoELayers, or is one of transformers whose experts moecomm runs (moecomm.transformers); such
    a model has run a forward before. In the graph every layer has room for `headroom` times the rows of
    balanced routing. The device checks whether all rows fitted, and ranks agree on the answer, with one host
    wait per step. If some did not fit, the replay is undone, and the step runs once more without graph and
    capacity, so that nothing is dropped (docs/graphs.md). A call does what `step_fn` does: it adds to the
    parameters' `grad`, changes buffers once and advances the RNG by one step. A `grad` that was None becomes
    a tensor of the graph. The next call overwrites that tensor, or adds to it if it is still the `grad`.

    Args:
        step_fn: takes tensors and returns a loss, or tensors in tuples, lists and dicts; it must not do what
            a graph cannot capture, such as reading values on the host.
        model: has the layers, all parameters that get gradients, and all buffers, which the step changes in
            place.
        headroom: gives each layer headroom * max_tokens * top_k rows, but at most as many as any routing can
            bring.
        grows: after a step whose rows did not fit, the next call captures the step anew. All layers get room
            for `headroom` times (at least once) what the fullest needed, relative to balanced routing. Each
            capture costs the warm-up, and larger tensors. Without it a warning is logged for the first
            overflow, then for each hundredth after it.
        group: the ranks that agree; contains all ranks with which `step_fn` communicates. None: the only
            group of all layers' communicators; then no layer may have aux_loss "sequence" or "global". If
            ranks share experts of transformers, None means all ranks: copies of the experts run together.
        warmup: number of runs before the first capture; at least one. Later captures take one. They change
            no state.
        recorder: records and replays the step; None: as a CUDA graph.

    A call raises InvalidArgument, on this rank alone, if inputs have another shape, dtype or device than at
    first, if the model is in another mode (`eval()`), or if parameters were frozen, unfrozen or moved to
    other memory since. It also raises errors of `step_fn`, and those of `Communicator.check` except
    CapacityExceeded. Errors after a step's last dispatch are raised by the next call. After an error the
    parameters' `grad` is as before.
    Construction raises Unsupported if the model is not on a GPU and no recorder is given.

    Attributes:
        device: the device of the layers.
        replays: how often the graph ran, including runs that overflowed.
        overflows: how many steps ran again without graph.
        captures: how often the step was captured.
        last_needed: the rows that the last step which ran again needed, and the capacity; None: no step did.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        model: nn.Module,
        *,
        headroom: float = 1.25,
        grows: bool = False,
        group: AnyGroup | None = None,
        warmup: int = 2,
        recorder: Recorder | None = None,
    ) -> None:
        own, layers = layers_of(model), experts_of(model)
        if not layers:
            raise InvalidArgument(
                "model has no MoELayer, and no experts of transformers that moecomm has run: call it once "
                "before; without such experts a graph of torch does for it"
            )
        if any(layer.config.main_grad for layer in own):
            raise InvalidArgument(
                "a MoELayer has main_grad=True, must have False: a step that does not fit is undone, and the "
                "part of main_grad that it added would stay"
            )
        self.device = layers[0].comm.device
        if recorder is None:
            require_gpu(self.device)
        require_integer("warmup", warmup, 1)
        require_number("headroom", headroom, lambda number: number > 0, "more than 0")
        self.headroom, self.grows = headroom, grows
        self.warmup = warmup
        self.replays = self.overflows = self.captures = 0
        self.last_needed: Needed | None = None
        self._step_fn, self._model, self._layers, self._own = step_fn, model, layers, own
        self._comms = self._communicators()
        self._capacities = [_capacity(layer, headroom) for layer in layers]
        self._exact = [None] * len(layers)  # without capacities outputs have exactly the rows that arrive
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        self._reshard()
        self._every = self._parameters = list(model.parameters())
        self._trains: list[bool] = []
        self._addresses: list[int] = []
        self._training = model.training
        self._overflow_check = OverflowCheck(self.device, self._group(group))
        self._recorder: Recorder = CudaRecorder(self.device) if recorder is None else recorder
        self._inputs: tuple[Any, ...] = ()
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._replay: Callable[[], _Done] | None = None
        self._own_grads: list[Tensor | None] = []

    @property
    def capacities(self) -> tuple[int, ...]:
        """The capacity of each layer in the graph, in rows, in the order of `model.modules()`."""
        return tuple(self._capacities)

    def __call__(self, *inputs: Any) -> Any:
        """Runs one step. inputs: tensors without gradients, of the shapes in the first call; values that are
        no tensors must equal those of the first call. Returns copies of the results, without gradients."""
        if not self.captures:
            self._prepare(inputs)
        if self._model.training != self._training:
            raise InvalidArgument(
                f"model.training is {self._model.training}, must be {self._training}, as captured: call "
                f"model.train({self._training}) before the step"
            )
        self._check_parameters()
        self._copy_inputs(inputs)
        if self._replay is None:  # the capacities have grown
            self._prepare(inputs)
            self._copy_inputs(inputs)
        assert self._replay is not None
        self._reshard()
        before = self._before()
        try:
            done, needed = self._replay_and_check(self._replay)
            if needed is not None:
                self.overflows += 1
                self.last_needed = needed
                if not self.grows and self.overflows % _REPORT_EVERY == 1:
                    _log.warning("a step ran again without graph: %s", self.report())
                self._copy_inputs(inputs)  # the replay may have changed them
                done = self._rerun_eager(before)
            assert done is not None
        except BaseException:
            self._put_grads(before.grads)
            raise
        self._accumulate_grads(done, before)
        return _map(self._copy, done.output)

    def report(self) -> str:
        """Returns one line: the number of steps, and of steps that ran again. If any ran again, also the rows
        that the last of them needed, and the capacity."""
        share = f" ({self.overflows / self.replays:.1%})" if self.replays else ""
        text = f"{self.replays} replayed steps, {self.overflows} run again without graph{share}"
        needed = self.last_needed
        if self.captures > 1:
            text += f", {self.captures} captures"
        if needed is None:
            return text
        return f"{text}; the last needed {needed.rows} rows of {needed.capacity} (headroom {self.headroom:g})"

    # -- before the first replay -----------------------------------------------------------------------

    def _communicators(self) -> list[Communicator]:
        return list({id(each.comm): each.comm for each in self._layers}.values())

    def _group(self, group: AnyGroup | None) -> Group | None:
        if group is not None:
            return as_group(group)
        groups = {id(comm.group): comm.group for comm in self._comms}
        if len(groups) > 1:
            raise InvalidArgument(
                "group is None and the layers' communicators have several groups: pass one that has all "
                "ranks which take part in a step"
            )
        if any(layer._balance is not None for layer in self._own):
            raise InvalidArgument(
                "group is None and a layer has aux_loss 'sequence' or 'global', whose ranks may be others "
                "than those of its communicator: pass a group that has all ranks which take part in a step"
            )
        found = next(iter(groups.values()))
        # FSDP2 of transformers joins ranks that have copies of the same experts.
        return found if found is None or len(self._own) == len(self._layers) else dist.group.WORLD

    def _prepare(self, inputs: tuple[Any, ...]) -> None:
        """Makes the static inputs, warms the step up without changing state, and captures it."""
        for number, each in enumerate(inputs):
            if isinstance(each, Tensor) and each.requires_grad:
                raise InvalidArgument(f"input {number} requires a gradient, must not: it is copied")
        self._inputs = tuple(each.detach().clone() if isinstance(each, Tensor) else each for each in inputs)
        self._buffers = []
        self._trains, self._training = [each.requires_grad for each in self._every], self._model.training
        self._parameters = [each for each in self._every if each.requires_grad]
        self._own_grads = [None] * len(self._parameters)
        before = self._before()
        buffers = dict(self._model.named_buffers())
        saved = {name: (each.clone(), each._version) for name, each in buffers.items()}
        try:
            came_to_end = False
            for _ in range(1 if self.captures else self.warmup):
                with contextlib.suppress(CapacityExceeded):
                    self._recorder.warm_up(lambda: self._body(waits=True))
                    came_to_end = True
                self._check_comms(overflowed=True)
            if not came_to_end:
                # On the CPU the dispatch after an overflow raises an error on all ranks, perhaps before the
                # step has changed all its buffers. So the step runs once more, with outputs of exact size.
                with self._settings(self._exact, None, waits=True):
                    self._run_step()
            now = dict(self._model.named_buffers())
            for name, buffer in buffers.items():
                if now.get(name) is not buffer:
                    raise InvalidArgument(
                        f"step_fn puts another tensor in the place of buffer {name}: a graph needs it to be "
                        "changed in place"
                    )
                kept, version = saved[name]
                if buffer._version != version or not torch.equal(buffer, kept):
                    with torch.no_grad():
                        buffer.copy_(kept)
                    self._buffers.append((kept, buffer))
            self._set_random(before.random)
            self._comms = self._communicators()  # a larger batch outside of the steps may have changed them
            self._replay = self._recorder.record(self._body)
            self._addresses = [_address(each) for each in self._every]
            self.captures += 1
        except BaseException:
            with torch.no_grad():
                for name, (kept, _) in saved.items():
                    buffers[name].copy_(kept)
            raise
        finally:
            self._set_random(before.random)
            self._put_grads(before.grads)

    def _check_parameters(self) -> None:
        """Raises InvalidArgument if parameters are not as they were when the step was captured."""
        for each, trained, address in zip(self._every, self._trains, self._addresses, strict=True):
            if each.requires_grad != trained:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(each.shape)} has requires_grad={not trained}, must have "
                    f"{trained}, as captured: make another GraphedStep"
                )
            if _address(each) != address:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(each.shape)} lies in other memory than captured, as after "
                    "model.to() or load_state_dict(assign=True): make another GraphedStep"
                )

    def _reshard(self) -> None:
        """Has FSDP2 drop the gathered weights that a forward without backward has left. A replay would not
        do so, and the next forward outside of it would take them for the present ones."""
        for each in self._sharded:
            each.reshard()

    def _copy_inputs(self, inputs: tuple[Any, ...]) -> None:
        if len(inputs) != len(self._inputs):
            raise InvalidArgument(
                f"{len(inputs)} inputs were given, must be {len(self._inputs)}, as captured"
            )
        for number, (new, kept) in enumerate(zip(inputs, self._inputs, strict=True)):
            if isinstance(kept, Tensor):
                kind = (kept.shape, kept.dtype, kept.device)
                if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != kind:
                    raise InvalidArgument(
                        f"input {number} is {_kind(new)}, must be {_kind(kept)}, as captured"
                    )
            elif new != kept:
                raise InvalidArgument(f"input {number} is {new!r}, must be {kept!r}, as captured")
        for new, kept in zip(inputs, self._inputs, strict=True):
            if isinstance(kept, Tensor):
                kept.copy_(new.detach(), non_blocking=True)

    # -- what a graph has ------------------------------------------------------------------------------

    def _body(self, waits: bool = False) -> _Done:
        """Runs the step as the graph records it: copies the buffers, sets capacities, checks for overflow."""

        def seen(layer: GraphedExperts, out: DispatchOutput) -> None:
            self._overflow_check.note_dispatch(out.overflow)

        with self._settings(self._capacities, seen, waits):
            self._overflow_check.start()
            with torch.no_grad():
                for kept, buffer in self._buffers:
                    kept.copy_(buffer)
            done = self._run_step()
            self._overflow_check.finish()
        return done

    def _run_step(self) -> _Done:
        self._put_grads([None] * len(self._parameters))
        try:
            output = _map(lambda tensor: tensor.detach(), self._step_fn(*self._inputs))
            if any(layer.has_pending_weights for layer in self._own):
                raise InvalidArgument(
                    "step_fn leaves gradients of experts' weights put off (OverlapConfig.defer_weights), "
                    "which replays would not compute: call moecomm.nn.backward_weights(model) within it"
                )
        except BaseException:
            for layer in self._own:  # what microbatches have put off is no part of the next run
                layer.backward_weights(drop=True)
            raise
        grads = [parameter.grad for parameter in self._parameters]
        self._put_grads([None] * len(self._parameters))
        return _Done(output, grads, [(each.last_losses, each.last_tokens_per_expert) for each in self._own])

    @contextlib.contextmanager
    def _settings(
        self,
        capacities: Sequence[int | None],
        seen: Callable[[GraphedExperts, DispatchOutput], None] | None,
        waits: bool,
    ) -> Iterator[None]:
        """A context in which the layers have these capacities, and each calls `seen` with itself and the
        result of its dispatch. `waits`: outside captures the host waits for the device in each layer, so that
        layers reuse memory."""
        before = [each.capacity for each in self._layers]
        try:
            for layer, capacity in zip(self._layers, capacities, strict=True):
                layer._dispatch_seen = None if seen is None else functools.partial(seen, layer)
                layer.capacity, layer._waits_on_host = capacity, waits
            yield
        finally:
            for layer, own_capacity in zip(self._layers, before, strict=True):
                layer.capacity, layer._dispatch_seen, layer._waits_on_host = own_capacity, None, False

    # -- a step ----------------------------------------------------------------------------------------

    def _before(self) -> _Before:
        kept, are_own = [], []
        for parameter, own in zip(self._parameters, self._own_grads, strict=True):
            grad = parameter.grad
            are_own.append(grad is not None and own is not None and _address(grad) == _address(own))
            kept.append(grad.clone() if grad is not None and are_own[-1] else grad)
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return _Before(kept, are_own, (torch.get_rng_state(), on_gpu))

    def _replay_and_check(self, replay: Callable[[], _Done]) -> tuple[_Done | None, Needed | None]:
        """Replays the step. Returns its outcome (None if an overflow ended it) and, if rows did not fit on
        some rank, what was needed (else None). All ranks of the group agree whether rows did not fit."""
        self.replays += 1
        done: _Done | None = None
        rows_on_host = 0
        try:
            done = replay()
        except CapacityExceeded as error:
            # On the CPU the next dispatch raises this on all ranks; in a graph no dispatch does.
            rows_on_host = error.needed
        try:
            rows = self._overflow_check.read(rows_on_host)
        except BaseException as error:
            if isinstance(error, Exception):
                self._wait()  # the device may find a lost peer after the last dispatch
            self._check_comms()  # the error of a lost peer says more than that of a failed agreement
            raise
        self._check_comms(overflowed=rows > 0)
        return done, Needed(rows, min(self._capacities)) if rows else None

    def _check_comms(self, overflowed: bool = False) -> None:
        """Raises the error that the device has found, except CapacityExceeded. After an overflow it ignores
        InvalidArgument too: rows left unspecified may cause it, and if they do not, the rerun raises it."""
        passed_over = (CapacityExceeded, InvalidArgument) if overflowed else (CapacityExceeded,)
        for comm in self._comms:
            for _ in range(2):  # check raises one error per call
                with contextlib.suppress(*passed_over):
                    comm.check()

    def _rerun_eager(self, before: _Before) -> _Done:
        """Restores the RNG and buffers, and runs the step without a graph, with outputs of exact size. With
        `grows` the next call captures the step anew, with larger capacities."""
        self._set_random(before.random)
        with torch.no_grad():
            for kept, buffer in self._buffers:
                buffer.copy_(kept)
        needed = [0.0]  # rows of each dispatch, over those of balanced routing

        @_disable_dynamo
        def seen(layer: GraphedExperts, out: DispatchOutput) -> None:
            needed.append(out.tokens.shape[0] / (layer.comm.max_tokens * layer.comm.top_k))

        with self._settings(self._exact, seen, waits=True):
            done = self._run_step()
        if self.grows:
            most = self._overflow_check.most(max(needed))
            found = [_capacity(layer, max(1.0, self.headroom) * most) for layer in self._layers]
            if any(map(operator.gt, found, self._capacities)):
                self._capacities, self._replay = list(map(max, found, self._capacities)), None
        return done

    def _accumulate_grads(self, done: _Done, before: _Before) -> None:
        """Adds the step's gradients to the earlier ones, and sets the layers' losses and token counts."""
        with torch.no_grad():
            for parameter, grad, prior, is_own in zip(
                self._parameters, done.grads, before.grads, before.are_own, strict=True
            ):
                if grad is None or prior is None:
                    parameter.grad = prior if grad is None else grad
                elif is_own:
                    parameter.grad = grad.add_(prior)
                else:
                    parameter.grad = prior.add_(grad)
        self._own_grads = done.grads
        for layer, (losses, tokens_per_expert) in zip(self._own, done.seen, strict=True):
            layer.last_losses, layer.last_tokens_per_expert = losses, tokens_per_expert

    def _copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor of the step's result."""
        if tensor.device.type == "cpu":
            self._wait()  # the step may not have copied it to the host yet
        return tensor.detach().clone()

    def _wait(self) -> None:
        """Waits until the device has finished the step."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -- state -----------------------------------------------------------------------------------------

    def _put_grads(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parameter.grad = grad

    def _set_random(self, state: tuple[Tensor, Tensor | None]) -> None:
        on_host, on_gpu = state
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self.device)


def experts_of(model: nn.Module) -> list[GraphedExperts]:
    """Returns the MoELayers of `model`, and the experts of transformers that moecomm has run, in order."""
    found: list[GraphedExperts] = []
    for module in model.modules():
        if isinstance(module, MoELayer):
            found.append(module)
        local = getattr(getattr(module, "moecomm", None), "local", None)  # of moecomm.transformers
        if local is not None and local.comm is not None and local not in found:  # wrappers have it, too
            found.append(local)
    return found


def _capacity(layer: GraphedExperts, headroom: float) -> int:
    """Returns the rows that a rank gets if the tokens of all ranks spread evenly over the experts, times
    `headroom`, but at most as many as any routing can bring, and at most the layer's own capacity.

    Example: 4 ranks with 1000 tokens each, top-2, 8 experts per rank: 2000 rows if balanced, 8000 at worst; a
    headroom of 1.25 gives 2500.
    """
    comm = layer.comm
    rows = math.ceil(min(rows_at_worst(comm), headroom * comm.max_tokens * comm.top_k))
    return rows if layer.capacity is None else min(rows, layer.capacity)


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's elements, of a DTensor those of this rank."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()  # to_local() is slow


def _kind(value: Any) -> str:
    """Returns what a graph fixes in an input: a tensor's dtype, shape and device, else the type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns `value` with `change` applied to each of its tensors."""

    def changed(each: Any) -> Any:
        if each is None or isinstance(each, Tensor):
            return None if each is None else change(each)
        raise InvalidArgument(
            f"step_fn returned {type(each).__name__}, must return tensors, also in tuples, lists and dicts"
        )

    return tree_map(changed, value)
