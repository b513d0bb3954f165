"""Parts of the language-model example on GPUs: attention that does not keep all logits against one that does,
the loss by slices of tokens, and the optimizer's compiled kernel against the update of float32 copies."""

import pytest
import torch
import torch.nn.functional as F

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import head as lm_head  # isort: skip
from lm import optimizer as lm_optimizer  # isort: skip
from lm.attention import AttentionCore, attend_by_slices, attend_densely  # isort: skip
from lm.optimizer import KERNEL_LEAST, AdamW  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

BOUNDS = {torch.float32: 2e-2, torch.bfloat16: 5e-2}
"""Differences allowed, as parts of a tensor's largest number. float32 products may have ten bits on GPUs."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("window", "sinks"), [(0, True), (128, True), (100, False)], ids=["sinks", "both", "window"]
)
def test_attention_equals_all_logits(window: int, sinks: bool, dtype: torch.dtype, seed: int) -> None:
    """Forward and gradients, of the sinks too, with eight heads to one of keys."""
    torch.manual_seed(seed)
    shapes = [(2, 16, 500, 64), (2, 2, 500, 64), (2, 2, 500, 64), (2, 16, 500, 64)]
    q, k, v, factor = (torch.randn(shape).to(dtype) for shape in shapes)
    sink = torch.randn(16) if sinks else None

    def step(device: str, to: torch.dtype) -> list[torch.Tensor]:
        parts = [each.to(device, to).requires_grad_() for each in (q, k, v)]
        sinks_N = None if sink is None else sink.to(device, torch.float32 if device == "cuda" else to)
        if sinks_N is not None:
            parts.append(sinks_N.requires_grad_())
        if device == "cuda":
            y = AttentionCore(window)(*parts[:3], sinks_N)
        else:
            y = attend_densely(*parts[:3], window, sinks_N, 0.125)
        (y * factor.to(device, to)).sum().backward()
        return [y.detach(), *(part.grad for part in parts)]

    for found, want in zip(step("cuda", dtype), step("cpu", torch.float64), strict=True):
        assert (found.cpu().double() - want).abs().max() < BOUNDS[dtype] * want.abs().max()


KINDS = {
    "qwen3": (128, 128, 2, torch.bfloat16),
    "gpt-oss": (64, 64, 2, torch.bfloat16),
    "deepseek-v3": (192, 128, 8, torch.bfloat16),
    "float32": (64, 64, 2, torch.float32),
}


@pytest.mark.parametrize("queries", [8192, 2048], ids=["square", "last queries"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_long_windows_keeps_no_logits(kind: str, queries: int, seed: int) -> None:
    """Forward and gradients of eight heads, of as many queries as keys and of a chunk of context parallelism.
    Logits would take 2.1 GB and 0.5 GB."""
    torch.manual_seed(seed)
    width, value_width, kv_heads, dtype = KINDS[kind]
    shapes = [(1, 8, queries, width), (1, kv_heads, 8192, width), (1, kv_heads, 8192, value_width)]
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    factor = torch.randn(1, 8, queries, value_width, device="cuda")
    found = []
    for attend, to in ((AttentionCore(), dtype), (attend_by_slices, torch.float32)):
        parts = [each.detach().to(to).requires_grad_() for each in (q, k, v)]
        extra = (None,) if isinstance(attend, AttentionCore) else (0, None, width**-0.5)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = attend(*parts, *extra)
        (y * factor).sum().backward()
        taken = torch.cuda.max_memory_allocated() - before
        if isinstance(attend, AttentionCore):
            assert taken < 8 * queries * 8192 * 4 / 2
        found.append([y.detach(), *(part.grad for part in parts)])
    for one, want in zip(*found, strict=True):
        assert (one.float() - want).abs().max() < BOUNDS[dtype] * want.abs().max()


# -- the head -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vocab", [50_000, 50_001], ids=str)
@pytest.mark.parametrize("by_quack", [True, False])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_head_equals_cross_entropy_in_a_part_of_its_memory(
    dtype: torch.dtype, by_quack: bool, vocab: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """8192 tokens of some 50 000 numbers, of which logits take 1.6 GB and a slice 64 MiB."""
    if by_quack and lm_head._quack_cross_entropy() is None:
        pytest.skip("quack-kernels is not installed")
    if not by_quack:
        monkeypatch.setattr(lm_head, "_quack_cross_entropy", lambda: None)
    torch.manual_seed(seed)
    monkeypatch.setattr(lm_head, "SLICE_BYTES", 1 << 26)
    tokens, hidden = 8192, 512
    x_TH = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    weight_VH = (torch.randn(vocab, hidden, device="cuda") / hidden**0.5).requires_grad_()
    targets_T = torch.randint(vocab, (tokens,), device="cuda")
    want = F.cross_entropy(x_TH.double() @ weight_VH.double().T, targets_T)
    grads = torch.autograd.grad(want, (x_TH, weight_VH))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = lm_head.linear_cross_entropy(x_TH, weight_VH, targets_T, dtype)
    found = torch.autograd.grad(loss, (x_TH, weight_VH))
    assert torch.cuda.max_memory_allocated() - before < 0.5e9
    with torch.no_grad():
        unlearned = lm_head.linear_cross_entropy(x_TH, weight_VH, targets_T, dtype)
    for each in (loss, unlearned):
        assert each.dtype == torch.float32 and abs(each.item() - want.item()) < 1e-3 * want.item()
    for one, other in zip(found, grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() < BOUNDS[dtype] * other.abs().max()


# -- the optimizer ------------------------------------------------------------------------------------------

SHAPES = [(8, 256, 512), (KERNEL_LEAST // 512, 1024), (100, 30)]


@pytest.mark.parametrize("rows", [lm_optimizer.KERNEL_ROWS, 300], ids=["whole", "parts"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_equals_the_update_on_cpus(
    weights: torch.dtype, moments: torch.dtype, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step at a time from the same state, of whole tensors and by parts; a kernel may round a product and
    a sum together. In bfloat16 two that are nearly equal may be rounded apart, by one number."""
    monkeypatch.setattr(lm_optimizer, "KERNEL_ROWS", rows)
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(weights)) for shape in SHAPES]
    copies = [torch.nn.Parameter(each.detach().cuda()) for each in parameters]
    ours, theirs = (
        AdamW([{"params": each, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), moments=moments)
        for each in (copies, parameters)
    )
    rounding = 2**-7 if torch.bfloat16 in (weights, moments) else 1e-5
    for step in range(4):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 / (step + 1)
        for copy, parameter in zip(copies, parameters, strict=True):
            parameter.grad = torch.randn(parameter.shape).to(weights)
            copy.grad = parameter.grad.cuda()
        ours.step()
        theirs.step()
        for copy, parameter in zip(copies, parameters, strict=True):
            torch.testing.assert_close(copy.cpu(), parameter, rtol=rounding, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):
                found, wanted = ours.state[copy][name].cpu(), theirs.state[parameter][name]
                torch.testing.assert_close(found, wanted, rtol=rounding, atol=1e-6)
        ours.load_state_dict(theirs.state_dict())
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.data.copy_(parameter.data)
