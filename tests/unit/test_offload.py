"""What autograd saves goes to host memory and comes back: with the bits of a backward without it, in an order
of copies and waits that never reads or frees memory too early."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moecomm.errors import InvalidArgument
from moecomm.nn import ActivationOffload, recompute_outputs
from moecomm.nn.offload import Pairs

BLOCKS, WIDTH = 4, 16


class LateCopies:
    """A stream that makes a copy as late as it may: when somebody waits for it. Memory of the device is not a
    number before its copy has come, and a copy of or to memory that nobody holds any more is an error."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, Callable[[], Tensor | None], Callable[[], Tensor | None]]] = []
        self.held: list[Tensor] = []
        self.issued = 0
        self.log: list[str] = []
        self.host_buffers = 0
        self.now = 1
        """The caller's stream."""

    def require_usable(self) -> None:
        pass

    def start(self, pairs: Pairs) -> Any:
        self.issued += 1
        self.log.append(f"start {self.issued}")
        self.queue += [(self.issued, _watch(to), _watch(origin)) for to, origin in pairs]
        return self.issued

    def wait(self, event: Any) -> None:
        self.log.append(f"wait {event}" + ("" if self.now == 1 else f" on {self.now}"))
        while self.queue and self.queue[0][0] <= event:
            _, to, origin = (each if isinstance(each, int) else each() for each in self.queue.pop(0))
            assert isinstance(to, Tensor), "memory was let go of before a copy came"
            assert isinstance(origin, Tensor), "memory was let go of before it was copied"
            to.copy_(origin)

    def empty_host(self, nbytes: int) -> Tensor:
        self.host_buffers += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def empty_here(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN as float32

    def stream(self) -> int:
        return self.now

    def use(self, here: Tensor) -> None:
        self.log.append(f"use on {self.now}")

    def hold(self, here: Tensor) -> None:
        self.held.append(here)


def _watch(tensor: Tensor) -> Callable[[], Tensor | None]:
    """Returns a function that returns the tensor, or None once nobody holds it. Of the host's buffers, which
    stay, slices are copied."""
    return weakref.ref(tensor) if tensor._base is None else lambda: tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).sigmoid())


