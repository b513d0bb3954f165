"""Small random models of transformers, and what ranks do with them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multirank.harness import preload
from tests.multirank.moe_cases import unsharded

# Each set of ranks would import them for some ten seconds.
preload("moecomm.transformers", "transformers.trainer", "transformers.models.mixtral.modeling_mixtral")
preload("accelerate", "peft")

VOCABULARY = 96
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
"""The weights on which peft's target_parameters puts adapters."""

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 16, "num_experts": 8},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "deepseek_v3": {
        **DEEPSEEK,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": DEEPSEEK,
    "olmoe": {},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
    "dots1": DEEPSEEK,
    "granitemoe": {},
}
"""What each family's config has besides SIZES."""


def save_model(family: str, folder: Path, seed: int, **changes: Any) -> None:
    """Saves a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    fields = {**SIZES, **FAMILIES[family], **changes}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "expert" in name or name.endswith("bias"):
                parameter.normal_(std=0.3)  # so that a wrong expert is a wrong loss
    model.save_pretrained(folder)


def load_parallel(folder: Path, how: str, **parallel: Any) -> nn.Module:
    """Loads a model on all ranks, as programs under torchrun do."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import moecomm.transformers  # noqa: F401

    if "MASTER_PORT" not in os.environ:
        set_environment()
    options = {key: parallel.pop(key) for key in ("dtype", "experts_implementation") if key in parallel}
    config = DistributedConfig(**parallel, ep_implementation=how)
    options = {"dtype": torch.float32, **options}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, **options)
    return model


def load_over(size: int, folder: Path, how: str, dtype: torch.dtype = torch.float32) -> Any:
    """Loads a model whose experts are over all of `size` ranks, or on one by an experts_implementation."""
    if size > 1:
        return load_parallel(folder, how, fsdp_size=size, ep_size=size, dtype=dtype)
    from transformers import AutoModelForCausalLM

    import moecomm.transformers  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=how)


def train_by(
    kind: tuple[Any, Any],
    out: Path,
    given: dict[str, Any],
    resume: Path | None = None,
    use_cpu: bool = True,
    **options: Any,
) -> tuple[Any, list[float]]:
    """Trains by a Trainer. kind: its class and that of its arguments; given: what it takes besides these, a
    model and data at least; options: of the arguments. Returns the Trainer and the losses of its steps."""
    trainer, arguments_of = kind
    usual = {"report_to": [], "bf16": False, "disable_tqdm": True}
    usual |= {"per_device_train_batch_size": 2, "logging_steps": 1}
    made = trainer(args=arguments_of(str(out), use_cpu=use_cpu, **{**usual, **options}), **given)
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return made, [float(each["loss"]) for each in made.state.log_history if "loss" in each]


def set_environment() -> None:
    """Sets what torchrun does; transformers reads it."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate has each rank compute on all cores
    os.environ["MASTER_PORT"] = "0"  # which nobody opens: the default group is there


def batch_of(part: int, seed: int) -> Tensor:
    """The tokens of one part of the data: each part has another number."""
    generator = torch.Generator().manual_seed(1000 * seed + part)
    return torch.randint(3, VOCABULARY, (1 + part % 2, 9 + 2 * part), generator=generator)


def forward_backward(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits and loss."""
    out = model(tokens, labels=tokens)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach()


class Plain(NamedTuple):
    """The results of one process, for parts of a batch."""

    outputs: list[tuple[Tensor, Tensor]]
    """(logits, loss) of each part."""

    gradients: dict[str, Tensor]
    """The gradients of the mean of all losses."""

    exact: Callable[[], dict[str, Tensor]]
    """Computes the gradients in float64."""


def run_plain(
    folder: Path,
    parts: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    adapt: Callable[[Any], Any] = lambda model: model,
) -> Plain:
    """Runs a forward and backward of all parts in one process, of what `adapt` makes of the model."""
    from transformers import AutoModelForCausalLM

    def run(**options: Any) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
        model = adapt(AutoModelForCausalLM.from_pretrained(folder, **options).to(device)).train()
        found = []
        for part in range(parts):
            tokens = batch_of(part, seed).to(device)
            out = model(tokens, labels=tokens)
            (out.loss / parts).backward()
            found.append((out.logits.detach(), out.loss.detach()))
        return found, gradients_of(model)

    # torch's grouped products take no float64
    return Plain(*run(dtype=dtype), lambda: run(dtype=torch.float64, experts_implementation="eager")[1])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: unsharded(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def ratios_of(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each tensor, over its largest value. For the gradient of a bias it is
    over that of its module's weight, if that is larger: the terms of both have one size, and those of a
    router's bias may nearly cancel."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    most = {name: float(each.abs().max().clamp(min=1e-6)) for name, each in wanted.items()}
    for name in most:
        if name.endswith(".bias"):
            most[name] = max(most[name], most.get(name.removesuffix("bias") + "weight", 0.0))
    return {name: float((found[name] - each).abs().max()) / most[name] for name, each in wanted.items()}


def differences(model: nn.Module, tokens: Tensor, plain: Plain, part: int, most: float) -> list[str]:
    """Runs a forward and backward of a part; returns what differs by more than `most` of the largest value
    from the logits, loss and gradients of one process.

    A gradient whose terms nearly cancel, such as that of a norm, may differ by as much more as one process
    itself is off: four times what its rounding makes beside float64, up to 1e-3, or to `most`.
    """
    names = ("logits", "loss")
    outputs = dict(zip(names, forward_backward(model, tokens), strict=True))
    ratios = ratios_of(outputs, dict(zip(names, plain.outputs[part], strict=True)))
    ratios |= ratios_of(gradients_of(model), plain.gradients)
    far = {name: ratio for name, ratio in ratios.items() if not ratio <= most}
    if far.keys() - names:
        rounding = ratios_of(plain.gradients, plain.exact())
        far = {
            name: ratio
            for name, ratio in far.items()
            if not ratio <= most + min(4 * rounding.get(name, 0.0), max(1e-3, most))
        }
    return [f"{name}: {ratio:.1e}" for name, ratio in far.items()]


def saved_once(folders: Path, family: str, **changes: Any) -> Path:
    """The folder of a family's model, made by the first rank that asks."""
    folder = folders / "-".join([family, *map(str, changes.values())])
    if dist.get_rank() == 0 and not folder.exists():
        save_model(family, folder, seed=3, **changes)
    dist.barrier()
    return folder
