"""docs/traps.md: what is right for dense models and wrong for experts spread over ranks is refused, or has a
way that is right."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm import Communicator
from moecomm.errors import InvalidArgument
from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    clip_grad_norm,
    is_expert_parameter,
    mark_synchronized,
    prepare_ddp,
    sharded_state,
    sync_gradients,
)
from moecomm.train import drift
from tests.multirank.catching import Caught, catch
from tests.multirank.harness import RankPool
from tests.multirank.moe_cases import SIZES, groups_of
from tests.ranks import on_cpu

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64)


def build(seed: int, group: Any = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(CONFIG, group=group, max_tokens=8, overlap=OverlapConfig(**options))


def of_all_ranks(value: Any) -> list[Any]:
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def of_rank_0(value: Any) -> Any:
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def wrong_states(rank: int, world_size: int, seed: int) -> list[Caught | None]:
    """Loads what rank 0 saved on every rank: as it is, strict or not, without its record, from another
    number of ranks. Returns what is raised."""
    layer, other = build(seed), build(seed + 1)
    alone = build(seed, groups_of(rank, world_size, 1)[0])
    experts = {name: tensor.clone() for name, tensor in other.experts.named_parameters()}
    with layer.comm, other.comm, alone.comm:
        saved = of_rank_0(layer.state_dict())
        assert saved["experts._extra_state"].tolist() == [0, 12 // world_size, 12, 0, 0, 1]
        found = [catch(lambda: other.load_state_dict(saved))]
        found.append(catch(lambda: other.load_state_dict(saved, strict=False)))
        found.append(catch(lambda: other.load_state_dict(alone.state_dict())))
        found.append(catch(lambda: alone.load_state_dict(layer.state_dict())))
        if rank > 0:
            for name, tensor in other.experts.named_parameters():
                assert torch.equal(tensor, experts[name]), "the error came after weights were changed"
        other.load_state_dict(layer.state_dict())  # its own
        assert torch.equal(other.experts.w_in, layer.experts.w_in)
    return found


def test_a_state_of_other_experts_is_refused(pool: Callable[[int], RankPool], seed: int) -> None:
    zero, one = pool(2)(wrong_states, seed)
    assert zero[:2] == [None, None]
    text = "the state holds experts 0..5 of 12, this module experts 6..11 of 12"
    for found, start in [
        (one[0], text),
        (one[1], text),
        (zero[2], "the state holds experts 0..11 of 12, this module experts 0..5 of 12"),
        (zero[3], "the state holds experts 0..5 of 12, this module experts 0..11 of 12"),
    ]:
        assert found is not None and found.name == "InvalidArgument"
        assert found.text.startswith(start) and "moecomm.nn.sharded_state" in found.text


@pytest.mark.filterwarnings("ignore:the state has no record")
def test_a_state_without_a_record_loads_where_shapes_fit() -> None:
    config = MoEConfig(**SIZES)
    whole, part = GroupedExperts(config), GroupedExperts(config, num_local_experts=4, first_expert=4)
    for experts in (whole, part):
        old = {name: torch.ones_like(tensor) for name, tensor in experts.named_parameters()}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            experts.load_state_dict(old, strict=True)
        assert bool((experts.w_in == 1).all())
        texts = [str(each.message) for each in seen]
        assert [re.sub(r".*: it", "it", text) for text in texts] == (
            [] if experts is whole else ["it is taken to hold experts 4..7 of 12"]
        )
        with pytest.raises(RuntimeError, match="size mismatch"):
            experts.load_state_dict({name: torch.ones(1) for name in old})


def test_the_record_goes_along() -> None:
    """A copy has it, and torch.save and load keep it, with tensors alone."""
    experts = GroupedExperts(MoEConfig(**SIZES), num_local_experts=4, first_expert=8)
    copied = copy.deepcopy(experts)
    assert copied.get_extra_state().tolist() == [8, 4, 12, 0, 0, 1]
    assert all(isinstance(value, torch.Tensor) for value in experts.state_dict().values())
    copied.load_state_dict(experts.state_dict())
    with pytest.raises(
        InvalidArgument, match=r"holds experts 8\.\.11 of 12, this module experts 0\.\.3 of 12"
    ):
        GroupedExperts(MoEConfig(**SIZES), num_local_experts=4).load_state_dict(experts.state_dict())


def converted(rank: int, world_size: int, options: dict[str, Any], seed: int) -> list[Caught | None]:
    layer = build(seed, **options)
    x = torch.ones(4, 16, dtype=torch.float64)
    with layer.comm:
        found = []
        if rank == 1:
            layer.experts.half()
        found.append(catch(lambda: layer(x)))
        layer.half()
        found.append(catch(lambda: layer(x)))
        layer.double()
        layer.shared.float()
        found.append(catch(lambda: layer(x)))
        layer.double()
        assert bool(layer(x).isfinite().all())
        return found


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=str)
def test_weights_of_another_dtype_are_refused_on_all_ranks(
    options: dict[str, Any], pool: Callable[[int], RankPool], seed: int
) -> None:
    text = "experts.w_in is torch.float16, must be the config's dtype torch.float64"
    for rank, found in enumerate(pool(2)(converted, options, seed)):
        assert all(each is not None and each.name == "InvalidArgument" for each in found)
        one, both, shared = found
        assert one.text.startswith(text if rank == 1 else f"rank 1: {text}")
        assert text in both.text
        assert "shared.w_in is torch.float32, must be" in shared.text


def norms(rank: int, world_size: int, seed: int) -> tuple[float, float]:
    """Returns the gradient norm that torch computes on this rank, and the norm over all ranks' experts."""
    layer = build(seed)
    with layer.comm:
        generator = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
        layer(x).square().sum().backward()
        sync_gradients(layer)
        own = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None])
        parts = [None] * world_size
        grads = {name: p.grad for name, p in layer.named_parameters()}
        dist.all_gather_object(parts, grads)
        whole = [torch.cat([p[n].flatten() for p in parts]) for n in grads if n.startswith("experts.")]
        dense = [grad.flatten() for name, grad in grads.items() if not name.startswith("experts.")]
        want = torch.cat([*whole, *dense]).norm()
        assert_close(clip_grad_norm(layer, 1e-3), want, rtol=1e-12, atol=0)
        return float(own), float(want)


