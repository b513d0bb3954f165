"""2. A mixture-of-experts layer that trains, its experts spread over the ranks.

    python examples/02_moe_layer.py
    torchrun --nproc-per-node 2 examples/02_moe_layer.py

The layer learns to imitate a fixed function. The ranks bring different tokens, and the losses printed are
the same for any number of ranks that divides the batch, because the gradients are those of the mean over
all tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# If an optimizer imported this module later, it would keep the process group alive until the process ends,
# and gloo's threads might then crash it (seen with torch 2.13).
import torch.distributed.nn.functional
import torch.nn.functional as F

from moecomm.nn import MoEConfig, MoELayer, sync_gradients, update_expert_bias

HIDDEN, BATCH, STEPS = 32, 240, 60

CONFIG = MoEConfig(
    hidden=HIDDEN,
    ffn_hidden=64,
    num_experts=4,
    top_k=2,
    score_function="sigmoid",
    normalize_topk=True,
    bias_update_rate=0.01,  # balances the experts without an auxiliary loss
    init_std=0.1,
)


def main() -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    torch.manual_seed(0)  # the same on all ranks: each then makes its own part of the same experts
    layer = MoELayer(CONFIG, max_tokens=BATCH // ranks)
    teacher_HH = torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)

    first_loss = last_loss = float("nan")
    for step in range(STEPS):
        x_BH = torch.randn(BATCH, HIDDEN)  # all ranks draw the whole batch, and each takes its part of it
        x_TH = x_BH.chunk(ranks)[rank]
        loss = F.mse_loss(layer(x_TH), (x_TH @ teacher_HH).tanh())
        loss.backward()
        sync_gradients(layer)  # all-reduces the router's gradient; experts' gradients need none
        optimizer.step()
        optimizer.zero_grad()

        loads_E = layer.last_tokens_per_expert.clone()
        update_expert_bias(layer)
        mean_loss = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean_loss)
            dist.all_reduce(loads_E)
        last_loss = mean_loss.item()
        first_loss = last_loss if step == 0 else first_loss
        if rank == 0 and step % 10 == 0:
            print(
                f"step {step:2d}  loss {last_loss:.4f}  tokens of each expert {loads_E.tolist()}", flush=True
            )

    assert last_loss < 0.6 * first_loss, f"the loss went from {first_loss} to {last_loss}"
    if rank == 0:
        held = layer.experts.num_local_experts
        print(f"loss {first_loss:.4f} -> {last_loss:.4f} on {ranks} rank(s), {held} experts each", flush=True)
    layer.comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
