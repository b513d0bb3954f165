"""Parallel folding: which ranks form the groups for attention, and which ranks the groups for the experts.

    folding = ParallelFolding(world_size=256, tp=4, cp=2, pp=4, ep=64)
    folding.dp, folding.edp                     # 8, 1
    folding.group_of("ep", 70)                  # the ranks 64 .. 127
    folding.group("ep")                         # this rank's process group, made on first use

`python docs/draw_folding.py --world 256 --tp 4 --cp 2 --pp 4 --ep 64` draws it. docs/folding.md explains it.
"""

from __future__ import annotations

from moecomm.parallel.folding import Coordinates, ParallelFolding

__all__ = ["Coordinates", "ParallelFolding"]
