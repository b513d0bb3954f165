"""Models of transformers whose experts get their tokens by moecomm, beside one process and transformers'
own."""

from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moecomm.errors import InvalidArgument
from tests.multirank.conftest import own_pool
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("transformers")

from tests.multirank.hf_models import (
    EXPERTS,
    FAMILIES,
    batch_of,
    differences,
    forward_backward,
    gradients_of,
    load_parallel,
    ratios_of,
    run_plain,
    saved_once,
    train_by,
)

pool = own_pool()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _check(model: torch.nn.Module, wanted: Any, part: int, seed: int) -> list[str]:
    """What differs from one process by more than 1e-5."""
    return differences(model, batch_of(part, seed), wanted, part, 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_families(rank: int, size: int, family: str, folders: Path, seed: int) -> list[str]:
    folder = saved_once(folders, family)
    wanted = run_plain(folder, size, seed)
    found = []
    for how in ("all_to_all", "moecomm"):
        model = load_parallel(folder, how, fsdp_size=2, ep_size=2).train()
        found += [f"{how}: {each}" for each in _check(model, wanted, rank, seed)]
    return found


MESHES = [
    {"fsdp_size": 4, "ep_size": 4},
    {"fsdp_size": 4, "ep_size": 2},  # two copies of each expert
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},  # the ranks of a batch
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    {"tp_size": 4, "ep_size": 4},
]


@pytest.mark.parametrize(
    ("family", "mesh"),
    [*(("qwen3_moe", mesh) for mesh in MESHES), ("gpt_oss", MESHES[1]), ("gpt_oss", MESHES[3])],
)
@on_ranks(4)
def test_meshes(
    rank: int, size: int, family: str, mesh: dict[str, int], folders: Path, seed: int
) -> list[str]:
    parts = mesh.get("fsdp_size", 1)
    folder = saved_once(folders, family, num_attention_heads=4, num_key_value_heads=4)
    model = load_parallel(folder, "moecomm", **mesh).train()
    return _check(model, run_plain(folder, parts, seed), rank // mesh.get("tp_size", 1), seed)


@pytest.mark.parametrize("how", ["batched_mm", "eager", "compiled"])
@on_ranks(2)
def test_forwards_of_transformers(rank: int, size: int, how: str, folders: Path, seed: int) -> list[str]:
    """Another forward of the experts runs on moecomm's rows; eager is moecomm's own products. A layer may be
    compiled."""
    folder = saved_once(folders, "qwen3_moe")
    options = {} if how == "compiled" else {"experts_implementation": how}
    model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2, **options).train()
    if how == "compiled":
        model.model.layers[1].compile(backend="aot_eager")
    return _check(model, run_plain(folder, size, seed), rank, seed)


@on_ranks(2)
def test_gradient_checkpointing(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """Both kinds, and with kept plans, along which no second dispatch is made."""
    import moecomm.transformers.recompute as recompute
    from moecomm.shared import SharedCommunicator

    folder = saved_once(folders, "qwen3_moe")
    wanted, found, made = run_plain(folder, size, seed), [], []
    plain = SharedCommunicator.run
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"use_reentrant": False}, 4),
        ({"use_reentrant": True}, 4),
        ({"use_reentrant": False, "context_fn": recompute.keep_plans}, 2),
    ]
    for kind, dispatches in kinds:
        model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2).train()
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedCommunicator, "run", lambda *given: made.append(1) or plain(*given))
            found += [f"{kind}: {each}" for each in _check(model, wanted, rank, seed)]
        assert len(made) == dispatches, f"{kind}: {len(made)} dispatches"
        made.clear()
    return found


