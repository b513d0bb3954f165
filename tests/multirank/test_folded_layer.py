"""MoELayer under a ParallelFolding equals one process with all ranks' tokens: outputs, gradients, weights,
dropped choices and checkpoints, with experts split over ETP ranks or not; and what of it is refused.
"""

import copy
import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from moecomm import Communicator
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    OverlapConfig,
    clip_grad_norm,
    fully_shard_experts,
    prepare_ddp,
    sharded_state,
    sync_gradients,
    update_expert_bias,
)
from moecomm.parallel import ParallelFolding, meshes
from moecomm.parallel.expert_ranks import require_parts_within_nodes
from moecomm.parallel.meshes import new_group
from moecomm.train import replicas
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, group_of, groups_of, wrapped
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_data_parallel import recipe
from tests.ranks import gathered

pool = own_pool()

TOKENS = [3, 9, 6, 0, 4, 1, 5, 2]
MAX_TOKENS = 10
FOLDINGS: dict[str, dict[str, Any]] = {
    "etp 2, ep 2": {"tp": 2, "etp": 2, "ep": 2},
    "etp 2, edp 2": {"cp": 2, "etp": 2},
    "tp 2, etp 2, edp 2": {"tp": 2, "etp": 2},
    "etp 4": {"tp": 4, "etp": 4},
    "ep 4 over tp 2 and cp 2": {"tp": 2, "cp": 2, "ep": 4},
}


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    overlap: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    crowded: bool = False
    """All tokens want the same experts."""

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(**{**SIZES, "dtype": self.dtype, **self.options})


FIXED = {"capacity_factor": 0.8, "pad_to_capacity": True}
CASES = {
    "shared experts, losses": Case(
        {"num_shared_experts": 1, "aux_loss": "batch", "aux_loss_coef": 0.7, "z_loss_coef": 0.3}
    ),
    "biases, clamped": Case({"activation": "swiglu_clamped", "bias": True}),
    "biases in halves, in order": Case({"bias": True}, {"overlap": False}),
    "gelu, nothing kept": Case({"activation": "gelu", "top_k": 5}, {"keep": "nothing"}),
    "dropped by weight": Case({"capacity_factor": 0.6, "pre_softmax": True}),
    "fixed buffers, by position": Case({**FIXED, "bias": True, "drop_policy": "position"}, crowded=True),
    "float32": Case(dtype=torch.float32),
}


def columns(name: str, activation: str, part: int, parts: int) -> tuple[int, list[int]] | None:
    """The dimension of a weight of all experts that parts divide, and the places of a part there."""
    width = int(SIZES["ffn_hidden"]) // parts
    inner = range(part * width, (part + 1) * width)
    if name == "b_out":
        return None
    if name == "w_out" or activation == "gelu":
        return 1 if name in ("w_out", "b_in") else 2, list(inner)
    if activation == "swiglu":
        return (1 if name == "b_in" else 2), [*inner, *(SIZES["ffn_hidden"] + i for i in inner)]
    return (1 if name == "b_in" else 2), [2 * i + odd for i in inner for odd in (0, 1)]


def held(name: str, whole: Tensor, layer: MoELayer, rank: int) -> Tensor:
    """This rank's part of a parameter of one process, by hand from its coordinates."""
    assert layer.folding is not None
    if not name.startswith("experts."):
        return whole
    place, folding = layer.folding.coordinates(rank), layer.folding
    count = layer.config.num_experts // folding.ep
    mine = whole[place.ep * count : (place.ep + 1) * count]
    found = columns(name.removeprefix("experts."), layer.config.activation, place.etp, folding.etp)
    return mine if found is None else mine.index_select(found[0], torch.tensor(found[1]))


def layers(rank: int, folding: ParallelFolding, case: Case, seed: int) -> tuple[MoELayer, MoELayer]:
    """One under the folding and one in this process alone, of the same weights, as they start."""
    overlap = OverlapConfig(**case.overlap)
    torch.manual_seed(seed)
    layer = MoELayer(case.config, folding=folding, max_tokens=MAX_TOKENS, overlap=overlap)
    torch.manual_seed(seed)
    config = MoEConfig(**{**SIZES, **case.options, "dtype": case.dtype})
    groups = [group_of(each) for each in range(folding.world_size)]
    alone = MoELayer(config, group=groups[rank], max_tokens=folding.world_size * MAX_TOKENS, overlap=overlap)
    whole = dict(alone.named_parameters())
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, held(name, whole[name], layer, rank)), name
    missing = set(whole) - set(dict(layer.named_parameters()))
    split = folding.coordinates(rank).etp > 0 and case.config.bias
    assert missing == ({"experts.b_out"} if split else set()), missing
    with torch.no_grad():
        for name, parameter in whole.items():
            if ".b_" in name:
                parameter.normal_()
            if case.crowded and name == "router.weight":
                parameter[: case.config.top_k, 0] += 20.0
        for name, parameter in layer.named_parameters():
            parameter.copy_(held(name, whole[name], layer, rank))
    return layer, alone


