"""When operations pass their phases, by stamps in their kernels."""

from typing import Any

import pytest
import torch

from tests.gpu import harness
from tests.multirank.on_ranks import on_ranks
from tests.ranks import variable

pytestmark = pytest.mark.usefixtures("cuda_only")


@pytest.mark.parametrize("fused", ["0", "64"])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_phases_come_in_order(rank: int, world_size: int, fused: str) -> None:
    sizes: dict[str, Any] = {"num_experts": 4 * world_size, "hidden": 256, "top_k": 2, "max_tokens": 64}
    ids_TK = torch.arange(128, device="cuda").view(64, 2) % (4 * world_size)
    x_TH = torch.ones(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with variable("MOECOMM_FUSED_TOKENS", fused):
        comm = harness.communicator(**sizes)
    with comm:
        assert comm.last_phases() == {"dispatch": {}, "combine": {}}
        out = comm.dispatch(x_TH, ids_TK)
        y_TH = comm.combine(out.tokens, out.handle)
        torch.cuda.synchronize()
        forward = comm.last_phases()
        y_TH.sum().backward()
        torch.cuda.synchronize()
        backward = comm.last_phases()
    for passed in (forward, backward):
        for kind, phases in passed.items():
            assert all(0 <= at <= phases["ended"] < 10 for at in phases.values()), (kind, phases)
            if fused == "0":  # one kernel announces and agrees side by side; the last block may begin later
                assert phases.get("announced", 0) <= phases["agreed"], (kind, phases)
    assert forward["dispatch"]["agreed"] <= forward["dispatch"]["planned"] < forward["dispatch"]["ended"]
    assert "planned" not in forward["combine"] and "planned" not in backward["dispatch"]
    assert backward != forward
