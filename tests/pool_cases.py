"""Pushes and pops in random order, beside a count of pages that shares nothing with the pool's."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

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


def random_order(
    device: torch.device, seed: int, *, page_bytes: int, pages: int, spill: int, steps: int
) -> list[str]:
    """Lists what is wrong after random steps: rows, pages held, the peak, or what `check` says."""
    from moecomm.errors import PoolExceeded
    from moecomm.nn.pool import ActivationPool

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
            problems += _check(pool, PoolExceeded, peak * page_bytes if failures else 0, step)
            failures, peak = 0, held
    return problems


def _check(pool: Any, kind: type[Exception], needed: int, step: int) -> list[str]:
    """`check` raises once, with the bytes that would have been needed."""
    problems = []
    for expected in (needed, 0):
        found = 0
        try:
            pool.check()
        except kind as error:
            found = error.needed  # type: ignore[attr-defined]
            if error.available != pool.bytes:  # type: ignore[attr-defined]
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
