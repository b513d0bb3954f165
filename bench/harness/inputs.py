"""Inputs of the benchmarks: top-k ids, rows, weights and experts.

Every input is a pure function of the seed and a few numbers, so every rank can make every other rank's inputs
again without asking. Ids are int32 of shape (T, K), distinct within a token. Rows are random, never zero, and
made on the device that is measured: ranks on equal devices agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from .options import RECORDED, Options, Point

Ids = npt.NDArray[np.int32]
Limit = tuple[int, int] | None  # of so many nodes the experts of a token are on at most so many
SCALES = {"fp8": (128, torch.float32), "mxfp8": (32, torch.float8_e8m0fnu)}
"""Columns that share a scale, and its dtype, by the wire format."""
# Streams keep the random numbers of different inputs apart.
_ROUTING, _ROWS, _WEIGHTS, SHUFFLES, _BYTES, _EXPERTS = 1, 2, 3, 5, 6, 7


def _rng(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng([seed, _ROUTING, *key])


def _limited(scores_TE: npt.NDArray[np.float64], topk: int, nodes: int, most: int) -> npt.NDArray[np.float64]:
    """The scores, minus infinity for experts of the nodes that a token may not use. It may use those whose
    topk / most highest scores add up to most (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """
    tokens, experts = scores_TE.shape
    scores_TNE = scores_TE.reshape(tokens, nodes, experts // nodes)
    counted = min(max(topk // most, 1), scores_TNE.shape[2])
    node_TN = np.sort(scores_TNE, axis=2)[:, :, -counted:].sum(axis=2)
    chosen_TM = np.argsort(-node_TN, axis=1, kind="stable")[:, :most]
    allowed_TN = np.zeros((tokens, nodes), dtype=bool)
    np.put_along_axis(allowed_TN, chosen_TM, True, axis=1)
    return np.where(allowed_TN[:, :, None], scores_TNE, -np.inf).reshape(tokens, experts)


def _top_k(scores_TE: npt.NDArray[np.float64], topk: int, limit: Limit) -> Ids:
    if limit is not None:
        scores_TE = _limited(scores_TE, topk, *limit)
    best = np.argpartition(-scores_TE, topk - 1, axis=1)[:, :topk]
    order = np.argsort(-np.take_along_axis(scores_TE, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1).astype(np.int32)


@lru_cache(maxsize=128)  # a run looks at the same ids for each path, wire format and number of SMs
def uniform(tokens: int, topk: int, experts: int, seed: int, rank: int, limit: Limit = None) -> Ids:
    """Every set of `topk` experts is equally likely; with a limit, of those that it leaves."""
    return _top_k(_rng(seed, tokens, rank).random((tokens, experts)), topk, limit)


@lru_cache(maxsize=128)
def zipf(
    tokens: int, topk: int, experts: int, seed: int, rank: int, exponent: float = 1.0, limit: Limit = None
) -> Ids:
    """The n-th most popular expert is drawn in proportion to 1 / n**exponent, without replacement within a
    token.

    Which expert is how popular is a permutation of the seed alone, so all ranks like the same experts and the
    popular ones are not all on rank 0. Drawing without replacement is the Gumbel top-k trick (Kool et al.
    2019).
    """
    popularity = _rng(seed, experts).permutation(experts) + 1.0
    gumbel = _rng(seed, tokens, rank).gumbel(size=(tokens, experts))
    return _top_k(gumbel - exponent * np.log(popularity), topk, limit)


def hot(tokens: int, topk: int, experts: int, seed: int, rank: int) -> Ids:
    """Every token of every rank wants expert 0; its other experts are uniform."""
    others = uniform(tokens, topk - 1, experts - 1, seed, rank) + 1 if topk > 1 else np.empty((tokens, 0))
    return np.hstack((np.zeros((tokens, 1)), others)).astype(np.int32)


@lru_cache(maxsize=16)
def read_ids(file: str, topk: int, experts: int) -> Ids:
    """The (N, K) ids in a file, as a router chose them. Raises ValueError for ids of other sizes."""
    ids_NK = np.load(file)
    if (
        ids_NK.ndim != 2
        or ids_NK.shape[1] != topk
        or not ids_NK.size
        or not ((ids_NK >= 0) & (ids_NK < experts)).all()
    ):
        raise ValueError(f"--routing {file} has shape {ids_NK.shape}, must have (N, {topk}) of {experts} ids")
    return ids_NK.astype(np.int32)


def balanced(tokens: int, topk: int, experts: int) -> Ids:
    """Contiguous equal shares, without randomness: token t's first expert is t * E // T, the others follow
    evenly.

    With topk = 1, tokens 0 .. T/E - 1 go to expert 0, the next to expert 1 and so on: with one expert a rank
    that is the exchange of an all-to-all. Example: T = 4, K = 2, E = 4 gives [[0, 2], [1, 3], [2, 0], [3,
    1]].
    """
    first = np.arange(tokens, dtype=np.int64) * experts // max(tokens, 1)
    apart = np.arange(topk, dtype=np.int64) * experts // topk
    return ((first[:, None] + apart) % experts).astype(np.int32)


def topk_ids(options: Options, point: Point, rank: int) -> Ids:
    """The (T, K) int32 ids of `rank`'s tokens under the point's routing; not to be written to."""
    shape = (point.tokens, point.topk, point.experts)
    limit = None if options.limit_nodes is None else (options.nodes, options.limit_nodes)
    if point.routing == "zipf":
        assert point.zipf is not None
        return zipf(*shape, options.seed, rank, point.zipf, limit)
    if point.routing == "uniform":
        return uniform(*shape, options.seed, rank, limit)
    if point.routing == "hot":
        return hot(*shape, options.seed, rank)
    if point.routing.endswith(RECORDED):  # consecutive tokens from a place by the seed on, and round again
        ids_NK = read_ids(point.routing, point.topk, point.experts)
        first = int(_rng(options.seed).integers(len(ids_NK))) + rank * point.tokens
        return ids_NK[(first + np.arange(point.tokens)) % len(ids_NK)]
    if point.routing == "one-hot":  # experts 0 .. topk-1 alone: the worst that routing can do to one rank
        return np.broadcast_to(np.arange(point.topk, dtype=np.int32), shape[:2])
    return balanced(*shape)


@dataclass(frozen=True)
class DataKey:
    """Names one set of inputs: another `round` is other data of the same shape."""

    seed: int
    round: int
    tokens: int
    hidden: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def _generator(device: torch.device, *words: int) -> torch.Generator:
    # 63 bits: a seed that every generator takes.
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 1
    return torch.Generator(device).manual_seed(state)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that values of `dtype` are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows(key: DataKey, rank: int, device: torch.device) -> torch.Tensor:
    """The (T, H) rows that `rank` puts in: signed, magnitudes in [0.25, 1.25), so that no value is zero."""
    generator = _generator(device, key.seed, _ROWS, key.round, key.tokens, rank)
    shape, dtype = (key.tokens, key.hidden), wide(key.torch_dtype)
    values = torch.rand(shape, generator=generator, device=device, dtype=dtype)
    values.sub_(0.5).mul_(2.0)
    values += torch.copysign(torch.full((), 0.25, dtype=dtype, device=device), values)
    return values.to(key.torch_dtype)


def weights(key: DataKey, rank: int, topk: int, device: torch.device) -> torch.Tensor:
    """The (T, K) float32 weights of `rank`'s tokens: positive, each row sums to 1."""
    generator = _generator(device, key.seed, _WEIGHTS, key.round, key.tokens, rank)
    values = torch.rand(key.tokens, topk, generator=generator, device=device).add_(0.25)
    return values.div_(values.sum(1, keepdim=True))


def expert(
    seed: int, number: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of expert `number` of all ranks': (H, 2F), gate first, and (F, H), so that rows keep their
    magnitude.
    """
    generator = _generator(device, seed, _EXPERTS, number)
    made = []
    for shape in ((hidden, 2 * ffn), (ffn, hidden)):
        values = torch.randn(shape, generator=generator, device=device, dtype=wide(dtype))
        made.append(values.mul_(shape[0] ** -0.5).to(dtype))
    return made[0], made[1]


def shared_experts(
    seed: int, point: Point, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The weights of a point's shared experts, as one wide expert's; empty without any."""
    width = point.shared * (point.ffn or 0)
    return expert(seed, point.experts, point.hidden, width, dtype, device) if width else ()


def payload(
    seed: int, round: int, source: int, target: int, num_bytes: int, device: torch.device
) -> torch.Tensor:
    """Random bytes, none of them zero, that `source` sends to `target` in a bare exchange."""
    generator = _generator(device, seed, _BYTES, round, source, target)
    return torch.randint(1, 256, (num_bytes,), generator=generator, device=device, dtype=torch.uint8)


def answer(rows_NH: torch.Tensor, key_N: torch.Tensor) -> torch.Tensor:
    """Answer of "expert" (or rank) `key` to a row: the row times 1 + (key mod 7) / 8, rounded to its type.

    Stands in for the expert's network in the combine benchmark: cheap, and different for neighbouring
    experts.
    """
    dtype = wide(rows_NH.dtype)
    scale = 1.0 + torch.remainder(key_N, 7).to(dtype) / 8.0
    return (rows_NH.to(dtype) * scale[:, None]).to(rows_NH.dtype)


def quantised(rows_NH: torch.Tensor, wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in a wire format: (N, H) float8_e4m3fn and (N, blocks) scales of its dtype.

    For each block of columns data = x * (1 / scale), to nearest even and at most 448 in magnitude. The scale
    of fp8 is max(amax / 448, 2^-126), that of mxfp8 the least power of two from 2^-127 on that is not below
    amax / 448. Rows are finite. Divisions are of tensors by tensors: by a number, torch would multiply with
    its inverse, which rounds otherwise.
    """
    count, hidden = rows_NH.shape
    columns = SCALES[wire][0]
    blocks = -(-hidden // columns)
    padded = torch.zeros(count, blocks * columns, dtype=torch.float32, device=rows_NH.device)
    padded[:, :hidden] = rows_NH
    grouped = padded.view(count, blocks, columns)
    amax = grouped.abs().amax(2)
    scales = torch.div(amax, torch.full_like(amax, 448.0))
    if wire == "mxfp8":
        exponents = scales.double().clamp_min(2.0**-127).log2().ceil()
        scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        scales = scales.clamp_min(2.0**-126)
    of_blocks = factors(scales)
    inverse = torch.div(torch.ones_like(of_blocks), of_blocks)
    scaled = (grouped * inverse[:, :, None]).clamp_(-448.0, 448.0)
    return scaled.view(count, -1)[:, :hidden].to(torch.float8_e4m3fn), scales


def factors(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales of a wire format in float32."""
    if scales.dtype == torch.float32:
        return scales
    return torch.exp2(scales.view(torch.uint8).double() - 127).float()


def spread(scales: torch.Tensor, hidden: int, wire: str) -> torch.Tensor:
    """Returns the scale of each column, (N, H) float32."""
    return factors(scales).repeat_interleave(SCALES[wire][0], dim=1)[:, :hidden]


def dequantised(data_NH: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, wire: str) -> torch.Tensor:
    """(N, H) rows of `dtype` from a wire format."""
    return (data_NH.to(torch.float32) * spread(scales, data_NH.shape[1], wire)).to(dtype)
