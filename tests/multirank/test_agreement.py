"""Ranks compare what they are about to average: nobody waits for a rank that has raised an error, and no sum
is of different parameters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moecomm
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    OverlapConfig,
    backward_weights,
    clip_grad_norm,
    sync_gradients,
    update_expert_bias,
)
from moecomm.train.agreement import agree, agree_by_holders
from moecomm.train.replicas import Replicas, find_replicas, match_blocks
from tests.multirank.catching import Caught, catch, refused, require
from tests.multirank.conftest import own_pool
from tests.multirank.harness import run_ranks
from tests.multirank.moe_cases import SIZES, groups_of
from tests.multirank.on_ranks import on_ranks
from tests.ranks import gathered

pool = own_pool()

H = SIZES["hidden"]


@on_ranks(2)
def test_hosts_compare_in_a_group_of_their_own(rank: int, world_size: int, seed: int) -> None:
    """So a thread may exchange in the caller's group meanwhile, as that of an async_save does."""
    device, sum_ = torch.device("cpu"), torch.ones(3)
    for first in (0, 1):
        layer = Model(rank, world_size, 2, seed).moe
        work = dist.all_reduce(sum_, async_op=True) if rank == first else None
        assert agree(None, device, "texts", lambda: ["the same"])
        agree_by_holders(None, device, "texts", [0], [["the same"]])
        assert find_replicas([layer], None)[layer.comm].ranks == (rank,)
        if work is None:
            dist.all_reduce(sum_)
        else:
            work.wait()
    assert sum_.tolist() == [4.0] * 3


class Model(nn.Module):
    def __init__(self, rank: int, world: int, ep: int, seed: int, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = (nn.Linear(H, H, dtype=torch.float64) for _ in range(2))
        config = MoEConfig(**SIZES, dtype=torch.float64, bias_update_rate=0.1)
        group = groups_of(rank, world, ep)[0]
        self.moe = MoELayer(config, group=group, max_tokens=8, overlap=OverlapConfig(**options))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.second(self.first(x)))
        return y


def _step(model: Model, rank: int) -> list[Tensor | None]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(5, H, generator=generator, dtype=torch.float64)).square().sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def _freeze(model: Model, rank: int) -> None:
    (model.first, model.second)[rank % 2].requires_grad_(False)


def _freeze_one_layer(model: Model, rank: int) -> None:
    if rank == 1:
        model.first.requires_grad_(False)


def _have_more(model: Model, rank: int) -> None:
    if rank == 1:
        model.more = nn.Linear(2, 2)


def _freeze_experts(model: Model, rank: int) -> None:
    if rank == 0:
        model.moe.experts.requires_grad_(False)


def _different(rank: int, world: int, change: Callable[[Model, int], None], seed: int) -> Caught | None:
    """Returns what ranks raise that have changed their models; their gradients stay as they are, and the next
    step of equal models is right."""
    model = Model(rank, world, 2, seed)
    with model.moe.comm:
        change(model, rank)
        before = _step(model, rank)
        found = catch(lambda: sync_gradients(model))
        for parameter, gradient in zip(model.parameters(), before, strict=True) if found else ():
            assert parameter.grad is gradient is None or torch.equal(parameter.grad, gradient)
        model.requires_grad_(True)
        if hasattr(model, "more"):
            del model.more
        _step(model, rank)
        assert model.first.weight.grad is not None
        total = model.first.weight.grad.clone()
        dist.all_reduce(total)
        sync_gradients(model)
        torch.testing.assert_close(model.first.weight.grad, total / world)
    return found


@pytest.mark.parametrize("change", [_freeze, _freeze_one_layer, _have_more])
@on_ranks(2)
def test_ranks_that_train_other_parameters(
    rank: int, world: int, change: Callable[[Model, int], None], seed: int
) -> None:
    name = "more.weight (2, 2) torch.float32" if change is _have_more else "first.weight (16, 16)"
    begins = "ranks average different parameters: rank "
    require(_different(rank, world, change, seed), name, begins=begins, name="MismatchedArguments")


@pytest.mark.parametrize("size", [2, 4])
@on_ranks("size")
def test_replicas_that_train_other_experts(rank: int, world: int, seed: int) -> None:
    found = _different(rank, world, _freeze_experts, seed)
    if world == 2:
        assert found is None  # nobody holds the same
        return
    require(found, name="MismatchedArguments")
    assert found is not None
    assert found.text.endswith("different parameters of these: they are others on ranks 0 and 2")


