"""Rows of several passes in one, against plain loops."""

import pytest
import torch

from moecomm.kernels.joined import join_groups, join_rows


def test_the_worked_example() -> None:
    ends = [torch.tensor(each, dtype=torch.int32) for each in ([2, 3], [1, 4])]
    joined = join_groups(ends, [3, 5])
    assert joined.ends_L.dtype == torch.int32 and joined.ends_L.tolist() == [3, 7]
    assert [each.tolist() for each in joined.places] == [[0, 1, 3], [2, 4, 5, 6, 7]]


def _plain(ends: list[list[int]], rows: list[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Ends and rows of the joined groups, and behind them what is past the groups, in the order of passes."""
    parts, joined_ends = [], []
    for group in range(len(ends[0])):
        for each, own in zip(rows, ends, strict=True):
            parts.append(each[own[group - 1] if group else 0 : own[group]])
        joined_ends.append(sum(len(part) for part in parts))
    parts += [each[own[-1] :] for each, own in zip(rows, ends, strict=True)]
    return joined_ends, torch.cat(parts)


@pytest.mark.parametrize(("columns", "dtype"), [(8, torch.bfloat16), (3, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 7])
def test_random_groups(groups: int, passes: int, columns: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends, rows = [], []
    for _ in range(passes):
        sizes = torch.randint(0, 5, (groups,), generator=generator) * torch.randint(
            0, 2, (groups,), generator=generator
        )
        ends.append(sizes.cumsum(0).tolist())
        count = ends[-1][-1] + int(torch.randint(0, 3, (), generator=generator))
        rows.append(torch.randn(count, columns, generator=generator).to(dtype))
    rows[0] = torch.cat((rows[0][:0].new_zeros(1, columns), rows[0]))[1:]  # an address of its own
    joined = join_groups(
        [torch.tensor(each, dtype=torch.int32) for each in ends], [len(each) for each in rows]
    )
    want_ends, want = _plain(ends, rows)
    assert joined.ends_L.tolist() == want_ends
    assert torch.equal(join_rows(rows, joined.places), want)
