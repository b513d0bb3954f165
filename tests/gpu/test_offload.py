"""ActivationOffload on a GPU: the bits of a backward without it, memory that is free in between, and pinned
memory that is taken once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moecomm.nn import ActivationOffload
from tests.gpu import harness
from tests.gpu.conftest import Pools

BLOCKS, TOKENS, WIDTH = 6, 4096, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _steps(rank: int, world_size: int, seed: int) -> list[str]:
    """Steps with other inputs each, which the host issues without waiting, with and without."""
    device = harness.device()
    torch.cuda.set_device(device)
    torch.manual_seed(seed)
    model = nn.ModuleList(Block() for _ in range(BLOCKS)).to(device)
    inputs = [torch.randn(TOKENS, WIDTH, device=device) for _ in range(3)]
    held: list[int] = []

    def step(x: Tensor, offload: ActivationOffload | None) -> list[Tensor]:
        before = torch.cuda.memory_allocated(device)
        for block in model:
            if offload is None:
                x = block(x)
            else:
                with offload:
                    x = block(x)
        held.append(torch.cuda.memory_allocated(device) - before)
        x.square().mean().backward()
        found = [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        return found

    plain = [step(x, None) for x in inputs]
    offload, taken, problems = ActivationOffload(model), [], []
    moved = []
    for _ in range(2):
        moved.append([step(x, offload) for x in inputs])
        taken.append(offload.taken_bytes)
    for number, (found, wanted) in enumerate(zip(moved[0] + moved[1], plain + plain, strict=True)):
        if not all(map(torch.equal, found, wanted)):
            problems.append(f"step {number}: other gradients")
    if not 0 < taken[0] == taken[1]:
        problems.append(f"pinned bytes {taken}")
    if held[-1] * 2 > held[0]:  # one block of six, and the result
        problems.append(f"bytes held after a forward: {held}")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph), offload:
            pass
    except Exception as error:
        if "entered while a CUDA graph is captured" not in str(error):
            problems.append(f"in a capture: {error!r}")
    else:
        problems.append("no error in a capture")
    return problems


@pytest.mark.usefixtures("cuda_only")
def test_steps_have_the_same_bits_and_hold_less(pool: Pools, seed: int) -> None:
    harness.assert_none(pool(1)(_steps, seed))