def test_the_norm_of_one_rank_is_not_that_of_the_model(pool: Callable[[int], RankPool], seed: int) -> None:
    (own_0, want_0), (own_1, want_1) = pool(2)(norms, seed)
    assert want_0 == want_1
    assert len({own_0, own_1, want_0}) == 3


def norm_with_frozen(rank: int, world_size: int, seed: int) -> tuple[float, float]:
    """Rank 0 trains none of its experts; the norm, and what a collective of the caller's gives behind it."""
    layer = build(seed)
    layer.experts.requires_grad_(rank != 0)
    with layer.comm:
        x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        layer(x).square().sum().backward()
        sync_gradients(layer)
        norm, total = clip_grad_norm(layer, 1e9), torch.ones(())
        dist.all_reduce(total)
        parts = [None] * world_size
        dist.all_gather_object(parts, [p.grad for p in layer.experts.parameters() if p.grad is not None])
        own = [p.grad for name, p in layer.named_parameters() if not name.startswith("experts.")]
        every = [each.flatten() for part in (*parts, own) for each in part if each is not None]
        assert_close(norm, torch.cat(every).norm(), rtol=1e-12, atol=0)
        return float(norm), float(total)


def test_the_norm_where_a_rank_has_frozen_its_experts(pool: Callable[[int], RankPool], seed: int) -> None:
    ours, theirs = pool(2)(norm_with_frozen, seed)
    assert ours == theirs and ours[1] == 2


