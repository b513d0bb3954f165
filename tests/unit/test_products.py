"""Engines of the experts' products: which one is chosen, and what is refused; tiles of quack's kernels."""

import re
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moecomm.errors import InvalidArgument, Unsupported
from moecomm.kernels import quack, tiles
from moecomm.kernels.products import Products
from moecomm.nn import GroupedExperts, MoEConfig, SharedExperts, sharded_state
from moecomm.nn.experts import make_products

SIZES: dict[str, Any] = {
    "hidden": 64,
    "ffn_hidden": 32,
    "num_experts": 4,
    "top_k": 2,
    "dtype": torch.bfloat16,
}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """quack-kernels seems to be installed, and every GPU is a Hopper."""
    monkeypatch.setattr(quack, "version_of", lambda name: quack.VERSION)
    monkeypatch.setattr(quack, "_epilogues", lambda: None)
    quack._import_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


REFUSED: dict[str, tuple[dict[str, Any], torch.device, str]] = {
    "no GPU": ({}, CPU, "quack needs a GPU of compute capability 9.0, and the experts are on cpu"),
    "float32": (
        {"dtype": torch.float32},
        GPU,
        "quack computes in bfloat16 and float16, and dtype is torch.float32",
    ),
    "odd width": ({"ffn_hidden": 36}, GPU, "hidden and ffn_hidden as multiples of 8, they are 64 and 36"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_quack_is_refused_where_it_does_not_serve(name: str, installed: pytest.MonkeyPatch) -> None:
    changes, device, text = REFUSED[name]
    config = MoEConfig(**{**SIZES, **changes}, products="quack")
    with pytest.raises(Unsupported, match=text):
        make_products(config, device)
    plain = MoEConfig(**{**SIZES, **changes})
    assert type(make_products(plain, device)) is Products  # nobody asked for quack


def test_quack_is_refused_on_other_gpus(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unsupported, match=r"used on compute capability 9\.0, and cuda:0 has 8\.0"):
        make_products(MoEConfig(**SIZES, products="quack"), GPU)


def test_quack_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "version_of", lambda name: None)
    with pytest.raises(Unsupported, match=r"quack-kernels is not installed; pip install 'quack-kernels=="):
        GroupedExperts(MoEConfig(**SIZES, products="quack"), device="cpu")
    assert "products by torch" in repr(GroupedExperts(MoEConfig(**SIZES), device="cpu"))


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'cutlass'"), TypeError("no such argument")]
)
def test_an_install_that_is_broken_is_told(error: Exception, installed: pytest.MonkeyPatch) -> None:
    """A choice of moecomm's own is torch then, with one warning; quack that was asked for is refused."""

    def broken() -> None:
        raise error

    installed.setattr(quack, "_epilogues", broken)
    text = f"cannot be imported ({type(error).__name__}: {error})"
    with pytest.warns(UserWarning, match=re.escape(text)) as warned:
        made = [make_products(MoEConfig(**SIZES), GPU) for _ in range(2)]
    assert [type(each) for each in made] == [Products] * 2 and len(warned) == 1
    with pytest.raises(Unsupported, match=re.escape(text)):
        make_products(MoEConfig(**SIZES, products="quack"), GPU)
    quack._import_problem.cache_clear()


