"""A comparison as one rank sees it: the ids of all ranks, its own inputs, and the work that is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moecomm.nn import mark_expert_parameter

from . import inputs
from .inputs import DataKey, Ids
from .options import COMPUTE, DENSE, HEADROOM, TORCH_PRODUCTS, Options, Point
from .path import FORWARD, IN_A_ROW, STEP, WHOLE, Path, Yardstick
from .placing import Rows, rows_of
from .timing import Timing

_GRADIENTS = 1  # added to the seed: gradients of the result are rows of another stream
_MICROBATCHES = 2  # so much of the seed for each microbatch
_PASSES = 3  # a backward makes two products for each of the forward: of the rows, and of the weights


def device_of(options: Options) -> torch.device:
    """The device that this rank's tensors are on."""
    on_gpu = options.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def poison(*tensors: Tensor | None) -> None:
    """Overwrites tensors with all-ones bits, so that a result that is not written anew cannot pass a check.

    Results of an earlier call are poisoned before they are released: memory that an allocator hands out again
    does not carry right-looking values.
    """
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            tensor.detach().view(torch.uint8).fill_(0xFF)


def corrupt(tensor: Tensor) -> None:
    """Flips a high bit of the first value."""
    if tensor.numel():
        tensor.detach().view(-1).view(torch.uint8)[tensor.element_size() - 1] ^= 0x40


# -- what has to travel: functions of the ids alone ----------------------------------------------------------


