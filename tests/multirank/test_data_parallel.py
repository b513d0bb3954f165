"""Data parallel x expert parallel: the recipes of docs/training.md, word for word, against one process that
sees all ranks' tokens; and what of them is refused.
"""

import copy
import dataclasses
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel  # noqa: F401  (of the recipes)
from torch.optim.swa_utils import AveragedModel
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
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, unsharded, wrapped
from tests.multirank.moe_cases import LinearThenMoE as Model
from tests.multirank.on_ranks import on_ranks
from tests.ranks import gathered

pool = own_pool()

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, bias_update_rate=0.01, dtype=torch.float64)
STEPS, MAX_NORM = 3, 0.5
TOKENS = [5, 0, 7, 4]


def recipe(title: str, page: str = "training.md") -> list[str]:
    """The code blocks of a part of a page."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"docs/{page} has no part {title!r}"
    return [
        textwrap.dedent(code) for code in re.findall(r"(?:^    .*\n|^\n(?=    ))+", found[1], re.MULTILINE)
    ]


def tokens(rank: int, step: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * step + rank)
    return torch.randn(TOKENS[rank], 16, generator=generator, dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    return (y.square() + y).sum()


def names(rank: int, world_size: int, ep: int, seed: int) -> dict[str, Any]:
    """Returns the names that the page's recipes take as given, with their values."""
    torch.manual_seed(seed)
    given = {name: value for name, value in globals().items() if not name.startswith("_")}
    return given | {
        "device_type": "cpu",
        "dp": world_size // ep,
        "ep": ep,
        "config": CONFIG,
        "max_tokens": max(TOKENS),
        "max_norm": MAX_NORM,
        "lr": 0.01,
        "batches": [tokens(rank, step, seed) for step in range(STEPS)],
    }


def spread(rank: int, world_size: int, ep: int, seed: int, config: MoEConfig = CONFIG) -> Model:
    """A model whose experts `ep` ranks share out."""
    torch.manual_seed(seed)
    return Model(MoELayer(config, group=groups_of(rank, world_size, ep)[0], max_tokens=max(TOKENS)))


def backward_of_all(model: Model, world_size: int, step: int, seed: int) -> None:
    """Adds the gradients of all ranks' tokens, and keeps them from clipping."""
    for rank in range(world_size):
        (loss_of(model(tokens(rank, step, seed))) / world_size).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.raw_grad = parameter.grad.clone()  # type: ignore[attr-defined]


