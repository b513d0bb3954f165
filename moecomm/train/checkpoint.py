"""State for torch.distributed.checkpoint that can be loaded on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels.activation import INTERLEAVED
from moecomm.kernels.parameters import Split, splits_of
from moecomm.nn.experts import GroupedExperts, SharedExperts
from moecomm.nn.layer import MoELayer, layers_of
from moecomm.parallel.records import grouped_in
from moecomm.train.model_parts import ModelParts
from moecomm.train.optimizer_state import Numbers, ParamGroups, ensure_state, require_savable

Place = DeviceMesh | Callable[[Tensor], Tensor]
"""How a tensor of this rank's experts belongs to the tensor of all experts: as a shard over a mesh, or as the
pieces (PartTensor) that a function makes of it."""


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Returns the state dict for `torch.distributed.checkpoint.save` and `.load`: {"model": ..., "layers":
    ..., "optimizer": ..., "param_groups": ...}.

    A checkpoint has each expert once, in (E, ...) tensors, and loads on any number of ranks, sharded or not
    (docs/training.md). Expert parameters, and the optimizer's tensors of their shape, are DTensors sharded by
    expert (dimension 0); under a folding with ETP > 1 PartTensors, which only save, async_save and load
    accept. All other tensors are as in `state_dict()`. Tensors share storage with the live ones, so `load`
    writes into model and optimizer in place.

    Names are those of model.state_dict(), except w_in.interleaved for a w_in whose gates and up values are
    interleaved. "layers", "param_groups" and "optimizer_numbers" (if any) are Statefuls: keep all keys at the
    top level of what you pass to `load`; you may add keys. Trained parameters without a step first get their
    initial optimizer state, if it is all zeros (Adam, AdamW, SGD, RMSprop, Muon and others, not NAdam or
    Rprop); with SGD's dampening, their first step is then also dampened.

    Args:
        model: the model itself; for a wrapper `ddp`, `ddp.module`.
        optimizer: its optimizer, if that should be saved.

    Raises InvalidArgument for experts outside of MoELayers. For experts spread over ranks: if hooks omit or
    copy a parameter, or the state has a buffer. For the optimizer's state: if it has anything but tensors
    and numbers, a tensor of another shape than its expert parameter (Adafactor), or if trained parameters
    lack state whose initial values are unknown: call it, to load as well, after a step in which all have
    gradients. A load raises InvalidArgument, on all ranks, for tensors of a layer that only the checkpoint
    has, and for a parameter group saved with different settings.
    """
    layers = layers_of(model)
    live, foreign = _live_state(model)  # before the rest, as it makes FSDP restore its shards
    places = _find_places(model)
    interleaved = _interleaved(model)
    tensors = {f"{n}.interleaved" if id(t) in interleaved else n: t for n, t in live.items()}
    names = {id(value): name for name, value in reversed(tensors.items())}  # the first of several names
    for name, parameter in model.named_parameters():
        if parameter in places and id(parameter) not in names:
            raise InvalidArgument(
                f"{name}, which is of this rank's experts, is not in model.state_dict(): a hook has left it "
                "out or put a copy in its place, which a checkpoint would take for the same on all ranks. "
                "Hooks may rename parameters of experts, and must hand out the parameters themselves"
            )
        names.setdefault(id(parameter), name)
    if foreign:
        raise InvalidArgument(
            f"{foreign[0]} is in the state of experts that are spread over ranks, and no parameter: a "
            "checkpoint would take it for the same on all ranks. Before, remove what has put it there "
            "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove), register a "
            "buffer with persistent=False, or make it a parameter"
        )
    of_model = {n: _shard(t, places.get(t) if isinstance(t, Tensor) else None) for n, t in tensors.items()}
    state: dict[str, Any] = {"model": of_model}
    if layers:
        state["layers"] = _LayerNames([_names_of(layer, tensors) for layer in layers])
    if optimizer is not None:
        named = {parameter: names[id(parameter)] for parameter in model.parameters()}
        if len(set(named.values())) < len(named):
            raise InvalidArgument(
                "model.state_dict() has a parameter under the name of another one, which is not in it: a "
                "hook has renamed it, and their states in the optimizer could not be told apart"
            )
        require_savable(optimizer, named)
        ensure_state(optimizer, named)
        state["optimizer"] = {
            name: {
                key: _shard(value, _place_of_state(places, parameter, name, key, value))
                for key, value in optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            }
            for parameter, name in named.items()
            if parameter in optimizer.state
        }
        counted = Numbers(optimizer, named)
        if counted.state_dict():
            state["optimizer_numbers"] = counted
        state["param_groups"] = ParamGroups(optimizer, named)
    return state


