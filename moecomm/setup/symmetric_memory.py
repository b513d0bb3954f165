"""Symmetric memory on GPUs: every rank allocates the same number of bytes, and maps every rank's allocation.

Follows the CUDA Driver API reference, "Virtual Memory Management". Physical memory (cuMemCreate) becomes a
file descriptor, which another process of this host can import. Both processes map it (cuMemAddressReserve,
cuMemMap, cuMemSetAccess), and it is freed with the last mapping, however the processes end. No multicast.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from moecomm.device import cuda_driver
from moecomm.device.cuda_driver import Driver, DriverError
from moecomm.errors import MoecommError, OutOfMemory, Unsupported
from moecomm.setup import fd_exchange as descriptors
from moecomm.setup.handshake import identity
from moecomm.setup.rendezvous import Rendezvous

Message = dict[str, Any]


class SymmetricMemory:
    """One allocation per rank, of the same size on all, mapped by every rank.

    `close`, the garbage collector or the end of the interpreter unmaps it, peers' memory first. Peers take no
    part, and may have ended; memory that a peer still maps stays valid for that peer. Do not close this
    during the capture of a CUDA graph: `close` waits for the device.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        bytes: int,
        device_index: int,
        *,
        ranks: Sequence[int] | None = None,
        api: Any = None,
    ) -> None:
        """Builds the memory, zeroed, and mapped by all ranks of `rendezvous`, which serves one memory.

        `bytes`: at least 1, the same on all ranks; rounded up to the granularity of the GPUs (2 MiB).
        `device_index`: as torch.cuda counts. Ranks may share a GPU. `ranks`: the ranks that map each other's
        memory, including this rank, the same list on all of them; None: all ranks. `api`: stands
        in for cuda.bindings.driver in tests.

        Raises on all ranks, with everything freed: OutOfMemory with `needed` and `available` bytes of the
        device; Unsupported if cuda-bindings or a driver is missing, if a GPU cannot share memory, or if two
        GPUs do not reach each other (the text names ranks and GPUs); PeerTimeout and PeerLost.
        """
        self._rendezvous = rendezvous
        self._ranks = list(range(rendezvous.size) if ranks is None else ranks)
        self._others = [rank for rank in self._ranks if rank != rendezvous.rank]
        self._index = device_index
        self._api = api
        self._context: Any = None
        self.bytes = bytes
        """The size of one allocation in bytes."""
        self.bases: list[int] = []
        """Device addresses in this process of the allocations of `ranks`; empty when closed."""
        # Resources are freed last in, first out.
        self._kept = ExitStack()
        self._close = weakref.finalize(self, _free, self._kept, os.getpid())
        try:
            with ExitStack() as passing:
                self._build(passing)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for the device, then unmaps the peers' memory and this rank's. A second call does nothing.
        A failure to free something is a RuntimeWarning."""
        self.bases.clear()
        self._close()

    def _build(self, passing: ExitStack) -> None:
        """Builds all mappings. `passing`: resources that are freed when all ranks have mapped all memory, or
        on an error."""
        peers = self._step("construction: GPUs", lambda: self._introduce(passing))
        self._alignment = max(int(peer["granularity"]) for peer in peers)
        self.bytes = -(-self.bytes // self._alignment) * self._alignment
        own: list[int] = []

        def allocate() -> None:
            self._check_reach(peers)
            own.append(self._allocate(passing))

        self._step("construction: GPU memory", allocate)
        self._step("construction: GPU handles", lambda: self._send(peers, own[0]))
        self._step("construction: GPU mapping", lambda: self._attach(peers, passing))
        self.bases.extend(self._address(peer) for peer in self._ranks)
        self._kept.callback(_synchronize, self._driver, self._context)

    def _introduce(self, passing: ExitStack) -> Message:
        """Opens the GPU and returns the facts that the other ranks need before allocation."""
        self._driver = cuda_driver.load(self._api)
        self._device = self._driver.call("cuDeviceGet", self._index)
        self._gpu = self._driver.gpu(self._device)
        if not self._gpu.virtual_memory:
            raise Unsupported(f"{self._gpu} has no virtual memory management (cuMemCreate)")
        if not self._gpu.posix_fd:
            raise Unsupported(
                f"{self._gpu} of rank {self._rendezvous.rank} cannot share memory as file descriptors"
            )
        self._kind = self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        # torch also uses this context; retained here, it lives as long as the mappings.
        self._context = self._driver.call("cuDevicePrimaryCtxRetain", self._device)
        self._kept.callback(self._driver.free, "cuDevicePrimaryCtxRelease", self._device)
        self._mailbox = descriptors.Mailbox(self._rendezvous.size)
        passing.callback(self._mailbox.close)
        option = self._driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = self._driver.call("cuMemGetAllocationGranularity", self._properties(), option)
        return {
            "granularity": int(granularity),
            "host": identity(),
            "pid": os.getpid(),
            "mailbox": self._mailbox.name,
            "gpu": str(self._gpu),
            "uuid": self._gpu.uuid,
        }

    def _check_reach(self, peers: list[Message]) -> None:
        """Checks, as far as this is possible before mapping, that this GPU reaches the memory of `peers`. A
        peer's GPU that this process does not see cannot be queried."""
        ordinals = {self._driver.gpu(device).uuid: device for device in self._driver.devices()}
        for rank in self._others:
            peer = peers[rank]
            if peer["host"] != identity():
                raise Unsupported(
                    f"ranks {self._rendezvous.rank} and {rank} share memory and not a network namespace, so "
                    "they cannot pass each other open files: start them in one (containers: --network=host)"
                )
            other = ordinals.get(peer["uuid"])
            if other is None or peer["uuid"] == self._gpu.uuid:
                continue
            if not self._driver.call("cuDeviceCanAccessPeer", self._device, other):
                raise self._unreachable(rank, peer, "cuDeviceCanAccessPeer says no")

    def _allocate(self, passing: ExitStack) -> int:
        """Allocates and maps this rank's memory, zeroed; returns its descriptor."""
        driver = self._driver
        handle = self._create(self._properties())
        passing.callback(driver.free, "cuMemRelease", handle)  # the mapping keeps the memory alive
        reserved = self.bytes * len(self._ranks)
        self._base = int(driver.call("cuMemAddressReserve", reserved, self._alignment, 0, 0))
        self._kept.callback(driver.free, "cuMemAddressFree", self._base, reserved)
        self._map(self._rendezvous.rank, handle)
        with driver.current(self._context):
            driver.call("cuMemsetD8", self._address(self._rendezvous.rank), 0, self.bytes)
            driver.call("cuCtxSynchronize")
        shared: int = driver.call("cuMemExportToShareableHandle", handle, self._kind, 0)
        passing.callback(os.close, shared)
        return shared

    def _create(self, properties: Any) -> Any:
        try:
            return self._driver.call("cuMemCreate", self.bytes, properties, 0)
        except DriverError as error:
            if not self._driver.out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # frees torch's cached memory, as torch does when out of memory
        return self._driver.call("cuMemCreate", self.bytes, properties, 0)

    def _send(self, peers: list[Message], descriptor: int) -> None:
        rank = self._rendezvous.rank
        for peer in self._others:
            descriptors.send(
                descriptor,
                peers[peer]["mailbox"],
                pid=peers[peer]["pid"],
                rank=rank,
                peer=peer,
                phase="construction: GPU handles",
                timeout=self._rendezvous.timeout,
            )

    def _attach(self, peers: list[Message], passing: ExitStack) -> None:
        """Maps the other ranks' memory. All ranks must have sent their descriptors before."""
        taken = self._mailbox.take(
            {peer: peers[peer]["pid"] for peer in self._others},
            rank=self._rendezvous.rank,
            phase="construction: GPU mapping",
            timeout=self._rendezvous.timeout,
        )
        for descriptor in taken.values():
            passing.callback(os.close, descriptor)
        for rank in self._others:
            try:
                handle = self._driver.call("cuMemImportFromShareableHandle", taken[rank], self._kind)
                try:
                    self._map(rank, handle)
                finally:
                    self._driver.free("cuMemRelease", handle)
            except DriverError as error:
                if self._driver.out_of_memory(error):
                    raise
                raise self._unreachable(rank, peers[rank], str(error)) from error

    def _map(self, rank: int, handle: Any) -> None:
        """Maps a handle at the address for the memory of `rank`, for loads and stores of this GPU."""
        api = self._driver.api
        address = self._address(rank)
        self._driver.call("cuMemMap", address, self.bytes, 0, handle, 0)
        self._kept.callback(self._driver.free, "cuMemUnmap", address, self.bytes)
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(self._device)
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._driver.call("cuMemSetAccess", address, self.bytes, [access], 1)

    def _address(self, rank: int) -> int:
        """Returns the address at which this process maps the memory of `rank`."""
        return self._base + self._ranks.index(rank) * self.bytes

    def _properties(self) -> Any:
        api = self._driver.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._device)
        properties.requestedHandleTypes = self._kind
        return properties

    def _step(self, phase: str, action: Callable[[], Message | None]) -> list[Message]:
        """Runs one step on all ranks; any failure is raised as a MoecommError, so that the other ranks learn
        of it."""

        def typed() -> Message | None:
            try:
                return action()
            except DriverError as error:
                raise self._typed(error) from error
            except OSError as error:
                raise Unsupported(f"{phase}: {error}") from error

        return self._rendezvous.step(phase, typed)

    def _typed(self, error: DriverError) -> MoecommError:
        if not self._driver.out_of_memory(error):
            return Unsupported(f"GPU {self._index}: {error}")
        available = 0
        with suppress(DriverError), self._driver.current(self._context):
            available = int(self._driver.call("cuMemGetInfo")[0])
        return OutOfMemory(
            f"the window needs {self.bytes} bytes, {available} are free on GPU {self._index} ({error}); "
            "lower max_tokens or hidden, give the model less, or set MOECOMM_WHOLE_SOURCES=0 on all ranks, "
            "which takes less where ranks outnumber top_k",
            needed=self.bytes,
            available=available,
        )

    def _unreachable(self, rank: int, peer: Message, why: str) -> Unsupported:
        return Unsupported(
            f"rank {self._rendezvous.rank} on {self._gpu} cannot reach the memory of rank {rank} on "
            f"{peer['gpu']}: {why}; the GPUs of a communicator need peer access to each other (NVLink, or "
            "PCIe peer to peer)"
        )


def _synchronize(driver: Driver, context: Any) -> None:
    """Waits for the device, since a running kernel may still use the mappings. Ignores errors: no kernel can
    run in a context that has failed or is gone."""
    with suppress(DriverError), driver.current(context):
        driver.call("cuCtxSynchronize")


def _free(kept: ExitStack, owner: int) -> None:
    """Frees the memory, except in a process that was forked from the process `owner`: the child has a copy of
    the object, but does not own the mappings."""
    if os.getpid() == owner:
        kept.close()
