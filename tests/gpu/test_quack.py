"""Products by quack-kernels have float64's numbers, and a layer with them is what it is with torch's."""

from typing import Any
from unittest import mock

import pytest
import torch

from moecomm.kernels import expert_ffn, quack
from moecomm.kernels.tiles import TILES, Tile
from tests.gpu import harness
from tests.multirank.on_ranks import on_ranks

pytest.importorskip("quack", reason="needs quack-kernels: pip install 'moecomm[cuda]'")

pytestmark = pytest.mark.usefixtures("cuda_only")

BOUND = 1e-2
"""The largest difference allowed, over the largest value: operands and results are bfloat16, sums float32. A
bias has the sum of as many rounded gradients as there are rows, which may cancel: its difference is over the
root of the sum of their squares, where that is larger."""


CASES = {
    "even": (256, 192, [100, 200, 300], "swiglu_interleaved", False, False),
    "ragged, an empty group": (512, 328, [0, 7, 130, 130], "swiglu_interleaved", False, False),
    "halves": (256, 192, [90, 91, 300], "swiglu", False, False),
    "clamped": (256, 192, [90, 91, 300], "swiglu_clamped", False, False),
    "as gpt-oss": (512, 328, [0, 7, 130, 130], "swiglu_clamped", True, False),
    "biases": (256, 192, [90, 91, 300], "swiglu_interleaved", True, False),
    "columns first": (256, 192, [100, 200, 300], "swiglu_interleaved", False, True),
    "halves, columns first": (512, 328, [0, 7, 130, 130], "swiglu", False, True),
    "clamped, biases, columns first": (256, 192, [90, 91, 300], "swiglu_clamped", True, True),
    "default dtype bfloat16": (384, 136, [100, 200, 300], "swiglu_interleaved", False, False),
}


def _operands(hidden: int, ffn: int, ends: list[int], seed: int, bias: bool) -> dict[str, torch.Tensor]:
    """Random rows, five of them past the last group, with weights and gradients."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    rows, experts = ends[-1] + 5, len(ends)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).bfloat16()

    biases = {"b_in": new(experts, 2 * ffn), "b_out": new(experts, hidden)} if bias else {}
    if bias:  # some columns are far beyond the limits of swiglu_clamped, all others far within
        biases["b_in"][:, [0, 3]] += 20
        biases["b_in"][:, 5] -= 20
    return {
        **biases,
        "x": new(rows, hidden),
        "grad": new(rows, hidden),
        "w_in": new(experts, hidden, 2 * ffn, scale=hidden**-0.5),
        "w_out": new(experts, ffn, hidden, scale=ffn**-0.5),
        "weights": torch.rand(rows, device="cuda", generator=generator) + 0.5,
    }


def _by_float64(given: dict[str, torch.Tensor], ends: list[int], activation: str) -> dict[str, torch.Tensor]:
    """The numbers of every product, by torch in float64, of the real rows alone."""
    rows = ends[-1]
    leaves = {
        name: (each[:rows] if name in ("x", "weights") else each).double().requires_grad_()
        for name, each in given.items()
        if name != "grad"
    }
    inner, z, y = _forward(leaves, ends, activation)
    inner.retain_grad()
    y.backward(given["grad"][:rows].double())
    grads = {f"grad_{name}": each.grad for name, each in leaves.items()}
    return {"inner": inner, "z": z, "y": y, "grad_inner": inner.grad, **grads}  # type: ignore[dict-item]


def _forward(exact: dict[str, torch.Tensor], ends: list[int], activation: str) -> tuple[torch.Tensor, ...]:
    """The first product, the activation and the result, of rows up to the last group's end."""
    counts = torch.tensor(ends, device="cuda").diff(prepend=torch.zeros(1, dtype=torch.int64, device="cuda"))
    of_row, weights = torch.arange(len(ends), device="cuda").repeat_interleave(counts), exact["weights"]

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, exact[name], strict=True)])

    inner = product(exact["x"], "w_in")
    if "b_in" in exact:
        inner = inner + exact["b_in"][of_row]
    gate, up = (inner[:, ::2], inner[:, 1::2]) if activation != "swiglu" else inner.chunk(2, dim=1)
    if activation == "swiglu_clamped":
        gate = gate.clamp(max=7.0)
        z = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1) * weights[:, None]
    else:
        z = torch.nn.functional.silu(gate) * up * weights[:, None]
    y = product(z, "w_out")
    return inner, z, y + weights[:, None] * exact["b_out"][of_row] if "b_out" in exact else y


