"""Finds the fastest tiles of quack's kernels for a layer, on the GPU that is here.

    python bench/quack_tiles.py                                     prints the table in use
    python bench/quack_tiles.py --hidden 4096 --ffn 1536 --experts 32 --rows 1024

The second measures the tiles of `CANDIDATES` for each product of local experts with that many rows each: the
fastest, with its time and those of the next ones, and at the end all of them as moecomm/kernels/tiles.py has
them. Kernels are compiled by several processes first. With --products fc1 fc2 these alone are measured.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moecomm.kernels.quack import QuackProducts, make_quack_products
from moecomm.kernels.tiles import ADDED, PRODUCTS, TILES, Tile

ALL = PRODUCTS + ADDED

_SHARED = [(256, 128), (256, 160), (256, 192), (128, 224), (128, 256)]
_PINGPONG = [(128, 128), (128, 160), (128, 192), (192, 128)]
CANDIDATES = [
    Tile(m, n, pingpong, *cluster)
    for pingpong, sizes in ((False, _SHARED), (True, _PINGPONG))
    for m, n in sizes
    for cluster in ((2, 1), (1, 2), (1, 1))
]


def candidates(product: str) -> list[Tile]:
    """Returns the tiles to try for a product."""
    clustered = [tile for tile in CANDIDATES if (tile.cluster_m, tile.cluster_n) != (1, 1)]
    return clustered + ([tile._replace(loads=True) for tile in clustered] if product in ADDED else [])


def make_calls(
    products: QuackProducts, hidden: int, ffn: int, ends: Sequence[int]
) -> dict[str, Callable[[], Any]]:
    """Returns a function for each product, on random rows in groups with these ends."""
    device, rows, experts = torch.device("cuda", torch.cuda.current_device()), ends[-1], len(ends)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x_PH, grad_PH = random(rows, hidden), random(rows, hidden)
    inner_PI, z_PF = random(rows, 2 * ffn), random(rows, ffn)
    w_in, w_out = random(experts, hidden, 2 * ffn) * hidden**-0.5, random(experts, ffn, hidden) * ffn**-0.5
    groups = products.groups(torch.tensor(ends, dtype=torch.int32, device=device))
    weights_P = torch.rand(rows, device=device)
    gated: dict[str, Any] = {"activation": "swiglu_interleaved"}
    needs: dict[str, Any] = {**gated, "need_weights": True, "need_z": True}
    sum_in, sum_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
    return {
        "fc1": lambda: products.gated_mm(x_PH, w_in, groups, weights_P, **gated),
        "fc2": lambda: products.grouped_mm(z_PF, w_out, groups),
        "fc2_dgrad": lambda: products.gated_mm_dgrad(grad_PH, w_out, groups, inner_PI, weights_P, **needs),
        "fc1_dgrad": lambda: products.grouped_mm_dgrad(inner_PI, w_in, groups),
        "fc2_wgrad": lambda: products.grouped_mm_wgrad(z_PF, grad_PH, groups),
        "fc1_wgrad": lambda: products.grouped_mm_wgrad(x_PH, inner_PI, groups),
        "fc2_wgrad_added": lambda: products.grouped_mm_wgrad(z_PF, grad_PH, groups, into=sum_out),
        "fc1_wgrad_added": lambda: products.grouped_mm_wgrad(x_PH, inner_PI, groups, into=sum_in),
    }


def _make_products(hidden: int, ffn: int, tiles: dict[str, Tile]) -> QuackProducts:
    device = torch.device("cuda", torch.cuda.current_device())
    sizes: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "dtype": torch.bfloat16, "device": device}
    return make_quack_products(**sizes, activation="swiglu_interleaved", tiles=tiles, compile_now=False)


def _compile(tile: Tile, chosen: Sequence[str]) -> str | None:
    """Compiles products with a tile, in a process of a pool; returns the errors of those that it cannot be
    used for, if any."""
    products = _make_products(256, 256, {})
    errors = []
    for product, call in make_calls(products, 256, 256, [100, 256]).items():
        for each in (tile, tile._replace(loads=True)):
            if product not in chosen or each not in candidates(product):
                continue
            products.use_tile(product, each)
            try:
                call()
            except Exception as error:
                errors.append(f"{product} with {each}: {type(error).__name__}: {error}")
    torch.cuda.synchronize()
    return "\n".join(errors) or None


def _measure(call: Callable[[], Any], flush: torch.Tensor, rounds: int = 7) -> float:
    """Returns the median of a call's time in us, with an empty L2 cache."""
    times = []
    for number in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(300_000)
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def find_tiles(
    hidden: int, ffn: int, experts: int, rows: int, *, chosen: Sequence[str] = ALL
) -> dict[str, list[tuple[float, Tile]]]:
    """Returns the tiles that can be used for each chosen product and their times in us, the fastest first.
    Groups have `rows` rows on average, from 0.7 to 1.3 times as many."""
    generator = torch.Generator().manual_seed(7)
    counts = (rows * (0.7 + 0.6 * torch.rand(experts, generator=generator))).int()
    ends = counts.cumsum(0).tolist()
    flush = torch.empty(256 << 20, device="cuda", dtype=torch.int8)
    found: dict[str, list[tuple[float, Tile]]] = {product: [] for product in chosen}
    products = _make_products(hidden, ffn, {})
    calls = make_calls(products, hidden, ffn, ends)
    for product, timed in found.items():
        for tile in candidates(product):
            products.use_tile(product, tile)
            try:
                timed.append((_measure(calls[product], flush), tile))
            except Exception as error:
                print(f"{product} with {tile}: {type(error).__name__}: {error}", file=sys.stderr)
        timed.sort(key=lambda each: each[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"hidden": "H", "ffn": "F", "experts": "local experts", "rows": "rows an expert"}
    for name, what in sizes.items():
        parser.add_argument(f"--{name}", type=int, help=what)
    parser.add_argument("--products", nargs="+", choices=ALL, default=ALL, help="(all)")
    options = parser.parse_args()
    given, chosen = [options.hidden, options.ffn, options.experts, options.rows], options.products
    if not all(given):
        for (hidden, ffn, rows), tiles in TILES.items():
            print(f"hidden {hidden}, ffn {ffn}, {rows} rows an expert")
            print("\n".join(f"    {product:18s} {tiles[product]}" for product in chosen))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(CANDIDATES), os.cpu_count() or 1), context) as pool:
        for error in pool.map(_compile, CANDIDATES, [chosen] * len(CANDIDATES)):
            if error is not None:
                print(error, file=sys.stderr)
    found = find_tiles(*given, chosen=chosen)
    for product, timed in found.items():
        print(f"{product:18s} " + ", ".join(f"{tile} {us:.0f} us" for us, tile in timed[:5]))
    best = " ".join(f"{product}={timed[0][1]}" for product, timed in found.items())
    print(f"({options.hidden}, {options.ffn}, {options.rows}): {best}")


if __name__ == "__main__":
    main()
