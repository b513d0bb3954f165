"""What autograd keeps for a backward, in the host's memory meanwhile.

A block's tensors are copied out on a stream of their own while the next block computes, and copied back while
the backward of the block after it computes:

    stream    forward                              backward
    caller    block 0    block 1    block 2        block 2     block 1     block 0
    copies               0 out      1 out          1 in        0 in

The caller's stream waits for the copies of block i at the end of block i + 1 and lets go of its tensors then,
so that the device holds those of two blocks at most, however far the host is ahead. Block 2 above, the last
one, is copied out too, but its backward finds its tensors still there. A backward that needs a block asks for
the one before it. The host waits for nothing.

All copies are on one stream. So a buffer in host memory that was read may be written again at once, and no
copy back can overtake the copy out. Memory of the device is taken and let go of on the caller's stream, which
waits for the copies first.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from moecomm.device.cuda_device import CudaDevice
from moecomm.errors import InvalidArgument
from moecomm.nn.recompute import require_unchanged, saving_hooks, version_of

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors of bytes to copy, each (to, from)."""


class ActivationOffload:
    """Keeps what autograd saves in host memory between forward and backward.

        offload = ActivationOffload(model)
        for block in blocks:
            with offload:
                x = block(x)
        loss_of(x).backward()

    Each `with` is a block, whose tensors go out together and come back together: while the next block
    computes, and while the backward of the block entered after it does. On GPUs the copies have a stream of
    their own, and the host waits for nothing; elsewhere they are made at once. Gradients have the same bits.

    Tensors of a float dtype whose memory has at least `min_bytes` are moved: those of attention, the block's
    input, and the rows and products that a MoELayer keeps. Of views only what they span is copied. Parameters
    and buffers of the model and casts of parameters stay where they are. Within a block
    torch.utils.checkpoint (use_reentrant=False) and `recompute_outputs` may be used: their inputs are moved
    then.

    Microbatches, and stages of a pipeline on this rank, share one object: blocks may have their forwards and
    backwards in any order, on one stream.

    Entering raises InvalidArgument within itself, within other saved_tensors_hooks (put it around a
    checkpoint, not inside) and while a CUDA graph is captured. Leaving raises it where a saved tensor was
    changed in place within the block. A backward raises RuntimeError, as autograd does, for one that was
    changed later, before the next block ended; after that the copy is used, which has not changed.

    Args:
        model: the module whose blocks are computed; its parameters say the device.
        min_bytes: the least bytes of a tensor that is moved.
        host_bytes: the most bytes of host memory to take; tensors beyond them stay on the device. None: as
            many as needed.

    Attributes:
        taken_bytes: bytes of host memory taken so far, pinned on GPUs. They are reused from step to step, in
            buffers of a power of two of bytes, and freed with this object.
        moved_bytes: bytes copied out so far.
    """

    def __init__(self, model: nn.Module, *, min_bytes: int = 1 << 20, host_bytes: int | None = None) -> None:
        if min_bytes < 1:
            raise InvalidArgument(f"min_bytes is {min_bytes}, must be at least 1")
        if host_bytes is not None and host_bytes < 0:
            raise InvalidArgument(f"host_bytes is {host_bytes}, must be at least 0, or None")
        first = next(model.parameters(), None)
        if first is None:
            raise InvalidArgument("model has no parameters, must be the module whose blocks are computed")
        self._min_bytes = min_bytes
        self._copies: _Copies = _GpuCopies(first.device) if first.device.type == "cuda" else _HostCopies()
        self._buffers = _Buffers(self._copies, host_bytes)
        self._open: _Block | None = None
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._leaving: weakref.ref[_Block] | None = None
        """The last block, whose tensors are being copied out and are still on the device."""
        self._staying = {each.untyped_storage().data_ptr() for each in model.buffers()}
        self.moved_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory taken so far."""
        return self._buffers.taken_bytes

    def __enter__(self) -> ActivationOffload:
        if self._open is not None or saving_hooks() is not None:
            raise InvalidArgument(
                "ActivationOffload is entered within "
                + (
                    "itself"
                    if self._open is not None
                    else "torch.utils.checkpoint or other saved_tensors_hooks"
                )
                + ", must be the outermost: put it around the whole block"
            )
        self._copies.require_usable()
        self._open = _Block(self._copies, self._buffers, self._leaving)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hooks is not None and self._open is not None
        self._hooks.__exit__(kind, error, trace)
        block, self._open, self._hooks = self._open, None, None
        if error is not None or not block.parts:
            return
        if (changed := block.changed()) is not None:
            raise InvalidArgument(
                f"a tensor of shape {tuple(changed.shape)} and dtype {changed.dtype} was changed in place "
                "after autograd had saved it, must stay as it is within ActivationOffload"
            )
        self.moved_bytes += block.copy_out()
        before = None if self._leaving is None else self._leaving()
        self._leaving = weakref.ref(block)
        if before is not None:
            before.let_go()

    def _pack(self, tensor: Tensor) -> Any:
        """Returns what autograd keeps in place of a tensor."""
        block, local = self._open, tensor
        if isinstance(local, DTensor):
            local = local._local_tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        moves = (
            block is not None
            and type(local) is Tensor
            and local.is_floating_point()
            and local.numel() > 0
            and local.untyped_storage().nbytes() >= self._min_bytes
            and local.untyped_storage().data_ptr() not in self._staying
            and not _is_of_parameter(tensor)
        )
        if block is None or not moves:
            # A tensor with its graph would hold the node that keeps it.
            return _Kept(tensor if tensor.is_leaf else tensor.detach(), version_of(tensor))
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        begin = int(local.storage_offset()) * local.itemsize
        return _Saved(block.part(local), local.dtype, local.shape, local.stride(), begin, spec)


_OF_PARAMETERS = frozenset(
    (
        "ToCopyBackward0",
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
    )
)
"""The nodes between a parameter and the forms of it that products save."""


def _is_of_parameter(tensor: Tensor) -> bool:
    """Returns True for a leaf that requires a gradient, and for casts and views of one."""
    if tensor.is_leaf:  # what a product saves of a frozen weight is a view without a graph
        return tensor.requires_grad or any(isinstance(each, nn.Parameter) for each in (tensor, tensor._base))
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _OF_PARAMETERS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


class _Kept(NamedTuple):
    """A tensor that stays where it is, as autograd keeps it, with its version: torch compares no versions of
    tensors that went through hooks."""

    tensor: Tensor
    version: int


class _Saved(NamedTuple):
    """What autograd keeps in place of a tensor that is moved."""

    part: _Part
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    begin: int
    """The byte of its memory at which it begins."""
    spec: Any
    """How a DTensor, whose local part this is, lies over ranks; None for a tensor."""


def _unpack(kept: _Saved | _Kept) -> Tensor:
    """Returns the tensor in whose place autograd has kept this."""
    if isinstance(kept, _Kept):
        require_unchanged(kept.tensor, kept.version)
        return kept.tensor
    here = kept.part.bring_back()
    local = here.new_empty(0, dtype=kept.dtype)
    begin = here.storage_offset() + kept.begin - kept.part.begin
    local.set_(here.untyped_storage(), begin // kept.dtype.itemsize, kept.shape, kept.strides)
    if kept.spec is None:
        return local
    spec = kept.spec
    whole: Tensor = DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return whole


class _Part:
    """What saved tensors that share memory span of it, as bytes; autograd's graph holds it.

    Attributes:
        here: it, on the device; None while it is in host memory alone. All of the memory, until the block is
            left.
        begin: the byte of the memory at which `here` begins.
        host: its copy in host memory; None if there is none, or none any more.
        nbytes: its bytes; `host` may have more.
    """

    def __init__(self, block: _Block, memory: Tensor) -> None:
        """memory: the first of the tensors."""
        self.block = block
        self.here: Tensor | None = _bytes_of(memory)
        self.host: Tensor | None = None
        self.begin, self.nbytes = 0, self.here.numel()
        self._versions: list[tuple[Tensor, int]] = []
        """The tensors, while they share memory with `here`, and their versions."""
        self._spans: list[tuple[int, int]] = []

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor to what is moved."""
        begin = int(tensor.storage_offset())
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._spans.append((begin * tensor.itemsize, (begin + last + 1) * tensor.itemsize))
        # With its graph it would hold the node that keeps it.
        self._versions.append((tensor if tensor.is_leaf else tensor.detach(), version_of(tensor)))

    def narrow(self) -> None:
        """Takes `here` to what the tensors span, beginning where kernels find their memory aligned."""
        begins, ends = zip(*self._spans, strict=True)
        self.begin = min(begins) // _ALIGNED * _ALIGNED
        self.nbytes = max(ends) - self.begin
        assert self.here is not None
        self.here = _bytes_of(self.here, self.begin, self.nbytes)

    def changed(self) -> Tensor | None:
        """Returns a tensor that was changed after it was saved, if there is one."""
        return next((tensor for tensor, version in self._versions if version_of(tensor) != version), None)

    def let_go(self) -> None:
        """Leaves the device, for what the copy has; changed memory stays, so that a backward can tell."""
        if self.host is not None and self.changed() is None:
            self.here = None
            self._versions.clear()

    def bring_back(self) -> Tensor:
        """Returns the memory on the device, for work that comes later on the caller's stream."""
        for tensor, version in self._versions:
            require_unchanged(tensor, version)
        self.block.begin_backward()
        assert self.here is not None
        self.block.arrive(self.here)
        return self.here

    def __del__(self) -> None:
        self.block.retire(self)


