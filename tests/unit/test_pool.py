"""ActivationPool: rows, counts, errors; and layers that keep theirs in one. tests/gpu/test_pool.py runs the
tests that have a `pool` on a GPU, too.

Pushes and pops in random order go beside a count of pages that shares nothing with the pool's.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moecomm import _C
from moecomm.errors import InvalidArgument, PoolExceeded
from moecomm.nn import ActivationPool, MoEConfig, MoELayer, OverlapConfig, keep_plans
from moecomm.nn import pages as pages_module
from moecomm.nn.pages import TABLE_WORDS, CudaPages
from moecomm.nn.token_dropping import rows_for_headroom
from tests import ranks
from tests.multirank.conftest import Pools
from tests.unit.loopback import FakeGpu

PAGE = 4096
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8)
WIDTHS = (1, 7, 16, 200, 1024, 2049)


def tensors_of(device: torch.device, rows: int, rng: random.Random, most: int = 4) -> list[Tensor]:
    """1 to `most` tensors of random bytes, all of `rows` rows."""
    found = []
    for _ in range(rng.randint(1, most)):
        dtype = rng.choice(DTYPES)
        count = rows * rng.choice(WIDTHS) * dtype.itemsize
        generator = torch.Generator(device).manual_seed(rng.getrandbits(40))
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device, generator=generator)
        found.append(
            data.view(dtype).view(rows, -1) if rows else torch.empty(0, 3, dtype=dtype, device=device)
        )
    return found


def pages_for(tensors: list[Tensor], count: int, page_bytes: int) -> int:
    total = 0
    for each in tensors:
        size = count * each.shape[1] * each.element_size()
        while size > 0:
            total, size = total + 1, size - page_bytes
    return total


def same(got: Tensor, want: Tensor, count: int) -> bool:
    """The first rows, byte by byte: NaNs too."""
    left, right = (each[:count].contiguous().view(torch.uint8) for each in (got, want))
    return got.shape == want.shape and got.dtype == want.dtype and torch.equal(left, right)


def _random_order(
    rank: int, world_size: int, seed: int, page_bytes: int, pages: int, spill: int, steps: int
) -> list[str]:
    """Lists what is wrong after random steps: rows, pages held, the peak, or what `check` says."""
    ranks.poison(64 << 20)
    device = ranks.device()
    rng = random.Random(seed)
    pool = ActivationPool(
        device, pages * page_bytes + 5, page_bytes=page_bytes, spill_bytes=spill * page_bytes + 7
    )
    problems: list[str] = []
    if (pool.device_bytes, pool.spill_bytes) != (pages * page_bytes, spill * page_bytes):
        problems.append(f"{pool} has not {pages} + {spill} pages")
    free, held, peak, failures = pages + spill, 0, 0, 0
    alive: list[tuple[Any, list[Tensor], int, int, bool]] = []
    for step in range(steps):
        if rng.random() < 0.55 and len(alive) < 12:
            rows = rng.choice((0, 1, 5, 64, 300))
            tensors = tensors_of(device, rows, rng)
            said = rng.choice((0, 1, rows // 2, rows, rows + 9))
            ends = torch.tensor([0, said // 2, said], dtype=torch.int32, device=device)
            given = rng.random() < 0.8
            count = min(said, rows) if given else rows
            needed = pages_for(tensors, count, page_bytes)
            handle = pool.stash(*tensors, ends=ends if given else None)
            fits = needed <= free
            free -= needed if fits else 0
            held += needed
            peak = max(peak, held)
            failures += not fits
            alive.append((handle, tensors, count, needed, fits))
        elif alive:
            handle, tensors, count, needed, fits = alive.pop(rng.randrange(len(alive)))
            if rng.random() < 0.2:
                pool.drop(handle)
            else:
                for number, (got, want) in enumerate(zip(pool.restore(handle), tensors, strict=True)):
                    if got.shape != want.shape or (fits and not same(got, want, count)):
                        problems.append(f"step {step}: tensor {number} of {count} rows came back differently")
            free += needed if fits else 0
            held -= needed
        use = pool.use()
        if (use.held, use.peak) != (held * page_bytes, peak * page_bytes):
            problems.append(f"step {step}: {use}, expected {held} and {peak} pages of {page_bytes}")
        if problems:
            break
        if step % 40 == 39:
            problems += _check(pool, peak * page_bytes if failures else 0, step)
            failures, peak = 0, held
    return problems


def _check(pool: ActivationPool, needed: int, step: int) -> list[str]:
    """`check` raises once, with the bytes that would have been needed."""
    problems = []
    for expected in (needed, 0):
        found = 0
        try:
            pool.check()
        except PoolExceeded as error:
            found = error.needed
            if error.available != pool.bytes:
                problems.append(f"step {step}: {error} of a pool with {pool.bytes} bytes")
        if found != expected:
            problems.append(f"step {step}: check said {found} bytes were needed, expected {expected}")
    return problems


ORDERS: dict[str, dict[str, int]] = {
    "room for all": {"page_bytes": 1 << 16, "pages": 2000, "spill": 0, "steps": 80},
    "small pages": {"page_bytes": 1 << 12, "pages": 9000, "spill": 0, "steps": 80},
    "some in host memory": {"page_bytes": 1 << 14, "pages": 60, "spill": 1500, "steps": 80},
    "all in host memory": {"page_bytes": 1 << 13, "pages": 0, "spill": 4000, "steps": 60},
    "often too small": {"page_bytes": 1 << 14, "pages": 150, "spill": 30, "steps": 160},
    "one page": {"page_bytes": 1 << 13, "pages": 1, "spill": 0, "steps": 80},
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_random_order(pool: Pools, order: dict[str, int], seed: int) -> None:
    assert pool(1)(_random_order, seed, *order.values()) == [[]]


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _within(rank: int, world_size: int, spill: int, seed: int) -> list[str]:
    device, rng, problems = ranks.device(), random.Random(seed), []
    pool = ActivationPool(device, (64 - spill) * PAGE, page_bytes=PAGE, spill_bytes=spill * PAGE)
    for turn in range(30):
        rows = rng.choice((1, 3, 50, 130))
        width = rng.choice((1, 13, 16, 512, 1000))
        count = rng.randint(0, rows)
        pushed = torch.randint(0, 256, (rows, width), dtype=torch.uint8, device=device)
        ends = torch.tensor([0, count], dtype=torch.int32, device=device)
        handle = pool.stash(pushed, ends=ends)
        if pool.use().held != pages_for([pushed], count, PAGE) * PAGE:
            problems.append(f"turn {turn}: {pool.use()} of {count} x {width}")
        if handle.table.shape != (TABLE_WORDS + pages_for([pushed], rows, PAGE),):
            problems.append(f"turn {turn}: {handle.table.shape} is not for the pages of the worst case")
        memory = torch.full((4096 + rows * width + 4096,), 0xA5, dtype=torch.uint8, device=device)
        into = memory[4096 : 4096 + rows * width].view(rows, width)
        pool._pages.restore([into], handle.table)
        if not torch.equal(into[:count], pushed[:count]):
            problems.append(f"turn {turn}: {count} of {rows} x {width} came back differently")
        memory[4096 : 4096 + count * width] = 0xA5
        if not bool((memory == 0xA5).all()):
            problems.append(f"turn {turn}: {count} of {rows} x {width}: bytes outside were written")
    if pool.use().held:
        problems.append(f"{pool.use()} at the end")
    return problems


@pytest.mark.parametrize("spill", [0, 60, 64])
def test_only_real_rows_are_written(pool: Pools, spill: int, seed: int) -> None:
    """Rows that are not real, and all around the tensors, stay as they were and take no pages."""
    assert pool(1)(_within, spill, seed) == [[]]


def test_what_does_not_fit_is_left_alone(seed: int) -> None:
    """A push that does not fit takes no page: of three pages one push takes two; the next needs three
    and says five in all; the third has room."""
    pool = ActivationPool("cpu", 3 * PAGE, page_bytes=PAGE)
    kept, too_much, small = numbers(8, 256, seed), numbers(12, 256, seed + 1), numbers(4, 256, seed + 2)
    handles = [pool.stash(each) for each in (kept, too_much)]
    assert pool.use() == (5 * PAGE, 5 * PAGE, 3 * PAGE)
    handles.append(pool.stash(small))
    into = torch.full_like(too_much, 7.0)
    pool._pages.restore([into], handles[1].table)
    assert (into == 7.0).all(), "a handle without pages brings nothing back"
    assert torch.equal(pool.restore(handles[2])[0], small)
    assert torch.equal(pool.restore(handles[0])[0], kept)
    with pytest.raises(PoolExceeded, match=f"has {3 * PAGE} bytes, .* needed {6 * PAGE}") as caught:
        pool.check()
    assert (caught.value.needed, caught.value.available) == (6 * PAGE, 3 * PAGE)
    pool.check()
    assert pool.use() == (0, 0, 3 * PAGE)


def test_reset(seed: int) -> None:
    pool = ActivationPool("cpu", 2 * PAGE, page_bytes=PAGE)
    rows = numbers(8, 256, seed)
    lost, failed = pool.stash(rows), pool.stash(rows)
    pool.reset()
    assert pool.use() == (0, 0, 2 * PAGE)
    pool.check()
    again = pool.stash(rows)
    pool.drop(failed)
    assert pool.use().held == 2 * PAGE, "a handle from before the reset counts no more"
    pool.restore(lost)
    with pytest.raises(InvalidArgument, match="not in the activation pool any more"):
        pool.check()
    assert torch.equal(pool.restore(again)[0], rows)
    pool.check()


def test_twice_is_an_error(seed: int) -> None:
    pool = ActivationPool("cpu", 4 * PAGE, page_bytes=PAGE)
    rows = numbers(8, 256, seed)
    handle = pool.stash(rows)
    copied = handle._replace(table=handle.table.clone())
    pool.restore(handle)
    other = pool.stash(rows)
    for stale in (handle, copied):
        pool.restore(stale)
        with pytest.raises(InvalidArgument, match="a backward ran twice"):
            pool.check()
    assert torch.equal(pool.restore(other)[0], rows), "and takes nothing from others"
    pool.restore(pool.blank(rows))
    with pytest.raises(InvalidArgument):
        pool.check()


@pytest.mark.parametrize("transpose", [False, True])
def test_any_strides_and_addresses(transpose: bool, seed: int) -> None:
    pool = ActivationPool("cpu", 8 * PAGE, page_bytes=PAGE)
    rows = numbers(9, 9, seed).t() if transpose else numbers(1, 82, seed).view(-1)[1:].view(9, 9)
    assert torch.equal(pool.restore(pool.stash(rows))[0], rows)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"page_bytes": 5000}, "page_bytes is 5000, must be a power of two from 4096"),
        ({"page_bytes": 2048}, "page_bytes is 2048"),
        ({"bytes": 100}, "bytes is 100, must be at least one page of 4096"),
        ({"bytes": -1}, "bytes is -1"),
        ({"spill_bytes": -1}, "spill_bytes is -1"),
        ({"bytes": 1.5}, "bytes is 1.5"),
    ],
)
def test_bad_pools(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        ActivationPool(**{"device": "cpu", "bytes": PAGE, "page_bytes": PAGE, **change})


def test_bad_pushes() -> None:
    pool = ActivationPool("cpu", PAGE, page_bytes=PAGE)
    rows = torch.zeros(3, 4)
    for arguments, ends, text in (
        ((), None, "0 tensors were given, must be 1 to 4"),
        ((rows,) * 5, None, "5 tensors"),
        ((rows, torch.zeros(4, 4)), None, "tensor 1 has shape"),
        ((torch.zeros(3),), None, "tensor 0 has shape"),
        ((torch.zeros(3, 0),), None, "tensor 0 has shape"),
        ((rows.to("meta"),), None, "tensor 0 is on meta"),
        ((rows,), torch.zeros(2), "ends is torch.float32"),
        ((rows,), torch.zeros(0, dtype=torch.int32), "ends is torch.int32 \\(0,\\)"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            pool.stash(*arguments, ends=ends)
    assert pool.use().held == 0


def test_rows_for_headroom() -> None:
    """The example of its docstring."""
    sizes = {"ranks": 4, "max_tokens": 1000, "top_k": 2, "num_local_experts": 8}
    assert rows_for_headroom(1.0, **sizes) == 2000
    assert rows_for_headroom(1.25, **sizes) == 2500
    assert rows_for_headroom(100.0, **sizes) == 8000
    assert rows_for_headroom(100.0, **{**sizes, "num_local_experts": 1}) == 4000


def test_pages_go_back_with_the_last_tensor_of_the_table(seed: int) -> None:
    """A handle of one page, whose table has an alias; a second one that is popped before its table goes."""
    pool = ActivationPool("cpu", 4 * PAGE, page_bytes=PAGE)
    rows = numbers(4, 256, seed)
    handle = pool.owned(pool.stash(rows))
    alias = handle.table.detach()[2:]
    del handle
    assert pool.use().held == PAGE
    popped = pool.owned(pool.stash(rows))
    assert torch.equal(pool.restore(popped)[0], rows)
    other = pool.stash(rows)
    del popped
    assert pool.use().held == 2 * PAGE, "what is popped does not go back once more"
    del alias
    assert pool.use().held == PAGE
    assert torch.equal(pool.restore(other)[0], rows)
    pool.check()


class Captures:
    """Pages that say of each call in which capture it is."""

    def __init__(self, pages: Any) -> None:
        self.now, self.dropped = 0, list[tuple[int, int]]()
        self._pages = pages

    def capture(self) -> int:
        return self.now

    def drop(self, table: Tensor) -> None:
        self.dropped.append((self.now, int(table[0])))
        self._pages.drop(table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)


def test_pages_go_back_in_the_capture_that_took_them(seed: int) -> None:
    """Serials 1 to 4: of no capture, of 7, of 7 again, of 8. What a graph took only that graph gives back,
    and what no graph took is given back by none."""
    pool = ActivationPool("cpu", 8 * PAGE, page_bytes=PAGE)
    pages = Captures(pool._pages)
    pool._pages = pages
    handles = []
    for pages.now in (0, 7, 7, 8):
        handles.append(pool.owned(pool.stash(numbers(4, 256, seed))))
    pages.now = 7
    handles[1:2] = []
    handles[0:1] = []
    pool.use()
    assert pages.dropped == [(7, 2)]
    pages.now = 8
    handles.clear()
    pool.use()
    assert pages.dropped == [(7, 2), (8, 4)]
    pages.now = 0
    pool.use()
    assert pages.dropped == [(7, 2), (8, 4), (0, 1)]


# -- layers --------------------------------------------------------------------------------------------------


class Layer:
    """A layer on one rank, whose capacity has room to spare."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        config = MoEConfig(
            hidden=16, ffn_hidden=8, num_experts=4, top_k=2, dtype=torch.float64, num_shared_experts=1
        )
        self.layer = MoELayer(config, max_tokens=20, overlap=OverlapConfig(**options))
        self.x = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)

    def gradients(self, wrap: Any = None) -> list[Tensor]:
        self.layer.zero_grad()
        self.x.grad = None
        y = self.layer(self.x) if wrap is None else wrap(self.layer, self.x)
        y.square().sum().backward()
        assert self.x.grad is not None
        grads = [each.grad for each in self.layer.parameters() if each.grad is not None]
        return [each.clone() for each in (self.x.grad, *grads)]

    def with_pool(self, size: int = 16 * PAGE) -> ActivationPool:
        self.layer.capacity = 60
        self.layer.pool = ActivationPool("cpu", size, page_bytes=PAGE)
        return self.layer.pool


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))


