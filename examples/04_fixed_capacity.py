"""4. Buffers of fixed size: static shapes, no wait for a row count, and what happens when they are too small.

    python examples/04_fixed_capacity.py
    torchrun --nproc-per-node 2 examples/04_fixed_capacity.py

By default a dispatch is dropless: it returns exactly the arriving rows, and the host waits for their number.
With `capacity=P` it returns P rows for any routing. Rows that do not fit are left out and reported, and
nothing is overwritten; the next call, or `check()`, raises CapacityExceeded with the number of rows needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import moecomm

EXPERTS, HIDDEN, TOP_K, TOKENS = 4, 16, 2, 32


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    with moecomm.Communicator(
        num_experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32, device="cpu"
    ) as comm:
        fill(comm)
    if dist.is_initialized():
        dist.destroy_process_group()


def fill(comm: moecomm.Communicator) -> None:
    torch.manual_seed(comm.rank)
    x_TH = torch.randn(TOKENS, HIDDEN)
    balanced_TK = torch.rand(TOKENS, EXPERTS).topk(TOP_K, dim=-1).indices
    crowded_TK = torch.tensor([0, 1]).expand(TOKENS, TOP_K).contiguous()  # all choose experts 0 and 1

    # 1.5 times what balanced routing needs. No routing can need more than `enough`.
    capacity = TOKENS * TOP_K * 3 // 2
    enough = comm.size * TOKENS * min(TOP_K, comm.num_local_experts)

    out = comm.dispatch(x_TH, balanced_TK, capacity=capacity)
    comm.check()
    assert len(out.tokens) == capacity
    say(comm, f"balanced: {int(out.offsets[-1])} rows in {capacity} places, overflow {int(out.overflow)}")
    # Rows past offsets[-1] are unspecified. Combine does not read them, so no mask is needed.
    y_TH = comm.combine(out.tokens, out.handle)
    torch.testing.assert_close(y_TH, TOP_K * x_TH)

    small = capacity // 2
    out = comm.dispatch(x_TH, crowded_TK, capacity=small)
    assert len(out.tokens) == small
    counts_L = out.tokens_per_expert.tolist()
    say(comm, f"crowded: {counts_L} rows for {small} places, overflow {int(out.overflow)}")
    try:
        comm.check()
    except moecomm.CapacityExceeded as error:  # on all ranks, also on those whose rows fit
        say(comm, f"check() raised CapacityExceeded: {error}")
        needed = error.needed
    else:
        raise AssertionError("the overflow was not reported")
    assert small < needed <= enough
    comm.check()  # the error is reported once: a second check passes

    # The communicator stays usable: with the number from the error the same tokens fit.
    out = comm.dispatch(x_TH, crowded_TK, capacity=needed)
    comm.check()
    torch.testing.assert_close(comm.combine(out.tokens, out.handle), TOP_K * x_TH)
    say(comm, f"again with capacity {needed}: every row has its place")


def say(comm: moecomm.Communicator, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
