"""One point of the layer benchmark as one rank sees it: everybody's ids, its own rows and gradients, its
experts' weights, and the rows that its experts get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moecomm.nn import mark_expert_parameter

from . import data, routing, verify
from .data import DataKey
from .layer_options import LayerOptions
from .layer_presets import Preset
from .routing import Ids

_GRADIENTS = 1  # added to the seed: gradients of the result are rows of another stream


def ids_of(kind: str, exponent: float | None, preset: Preset, tokens: int, seed: int, rank: int) -> Ids:
    """The (T, K) int32 ids of a rank's tokens."""
    shape = (tokens, preset.topk, preset.experts)
    if kind == "uniform":
        return routing.uniform(*shape, seed, rank)
    if kind == "zipf":
        assert exponent is not None
        return routing.zipf(*shape, seed, rank, exponent)
    assert kind == "balanced", kind
    return routing.balanced(*shape)


def rows_per_rank(ids_R: Sequence[Ids], experts: int) -> list[int]:
    """(token, expert) pairs at each rank's experts.

    Example: 2 ranks, 4 experts, ids [[0, 2]] and [[0, 1]]: rank 0 has experts 0 and 1, so [3, 1].
    """
    local = experts // len(ids_R)
    owners = np.concatenate([ids_TK.ravel() for ids_TK in ids_R]) // local
    found: list[int] = np.bincount(owners, minlength=len(ids_R)).tolist()
    return found


class Experts:
    """This rank's experts: (L, H, 2F) and (L, F, H), the same for every way and point of a preset."""

    def __init__(self, options: LayerOptions, preset: Preset, rank: int, device: torch.device) -> None:
        local = preset.experts // options.ranks
        dtype: torch.dtype = getattr(torch, options.dtype)
        w_in = torch.empty(local, preset.hidden, 2 * preset.ffn, dtype=dtype, device=device)
        w_out = torch.empty(local, preset.ffn, preset.hidden, dtype=dtype, device=device)
        for place in range(local):
            number = rank * local + place
            w_in[place], w_out[place] = data.expert(
                options.seed, number, preset.hidden, preset.ffn, dtype, device
            )
        self.w_in, self.w_out = torch.nn.Parameter(w_in), torch.nn.Parameter(w_out)
        for each in (self.w_in, self.w_out):
            mark_expert_parameter(each)  # as those that a layer makes


class LayerCase:
    """Inputs of one point on one rank. `load` fills in another round of data, same ids."""

    def __init__(
        self,
        options: LayerOptions,
        preset: Preset,
        routed: tuple[str, float | None],
        tokens: int,
        rank: int,
        device: torch.device,
        experts: Experts,
    ) -> None:
        self.options, self.preset, self.rank, self.device = options, preset, rank, device
        self.kind, self.exponent = routed
        self.tokens, self.experts = tokens, experts
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.local = preset.experts // options.ranks
        self.ids_R = [
            ids_of(self.kind, self.exponent, preset, tokens, options.seed, source)
            for source in range(options.ranks)
        ]
        self.rows_R = rows_per_rank(self.ids_R, preset.experts)
        self.layout = verify.expert_layout(self.ids_R, rank, preset.experts)
        self.capacity = max(1, int(max(self.rows_R) * options.headroom))
        self.topk_idx_TK = torch.from_numpy(self.ids_R[rank].copy()).to(device)
        self.offsets_L = torch.from_numpy(self.layout.offsets_G).to(device, torch.int32)
        rows = self.layout.num_rows
        weights_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32

        def empty(count: int) -> Tensor:
            return torch.empty(count, preset.hidden, dtype=self.dtype, device=device)

        self.x_TH, self.dy_TH = empty(tokens).requires_grad_(), empty(tokens)
        self.weights_TK = torch.empty(
            tokens, preset.topk, dtype=weights_dtype, device=device
        ).requires_grad_()
        # The same as it arrives at this rank's experts, for what is timed without communication.
        self.rows_PH, self.dy_PH = empty(rows).requires_grad_(), empty(rows)
        self.weights_P = torch.empty(rows, dtype=weights_dtype, device=device).requires_grad_()
        self.weighted_dy_PH = empty(rows)
        self._shuffles = np.random.default_rng([options.seed, 5, tokens, rank])
        self.key = DataKey(options.seed, 0, tokens, preset.hidden, options.dtype)
        self.load(0)

    @property
    def gradient_key(self) -> DataKey:
        """Of the gradients of the result."""
        return replace(self.key, seed=self.key.seed + _GRADIENTS)

    @torch.no_grad()
    def load(self, round: int) -> None:
        """Fills all inputs with the data of `round`, and puts the ids back as they were."""
        self.topk_idx_TK.copy_(torch.from_numpy(self.ids_R[self.rank]))
        self.key = replace(self.key, round=round)
        for source in range(self.options.ranks):
            x_TH = data.rows(self.key, source, self.device)
            dy_TH = data.rows(self.gradient_key, source, self.device)
            weights_TK = data.weights(self.key, source, self.preset.topk, self.device)
            if source == self.rank:
                self.x_TH.copy_(x_TH)
                self.dy_TH.copy_(dy_TH)
                self.weights_TK.copy_(weights_TK)
            here_N = self.layout.source_N == source
            row_N, token_N, slot_N = (
                torch.from_numpy(each[here_N]).to(self.device)
                for each in (self.layout.row_N, self.layout.token_N, self.layout.slot_N)
            )
            self.rows_PH[row_N] = x_TH[token_N]
            self.dy_PH[row_N] = dy_TH[token_N]
            self.weights_P[row_N] = weights_TK[token_N, slot_N].to(self.weights_P.dtype)
        self.weighted_dy_PH.copy_(self.dy_PH * self.weights_P[:, None])

    def fresh_ids(self) -> None:
        """Other ids with the same traffic: tokens rolled, each token's slots shuffled. A training step never
        sees its ids twice."""
        rolled = np.roll(self.ids_R[self.rank], int(self._shuffles.integers(self.tokens)), axis=0)
        self.topk_idx_TK.copy_(torch.from_numpy(self._shuffles.permuted(rolled, axis=1)))
