"""1. Dispatch tokens to the ranks of their experts, and combine the experts' results.

    python examples/01_dispatch_combine.py                            # one process that has all experts
    torchrun --nproc-per-node 3 examples/01_dispatch_combine.py       # six experts on three ranks

Names end in shape letters: T tokens of this rank, H hidden, K top-k, E experts, L local experts, P received
rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import moecomm

EXPERTS, HIDDEN, TOP_K, TOKENS = 6, 8, 2, 4


def main() -> None:
    if dist.is_torchelastic_launched():  # started by torchrun
        dist.init_process_group("gloo")
    # Without a process group the communicator is this process's alone; the code below stays the same.
    with moecomm.Communicator(
        num_experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float32, device="cpu"
    ) as comm:
        route(comm)
    if dist.is_initialized():
        dist.destroy_process_group()


def route(comm: moecomm.Communicator) -> None:
    # Token t of rank r is a row filled with 10 r + t, so that the output shows where a row comes from.
    names_T = 10.0 * comm.rank + torch.arange(TOKENS)
    x_TH = names_T.unsqueeze(1).expand(TOKENS, HIDDEN).contiguous()
    # A router would choose the experts; here token t goes to the experts t and t + 1 + r (mod E), or to t + 1
    # where that is t again.
    first_T = torch.arange(TOKENS) % EXPERTS
    topk_idx_TK = torch.stack((first_T, (first_T + 1 + comm.rank % (EXPERTS - 1)) % EXPERTS), dim=1)
    weights_TK = torch.tensor([0.75, 0.25]).expand(TOKENS, TOP_K).contiguous()

    out = comm.dispatch(x_TH, topk_idx_TK, weights_TK)

    # The rows of each local expert are contiguous, ordered by source rank, then by token.
    lines = [f"rank {comm.rank} of {comm.size} received {len(out.tokens)} rows"]
    y_PH = torch.empty_like(out.tokens)
    begin = 0
    for local, end in enumerate(out.offsets.tolist()):
        expert = comm.rank * comm.num_local_experts + local
        lines.append(f"  expert {expert}: tokens {[int(row[0]) for row in out.tokens[begin:end]]}")
        y_PH[begin:end] = out.tokens[begin:end] * (expert + 1)  # this expert's network: times (expert + 1)
        begin = end

    # Each token gets the weighted sum of its experts' rows, on the rank that brought it.
    y_TH = comm.combine(y_PH, out.handle, weights=out.weights)

    expected_TH = x_TH * (weights_TK * (topk_idx_TK + 1)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(y_TH, expected_TH)
    lines.append(f"  combined: token {int(names_T[3])} became {y_TH[3, 0]:.2f}, as it must")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
