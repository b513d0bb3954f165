"""Builds a model with mixture-of-experts layers, its optimizer and its learning rate from the options."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import moecomm
from lm.attention import AttentionConfig
from lm.errors import UsageError
from lm.model import FeedForward, ModelConfig, Transformer
from lm.optimizer import AdamW
from lm.options import Options
from lm.precision import EXPERTS
from lm.recompute import overlap_config
from moecomm.nn import GraphedStep, MoEConfig, MoELayer, is_expert_parameter
from moecomm.parallel import ParallelFolding

FINAL_LR_SHARE = 0.1
HEADROOM = 1.25  # rows of a graph, relative to balanced routing
DRAWN = 1 << 22  # numbers of a weight that a thread draws at a time


def build_model(
    options: Options,
    vocab: int,
    comm: moecomm.Communicator,
    folding: ParallelFolding | None = None,
    holds: Callable[[str], bool] = lambda part: True,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Builds the model on a device. Its weights are drawn from torch's default generator and are the same on
    every rank, device and folding; float32, or rounded to bfloat16 (`narrow`). A pipeline stage has some of
    them: `holds` as in Transformer.

    Weights shrink with the square root of the width, and those that write to the residual stream further,
    with the number of layers that do so. So the logits of routers, and of a separate output matrix, start
    with a standard deviation of one. With smaller logits the first steps give all tokens nearly the same
    hidden state, which no router can spread over experts (docs/history.md). A tied output matrix first
    predicts the token just read, with a logit of sqrt(dim): the first loss is far above that of guessing
    (10.5 for 257 tokens, where guessing has 5.5). The small preset learned faster from there than from any
    neutral start that was tried.
    """
    std = options.dim**-0.5
    moe = dataclasses.replace(moe_config(options), dtype=comm.dtype)
    overlap = overlap_config(options)
    with _LeaveEmpty():
        model = assemble(options, vocab, lambda: MoELayer(moe, comm, folding=folding, overlap=overlap), holds)
    model = model.float()  # experts' parameters follow `precision`
    seed = int(torch.randint(2**62, ()))
    with torch.no_grad():
        draw_normal(model.embedding.weight, std, f"{seed}:embedding")
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                draw_normal(module.weight, std, f"{seed}:{name}")
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
        model.drop_meta()
        model = model.to(device)
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "w_out", "ffn.down.weight")):
                parameter.div_(math.sqrt(2 * options.layers))
    if options.weights == "bfloat16":
        narrow(model)
    return model


class _LeaveEmpty(TorchFunctionMode):
    """Leaves the matrices of torch's Linear and Embedding uninitialised, since `build_model` fills them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        drawn = func in (torch.nn.init.kaiming_uniform_, torch.nn.init.normal_)
        if drawn and isinstance(kwargs["tensor"], torch.nn.Parameter):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def draw_normal(weight: torch.Tensor, std: float, key: str) -> None:
    """Fills a weight on the CPU with normal numbers that depend on its key alone, using all cores: one core
    would take a minute for the dense matrices of a large model. A weight on the meta device is left alone."""
    if weight.is_meta:
        return
    flat = weight.detach().view(-1)

    def draw(start: int) -> None:
        name = hashlib.blake2b(f"{key}:{start}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(name, "little"))
        flat[start : start + DRAWN].normal_(std=std, generator=generator)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(draw, range(0, flat.numel(), DRAWN)))


def narrow(model: Transformer) -> None:
    """Converts matrices and experts to bfloat16. Norms, biases and sinks, which are few, stay float32."""
    experts = {p for part in model.modules() if isinstance(part, EXPERTS) for p in part.parameters()}
    for parameter in model.parameters():
        if parameter.ndim >= 2 or parameter in experts:
            parameter.data = parameter.data.bfloat16()


def moe_config(options: Options) -> MoEConfig:
    """Returns the config of the layers with experts. Raises UsageError for options that do not fit."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    try:
        return MoEConfig(
            hidden=options.dim,
            ffn_hidden=options.ffn,
            num_experts=options.experts,
            top_k=options.top_k,
            activation=options.activation,
            bias=options.expert_bias,
            num_shared_experts=options.shared_experts,
            shared_gate=options.shared_gate,
            router_bias=options.router_bias,
            score_function=options.score_function,
            pre_softmax=options.pre_softmax,
            normalize_topk=options.normalize_topk and options.top_k > 1,
            scaling_factor=options.scaling_factor,
            num_groups=options.num_groups or None,
            topk_groups=options.topk_groups or None,
            bias_update_rate=options.bias_rate,
            aux_loss=options.aux_loss if options.aux_coef else "none",
            aux_loss_coef=options.aux_coef,
            dtype=dtype,
            init_std=options.dim**-0.5,
        )
    except moecomm.InvalidArgument as error:
        raise UsageError(f"the layers with experts: {error}") from None


