"""The experts' products by quack-kernels (github.com/Dao-AILab/quack), on Hopper GPUs.

Its grouped products are faster than torch's, can add weight gradients to existing tensors, and have the
activation and the routing weight in their epilogues. It is an optional dependency, which
`pip install 'moecomm[cuda]'` installs.

quack's epilogues read a gate and its up value from neighbouring columns, so only products with interleaved
gates include the activation. The kernels' tiles are in moecomm/kernels/tiles.py.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor

from moecomm.errors import Unsupported
from moecomm.kernels.activation import INPUTS, INTERLEAVED
from moecomm.kernels.products import Products
from moecomm.kernels.tiles import ADDED, FLOAT32_SUMS, PRODUCTS, Tile, nearest_tile, parse_tile
from moecomm.setup.version import version_of
from moecomm.types import DispatchOutput

VERSION = "0.6.5"
"""The version of quack-kernels that this module was tested with."""
_MULTIPLE = 8
_FEW = parse_tile("128x256c12+")
"""The tile of a product of few columns that is added to rows."""

_compiled: set[Any] = set()
_plans: dict[tuple[Any, ...], Any] = {}
"""quack's launch plans, by all that they depend on. quack keeps a plan for each number of rows: if the number
changes from call to call, a call takes the host several times as long, and memory grows without end."""


def missing_on(*, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns why quack cannot compute these experts' products, and what would help; None if it can. If there
    is no other obstacle it imports quack, which takes seconds the first time."""
    if version_of("quack-kernels") is None:
        return f"quack-kernels is not installed; pip install 'quack-kernels=={VERSION}'"
    if device.type != "cuda":
        return f"quack needs a GPU of compute capability 9.0, and the experts are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"quack is used on compute capability 9.0, and {device} has {'.'.join(map(str, capability))}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"quack computes in bfloat16 and float16, and dtype is {dtype}"
    if hidden % _MULTIPLE or ffn % _MULTIPLE:
        return f"quack needs hidden and ffn_hidden as multiples of {_MULTIPLE}, they are {hidden} and {ffn}"
    return _import_problem()


