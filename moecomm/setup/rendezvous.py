"""The rendezvous of the ranks of a new communicator: small JSON messages through the store of
torch.distributed.

The store is there with every backend (gloo, NCCL), has its own deadline, and carries text that is parsed as
JSON only.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from moecomm.errors import MoecommError, PeerLost, PeerTimeout, from_message, to_message
from moecomm.types import Group

_EXPLANATION_S = 1.0
"""The seconds that a rank which has lost a peer waits for an explanation from that peer."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Pauses between looks for ranks that have not come, the first and the longest."""

_LOST = (PeerTimeout, PeerLost)
"""The errors about another rank, which may know more."""

_built: dict[str, int] = defaultdict(int)  # communicators begun so far, by name of their group


class Rendezvous:
    """The rendezvous of one construction, numbered, of all ranks of a group (None: this process alone)."""

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        self._met = False
        if group is None:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        _built[group.group_name] += 1
        self._store = PrefixStore(
            f"moecomm/{group.group_name}/{_built[group.group_name]}", _get_default_store()
        )

    def _meet(self, phase: str, deadline: float, limit: float) -> None:
        """Makes the store one that only the processes of this run write to. torchrun keeps its store when it
        starts ranks again, and what ranks before them have written is still there: so each process writes a
        random number, and the name of the new store is made of all of them. A process goes on when every
        rank has written down that same name, which a rank of a run before cannot have done."""
        assert self._store is not None
        own, pause = secrets.token_hex(8), _SHORTEST_PAUSE_S
        self._set(phase, f"number/{self.rank}", own)
        while True:
            numbers = [self._get(phase, f"number/{peer}", peer, deadline, limit) for peer in range(self.size)]
            name = hashlib.sha256(" ".join(numbers).encode()).hexdigest()[:16]
            self._set(phase, f"name/{self.rank}", name)
            names = [self._get(phase, f"name/{peer}", peer, deadline, limit) for peer in range(self.size)]
            late = [peer for peer, found in enumerate(names) if found != name]
            if not late:
                self._store, self._met = PrefixStore(name, self._store), True
                return
            if time.monotonic() > deadline:
                raise self._timeout(phase, late[0], limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def exchange(self, phase: str, message: dict[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        """Sends a message and returns every rank's message of this phase, by rank.

        Raises PeerTimeout, naming the rank that did not come within `patience` times the timeout, or PeerLost
        if the store is gone.
        """
        if self._store is None:
            return [message]
        limit = patience * self.timeout
        deadline = time.monotonic() + limit
        if not self._met:
            self._meet(phase, deadline, limit)
        self._tell(phase, message)
        return [self._receive(phase, peer, deadline, limit) for peer in range(self.size)]

    def step(
        self, phase: str, action: Callable[[], dict[str, Any]], patience: float = 1.0
    ) -> list[dict[str, Any]]:
        """Runs one step on all ranks: exchanges the result of `action`. An error that it raises on one rank
        is raised on all, instead of errors that say that this rank was lost.

        An `action` that waits for peers itself needs more `patience`: otherwise early ranks time out on ranks
        that still wait for a missing one.
        """
        error: MoecommError | None = None
        try:
            message = action()
        except MoecommError as failed:
            error = failed
            message = {"error": to_message(failed)}
        if isinstance(error, _LOST):
            # `action` has waited already, and a peer that is gone would not answer here either.
            self._tell(phase, message)
            raise self._cause(phase, error)
        messages = self.exchange(phase, message, patience)
        if error is not None:
            raise error
        errors = [
            from_message(other["error"], rank) for rank, other in enumerate(messages) if "error" in other
        ]
        if errors:
            raise next((each for each in errors if not isinstance(each, _LOST)), errors[0])
        return messages

    def _cause(self, phase: str, error: PeerTimeout | PeerLost) -> MoecommError:
        """Returns the error that the peer named by `error` has raised itself, or the one that this names, and
        so on; `error` where all of them lost a peer, or say nothing."""
        found: MoecommError = error
        asked = {self.rank}
        while isinstance(found, _LOST):
            peer = found.peer
            if self._store is None or peer in asked or not 0 <= peer < self.size:
                return error
            asked.add(peer)
            try:
                other = self._receive(phase, peer, time.monotonic() + _EXPLANATION_S, _EXPLANATION_S)
            except MoecommError:
                return error
            if "error" not in other:
                return error
            found = from_message(other["error"], peer)
        found.__cause__ = error
        return found

    def _tell(self, phase: str, message: dict[str, Any]) -> None:
        if self._store is not None and self._met:
            self._set(phase, f"{phase}/{self.rank}", json.dumps(message))

    def _set(self, phase: str, key: str, value: str) -> None:
        assert self._store is not None
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _get(self, phase: str, key: str, peer: int, deadline: float, limit: float) -> str:
        """Returns what `peer` has written under this key, as soon as it is there."""
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            value: bytes = self._store.get(key)
            return value.decode()
        except dist.DistNetworkError as error:
            raise self._lost(phase, error) from error
        except RuntimeError as error:
            if time.monotonic() < deadline:
                raise self._lost(phase, error) from error
            raise self._timeout(phase, peer, limit) from error

    def _receive(self, phase: str, peer: int, deadline: float, limit: float) -> dict[str, Any]:
        message = json.loads(self._get(phase, f"{phase}/{peer}", peer, deadline, limit))
        if not isinstance(message, dict):
            raise MoecommError(
                f"rank {self.rank}, {phase}: rank {peer} sent {type(message).__name__}, expected an object"
            )
        return message

    def _timeout(self, phase: str, peer: int, limit: float) -> PeerTimeout:
        return PeerTimeout(
            f"rank {self.rank}, {phase}: rank {peer} did not come within {limit:g} s; "
            "every rank of the group has to build the communicator",
            rank=self.rank,
            peer=peer,
            phase=phase,
        )

    def _lost(self, phase: str, error: Exception) -> PeerLost:
        return PeerLost(
            f"rank {self.rank}, {phase}: the store of torch.distributed is gone ({error})",
            rank=self.rank,
            phase=phase,
        )
