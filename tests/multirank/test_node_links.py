"""Two hosts with a network between them, as near to it as one machine comes: two network namespaces, each
with an address of its own, joined by a veth pair. Results are the same over it, also when it is slow or away
for a moment; when it is cut, both sides say so, and go on once it is back.

Needs root, `ip` and `tc`; the ranks still share /dev/shm and process numbers, so `ranks_per_node=1` makes
nodes of them.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests import cases
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.node_jobs import (
    LONG,
    NEVER_NOTICED,
    SHORT,
    Found,
    caught,
    communicator,
    left_since,
    refusals,
    run,
    small_case,
    steps,
    warm_up,
)
from tests.oracle import assert_none, play

pytestmark = needs_fabric

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Hosts:
    """Network namespaces in the role of hosts: by rank, their names, ends of the link, and addresses."""

    namespaces: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str]

    def enter(self, rank: int) -> None:
        """Moves this thread, and those that it starts from then on, to that rank's host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.namespaces[rank]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns of {self.namespaces[rank]}")

    def set_link(self, rank: int, state: str) -> None:
        _tool("ip", "-n", self.namespaces[rank], "link", "set", self.interfaces[rank], state)

    def await_link(self) -> None:
        """The system takes up to a second to see that an end of a link that is up has another end."""
        limit = time.monotonic() + 20.0
        for namespace, interface in zip(self.namespaces, self.interfaces, strict=True):
            while "state UP" not in _tool("ip", "-n", namespace, "link", "show", interface):
                assert time.monotonic() < limit, f"{interface} is not up"
                time.sleep(0.02)

    def shape(self, rate: str) -> None:
        """Limits the rate at which both ends send."""
        for namespace, interface in zip(self.namespaces, self.interfaces, strict=True):
            limits = ("rate", rate, "burst", "64kb", "latency", "50ms")
            _tool("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limits)


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20.0)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install iproute2")
    number = os.getpid() % 16384  # of a /30 for tests of networks (RFC 2544), and in names
    names = (f"moecomm{number}a", f"moecomm{number}b")
    made = Hosts(names, (f"va{number}", f"vb{number}"), _addresses(number))
    try:
        try:
            for name in names:
                _tool("ip", "netns", "add", name)
            ends = [["name", end, "netns", name] for end, name in zip(made.interfaces, names, strict=True)]
            _tool("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except OSError as error:
            pytest.skip(f"cannot make network namespaces: {error}")
        for rank in range(2):
            address = ("dev", made.interfaces[rank], f"{made.addresses[rank]}/30")
            _tool("ip", "-n", names[rank], "addr", "add", *address)
            _tool("ip", "-n", names[rank], "link", "set", "lo", "up")
            made.set_link(rank, "up")
        made.await_link()
        yield made
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                _tool("ip", "netns", "del", name)


def _addresses(number: int) -> tuple[str, str]:
    base = 4 * number
    return (f"198.18.{base // 256 % 256}.{base % 256 + 1}", f"198.18.{base // 256 % 256}.{base % 256 + 2}")


def _docker0(hosts: Hosts, carrier: bool) -> None:
    """Gives both hosts an interface of one address, made before the link between them. Docker's is without
    a carrier while no container runs."""
    _tool("ip", "-n", hosts.namespaces[0], "link", "del", hosts.interfaces[0])
    for name in hosts.namespaces:
        _tool("ip", "-n", name, "link", "add", "docker0", "type", "veth", "peer", "inside")
        _tool("ip", "-n", name, "addr", "add", "dev", "docker0", "172.17.0.1/16")
        _tool("ip", "-n", name, "link", "set", "docker0", "up")
        if carrier:
            _tool("ip", "-n", name, "link", "set", "inside", "up")
    ends = [["name", *each] for each in zip(hosts.interfaces, ["netns"] * 2, hosts.namespaces, strict=True)]
    _tool("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for rank in range(2):
        hosts.set_link(rank, "up")
    hosts.await_link()


# -- results -------------------------------------------------------------------------------------------------
def _on_hosts(
    rank: int, world_size: int, hosts: Hosts, some: list[Case]
) -> list[tuple[bool, list[str], dict[str, float]]]:
    hosts.enter(rank)
    found = []
    for case in some:
        with communicator(case, LONG) as comm:
            found.append(
                (hosts.addresses[rank] in str(comm), play(comm, case, rank, gradients=False), comm.stats())
            )
    return found


def _verify(results: list[list[tuple[bool, list[str], dict[str, float]]]]) -> None:
    for found in zip(*results, strict=True):
        assert all(by_address for by_address, _, _ in found), "not by the address of the link"
        assert all(stats["network_puts"] > 0 for _, _, stats in found)
        assert_none([arrays for _, arrays, _ in found])


def test_results_over_a_network(hosts: Hosts, seed: int) -> None:
    base = Case(tokens=(300, 217), num_experts=8, hidden=1024, top_k=3, seed=seed, ranks_per_node=1)
    some = [base, replace(base, layout="rank", dtype="bfloat16", slack=-5), replace(base, tokens=(0, 9))]
    _verify(run(2, _on_hosts, hosts, some))


def test_results_over_a_slow_network(hosts: Hosts, seed: int) -> None:
    """Results are right where rows take long and the network drops some, as more are sent than it keeps."""
    try:
        hosts.shape("100mbit")
    except OSError as error:
        pytest.skip(f"cannot shape a link: {error}")
    case = Case(tokens=(160, 200), num_experts=4, hidden=1024, top_k=2, seed=seed, ranks_per_node=1)
    _verify(run(2, _on_hosts, hosts, [case]))


# -- a link that fails ---------------------------------------------------------------------------------------
def _away_for_a_moment(rank: int, world_size: int, hosts: Hosts, case: Case) -> list[str]:
    def cut() -> None:
        time.sleep(0.1)
        hosts.set_link(1, "down")
        time.sleep(0.5)
        hosts.set_link(1, "up")

    hosts.enter(rank)
    with communicator(case, LONG) as comm:
        steps(comm, case, rank, 3)
        dist.barrier()
        cutting = threading.Thread(target=cut)
        if rank == 0:
            cutting.start()
        more = torch.ones(1)
        while more.item():
            steps(comm, case, rank, 5)
            more.fill_(cutting.is_alive())
            dist.broadcast(more, 0)
        return play(comm, case, rank, gradients=False)


def test_a_link_that_is_away_for_a_moment(hosts: Hosts) -> None:
    case = replace(small_case(2, 1), tokens=(64, 64), hidden=1 << 12)
    assert_none(run(2, _away_for_a_moment, hosts, case))


def _cut(rank: int, world_size: int, hosts: Hosts, case: Case) -> Found:
    """Rows are on their way when the link goes; a construction fails meanwhile; then it comes back."""
    hosts.enter(rank)
    before = warm_up(case, rank)
    comm = communicator(case, SHORT)
    steps(comm, case, rank, 3)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.2, hosts.set_link, (1, "down")).start()
    found = caught(partial(steps, comm, case, rank, 1_000_000))
    found["since the cut"] = found.pop("seconds") - 0.2
    found["refusals"] = refusals(comm, partial(cases.dispatch, comm, case, rank))
    closing = time.monotonic()
    comm.close()
    del comm
    found["closing"] = time.monotonic() - closing
    found["left"] = left_since(before)

    dist.barrier()
    found["without a link"] = caught(lambda: communicator(case, SHORT))
    found["left then"] = left_since(before)
    dist.barrier()
    if rank == 0:
        hosts.set_link(1, "up")
        hosts.await_link()
    dist.barrier()
    with communicator(case, LONG) as comm:
        found["afterwards"] = play(comm, case, rank, gradients=False)
    return found


def test_a_link_that_is_cut(hosts: Hosts) -> None:
    case = replace(small_case(2, 1), tokens=(64, 64), hidden=1 << 14)
    results = run(2, _cut, hosts, case)
    assert_none([found["afterwards"] for found in results])
    for rank, found in enumerate(results):
        assert found["type"] in ("PeerTimeout", "PeerLost"), found
        assert (found["rank"], found["peer"]) == (rank, 1 - rank), found
        assert found["phase"] in found["text"] and f"rank {1 - rank}" in found["text"], found
        assert found["since the cut"] < NEVER_NOTICED and found["closing"] < NEVER_NOTICED, found
        assert found["refusals"] == {found["type"]}, found
        assert found["left"] == {} and found["left then"] == {}, found
        failed = found["without a link"]
        # The host whose end is down has only its loopback left.
        assert failed["type"] == "MismatchedArguments", failed
        assert "127.0.0.1" in failed["text"] and "MOECOMM_FABRIC_INTERFACE" in failed["text"], failed
        print(f"rank {rank}: {found['text']} after {found['since the cut']:.2f} s, {found['closing']:.2f} s")


# -- addresses -----------------------------------------------------------------------------------------------
def _address(rank: int, world_size: int, hosts: Hosts) -> tuple[bool, list[str]]:
    hosts.enter(rank)
    case = small_case(2, 1)
    with communicator(case, LONG) as comm:
        return hosts.addresses[rank] in str(comm), play(comm, case, rank, gradients=False)


@pytest.mark.parametrize("ipv6", [True, False])
def test_an_interface_without_a_carrier_is_no_way_to_the_other_host(hosts: Hosts, ipv6: bool) -> None:
    """Over IPv6 with a default route, or IPv4 without one, as nodes that only compute have it."""
    _docker0(hosts, carrier=False)
    addresses = ("fd00::1", "fd00::2") if ipv6 else hosts.addresses
    for rank in range(2):
        at = ["ip", "-n", hosts.namespaces[rank]]
        if ipv6:
            _tool(*at, "addr", "add", "dev", hosts.interfaces[rank], f"{addresses[rank]}/64", "nodad")
            _tool(*at, "route", "add", "default", "via", addresses[1 - rank], "dev", hosts.interfaces[rank])
        else:
            _tool(*at, "addr", "add", "dev", hosts.interfaces[rank], f"{addresses[rank]}/30")
    results = run(2, _address, replace(hosts, addresses=addresses))
    assert_none([problems for _, problems in results])
    assert [named for named, _ in results] == [True, True], "another address was used"


def _one_address(rank: int, world_size: int, hosts: Hosts) -> Found:
    hosts.enter(rank)
    return caught(lambda: communicator(small_case(2, 1), LONG))


def test_hosts_that_give_one_address_are_refused(hosts: Hosts) -> None:
    _docker0(hosts, carrier=True)
    for found in run(2, _one_address, hosts):
        assert found["type"] == "MismatchedArguments", found
        assert all(word in found["text"] for word in ("172.17.0.1", "MOECOMM_FABRIC_INTERFACE")), found
