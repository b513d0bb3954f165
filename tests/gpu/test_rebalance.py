"""Experts that change places between GPUs: by NCCL, in any dtype, under a step that is a graph."""

import pytest
import torch
from torch import nn

from moecomm.graphs import GraphedStep
from moecomm.nn import MoEConfig, MoELayer, sync_gradients
from moecomm.train import rebalance_experts
from tests.gpu import harness
from tests.multirank.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("cuda_only")

EXPERTS, HIDDEN, TOKENS = 8, 64, 128


@pytest.mark.parametrize("graphed", [False, True], ids=["plain", "graph"])
@on_ranks(2)
def test_training_goes_on_nccl(rank: int, size: int, graphed: bool, seed: int) -> None:
    """A float32 model has the losses of one whose experts stay, and an optimizer's state of int16 travels."""
    group, device, losses = harness.nccl(), harness.device(), []
    config = MoEConfig(hidden=HIDDEN, ffn_hidden=32, num_experts=EXPERTS, top_k=2, router_bias=True)
    for moves in (False, True):
        torch.manual_seed(seed)
        layer = MoELayer(config, group=group, max_tokens=TOKENS)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, device=device), layer)
        assert layer.router.bias is not None
        layer.router.bias.data.copy_(torch.linspace(0.5, -0.5, EXPERTS))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        numbers = torch.arange(EXPERTS // size, dtype=torch.int16, device=device) + rank * EXPERTS // size
        optimizer.state[layer.experts.w_in]["numbers"] = numbers.view(-1, 1).repeat(1, 3)

        def forward_backward(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss.detach()

        step = GraphedStep(forward_backward, model, grows=True) if graphed else forward_backward
        found, order = [], list(range(EXPERTS))
        for number in range(6):
            generator = torch.Generator().manual_seed(100 * seed + 2 * number + rank)
            found.append(float(step(torch.randn(TOKENS, HIDDEN, generator=generator).to(device))))
            sync_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
            if moves and (done := rebalance_experts(model, optimizer, group=group, tolerance=0.0)):
                order = [order[each] for each in done["1"].order]
        losses.append(torch.tensor(found))
        if moves:
            assert order != sorted(order), "experts did move"
            own = order[rank * EXPERTS // size : (rank + 1) * EXPERTS // size]
            assert optimizer.state[layer.experts.w_in]["numbers"].tolist() == [[each] * 3 for each in own]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