@on_ranks(2)
def test_another_routing_in_a_recompute(rank: int, size: int, seed: int) -> None:
    """One rank whose router chooses otherwise the second time: all ranks are told."""
    from moecomm.nn.expert_pass import DispatchState
    from moecomm.shared import Shape, shared_communicator
    from moecomm.transformers.recompute import keep_dispatch, keep_plans, kept_dispatch

    shape = Shape(4, 16, 2, torch.float32, torch.device("cpu"))
    shared = shared_communicator(dist.group.WORLD, shape, 8)
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(8, 16, generator=generator)
    ids = torch.rand(8, 4, generator=generator).topk(2).indices
    first, again = keep_plans()
    assert kept_dispatch(ids) is None
    comm, out = shared.dispatch(x, ids, torch.rand(8, 2, generator=generator))
    with first:
        keep_dispatch(ids, comm, DispatchState(out.handle, out.weights, out.offsets))
    for _ in range(2):  # twice: a backward may run twice
        with again:
            kept = kept_dispatch(ids)
            assert kept is not None and kept.state.handle is out.handle and kept_dispatch(ids) is None

    def follow() -> None:
        kept = kept_dispatch(ids.flip(1) if rank else ids)
        assert kept is not None
        kept.comm.redispatch(x, kept.state.handle)

    with again, pytest.raises(InvalidArgument, match="chose other experts when its layer was computed again"):
        follow()


