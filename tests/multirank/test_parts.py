"""Operations in parts on the CPU, where all rows come at once: the same calls, results and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.multirank import cases
from tests.multirank.cases import Case
from tests.multirank.harness import RankPool

Pools = Callable[[int], RankPool]


def _compare(rank: int, world_size: int, case: Case, parts: int) -> list[str]:
    """What is not as in one part, bit for bit."""
    import moecomm

    with moecomm.Communicator(**case.communicator) as comm:
        x_TH = cases.tensor(case.x(rank), case.torch_dtype)
        ids_TK, weights_TK = torch.from_numpy(case.ids(rank)), torch.from_numpy(case.topk_weights(rank))
        plain = comm.dispatch(x_TH, ids_TK, weights_TK)
        begun = comm.begin_dispatch(x_TH, ids_TK, weights_TK, parts=parts)
        for _ in range(parts):
            begun.receive()
        out = begun.output
        local = case.num_experts // world_size
        ends = [max(e for e in range(local) if e * parts // local == part) for part in range(parts)]
        rows_PH = cases.tensor(case.rows(rank, len(out.tokens)), case.torch_dtype)
        grads_P = cases.tensor(case.row_weights(rank, len(out.tokens)))
        again = comm.begin_redispatch(x_TH * 2, out.handle)
        for _ in range(parts):
            again.receive()
        sums = comm.begin_combine(out.handle)
        gradients = None
        for first, end in itertools.pairwise((0, *begun.ends)):
            sums.send(rows_PH[first:end])
        gradients = comm.begin_combine(out.handle, grad_weights=grads_P)
        for first, end in itertools.pairwise((0, *begun.ends)):
            gradients.send(rows_PH[first:end])
        want = comm.dispatch_backward(rows_PH, plain.handle, grad_weights=grads_P)
        checks = {
            "tokens": torch.equal(plain.tokens, out.tokens),
            "weights": torch.equal(plain.weights, out.weights),
            "offsets": torch.equal(plain.offsets, out.offsets),
            "ends": begun.ends == out.handle.part_ends == tuple(int(plain.offsets[e]) for e in ends),
            "again": torch.equal(again.rows, comm.redispatch(x_TH * 2, plain.handle)),
            "sums": torch.equal(sums.result[0], comm.combine(rows_PH, plain.handle)),
            "no gradients": sums.result[1] is None,
            "gradients": all(torch.equal(a, b) for a, b in zip(gradients.result, want, strict=True)),
        }
        return [name for name, good in checks.items() if not good]


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_in_one_part(pool: Pools, size: int, parts: int, seed: int) -> None:
    case = Case(
        tokens=cases.unequal_tokens(size, 13, seed),
        num_experts=11 * size,
        hidden=24,
        top_k=4,
        dtype="bfloat16",
        routing="holes",
        seed=seed,
    )
    assert pool(size)(_compare, case, parts) == [[]] * size
    assert pool(size)(_compare, replace(case, routing="one-rank"), parts) == [[]] * size


def test_between_nodes(pool: Pools, seed: int) -> None:
    case = Case(tokens=(5, 0, 7, 9), num_experts=12, hidden=8, top_k=3, seed=seed, ranks_per_node=2)
    assert pool(4)(_compare, case, 3) == [[]] * 4


def _mistakes(rank: int, world_size: int) -> list[str]:
    """Rank 0 makes each; both raise, and the communicator goes on."""
    import moecomm

    case = Case(tokens=(5, 6), num_experts=4, hidden=8, top_k=2)
    texts = []
    with moecomm.Communicator(**case.communicator) as comm:
        x_TH, ids_TK = cases.tensor(case.x(rank), case.torch_dtype), torch.from_numpy(case.ids(rank))
        whole = comm.dispatch(x_TH, ids_TK)
        split = comm.begin_dispatch(x_TH, ids_TK, parts=2)
        split.receive()
        handle = split.output.handle
        split.receive()
        grads = torch.zeros(handle.num_rows)
        right: dict[Callable[..., Any], dict[str, Any]] = {
            comm.begin_dispatch: {"x_TH": x_TH, "topk_idx_TK": ids_TK, "parts": 2},
            comm.begin_redispatch: {"x_TH": x_TH, "handle": handle},
            comm.begin_combine: {"handle": handle, "grad_weights": grads},
        }
        wrong: list[tuple[Callable[..., Any], dict[str, Any]]] = [
            (comm.begin_dispatch, {"parts": 3}),
            (comm.begin_dispatch, {"parts": 0}),
            (comm.begin_dispatch, {"x_TH": x_TH.double()}),
            (comm.begin_redispatch, {"x_TH": torch.zeros(4, 8)}),
            (comm.begin_redispatch, {"handle": whole.handle}),
            (comm.begin_combine, {"handle": whole.handle}),
            (comm.begin_combine, {"grad_weights": grads[:-1]}),
        ]
        for call, mistake in wrong:
            arguments = {**right[call], **(mistake if rank == 0 else {})}
            try:
                begun = call(**arguments)  # or in a part, where another rank's mistake is met
                for part in range(2):
                    if call == comm.begin_combine:
                        begun.send(split.output.tokens[slice(*(0, *handle.part_ends)[part : part + 2])])
                    else:
                        begun.receive()
                texts.append("")
            except moecomm.InvalidArgument as error:
                texts.append(str(error))
        assert torch.equal(comm.dispatch(x_TH, ids_TK).tokens, whole.tokens)
    return texts


def test_mistakes_are_told_to_all(pool: Pools) -> None:
    here, there = pool(2)(_mistakes)
    starts = [
        "parts is 3",
        "parts is 0",
        "x is torch.float64",
        "x has shape (4, 8)",
        "handle is that of a dispatch in one piece",
        "handle is that of a dispatch in one piece",
        "grad_weights has shape",
    ]
    assert [text[: len(start)] for text, start in zip(here, starts, strict=True)] == starts
    assert [text[: len(start) + 8] for text, start in zip(there, starts, strict=True)] == [
        f"rank 0: {start}" for start in starts
    ]
