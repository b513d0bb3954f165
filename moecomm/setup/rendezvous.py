"""The rendezvous of the ranks of a new communicator: small JSON messages through the store of
torch.distributed.

The store exists with every backend (gloo, NCCL), has its own deadline, and carries text that is only parsed
as JSON.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from moecomm.errors import (
    InvalidArgument,
    MismatchedArguments,
    MoecommError,
    OutOfMemory,
    PeerLost,
    PeerTimeout,
    Unsupported,
    from_message,
    of_peer,
    to_message,
)
from moecomm.types import Group

_EXPLANATION_S = 1.0
"""The seconds for which a rank that has lost a peer waits for an explanation from that peer."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""The first and the longest pause, in seconds, between two checks whether all ranks have arrived."""

_LOST = (PeerTimeout, PeerLost)
"""Errors about another rank; that rank may know the cause."""

_LOOK_S = 0.5
"""The seconds after which a rank that waits for a message checks whether the peer has given up."""

_building: dict[str, threading.Lock] = defaultdict(threading.Lock)
"""Locks, by group name: a thread holds its group's lock while it builds a communicator over the group."""


class _BegunAnew(MoecommError):
    """A peer has given up this rank's construction, and has begun another."""


class Rendezvous:
    """Brings together the ranks of a group (None: this process alone) that build a communicator at the same
    time, regardless of what they have built, or failed to build, before. As a context it keeps this process's
    other threads from building a communicator over the group.

    Raises InvalidArgument for a group that was destroyed, Unsupported for torch's "fake" backend, OutOfMemory
    if no descriptors are free for a connection to the store, PeerLost if the store is gone.
    """

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.timeout, self.absence = timeout, 0.0
        self.rank, self.size = 0, 1
        self._store: Store | None = None
        self._numbers: list[str] | None = None  # the ranks' random numbers, once they have met
        self._old_conflict: str | None = None  # value of the key "conflict" when this rank came
        if group is None:
            return
        try:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            members, fake = dist.get_process_group_ranks(group), dist.get_backend(group) == "fake"
        except (KeyError, ValueError) as error:
            raise InvalidArgument(
                f"group is no process group of torch.distributed any more ({error}): pass one made since "
                "destroy_process_group()"
            ) from error
        if fake:
            raise Unsupported("group is of torch's 'fake' backend, whose ranks cannot exchange anything")
        self._name = group.group_name
        self._members = ",".join(map(str, members))
        self._own = f"{secrets.token_hex(8)} {self._members}"
        phase = "construction: arguments"
        try:
            # Raises unless two descriptors are free: in the process that has the store both ends take one.
            # clone() would retry for the store's own timeout, 30 minutes.
            with socket.socket(), socket.socket():
                pass
            # A clone: a store has one connection, which another thread may hold while it waits.
            default: Any = _get_default_store()  # torch's stubs lack clone()
            store: Store = default.clone()
        except OSError as error:
            raise OutOfMemory(f"{error}; raise the limit of open files (ulimit -n)") from error
        except RuntimeError as error:
            raise self._lost(phase, error) from error
        self._store = self._base = PrefixStore(f"moecomm/{self._name}", store)

    def __enter__(self) -> Rendezvous:
        if self._store is not None and not _building[self._name].acquire(timeout=self.timeout):
            raise InvalidArgument(
                f"group is one that another thread of rank {self.rank} has been building a communicator over "
                f"for {self.timeout:g} s, expected one construction at a time"
            )
        return self

    def __exit__(self, *raised: Any) -> None:
        # The error is a variable of frames in its traceback: a cycle that would keep the store's connection.
        traceback.clear_frames(raised[2])
        if self._store is not None:
            _building[self._name].release()

    def _meet(self, phase: str, deadline: float, limit: float) -> None:
        """Replaces the store by one to which only the ranks of this construction write. Ranks that were
        restarted, have failed before, or were in another group of this name have left keys in the store. So
        each process writes a random number, and all these numbers form the name of the new store. A process
        continues when every rank has written that name, which only a rank that waits now can do.

        torch gives groups of different ranks the same name if not all ranks call new_group() for each. So a
        rank writes its group's members beside its number. A number that appears after this rank came is of a
        rank that waits now: other members show that mistake. The key "conflict" tells the waiting ranks."""
        numbers = [f"number/{peer}" for peer in range(self.size)]
        names = [f"name/{peer}" for peer in range(self.size)]
        before = self._present(phase, [*numbers, "conflict"])
        self._set(phase, numbers[self.rank], self._own)
        before[numbers[self.rank]] = self._own
        self._old_conflict = before.get("conflict")
        members, name, pause = self._members, "", _SHORTEST_PAUSE_S
        while True:
            found = self._present(phase, [*numbers, "conflict"])
            for key, value in found.items():
                if value == before.get(key):
                    continue
                if key == "conflict":
                    raise self._conflict(value)
                if value.split()[1] != members:
                    conflict = f"{self._own} {value.split()[1]}"
                    self._set(phase, "conflict", conflict)
                    raise self._conflict(conflict)
            late = next((peer for peer, key in enumerate(numbers) if key not in found), None)
            if late is None:
                own = hashlib.sha256("\n".join(found[key] for key in numbers).encode()).hexdigest()[:16]
                if own != name:
                    self._set(phase, names[self.rank], own)
                    name = own
                written = self._present(phase, names)
                late = next((peer for peer, key in enumerate(names) if written.get(key) != name), None)
                if late is None:
                    self._store = PrefixStore(name, self._base)
                    self._numbers = [found[key] for key in numbers]
                    return
            if time.monotonic() > deadline:
                if members in found.get("conflict", "").split()[1:]:  # the others have raised this conflict
                    raise self._conflict(found["conflict"])
                raise self._timeout(phase, late, limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S + self.size / 1000)

    def exchange(self, phase: str, message: dict[str, Any], patience: float = 1.0) -> list[dict[str, Any]]:
        """Sends a message and returns every rank's message in this phase, by rank. Raises PeerTimeout for a
        rank that did not arrive within `patience` times the timeout, PeerLost if the store is gone or a rank
        has given up and begun another construction."""
        if self._store is None:
            return [message]
        limit = patience * self.timeout
        meeting = None if self._numbers else time.monotonic() + limit
        while True:
            if meeting is not None:
                self._store, self._numbers = self._base, None
                self._meet(phase, meeting, limit)
            self._tell(phase, message)
            deadline = time.monotonic() + limit
            try:
                return [self._receive(phase, peer, deadline, limit) for peer in range(self.size)]
            except _BegunAnew as error:
                if meeting is None:
                    raise of_peer(PeerLost, str(error), self.rank, phase) from None

    def step(
        self, phase: str, action: Callable[[], dict[str, Any] | None], patience: float = 1.0
    ) -> list[dict[str, Any]]:
        """Runs one step on all ranks: exchanges the results of `action` (None counts as an empty message). If
        `action` raises an error on one rank, all ranks raise that error, rather than errors about a lost
        rank. An `action` that itself waits for peers needs more `patience`, so that ranks whose action ends
        early wait for the others'."""
        error: MoecommError | None = None
        try:
            message = action() or {}
        except MoecommError as failed:
            error = failed
            message = {"error": to_message(failed)}
        if isinstance(error, _LOST):
            # `action` has already waited, and a peer that is gone would not answer here either.
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
        """Follows the chain of blamed peers to the first error that is not about a lost peer; returns `error`
        if there is none, or a peer does not answer."""
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
        if self._numbers:
            self._set(phase, f"{phase}/{self.rank}", json.dumps(message))

    def _set(self, phase: str, key: str, value: str) -> None:
        assert self._store is not None
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _present(self, phase: str, keys: list[str]) -> dict[str, str]:
        """Returns the keys among `keys` that the store has, with their values."""
        try:
            there = keys if self._base.check(keys) else [key for key in keys if self._base.check([key])]
            values = self._base.multi_get(there) if there else []
            return {key: value.decode() for key, value in zip(there, values, strict=True)}
        except RuntimeError as error:
            raise self._lost(phase, error) from error

    def _receive(self, phase: str, peer: int, deadline: float, limit: float) -> dict[str, Any]:
        """Returns the message of `peer` in this phase, as soon as it exists."""
        key = f"{phase}/{peer}"
        assert self._store is not None and self._numbers is not None
        while True:
            begin = time.monotonic()
            span = min(max(deadline - begin, 0.01), _LOOK_S)
            try:
                self._store.wait([key], timedelta(seconds=span))
                return json.loads(self._store.get(key))
            except dist.DistNetworkError as error:
                raise self._lost(phase, error) from error
            except RuntimeError as error:
                if time.monotonic() < begin + 0.9 * span:
                    raise self._lost(phase, error) from error
                found = self._present(phase, [f"number/{peer}", "conflict"])
                conflict = found.get("conflict")
                if conflict not in (None, self._old_conflict) and self._members in conflict.split()[1:]:
                    raise self._conflict(conflict) from None  # the peer raises this conflict in _meet()
                if found.get(f"number/{peer}") != self._numbers[peer]:
                    text = f"rank {peer} has given up this construction and begun another"
                    raise _BegunAnew(text) from None
                if time.monotonic() >= deadline:
                    raise self._timeout(phase, peer, limit) from error

    def _timeout(self, phase: str, peer: int, limit: float) -> PeerTimeout:
        text = (
            f"rank {peer} did not come within {limit:g} s; every rank of the group has to be building the "
            "communicator at the same time (raise timeout where some come late)"
        )
        return of_peer(PeerTimeout, text, self.rank, phase, peer)

    def _conflict(self, conflict: str) -> MismatchedArguments:
        _, one, other = conflict.split()
        return MismatchedArguments(
            f"ranks disagree on the members of group {self._name!r}: rank {self.rank} has one of the ranks "
            f"{self._members}, others have groups of that name of the ranks {one} and of the ranks "
            f"{other}; every rank has to call dist.new_group() for all groups, those it is not in too, in "
            "the same order"
        )

    def _lost(self, phase: str, error: Exception) -> PeerLost:
        return of_peer(PeerLost, f"the store of torch.distributed is gone ({error})", self.rank, phase)