@pytest.mark.parametrize(("keep", "pages"), [("all", 4), ("rows", 2), ("nothing", 0)])
def test_a_layer_keeps_its_rows_there(keep: Any, pages: int, seed: int) -> None:
    """40 rows of 16 values, and of 16 of the first product, 8 bytes each: two pages of 4096 each. They go
    with the backward, or with a result that has none."""
    case = Layer(seed, keep=keep)
    want = case.gradients()
    pool = case.with_pool()
    for backward in (True, False):
        y = case.layer(case.x)
        assert pool.use().held == pages * PAGE
        if backward:
            y.sum().backward()
        del y
        assert pool.use().held == 0
    assert_same(case.gradients(), want)
    pool.check()


def test_an_error_after_the_push_leaves_no_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Layer(seed)
    want = case.gradients()
    pool = case.with_pool()
    comm = case.layer.comm

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no combine")

    with monkeypatch.context() as patched:
        patched.setattr(type(comm), "combine", fail)
        with pytest.raises(RuntimeError, match="no combine"):
            case.layer(case.x)
    assert pool.use().held == 0
    assert_same(case.gradients(), want)
    pool.check()


def test_an_alias_of_the_saved_table_changes_nothing(seed: int) -> None:
    """Somebody looks at what autograd saves, and keeps it: under a checkpoint, which throws it away, its
    pages stay until the alias goes; beside a backward they go back with that, and once."""
    case = Layer(seed)
    want = case.gradients()
    pool = case.with_pool()
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor

    def throw_away(tensor: Tensor) -> None:
        pack(tensor)

    def keep(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(throw_away, lambda _: torch.empty(0)):
        y = case.layer(case.x)
    assert pool.use().held == 4 * PAGE
    seen.clear()
    assert pool.use().held == 0
    with torch.autograd.graph.saved_tensors_hooks(pack, keep):
        assert_same(case.gradients(), want)
    assert pool.use().held == 0
    with torch.autograd.graph.saved_tensors_hooks(throw_away, lambda _: torch.empty(0)):
        other = case.layer(case.x)
    seen.clear()
    assert pool.use().held == 0
    pool.check()
    del y, other


def test_tables_that_the_caller_copies_own_nothing(seed: int) -> None:
    """A graph that keeps a deep copy of what was saved: pages went with the original, and `check` says so."""
    case = Layer(seed)
    pool = case.with_pool()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: copy.deepcopy(each.detach()), lambda each: each
    ):
        y = case.layer(case.x)
    assert pool.use().held == 0
    y.sum().backward()
    with pytest.raises(InvalidArgument, match="not in the activation pool any more"):
        pool.check()


