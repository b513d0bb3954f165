"""Experts: a network per group of rows (GroupedExperts), one for all rows (SharedExperts), or a user's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moecomm.arguments import require_ascending, require_integer, weight_dtype
from moecomm.autograd.in_place import has_main_grad, to_main_grad
from moecomm.backends.opened import call_or_tell
from moecomm.communicator import Communicator
from moecomm.errors import InvalidArgument
from moecomm.kernels.activation import INPUTS, INTERLEAVED, weighted_activation
from moecomm.kernels.engine import make_products
from moecomm.kernels.expert_ffn import expert_ffn
from moecomm.kernels.outside_autocast import matmul
from moecomm.kernels.parameters import (
    ExpertPart,
    has_part_for_each,
    init_expert_weights,
    init_shared_weight,
    mark_expert_parameter,
    mixed_shards_error,
    ranks_of_shards,
    splits_of,
)
from moecomm.nn.config import MoEConfig, require_config
from moecomm.parallel.records import accept_interleaved, require_same_experts, says
from moecomm.types import DispatchOutput

Run = Callable[[Tensor], Tensor]

_WEIGHTS = ("w_in", "w_out", "b_in", "b_out")
_IN_MAIN_GRAD = frozenset((*_WEIGHTS, *(f"parametrizations.{name}.original" for name in _WEIGHTS)))
"""The names of the parameters that may accumulate main_grad. If torch parametrizes a weight, it keeps the
weight's parameter under the name `original`."""


_OWN = _IN_MAIN_GRAD | {f"{name}_{added}" for name in _WEIGHTS for added in ("orig", "g", "v")}
"""The names of weights and biases, and those that torch.nn.utils' prune, spectral_norm, weight_norm add."""


