"""Checkpoints of models whose state has other names than their parameters, of experts with buffers, and of
optimizers with numbers, or without state for some parameters: what is saved comes back, or is refused."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from moecomm.nn import GroupedExperts, MoEConfig, MoELayer, sharded_state, sync_gradients
from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, unsharded, wrapped
from tests.multirank.moe_cases import LinearThenMoE as Block
from tests.multirank.on_ranks import on_ranks

pool = own_pool()

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, bias_update_rate=0.01, dtype=torch.float64)


class Model(nn.Module):
    """Two blocks, perhaps with the same experts or weights of them, and a weight that no forward uses unless
    `with_spare`."""

    with_spare = False

    def __init__(self, group: Any, seed: int, ties: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = MoEConfig(**{**vars(CONFIG), **options})
        first = MoELayer(config, group=group, max_tokens=8)
        second = MoELayer(config, first.comm)
        if ties == "experts":
            second.experts = first.experts
        elif ties == "weights":
            second.experts.w_in, second.experts.w_out = first.experts.w_in, first.experts.w_out
        self.blocks = nn.ModuleList([Block(first), Block(second)])
        self.spare = nn.Linear(16, 3, dtype=torch.float64)
        self.comm = first.comm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.spare(x) if self.with_spare else x


def build(rank: int, world: int, ep: int, seed: int, **options: Any) -> Model:
    return Model(groups_of(rank, world, ep)[0], seed, **options)


def checkpointed(model: Model, around: type[nn.Module]) -> Model:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, around))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(5, 16, generator=generator, dtype=torch.float64)).square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        # sync_gradients would give the spare weight a gradient of zeros.
        unused = [p for p in model.parameters() if p.grad is None]
        sync_gradients(model)
        for parameter in unused:
            parameter.grad = None
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return unsharded(tensor).detach().clone()


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns all tensors of a `sharded_state`, of all ranks' experts."""
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state.get("optimizer", {}).items():
        found |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return {name: whole(value) for name, value in found.items()}


