"""Adapters of peft on experts that lie over ranks, beside one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moecomm import Communicator
from moecomm.errors import InvalidArgument, Unsupported
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("transformers")

from tests.multirank.hf_models import (
    EXPERTS,
    FAMILIES,
    batch_of,
    differences,
    load_parallel,
    run_plain,
    saved_once,
)
from tests.multirank.test_transformers import folders

__all__ = ["folders"]  # a fixture
pool = own_pool()


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_adapters(rank: int, size: int, family: str, folders: Path, seed: int) -> list[str]:
    """Adapters of all kinds of weights: as in one process, their gradients averaged over ranks as the Trainer
    does it."""
    peft = pytest.importorskip("peft")
    from moecomm.transformers import keep_plans
    from moecomm.transformers.adapters import adapt_experts

    folder = saved_once(folders, family)
    router = "router.weight" if family in ("gpt_oss", "granitemoe") else "gate.weight"
    config = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=[router, *EXPERTS])

    def adapt(model: Any) -> Any:
        torch.manual_seed(seed % 2**32)
        adapted = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero as peft makes it: nothing would be added
                torch.nn.init.normal_(parameter, std=0.3)
        return adapted

    def average(parameter: torch.nn.Parameter) -> None:
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    wanted = run_plain(folder, size, seed, adapt=adapt)
    model: Any = adapt_experts(adapt(load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2)))
    if family in ("qwen3_moe", "gpt_oss"):  # layers that are computed again follow the first plans
        kind = {"use_reentrant": False, "context_fn": keep_plans}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kind)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    counted: Any = {"autospec": True, "side_effect": Communicator.dispatch}
    with mock.patch.object(Communicator, "dispatch", **counted) as sent:
        found = differences(model, batch_of(rank, seed), wanted, rank, 1e-5)
    layers = sum(hasattr(each, "moecomm") for each in model.modules())
    assert sent.call_count - (sent.call_count > layers) == layers  # once more for a larger communicator
    with model.disable_adapter():  # adapters that are off do not count
        logits, _ = run_plain(folder, size, seed).outputs[rank]
        assert torch.allclose(model(batch_of(rank, seed)).logits, logits, rtol=1e-5, atol=1e-5)
    return found


@on_ranks(2)
def test_a_second_adapter_of_experts(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """It may be added after the first forward, as in one process."""
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    from moecomm.transformers.adapters import adapt_experts

    folder, tokens = saved_once(folders, "qwen3_moe"), batch_of(rank, seed)
    parallel = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2)
    found: dict[str, list[torch.Tensor]] = {"first": [], "second": []}
    for model in (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), parallel):
        torch.manual_seed(seed % 2**32)
        config = peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config, "first").eval()
        if model is parallel:
            adapt_experts(adapted)
        with torch.no_grad():
            adapted(tokens)
            adapted.add_adapter("second", config)
            for name, logits in found.items():
                adapted.set_adapter(name)
                logits.append(adapted(tokens).logits)
    assert not torch.allclose(found["first"][0], found["second"][0], rtol=1e-2), "the adapters say nothing"
    return [name for name, each in found.items() if not torch.allclose(*each, rtol=1e-4, atol=1e-4)]


@on_ranks(2)
def test_adapters_that_are_refused(rank: int, size: int, folders: Path, seed: int) -> None:
    peft = pytest.importorskip("peft")
    from moecomm.transformers.adapters import adapt_experts

    folder = saved_once(folders, "qwen3_moe")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS)
    for how, kind in (("all_to_all", InvalidArgument), ("moecomm", Unsupported)):
        whole = {"experts_implementation": "moecomm"}  # of this rank's experts alone
        model: Any = load_parallel(folder, how, fsdp_size=2, ep_size=2, **whole)
        if how == "moecomm":  # peft 0.21 itself makes no such adapters on ranks that share batches
            model.model.layers[0].mlp.experts.moecomm.tp_mesh = SimpleNamespace(size=lambda: 2)
        with pytest.raises(kind, match=r"ep_implementation='moecomm'|tp_size=1"):
            adapt_experts(peft.get_peft_model(model, config))
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    model = load_parallel(saved_once(folders, "gpt_oss"), "moecomm", fsdp_size=2, ep_size=2)
    with pytest.raises(Unsupported, match="gate_up_proj_bias, which has 2 dimensions"):
        adapt_experts(peft.get_peft_model(model, config))
    with pytest.raises(InvalidArgument, match="model is list"):
        adapt_experts([model])  # type: ignore[arg-type]
