"""DeepEP's `Buffer`: its calls of normal mode, on moecomm's rows by rank. low_latency.py has its other calls.

Names, order and defaults of arguments are those of DeepEP's deep_ep/buffers/legacy.py (version 1 of its API).
Shape letters: T tokens, K top-k, H hidden, E experts, R ranks, L local experts, P received rows.
Weights are float32, with float64 rows float64.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.checks import INTEGERS, checked, require_shape, top_k_of
from deep_ep.config import Config
from deep_ep.handle import DispatchHandle
from deep_ep.low_latency import LowLatency
from deep_ep.operations import all_rounded_up, events_of, parts_of
from deep_ep.utils import EventHandle, EventOverlap
from moecomm.arguments import require_integer
from moecomm.errors import InvalidArgument


class Buffer(LowLatency):
    """Dispatch and combine between the ranks of `group`, with DeepEP's calls.

    All ranks call the operations together. The first dispatch of each shape (experts, hidden, top-k, dtype)
    builds a communicator of moecomm, which is made larger when a batch brings more tokens. Any number of
    ranks, any top-k and rows of any multiple of 16 bytes are served, on GPUs and on CPUs.

    Args:
        group: the ranks.
        num_nvl_bytes, num_rdma_bytes: kept as attributes; moecomm makes memory by the largest batch.
        explicitly_destroy: `destroy()` may be called.
        enable_shrink: ignored with a warning: no rank is masked.
        comm: a communicator of MPI, which raises NotImplementedError.
        The others are ignored.
    """

    num_sms: int = 20
    """The number that DeepEP's configs have; moecomm uses it only after a call of `set_num_sms`."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
    ) -> None:
        if comm is not None:
            raise NotImplementedError("comm=: moecomm's ranks meet by torch.distributed alone; pass group=")
        super().__init__(group, explicitly_destroy)
        if enable_shrink:
            warnings.warn("enable_shrink is ignored: a lost rank raises PeerLost on all others", stacklevel=2)
        self.rank, self.group_size = self.group.rank(), self.group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: nothing that is here depends on it."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the SMs of an operation, for communicators that are built later, in place of three quarters
        of a GPU. Raises InvalidArgument for an odd number."""
        if new_num_sms % 2 or new_num_sms < 2:
            raise InvalidArgument(f"new_num_sms is {new_num_sms}, expected an even number of at least 2")
        Buffer.num_sms = Buffer._chosen_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Returns a config, for any number of ranks."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @checked
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Counts where tokens go.

        topk_idx: (T, K) int32 or int64 expert ids, -1 for none; ids of no expert, which a dispatch refuses,
        count for none. num_experts: E. Raises InvalidArgument for another shape or dtype, or if num_experts
        is no multiple of the ranks.

        Returns:
            (R,) int32 tokens for each rank; None (DeepEP: tokens for each node); (E,) int32 tokens for each
            expert; (T, R) bool, whether a token goes to a rank; an event.
        """
        require_shape("topk_idx", topk_idx, "(T, K)", None, None, dtypes=INTEGERS)
        require_integer("num_experts", num_experts, 1)
        if num_experts % self.group_size:
            raise InvalidArgument(
                f"num_experts is {num_experts}, expected a multiple of {self.group_size} ranks"
            )

        def count() -> tuple[Tensor, Tensor, Tensor]:
            # The first column is for "none", the last for ids that are too large.
            columns_TK = (topk_idx + 1).clamp_(0, num_experts + 1).long()
            chosen_TX = topk_idx.new_zeros((len(topk_idx), num_experts + 2), dtype=torch.bool)
            chosen_TE = chosen_TX.scatter_(1, columns_TK, True)[:, 1:-1]
            in_rank_TR = chosen_TE.unflatten(1, (self.group_size, -1)).any(2)
            return in_rank_TR.sum(0, dtype=torch.int32), chosen_TE.sum(0, dtype=torch.int32), in_rank_TR

        counts, event = self.run(count, (topk_idx,), events_of(previous_event), async_finish)
        per_rank_R, per_expert_E, in_rank_TR = counts
        return per_rank_R, None, per_expert_E, in_rank_TR, event

    @checked
    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Brings each token to the ranks of its experts, once to each rank.

        Args:
            x: (T, H) rows; or, on GPUs, a pair of float8_e4m3fn rows and (T, H / 128) float32 scales.
            handle: of an earlier dispatch, along whose plan the rows go; topk_idx and topk_weights are None
                then. For fp8 rows the plan is made again, so that the host waits as in that dispatch.
            num_tokens_per_expert: (E,) of `get_dispatch_layout`; its length is the number of experts.
            topk_idx, topk_weights: (T, K) expert ids, -1 for none, and weights, which travel along.
            is_token_in_rank: (T, R) bool, used where topk_idx is None.
            expert_alignment: the counts are rounded up to a multiple of it.
            num_worst_tokens: if above 0, the number of rows of the result, the same on all ranks; the host
                waits for nothing. On GPUs a rank may then bring num_worst_tokens / R tokens, or as many as
                any rank brought before; more raise InvalidArgument on that rank.
            previous_event: with async_finish the operation begins after it, else after the current stream.
            async_finish: the current stream does not wait for the operation; the returned event is for it.
            The others are ignored.

        Returns:
            The rows, (P, H) by source rank, then token, or a pair as given; (P, K) local expert ids in the
            dtype of topk_idx, -1 where an expert is elsewhere; (P, K) weights, 0 there; a list of the rows
            for each local expert, empty with num_worst_tokens; the handle; an event. With a handle the rows
            and the event alone, the rest is None.

        Raises:
            InvalidArgument: arguments that do not go together.
            CommunicatorClosed: after `destroy()`.
            What `moecomm.Communicator.dispatch` raises, on all ranks.
        """
        before = events_of(previous_event)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument("handle and topk_idx or topk_weights are given, expected one kind")
            rows, event = self.send_along(handle, x, before, async_finish, Buffer._chosen_sms)
            return rows, None, None, None, None, event
        require_integer("expert_alignment", expert_alignment, 1)
        require_integer("num_worst_tokens", num_worst_tokens, 0)
        experts = self._experts_of(num_tokens_per_expert, is_token_in_rank, topk_idx, topk_weights)
        top_k = self.group_size if topk_idx is None else top_k_of(topk_idx)
        # Room for the largest batch: if the host does not wait, ranks cannot agree on a larger one later.
        every = -(-num_worst_tokens // self.group_size)
        shared = self.communicator(x, experts, top_k, Buffer._chosen_sms, every=every)
        capacity, rows, ids_TK = num_worst_tokens or None, parts_of(x), topk_idx
        if ids_TK is None:
            try:
                ids_TK = self._ids_by_rank(is_token_in_rank, experts, len(rows[0]))
            except InvalidArgument as error:
                shared.refuse(error, rows[0], capacity)

        def bring() -> tuple[Any, ...]:
            comm, out = shared.dispatch(
                x,
                ids_TK,
                topk_weights,
                layout="rank",
                capacity=capacity,
                dequantize=rows[0] is x,
                host_counts=capacity is None,
            )
            counts = out.host_counts or []
            if counts and topk_idx is None:  # rows by rank name no experts where no ids were given
                counts = self._total(num_tokens_per_expert).tolist()
            counts = all_rounded_up(counts, expert_alignment)
            handle = DispatchHandle(comm, out, ids_TK, is_token_in_rank, capacity)
            idx_PK = None if topk_idx is None else out.topk_idx
            return out.tokens, out.scales, idx_PK, out.weights, counts, handle

        inputs = (*rows, topk_idx, topk_weights, is_token_in_rank)
        (tokens, scales, idx_PK, *others), event = self.run(bring, inputs, before, async_finish)
        return tokens if scales is None else (tokens, scales), idx_PK, *others, event

    @checked
    def combine(
        self,
        x: Tensor,
        handle: DispatchHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns rows to the ranks of their tokens, and sums them there, without weights.

        Args:
            x: (P, H) rows in the order of the dispatch.
            handle: of that dispatch.
            topk_weights: (P, K), which travel along; for each expert of a token, the weight of the
                rank that has the expert is returned.
            bias: one or two tensors (T, H) that are added to the sums.
            The others are as in `dispatch`.

        Returns:
            (T, H) sums by ascending rank in float32, rounded once (with a bias once more); (T, K) weights, 0
            where a token names no expert, or None; an event.

        Raises:
            What `moecomm.Communicator.combine` raises, on all ranks.
        """
        return self.bring_back(handle, x, topk_weights, bias, events_of(previous_event), async_finish)

    def get_local_buffer_tensor(self, *args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError("get_local_buffer_tensor: moecomm's windows are not handed out")

    # ---------------------------------------------------------------------------------------------------

    def _experts_of(
        self,
        num_tokens_per_expert: Tensor | None,
        is_token_in_rank: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> int:
        if num_tokens_per_expert is None:
            raise InvalidArgument(
                "num_tokens_per_expert is None, expected (E,) of get_dispatch_layout, or a handle"
            )
        if topk_idx is None and (topk_weights is not None or is_token_in_rank is None):
            raise InvalidArgument(
                "topk_idx is None, expected (T, K); or is_token_in_rank, and no topk_weights"
            )
        if num_tokens_per_expert.dim() != 1 or topk_idx is None:  # its values are used without topk_idx
            require_shape("num_tokens_per_expert", num_tokens_per_expert, "(E,)", None, dtypes=INTEGERS)
        return num_tokens_per_expert.shape[0]

    def _ids_by_rank(self, is_token_in_rank: Any, experts: int, tokens: int) -> Tensor:
        """Returns (T, R) ids that send tokens to the ranks: the first expert of each, or -1."""
        shape, ranks = f"({tokens}, R)", self.group_size
        require_shape("is_token_in_rank", is_token_in_rank, shape, tokens, ranks, dtypes=(torch.bool,))
        first_R = torch.arange(0, experts, experts // self.group_size, device=is_token_in_rank.device)
        return torch.where(is_token_in_rank, first_R, -1)

    def _total(self, num_tokens_per_expert: Any) -> Tensor:
        """Returns (L,): the tokens of all ranks for each expert of this rank."""
        total_E = num_tokens_per_expert.clone()
        dist.all_reduce(total_E, group=self.group)
        return total_E.view(self.group_size, -1)[self.rank]
