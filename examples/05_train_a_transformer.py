"""5. A whole small transformer that trains: accumulation, clipping, checkpointing, evaluation, save and load.

    python examples/05_train_a_transformer.py
    torchrun --nproc-per-node 2 examples/05_train_a_transformer.py

It learns to continue counts such as 3 5 7 9, which needs attention: two numbers are needed to know the step.
The printed losses are the same for any number of ranks that divides the sequences of a batch. docs/guide.md
goes through it part by part.

Shape letters: B sequences of this rank, S positions, N heads, D width of a head, H hidden, V vocabulary.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.nn import (
    MoEConfig,
    MoELayer,
    clip_grad_norm,
    keep_plans,
    set_loss_scale,
    sharded_state,
    sync_gradients,
)

VOCABULARY, SEQUENCE, HEADS = 16, 12, 2
BATCH, MICROBATCHES, STEPS = 16, 2, 16  # sequences of a microbatch over all ranks; microbatches per step

CONFIG = MoEConfig(
    hidden=32,
    ffn_hidden=32,
    num_experts=4,
    top_k=2,
    num_shared_experts=1,
    aux_loss="sequence",  # balances the experts within each sequence
    aux_loss_coef=0.01,
    init_std=0.1,
)


class Block(nn.Module):
    """Causal attention and a mixture of experts, each applied to normalised input and added to its input."""

    def __init__(self, comm: moecomm.Communicator) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(CONFIG.hidden) for _ in range(2))
        self.qkv = nn.Linear(CONFIG.hidden, 3 * CONFIG.hidden, bias=False)
        self.out = nn.Linear(CONFIG.hidden, CONFIG.hidden, bias=False)
        self.experts = MoELayer(CONFIG, comm)

    def forward(self, x_BSH: Tensor) -> Tensor:
        qkv_BSH3 = self.qkv(self.norms[0](x_BSH))
        q_BNSD, k_BNSD, v_BNSD = (
            part_BSH.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part_BSH in qkv_BSH3.chunk(3, dim=-1)
        )
        attended_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)
        x_BSH = x_BSH + self.out(attended_BNSD.transpose(1, 2).flatten(-2))
        return x_BSH + self.experts(self.norms[1](x_BSH))


class Transformer(nn.Module):
    """Maps (B, S) tokens to (B, S, V) logits of the tokens that follow them."""

    def __init__(self, comm: moecomm.Communicator) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, CONFIG.hidden)
        self.positions = nn.Embedding(SEQUENCE, CONFIG.hidden)
        self.blocks = nn.ModuleList(Block(comm) for _ in range(2))
        self.norm = nn.RMSNorm(CONFIG.hidden)
        self.logits = nn.Linear(CONFIG.hidden, VOCABULARY, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.tokens(tokens_BS) + self.positions.weight
        for block in self.blocks:
            # Keeps only the block's input, and recomputes the rest along the forward's plans.
            x_BSH = checkpoint(block, x_BSH, use_reentrant=False, context_fn=keep_plans(block))
        return self.logits(self.norm(x_BSH))


def main() -> None:
    if dist.is_torchelastic_launched():  # started by torchrun
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # One communicator serves all layers: a layer's call ends before that of the next begins.
    with moecomm.Communicator(
        num_experts=CONFIG.num_experts,
        hidden=CONFIG.hidden,
        top_k=CONFIG.top_k,
        max_tokens=BATCH // ranks * SEQUENCE,
        dtype=CONFIG.dtype,
        device="cpu",
    ) as comm:
        train(comm, rank, ranks)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(comm: moecomm.Communicator, rank: int, ranks: int) -> None:
    torch.manual_seed(0)  # the same on all ranks: each then makes its own part of the same experts
    model = Transformer(comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = evaluate(model, rank, ranks)
    say(rank, f"before training: loss {first:.3f}")
    for number in range(STEPS):
        norm = step(model, optimizer, number, rank, ranks)
        if number % 8 == 7:
            loss = evaluate(model, rank, ranks)
            say(rank, f"step {number + 1}: loss {loss:.3f}, gradient norm {norm:.2f}")
    last = evaluate(model, rank, ranks)
    assert last < 0.5 * first, f"the loss went from {first} to {last}"

    with tempfile.TemporaryDirectory(prefix="moecomm-") as own:
        folder = of_rank_0(own)
        save(sharded_state(model, optimizer), checkpoint_id=folder)
        torch.manual_seed(1)
        other = Transformer(comm)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)  # loading also sets the learning rate
        assert evaluate(other, rank, ranks) != last
        load(sharded_state(other, other_optimizer), checkpoint_id=folder)
        assert evaluate(other, rank, ranks) == last  # once this is known, all ranks have loaded

    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        step(each, its_optimizer, STEPS, rank, ranks)
    assert evaluate(other, rank, ranks) == evaluate(model, rank, ranks)
    say(rank, f"loaded: loss {last:.3f} again, and the same next step")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, ranks: int) -> float:
    """Trains one step of MICROBATCHES microbatches, on all ranks; returns the norm of the gradients."""
    model.train()
    set_loss_scale(model, 1 / MICROBATCHES)  # scales the losses that the layers attach themselves
    for microbatch in range(MICROBATCHES):
        tokens_BS = batch(MICROBATCHES * number + microbatch, rank, ranks)
        loss = next_token_loss(model, tokens_BS) / MICROBATCHES
        loss.backward()
    sync_gradients(model)  # averages over ranks; experts' gradients come from all ranks' tokens already
    norm = clip_grad_norm(model, 1.0)  # of the whole model, the same on all ranks
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@torch.no_grad()
def evaluate(model: nn.Module, rank: int, ranks: int) -> float:
    """Returns the mean loss of all ranks on sequences that are not used for training."""
    model.eval()  # no jitter, and expert loads are not counted
    loss = next_token_loss(model, batch(-1, rank, ranks)) / ranks
    if ranks > 1:
        dist.all_reduce(loss)
    return loss.item()


def next_token_loss(model: nn.Module, tokens_BS: Tensor) -> Tensor:
    logits_BSV = model(tokens_BS[:, :-1])
    return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())


def batch(number: int, rank: int, ranks: int) -> Tensor:
    """Makes this rank's part of a batch, (B, S + 1): counts from any start in steps of 1 to 3, modulo V."""
    generator = torch.Generator().manual_seed(1000 + number)
    start_B = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    by_B = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return ((start_B + by_B * torch.arange(SEQUENCE + 1)) % VOCABULARY).chunk(ranks)[rank]


def of_rank_0(folder: str) -> str:
    """Returns the folder that rank 0 passes."""
    folders = [folder]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    return folders[0]


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