def make_communicator(
    options: Options, folding: ParallelFolding, max_tokens: int, device: torch.device
) -> moecomm.Communicator:
    """Returns all layers' communicator. Raises UsageError for rows that cannot travel as the options say."""

    def wire(chosen: str) -> str | None:
        return None if chosen == "dtype" else chosen

    try:
        return MoELayer.make_communicator(
            moe_config(options),
            folding,
            max_tokens=max_tokens,
            device=device,
            wire=wire(options.wire),
            combine_wire=wire(options.combine_wire),
            gradient_wire=wire(options.gradient_wire),
        )
    except (moecomm.InvalidArgument, moecomm.Unsupported) as error:
        if "wire" not in str(error):
            raise
        names = ("wire", "combine_wire", "gradient_wire")
        given = [(name.replace("_", "-"), getattr(options, name)) for name in names]
        flags = " ".join(f"--{flag} {chosen}" for flag, chosen in given if chosen != "dtype")
        raise UsageError(f"{flags}: {error}") from None


def attention_config(options: Options) -> AttentionConfig:
    """Returns the config of the attention; options have most of its fields under the same names."""
    same = (field.name for field in dataclasses.fields(AttentionConfig) if hasattr(options, field.name))
    given = {name: getattr(options, name) for name in same}
    given["kind"] = options.attention
    given["kv_heads"] = options.kv_heads or options.heads
    given["head_dim"] = options.head_dim or options.dim // options.heads
    return AttentionConfig(**given)


def assemble(
    options: Options,
    vocab: int,
    make_moe: Callable[[], torch.nn.Module],
    holds: Callable[[str], bool] = lambda part: True,
) -> Transformer:
    """Returns the model with torch's own initial weights; `make_moe()` makes each layer with experts. holds:
    as in Transformer."""
    config = ModelConfig(
        vocab=vocab,
        dim=options.dim,
        layers=options.layers,
        max_seq=options.seq,
        attention=attention_config(options),
        tied=options.tied,
        norm_eps=options.norm_eps,
    )

    def make_ffn(layer: int) -> torch.nn.Module:
        return FeedForward(options.dim, options.dense_ffn) if layer < options.dense_layers else make_moe()

    return Transformer(config, make_ffn, holds)


def model_vocab(options: Options, of_tokenizer: int) -> int:
    """Returns the entries of the embedding and the output. Raises UsageError if the tokenizer has more."""
    if options.vocab and options.vocab < of_tokenizer:
        raise UsageError(f"--vocab {options.vocab} is less than the {of_tokenizer} of the tokenizer")
    return options.vocab or of_tokenizer


def build_graphed_step(
    forward_backward: Callable[..., Any],
    model: Transformer,
    comm: moecomm.Communicator,
) -> GraphedStep:
    """Builds a step in a CUDA graph with room for slightly more rows than balanced routing brings, and for
    those of any routing that there was. Raises UsageError on the CPU."""
    if comm.device.type != "cuda":
        raise UsageError(f"--graph: a graph is of GPUs, and this run is on the {comm.device.type}")
    return GraphedStep(forward_backward, model, headroom=HEADROOM, grows=True)


def fits_graph(device: torch.device, before: int) -> bool:
    """Returns whether this GPU's memory has room for a graph of the step. It keeps tensors of its own, where
    it has grown at most twice as many as a step without one, and some steps still run without. Called between
    steps. before: bytes that were allocated before the first step."""
    free, total = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 3 * (torch.cuda.max_memory_allocated(device) - before) < room - 0.05 * total


def build_optimizer(model: Transformer, options: Options) -> AdamW:
    def is_matrix(name: str, parameter: torch.Tensor) -> bool:
        return parameter.ndim >= 2 and not name.endswith((".b_in", ".b_out"))  # the experts' biases, (L, ...)

    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.lr, betas=(0.9, 0.95), moments=getattr(torch, options.moments))


def learning_rate(step: int, options: Options) -> float:
    """A linear rise over the warm-up, then half a cosine down to a tenth; `step` counts from 1."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (
        FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    )


def count_parameters(
    model: Transformer, options: Options, num_local_experts: int, etp: int = 1
) -> tuple[int, int]:
    """Returns (all parameters, those that one token uses), over all ranks of a pipeline stage. With experts
    in `etp` parts only rank 0 has the right numbers: the bias b_out belongs to an expert's first part
    alone."""
    dense = sum(p.numel() for p in model.parameters() if not is_expert_parameter(p))
    one_expert = sum(
        p.numel() * (1 if name.endswith("b_out") else etp)
        for name, p in model.named_parameters()
        if is_expert_parameter(p)
    )
    one_expert //= num_local_experts
    return dense + one_expert * options.experts, dense + one_expert * options.top_k