def tokens_of(rank: int, case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """x (T, H) of a rank and the factors of its output in the loss."""
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    x, factor = torch.randn(2, TOKENS[rank], 16, generator=generator, dtype=torch.float64).to(case.dtype)
    if case.crowded:
        x[:, 0] = 1.0
    return x.requires_grad_(), factor


def run(layer: nn.Module, x: Tensor, factor: Tensor, ranks: int = 1) -> Tensor:
    """A forward and a backward of a rank's loss, or that share of it that counts in the mean over ranks."""
    y: Tensor = layer(x)
    ((y * factor).sum() / ranks).backward()
    return y.detach()


close = functools.partial(assert_close, rtol=1e-9, atol=1e-9)


def check_gradients(layer: nn.Module, alone: MoELayer, rank: int, close: Callable[..., None] = close) -> None:
    inner = next(module for module in layer.modules() if isinstance(module, MoELayer))
    wanted = dict(alone.named_parameters())
    for name, parameter in inner.named_parameters():
        found = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        close(found, held(name, wanted[name].grad, inner, rank), msg=name)


def check_clipping(layer: nn.Module, alone: MoELayer, rank: int, close: Callable[..., None] = close) -> None:
    """Gradients, their norm, and what clipping makes of them."""
    check_gradients(layer, alone, rank, close)
    wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    close(clip_grad_norm(layer, 0.1).to(wanted.dtype), wanted)
    check_gradients(layer, alone, rank, close)


@pytest.mark.parametrize("name", FOLDINGS)
@on_ranks(4)
def test_equals_one_process(rank: int, world_size: int, name: str, seed: int) -> None:
    """All cases under two foldings, and under each other one every second."""
    every, number = list(CASES.values()), list(FOLDINGS).index(name)
    folding = ParallelFolding(world_size=world_size, **FOLDINGS[name])
    for case in every if number < 2 else every[number % 2 :: 2]:
        layer, alone = layers(rank, folding, case, seed)
        tolerance = 1e-9 if case.dtype == torch.float64 else 1e-5
        within = functools.partial(assert_close, rtol=tolerance, atol=tolerance)
        # The losses of the layer are per rank, of a mean over ranks.
        alone.loss_scale = 1 / world_size
        with layer.comm, alone.comm:
            x, factor = tokens_of(rank, case, seed)
            y = run(layer, x, factor)
            for other in range(world_size):
                other_x, other_factor = tokens_of(other, case, seed)
                other_y = run(alone, other_x, other_factor, world_size)
                if other == rank:
                    within(y, other_y)
                    within(x.grad, other_x.grad * world_size)
                    for name, loss in layer.last_losses.items():
                        within(loss, alone.last_losses[name])
            sync_gradients(layer)
            check_clipping(layer, alone, rank, within)


@on_ranks(8)
def test_the_pages_recipe(rank: int, world_size: int, seed: int) -> None:
    case = Case({"num_shared_experts": 1})
    _, alone = layers(rank, ParallelFolding(world_size=world_size, ep=world_size // 2), case, seed)
    torch.manual_seed(seed)
    x, factor = tokens_of(rank, case, seed)
    given = {name: value for name, value in globals().items() if not name.startswith("_")}
    given |= {"config": case.config, "max_tokens": MAX_TOKENS, "max_norm": 0.1, "x": x}
    code = recipe("A layer under a folding", "folding.md")[0]
    exec(code, given | {"loss_of": lambda y: (y * factor).sum()}, found := {})
    with alone.comm, found["layer"].comm:
        for other in range(world_size):
            run(alone, *tokens_of(other, case, seed), ranks=world_size)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        check_gradients(found["layer"], alone, rank)


@on_ranks(4)
def test_compiled(rank: int, world_size: int, seed: int) -> None:
    """Parts of experts in a layer under torch.compile."""
    folding = ParallelFolding(world_size=world_size, **FOLDINGS["etp 2, ep 2"])
    layer, alone = layers(rank, folding, CASES["fixed buffers, by position"], seed)
    alone.comm.close()
    x, factor = tokens_of(rank, CASES["fixed buffers, by position"], seed)
    with layer.comm:
        found = []
        for each in (layer, torch.compile(layer, backend="eager")):
            layer.zero_grad()
            y = run(each, x, factor)
            found.append({"y": y, **{name: p.grad for name, p in layer.named_parameters()}})
        for name, value in found[0].items():
            close(found[1][name], value, msg=name)
        experts, top_k = layer.config.num_experts, layer.config.top_k
        for unknown in (-2, experts, 1 << 40):  # of an expert that is split, each is told as one of its parts
            ids_TK = torch.arange(top_k).repeat(len(x), 1)
            ids_TK[:, -1] = unknown
            refused(lambda ids_TK=ids_TK: layer(x, topk_idx=ids_TK), "topk_idx", name="InvalidRouting")


# -- gradients under wrappers, stages ----------------------------------------------------------------------
def model_of(moe: MoELayer) -> Any:
    return nn.Sequential(OrderedDict(moe=moe))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(4)
def test_wrappers_average_alike(rank: int, world_size: int, kind: str, seed: int) -> None:
    folding = ParallelFolding(world_size=world_size, **FOLDINGS["tp 2, etp 2, edp 2"])
    case = CASES["biases in halves, in order"] if kind == "ddp" else CASES["shared experts, losses"]
    case = Case({**case.options, "aux_loss": "none", "aux_loss_coef": 0.0, "z_loss_coef": 0.0}, case.overlap)
    layer, alone = layers(rank, folding, case, seed)
    model: nn.Module = model_of(layer)
    with layer.comm, alone.comm:
        model = wrapped(model, kind)
        for _ in range(2):
            run(model, *tokens_of(rank, case, seed))
            for other in range(world_size):
                run(alone, *tokens_of(other, case, seed), ranks=world_size)
        check_clipping(model, alone, rank)


@on_ranks(4)
def test_pipeline_stages(rank: int, world_size: int, seed: int) -> None:
    """Two stages, of other weights: each is averaged over its own ranks, the norm is that of both."""
    folding = ParallelFolding(world_size=world_size, pp=2, etp=2, tp=2)
    stage = folding.group_of("tp-cp-dp", rank)
    case = Case({"bias_update_rate": 0.1})
    layer, alone = layers(rank, folding, case, seed + 7 * folding.coordinates(rank).pp)
    with layer.comm, alone.comm:
        run(layer, *tokens_of(rank, case, seed))
        for other in stage:
            run(alone, *tokens_of(other, case, seed), ranks=len(stage))
        sync_gradients(layer)
        check_gradients(layer, alone, rank)
        update_expert_bias(layer)
        assert alone.router.load_E is not None and alone.router.expert_bias_E is not None
        load_E = alone.router.load_E
        bias_E = 0.1 * (load_E.sum() - load_E * load_E.numel()).sign()
        close(layer.router.expert_bias_E, bias_E.float())
        pipeline, every, dense = folding.group("pp"), dist.group.WORLD, nn.Linear(1, 1)
        other = dataclasses.replace(folding, pp=1)
        calls: dict[str, Callable[[], Any]] = {
            "pp_group is None, must be the ranks of this rank's": lambda: clip_grad_norm(layer, 0.1),
            "group has ranks (0, 1, 2, 3), must have": lambda: sync_gradients(layer, every),
            "group has ranks": lambda: prepare_ddp(layer, pipeline),
            "the model's layers, or they and `folding`, have different foldings": lambda: sync_gradients(
                layer, folding=other
            ),
            "group has ranks (0, 1, 2, 3), must": lambda: sync_gradients(dense, every, folding=folding),
        }
        for text, call in calls.items():
            refused(call, begins=text)
        square = torch.stack([p.grad.square().sum() for p in alone.parameters() if p.grad is not None]).sum()
        dist.all_reduce(square, group=pipeline)
        norm = clip_grad_norm(layer, 0.1, pp_group=pipeline)
        close(norm, square.sqrt())
    dense = nn.Linear(1, 1, bias=False)  # a stage without MoELayers
    dense.weight.grad = torch.full((1, 1), float(rank))
    sync_gradients(dense, folding=folding)
    assert dense.weight.grad.item() == sum(stage) / len(stage)
    assert len(set(map(float, gathered(norm)))) == 1


# -- state ---------------------------------------------------------------------------------------------------
def trained(
    rank: int, arguments: dict[str, Any], case: Case, seed: int, sharded: bool = False
) -> tuple[Any, torch.optim.Optimizer, MoELayer]:
    """A model after a step, so that its optimizer has a state, and the layer of one process as it began."""
    folding = ParallelFolding(world_size=4, **arguments)
    layer, alone = layers(rank, folding, case, seed)
    model = model_of(layer)
    if sharded:
        fully_shard_experts(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run(model, *tokens_of(rank, case, seed))
    sync_gradients(model)
    optimizer.step()
    return model, optimizer, alone


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped"])
@on_ranks(4)
def test_checkpoints(rank: int, world_size: int, activation: str, tmp_path: Path, seed: int) -> None:
    """Parts are saved as whole experts, which one process reads, and another folding; and back."""
    case = Case({"activation": activation, "bias": True})
    model, optimizer, alone = trained(rank, FOLDINGS["etp 2, ep 2"], case, seed)
    dcp.save(sharded_state(model, optimizer), checkpoint_id=f"{tmp_path}/parts")
    whole = model_of(alone)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    dcp.load(sharded_state(whole, whole_optimizer), checkpoint_id=f"{tmp_path}/parts")
    want = dict(whole.named_parameters())

    def require_whole(what: str) -> None:
        """Checks that the whole model has this one's weights and moments."""
        for name, parameter in model.named_parameters():
            part = functools.partial(held, name.removeprefix("moe."), layer=model.moe, rank=rank)
            assert torch.equal(parameter, part(want[name])), (name, what)
            for key, value in optimizer.state[parameter].items():
                state = whole_optimizer.state[want[name]][key]
                assert torch.equal(value, part(state) if state.dim() else state), (name, key, what)

    require_whole("as it was saved")
    for way, sharded in (("etp 4", False), ("etp 2, edp 2", True)):
        other, other_optimizer, unused = trained(rank, FOLDINGS[way], case, seed + 1, sharded)
        unused.comm.close()
        dcp.load(sharded_state(other, other_optimizer), checkpoint_id=f"{tmp_path}/parts")
        path = f"{tmp_path}/{way}"
        written = dcp.async_save(sharded_state(other, other_optimizer), checkpoint_id=path)
        with torch.no_grad():  # what is saved is a copy
            for each in other.parameters():
                each.zero_()
        written.result()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.fill_(float("nan"))
        dcp.load(sharded_state(whole, whole_optimizer), checkpoint_id=path)
        require_whole(way)
        other.moe.comm.close()
    if activation == "swiglu":
        refused(lambda: sharded_state(model)["model"]["moe.experts.w_in"] + 1, name="Unsupported")
    model.moe.comm.close()
    alone.comm.close()


@on_ranks(4)
def test_a_state_of_another_part_is_refused(rank: int, world_size: int, seed: int) -> None:
    case = CASES["biases in halves, in order"]
    layer, alone = layers(rank, ParallelFolding(world_size=4, **FOLDINGS["etp 2, ep 2"]), case, seed)
    with layer.comm, alone.comm:
        told = gathered(layer.state_dict())
        ids = told[rank]["experts._extra_state"].tolist()
        assert ids == [6 * (rank // 2), 6, 12, 0, rank % 2, 2]
        before = copy.deepcopy(layer.state_dict())
        for other in range(4):
            if other == rank:
                layer.load_state_dict(told[other])
                continue
            text = f"part {other % 2} of 2 of each, this module experts"
            refused(functools.partial(layer.load_state_dict, told[other]), text)
        refused(lambda: layer.load_state_dict(alone.state_dict()), "holds experts 0..11 of 12, this module")
        for name, value in layer.state_dict().items():
            if name.startswith("experts."):
                assert torch.equal(value, before[name]), name
        twin = copy.deepcopy(layer)
        twin.load_state_dict(told[rank])


# -- what is refused -----------------------------------------------------------------------------------------
@on_ranks(4)
def test_what_does_not_fit_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    folding = ParallelFolding(world_size=world_size, tp=2, etp=2, ep=2)
    config = Case().config
    sizes: dict[str, Any] = {"hidden": 16, "max_tokens": 8, "dtype": torch.float64}
    with (
        MoELayer.make_communicator(config, folding, max_tokens=8) as right,
        Communicator(folding.group("ep"), num_experts=12, top_k=3, **sizes) as of_ep,
        Communicator(folding.group("etp-ep"), num_experts=12, top_k=3, **sizes) as unsplit,
    ):
        layers = [MoELayer(config, right, folding=folding) for _ in range(2)]
        assert layers[0].comm is layers[1].comm
        made = functools.partial(MoELayer, folding=folding)
        calls: dict[str, Callable[[], Any]] = {
            "comm has ranks": lambda: made(config, of_ep),
            "comm.num_experts is 12, must be 24, for experts in etp=2 parts": lambda: made(config, unsplit),
            "comm.num_experts is 24, must be the config's": lambda: MoELayer(config, right),
            "group (or mesh) is given by folding": lambda: made(config, group=dist.group.WORLD, max_tokens=8),
            "group (or mesh) and max_tokens are given by comm": lambda: made(config, right, max_tokens=8),
            "max_tokens is None": lambda: made(config),
            "folding is 3, must be a": lambda: MoELayer(config, folding=3, max_tokens=8),  # type: ignore[arg-type]
            "folding.etp is 2, must be 1 with experts of one's own": lambda: made(
                config, max_tokens=8, experts=nn.Identity()
            ),
            "num_experts is 13, must be a multiple of the folding's ep=2": lambda: made(
                Case({"num_experts": 13}).config, max_tokens=8
            ),
            "ffn_hidden is 9, must be a multiple of the folding's etp=2": lambda: made(
                Case({"ffn_hidden": 9}).config, max_tokens=8
            ),
        }
        for text, call in calls.items():
            refused(call, begins=text)
        # Each expert is whole within one node: of two, but not of four with one rank each.
        limited = Case({"limit_nodes": 1}).config
        require_parts_within_nodes(limited, folding, SimpleNamespace(nodes=2, size=4))  # type: ignore[arg-type]
        four: Any = SimpleNamespace(nodes=4, size=4)
        begins = "limit_nodes is 1, must be None where"
        refused(lambda: require_parts_within_nodes(limited, folding, four), begins=begins)
        for parameter in layers[0].router.parameters():
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        refused(lambda: sync_gradients(layers[0]), "is split by tensor parallelism")


@on_ranks(4)
def test_replicas_beside_groups_of_some_ranks(rank: int, world_size: int, seed: int) -> None:
    """Ranks 0 and 1 are in a group more than 2 and 3 when those of hosts and of replicas are made."""
    dist.new_group([0, 1])
    ep_group, _ = groups_of(rank, world_size, 2)
    torch.manual_seed(seed)
    layer = MoELayer(Case().config, group=ep_group, max_tokens=MAX_TOKENS)
    with layer.comm, mock.patch.object(replicas, "_of_hosts", weakref.WeakKeyDictionary()):
        run(layer, *tokens_of(rank, Case(), seed))
        sync_gradients(layer)
    _make_pairs(rank)


def _make_pairs(rank: int) -> None:
    for ranks in ((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 2), (1, 3)):
        total, mine = torch.tensor(10.0**rank), next(each for each in ranks if rank in each)
        dist.all_reduce(total, group=new_group(mine))
        assert total == sum(10.0**each for each in mine)


@on_ranks(2)
def test_a_group_made_after_another_was_destroyed(rank: int, world_size: int) -> None:
    """torch before 2.14 would give it the name of the group that was made second, and refuse it."""
    first, second = new_group((0, 1)), new_group((0, 1))
    dist.destroy_process_group(first)
    for group in (second, new_group((0, 1)), dist.new_group([0, 1], use_local_synchronization=True)):
        total = torch.tensor(10.0**rank)
        dist.all_reduce(total, group=group)
        assert total == 11


def _name_by_count(ranks: Sequence[int], use_hashed_name: bool) -> str:
    """Names a process group as torch does from 2.14 on."""
    count = c10d._world.group_count
    c10d._world.group_count += 1
    return f"{'_'.join(map(str, ranks))} {count}" if use_hashed_name else str(count)


@on_ranks(4)
def test_groups_that_torch_names_by_its_count(rank: int, world_size: int) -> None:
    """Groups of some ranks leave torch's count of groups as it is, by which it names those that all make."""
    named = mock.patch.object(c10d, "_process_group_name", _name_by_count)
    with named, mock.patch.object(meshes, "_NAMED_BY_COUNT", True):
        dist.new_group([0, 1])
        if rank != 3:
            new_group((0, 1, 2))
        _make_pairs(rank)
        total = torch.tensor(1.0)
        dist.all_reduce(total, group=dist.new_group())
        assert total == world_size


@on_ranks(2, MOECOMM_TIMEOUT="1")
def test_a_rank_that_makes_no_group_is_named(rank: int, world_size: int) -> None:
    if rank == 0:
        refused(lambda: new_group((0, 1)), "rank 1 did not come within 1 s", name="PeerTimeout")
