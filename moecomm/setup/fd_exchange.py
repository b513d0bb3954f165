"""Passes open files between processes of one host (SCM_RIGHTS, unix(7)).

The sockets have random names in the abstract namespace, so no file can be left behind. Other users can see
the names but not use them, since each end checks the process at the other end (SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time

from moecomm.errors import PeerLost, PeerTimeout, of_peer

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_INT = struct.Struct("i")


class Mailbox:
    """A socket to which the other ranks of this host send one file each. A file stays there until it is taken
    or the mailbox is closed, even if its sender has ended by then. So ranks send, then synchronise, then
    take, without threads."""

    def __init__(self, senders: int) -> None:
        """Opens the mailbox. `senders`: how many files may be in it at once. Raises OSError."""
        self.name = f"moecomm-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(f"\0{self.name}")
            self._socket.listen(senders + 8)  # room for other processes, which take() rejects
        except BaseException:
            self._socket.close()
            raise

    def take(self, senders: dict[int, int], *, rank: int, phase: str, timeout: float) -> dict[int, int]:
        """Returns the files that were sent: an open descriptor for each rank in `senders`, which maps ranks
        to pids. The caller closes them. Connections of other processes are closed unread. Raises PeerTimeout
        for a file that is late, PeerLost if a rank sent something else, and OSError."""
        ranks = {pid: peer for peer, pid in senders.items()}
        deadline = time.monotonic() + timeout
        taken: dict[int, int] = {}
        try:
            while ranks:
                peer = next(iter(ranks.values()))
                try:
                    self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                    connection, _ = self._socket.accept()
                    with connection:
                        pid, uid = _other_end(connection)
                        if uid != os.geteuid() or pid not in ranks:
                            continue
                        peer = ranks.pop(pid)
                        connection.settimeout(max(deadline - time.monotonic(), 0.001))
                        taken[peer] = _receive(connection, rank, peer, phase)
                except TimeoutError as error:
                    raise _late(rank, peer, phase, timeout) from error
        except BaseException:
            for descriptor in taken.values():
                os.close(descriptor)
            raise
        return taken

    def close(self) -> None:
        """Closes the mailbox and drops files that were not taken."""
        self._socket.close()


def send(
    descriptor: int, mailbox: str, *, pid: int, rank: int, peer: int, phase: str, timeout: float
) -> None:
    """Sends an open file to the mailbox named `mailbox`, which must belong to rank `peer`, process `pid`.
    Raises PeerLost if that process ended or does not own it, PeerTimeout if it stays full, and OSError."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        while True:
            try:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                connection.connect(f"\0{mailbox}")
                break
            except (BlockingIOError, TimeoutError) as error:  # the socket's queue is full
                if time.monotonic() >= deadline:
                    raise _late(rank, peer, phase, timeout) from error
                time.sleep(0.001)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise of_peer(PeerLost, f"rank {peer} (pid {pid}) has ended", rank, phase, peer) from error
        found, uid = _other_end(connection)
        if (found, uid) != (pid, os.geteuid()):
            other = f"pid {found} of user {uid}, expected pid {pid} of user {os.geteuid()}"
            raise of_peer(PeerLost, f"the socket of rank {peer} belongs to {other}", rank, phase, peer)
        try:
            socket.send_fds(connection, [b"1"], [descriptor])
        except TimeoutError as error:
            raise _late(rank, peer, phase, timeout) from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise of_peer(PeerLost, f"rank {peer} (pid {pid}) has ended", rank, phase, peer) from error


def _receive(connection: socket.socket, rank: int, peer: int, phase: str) -> int:
    # Not socket.recv_fds, which ignores its flags in Python 3.10 and 3.11: children would inherit the file.
    data, control, flags, _ = connection.recvmsg(1, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    descriptors = [
        number
        for level, kind, content in control
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (number,) in _INT.iter_unpack(content[: len(content) // _INT.size * _INT.size])
    ]
    if data == b"1" and len(descriptors) == 1 and not flags & socket.MSG_CTRUNC:
        return descriptors[0]
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    text = (
        f"rank {peer} sent {len(data)} bytes and {len(descriptors)} open files, expected 1 and 1 (is this "
        "process out of descriptors? ulimit -n)"
    )
    raise of_peer(PeerLost, text, rank, phase, peer)


def _other_end(connection: socket.socket) -> tuple[int, int]:
    """Returns (pid, uid) of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _late(rank: int, peer: int, phase: str, timeout: float) -> PeerTimeout:
    return of_peer(PeerTimeout, f"rank {peer} did not come within {timeout:g} s", rank, phase, peer)
