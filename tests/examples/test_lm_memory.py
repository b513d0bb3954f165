"""What a block keeps for its backward, counted: --recompute frees what docs/memory.md says."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import moecomm
from moecomm.nn import MoELayer
from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import options, precision  # isort: skip
from lm.build import assemble, moe_config  # isort: skip
from lm.model import Block, run_plainly  # isort: skip
from lm.recompute import overlap_config, save_memory  # isort: skip

TOKENS = 64
Measure = Callable[..., tuple[int, list[Tensor]]]
OF_PARAMETERS = {f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView")}
"""The nodes between a parameter and the forms of it that products save."""


class FusedNorm(torch.autograd.Function):
    """An RMSNorm that keeps what torch's kernel for GPUs does: the input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad_weight = (grad * x * scale).flatten(0, -2).sum(0)
        grad = grad * weight
        return scale * (grad - x * scale.square() * (grad * x).mean(-1, keepdim=True)), grad_weight, None


class FusedAttention(torch.autograd.Function):
    """Causal attention that keeps what kernels for GPUs do: its inputs, its result and a number a query and
    head. torch has none on the CPU for values of another width than the keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, grouped: bool, scale: float) -> Tensor:
        ctx.how = {"is_causal": True, "enable_gqa": grouped, "scale": scale}
        y = _attend(q, k, v, **ctx.how)
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, y.new_zeros(q.shape[:3], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            y = _attend(*inputs, **ctx.how)
        return *torch.autograd.grad(y, inputs, grad), None, None


_attend = F.scaled_dot_product_attention


class Kept:
    """Counts the memory that autograd keeps, each storage once, without parameters, casts of them and
    buffers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = {each.untyped_storage().data_ptr() for each in model.buffers()}
        self._found: dict[int, Any] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if not is_of_parameter(tensor) and memory.data_ptr() not in self._buffers:
            self._found[memory.data_ptr()] = memory
        return tensor.detach()

    def nbytes(self) -> int:
        return sum(each.nbytes() for each in self._found.values())


def is_of_parameter(tensor: Tensor) -> bool:
    """Is it a parameter, or a cast or view of one?"""
    if tensor.is_leaf:  # what a product saves of a frozen weight is a view without a graph
        return tensor.requires_grad or any(
            isinstance(each, torch.nn.Parameter) for each in (tensor, tensor._base)
        )
    node: Any = tensor.grad_fn
    while node is not None and node.name() in OF_PARAMETERS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def chosen(folder: Path, flags: str) -> options.Options:
    return options.parse([*flags.split(), "--device", "cpu", "--dtype", "bfloat16", "--out", str(folder)])


@contextlib.contextmanager
def one_block(folder: Path, flags: str, tokens: int = TOKENS) -> Iterator[Measure]:
    """measure(recompute, backward=True) returns the bytes that a block keeps for its backward, and all
    gradients, if the backward is wanted."""
    flags = f"{flags} --seq {tokens} --layers 1 --vocab 64"
    moe = moe_config(chosen(folder, flags))
    with moecomm.Communicator(
        num_experts=moe.num_experts,
        hidden=moe.hidden,
        top_k=moe.top_k,
        max_tokens=tokens,
        dtype=torch.bfloat16,
        device="cpu",
    ) as comm:
        torch.manual_seed(1)
        model = assemble(
            chosen(folder, flags), 64, lambda: MoELayer(moe, comm), lambda part: part == "blocks.0"
        )
        model.drop_meta()
        (block,) = (each for each in model.modules() if isinstance(each, Block))
        block.float()
        whole = One(block, model.positions(tokens))

        def measure(recompute: str, *, backward: bool = True) -> tuple[int, list[Tensor]]:
            wanted = chosen(folder, f"{flags} --recompute={recompute}")
            block.runs = dict.fromkeys(block.runs, run_plainly)
            block.ffn.overlap = overlap_config(wanted)
            save_memory(model, wanted)
            model.zero_grad()
            torch.manual_seed(2)
            x = torch.randn(1, tokens, wanted.dim).requires_grad_()
            counter = Kept(model)
            hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda kept: kept)
            with hooks:
                y = precision.compute(whole, torch.bfloat16, x * 1)
            kept = counter.nbytes()
            if not backward:
                return kept, []
            y.square().sum().backward()
            gradients = [x.grad, *(each.grad for each in block.parameters())]
            return kept, [each for each in gradients if each is not None]

        yield measure


class One(torch.nn.Module):
    """A block as a function of its input."""

    def __init__(self, block: Block, positions: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.block, self.positions = block, positions

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.block(x_BSH, *self.positions)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: FusedNorm.apply(x, weight, eps))
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused_attention)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, scale: float, **causal: Any
) -> Tensor:
    assert causal == {"attn_mask": None, "is_causal": True}
    y: Tensor = FusedAttention.apply(q, k, v, enable_gqa, scale)
    return y


# Widths that are all different, so that no two tensors are taken for each other.
SMALL = (
    "--dim 96 --heads 4 --kv-heads 2 --head-dim 16 --qk-norm --experts 8 --top-k 2 --ffn 40 "
    "--shared-experts 1 --aux-coef 0"
)
SMALL_LATENT = (
    "--dim 96 --attention latent --no-qk-norm --heads 4 --head-dim 24 --q-rank 40 --kv-rank 28 --rope-dim 8 "
    "--value-dim 16 --experts 8 --top-k 2 --ffn 40 --shared-experts 1 --aux-coef 0"
)
FREED = {  # bytes a token, by hand: bfloat16 has 2, float32 4
    # a copy for attention's products and one for the experts; the router's input, which is float32 on the CPU
    (SMALL, "norms"): 96 * 2 + 96 * 4 + 96 * 2,
    (SMALL, "shared"): 2 * 40 * 2,
    (SMALL, "fc1"): 2 * (2 * 40) * 2,
    (SMALL, "dispatch"): 2 * (2 * 40 + 96) * 2,
    (SMALL_LATENT, "norms"): 96 * 2 + 96 * 4 + 96 * 2,
    # queries and keys, keys without position with values, less the result of q_down and the keys' rotated
    # part; the latents of keys and values are kept in any case
    (SMALL_LATENT, "mla-up"): (2 * 4 * 32 + 4 * 40 - 40 - 8) * 2,
    (SMALL_LATENT, "mla-up,norms"): (2 * 4 * 32 + 4 * 40 - 40 - 8) * 2 + 96 * 2 + 96 * 4 + 96 * 2,
}


def test_each_part_frees_what_it_says(fused: None, tmp_path: Path) -> None:
    for model in (SMALL, SMALL_LATENT):
        with one_block(tmp_path, model) as measure:
            before, wanted = measure("")
            for (of, part), freed in FREED.items():
                if of == model:
                    kept, gradients = measure(part)
                    assert before - kept == freed * TOKENS, (part, (before - kept) / TOKENS, freed)
                    assert all(map(torch.equal, gradients, wanted)), part
            # A block keeps its input; with attention and the experts apart, the input of each.
            for part, inputs in (("all", 1), ("attention,moe", 2)):
                kept, gradients = measure(part)
                assert kept == inputs * 96 * 4 * TOKENS and all(map(torch.equal, gradients, wanted)), part
