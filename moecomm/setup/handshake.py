"""The first and the last steps of a communicator's construction: its ranks meet first, and open
their connections last."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import moecomm._C as _C
from moecomm.env import Env, read_env
from moecomm.errors import MismatchedArguments, MoecommError, OutOfMemory, Unsupported
from moecomm.setup.rendezvous import Rendezvous
from moecomm.setup.topology import NodeMap, find_nodes
from moecomm.setup.version import __version__

Native = TypeVar("Native", bound="_C.Communicator | _C.DeviceCommunicator")


def identity() -> dict[str, str]:
    """Returns two texts: `node`, equal for processes that can map each other's shared memory and know each
    other's pids, and `network`, equal for processes with the same network addresses."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        shm = os.stat("/dev/shm")
        return {
            "node": f"{boot}/{shm.st_dev}/{shm.st_ino}/{os.readlink('/proc/self/ns/pid')}",
            "network": f"{boot}/{os.readlink('/proc/self/ns/net')}",
        }
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise OutOfMemory(f"{error}; raise the limit of open files (ulimit -n)") from error
        raise Unsupported(f"this machine lacks what moecomm needs: {error}") from error


class GroupInfo(NamedTuple):
    """The ranks that build a communicator together, with the facts that each has sent."""

    messages: list[dict[str, Any]]
    """The message of every rank, with its facts."""
    hosts: list[str]
    """The host of every rank: equal for ranks that can share memory."""
    nodes: NodeMap

    def host_ranks(self, rank: int) -> int:
        """Returns the number of ranks on the host of `rank`."""
        return self.hosts.count(self.hosts[rank])


def handshake(
    rendezvous: Rendezvous,
    arguments: dict[str, Any],
    error: MoecommError | None,
    facts: Callable[[], dict[str, Any]] = dict,
) -> GroupInfo:
    """Runs a construction's first step: ranks meet, compare versions and arguments, and find nodes. All raise
    an `error` that one brings. arguments: those that all ranks have to share, as JSON values; facts: returns
    further facts for the other ranks."""

    def describe_self() -> dict[str, Any]:
        if error is not None:
            raise error
        return {
            "version": __version__,
            "arguments": arguments,
            "job": secrets.token_hex(16),
            **identity(),
            **facts(),
        }

    try:
        messages = rendezvous.step("construction: arguments", describe_self)
    finally:
        error = None  # no cycle: the error's traceback holds describe_self, which holds the error
    for rank, other in enumerate(messages):
        if other.get("version") != messages[0].get("version"):
            raise MismatchedArguments(
                f"ranks run different versions of moecomm: rank 0 has {messages[0].get('version')}, "
                f"rank {rank} has {other.get('version')}; install the same one on every host"
            )
        for name, value in messages[0]["arguments"].items():
            theirs = other["arguments"].get(name)
            if theirs != value:
                raise MismatchedArguments(
                    f"ranks disagree on {name}: rank 0 has {value!r}, rank {rank} has {theirs!r}"
                )
    hosts = [str(message["node"]) for message in messages]
    return GroupInfo(messages, hosts, find_nodes(hosts, arguments["ranks_per_node"]))


def connect(
    rendezvous: Rendezvous, group_info: GroupInfo, create: Callable[[], Native], *bases: list[int]
) -> Native:
    """Runs the last steps of a construction and returns this rank's native communicator, which `create`
    makes with its shared memory, connected to those of the other ranks. bases: on CUDA one list, the
    addresses here of the windows of the node's ranks."""
    made: list[Native] = []

    def name() -> dict[str, Any]:
        return {"memory": made[0].link(), "pid": os.getpid()}

    def join() -> None:
        node = [peers[rank] for rank in group_info.nodes.local_ranks(rendezvous.rank)]
        connect: Any = made[0].connect
        connect(*bases, [str(peer["memory"]) for peer in node], [int(peer["pid"]) for peer in node])

    try:
        rendezvous.step("construction: communicators", lambda: made.append(create()))
        # The memory has a name only from here until all ranks have mapped it. The memory is created before,
        # which may take a while.
        peers = rendezvous.step("construction: names", name)
        rendezvous.step("construction: mapping", join)
    except BaseException:
        if made:
            made[0].close()
        raise
    finally:
        if made:
            made[0].unlink()
    if group_info.nodes.nodes > 1:
        _connect_rail(rendezvous, group_info, made[0])
    return made[0]


