"""A model whose windows and attention are split over ranks: tensor and context parallelism.

A window of S tokens belongs to the TP x CP ranks of a group. Context parallelism cuts it into 2 CP chunks, of
which rank c has number c and number 2 CP - 1 - c: under the causal mask all have equal work. Tensor
parallelism cuts what they have once more, so a rank has S / (TP CP) tokens of each window (`own_places`).

    S = 16, TP 2, CP 2         cp 0        cp 1
    chunks                     0    3      1    2
    tp 0                       0..3        4..7
    tp 1                       12..15      8..11

With these tokens and whole weights it computes all but attention's products: embedding, norms, router,
experts, output and loss, which is sequence parallelism from end to end. Before attention the TP ranks gather
their tokens, each computes its own heads, and what they give is summed and scattered (torch's plans of
tensor parallelism). Keys and values are gathered over the CP ranks.
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
from lm.model import Block, Transformer
from moecomm.parallel import Coordinates, ParallelFolding

# torch 2.13 has new names for these two, and warns of the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_places(seq: int, folding: ParallelFolding, place: Coordinates, device: torch.device) -> Tensor | None:
    """Returns the places of a rank's tokens in a window, (S / (TP CP),) int64; None: all, in order."""
    if folding.tp == folding.cp == 1:
        return None
    return _context_places(seq, folding.cp, place.cp).chunk(folding.tp)[place.tp].to(device)


def _context_places(seq: int, cp: int, rank: int) -> Tensor:
    """Returns the places of a CP rank's tokens in a window."""
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def split_attention(model: Transformer, folding: ParallelFolding, device: torch.device) -> DeviceMesh | None:
    """Splits the attention of a model over the ranks of the folding's TP and CP groups, in place. All ranks
    call it together, each with the whole weights, which are the same everywhere. With TP it returns the ranks
    of this one's stage as a mesh ("dp_cp", "tp"): those that hold the same parts, and those that hold all."""
    mesh = None
    if folding.tp > 1:
        mesh = _attention_mesh(folding, device)
        for block in _blocks(model):
            _split_heads(block, mesh["tp"], folding)
        model.gathered = folding.tp
    if folding.cp > 1:
        folding.group("cp")  # made here, by all ranks: stages of a pipeline first use it at other times
        rank = folding.coordinates(dist.get_rank()).cp
        places_S = _context_places(model.config.max_seq, folding.cp, rank).to(device)
        model.cos_SD, model.sin_SD = model.cos_SD[places_S], model.sin_SD[places_S]
        for block in _blocks(model):
            block.attention.core = ContextCore(block.attention.core, folding, rank)
    return mesh


def _attention_mesh(folding: ParallelFolding, device: torch.device) -> DeviceMesh:
    groups = [folding.group("dp-cp"), folding.group("tp")]
    columns = dist.get_process_group_ranks(groups[0])
    ranks = torch.tensor([folding.group_of("tp", rank) for rank in columns], dtype=torch.int)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("dp_cp", "tp"))


def _blocks(model: Transformer) -> list[Any]:
    return [block for block in model.modules() if isinstance(block, Block)]


def _split_heads(block: Any, mesh: DeviceMesh, folding: ParallelFolding) -> None:
    attention = block.attention
    plan: dict[str, Any] = {"out": RowwiseParallel(output_layouts=Shard(1))}
    if isinstance(attention, LatentAttention):
        # The products that make latents have the rank's own tokens: latents are what is gathered.
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q_up", "kv_up")}
        attention.share_keys = Gather(1, folding, "tp")
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
    """Maps a rank's tensor to those of all ranks of a dimension of the folding, one after another along
    `dim`; backward sums what they give for it."""

    def __init__(self, dim: int, folding: ParallelFolding, over: str) -> None:
        super().__init__()
        self._dim, self._folding, self._over = dim, folding, over

    def forward(self, x: Tensor) -> Tensor:
        group = self._folding.group(self._over)
        gathered: Tensor = _Gathered.apply(x, self._dim, group)  # type: ignore[no-untyped-call]
        return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ranks = dist.get_world_size(group)
        parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        _all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts.chunk(ranks), dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        parts = dx.chunk(dist.get_world_size(ctx.group), ctx.dim)
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(own, torch.cat(parts), group=ctx.group)
        return own, None, None


class ContextCore(nn.Module):
    """An AttentionCore of windows that are spread over the CP ranks: core(q, k, v, sinks) with a rank's own
    two chunks of queries, keys and values. Each chunk of queries sees the keys of all ranks up to its end.
    """

    def __init__(self, core: nn.Module, folding: ParallelFolding, rank: int) -> None:
        """rank: this one's place in the CP group."""
        super().__init__()
        self.core, self._gather = core, Gather(2, folding, "cp")
        chunks = 2 * folding.cp
        self._own = (rank, chunks - 1 - rank)
        gathered = [chunk for each in range(folding.cp) for chunk in (each, chunks - 1 - each)]
        self._order = [gathered.index(chunk) for chunk in range(chunks)]

    def forward(self, q_BNSD: Tensor, k_BMSD: Tensor, v_BMSV: Tensor, sinks_N: Tensor | None) -> Tensor:
        q_BNSD, k_BMSD = q_BNSD.to(v_BMSV.dtype), k_BMSD.to(v_BMSV.dtype)
        keys, values = self._chunks(k_BMSD), self._chunks(v_BMSV)
        results = [
            self.core(own_BNSD, torch.cat(keys[: last + 1], 2), torch.cat(values[: last + 1], 2), sinks_N)
            for own_BNSD, last in zip(q_BNSD.chunk(2, 2), self._own, strict=True)
        ]
        return torch.cat(results, 2)

    def _chunks(self, x_BMSD: Tensor) -> list[Tensor]:
        """Returns the chunks of all CP ranks in the order of their positions."""
        gathered = self._gather(x_BMSD).chunk(len(self._order), 2)
        return [gathered[number] for number in self._order]