def optimizers(rank: int, world_size: int, folder: str, seed: int) -> None:
    """sharded_state brings each rank the moments of its own experts, where rank 0's state would fit too."""
    layer, fresh = build(seed), build(seed)
    with layer.comm, fresh.comm:
        made = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (layer, fresh)]
        layer(torch.ones(4, 16, dtype=torch.float64)).square().sum().backward()
        sync_gradients(layer)
        made[0].step()
        dcp.save(sharded_state(layer, made[0]), checkpoint_id=folder)
        dcp.load(sharded_state(fresh, made[1]), checkpoint_id=folder)
        moments = [
            each.state[model.experts.w_in]["exp_avg"]
            for each, model in zip(made, (layer, fresh), strict=True)
        ]
        assert torch.equal(*moments)
        # Equal tokens may all go to the experts of one rank; it alone has moments then.
        sizes = of_all_ranks(float(moments[0].abs().sum()))
        assert any(sizes)
        assert not torch.equal(of_rank_0(moments[0]), moments[0]) or rank == 0


def test_the_state_of_an_optimizer_is_of_its_own_experts(
    pool: Callable[[int], RankPool], tmp_path: Path, seed: int
) -> None:
    pool(2)(optimizers, str(tmp_path / "saved"), seed)


def step(layer: MoELayer, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """Makes gradients, of tokens that are other ones on each rank, and synchronises them."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    optimizer.zero_grad()
    x = torch.randn(4, 16, dtype=torch.float64, generator=generator)
    layer(x).square().sum().backward()
    sync_gradients(layer)


def drifted(rank: int, world_size: int, how: str, seed: int) -> Caught | None:
    """Returns what is raised in the step after one in which ranks have clipped, stepped, or started, by
    themselves."""
    layer = build(seed + rank * (how == "seeds"))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    with layer.comm:
        found = catch(lambda: step(layer, optimizer, rank, 0))
        if how == "seeds":
            return found
        assert found is None
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
        else:
            assert how in ("scaler", "nothing")
            clip_grad_norm(layer, 1e-3)
        if how == "scaler":
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            if rank == 1:
                layer.experts.w_in.grad[0, 0, 0] = float("inf")
            scaler.step(optimizer)
        else:
            optimizer.step()
        return catch(lambda: step(layer, optimizer, rank, 1))


@pytest.mark.parametrize("how", ["clip", "scaler", "seeds", "nothing"])
def test_ranks_whose_common_weights_drift_apart_are_told(
    how: str, pool: Callable[[int], RankPool], seed: int
) -> None:
    for found in pool(2)(drifted, how, seed):
        if how == "nothing":
            assert found is None
            continue
        assert found is not None and found.name == "MismatchedArguments"
        assert found.text.startswith("a router's weights differ between ranks")


def drifted_under_ddp(rank: int, world_size: int, how: str, seed: int) -> tuple[int, Caught | None]:
    """Trains under DistributedDataParallel, clipping or stepping as `how` says; returns the steps that were
    made and what the next one raised."""
    torch.manual_seed(seed)
    config = CONFIG if on_cpu() else dataclasses.replace(CONFIG, dtype=torch.float32)
    layer = MoELayer(config, max_tokens=8)
    model = DistributedDataParallel(prepare_ddp(layer))
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    draw = torch.Generator().manual_seed(seed + rank)
    with layer.comm:
        for number in range(70):
            optimizer.zero_grad()
            x = torch.randn(4, 16, dtype=config.dtype, generator=draw).to(layer.comm.device)
            scale = scaler.scale if how == "scaler" else torch.clone
            error = catch(lambda x=x, scale=scale: scale(model(x).square().sum()).backward())
            if error is not None:
                return number, error
            if how == "scaler" and rank == 1 and number == 3:
                layer.experts.w_in.grad[0, 0, 0] = float("inf")
            if how == "clip":
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
            else:
                clip_grad_norm(layer, 1e-3)
            if how == "scaler":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        return number, None


@pytest.mark.parametrize(("how", "most"), [("clip", 4), ("scaler", 9), ("nothing", 70)])
def test_ranks_under_ddp_whose_weights_drift_apart_are_told(
    how: str, most: int, pool: Callable[[int], RankPool], seed: int
) -> None:
    for steps, found in pool(2)(drifted_under_ddp, how, seed):
        assert steps < most
        if how == "nothing":
            assert found is None and steps == 69
            continue
        assert found is not None and found.name == "MismatchedArguments"
        assert "clip by moecomm.nn.clip_grad_norm" in found.text


class Uncopied:
    """An event that has passed and cannot be copied, as CUDA's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def synchronize(self) -> None:
        pass


def copied_under_ddp(rank: int, world_size: int, seed: int) -> bool:
    """Copies a layer under DistributedDataParallel between steps; returns whether the copy is the same."""
    layer = build(seed)
    model = DistributedDataParallel(prepare_ddp(layer))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    x = torch.ones(4, 16, dtype=torch.float64)
    with layer.comm, mock.patch.object(drift, "_on_host", lambda bits: (bits, Uncopied())):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        twin = copy.deepcopy(layer)
        return torch.equal(twin(x), layer(x))


def test_a_layer_under_ddp_is_copied_between_steps(pool: Callable[[int], RankPool], seed: int) -> None:
    assert pool(2)(copied_under_ddp, seed) == [True, True]


def scaled_alike(rank: int, world_size: int, seed: int) -> list[bool]:
    """An infinity among one rank's experts; returns whether the step after it was made, and one without."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    layer = build(seed)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), ShardedGradScaler("cpu", init_scale=8.0)
    made = []
    with layer.comm:
        for number in range(2):
            before = layer.router.weight.detach().clone()
            x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
            optimizer.zero_grad()
            scaler.scale(layer(x).square().sum()).backward()
            sync_gradients(layer)
            if rank == 1 and number == 0:
                layer.experts.w_in.grad[0, 0, 0] = float("inf")
            scaler.unscale_(optimizer)
            clip_grad_norm(layer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            made.append(not torch.equal(layer.router.weight, before))
        assert scaler.get_scale() == 4.0
        sync_gradients(layer)
    return made


def test_a_scaler_that_all_ranks_share(pool: Callable[[int], RankPool], seed: int) -> None:
    assert pool(2)(scaled_alike, seed) == [[False, True]] * 2


def put_off(rank: int, world_size: int, seed: int) -> list[Caught | None]:
    """Steps while gradients of experts are put off: of an optimizer that has the experts, of one that has
    not, and behind `backward_weights`."""
    layer = build(seed, defer_weights=True)
    dense = [each for each in layer.parameters() if not is_expert_parameter(each)]
    every, other = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(dense, lr=0.1)
    with layer.comm:
        layer(torch.ones(4, 16, dtype=torch.float64)).square().sum().backward()
        before = [each.detach().clone() for each in layer.parameters()]
        found = [catch(every.step)]
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        found.append(catch(other.step))
        layer.backward_weights(drop=rank == 1)
        sync_gradients(layer)
        return [*found, catch(every.step)]


def test_a_step_with_gradients_put_off_is_refused(pool: Callable[[int], RankPool], seed: int) -> None:
    for with_experts, without, after in pool(2)(put_off, seed):
        assert without is after is None
        assert with_experts is not None and with_experts.name == "InvalidArgument"
        assert "whose gradients are still put off" in with_experts.text


def not_averaged(rank: int, world_size: int, seed: int, kind: str) -> list[Caught | None]:
    """Steps behind a backward alone, behind an all-reduce of one's own, with what the experts are not in,
    behind a `mark_synchronized` and behind `sync_gradients`; with this kind of layer."""
    torch.manual_seed(seed)
    overlap = OverlapConfig(overlap=kind != "in order")
    own = OwnExperts() if kind == "own experts" else None
    layer = MoELayer(CONFIG, max_tokens=8, overlap=overlap, experts=own)
    dense = [each for each in layer.parameters() if not is_expert_parameter(each)]
    every, other = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(dense, lr=0.1)
    x = torch.ones(4, 16, dtype=torch.float64)
    with layer.comm:
        layer(x).square().sum().backward()
        before = [each.detach().clone() for each in layer.parameters()]
        found = [catch(every.step)]
        for each in layer.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad)
        found.append(catch(every.step))
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        found.append(catch(other.step))
        mark_synchronized(layer)
        found.append(catch(every.step))
        with torch.no_grad():
            layer(x)
        every.zero_grad()
        layer(x).square().sum().backward()
        sync_gradients(layer)
        layer(x)  # without a backward
        return [*found, catch(every.step)]


class OwnExperts(torch.nn.Module):
    """One matrix for each of six experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 16, 16, dtype=torch.float64))

    def forward(self, rows_PH: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                each @ w
                for each, w in zip(
                    rows_PH.tensor_split(offsets_L[:-1].long().cpu()), self.weight, strict=True
                )
            ]
        )