def one_process(rank: int, world_size: int, steps: int, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """The model after `steps` steps on all ranks' tokens, with all experts and the last step's gradients."""
    model = spread(rank, world_size, 1, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        backward_of_all(model, world_size, step, seed)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        router = model.moe.router
        assert router.load_E is not None and router.expert_bias_E is not None
        load_E = router.load_E
        router.expert_bias_E += CONFIG.bias_update_rate * (load_E.sum() - load_E * load_E.numel()).sign()
        load_E.zero_()
    return model, optimizer


def assert_same(model: nn.Module, wanted: nn.Module, of: str = "data", tolerance: float = 1e-9) -> None:
    """Weights (or another attribute of parameters) are those of one process, its experts this rank's."""
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    first, count = layer.experts.first_expert, layer.experts.num_local_experts
    want = dict(wanted.named_parameters())
    for name, parameter in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        attribute = parameter.detach() if of == "data" else parameter.grad
        expected = want[name].detach() if of == "data" else want[name].raw_grad  # type: ignore[attr-defined]
        if ".experts." in name:
            expected = expected[first : first + count]
        say = partial("{}: {}".format, name)
        assert_close(unsharded(attribute), expected, rtol=tolerance, atol=tolerance, msg=say)


def assert_replicas_equal(model: nn.Module, rank: int, ep: int) -> None:
    """Asserts that parameters of replicas, and dense ones of all ranks, have the same bits."""
    own = {name: unsharded(parameter.detach()) for name, parameter in model.named_parameters()}
    told = gathered(own)
    for other, theirs in enumerate(told):
        for name, tensor in own.items():
            if ".experts." not in name or other % ep == rank % ep:
                assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize(
    ("title", "ep"),
    [
        *(("By hand", 2), ("By hand", 4)),
        *(("DistributedDataParallel", 1), ("DistributedDataParallel", 2)),
        *(("FSDP2", 1), ("FSDP2", 2), ("FSDP2", 4)),
    ],
)
@on_ranks(4)
def test_recipe_is_one_process(rank: int, world_size: int, title: str, ep: int, seed: int) -> None:
    given = names(rank, world_size, ep, seed)
    exec(recipe(title)[0], given)
    model = given["model"]
    with model.moe.comm:
        wanted, _ = one_process(rank, world_size, STEPS, seed)
        assert_same(model, wanted)
        assert_replicas_equal(model, rank, ep)
        ours, theirs = model.moe.router.expert_bias_E, wanted.moe.router.expert_bias_E
        assert ours is not None and theirs is not None and torch.equal(ours, theirs) and bool(ours.any())
        wanted.moe.comm.close()


@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_a_start_without_values(rank: int, world_size: int, ep: int, seed: int) -> None:
    """The page's start on the meta device draws what the same loop draws where nothing is sharded."""
    given = names(rank, world_size, ep, seed)
    mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("dp", "ep"))
    exec(recipe("FSDP2")[1], given := given | {"mesh": mesh, "seed": seed})
    plain, _ = one_process(rank, world_size, 0, seed + 1)
    for number, module in enumerate(plain.modules()):
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(seed + number)
            module.reset_parameters()
    experts = given["model"].moe.experts
    with plain.moe.comm, given["model"].moe.comm, torch.no_grad():
        for (name, found), want in zip(
            given["model"].moe.named_parameters(), plain.moe.parameters(), strict=True
        ):
            here = slice(experts.first_expert, experts.first_expert + experts.num_local_experts)
            assert torch.equal(unsharded(found), want[here] if name.startswith("experts.") else want), name
        loss_of(given["model"](tokens(rank, 0, seed)))


def build(rank: int, world_size: int, ep: int, seed: int) -> tuple[Model, DeviceMesh]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("dp", "ep"))
    return Model(MoELayer(CONFIG, mesh=mesh, ep_dim="ep", max_tokens=max(TOKENS))), mesh


