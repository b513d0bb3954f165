"""Small dispatches and combines on a few ranks, checked, in a form that a sanitizer can watch.

    compute-sanitizer --tool memcheck --target-processes all python -m tests.gpu.sanitize_case --ranks 2

Ranks are plain child processes. The exit code is 0 if every result was right.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace

import torch
import torch.distributed as dist

from moecomm.types import WIRE_FORMATS
from tests import oracle
from tests.gpu import harness
from tests.gpu.harness import Job

TIMEOUT_S = 240.0  # a sanitizer makes a kernel a hundred times slower


def jobs(size: int) -> list[Job]:
    base = Job.on(size, (9, 20, 0, 37), experts=4, hidden=136, top_k=3, routing="holes", seed=7)
    some = [
        base,
        replace(base, layout="rank", dtype="float32"),
        replace(base, alignment=8, slack=5, dtype="float16"),
        replace(base, slack=-4, num_sms=2),
        replace(base, routing="one-rank", dtype="float32", hidden=124),
    ]
    if not harness.on_cpu():
        for wire in WIRE_FORMATS:
            travels = replace(base, wire=wire, hidden=272)
            some += [travels, replace(travels, hidden=144, layout="rank")]
    return some


def run_rank(rank: int, size: int, folder: str) -> int:
    harness.use_device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    problems = []
    for job in jobs(size):
        arguments = {**job.communicator, "timeout": TIMEOUT_S}
        with harness.communicator(**arguments) as comm:
            for turn in range(2):
                problems += oracle.play(comm, replace(job, seed=job.seed + turn), rank)
                harness.settled_error(comm)
            dist.barrier()
    for text in problems:
        print(text, file=sys.stderr)
    if not harness.on_cpu():
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=None, help="run this rank only (used for the children)")
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    if options.rank is not None:
        return run_rank(options.rank, options.ranks, options.folder)
    with tempfile.TemporaryDirectory(prefix="moecomm-sanitize-") as folder:
        command = [sys.executable, "-m", "tests.gpu.sanitize_case", "--ranks", str(options.ranks)]
        ranks = [
            subprocess.Popen([*command, "--folder", folder, "--rank", str(rank)])
            for rank in range(options.ranks)
        ]
        try:
            return max(abs(rank.wait(timeout=2 * TIMEOUT_S)) for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    sys.exit(main())
