"""Mixture-of-experts layers of Megatron-Core, their tokens carried by moecomm and by its own dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.errors import Unsupported
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)

pool = own_pool()
HIDDEN = 32


def _layer(rank: int, size: int, seed: int, **changes: Any) -> Any:
    """A layer of sequential experts with weights of the seed; on the CPU, where only the allgather dispatcher
    of Megatron-Core runs."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=size)
    # Without TransformerEngine this name is missing, and a router puts its weight on the current GPU.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "expert_model_parallel_size": size,
        "moe_token_dispatcher_type": "allgather",
        "use_cpu_initialization": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
    }
    torch.manual_seed(seed)
    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    layer = build_module(spec, config=TransformerConfig(**{**fields, **changes}), layer_number=1)
    with torch.no_grad():
        layer.router.weight.normal_(generator=torch.Generator().manual_seed(seed))
        for parameter in layer.experts.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed + 1 + rank))
    return layer.train()


def _step(layer: Any, tokens: int, seed: int) -> dict[str, Tensor]:
    x = torch.randn(tokens, 2, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    y, _ = layer(x)
    y.square().mean().backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}
    layer.zero_grad()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"},
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
        {"moe_shared_expert_intermediate_size": 16},
    ],
    ids=["dropless", "capacity", "sigmoid top-3", "shared expert"],
)
@on_ranks(2)
def test_as_its_own(rank: int, size: int, changes: dict[str, Any], seed: int) -> list[str]:
    """The same outputs and gradients, for batches that grow."""
    from moecomm.megatron import use_moecomm

    own, ours = (_layer(rank, size, seed, **changes) for _ in range(2))
    found = [] if use_moecomm(ours) == 1 else ["no layer was found"]
    for step, tokens in enumerate([6, 3, 40]):
        wanted, got = (_step(layer, tokens, seed + 100 * step + rank) for layer in (own, ours))
        if wanted.keys() != got.keys():
            found.append(f"step {step}: {wanted.keys() ^ got.keys()}")
            continue
        for name, each in wanted.items():
            if not torch.allclose(got[name], each, rtol=1e-5, atol=1e-6):
                found.append(f"step {step}, {name}: {(got[name] - each).abs().max()}")
    return found


@on_ranks(2)
def test_recompute(rank: int, size: int, seed: int) -> list[str]:
    """A layer that torch.utils.checkpoint computes again has the gradients of one that is computed once."""
    from torch.utils.checkpoint import checkpoint

    from moecomm.megatron import use_moecomm

    layer = _layer(rank, size, seed)
    use_moecomm(layer)
    wanted = _step(layer, 8, seed + rank)
    got = _step(_Checkpointed(layer, checkpoint), 8, seed + rank)
    return [
        name
        for name, each in wanted.items()
        if not torch.equal(got[f"layer.{name}" if "." in name else name], each)
    ]


class _Checkpointed(torch.nn.Module):
    def __init__(self, layer: Any, checkpoint: Any) -> None:
        super().__init__()
        self.layer, self._checkpoint = layer, checkpoint

    def forward(self, x: Tensor) -> Any:
        return self._checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}, "pad_expert_input"),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is 'local', must be 'none'"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(
    rank: int, size: int, changes: dict[str, Any], says: str, seed: int
) -> None:
    from moecomm.megatron import use_moecomm

    layer = _layer(rank, size, seed)
    for name, value in changes.items():
        setattr(layer.config, name, value)
    before = layer.token_dispatcher
    with pytest.raises(Unsupported, match=f"layer 1: .*{says}"):
        use_moecomm(layer)
    assert layer.token_dispatcher is before
    dist.barrier()
