"""Train a small GPT with mixture-of-experts layers by Megatron-Core's own modules, tokens carried by moecomm.

    python examples/train_megatron.py                          # a rank on each GPU, else two on the CPU
    python examples/train_megatron.py notes.txt --steps 200    # other text than Python's help on its topics
    python examples/train_megatron.py --dispatcher alltoall    # Megatron-Core's own, to compare
    torchrun --nproc-per-node 8 examples/train_megatron.py --dtype bfloat16 --overlap

Model, layers, data parallel wrapper, optimizer and schedule are Megatron-Core's (pip install megatron-core);
moecomm only needs the call of `use_moecomm` in `build`. Megatron-Core does not support the CPU:
`megatron_cpu.py` stands in for the GPU there. The last line is the result.

Shape letters: B windows of a microbatch, S positions.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pydoc_data.topics
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm import ranks
from lm.errors import UsageError, exit_code
from lm.flags import Parser, above_zero, amount, count
from torch import Tensor

VOCABULARY, SEQUENCE, EXPERTS = 256, 64, 8
MICROBATCHES, WINDOWS = 2, 8  # per step; per microbatch on each rank


def parse() -> argparse.Namespace:
    parser = Parser(
        description="Train a small GPT with experts by Megatron-Core, on all GPUs or on two CPU ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("text", nargs="*", type=Path, help="files to train on (default: Python's help on its topics)")
    add("--dispatcher", choices=("moecomm", "alltoall", "allgather"), default="moecomm")
    add("--steps", type=count, default=40)
    add("--lr", type=amount, default=3e-3)
    add("--hidden", type=count, default=64, help="model width, a multiple of 8")
    add("--layers", type=count, default=2)
    add(
        "--capacity",
        type=above_zero,
        metavar="FACTOR",
        help="tokens of an expert, as a part of an even share",
    )
    add("--recompute", choices=("none", "moe", "full"), default="none", help="layers computed twice")
    add("--overlap", action="store_true", help="the forward of a microbatch beside another's backward")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--ranks", type=count, help="processes (default: one a GPU; two on the CPU)")
    options = parser.parse_args()
    if options.hidden % 8:
        raise UsageError(f"--hidden {options.hidden}: must be a multiple of 8")  # four heads of even width
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UsageError("not installed: megatron-core; pip install megatron-core")
    return options


def start() -> int:
    """Starts the ranks, or runs this one; returns the exit code."""
    options = parse()
    if "LOCAL_RANK" not in os.environ:
        read(options.text)
        return ranks.launch(sys.argv, options.ranks or ranks.default_ranks(options.device))
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="megatron")  # about missing packages and its own defaults
    with ranks.process_group(options.device) as device, contextlib.ExitStack() as stack:
        import megatron_cpu

        megatron_cpu.without_transformer_engine()
        if device.type == "cpu":
            stack.enter_context(megatron_cpu.without_gpu())
        train(options, device)
    return 0


def read(files: list[Path]) -> Tensor:
    """Returns the bytes of the text."""
    try:
        data = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    data = data if files else "\n".join(pydoc_data.topics.topics.values()).encode()
    if len(data) <= SEQUENCE:
        raise UsageError(f"{len(data)} bytes of text: must be more than {SEQUENCE}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def configure(options: argparse.Namespace, size: int) -> Any:
    """Returns Megatron-Core's configuration, with experts spread over as many of `size` ranks as divide
    them."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": 4,
        "ffn_hidden_size": 2 * options.hidden,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.01,
        "moe_expert_capacity_factor": options.capacity,
        "expert_model_parallel_size": math.gcd(size, EXPERTS),
        # moecomm replaces either one.
        "moe_token_dispatcher_type": "allgather" if options.dispatcher == "allgather" else "alltoall",
        "overlap_moe_expert_parallel_comm": options.overlap,
        "bf16": options.dtype == "bfloat16",
        "params_dtype": getattr(torch, options.dtype),
    }
    if options.recompute == "moe":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    elif options.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    try:
        return TransformerConfig(**fields)
    except (AssertionError, ValueError) as error:  # incompatible options
        raise UsageError(f"Megatron-Core: {error}") from None


def build(config: Any, dispatcher: str) -> Any:
    """Returns the model, with weights that are the same for all dispatchers."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from moecomm.megatron import use_moecomm

    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)  # other numbers for each rank's experts
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm"
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if dispatcher == "moecomm":
        use_moecomm(model)
    return model


def windows(text: Tensor, device: torch.device, seed: int) -> Iterator[Tensor]:
    """Yields microbatches, (B, S + 1) bytes from random places."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts_B1 = torch.randint(len(text) - SEQUENCE, (WINDOWS, 1), generator=generator)
        yield text[starts_B1 + torch.arange(SEQUENCE + 1)].long().to(device)


def forward_step(data: Iterator[Tensor], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Returns to Megatron-Core's schedule a microbatch's losses, or their plan, and the function for their
    mean."""
    ids_BS = next(data)
    places_BS = torch.arange(SEQUENCE, device=ids_BS.device).expand(WINDOWS, SEQUENCE)
    later = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=ids_BS.device).triu(1)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(ids_BS[:, :-1], places_BS, later, labels=ids_BS[:, 1:]), mean_loss


def mean_loss(losses_BS: Tensor) -> tuple[Tensor, Tensor]:
    loss = losses_BS.float().mean()
    return loss, loss.detach().clone()


def train(options: argparse.Namespace, device: torch.device) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    rank, size = dist.get_rank(), dist.get_world_size()
    config = configure(options, size)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=config.expert_model_parallel_size)
    model = build(config, options.dispatcher).to(device)
    if config.bf16:
        model = Float16Module(config, model)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(optimizer="adam", lr=options.lr, bf16=config.bf16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(settings, [model])
    step = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=windows(read(options.text), device, seed=rank),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=WINDOWS,
    )
    losses: list[float] = []
    for number in range(1, options.steps + 1):
        if number == 2:
            begin = time.perf_counter()  # the first step builds what the others use
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = torch.stack(step()).mean()
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / size)
        if rank == 0 and (number % 10 == 0 or number == 1):
            print(f"step {number}: loss {losses[-1]:.3f}", flush=True)
    if rank == 0:
        tokens = (len(losses) - 1) * size * MICROBATCHES * WINDOWS * SEQUENCE
        speed = f"{tokens / (time.perf_counter() - begin):,.0f} tokens/s, " if tokens else ""
        print(
            f"result: loss {losses[0]:.5f} -> {losses[-1]:.5f}, {len(losses)} steps, {speed}"
            f"{EXPERTS} experts on {config.expert_model_parallel_size} of {size} ranks, {options.dispatcher}"
        )


if __name__ == "__main__":
    sys.exit(exit_code("train_megatron.py", start))
