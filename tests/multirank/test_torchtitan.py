"""Mixtures of experts of torchtitan, their tokens carried by moecomm and by torchtitan's own all-to-all."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.multirank.on_ranks import on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed", exc_type=ImportError)
if importlib.util.find_spec("triton") is None:
    pytest.skip("torchtitan imports triton, which is not installed", allow_module_level=True)

EXPERTS, TOP_K, DIM = 8, 2, 32


class Experts(nn.Module):
    """Experts that torchtitan's region calls, in float32: its own compute in bfloat16."""

    def __init__(self, local: int, first: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        all_EDD = torch.randn(EXPERTS, DIM, DIM, generator=generator)
        self.weight_EDD = nn.Parameter(all_EDD[first : first + local].clone())

    @torch.compiler.disable  # of products in float32 the compiler knows no shapes
    def forward(self, x_RD: Tensor, counts_E: Tensor) -> Tensor:
        offsets_E = counts_E.cumsum(0, dtype=torch.int32)
        return torch.tanh(torch._grouped_mm(x_RD, self.weight_EDD, offs=offsets_E))


def _region(how: str, mesh: Any, rank: int, size: int, seed: int) -> Any:
    """A RoutedExperts of torchtitan with the dispatcher that its override gives."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=DIM, hidden_dim=DIM, num_experts=EXPERTS),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )
    if how == "moecomm":
        told = apply_overrides(OverrideConfig(imports=["moecomm.torchtitan.dispatcher"]), config)
        assert len(told) == 1, told
    region = config.build()
    local = EXPERTS if mesh is None else EXPERTS // size
    region.inner_experts = Experts(local, 0 if mesh is None else rank * local, seed)
    region.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return region


def _step(region: Any, batch: int, seed: int) -> list[Tensor]:
    """Output and gradients of a batch."""
    generator = torch.Generator().manual_seed(seed)
    x_BLD = torch.randn(batch, 6, DIM, generator=generator, requires_grad=True)
    scores_BLE = torch.rand(batch, 6, EXPERTS, generator=generator, requires_grad=True)
    topk_BLK, ids_BLK = scores_BLE.topk(TOP_K)
    counts_E = torch.bincount(ids_BLK.flatten(), minlength=EXPERTS)
    y_BLD = region(x_BLD, topk_BLK, ids_BLK, counts_E)
    y_BLD.square().sum().backward()
    found = [y_BLD.detach(), x_BLD.grad, scores_BLE.grad, region.inner_experts.weight_EDD.grad.clone()]
    region.zero_grad()
    return found


class Block(nn.Module):
    """A router before a RoutedExperts, and a residual connection."""

    def __init__(self, region: Any, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gate_ED = nn.Parameter(torch.randn(EXPERTS, DIM, generator=generator))
        self.region = region

    def forward(self, x_BLD: Tensor) -> Tensor:
        topk_BLK, ids_BLK = (x_BLD @ self.gate_ED.T).softmax(-1).topk(TOP_K)
        counts_E = torch.bincount(ids_BLK.flatten(), minlength=EXPERTS)
        return x_BLD + self.region(x_BLD, topk_BLK, ids_BLK, counts_E)


class Model(nn.Module):
    """Blocks by name, as torchtitan's models have them."""

    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})

    def forward(self, x_BLD: Tensor) -> Tensor:
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        return x_BLD


@pytest.mark.parametrize("parallel", [True, False], ids=["ep", "no mesh"])
@on_ranks(2)
def test_as_all_to_all(rank: int, size: int, parallel: bool, seed: int) -> None:
    """Two layers, batches that grow: the same as torchtitan's own dispatcher, whose layers share nothing."""
    from torchtitan.distributed.utils import set_spmd_backend

    set_spmd_backend("full_dtensor")  # without the meshes of torchtitan's own types
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)) if parallel else None
    layers = {how: [_region(how, mesh, rank, size, seed + i) for i in range(2)] for how in ("own", "moecomm")}
    for step, batch in enumerate([2, 1, 9]):
        for layer in range(2):
            wanted, got = (
                _step(layers[how][layer], batch, seed + 10 * step + rank) for how in ("own", "moecomm")
            )
            for name, one, other in zip(("y", "x", "scores", "weights"), got, wanted, strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), f"step {step}, {name}"
    if parallel:
        one, other = (each.token_dispatcher._comms._found for each in layers["moecomm"])
        assert list(one.values()) == list(other.values())  # layers of one shape share a communicator


@pytest.mark.parametrize("how", ["FullAC", "SelectiveAC", "compile"])
@on_ranks(2)
def test_layers_that_are_wrapped(rank: int, size: int, how: str, seed: int) -> None:
    """Activation checkpointing as torchtitan applies it, which dispatches again in the backward, and blocks
    that are compiled, but not as one graph: the same as torchtitan's own dispatcher without them."""
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed.utils import set_spmd_backend

    from moecomm.shared import SharedCommunicator

    set_spmd_backend("full_dtensor")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    made, plain = [], SharedCommunicator.dispatch
    models = {
        each: Model(*(Block(_region(each, mesh, rank, size, seed + i), seed + i) for i in range(2)))
        for each in ("own", "moecomm")
    }
    if how == "compile":
        for block in models["moecomm"].layers.values():
            block.compile(backend="aot_eager")
    else:
        policy = getattr(activation_checkpoint, how)
        policy(policy.Config()).apply(models["moecomm"])
    for step, batch in enumerate([2, 1, 9]):
        generator = torch.Generator().manual_seed(seed + 10 * step + rank)
        x_BLD, results = torch.randn(batch, 6, DIM, generator=generator), []
        for model in models.values():
            model.zero_grad()
            mine_BLD = x_BLD.clone().requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(SharedCommunicator, "dispatch", lambda *given: made.append(1) or plain(*given))
                y_BLD = model(mine_BLD)
                y_BLD.square().mean().backward()
            weights = [each.grad for each in model.parameters()]
            results.append([y_BLD.detach(), mine_BLD.grad, *weights])
        for number, (one, other) in enumerate(zip(*results, strict=True)):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), f"step {step}, {number}"
        assert len(made) == (2 if how == "compile" else 4), f"step {step}: {len(made)} dispatches"
        made.clear()
    if how == "compile":
        block.compile(backend="aot_eager", fullgraph=True)  # as torchtitan does it
        with pytest.raises(torch._dynamo.exc.Unsupported, match="dispatch"):
            block(x_BLD)