def pairs(ids_R: Sequence[Ids], experts: int, ranks_per_group: int = 1) -> npt.NDArray[np.int64]:
    """(R, G): tokens of a rank that want an expert of a group of ranks (a node), each counted once.

    Example: 2 ranks, experts 0, 1 | 2, 3, token of rank 0 with ids [0, 2], token of rank 1 with ids [0, 1]:
    [[1, 1], [1, 0]].
    """
    per_group = experts // len(ids_R) * ranks_per_group
    groups = range(len(ids_R) // ranks_per_group)
    # -1 // per_group is -1: no group.
    found = [[(ids_TK // per_group == group).any(axis=1).sum() for group in groups] for ids_TK in ids_R]
    return np.array(found, dtype=np.int64)


def rows_per_rank(ids_R: Sequence[Ids], experts: int) -> list[int]:
    """(token, expert) pairs at each rank's experts.

    Example: 2 ranks, 4 experts, ids [[0, 2]] and [[0, 1]]: rank 0 has experts 0 and 1, so [3, 1].
    """
    ids = np.concatenate([ids_TK.ravel() for ids_TK in ids_R])
    owners = ids[ids >= 0] // (experts // len(ids_R))
    found: list[int] = np.bincount(owners, minlength=len(ids_R)).tolist()
    return found


class Case:
    """Inputs of one operation on one rank, and the work in it. `load` fills in another round of data."""

    def __init__(self, options: Options, point: Point, rank: int) -> None:
        self.options, self.point, self.rank = options, point, rank
        self.device = device_of(options)
        self.dtype: torch.dtype = getattr(torch, point.dtype)
        self.ids_R = [inputs.topk_ids(options, point, source) for source in range(options.ranks)]
        self.ids_TK = self.ids_R[rank]
        self.topk_idx_TK = torch.from_numpy(self.ids_TK.copy()).to(self.device)
        self._shuffles = np.random.default_rng([options.seed, inputs.SHUFFLES, point.tokens, rank])
        self.rows = self.rows_of(rank, options.alignment)
        self.capacity = self._capacity()
        self.x_TH = torch.empty(point.tokens, point.hidden, dtype=self.dtype, device=self.device)
        self.weights_TK = torch.empty(
            point.tokens, point.topk, dtype=inputs.wide(self.dtype), device=self.device
        )
        self.key = DataKey(options.seed, 0, point.tokens, point.hidden, point.dtype)
        self.load(0)

    def rows_of(self, rank: int, alignment: int) -> Rows:
        """Returns the origin of each row of `rank`'s result."""
        return rows_of(self.ids_R, rank, self.point.experts, self.options.layout, alignment)

    def _capacity(self) -> int | None:
        if self.options.capacity != "auto":
            assert not isinstance(self.options.capacity, str)
            return self.options.capacity
        alignment = self.options.alignment
        return max(1, *(self.rows_of(rank, alignment).num_rows for rank in range(self.options.ranks)))

    @property
    def wire_row_bytes(self) -> int:
        """Bytes of a row, or of a sum, on its way. The backward travels in the rows' own type."""
        options = self.options
        wire = options.combine_wire if options.program == "combine" else options.wire
        if wire is None or options.kept_handle:
            return self.point.row_bytes
        columns, dtype = inputs.SCALES[wire]
        return self.point.hidden + -(-self.point.hidden // columns) * dtype.itemsize

    @property
    def useful_R(self) -> list[int]:
        """Bytes of each rank's result rows: one per (token, expert), or (token, rank) in the rank layout."""
        options = self.options
        handed_on = options.program == "dispatch" and options.wire is not None and not options.dequantize
        row_bytes = self.wire_row_bytes if handed_on else self.point.row_bytes
        if options.layout == "rank":
            rows: list[int] = pairs(self.ids_R, self.point.experts).sum(axis=0).tolist()
        else:
            rows = rows_per_rank(self.ids_R, self.point.experts)
        return [count * row_bytes for count in rows]

    def rows_between(self) -> list[list[int]]:
        """[from][to]: rows that travel between two ranks, each (token, other rank) once; 0 within a rank."""
        found = pairs(self.ids_R, self.point.experts)
        np.fill_diagonal(found, 0)
        rows: list[list[int]] = (found.T if self.options.program == "combine" else found).tolist()
        return rows

    @torch.no_grad()
    def load(self, round: int) -> None:
        """Fills rows and weights with the data of `round`, and puts the ids back as they were."""
        self.topk_idx_TK.copy_(torch.from_numpy(self.ids_TK))
        self.key = replace(self.key, round=round)
        self.x_TH.copy_(inputs.rows(self.key, self.rank, self.device))
        self.weights_TK.copy_(inputs.weights(self.key, self.rank, self.point.topk, self.device))

    def fresh_ids(self) -> None:
        """Puts other ids with the same traffic: tokens rolled, each token's slots shuffled.

        A training step never sees its ids twice, and moecomm keeps the plan of ids that it has seen.
        """
        rolled = np.roll(self.ids_TK, int(self._shuffles.integers(max(self.point.tokens, 1))), axis=0)
        self.topk_idx_TK.copy_(torch.from_numpy(self._shuffles.permuted(rolled, axis=1)))

    def maybe_corrupt(self, result: Tensor) -> None:
        """Corrupts one value of the result on every rank that has one, if --inject-error is given."""
        if self.options.inject_error:
            corrupt(result)

    def figures(
        self, path: Path | Yardstick, phase: str, timings: Mapping[tuple[str, str], Timing]
    ) -> dict[str, Any]:
        """The bytes behind a time and the bandwidths they make."""
        useful, remote = sum(self.useful_R), sum(map(sum, self.rows_between())) * self.wire_row_bytes
        per_rank = self.options.ranks * timings[path.name, phase].median * 1e9
        is_remote = not isinstance(path, Path) or path.remote
        return {
            "size_bytes": self.point.tokens * self.point.row_bytes,
            "useful_bytes": useful,
            "remote_bytes": remote,
            "algbw_GBps": useful / per_rank,
            "busbw_GBps": remote / per_rank if is_remote else None,
        }


class Experts:
    """This rank's expert weights (L, H, 2F) and (L, F, H), the same in all variants of a layer."""

    def __init__(self, options: Options, point: Point, rank: int) -> None:
        assert point.ffn is not None
        self.seed = options.seed
        local, device = point.experts // options.ranks, device_of(options)
        dtype: torch.dtype = getattr(torch, point.dtype)
        w_in = torch.empty(local, point.hidden, 2 * point.ffn, dtype=dtype, device=device)
        w_out = torch.empty(local, point.ffn, point.hidden, dtype=dtype, device=device)
        for place in range(local):
            made = inputs.expert(self.seed, rank * local + place, point.hidden, point.ffn, dtype, device)
            w_in[place], w_out[place] = made
        self.w_in, self.w_out = torch.nn.Parameter(w_in), torch.nn.Parameter(w_out)
        for each in (self.w_in, self.w_out):
            mark_expert_parameter(each)  # as those that a layer makes
        self.shared = [
            torch.nn.Parameter(each) for each in inputs.shared_experts(self.seed, point, dtype, device)
        ]


class LayerCase(Case):
    """Inputs and expectations of a layer: also the gradients of its result, and rows as experts get them.

    `microbatches` are those of a step, this one first, each with routing and data of its own: their `number`
    tells them apart.
    """

    def __init__(self, options: Options, point: Point, rank: int, experts: Experts, number: int = 0) -> None:
        options = replace(options, seed=options.seed + _MICROBATCHES * number)
        rows = rows_of(
            [inputs.topk_ids(options, point, source) for source in range(options.ranks)], rank, point.experts
        )
        device, dtype = device_of(options), experts.w_in.dtype
        self.experts, self.local = experts, point.experts // options.ranks

        def empty(count: int) -> Tensor:
            return torch.empty(count, point.hidden, dtype=dtype, device=device)

        self.dy_TH = empty(point.tokens)
        # Inputs as they arrive at this rank's experts, for what is timed without communication.
        self.rows_PH, self.dy_PH = empty(rows.num_rows).requires_grad_(), empty(rows.num_rows)
        self.weights_P = torch.empty(rows.num_rows, dtype=inputs.wide(dtype), device=device).requires_grad_()
        self.offsets_L = torch.from_numpy(rows.offsets_G).to(device, torch.int32)
        # A round, and what verify expects of it.
        self.wanted: tuple[int, list[dict[str, Tensor]]] | None = None
        super().__init__(options, point, rank)
        self.x_TH.requires_grad_()
        self.weights_TK.requires_grad_()
        self.rows_R = rows_per_rank(self.ids_R, point.experts)
        self.fixed_rows = max(1, int(max(self.rows_R) * HEADROOM))
        others = range(1, point.microbatches) if number == 0 else ()
        self.microbatches = [self, *(LayerCase(options, point, rank, experts, each) for each in others)]

    @torch.no_grad()
    def load(self, round: int) -> None:
        """Fills all inputs with the data of `round`, and puts the ids back as they were."""
        super().load(round)
        gradient_key = replace(self.key, seed=self.key.seed + _GRADIENTS)
        for source in range(self.options.ranks):
            x_TH = inputs.rows(self.key, source, self.device)
            dy_TH = inputs.rows(gradient_key, source, self.device)
            weights_TK = inputs.weights(self.key, source, self.point.topk, self.device)
            if source == self.rank:
                self.dy_TH.copy_(dy_TH)
            row_N, token_N, slot_N = self.rows.from_source(source, self.device)
            self.rows_PH[row_N] = x_TH[token_N]
            self.dy_PH[row_N] = dy_TH[token_N]
            self.weights_P[row_N] = weights_TK[token_N, slot_N].to(self.weights_P.dtype)

    def figures(
        self, path: Path | Yardstick, phase: str, timings: Mapping[tuple[str, str], Timing]
    ) -> dict[str, Any]:
        """The flops of both products behind a time, 6 x H x F a row forward, and the rates they make.

        Example: hidden 4, ffn 2, one row: 2 x 4 x 4 + 2 x 2 x 4 = 48.
        """
        seconds = timings[path.name, phase].median
        rows, inner, columns = self.options.dense
        dense_tflops = 2.0 * rows * inner * columns / timings[DENSE, STEP].median / 1e12
        # A whole step is held against the products in a row, which have no ends.
        other = IN_A_ROW if phase == WHOLE else phase
        base = timings.get((COMPUTE, other)) or timings.get((TORCH_PRODUCTS, other))
        parts = self.microbatches if phase in (IN_A_ROW, WHOLE) else [self]
        arrived = sum(sum(each.rows_R) for each in parts)
        passes = 1 if phase == FORWARD else _PASSES
        assert self.point.ffn is not None
        rows_here = arrived / self.options.ranks + self.point.shared * self.point.tokens * len(parts)
        work = 6.0 * passes * self.point.hidden * self.point.ffn * rows_here
        flops = work if isinstance(path, Path) and path.computes else None
        if path.name == DENSE:
            flops = 2.0 * rows * inner * columns
        tflops = None if flops is None else flops / seconds / 1e12
        return {
            "rows": sum(self.rows_R),
            "flops": flops,
            "tflops": tflops,
            "dense_tflops": dense_tflops,
            "share": None if tflops is None else tflops / dense_tflops,
            "ratio": None if base is None or path.name == DENSE else seconds / base.median,
        }
