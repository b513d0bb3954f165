"""The experts of a transformers module, on rows that are grouped by expert.

`use_experts_implementation` of transformers sets attributes of a module that describe its weights: has_gate,
has_bias, is_transposed, has_post_expert_norm. Products use these weights directly, without a copy; a module
without this description runs its own forward on the same rows.

Shape letters: P rows of L local experts, H hidden columns, F columns of the activation's result, I columns of
the first product (2F with a gate).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import moe

from moecomm.arguments import weight_dtype
from moecomm.backends.opened import call_or_tell
from moecomm.communicator import Communicator
from moecomm.errors import Unsupported
from moecomm.kernels import quack
from moecomm.kernels.expert_ffn import LowRank, expert_ffn, join_adapters
from moecomm.kernels.products import Products, grouped_linear
from moecomm.nn.expert_pass import DispatchState, Forward, PassContext, Weights, run_forward
from moecomm.shared import LayerCommunicators, SharedCommunicator
from moecomm.transformers.recompute import dispatch_again, keep_dispatch, kept_dispatch
from moecomm.transformers.sole_experts import DividedGradient
from moecomm.types import DispatchOutput

OwnForward = Callable[[Tensor, Tensor, Tensor], Tensor]

# transformers' own implementations, which moecomm's products replace: they compute the same. If a config asks
# for another implementation ("sonicmoe", "deepgemm"), that implementation runs, on moecomm's rows.
_REPLACED = (None, "eager", "grouped_mm", "moecomm")


class LocalExperts:
    """This rank's experts of one module of transformers, applied to the rows of a dispatch. comm: that of the
    last forward; None before the first. capacity: the rows that dispatches have room for, if ranks share the
    experts, which a GraphedStep sets; None: as many as arrive."""

    def __init__(self, experts: nn.Module, forward: OwnForward, num_local_experts: int) -> None:
        self._experts, self._forward, self._count = experts, forward, num_local_experts
        self._described = _is_described(experts)
        self._activation = activation_of(experts) if self._described else None
        self._products: dict[tuple[Any, ...], Products] = {}
        self._adapters: dict[str, list[LowRank]] = {}
        self.comm: Communicator | None = None
        self.capacity: int | None = None
        self._dispatch_seen: Callable[[DispatchOutput], None] | None = None
        self._waits_on_host = False

    @contextlib.contextmanager
    def adding(self, name: str, adapters: list[LowRank]) -> Iterator[None]:
        """A context in which the weight `name` has adapters, whose factors are transposed as the weight is.
        They stay beside the weight, unless the module runs its own forward."""
        if not adapters:
            yield
            return
        self._adapters[name] = adapters
        try:
            yield
        finally:
            del self._adapters[name]

    @property
    def has_adapters(self) -> bool:
        """True within `adding`."""
        return bool(self._adapters)

    @contextlib.contextmanager
    def _changed(self, batches: int, merges: bool) -> Iterator[None]:
        """A context that divides the weights' gradients by `batches`, and if `merges` adds adapters to the
        weights."""
        weights: Any = self._experts._parameters
        plain = {name: each for name, each in weights.items() if each is not None}
        try:
            if batches > 1:
                for name, each in plain.items():
                    if each.requires_grad:
                        weights[name] = DividedGradient.apply(each, batches)  # type: ignore[no-untyped-call]
            for name, adapters in self._adapters.items() if merges else ():
                with torch.autocast(plain[name].device.type, enabled=False):  # the weight keeps its dtype
                    for left, right, scale in adapters:
                        weights[name] = torch.baddbmm(weights[name], left, right, alpha=scale)
            yield
        finally:
            weights.update(plain)

    def __call__(
        self,
        comms: LayerCommunicators,
        hidden_states: Tensor,
        ids_TK: Tensor,
        top_k_weights: Tensor,
        batches: int = 1,
    ) -> Tensor:
        """Returns what `MoecommEP` does, by communicators of the layer. ids: -1 for none; batches: the number
        by which the gradients of the module's weights are divided."""
        plain = self.has_plain_weights()
        dtype = getattr(self._experts, self._first).dtype if plain else None
        x_TH, kind = hidden_states, hidden_states.device.type
        on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if plain and on and x_TH.dtype is not torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(x_TH.device.type)
            x_TH = x_TH.to(dtype)
        weights_TK = top_k_weights.to(weight_dtype(x_TH.dtype))
        shared = comms.of(x_TH, ids_TK.shape[1])
        return self._run(shared, x_TH, ids_TK, weights_TK, batches, dtype).to(hidden_states.dtype)

    def _run(
        self,
        shared: SharedCommunicator,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        batches: int,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """Dispatches the tokens, runs the experts on their rows and combines the results. dtype: that of the
        products; None if the module runs its own forward."""
        # moecomm's own layers have a pass without and a pass with adapters. Both need an activation that
        # moecomm knows, and products in the dtype of the tokens.
        known = self._activation if dtype is x_TH.dtype else None
        if known is not None and not self._adapters:
            return self._run_pass(shared, x_TH, ids_TK, weights_TK, 1 / batches)
        kept = kept_dispatch(ids_TK)
        if kept is not None and isinstance(kept.state, DispatchOutput):
            comm, out = kept.comm, dispatch_again(kept, x_TH, weights_TK)
        else:
            if dtype is None and self.capacity is not None:
                name = type(self._experts).__name__
                raise Unsupported(f"a GraphedStep with {name}, which runs its own forward")
            # A module's own forward takes no rows that are unspecified.
            capacity = None if dtype is None else self._capacity(shared, ids_TK)
            comm, out = shared.dispatch(x_TH, ids_TK, weights_TK, capacity=capacity)
            keep_dispatch(ids_TK, comm, out)
            self.comm = comm
            if self._dispatch_seen is not None:
                self._dispatch_seen(out)
        with self._changed(batches, merges=known is None):
            if known is not None:
                rows_PH = call_or_tell(comm, self._with_adapters, out, comm, known)
                return comm.combine(rows_PH, out.handle)
            rows_PH = call_or_tell(comm, self._on_rows, out, comm, dtype)
        return comm.combine(rows_PH, out.handle, weights=out.weights)

    def _run_pass(
        self, shared: SharedCommunicator, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, scale: float
    ) -> Tensor:
        """Runs the module's experts as moecomm's own layers run theirs (`run_forward`), with the module's
        weights, whose gradients are multiplied by `scale`."""
        weights = self._plain_weights(x_TH.dtype)
        forwards: list[Forward] = []

        def forward_on(comm: Communicator, state: DispatchState | None) -> Tensor:
            context = PassContext(
                comm=comm,
                topk_idx_TK=ids_TK,
                activation=self._activation or "",
                products=self._products_of(weights, comm),
                capacity=self._capacity(shared, ids_TK),
                waits_on_host=self._waits_on_host,
                seen=self._dispatch_seen,
                gradient_scale=scale,
            )
            forwards.append(Forward(context, state))
            return run_forward(forwards[-1], x_TH, weights_TK, weights)

        kept = kept_dispatch(ids_TK)
        if kept is not None and isinstance(kept.state, DispatchState):
            return forward_on(kept.comm, kept.state)
        y_TH = shared.run(x_TH.shape[0], lambda comm: forward_on(comm, None), lambda: forwards[-1].dispatched)
        self.comm = forwards[-1].context.comm
        keep_dispatch(ids_TK, self.comm, forwards[-1].state)
        return y_TH

    def _capacity(self, shared: SharedCommunicator, ids_TK: Tensor) -> int | None:
        known = shared.known_rows(ids_TK)
        return self.capacity if known is None else known

    @property
    def _first(self) -> str:
        """The name of the first product's weight."""
        return "gate_up_proj" if cast(Any, self._experts).has_gate else "up_proj"

    def _plain_weights(self, dtype: torch.dtype) -> Weights:
        experts: Any = self._experts
        w_in, w_out = getattr(experts, self._first), experts.down_proj
        b_in = getattr(experts, f"{self._first}_bias") if experts.has_bias else None
        b_out = experts.down_proj_bias if experts.has_bias else None
        if not experts.is_transposed:
            w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
        if w_in.dtype is not dtype:
            w_in, w_out = w_in.to(dtype), w_out.to(dtype)
            b_in, b_out = (None if each is None else each.to(dtype) for each in (b_in, b_out))
        return Weights(w_in, w_out, None, None, b_in=b_in, b_out=b_out)

    def _on_rows(self, out: DispatchOutput, comm: Communicator, dtype: torch.dtype | None) -> Tensor:
        """Returns the experts' results, (P, H) in the rows' dtype, where no pass can run: weights of another
        dtype, an activation that moecomm lacks, or a module that needs its own forward."""
        if dtype is None:
            return self._run_forward(out)
        experts: Any = self._experts
        w_in, w_out, *_, b_in, b_out = weights = self._plain_weights(dtype)
        products = self._products_of(weights, comm)
        rows_PH = out.tokens.to(w_in.dtype)
        inner_PI = grouped_linear(rows_PH, w_in, b_in, out.offsets, products)
        z_PF = experts._apply_gate(inner_PI) if experts.has_gate else experts.act_fn(inner_PI)
        return grouped_linear(z_PF, w_out, b_out, out.offsets, products).to(out.tokens.dtype)

    def _with_adapters(self, out: DispatchOutput, comm: Communicator, activation: str) -> Tensor:
        """Returns the experts' results times their routing weights, (P, H), with adapters beside weights."""
        w_in, w_out, *_, b_in, b_out = weights = self._plain_weights(out.tokens.dtype)
        products = self._products_of(weights, comm)

        def adapter(name: str) -> LowRank | None:
            found = []
            for left, right, scale in self._adapters.get(name, ()):
                if not cast(Any, self._experts).is_transposed:
                    left, right = right.mT, left.mT
                found.append(LowRank(left.to(w_in.dtype), right.to(w_in.dtype), scale))
            return join_adapters(found)

        return expert_ffn(
            out.tokens,
            w_in,
            w_out,
            out.offsets,
            out.weights,
            activation=activation,
            products=products,
            b_in_LI=b_in,
            b_out_LH=b_out,
            adapters=(adapter(self._first), adapter("down_proj")),
            groups=products.groups_of(out),
        )

    def _products_of(self, weights: Weights, comm: Communicator) -> Products:
        """Returns quack's products if they support the experts, else torch's. Tiles are chosen for an
        expert's average rows if all ranks bring max_tokens, so that all ranks choose alike."""
        rows, w_out_LFH = comm.max_tokens * comm.top_k // self._count, weights.w_out
        _, ffn, hidden = w_out_LFH.shape
        columns_first = not self._experts.is_transposed
        sizes: dict[str, Any] = {"hidden": hidden, "ffn": ffn}
        sizes |= {"dtype": w_out_LFH.dtype, "device": w_out_LFH.device}
        key = (*sizes.values(), rows)
        if key not in self._products:
            if self._activation is not None and quack.missing_on(**sizes) is None:
                made: Products = quack.make_quack_products(
                    **sizes,
                    activation=self._activation,
                    bias=weights.b_in is not None,
                    rows=rows,
                    columns_first=columns_first,
                )
            else:
                made = Products(columns_first=columns_first)
            self._products[key] = made
        return self._products[key]

    def has_plain_weights(self) -> bool:
        """Returns whether the weights are plain tensors that products accept. Each forward asks, since
        quantizers may come later."""
        experts: Any = self._experts
        if not self._described or experts.config._experts_implementation not in _REPLACED:
            return False
        for name in (self._first, "down_proj"):
            weight = getattr(experts, name, None)
            if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.itemsize == 1:
                return False
            if weight.dim() != 3 or weight.shape[0] != self._count:
                return False
        return True

    def _run_forward(self, out: DispatchOutput) -> Tensor:
        """Runs the module's own forward: each row is a token of one expert, with weight 1."""
        rows, counts_L = out.tokens.shape[0], out.tokens_per_expert
        if rows == 0:
            # Some forwards need at least one row. A row of zeros gives all weights a gradient of zero.
            none = out.tokens.new_zeros(1, out.tokens.shape[1]) + out.tokens.sum()
            one = none.new_ones(1, 1)
            return self._forward(none, torch.zeros_like(one, dtype=torch.int64), one)[:0]
        experts_L = torch.arange(self._count, device=counts_L.device)
        ids_P = experts_L.repeat_interleave(counts_L, output_size=rows)
        return self._forward(out.tokens, ids_P.unsqueeze(1), out.tokens.new_ones(rows, 1))


def _is_described(experts: nn.Module) -> bool:
    """Returns whether `use_experts_implementation` has wrapped this class's forward, so that its attributes
    describe what it computes, and no norm follows."""
    code = getattr(type(experts).forward, "__code__", None)
    made = code is not None and code.co_filename == moe.__file__
    return made and not getattr(experts, "has_post_expert_norm", True)


def activation_of(experts: nn.Module) -> str | None:
    """Returns moecomm's name for the function between the products of `experts`; None if moecomm lacks it.
    Compares results, since modules may define their own functions; also for large values: some clamp."""
    module: Any = experts
    with torch.device("cpu"):  # whatever torch.set_default_device says
        order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
        small, large = torch.linspace(-9.0, 9.0, 48, dtype=torch.float64), torch.logspace(1, 5, 24)
    inner_PI = torch.cat([small, large, -large])[order].view(2, 48)
    try:
        found = module._apply_gate(inner_PI) if module.has_gate else module.act_fn(inner_PI)
    except Exception:  # a function for other inputs may raise any error; moecomm lacks it
        return None
    gate, up = inner_PI.chunk(2, dim=1)
    even, odd = inner_PI[:, ::2], inner_PI[:, 1::2]
    low, high = even.clamp(max=7.0), odd.clamp(-7.0, 7.0)
    known = {
        "swiglu": functional.silu(gate) * up,
        "swiglu_interleaved": functional.silu(even) * odd,
        "swiglu_clamped": low * torch.sigmoid(1.702 * low) * (high + 1),
        "gelu": functional.gelu(inner_PI),
    }
    for name, wanted in known.items():
        if found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6):
            return name
    return None
