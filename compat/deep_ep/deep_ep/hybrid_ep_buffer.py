"""DeepEP's `HybridEPBuffer` (its branch hybrid-ep), on moecomm.

Names, order and defaults of arguments are those of deep_ep/hybrid_ep_buffer.py there. Shape letters and
dtypes, also of probs, are as in buffer.py.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.checks import checked, require_shape, top_k_of
from deep_ep.handle import HybridHandle
from deep_ep.maps import ids_of, indices_to_map, most_experts, picked, spread
from deep_ep.operations import Operations, rounded_up
from moecomm import Communicator, DispatchOutput
from moecomm.arguments import check_weights, require_integer
from moecomm.backends.opened import call_or_tell
from moecomm.errors import CapacityExceeded, InvalidArgument
from moecomm.shared import largest, may_be_too_large

__all__ = ["BufferConfig", "HybridEPBuffer", "indices_to_map"]


@dataclass
class BufferConfig:
    """Sizes of a buffer, in `configurer.buffer_config`. A handle has a copy with the sizes of its dispatch.

    Attributes:
        num_of_experts_per_token: the most experts of a token in a routing map, the same on all ranks; 0: all
            ranks agree on it. DeepEP does not have it.
    """

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    token_data_type: str
    num_of_nodes: int = 1
    pad_multiple: int = 0
    num_of_experts_per_token: int = 0


class HybridEPBuffer(Operations):
    """Dispatch and combine between the ranks of `group`, with the calls of DeepEP's branch hybrid-ep.

    All ranks call the operations together. Communicators are built as by `Buffer`, the first for
    `max_num_of_tokens_per_rank`. Ranks may have different numbers of tokens, also none.

    A communicator has a fixed top-k. For ids it is their K. A routing map has no K: all ranks agree on the
    most experts of a token, once, and again when a token of any rank has more.

    Args:
        group: the ranks.
        hidden_dim, num_local_experts, use_fp8: kept in `configurer.buffer_config`; the batches decide.
        max_num_of_tokens_per_rank: tokens for which communicators are built.
        num_sms_dispatch_api: SMs of an operation, also of a combine; None: moecomm's own number.
        The others are ignored.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        super().__init__(group, explicitly_destroy=False)
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size
        self.local_rank, self.node_rank, self.num_of_nodes = self.rank, 0, 1
        sizes = (hidden_dim, max_num_of_tokens_per_rank, num_local_experts, self.group_size)
        self.configurer = SimpleNamespace(buffer_config=BufferConfig(*sizes, _data_type(use_fp8)))
        self._num_sms = num_sms_dispatch_api
        self._top_k: dict[int, int] = {}  # by number of experts: the top-k that ranks have agreed on for maps
        self._bounded: weakref.WeakSet[Communicator] = weakref.WeakSet()

    def empty_jit_cache(self) -> None:
        """Does nothing: no kernel is compiled at run time."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> BufferConfig:
        """Returns a copy of the buffer's config with the given values. More tokens than before, rounded up to
        a multiple of 16, become the buffer's own `max_num_of_tokens_per_rank` too."""
        own: BufferConfig = self.configurer.buffer_config
        most = rounded_up(num_of_tokens_per_rank or 0, 16)
        own.max_num_of_tokens_per_rank = max(own.max_num_of_tokens_per_rank, most)
        config = copy.copy(own)
        given = {
            "hidden_dim": hidden_dim,
            "num_of_experts_per_rank": num_local_experts,
            "pad_multiple": pad_multiple,
            "token_data_type": None if use_fp8 is None else _data_type(use_fp8),
        }
        for name, value in {**given, **kwargs}.items():
            if value is not None:
                setattr(config, name, value)
        return config

    @checked
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HybridHandle | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Brings each token to the ranks of its experts, once to each rank. The host waits for the row count.

        Args:
            hidden: (T, H) rows; or, on GPUs, fp8 rows as float8_e4m3fn or uint8.
            scaling_factor: (T, H / 128) float32 scales of fp8 rows.
            topk_idx, topk_weights, num_of_experts: (T, K) expert ids, -1 for none; weights or None; E.
            routing_map, probs: in their place, (T, E) bool, and (T, E) or None.
            handle: of an earlier dispatch, along whose plan the rows go, with probs or weights if given.
            The others are ignored.

        Returns:
            The rows, (P, H), by source rank, then token; (P, E) probs, 0 but for the experts of this rank, or
            None; (P, H / 128) scales or None; the handle.

        Raises:
            InvalidArgument: arguments that do not go together.
            Unsupported: fp8 rows on CPUs.
            What `moecomm.Communicator.dispatch` raises, on all ranks.
        """
        routing = (topk_idx, topk_weights, num_of_experts, routing_map, probs)
        require_shape("hidden", hidden, "(T, H)", None, None)
        config = self.update_template_config(hidden.shape[-1], len(hidden))
        options = {"layout": "rank", "capacity": None}
        rows, weights, scales, handle = self._bring(hidden, scaling_factor, routing, handle, options, config)
        if weights is not None:
            weights = spread(weights, handle.received_ids(), handle.comm.num_experts)
        return rows, weights, scales, handle

    @checked
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: HybridHandle | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns rows to the ranks of their tokens, and sums them there, without weights.

        hidden: (P, H) rows in the order of the dispatch; probs: (P, E), of which those of the rank's experts
        travel along; handle: of that dispatch. Returns (T, H) sums by ascending rank in float32, rounded
        once, and (T, E) probs, each from the rank that has its expert, 0 where the token does not go, or
        None. Raises what `moecomm.Communicator.combine` raises, on all ranks.
        """
        kept = _expect(handle, "rank")
        if probs is not None:
            shape = kept.handle.num_rows, kept.comm.num_experts
            call_or_tell(kept.comm, require_shape, "probs", probs, str(shape), *shape)
            probs = picked(probs, kept.received_ids())
        return self._sums(hidden, probs, kept)

    @checked
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        handle: HybridHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, HybridHandle]:
        """Brings each token to its experts: one row for each (token, local expert).

        Args:
            num_permuted_tokens: rows of the result, the same on all ranks: if more arrive, they are left out,
                and the handle's overflow flag is 1. None: all that arrive. With a handle: its number.
            pad_multiple: each expert's rows are a multiple of it, with rows of zeros; None or 0: 1. A given
                handle replaces it by its own.
            non_blocking: the host waits for nothing; needs num_permuted_tokens, a multiple of pad_multiple.
            use_host_meta: the opposite of non_blocking, deprecated.
            num_of_experts_per_rank, use_fp8: kept in the handle's config.
            fuse_permute_dispatch: ignored. The others are as in `dispatch`.

        Returns:
            The rows, (P, H), by expert, then source rank, then token; (P,) probs or None; (P, H / 128) scales
            or None; (L,) int64 rows of each expert, with padding and as far as they fit, on the host unless
            non_blocking; the handle.

        Raises:
            As `dispatch`.
        """
        if use_host_meta is not None:
            warnings.warn("use_host_meta is deprecated: pass non_blocking", stacklevel=2)
            non_blocking = not use_host_meta
        require_shape("hidden", hidden, "(T, H)", None, None)
        alignment = require_integer("pad_multiple", pad_multiple or 1, 1)
        if handle is None and num_permuted_tokens is not None:
            require_integer("num_permuted_tokens", num_permuted_tokens, 0)
        fits = isinstance(num_permuted_tokens, int) and num_permuted_tokens % alignment == 0
        if non_blocking and not fits:
            raise InvalidArgument(
                f"num_permuted_tokens is {num_permuted_tokens}, expected a multiple of pad_multiple = "
                f"{alignment} with non_blocking=True"
            )
        if handle is not None and isinstance(num_permuted_tokens, int):
            rows = _expect(handle, "expert").handle.num_rows
            if num_permuted_tokens != rows:
                raise InvalidArgument(f"num_permuted_tokens is {num_permuted_tokens}, expected {rows}")
        routing = (topk_idx, topk_weights, num_of_experts, routing_map, probs)
        sizes = (hidden.shape[-1], len(hidden), num_of_experts_per_rank, pad_multiple, use_fp8)
        config = self.update_template_config(*sizes)
        options = {"layout": "expert", "alignment": alignment, "capacity": num_permuted_tokens}
        tokens, weights, scales, handle = self._bring(
            hidden, scaling_factor, routing, handle, options, config
        )
        counts_L = handle.padded_counts().long() if non_blocking else handle.padded_counts_on_host()
        return tokens, weights, scales, counts_L, handle

    @checked
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: HybridHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Like `combine`, for rows and (P,) probs in the order of `dispatch_with_permute`. A rank first sums
        its rows of a token, in the order of k or of the map, in float32, rounded once; then the sum travels.
        Nothing depends on the last three arguments."""
        return self._sums(hidden, probs, _expect(handle, "expert"))

    # ---------------------------------------------------------------------------------------------------

    def _sums(self, hidden: Tensor, weights: Tensor | None, handle: HybridHandle) -> tuple[Tensor, Any]:
        names = ("hidden", "probs")
        sums_TH, weights_TK, _ = self.bring_back(handle, hidden, weights, None, (), False, names)
        if weights_TK is not None:
            weights_TK = spread(weights_TK, handle.ids_TK, handle.comm.num_experts)
        return sums_TH, weights_TK

    def _bring(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None,
        routing: tuple[Any, ...],
        handle: HybridHandle | None,
        options: dict[str, Any],
        config: BufferConfig,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Dispatches, and returns rows, weights in moecomm's form, scales and the handle."""
        topk_idx, topk_weights, experts, map_TE, probs = routing
        tokens = len(hidden)
        error = None  # is told to all ranks, as this one alone may have found it
        x: Any = hidden
        if hidden.dtype in (torch.uint8, torch.float8_e4m3fn):
            if scaling_factor is None:
                raise InvalidArgument("scaling_factor is None, expected (T, H / 128) scales of fp8 rows")
            x = hidden.view(torch.float8_e4m3fn), scaling_factor
        if handle is not None:
            kept, experts = _expect(handle, options["layout"]), handle.comm.num_experts
            if map_TE is None and topk_idx is not None:  # ids may be in another order than those of the plan
                _, probs = indices_to_map(topk_idx, topk_weights, tokens, experts)
            if probs is None and x is hidden:
                rows, _ = self.send_along(kept, x, (), apart=False)
                return rows, None, None, kept
        elif map_TE is not None:
            require_shape("routing_map", map_TE, f"({tokens}, E)", None, None, dtypes=(torch.bool,))
            experts = map_TE.shape[1]
            if len(map_TE) != tokens:
                wanted = f"({tokens}, {experts})"
                error = InvalidArgument(f"routing_map has shape {tuple(map_TE.shape)}, expected {wanted}")
                map_TE = map_TE.new_zeros(tokens, experts)
        elif topk_idx is None or experts is None:
            raise InvalidArgument(
                "expected topk_idx and num_of_experts, or routing_map, or handle; none is given"
            )
        if experts < 1 or experts % self.group_size:
            raise InvalidArgument(f"{experts} experts, expected a multiple of {self.group_size} ranks")
        by_probs = handle is not None or map_TE is not None
        if by_probs and probs is not None:
            name = "probs" if topk_idx is None or map_TE is not None else "topk_weights"
            try:
                check_weights(name, probs, (tokens, experts), "(T, E)", hidden.dtype, hidden.device)
            except InvalidArgument as found:
                error, probs = error or found, None
        if options["capacity"] is None:
            self._forgive()
        options = {**options, "dequantize": x is hidden, "host_counts": options["capacity"] is None}

        def bring() -> tuple[Any, ...]:
            if handle is not None:
                weights = None if probs is None else picked(probs, handle.ids_TK)
                comm, out = self.send_again(handle, x, weights, self._num_sms, error)
                made = handle
            else:
                if map_TE is not None:
                    comm, out, ids_TK = self._dispatch_map(x, map_TE, probs, error, options)
                else:
                    shared, ids_TK = self._shared(x, experts, top_k_of(topk_idx)), topk_idx
                    comm, out = shared.dispatch(x, ids_TK, topk_weights, **options)
                made = HybridHandle(comm, out, ids_TK, options, config)
            if made.options["capacity"] is not None:
                self._bounded.add(comm)
                if not hidden.is_cuda:
                    self._forgive()
            given = probs if by_probs else topk_weights
            return out.tokens.view(hidden.dtype), None if given is None else out.weights, out.scales, made

        inputs = (hidden, scaling_factor, probs, topk_weights)
        (rows, weights, scales, made), _ = self.run(bring, inputs, (), apart=False)
        return rows, weights, scales, made

    def _shared(self, x: Any, experts: int, top_k: int) -> Any:
        most = self.configurer.buffer_config.max_num_of_tokens_per_rank
        return self.communicator(x, experts, top_k, self._num_sms, most)

    def _dispatch_map(
        self,
        x: Any,
        map_TE: Tensor,
        probs: Tensor | None,
        error: InvalidArgument | None,
        options: dict[str, Any],
    ) -> tuple[Communicator, DispatchOutput, Tensor]:
        """Dispatches by a map, with a top-k that suffices for the tokens of all ranks; or all raise `error`.

        If the top-k is too small on a rank, that rank gives ids with more columns. The dispatch then fails on
        all ranks, and they agree on a larger top-k. On GPUs, with a fixed number of rows, the host does not
        read the map once there is a top-k: the device refuses a token with more experts (`ids_of`).
        """
        experts, config = map_TE.shape[1], self.configurer.buffer_config
        reads = options["capacity"] is None or not map_TE.is_cuda
        held = config.num_of_experts_per_token or self._top_k.get(experts)
        if held is None:
            (needed,) = largest(self.group, most_experts(map_TE))
            held = self._top_k[experts] = max(1, needed)
        most = most_experts(map_TE) if reads else held
        while True:
            ids_TK = ids_of(map_TE, max(held, most))
            weights = None if probs is None else picked(probs, ids_TK.clamp(max=experts - 1))
            shared = self._shared(x, experts, held)
            try:
                if error is not None:
                    shared.refuse(error, ids_TK, options["capacity"])
                return *shared.dispatch(x, ids_TK, weights, **options), ids_TK
            except InvalidArgument as raised:
                if not reads or not may_be_too_large(raised):
                    raise
                (needed,) = largest(self.group, most)
                if needed <= held:  # the error is another one, on all ranks
                    raise
            # More than needed, so that batches with ever more do not each build a communicator.
            held = self._top_k[experts] = min(experts, needed + needed // 4)
            config.num_of_experts_per_token = 0
            assert self._by_experts is not None
            del self._by_experts[experts]  # handles keep the smaller one while they need it

    def _forgive(self) -> None:
        """Clears errors about rows that were left out, which a later dispatch would raise: the flags of
        handles report them. On GPUs the host waits, so that all ranks clear them before the same dispatch."""
        for comm in list(self._bounded):
            if comm.device.type == "cuda":
                torch.cuda.synchronize(comm.device)
            with contextlib.suppress(CapacityExceeded):
                comm.check()


def _data_type(fp8: bool) -> str:
    return "UINT8" if fp8 else "UINT16"


def _expect(handle: Any, layout: str) -> HybridHandle:
    """Returns a handle of this layout."""
    if not isinstance(handle, HybridHandle) or handle.options["layout"] != layout:
        call = "dispatch" if layout == "rank" else "dispatch_with_permute"
        raise InvalidArgument(f"handle is {type(handle).__name__}, expected that of a call of {call}")
    return handle
