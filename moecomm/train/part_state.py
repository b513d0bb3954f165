"""A rank's part of its experts as torch.distributed.checkpoint takes it: pieces of tensors of whole experts.

The columns of a part are contiguous within each block of a weight (moecomm/nn/parameters.py), so a rank has
one piece a block: of a w_in in halves one of gates and one of up values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.nn.experts import GroupedExperts
from moecomm.nn.parameters import Split


class PartTensor(Tensor):
    """The (E, ...) tensor of whole experts, of which this rank has some pieces; they share storage with the
    parameter, or the optimizer's tensor, that they are of. It is for torch.distributed.checkpoint's save,
    async_save and load alone: other operations raise Unsupported."""

    _pieces: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, whole: torch.Size, pieces: dict[torch.Size, Tensor], like: Tensor) -> PartTensor:
        made: PartTensor = Tensor._make_wrapper_subclass(cls, whole, dtype=like.dtype, device=like.device)
        made._pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> PartTensor:
        if func is torch.ops.aten.new_empty.default:  # async_save does this, and copies the pieces into it
            own, sizes = args[:2]
            like = torch.empty(0, dtype=own.dtype, device=(kwargs or {}).get("device") or own.device)
            return cls(torch.Size(sizes), {}, like)
        raise Unsupported(
            f"{func} on a tensor of sharded_state whose experts are split over ETP ranks: it can be saved "
            "and loaded by torch.distributed.checkpoint, and nothing else"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartTensor(shape={tuple(self.shape)}, pieces at {[tuple(at) for at in self._pieces]})"

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, piece.shape) for at, piece in self._pieces.items()]

    def __create_write_items__(self, fqn: str, own: PartTensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, at),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(at, piece.shape),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.shape,
                ),
            )
            for at, piece in self._pieces.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.offset]


def part_of_all(tensor: Tensor, experts: GroupedExperts, split: Split | None) -> PartTensor:
    """Returns a parameter of experts in parts, or an optimizer's tensor of its shape, as pieces of the tensor
    of all whole experts. It may be a DTensor sharded by expert (`fully_shard_experts`)."""
    first, count = experts.first_expert, experts.part.of
    shape, local = list(tensor.shape), tensor.detach()
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local().detach()
        if any(offsets[1:]) or local.shape[1:] != tensor.shape[1:]:
            raise InvalidArgument(
                f"experts split over ETP ranks are sharded as {tensor.placements}, must be sharded by "
                "expert, Shard(0), for sharded_state: leave shard_placement_fn out of fully_shard_experts"
            )
        first += offsets[0]
    shape[0] = experts.config.num_experts
    pieces = {}
    if split is None:
        pieces[torch.Size([first, *[0] * (local.dim() - 1)])] = local
    else:
        width = local.shape[split.dim] // split.blocks
        shape[split.dim] *= count
        for block in range(split.blocks):
            at = [first, *[0] * (local.dim() - 1)]
            at[split.dim] = (block * count + experts.part.number) * width
            pieces[torch.Size(at)] = local.narrow(split.dim, block * width, width)
    return PartTensor(torch.Size(shape), pieces if local.shape[0] else {}, local)