@pytest.mark.parametrize("how", ["by hand", "ddp", "fsdp", "fsdp of blocks"])
@on_ranks(4)
def test_gradients_and_norm_are_those_of_one_process(rank: int, world_size: int, how: str, seed: int) -> None:
    """Gradients before clipping, the norm, and what sync_gradients does after them."""
    model, _ = build(rank, world_size, 2, seed)
    wanted, _ = one_process(rank, world_size, 1, seed)
    torch.manual_seed(seed)
    with model.moe.comm, wanted.moe.comm:
        fresh, _ = one_process(rank, world_size, 0, seed)
        fresh.moe.comm.close()
        runs: nn.Module = wrapped(model, "ddp") if how == "ddp" else model
        if how.startswith("fsdp"):
            fully_shard_experts(model)
            if how == "fsdp of blocks":
                fully_shard(model.moe)
            fully_shard(model)
        loss_of(runs(tokens(rank, 0, seed))).backward()
        if how == "ddp":
            for each in (runs, model):
                refused(partial(sync_gradients, each), "under DistributedDataParallel")
        else:
            sync_gradients(model)
        assert_same(model, wanted, "grad")
        want = torch.cat([p.raw_grad.flatten() for p in wanted.parameters()]).norm()  # type: ignore[attr-defined]
        assert_close(clip_grad_norm(model, MAX_NORM), want, rtol=1e-12, atol=0)
        clipped = clip_grad_norm(model, MAX_NORM)
        assert_close(clipped, torch.tensor(MAX_NORM, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("ep", "reduce"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)], ids=str
)
@on_ranks(4)
def test_fsdp_with_mixed_precision(
    rank: int, world_size: int, ep: int, reduce: torch.dtype, tmp_path: Path, seed: int
) -> None:
    """Weights in float64 compute in float32 by FSDP2's policy, with replicas or without: gradients of two
    backwards are those of one process but for float32, a step changes the weights by them, and a checkpoint
    has the weights."""
    model = spread(rank, world_size, ep, seed, dataclasses.replace(CONFIG, dtype=torch.float32)).double()
    wanted, _ = one_process(rank, world_size, 0, seed)
    ours = model.moe.experts
    with torch.no_grad():  # a layer in float32 draws others
        for name, parameter in model.named_parameters():
            value = dict(wanted.named_parameters())[name]
            part = slice(ours.first_expert, ours.first_expert + ours.num_local_experts)
            parameter.copy_(value[part] if ".experts." in name else value)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce)
    wrapped(model, "fsdp", mp_policy=policy)
    assert all(isinstance(each, DTensor) and each.dtype == torch.float64 for each in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with model.moe.comm, wanted.moe.comm:
        for step in range(2):
            loss_of(model(tokens(rank, step, seed))).backward()
            backward_of_all(wanted, world_size, step, seed)
        assert_same(model, wanted, "grad", tolerance=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(wanted.parameters(), MAX_NORM)
        assert_close(clip_grad_norm(model, MAX_NORM), norm, rtol=1e-4, atol=0)
        before = unsharded(model.moe.experts.w_in.detach()).clone()
        assert sharded_state(model)["model"]["moe.experts.w_in"].shape == wanted.moe.experts.w_in.shape
        optimizer.step()
        change = before - unsharded(model.moe.experts.w_in.detach())
        first = model.moe.experts.first_expert
        want = wanted.moe.experts.w_in.grad
        assert want is not None
        assert_close(change, 0.5 * want[first : first + len(change)], rtol=1e-4, atol=1e-6)
        saved = {name: unsharded(parameter.detach()).clone() for name, parameter in model.named_parameters()}
        torch.distributed.checkpoint.save(sharded_state(model), checkpoint_id=tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.distributed.checkpoint.load(sharded_state(model), checkpoint_id=tmp_path)
        for name, parameter in model.named_parameters():
            assert torch.equal(unsharded(parameter.detach()), saved[name]), name


def one_step(
    model: nn.Module, inner: Model, wanted: Model, rank: int, world_size: int, seed: int, share: float = 1.0
) -> None:
    """Checks gradients of a backward; `share`: of each loss."""
    inner.zero_grad(set_to_none=True)
    wanted.zero_grad(set_to_none=True)
    (loss_of(model(tokens(rank, 0, seed))) * share).backward()
    backward_of_all(wanted, world_size, 0, seed)
    assert_same(inner, wanted, "grad")


@pytest.mark.parametrize(
    ("way", "ep"),
    [
        ("ddp frozen", 2),
        ("ddp frozen", 4),
        ("ddp copied", 2),
        ("ddp assigned", 2),
        ("ddp assigned", 4),
        ("fsdp frozen", 4),
        ("fsdp assigned", 4),
    ],
)
@on_ranks(4)
def test_experts_that_are_replaced_or_trained_later(
    rank: int, world_size: int, way: str, ep: int, seed: int
) -> None:
    """Experts that were frozen, or whose parameters are other objects than when the model was wrapped."""
    model = spread(rank, world_size, ep, seed)
    wanted, _ = one_process(rank, world_size, 0, seed)
    wrapper, how = way.split()
    if how == "frozen":
        model.moe.experts.requires_grad_(False)
    runs = wrapped(model, wrapper)
    with model.moe.comm, wanted.moe.comm:
        if how == "frozen":
            runs(tokens(rank, 0, seed)).square().sum().backward()
            assert all(each.grad is None for each in model.moe.experts.parameters())
            assert model.first.weight.grad is not None and model.moe.router.weight.grad is not None
            model.moe.experts.requires_grad_(True)
            one_step(runs, model, wanted, rank, world_size, seed)
            return
        if how == "copied":
            runs = copy.deepcopy(runs)
        else:
            experts = model.moe.experts
            values = {name: value.detach().clone() for name, value in experts.named_parameters()}
            experts.load_state_dict(values, strict=False, assign=True)
        if wrapper == "ddp":
            refused(lambda: runs(tokens(rank, 0, seed)), "wrap moecomm.nn.prepare_ddp(model) anew")
            with torch.no_grad():
                runs(tokens(rank, 0, seed))  # nothing is averaged
        else:
            one_step(runs, model, wanted, rank, world_size, seed)


class OtherRouter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.inner(*inputs, **options)


@on_ranks(4)
def test_fsdp_of_experts_in_a_wrapper(rank: int, world_size: int, seed: int) -> None:
    """Experts under checkpoint_wrapper are sharded over the ranks that hold the same, beside a router of
    another class."""
    model = spread(rank, world_size, 2, seed)
    wanted, _ = one_process(rank, world_size, 0, seed)
    for each in (model, wanted):
        each.moe.router = OtherRouter(each.moe.router)  # type: ignore[assignment]
    model.moe.experts = checkpoint_wrapper(model.moe.experts)
    with model.moe.comm, wanted.moe.comm:
        one_step(wrapped(model, "fsdp"), model, wanted, rank, world_size, seed)


@on_ranks(4)
def test_shards_are_saved_with_another_communicator(
    rank: int, world_size: int, tmp_path: Path, seed: int
) -> None:
    """One that has replaced that with which they were sharded."""
    model = spread(rank, world_size, 2, seed)
    wrapped(model, "fsdp")
    group, sizes = model.moe.comm.group, {"num_experts": 12, "hidden": 16, "top_k": 3}
    model.moe.comm.close()
    model.moe.comm = Communicator(group, **sizes, max_tokens=max(TOKENS), dtype=torch.float64)
    other = spread(rank, world_size, 1, seed + 1)
    with model.moe.comm, other.moe.comm:
        torch.distributed.checkpoint.save(sharded_state(model), checkpoint_id=tmp_path)
        torch.distributed.checkpoint.load(sharded_state(other), checkpoint_id=tmp_path)
        assert_same(model, other)


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "policy"])
@pytest.mark.parametrize("ep", [2, 4])
@on_ranks(4)
def test_a_divisor_of_the_callers(rank: int, world_size: int, ep: int, mixed: bool, seed: int) -> None:
    """A divisor of 1 in all modules, and a loss that has the ranks' share in it, is the mean all the same."""
    model = spread(rank, world_size, ep, seed)
    wanted, _ = one_process(rank, world_size, 0, seed)
    fully_shard_experts(model, **({"mp_policy": MixedPrecisionPolicy()} if mixed else {}))
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    with model.moe.comm, wanted.moe.comm:
        one_step(model, model, wanted, rank, world_size, seed, share=1 / world_size)


@pytest.mark.parametrize("dim", ["dp", "ep"])
@on_ranks(4)
def test_dense_parameters_over_some_ranks_are_refused(
    rank: int, world_size: int, dim: str, seed: int
) -> None:
    model, mesh = build(rank, world_size, 2, seed)
    fully_shard_experts(model)
    fully_shard(model, mesh=mesh[dim])
    with model.moe.comm:
        loss_of(model(tokens(rank, 0, seed))).backward()
        refused(lambda: clip_grad_norm(model, MAX_NORM), "must be so over all ranks that hold the model")
        refused(lambda: sync_gradients(model), "must be so over all ranks (0, 1, 2, 3)")


@on_ranks(2)
def test_mixed_precision_of_a_layer_in_order(rank: int, world_size: int, seed: int) -> None:
    """A layer in order takes its experts' routing weights through their forward, which FSDP2 would cast."""
    torch.manual_seed(seed)
    config = dataclasses.replace(CONFIG, dtype=torch.bfloat16)
    model = Model(MoELayer(config, max_tokens=max(TOKENS), overlap=OverlapConfig(overlap=False))).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped(model, "fsdp", mp_policy=policy)
    with model.moe.comm:
        loss_of(model(tokens(rank, 0, seed).float()).float()).backward()
        assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in model.parameters())


