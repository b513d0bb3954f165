"""Constructions that cannot work on GPUs: the same typed error on all ranks, and a good one right after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import oracle
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.gpu.harness import Job
from tests.multirank.catching import Caught, catch

pytestmark = pytest.mark.usefixtures("cuda_only")


def _bad(rank: int, world_size: int, job: Job) -> tuple[dict[str, Caught | None], list[str]]:
    good = job.communicator
    last = rank == world_size - 1
    memory = torch.cuda.get_device_properties(harness.device()).total_memory
    bad: dict[str, dict[str, Any]] = {
        "num_sms too few": {"num_sms": 1},
        "num_sms too many": {"num_sms": 100_000},
        "no such GPU": {"device": "cuda:77"},
        "no such device": {"device": "meta"},
        "one rank's float64": {"dtype": torch.float64 if last else torch.float32},
        "window too large": {"hidden": 1 << 16, "max_tokens": memory >> 17},
        "one rank's hidden": {"hidden": 64 if last else 128},
        "one rank's wire": {"wire": "fp8" if last else None},
        "one rank's combine_wire": {"combine_wire": "fp8" if last else None},
        "one rank's gradient_wire": {"gradient_wire": "fp8" if last else None},
        "one rank's device": {"device": "cpu" if last else harness.device()},
        "one rank's num_sms": {"num_sms": 0 if last else 8},
    }
    if world_size > 1 and harness.RANKS_PER_GPU == 1:
        bad["two ranks on one GPU"] = {"device": "cuda:0"}
    caught = {}
    for name, arguments in bad.items():
        caught[name] = catch(lambda kept={**good, **arguments}: harness.communicator(**kept).close())
    with harness.communicator(**good) as comm:
        return caught, oracle.play(comm, job, rank)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bad_arguments(pool: Pools, size: int, seed: int) -> None:
    job = Job(tokens=(9,) * size, num_experts=2 * size, hidden=128, top_k=2, seed=seed)
    results = pool(size)(_bad, job)
    harness.assert_none([problems for _, problems in results])
    wanted = {
        "num_sms too few": ("InvalidArgument", ["num_sms is 1"]),
        "num_sms too many": ("InvalidArgument", ["num_sms is 100000"]),
        "no such GPU": ("InvalidArgument", ["cuda:77"]),
        "no such device": ("Unsupported", ["meta"]),
        "one rank's float64": ("Unsupported", ["dtype is torch.float64", "use float32", "device='cpu'"]),
        "window too large": ("OutOfMemory", ["bytes", "max_tokens"]),
        "one rank's hidden": ("MismatchedArguments", ["hidden", "64", "128"]),
        "one rank's wire": ("MismatchedArguments", ["wire", "fp8"]),
        "one rank's combine_wire": ("MismatchedArguments", ["combine_wire", "fp8"]),
        "one rank's gradient_wire": ("MismatchedArguments", ["gradient_wire", "fp8"]),
        "one rank's device": ("MismatchedArguments", ["device", "cpu", "cuda"]),
        "one rank's num_sms": ("InvalidArgument", ["num_sms is 0"]),
        "two ranks on one GPU": ("InvalidArgument", ["same GPU", "set_device"]),
    }
    for caught, _ in results:
        for name, error in caught.items():
            if size == 1 and wanted[name][0] == "MismatchedArguments":
                assert error is None, f"{name}: {error}"
                continue
            type_name, words = wanted[name]
            assert error is not None and error.name == type_name, f"{name}: {error}"
            assert all(word in error.text for word in words), f"{name}: {error.text!r}"
