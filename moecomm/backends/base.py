"""What a backend is: the methods that the communicator and autograd call, whatever the memory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from moecomm import _C
from moecomm.env import read_env
from moecomm.errors import InvalidArgument, MismatchedArguments, MoecommError, OutOfMemory, Unsupported
from moecomm.memory import MemoryPlan
from moecomm.nodes import NodeMap, find_nodes
from moecomm.rendezvous import Rendezvous
from moecomm.types import Layout, PlanViews, Work
from moecomm.version import __version__

Result = TypeVar("Result")
Finished = TypeVar("Finished")


class _Native(Protocol):
    def close(self) -> None: ...
    def open_rail(
        self, *, job: bytes, provider: str, interface: str, lanes: int, shuffle: int
    ) -> _C.Rail: ...
    def connect_rail(self, rail: _C.Rail, cards: list[bytes], endpoints: list[str]) -> None: ...
    def network(self) -> str: ...
    def network_lanes(self) -> int: ...


Native = TypeVar("Native", bound=_Native)


class RawDispatch(NamedTuple):
    """The tensors of a DispatchOutput before autograd has seen them, and the plan behind its handle."""

    tokens_PH: torch.Tensor
    weights: torch.Tensor | None
    topk_idx_PK: torch.Tensor | None
    plan_views: Callable[[], PlanViews]
    """Makes them; called when one is first asked for, if ever."""
    plan: Any
    """The backend's own: it has `tokens` and `rows`. Redispatch and combine take it, or a TensorPlan."""
    scales: torch.Tensor | None = None
    """With tokens handed on as they travelled: (P, ceil(H / 128)) float32."""


class TensorPlan(NamedTuple):
    """A plan as a tensor and numbers that are known without looking into it."""

    blob: torch.Tensor
    """(words,) int32 with the fields of `PlanFields`; the rest is the backend's own. In device memory it is
    the device that writes it, so it stays valid over replays of a CUDA graph."""
    layout: Layout
    tokens: int
    rows: int
    stream: int = 0
    """That the blob's memory belongs to."""


class PlanFields(NamedTuple):
    """Where to find what a DispatchOutput tells of its plan, in int32 words of a blob."""

    words: int
    overflow: int
    expert_rows: slice
    offsets: slice
    """Expert layout."""
    source_ends: slice
    """Rank layout."""

    def views(self, blob: torch.Tensor, layout: Layout) -> PlanViews:
        """Those of the plan in `blob`."""
        ends = self.source_ends if layout == "rank" else self.offsets
        return blob[self.expert_rows], blob[ends], blob[self.overflow]


class DispatchCall(NamedTuple):
    """The checked arguments of a dispatch."""

    x_TH: torch.Tensor
    x_scales: torch.Tensor | None
    """With x_TH in the wire format already: (T, ceil(H / 128)) float32."""
    topk_idx_TK: torch.Tensor
    topk_weights_TK: torch.Tensor | None
    layout: Layout
    alignment: int
    capacity: int
    """-1 for exact sizes."""
    dequantize: bool


