"""The cost model of a layer: shares of parts against sampled routing, times against arithmetic, choices."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import moecomm
from moecomm.model import MACHINES, MODELS, Shape, predict
from moecomm.overlap import H200, LayerShape, choose, part_shares, planned

MACHINE = MACHINES["h200"]
FFN = {"deepseek-v3": 2048, "qwen3-235b": 1536, "gpt-oss-120b": 2880}


def _shape(model: str = "deepseek-v3", tokens: int = 4096, **changes: Any) -> LayerShape:
    sizes = {**MODELS[model], "num_groups": None, "topk_groups": None}
    return LayerShape(Shape(nodes=1, ranks_per_node=4, tokens=tokens, **sizes), ffn=FFN[model], **changes)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(4, 256, 8), (2, 22, 4), (3, 24, 24)])
def test_shares_of_parts_are_those_of_random_routing(
    ranks: int, experts: int, top_k: int, parts: int, seed: int
) -> None:
    exchange = Shape(nodes=1, ranks_per_node=ranks, tokens=1, hidden=8, top_k=top_k, experts=experts)
    shares = part_shares(exchange, parts)
    local = experts // ranks
    rng = np.random.default_rng(seed)
    ids = rng.random((20000, experts)).argsort(axis=1)[:, :top_k]
    first = np.where(ids < local, ids, experts).min(axis=1)
    part = first[first < local] * parts // local
    sampled = np.bincount(part, minlength=parts) / len(part)
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(sampled, abs=0.02)


def test_the_example() -> None:
    assert part_shares(_shape().exchange, 2) == pytest.approx((0.73, 0.27), abs=0.005)
    assert part_shares(_shape().exchange, 4)[0] == pytest.approx(0.45, abs=0.005)


def test_times_by_hand() -> None:
    """No shared experts, one part, all the SMs that transfers want."""
    rates = dataclasses.replace(H200, dispatch_sms=32, combine_sms=32, sms=64)
    shape = _shape()
    forward, _ = planned(shape, MACHINE, rates, 1, 32)
    transfers = predict(MACHINE, shape.exchange)
    assert forward["dispatch"].seconds == pytest.approx(transfers.dispatch.seconds + 6e-6)
    assert forward["combine"].seconds == pytest.approx(transfers.combine.seconds + 6e-6)
    flops = 2 * 4096 * 8 * 4096 * 7168
    assert forward["up"].seconds == pytest.approx(flops / 640e12 * 2 + 8e-6)  # on half of the SMs
    assert forward["down"].seconds == pytest.approx(flops / 2 / 640e12 * 2 + 8e-6)
    assert forward["activation"].seconds == pytest.approx(4096 * 8 * 3 * 2048 * 2 / 4143e9)
    total = sum(stage.seconds for stage in forward.stages)
    assert forward.plan().seconds == pytest.approx(total)  # nothing lies beside anything


def test_fewer_sms_slow_transfers_and_speed_products() -> None:
    few, many = (planned(_shape(), MACHINE, H200, 2, sms)[0] for sms in (16, 32))
    assert few["dispatch 0"].seconds > many["dispatch 0"].seconds
    assert few["up 0"].seconds < many["up 0"].seconds


@pytest.mark.parametrize("model", FFN)
def test_parts_hide_more_and_more(model: str) -> None:
    shape = _shape(model)
    exposed = []
    for parts in (1, 2, 4):
        timelines = [schedule.plan() for schedule in planned(shape, MACHINE, H200, parts, 32)]
        exposed.append(sum(timeline.exposed_seconds for timeline in timelines))
    assert all(a > b for a, b in itertools.pairwise(exposed))


def test_choices() -> None:
    large, small = choose(_shape(), MACHINE, H200), choose(_shape(tokens=8), MACHINE, H200)
    assert large.parts > 1 and small.parts == 1
    assert choose(_shape(), MACHINE, H200, most_parts=1).parts == 1
    for parts, sms in itertools.product((1, 3), (16, 64)):
        assert large.seconds <= sum(
            schedule.plan().seconds for schedule in planned(_shape(), MACHINE, H200, parts, sms)
        )
    assert str(large).startswith(f"{large.parts} parts, {large.comm_sms} SMs for communication: ")
    assert large.timelines()["forward"].seconds + large.timelines()["backward"].seconds == large.seconds


def test_shared_experts_lie_over_the_dispatch() -> None:
    forward, backward = planned(_shape(shared_ffn=2048), MACHINE, H200, 1, 32, "nothing")
    spans = {span.name: span for span in forward.plan().spans}
    assert spans["shared experts"].begin < spans["dispatch"].end
    assert spans["sum"].begin >= spans["combine"].end
    assert "rows again" in backward and "up again" in backward


def test_refused() -> None:
    with pytest.raises(moecomm.InvalidArgument, match=r"Rates\.sms is 0, must be above 0"):
        dataclasses.replace(H200, sms=0)
    with pytest.raises(moecomm.InvalidArgument, match="sms has 132, must be from 1 to 131"):
        choose(_shape(), MACHINE, H200, sms=(24, 132))
