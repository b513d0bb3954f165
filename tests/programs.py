"""Runs Python programs as `python ARGUMENTS` would, in a fraction of the time: in processes that are forked
with all libraries loaded."""

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from tests.multirank.harness import NO_GPUS, run_ranks

TIMEOUT_S = 240


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.strip().splitlines()[-1]


def run_program(
    *arguments: str | Path, torchrun: int = 0, code: int = 0, environment: Mapping[str, str] = NO_GPUS
) -> Finished:
    """Runs a file, or `-m` and a module, to its end: alone, or on `torchrun` ranks with the environment that
    torchrun gives them. Every exit status has to be `code`. The output is that of all ranks, by rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = [str(each) for each in arguments], store.port if torchrun else None
    done = run_ranks(torchrun or 1, _run, *given, timeout=TIMEOUT_S, environment={**NO_GPUS, **environment})
    codes, out, err = ([each[i] for each in done] for i in range(3))
    assert set(codes) == {code}, "".join((*out, *err))
    return Finished(code, "".join(out), "".join(err))


def _run(rank: int, ranks: int, arguments: list[str], port: int | None) -> tuple[int, str, str]:
    dist.destroy_process_group()  # the program makes its own
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in {**place, **store, "TORCHELASTIC_RUN_ID": "tests"}.items():
        os.environ.pop(name, None)
        if port is not None:
            os.environ[name] = str(value)
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    run = runpy.run_module if is_module else runpy.run_path
    code = 0
    with _captured(sys.stdout) as out, _captured(sys.stderr) as err:
        try:
            run(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        return code, *(os.pread(each, 1 << 24, 0).decode() for each in (out, err))


@contextlib.contextmanager
def _captured(stream: TextIO) -> Iterator[int]:
    """A file that has what goes to `stream` meanwhile, also from processes that this one starts."""
    before = os.dup(stream.fileno())
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), stream.fileno())
        try:
            yield file.fileno()
        finally:
            os.dup2(before, stream.fileno())
            os.close(before)
