"""LigerCute's fused expert-parallel layer for Hopper (github.com/linkedin/Liger-Kernel, liger_cute_kernels),
which `pip install liger-kernel 'liger-cute-kernels[cu12]'` brings.

It computes in bfloat16, with routing weights in bfloat16, on one host. Its weights are copies: gate, up and
down, each as (experts, columns of the result, columns of the rows).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..harness import verify
from ..harness.case import LayerCase


class LigerLayer:
    """The layer, called as a MoELayer is. `router` gives the routing of each call; `with_shared(y, x)` adds
    what shared experts make of x."""

    def __init__(
        self, case: LayerCase, router: nn.Module, with_shared: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")  # else it looks for a network
        import liger_cute_kernels as kernels  # type: ignore[import-not-found]
        from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe  # type: ignore[import-not-found]

        options, shapes = case.options, case.options.shapes
        # Sizes cannot grow later: those of all points of this run.
        most = kernels.MoEConfig(
            max_tokens=options.most_tokens,
            hidden_size=max(shape.hidden for shape in shapes),
            num_experts=max(shape.experts for shape in shapes),
            top_k=max(shape.topk for shape in shapes),
            num_hosts=1,
            gpus_per_host=options.ranks,
        )
        kernels.configure(device=case.device, moe=most)
        self.router, self._with_shared, self._experts = router, with_shared, case.point.experts
        self._layer = LigerExpertParallelFusedMoe()
        self._interleaved = options.activation == "swiglu_interleaved"
        w_in, w_out = case.experts.w_in.detach(), case.experts.w_out.detach()
        gate, up = (w_in[..., ::2], w_in[..., 1::2]) if self._interleaved else w_in.chunk(2, dim=-1)
        own = [each.transpose(1, 2).contiguous().requires_grad_() for each in (gate, up, w_out)]
        self.weights = [*own, *case.experts.shared]

    def __call__(self, x_TH: Tensor) -> Tensor:
        routing = self.router(x_TH)
        weights_TK = routing.topk_weights_TK.to(torch.bfloat16)
        own = self.weights[:3]
        y_TH: Tensor = self._layer(x_TH, routing.topk_idx_TK, weights_TK, *own, self._experts)
        return self._with_shared(y_TH, x_TH)

    def by_name(self, grads: Sequence[Tensor]) -> dict[str, Tensor]:
        """Gradients of `weights` in the layout of moecomm's weights, under the names that verify uses."""
        gate, up, w_out = (each.transpose(1, 2) for each in grads[:3])
        w_in = torch.stack((gate, up), dim=-1).flatten(2) if self._interleaved else torch.cat((gate, up), -1)
        return verify.by_name((w_in, w_out.contiguous(), *grads[3:]))
