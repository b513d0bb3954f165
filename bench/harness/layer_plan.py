"""What run_all.py --layers runs: whole layers, forward and backward."""

from __future__ import annotations

from .layer_options import PROGRAM
from .plan import Run

_TARGETS = ("deepseek-v3", "qwen3-235b", "qwen3-30b", "gpt-oss-120b", "mixtral-8x22b")
_CLOSELY = ("deepseek-v3", "qwen3-30b")


def layers_cuda_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """4096 tokens a rank of every layer, by importance, with 512 tokens in graphs; then skewed routing, and
    what can be kept for the backward.
    """
    steady = _steady("cuda", ranks, iters, warmup)
    runs = [
        _run(
            f"cuda-layers-{name}",
            name,
            (*steady,),
            "a layer beside its products alone",
            quick=name in _TARGETS,
        )
        for name in (*_TARGETS, "kimi-k2")
    ]
    bare = ("--graph-tokens", "0", "--ways")
    fp8 = (*bare, "compute only,overlapped,fp8 compute only,fp8 overlapped,fp8 weights anew")
    runs += [_run(f"cuda-layers-{name}-fp8", name, (*fp8, *steady), "products in fp8") for name in _CLOSELY]
    parts = (*bare, "compute only,serial,overlapped")
    for sms, counts in ((None, "1,2,4"), (24, "1,2,4,8"), (40, "1,2,4")):
        of = () if sms is None else ("--num-sms", str(sms))
        name = f"cuda-layers-{_CLOSELY[0]}-parts{'' if sms is None else f'-{sms}'}"
        runs.append(_run(name, _CLOSELY[0], (*parts, "--parts", counts, *of, *steady), "rows in parts"))
    skew = ("--routing", "zipf", "--zipf", "0.5,1", "--graph-tokens", "0")
    runs += [_run(f"cuda-layers-{name}-skew", name, (*skew, *steady), "skewed routing") for name in _CLOSELY]
    beside = "compute only,serial,overlapped,baseline"
    keep = ("--keep", "all,rows,nothing", "--ways", beside, "--graph-tokens", "0")
    return runs + [
        _run(f"cuda-layers-{name}-keep", name, (*keep, *steady), "what the forward keeps")
        for name in _CLOSELY
    ]


def layers_cpu_plan(ranks: int, iters: int, warmup: int) -> list[Run]:
    """The layers a sixteenth as wide: that everything runs, and how the ways compare where nothing can run
    under anything else.
    """
    steady = _steady("cpu", ranks, iters, warmup)
    small = ("--scale", "16", "-b", "256", "--graph-tokens", "32")
    skew = ("--scale", "16", "-b", "256", "--graph-tokens", "0", "--routing", "zipf")
    keep = ("--scale", "16", "-b", "256", "--graph-tokens", "0", "--keep", "all,rows,nothing")
    runs = [
        _run(f"layers-{name}", name, (*small, *steady), "a layer", quick=True)
        for name in ("qwen3-30b", "mixtral-8x22b")
    ]
    runs.append(_run("layers-qwen3-30b-skew", "qwen3-30b", (*skew, *steady), "skewed routing"))
    runs.append(_run("layers-qwen3-30b-keep", "qwen3-30b", (*keep, *steady), "what the forward keeps"))
    return runs


def _steady(device: str, ranks: int, iters: int, warmup: int) -> tuple[str, ...]:
    return ("--device", device, "-g", str(ranks), "-n", str(iters), "-w", str(warmup), "--timeout", "60")


def _run(name: str, preset: str, flags: tuple[str, ...], about: str, quick: bool = False) -> Run:
    return Run(name, PROGRAM, ("--presets", preset, *flags), about, quick)
