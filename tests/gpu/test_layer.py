"""MoELayer on GPUs: the same bits in whatever way it runs, also in a graph; nearly the numbers of the CPU; no
hidden wait of the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moecomm.nn import keep_plans
from tests.gpu import harness
from tests.gpu.conftest import Pools

WAYS: dict[str, dict[str, Any]] = {
    "in order": {"overlap": False},
    "overlapped": {},
    "rows kept": {"keep": "rows"},
    "nothing kept": {"keep": "nothing"},
    "weights later": {"defer_weights": True},
    "home on eight SMs": {"beside_sms": 8},
    "home on two SMs, rows kept": {"beside_sms": 2, "keep": "rows"},
    "home before the weights": {"beside_sms": 0},
    "nothing kept, weights later": {"keep": "nothing", "defer_weights": True},
}


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]
    seed: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    num_sms: int | None = None
    """Of the communicator. With few of them products leave these alone."""

    @property
    def config(self) -> Any:
        from moecomm.nn import MoEConfig

        sizes = {"hidden": 256, "ffn_hidden": 192, "num_experts": 12, "top_k": 3, "init_std": 0.05}
        return MoEConfig(**{**sizes, "dtype": self.dtype, "num_shared_experts": 1, **self.options})

    def layer(self, device: torch.device | str | None = None) -> Any:
        from moecomm import Communicator
        from moecomm.nn import MoELayer

        torch.manual_seed(self.seed)
        config = self.config
        comm = Communicator(
            num_experts=config.num_experts,
            hidden=config.hidden,
            top_k=config.top_k,
            max_tokens=max(max(self.tokens), 1),
            dtype=config.dtype,
            device=harness.device() if device is None else device,
            num_sms=self.num_sms,
            timeout=harness.COMM_TIMEOUT_S,
        )
        return MoELayer(config, comm)

    def input(self, rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the gradient of y, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + step * 10 + rank)
        pair = torch.randn(2, self.tokens[rank], self.config.hidden, generator=generator)
        return pair[0].to(self.dtype), pair[1].to(self.dtype)


def _run(layer: Any, x: torch.Tensor, grad: torch.Tensor, way: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Runs one forward and backward; returns the output and all gradients."""
    settings = {"overlap": True, "keep": "all", "defer_weights": False, "beside_sms": None, **way}
    for name, value in settings.items():
        setattr(layer, name, value)
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    layer.backward_weights()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def _differences(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], bound: float, what: str
) -> list[str]:
    """Lists values that differ: the output and gradients of experts by a bit, others by more than `bound`.

    Autograd chooses the order in which gradients from several places are summed.
    """
    problems = []
    for name, value in left.items():
        other = right[name]
        if name == "y" or name.startswith(("experts.", "shared.")):
            good = torch.equal(value, other)
        else:
            scale = float(value.float().abs().max()) if value.numel() else 0.0
            good = bool(((value - other).float().abs() <= bound * scale).all())
        if not good:
            problems.append(f"{what}: {name}")
    return problems


def change_weights(layer: Any, factor: float) -> None:
    """Changes the experts' weights in place, so that what is cached of them has to be made again."""
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.mul_(factor)


