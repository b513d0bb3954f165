"""The fastest tiles of quack's kernels for the experts' products, by layer, on an H200.

A kernel's tile is worth 10 to 25 % of its time. A layer that is not in the table takes the `nearest_tile`.

    python bench/quack_tiles.py      prints the table, and measures tiles for other layers
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

PRODUCTS = ("fc1", "fc2", "fc2_dgrad", "fc1_dgrad", "fc2_wgrad", "fc1_wgrad")
ADDED = ("fc2_wgrad_added", "fc1_wgrad_added")
"""The products that add weight gradients to existing tensors."""


class Tile(NamedTuple):
    """The part of a product that a block (m rows, n columns) and a cluster of blocks (cluster_m along the
    rows, cluster_n along the columns) compute. Written "128x192p21": m, n, p (pingpong) or c (not), cluster_m
    and cluster_n; "+" at the end stands for `loads`.

    Attributes:
        pingpong: two groups of warps alternate with one tile each, instead of sharing a tile.
        loads: for a product that adds to a tensor: the block loads the old values and stores the sums,
            rounded once. False: the block rounds its results and adds them in memory.
    """

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 2
    cluster_n: int = 1
    loads: bool = False

    def __str__(self) -> str:
        kind, end = "p" if self.pingpong else "c", "+" if self.loads else ""
        return f"{self.m}x{self.n}{kind}{self.cluster_m}{self.cluster_n}{end}"


def parse_tile(text: str) -> Tile:
    """Returns the tile that str() writes as `text`."""
    found = re.fullmatch(r"(\d+)x(\d+)([pc])(\d)(\d)(\+?)", text)
    assert found is not None, f"{text!r} is no tile"
    m, n, kind, cluster_m, cluster_n, end = found.groups()
    return Tile(int(m), int(n), kind == "p", int(cluster_m), int(cluster_n), end == "+")


Sizes = tuple[int, int, int]
"""hidden, ffn_hidden, and the average rows of an expert."""
_TABLE: dict[Sizes, str] = {
    (2048, 768, 512): """
        fc1=128x192p12 fc2=128x256c12 fc2_dgrad=128x128p12 fc1_dgrad=128x256c12
        fc2_wgrad=192x128p12 fc1_wgrad=128x192p21 fc2_wgrad_added=128x128p12 fc1_wgrad_added=128x128p12
    """,
    (2880, 2880, 256): """
        fc1=128x192p12 fc2=128x256c12 fc2_dgrad=128x128p12 fc1_dgrad=128x256c12
        fc2_wgrad=256x160c21 fc1_wgrad=128x192p12 fc2_wgrad_added=128x160p12+ fc1_wgrad_added=128x128p21+
    """,
    (4096, 1536, 512): """
        fc1=128x192p12 fc2=128x192p12 fc2_dgrad=128x128p12 fc1_dgrad=128x256c12
        fc2_wgrad=192x128p12 fc1_wgrad=128x128p21 fc2_wgrad_added=128x160p21 fc1_wgrad_added=128x256c12
    """,
    (4096, 1536, 8192): """
        fc1=256x192c12 fc2=192x128p12 fc2_dgrad=128x128p12 fc1_dgrad=192x128p12
        fc2_wgrad=128x192p21 fc1_wgrad=256x128c12 fc2_wgrad_added=256x192c12 fc1_wgrad_added=256x128c12
    """,
    (6144, 16384, 2048): """
        fc1=256x192c12 fc2=256x128c12 fc2_dgrad=128x128p12 fc1_dgrad=256x192c12
        fc2_wgrad=256x192c12 fc1_wgrad=192x128p12 fc2_wgrad_added=128x128p12+ fc1_wgrad_added=128x128p21+
    """,
    (7168, 2048, 256): """
        fc1=128x128p12 fc2=128x192p12 fc2_dgrad=128x128p12 fc1_dgrad=128x192p12
        fc2_wgrad=128x128p12 fc1_wgrad=128x128p21 fc2_wgrad_added=192x128p12+ fc1_wgrad_added=128x128p21+
    """,
    (7168, 2048, 8192): """
        fc1=256x128c12 fc2=192x128p12 fc2_dgrad=192x128p12 fc1_dgrad=128x224c12
        fc2_wgrad=128x224c21 fc1_wgrad=256x128c21 fc2_wgrad_added=128x224c21 fc1_wgrad_added=256x128c21
    """,
}
TILES: dict[Sizes, dict[str, Tile]] = {
    sizes: {name: parse_tile(tile) for name, tile in (each.split("=") for each in line.split())}
    for sizes, line in _TABLE.items()
}
"""The fastest tiles, by the layer's sizes and the product."""
FLOAT32_SUMS = Tile(128, 128, True, loads=True)
"""The tile for gradients that are added to float32 tensors, 0 to 5 % slower than the best for the layers of
the table; adding in memory takes a quarter longer."""


def nearest_tile(product: str, hidden: int, ffn: int, rows: int | None = None) -> Tile:
    """Returns a product's tile for the layer of the table with the nearest sizes, by ratio. rows: average
    rows of an expert, None if unknown."""

    def distance(sizes: Sizes) -> float:
        ratios = (size / own for size, own in zip(sizes, (hidden, ffn, rows or sizes[2]), strict=True))
        return math.hypot(*map(math.log, ratios))

    return TILES[min(TILES, key=distance)][product]