@on_ranks(2)
def test_an_error_of_one_rank_is_told(rank: int, world: int, seed: int) -> None:
    """Rank 1 alone has gradients that are put off, and then a sparse one."""
    model = Model(rank, world, 2, seed, defer_weights=rank == 1)

    def told(kind: str, begins: str) -> None:
        other, own = gathered(catch(lambda: sync_gradients(model)))
        require(own, begins=begins, name=kind)
        require(other)
        assert other.text == f"rank 1 raises {kind}: {own.text}"

    with model.moe.comm:
        _step(model, rank)
        told("InvalidArgument", "model has layers")
        backward_weights(model)
        gradient = model.first.weight.grad
        if rank == 1 and gradient is not None:
            model.first.weight.grad = gradient.to_sparse()
        told("Unsupported", "the gradient of first.weight")
        if rank == 1:
            refused(lambda: clip_grad_norm(model, 1.0), "is sparse", name="Unsupported")
        model.first.weight.grad = gradient
        sync_gradients(model)
        norms: list[Tensor] = [torch.zeros((), dtype=torch.float64)] * 2
        dist.all_gather(norms, clip_grad_norm(model, 1.0))
        assert norms[0] == norms[1]
        # As torch's is called.
        for call in (sync_gradients, lambda parameters: clip_grad_norm(parameters, 1.0)):
            refused(lambda call=call: call(model.parameters()), "model is generator, must be")


@on_ranks(2)
def test_in_a_capture_a_rank_looks_for_itself(rank: int, world: int) -> None:
    """Nothing is exchanged while a graph is captured: ranks have other words here, and go on."""
    device = torch.device("cuda")

    def fails() -> list[str]:
        raise moecomm.Unsupported("not so")

    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        agree(None, device, "ranks", lambda: [str(rank)])
        agree_by_holders(None, device, "ranks", [0], [[str(rank)]])
        if rank == 1:
            refused(lambda: agree(None, device, "ranks", fails), name="Unsupported")


@on_ranks(2)
def test_what_is_no_group_of_this_rank_is_refused(rank: int, world: int, seed: int) -> None:
    """What a rank gets that passes what new_group() gives ranks outside of a group, and a list."""
    inside = dist.new_group([0])
    model = Model(rank, world, 2, seed)
    sizes: dict[str, Any] = {"num_experts": 2, "hidden": 8, "top_k": 1, "max_tokens": 4, "device": "cpu"}
    says = "must be a process group that this rank is in"
    with model.moe.comm:
        for group in (inside, [0, 1]) if rank == 1 else ():
            of_none = "which new_group() gives ranks outside" if group is inside else ""
            refused(lambda group=group: update_expert_bias(model, group), says, of_none)
            refused(lambda group=group: sync_gradients(model, group), says)
            refused(lambda group=group: clip_grad_norm(model, 1.0, pp_group=group), says)
            refused(lambda group=group: moecomm.Communicator(group, **sizes), says)


@on_ranks(2)
def test_the_norm_of_complex_gradients(rank: int, world: int, seed: int) -> None:
    model = Model(rank, world, 2, seed)
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    with model.moe.comm:
        _step(model, rank)
        model.phase.grad = torch.tensor([3 + 4j, 0, 12j], dtype=torch.complex128)
        sync_gradients(model)
        without = clip_grad_norm(nn.ModuleList([model.first, model.second, model.moe]), float("inf"))
        torch.testing.assert_close(clip_grad_norm(model, float("inf")).square(), without.square() + 169)


def test_blocks_of_ranks() -> None:
    """The example of moecomm.train.replicas, and ranks laid out the other way."""
    assert match_blocks([(0, 1), (0, 1), (2, 3), (2, 3)], (0, 1, 2, 3)) == ((0, 1), (2, 3))
    assert match_blocks([(0, 2), (1, 3), (0, 2), (1, 3)], (0, 1, 2, 3)) == ((0, 2), (1, 3))
    assert match_blocks([(4, 6), (4, 6)], (4, 6)) == ((4, 6),)
    for own, ranks in [
        ([(0, 1), (0, 1)], (0, 2)),
        ([(0, 1), (0, 1), (2,)], (0, 1, 2)),
        ([(0, 1), (1, 2), (1, 2)], (0, 1, 2)),
        ([(0, 1)], (0,)),
    ]:
        refused(partial(match_blocks, own, ranks), "must part these ranks")


def destroyed(rank: int, world_size: int, folder: str) -> float:
    """After destroy_process_group() the group is made anew on all its ranks, also where somebody holds it."""
    replicas = Replicas(blocks=((0,), (1,)), ranks=(0, 1))
    held = replicas.group if rank == 0 else None
    if rank == 1:
        replicas.group  # noqa: B018  # made, and let go of
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/again", world_size), rank=rank, world_size=world_size
    )
    total = torch.tensor([rank + 1.0])
    if rank != 2:
        dist.all_reduce(total, group=replicas.group)
        assert replicas.group is not held
    dist.barrier()
    return float(total)


def test_a_group_that_was_destroyed_is_made_anew(tmp_path: Path) -> None:
    assert run_ranks(3, destroyed, str(tmp_path)) == [3.0, 3.0, 3.0]