class _LayerNames:
    """The names of each layer's tensors, as a Stateful: without them a load would not notice that the model
    lacks a tensor of the checkpoint."""

    def __init__(self, layers: Sequence[tuple[str, ...]]) -> None:
        self._layers = {names[0]: names for names in layers if names}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._layers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for first, own in self._layers.items():
            more = [name for name in state[first] if name not in own]
            if more:
                raise InvalidArgument(
                    f"the checkpoint has {', '.join(more)}, which the model lacks: its layer would compute "
                    "something else than the saved one. Build it with the MoEConfig of the saved model "
                    "(shared experts and their gate, biases of experts and router, balancing biases), or "
                    "leave 'layers' out of what is loaded, to do without"
                )


def _names_of(layer: MoELayer, tensors: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a layer's tensors, the same on all ranks; without those of custom experts, which
    may differ between ranks."""
    experts, _ = grouped_in(layer.experts)
    parts = [each for each in (layer.router, experts, layer.shared) if each is not None]
    own = {id(tensor) for each in parts for tensor in (*each.parameters(), *each.buffers())}
    names = [name for name, value in tensors.items() if id(value) in own]
    if experts is not None and experts.part.number:  # only part 0 has b_out
        names += [f"{name.removesuffix('b_in')}b_out" for name in names if name.endswith("experts.b_in")]
    return tuple(names)


def _live_state(model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Returns the model's state_dict of live tensors, not copies, without experts' records (get_extra_state);
    and the names of its values that come from experts spread over ranks and are no parameters."""
    records: list[Any] = []
    foreign: list[tuple[str, Any]] = []
    spread: set[nn.Module] = set()
    if dist.is_initialized():
        spread |= {layer.experts for layer in layers_of(model) if layer.comm.size > 1}
        spread |= {each for each in model.modules() if isinstance(each, GroupedExperts) and not each.has_all}

    def note(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if isinstance(module, GroupedExperts):
            records.append(state.get(f"{prefix}_extra_state"))
        if module in spread:
            known = {id(each) for each in (*module.parameters(), *records)}
            foreign.extend((n, v) for n, v in state.items() if n.startswith(prefix) and id(v) not in known)

    handles = []
    for module in model.modules():
        if module in spread or isinstance(module, GroupedExperts):
            handle = module.register_state_dict_post_hook(note)
            # Moves the hook before hooks that rename.
            module._state_dict_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            handles.append(handle)
    try:
        state = model.state_dict(keep_vars=True)
    finally:
        for handle in handles:
            handle.remove()
    left_out = {id(each) for each in records if each is not None}
    state = {name: value for name, value in state.items() if id(value) not in left_out}
    kept = {id(value) for value in state.values()}
    return state, [name for name, value in foreign if id(value) in kept]


def _place_of_state(
    places: dict[Any, Place], parameter: Tensor, name: str, key: str, value: Tensor
) -> Place | None:
    """Returns the Place of an optimizer's tensor: its parameter's Place, or None for a number, which all
    ranks have alike. Raises InvalidArgument for a tensor of experts whose shape is not its parameter's."""
    place = places.get(parameter)
    if place is None or value.shape == parameter.shape:
        return place
    if value.numel() > 1:
        raise InvalidArgument(
            f"the optimizer's {key} of {name} is {tuple(value.shape)}, and the experts' weight "
            f"{tuple(parameter.shape)}: a checkpoint would take it for the same on all ranks. Use an "
            "optimizer whose state has the weights' shape"
        )
    return None


def _interleaved(model: nn.Module) -> set[int]:
    """Returns the ids of weights with interleaved gates and up values. These weights get another name, so
    that a checkpoint cannot be loaded into weights of the other order."""
    return {
        id(module._parameters["w_in"])
        for module in model.modules()
        if isinstance(module, (GroupedExperts, SharedExperts))
        and module.config.activation in INTERLEAVED
        and module._parameters.get("w_in") is not None
    }


def _find_places(model: nn.Module) -> dict[Any, Place]:
    """Returns the Place of each expert parameter: a mesh, which has a second dimension if FSDP has sharded
    the parameter; for experts split over ETP ranks a function."""
    if not dist.is_initialized():
        return {}
    parts = ModelParts(model)
    owners = parts.owners
    meshes: dict[tuple[Any, Any], DeviceMesh] = {}
    places: dict[Any, Place] = {}
    for layer in parts.layers:
        if layer.folding is not None and layer.folding.etp > 1:
            splits = splits_of(layer.config.activation)
            for name, of_part in layer.experts.named_parameters():
                owners.pop(of_part, None)
                # A parametrization's original has the shape of the weight.
                weight = name.removeprefix("parametrizations.").removesuffix(".original")
                if weight not in splits:
                    raise InvalidArgument(
                        f"experts.{name} is no weight or bias of GroupedExperts, and folding.etp is "
                        f"{layer.folding.etp}: how parts of experts share it a checkpoint cannot know. Save "
                        "it on your own, or remove it before"
                    )
                places[of_part] = partial(part_of_all, experts=layer.experts, split=splits[weight])
    for parameter, layer in owners.items():
        kind, over = parameter.device.type, getattr(parameter, "device_mesh", None)
        key = (layer.comm, over)
        if key not in meshes:
            if over is not None:
                meshes[key] = layer.experts.moecomm_replicas.mesh(layer.comm, kind)
            else:
                assert layer.comm.group is not None
                meshes[key] = DeviceMesh.from_group(layer.comm.group, kind)
        places[parameter] = meshes[key]
    return places


def _shard(tensor: Any, place: Place | None) -> Any:
    """Returns this rank's experts as a shard (DTensor) or PartTensor of all experts; without a Place the
    given value, detached if it is a tensor."""
    if place is None:
        return tensor.detach() if isinstance(tensor, Tensor) else tensor
    if not isinstance(place, DeviceMesh):
        return place(tensor)
    is_sharded = isinstance(tensor, DTensor)
    local = (tensor.to_local() if is_sharded else tensor).detach()
    placements = [Shard(0), *(tensor.placements if is_sharded else ())]
    shape = torch.Size((tensor.shape[0] * place.size(0), *tensor.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, place, placements, run_check=False, shape=shape, stride=stride)


# -- parts of experts, as pieces of whole experts' tensors -------------------------------------------------


class PartTensor(Tensor):
    """The (E, ...) tensor of all experts, whole. This rank has some pieces of it (blocks at offsets), which
    share storage with a parameter or an optimizer's tensor. PartTensor is only for
    torch.distributed.checkpoint's save, async_save and load: other operations raise Unsupported."""

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
        if func is torch.ops.aten.new_empty.default:  # async_save copies the pieces into it
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
    """Returns `tensor` (a parameter of experts split over ETP ranks, or an optimizer's tensor for it) as
    pieces of the tensor of all whole experts. Raises InvalidArgument for a DTensor not sharded by expert."""
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
