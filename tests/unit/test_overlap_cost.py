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
    """No shared experts, one part, as many SMs as links want."""
    rates = dataclasses.replace(H200, dispatch_GBps=1e3, combine_GBps=1e3, sms=64)
    shape = _shape()
    forward, backward = planned(shape, MACHINE, rates, 1, 32)
    transfers = predict(MACHINE, shape.exchange)
    assert forward["dispatch"].seconds == pytest.approx(transfers.dispatch.seconds)
    assert forward["combine"].seconds == pytest.approx(transfers.combine.seconds)
    flops, rows = 2 * 4096 * 8 * 4096 * 7168, 4096 * 8 / 64
    rate = 760e12 * rows / (rows + 115)
    assert forward["up"].seconds == pytest.approx(flops / rate + 8e-6)
    assert forward["down"].seconds == pytest.approx(flops / 2 / rate + 8e-6)
    assert forward["activation"].seconds == pytest.approx(4096 * 8 * 3 * 2048 * 2 / 4143e9)
    total = sum(stage.seconds for stage in forward.stages)
    assert forward.plan().seconds == pytest.approx(total)  # nothing lies beside anything
    rate = 720e12 * rows / (rows + 200)
    assert backward["up weights"].seconds == pytest.approx(flops / rate + 8e-6)
    # On half of the SMs, as gradients travel home meanwhile.
    assert backward["down weights"].seconds == pytest.approx((flops / 2 / rate + 8e-6) * 2)
    spans = {span.name: span for span in backward.plan().spans}
    assert spans["down weights"].begin == pytest.approx(spans["home"].begin)


def test_transfers_that_sms_hold() -> None:
    rates = dataclasses.replace(H200, dispatch_GBps=1.0, combine_GBps=2.0)
    shape = _shape()
    bytes_of_rows = 4096 * 8 * 7168 * 2
    forward, _ = planned(shape, MACHINE, rates, 1, 16)
    fixed = (MACHINE.dispatch_fixed_us * 1e-6, MACHINE.combine_fixed_us * 1e-6)
    assert forward["dispatch"].seconds == pytest.approx(bytes_of_rows / 16e9 + fixed[0])
    assert forward["combine"].seconds == pytest.approx(bytes_of_rows / 32e9 + fixed[1])
    forward, _ = planned(shape, MACHINE, rates, 2, 16)
    there = part_shares(shape.exchange, 2)
    more = 5000e-6 / 16
    assert forward["dispatch 1"].seconds == pytest.approx(bytes_of_rows / 16e9 * there[1] + more)
    # Half of a combine's work, the sums at home, comes with the last part.
    assert forward["combine 0"].seconds == pytest.approx(bytes_of_rows / 64e9 * there[1] + more)
    assert forward["combine 1"].seconds == pytest.approx(bytes_of_rows / 64e9 * (1 + there[0]) + fixed[1])


def test_many_sms_have_nothing_beside_them() -> None:
    few, many = (planned(_shape(), MACHINE, H200, 2, sms) for sms in (24, 99))
    assert few[0]["dispatch 1"].seconds > many[0]["dispatch 1"].seconds
    assert few[0]["up 0"].seconds == pytest.approx(many[0]["up 0"].seconds * 132 / 108)
    for schedule in many:
        timeline = schedule.plan()
        assert timeline.seconds == pytest.approx(sum(stage.seconds for stage in schedule.stages))
    assert few[1].plan().seconds < sum(stage.seconds for stage in few[1].stages)


@pytest.mark.parametrize("model", FFN)
def test_parts_hide_more_and_more(model: str) -> None:
    """Where finding their rows costs nothing."""
    shape = _shape(model)
    rates = dataclasses.replace(H200, part_us=1e-9)
    exposed = []
    for parts in (1, 2, 4):
        timelines = [schedule.plan() for schedule in planned(shape, MACHINE, rates, parts, 32)]
        exposed.append(sum(timeline.exposed_seconds for timeline in timelines))
    assert all(a > b for a, b in itertools.pairwise(exposed))


def test_choices() -> None:
    two_nodes = Shape(nodes=2, ranks_per_node=8, tokens=4096, hidden=7168, top_k=8, experts=256)
    large, small = choose(LayerShape(two_nodes, ffn=2048), MACHINE, H200), choose(_shape(), MACHINE, H200)
    assert large.parts > 1 and small.parts == 1
    assert choose(LayerShape(two_nodes, ffn=2048), MACHINE, H200, most_parts=1).parts == 1
    for parts, sms in itertools.product((1, 3), (16, 64, 99)):
        schedules = planned(LayerShape(two_nodes, ffn=2048), MACHINE, H200, parts, sms)
        assert large.seconds <= sum(schedule.plan().seconds for schedule in schedules)
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