_ALIGNED = 512
"""Bytes; torch's memory of GPUs begins at multiples of it."""


def _bytes_of(tensor: Tensor, begin: int = 0, nbytes: int | None = None) -> Tensor:
    """Returns `nbytes` bytes of a tensor's memory from `begin` on, or all of it."""
    memory = tensor.untyped_storage()
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return found.set_(memory, begin, (memory.nbytes() if nbytes is None else nbytes,), (1,))


class _Block:
    """The tensors that are saved within one `with`. Each of its parts holds it.

    Attributes:
        parts: the parts, by the address of their memory, until they are copied out.
    """

    def __init__(self, copies: _Copies, buffers: _Buffers, before: weakref.ref[_Block] | None) -> None:
        self._copies, self._buffers, self._before = copies, buffers, before
        self.parts: dict[int, _Part] = {}
        self._all: list[weakref.ref[_Part]] = []
        self._leaving: Any = None
        """The event of the copies out, until the tensors are let go of."""
        self._arriving: Any = None
        """The event of the copies back, once they have begun."""
        self._waiting: set[int] = set()
        """The streams that have been told to wait for it."""
        self._fetched_on = 0
        """The stream whose memory the copies back are made to."""
        self._has_begun = False
        """True from the begin of the backward on."""

    def part(self, tensor: Tensor) -> _Part:
        """Returns the part that is a tensor's memory."""
        memory = tensor.untyped_storage().data_ptr()
        found = self.parts.get(memory)
        if found is None:
            found = self.parts[memory] = _Part(self, tensor)
        found.add(tensor)
        return found

    def changed(self) -> Tensor | None:
        """Returns a tensor that was changed after it was saved, if there is one."""
        return next((each for part in self.parts.values() if (each := part.changed()) is not None), None)

    def copy_out(self) -> int:
        """Begins to copy the parts to host memory, as far as there is room; returns the bytes."""
        pairs = []
        parts, self.parts = self.parts, {}
        for part in parts.values():
            part.narrow()
            part.host = self._buffers.take(part.nbytes)
            if part.host is not None and part.here is not None:
                pairs.append((part.host[: part.nbytes], part.here))
        self._all = [weakref.ref(part) for part in parts.values()]
        self._leaving = self._copies.start(pairs)
        return sum(here.numel() for _, here in pairs)

    def let_go(self) -> None:
        """Lets go of what was copied out, after the copies and the caller's work so far; in a backward that
        has begun autograd does."""
        if self._leaving is None or self._has_begun:
            return
        self._copies.wait(self._leaving)
        self._leaving = None
        for part in self._living():
            part.let_go()

    def begin_backward(self) -> None:
        """Asks for this block, if nobody has, and for the one before it, when the first of this one's tensors
        is needed."""
        if self._has_begun:
            return
        self._has_begun = True
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()

    def fetch(self) -> None:
        """Begins to copy back what is in host memory alone."""
        pairs = []
        for part in self._living():
            if part.here is None and part.host is not None:
                part.here = self._copies.empty_here(part.nbytes)
                pairs.append((part.here, part.host[: part.nbytes]))
                self._buffers.give(part.host)  # the next copy into it comes after this one
                part.host = None
        if pairs:
            self._arriving, self._fetched_on = self._copies.start(pairs), self._copies.stream()

    def arrive(self, here: Tensor) -> None:
        """Makes the caller's later work, which uses the memory `here`, come after the copies back. The nodes
        of a backward run on the streams of their forwards, so there may be several such streams."""
        if self._arriving is None:
            return
        stream = self._copies.stream()
        if stream not in self._waiting:
            self._waiting.add(stream)
            self._copies.wait(self._arriving)
        if stream != self._fetched_on:
            self._copies.use(here)

    def retire(self, part: _Part) -> None:
        """Lets a part's memory be used for something else, after the copies that are under way."""
        if part.here is not None:
            self.arrive(part.here)  # nobody has waited for a backward that did not come
            if self._leaving is not None:
                self._copies.hold(part.here)
        if part.host is not None:
            self._buffers.give(part.host)

    def _living(self) -> list[_Part]:
        return [part for part in (each() for each in self._all) if part is not None]


class _Buffers:
    """Host memory in buffers of a power of two of bytes, taken when it is first needed, and kept.

    Attributes:
        taken_bytes: bytes of all of them.
    """

    def __init__(self, copies: _Copies, limit: int | None) -> None:
        self._copies, self._limit = copies, limit
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.taken_bytes = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Returns a buffer of at least so many bytes; None beyond the limit."""
        size = 1 << (nbytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        if self._limit is not None and self.taken_bytes + size > self._limit:
            return None
        self.taken_bytes += size
        return self._copies.empty_host(size)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back, for copies that are begun later."""
        self._free[buffer.numel()].append(buffer)


class _Copies(Protocol):
    """How bytes are copied between the device and the host's memory."""

    def require_usable(self) -> None:
        """Raises InvalidArgument where no copies can be made."""

    def start(self, pairs: Pairs) -> Any:
        """Begins copies, after the caller's work so far and all copies before; returns their event."""

    def wait(self, event: Any) -> None:
        """Makes the caller's later work come after the copies of an event."""

    def stream(self) -> int:
        """Returns the number of the caller's stream."""

    def empty_host(self, nbytes: int) -> Tensor:
        """Returns new host memory."""

    def empty_here(self, nbytes: int) -> Tensor:
        """Returns new memory of the device, for the caller's stream."""

    def use(self, here: Tensor) -> None:
        """Keeps a tensor's memory, of which the caller lets go, until its stream's work so far is done."""

    def hold(self, here: Tensor) -> None:
        """Keeps a tensor's memory, of which the caller lets go, until the copies so far are done."""


