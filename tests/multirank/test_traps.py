"""docs/traps.md: what is right for dense models and wrong for experts spread over ranks is refused, or has a
way that is right."""

import copy
import dataclasses
import io
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from moecomm import Communicator
from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    clip_grad_norm,
    is_expert_parameter,
    mark_synchronized,
    prepare_ddp,
    sync_gradients,
)
from moecomm.train import drift
from tests.multirank.catching import Caught, catch, refused, require
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import SIZES, OwnExperts, groups_of
from tests.multirank.on_ranks import on_ranks
from tests.ranks import gathered, on_cpu

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64)


def build(seed: int, group: Any = None, **options: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(CONFIG, group=group, max_tokens=8, overlap=OverlapConfig(**options))


def of_rank_0(value: Any) -> Any:
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


@on_ranks(2)
def test_a_state_of_other_experts_is_refused(rank: int, world_size: int, seed: int) -> None:
    """Loads what rank 0 saved on every rank: as it is, strict or not, and from another number of ranks."""
    layer, other = build(seed), build(seed + 1)
    alone = build(seed, groups_of(rank, world_size, 1)[0])
    experts = {name: tensor.clone() for name, tensor in other.experts.named_parameters()}
    every, here = "experts 0..11 of 12", f"experts {6 * rank}..{6 * rank + 5} of 12"
    with layer.comm, other.comm, alone.comm:
        saved = of_rank_0(layer.state_dict())
        assert saved["experts._extra_state"].tolist() == [0, 12 // world_size, 12, 0, 0, 1]
        for strict in (True, False) if rank > 0 else ():
            load = partial(other.load_state_dict, saved, strict=strict)
            text = "the state holds experts 0..5 of 12, this module experts 6..11 of 12"
            refused(load, "moecomm.nn.sharded_state", begins=text)
            for name, tensor in other.experts.named_parameters():
                assert torch.equal(tensor, experts[name]), "the error came after weights were changed"
        state, of_one = layer.state_dict(), alone.state_dict()
        for module, given, of, into in ((other, of_one, every, here), (alone, state, here, every)):
            load = partial(module.load_state_dict, given)
            refused(load, begins=f"the state holds {of}, this module {into}")
        other.load_state_dict(state)  # its own
        assert torch.equal(other.experts.w_in, layer.experts.w_in)


@pytest.mark.filterwarnings("ignore:the state has no record")
def test_a_state_without_a_record_loads_where_shapes_fit() -> None:
    config = MoEConfig(**SIZES)
    whole, part = GroupedExperts(config), GroupedExperts(config, num_local_experts=4, first_expert=4)
    for experts in (whole, part):
        old = {name: torch.ones_like(tensor) for name, tensor in experts.named_parameters()}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            experts.load_state_dict(old, strict=True)
            experts.load_state_dict({}, strict=False)  # a state of other parts of the model alone
        assert bool((experts.w_in == 1).all())
        texts = [str(each.message) for each in seen]
        assert [re.sub(r".*: it", "it", text) for text in texts] == (
            [] if experts is whole else ["it is taken to hold experts 4..7 of 12"]
        )
        with pytest.raises(RuntimeError, match="size mismatch"):
            experts.load_state_dict({name: torch.ones(1) for name in old})


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=str)
@on_ranks(2)
def test_weights_of_another_dtype_are_refused_on_all_ranks(
    rank: int, world_size: int, options: dict[str, Any], seed: int
) -> None:
    layer = build(seed, **options)
    call = partial(layer, torch.ones(4, 16, dtype=torch.float64))
    text = "experts.w_in is torch.float16, must be the config's dtype torch.float64"
    with layer.comm:
        if rank == 1:
            layer.experts.half()
        refused(call, begins=text if rank == 1 else f"rank 1: {text}")
        layer.half()
        refused(call, text)
        layer.double()
        layer.shared.float()
        refused(call, "shared.w_in is torch.float32, must be")
        layer.double()
        assert bool(call().isfinite().all())


@on_ranks(2)
def test_the_norm_where_a_rank_has_frozen_its_experts(rank: int, world_size: int, seed: int) -> None:
    """Rank 0 trains none of its experts; a collective of the caller's comes behind the norm."""
    layer = build(seed)
    layer.experts.requires_grad_(rank != 0)
    with layer.comm:
        x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        layer(x).square().sum().backward()
        sync_gradients(layer)
        norm, total = clip_grad_norm(layer, 1e9), torch.ones(())
        dist.all_reduce(total)
        parts = gathered([p.grad for p in layer.experts.parameters() if p.grad is not None])
        own = [p.grad for name, p in layer.named_parameters() if not name.startswith("experts.")]
        every = [each.flatten() for part in (*parts, own) for each in part if each is not None]
        assert_close(norm, torch.cat(every).norm(), rtol=1e-12, atol=0)
        assert total.item() == 2


def step(layer: MoELayer, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    """Makes gradients, of tokens that are other ones on each rank, and synchronises them."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    optimizer.zero_grad()
    x = torch.randn(4, 16, dtype=torch.float64, generator=generator)
    layer(x).square().sum().backward()
    sync_gradients(layer)


@pytest.mark.parametrize("how", ["clip", "scaler", "seeds", "nothing"])
@on_ranks(2)
def test_ranks_whose_common_weights_drift_apart_are_told(
    rank: int, world_size: int, how: str, seed: int
) -> None:
    """The step tells after one in which ranks have clipped, stepped, or started, by themselves."""
    layer = build(seed + rank * (how == "seeds"))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    with layer.comm:
        if how != "seeds":
            step(layer, optimizer, rank, 0)
            clip = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3) if how == "clip" else None
            if clip is None:
                clip_grad_norm(layer, 1e-3)
            if how == "scaler":
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(torch.ones(()))
                if rank == 1:
                    layer.experts.w_in.grad[0, 0, 0] = float("inf")
                scaler.step(optimizer)
            else:
                optimizer.step()
        again = partial(step, layer, optimizer, rank, 1)
        if how == "nothing":
            again()
        else:
            refused(again, name="MismatchedArguments", begins="a router's weights differ between ranks")


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
    how: str, most: int, pool: Pools, seed: int
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


@on_ranks(2)
def test_a_layer_under_ddp_is_copied_between_steps(rank: int, world_size: int, seed: int) -> None:
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
        assert torch.equal(twin(x), layer(x))


@on_ranks(2)
def test_a_scaler_that_all_ranks_share(rank: int, world_size: int, seed: int) -> None:
    """After an infinity among one rank's experts no rank makes the step, and all make the next one."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    layer = build(seed)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), ShardedGradScaler("cpu", init_scale=8.0)
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
            assert torch.equal(layer.router.weight, before) == (number == 0)
        assert scaler.get_scale() == 4.0
        sync_gradients(layer)


@on_ranks(2)
def test_a_step_with_gradients_put_off_is_refused(rank: int, world_size: int, seed: int) -> None:
    """Steps of an optimizer that has the experts, of one that has not, and behind `backward_weights`."""
    layer = build(seed, defer_weights=True)
    dense = [each for each in layer.parameters() if not is_expert_parameter(each)]
    every, other = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(dense, lr=0.1)
    with layer.comm:
        layer(torch.ones(4, 16, dtype=torch.float64)).square().sum().backward()
        before = [each.detach().clone() for each in layer.parameters()]
        refused(every.step, "whose gradients are still put off")
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        other.step()
        layer.backward_weights(drop=rank == 1)
        sync_gradients(layer)
        every.step()


@pytest.mark.parametrize("kind", ["overlapped", "in order", "own experts"])
@on_ranks(2)
def test_a_step_without_averaged_gradients_is_refused(
    rank: int, world_size: int, kind: str, seed: int
) -> None:
    """Steps behind a backward alone, behind an all-reduce of the caller's, with what the experts are not in,
    behind a `mark_synchronized` and behind `sync_gradients`."""
    torch.manual_seed(seed)
    overlap = OverlapConfig(overlap=kind != "in order")
    own = OwnExperts(6 * rank, 6) if kind == "own experts" else None
    layer = MoELayer(CONFIG, max_tokens=8, overlap=overlap, experts=own)
    dense = [each for each in layer.parameters() if not is_expert_parameter(each)]
    every, other = torch.optim.SGD(layer.parameters(), lr=0.1), torch.optim.SGD(dense, lr=0.1)
    x = torch.ones(4, 16, dtype=torch.float64)
    with layer.comm:
        layer(x).square().sum().backward()
        before = [each.detach().clone() for each in layer.parameters()]
        refused(every.step, "that 2 ranks share out", "sync_gradients(model)")
        for each in layer.parameters():
            if each.grad is not None:
                dist.all_reduce(each.grad)
        refused(every.step, "that 2 ranks share out", "sync_gradients(model)")
        assert all(torch.equal(*pair) for pair in zip(layer.parameters(), before, strict=True))
        other.step()
        mark_synchronized(layer)
        every.step()
        with torch.no_grad():
            layer(x)
        every.zero_grad()
        layer(x).square().sum().backward()
        sync_gradients(layer)
        layer(x)  # without a backward
        every.step()


@pytest.mark.parametrize("ep", [2, 1])
@on_ranks(2)
def test_wrappers_that_mix_experts_are_refused(rank: int, world_size: int, ep: int, seed: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    layer = build(seed, groups_of(rank, world_size, ep)[0])
    x = torch.ones(4, 16, dtype=torch.float64)

    def zero(parameters: list[torch.nn.Parameter]) -> Any:
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
        layer(x).square().sum().backward()
        return optimizer.step

    def fsdp() -> None:
        FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)

    with layer.comm:
        step = zero(list(layer.parameters()))
        before = layer.experts.w_in.detach().clone()
        if ep == 1:
            step()
        else:
            refused(step, begins="the optimizer is a ZeroRedundancyOptimizer")
            assert torch.equal(before, layer.experts.w_in)
        zero([each for each in layer.parameters() if not is_expert_parameter(each)])()
        if ep == 1:
            fsdp()
        else:
            refused(fsdp, "fully_shard_experts(model)")


@on_ranks(1)
def test_a_communicator_is_not_copied(rank: int, world_size: int, seed: int) -> None:
    layer = build(seed)
    with layer.comm as comm:
        assert copy.deepcopy(layer).comm is copy.copy(layer).comm is comm
        for call in (lambda: torch.save(layer, io.BytesIO()), lambda: copy.deepcopy(comm)):
            refused(call, "state_dict()", "build a new Communicator", name="TypeError")


@on_ranks(2)
def test_a_layer_goes_on_with_another_communicator(rank: int, world_size: int, seed: int) -> None:
    """Rank 1 comes after the deadline. The layer goes on with another communicator."""
    torch.manual_seed(seed)
    sizes = {"num_experts": 12, "hidden": 16, "top_k": 3, "max_tokens": 8}
    options: dict[str, Any] = {**sizes, "dtype": torch.float64, "device": "cpu"}
    layer = MoELayer(CONFIG, Communicator(**options, timeout=0.5))
    x = torch.ones(4, 16, dtype=torch.float64)
    want = layer(x).detach()
    found = catch(lambda: layer(x)) if rank == 0 else None
    dist.barrier()
    require(found or catch(lambda: layer(x)), name="PeerTimeout")
    layer.comm.close()
    layer.comm = Communicator(**options)
    with layer.comm:
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, want)


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


@pytest.mark.parametrize("name", WAYS)
@on_ranks(3)
def test_layers_that_are_called_in_another_order(rank: int, world_size: int, name: str, seed: int) -> None:
    """Rank 1 calls another layer of the same communicator than the other ranks do: forward and backward."""
    options, overlap = WAYS[name]
    config = dataclasses.replace(CONFIG, **options)
    about = (
        "ranks disagree on the layer that calls (a number of its place among those of the communicator, of "
        "its MoEConfig, and under DistributedDataParallel of a router's weights, which differ where ranks "
        "clip or step by themselves: clip by moecomm.nn.clip_grad_norm, scale by ShardedGradScaler; 0: "
        "none): rank 0"
    )
    with communicator_of(config) as comm:
        layers = []
        for own in (False, False, True):  # weights are alike, so that tokens have the same experts in both
            torch.manual_seed(seed)
            how = {"experts": Doubled()} if own else {"overlap": OverlapConfig(**overlap)}
            layers.append(MoELayer(config, comm, **how))
        numbers = [*(layer._caller for layer in layers), 0]
        x = torch.ones(4, 16, dtype=torch.float64, requires_grad=True)
        ids = torch.arange(12).view(4, 3)
        calls: list[Callable[[], Any]] = [partial(layer, x) for layer in layers]
        calls.append(lambda: comm.dispatch(x, ids))
        wanted = layers[0](x).detach()
        for there in (1, 2, 3):
            begins = f"{about} has {numbers[0]}, rank 1 has {numbers[there]}"
            refused(calls[there if rank == 1 else 0], begins=begins, name="MismatchedArguments")
            assert torch.equal(layers[0](x), wanted), "the error has left something behind"
        sums = [layer(x).sum() for layer in layers[:2]]
        begins = "ranks disagree on the handle"
        refused(sums[rank == 1].backward, begins=begins, name="MismatchedArguments")


@on_ranks(2)
def test_what_may_be_called_for_a_layer(rank: int, world_size: int, seed: int) -> None:
    """What ranks may do differently: call a layer or its copy, and call it compiled."""
    config = dataclasses.replace(CONFIG, capacity_factor=2.0, pad_to_capacity=True)
    comm = communicator_of(config)
    layers = [MoELayer(config, comm) for _ in range(3)]
    x = torch.ones(4, 16, dtype=torch.float64)
    wanted = layers[1](x).detach()
    copied, compiled = copy.deepcopy(layers[1]), torch.compile(layers[1], backend="eager")
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


@on_ranks(2)
def test_a_communicator_of_another_kind_is_refused(rank: int, world_size: int, seed: int) -> None:
    """A layer into which they are put keeps its own."""
    layer = build(seed)
    sizes = {name: getattr(layer.comm, name) for name in ("num_experts", "hidden", "top_k", "max_tokens")}
    options: dict[str, Any] = {**sizes, "dtype": layer.comm.dtype, "device": "cpu"}
    others = {
        "comm.size is": Communicator(groups_of(rank, world_size, 1)[0], **options),
        "comm.max_tokens is": Communicator(**{**options, "max_tokens": 2 * layer.comm.max_tokens}),
        "comm.dtype is": Communicator(**{**options, "dtype": torch.float32}),
    }
    before = layer.comm
    for says, other in {"NoneType": None, **others}.items():
        refused(partial(setattr, layer, "comm", other), says)
    assert layer.comm is before
    layer(torch.ones(2, layer.config.hidden, dtype=layer.config.dtype)).sum().backward()
    for each in (before, *others.values()):
        each.close()
