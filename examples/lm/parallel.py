"""Splits a model's windows and attention over ranks: tensor and context parallelism.

The TP x CP ranks of a group share a window of S tokens. Context parallelism cuts it into 2 CP chunks, of
which rank c has numbers c and 2 CP - 1 - c, so that all have equal work under the causal mask. Tensor
parallelism cuts these further, so a rank has S / (TP CP) tokens of each window (`own_places`).

    S = 16, TP 2, CP 2         cp 0        cp 1
    chunks                     0    3      1    2
    tp 0                       0..3        4..7
    tp 1                       12..15      8..11

With these tokens and whole weights a rank computes everything but attention's products: embedding, norms,
router, experts, output and loss. This is sequence parallelism from end to end. Before attention the TP ranks
gather their tokens; each computes its own heads, and the results are summed and scattered (torch's tensor
parallelism). Keys and values, or their latents, are gathered over the CP ranks, in the order of their
positions; each chunk of queries attends to those that it sees.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from lm.attention import GroupedAttention, LatentAttention
from lm.model import Transformer
from moecomm.parallel import Coordinates, ParallelFolding

# torch 2.13 renamed these two, and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_places(seq: int, folding: ParallelFolding, place: Coordinates, device: torch.device) -> Tensor | None:
    """Returns the positions of a rank's tokens in a window, (S / (TP CP),) int64; None: all, in order."""
    if folding.tp == folding.cp == 1:
        return None
    return _context_places(seq, folding.cp, place.cp).chunk(folding.tp)[place.tp].to(device)


def _context_places(seq: int, cp: int, rank: int) -> Tensor:
    """Returns the positions of a CP rank's tokens in a window."""
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def split_attention(model: Transformer, folding: ParallelFolding, device: torch.device) -> DeviceMesh | None:
    """Splits a model's attention over the folding's TP and CP groups, in place. All ranks call it together,
    with equal whole weights. With TP it returns the ranks of this one's stage as a mesh ("dp_cp", "tp"):
    along "dp_cp" ranks hold the same parts, along "tp" together all parts."""
    mesh = None
    if folding.tp > 1:
        mesh = _attention_mesh(folding, device)
        for block in model.own_blocks():
            _split_heads(block, mesh["tp"], folding)
        model.gathered = folding.tp
    if folding.cp > 1:
        folding.group("cp")  # made here, by all ranks: pipeline stages first use it at different times
        rank = folding.coordinates(dist.get_rank()).cp
        places_S = _context_places(model.config.max_seq, folding.cp, rank).to(device)
        model.cos_SD, model.sin_SD = model.cos_SD[places_S], model.sin_SD[places_S]
        for block in model.own_blocks():
            block.attention.gather_keys = GatherKeys(folding)
            block.attention.core = ContextCore(block.attention.core, folding, rank)
    return mesh


def _attention_mesh(folding: ParallelFolding, device: torch.device) -> DeviceMesh:
    groups = [folding.group("dp-cp"), folding.group("tp")]
    columns = dist.get_process_group_ranks(groups[0])
    ranks = torch.tensor([folding.group_of("tp", rank) for rank in columns], dtype=torch.int)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp_cp", "tp"))


