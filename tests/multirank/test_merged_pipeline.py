"""Merged microbatches in a pipeline of torch.distributed.pipelining: the same bits as without a pipeline."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleGPipe

from moecomm import InvalidArgument
from moecomm.nn import MoEBlock, MoEConfig, MoELayer, OverlapConfig
from moecomm.overlap import MergedStage, merge_stages
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import SIZES, groups_of
from tests.multirank.test_merged import Attention, Dense, unequal
from tests.ranks import communicator, device, on_cpu, synchronize

STAGES, TOKENS = 4, 5


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y * target).sum()


def stages_of(comm: Any, config: MoEConfig, seed: int, recompute: bool) -> list[nn.ModuleList]:
    """The blocks of four stages, the same on every rank but for the experts."""
    torch.manual_seed(seed)
    stages = []
    for number in range(STAGES):
        layer = MoELayer(config, comm, overlap=OverlapConfig(keep="rows" if recompute else "all"))
        blocks = [MoEBlock(Attention(config.hidden), layer, recompute=recompute)]
        stages.append(nn.ModuleList([*blocks, Dense(config.hidden)] if number % 2 else blocks).to(device()))
    return stages


def nccl_group(rank: int, world_size: int) -> Any:
    """The ranks of this one's pipeline, in a group that sends tensors of GPUs."""
    half = world_size // 2
    groups = [dist.new_group([first, first + half], backend="nccl") for first in range(half)]
    return groups[rank % half]


def whole_model(stages: list[nn.ModuleList], x: Tensor, target: Tensor) -> list[Tensor]:
    """Runs all stages here, one microbatch after the other; returns the losses."""
    losses = []
    for y, wanted in zip(x, target, strict=True):
        for stage in stages:
            for block in stage:
                y = block(y)
        loss = loss_of(y, wanted)
        loss.backward()
        losses.append(loss.detach())
    return losses


def run_pipeline(
    rank: int, world_size: int, microbatches: int, recompute: bool, seed: int
) -> tuple[int, list[str]]:
    """One step in a pipeline of two ranks; returns the number of merged pairs, and what differs."""
    ep_group, pp_group = groups_of(rank, world_size, world_size // 2)
    if not on_cpu():
        pp_group = nccl_group(rank, world_size)
    config = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float32)
    comm = communicator(
        group=ep_group,
        num_experts=config.num_experts,
        hidden=config.hidden,
        top_k=config.top_k,
        max_tokens=TOKENS,
        dtype=config.dtype,
    )
    whole = stages_of(comm, config, seed, recompute)
    place = dist.get_rank(pp_group)
    own = {number: copy.deepcopy(whole[number]) for number in (place, STAGES - 1 - place)}
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank(ep_group))
    shape = (2, microbatches, TOKENS, config.hidden)
    x, target = (each.to(device()) for each in torch.randn(*shape, generator=generator))

    losses = whole_model(whole, x, target)
    want: dict[str, Tensor | None] = {f"loss {number}": each for number, each in enumerate(losses)}
    want |= {f"{n} {name}": p.grad for n in own for name, p in whole[n].named_parameters()}

    example = torch.empty(TOKENS, config.hidden, device=device())
    stages: list[Any] = [
        PipelineStage(
            MergedStage(blocks),
            number,
            STAGES,
            device(),
            input_args=(example.clone().requires_grad_(number > 0),),
            output_args=(example.clone().requires_grad_(),),
            group=pp_group,
        )
        for number, blocks in own.items()
    ]
    schedule = ScheduleDualPipeV(stages, microbatches, loss_of, scale_grads=False)
    merge_stages(schedule)
    functions, pairs = schedule._comp_type_to_function_map, []
    ((action, run),) = functions.items()

    def counted(*args: Any) -> None:
        pairs.append(args)
        run(*args)

    functions[action] = counted
    found: list[Tensor] = []
    if place == 0:
        schedule.step(x.flatten(0, 1), target=target.flatten(0, 1), losses=found)
    else:
        schedule.step()
    synchronize()
    got: dict[str, Tensor | None] = {f"loss {n}": each.detach() for n, each in enumerate(found or losses)}
    got |= {f"{n} {name}": p.grad for n, blocks in own.items() for name, p in blocks.named_parameters()}
    dist.barrier()
    comm.close()
    return len(pairs), unequal(want, got, f"rank {rank}")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_of_two(pool: Pools, ranks: int, recompute: bool, seed: int) -> None:
    """DualPipeV with two stages a rank; on four ranks experts are spread over two."""
    for pairs, problems in pool(ranks)(run_pipeline, 6, recompute, seed):
        assert pairs > 0 and problems == []


def by_itself(rank: int, world_size: int, seed: int) -> None:
    """A stage without a schedule, and what no schedule can take."""
    config = MoEConfig(**SIZES, dtype=torch.float32)
    comm = communicator(num_experts=12, hidden=16, top_k=3, max_tokens=TOKENS, dtype=config.dtype)
    blocks, *_ = stages_of(comm, config, seed, False)
    stage, x = MergedStage(blocks), torch.randn(TOKENS, 16, device=device())
    want = blocks[0](x)
    want.square().sum().backward()
    grads = [each.grad for each in stage.parameters()]
    stage.zero_grad()
    assert [*stage.parameters()] == [*blocks.parameters()]
    with torch.no_grad():
        assert torch.equal(stage(x), want)
    y = stage(x)
    y.square().sum().backward()
    assert torch.equal(y, want)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(stage.parameters(), grads, strict=True))

    plain: Any = PipelineStage(nn.Linear(2, 2), 0, 1, device())
    schedule: Any = ScheduleGPipe(plain, 1)
    with pytest.raises(InvalidArgument, match="schedule is ScheduleGPipe, must be one whose actions"):
        merge_stages(schedule)
    schedule = SimpleNamespace(_stages=[plain], register_custom_function=print)
    with pytest.raises(InvalidArgument, match="the module of stage 0 is Linear, must be a MergedStage"):
        merge_stages(schedule)
    comm.close()


def test_a_stage_by_itself(pool: Pools, seed: int) -> None:
    pool(1)(by_itself, seed)