def assert_same(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert_close(found, want, rtol=0, atol=0)


def poison(state: dict[str, Any]) -> None:
    """Overwrites whatever a load is to write."""
    values = [*state["model"].values(), *(v for each in state["optimizer"].values() for v in each.values())]
    for value in values:
        (value.to_local() if isinstance(value, DTensor) else value).fill_(77)


@pytest.mark.parametrize(
    ("around", "fsdp", "options"),
    [
        ("layer", False, {"activation": "swiglu_interleaved"}),
        ("block", True, {}),
        ("layer", False, {"ties": "experts"}),
        ("block", False, {"ties": "weights"}),
        ("experts", False, {"bias": True}),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_model_under_activation_checkpointing_has_the_checkpoint_of_the_plain_one(
    rank: int, world: int, around: str, fsdp: bool, options: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """A wrapped model's checkpoint is that of the plain one, and loads into either, at any EP size."""
    kind = {"block": Block, "layer": MoELayer, "experts": GroupedExperts}[around]

    def make(ep: int, wraps: bool, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model: nn.Module = build(rank, world, ep, seed, **options)
        comm = model.comm
        if wraps:
            checkpointed(model, kind)  # type: ignore[arg-type]
        wrapped(model, "fsdp" if fsdp else "")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1), comm

    model, optimizer, comm = make(2, True, seed)
    plain, plain_optimizer, plain_comm = make(2, False, seed)
    with comm, plain_comm:
        train(model, optimizer, rank, range(2))
        train(plain, plain_optimizer, rank, range(2))
        state = sharded_state(model, optimizer)
        for name, value in state["model"].items():
            assert isinstance(value, DTensor) or ".experts." not in name, name
            assert ".experts." not in name or value.shape[0] == CONFIG.num_experts, name
        want = tensors_of(sharded_state(plain, plain_optimizer))
        assert_same(tensors_of(state), want)
        dcp.save(state, checkpoint_id=tmp_path)
    for ep, wraps in ((1, True), (2, False)):
        fresh, fresh_optimizer, fresh_comm = make(ep, wraps, seed + 1)
        with fresh_comm:
            poison(sharded_state(fresh, fresh_optimizer))
            dcp.load(sharded_state(fresh, fresh_optimizer), checkpoint_id=tmp_path)
            assert_same(tensors_of(sharded_state(fresh, fresh_optimizer)), want)


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in list(state):
        state[name.replace("blocks.", "layers.")] = state.pop(name)


@on_ranks(2)
def test_names_that_a_hook_changes(rank: int, world: int, tmp_path: Path, seed: int) -> None:
    model = build(rank, world, 2, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with model.comm:
        train(model, optimizer, rank, range(2))
        want = tensors_of(sharded_state(model, optimizer))
        handle = model.register_state_dict_post_hook(rename)
        state = sharded_state(model, optimizer)
        assert_same(tensors_of(state), {n.replace(".blocks.", ".layers."): t for n, t in want.items()})
        assert not any("_extra_state" in name for name in state["model"])
        dcp.save(state, checkpoint_id=tmp_path)
        poison(state)
        dcp.load(sharded_state(model, optimizer), checkpoint_id=tmp_path)
        handle.remove()
        assert_same(tensors_of(sharded_state(model, optimizer)), want)


@pytest.mark.parametrize("ep", [2, 1])
@on_ranks(2)
def test_hooks_that_hide_a_weight_of_experts_are_refused(rank: int, world: int, ep: int, seed: int) -> None:
    """Hooks that leave an expert's weight out, or copy it."""
    name = "blocks.1.moe.experts.w_in"

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del state[name]

    def cast(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[name] = state[name].detach().bfloat16()

    for hook in (drop, cast):
        model = build(rank, world, ep, seed)
        model.register_state_dict_post_hook(hook)
        with model.comm:
            if ep == 1:
                sharded_state(model)
            else:
                begins = f"{name}, which is of this rank's experts, is not"
                refused(functools.partial(sharded_state, model), begins=begins)


class Counting(torch.optim.Optimizer):
    """Momentum with numbers in its state, and a count in its param_groups."""

    def __init__(self, parameters: Any, extra: Any = None) -> None:
        super().__init__(parameters, {"lr": 0.001, "weight_decay": 0.1})
        self.extra = extra

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "none": None, "m": torch.zeros_like(parameter)}
                state["step"] += 1
                state["warm"] = state["step"] > 1
                if self.extra is not None:
                    state["extra"] = self.extra(state)
                state["m"].lerp_(parameter.grad + group["weight_decay"] * parameter, 0.1)
                counted = 1.5 / (1 - 0.9 ** (state["step"] + group["calls"]))
                parameter.sub_(group["lr"] * counted * state["m"] / (state["m"].abs() + 0.1))


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in each.items() if not isinstance(value, Tensor)}
        for each in optimizer.state.values()
    ]


@on_ranks(2)
def test_numbers_of_an_optimizer_come_back(rank: int, world: int, tmp_path: Path, seed: int) -> None:
    model = build(rank, world, 2, seed)
    optimizer = Counting(model.parameters())
    with model.comm:
        train(model, optimizer, rank, range(3))
        state = sharded_state(model, optimizer)
        assert state.keys() == {"model", "layers", "optimizer", "optimizer_numbers", "param_groups"}
        dcp.save(state, checkpoint_id=tmp_path)
        train(model, optimizer, rank, range(3, 5))
        want = tensors_of(sharded_state(model, optimizer))
    for ep in (1, 2):
        fresh = build(rank, world, ep, seed + 1)
        fresh_optimizer = Counting(fresh.parameters())
        with fresh.comm:
            dcp.load(sharded_state(fresh, fresh_optimizer), checkpoint_id=tmp_path)
            trained = [p for n, p in fresh.named_parameters() if "spare" not in n]
            held = {"step": 3, "warm": True, "none": None}
            assert [fresh_optimizer.state[p]["step"] for p in trained] == [3] * len(trained)
            assert held in numbers(fresh_optimizer) and fresh_optimizer.param_groups[0]["calls"] == 3
            train(fresh, fresh_optimizer, rank, range(3, 5))
            found = tensors_of(sharded_state(fresh, fresh_optimizer))
            assert_close(found, want, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_state_before_the_first_step(rank: int, world: int, seed: int) -> None:
    """Asked before the first step, optimizers step as those that were not asked."""
    kinds: tuple[Any, ...] = (
        Counting,
        functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
        functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True, lr=torch.tensor(0.01)),
        functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    )
    for kind in kinds:
        model = build(rank, world, 2, seed)
        twin = copy.deepcopy(model)
        optimizer, plain = kind(model.parameters()), kind(twin.parameters())
        with model.comm:
            sharded_state(model, optimizer)
            plain_group = {key: value for key, value in plain.param_groups[0].items() if key != "params"}
            assert plain_group.items() <= optimizer.param_groups[0].items()
            assert optimizer.param_groups[0].keys() == plain.param_groups[0].keys()
            values = [value for each in optimizer.state.values() for value in each.values()]
            assert not any(bool(value.any() if isinstance(value, Tensor) else value) for value in values)
            train(model, optimizer, rank, range(2))
            sharded_state(model, optimizer)
            train(model, optimizer, rank, range(2, 4))
            train(twin, plain, rank, range(4))
            assert_same(model.state_dict(), twin.state_dict())


@on_ranks(2)
def test_hooks_before_the_first_step(rank: int, world: int, seed: int) -> None:
    """Hooks of an optimizer's steps run with the steps that the caller makes, and no others."""
    model, calls = build(rank, world, 2, seed), []
    kinds = (torch.optim.AdamW(model.parameters()), Counting(model.parameters()))
    with model.comm:
        for optimizer in kinds:
            optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
            optimizer.register_step_post_hook(lambda *_: calls.append("after"))
            sharded_state(model, optimizer)
            assert calls == []
            optimizer.step()
            assert calls == ["before", "after"]
            calls.clear()


@on_ranks(2)
def test_state_that_cannot_be_saved_is_refused(rank: int, world: int, seed: int) -> None:
    """A list, state of an unknown start, state of no parameter, a step that needs a closure, and parameters
    outside of the model; an optimizer that was refused is as it was."""
    model = build(rank, world, 2, seed)
    with model.comm:
        for extra, says in (
            (lambda state: [state["m"]], "is a list"),
            (lambda state: 0.9 ** state["step"], "is not zero after a step of zero gradients"),
        ):
            optimizer = Counting(model.parameters(), extra)
            group = dict(optimizer.param_groups[0])
            state_of = functools.partial(sharded_state, model, optimizer)
            refused(state_of, says, begins="the optimizer's extra of ")
            assert not optimizer.state and optimizer.param_groups[0] == group
            assert all(parameter.grad is None for parameter in model.parameters())
        for kind, key in ((torch.optim.NAdam, "mu_product"), (torch.optim.Rprop, "step_size")):
            optimizer = kind(model.parameters(), lr=0.001)  # type: ignore[assignment]
            begins = f"the optimizer's {key} of blocks.0.first.weight is not zero"
            refused(functools.partial(sharded_state, model, optimizer), begins=begins)
            assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.001
        optimizer = Counting(model.parameters())
        optimizer.state["calls"] = 3  # type: ignore[index]
        of_more = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(3))])
        for other, begins in (
            (optimizer, "the optimizer's state has 'calls', which is of no parameter"),
            (
                torch.optim.LBFGS(model.parameters()),
                "the optimizer is a LBFGS, whose step with zero gradients raises TypeError (",
            ),
            (of_more, "the optimizer has 1 parameters that are not in the model, one of shape (3,)"),
        ):
            refused(functools.partial(sharded_state, model, other), begins=begins)