class GroupedExperts(nn.Module):
    """This rank's experts (L of E), applied to expert-major rows in two grouped products.

    The columns of w_in (L, H, I): for swiglu all gates, then all up values; for swiglu_interleaved and
    swiglu_clamped gates in even and up values in odd columns; I = 2F for these three. For gelu I = F. With
    config.bias, b_in is added to a row's first product and b_out to its second, before the routing weight.
    The initial values of expert e depend on its global id and one draw from torch's default generator: ranks
    that call torch.manual_seed alike make the same model at any EP size.

    Marked as expert parameters are the weights, the biases, and those parameters of a parametrization that
    have a part for each expert (docs/training.md, `mark_adapter`). If ranks have different experts, only
    `fully_shard_experts` may shard them; fully_shard raises InvalidArgument. A state_dict records which
    experts it has (`get_extra_state`). load_state_dict raises InvalidArgument for a state of other experts,
    before it changes a weight, and warns if a state without that record may be of other experts.

    Args:
        config: the layer's MoEConfig.
        num_local_experts: L; None: all.
        first_expert: global id of the first local expert.
        part: the part of each expert that this rank holds (ExpertPart): F is then ffn_hidden / part.of.
        rows_per_expert: average rows of an expert in a call, by which tiles are chosen.
        device: where the weights are created.
        products_on: the device that computes, if it is not `device` (for weights created on meta).

    Attributes:
        w_in: (L, H, I) of the config's dtype.
        w_out: (L, F, H) of the config's dtype.
        b_in: (L, I) of the config's dtype; None without config.bias.
        b_out: (L, H) of the config's dtype; None without config.bias, and if part.number > 0.
        config, num_local_experts, first_expert, part: see above; part 0 of 1 is a whole expert.
        products: the Products that compute and differentiate the two grouped products.
        sharded_over: ranks of the default group over which `fully_shard_experts` shards the weights.
    """

    w_in: nn.Parameter
    w_out: nn.Parameter
    b_in: nn.Parameter | None
    b_out: nn.Parameter | None
    sharded_over: frozenset[int] = frozenset()

    def __init__(
        self,
        config: MoEConfig,
        *,
        num_local_experts: int | None = None,
        first_expert: int = 0,
        part: ExpertPart | None = None,
        rows_per_expert: int | None = None,
        device: torch.device | str | None = None,
        products_on: torch.device | None = None,
    ) -> None:
        super().__init__()
        require_config(config)
        part = part or ExpertPart()
        ffn, rest = divmod(config.ffn_hidden, part.of)
        if rest or not 0 <= part.number < part.of:
            raise InvalidArgument(
                f"part is {part}, must be one of equal parts of ffn_hidden={config.ffn_hidden} columns"
            )
        every = config.num_experts
        local = every if num_local_experts is None else num_local_experts
        require_integer("num_local_experts", local, 1, every)
        require_integer("first_expert", first_expert, 0, every - local)
        self.config, self.num_local_experts, self.first_expert, self.part = config, local, first_expert, part
        where = products_on or (torch.get_default_device() if device is None else torch.device(device))
        self.products = make_products(dataclasses.replace(config, ffn_hidden=ffn), where, rows_per_expert)
        inner = ffn * INPUTS[config.activation]
        shapes: dict[str, tuple[int, ...]] = {"w_in": (config.hidden, inner), "w_out": (ffn, config.hidden)}
        shapes |= {"b_in": (inner,), "b_out": (config.hidden,)} if config.bias else {}
        for name in _WEIGHTS:
            has = name in shapes and not (name == "b_out" and part.number)
            made = torch.empty(local, *shapes[name], dtype=config.dtype, device=device) if has else None
            self.register_parameter(name, None if made is None else nn.Parameter(made))
        self.mark_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the weights, or this rank's shards, with random numbers of standard deviation
        config.init_std, and biases with zeros. Draws one number of torch's default CPU generator."""
        seed, splits = int(torch.randint(2**62, (), device="cpu")), splits_of(self.config.activation)
        for name, weight in (("w_in", self.w_in), ("w_out", self.w_out)):
            split = splits[name]
            assert split is not None
            init_expert_weights(
                weight,
                seed=seed,
                name=name,
                first_expert=self.first_expert,
                std=self.config.init_std,
                part=self.part,
                split=split,
            )
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        rows_PH: Tensor,
        offsets_L: Tensor | None = None,
        weights_P: Tensor | None = None,
        *,
        has_tail: bool = True,
        run: Run | None = None,
    ) -> Tensor:
        """Computes the experts on grouped rows; returns (P, H). Raises InvalidArgument for wrong rows or
        offsets. On a GPU, where the host would wait, offsets that descend or exceed P give any result.

        rows_PH: (P, H) of the weights' dtype, grouped by local expert; offsets_L: (L,) int32 cumulative ends
        of groups; weights_P: (P,) float32 (float64 for float64 rows) routing weights. Rows past offsets[-1]
        may hold anything: results and gradients are zero there, and weights' gradients leave these rows out.
        has_tail=False, for P == offsets[-1], saves two passes over rows. With `run`, forward returns
        run(rows_PH) after hooks of this module have prepared the weights (FSDP gathers them).
        """
        if run is not None:
            return run(rows_PH)
        if not isinstance(offsets_L, Tensor):
            raise InvalidArgument(f"offsets are {type(offsets_L).__name__}, must be a tensor of groups' ends")
        # Autocast is also off for what parametrizations compute for the weights.
        with torch.autocast(rows_PH.device.type, enabled=False):
            _require_rows(rows_PH, self.config.hidden, self.w_in)
            if offsets_L.shape != (wanted := (self.num_local_experts,)):
                raise InvalidArgument(f"offsets have shape {tuple(offsets_L.shape)}, must be {wanted}")
            require_ascending("offsets", offsets_L, rows_PH.shape[0])
            offsets_L = offsets_L.to(torch.int32)
            real_P1 = _real_rows(rows_PH, offsets_L) if has_tail else None
            # The first where() zeroes the gradient of the tail (rows past offsets[-1]), the second its
            # result. A product with zero would keep NaN.
            y_PH = expert_ffn(
                rows_PH if real_P1 is None else rows_PH.where(real_P1, 0.0),
                self.w_in,
                self.w_out,
                offsets_L,
                weights_P,
                activation=self.config.activation,
                products=self.products,
                b_in_LI=self.b_in,
                b_out_LH=self.b_out,
            )
            return y_PH if real_P1 is None else y_PH.where(real_P1, 0.0)

    def mark_parameters(self) -> None:
        """Marks the parameters as those of experts, and makes the trained weights accumulate `main_grad` if
        the config says so. Parameters that a parametrization or a subclass has added still use `grad`."""
        for name, parameter in self.named_parameters():  # marks them, by named_modules()
            if isinstance(parameter, DTensor):
                continue
            trained = parameter.requires_grad and parameter.is_leaf  # no leaf: computed from parameters
            collects = self.config.main_grad and trained and name in _IN_MAIN_GRAD
            if collects and not has_main_grad(parameter):
                parameter.register_post_accumulate_grad_hook(to_main_grad)

    def is_per_expert(self, name: str, parameter: Tensor) -> bool | None:
        """Returns whether the parameter of this name has a part for each of this rank's experts. None:
        unknown, for a parameter that was added to the module (declare it by `mark_adapter`)."""
        if name in _OWN or self.has_all:
            return parameter.dim() > 0 and parameter.shape[0] == self.num_local_experts
        return has_part_for_each(self, self.num_local_experts, name, parameter)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields what nn.Module.named_modules does, and marks each module's parameters. So all parameters
        that `parameters()` of a model returns are marked, also those of parametrizations."""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            self._mark(name.removeprefix(prefix).lstrip("."), module)
            yield name, module

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter like nn.Module, and marks it."""
        super().register_parameter(name, param)
        self._mark("", self)

    def _mark(self, path: str, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, nn.Parameter):
                continue
            if self.is_per_expert(f"{path}.{name}".lstrip("."), parameter):
                mark_expert_parameter(parameter)

    def _apply(self, *args: Any, **options: Any) -> GroupedExperts:
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        self.mark_parameters()  # to_empty, for example, makes new parameters
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Copying or unpickling a module makes new Parameter objects, which have lost attributes and hooks.
        self.mark_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupedExperts:
        # Without this method torch would give a parametrized module's class a __deepcopy__ of torch's own.
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.mark_parameters()
        return twin

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP sets its sharded parameters here: when it shards, and again after each forward or backward.
        if isinstance(value, DTensor):
            if self.config.main_grad:
                raise InvalidArgument(
                    "main_grad is True, must be False under fully_shard, which averages and shards `grad` "
                    "alone"
                )
            if not self.has_all and self.sharded_over != set(ranks := ranks_of_shards(value)):
                raise mixed_shards_error(name, ranks, self.held)
        super().__setattr__(name, value)

    @property
    def held(self) -> str:
        """Text that says which experts this rank holds."""
        return says(self.get_extra_state().tolist())

    @property
    def has_all(self) -> bool:
        """True if this rank holds all experts, whole."""
        return self.num_local_experts == self.config.num_experts and self.part.of == 1

    def get_extra_state(self) -> Tensor:
        """Returns the record that a state_dict keeps of these experts, (6,) int64: first_expert, L, E, 1 if
        gates and up values are interleaved (else 0), the part's number, and the number of parts."""
        interleaved = self.config.activation in INTERLEAVED
        held = [self.first_expert, self.num_local_experts, self.config.num_experts, int(interleaved)]
        return torch.tensor([*held, *self.part], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Does nothing: `_load_from_state_dict` has compared the record before it loads a weight."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        require_same_experts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.mark_parameters()  # assign=True replaces the tensors

    def extra_repr(self) -> str:
        biases = ", biases" if self.config.bias else ""
        return f"{self.held}, {self.config.activation}{biases}, products by {self.products.name}"


class SharedExperts(nn.Module):
    """The experts that see every token, as one dense network of width F' = num_shared_experts * ffn_hidden
    (DeepSeekMoE, arXiv 2401.06066), the same on all ranks. With config.shared_gate the result for token x is
    multiplied by sigmoid(x w_gate).

    Attributes:
        w_in: (H, F' or 2F') of the config's dtype, columns as in GroupedExperts.
        w_out: (F', H) of the config's dtype.
        w_gate: (H,) of the config's dtype; None without config.shared_gate.
        config: the layer's MoEConfig.
    """

    w_in: nn.Parameter
    w_out: nn.Parameter
    w_gate: nn.Parameter | None

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        require_config(config)
        self.config = config
        width = config.num_shared_experts * config.ffn_hidden
        inner = width * INPUTS[config.activation]
        self.w_in = nn.Parameter(torch.empty(config.hidden, inner, dtype=config.dtype, device=device))
        self.w_out = nn.Parameter(torch.empty(width, config.hidden, dtype=config.dtype, device=device))
        gate = nn.Parameter(torch.empty_like(self.w_out[0])) if config.shared_gate else None
        self.register_parameter("w_gate", gate)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the weights with new random numbers of standard deviation config.init_std, from torch's
        default CPU generator."""
        for weight in self.parameters():
            init_shared_weight(weight, self.config.init_std)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        accept_interleaved(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x_TH: Tensor, *, run: Run | None = None) -> Tensor:
        """Maps (T, H) of the weights' dtype to (T, H). `run`: as in GroupedExperts.forward."""
        if run is not None:
            return run(x_TH)
        care = torch.is_autocast_enabled(x_TH.device.type)
        with torch.autocast(x_TH.device.type, enabled=False):
            w_in = self.w_in
            _require_rows(x_TH, self.config.hidden, w_in)
            gates_T = shared_gates(x_TH, self.w_gate, care)
            inner_TI = matmul(x_TH, w_in, care)
            z_TF = weighted_activation(inner_TI, gates_T, activation=self.config.activation)
            return matmul(z_TF, self.w_out, care)


def _require_rows(rows_XH: Tensor, hidden: int, weight: Tensor) -> None:
    if rows_XH.dim() != 2 or rows_XH.shape[1] != hidden or rows_XH.dtype != weight.dtype:
        raise InvalidArgument(
            f"rows have shape {tuple(rows_XH.shape)} and dtype {rows_XH.dtype}, must be "
            f"(rows, hidden={hidden}) of the weights' dtype {weight.dtype}"
        )


def _real_rows(rows_PH: Tensor, offsets_L: Tensor) -> Tensor:
    """Returns (P, 1) bool: False for the rows past the last group."""
    return (torch.arange(rows_PH.shape[0], device=rows_PH.device) < offsets_L[-1]).unsqueeze(1)


def shared_gates(x_TH: Tensor, w_gate_H: Tensor | None, care: bool = False) -> Tensor | None:
    """Returns the factors of the shared experts' inner rows, sigmoid(x w): (T,) in the dtype of routing
    weights; None without a gate. `care`: as in `outside_autocast.matmul`."""
    if w_gate_H is None:
        return None
    return matmul(x_TH, w_gate_H, care).to(weight_dtype(x_TH.dtype)).sigmoid()


# -- experts of one's own ----------------------------------------------------------------------------------


def adopt_experts(experts: nn.Module, config: MoEConfig) -> None:
    """Checks a user's module of experts, and marks its parameters as experts'. Raises InvalidArgument."""
    if not isinstance(experts, nn.Module):
        raise InvalidArgument(f"experts is {type(experts).__name__}, must be an nn.Module or None")
    for name in ("bias", "main_grad"):
        if getattr(config, name):
            raise InvalidArgument(f"{name} is True, must be False with experts of one's own")
    parameters = dict(experts.named_parameters(remove_duplicate=False))
    others = [name for name in experts.state_dict() if name not in parameters]
    if others and others[0].endswith("_extra_state"):
        raise InvalidArgument(
            f"experts has {others[0]!r} in its state, a record that moecomm does not save (a GroupedExperts "
            "has one): around the layer's own experts put hooks, or torch.nn.utils.parametrize for their "
            "weights, with MoELayer(experts=None); a module of one's own has parameters alone"
        )
    if others:
        raise InvalidArgument(
            f"experts has the buffer {others[0]!r} in its state, which a checkpoint would take for the same "
            "on all ranks: register it with persistent=False, or make it a parameter"
        )
    for parameter in parameters.values():
        if not isinstance(parameter, DTensor):  # DTensors stay unmarked: `refuse_mixed_shards` checks them
            mark_expert_parameter(parameter)


def combine_own_experts(
    comm: Communicator, experts: nn.Module, out: DispatchOutput, has_tail: bool
) -> Tensor:
    """Runs a user's module and combines: returns (T, H), the sums over a token's experts of weight * row."""
    rows_PH, real_P1 = out.tokens, None
    if has_tail:
        # NaN times zero is not zero: where() hides the tail's contents from the module, and from gradients.
        real_P1 = _real_rows(rows_PH, out.offsets)
        rows_PH = rows_PH.where(real_P1, 0.0)
    with torch.autocast(rows_PH.device.type, enabled=False):
        expert_rows_PH = call_or_tell(comm, experts, rows_PH, out.offsets)
    if not isinstance(expert_rows_PH, Tensor):
        kind = type(expert_rows_PH).__name__
        comm.refuse(
            InvalidArgument(f"experts returned {kind}, must return the (P, H) tensor of the experts' rows")
        )
    # Combine refuses rows of a wrong shape or dtype on all ranks. Without rows the module's result may not
    # depend on its input, and other ranks' backward would wait for this rank: cat() makes it depend.
    if expert_rows_PH.shape == rows_PH.shape and expert_rows_PH.dtype == rows_PH.dtype:
        if real_P1 is not None:
            expert_rows_PH = expert_rows_PH.where(real_P1, rows_PH)
        elif not rows_PH.shape[0]:
            expert_rows_PH = torch.cat((expert_rows_PH, rows_PH))
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in experts.parameters())
    if trains and not expert_rows_PH.requires_grad:
        expert_rows_PH = expert_rows_PH.detach().requires_grad_()  # so that this rank joins the backward
    return comm.combine(expert_rows_PH, out.handle, weights=out.weights)
