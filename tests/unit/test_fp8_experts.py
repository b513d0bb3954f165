"""The experts' products in fp8: their error, which weights are kept quantised and for how long."""

import copy
import functools
import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import fp8_products as module
from moecomm.kernels import operators
from moecomm.kernels.fp8_products import Fp8Products
from moecomm.kernels.products import Products
from moecomm.kernels.quantize import (
    Quantized,
    QuantizedColumns,
    quantize_columns,
    quantize_rows,
    quantize_transposed,
)
from moecomm.kernels.scaled_mm import missing_on, scaled_grouped_mm, scaled_grouped_mm_wgrad
from moecomm.nn import GroupedExperts, MoEConfig
from moecomm.nn.experts import make_products
from tests import ranks
from tests.multirank.conftest import Pools
from tests.multirank.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("pool")

SIZES: dict[str, Any] = {"hidden": 32, "ffn_hidden": 48, "num_experts": 4, "top_k": 2, "init_std": 0.3}
GROUPS = ([3, 5, 40, 50], [0, 4, 4, 50], [0, 0, 50, 50], [16, 32, 48, 50])
LARGE = (
    (64, 32, 48, [3, 3, 40, 50]),
    (300, 256, 384, [0, 100, 100, 300]),
    (1024, 1024, 512, [256, 512, 768, 1024]),
    (520, 512, 4096, [130, 260, 390, 520]),
    (100, 16, 16, [25, 50, 75, 90]),
)


def make(seed: int, **options: Any) -> GroupedExperts:
    torch.manual_seed(seed)
    return GroupedExperts(MoEConfig(**{**SIZES, "expert_precision": "fp8", **options}))


def ends_of(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=ranks.device())


@pytest.fixture
def products(pool: Pools) -> None:
    """The CPU has products of e4m3; in tests/gpu this skips where torch has none."""


