"""Constructions that cannot work on GPUs: the same typed error on all ranks, and a good one right after."""

from typing import Any

import pytest
import torch

from tests import oracle
from tests.gpu import harness
from tests.gpu.harness import Job
from tests.multirank.catching import refused
from tests.multirank.on_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("cuda_only")


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_bad_arguments(rank: int, world_size: int, seed: int) -> list[str]:
    job = Job(tokens=(9,) * world_size, num_experts=2 * world_size, hidden=128, top_k=2, seed=seed)
    last = rank == world_size - 1
    memory = torch.cuda.get_device_properties(harness.device()).total_memory
    bad: list[tuple[dict[str, Any], str, list[str]]] = [
        ({"num_sms": 1}, "InvalidArgument", ["num_sms is 1"]),
        ({"num_sms": 100_000}, "InvalidArgument", ["num_sms is 100000"]),
        ({"device": "cuda:77"}, "InvalidArgument", ["cuda:77"]),
        ({"device": "meta"}, "Unsupported", ["meta"]),
        (
            {"dtype": torch.float64 if last else torch.float32},
            "Unsupported",
            ["dtype is torch.float64", "use float32", "device='cpu'"],
        ),
        ({"hidden": 1 << 16, "max_tokens": memory >> 17}, "OutOfMemory", ["bytes", "max_tokens"]),
        ({"num_sms": 0 if last else 8}, "InvalidArgument", ["num_sms is 0"]),
    ]
    one_ranks: list[tuple[dict[str, Any], list[str]]] = [
        ({"hidden": 64 if last else 128}, ["hidden", "64", "128"]),
        ({"wire": "fp8" if last else None}, ["wire", "fp8"]),
        ({"combine_wire": "fp8" if last else None}, ["combine_wire", "fp8"]),
        ({"gradient_wire": "fp8" if last else None}, ["gradient_wire", "fp8"]),
        ({"device": "cpu" if last else harness.device()}, ["device", "cpu", "cuda"]),
    ]
    if world_size > 1:
        bad += [(arguments, "MismatchedArguments", words) for arguments, words in one_ranks]
        if harness.RANKS_PER_GPU == 1:
            bad.append(({"device": "cuda:0"}, "InvalidArgument", ["same GPU", "set_device"]))
    else:  # the only rank may have them
        for arguments, _ in one_ranks:
            harness.communicator(**{**job.communicator, **arguments}).close()
    for arguments, name, words in bad:
        given = {**job.communicator, **arguments}
        refused(lambda given=given: harness.communicator(**given), *words, name=name)
    with harness.communicator(**job.communicator) as comm:
        return oracle.play(comm, job, rank)