@pytest.mark.parametrize("kind", ["overlapped", "in order", "own experts"])
def test_a_step_without_averaged_gradients_is_refused(
    kind: str, pool: Callable[[int], RankPool], seed: int
) -> None:
    for bare, reduced, without, marked, averaged in pool(2)(not_averaged, seed, kind):
        for refused in (bare, reduced):
            assert refused is not None and refused.name == "InvalidArgument"
            assert "that 2 ranks share out" in refused.text and "sync_gradients(model)" in refused.text
        assert without is marked is averaged is None


def mixing_wrappers(rank: int, world_size: int, ep: int, seed: int) -> list[Caught | None]:
    """Returns what ZeroRedundancyOptimizer raises with all parameters, and with those that ranks share, and
    what FullyShardedDataParallel raises."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    layer = build(seed, groups_of(rank, world_size, ep)[0])
    with layer.comm:
        x = torch.ones(4, 16, dtype=torch.float64)
        dense = [each for each in layer.parameters() if not is_expert_parameter(each)]
        found = []
        for parameters in (list(layer.parameters()), dense):
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
            layer(x).square().sum().backward()
            before = layer.experts.w_in.detach().clone()
            found.append(catch(optimizer.step))
            assert torch.equal(before, layer.experts.w_in) or ep == 1
        cpu = torch.device("cpu")
        return [*found, catch(lambda: FullyShardedDataParallel(layer, device_id=cpu, use_orig_params=True))]


@pytest.mark.parametrize("ep", [2, 1])
def test_wrappers_that_mix_experts_are_refused(ep: int, pool: Callable[[int], RankPool], seed: int) -> None:
    for zero, dense, fsdp in pool(2)(mixing_wrappers, ep, seed):
        assert dense is None
        if ep == 1:
            assert zero is fsdp is None
            continue
        assert zero is not None and zero.name == "InvalidArgument"
        assert zero.text.startswith("the optimizer is a ZeroRedundancyOptimizer")
        assert fsdp is not None and fsdp.name == "InvalidArgument"
        assert "fully_shard_experts(model)" in fsdp.text


def sparse(rank: int, world_size: int, seed: int) -> list[Caught | None]:
    torch.manual_seed(seed)
    words = torch.nn.Embedding(5, 16, sparse=True, dtype=torch.float64)
    model = torch.nn.Sequential(words, build(seed))
    with model[1].comm:
        model(torch.tensor([rank, 3])).sum().backward()
        return [catch(lambda: sync_gradients(model)), catch(lambda: clip_grad_norm(model, 1.0))]


def test_sparse_gradients_are_refused(pool: Callable[[int], RankPool], seed: int) -> None:
    for found in [each for rank in pool(2)(sparse, seed) for each in rank]:
        assert found is not None and found.name == "Unsupported"
        assert found.text.startswith("the gradient of 0.weight is sparse")


def copied(rank: int, world_size: int, seed: int) -> list[Caught | None]:
    layer = build(seed)
    with layer.comm as comm:
        assert copy.deepcopy(layer).comm is copy.copy(layer).comm is comm
        return [catch(lambda: torch.save(layer, io.BytesIO())), catch(lambda: copy.deepcopy(comm))]


def test_a_communicator_is_not_copied(pool: Callable[[int], RankPool], seed: int) -> None:
    for found in pool(1)(copied, seed)[0]:
        assert found is not None and found.name == "TypeError"
        assert "state_dict()" in found.text and "build a new Communicator" in found.text


def late(rank: int, world_size: int, seed: int) -> str:
    """Rank 1 comes after the deadline. The layer goes on with another communicator."""
    torch.manual_seed(seed)
    sizes = {"num_experts": 12, "hidden": 16, "top_k": 3, "max_tokens": 8}
    options: dict[str, Any] = {**sizes, "dtype": torch.float64, "device": "cpu"}
    layer = MoELayer(CONFIG, Communicator(**options, timeout=1.0))
    x = torch.ones(4, 16, dtype=torch.float64)
    want = layer(x).detach()
    found = catch(lambda: layer(x)) if rank == 0 else None
    dist.barrier()
    found = found or catch(lambda: layer(x))
    layer.comm.close()
    layer.comm = Communicator(**options)
    with layer.comm:
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, want)
    assert found is not None
    return found.name


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))

    def forward(self, rows_PH: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return rows_PH * self.factor


def communicator_of(config: MoEConfig) -> Communicator:
    sizes = {key: getattr(config, key) for key in ("num_experts", "hidden", "top_k", "dtype")}
    return Communicator(**sizes, max_tokens=8, device="cpu")


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropless": ({}, {}),
    "capacity": ({"capacity_factor": 2.0, "pad_to_capacity": True}, {}),
    "in order": ({}, {"overlap": False}),
}


def in_another_order(
    rank: int, world_size: int, name: str, seed: int
) -> tuple[list[Caught | None], list[int]]:
    """Rank 1 calls another layer of the same communicator than the other ranks do: forward and backward. The
    numbers of the layers come back too."""
    options, overlap = WAYS[name]
    config = dataclasses.replace(CONFIG, **options)
    with communicator_of(config) as comm:
        layers = []
        for own in (False, False, True):  # weights are alike, so that tokens have the same experts in both
            torch.manual_seed(seed)
            how = {"experts": Doubled()} if own else {"overlap": OverlapConfig(**overlap)}
            layers.append(MoELayer(config, comm, **how))
        x = torch.ones(4, 16, dtype=torch.float64, requires_grad=True)
        ids = torch.arange(12).view(4, 3)
        calls: list[Callable[[], Any]] = [partial(layer, x) for layer in layers]
        calls.append(lambda: comm.dispatch(x, ids))
        wanted = layers[0](x).detach()
        found = []
        for here, there in ((0, 1), (0, 2), (0, 3)):
            found.append(catch(calls[there if rank == 1 else here]))
            assert torch.equal(layers[0](x), wanted), "the error has left something behind"
        sums = [layer(x).sum() for layer in layers[:2]]
        found.append(catch(sums[rank == 1].backward))
        return found, [layer._caller for layer in layers]


@pytest.mark.parametrize("name", WAYS)
def test_layers_that_are_called_in_another_order(
    name: str, pool: Callable[[int], RankPool], seed: int
) -> None:
    about = (
        "ranks disagree on the layer that calls (a number of its place among those of the communicator, of "
        "its MoEConfig, and under DistributedDataParallel of a router's weights, which differ where ranks "
        "clip or step by themselves: clip by moecomm.nn.clip_grad_norm, scale by ShardedGradScaler; 0: "
        "none): rank 0"
    )
    for found, (first, *others) in pool(3)(in_another_order, name, seed):
        texts = [each and f"{each.name}: {each.text}" for each in found]
        starts = [f"{about} has {first}, rank 1 has {there}" for there in (*others, 0)]
        starts.append("ranks disagree on the handle")
        for text, start in zip(texts, starts, strict=True):
            assert text is not None and text.startswith(f"MismatchedArguments: {start}"), texts


def one_caller(rank: int, world_size: int, seed: int) -> None:
    """What ranks may do differently: call a layer or its copy, and call it compiled."""
    config = dataclasses.replace(CONFIG, capacity_factor=2.0, pad_to_capacity=True)
    comm = communicator_of(config)
    layers = [MoELayer(config, comm) for _ in range(3)]
    x = torch.ones(4, 16, dtype=torch.float64)
    wanted = layers[1](x).detach()
    copied, compiled = copy.deepcopy(layers[1]), torch.compile(layers[1], backend="eager", fullgraph=True)
    for mine in (copied, compiled):
        assert torch.equal((mine if rank == 1 else layers[1])(x), wanted)
    comm.close()
    with communicator_of(config) as comm:
        if rank == 1:  # as where this process has been started anew
            layers = [MoELayer(config, comm) for _ in range(3)]
        else:
            for layer in reversed(layers):
                layer.comm = comm
        layers.append(MoELayer(config, comm))
        for layer in layers:
            layer(x)


def test_what_may_be_called_for_a_layer(pool: Callable[[int], RankPool], seed: int) -> None:
    pool(2)(one_caller, seed)


def count_graphs(rank: int, world_size: int) -> int:
    config = dataclasses.replace(CONFIG, capacity_factor=2.0, pad_to_capacity=True)
    counter = CompileCounter()
    with communicator_of(config) as comm:
        for _ in range(4):
            torch.compile(MoELayer(config, comm), backend=counter, fullgraph=True)(
                torch.ones(4, 16, dtype=torch.float64)
            )
    return counter.frame_count


def test_layers_share_a_graph_of_torch_compile(pool: Callable[[int], RankPool]) -> None:
    assert pool(1)(count_graphs) == [1]


def exchanged(rank: int, world_size: int, seed: int) -> dict[str, Caught | None]:
    """Communicators of another kind are put into a layer, which keeps its own."""
    layer = build(seed)
    sizes = {name: getattr(layer.comm, name) for name in ("num_experts", "hidden", "top_k", "max_tokens")}
    options: dict[str, Any] = {**sizes, "dtype": layer.comm.dtype, "device": "cpu"}
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    others = {
        "none": None,
        "size": Communicator(alone, **options),
        "max_tokens": Communicator(**{**options, "max_tokens": 2 * layer.comm.max_tokens}),
        "dtype": Communicator(**{**options, "dtype": torch.float32}),
    }
    before = layer.comm
    found = {what: catch(lambda other=other: setattr(layer, "comm", other)) for what, other in others.items()}
    assert layer.comm is before
    layer(torch.ones(2, layer.config.hidden, dtype=layer.config.dtype)).sum().backward()
    for each in (before, *others.values()):
        if each is not None:
            each.close()
    return found


def test_a_communicator_of_another_kind_is_refused(pool: Callable[[int], RankPool], seed: int) -> None:
    for found in pool(2)(exchanged, seed):
        for what, caught in found.items():
            assert caught is not None and caught.name == "InvalidArgument", what
            assert ("NoneType" if what == "none" else f"comm.{what} is") in caught.text, caught.text


def test_a_layer_goes_on_with_another_communicator(pool: Callable[[int], RankPool], seed: int) -> None:
    assert pool(2)(late, seed) == ["PeerTimeout"] * 2