@on_ranks(4)
def test_fsdp_of_spread_experts_is_refused(rank: int, world_size: int, seed: int) -> None:
    for how in ("over all ranks", "over the replicas", "of the layer"):
        model, mesh = build(rank, world_size, 2, seed)
        module = {"over all ranks": model, "over the replicas": model.moe.experts, "of the layer": model.moe}
        given = {} if how == "over all ranks" else {"mesh": mesh["dp"]}
        with model.moe.comm:
            text = "Call moecomm.nn.fully_shard_experts(model) first"
            refused(partial(fully_shard, module[how], **given), text)
    model, mesh = build(rank, world_size, 2, seed)
    with model.moe.comm:
        refused(lambda: fully_shard_experts(model, mesh=mesh["dp"]), begins="mesh is given")
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        wrapped(model, "fsdp")
        refused(lambda: prepare_ddp(model), begins="model is sharded by fully_shard")
        model.moe.overlap = OverlapConfig(defer_weights=True)
        loss_of(model(tokens(rank, 0, seed))).backward()
        refused(model.moe.backward_weights, begins="defer_weights is True")


@on_ranks(4)
def test_groups_that_cannot_be_right_are_refused(rank: int, world_size: int, seed: int) -> None:
    model, mesh = build(rank, world_size, 2, seed)
    with model.moe.comm:
        loss_of(model(tokens(rank, 0, seed))).backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        calls: list[tuple[str, Callable[[], object]]] = [
            ("the EP groups of a layer are", lambda: sync_gradients(model, group=mesh["dp"])),
            ("group is a DeviceMesh of 2 dimensions", lambda: sync_gradients(model, group=mesh)),
            ("group is a DeviceMesh of 2 dimensions", lambda: update_expert_bias(model, mesh)),
            ("group has ranks", lambda: update_expert_bias(model, mesh["dp"])),
        ]
        for text, call in calls:
            refused(call, begins=text)
        for name, parameter in model.named_parameters():
            assert name not in before or torch.equal(parameter.grad, before[name])  # type: ignore[arg-type]
        # The right ones, as meshes and as groups, are taken.
        sync_gradients(model, DeviceMesh("cpu", list(range(world_size))))
        update_expert_bias(model, DeviceMesh("cpu", list(range(world_size))))


