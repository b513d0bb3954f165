#!/usr/bin/env python3
"""Times models of transformers, their experts' tokens by moecomm and by transformers itself in turns.

    python bench/transformers_perf.py                             # a rank on each GPU, else two small ones
    torchrun --nproc-per-node 4 bench/transformers_perf.py --model gpt-oss-20b --layers 8 -J run.json

Weights are random, in bfloat16 on GPUs. A step is forward, backward and AdamW under FSDP2 and as many EP
ranks as there are, on one rank without either; "layers" are the experts' modules alone, forward and backward,
with drawn ids."""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder above bench/ is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
from lm import ranks
from lm.errors import UsageError, exit_code
from lm.flags import Parser, amount, count

from bench.harness.command_line import file_to_write
from bench.harness.launch import leave_multicast_off
from moecomm.graphs import GraphedStep

COMMON = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b": (
        "qwen3_moe",
        {**COMMON, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {**COMMON, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880}
        | {"intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
    "small": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    ),
}
"""MODELS holds for each name a model type of transformers, and the widths of its config."""
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
DIFFERENCE = {"cpu": 1e-5, "cuda": 1e-2}  # the most by which first losses may differ, of the loss


def parse() -> argparse.Namespace:
    parser = Parser(prog="transformers_perf.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), help="widths (default: qwen3-30b on GPUs, small on the CPU)")
    add("--layers", type=count, default=4)
    add("--tokens", type=count, help="of a rank, in one sequence (default: 4096 on GPUs, 64 on the CPU)")
    add("--variants", metavar="LIST", help="ep_implementations, or experts_implementations of one rank")
    add("--rounds", type=count, default=5, help="turns of each variant (%(default)s)")
    add("--steps", type=count, default=4, help="timed steps of a turn (%(default)s)")
    add("--zipf", type=amount, default=0.0, help="ids of the layers: expert n is drawn with weight n**-ZIPF")
    add("--lora", type=count, default=0, metavar="R", help="train adapters of R columns, on experts as well")
    add("--graph", action="store_true", help="moecomm's steps are replayed (GraphedStep); others never are")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--ranks", type=count, help="processes (default: one a GPU; two on the CPU)")
    add("-J", "--json", type=file_to_write, metavar="FILE", help="write a record of the run")
    add("--commit", metavar="HASH", help="commit to record where the source is no git checkout")
    return parser.parse_args()


def start() -> int:
    """Starts the ranks, or runs this one; returns the exit code."""
    arguments = parse()
    if "LOCAL_RANK" in os.environ:
        return run_rank(arguments)
    leave_multicast_off()
    return ranks.launch(sys.argv, arguments.ranks or ranks.default_ranks(arguments.device))


def run_rank(arguments: argparse.Namespace) -> int:
    from bench.harness import record, report

    with ranks.process_group(arguments.device) as device:
        rows = measure(arguments, device)
        if dist.get_rank() == 0:
            command = shlex.join(["python", "bench/transformers_perf.py", *sys.argv[1:]])
            content = {
                **record.heading("transformers_perf", command, arguments.commit, device.type),
                "ranks": dist.get_world_size(),
                "wrong": sum(row["wrong"] for row in rows),
                "rows": rows,
            }
            if arguments.json is not None:
                record.write(arguments.json, content)
            print(f"# {report.machine_words(content['hardware'], content['gpus'])}")
            print(table(rows), flush=True)
        return int(any(row["wrong"] for row in rows))


def measure(arguments: argparse.Namespace, device: Any) -> list[dict[str, Any]]:
    """Returns a row of each variant and phase: medians over the turns, on the slowest rank."""
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.utils import logging

    import moecomm.transformers  # noqa: F401  (registers "moecomm")

    logging.disable_progress_bar()
    world = dist.get_world_size()
    known: Any = EPImplementationInterface() if world > 1 else ALL_EXPERTS_FUNCTIONS
    variants = (arguments.variants or f"{'all_to_all' if world > 1 else 'grouped_mm'},moecomm").split(",")
    if unknown := [each for each in variants if each not in known]:
        raise UsageError(f"--variants has {unknown[0]!r}, must be of {', '.join(known)}")
    gpu = device.type == "cuda"
    if arguments.graph and not gpu:
        raise UsageError("--graph: a step is captured on a GPU only")
    name = arguments.model or ("qwen3-30b" if gpu else "small")
    tokens = arguments.tokens or (4096 if gpu else 64)
    widths = MODELS[name][1]
    experts = widths.get("num_experts") or widths["num_local_experts"]
    if experts % world:
        raise UsageError(f"--model {name}: {world} ranks cannot share its {experts} experts evenly")
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        if dist.get_rank() == 0:
            save(name, arguments.layers, folder[0], device)
        dist.barrier()
        runs = [Run(each, folder[0], tokens, device, arguments) for each in variants]
        dist.barrier()  # all ranks have read the folder
    losses = torch.stack([run.step() for run in runs]).double()
    dist.all_reduce(losses)
    first = (losses / world).tolist()
    for run in runs if arguments.graph else ():
        run.capture()
    for _ in range(arguments.rounds):
        for run in runs:
            run.turn("step", run.step, arguments.steps)
            run.turn("layers", run.layers, arguments.steps)
    rows, asked = [], {**vars(arguments), "model": name, "tokens": tokens}
    known = {each: asked[each] for each in ("model", "tokens", "layers", "zipf", "lora", "graph")}
    for run, loss in zip(runs, first, strict=True):
        wrong = is_wrong(loss, first[0], device.type)
        for phase, samples in run.samples.items():
            seconds = statistics.median(samples)
            row = {
                "path": run.how,
                "phase": phase,
                **known,
                "time_s": seconds,
                "min_s": min(samples),
                "samples_s": samples,
                "host_s": statistics.median(run.host[phase]),
                "memory_bytes": run.memory.get(phase),
                "tokens_per_s": tokens / seconds,
                "loss": loss,
                "wrong": wrong,
            }
            rows.append(row)
    return rows


def is_wrong(loss: float, first: float, device: str) -> int:
    """Returns 1 if a variant's first loss is not that of the first variant, or no number."""
    return int(not abs(loss - first) <= DIFFERENCE[device] * abs(first))


def save(name: str, layers: int, folder: str, device: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, widths = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(family, num_hidden_layers=layers, **widths)
        AutoModelForCausalLM.from_config(config, dtype=DTYPES[device.type]).save_pretrained(folder)


def adapted(model: Any, columns: int, how: str) -> Any:
    """Returns the model with adapters beside the attention and the experts, the same on all ranks."""
    from peft import LoraConfig, get_peft_model

    from moecomm.transformers.adapters import adapt_experts

    torch.manual_seed(1)
    weights = ["experts.gate_up_proj", "experts.down_proj"]
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": weights}
    model = get_peft_model(model, LoraConfig(r=columns, init_lora_weights=False, **targets))
    return adapt_experts(model) if how == "moecomm" else model


class Run:
    """A variant's model, and what was measured of it by phase: seconds, those in which the host issued, and
    the most bytes of a GPU besides weights and optimizer."""

    def __init__(self, how: str, folder: str, tokens: int, device: Any, arguments: Any) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        self.how, self._device, rank, world = how, device, dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"experts_implementation": how}
        if world > 1:
            parallel = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation=how)
            options = {"distributed_config": parallel}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[device.type], **options)
        loaded = loaded.to(device) if world == 1 else loaded
        self.model: Any = (adapted(loaded, arguments.lora, how) if arguments.lora else loaded).train()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self._forward_backward: Callable[[Any], Any] = self._plain
        generator, config = torch.Generator().manual_seed(1 + rank), self.model.config
        self._tokens = torch.randint(config.vocab_size, (1, tokens), generator=generator).to(device)
        experts = getattr(config, "num_local_experts", None) or config.num_experts
        self._experts = [each for n, each in self.model.named_modules() if n.endswith("mlp.experts")]
        weights_E = torch.arange(1, experts + 1, dtype=torch.float64) ** -arguments.zipf
        weights_TE, top_k = weights_E.expand(tokens, -1), config.num_experts_per_tok
        self._ids_TK = ids_TK = torch.multinomial(weights_TE, top_k, generator=generator).to(device)
        self._weights_TK = torch.rand(ids_TK.shape, generator=generator).to(device, loaded.dtype)
        self._x_TH = torch.randn(tokens, config.hidden_size, generator=generator).to(device, loaded.dtype)
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.host: dict[str, list[float]] = defaultdict(list)
        self.memory: dict[str, int] = defaultdict(int)

    def _plain(self, tokens: Any) -> Any:
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Any:
        """Trains once; returns the loss of this rank's tokens."""
        loss = self._forward_backward(self._tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def capture(self) -> None:
        """Makes moecomm's later steps replays of a graph. A step has run before."""
        if self.how == "moecomm":
            self._forward_backward = GraphedStep(self._plain, self.model, grows=True)

    def layers(self) -> None:
        """Runs the experts' modules alone, forward and backward."""
        for module in self._experts:
            x_TH = self._x_TH.detach().requires_grad_()
            weights_TK = self._weights_TK.detach().requires_grad_()
            y_TH = module(x_TH, self._ids_TK, weights_TK)
            y_TH.backward(self._x_TH)
        self.model.zero_grad()

    def turn(self, phase: str, run: Callable[[], Any], steps: int) -> None:
        """Times `steps` calls as one, after one that is not timed."""
        gpu = self._device.type == "cuda"
        run()
        held = torch.cuda.memory_allocated() if gpu else 0
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            run()
        issued = time.perf_counter()
        if gpu:
            torch.cuda.synchronize()
        took = [(time.perf_counter() - begin) / steps, (issued - begin) / steps]
        found = torch.tensor(took, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.samples[phase].append(float(found[0]))
        self.host[phase].append(float(found[1]))
        if gpu and not (
            phase == "step" and self._forward_backward is not self._plain
        ):  # a graph holds its own
            self.memory[phase] = max(self.memory[phase], torch.cuda.max_memory_allocated() - held)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, each beside the first variant's of its phase."""
    lines = ["| phase | by | ms | host ms | tokens/s a rank | besides weights, GiB | times as fast |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: str(row["phase"]), reverse=True):
        base = next(each for each in rows if each["phase"] == row["phase"])
        memory = "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.2f}"
        lines.append(
            f"| {row['phase']} | {row['path']} | {1e3 * row['time_s']:.2f} | {1e3 * row['host_s']:.2f} | "
            f"{row['tokens_per_s']:,.0f} | {memory} | "
            f"{base['time_s'] / row['time_s']:.2f} |{' WRONG' if row['wrong'] else ''}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(exit_code("transformers_perf.py", start))
