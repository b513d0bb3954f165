"""An operation that waits in a thread of its own for a rank that does not come does not hold up its process:
after an uncaught exception, the main thread's end, Ctrl-C in wait() or close() that ends, and the others hear
of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fabric import needs_fabric
from tests.multirank.harness import NO_GPUS

NEVER_NOTICED = 20.0
"""Seconds; the communicators' deadline is three times as long."""

_PROGRAM = """
import datetime, json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import moecomm

rank, store, ended, device, how = int(sys.argv[1]), *sys.argv[2:]
if device == "cuda":
    torch.cuda.set_device(rank)
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
comm = moecomm.Communicator(
    num_experts=2, hidden=16, top_k=1, max_tokens=8, dtype=torch.float32, device=device, timeout=60.0
)
x, ids = torch.ones(2, 16, device=device), torch.arange(2, device=device).view(2, 1)
kept = comm.dispatch(x.requires_grad_(how == "forks"), ids)
if how == "forks":
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
capacity = 4 if how == "exception" else None  # on a GPU the host does not wait then
dist.barrier()


def close(*_):
    comm.close()
    sys.exit(3)


if rank == 1:
    print("waiting", flush=True)
    while not os.path.exists(ended):
        time.sleep(0.01)
    try:
        comm.dispatch(x, ids, capacity=capacity)  # what the other has announced before its end counts
        comm.dispatch(x, ids)
    except moecomm.PeerLost as error:
        print(json.dumps([error.peer, str(error)]), flush=True)
else:
    # A shell starts what runs in the background with interrupts ignored, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, close)
    if how == "daemon":
        threading.Thread(target=comm.dispatch, args=(x, ids), daemon=True).start()
        time.sleep(0.3)
        print("waiting", flush=True)
        sys.exit()
    work = comm.dispatch(x, ids, capacity=capacity, async_op=True)
    print("waiting", flush=True)
    if how == "exception":
        raise KeyError("a bug")
    if how == "sleep":
        time.sleep(60)
    if how == "queue":
        comm.dispatch(x, ids)  # behind what is under way
    work.wait()
"""


@pytest.mark.parametrize(
    ("how", "number", "status"),
    [
        ("daemon", None, 0),
        ("exception", None, 1),
        ("queue", signal.SIGINT, -signal.SIGINT),
        ("sleep", signal.SIGTERM, 3),
        pytest.param("forks", signal.SIGINT, -signal.SIGINT, marks=needs_fabric),
    ],
)
def test_a_waiting_operation_ends_with_its_process(
    tmp_path: Path, how: str, number: signal.Signals | None, status: int
) -> None:
    check_end(tmp_path, "cpu", how, number, status)


def check_end(tmp_path: Path, device: str, how: str, number: signal.Signals | None, status: int) -> None:
    """Two ranks, of which the first ends while it waits for the second. With "forks" each is a node that has
    had a child."""
    hidden = NO_GPUS if device == "cpu" else {}
    if how == "forks":
        hidden = {**hidden, "MOECOMM_RANKS_PER_NODE": "1", "MOECOMM_FABRIC_PROVIDER": "tcp"}
    environment = {**os.environ, **hidden, "GLOO_SOCKET_IFNAME": "lo"}
    ended = tmp_path / "ended"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / "store"), str(ended), device, how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for each in ranks:
            assert each.stdout is not None and each.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        if number is not None:
            ranks[0].send_signal(number)
        ranks[0].wait(NEVER_NOTICED)
        ended.touch()
        said = [each.communicate(timeout=NEVER_NOTICED) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert ranks[0].returncode == status, said
    assert number != signal.SIGINT or "KeyboardInterrupt" in said[0][1], said
    assert ranks[1].returncode == 0, said
    peer, text = json.loads(said[1][0])
    assert peer == 0 and "rank 0" in text, said
