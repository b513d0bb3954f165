"""Top-k ids to benchmark with: synthetic distributions and recorded traces.

All of it is a pure function of (seed, rank, tokens), so every rank can compute every other rank's ids without
asking. Ids are int32 of shape (T, K), distinct within a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .options import Options

Ids = npt.NDArray[np.int32]
_ROUTING_STREAM = 1  # keeps these random streams apart from those of the row data


def _rng(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng([seed, _ROUTING_STREAM, *key])


@dataclass(frozen=True)
class Limit:
    """Group-limited routing: the experts of a token are on `most` of `nodes` nodes."""

    nodes: int
    most: int


def _limited(scores_TE: npt.NDArray[np.float64], topk: int, limit: Limit) -> npt.NDArray[np.float64]:
    """The scores, minus infinity for experts of the nodes that a token may not use. It may use those whose
    topk / most highest scores add up to most (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """
    tokens, experts = scores_TE.shape
    scores_TNE = scores_TE.reshape(tokens, limit.nodes, experts // limit.nodes)
    counted = min(max(topk // limit.most, 1), scores_TNE.shape[2])
    node_TN = np.sort(scores_TNE, axis=2)[:, :, -counted:].sum(axis=2)
    chosen_TM = np.argsort(-node_TN, axis=1, kind="stable")[:, : limit.most]
    allowed_TN = np.zeros((tokens, limit.nodes), dtype=bool)
    np.put_along_axis(allowed_TN, chosen_TM, True, axis=1)
    return np.where(allowed_TN[:, :, None], scores_TNE, -np.inf).reshape(tokens, experts)


def _top_k(scores_TE: npt.NDArray[np.float64], topk: int, limit: Limit | None) -> Ids:
    if limit is not None:
        scores_TE = _limited(scores_TE, topk, limit)
    best = np.argpartition(-scores_TE, topk - 1, axis=1)[:, :topk]
    order = np.argsort(-np.take_along_axis(scores_TE, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1).astype(np.int32)


def uniform(tokens: int, topk: int, experts: int, seed: int, rank: int, limit: Limit | None = None) -> Ids:
    """Every set of `topk` experts is equally likely; with a limit, of those that it leaves."""
    return _top_k(_rng(seed, tokens, rank).random((tokens, experts)), topk, limit)


def zipf(
    tokens: int,
    topk: int,
    experts: int,
    seed: int,
    rank: int,
    exponent: float = 1.0,
    limit: Limit | None = None,
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


def one_hot(tokens: int, topk: int, experts: int) -> Ids:
    """Every token of every rank wants experts 0 .. topk-1: the worst that routing can do to one rank."""
    return np.broadcast_to(np.arange(topk, dtype=np.int32), (tokens, topk)).copy()


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


@lru_cache(maxsize=4)
def load_trace(path: str, experts: int) -> Ids:
    """Recorded ids from a .npy file, or a .npz file with one array or one named topk_idx: (T, K) or (R, T,
    K).

    Raises ValueError when the file is not that, an id is outside -1 .. experts-1, or a token names an expert
    twice.
    """
    if Path(path).suffix not in (".npy", ".npz"):
        raise ValueError(f"trace {path} has to be a .npy or .npz file")
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            names = list(loaded)
            name = "topk_idx" if "topk_idx" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise ValueError(f"trace {path} holds arrays {names}: name one of them topk_idx")
            loaded = loaded[name]
    except OSError as problem:
        raise ValueError(f"trace {path} cannot be read: {problem.strerror or problem}") from None
    if loaded.ndim not in (2, 3) or not np.issubdtype(loaded.dtype, np.integer) or loaded.size == 0:
        raise ValueError(
            f"trace {path} has to hold integers (T, K) or (R, T, K), got {loaded.dtype} {loaded.shape}"
        )
    low, high = int(loaded.min()), int(loaded.max())
    if low < -1 or high >= experts:
        raise ValueError(
            f"trace {path} has ids {low} .. {high}, outside -1 .. {experts - 1} (--experts {experts})"
        )
    ordered = np.sort(loaded, axis=-1)
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        raise ValueError(f"trace {path} names an expert twice within a token")
    return np.ascontiguousarray(loaded, dtype=np.int32)


def trace_ids(trace: Ids, tokens: int, rank: int) -> Ids:
    """`tokens` consecutive tokens of a trace for one rank, from the start again when the trace ends.

    Of (R, T, K), rank r reads row r (modulo R). Of (T, K), rank r starts at token r * tokens.
    """
    if trace.ndim == 3:
        own = trace[rank % trace.shape[0]]
        return np.ascontiguousarray(own[np.arange(tokens) % own.shape[0]])
    return np.ascontiguousarray(trace[(rank * tokens + np.arange(tokens)) % trace.shape[0]])


# A run looks at the same ids for each path, wire format and number of SMs.
_uniform = lru_cache(maxsize=128)(uniform)
_zipf = lru_cache(maxsize=128)(zipf)


def topk_ids(options: Options, tokens: int, rank: int) -> Ids:
    """The ids of `rank`'s `tokens` tokens under the routing that was asked for, (T, K) int32; not to be
    written to.
    """
    shape = (tokens, options.topk, options.experts)
    limit = None if options.limit_nodes is None else Limit(options.nodes, options.limit_nodes)
    if options.routing == "uniform":
        return _uniform(*shape, options.seed, rank, limit)
    if options.routing == "zipf":
        return _zipf(*shape, options.seed, rank, options.zipf, limit)
    if options.routing == "one-hot":
        return one_hot(*shape)
    if options.routing == "balanced":
        return balanced(*shape)
    if options.trace is None:
        raise ValueError(f"routing {options.routing!r} needs a trace file")
    return trace_ids(load_trace(options.trace, options.experts), tokens, rank)
