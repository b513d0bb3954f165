"""Gradients of what torch's tensor parallelism splits beside a MoELayer under a folding: sync_gradients and
clip_grad_norm give those of one process with all ranks' tokens."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing import assert_close

from moecomm.nn import MoEConfig, MoELayer, clip_grad_norm, sync_gradients
from moecomm.parallel import ParallelFolding
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks

HIDDEN, SEQUENCE = 8, 12
CONFIG = MoEConfig(hidden=HIDDEN, ffn_hidden=4, num_experts=4, top_k=2, dtype=torch.float64)


def dense_layers() -> nn.ModuleDict:
    torch.manual_seed(3)
    make = {"dtype": torch.float64}
    layers = {
        "norm": nn.LayerNorm(HIDDEN, **make),  # type: ignore[arg-type]
        "up": nn.Linear(HIDDEN, 16, **make),  # type: ignore[arg-type]
        "down": nn.Linear(16, HIDDEN, **make),  # type: ignore[arg-type]
        "whole": nn.Linear(HIDDEN, HIDDEN, **make),  # type: ignore[arg-type]
    }
    return nn.ModuleDict(layers)


def run_dense(dense: nn.ModuleDict, x_BSH: torch.Tensor) -> torch.Tensor:
    y_BSH: torch.Tensor = dense["whole"](dense["down"](dense["up"](dense["norm"](x_BSH)).tanh()))
    return y_BSH


def local(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@on_ranks(4)
def test_gradients_are_those_of_one_process(rank: int, world: int) -> None:
    folding = ParallelFolding(world_size=world, tp=2, ep=4)
    dense = dense_layers()
    alone = copy.deepcopy(dense)
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = folding.dense_mesh("cpu")["tp"]
    parallelize_module(dense, mesh, plan, src_data_rank=None)  # type: ignore[arg-type]
    parallelize_module(dense["up"], mesh, ColwiseParallel(), src_data_rank=None)
    model = nn.ModuleDict({"dense": dense, "moe": MoELayer(CONFIG, folding=folding, max_tokens=SEQUENCE)})

    torch.manual_seed(4)
    x_DBSH = torch.randn(folding.dp, 2, SEQUENCE, HIDDEN, dtype=torch.float64)
    weights_DBSH = torch.randn_like(x_DBSH)
    place = folding.coordinates(rank)
    own, weights = (each[place.dp].chunk(2, 1)[place.tp] for each in (x_DBSH, weights_DBSH))
    (run_dense(dense, own) * weights).sum().backward()
    sync_gradients(model)

    (run_dense(alone, x_DBSH.flatten(0, 1)) * weights_DBSH.flatten(0, 1)).sum().backward()
    square = torch.zeros((), dtype=torch.float64)
    for (name, ours), theirs in zip(dense.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        found = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        assert_close(found, theirs.grad / world, msg=lambda text, name=name: f"{name}: {text}")
        square += (theirs.grad / world).square().sum()
    split = [name for name, each in dense.named_parameters() if isinstance(each, DTensor)]
    assert split == ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"]
    assert_close(clip_grad_norm(model, 1e-3), square.sqrt())
    clipped = torch.stack([local(each).square().sum() for each in dense.parameters()])
    assert bool((clipped.sqrt() <= 1e-3).all())


@on_ranks(4)
def test_a_parameter_without_a_gradient_counts_as_zero(rank: int, world: int) -> None:
    """A rank whose loss does not touch a split parameter counts as zero there."""
    folding = ParallelFolding(world_size=world, tp=2)
    up = parallelize_module(
        nn.Linear(HIDDEN, 4, bias=False, dtype=torch.float64),
        folding.dense_mesh("cpu")["tp"],
        ColwiseParallel(),
        src_data_rank=None,
    )
    model = nn.ModuleDict({"up": up, "moe": MoELayer(CONFIG, folding=folding, max_tokens=4)})
    if folding.coordinates(rank).dp == 0:
        up(torch.ones(1, HIDDEN, dtype=torch.float64)).sum().backward()
    sync_gradients(model)
    gradient = up.weight.grad
    assert isinstance(gradient, DTensor)
    assert_close(gradient.to_local(), torch.full((2, HIDDEN), 1 / world, dtype=torch.float64))


@on_ranks(4)
def test_shards_of_other_meshes_are_refused(rank: int, world: int) -> None:
    """FSDP2 over a part of the ranks is refused as ever, over the TP ranks too."""
    folding = ParallelFolding(world_size=world, tp=2)
    moe = MoELayer(CONFIG, folding=folding, max_tokens=4)
    over_tp = DeviceMesh.from_group(folding.group("tp"), "cpu")
    sharded = fully_shard(nn.Linear(4, 4), mesh=over_tp)
    refused(lambda: sync_gradients(nn.ModuleDict({"a": sharded, "moe": moe})), "is sharded over ranks")


@on_ranks(2)
def test_a_sum_over_ranks_that_may_still_run(rank: int, world: int) -> None:
    """A layer, or a dispatch, takes the tensor that torch's tensor parallelism hands to the next module."""
    folding = ParallelFolding(world_size=world, tp=2, ep=2)
    plan = RowwiseParallel(input_layouts=Replicate())
    down = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    parallelize_module(down, folding.dense_mesh("cpu")["tp"], plan, src_data_rank=None)
    moe = MoELayer(CONFIG, folding=folding, max_tokens=SEQUENCE)
    x_TH = torch.randn(4, HIDDEN, dtype=torch.float64)
    ids_TK = torch.arange(CONFIG.top_k).expand(4, -1)
    found = []
    for plain in (False, True):
        y_TH = down(x_TH) + 0 if plain else down(x_TH)
        assert (type(y_TH) is torch.Tensor) == plain
        rows_PH, z_TH = moe.comm.dispatch(y_TH, ids_TK).tokens, moe(y_TH)
        (z_TH.square().sum() + rows_PH.sum()).backward()
        found.append([z_TH, rows_PH, local(down.weight)])
        down.weight.grad = None
    assert_close(*found, rtol=0, atol=0)