def test_the_choice_is_quack_where_it_serves(installed: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Recorded(Products):
        name = "quack"

        def __init__(self, **sizes: Any) -> None:
            made.append(sizes)

    installed.setattr(quack, "make_quack_products", Recorded)
    for choice, expected in ((None, "quack"), ("quack", "quack"), ("torch", "torch")):
        assert make_products(MoEConfig(**SIZES, products=choice), GPU, rows=7).name == expected
    sizes = {"hidden": 64, "ffn": 32, "dtype": torch.bfloat16, "device": GPU, "rows": 7}
    assert made == 2 * [{**sizes, "activation": "swiglu", "bias": False}]


def test_a_config_has_one_engine() -> None:
    with pytest.raises(InvalidArgument, match="products is 'cutlass', must be one of None, torch, quack"):
        MoEConfig(**SIZES, products="cutlass")


def test_tiles() -> None:
    """A layer of the table has its own tiles, another one those of the nearest; every product has some."""
    for (hidden, ffn, rows), found in tiles.TILES.items():
        assert list(found) and set(found) == {*tiles.PRODUCTS, *tiles.ADDED}
        for product, tile in found.items():
            assert tiles.nearest_tile(product, hidden, ffn, rows) == tile
            assert tiles.parse_tile(str(tile)) == tile
            assert product in tiles.ADDED or not tile.loads
    assert tiles.nearest_tile("fc1", 7000, 2100) in {
        found["fc1"] for sizes, found in tiles.TILES.items() if sizes[:2] == (7168, 2048)
    }
    assert tiles.nearest_tile("fc1", 7000, 2100, 300) == tiles.TILES[7168, 2048, 256]["fc1"]
    assert tiles.nearest_tile("fc2", 1024, 512, 100) == tiles.TILES[2048, 768, 512]["fc2"]
    assert tiles.Tile(256, 192, False, loads=True) == tiles.parse_tile("256x192c21+")


def test_a_state_of_another_order_of_columns_is_refused() -> None:
    halves = GroupedExperts(MoEConfig(**SIZES), device="cpu")
    interleaved = GroupedExperts(MoEConfig(**SIZES, activation="swiglu_interleaved"), device="cpu")
    for one, other, text in (
        (halves, interleaved, "not interleaved"),
        (interleaved, halves, "up values are interleaved"),
    ):
        before = other.w_in.detach().clone()
        with pytest.raises(InvalidArgument, match=text):
            other.load_state_dict(one.state_dict())
        assert torch.equal(other.w_in, before)
    old = {**halves.state_dict(), "_extra_state": halves.get_extra_state()[:3]}  # of version 0.2.0
    GroupedExperts(MoEConfig(**SIZES), device="cpu").load_state_dict(old)
    with pytest.raises(InvalidArgument, match="not interleaved"):
        interleaved.load_state_dict(old)


def with_shared(activation: str) -> torch.nn.Module:
    """Routed and shared experts."""
    config = MoEConfig(**SIZES, activation=activation, num_shared_experts=1)
    parts = {"experts": GroupedExperts(config, device="cpu"), "shared": SharedExperts(config, device="cpu")}
    return torch.nn.ModuleDict(parts)


def test_a_checkpoint_names_the_order_of_columns() -> None:
    """A model with another order finds no weight to load, in either direction, nor its optimizer a state."""
    found = []
    for activation in ("swiglu", "swiglu_interleaved"):
        model = with_shared(activation)
        state = sharded_state(model, torch.optim.AdamW(model.parameters()))
        assert state["optimizer"].keys() == state["model"].keys()
        found.append(set(state["model"]))
    halves, interleaved = found
    assert halves - interleaved == {"experts.w_in", "shared.w_in"}
    assert interleaved - halves == {"experts.w_in.interleaved", "shared.w_in.interleaved"}


def test_the_name_of_interleaved_weights_in_a_checkpoint_is_accepted() -> None:
    """The checkpoint is as torch's dcp_to_torch_save makes one file of it."""
    saved, model, halves = map(with_shared, ("swiglu_interleaved", "swiglu_interleaved", "swiglu"))
    state, of_halves = (dict(sharded_state(each)["model"]) for each in (saved, halves))
    model.load_state_dict(state)
    torch.testing.assert_close(list(model.parameters()), list(saved.parameters()), rtol=0, atol=0)
    assert "experts.w_in.interleaved" in state, "the caller's dict has changed"
    for name in ("experts", "shared"):
        part = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(name)}
        with pytest.raises(InvalidArgument, match=r"has w_in\.interleaved, whose gates"):
            halves[name].load_state_dict(part)
    with pytest.warns(UserWarning, match="of 4, with interleaved gates and up values"):
        model.load_state_dict(of_halves)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"hidden": 60}], ids=str)
def test_products_are_counted(options: dict[str, Any]) -> None:
    """FlopCounterMode sees 24 rows through both weights, and twice that in the backward."""
    config = MoEConfig(**{**SIZES, **options})
    experts = GroupedExperts(config, device="cpu")
    rows = torch.randn(24, config.hidden, dtype=config.dtype, requires_grad=True)
    offsets = torch.tensor([8, 16, 16, 24], dtype=torch.int32)
    of_a_row = 2 * (config.hidden * 64 + 32 * config.hidden)
    with FlopCounterMode(display=False) as counter:
        y = experts(rows, offsets)
        assert counter.get_total_flops() == 24 * of_a_row
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 24 * of_a_row