def _by_quack(products: Any, given: dict[str, torch.Tensor], offsets: torch.Tensor, activation: str) -> Any:
    """The numbers of every product."""
    groups = products.groups(offsets)
    gated: dict[str, Any] = {"activation": activation}
    b_in, b_out, weights = given.get("b_in"), given.get("b_out"), given["weights"]
    inner, z = products.gated_mm(given["x"], given["w_in"], groups, weights, **gated, bias_LI=b_in)
    grad_inner, grad_weights, z_again = products.gated_mm_dgrad(
        given["grad"],
        given["w_out"],
        groups,
        inner,
        given["weights"],
        need_weights=True,
        need_z=True,
        **gated,
    )
    x, grad, of_biases = given["x"], given["grad"], {}
    if b_out is not None:
        grad_weights = grad_weights + products.bias_weights_grad(grad, b_out, groups)
        of_biases["grad_b_in"] = products.bias_grad(grad_inner, groups)
        of_biases["grad_b_out"] = products.bias_grad(grad, groups, weights)
    return {
        **of_biases,
        "inner": inner,
        "inner again": products.grouped_mm(x, given["w_in"], groups, bias_LB=b_in),
        "z": z,
        "y": products.grouped_mm(z, given["w_out"], groups, bias_LB=b_out, weights_P=weights),
        "grad_inner": grad_inner,
        "grad_weights": grad_weights,
        "grad_x": products.grouped_mm_dgrad(grad_inner, given["w_in"], groups),
        "grad_w_in": products.grouped_mm_wgrad(x, grad_inner, groups),
        "grad_w_out": products.grouped_mm_wgrad(z_again, grad, groups),
    }


def _make(hidden: int, ffn: int, activation: str, columns_first: bool = False) -> Any:
    from moecomm.kernels.quack import make_quack_products

    device = torch.device("cuda", torch.cuda.current_device())
    sizes: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "dtype": torch.bfloat16, "device": device}
    return make_quack_products(**sizes, activation=activation, columns_first=columns_first)