def test_nothing_is_kept_without_a_gradient_or_a_capacity(seed: int) -> None:
    case = Layer(seed)
    pool = case.with_pool()
    with torch.no_grad():
        case.layer(case.x)
    case.layer.capacity = None
    case.gradients()
    assert pool.use().peak == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plans", [False, True])
def test_checkpoints(reentrant: bool, plans: bool, seed: int) -> None:
    """The first pass of a checkpoint keeps nothing: its pages are free when it is done."""
    if plans and reentrant:
        pytest.skip("keep_plans is for use_reentrant=False")

    def wrap(layer: Any, x: Tensor) -> Tensor:
        options = {"context_fn": keep_plans(layer)} if plans else {}
        y: Tensor = checkpoint(layer, x, use_reentrant=reentrant, **options)
        assert pool.use().held == 0
        return y

    case = Layer(seed)
    want = case.gradients()
    pool = case.with_pool()
    assert_same(case.gradients(wrap), want)
    assert pool.use() == (0, 4 * PAGE, 16 * PAGE)
    pool.check()


def test_a_second_backward_is_an_error(seed: int) -> None:
    case = Layer(seed)
    want = case.gradients()
    pool = case.with_pool()
    with torch.autograd.graph.save_on_cpu():  # which keeps what is on the CPU already
        assert_same(case.gradients(), want)
    pool.check()
    y = case.layer(case.x)
    y.sum().backward(retain_graph=True)
    pool.check()
    y.sum().backward()
    with pytest.raises(InvalidArgument, match="a backward ran twice"):
        pool.check()