@on_ranks(3)
def test_ep_groups_of_several_sizes_are_refused(rank: int, world_size: int, seed: int) -> None:
    """Ranks 0 and 1 share out the experts, and 2 has them all."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    torch.manual_seed(seed)
    model = Model(MoELayer(CONFIG, group=groups[rank == 2], max_tokens=8))
    with model.moe.comm:
        text = "the EP groups of a layer are ((0, 1), (2,)) on the ranks (0, 1, 2)"
        refused(lambda: sync_gradients(model), begins=text)


@on_ranks(4)
def test_a_mesh_of_one_dimension_is_a_group(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    sizes: dict[str, Any] = {"num_experts": 12, "hidden": 16, "top_k": 3, "max_tokens": 8}
    with Communicator(mesh["ep"], **sizes) as comm:
        assert comm.group is mesh.get_group("ep") and comm.size == 2
    config = MoEConfig(**SIZES)
    for options in ({"group": mesh["dp"]}, {"mesh": mesh, "ep_dim": "dp"}, {"mesh": mesh["dp"]}):
        layer = MoELayer(config, max_tokens=8, **options)  # type: ignore[arg-type]
        with layer.comm:
            assert layer.comm.group is mesh.get_group("dp")
            assert layer.experts.first_expert == 6 * (rank // 2)
    unnamed = init_device_mesh("cpu", (2, 2))
    layer_of = partial(MoELayer, config, max_tokens=8)
    two = "group is a DeviceMesh of 2 dimensions, must have one: pass one"
    for text, call in (
        (f"{two} of its", lambda: Communicator(mesh, **sizes)),
        (f"{two} with", lambda: Communicator(unnamed, **sizes)),
        ("ep_dim is None, must be the dimension", lambda: layer_of(mesh=mesh)),
        ("ep_dim is 'tp', must be the dimension", lambda: layer_of(mesh=mesh, ep_dim="tp")),
        ("ep_dim is 'ep', must be None", lambda: layer_of(ep_dim="ep")),
        ("mesh is 'ep', must be a DeviceMesh", lambda: layer_of(mesh="ep")),
        ("config is a dict, must be a MoEConfig", lambda: MoELayer(SIZES, max_tokens=8)),
        ("comm is a MoEConfig, must be a Communicator", lambda: MoELayer(config, config)),
        ("group and mesh are both", lambda: layer_of(group=mesh["ep"], mesh=mesh)),
    ):
        refused(call, begins=text)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        ("FSDP2", "By hand 4"),
        ("DistributedDataParallel", "FSDP2 1"),
        ("By hand", "DistributedDataParallel 2"),
    ],
)
@on_ranks(4)
def test_checkpoint_goes_on_in_another_recipe(
    rank: int, world_size: int, save: str, load: str, tmp_path: Path, seed: int
) -> None:
    """Saved after a recipe's steps, loaded into another kind of model: the model of one process goes on."""
    folder = tmp_path / "saved"
    given = names(rank, world_size, 2, seed)
    exec(recipe(save)[0], given)
    write, read = recipe("Checkpoints")
    exec(write, given | {"folder": folder, "steps": STEPS})
    given["model"].moe.comm.close()
    wanted, _ = one_process(rank, world_size, STEPS, seed)
    title, ep = load.rsplit(" ", 1)
    fresh = names(rank, world_size, int(ep), seed + 1) | {"batches": [], "lr": 123.0}
    exec(recipe(title)[0], fresh)
    model, optimizer = fresh["model"], fresh["optimizer"]
    with model.moe.comm, wanted.moe.comm:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        exec(read, fresh | {"folder": folder})
        assert_same(model, wanted)
        assert optimizer.param_groups[0]["lr"] == 0.01
        # Another step, which needs the moments of the optimizer as they were.
        runs = fresh.get("ddp", model)
        optimizer.zero_grad()
        loss_of(runs(tokens(rank, STEPS, seed))).backward()
        if title == "By hand":
            sync_gradients(model)
        clip_grad_norm(model, MAX_NORM)
        optimizer.step()
        longer, _ = one_process(rank, world_size, STEPS + 1, seed)
        longer.moe.comm.close()
        assert_same(model, longer)


