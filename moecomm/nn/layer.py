"""The mixture-of-experts layer: route, dispatch, compute, combine."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from moecomm.arguments import require_module, require_number, require_tensor, require_values, waited
from moecomm.autograd.attached_loss import attach_loss
from moecomm.autograd.deferred import Pending, run_pending
from moecomm.backends.base import MOST_CALLERS, caller_of
from moecomm.backends.opened import call_or_tell
from moecomm.communicator import Communicator
from moecomm.compiled import break_graph
from moecomm.errors import InvalidArgument, known_to_all
from moecomm.kernels.outside_autocast import without_autocast
from moecomm.kernels.parameters import ExpertPart
from moecomm.kernels.routing import prepare_layer
from moecomm.nn.config import MoEConfig, OverlapConfig, require_config, values_that_agree
from moecomm.nn.expert_pass import PassContext, Plans, Weights, run_experts
from moecomm.nn.experts import GroupedExperts, SharedExperts, adopt_experts, combine_own_experts
from moecomm.nn.guards import check_settings, refuse_own_settings, watchers_of
from moecomm.nn.losses import balance_ranks
from moecomm.nn.router import Choices, Routing, TopKRouter, flat, received_rows_bound
from moecomm.overlap import Stages, Timeline
from moecomm.parallel import ParallelFolding, expert_ranks
from moecomm.parallel.records import keep_record
from moecomm.parallel.spread import built_layers
from moecomm.setup.memory_plan import NATIVE_DTYPES
from moecomm.types import AnyGroup, as_group


class MoELayer(nn.Module):
    """y = shared(x) + sum over the chosen experts of weight * expert(x), with the experts spread over ranks.

    All ranks of the communicator call forward together, each with its own tokens, possibly none. Rows travel
    and experts compute in config.dtype; the output has x's dtype. No choice is dropped unless
    config.capacity_factor is set. docs/layer.md says how a layer runs, docs/training.md how it is trained.

    Args:
        config: sizes, routing and balancing, the same on all ranks.
        comm: the communicator, which many layers may share; under a folding, one made by `make_communicator`.
            None: the layer builds one; all ranks raise if configs differ or one rank has a wrong argument.
        group: the ranks that share out the experts, a process group or a DeviceMesh of one dimension; None:
            all ranks.
        mesh, ep_dim: in place of `group`, a DeviceMesh and the name of its dimension.
        max_tokens: the most tokens of a rank in one call; required without `comm`.
        nodes: the number of nodes for config.limit_nodes, equally many ranks on each; None: comm.nodes.
            Give another number to route as a job on that many nodes does.
        overlap: what is computed during transfers, and kept for the backward; None: OverlapConfig().
        experts: a module in place of GroupedExperts; see below.
        folding: a ParallelFolding, instead of `group` (docs/folding.md). All ranks of the job then build
            their layers and communicators together, since that makes the folding's groups.
        loss_group: without a folding, the ranks whose choices aux_loss="global" counts; None: all ranks.

    The routing's losses get their gradients when the result's backward runs, as if loss_scale * (their sum)
    were part of the model's loss. If you multiply the model's loss by a factor, set loss_scale to this
    factor, or call `set_loss_scale`, before the backward.

    `experts` holds this rank's L experts; expert l has the global id comm.rank * L + l. A forward calls it
    once, with autocast off, as experts(rows_PH, offsets_L): rows (P, H) of config.dtype grouped by expert,
    and the cumulative ends of the groups, int32. It returns (P, H) of that dtype, rows in the same order; P
    may be 0 and groups may be empty. Any other result raises InvalidArgument on all ranks. With a
    capacity rows past offsets[-1] are zero, and their results are not used. The module's parameters are all
    marked as expert parameters, and no other part of the model may use them. Its state may have no buffers.
    `sharded_state` assumes that dimension 0 of its parameters counts experts; otherwise a checkpoint loads at
    the same number of ranks only. The state_dict's metadata record which experts it has, and load_state_dict
    raises InvalidArgument for a state of other experts. Autograd does the backward, so
    config.bias and main_grad, and all of OverlapConfig but `overlap`, must have their defaults. Only
    `fully_shard_experts` may shard the module.

    Attributes:
        config: the layer's MoEConfig, with its node limit turned into groups (`MoEConfig.for_nodes`).
        folding: the ParallelFolding, or None.
        router: the TopKRouter.
        experts: the GroupedExperts, or the module given.
        shared: the SharedExperts; None without any.
        capacity: rows that a dispatch returns for any routing; None: as many as arrive.
        last_losses: detached 0-d losses of the last forward, by name.
        last_tokens_per_expert: (E,) int64, this rank's choices before drops in the last forward.
    """

    def __init__(
        self,
        config: MoEConfig,
        comm: Communicator | None = None,
        *,
        group: AnyGroup | None = None,
        mesh: DeviceMesh | None = None,
        ep_dim: str | None = None,
        max_tokens: int | None = None,
        nodes: int | None = None,
        overlap: OverlapConfig | None = None,
        experts: nn.Module | None = None,
        folding: ParallelFolding | None = None,
        loss_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        group = expert_ranks.expert_group(group, mesh, ep_dim)
        together = comm is None  # with a comm one rank may build its layer alone, after a restart
        with expert_ranks.told(group, folding, comm):
            require_config(config)
            if comm is not None and not isinstance(comm, Communicator):
                raise InvalidArgument(f"comm is a {type(comm).__name__}, must be a Communicator")
            if loss_group is not None and (folding is not None or config.aux_loss != "global"):
                only = "None with a folding, and without aux_loss='global'"
                raise InvalidArgument(f"loss_group is {loss_group!r}, must be {only}")
            loss_group = as_group(loss_group, "loss_group")
            if folding is not None:
                expert_ranks.require_folding(config, folding, group, experts)
            self.overlap = OverlapConfig() if overlap is None else overlap
            if experts is not None:
                adopt_experts(experts, config)
                refuse_own_settings(self.overlap)
        if comm is None:
            same = values_that_agree(config) | {"nodes": repr(nodes)}
            comm = expert_ranks.build_communicator(config, group, folding, max_tokens=max_tokens, _alike=same)
        elif group is not None or max_tokens is not None:
            raise InvalidArgument(
                "group (or mesh) and max_tokens are given by comm, must be None when comm is passed"
            )
        try:
            expert_ranks.require_communicator(config, folding, comm)
            if config.limit_nodes is None and nodes is not None:
                raise InvalidArgument(f"nodes is {nodes}, must be None without limit_nodes in the config")
            self._part_ids = None if folding is None else expert_ranks.ids_of_parts(config, folding, comm)
            given, config = config, config.for_nodes(comm.nodes if nodes is None else nodes)
            if given.limit_nodes is not None and nodes is None:
                expert_ranks.require_parts_within_nodes(given, folding, comm)
        except InvalidArgument as error:
            if not together:
                raise
            comm.refuse(error)
        if folding is not None:
            expert_ranks.make_groups(folding)
        self.config, self._comm, self.folding = config, comm, folding
        self._number = comm._layers = comm._layers % MOST_CALLERS + 1
        # Each dispatch compares _caller between ranks: they must dispatch for the same layer.
        self._caller = caller_of(self._number, values_that_agree(config))
        self._balance = balance_ranks(config.aux_loss, folding, loss_group)
        meta = torch.get_default_device().type == "meta"
        weights_on = torch.device("meta") if meta else comm.device
        self.router = TopKRouter(config, device=weights_on, balance=self._balance)
        self._own_experts = experts is not None
        self.experts: Any = experts
        first_expert, part = comm.rank * comm.num_local_experts, ExpertPart()
        if folding is not None:
            first_expert, part = expert_ranks.held_by(config, folding)
        if experts is not None:
            keep_record(experts, (first_expert, comm.num_local_experts, config.num_experts))
        else:
            self.experts = GroupedExperts(
                config,
                num_local_experts=comm.num_local_experts,
                first_expert=first_expert,
                part=part,
                rows_per_expert=comm.size * comm.max_tokens * config.top_k // config.num_experts,
                device=weights_on,
                products_on=comm.device,
            )
        self.shared = SharedExperts(config, device=weights_on) if config.num_shared_experts else None
        self.capacity = received_rows_bound(config, comm) if config.pad_to_capacity else None
        prepare_layer(comm.device, config.dtype)
        self._waits_on_host = False
        self._deferred: list[Pending] = []
        self._recorded: dict[str, Stages] = {}
        self._unsynchronized = False
        """True from a backward until `sync_gradients` or `mark_synchronized` is called."""
        self._drift: Any = None  # the Drift of a layer under DistributedDataParallel
        self._dispatch_seen: Any = None  # of a GraphedStep: called with each DispatchOutput
        self._plans: Plans | None = None
        self._loss_scale = 1.0
        # Backwards read this tensor, so that a scale set after the forward is used, also in CUDA graphs. It
        # is not a buffer: .to(dtype) would round it, and DistributedDataParallel broadcast it.
        self._loss_scale_on_device = torch.ones((), dtype=torch.float64, device=comm.device)
        self.last_losses: dict[str, Tensor] = {}
        self.last_tokens_per_expert = torch.zeros(config.num_experts, dtype=torch.int64, device=comm.device)
        built_layers.add(self)

    @staticmethod
    def make_communicator(
        config: MoEConfig, folding: ParallelFolding, *, max_tokens: int, **options: Any
    ) -> Communicator:
        """Builds a communicator that layers under a folding may share: MoELayer(config, comm,
        folding=folding). All ranks of the job call this together. options: those of Communicator. Raises
        InvalidArgument for a config whose experts the folding cannot hold, and the errors of
        `ParallelFolding.group` and Communicator."""
        return expert_ranks.build_communicator(config, None, folding, max_tokens=max_tokens, **options)

    @property
    def comm(self) -> Communicator:
        """The communicator; with ETP > 1 in a folding its experts are parts of the layer's experts. A
        new one may be set on all ranks between forwards, e.g. after PeerTimeout. Raises InvalidArgument if
        its size, rank, nodes, device, num_experts, hidden, top_k, dtype or max_tokens differ."""
        return self._comm

    @comm.setter
    def comm(self, comm: Communicator) -> None:
        if not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm is a {type(comm).__name__}, must be a Communicator")
        sizes = ("num_experts", "hidden", "top_k", "dtype", "max_tokens")
        for name in ("size", "rank", "nodes", "device", *sizes):
            new, old = getattr(comm, name), getattr(self._comm, name)
            if new != old:
                raise InvalidArgument(
                    f"comm.{name} is {new!r}, must be {old!r} as of the communicator before: the layer's "
                    "experts and settings are made for it"
                )
        self._comm = comm
        comm._layers = max(comm._layers, self._number)

    @property
    def overlap(self) -> OverlapConfig:
        """What is computed during transfers, and kept for the backward. Another OverlapConfig may be set
        between forwards; anything else raises InvalidArgument."""
        return self._overlap

    @overlap.setter
    def overlap(self, overlap: OverlapConfig) -> None:
        if not isinstance(overlap, OverlapConfig):
            raise InvalidArgument(
                f"overlap is {overlap!r}, must be an OverlapConfig, such as OverlapConfig(overlap=False)"
            )
        self._overlap = overlap

    @property
    def loss_scale(self) -> float:
        """The factor of the routing's losses, 1.0 at first. It may be set at any time, without a wait for the
        device, and applies to later backwards. Raises InvalidArgument unless it is a finite number."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = require_number("loss_scale", scale, math.isfinite, "a finite number")
        # torch counts no change through .data. A counted change would break compiled backwards.
        self._loss_scale_on_device.data.fill_(self._loss_scale)

    def forward(
        self,
        x: Tensor,
        seq_len: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        topk_idx: Tensor | None = None,
    ) -> Tensor:
        """Routes tokens to the experts. Returns y: the weighted sums of their results, plus shared experts'.

        Args:
            x: (T, H), or (B, S, H) for B sequences of S tokens; any float dtype. y has x's shape and dtype.
            seq_len: length of the sequences in a (T, H) input, for aux_loss="sequence".
            cu_seqlens: in place of seq_len, (N + 1,) int32 or int64: the starts of N packed sequences, the
                first 0, and the end of the last; later tokens are of no sequence. If a loss uses it, bad
                values (descending, above T) raise on a CPU. On a GPU, for which the host does not wait, they
                make the loss and the router's gradients NaN.
            mask: (T,) or (B, S) bool, False for padding, which only shared experts see (docs/layer.md).
            topk_idx: (T, K) or (B, S, K) int32 or int64: the experts of the tokens, chosen in another forward
                (`Routing.chosen_TK`). A token whose ids are all -1 is routed by its scores.

        Raises InvalidArgument on all ranks for arguments of a wrong shape or dtype, a seq_len that does not
        divide T, weights of another dtype than the config's, and incompatible settings; InvalidRouting for
        invalid ids, or an id twice in a token. A graph of torch.compile ends before a layer.
        """
        every = {"cu_seqlens": cu_seqlens, "mask": mask, "topk_idx": topk_idx}
        given = {name: value for name, value in every.items() if value is not None}
        if torch.compiler.is_compiling():
            break_graph("a MoELayer runs outside of the graphs of torch.compile")
            return self._forward_outside_graph(x, seq_len, given)
        return self._forward(x, seq_len, given)

    def _forward(self, x: Tensor, seq_len: int | None, given: dict[str, Any]) -> Tensor:
        in_order = not self.overlap.overlap or self._own_experts
        x, watched = waited(x), None if in_order else watchers_of(self)
        in_order = in_order or watched is not None
        try:
            *tensors, unattached = self._route(x, seq_len, in_order, watched, given)
        except Exception as error:
            if known_to_all(error):
                raise
            self.comm.refuse(error)
        run = self._run_in_order if in_order else self._run
        apart_TH = None
        if self.shared is not None and self._shared_within is None:
            apart_TH = call_or_tell(self.comm, self.shared, x.flatten(0, -2).to(self.config.dtype))
        y_TH = run(*tensors)
        y_TH = y_TH if apart_TH is None else y_TH + apart_TH
        return self._finish(y_TH, x.shape, x.dtype, unattached)

    _forward_outside_graph = _disable_dynamo(_forward)

    @property
    def _shared_within(self) -> SharedExperts | None:
        """The shared experts, if they process the same rows as the other experts; else None."""
        return None if self.config.weights_on_input else self.shared

    def _route(
        self, x: Tensor, seq_len: int | None, in_order: bool, watched: str | None, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Routing | None]:
        """Returns the rows, ids and weights that are sent to the experts, and the routing whose losses are
        still to be attached to the layer's result (None: the weights have them). Sets last_losses and
        last_tokens_per_expert. Raises on this rank alone."""
        x_TH, balance = x, self._balance
        before = 0 if balance is None else balance.exchanges
        try:
            with without_autocast(self.comm.device.type):
                check_settings(self, in_order, watched)
            require_tensor("x", x, self.comm.device)
            require_values(router=self.router, experts=self.experts, shared=self.shared)
            if x.dtype not in NATIVE_DTYPES:
                raise InvalidArgument(f"x is {x.dtype}, expected one of {', '.join(map(str, NATIVE_DTYPES))}")
            hidden = self.config.hidden
            if x.dim() not in (2, 3) or x.shape[-1] != hidden:
                shapes = f"(tokens, hidden={hidden}) or (sequences, tokens, hidden={hidden})"
                raise InvalidArgument(f"x has shape {tuple(x.shape)}, must be {shapes}")
            if x.dim() == 3:
                if seq_len not in (None, x.shape[1]):
                    raise InvalidArgument(
                        f"seq_len is {seq_len}, must be None or {x.shape[1]} for x of shape {tuple(x.shape)}"
                    )
                x_TH, given = x.flatten(0, 1), flat(x, given)
                seq_len = seq_len if "cu_seqlens" in given else x.shape[1] or None
            if balance is not None:  # before the router's forward, in which ranks wait for each other
                self.router.check(x_TH, seq_len, **given)
            routing = self._choose_experts(x_TH, seq_len, given)
        except Exception as error:
            if balance is not None and balance.exchanges == before and not known_to_all(error):
                balance.bring_nothing(self.config.num_experts, self.comm.device)  # other ranks wait for this
            raise
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.last_losses = {name: loss.detach() for name, loss in routing.losses.items()}
        self.last_tokens_per_expert = routing.tokens_per_expert_E
        # The losses are attached to the weights, if these have gradients, so that the recomputation of
        # torch.utils.checkpoint can stop before the combine.
        weights_TK = self._attach(routing.topk_weights_TK, routing)
        unattached = None if weights_TK.requires_grad else routing
        topk_idx_TK = routing.topk_idx_TK
        if self.config.weights_on_input:
            x_TH, weights_TK = x_TH * weights_TK, torch.ones_like(weights_TK)
        if self._part_ids is not None:
            # A choice becomes one choice for each part of its expert, with the same weight.
            experts = self.config.num_experts
            parts_TKP = self._part_ids[topk_idx_TK.long().clamp(-1, experts)]
            if "topk_idx" in given:  # id -1 selects the last row; an invalid id stays invalid
                unknown_TK1 = ((topk_idx_TK < -1) | (topk_idx_TK >= experts)).unsqueeze(-1)
                parts_TKP = parts_TKP.masked_fill(unknown_TK1, self.comm.num_experts)
            topk_idx_TK = parts_TKP.flatten(1)
            weights_TK = weights_TK.repeat_interleave(self._part_ids.shape[1], dim=1)
        return x_TH.to(self.config.dtype), topk_idx_TK, weights_TK, unattached

    def _choose_experts(self, x_TH: Tensor, seq_len: int | None, given: dict[str, Any]) -> Routing:
        """Returns the Routing; a recomputation with `keep_plans` has the choices of the first forward."""
        router, plans = self.router, self._plans
        if plans is None:
            return router(x_TH, seq_len, **given)
        if not plans.again or not plans.choices:
            routing = router(x_TH, seq_len, **given)
            chosen_TK = routing.topk_idx_TK if routing.chosen_TK is None else routing.chosen_TK
            plans.choices.append(Choices(chosen_TK, routing.topk_idx_TK))
            return routing
        again = plans.choices.pop(0)
        if getattr(router.forward, "__func__", None) is TopKRouter.forward:
            given = {**given, "again": again}
        routing = router(x_TH, seq_len, **given)
        capturing = x_TH.is_cuda and torch.cuda.is_current_stream_capturing()
        same = capturing or routing.topk_idx_TK is again.kept_TK
        if not same and not torch.equal(routing.topk_idx_TK, again.kept_TK):
            raise InvalidArgument(
                "layer.router, a router of one's own or with a hook that chooses, chose other experts when a "
                "checkpoint with keep_plans was computed again: it must choose the same both times"
            )
        return routing

    def _finish(
        self, y_TH: Tensor, shape: torch.Size, dtype: torch.dtype, unattached: Routing | None
    ) -> Tensor:
        """Returns y in the shape and dtype of the layer's input, with the losses of `unattached`."""
        y_TH = y_TH.to(dtype) if unattached is None else self._attach(y_TH.to(dtype), unattached)
        # Not a view: if changed in place, a view loses FSDP2's backward hook; and torch refuses in-place
        # changes of a view of a Python function's result (`attach_loss`).
        is_result = y_TH.shape == shape and unattached is None
        return y_TH if is_result else torch.ops.aten._unsafe_view(y_TH, shape)

    def backward_weights(self, *, drop: bool = False) -> None:
        """Computes the gradients of the experts' weights that backwards have put off
        (`OverlapConfig.defer_weights`), and adds them to the parameters' `grad` (docs/layer.md). Raises
        InvalidArgument for parameters that are sharded or have hooks, which would not run. `drop` discards
        the gradients instead, for a step that is skipped."""
        if self._own_experts:
            return
        if drop:
            self._deferred.clear()
        run_pending(self._deferred, self.experts.w_in, self.experts.w_out)

    @property
    def has_pending_weights(self) -> bool:
        """True while `backward_weights` has gradients to compute."""
        return bool(self._deferred)

    def timelines(self) -> dict[str, Timeline]:
        """Returns when the stages of the last recorded "forward" and "backward" ran (`OverlapConfig.record`).
        Waits for the stages to end."""
        return {name: stages.timeline() for name, stages in self._recorded.items()}

    def _weights(self) -> Weights:
        """Returns the current weights of the experts and the shared experts."""
        experts, shared = self.experts, self._shared_within
        with without_autocast(self.comm.device.type):  # a parametrization would compute in autocast's dtype
            s_in, s_out, s_gate = (shared.w_in, shared.w_out, shared.w_gate) if shared else (None,) * 3
            return Weights(experts.w_in, experts.w_out, s_in, s_out, s_gate, experts.b_in, experts.b_out)

    def _run(self, rows_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        experts, shared, overlap = self.experts, self._shared_within, self.overlap
        context = PassContext(
            layer=self,
            comm=self.comm,
            topk_idx_TK=topk_idx_TK,
            capacity=self.capacity,
            activation=self.config.activation,
            products=experts.products,
            keep=overlap.keep,
            keep_shared=overlap.keep_shared,
            waits_on_host=self._waits_on_host,
            deferred=self._deferred if overlap.defer_weights else None,
            recorded=self._recorded if overlap.record else None,
            seen=self._dispatch_seen,
        )

        def run(x_TH: Tensor) -> Tensor:
            return run_experts(context, x_TH, topk_weights_TK, self._weights(), self._plans)

        # Calls shared and experts as modules, so that hooks that prepare weights run.
        if shared is None:
            return experts(rows_TH, run=run)
        return shared(rows_TH, run=lambda x_TH: experts(x_TH, run=run))

    def _run_in_order(self, rows_TH: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Runs shared experts, dispatch, experts and combine one after another, differentiated by autograd.
        With custom experts, `overlap` lets shared experts overlap the dispatch. Shared experts run before the
        combine, in which other ranks can still learn of their errors."""
        comm, capacity, shared_TH = self.comm, self.capacity, None
        shared = self._shared_within
        if self._own_experts and self.overlap.overlap and shared:
            work = comm.dispatch(
                rows_TH, topk_idx_TK, topk_weights_TK, capacity=capacity, async_op=True, _layer=self
            )
            shared_TH = call_or_tell(comm, shared, rows_TH)
            out = work.wait()
        else:
            if shared is not None:
                shared_TH = call_or_tell(comm, shared, rows_TH)
            out = comm.dispatch(rows_TH, topk_idx_TK, topk_weights_TK, capacity=capacity, _layer=self)
        has_tail = capacity is not None
        if self._dispatch_seen is not None:
            self._dispatch_seen(out)
        if self._own_experts:
            y_TH = combine_own_experts(comm, self.experts, out, has_tail)
        else:
            expert_rows_PH = call_or_tell(
                comm, self.experts, out.tokens, out.offsets, out.weights, has_tail=has_tail
            )
            y_TH = comm.combine(expert_rows_PH, out.handle)
        if y_TH.requires_grad:
            y_TH.register_hook(self._note_backward)
        return y_TH if shared_TH is None else y_TH + shared_TH

    def _note_backward(self, grad_TH: Tensor) -> None:
        self._unsynchronized = True

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """Copies the layer (for example for an average of weights); the copy has its own parameters and
        shares the communicator."""
        for shared in (self.comm, self._dispatch_seen):
            memo[id(shared)] = shared
        memo[id(self._deferred)], memo[id(self._recorded)] = [], {}
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if twin._own_experts:
            adopt_experts(twin.experts, twin.config)  # copies of parameters have lost their marks
        built_layers.add(twin)
        return twin

    def _attach(self, to: Tensor, routing: Routing) -> Tensor:
        if not (torch.is_grad_enabled() and to.requires_grad):
            return to
        losses, router, load_E = list(routing.losses.values()), self.router, routing.tokens_per_expert_E
        records = self.training and getattr(router, "load_E", None) is not None  # else a custom router
        if not (losses or records):
            return to
        total = sum(losses[1:], start=losses[0]) if losses else to.new_zeros((), dtype=torch.float32)
        return attach_loss(
            to, total, self._loss_scale_on_device, (lambda: router.record_load(load_E)) if records else None
        )


def layers_of(model: nn.Module) -> list[MoELayer]:
    """Returns the MoELayers of `model`, each once, in order. Raises InvalidArgument if it is no nn.Module."""
    require_module(model)
    return [module for module in model.modules() if isinstance(module, MoELayer)]