@pytest.mark.parametrize("how", ["eager", "batched_mm"])
@on_ranks(2)
def test_an_error_after_the_dispatch(rank: int, size: int, folders: Path, how: str, seed: int) -> None:
    """Experts that fail on one rank, as where a kernel's compiler has no space left: the other is told, and
    does not take it for a batch that is too large."""
    from moecomm.kernels.products import Products

    options = {"fsdp_size": 2, "ep_size": 2, "experts_implementation": how}
    model: Any = load_parallel(saved_once(folders, "qwen3_moe"), "moecomm", **options)
    experts, ids = model.model.layers[0].mlp.experts, torch.tensor([[0, 7], [4, 3]])
    batch = torch.ones(2, 32), ids, torch.ones(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            fails = Mock(side_effect=OSError("no space"))
            patch.setattr(Products, "grouped_mm", fails)
            patch.setattr(experts.moecomm.local, "_forward", fails)
        with pytest.raises((OSError, InvalidArgument), match="no space"):
            experts(*batch)
    assert experts(*batch).any()


@on_ranks(2)
def test_batches_of_all_sizes(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """Larger batches come to one rank, or to both, while graphs of smaller ones wait for their backward; then
    text is generated, a token a step."""
    from transformers import AutoModelForCausalLM

    folder = saved_once(folders, "qwen3_moe")
    model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2).train()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    problems, losses = [], []
    for step, lengths in enumerate([(3, 2), (40, 2), (2, 3), (60, 60), (2, 60)]):
        batches = [batch_of(0, seed + step).repeat(1, 8)[:, :length] for length in lengths]
        wanted = plain(batches[rank]).logits
        logits = model(batches[rank]).logits
        assert torch.allclose(logits, wanted, rtol=1e-5, atol=1e-5), lengths
        losses.append(logits.square().mean())
    model.set_requires_gradient_sync(False)
    torch.stack(losses).sum().backward()
    with torch.no_grad():
        prompt = batch_of(0, seed)
        text, expected = (
            each.eval().generate(prompt, max_new_tokens=6, do_sample=False) for each in (model, plain)
        )
    return problems if torch.equal(text, expected) else [*problems, f"{text} for {expected}"]


@on_ranks(2)
def test_models_come_and_go(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """Two models share a communicator; one that is deleted on one rank earlier than on the other is no
    harm."""
    import gc

    import moecomm.shared as shared

    folder = saved_once(folders, "qwen3_moe")
    wanted = run_plain(folder, size, seed)
    problems, parallel = [], {"fsdp_size": 2, "ep_size": 2}
    gc.collect()
    gc.disable()
    try:
        for turn in range(3):
            models = [load_parallel(folder, "moecomm", **parallel).train() for _ in range(2)]
            problems += [text for model in models for text in _check(model, wanted, rank, seed)]
            alive = [each for group in shared._groups.values() for each in group.alive.values()]
            assert len({each.serial for each in alive}) == 1, f"turn {turn}: {len(alive)} communicators"
            del models
            if rank == turn % 2:
                gc.collect()
    finally:
        gc.enable()
    return problems


@on_ranks(2)
def test_mixed_precision(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """Weights in bfloat16 while they compute, beside transformers' own: one layer, as a router behind a
    rounded one chooses other experts."""
    folder = saved_once(folders, "qwen3_moe", num_hidden_layers=1)
    logits, gradients = {}, {}
    for how in ("all_to_all", "moecomm"):
        model = load_parallel(folder, how, fsdp_size=2, ep_size=2, fsdp_mixed_precision=True).train()
        logits[how], _ = forward_backward(model, batch_of(rank, seed))
        gradients[how] = gradients_of(model)
    ratios = ratios_of(
        {"logits": logits["moecomm"], **gradients["moecomm"]},
        {"logits": logits["all_to_all"], **gradients["all_to_all"]},
    )
    # A gradient whose terms nearly cancel, such as a norm's, may differ by what rounding makes of it.
    rounding = ratios_of(gradients["all_to_all"], run_plain(folder, size, seed).gradients)
    most = {name: min(max(0.03, 2 * rounding.get(name, 0.0)), 0.06) for name in ratios}
    return [f"{name}: {ratio}" for name, ratio in ratios.items() if not ratio <= most[name]]


@on_ranks(4)
def test_experts_without_copies_are_left_out_of_fsdp(rank: int, size: int, folders: Path, seed: int) -> None:
    """FSDP2 would only copy them; it still casts weights, and reduces gradients of experts with copies."""
    folder = saved_once(folders, "qwen3_moe", num_attention_heads=4, num_key_value_heads=4)
    for left_out, parallel in (
        (True, {"ep_size": 4}),
        (False, {"ep_size": 4, "fsdp_mixed_precision": True}),
        (False, {"ep_size": 2}),
    ):
        model = load_parallel(folder, "moecomm", fsdp_size=4, **parallel)
        weights = {name: each for name, each in model.named_parameters() if "experts." in name}
        names = {each.device_mesh.mesh_dim_names for each in weights.values()}
        assert weights and (names == {("ep",)}) is left_out, f"{parallel}: the experts are on {names}"


@on_ranks(2)
def test_accumulated_gradients(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """Two microbatches, the first without FSDP2's reduction: gradients add up to the mean over both ranks."""
    folder = saved_once(folders, "qwen3_moe")
    wanted = run_plain(folder, 2 * size, seed).gradients
    model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2).train()
    for number in range(2):
        model.set_requires_gradient_sync(number == 1)
        tokens = batch_of(number * size + rank, seed)
        (model(tokens, labels=tokens).loss / 2).backward()
    ratios = ratios_of(gradients_of(model), wanted)
    return [f"{name}: {ratio}" for name, ratio in ratios.items() if not ratio <= 1e-4]


@on_ranks(2)
def test_saved_models(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """What ranks save one process loads, and ranks of another mesh: after a step."""
    from transformers import AutoModelForCausalLM

    folder, saved = saved_once(folders, "gpt_oss"), folders / f"saved-{seed}"
    model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2).train()
    forward_backward(model, batch_of(rank, seed))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(saved)
    dist.barrier()
    tokens = batch_of(0, seed)
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        one = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()(tokens).logits
        other = load_parallel(saved, "moecomm", tp_size=2, ep_size=2).eval()(tokens).logits
    found = {"one process": one, "another mesh": other}
    return [name for name, each in found.items() if not torch.allclose(each, expected, rtol=1e-5, atol=1e-5)]


@on_ranks(2)
def test_ids_of_none(rank: int, size: int, folders: Path, seed: int) -> None:
    """Ids past the last expert and below 0 take a token to no expert; one rank has no token at all."""
    folder = saved_once(folders, "qwen3_moe")
    model: Any = load_parallel(folder, "moecomm", fsdp_size=2, ep_size=2)
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(seed + rank)
    tokens = 4 * rank
    x = torch.randn(tokens, 32, requires_grad=True)
    ids = torch.tensor([[0, 8], [7, -1], [3, 5], [9, -1]])[:tokens]
    weights = torch.rand(tokens, 2, requires_grad=True)
    y = experts(x, ids, weights)
    y.sum().backward()
    assert not torch.any(y[3:]) and not torch.any(x.grad[3:]), "a token of no expert has a result"
    kept = (ids >= 0) & (ids < 8)
    assert torch.equal(weights.grad != 0, kept) and torch.all(y[:3].abs().sum(1) > 0)


@on_ranks(2)
def test_results_may_be_changed_in_place(rank: int, size: int, folders: Path, seed: int) -> None:
    """Also large ones, which are in memory of the pool."""
    model: Any = load_parallel(saved_once(folders, "qwen3_moe"), "moecomm", fsdp_size=2, ep_size=2)
    x = torch.ones(8192, 32, requires_grad=True)
    y = model.model.layers[0].mlp.experts(x, torch.tensor([[0, 7]]).repeat(8192, 1), torch.ones(8192, 2))
    y += x
    y.sum().backward()
    assert x.grad is not None and x.grad.any()


def _data(seed: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(3, 96, (32, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(library: str) -> tuple[Any, Any]:
    """The Trainer of a library and its class of arguments; data and tokenizer go with that of TRL."""
    import transformers

    if library == "transformers":
        return transformers.Trainer, transformers.TrainingArguments
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(each): each for each in range(96)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")

    class SFTTrainer(trl.SFTTrainer):
        def __init__(self, model: Any, args: Any, train_dataset: Any, **options: Any) -> None:
            rows = Dataset.from_dict({"input_ids": [each["input_ids"].tolist() for each in train_dataset]})
            super().__init__(model, args, train_dataset=rows, processing_class=tokenizer, **options)

    return SFTTrainer, trl.SFTConfig


def _train(
    kind: tuple[Any, Any],
    model: Any,
    out: Path,
    seed: int,
    adapters: dict[str, Any],
    resume: Path | None = None,
    callbacks: Any = None,
    **options: Any,
) -> tuple[Any, list[float]]:
    """Trains a model, or the adapters that are named; returns it, and the losses. Options: of `train_by`."""
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **adapters))
        if "target_parameters" in adapters:
            from moecomm.transformers.adapters import adapt_experts

            adapt_experts(model)
    given = {"model": model, "train_dataset": _data(seed), "callbacks": callbacks}
    return model, train_by(kind, out, given, resume, **options)[1]


ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
ALL: dict[str, Any] = {**ATTENTION, "target_parameters": ["gate.weight", *EXPERTS]}


TRL = pytest.param(
    "trl", {}, id="trl", marks=pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
)


@pytest.mark.parametrize(
    ("library", "adapters"),
    [
        pytest.param("transformers", {}, id="full"),
        pytest.param("transformers", ATTENTION, id="attention"),
        pytest.param("transformers", ALL, id="all"),
        TRL,
    ],
)
@on_ranks(2)
def test_trainer(
    rank: int, size: int, library: str, adapters: dict[str, Any], folders: Path, seed: int
) -> None:
    """The Trainer of transformers, and TRL's: the same losses as with transformers' own, trained weights that
    are the same on all ranks, and a checkpoint that one process loads. With adapters of peft as well; those
    of experts are moecomm's alone."""
    from transformers import AutoModelForCausalLM, set_seed

    pytest.importorskip("accelerate")
    folder, out = saved_once(folders, "qwen3_moe"), folders / f"trained-{seed}"
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
    # Not Adam, whose first steps take the sign of a gradient: rounding may turn one that is all but zero.
    options |= {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0}
    options |= {"save_steps": 3, "save_only_model": True}
    losses, model = {}, torch.nn.Module()
    for how in ("moecomm",) if "target_parameters" in adapters else ("all_to_all", "moecomm"):
        set_seed(seed % 2**32)
        model = load_parallel(folder, how, fsdp_size=2, ep_size=2)
        model, losses[how] = _train(_trainer(library), model, out, seed, adapters, **options)
    dist.barrier()
    tokens = batch_of(0, seed)
    with torch.no_grad():
        one: Any = AutoModelForCausalLM.from_pretrained(
            folder if adapters else out / "checkpoint-3", dtype=torch.float32
        )
        if adapters:
            one = pytest.importorskip("peft").PeftModel.from_pretrained(one, out / "checkpoint-3")
            one = one.merge_and_unload()
        assert torch.allclose(one.eval()(tokens).logits, model.eval()(tokens).logits, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            both = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(both, parameter.detach())
            assert torch.equal(*both), f"{name} differs between ranks"
    one, other = torch.tensor(losses["moecomm"]), torch.tensor(losses.get("all_to_all", losses["moecomm"]))
    assert torch.allclose(one, other, rtol=1e-4) and len(one) == 3, losses


@pytest.mark.parametrize(
    ("library", "adapters"),
    [pytest.param("transformers", {}, id="full"), pytest.param("transformers", ALL, id="all"), TRL],
)
@on_ranks(2)
def test_resumed_trainer(
    rank: int, size: int, library: str, adapters: dict[str, Any], folders: Path, seed: int
) -> None:
    """Two steps, and two more from their checkpoint on another mesh, or with a model that is whole on each
    rank, lose what four steps do. What cannot be resumed is refused."""
    from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

    from moecomm.transformers import Resumable

    trainer, arguments = _trainer(library)

    class ResumableTrainer(Resumable, trainer): ...  # type: ignore[misc,valid-type]

    class StopAfter2(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    pytest.importorskip("accelerate")
    folder, out = saved_once(folders, "qwen3_moe"), folders / f"resumed-{seed}"
    # The optimizer has a state; the epsilon keeps rounding from turning a step.
    every: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-2}
    every |= {"max_steps": 4, "lr_scheduler_type": "linear"}

    def run(name: str, source: Path, resume: Path | None = None, ep: int = 2, **options: Any) -> list[float]:
        set_seed(seed % 2**32)
        if ep:
            model = load_parallel(source, "moecomm", fsdp_size=2, ep_size=ep)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        kind = ResumableTrainer, arguments
        return _train(kind, model, out / name, seed, adapters, resume, **every, **options)[1]

    straight = run("straight", folder, save_strategy="no")
    run("first", folder, save_steps=2, callbacks=[StopAfter2()])
    dist.barrier()
    checkpoint = out / "first" / "checkpoint-2"
    source = folder if adapters else checkpoint
    for name, ep in [("same", 2)] if adapters else [("same", 2), ("other", 1), ("whole", 0)]:
        resumed = run(name, source, checkpoint, ep, save_strategy="no")
        assert resumed == pytest.approx(straight, rel=1e-4), name
    assert len(set(straight)) == 4, f"the steps say nothing: {straight}"
    if not adapters:
        run("no_state", folder, save_steps=4, save_only_model=True)
        dist.barrier()
        for wrong, of in (("loaded from", checkpoint), ("no optimizer", out / "no_state" / "checkpoint-4")):
            with pytest.raises(InvalidArgument, match=wrong):
                run("wrong", folder, of, save_strategy="no")
        with pytest.raises(InvalidArgument, match="load_best_model_at_end is True"):
            run("wrong", folder, save_strategy="no", load_best_model_at_end=True)
        if not torch.cuda.is_available():
            with pytest.raises(InvalidArgument, match=r"1 of 2 ranks, .* use_cpu=True"):
                run("wrong", folder, use_cpu=False, save_strategy="no")


@on_ranks(2)
def test_accelerate(rank: int, size: int, folders: Path, seed: int) -> list[str]:
    """accelerate without a Trainer: clipped steps as in one process, the last of them from a checkpoint on
    another mesh."""
    accelerate = pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM
    from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

    folder, saved = saved_once(folders, "qwen3_moe"), folders / f"accelerate-{seed}"

    def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    momentum, wanted = optimizer_of(plain), []
    for batch in islice(torch.utils.data.DataLoader(_data(seed), 4), 4):
        plain(**batch).loss.backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        momentum.step()
        momentum.zero_grad()

    norms: list[float] = []
    for source, ep, begin, end in ((folder, 2, 0, 2), (saved, 1, 2, 4)):
        model: Any = load_parallel(source, "moecomm", fsdp_size=2, ep_size=ep).train()
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, data = accelerator.prepare(
            optimizer_of(model), torch.utils.data.DataLoader(_data(seed), 2)
        )
        if begin:
            load_optimizer_distributed(model, optimizer.optimizer, f"{saved}/optimizer")
        for batch in islice(data, begin, end):
            accelerator.backward(model(**batch).loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(saved)
        save_optimizer_distributed(model, optimizer.optimizer, f"{saved}/optimizer")
        dist.barrier()
    trained = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    ratios = ratios_of(dict(trained.named_parameters()), dict(plain.named_parameters()))
    ratios["norms"] = float((torch.tensor(norms) / torch.tensor(wanted) - 1).abs().max())
    return [f"{name}: {ratio}" for name, ratio in ratios.items() if not ratio <= 1e-4]