def _split_heads(block: Any, mesh: DeviceMesh, folding: ParallelFolding) -> None:
    attention = block.attention
    plan: dict[str, Any] = {"out": RowwiseParallel(output_layouts=Shard(1))}
    if isinstance(attention, LatentAttention):
        # The products of latents have the rank's own tokens as input, since latents are gathered.
        plan |= {"q_up": ColwiseParallel(input_layouts=Shard(1))}
        attention.share_latents = Gather(1, folding, "tp")
        own = distribute_tensor(attention.kv_up.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        attention.kv_up.weight = nn.Parameter(own)
    else:
        assert isinstance(attention, GroupedAttention)
        plan |= {name: ColwiseParallel() for name in ("q", "k", "v")}
        layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        names = {name: (layout, None, None) for name, layout in layouts.items()}
        parallelize_module(attention, mesh, PrepareModuleInput(**names), src_data_rank=None)  # type: ignore[arg-type]
        if attention.sinks_N is not None:
            own = distribute_tensor(attention.sinks_N.detach(), mesh, [Shard(0)], src_data_rank=None)
            attention.sinks_N = nn.Parameter(own)
    parallelize_module(attention, mesh, plan, src_data_rank=None)


class Gather(nn.Module):
    """Maps a rank's tensor to those of all ranks along a dimension of the folding, concatenated in `dim`;
    backward sums their gradients for it."""

    def __init__(self, dim: int, folding: ParallelFolding, over: str, order: list[int] | None = None) -> None:
        """order: indices of the gathered chunks in their new order, with equally many chunks of each rank;
        None: the ranks' tensors in rank order."""
        super().__init__()
        self._dim, self._folding, self._over = dim, folding, over
        self._order = list(range(folding.size(over))) if order is None else order

    def forward(self, x: Tensor) -> Tensor:
        group = self._folding.group(self._over)
        gathered: Tensor = _Gathered.apply(x, self._dim, self._order, group)  # type: ignore[no-untyped-call]
        return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.order, ctx.group = dim, order, group
        ranks = dist.get_world_size(group)
        parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        _all_gather(parts, x.contiguous(), group=group)
        chunks = [each for part in parts.chunk(ranks) for each in part.chunk(len(order) // ranks, dim)]
        return torch.cat([chunks[number] for number in order], dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        chunks, ranks = dx.chunk(len(ctx.order), ctx.dim), dist.get_world_size(ctx.group)
        of_rank = len(chunks) // ranks
        gathered = [chunks[ctx.order.index(number)] for number in range(len(chunks))]
        parts = [torch.cat(gathered[rank * of_rank :][:of_rank], ctx.dim) for rank in range(ranks)]
        own = torch.empty_like(parts[0])
        _reduce_scatter(own, torch.cat(parts), group=ctx.group)
        return own, None, None, None


class GatherKeys(nn.Module):
    """Maps a CP rank's two chunks of keys and values, or of their latents, to those of the whole window, in
    one transfer: (B, heads, S / CP, width) each to (B, heads, S, width)."""

    def __init__(self, folding: ParallelFolding) -> None:
        super().__init__()
        chunks = 2 * folding.cp
        gathered = [chunk for rank in range(folding.cp) for chunk in (rank, chunks - 1 - rank)]
        self._gather = Gather(1, folding, "cp", [gathered.index(chunk) for chunk in range(chunks)])

    def forward(self, k_BMSD: Tensor, v_BMSV: Tensor) -> tuple[Tensor, Tensor]:
        both_BSMW = self._gather(torch.cat((k_BMSD, v_BMSV), dim=-1).transpose(1, 2))
        k_BMSD, v_BMSV = both_BSMW.transpose(1, 2).split((k_BMSD.shape[-1], v_BMSV.shape[-1]), dim=-1)
        return k_BMSD, v_BMSV


class ContextCore(nn.Module):
    """An AttentionCore for windows that are spread over the CP ranks: core(q, k, v, sinks) with a rank's own
    two chunks of queries, and the keys and values of the whole window."""

    def __init__(self, core: nn.Module, folding: ParallelFolding, rank: int) -> None:
        """rank: position of this rank in the CP group."""
        super().__init__()
        self.core, self._chunks = core, (rank, 2 * folding.cp - 1 - rank)

    def forward(self, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, sinks_N: Tensor | None) -> Tensor:
        results = []
        for own_BNSD, chunk in zip(q_BNSD.chunk(2, 2), self._chunks, strict=True):
            end = (chunk + 1) * own_BNSD.shape[2]
            results.append(self.core(own_BNSD, k_BMSD[:, :, :end], v_BMSV[:, :, :end], sinks_N))
        return torch.cat(results, 2)
