"""Open files between processes: who gets which, who is refused, and what a missing rank leads to."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from moecomm.errors import PeerLost, PeerTimeout
from moecomm.setup.fd_exchange import Mailbox, send

PHASE = "test"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory(content: bytes) -> int:
    memory = os.memfd_create("fd-exchange")
    os.write(memory, content)
    return memory


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    box = Mailbox(4)
    yield box
    box.close()


def _send(box: Mailbox, descriptor: int, *, pid: int = 0, timeout: float = 5.0) -> None:
    send(descriptor, box.name, pid=pid or os.getpid(), rank=0, peer=1, phase=PHASE, timeout=timeout)


def test_a_file_that_was_sent_outlives_its_sender(mailbox: Mailbox) -> None:
    receiver, sender = os.getpid(), os.fork()
    if sender == 0:
        try:
            memory = os.memfd_create("x")
            os.write(memory, b"left")
            send(memory, mailbox.name, pid=receiver, rank=1, peer=0, phase=PHASE, timeout=20)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(sender, 0)[1] == 0
    taken = mailbox.take({1: sender}, rank=0, phase=PHASE, timeout=5.0)
    assert os.pread(taken[1], 10, 0) == b"left" and not os.get_inheritable(taken[1])
    os.close(taken[1])


def test_a_process_that_is_not_expected_is_refused(mailbox: Mailbox) -> None:
    """A message from this process is refused, since another process is expected."""
    before = _open_files()
    memory = _memory(b"forged")
    _send(mailbox, memory)
    with pytest.raises(PeerTimeout, match="rank 3 did not come") as caught:
        mailbox.take({3: os.getppid()}, rank=0, phase=PHASE, timeout=0.3)
    assert (caught.value.rank, caught.value.peer, caught.value.phase) == (0, 3, PHASE)
    os.close(memory)
    assert _open_files() == before


def test_strangers_do_not_keep_the_expected_one_out(mailbox: Mailbox) -> None:
    program = (
        "import time; from socket import *; s = [socket(AF_UNIX, SOCK_SEQPACKET) for _ in range(3)];"
        f"[each.connect('\\0{mailbox.name}') for each in s]; print('there', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        memory = _memory(b"right")
        _send(mailbox, memory)
        taken = mailbox.take({1: os.getpid()}, rank=0, phase=PHASE, timeout=5.0)
        stranger.kill()
    assert os.pread(taken[1], 10, 0) == b"right"
    os.close(taken[1])
    os.close(memory)


def test_nothing_is_sent_to_another_process(mailbox: Mailbox) -> None:
    memory = _memory(b"secret")
    with pytest.raises(PeerLost, match=f"belongs to pid {os.getpid()} .* expected pid {os.getppid()}"):
        _send(mailbox, memory, pid=os.getppid())
    with pytest.raises(PeerLost, match="sent 0 bytes and 0 open files"):
        mailbox.take({1: os.getpid()}, rank=0, phase=PHASE, timeout=1.0)
    os.close(memory)


def test_a_mailbox_that_is_gone_means_a_lost_peer(mailbox: Mailbox) -> None:
    memory = _memory(b"")
    mailbox.close()
    with pytest.raises(PeerLost, match=r"rank 1 \(pid \d+\) has ended") as caught:
        _send(mailbox, memory)
    assert caught.value.peer == 1
    os.close(memory)


def test_what_was_taken_is_closed_when_another_rank_is_late(mailbox: Mailbox) -> None:
    before = _open_files()
    memory = _memory(b"first")
    _send(mailbox, memory)
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 2 did not come within 0\.3 s"):
        mailbox.take({1: os.getpid(), 2: os.getppid()}, rank=0, phase=PHASE, timeout=0.3)
    assert 0.25 < time.monotonic() - begin < 3.0
    os.close(memory)
    assert _open_files() == before


@pytest.mark.parametrize(
    ("message", "files", "kind", "says"),
    [
        (b"1", 0, PeerLost, "sent 1 bytes and 0 open files"),
        (b"1", 2, PeerLost, "expected 1 and 1"),
        (b"", 0, PeerTimeout, "rank 1 did not come"),
    ],
    ids=["no file", "two files", "nothing"],
)
def test_what_is_no_message_with_a_file_is_refused_and_closed(
    mailbox: Mailbox, message: bytes, files: int, kind: type[Exception], says: str
) -> None:
    before = _open_files()
    memories = [_memory(b"") for _ in range(files)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{mailbox.name}")
        if message:
            socket.send_fds(connection, [message], memories)
        with pytest.raises(kind, match=says):
            mailbox.take({1: os.getpid()}, rank=0, phase=PHASE, timeout=0.3)
    for each in memories:
        os.close(each)
    assert _open_files() == before


def test_a_full_mailbox_has_a_deadline_and_recovers() -> None:
    box = Mailbox(0)
    waiting = []
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        waiting.append(connection)
        try:
            connection.connect(f"\0{box.name}")
        except BlockingIOError:
            break
    memory = _memory(b"late")
    with pytest.raises(PeerTimeout, match=r"rank 1 did not come within 0\.2 s"):
        _send(box, memory, timeout=0.2)
    sender = threading.Thread(target=_send, args=(box, memory), kwargs={"timeout": 20.0})
    sender.start()
    for connection in waiting:
        connection.close()
    with pytest.raises(PeerLost):  # the first that waited had nothing to say
        box.take({1: os.getpid()}, rank=0, phase=PHASE, timeout=5.0)
    sender.join(20.0)
    assert not sender.is_alive()
    box.close()
    os.close(memory)