def check_host_room(rendezvous: Rendezvous, group_info: GroupInfo, needed: int) -> None:
    """Raises OutOfMemory on all ranks if a host's /dev/shm lacks `needed` bytes for each of its ranks."""
    messages = rendezvous.step("construction: host memory", lambda: {"available": _C.shm_available_bytes()})
    for host in dict.fromkeys(group_info.hosts):
        ranks = [rank for rank, its_host in enumerate(group_info.hosts) if its_host == host]
        available = min(int(messages[rank]["available"]) for rank in ranks)
        if needed * len(ranks) > available:
            raise OutOfMemory(
                f"the windows of {len(ranks)} ranks need {needed * len(ranks)} bytes of /dev/shm, "
                f"{available} are free"
                + ("" if len(ranks) == rendezvous.size else f" on the host of rank {ranks[0]}")
                + "; give it more room (docker: --shm-size) or lower max_tokens, hidden or top_k",
                needed=needed * len(ranks),
                available=available,
            )


def open_rail(native: Native, job: bytes, env: Env) -> _C.Rail:
    """Opens a communicator's endpoints towards other nodes, as `env` asks. `job`: bytes that identify the
    communicator and are the same on all its ranks."""
    provider, interface = env.fabric_provider or "", env.fabric_interface or ""
    return native.open_rail(job=job, provider=provider, interface=interface, lanes=env.fabric_lanes or 0)


def _connect_rail(rendezvous: Rendezvous, group_info: GroupInfo, native: Native) -> None:
    """Connects to the ranks with this rank's local index (its rail); an error closes the communicator."""
    rails: list[_C.Rail] = []

    def opened() -> dict[str, Any]:
        job = bytes.fromhex(group_info.messages[0]["job"])  # outsiders cannot guess it
        rails.append(open_rail(native, job, read_env()))
        addresses = [address.hex() for address in rails[0].endpoint_addresses]
        return {"endpoint_addresses": addresses, "endpoint": rails[0].endpoint}

    def connect() -> None:
        peers = [messages[rank] for rank in group_info.nodes.rail(rendezvous.rank)]
        addresses = [[bytes.fromhex(lane) for lane in peer["endpoint_addresses"]] for peer in peers]
        native.connect_rail(rails[0], addresses, [peer["endpoint"] for peer in peers])

    try:
        messages = rendezvous.step("construction: network", opened)
        _require_addresses(group_info, [message["endpoint"] for message in messages])
        # connect() takes up to 1.5 times the timeout.
        rendezvous.step("construction: connections", connect, patience=2.0)
    except BaseException:
        native.close()
        raise


def _require_addresses(group_info: GroupInfo, endpoints: list[str]) -> None:
    """Raises MismatchedArguments if ranks on different hosts or containers share a non-loopback address."""
    seen: dict[str, int] = {}
    for rank, endpoint in enumerate(endpoints):
        address = endpoint.rpartition(":")[0].strip("[]")
        first = seen.setdefault(address, rank)
        networks = [str(group_info.messages[each].get("network")) for each in (first, rank)]
        if networks[0] != networks[1] and not ipaddress.ip_address(address).is_loopback:
            raise MismatchedArguments(
                f"ranks {first} and {rank} are on different hosts or containers and give the same address, "
                f"{address}, which leads each to itself (docker0 has one on every host); set "
                "MOECOMM_FABRIC_INTERFACE to the interface, or address, by which the nodes reach each other"
            )
