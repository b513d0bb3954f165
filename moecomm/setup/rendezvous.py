"""The rendezvous of the ranks of a new communicator: small JSON messages through the store of
torch.distributed.

The store is there with every backend (gloo, NCCL), has its own deadline, and carries text that is parsed as
JSON only.
"""

from __future__ import annotations

import json
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

_LOST = (PeerTimeout, PeerLost)
"""The errors about another rank, which may know more."""

_built: dict[str, int] = defaultdict(int)  # communicators begun so far, by name of their group


class Rendezvous:
    """The rendezvous of one construction, numbered, of all ranks of a group (None: this process alone)."""

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.timeout = timeout
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        if group is None:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        _built[group.group_name] += 1
        self._store = PrefixStore(
            f"moecomm/{group.group_name}/{_built[group.group_name]}", _get_default_store()
        )

    def exchange(self, phase: str, message: dict[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        """Sends a message and returns every rank's message of this phase, by rank.

        Raises PeerTimeout, naming the rank that did not come within `patience` times the timeout, or PeerLost
        if the store is gone.
        """
        if self._store is None:
            return [message]
        limit = patience * self.timeout
        deadline = time.monotonic() + limit
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
        if self._store is None:
            return
        try:
            self._store.set(f"{phase}/{self.rank}", json.dumps(message))
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _receive(self, phase: str, peer: int, deadline: float, limit: float) -> dict[str, Any]:
        assert self._store is not None
        key = f"{phase}/{peer}"
        try:
            self._store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            message = json.loads(self._store.get(key))
        except dist.DistNetworkError as error:
            raise self._lost(phase, error) from error
        except RuntimeError as error:
            if time.monotonic() < deadline:
                raise self._lost(phase, error) from error
            raise PeerTimeout(
                f"rank {self.rank}, {phase}: rank {peer} did not come within {limit:g} s; "
                "every rank of the group has to build the communicator",
                rank=self.rank,
                peer=peer,
                phase=phase,
            ) from error
        if not isinstance(message, dict):
            raise MoecommError(
                f"rank {self.rank}, {phase}: rank {peer} sent {type(message).__name__}, expected an object"
            )
        return message

    def _lost(self, phase: str, error: Exception) -> PeerLost:
        return PeerLost(
            f"rank {self.rank}, {phase}: the store of torch.distributed is gone ({error})",
            rank=self.rank,
            phase=phase,
        )