def test_a_pool_too_small(seed: int) -> None:
    """The forward is right, the gradients are unspecified, and nothing is raised but by `check`."""
    case = Layer(seed)
    want = case.layer(case.x)
    pool = case.with_pool(size=3 * PAGE)
    y = case.layer(case.x)
    assert torch.equal(y, want)
    y.sum().backward()
    with pytest.raises(PoolExceeded) as caught:
        pool.check()
    assert (caught.value.needed, caught.value.available) == (4 * PAGE, 3 * PAGE)


def test_a_graph_of_torch_compile_ends_before_a_layer_with_a_pool(seed: int) -> None:
    case = Layer(seed)
    want = case.gradients()
    pool = case.with_pool()
    compiled = torch.compile(lambda layer, x: 2 * layer(x) / 2, backend="aot_eager")
    assert_same(case.gradients(compiled), want)
    y = compiled(case.layer, case.x)
    assert pool.use().held == 4 * PAGE
    y.sum().backward()
    assert pool.use().held == 0
    pool.check()
    torch._dynamo.reset()  # which remembers that a graph ends here, and would not ask again
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_forward"):
        torch.compile(case.layer, backend="aot_eager", fullgraph=True)(case.x)


def test_kernels_of_several_streams_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        ticket_words = TABLE_WORDS

        def __init__(self, **pages: int) -> None:
            pass

        def reset(self, stream: int) -> None:
            FakeGpu.last.log.append(f"reset on {stream}")

        def push(self, *arguments: Any) -> None:
            FakeGpu.last.log.append(f"push on {arguments[-1]}")

        def pop(self, *arguments: Any) -> None:
            FakeGpu.last.log.append(f"pop on {arguments[-1]}")

    monkeypatch.setattr(_C, "PagePool", Kernels, raising=False)
    monkeypatch.setattr(pages_module, "CudaDevice", FakeGpu)
    kept = CudaPages(torch.device("cpu"), 4, 0, PAGE)
    gpu, rows, table = FakeGpu.last, torch.zeros(4, 4), torch.zeros(TABLE_WORDS + 1, dtype=torch.int32)
    one, two = gpu.new_stream(), gpu.new_stream()
    with gpu.on(one):
        kept.stash([rows], None, table)
    with gpu.on(two):
        kept.restore([rows], table)
        kept.stash([rows], None, table)
    kept.follow()
    assert gpu.log == [
        *("reset on 100", "record 100", "101 waits for 100", "push on 101"),
        *("record 101", "102 waits for 101", "pop on 102", "push on 102", "record 102", "100 waits for 102"),
    ]
    gpu.captures = {101, 102}
    gpu.log.clear()
    with gpu.on(one):
        kept.stash([rows], None, table)
    with gpu.on(two):
        kept.restore([rows], table)
    assert gpu.log == ["push on 101", "record 101", "102 waits for 101", "pop on 102"]
    gpu.captures = {102}  # the capture of the first has ended
    gpu.log.clear()
    with gpu.on(one):
        kept.follow()
    assert gpu.log == ["record 100", "101 waits for 100"]


def test_a_layer_in_order_has_no_pool(seed: int) -> None:
    case = Layer(seed, overlap=False)
    case.with_pool()
    with pytest.raises(InvalidArgument, match="pool is set and the layer runs in order"):
        case.layer(case.x)
