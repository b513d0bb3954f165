"""Experts of transformers' models that change places between ranks, beside experts that stay."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multirank.catching import refused
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("transformers")

from tests.multirank.hf_models import EXPERTS, batch_of, load_parallel, saved_once
from tests.multirank.test_transformers import folders

__all__ = ["folders"]  # a fixture
pool = own_pool()

SEED = 5
"""The seed of tokens by which experts of each family move."""
MOVES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe")
STAYS = {
    "deepseek_v3": "groups of experts",
    "glm4_moe": "groups of experts",
    "dots1": "groups of experts",
    "ernie4_5_moe": "must be a tensor with the 8 experts in its first dimension",
}


def _train(model: Any, moves: bool, part: int, seed: int) -> tuple[list[float], int]:
    """Trains on a part of the data; returns the losses of some steps, and how often experts moved."""
    from moecomm.transformers import rebalance_experts

    optimizer, losses, moved = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), [], 0
    for step in range(3):
        tokens = batch_of(part, seed + step)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if moves:
            done = rebalance_experts(model, optimizer, tolerance=0.0)
            assert all(1 <= each.after < each.before for each in done.values())
            moved += len(done)
    return losses, moved


@pytest.mark.parametrize(("family", "tp"), [*((each, 1) for each in MOVES), ("gpt_oss", 2)])
@on_ranks(2)
def test_training_goes_on(rank: int, size: int, family: str, tp: int, folders: Path, seed: int) -> None:
    """Losses are those of a model whose experts stay; what is saved is, in one process, the model that was
    trained."""
    from transformers import AutoModelForCausalLM

    folder, saved = saved_once(folders, family), folders / f"moved-{family}-{tp}-{seed}"
    losses, parallel = {}, {"fsdp_size": 2 // tp, "tp_size": tp, "ep_size": 2}
    for moves in (False, True):
        model: Any = load_parallel(folder, "moecomm", **parallel).train()
        losses[moves], moved = _train(model, moves, rank // tp, SEED)
    assert moved, "experts did move"
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), rtol=1e-5, atol=1e-5)
    model.save_pretrained(saved)
    dist.barrier()
    one: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    tokens = batch_of(0, seed)
    with torch.no_grad():
        assert torch.allclose(one(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", STAYS)
@on_ranks(2)
def test_what_cannot_be_moved_is_refused(rank: int, size: int, family: str, folders: Path, seed: int) -> None:
    """On all ranks, and the model computes what it did."""
    from moecomm.transformers import rebalance_experts

    model: Any = load_parallel(saved_once(folders, family), "moecomm", fsdp_size=2, ep_size=2).eval()
    refused(lambda: rebalance_experts(model), "has not run")
    with torch.no_grad():
        before = model(batch_of(rank, seed)).logits
        refused(lambda: rebalance_experts(model), STAYS[family], name="Unsupported")
        assert torch.equal(model(batch_of(rank, seed)).logits, before)


@on_ranks(2)
def test_other_refusals(rank: int, size: int, folders: Path, seed: int) -> None:
    """Copies of experts, adapters, and models without moecomm."""
    from moecomm.transformers import rebalance_experts
    from moecomm.transformers.adapters import adapt_experts

    folder, tokens = saved_once(folders, "qwen3_moe"), batch_of(rank, seed)
    refused(lambda: rebalance_experts(torch.nn.Linear(2, 2)), "ep_implementation")
    parallel = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2)
    bad = math.nan if rank else 0.0
    refused(
        lambda: rebalance_experts(parallel, tolerance=bad), "has not run" if not rank else "tolerance is nan"
    )
    peft = pytest.importorskip("peft")
    for weights in (["gate.weight"], EXPERTS):
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=weights)
        parallel = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2)
        adapted: Any = peft.get_peft_model(parallel, config)
        if weights is EXPERTS:
            adapt_experts(adapted)
        adapted(tokens)
        refused(lambda model=adapted: rebalance_experts(model), name="Unsupported")


@on_ranks(4)
def test_copies_are_refused(rank: int, size: int, folders: Path, seed: int) -> None:
    from moecomm.transformers import rebalance_experts

    model: Any = load_parallel(saved_once(folders, "qwen3_moe"), "moecomm", fsdp_size=4, ep_size=2)
    model(batch_of(rank, seed))
    refused(lambda: rebalance_experts(model), "copies", name="Unsupported")
