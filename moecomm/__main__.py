"""`python -m moecomm` shows what was found on this machine, and which transport each peer will use.

Without torchrun it describes as many ranks of this host as `-g` says. Under torchrun every rank first joins a
small communicator and exchanges rows, so that the printed transports have really been used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

import moecomm
from moecomm.setup import discovery


def _section(title: str, facts: Iterable[tuple[str, str]]) -> None:
    print(title)
    for name, fact in facts:
        print(f"  {name:<18} {fact}")


def _try_out() -> int:
    """Dispatches and combines a few tokens between the ranks of torchrun, and prints the outcome on rank 0.

    Returns 0, or 1 for a wrong result or an error of moecomm. Each rank prints its error in one line.
    """
    dist.init_process_group("gloo")
    try:
        size = dist.get_world_size()
        with moecomm.Communicator(
            num_experts=size,
            hidden=8,
            top_k=size,
            max_tokens=4,
            dtype=torch.float32,
            device="cpu",
            timeout=30,
        ) as comm:
            x_TH = torch.arange(32, dtype=torch.float32).view(4, 8) + comm.rank
            out = comm.dispatch(x_TH, torch.arange(size).expand(4, size))
            right = torch.equal(comm.combine(out.tokens, out.handle), x_TH * size)
            if comm.rank == 0:
                where = f" on {comm.nodes} nodes" if comm.nodes > 1 else ""
                _section(
                    f"transports of {size} ranks{where} (tried: {'works' if right else 'WRONG RESULT'})",
                    discovery.transports(
                        size, comm.ranks_per_node, int(os.environ.get("LOCAL_WORLD_SIZE", size))
                    ),
                )
            return 0 if right else 1
    except moecomm.MoecommError as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns 0, or 1 if the ranks of torchrun could not exchange rows."""
    parser = argparse.ArgumentParser(prog="python -m moecomm", description=__doc__.split("\n")[0])
    parser.add_argument(
        "-g", "--ranks", type=int, default=2, help="ranks on this host to describe (default 2)"
    )
    parser.add_argument(
        "--left-out", action="store_true", help="print only what this build or machine cannot do, a line each"
    )
    options = parser.parse_args(arguments)
    if options.left_out:
        print("\n".join(discovery.left_out()))
        return 0
    if options.ranks < 1:
        parser.error(f"--ranks is {options.ranks}, expected at least 1")
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if not under_torchrun or os.environ.get("RANK") == "0":
        _section("versions", discovery.versions())
        _section("host", discovery.processors())
        _section("GPUs", discovery.gpus())
        _section("network", discovery.fabric())
    if under_torchrun:
        return _try_out()
    _section(f"transports of {options.ranks} ranks on this host", discovery.transports(options.ranks))
    return 0


def _run() -> int:
    """Runs `main` and returns its status; 0 if a reader closes the pipe early, as `| head` does."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
    return status


if __name__ == "__main__":
    sys.exit(_run())
