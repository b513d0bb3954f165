"""What run_all.py runs on one node, on CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

_SWEEP_ITERS, _SWEEP_WARMUP = 10, 3  # most iterations of a point of a sweep on GPUs


@dataclass(frozen=True)
class Run:
    """One run of the plan: a program and its flags."""

    name: str
    program: str
    flags: tuple[str, ...]
    about: str
    quick: bool = False  # part of --quick
    alone: bool = False  # in ranks of its own


def cpu_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """The reference case, then a small sweep around it."""
    steady = ("--device", "cpu", "-g", str(ranks), "-n", str(iters), "-w", str(warmup), "--baselines")
    reference = ("-b", "2048", "--hidden", "4096", "-d", "float32", "--experts", "32", "--topk", "4")
    bfloat16 = ("-b", "2048", "--hidden", "2048", "-d", "bfloat16", "--experts", "64", "--topk", "8")
    small = ("-b", "32", "-e", "512", "-f", "4", "--hidden", "4096", "--experts", "32", "--topk", "4")
    zipf = ("-b", "1024", "--hidden", "2048", "--routing", "zipf")
    runs = []
    for operation in ("dispatch", "combine"):
        flags = (*reference, *steady)
        runs.append(Run(f"{operation}-reference", operation, flags, "the reference case", quick=True))
    for operation in ("dispatch", "combine"):
        runs += [
            Run(f"{operation}-small", operation, (*small, *steady), "fewer tokens"),
            Run(f"{operation}-bfloat16", operation, (*bfloat16, *steady), "bfloat16, top-8 of 64"),
            Run(f"{operation}-zipf", operation, (*zipf, *steady), "skewed routing"),
        ]
    runs.append(Run("alltoall", "alltoall", ("-b", "256", "-e", "4096", "-f", "4", *steady), "raw exchange"))
    return runs


def cuda_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """4096 tokens, hidden 7168, top-8 of 256 in every form, then what is around it, by importance."""
    shape = ("--hidden", "7168", "-d", "bfloat16")
    total = _shared_experts(256, ranks)
    usual_experts = ("--experts", total, "--topk", "8")
    point = ("-b", "4096", *shape, *usual_experts)
    few = ("-b", "512", *shape, *usual_experts)
    tokens = ("-b", "1", "-e", "32768", "-f", "8", *shape, *usual_experts)
    all_experts = ",".join(_shared_experts(each, ranks) for each in (32, 256, 896))
    experts = ("-b", "4096", *shape, "--experts", all_experts, "--topk", "8")
    topk = ("-b", "4096", *shape, "--experts", total, "--topk", "1,2,4,8,16")
    zipf = (*point, "--routing", "zipf", "--zipf", "0.5,1,1.5")
    one_hot = (*point, "--routing", "one-hot")
    sms = ("--num-sms", "8,24,48,132")
    fp8, handed_on = ("--wire", "fp8"), ("--wire", "fp8", "--no-dequantize")
    fixed, graph = ("--capacity", "auto"), ("--capacity", "auto", "--graph")
    everything, links = ("--baselines",), ("--baselines", "sm-push")
    usual, beside_nccl = ("--baselines", "sm-push,nccl"), ("--baselines", "sm-push,nccl,nccl-tuned")
    # torch's all_to_all_vdev_2d takes at most 16 experts a rank.
    few_experts = ("-b", "4096", *shape, "--experts", str(16 * ranks), "--topk", "8")
    symmetric = (*few_experts, "--baselines", "sm-push,torch-symm")

    def run(
        name: str,
        flags: Sequence[str],
        about: str,
        *,
        gpus: int = ranks,
        most_iters: int = iters,
        most_warmup: int = warmup,
        **more: bool,
    ) -> Run:
        operation = name.split("-")[0]
        program = "dispatch" if operation == "backward" else operation
        times = ("-n", str(min(iters, most_iters)), "-w", str(min(warmup, most_warmup)))
        steady = ("--device", "cuda", "-g", str(gpus), *times, "--timeout", "60")
        return Run(f"cuda-{name}", program, (*flags, *steady), about, **more)

    sweep = partial(run, most_iters=_SWEEP_ITERS, most_warmup=_SWEEP_WARMUP)

    def on_gpus(gpus: int) -> list[Run]:
        """What the model of how time grows is held against: a call that is nearly all fixed cost, and one
        that is nearly all transfer."""
        experts = _shared_experts(256, gpus)
        flags = ("-b", "8", "-e", "4096", "-f", "512", *shape, "--experts", experts, "--topk", "8", *fixed)
        about = f"on {gpus} GPUs" if experts == "256" else f"on {gpus} GPUs, which cannot share 256 experts"
        return [
            run(f"{operation}-on-{gpus}", (*flags, *links), about, gpus=gpus)
            for operation in ("dispatch", "combine")
        ]

    return [
        run("dispatch", (*point, *everything), "dispatch to expert-major, exact sizes", quick=True),
        run("dispatch-fp8", (*point, *fp8, *usual), "rows travel in fp8, arrive in bf16", quick=True),
        run("dispatch-fp8-on", (*point, *handed_on, *usual), "fp8 rows and scales handed on", quick=True),
        run("combine", (*point, *everything), "combine from expert-major with weights", quick=True),
        run("backward", (*point, "--kept-handle", "plain", *links), "along a kept handle", quick=True),
        run(
            "backward-weighted",
            (*point, "--kept-handle", "weighted", *links),
            "along a kept handle, times weights and with their gradients",
            quick=True,
        ),
        run(
            "dispatch-fixed",
            (*point, *fixed, *links),
            "fixed capacity: the host waits for nothing",
            quick=True,
        ),
        run("dispatch-512", (*few, *beside_nccl), "fewer tokens"),
        run("combine-512", (*few, *beside_nccl), "fewer tokens"),
        sweep("dispatch-sms", (*point, *sms, *links), "sweep over SMs"),
        sweep("combine-sms", (*point, *sms, *links), "sweep over SMs"),
        sweep("dispatch-experts", (*experts, *usual), "sweep over experts"),
        sweep("combine-experts", (*experts, *usual), "sweep over experts"),
        *(each for gpus in dict.fromkeys((ranks, 2, 3, 4)) if 1 < gpus <= ranks for each in on_gpus(gpus)),
        run("dispatch-graph", (*point, *graph, *links), "fixed capacity, replayed from a graph"),
        run("dispatch-fp8-graph", (*point, *fp8, *graph, *links), "fp8, replayed from a graph"),
        run("combine-graph", (*point, *graph, *links), "combine, replayed from a graph"),
        sweep("dispatch-graph-tokens", (*tokens, *graph, *links), "sweep over tokens in a graph"),
        sweep("combine-graph-tokens", (*tokens, *graph, *links), "sweep over tokens in a graph"),
        sweep("dispatch-tokens", (*tokens, *usual), "sweep over tokens"),
        sweep("combine-tokens", (*tokens, *usual), "sweep over tokens"),
        sweep("dispatch-topk", (*topk, *usual), "sweep over top-k"),
        sweep("combine-topk", (*topk, *usual), "sweep over top-k"),
        sweep("dispatch-skew", (*zipf, *usual), "sweep over skew"),
        sweep("combine-skew", (*zipf, *usual), "sweep over skew"),
        run("dispatch-one-hot", (*one_hot, *usual), "everything to one rank"),
        sweep("dispatch-fp8-sms", (*point, *fp8, *sms, *links), "sweep over SMs"),
        run("alltoall", ("-b", "4096", *shape, *everything), "raw exchange"),
        run("dispatch-symm", symmetric, "beside torch's symmetric memory", alone=True),
        run("combine-symm", symmetric, "beside torch's symmetric memory", alone=True),
    ]


def _shared_experts(experts: int, ranks: int) -> str:
    """The most experts up to `experts` that the ranks can share evenly: 255 of 256 for three."""
    return str(experts // ranks * ranks)
