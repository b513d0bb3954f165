"""MoELayer on GPUs: the same bits in whatever way it runs, also in a graph; nearly the numbers of the CPU; no
hidden wait of the host."""

import copy
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moecomm.errors import MismatchedArguments, MoecommError
from moecomm.nn import MoELayer, keep_plans, sync_gradients
from tests.gpu import harness
from tests.gpu.conftest import Pools
from tests.multirank.moe_cases import WAYS, LayerCase, change_weights, check_ways, differences, run_layer
from tests.multirank.on_ranks import on_ranks
from tests.multirank.test_faults import FreshRanks
from tests.multirank.test_moe_layer import test_timelines  # noqa: F401
from tests.multirank.test_traps import drifted_under_ddp

KINDS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"capacity_factor": 1.5, "pad_to_capacity": True},
    "gelu, no shared experts": {"activation": "gelu", "num_shared_experts": 0},
    "few SMs": {},
}
FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dropless", "capacity", "gelu, no shared experts", "few SMs"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_way_gives_the_same(pool: Pools, size: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    num_sms = 8 if kind == "few SMs" else None
    case = LayerCase((300, 0, 257, 64)[:size], seed, dtype, KINDS[kind], num_sms)
    harness.assert_none(pool(size)(check_ways, case))


@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_against_the_cpu(rank: int, world_size: int, seed: int) -> None:
    """The layer gives the same on GPU and CPU in float32, where both choose the same experts."""
    case = LayerCase((70, 0, 40, 33)[:world_size], seed, torch.float32)
    layer, on_cpu = case.layer(), case.layer("cpu")
    for ours, theirs in zip(layer.parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    x, grad = case.input(rank)
    want = run_layer(on_cpu, x, grad, {})
    got = run_layer(layer, x.to(harness.device()), grad.to(harness.device()), {})
    # A handful of roundings of each number, and sums of up to some hundred of them in another order.
    bound = 32 * torch.finfo(case.dtype).eps
    for name, value in want.items():
        scale = float(value.abs().max()) if value.numel() else 1.0
        assert_close(got[name].cpu(), value, rtol=0, atol=bound * scale, msg=f"{name} differs")
    layer.comm.close()
    on_cpu.comm.close()


def check_waits(rank: int, world_size: int, case: LayerCase) -> None:
    layer = case.layer()
    x, grad = case.input_here(rank)
    for way in WAYS.values():
        run_layer(layer, x, grad, way)  # what is set up once may wait
    for way in WAYS.values():
        torch.cuda.set_sync_debug_mode("error")
        run_layer(layer, x, grad, way)
        torch.cuda.set_sync_debug_mode("default")
    layer.comm.close()


def _left_alone(rank: int, world_size: int, how: str) -> tuple[str, float, float]:
    case = LayerCase((2000,) * world_size, 0, options={"num_shared_experts": 0})
    sizes = {name: getattr(case.config, name) for name in ("num_experts", "hidden", "top_k", "dtype")}
    layer = MoELayer(case.config, harness.communicator(**sizes, max_tokens=2000, timeout=4.0))
    x, grad = case.input_here(rank)
    for _ in range(3):
        run_layer(layer, x, grad, WAYS["overlapped"])
    torch.cuda.synchronize()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * layer.comm.timeout)
        return "", 0.0, 0.0
    begin = time.monotonic()
    try:
        layer(x)
        error = "none"
    except MoecommError as problem:
        error = type(problem).__name__
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    left = float(torch.ones(1000, device=harness.device()).sum())  # the context is usable
    return error, seconds, left


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize(("how", "error"), [("killed", "PeerLost"), ("away", "PeerTimeout")])
def test_a_rank_that_does_not_come_to_a_forward(fresh_ranks: FreshRanks, how: str, error: str) -> None:
    found = fresh_ranks(2, _left_alone, how, may_die=[1] if how == "killed" else [])
    assert found[0][0] == error and found[0][2] == 1000.0, found
    assert found[0][1] < 6, found


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_for_nothing_with_a_capacity(pool: Pools, size: int, seed: int) -> None:
    case = LayerCase((96,) * size, seed, options=FIXED)
    pool(size)(check_waits, case)


def check_graph(rank: int, world_size: int, case: LayerCase) -> list[str]:
    """Checks a graph of a forward and backward, with other rows and weights in each replay."""
    layer = case.layer()
    eager = copy.deepcopy(layer)
    x, grad = case.input_here(rank)
    x.requires_grad_()

    def step() -> torch.Tensor:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        y = layer(x)
        y.backward(grad)
        return y

    graph, y = harness.captured(step, warm_ups=3)
    problems = []
    for number in range(5):
        new_x, new_grad = case.input_here(rank, number)
        with torch.no_grad():
            x.copy_(new_x)
            grad.copy_(new_grad)
        for each in (layer, eager):
            change_weights(each, 1 + number / 4)
        graph.replay()
        grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        got = {"y": y.detach().clone(), "x": x.grad.clone(), **grads}
        want = run_layer(eager, new_x, new_grad, {})
        problems += differences(got, want, f"rank {rank}, replay {number}")
    layer.comm.check()
    torch.cuda.synchronize()
    del graph
    layer.comm.close()
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_backward_in_one_graph(pool: Pools, size: int, seed: int) -> None:
    case = LayerCase((128,) * size, seed, options=FIXED)
    harness.assert_none(pool(size)(check_graph, case))


