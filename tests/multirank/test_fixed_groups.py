"""Dispatches in the expert layout whose groups all have the same number of rows (`expert_capacity`): the same
rows, weights, sums and gradients as those of a dropless dispatch, bit for bit, at their fixed places."""

from typing import Any

import pytest
import torch

from tests import cases, ranks
from tests.cases import Case
from tests.fabric import needs_fabric
from tests.multirank.catching import catch, refused, require
from tests.multirank.on_ranks import on_ranks
from tests.oracle import settled_error


def _case(size: int, seed: int, tokens: tuple[int, ...], **options: Any) -> Case:
    shape = {"num_experts": 5 * size, "hidden": 64, "top_k": 4, "routing": "holes", **options}
    return Case(tokens=tuple(tokens[rank % len(tokens)] for rank in range(size)), seed=seed, **shape)


def _at(out: Any, groups: int) -> torch.Tensor:
    """The rows of the fixed groups that hold the rows of `out`, a dropless dispatch."""
    counts = out.tokens_per_expert.tolist()
    return torch.cat([torch.arange(n, device=out.tokens.device) + e * groups for e, n in enumerate(counts)])


def _differ(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    return [name for name, (found, wanted) in pairs.items() if not torch.equal(found, wanted)]


def _run(comm: Any, case: Case, rank: int, groups: int, asynchronous: bool) -> list[str]:
    own = cases.inputs(case, rank, comm.device)
    x_TH, weights_TK = (each.detach().requires_grad_() for each in (own.x_TH, own.weights_TK))
    grad_TH = cases.gradient(case, rank, comm.device)

    def whole(out: Any) -> tuple[torch.Tensor, ...]:
        y_TH = comm.combine(out.tokens * 2, out.handle, weights=out.weights)
        return (y_TH, *torch.autograd.grad(y_TH, (x_TH, weights_TK), grad_TH))

    plain = comm.dispatch(x_TH, own.ids_TK, weights_TK)
    ranks.poison(1 << 20)
    out = comm.dispatch(x_TH, own.ids_TK, weights_TK, expert_capacity=groups, async_op=asynchronous)
    out = out.wait() if asynchronous else out
    local, at = comm.num_local_experts, _at(plain, groups)
    assert out.tokens.shape[0] == out.handle.num_rows == local * groups and out.weights is not None
    ends = torch.arange(1, local + 1, dtype=torch.int32, device=at.device) * groups
    pairs = {
        "rows": (out.tokens[at], plain.tokens),
        "weights": (out.weights[at], plain.weights),
        "counts": (out.tokens_per_expert, plain.tokens_per_expert),
        "ends": (out.offsets, ends),
        "starts": (out.expert_starts[1:], ends),
        "rows sent again": (
            comm.redispatch(x_TH.detach() * 3, out.handle)[at],
            comm.redispatch(x_TH.detach() * 3, plain.handle),
        ),
    }
    names = ("sums", "gradient of rows", "gradient of weights")
    pairs |= dict(zip(names, zip(whole(out), whole(plain), strict=True), strict=True))
    comm.check()
    return _differ(pairs) + ([] if int(out.overflow) == 0 else ["overflow"])


@pytest.mark.parametrize("per_node", [None, pytest.param(1, marks=needs_fabric)])
@pytest.mark.parametrize("most", [9, 300])
@on_ranks("most_ranks")
def test_groups_of_one_size(
    rank: int, world_size: int, most: int, per_node: int | None, seed: int
) -> list[str]:
    """Few tokens and more; ranks without tokens; experts with none and, in "one-expert", with all."""
    found = []
    for routing in ("holes", "one-expert", "empty"):
        tokens = (most, 0, most // 2)
        case = _case(world_size, seed, tokens, routing=routing, dtype="bfloat16", ranks_per_node=per_node)
        with ranks.communicator(**case.communicator) as comm:
            for groups in (world_size * comm.max_tokens, world_size * comm.max_tokens + 3):
                found += [f"{routing}: {name}" for name in _run(comm, case, rank, groups, groups % 2 == 1)]
    return found


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int, seed: int) -> None:
    case = _case(world_size, seed, (4, 3))
    with ranks.communicator(**case.communicator) as comm:
        own = cases.inputs(case, rank, comm.device)
        least = world_size * comm.max_tokens
        for options, text in [
            ({"expert_capacity": least - 1}, f"expert_capacity is {least - 1}"),
            ({"expert_capacity": 2**30}, f"expert_capacity is {2**30}"),
            ({"expert_capacity": least, "alignment": 8}, "alignment is 8"),
            ({"expert_capacity": least, "capacity": least}, f"capacity {least}, expected 1 and None"),
        ]:
            refused(lambda options=options: comm.dispatch(own.x_TH, own.ids_TK, **options), text)
        compiled = torch.compile(comm.dispatch, backend="eager")
        counted = {"capacity": least, "host_counts": True}
        for call in (comm.dispatch, compiled):
            refused(lambda call=call: call(own.x_TH, own.ids_TK, **counted), "host_counts is True")
        error = catch(lambda: comm.dispatch(own.x_TH, own.ids_TK, expert_capacity=least + rank))
        require(error or settled_error(comm), "capacity", name="MismatchedArguments")
