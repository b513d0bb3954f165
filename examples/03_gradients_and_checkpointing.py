"""3. Gradients flow through dispatch and combine, also when activations are recomputed.

    python examples/03_gradients_and_checkpointing.py
    torchrun --nproc-per-node 2 examples/03_gradients_and_checkpointing.py

The backward of a dispatch is a combine, and vice versa, along the forward's plan. Under
torch.utils.checkpoint the forward runs a second time during the backward, and finds that plan again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import moecomm

EXPERTS, HIDDEN, TOP_K, TOKENS = 4, 16, 2, 10


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    with moecomm.Communicator(
        num_experts=EXPERTS, hidden=HIDDEN, top_k=TOP_K, max_tokens=TOKENS, dtype=torch.float64, device="cpu"
    ) as comm:
        compare(comm)
    if dist.is_initialized():
        dist.destroy_process_group()


def compare(comm: moecomm.Communicator) -> None:
    # Expert e is one matrix. Every rank knows all of them here, so that it can check the result by itself.
    experts_EHH = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=seed(0), dtype=torch.float64)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=seed(1 + comm.rank), dtype=torch.float64, requires_grad=True)
    scores_TE = torch.randn(TOKENS, EXPERTS, generator=seed(100 + comm.rank), dtype=torch.float64)
    scores_TE.requires_grad_()

    def with_moecomm(x_TH: Tensor, scores_TE: Tensor) -> Tensor:
        chosen_TK, topk_idx_TK = scores_TE.topk(TOP_K, dim=-1)
        out = comm.dispatch(x_TH, topk_idx_TK, chosen_TK.softmax(dim=-1))
        groups = out.tokens.tensor_split(out.offsets[:-1].long())
        mine_LHH = experts_EHH[comm.rank * comm.num_local_experts :]
        rows_PH = torch.cat([torch.tanh(rows @ mine_LHH[local]) for local, rows in enumerate(groups)])
        return comm.combine(rows_PH, out.handle, weights=out.weights)

    def without(x_TH: Tensor, scores_TE: Tensor) -> Tensor:
        chosen_TK, topk_idx_TK = scores_TE.topk(TOP_K, dim=-1)
        all_TEH = torch.tanh(torch.einsum("th,ehg->teg", x_TH, experts_EHH))
        taken_TKH = all_TEH.gather(1, topk_idx_TK.unsqueeze(-1).expand(-1, -1, HIDDEN))
        return (chosen_TK.softmax(dim=-1).unsqueeze(-1) * taken_TKH).sum(dim=1)

    def gradients(y_TH: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y_TH.square().sum(), (x_TH, scores_TE)))

    expected = gradients(without(x_TH, scores_TE))
    plain = gradients(with_moecomm(x_TH, scores_TE))
    torch.testing.assert_close(plain, expected, rtol=1e-10, atol=1e-10)
    worst = max((a - b).abs().max().item() for a, b in zip(plain, expected, strict=True))
    say(comm, f"gradients of tokens and scores: within {worst:.1e} of those computed on one rank")

    comm.reset_stats()
    again = gradients(checkpoint(with_moecomm, x_TH, scores_TE, use_reentrant=False))
    stats = comm.stats()
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert stats["plans_reused"] >= 1, stats
    say(comm, "with activation checkpointing: the same bits")
    say(
        comm,
        f"it took {stats['dispatch_calls']} dispatches and {stats['combine_calls']} combines, "
        f"forward, recomputed forward and backward together; plans reused: {stats['plans_reused']}",
    )


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def say(comm: moecomm.Communicator, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