@pytest.mark.parametrize("options", [{}, FIXED], ids=["", "fixed"])
@pytest.mark.parametrize("size", [1, 2, 4])
@on_ranks("size")
def test_checkpoints_keep_plans(rank: int, world_size: int, options: dict[str, Any], seed: int) -> list[str]:
    """Computed again with the plans of the first time."""
    case = LayerCase((200, 0, 77, 256)[:world_size], seed, options=options)
    layer = case.layer()
    x, grad = case.input_here(rank)
    problems = []
    for way in ({}, {"keep": "rows"}, {"keep": "nothing"}):
        want = run_layer(layer, x, grad, way)
        layer.zero_grad()
        inside = x.detach().clone().requires_grad_()
        y = checkpoint(layer, inside, use_reentrant=False, context_fn=keep_plans(layer))
        layer.comm.reset_stats()
        y.backward(grad)
        harness.synchronize()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        got = {"y": y.detach(), "x": inside.grad, **grads}
        problems += differences(got, want, f"rank {rank}, {way}")
        stats = layer.comm.stats()
        assert not stats["plans_made"] and not stats["plans_reused"] and stats["combine_calls"] == 1, stats
    layer.comm.close()
    return problems


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_an_error_between_stages_leaves_the_layer_usable(rank: int, world_size: int, seed: int) -> list[str]:
    """The dispatch that was under way is given up. An error between the stages of a forward, on all ranks;
    the layer goes on."""
    case = LayerCase((90,) * world_size, seed)
    layer = case.layer()
    x, grad = case.input_here(rank)
    want = run_layer(layer, x, grad, {})
    shared: Callable[..., Any] = layer.shared.w_in

    class Broken(torch.nn.Parameter):
        def __rmatmul__(self, other: Any) -> Any:
            raise ZeroDivisionError("in the middle")

    layer.shared.w_in = Broken(shared.detach())
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        layer(x)
    layer.shared.w_in = shared
    problems = differences(want, run_layer(layer, x, grad, {}), f"rank {rank}")
    layer.comm.close()
    return problems


WIDE_SHARED = {"hidden": 1024, "ffn_hidden": 2048, "num_shared_experts": 32}  # some milliseconds of products


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_a_dropless_dispatch_is_received_beside_the_shared_experts(
    rank: int, world_size: int, seed: int
) -> None:
    """The receiving half waits for the rows alone, not for the products that were issued meanwhile."""
    case = LayerCase((4096,) * world_size, seed, options=WIDE_SHARED)
    layer = case.layer()
    x, _ = case.input_here(rank)
    with torch.no_grad():
        layer(x)  # what is loaded at the first call may wait
    layer.overlap = replace(layer.overlap, record=True)
    torch.cuda.synchronize()
    with torch.no_grad():
        layer(x)
    spans = {span.name: span for span in layer.timelines()["forward"].spans}
    assert spans["dispatch_receive"].begin < spans["shared"].end, spans
    layer.comm.close()


@pytest.mark.usefixtures("cuda_only")
@on_ranks(2)
def test_gradients_by_nccl_are_compared_by_hosts(rank: int, world_size: int, seed: int) -> None:
    """The hosts do not wait for GPUs that are at work, and find routers that drifted apart one call late."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    case = LayerCase((64, 48), seed)
    layer, (x, grad) = case.layer(), case.input_here(rank)

    def synchronise(busy: bool = False) -> bool:
        """Returns whether the GPU was still at work afterwards."""
        layer.zero_grad()
        layer(x).backward(grad)
        if busy:
            torch.cuda._sleep(1 << 31)  # a second and more
        done = torch.cuda.current_stream().record_event()
        sync_gradients(layer, group)
        return not done.query()

    synchronise()
    assert synchronise(busy=True)
    torch.cuda.synchronize()
    if rank == 1:
        with torch.no_grad():
            layer.router.weight[0, 0] += 1
    synchronise()
    with pytest.raises(MismatchedArguments, match="a router's weights differ"):
        synchronise()
    dist.broadcast(layer.router.weight.data, 0, group)
    synchronise()
    layer.router.weight.data[0, 0] += rank
    twin = copy.deepcopy(layer)  # of which nothing is known, so that the first call tells
    with pytest.raises(MismatchedArguments, match="a router's weights differ"):
        sync_gradients(twin, group)
    layer.comm.close()
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("how", "least"), [("clip", 2), ("nothing", 69)])
def test_ranks_under_ddp_whose_weights_drift_apart_are_told(
    pool: Pools, how: str, least: int, seed: int
) -> None:
    """Bits of the router reach the host behind the step that they are of."""
    for steps, found in pool(2)(drifted_under_ddp, how, seed):
        assert least <= steps and (found is None) == (how == "nothing")
        assert found is None or (found.name == "MismatchedArguments" and steps < 8)