@on_ranks(4)
def test_average_of_weights(rank: int, world_size: int, tmp_path: Path, seed: int) -> None:
    """An average of weights computes, goes on after a checkpoint, and loads at another EP size."""
    model, _ = build(rank, world_size, 2, seed)
    twin = copy.deepcopy(model)
    average = AveragedModel(model)
    with model.moe.comm:
        average.update_parameters(model)
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), twin.parameters(), strict=True):
                parameter.mul_(3)
                first.mul_(2)
        average.update_parameters(model)
        x = tokens(rank, 0, seed)
        assert_close(average(x), twin(x), rtol=1e-9, atol=1e-9)
        torch.distributed.checkpoint.save(sharded_state(average), checkpoint_id=tmp_path)
        other = AveragedModel(spread(rank, world_size, 1, seed + 1))
        torch.distributed.checkpoint.load(sharded_state(other), checkpoint_id=tmp_path)
        assert_same(average.module, other.module)
        assert int(other.n_averaged) == int(average.n_averaged) == 2
        other.module.moe.comm.close()


@on_ranks(2)
def test_state_that_no_checkpoint_can_tell_apart_is_refused(rank: int, world: int) -> None:
    model = Model(MoELayer(CONFIG, max_tokens=8))
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    model(torch.randn(5, 16, dtype=torch.float64)).sum().backward()
    sync_gradients(model)
    optimizer.step()
    refused(lambda: sharded_state(model, optimizer), begins="the optimizer's row_var of moe.experts.")
    refused(lambda: sharded_state(model, "adam"), begins="optimizer is str, must be an optimizer of torch")
