"""DeepEP's tuning parameters, which moecomm accepts and does not need."""

from __future__ import annotations

from dataclasses import dataclass

from moecomm.errors import InvalidArgument


@dataclass
class Config:
    """Sizes of DeepEP's kernels and queues, with DeepEP's names and defaults.

    moecomm chooses these by the sizes of a call, so they change nothing here; `Buffer.set_num_sms` does.
    Both size hints are 0, since a caller need not give memory: moecomm makes it by the largest batch.

    Raises InvalidArgument for what DeepEP asserts.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise InvalidArgument(f"num_sms is {self.num_sms}, expected at least 0")
        for kind in ("nvl", "rdma"):
            sent = getattr(self, f"num_max_{kind}_chunked_send_tokens")
            received = getattr(self, f"num_max_{kind}_chunked_recv_tokens")
            if not 0 < sent < received:
                raise InvalidArgument(
                    f"num_max_{kind}_chunked_send_tokens is {sent}, expected more than 0 and less than "
                    f"num_max_{kind}_chunked_recv_tokens, {received}"
                )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint
