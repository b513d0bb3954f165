"""Plain copies, the ceiling on a CPU: every rank copies as many bytes as the operation gives it, all at once,
into memory it already owns.

Nothing that ends with these bytes in ordinary memory can be faster than writing them. Source and destination
are as large as the result, and all their pages have been touched.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ..harness.case import Case
from ..harness.path import CALL, Path, Verdict
from ..harness.timing import Clock, fastest


class Memcpy:
    """Two buffers of `num_bytes` and the calls that copy one to the other."""

    def __init__(self, num_bytes: int, seed: int, device: torch.device) -> None:
        self._source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._seed = seed
        self.fill(0)

    def fill(self, round: int) -> None:
        """Random, never zero bytes into the source, poison into the destination."""
        rng = np.random.default_rng([self._seed, 4, round])
        # A large random block repeated: as good as fresh bytes for a copy, and quick to make.
        block = torch.from_numpy(
            rng.integers(1, 256, size=min(self._source.numel(), 1 << 20) or 1, dtype=np.uint8)
        ).to(self._source.device)
        for at in range(0, self._source.numel(), block.numel()):
            part = self._source[at : at + block.numel()]
            part.copy_(block[: part.numel()])
        self._target.fill_(0)

    def torch_copy(self) -> None:
        self._target.copy_(self._source)

    def libc_memmove(self) -> None:
        ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._target.numel())

    def wrong(self) -> int:
        """Bytes that did not arrive."""
        return int(torch.count_nonzero(self._target != self._source))

    def corrupt(self) -> None:
        """Flips a bit of the destination."""
        self._target[-1:] ^= 1


def make_path(case: Case, clock: Clock) -> Path:
    """A copy of this rank's useful bytes on its own device. On the CPU it is the faster of torch's copy_ and
    libc's memmove, chosen by a short trial on all ranks.
    """
    copier = Memcpy(case.useful_R[case.rank], case.options.seed, case.device)
    copies = {"torch.Tensor.copy_": copier.torch_copy}
    if case.device.type == "cpu":
        copies["memmove"] = copier.libc_memmove
    note = fastest(copies, clock)

    def check(round: int) -> Verdict:
        copier.fill(round)
        copies[note]()
        if case.options.inject_error:
            copier.corrupt()
        return Verdict(copier.wrong())

    return Path(name="memcpy", calls={CALL: copies[note]}, check=check, remote=False, note=note)