class Thrifty(Block):
    """With a norm that is computed again."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        with recompute_outputs(self.norm, (x,), h):
            return x + self.down(self.up(h).sigmoid())


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def make(kind: type[Block] = Block) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(kind() for _ in range(BLOCKS))


def inputs(number: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(number))


def forward(model: nn.ModuleList, x: Tensor, offload: ActivationOffload | None = None) -> Tensor:
    for block in model:
        if offload is None:
            x = block(x)
        else:
            with offload:
                x = block(x)
    return x.square().sum()


def gradients(model: nn.ModuleList) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [each for each in found if each is not None]


def late(model: nn.Module, **options: Any) -> tuple[ActivationOffload, LateCopies]:
    offload, copies = ActivationOffload(model, min_bytes=64, **options), LateCopies()
    offload._copies = offload._buffers._copies = copies
    return offload, copies


Order = Callable[[nn.ModuleList, ActivationOffload | None], None]


def one(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    forward(model, inputs(0), offload).backward()


def accumulated(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    for number in range(3):
        forward(model, inputs(number), offload).backward()


def ahead(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    """As a first stage of a pipeline: forwards are ahead of the backwards, which come in their order."""
    losses = [forward(model, inputs(number), offload) for number in range(2)]
    for number in range(2, 4):
        losses.pop(0).backward()
        losses.append(forward(model, inputs(number), offload))
    for loss in losses:
        loss.backward()


def backwards_reversed(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    for loss in [forward(model, inputs(number), offload) for number in range(3)][::-1]:
        loss.backward()


def given_up(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    """A forward whose backward never comes, and one whose backward ends in the middle."""
    forward(model, inputs(5), offload)
    x = inputs(6)
    middle = None
    for number, block in enumerate(model):
        with offload or torch.enable_grad():
            x = block(x)
        middle = x if number == 1 else middle
    assert middle is not None
    torch.autograd.grad(x.sum(), middle)
    del x, middle
    forward(model, inputs(0), offload).backward()


def twice(model: nn.ModuleList, offload: ActivationOffload | None) -> None:
    loss = forward(model, inputs(0), offload)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("kind", [Block, Thrifty, Checkpointed])
@pytest.mark.parametrize("order", [one, accumulated, ahead, backwards_reversed, given_up, twice])
def test_gradients_have_the_same_bits(order: Order, kind: type[Block]) -> None:
    """Twice, with the same host memory."""
    model = make()
    order(model, None)
    wanted = gradients(model)
    model = make(kind)
    offload, copies = late(model)
    taken = []
    for _ in range(3):
        order(model, offload)
        for found, same in zip(gradients(model), wanted, strict=True):
            assert torch.equal(found, same)
        taken.append(copies.host_buffers)
    assert taken[0] > 0 and taken[2] == taken[1] == taken[0]
    free = sum(len(each) for each in offload._buffers._free.values())
    assert free == copies.host_buffers  # all came back
    plain = ActivationOffload(model, min_bytes=64)
    order(model, plain)
    assert all(map(torch.equal, gradients(model), wanted)) and plain.moved_bytes > 0


def test_the_order_of_copies() -> None:
    """Blocks 1 to 4 go out; each is let go of at the end of the next; 3, 2, 1 come back, one ahead."""
    model = make()
    offload, copies = late(model)
    loss = forward(model, inputs(0), offload)
    assert copies.log == ["start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3"]
    copies.log.clear()
    loss.backward()
    # The fourth is still there; 5, 6 and 7 bring back the third, second and first, each asked for by the one
    # after it, before that one waits for its own.
    assert copies.log == ["start 5", "start 6", "wait 5", "start 7", "wait 6", "wait 7"]


def test_a_backward_on_two_streams() -> None:
    """Each stream waits for the copies once; the allocator is told of one that did not ask for the memory."""
    model = make()
    offload, copies = late(model)
    x = torch.rand(7, WIDTH, requires_grad=True)
    with offload:
        first, second = x * torch.rand(7, WIDTH), (x * 2) * torch.rand(7, WIDTH)
    forward(model, inputs(0), offload)  # lets go of what the block has saved
    copies.log.clear()

    class OnStream(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor, stream: int) -> Tensor:
            ctx.stream = stream
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            copies.now = ctx.stream
            return grad, None

    for stream, y in ((1, first), (2, second), (1, first), (2, second)):
        OnStream.apply(y, stream).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    back = [entry for entry in copies.log if "start" not in entry]
    event = copies.issued
    assert back[0] == f"wait {event}" and back.count(f"wait {event}") == 1
    assert back.count(f"wait {event} on 2") == 1 and back.count("use on 2") == 2
    copies.now = 1


def test_host_memory_has_a_bound() -> None:
    """What does not fit stays on the device."""
    model = make()
    forward(model, inputs(0)).backward()
    wanted = gradients(model)
    offload, _ = late(model, host_bytes=3000)
    for _ in range(2):
        forward(model, inputs(0), offload).backward()
        assert all(map(torch.equal, gradients(model), wanted))
        assert 2000 < offload.taken_bytes <= 3000
    assert 0 < offload.moved_bytes <= 2 * offload.taken_bytes


def test_parameters_and_buffers_stay() -> None:
    model = make()
    model.register_buffer("scale", torch.rand(7, WIDTH))
    offload = ActivationOffload(model, min_bytes=1)
    x = inputs(0).requires_grad_()
    with offload, torch.autocast("cpu", torch.bfloat16):
        y = model[0].up(x * model.get_buffer("scale"))
    assert offload.moved_bytes == x.numel() * 2  # the product's input in bfloat16
    y.sum().backward()


def test_what_is_refused() -> None:
    model = make()
    offload = ActivationOffload(model, min_bytes=1)
    for options in ({"min_bytes": 0}, {"host_bytes": -1}):
        with pytest.raises(
            InvalidArgument, match=f"{next(iter(options))} is {next(iter(options.values()))}, must"
        ):
            ActivationOffload(model, **options)
    with pytest.raises(InvalidArgument, match="model has no parameters, must be"):
        ActivationOffload(nn.Identity())
    with (
        offload,
        pytest.raises(InvalidArgument, match="entered within itself, must be the outermost"),
        offload,
    ):
        pass
    with pytest.raises(InvalidArgument, match=r"entered within torch\.utils\.checkpoint or other"):
        checkpoint(lambda x: forward(model, x, offload), inputs(0), use_reentrant=False)
    x = inputs(0).requires_grad_()
    with (
        pytest.raises(
            InvalidArgument, match=r"shape \(7, 16\) and dtype torch\.float32 was changed in place"
        ),
        offload,
    ):
        (x * 1).exp().add_(1)
    with pytest.raises(ZeroDivisionError), offload:
        _ = forward(model, x) / (1 / 0)
    forward(model, x, offload).backward()  # it can be used after all of these


def test_outputs_must_be_the_same_again() -> None:
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    x, calls = inputs(0).requires_grad_(), []

    def changing(x: Tensor) -> Tensor:
        calls.append(x)
        return norm(x)[: 8 - len(calls)]

    h = changing(x)
    with recompute_outputs(changing, (x,), h):
        y = linear(h)
    with pytest.raises(InvalidArgument, match=r"make returned .* must return what it did before"):
        y.sum().backward()


def test_outputs_are_made_once_for_all_that_need_them() -> None:
    calls = []
    norm, products = nn.RMSNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))

    def counted(x: Tensor) -> Tensor:
        calls.append(torch.is_autocast_enabled("cpu"))
        y: Tensor = norm(x)
        return y

    x = inputs(0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        h = counted(x)
        with recompute_outputs(counted, (x,), h):
            y = sum(each(h).float().sum() for each in products)
    assert isinstance(y, Tensor)
    y.backward(retain_graph=True)
    y.backward()
    assert calls == [True, True, True]  # in the forward, and once in each backward


class _Pair(torch.autograd.Function):
    """Two outputs of one node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2 + grads[1] * 3