class QuackProducts(Products):
    """Products by quack-kernels, for experts of one size (`hidden` and `ffn`, multiples of 8), with the
    activation in separate passes.

    rows: average rows of an expert, by which tiles are chosen; tiles: tiles of some products, in place of
    those of tiles.py; columns_first: weights are views of (L, out, in) tensors, and gradients get that memory
    layout too; bias: experts have biases. Kernels are compiled here, which takes seconds and is reported on
    stderr; compile_now=False leaves each kernel to its first use. quack keeps compiled kernels on disk
    (QUACK_CACHE_DIR). Raises Unsupported if quack is not installed or cannot compute these products.
    """

    name = "quack"
    adds = True

    def __init__(
        self,
        *,
        hidden: int,
        ffn: int,
        dtype: torch.dtype,
        device: torch.device,
        activation: str,
        bias: bool = False,
        rows: int | None = None,
        tiles: dict[str, Tile] | None = None,
        columns_first: bool = False,
        compile_now: bool = True,
    ) -> None:
        reason = missing_on(hidden=hidden, ffn=ffn, dtype=dtype, device=device)
        if reason is not None:
            raise Unsupported(f"products is 'quack', but {reason}. products='torch' needs none of it")
        super().__init__(columns_first=columns_first)
        self._hidden, self._ffn, self._inner = hidden, ffn, ffn * INPUTS[activation]
        self._activation = activation
        self._tiles: dict[str, Tile] = {}
        for product in PRODUCTS + ADDED:
            self.use_tile(product, (tiles or {}).get(product) or nearest_tile(product, hidden, ffn, rows))
        if compile_now:
            self._compile(dtype, device, bias)

    def use_tile(self, product: str, tile: Tile) -> None:
        """Sets the tile of a product for later calls."""
        self._tiles[product] = tile

    def __deepcopy__(self, memo: dict[int, Any]) -> QuackProducts:
        return self

    def groups(self, offsets_L: Tensor) -> Tensor:
        starts = offsets_L.new_zeros(offsets_L.shape[0] + 1)
        starts[1:].copy_(offsets_L)
        return starts

    def groups_of(self, out: DispatchOutput) -> Tensor:
        return out.expert_starts

    def grouped_mm(
        self,
        rows_PA: Tensor,
        weight_LAB: Tensor,
        groups: Tensor,
        *,
        bias_LB: Tensor | None = None,
        weights_P: Tensor | None = None,
    ) -> Tensor:
        rows = rows_PA.shape[0]
        if bias_LB is None or rows == 0:
            return self._rows(rows_PA, weight_LAB.mT, groups, "fc2")
        product_PB = rows_PA.new_empty(rows, weight_LAB.shape[2])
        self._launch_fused(
            "weighted_bias",
            "fc2",
            rows_PA,
            weight_LAB,
            groups,
            out={"D": product_PB},
            bias=bias_LB.contiguous(),
            weight=_weights(weights_P, rows_PA, rows),
        )
        return product_PB

    def add_mm(self, rows_PA: Tensor, weight_LAB: Tensor, groups: Tensor, into_PB: Tensor) -> None:
        if rows_PA.shape[0] > 0:
            weight_LBA = weight_LAB.mT
            _launch(_FEW, rows_PA, weight_LBA, into_PB, weight_LBA, True, cu_seqlens_m=groups)

    def grouped_mm_dgrad(self, rows_PB: Tensor, weight_LAB: Tensor, groups: Tensor) -> Tensor:
        return self._rows(rows_PB, weight_LAB, groups, "fc1_dgrad")

    def _wgrad_into(
        self, rows_PA: Tensor, grad_PB: Tensor, groups: Tensor, into: Tensor | None, scale: float
    ) -> Tensor | None:
        sizes = rows_PA.shape[1], grad_PB.shape[1]
        product = "fc1_wgrad" if set(sizes) == {self._hidden, self._inner} else "fc2_wgrad"
        out_LAB = rows_PA.new_empty(groups.shape[0] - 1, *sizes) if into is None else into
        if grad_PB.shape[0] == 0:
            return out_LAB.zero_() if into is None else None
        if into is not None:
            product = f"{product}_added"
        tile, adds = self._tiles[product], into is not None
        if adds and out_LAB.dtype is torch.float32:
            tile = FLOAT32_SUMS
        left, right = rows_PA.contiguous().t(), grad_PB.contiguous().t()
        _launch(tile, left, right, out_LAB, out_LAB, adds, scale, cu_seqlens_k=groups)
        return out_LAB if into is None else None

    def _rows(self, rows_PA: Tensor, weight_LBA: Tensor, groups: Tensor, product: str) -> Tensor:
        rows = rows_PA.shape[0]
        out_PB = rows_PA.new_empty(rows, weight_LBA.shape[1])
        if rows > 0:
            rows_PA = rows_PA.contiguous()
            _launch(self._tiles[product], rows_PA, weight_LBA, out_PB, weight_LBA, cu_seqlens_m=groups)
        return out_PB

    def _launch_fused(
        self,
        epilogue: str,
        product: str,
        rows_PA: Tensor,
        weight_LAB: Tensor,
        groups: Tensor,
        c: Tensor | None = None,
        *,
        out: dict[str, Tensor],
        sums: dict[str, Tensor] | None = None,
        **operands: Tensor,
    ) -> None:
        """Computes a product of rows with an epilogue of `moecomm.kernels.quack_epilogue`. `c`, `operands`:
        inputs of the epilogue; `sums`: tensors (P, tiles along the columns) for its sums within each tile."""
        rows_PA, sums = rows_PA.contiguous(), sums or {}
        given: dict[str, Any] = {"cu_seqlens_m": groups, **operands}
        layout, tile = (weight_LAB.stride(), rows_PA.stride(), rows_PA.dtype), self._tiles[product]
        key = (epilogue, tile, weight_LAB.shape, *layout, rows_PA.device)
        plan = _plans.get(key)
        if plan is None:
            make = functools.partial(getattr(_epilogues(), epilogue).plan, config=_config(tile))
            plan = _plans[key] = make(rows_PA, weight_LAB, c, out=out, **given, **sums)
            plan.scratch = {}
        plan.run(rows_PA, weight_LAB, c, out=out, scratch=sums, **given)

    def _compile(self, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        """Runs every product once on a few rows, to compile its kernel. Prints a time over 1 s to stderr."""
        kind = (type(self), self._activation, self.columns_first, bias)
        key = (*kind, *self._tiles.values(), dtype, device)
        if key in _compiled:
            return
        began = time.monotonic()
        rows, hidden, ffn = 256, self._hidden, self._ffn
        new = functools.partial(torch.zeros, dtype=dtype, device=device)
        x_PH, grad_PH = new(rows, hidden), new(rows, hidden)
        w_in, w_out = new(2, hidden, self._inner), new(2, ffn, hidden)
        if self.columns_first:
            w_in, w_out = (weight.mT.contiguous().mT for weight in (w_in, w_out))
        groups = torch.tensor([0, 100, rows], dtype=torch.int32, device=device)
        weights_P = torch.ones(rows, dtype=torch.float32, device=device)
        gated: dict[str, Any] = {"activation": self._activation}
        b_in, b_out = (new(2, self._inner), new(2, hidden)) if bias else (None, None)
        inner_PI, z_PF = self.gated_mm(x_PH, w_in, groups, weights_P, **gated, bias_LI=b_in)
        self.grouped_mm(x_PH, w_in, groups, bias_LB=b_in)
        self.grouped_mm(z_PF, w_out, groups, bias_LB=b_out, weights_P=weights_P)
        grad_inner_PI, _, z_again_PF = self.gated_mm_dgrad(
            grad_PH, w_out, groups, inner_PI, weights_P, **gated, need_weights=True, need_z=True
        )
        assert z_again_PF is not None
        self.grouped_mm_dgrad(grad_inner_PI, w_in, groups)
        if b_out is not None:
            self.bias_grad(grad_inner_PI, groups)
            self.bias_grad(grad_PH, groups, weights_P)
            self.bias_weights_grad(grad_PH, b_out, groups)
        for dtype_into in (None, dtype, torch.float32):
            into_in, into_out = (
                None if dtype_into is None else torch.zeros_like(weight, dtype=dtype_into)
                for weight in (w_in, w_out)
            )
            self.grouped_mm_wgrad(x_PH, grad_inner_PI, groups, into=into_in)
            self.grouped_mm_wgrad(z_again_PF, grad_PH, groups, into=into_out)
        torch.cuda.synchronize(device)
        _compiled.add(key)
        seconds = time.monotonic() - began
        if seconds > 1:
            print(
                f"moecomm: quack's kernels for experts of {hidden} x {ffn}: {seconds:.0f} s", file=sys.stderr
            )


class FusedQuackProducts(QuackProducts):
    """Products by quack-kernels with the activation in their epilogues."""

    def gated_mm(
        self,
        rows_PH: Tensor,
        weight_LHI: Tensor,
        groups: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        bias_LI: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = {"activation": activation, "bias_LI": bias_LI}
        clamped, (groups_L, _, inner) = activation == "swiglu_clamped", weight_LHI.shape
        if bias_LI is not None and not clamped:
            return super().gated_mm(rows_PH, weight_LHI, groups, weights_P, **given)
        rows = rows_PH.shape[0]
        inner_PI, z_PF = rows_PH.new_empty(rows, inner), rows_PH.new_empty(rows, inner // 2)
        if rows == 0:
            return inner_PI, z_PF
        operands: dict[str, Any] = {"weight": _weights(weights_P, rows_PH, rows)}
        if clamped:
            bias_LI = rows_PH.new_zeros(groups_L, inner) if bias_LI is None else bias_LI
            operands["bias"] = bias_LI.contiguous()
        self._launch_fused(
            "weighted_swiglu_clamped" if clamped else "weighted_swiglu",
            "fc1",
            rows_PH,
            weight_LHI,
            groups,
            out={"D": inner_PI, "postact": z_PF},
            **operands,
        )
        return inner_PI, z_PF

    def gated_mm_dgrad(
        self,
        grad_rows_PH: Tensor,
        weight_LFH: Tensor,
        groups: Tensor,
        inner_PI: Tensor,
        weights_P: Tensor | None,
        *,
        activation: str,
        need_weights: bool,
        need_z: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = inner_PI.shape[0]
        grad_inner_PI, z_PF = torch.empty_like(inner_PI), inner_PI.new_empty(rows, inner_PI.shape[1] // 2)
        weights_P = _weights(weights_P, inner_PI, rows)
        tiles = -(-z_PF.shape[1] // self._tiles["fc2_dgrad"].n)
        grad_weights_PT = weights_P.new_empty(rows, tiles)
        if rows > 0:
            clamped = activation == "swiglu_clamped"
            self._launch_fused(
                "weighted_swiglu_clamped_backward" if clamped else "weighted_swiglu_backward",
                "fc2_dgrad",
                grad_rows_PH,
                weight_LFH.mT,
                groups,
                inner_PI,
                out={"D": grad_inner_PI, "postact": z_PF},
                sums={"dweight": grad_weights_PT},
                weight=weights_P,
            )
        grad_weights_P = grad_weights_PT.sum(1) if need_weights else None
        return grad_inner_PI, grad_weights_P, z_PF if need_z else None


def make_quack_products(*, activation: str, **others: Any) -> QuackProducts:
    """Makes the products of experts, with the activation in their epilogues if quack supports that. Arguments
    are those of `QuackProducts`."""
    made = FusedQuackProducts if activation in INTERLEAVED else QuackProducts
    return made(activation=activation, **others)


# -- quack -------------------------------------------------------------------------------------------------


@functools.cache
def _quack() -> Any:
    found = version_of("quack-kernels")
    if found != VERSION:
        print(f"moecomm: quack-kernels is {found}, tested was {VERSION}", file=sys.stderr)
    return importlib.import_module("quack.gemm_interface")


@functools.cache
def _import_problem() -> str | None:
    """Returns why quack, though installed, cannot be imported; None if it can. Warns once if it cannot, since
    moecomm then chooses torch's products."""
    try:
        _epilogues()
    except Exception as error:  # a missing or mismatched package may raise any error
        problem = f"quack-kernels is installed and cannot be imported ({type(error).__name__}: {error})"
        warnings.warn(f"{problem}; experts' products are by torch, which is slower", stacklevel=2)
        return f"{problem}; pip install --force-reinstall 'quack-kernels=={VERSION}'"
    return None


@functools.cache
def _gemm() -> Any:
    return importlib.import_module("quack.gemm")


@functools.cache
def _epilogues() -> Any:
    _quack()
    return importlib.import_module("moecomm.kernels.quack_epilogue")


def _launch(
    tile: Tile,
    left: Tensor,
    right_T: Tensor,
    out: Tensor,
    weight: Tensor,
    adds: bool = False,
    scale: float = 1.0,
    **groups: Tensor,
) -> None:
    """Computes left @ right times `scale` into `out`; if `adds`, adds the result to `out`. `right_T` is the
    transpose of right. `weight`: the tensor with a matrix for each group; the plan depends on its sizes, not
    on the number of rows."""
    there = out if adds and tile.loads else None
    strides = left.stride(), right_T.stride(), out.stride()
    dtypes = left.dtype, out.dtype
    key = (tile, weight.shape, strides, dtypes, adds, scale == 1, left.device, *groups)
    plan = _plans.get(key)
    if plan is not None:
        _gemm().run_gemm_plan(plan, left, right_T, out, there, alpha=scale, **groups)
        return
    adds_itself = adds and there is None
    *_, _plans[key] = _quack().gemm_tuned.fn(
        left, right_T.mT, out, there, alpha=scale, add_to_output=adds_itself, config=_config(tile), **groups
    )


def _weights(weights_P: Tensor | None, like: Tensor, rows: int) -> Tensor:
    return like.new_ones(rows, dtype=torch.float32) if weights_P is None else weights_P


@functools.cache  # quack finds a plan by id(config), so a config must never be freed and its id reused
def _config(tile: Tile) -> Any:
    return importlib.import_module("quack.gemm_config").GemmConfig(
        tile_m=tile.m,
        tile_n=tile.n,
        pingpong=tile.pingpong,
        cluster_m=tile.cluster_m,
        cluster_n=tile.cluster_n,
        device_capacity=9,
        is_dynamic_persistent=False,
        use_tma_gather=False,
        swap_ab=False,
    )