def operands(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (50, 32), weights (4, 32, 48) and gradients (50, 48)."""
    torch.manual_seed(seed)
    rows, weight, grad = torch.randn(50, 32), torch.randn(4, 32, 48), torch.randn(50, 48)
    return rows.to(dtype), weight.to(dtype), grad.to(dtype)


# -- the arithmetic ----------------------------------------------------------------------------------------
def _check_products(rows: int, a: int, b: int, ends: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, a, device=ranks.device(), dtype=torch.bfloat16)
    dy = torch.randn(rows, b, device=ranks.device(), dtype=torch.bfloat16)
    weight = torch.randn(len(ends), a, b, device=ranks.device(), dtype=torch.bfloat16)
    offsets, last = ends_of(ends), ends[-1]
    x[last:], dy[last:] = math.nan, math.nan

    def near(got: Tensor, left: Tensor, right: Tensor, what: str) -> None:
        want, size = left @ right, left.abs() @ right.abs()
        # Tensor cores keep 14 bits of a running sum, to which they add 32 products at a time.
        summed = 2.0**-18 if ranks.on_cpu() else (left.shape[1] / 32 + 2) * 2.0**-13
        assert got.dtype == torch.bfloat16
        error = (got.double() - want).abs()
        rounding = 2.0**-8 if ranks.on_cpu() else 2.0**-7
        assert bool((error <= want.abs() * rounding + size * summed).all()), (rows, a, b, ends, what)

    def real(values: Tensor, scales: Tensor) -> Tensor:
        return values.double() * scales.double().unsqueeze(-1)

    for what, left, right in (
        ("y", quantize_rows(x, offsets), quantize_transposed(weight)),
        ("dx", quantize_rows(dy, offsets), quantize_rows(weight)),
    ):
        got, p, q = scaled_grouped_mm(left, right, offsets), real(*left), real(*right)
        for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            near(got[begin:end], p[begin:end], q[group].t(), what)
    columns = quantize_columns(x, offsets), quantize_columns(dy, offsets)
    padded = columns[0].padded_ends_L.tolist()
    results = []
    for fill in (0x7F, 0):  # NaN in e4m3
        for each in columns:
            each.values_CQ.view(torch.uint8)[:, padded[-1] :] = fill
        results.append(scaled_grouped_mm_wgrad(*columns))
    assert torch.equal(*results), "values past the last padded end matter"
    for group, (begin, end) in enumerate(zip([0, *padded], padded, strict=False)):
        p, q = (real(each.values_CQ[:, begin:end], each.scales_LC[group]) for each in columns)
        near(results[0][group], p, q.t(), "dw")


@pytest.mark.usefixtures("products")
@on_ranks(1)
def test_products_of_quantised_operands(rank: int, world_size: int, seed: int) -> None:
    """Products equal those in float64, but for sums in less and one rounding to bfloat16. NaN lies where
    nobody may read."""
    small = [(50, 32, 48, ends) for ends in GROUPS]
    for rows, a, b, ends in small if ranks.on_cpu() else [*small, *LARGE]:
        _check_products(rows, a, b, ends, seed)


def test_both_operands_of_each_product_are_quantised(seed: int) -> None:
    rows, weight, grad = operands(seed, torch.bfloat16)
    products, ends = Fp8Products(), ends_of([9, 9, 20, 50])
    y = scaled_grouped_mm(quantize_rows(rows, ends), quantize_transposed(weight), ends)
    assert torch.equal(products.grouped_mm(rows, weight, ends), y)
    dx = scaled_grouped_mm(quantize_rows(grad, ends), quantize_rows(weight), ends)
    assert torch.equal(products.grouped_mm_dgrad(grad, weight, ends), dx)
    dw = scaled_grouped_mm_wgrad(quantize_columns(rows, ends), quantize_columns(grad, ends))
    assert torch.equal(products.grouped_mm_wgrad(rows, grad, ends), dw)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ends": torch.tensor([50], dtype=torch.int32)}, "weights of 4 groups and ends of 1"),
        ({"ends": torch.tensor([1, 2, 3, 50])}, "ends is torch.int64"),
        ({"rows": torch.zeros(50, 48)}, r"\(50, 48\) and weights \(4, 48, 32\)"),
        ({"scales": torch.ones(49)}, r"scales of rows have shape \(49,\), expected \(50,\)"),
        ({"scales": torch.ones(50, dtype=torch.float64)}, "with torch.float64 scales"),
        ({"weights": torch.zeros(4, 32, 24)}, "N is 24, expected a multiple of 16"),
        ({"device": "meta"}, "rows are on meta, expected cpu"),
    ],
)
def test_refuses_operands(changed: dict[str, Any], text: str) -> None:
    rows = changed.get("rows", torch.zeros(50, 32)).to(torch.float8_e4m3fn)
    left = Quantized(rows, changed.get("scales", torch.ones(50)))
    left = Quantized(*(each.to(changed.get("device", "cpu")) for each in left))
    weights = changed.get("weights", torch.zeros(4, 32, 48)).transpose(1, 2).to(torch.float8_e4m3fn)
    right = Quantized(weights, torch.ones(weights.shape[:2]))
    with pytest.raises(InvalidArgument, match=text):
        scaled_grouped_mm(left, right, changed.get("ends", ends_of([1, 2, 3, 50])))


def test_refuses_columns() -> None:
    good = quantize_columns(torch.zeros(50, 32), ends_of([1, 50]))
    for bad, text in (
        (good._replace(values_CQ=good.values_CQ[:, :16]), r"\(A, Q\) and \(B, Q\)"),
        (good._replace(scales_LC=good.scales_LC[:1]), "scales of right columns"),
        (good._replace(values_CQ=good.values_CQ[:8], scales_LC=good.scales_LC[:, :8]), "B is 8"),
        (good._replace(values_CQ=good.values_CQ.float()), "right columns are torch.float32"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            scaled_grouped_mm_wgrad(good, QuantizedColumns(*bad))


def test_in_a_graph(seed: int) -> None:
    experts = make(seed, dtype=torch.bfloat16)
    rows, _, _ = operands(seed, torch.bfloat16)
    torch._dynamo.reset()
    found = []
    for call in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        experts.zero_grad()
        x = rows.clone().requires_grad_()
        y = call(x, ends_of([9, 9, 20, 50]), torch.ones(50))
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, experts.w_in.grad, experts.w_out.grad])
    torch._dynamo.reset()
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


# -- weights that are kept ---------------------------------------------------------------------------------
@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often weights, which have three dimensions, were quantised."""
    calls: Counter[str] = Counter()
    for quantize in (quantize_rows, quantize_transposed):

        @functools.wraps(quantize)
        def counted(x: Tensor, *others: Any, quantize: Any = quantize) -> Any:
            if x.dim() == 3:
                calls[quantize.__name__] += 1
            return quantize(x, *others)

        monkeypatch.setattr(module, quantize.__name__, counted)
    return calls


def step(experts: GroupedExperts, seed: int) -> Tensor:
    rows, _, _ = operands(seed, experts.w_in.dtype)
    y = experts(rows.clone().requires_grad_(), ends_of([9, 9, 20, 50]))
    y.float().square().sum().backward()
    return y.detach()


def test_once_for_several_backwards(made: Counter[str], seed: int) -> None:
    experts = make(seed, dtype=torch.bfloat16)
    for _ in range(3):
        step(experts, seed)
    assert made == {"quantize_transposed": 2, "quantize_rows": 2}
    products = experts.products
    assert isinstance(products, Fp8Products)
    values = sum(parameter.numel() for parameter in experts.parameters())
    scales = sum(math.prod(p.shape[:2]) + p.shape[0] * p.shape[2] for p in experts.parameters())
    assert products.kept_bytes() == 2 * values + 4 * scales
    experts.forget_quantized()
    assert products.kept_bytes() == 0


def with_optimizer(kind: Any, **options: Any) -> Callable[[GroupedExperts], None]:
    return lambda experts: kind(experts.parameters(), lr=0.5, **options).step()


@torch.no_grad()
def in_place(experts: GroupedExperts) -> None:
    experts.w_in.mul_(-1.5)
    experts.w_out.mul_(-1.5)


def loaded(experts: GroupedExperts) -> None:
    weights = {name: -parameter for name, parameter in experts.named_parameters()}
    experts.load_state_dict({**experts.state_dict(), **weights})


def other_memory(experts: GroupedExperts) -> None:
    for parameter in experts.parameters():
        parameter.data = parameter.data * -2


def past_the_counter(experts: GroupedExperts) -> None:
    for parameter in experts.parameters():
        parameter.data.mul_(-2)
    experts.forget_quantized()


CHANGES: dict[str, Callable[[GroupedExperts], None]] = {
    "sgd": with_optimizer(torch.optim.SGD),
    "adamw": with_optimizer(torch.optim.AdamW),
    "adamw, foreach": with_optimizer(torch.optim.AdamW, foreach=True),
    "adamw, fused": with_optimizer(torch.optim.AdamW, fused=True),
    "sgd, fused": with_optimizer(torch.optim.SGD, fused=True),
    "in place": in_place,
    "loaded": loaded,
    "other memory": other_memory,
    "past the counter, and told": past_the_counter,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed(change: Callable[[GroupedExperts], None], seed: int) -> None:
    experts = make(seed)
    before = step(experts, seed)
    change(experts)
    fresh = make(seed)
    fresh.load_state_dict(experts.state_dict())
    experts.zero_grad()
    after = step(experts, seed)
    assert not torch.equal(before, after)
    assert torch.equal(after, step(fresh, seed))
    for ours, theirs in zip(experts.parameters(), fresh.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_what_stands_in_for_a_parameter_is_not_kept(made: Counter[str], seed: int) -> None:
    """Such as what FSDP gathers: its address and version may come again with other values."""
    experts = make(seed, dtype=torch.bfloat16)
    rows, _, _ = operands(seed, torch.bfloat16)
    offsets = ends_of([9, 9, 20, 50])
    others = {name: value.detach() * 2 for name, value in experts.named_parameters()}
    for count in (1, 2):
        torch.func.functional_call(experts, others, (rows, offsets))
        assert made == {"quantize_transposed": 2 * count}
    assert isinstance(experts.products, Fp8Products) and experts.products.kept_bytes() == 0


def test_copies_keep_nothing(seed: int) -> None:
    experts = make(seed, dtype=torch.bfloat16)
    want = step(experts, seed)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert twin.products is not experts.products and twin.products.kept_bytes() == 0
        assert torch.equal(step(twin, seed), want)
        assert twin.products.kept_bytes() == experts.products.kept_bytes()  # type: ignore[attr-defined]


def test_what_is_kept_goes_with_its_parameter(seed: int) -> None:
    experts = make(seed, dtype=torch.bfloat16)
    step(experts, seed)
    products = experts.products
    assert isinstance(products, Fp8Products) and products.kept_bytes() > 0
    del experts
    assert products.kept_bytes() == 0


def test_in_inference_mode(seed: int) -> None:
    """Parameters that were made there have no version."""
    with torch.inference_mode():
        experts = make(seed, dtype=torch.bfloat16)
        rows, _, _ = operands(seed, torch.bfloat16)
        y = experts(rows, ends_of([9, 9, 20, 50]))
        experts.w_out.mul_(2)
        assert not torch.equal(experts(rows, ends_of([9, 9, 20, 50])), y)


# -- where it can be ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"expert_precision": "fp4"}, "expert_precision is 'fp4', must be one of None, fp8"),
        ({"hidden": 24}, "hidden is 24, must be a multiple of 16"),
        ({"ffn_hidden": 40}, "ffn_hidden is 40, must be a multiple of 16"),
        ({"dtype": torch.float64}, "dtype is torch.float64, must be narrower"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        MoEConfig(**{**SIZES, "expert_precision": "fp8", **options})


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpus_that_have_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(operators, "prepare", lambda *given: prepared.append(given))
    config, gpu = MoEConfig(**SIZES, expert_precision="fp8", dtype=torch.bfloat16), torch.device("cuda", 3)
    if capability == (9, 0):
        assert missing_on(gpu) is None
        products: Products = make_products(config, gpu)
        assert isinstance(products, Fp8Products) and prepared == [("quantize", gpu, torch.bfloat16)]
        return
    with pytest.raises(Unsupported, match=rf"cuda:3 has compute capability {capability[0]}\.{capability[1]}"):
        make_products(config, gpu)
    assert type(make_products(MoEConfig(**SIZES), gpu)) is Products and not prepared