def _far(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest value, or over `least`, of the rows that `want` has."""
    rows = want.shape[0]
    return float((got[:rows].double() - want).abs().max() / max(float(want.abs().max()), least))


def _far_by_name(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], ends: list[int]) -> list[str]:
    """The names of what is too far from float64's numbers."""
    squares = want["grad_inner"].square()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    least = {"grad_b_in": max(float(squares[a:b].sum(0).sqrt().max()) for a, b in groups if a < b)}
    return [name for name in want if not _far(got[name], want[name], least.get(name, 0.0)) <= BOUND]


@pytest.mark.parametrize("name", CASES)
@on_ranks(1)
def test_products_are_those_of_float64(rank: int, world_size: int, name: str, seed: int) -> list[str]:
    hidden, ffn, ends, activation, bias, columns_first = CASES[name]
    given = _operands(hidden, ffn, ends, seed, bias)
    torch.set_default_dtype(torch.bfloat16 if name.startswith("default") else torch.float32)
    try:
        products = _make(hidden, ffn, activation, columns_first)
    finally:
        torch.set_default_dtype(torch.float32)
    if columns_first:
        given |= {name: given[name].mT.contiguous().mT for name in ("w_in", "w_out")}
    offsets, rows = torch.tensor(ends, dtype=torch.int32, device="cuda"), ends[-1]
    want = _by_float64(given, ends, activation)
    want["inner again"] = want["inner"]
    got = _by_quack(products, given, offsets, activation)
    problems = _far_by_name(got, want, ends)
    for name in ("w_in", "w_out"):  # else autograd copies the gradient
        problems += [f"order of grad_{name}"] * (got[f"grad_{name}"].stride() != given[name].stride())
    groups = products.groups(offsets)
    for dtype in (torch.bfloat16, torch.float32):
        into_in, into_out = (torch.ones_like(given[name], dtype=dtype) for name in ("w_in", "w_out"))
        products.grouped_mm_wgrad(given["x"], got["grad_inner"], groups, into=into_in)
        products.grouped_mm_wgrad(got["z"], given["grad"], groups, into=into_out)
        for name, into in (("grad_w_in", into_in), ("grad_w_out", into_out)):
            problems += [f"{name} into {dtype}"] * (not _far(into - 1, want[name]) <= 2 * BOUND)
    again = _by_quack(products, given, offsets, activation)
    for name, value in got.items():
        count = value.shape[0] if name.startswith(("grad_w_", "grad_b_")) else rows
        problems += [f"{name} again"] * (not torch.equal(value[:count], again[name][:count]))
    plans, cut = len(quack._plans), ("weights", "x", "grad")
    fewer = given | {name: given[name][:-2] for name in cut}  # of the rows past the last group
    by_fewer = _by_quack(products, fewer, offsets, activation)
    problems += [f"{name}, fewer rows" for name in _far_by_name(by_fewer, want, ends)]
    return problems + ["a plan for each number of rows"] * (len(quack._plans) != plans)


@on_ranks(1)
def test_every_tile_has_a_config_of_its_own(rank: int, world_size: int) -> list[str]:
    """quack keeps plans by the identity of a tile's config: two tiles must never have had the same one."""
    tiles = {tile for each in TILES.values() for tile in each.values()}
    seen = {id(quack._config(tile)) for tile in tiles}
    return [] if len(seen) == len(tiles) else [f"{len(tiles)} tiles have {len(seen)} configs"]


@on_ranks(1)
def test_gradients_that_are_added(rank: int, world_size: int, seed: int) -> None:
    """Gradients of weights that are added to what is there, by tiles that load it and tiles that do not;
    twice, as the first launch makes the plan."""
    hidden, ffn, ends = 256, 192, [100, 100, 300]
    given, products = _operands(hidden, ffn, ends, seed, False), _make(hidden, ffn, "swiglu_interleaved")
    groups = products.groups(torch.tensor(ends, dtype=torch.int32, device="cuda"))
    grad = given["w_in"].new_empty(ends[-1] + 5, 2 * ffn).normal_()
    wanted = [given["x"][a:b].double().T @ grad[a:b].double() for a, b in zip([0, *ends], ends, strict=False)]
    for dtype in (torch.bfloat16, torch.float32):
        for loads in (False, True):
            products.use_tile("fc1_wgrad_added", Tile(128, 128, True, loads=loads))
            before = torch.randn(len(ends), hidden, 2 * ffn, device="cuda").to(dtype)
            into, want = before.clone(), before.double() + 2 * torch.stack(wanted)
            for _ in range(2):
                products.grouped_mm_wgrad(given["x"], grad, groups, into=into)
            assert _far(into, want) <= BOUND, f"{dtype}, loads {loads}: {_far(into, want)}"


def _pair(seed: int, bias: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    """A communicator, and layers of the same weights with torch's products and with quack's."""
    from moecomm import Communicator
    from moecomm.nn import MoEConfig, MoELayer

    shape: dict[str, Any] = {"num_experts": 8, "hidden": 256, "top_k": 2, "dtype": torch.bfloat16}
    options |= {"ffn_hidden": 192, "init_std": 0.05, "capacity_factor": 4.0, "pad_to_capacity": True}
    torch.manual_seed(seed)
    comm = Communicator(**shape, max_tokens=200, device=harness.device())
    plain, layer = (
        MoELayer(MoEConfig(**shape, **options, bias=bias, products=name), comm) for name in ("torch", "quack")
    )
    for value in (plain.experts.b_in, plain.experts.b_out) if bias else ():
        torch.nn.init.normal_(value)
    layer.load_state_dict(plain.state_dict())
    return comm, plain, layer


@pytest.mark.parametrize(("activation", "bias"), [("swiglu_interleaved", False), ("swiglu_clamped", True)])
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_layer_is_what_it_is_with_torch(
    rank: int, world_size: int, activation: str, bias: bool, seed: int
) -> list[str]:
    """Microbatches whose gradients add up: with torch's products and quack's, overlapped and in order, and
    replayed from a graph."""
    from moecomm.nn import MoELayer, OverlapConfig

    comm, plain, layer = _pair(seed, bias, activation=activation)
    x = torch.randn(2, 200, 256, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(200, 256, device="cuda").bfloat16()

    def step(of: MoELayer) -> dict[str, torch.Tensor]:
        x.grad = None
        for parameter in of.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        ys = [of(each) for each in x]
        for y in ys:
            y.backward(grad)
        of.backward_weights()
        grads = {name: parameter.grad for name, parameter in of.named_parameters()}
        return {"y": torch.stack(ys), "x": x.grad, **grads}  # type: ignore[dict-item]

    def taken(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in found.items()}

    want = taken(step(plain))
    step(layer)
    found = {"overlapped": taken(step(layer))}  # into gradients that are there
    layer.overlap = OverlapConfig(overlap=False)
    found["in order"] = taken(step(layer))
    layer.overlap = OverlapConfig(defer_weights=True)
    with mock.patch("moecomm.autograd.deferred.MOST_JOINED_ROWS", 10**6):
        found["weights together"] = taken(step(layer))
    layer.overlap = OverlapConfig()
    graph, recorded = harness.captured(lambda: step(layer), warm_ups=1)
    graph.replay()
    found["graph"] = taken(recorded)
    comm.check()
    problems = [
        f"rank {rank}, {way}, {name}: {_far(values[name], value.double()):.1e}"
        for way, values in found.items()
        for name, value in want.items()
        if not _far(values[name], value.double()) <= 2 * BOUND
    ]
    problems += [
        f"rank {rank}, {name} in the graph"
        for name, value in found["overlapped"].items()
        if name.startswith("experts.") and not torch.equal(value, found["graph"][name])
    ]
    torch.cuda.synchronize()
    del graph
    comm.close()
    return problems


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_gradients_in_float32(rank: int, world_size: int, seed: int) -> list[str]:
    """Gradients of microbatches in `main_grad`, from quack's products and from torch's, and in a graph."""
    comm, plain, layer = _pair(seed, activation="swiglu_interleaved", main_grad=True)
    batches = torch.randn(3, 200, 256, device="cuda").bfloat16()
    for x in batches:
        for each in (plain, layer):
            each(x).square().sum().backward()
    problems = []
    for name in ("w_in", "w_out"):
        one, other = (getattr(each.experts, name) for each in (layer, plain))
        problems += [f"rank {rank}, {name}.grad"] * (one.grad is not None or other.grad is not None)
        problems += [f"rank {rank}, {name}"] * (
            not _far(one.main_grad, other.main_grad.double()) <= 2 * BOUND
        )
    before = layer.experts.w_in.main_grad.clone()
    graph, _ = harness.captured(lambda: layer(batches[0]).square().sum().backward(), warm_ups=1)
    once = layer.experts.w_in.main_grad - before
    graph.replay()
    graph.replay()
    three = layer.experts.w_in.main_grad - before
    problems += [f"rank {rank}, replays"] * (not _far(three, 3 * once.double()) <= BOUND)
    comm.check()
    torch.cuda.synchronize()
    del graph
    comm.close()
    return problems


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("case", [*CASES, "no rows"])
@on_ranks(1)
def test_adapters(rank: int, world_size: int, case: str, scale: float, seed: int) -> None:
    """Products with adapters, whose factors lie as peft's do, are those of weights with adapters added."""
    hidden, ffn, ends, activation, bias, columns_first = CASES.get(
        case, (256, 192, [0, 0, 0], "swiglu", False, True)
    )
    given, experts, ranks = _operands(hidden, ffn, ends, seed, bias), len(ends), 8
    generator = torch.Generator(device="cuda").manual_seed(seed + 1)

    def factors(into: int, out: int) -> list[torch.Tensor]:
        first = torch.randn(experts, ranks, into, device="cuda", generator=generator) * into**-0.5
        second = torch.randn(out, ranks, experts, device="cuda", generator=generator) * ranks**-0.5
        return [each.bfloat16().requires_grad_() for each in (first, second)]

    def adapter(first: torch.Tensor, second: torch.Tensor) -> expert_ffn.LowRank:
        return expert_ffn.LowRank(first.mT, second.permute(2, 1, 0), scale)

    leaves = [*factors(hidden, 2 * ffn), *factors(ffn, hidden)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    parts = [adapter(*exact[:2]), adapter(*exact[2:])]
    rows = ends[-1]
    added = {name: each.double() for name, each in given.items()}
    added |= {name: added[name][:rows] for name in ("x", "weights")}
    for name, one in zip(("w_in", "w_out"), parts, strict=True):
        added[name] = added[name] + one.scale * one.left_LAR @ one.right_LRB
    *_, y = _forward(added, ends, activation)
    wanted = (y, *torch.autograd.grad(y, exact, given["grad"][:rows].double()))

    if columns_first:
        for name in ("w_in", "w_out"):
            given[name] = given[name].mT.contiguous().mT
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    sizes = {"hidden": hidden, "ffn": ffn, "dtype": torch.bfloat16, "device": offsets.device}
    products = quack.make_quack_products(
        **sizes, activation=activation, columns_first=columns_first, compile_now=False
    )
    joined: Any = tuple(expert_ffn.join_adapters([adapter(*leaves[i : i + 2])]) for i in (0, 2))
    biases = {"b_in_LI": given.get("b_in"), "b_out_LH": given.get("b_out")}
    x, weights_P = given["x"][:rows], given["weights"][:rows]
    options: dict[str, Any] = {"activation": activation, "products": products, "adapters": joined, **biases}
    y = expert_ffn.expert_ffn(x, given["w_in"], given["w_out"], offsets, weights_P, **options)
    found = (y, *torch.autograd.grad(y, leaves, given["grad"][:rows]))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        if other.numel():
            assert (one - other).abs().max() <= 2 * BOUND * max(other.abs().max().item(), 1e-9)
