"""The results that every rank of a case must get, made and checked by torch operations on its device. Shares
nothing with the product.

Every rank makes the inputs of all ranks from seeds, so it knows by itself what it must get; nothing is
gathered. The loops of tests/reference.py say what is right; tests/unit/test_oracle.py holds this file to
them.

N counts the tokens of all ranks in a row: token t of rank s is n = starts[s] + t.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from moecomm.env import read_env
from tests import cases, ranks
from tests.cases import Case, Inputs
from tests.multirank.catching import catch

CHUNK = 8192  # tokens or rows that are checked at a time
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that rows on GPUs can have."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that one rank must get: for each row of its output its token and place, -1 for none."""

    token_P: torch.Tensor
    place_P: torch.Tensor
    """Expert layout: k. Rank layout: 0."""
    expert_P: torch.Tensor
    """Expert layout: the local expert. Rank layout: 0."""
    tokens_per_expert: torch.Tensor
    ends: torch.Tensor
    needed: int


def rows(job: Case, rank: int, ids_NK: torch.Tensor) -> Rows:
    """Returns the rows that `rank` must get if there is no capacity."""
    local = job.num_experts // job.size
    mine_NK = (ids_NK >= rank * local) & (ids_NK < (rank + 1) * local)
    n_A, k_A = mine_NK.nonzero(as_tuple=True)
    expert_A = ids_NK[n_A, k_A] - rank * local
    counts_L = torch.bincount(expert_A, minlength=local)
    if job.layout == "rank":
        token_P = mine_NK.any(1).nonzero().view(-1)
        limits = torch.tensor(job.tokens, device=ids_NK.device).cumsum(0)
        ends = torch.searchsorted(token_P, limits)
        nothing = torch.zeros_like(token_P)
        return Rows(
            token_P=token_P,
            place_P=nothing,
            expert_P=nothing,
            tokens_per_expert=counts_L,
            ends=ends,
            needed=len(token_P),
        )
    order_A = torch.argsort(expert_A, stable=True)
    padded_L = (counts_L + job.alignment - 1) // job.alignment * job.alignment
    ends_L = padded_L.cumsum(0)
    before_L = counts_L.cumsum(0) - counts_L
    sorted_A = expert_A[order_A]
    within_A = torch.arange(len(order_A), device=ids_NK.device) - before_L[sorted_A]
    place = (ends_L - padded_L)[sorted_A] + within_A
    needed = int(ends_L[-1])
    found = {}
    for name, values in (("token_P", n_A), ("place_P", k_A), ("expert_P", expert_A)):
        whole = torch.full((needed,), -1, dtype=torch.int64, device=ids_NK.device)
        whole[place] = values[order_A]
        found[name] = whole
    return Rows(tokens_per_expert=counts_L, ends=ends_L, needed=needed, **found)