def test_an_output_that_is_changed_in_place_is_kept() -> None:
    norm, x = nn.LayerNorm(WIDTH), inputs(0)
    found = []
    for again in (False, True):
        leaf = x.clone().requires_grad_()
        h = norm(leaf)
        with recompute_outputs(norm, (leaf,), h) if again else contextlib.nullcontext():
            y = h.sigmoid_()
        y.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_a_cast_of_the_second_output_is_not_the_first() -> None:
    x, weight = inputs(0), torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for again in (False, True):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        pair = _Pair.apply(leaf)
        with recompute_outputs(_Pair.apply, (leaf,), pair) if again else contextlib.nullcontext():
            y = pair[1].double() @ w.double()
        y.sum().backward()
        found.append(w.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["offload", "recompute"])
def test_what_stays_may_not_be_changed_in_place(kind: str) -> None:
    """torch compares no versions of tensors that go through hooks."""
    model = make()
    x = inputs(0).requires_grad_()
    h = x * 1
    block = (
        ActivationOffload(model, min_bytes=1 << 30) if kind == "offload" else recompute_outputs(abs, (), h)
    )
    with block:
        other = (x * 2).exp()
        y = other * x
    other.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


Change = Callable[[ActivationOffload, nn.ModuleList, Tensor], None]


def at_once(offload: ActivationOffload, model: nn.ModuleList, saved: Tensor) -> None:
    saved.add_(1)


def in_a_view(offload: ActivationOffload, model: nn.ModuleList, saved: Tensor) -> None:
    saved[:1, ::2].zero_()


def before_the_next_block(offload: ActivationOffload, model: nn.ModuleList, saved: Tensor) -> None:
    saved.add_(1)
    forward(model, inputs(0), offload)


def within_the_next_block(offload: ActivationOffload, model: nn.ModuleList, saved: Tensor) -> None:
    with offload:
        x = model[0](inputs(0))
        saved.add_(1)
        x.sigmoid()


@pytest.mark.parametrize("host_bytes", [None, 0])
@pytest.mark.parametrize("change", [at_once, in_a_view, before_the_next_block, within_the_next_block])
def test_what_is_moved_may_not_be_changed_until_it_has_gone(change: Change, host_bytes: int | None) -> None:
    """The last block is not brought back, and of others the copies may still be under way."""
    model = make()
    offload, _ = late(model, host_bytes=host_bytes)
    x = inputs(0).requires_grad_()
    with offload:
        y = torch.exp(x)
    loss = y.sum()
    with torch.no_grad():
        change(offload, model, y.detach())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(7, 16\)"):
        loss.backward()


def test_what_has_gone_has_its_old_values() -> None:
    model = make()
    offload, _ = late(model)
    x = inputs(0).requires_grad_()
    with offload:
        y = torch.exp(x)
    forward(model, inputs(0), offload)
    y.detach().add_(1)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.exp(inputs(0)))


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_views_what_they_span_is_moved(gone: bool, dtype: torch.dtype) -> None:
    """Two views of a buffer, some way into it, that overlap, and one without elements."""
    model = make()
    offload, copies = late(model)
    buffer = torch.randn(5000, generator=torch.Generator().manual_seed(2)).to(dtype)
    rows, column, none = buffer[1003:1103].view(10, 10), buffer[1050:1250].view(10, 20)[:, 3], buffer[1:1]
    x, z = (
        torch.ones(10, 10, dtype=dtype, requires_grad=True),
        torch.ones(10, dtype=dtype, requires_grad=True),
    )
    with offload:
        total = (x * rows).sum() + (z * column).sum() + (z[:0] * none).sum()
    # Of the second one the last element is the 183rd.
    begin = 1003 * dtype.itemsize // 512 * 512
    assert offload.moved_bytes == (1050 + 184) * dtype.itemsize - begin
    if gone:
        forward(model, inputs(0), offload)
    total.backward()
    assert torch.equal(x.grad, rows) and torch.equal(z.grad, column)
    copies.held.clear()


def test_a_small_view_takes_little_of_the_host() -> None:
    model = make()
    offload = ActivationOffload(model, min_bytes=1 << 20)
    big, x = torch.randn(1 << 20), torch.ones(64, requires_grad=True)
    with offload:
        y = x * big[1 << 19 :][:64]
    assert offload.moved_bytes == 256 == offload.taken_bytes
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, big[1 << 19 :][:64])


def test_a_frozen_weight_stays() -> None:
    model = make()
    model.requires_grad_(False)
    offload = ActivationOffload(model, min_bytes=1)
    x = inputs(0).requires_grad_()
    with offload:
        y = nn.functional.linear(x, next(iter(model.children())).up.weight)
    assert offload.moved_bytes == 0  # nothing but the weight is needed
    y.sum().backward()
