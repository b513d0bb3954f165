"""The memory that a run needs on each rank, checked before anything is loaded, and what would fit instead."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm.errors import UsageError

GiB = 1 << 30
ROOM = 0.92  # usable part of a device's memory: the rest is for libraries, windows and fragmentation


@dataclass(frozen=True, kw_only=True)
class Model:
    """kind: the model type of transformers. Numbers of parameters (in all, of the widest layer, of experts'
    adapters with one column), and sizes of activations; expert_width: values that one expert computes for a
    token, between its rows."""

    kind: str
    tells_logits: bool  # of its routers
    parameters: int
    layer_parameters: int
    adapter_parameters: int
    layers: int
    hidden: int
    expert_width: int
    vocabulary: int
    experts: int
    top_k: int
    positions: int  # that the model was made for; 0: its config does not say

    @classmethod
    def of(cls, folder: str) -> Model:
        """Reads the folder's config alone. Raises UsageError unless it is a causal language model whose
        experts transformers can spread over ranks."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(folder)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"MODEL_FOLDER {folder}: {str(error).splitlines()[0]}") from None
        text: Any = config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        experts = _first(text, names, 0)
        if not experts or not getattr(text, "base_model_ep_plan", None):
            raise UsageError(
                f"MODEL_FOLDER {folder}: {type(model).__name__} has no experts that transformers can spread "
                "over ranks (its config has no base_model_ep_plan)"
            )
        blocks = [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]
        widest = max(sum(each[0].numel() for each in _experts_of(block)) for block in blocks)
        return cls(
            kind=text.model_type,
            tells_logits="output_router_logits" in inspect.signature(model.forward).parameters,
            parameters=sum(each.numel() for each in model.parameters()),
            layer_parameters=max(sum(each.numel() for each in block.parameters()) for block in blocks),
            adapter_parameters=sum(len(each) * sum(each.shape[1:]) for each in _experts_of(model)),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            expert_width=widest // text.hidden_size,
            vocabulary=text.vocab_size,
            experts=experts,
            top_k=_first(text, ("num_experts_per_tok", "moe_k"), 1),
            positions=_first(text, ("max_position_embeddings",), 0),
        )

    def note(self, seq: int) -> str:
        """Returns a line about windows longer than the model was made for, else an empty string."""
        if not 0 < self.positions < seq:
            return ""
        return f"note: --seq {seq} is more than the {self.positions} positions that the model was made for"


def _experts_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [each for name, each in module.named_parameters() if "experts." in name and each.dim() == 3]


def available_memory() -> int:
    """Returns the bytes of this host that programs may take. They include those of cached files, such as a
    model that was just downloaded."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _first(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    """Returns the number that a config has under one of these names; model families use different names."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), otherwise)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layout of a run, as far as it determines what a rank has to hold."""

    ranks: int
    tokens: int  # of a rank per pass
    lora: bool
    recompute: bool
    expert_columns: int = 0  # of the experts' adapters
    gpu: bool

    def bytes_of(self, model: Model) -> dict[str, int]:
        """Returns the bytes of each part on a rank."""
        width = 2 if self.gpu else 4  # bytes per number in computation
        weight = width if self.lora else 4
        state = 0 if self.lora else 12  # float32 gradient, and AdamW's two moments
        share = model.parameters // self.ranks
        chosen = model.top_k * (2 * model.hidden + model.expert_width)  # values of a token in its experts
        kept = 2 * model.hidden if self.recompute else 24 * model.hidden + chosen
        once = 24 * model.hidden + 2 * chosen  # in the layer that is being computed
        return {
            "weights": share * weight,
            "gradients and optimizer": share * state,
            "experts' adapters": model.adapter_parameters * self.expert_columns * 4 * weight,
            "the layer at work": model.layer_parameters * width,
            "activations": self.tokens * (model.layers * kept + once) * width,
            "logits": self.tokens * model.vocabulary * (8 + 2 * width),  # and in float32, with gradients
        }

    def total(self, model: Model) -> int:
        return sum(self.bytes_of(model).values())

    def fits(self, model: Model, room: int) -> bool:
        return self.total(model) <= room * ROOM


def check_fits(model: Model, plan: Plan, room: int, held: str) -> str:
    """Returns a line about the run's needs. Raises UsageError, which says what would fit, if they exceed
    `room` bytes on a rank; `held`: the kind of memory."""
    needs = plan.bytes_of(model)
    parts = ", ".join(f"{name} {size / GiB:.1f}" for name, size in needs.items())
    how = " with --recompute" if plan.recompute else ""
    said = f"{plan.total(model) / GiB:.1f} GiB a rank{how} ({parts}) of {room * ROOM / GiB:.1f} GiB, {held}"
    if plan.fits(model, room):
        return said
    others: list[str] = []
    for words, other in (
        ("--recompute", dataclasses.replace(plan, recompute=True)),
        ("--seq or --batch of half the size", dataclasses.replace(plan, tokens=plan.tokens // 2)),
        ("--lora", dataclasses.replace(plan, lora=True)),
        ("--lora --recompute", dataclasses.replace(plan, lora=True, recompute=True)),
    ):
        if other != plan and other.fits(model, room) and not any(each in words for each in others):
            others.append(words)
    for ranks in (2 * plan.ranks, 4 * plan.ranks, 8 * plan.ranks):
        if dataclasses.replace(plan, ranks=ranks).fits(model, room):
            others.append(f"{ranks} of these devices")
            break
    what = ", or ".join(others) if others else "nothing of --lora, --recompute or eight times the devices"
    raise UsageError(f"this run does not fit: it needs {said}. What fits: {what}")


def experts_ranks(model: Model, ranks: int, asked: int | None) -> int:
    """Returns the number of ranks that share the experts: the largest that divides both. Raises UsageError if
    `asked` does not."""
    possible = [each for each in range(1, ranks + 1) if ranks % each == 0 and model.experts % each == 0]
    if asked is None:
        return possible[-1]
    if asked not in possible:
        raise UsageError(
            f"--ep {asked} must divide {ranks} ranks and {model.experts} experts: one of "
            f"{', '.join(map(str, possible))}"
        )
    return asked