@dataclass
class Oracle:
    """The expected results of one rank of a job, and the checks of what the product gave it.

    Each check returns the differences in words; nothing if all is right.
    """

    job: Case
    rank: int
    device: torch.device
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        self.all = [cases.inputs(job, source, self.device) for source in range(job.size)]
        self.own = self.all[self.rank]
        self.ids_NK = torch.cat([each.ids_TK for each in self.all]).long()
        self.weights_NK = torch.cat([each.weights_TK for each in self.all])
        self.x_NH = torch.cat([each.x_TH for each in self.all])
        if job.wire is not None:
            self.x_NH = through_wire(self.x_NH, job.wire)
        self.rows = [rows(job, owner, self.ids_NK) for owner in range(job.size)]
        self.mine = self.rows[self.rank]
        self.needed = [each.needed for each in self.rows]
        self.capacity = None if job.slack is None else max(max(self.needed) + job.slack, 0)
        self.overflows = self.capacity is not None and max(self.needed) > self.capacity
        """Some rank leaves rows out."""
        self.kept = self.mine.needed if self.capacity is None else min(self.mine.needed, self.capacity)
        start = sum(job.tokens[: self.rank])
        self.home = slice(start, start + job.tokens[self.rank])
        """This rank's tokens among the N."""

    # -- what goes in ----------------------------------------------------------------------------------

    def dispatch(self, comm: Any, own: Inputs | None = None, **options: Any) -> Any:
        return cases.dispatch(
            comm, self.job, self.rank, own or self.own, **{"capacity": self.capacity, **options}
        )

    def check_step(self, comm: Any, own: Inputs | None = None) -> Any:
        """A dispatch and a combine, both checked; returns what the dispatch gave."""
        out = self.dispatch(comm, own)
        self.check_dispatch(out)
        self.check_combine("combine", comm.combine(self.answer(out.tokens), out.handle))
        return out

    def factor_P(self, rank: int) -> torch.Tensor:
        """Returns the factors that the experts of `rank` multiply rows with, another one for each expert."""
        expert_P = self.rows[rank].expert_P.clamp_min(0) + rank * (self.job.num_experts // self.job.size)
        return (1 + (expert_P % 7) / 8).to(self.job.torch_dtype)

    def answer(self, tokens_PH: torch.Tensor) -> torch.Tensor:
        """The experts' answer to a dispatch's output. Rows past the last are NaN: nobody may read them."""
        factor_P = torch.full((len(tokens_PH),), float("nan"), device=self.device).to(tokens_PH.dtype)
        factor_P[: self.kept] = self.factor_P(self.rank)[: self.kept]
        return tokens_PH * factor_P[:, None]

    # -- what must come out ----------------------------------------------------------------------------

    def check_dispatch(self, out: Any) -> None:
        job, mine, kept = self.job, self.mine, self.kept
        count = kept if self.capacity is None else self.capacity
        if tuple(out.tokens.shape) != (count, job.hidden) or out.tokens.dtype != job.torch_dtype:
            self._say(f"tokens are {out.tokens.dtype} {tuple(out.tokens.shape)}, expected {count} rows")
            return
        self._same("tokens_per_expert", out.tokens_per_expert, mine.tokens_per_expert.int())
        ends = mine.ends.clamp_max(count).int()
        self._same("offsets", out.offsets, ends)
        if job.layout == "expert":
            self._same("expert_offsets", out.expert_offsets, ends)
            self._same("expert_starts", out.expert_starts, functional.pad(ends, (1, 0)))
        overflow = mine.needed if mine.needed > count else 0
        self._same("overflow", out.overflow, torch.tensor(overflow, dtype=torch.int32, device=self.device))
        for start in range(0, kept, CHUNK):
            part = slice(start, min(start + CHUNK, kept))
            want = self._gathered(self.x_NH, mine.token_P[part])
            self._same(f"tokens[{part.start}:{part.stop}]", out.tokens.detach()[part], want)
        if (out.weights is None) == job.weights:
            self._say(f"weights are {type(out.weights).__name__}")
        elif job.weights:
            self._same("weights", out.weights.detach()[:kept], self.weights_P()[:kept])
        if job.layout == "rank":
            ids_PK = functional.pad(self._local_ids_PK()[:kept], (0, 0, 0, count - kept), value=-1)
            self._same("topk_idx", out.topk_idx, ids_PK.to(torch.int64 if job.wide_ids else torch.int32))

    def weights_P(self) -> torch.Tensor:
        """The weights that arrive: (P,), or (P, K) in the rank layout."""
        mine = self.mine
        if self.job.layout == "rank":
            return torch.where(self._local_ids_PK() >= 0, self.weights_NK[mine.token_P], 0)
        found = self.weights_NK[mine.token_P.clamp_min(0), mine.place_P.clamp_min(0)]
        return torch.where(mine.token_P >= 0, found, 0)

    def check_combine(
        self, name: str, y_TH: torch.Tensor, weighted: bool = False, forward: bool = True
    ) -> None:
        """y of the answers; `weighted`: times the weights that arrived (expert layout); `forward`: sums
        travel as the communicator's combine_wire says."""
        if y_TH.dtype != self.job.torch_dtype or tuple(y_TH.shape) != tuple(self.own.x_TH.shape):
            self._say(f"{name} is {y_TH.dtype} {tuple(y_TH.shape)}")
            return
        kept_ONK = self._kept()
        chunk = max(1, CHUNK // self.job.size)  # the sums of all owners at once
        for start in range(self.home.start, self.home.stop, chunk):
            part = slice(start, min(start + chunk, self.home.stop))
            wire = self.job.combine_wire if forward else None
            want = self._summed(part, kept_ONK[:, part], weighted, wire)
            place = slice(part.start - self.home.start, part.stop - self.home.start)
            self._same(f"{name}[{place.start}:{place.stop}]", y_TH.detach()[place], want)

    def check_weight_gradients(self, grad_TK: torch.Tensor, factor: float) -> None:
        """Checks gradients of the weights, if each that arrived got `factor` times itself as its gradient."""
        kept_TK = self._kept()[:, self.home].any(0)
        self._same("gradient of the weights", grad_TK, torch.where(kept_TK, self.own.weights_TK * factor, 0))

    def grad_y(self, rank: int) -> torch.Tensor:
        return cases.gradient(self.job, rank, self.device)

    def check_row_gradients(self, name: str, grad_PH: torch.Tensor, weights_P: torch.Tensor | None) -> None:
        """Checks the gradients of rows of a combine whose result had the gradient `grad_y`."""
        grad_NH = torch.cat([self.grad_y(source) for source in range(self.job.size)])
        for start in range(0, self.kept, CHUNK):
            part = slice(start, min(start + CHUNK, self.kept))
            want = self._gathered(grad_NH, self.mine.token_P[part])
            if weights_P is None and self.job.gradient_wire is not None:
                want = through_wire(want, self.job.gradient_wire).to(grad_NH.dtype)
            if weights_P is not None:
                want = (want.to(self.job.accumulate) * weights_P[part, None]).to(grad_NH.dtype)
            empty_P = self.mine.token_P[part] < 0
            got = grad_PH[part].masked_fill(empty_P[:, None], 0)  # nobody reads those of alignment rows
            self._same(f"{name}[{part.start}:{part.stop}]", got, want)

    def check_dots(self, dots_P: torch.Tensor, rows_PH: torch.Tensor) -> None:
        """Gradient of a combine's weights: <row, gradient of y>, a float32 sum in an order of its own."""
        grad_NH = torch.cat([self.grad_y(source) for source in range(self.job.size)])
        for start in range(0, self.kept, CHUNK):
            part = slice(start, min(start + CHUNK, self.kept))
            terms = rows_PH[part].double() * self._gathered(grad_NH, self.mine.token_P[part]).double()
            real_P = self.mine.token_P[part] >= 0
            error = ((dots_P[part].double() - terms.sum(1)) * real_P).abs()
            bound = terms.abs().sum(1) * self.job.hidden * torch.finfo(self.job.accumulate).eps
            if not bool((error <= bound + 1e-30).all()):
                self._say(f"gradient of combine's weights off by {float((error - bound).max())}")

    # -- parts -----------------------------------------------------------------------------------------

    def _gathered(self, values_NH: torch.Tensor, token_P: torch.Tensor) -> torch.Tensor:
        if len(values_NH) == 0:
            return values_NH.new_zeros(len(token_P), values_NH.shape[1])
        return values_NH[token_P.clamp_min(0)].masked_fill((token_P < 0)[:, None], 0)

    def _local_ids_PK(self) -> torch.Tensor:
        local = self.job.num_experts // self.job.size
        ids_PK = self.ids_NK[self.mine.token_P] - self.rank * local
        return torch.where((ids_PK >= 0) & (ids_PK < local), ids_PK, -1)

    def _kept(self) -> torch.Tensor:
        """(R, N, K): is this place of this token among the rows that the owner has kept?"""
        size, (total, top_k) = self.job.size, self.ids_NK.shape
        kept = torch.zeros(size, total, top_k, dtype=torch.bool, device=self.device)
        local = self.job.num_experts // size
        for owner, found in enumerate(self.rows):
            part = slice(None) if self.capacity is None else slice(self.capacity)
            token, place = found.token_P[part], found.place_P[part]
            if self.job.layout == "rank":
                ids = self.ids_NK[token]
                kept[owner, token] = (ids >= owner * local) & (ids < (owner + 1) * local)
            else:
                kept[owner, token[token >= 0], place[token >= 0]] = True
        return kept

    def _summed(self, part: slice, kept_ONK: torch.Tensor, weighted: bool, wire: str | None) -> torch.Tensor:
        """The contract of combine: owners sum by ascending k and round, another node's sums are added up and
        rounded there, and the home adds by ascending owner. `wire`: what goes to the home, a sum of an owner
        or of another node, is quantised in place of the rounding."""
        job, x = self.job, self.x_NH[part]
        local, by_rank = job.num_experts // job.size, job.layout == "rank"
        partial_ONH = torch.zeros(job.size, *x.shape, dtype=job.accumulate, device=self.device)
        for k in range(1 if by_rank else job.top_k):
            expert_1N = self.ids_NK[part, k].clamp_min(0)[None]
            if by_rank:
                expert_1N = (torch.arange(job.size, device=self.device) * local)[:, None]
            factor_1N = (1 + (expert_1N % 7) / 8).to(job.torch_dtype)  # that of `factor_P`
            value = (x * factor_1N[..., None]).to(job.accumulate)
            if weighted:
                value = value * self.weights_NK[part, k, None]
            here_ON = kept_ONK.any(2) if by_rank else kept_ONK[:, :, k]
            partial_ONH += torch.where(here_ON[..., None], value, 0)

        def rounded(sum_NH: torch.Tensor) -> torch.Tensor:
            return sum_NH.to(job.torch_dtype).to(job.accumulate)

        def travelled(sum_NH: torch.Tensor) -> torch.Tensor:
            return rounded(sum_NH) if wire is None else through_wire(sum_NH, wire)

        per_node = job.ranks_per_node or read_env().ranks_per_node or job.size
        total = node_total = torch.zeros_like(partial_ONH[0])
        for owner, value in enumerate(partial_ONH):
            if owner // per_node == self.rank // per_node:
                total = total + travelled(value)
                continue
            node_total = rounded(value) + (0 if owner % per_node == 0 else node_total)
            if (owner + 1) % per_node == 0:
                total = total + travelled(node_total)
        return total.to(job.torch_dtype)

    def _same(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Equal in type, shape and every bit, but for the sign of zero and the payload of a NaN."""
        if got.dtype != want.dtype or got.shape != want.shape:
            self._say(f"{name}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
        elif not torch.equal(got, want):
            wrong = ((got != want) & ~((got != got) & (want != want))).nonzero()
            if len(wrong):
                first = tuple(wrong[0].tolist())
                self._say(
                    f"{name}: {len(wrong)} of {got.numel()} differ, first {list(first)}: "
                    f"{got[first].item()!r}, expected {want[first].item()!r}"
                )

    def _say(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}; {self.job}")


SCALE_COLUMNS = {"fp8": 128, "mxfp8": 32}


def quantised(x_TH: torch.Tensor, wire: str = "fp8") -> tuple[torch.Tensor, torch.Tensor]:
    """float8 e4m3 data (T,H) and scales (T, blocks); the contract is in tests/reference.py."""
    columns = SCALE_COLUMNS[wire]
    count, hidden = x_TH.shape
    blocks = -(-hidden // columns)
    wide = torch.zeros(count, blocks * columns, device=x_TH.device)
    wide[:, :hidden] = x_TH.float()
    wide = wide.view(count, blocks, columns)
    # By a tensor on the device: torch multiplies with the reciprocal of a Python number instead.
    largest = torch.full((1,), 448.0, device=x_TH.device)
    amax = wide.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(2)
    scales = (amax / largest).clamp_min(2.0**-126)
    if wire == "mxfp8":
        scales = _e8m0(amax / largest)
    factors = factors_of(scales)
    inverse = torch.where(factors.isnan(), 0.0, torch.ones_like(factors) / factors)
    data = (wide * inverse[:, :, None]).clamp(-448, 448)
    return data.view(count, blocks * columns)[:, :hidden].to(torch.float8_e4m3fn).contiguous(), scales


def _e8m0(x: torch.Tensor) -> torch.Tensor:
    """The least powers of two that are not below float32 x, as float8_e8m0fnu; NaN for infinity."""
    mantissa, exponent = torch.frexp(x.double())
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    codes = torch.where(x > 0, exponent.clamp_min(-127), -127) + 127
    return torch.where(x.isinf(), 255, codes).to(torch.uint8).view(torch.float8_e8m0fnu)


def factors_of(scales: torch.Tensor) -> torch.Tensor:
    """Scales of a wire format as float32."""
    if scales.dtype == torch.float32:
        return scales
    codes = scales.view(torch.uint8)
    return torch.where(codes == 255, torch.nan, torch.pow(2.0, codes.double() - 127)).float()


def dequantised(
    data_TH: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, wire: str = "fp8"
) -> torch.Tensor:
    whole = factors_of(scales).repeat_interleave(SCALE_COLUMNS[wire], 1)[:, : data_TH.shape[1]]
    return (data_TH.float() * whole).to(dtype)


def through_wire(x_TH: torch.Tensor, wire: str) -> torch.Tensor:
    """Rows after they have travelled in a wire format."""
    parts = x_TH.split(CHUNK)
    return torch.cat([dequantised(*quantised(part, wire), x_TH.dtype, wire) for part in parts])


@contextmanager
def opened(case: Case, rank: int, **changes: Any) -> Iterator[tuple[Any, Oracle]]:
    """A communicator of the case, but for `changes` of its arguments, and what this rank must get."""
    with ranks.communicator(**{**case.communicator, **changes}) as comm:
        yield comm, Oracle(case, rank, comm.device)


def play(comm: Any, case: Case, rank: int, *, gradients: bool = True) -> list[str]:
    """Dispatch, combine without and with weights, all gradients if wanted, and the overflow; what was
    wrong."""
    oracle = Oracle(case, rank, comm.device)
    # torch fills new tensors with NaN in this mode: what the product leaves unwritten shows.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        _play(comm, oracle, gradients)
    finally:
        torch.use_deterministic_algorithms(before)
    exceeded = settled_error(comm)
    found = exceeded and (exceeded.name, exceeded.needed, exceeded.capacity)
    most, capacity = max(oracle.needed), oracle.capacity
    want = None if capacity is None or most <= capacity else ("CapacityExceeded", most, capacity)
    if found != want:
        oracle._say(f"check() raised {exceeded}, expected {want}")
    return oracle.problems


def _play(comm: Any, oracle: Oracle, gradients: bool) -> None:
    case, own = oracle.job, oracle.own
    x_TH, weights_TK = (each.clone().requires_grad_(gradients) for each in (own.x_TH, own.weights_TK))
    out = oracle.dispatch(comm, Inputs(x_TH=x_TH, ids_TK=own.ids_TK, weights_TK=weights_TK))
    oracle.check_dispatch(out)
    if oracle.problems:
        return
    answer_PH = oracle.answer(out.tokens.detach()).requires_grad_(gradients)
    grad_y_TH = oracle.grad_y(oracle.rank)
    y_TH = comm.combine(answer_PH, out.handle)
    oracle.check_combine("combine", y_TH)
    if gradients:
        y_TH.backward(grad_y_TH)
        oracle.check_row_gradients("gradient of combine", answer_PH.grad, None)
    if case.weights and case.layout == "expert":
        weights_P = out.weights.detach().clone()
        weights_P[oracle.kept :] = float("nan")
        weights_P.requires_grad_(gradients)
        answer_PH.grad = None
        y_TH = comm.combine(answer_PH, out.handle, weights=weights_P)
        oracle.check_combine("weighted combine", y_TH, weighted=True)
        if gradients:
            y_TH.backward(grad_y_TH)
            oracle.check_row_gradients("gradient of weighted combine", answer_PH.grad, weights_P.detach())
        if gradients and not case.extremes:
            oracle.check_dots(weights_P.grad, answer_PH.detach())
    if case.layout == "rank":
        _play_index(comm, oracle, out, gradients)
    if not gradients:
        return
    grads = [oracle.answer(out.tokens.detach())]
    if case.weights:
        given = [out.weights]
        if case.layout == "rank" and not oracle.overflows:
            given.append(out.expert_weights)
        grads += [each.detach() * 2 for each in given]
        torch.autograd.backward([out.tokens, *given], grads)
        oracle.check_weight_gradients(weights_TK.grad, 2.0 * len(given))
    else:
        out.tokens.backward(grads[0])
    oracle.check_combine("gradient of dispatch", x_TH.grad, forward=False)


def _play_index(comm: Any, oracle: Oracle, out: Any, gradients: bool) -> None:
    """Checks the expert-major index of a dispatch in the rank layout, and combines rows by it."""
    job = replace(oracle.job, layout="expert", alignment=1, slack=None)
    by_expert = Oracle(job, oracle.rank, oracle.device, oracle.problems)
    mine, count = by_expert.mine, len(out.expert_rows)
    most = min(job.top_k, job.num_experts // job.size)
    wanted = mine.needed if oracle.capacity is None else oracle.capacity * most
    if count != wanted:
        oracle._say(f"expert_rows has {count} positions, expected {wanted}")
        return
    row_N = torch.full((len(oracle.ids_NK),), -1, dtype=torch.int64, device=oracle.device)
    row_N[oracle.mine.token_P[: oracle.kept]] = torch.arange(oracle.kept, device=oracle.device)
    row_Q = torch.full((count,), -1, dtype=torch.int64, device=oracle.device)
    row_Q[: mine.needed] = row_N[mine.token_P][:count]
    oracle._same("expert_rows", out.expert_rows, row_Q.clamp_min(0).int())
    ends = mine.ends.clamp_max(count).int()
    oracle._same("expert_offsets", out.expert_offsets, ends)
    oracle._same("expert_starts", out.expert_starts, functional.pad(ends, (1, 0)))
    if job.weights:
        weights_Q = torch.zeros(count, dtype=job.accumulate, device=oracle.device)
        weights_Q[: mine.needed] = by_expert.weights_P()[:count]
        oracle._same("expert_weights", out.expert_weights.detach(), weights_Q * (row_Q >= 0))
    if oracle.overflows:
        return
    rows_QH = by_expert.answer(out.tokens.detach()[out.expert_rows.long()]).requires_grad_(gradients)
    y_TH = comm.combine(rows_QH, out.expert_handle)
    by_expert.check_combine("combine by the index", y_TH)
    if gradients:
        y_TH.backward(oracle.grad_y(oracle.rank))
        by_expert.check_row_gradients("gradient of combine by the index", rows_QH.grad, None)


def settled_error(comm: Any) -> Any:
    """Returns what check() raises once all work of this rank is done: a Caught, or None."""
    ranks.synchronize(comm.device)
    return catch(comm.check)


def assert_none(problems: Sequence[Sequence[str]]) -> None:
    """Asserts that every rank's list of what was wrong is empty."""
    found = [text for each in problems for text in each]
    assert not found, "\n".join(found[:12])
