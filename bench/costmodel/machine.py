"""Machines described by a few numbers (rates and latencies), and those whose numbers are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from moecomm import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank, in one direction. GB are 1e9 bytes. Raises InvalidArgument for a rate of zero."""

    node_GBps: float  # between ranks of a node: NVLink, or shared memory
    memory_GBps: float  # a rank's own memory, read and written bytes together
    reduce_GBps: float  # gathering expert rows and storing their sums, read and written bytes together
    dispatch_fixed_us: float  # a dispatch without rows within one node: launches, route, signals, plan
    combine_fixed_us: float  # a combine without rows within one node

    nic_GBps: float  # one NIC, with puts as large as one likes
    nic_share: float = 1.0  # part of nic_GBps that a stream of puts reaches
    ranks_per_nic: float = 1.0  # ranks that share a NIC
    nic_half_bytes: float = 0.0  # put size at which the NIC gives half of its rate (Hockney's n_1/2)
    nic_latency_us: float = 0.0  # from a put's post to the remote completion's being seen, without its bytes

    put_rate: float = math.inf
    """Puts a second that a proxy thread posts and completes while it counts as many arrivals."""
    command_rate: float = math.inf  # commands a second that a proxy thread takes from its ring
    proxy_us: float = 0.0  # from compute to the proxy and back: a command there, and a flag on the other side
    staging_GBps: float = math.inf
    """Copying rows to where the NIC reads them, or from where it wrote them, whichever is slower."""

    def __post_init__(self) -> None:
        times = ("dispatch_fixed_us", "combine_fixed_us", "nic_half_bytes", "nic_latency_us", "proxy_us")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in times:
                good, bound = math.isfinite(value) and value >= 0, "a finite number of at least 0"
            else:
                good, bound = value > 0, "above 0"
            if not good:
                raise InvalidArgument(f"Machine.{field.name} is {value!r}, must be {bound}")
        if self.nic_share > 1:
            raise InvalidArgument(f"Machine.nic_share is {self.nic_share!r}, must be at most 1")

    @property
    def rail_bytes_per_s(self) -> float:
        """The share of its NIC's bandwidth that one rank has, in bytes/s."""
        return self.nic_GBps * 1e9 * self.nic_share / self.ranks_per_nic

    @property
    def round_s(self) -> float:
        """Seconds for one message from rank to rank over the network, proxies included."""
        return (self.nic_latency_us + self.proxy_us) * 1e-6


# Where each number is from: docs/model.md. The first five and staging were measured; of the network of "h200"
# everything is an assumption.
_H200 = Machine(  # a NIC of 400 Gb/s for each GPU, which reads and writes the GPU's memory
    node_GBps=346.4,
    memory_GBps=4143.0,
    reduce_GBps=26 * 44.0,
    dispatch_fixed_us=47.6,
    combine_fixed_us=34.8,
    proxy_us=2.3,
    command_rate=8e6,
    staging_GBps=4143.0 / 2,
    nic_GBps=50.0,
    nic_share=0.9,
    nic_latency_us=5.0,
    nic_half_bytes=4096,
    put_rate=1e6,
)
MACHINES: dict[str, Machine] = {
    "h200": _H200,
    # the same where the NIC cannot reach the GPU's memory: rows pass through pinned host memory
    "h200-host-ring": replace(_H200, staging_GBps=45.0),
    # nodes emulated on one host with GPUs: libfabric over loopback TCP
    "h200-tcp": replace(
        _H200,
        staging_GBps=45.0,
        nic_GBps=7.36,
        nic_share=1.0,
        nic_half_bytes=15700,
        nic_latency_us=3.9,
        put_rate=math.inf,
    ),
    # nodes emulated on a machine with two cores, a rank each: libfabric over loopback TCP
    "cpu-tcp": Machine(
        node_GBps=14.0,
        memory_GBps=14.0,
        reduce_GBps=4.0,
        dispatch_fixed_us=100.0,
        combine_fixed_us=100.0,
        staging_GBps=7.0,
        nic_GBps=0.9,
        nic_latency_us=20.0,
    ),
}