class Backend(Protocol):
    """Turns tensors into pointers for one kind of memory.

    `dispatch` and its halves, `redispatch`, `combine`, `empty_input`, `ready` and `fail` are called within
    `run` or `launch` only, which put the operations of all threads into one order.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    top_k: int
    memory: MemoryPlan
    nodes: NodeMap
    network_lanes: int
    """Endpoints towards other nodes; 0 on one node."""
    num_sms: int
    """SMs that an operation holds; on the CPU, threads."""
    plan_fields: PlanFields
    """Of the blob in a TensorPlan."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where operations of `launch` run; None where there are no streams."""

    def limit_sms(self, num_sms: int | None) -> int | None:
        """Operations that begin from now on use so many SMs; None: as many as the communicator was made with.
        Returns what it was before."""

    def run(self, name: str, operation: Callable[[], Result]) -> Result:
        """The result of `operation` after all before it; `name` is for profilers."""

    def settle_begun(self) -> None:
        """Completes what `launch` has only begun."""

    def launch(
        self,
        name: str,
        begin: Callable[[], Any],
        complete: Callable[[Any], Result] | None,
        finish: Callable[[Result], Finished],
        inputs: tuple[Any, ...],
    ) -> Work[Finished]:
        """Starts an operation beside the caller, after all before it: `complete(begin())`, where `complete`
        keeps the host waiting for peers, or `begin()` alone.

        `finish` is for the caller's thread, in `wait`. `inputs`: tensors that the operation reads (what is no
        tensor is left alone).
        """

    def ready(self) -> None:
        """Raises what must keep the next dispatch from running; on all ranks alike."""

    def dispatch(self, call: DispatchCall) -> RawDispatch:
        """Sends rows and receives those that arrive."""

    def begin_dispatch(self, call: DispatchCall) -> Any:
        """The first half of one without capacity: brings the rows on their way. What it returns goes to
        `finish_dispatch`."""

    def finish_dispatch(self, begun: Any) -> RawDispatch:
        """The second half: the rows that arrive."""

    def tensor_plan(self, plan: Any) -> TensorPlan:
        """The plan of a RawDispatch as a tensor; it lives as long as the blob's memory."""

    def redispatch(
        self,
        plan: Any,
        rows_TH: torch.Tensor,
        scales_P: torch.Tensor | None,
        other_PH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows along a kept plan, times scales; with `other_PH` also <row, other[p]> for each place."""

    def combine(
        self,
        plan: Any,
        rows_PH: torch.Tensor | None,
        weights_P: torch.Tensor | None,
        weight_grads: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(y_TH, or None without rows; gradients (T, K) of the routing weights, or None without
        weight_grads)."""

    def empty_input(self, num_tokens: int) -> torch.Tensor:
        """(num_tokens, H), in the window if that saves a copy."""

    def fail(self, error: MoecommError) -> NoReturn:
        """Tells all ranks that this one's arguments are bad, and raises `error`."""

    def check(self) -> None:
        """Raises what is pending: CapacityExceeded, or what broke the communicator."""

    def stats(self) -> dict[str, float]:
        """Counters since construction or the last reset."""

    def reset_stats(self) -> None:
        """Sets the counters to zero."""

    def close(self) -> None:
        """Waits for what is under way, tells the peers, and lets go of the window."""


def node_identity() -> str:
    """Equal for processes that can map each other's shared memory and watch each other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/dev/shm').st_dev}/{os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise Unsupported(f"this machine lacks what moecomm needs: {error}") from error


class Party(NamedTuple):
    """Who builds a communicator together."""

    messages: list[dict[str, Any]]
    """Every rank's, with the facts that it told."""
    hosts: list[str]
    """Of every rank: equal for ranks that can share memory."""
    nodes: NodeMap

    def host_ranks(self, rank: int) -> int:
        """Ranks on the host of `rank`."""
        return self.hosts.count(self.hosts[rank])

    @property
    def job(self) -> str:
        """A name of this construction that nobody else can guess: that of rank 0."""
        return str(self.messages[0]["job"])


def meet(
    meeting: Rendezvous,
    arguments: dict[str, Any],
    error: MoecommError | None,
    facts: Callable[[], dict[str, Any]] = dict,
) -> Party:
    """The first step of a construction: who is there, on which nodes.

    Args:
        arguments: those of the Communicator that all ranks have to share, as JSON values.
        error: why this rank's are bad; it still meets the others, so that all raise.
        facts: more that the others should know.
    """

    def introduce() -> dict[str, Any]:
        if error is not None:
            raise error
        return {
            "version": __version__,
            "arguments": arguments,
            "node": node_identity(),
            "job": secrets.token_hex(16),
            **facts(),
        }

    messages = meeting.step("construction: arguments", introduce)
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
    return Party(messages, hosts, find_nodes(hosts, arguments["ranks_per_node"]))


def introduce(
    meeting: Rendezvous,
    party: Party,
    create: Callable[[], Native],
    link: Callable[[Native], str],
    connect: Callable[[Native, list[str], list[int]], None],
    unlink: Callable[[Native], None],
) -> Native:
    """The last steps of a construction: this rank's native communicator, with the ways to the others open.

    Args:
        party: from `meet`.
        create: makes it, with its shared memory.
        link: names that memory.
        connect: opens those of the node's ranks by name and process id, by local index.
        unlink: takes the name away again.
    """
    made: list[Native] = []

    def make() -> dict[str, Any]:
        made.append(create())
        return {}

    def name() -> dict[str, Any]:
        return {"memory": link(made[0]), "pid": os.getpid()}

    def join() -> dict[str, Any]:
        node = [peers[rank] for rank in party.nodes.local_ranks(meeting.rank)]
        connect(made[0], [str(peer["memory"]) for peer in node], [int(peer["pid"]) for peer in node])
        return {}

    try:
        meeting.step("construction: communicators", make)
        # Names exist from here until all have mapped: not while memory is taken, which can last.
        peers = meeting.step("construction: names", name)
        meeting.step("construction: mapping", join)
    except BaseException:
        if made:
            made[0].close()
        raise
    finally:
        if made:
            unlink(made[0])
    if party.nodes.nodes > 1:
        _connect_rail(meeting, party, made[0])
    return made[0]


def check_host_room(meeting: Rendezvous, party: Party, needed: int) -> None:
    """Raises OutOfMemory on all ranks where /dev/shm of a host has not `needed` bytes for each of its
    ranks."""
    messages = meeting.step("construction: host memory", lambda: {"available": _C.shm_available_bytes()})
    for host in dict.fromkeys(party.hosts):
        ranks = [rank for rank, its_host in enumerate(party.hosts) if its_host == host]
        available = min(int(messages[rank]["available"]) for rank in ranks)
        if needed * len(ranks) > available:
            raise OutOfMemory(
                f"the windows of {len(ranks)} ranks need {needed * len(ranks)} bytes of /dev/shm, "
                f"{available} are free"
                + ("" if len(ranks) == meeting.size else f" on the host of rank {ranks[0]}")
                + "; give it more room (docker: --shm-size) or lower max_tokens, hidden or top_k",
                needed=needed * len(ranks),
                available=available,
            )


def describe(native: _Native, nodes: NodeMap) -> str:
    """What a native communicator says of itself and of its network."""
    network = native.network()
    return f"{native}{f'; {nodes.nodes} nodes, {network}' if network else ''}"


def _connect_rail(meeting: Rendezvous, party: Party, native: _Native) -> None:
    """Opens the ways to the ranks of this rank's rail; an error closes the communicator."""
    rails: list[_C.Rail] = []

    def open_rail() -> dict[str, Any]:
        env = read_env()
        rails.append(
            native.open_rail(
                job=bytes.fromhex(party.job),
                provider=env.fabric_provider or "",
                interface=env.fabric_interface or "",
                lanes=env.fabric_lanes or 0,
                shuffle=env.fabric_shuffle or 0,
            )
        )
        return {"card": rails[0].card.hex(), "endpoint": rails[0].endpoint}

    def connect() -> dict[str, Any]:
        peers = [messages[rank] for rank in party.nodes.rail(meeting.rank)]
        cards = [_card(peer) for peer in peers]
        native.connect_rail(rails[0], cards, [str(peer.get("endpoint")) for peer in peers])
        return {}

    try:
        messages = meeting.step("construction: network", open_rail)
        # connect() takes up to one and a half times the timeout.
        meeting.step("construction: connections", connect, patience=2.0)
    except BaseException:
        native.close()
        raise


def _card(message: dict[str, Any]) -> bytes:
    try:
        return bytes.fromhex(str(message["card"]))
    except (KeyError, ValueError) as error:
        raise InvalidArgument("a rank sent no address card, expected one in hexadecimal") from error
