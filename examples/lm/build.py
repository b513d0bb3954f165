"""Builds a model with mixture-of-experts layers, its optimizer and its learning rate from options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

import moecomm
from lm.attention import AttentionConfig
from lm.errors import UsageError
from lm.model import FeedForward, ModelConfig, Transformer
from lm.optimizer import AdamW
from lm.options import Options
from lm.precision import EXPERTS
from lm.recompute import overlap_config
from moecomm.nn import ActivationPool, GraphedStep, MoEConfig, MoELayer, is_expert_parameter
from moecomm.parallel import ParallelFolding

FINAL_LR_SHARE = 0.1
HEADROOM = 1.25  # rows of a graph, and its pool, beyond what a balanced routing needs


def build_model(
    options: Options,
    vocab: int,
    comm: moecomm.Communicator,
    folding: ParallelFolding | None = None,
    holds: Callable[[str], bool] = lambda part: True,
) -> Transformer:
    """The same weights on every rank, device and folding, from torch's default generator; float32, or rounded
    to bfloat16 (`narrow`). A stage of a pipeline has some of them: `holds` as in Transformer.

    Weights start small in proportion to the square root of the width, and those that write into the
    residual stream smaller still, by the number of layers that do so. Routers start close to indifferent, and
    an output matrix of its own at zero. A tied one expects the token that was read to come next, by a logit
    of sqrt(dim): the first loss is far above that of guessing (10.5 for 257 tokens, where guessing has 5.5).
    The model learns faster from there than from any indifferent beginning that was tried
    (docs/performance.md).
    """
    std = options.dim**-0.5
    moe = dataclasses.replace(moe_config(options), dtype=comm.dtype)
    overlap = overlap_config(options)
    model = assemble(options, vocab, lambda: MoELayer(moe, comm, folding=folding, overlap=overlap), holds)
    model = model.float()  # those of experts: see precision

    def draw(weight: torch.Tensor) -> None:
        """Fills a weight; for one of another stage the numbers are drawn as well, so that the next weight
        gets its own."""
        weight = torch.empty(weight.shape) if weight.is_meta else weight
        torch.nn.init.normal_(weight, std=std)

    with torch.no_grad():
        draw(model.embedding.weight)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                draw(module.weight)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)
        if model.head.output is not None:
            model.head.output.weight.zero_()
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "w_out", "ffn.down.weight")):
                parameter.div_(math.sqrt(2 * options.layers))
            elif name.endswith("router.weight"):
                parameter.mul_(0.1)
    model.drop_meta()
    if options.weights == "bfloat16":
        narrow(model)
    return model


def narrow(model: Transformer) -> None:
    """Makes matrices and experts bfloat16. Norms, biases and sinks stay float32, and are few."""
    experts = {p for part in model.modules() if isinstance(part, EXPERTS) for p in part.parameters()}
    for parameter in model.parameters():
        if parameter.ndim >= 2 or parameter in experts:
            parameter.data = parameter.data.bfloat16()


def moe_config(options: Options) -> MoEConfig:
    """The layers with experts. Raises UsageError for what does not fit."""
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
            expert_precision=None if options.expert_precision == "dtype" else options.expert_precision,
            init_std=options.dim**-0.5,
        )
    except moecomm.InvalidArgument as error:
        raise UsageError(f"the layers with experts: {error}") from None


def make_communicator(
    options: Options, folding: ParallelFolding, max_tokens: int, device: torch.device
) -> moecomm.Communicator:
    """The communicator of all layers. Raises UsageError for rows that cannot travel as the options say."""

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
    return AttentionConfig(
        dim=options.dim,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim or options.dim // options.heads,
        kind=options.attention,
        rope_base=options.rope_base,
        rope_factor=options.rope_factor,
        rope_positions=options.rope_positions,
        rope_truncate=options.rope_truncate,
        rope_mscale=options.rope_mscale,
        norm_eps=options.norm_eps,
        qk_norm=options.qk_norm,
        qkv_bias=options.qkv_bias,
        out_bias=options.out_bias,
        window=options.window,
        sinks=options.sinks,
        q_rank=options.q_rank,
        kv_rank=options.kv_rank,
        rope_dim=options.rope_dim,
        value_dim=options.value_dim,
    )


def assemble(
    options: Options,
    vocab: int,
    make_moe: Callable[[], torch.nn.Module],
    holds: Callable[[str], bool] = lambda part: True,
) -> Transformer:
    """The model with torch's own first weights; `make_moe()` makes each of the layers with experts. holds: as
    in Transformer."""
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
    """Entries of the embedding and the output. Raises UsageError if the tokenizer has more."""
    if options.vocab and options.vocab < of_tokenizer:
        raise UsageError(f"--vocab {options.vocab} is less than the {of_tokenizer} of the tokenizer")
    return options.vocab or of_tokenizer


def build_graphed_step(
    forward_backward: Callable[[torch.Tensor], torch.Tensor],
    model: Transformer,
    options: Options,
    comm: moecomm.Communicator,
) -> GraphedStep:
    """Builds a step in a CUDA graph, whose saved activations go to a pool with room for a little more than
    balanced routing brings. Raises UsageError on the CPU."""
    if comm.device.type != "cuda":
        raise UsageError(f"--graph: a graph is of GPUs, and this run is on the {comm.device.type}")
    rows = (options.layers - options.dense_layers) * comm.max_tokens * options.top_k
    row_bytes = (options.dim + 2 * options.ffn) * comm.dtype.itemsize
    pool = ActivationPool(comm.device, math.ceil(HEADROOM * rows * row_bytes))
    return GraphedStep(forward_backward, model, pool=pool, headroom=HEADROOM)


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
    """Linear rise over the warm-up, then half a cosine down to a tenth; `step` counts from 1."""
    if step <= options.warmup:
        return options.lr * step / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (
        FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    )


def count_parameters(
    model: Transformer, options: Options, num_local_experts: int, etp: int = 1
) -> tuple[int, int]:
    """(all, those that one token meets), over all ranks of a pipeline stage. With experts in `etp` parts it
    is rank 0 that has the right numbers: the first part of an expert alone has the bias b_out, and has it
    whole."""
    dense = sum(p.numel() for p in model.parameters() if not is_expert_parameter(p))
    one_expert = sum(
        p.numel() * (1 if name.endswith("b_out") else etp)
        for name, p in model.named_parameters()
        if is_expert_parameter(p)
    )
    one_expert //= num_local_experts
    return dense + one_expert * options.experts, dense + one_expert * options.top_k
