"""Models whose experts are not spread, by experts_implementation="moecomm" and by transformers itself."""

import copy
import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moecomm.errors import InvalidArgument, Unsupported
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("transformers")

from moecomm.transformers import whole_experts
from tests.multirank.hf_models import (
    EXPERTS,
    FAMILIES,
    batch_of,
    differences,
    forward_backward,
    gradients_of,
    load_over,
    ratios_of,
    run_plain,
    saved_once,
)
from tests.multirank.test_transformers import folders

__all__ = ["folders"]  # a fixture
pool = own_pool()


def _load(folder: Path, how: str = "moecomm") -> Any:
    return load_over(1, folder, how)


def _experts(model: Any) -> list[Any]:
    return [each for name, each in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(1)
def test_few_rows_on_gpus_run_as_transformers_generates(
    rank: int, size: int, family: str, folders: Path, seed: int
) -> None:
    """By "batched_mm", bit for bit, on tensors that say they are on a GPU; not with gradients, and not with
    so many rows that copies of their experts' weights take longer."""
    folder, tokens = saved_once(folders, family), batch_of(0, seed)
    model, other = _load(folder), _load(folder, "batched_mm")
    with torch.no_grad(), mock.patch.object(torch.Tensor, "is_cuda", True):
        assert torch.equal(model(tokens).logits, other(tokens).logits)
    assert all(each.moecomm.local.comm is None for each in _experts(model))
    experts = _experts(model)[0]
    of_expert = sum(each[0].nbytes for name, each in experts.named_parameters() if name.endswith("proj"))
    most, whole = whole_experts.MOST_COPIED // of_expert, experts.moecomm
    assert not whole.is_better_copied(1)
    with torch.no_grad():
        assert [whole.is_better_copied(rows) for rows in (0, 1, most, most + 1)] == [False, True, True, False]
        with whole.local.adding("down_proj", [(torch.ones(1), torch.ones(1), 1.0)]):
            assert not whole.is_better_copied(1)


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_families(rank: int, size: int, family: str, folders: Path, seed: int) -> list[str]:
    """Logits, loss and gradients. Ranks need not call together, although they have a process group."""
    folder, own = saved_once(folders, family), seed + rank
    model = _load(folder).train()
    tokens = batch_of(0, own)
    for _ in range(2 * rank):
        model(tokens)
    found = differences(model, tokens, run_plain(folder, 1, own), 0, 1e-5)
    logits = model(tokens).logits
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(tokens).logits, logits, rtol=1e-5, atol=1e-6)
        assert all(each.moecomm.experts is each for each in _experts(copied))
    length: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    texts = [each.generate(tokens[:, :5], **length) for each in (model, _load(folder, "eager"))]
    assert torch.equal(*texts)
    last = weakref.ref(_experts(model)[-1].moecomm.local)
    del model, logits, copied
    gc.collect()
    assert last() is None, "a deleted model's communicators stay"
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@on_ranks(1)
def test_adapters(rank: int, size: int, family: str, folders: Path, seed: int) -> None:
    """Adapters of experts, as peft computes them by weights that it makes."""
    peft = pytest.importorskip("peft")
    from moecomm.transformers.adapters import adapt_experts

    folder, tokens = saved_once(folders, family), batch_of(0, seed)
    config = peft.LoraConfig(
        r=3, target_modules=["o_proj"], target_parameters=EXPERTS, init_lora_weights=False
    )
    results = []
    for how in ("grouped_mm", "moecomm"):
        torch.manual_seed(seed % 2**32)
        model = peft.get_peft_model(_load(folder, how), config)
        if how == "grouped_mm":
            with pytest.raises(InvalidArgument, match="experts_implementation='moecomm'"):
                adapt_experts(model)
        else:
            adapt_experts(model)
        logits, loss = forward_backward(model, tokens)
        results.append({"logits": logits, "loss": loss, **gradients_of(model)})
    ratios = ratios_of(results[1], results[0])
    assert max(ratios.values()) < 2e-5, ratios
    for how in ("grouped_mm", "moecomm"):
        model.get_base_model().set_experts_implementation(how)
        torch.testing.assert_close(model(tokens).logits, results[0]["logits"], rtol=1e-4, atol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, results[0]["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adapters", [False, True])
@on_ranks(1)
def test_autocast(rank: int, size: int, adapters: bool, folders: Path, seed: int) -> None:
    """Experts' products are in autocast's dtype, their gradients in the weights'."""
    peft = pytest.importorskip("peft")
    from moecomm.transformers.adapters import adapt_experts

    # Each token has all experts: rounding might choose others.
    folder = saved_once(folders, "mixtral", num_experts_per_tok=8)
    model, tokens = _load(folder).train(), batch_of(0, seed)
    if adapters:
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], target_parameters=EXPERTS)
        model = adapt_experts(peft.get_peft_model(model, config))
    exact, _ = forward_backward(model, tokens)
    wanted = gradients_of(model)
    model.zero_grad()
    found_in: list[Any] = []
    for each in model.modules():
        if hasattr(each, "moecomm"):
            comms = each.moecomm._comms
            comms.of = mock.Mock(side_effect=comms.of)
            found_in.append(comms.of)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, labels=tokens)
    out.loss.backward()
    found = gradients_of(model)
    assert {of.call_args.args[0].dtype for of in found_in} == {torch.bfloat16}
    assert all(found[name].dtype is torch.float32 for name in wanted)
    far = {name: ratio for name, ratio in ratios_of(found, wanted).items() if ratio > 0.15}
    assert not far and (out.logits - exact).abs().max() < 0.05 * exact.abs().max(), far
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone
        model.double()(tokens)
    assert {of.call_args.args[0].dtype for of in found_in} == {torch.float64}


@on_ranks(1)
def test_two_threads(rank: int, size: int, folders: Path, seed: int) -> None:
    """One within autocast and one without may run the same experts at once."""
    experts = _experts(_load(saved_once(folders, "mixtral")))[0]
    torch.manual_seed(seed)
    given = torch.randn(5, 32), torch.tensor([[1, 7]] * 5), torch.rand(5, 2)
    wanted, found = experts(*given), list[torch.Tensor]()
    comms, of = experts.moecomm._comms, experts.moecomm._comms.of

    def within() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(experts(*given))

    def of_the_first(*arguments: Any) -> Any:
        comms.of = of
        other = threading.Thread(target=within)
        other.start()
        other.join()
        return of(*arguments)

    comms.of = of_the_first
    torch.testing.assert_close(experts(*given), wanted)
    assert 0 < (found[0] - wanted).abs().max() < 0.05 * wanted.abs().max()


@on_ranks(1)
def test_a_device_without_autocast(rank: int, size: int, folders: Path, seed: int) -> None:
    model = _load(saved_once(folders, "mixtral")).to("meta")
    with pytest.raises(Unsupported, match="device is meta"):
        model(batch_of(0, seed).to("meta"))
