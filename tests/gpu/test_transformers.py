"""Models of transformers in bfloat16, their experts' tokens by moecomm, beside one process and all-to-all."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu import harness

pytest.importorskip("transformers", minversion="5.23")

from tests.multirank import hf_models
from tests.multirank import test_transformers as on_cpu_ranks

ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
"""Behind a layer that is rounded, a router chooses other experts."""
BOUND = 0.04
"""The largest difference allowed, over the largest value of a tensor: products are rounded to bfloat16, and
summed in another order."""


def _with_nccl(rank: int, size: int) -> None:
    """Makes a default process group that FSDP can use on GPUs."""
    store = dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)


def _load(folder: Path, how: str, size: int, dtype: torch.dtype) -> torch.nn.Module:
    """Loads a model whose experts are over all ranks, or on one rank by an experts_implementation."""
    model = hf_models.load_over(size, folder, how, dtype)
    return model if size > 1 else model.to(harness.device())


def _families(rank: int, size: int, folder: Path, seed: int) -> list[str]:
    _with_nccl(rank, size)
    found, device = [], harness.device()
    for family in hf_models.FAMILIES:
        if rank == 0:
            types = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {}
            hf_models.save_model(family, folder / family, seed=3, **ONE_LAYER, **types)
        dist.barrier()
        plain = hf_models.run_plain(folder / family, size, seed, torch.bfloat16, device)
        tokens = hf_models.batch_of(rank, seed).to(device)
        for how in ("all_to_all" if size > 1 else "grouped_mm", "moecomm"):
            model = _load(folder / family, how, size, torch.bfloat16).train()
            differs = hf_models.differences(model, tokens, plain, rank, BOUND)
            found += [f"{family}, {how}, {each}" for each in differs]
            del model
    dist.barrier()
    return found


@pytest.mark.usefixtures("cuda_only")
def test_families(tmp_path: Path, seed: int) -> None:
    """Loss, logits and gradients of each family, on two ranks, or on one if there is only one GPU."""
    size = 2 if harness.gpus() >= 2 else 1
    harness.assert_none(harness.run_on_gpus(size, _families, tmp_path, seed, timeout=600.0))


def _trainers(rank: int, size: int, folder: Path, seed: int) -> list[str]:
    from transformers import set_seed

    _with_nccl(rank, size)
    if rank == 0:
        hf_models.save_model("qwen3_moe", folder / "model", seed=3)
    dist.barrier()
    # Not Adam, whose first steps take the sign of a gradient: rounding may turn one that is all but zero.
    options = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no"}
    found = []
    for library in (
        ("transformers", "trl") if find_spec("trl") and find_spec("datasets") else ("transformers",)
    ):
        losses = {}
        for how in ("all_to_all" if size > 1 else "grouped_mm", "moecomm"):
            set_seed(seed % 2**32)
            model = _load(folder / "model", how, size, torch.float32)
            kind, steps = on_cpu_ranks._trainer(library), {"gradient_accumulation_steps": 2, "max_steps": 3}
            _, losses[how] = on_cpu_ranks._train(
                kind, model, folder / "out", seed, {}, use_cpu=False, **options, **steps
            )
        one, other = (torch.tensor(each) for each in losses.values())
        if len(one) != 3 or not torch.allclose(one, other, rtol=1e-3):
            found.append(f"{library}: {losses}")
    return found


@pytest.mark.usefixtures("cuda_only")
def test_trainers(tmp_path: Path, seed: int) -> None:
    """The Trainer of transformers, and of TRL where it is installed, in float32: the losses of steps
    with accumulation are those with transformers' own all-to-all."""
    pytest.importorskip("accelerate")
    size = 2 if harness.gpus() >= 2 else 1
    harness.assert_none(harness.run_on_gpus(size, _trainers, tmp_path, seed, timeout=300.0))


def _graphed(rank: int, size: int, folder: Path, seed: int) -> list[str]:
    from transformers import Trainer, TrainingArguments, set_seed

    from moecomm.transformers import Graphed

    class GraphedTrainer(Graphed, Trainer): ...  # type: ignore[misc]

    _with_nccl(rank, size)
    wrong = []
    for family in hf_models.FAMILIES:
        if rank == 0:
            hf_models.save_model(family, folder / family, seed=3)
        dist.barrier()
        losses = []
        for kind in (Trainer, GraphedTrainer):
            set_seed(seed % 2**32)
            options = {"learning_rate": 0.1, "optim": "sgd", "save_strategy": "no", "max_steps": 6}
            model = _load(folder / family, "moecomm", size, torch.bfloat16)
            given = {"model": model, "train_dataset": on_cpu_ranks._data(seed)}
            arguments = (kind, TrainingArguments), folder / "out", given
            trainer, found = hf_models.train_by(*arguments, use_cpu=False, **options)
            losses.append(torch.tensor(found))
        if trainer.graphed_step is None or len(losses[1]) < 6 or not torch.allclose(*losses, rtol=BOUND):
            wrong.append(f"{family}: plain {losses[0]}, graphed {losses[1]}")
    return wrong


@pytest.mark.usefixtures("cuda_only")
def test_graphed_trainer(tmp_path: Path, seed: int) -> None:
    """A Trainer that replays a CUDA graph has the losses of the plain one, for each family. In bfloat16:
    torch's products of other dtypes read the groups' ends on the host."""
    pytest.importorskip("accelerate")
    size = 2 if harness.gpus() >= 2 else 1
    harness.assert_none(harness.run_on_gpus(size, _graphed, tmp_path, seed, timeout=300.0))
