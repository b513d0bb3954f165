"""The runs of run_all.py: operations, layers, and operations between nodes, on CPU ranks and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from .options import WIDE

NATIVE = ("fabric_raw", "proxy_rate")
_BOTH = ("dispatch", "combine")
_TARGET_LAYERS = ("deepseek-v3", "qwen3-235b", "qwen3-30b", "gpt-oss-120b", "mixtral-8x22b")
_CLOSELY = ("deepseek-v3", "qwen3-30b")


@dataclass(frozen=True)
class Run:
    """One run of the plan: a program, in Python or C++, and its flags."""

    name: str
    program: str
    flags: tuple[str, ...]
    alone: bool = False  # in ranks of its own


def _run(name: str, program: str, flags: str, alone: bool = False) -> Run:
    return Run(name, program, tuple(flags.split()), alone)


def operations_cpu(ranks: int, iters: int, warmup: int) -> list[Run]:
    """The reference case, then a small sweep around it."""
    steady = f"--device cpu -g {ranks} -n {iters} -w {warmup} --baselines"
    cases = (
        ("reference", "-b 2048 --hidden 4096 -d float32 --experts 32 --topk 4"),
        ("small", "-b 32 -e 512 -f 4 --hidden 4096 --experts 32 --topk 4"),
        ("bfloat16", "-b 2048 --hidden 2048 -d bfloat16 --experts 64 --topk 8"),
        ("zipf", "-b 1024 --hidden 2048 --routing zipf"),
    )
    return [
        _run(f"{operation}-{name}", operation, f"{flags} {steady}")
        for name, flags in cases
        for operation in _BOTH
    ]


def operations_cuda(ranks: int, iters: int, warmup: int) -> list[Run]:
    """4096 tokens, hidden 7168, top-8 of 256 in every form, then what is around it, by importance."""
    shape = "--hidden 7168 -d bfloat16"
    experts = _shared(256, ranks)
    few, point = (f"-b {tokens} {shape} --experts {experts} --topk 8" for tokens in (512, 4096))
    links, beside_nccl = "--baselines sm-push", "--baselines sm-push,nccl"
    fixed = f"{point} --capacity auto"
    # torch's all_to_all_vdev_2d takes at most 16 experts a rank.
    symmetric = f"-b 4096 {shape} --experts {16 * ranks} --topk 8 --baselines sm-push,torch-symm"
    many = ",".join(str(_shared(count, ranks)) for count in (32, 256, 896))
    # Twenty calls in a graph, so that neither the host nor a launch is in the time.
    graph, many_sms = "--capacity auto --graph 20", "8,16,24,32,64,132"
    sizes = (
        f"-b 1 -e 4096 -f 2 {shape} --experts {experts} --topk 8 {graph} --baselines sm-exchange,nccl-rows"
    )
    sweeps = {
        "experts": f"-b 4096 {shape} --experts {many} --topk 8 {beside_nccl}",
        "tokens": f"-b 1 -e 32768 -f 8 {shape} --experts {experts} --topk 8 {beside_nccl}",
        "topk": f"-b 4096 {shape} --experts {experts} --topk 1,2,4,8,16 {beside_nccl}",
        "skew": f"{point} --routing zipf --zipf 0.5,1,1.5 {beside_nccl}",
    }

    def run(name: str, flags: str, *, gpus: int = ranks, most: int = iters) -> Run:
        operation = name.split("-")[0]
        steady = f"--device cuda -g {gpus} -n {min(iters, most)} -w {min(warmup, most)} --timeout 60"
        program = "dispatch" if operation == "backward" else operation
        return _run(f"cuda-{name}", program, f"{flags} {steady}", alone="symm" in name)

    def on_gpus(gpus: int) -> list[Run]:
        """Runs whose times are nearly all fixed cost, or nearly none."""
        flags = f"-b 8 -e 4096 -f 512 {shape} --experts {_shared(256, gpus)} --topk 8 --capacity auto {links}"
        return [run(f"{operation}-on-{gpus}", flags, gpus=gpus) for operation in _BOTH]

    return [
        run("dispatch", f"{point} --baselines"),
        run("dispatch-fp8", f"{point} --wire fp8 {beside_nccl}"),
        run("dispatch-fp8-on", f"{point} --wire fp8 --no-dequantize {beside_nccl}"),
        run("dispatch-mxfp8", f"{point} --wire mxfp8 {links}"),
        run("combine", f"{point} --baselines"),
        run("combine-fp8", f"{point} --combine-wire fp8 {links}"),
        run("backward", f"{point} --kept-handle plain {links}"),
        run("backward-weighted", f"{point} --kept-handle weighted {links}"),
        run("dispatch-fixed", f"{fixed} {links}"),
        *(run(f"{operation}-512", f"{few} {beside_nccl},nccl-tuned") for operation in _BOTH),
        *(each for gpus in dict.fromkeys((ranks, 2, 3, 4)) if 1 < gpus <= ranks for each in on_gpus(gpus)),
        *(
            run(f"{operation}-few{wire and '-'}{wire}", f"{sizes} {wire and '--wire'} {wire}", most=10)
            for operation, wire in (("dispatch", ""), ("combine", ""), ("dispatch", "fp8"))
        ),
        *(
            run(
                f"{operation}-{layout}-sms",
                f"{point} --layout {layout} {graph} --num-sms {many_sms} {links}",
                most=10,
            )
            for layout in ("expert", "rank")
            for operation in _BOTH
        ),
        *(
            run(f"{operation}-{name}", flags, most=10)
            for name, flags in sweeps.items()
            for operation in _BOTH
        ),
        run("dispatch-fp8-sms", f"{point} --wire fp8 --num-sms 8,24,48,132 {links}", most=10),
        run("dispatch-one-hot", f"{point} --routing one-hot {beside_nccl}"),
        run("alltoall", f"-b 4096 {shape} --baselines"),
        *(run(f"{operation}-symm", symmetric) for operation in _BOTH),
    ]


def _shared(experts: int, ranks: int) -> int:
    """The most experts up to `experts` that the ranks can share evenly: 255 of 256 for three."""
    return experts // ranks * ranks


def layers_cuda(ranks: int, iters: int, warmup: int) -> list[Run]:
    """4096 tokens a rank of every layer, by importance, with 512 tokens in graphs; then skewed
    routing, and what is kept for the backward."""
    steady = f"--device cuda -g {ranks} -n {iters} -w {warmup} --timeout 60"
    runs = [_run(f"cuda-layers-{name}", "moe_layer", f"--presets {name} {steady}") for name in _TARGET_LAYERS]
    around: dict[str, tuple[str, ...]] = {
        "skew": ("--routing", "zipf", "--zipf", "0.5,1"),
        "keep": ("--keep", "all,rows,nothing", "--variants", "compute only,serial,overlapped,baseline"),
    }
    return runs + [
        Run(f"cuda-layers-{name}-{kind}", "moe_layer",
            ("--presets", name, *flags, "--graph-tokens", "0", *steady.split()))
        for kind, flags in around.items()
        for name in _CLOSELY
    ]  # fmt: skip


def training_cuda(ranks: int, iters: int, warmup: int) -> list[Run]:
    """Four microbatches of every layer, and of two of them as wide expert parallelism leaves them. Some ten
    rounds are enough: a round has twelve microbatches of each path.
    """
    steady = f"--device cuda -g {ranks} -n {min(iters, 7)} -w {min(warmup, 2)} --timeout 60"
    steady += " --activation swiglu_interleaved"
    return [
        _run(f"cuda-steps-{name}", "moe_layer", f"--ways microbatches --presets {name} {steady}")
        for name in (*_TARGET_LAYERS, *WIDE)
    ]


def _between(nodes: int, local: int, flags: str, *, name: str = "nodes", kind: str = "") -> list[Run]:
    """Dispatch and combine on `nodes` nodes of `local` ranks, over TCP."""
    where = f"-g {nodes * local} --ranks-per-node {local} --fabric-provider tcp"
    return [
        _run(f"{name}-{operation}-{nodes}x{local}-tcp{kind}", operation, f"{flags} {where}")
        for operation in _BOTH
    ]


def nodes_cpu(iters: int, warmup: int) -> list[Run]:
    """CPU ranks: 1024 tokens of 2048 on two nodes, other numbers of tokens, more ranks, C++."""
    shape = "--hidden 2048 -d bfloat16 --experts 64 --topk 8"
    point, fewer, sweep = (f"-b {sizes} {shape}" for sizes in ("1024", "512", "16 -e 4096 -f 4"))
    usual = "--baselines fabric,fabric-cold,memcpy,gloo,gloo-tuned,gloo-rows"
    steady = f"--device cpu -n {iters} -w {warmup}"
    runs = _between(2, 1, f"{point} {usual} {steady}")
    runs += _between(2, 1, f"{sweep} --baselines fabric {steady}", kind="-tokens")
    for nodes, local in ((2, 2), (4, 1)):
        runs += _between(nodes, local, f"{fewer} {usual} {steady}")
    return runs + _NATIVES


def nodes_cuda(gpus: int, iters: int, warmup: int) -> list[Run]:
    """GPUs as two nodes: 4096 tokens of 7168, top-8, then what is around it, then provider and proxy."""
    if gpus < 2 or gpus % 2:
        raise ValueError(f"two nodes need an even number of GPUs, not {gpus}: use -g")
    shape = f"--hidden 7168 -d bfloat16 --experts {_shared(256, gpus)} --topk 8"
    steady = f"--device cuda -n {iters} -w {warmup} --timeout 60"
    beside = "--baselines fabric,fabric-cold,fabric-one,memcpy,nccl,nccl-tuned,nccl-rows"
    runs = []
    for kind, flags in (
        ("", f"-b 4096 {shape} {beside}"),
        ("-limit", f"-b 4096 {shape} --limit-nodes 1 --baselines fabric"),
        ("-tokens", f"-b 8 -e 4096 -f 8 {shape} --baselines fabric"),
    ):
        runs += _between(2, gpus // 2, f"{flags} {steady}", name="cuda-nodes", kind=kind)
    return runs + _NATIVES


_NATIVES = [  # the provider over message sizes, and the proxy
    _run("nodes-raw-tcp", "fabric_raw", "--provider tcp --sizes 64,4096,65536,524288,1048576,4194304"),
    _run("nodes-proxy", "proxy_rate", ""),
]