def check_ways(rank: int, world_size: int, case: Case) -> list[str]:
    layer = case.layer()
    bound = 8 * torch.finfo(case.dtype).eps
    problems = []
    for step in range(3):
        x, grad = (each.to(harness.device()) for each in case.input(rank, step))
        found = {name: _run(layer, x, grad, way) for name, way in WAYS.items()}
        for name, each in found.items():
            problems += _differences(found["in order"], each, bound, f"rank {rank}, step {step}, {name}")
        again = _run(layer, x, grad, {})
        problems += _differences(found["overlapped"], again, bound, f"rank {rank}, step {step}, again")
        change_weights(layer, 1.5)
    harness.synchronize()
    layer.comm.close()
    return problems


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["dropless", "capacity", "gelu, no shared experts", "few SMs"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_way_gives_the_same(pool: Pools, size: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    options: dict[str, dict[str, Any]] = {
        "dropless": {},
        "capacity": {"capacity_factor": 1.5, "pad_to_capacity": True},
        "gelu, no shared experts": {"activation": "gelu", "num_shared_experts": 0},
        "few SMs": {},
    }
    num_sms = 8 if kind == "few SMs" else None
    case = Case((300, 0, 257, 64)[:size], seed, dtype, options[kind], num_sms)
    harness.assert_none(pool(size)(check_ways, case))


def _against_cpu(rank: int, world_size: int, case: Case) -> None:
    layer, on_cpu = case.layer(), case.layer("cpu")
    for ours, theirs in zip(layer.parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    x, grad = case.input(rank)
    want = _run(on_cpu, x, grad, {})
    got = _run(layer, x.to(harness.device()), grad.to(harness.device()), {})
    # A handful of roundings of each number, and sums of up to some hundred of them in another order.
    bound = 32 * torch.finfo(case.dtype).eps
    for name, value in want.items():
        scale = float(value.abs().max()) if value.numel() else 1.0
        assert_close(got[name].cpu(), value, rtol=0, atol=bound * scale, msg=f"{name} differs")
    layer.comm.close()
    on_cpu.comm.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_against_the_cpu(pool: Pools, size: int, seed: int) -> None:
    """The layer gives the same on GPU and CPU in float32, where both choose the same experts."""
    pool(size)(_against_cpu, Case((70, 0, 40, 33)[:size], seed, torch.float32))


def check_waits(rank: int, world_size: int, case: Case) -> None:
    layer = case.layer()
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    for way in WAYS.values():
        _run(layer, x, grad, way)  # what is set up once may wait
    for way in WAYS.values():
        layer.experts.forget_quantized()
        torch.cuda.set_sync_debug_mode("error")
        _run(layer, x, grad, way)
        torch.cuda.set_sync_debug_mode("default")
    layer.comm.close()


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2])
def test_the_host_waits_for_nothing_with_a_capacity(pool: Pools, size: int, seed: int) -> None:
    case = Case((96,) * size, seed, options={"capacity_factor": 2.0, "pad_to_capacity": True})
    pool(size)(check_waits, case)


def check_graph(rank: int, world_size: int, case: Case) -> list[str]:
    """Checks a graph of a forward and backward, with other rows and weights in each replay."""
    layer = case.layer()
    eager = copy.deepcopy(layer)
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    x.requires_grad_()

    def step() -> torch.Tensor:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        y = layer(x)
        y.backward(grad)
        return y

    harness.warm_up(step, times=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    problems = []
    for number in range(5):
        new_x, new_grad = (each.to(harness.device()) for each in case.input(rank, number))
        with torch.no_grad():
            x.copy_(new_x)
            grad.copy_(new_grad)
        for each in (layer, eager):
            change_weights(each, 1 + number / 4)
        graph.replay()
        grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        got = {"y": y.detach().clone(), "x": x.grad.clone(), **grads}
        want = _run(eager, new_x, new_grad, {})
        problems += _differences(want, got, 8 * torch.finfo(case.dtype).eps, f"rank {rank}, replay {number}")
    layer.comm.check()
    torch.cuda.synchronize()
    del graph
    layer.comm.close()
    return problems


@pytest.mark.usefixtures("cuda_only")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_backward_in_one_graph(pool: Pools, size: int, seed: int) -> None:
    case = Case((128,) * size, seed, options={"capacity_factor": 2.0, "pad_to_capacity": True})
    harness.assert_none(pool(size)(check_graph, case))


def _timelines(rank: int, world_size: int, case: Case) -> dict[str, list[tuple[str, float, float]]]:
    layer = case.layer()
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    _run(layer, x, grad, {})
    layer.record = True
    _run(layer, x, grad, {"keep": "nothing"})
    found = {
        name: [(span.name, span.begin, span.end) for span in timeline.spans]
        for name, timeline in layer.timelines().items()
    }
    layer.comm.close()
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_timelines(pool: Pools, size: int, seed: int) -> None:
    """Stages of one stream run one after another; a product runs after the transfer that it needs."""
    after = {
        "fc1": ("dispatch_receive",),
        "combine": ("fc2",),
        "fc1_again": ("dispatch_grad", "shared_grad"),
        "fc2_dgrad": ("fc1_again",),
        "combine_grad": ("fc1_dgrad",),
        "fc1_wgrad": ("fc1_dgrad",),
    }
    names = {
        "forward": {"dispatch_send", "shared", "dispatch_receive", "fc1", "fc2", "combine"},
        "backward": {
            *("dispatch_grad", "shared_grad", "fc1_again", "fc2_dgrad", "fc2_wgrad"),
            *("fc1_dgrad", "combine_grad", "fc1_wgrad"),
        },
    }
    for found in pool(size)(_timelines, Case((200,) * size, seed)):
        for name, spans in found.items():
            times = {span: (begin, end) for span, begin, end in spans}
            assert times.keys() == names[name]
            for span, (begin, end) in times.items():
                assert 0 <= begin <= end
                assert all(times[other][1] <= begin + 1e-6 for other in after.get(span, ()))


def _checkpointed(rank: int, world_size: int, case: Case) -> list[str]:
    """Computed again with the plans of the first time."""
    layer = case.layer()
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    problems = []
    for way in ({}, {"keep": "rows"}, {"keep": "nothing"}):
        want = _run(layer, x, grad, way)
        layer.zero_grad()
        inside = x.detach().clone().requires_grad_()
        y = checkpoint(layer, inside, use_reentrant=False, context_fn=keep_plans)
        layer.comm.reset_stats()
        y.backward(grad)
        harness.synchronize()
        grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
        got = {"y": y.detach(), "x": inside.grad, **grads}
        problems += _differences(want, got, 8 * torch.finfo(case.dtype).eps, f"rank {rank}, {way}")
        stats = layer.comm.stats()
        if stats["plans_made"] or stats["plans_reused"] or stats["combine_calls"] != 1:
            problems.append(f"rank {rank}, {way}: {stats}")
    layer.comm.close()
    return problems


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 2.0, "pad_to_capacity": True}], ids=["", "fixed"]
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_checkpoints_keep_plans(pool: Pools, size: int, options: dict[str, Any], seed: int) -> None:
    harness.assert_none(pool(size)(_checkpointed, Case((200, 0, 77, 256)[:size], seed, options=options)))


def _fails(rank: int, world_size: int, case: Case) -> list[str]:
    """An error between the stages of a forward, on all ranks; the layer goes on."""
    layer = case.layer()
    x, grad = (each.to(harness.device()) for each in case.input(rank))
    want = _run(layer, x, grad, {})
    shared: Callable[..., Any] = layer.shared.w_in

    class Broken(torch.nn.Parameter):
        def __rmatmul__(self, other: Any) -> Any:
            raise ZeroDivisionError("in the middle")

    layer.shared.w_in = Broken(shared.detach())
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        layer(x)
    layer.shared.w_in = shared
    problems = _differences(want, _run(layer, x, grad, {}), 8 * torch.finfo(case.dtype).eps, f"rank {rank}")
    layer.comm.close()
    return problems


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_between_stages_leaves_the_layer_usable(pool: Pools, size: int, seed: int) -> None:
    """The dispatch that was under way is given up."""
    harness.assert_none(pool(size)(_fails, Case((90,) * size, seed)))