class _HostCopies:
    """Copies that are made at once."""

    def require_usable(self) -> None:
        """Does nothing."""

    def start(self, pairs: Pairs) -> Any:
        """Makes the copies."""
        for to, origin in pairs:
            to.copy_(origin)
        return True

    def wait(self, event: Any) -> None:
        """Does nothing."""

    def stream(self) -> int:
        """Returns 0."""
        return 0

    def empty_host(self, nbytes: int) -> Tensor:
        """Returns new memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def empty_here(self, nbytes: int) -> Tensor:
        """Returns new memory."""
        return self.empty_host(nbytes)

    def use(self, here: Tensor) -> None:
        """Does nothing."""

    def hold(self, here: Tensor) -> None:
        """Does nothing."""


class _GpuCopies:
    """Copies on a stream of their own, to and from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._gpu = CudaDevice(index)
        self._stream = self._gpu.new_stream()

    def require_usable(self) -> None:
        """Raises InvalidArgument in a capture."""
        if self._gpu.capturing():
            raise InvalidArgument(
                "ActivationOffload is entered while a CUDA graph is captured, must be outside: a graph keeps "
                "its memory between replays"
            )

    def start(self, pairs: Pairs) -> torch.cuda.Event:
        """Issues the copies after what the current stream has been given."""
        self._stream.wait_event(self._gpu.record_event())
        with self._gpu.on(self._stream):
            for to, origin in pairs:
                to.copy_(origin, non_blocking=True)
        return self._gpu.record_event(self._stream)

    def wait(self, event: torch.cuda.Event) -> None:
        """Makes the current stream wait."""
        self._gpu.stream().wait_event(event)

    def stream(self) -> int:
        """Returns the handle of the current stream."""
        return self._gpu.raw_stream()

    def empty_host(self, nbytes: int) -> Tensor:
        """Returns new pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty_here(self, nbytes: int) -> Tensor:
        """Returns memory of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._gpu.device)

    def use(self, here: Tensor) -> None:
        """Tells torch's allocator of the current stream."""
        here.record_stream(self._gpu.stream())

    def hold(self, here: Tensor) -> None:
        """Tells torch's allocator of the copies' stream."""
        here.record_stream(self._stream)