def grouped(model: nn.Module, settings: list[tuple[str, dict[str, Any]]]) -> torch.optim.Optimizer:
    """Returns an AdamW with a group for each of some parts of names, and their settings."""
    groups = []
    left = dict(model.named_parameters())
    for part, options in settings:
        names = [name for name in left if part in name]
        groups.append({"params": [left.pop(name) for name in names], **options})
    assert not left
    return torch.optim.AdamW(groups, foreach=False)


def decays(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    found = {p: (g["weight_decay"], float(g["lr"])) for g in optimizer.param_groups for p in g["params"]}
    return {name: found[parameter] for name, parameter in model.named_parameters()}


@on_ranks(2)
def test_settings_of_groups_come_back_by_names(rank: int, world: int, tmp_path: Path, seed: int) -> None:
    """They are refused where groups have been joined whose settings were different, and where a group has a
    setting more."""
    model = build(rank, world, 2, seed)
    router = {"weight_decay": 0.0, "lr": torch.tensor(0.125, dtype=torch.float64)}
    saved = [("router", router), ("experts", {"weight_decay": 0.5, "lr": 0.25}), ("", {"lr": 0.25})]
    optimizer = grouped(model, saved)
    with model.comm:
        want = decays(model, optimizer)
        dcp.save(sharded_state(model, optimizer), checkpoint_id=tmp_path)
    fresh = build(rank, world, 1, seed + 1)
    with fresh.comm:
        rate = torch.tensor(7.0, dtype=torch.float64)
        for settings in (
            [("experts.w_in", {"lr": rate}), ("experts", {"weight_decay": 7.0})],
            [("experts", {}), ("router.weight", {}), ("blocks.1.first", {"lr": 7.0})],
        ):
            other = grouped(fresh, [*settings, ("router", {}), ("", {"weight_decay": 7.0, "amsgrad": False})])
            dcp.load(sharded_state(fresh, other), checkpoint_id=tmp_path)
            assert decays(fresh, other) == want
        assert float(rate) == 0.25, "a rate that is a tensor has been replaced"
        assert all(isinstance(group["lr"], float) for group in other.param_groups)
        joined = grouped(fresh, [("router", {}), ("", {"weight_decay": 7.0})])
        before = decays(fresh, joined)
        begins = "param_groups[1] of the optimizer has blocks.0.first.weight and blocks.0.moe"
        says = "experts.w_in, which the checkpoint has with different settings (weight_decay 0.01"
        refused(lambda: dcp.load(sharded_state(fresh, joined), checkpoint_id=tmp_path), says, begins=begins)
        assert decays(fresh, joined) == before
        for group in other.param_groups:
            group["initial_lr"] = 0.1
        begins = "param_groups[0] of the optimizer has 'initial_lr', which the checkpoint lacks"
        refused(lambda: dcp.load(sharded_state(fresh, other), checkpoint_id=tmp_path), begins=begins)


@on_ranks(2)
def test_groups_of_named_parameters(rank: int, world: int, tmp_path: Path, seed: int) -> None:
    """The names in a group are no setting: groups may be divided, joined, and without names."""
    model = build(rank, world, 2, seed)
    named = dict(model.named_parameters())
    parts = [
        {"params": [(n, p) for n, p in named.items() if ("experts" in n) == own]} for own in (True, False)
    ]
    ways: dict[str, Any] = {"divided": parts, "joined": [*named.items()], "without": [*named.values()]}
    with model.comm:
        for saved, loaded in (("joined", "divided"), ("divided", "joined"), ("joined", "without")):
            one, other = torch.optim.AdamW(ways[saved], lr=0.5), torch.optim.AdamW(ways[loaded])
            want = [group.get("param_names") for group in other.param_groups]
            dcp.save(sharded_state(model, one), checkpoint_id=tmp_path / saved / loaded)
            dcp.load(sharded_state(model, other), checkpoint_id=tmp_path / saved / loaded)
            assert [group.get("param_names") for group in other.param_groups] == want
            assert {group["lr"] for group in other.param_groups} == {0.5}


@pytest.mark.parametrize(
    ("more", "less", "name"),
    [
        ({}, {"num_shared_experts": 0}, "shared.w_in, blocks.0.moe.shared.w_out"),
        ({"bias_update_rate": 0.01}, {}, "router.expert_bias_E"),
        ({"shared_gate": True}, {}, "shared.w_gate"),
        ({"bias": True}, {}, "experts.b_in, blocks.0.moe.experts.b_out"),
        ({"router_bias": True}, {}, "router.bias"),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_model_with_less_than_the_checkpoint_is_refused(
    rank: int, world: int, more: dict[str, Any], less: dict[str, Any], name: str, tmp_path: Path, seed: int
) -> None:
    """A model with the options `less` loads a checkpoint of one with `more`."""
    full = build(rank, world, 2, seed, **{"bias_update_rate": 0.0, **more})
    with full.comm:
        dcp.save(sharded_state(checkpointed(full, Block) if "bias" in more else full), checkpoint_id=tmp_path)
        dcp.load(sharded_state(full), checkpoint_id=tmp_path)
    model = build(rank, world, 1, seed + 1, **{"bias_update_rate": 0.0, **less})
    with model.comm:
        begins = f"the checkpoint has blocks.0.moe.{name}, which the model lacks"
        refused(lambda: dcp.load(sharded_state(model), checkpoint_id=tmp_path), begins=begins)
        state = sharded_state(model)
        state.pop("layers", None)
        dcp.load(state, checkpoint_id=tmp_path)


@on_ranks(2)
def test_the_layout_of_a_checkpoint_stays(rank: int, world: int, seed: int) -> None:
    model = build(rank, world, 2, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with model.comm:
        state = sharded_state(model, optimizer)
    assert list(state) == ["model", "layers", "optimizer", "param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert list(state["optimizer"]) == names
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq"} for each in state["optimizer"].values())
    assert list(state["model"]) == [name for name in model.state_dict() if "_extra_state" not in name]


@pytest.mark.parametrize("ep", [2, 1])
@pytest.mark.parametrize(
    ("how", "said"), [("spectral_norm", "experts.parametrizations.w_in.0._u"), ("prune", "experts.w_in_mask")]
)
@on_ranks(2)
def test_buffers_of_spread_experts_are_refused(
    rank: int, world: int, how: str, said: str, ep: int, seed: int
) -> None:
    """Of a wrapped model too; without them, and where all experts are here, it is saved."""
    for wraps in (False, True):
        model = build(rank, world, ep, seed)
        experts: Any = model.blocks[0].moe.experts
        with model.comm:
            if how == "spectral_norm":
                parametrizations.spectral_norm(experts, "w_in")
            else:
                prune.l1_unstructured(experts, "w_in", amount=0.3)
            if wraps:
                checkpointed(model, Block)
            if ep == 1:
                sharded_state(model)
            else:
                says = f"moe.{said} is in the state of experts that are spread over ranks"
                refused(functools.partial(sharded_state, model), says)
            if how == "spectral_norm":
                nn.utils.parametrize.remove_parametrizations(experts, "w_in")
            else:
                prune.remove(experts, "w_in")
            sharded_state(model)


@pytest.mark.parametrize("way", ["by hand", "fsdp"])
@on_ranks(2)
def test_a_weight_without_gradients_so_far(
    rank: int, world: int, way: str, tmp_path: Path, seed: int
) -> None:
    """A weight that had no gradient so far: the run goes on the same, saved or not, and resumes."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model: nn.Module = build(rank, world, 2, seed)
        comm = model.comm
        wrapped(model, way)
        return model, torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1), comm

    def go_on(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model.with_spare = True
        backward(model, rank, 7)
        sync_gradients(model)
        optimizer.step()
        return {name: whole(parameter) for name, parameter in model.named_parameters()}

    model, optimizer, comm = make(seed)
    twin, twin_optimizer, twin_comm = make(seed)
    with comm, twin_comm:
        train(model, optimizer, rank, range(2))
        train(twin, twin_optimizer, rank, range(2))
        before = [p for p in model.parameters() if p in optimizer.state]
        moments = [{k: whole(v) for k, v in optimizer.state[p].items()} for p in before]
        assert len(before) == len(list(model.parameters())) - 2
        gradients = [parameter.grad for parameter in model.parameters()]
        dcp.save(sharded_state(model, optimizer), checkpoint_id=tmp_path)
        for parameter, values in zip(before, moments, strict=True):
            assert_same({k: whole(v) for k, v in optimizer.state[parameter].items()}, values)
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
        want = go_on(twin, twin_optimizer)
        assert_same(go_on(model, optimizer), want)
    resumed, resumed_optimizer, resumed_comm = make(seed + 1)
    with resumed_comm:
        dcp.load(sharded_state(resumed, resumed_optimizer), checkpoint_id=tmp_path)
        assert_same(go_on(resumed, resumed_optimizer), want)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_process_groups(tmp_path: Path, seed: int) -> None:
    model = Model(None, seed)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save(sharded_state(model), checkpoint_id=tmp_path / "a", no_dist=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(sharded_state(model), checkpoint_id=tmp_path / "a", no_dist=True)
    assert_same(model.state_dict(), want)


@on_ranks(2)
def test_steps_go_on_beside_an_async_save(rank: int, world: int, tmp_path: Path) -> None:
    """An async_save with a process group of its own saves the state at the call."""
    model, other = build(rank, world, world, 1), build(rank, world, world, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own = dist.new_group(backend="gloo")
    for number in range(3):
        path, want = tmp_path / str(number), tensors_of(sharded_state(model))
        written = dcp.async_save(sharded_state(model), checkpoint_id=path, process_group=own)
        train(model, optimizer, rank, range(5))
        written.result()
        dcp.load(sharded_state(other), checkpoint_id=path)
        assert_same(tensors_of(sharded_state(other)), want)
    dist.destroy_process_group(own)
    model.comm.close()
    other.comm.close()
