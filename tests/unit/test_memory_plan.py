"""Size and sections of a window."""

from typing import Any

import pytest
import torch

import moecomm
from moecomm import _C

PAGE = 4096


def _plan(**changes: Any) -> moecomm.MemoryPlan:
    arguments: dict[str, Any] = {"ranks": 4, "num_experts": 8, "hidden": 64, "top_k": 2, "max_tokens": 100}
    return moecomm.Communicator.memory_plan(
        **{**arguments, "dtype": torch.float32, "device": "cpu", **changes}
    )


def _sizes(plan: moecomm.MemoryPlan, name: str) -> list[int]:
    return [size for section, _, size in plan.sections if section == name]


def test_table() -> None:
    plan = _plan(ranks_per_node=2)
    text = str(plan)
    for name, offset, size in plan.sections:
        assert any(
            line.split()[-2:] == [str(offset), str(size)] and name in line for line in text.split("\n")
        )
    assert str(plan.total_bytes) in text
    assert text.split("\n")[-1].split() == ["a", "node", "at", "once", str(plan.committed_bytes * 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 6}, ["hidden is 6", "16"]),
        ({"hidden": -4}, ["hidden is -4"]),
        ({"hidden": 8.0}, ["hidden is 8.0"]),
        ({"num_experts": 0}, ["num_experts is 0"]),
        ({"num_experts": 6}, ["num_experts is 6", "4"]),
        ({"top_k": 0}, ["top_k is 0"]),
        ({"top_k": 9}, ["top_k is 9", "8"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"max_tokens": 2**31}, ["max_tokens is 2147483648"]),
        ({"max_tokens": 2**30}, ["max_tokens is 1073741824", "rows"]),
        ({"max_tokens": 2**28 - 1, "hidden": 2**31 - 4}, ["max_tokens is 268435455", "bytes"]),
        ({"ranks": 0}, ["ranks is 0"]),
        ({"dtype": torch.int32}, ["dtype is torch.int32"]),
        ({"dtype": "float32"}, ["dtype is 'float32', expected one of torch.float32"]),
        ({"ranks_per_node": 0}, ["ranks_per_node is 0"]),
        ({"ranks_per_node": 3}, ["ranks_per_node is 3", "4 ranks"]),
    ],
)
def test_sizes_that_no_window_can_have(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(moecomm.InvalidArgument) as caught:
        _plan(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_this_version_has_not() -> None:
    with pytest.raises(moecomm.Unsupported, match="wire is 'fp8'"):
        _plan(wire="fp8")


LONG = {"hidden": 7168, "top_k": 8, "max_tokens": 65_536, "dtype": torch.bfloat16}
"""Half of a window of 131 072 tokens of DeepSeek-V3: 939 524 096 bytes of rows."""


@pytest.mark.parametrize("ranks", [2, 8, 72])
def test_long_windows(ranks: int) -> None:
    """Sections, and distances between them, of more than 2^32 bytes."""
    plan = _plan(**LONG, ranks=ranks, num_experts=16 * ranks)
    rows = 65_536 * 7168 * 2
    assert _sizes(plan, "token rows") == _sizes(plan, "input rows") == [rows] * 2
    assert _sizes(plan, "combine slots") == [min(ranks, 8) * rows] * 2
    _require_one_after_another(plan)
    assert plan.total_bytes > (4 + 2 * min(ranks, 8)) * rows > 1 << 32


def _require_one_after_another(plan: moecomm.MemoryPlan) -> None:
    end = 0
    for _, offset, size in plan.sections:
        assert offset == end and offset % PAGE == 0 and size > 0
        end += size
    assert end == plan.total_bytes


def test_a_communicator_has_the_plan_that_was_announced() -> None:
    with moecomm.Communicator(
        num_experts=8, hidden=64, top_k=2, max_tokens=100, dtype=torch.float32, device="cpu"
    ) as comm:
        assert comm.memory == _plan(ranks=1)


# -- device memory: needs the CUDA part of the extension, and no GPU -----------------------------------------

needs_cuda_part = pytest.mark.skipif(
    _C.cuda_version is None, reason="the extension is built without its CUDA part"
)


def _device_plan(**changes: Any) -> moecomm.MemoryPlan:
    return _plan(**{"device": "cuda", **changes})


@needs_cuda_part
@pytest.mark.parametrize("ranks", [2, 8, 72])
def test_long_windows_on_cuda(ranks: int) -> None:
    plan = _device_plan(**LONG, ranks=ranks, num_experts=16 * ranks)
    assert _sizes(plan, "rows") == [min(ranks, 8) * 65_536 * 7168 * 2] * 2
    assert _sizes(plan, "routes") == [ranks * 65_536 * 8 * 16] * 2
    _require_one_after_another(plan)


@needs_cuda_part
def test_sizes_that_no_window_on_cuda_can_have() -> None:
    with pytest.raises(moecomm.InvalidArgument, match="hidden is 8, expected a multiple of 16"):
        _device_plan(hidden=8, wire="fp8")
    with pytest.raises(moecomm.InvalidArgument, match=r"hidden is 6: a row of torch\.float32"):
        _device_plan(hidden=6)
    with pytest.raises(moecomm.Unsupported, match=r"dtype is torch\.float64 on cuda, expected .*use float32"):
        _device_plan(dtype=torch.float64)
    with pytest.raises(moecomm.Unsupported, match="wire is 'int4'"):
        _device_plan(wire="int4")
    with pytest.raises(moecomm.Unsupported, match="max_tokens is 16777215, on CUDA it is less than 16777215"):
        _device_plan(max_tokens=2**24 - 1)
    assert _sizes(_device_plan(max_tokens=2**24 - 2), "routes") == [4 * 2**24 * 2 * 16] * 2  # whole pages
