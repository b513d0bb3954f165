"""MoELayer on 1 to 4 ranks equals loops over tokens and experts: outputs, losses, and all gradients."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.testing import assert_close

from moecomm import Communicator
from moecomm.nn import MoEConfig, MoELayer, OverlapConfig, is_expert_parameter, set_loss_scale
from moecomm.parallel import ParallelFolding
from tests.multirank.catching import refused
from tests.multirank.conftest import Pools
from tests.multirank.moe_cases import (
    SIZES,
    TOKENS,
    Case,
    LayerCase,
    check_ways,
    layer_step,
    reference_step,
    run_layer,
    tokens_of,
    whole,
)
from tests.multirank.on_ranks import on_ranks

CASES = {
    "softmax": Case(),
    "both losses": Case({"aux_loss": "batch", "aux_loss_coef": 0.7, "z_loss_coef": 0.3}),
    "losses, scaled": Case({"aux_loss": "batch", "aux_loss_coef": 0.7, "z_loss_coef": 0.3}, loss_scale=0.25),
    "per sequence, shared experts": Case(
        {"aux_loss": "sequence", "aux_loss_coef": 0.5, "num_shared_experts": 2}, sequences=True
    ),
    "like deepseek-v3": Case(
        {
            "score_function": "sigmoid",
            "normalize_topk": True,
            "scaling_factor": 2.5,
            "num_groups": 4,
            "topk_groups": 2,
            "bias_update_rate": 0.001,
            "num_shared_experts": 1,
            "aux_loss": "sequence",
            "aux_loss_coef": 0.1,
        }
    ),
    "like gpt-oss": Case({"activation": "swiglu_clamped", "bias": True, "router_bias": True}),
    "like qwen2-moe": Case({"pre_softmax": True, "num_shared_experts": 2, "shared_gate": True}),
    "fixed buffers, biases": Case(
        {"capacity_factor": 1.0, "pad_to_capacity": True, "activation": "swiglu_clamped", "bias": True},
        poison_tail=True,
    ),
    "like switch": Case(
        {
            "top_k": 1,
            "pre_softmax": True,
            "capacity_factor": 1.25,
            "drop_policy": "position",
            "activation": "gelu",
        }
    ),
    "drop by weight": Case({"capacity_factor": 0.6, "pre_softmax": True, "z_loss_coef": 0.3}),
    "fixed buffers": Case({"capacity_factor": 1.0, "pad_to_capacity": True}, poison_tail=True),
    "fixed buffers, by position": Case(
        {"capacity_factor": 0.8, "pad_to_capacity": True, "drop_policy": "position", "activation": "gelu"},
        poison_tail=True,
    ),
    "balanced by force": Case({"force_balanced": True, "top_k": 4}),
    "all experts": Case({"top_k": 12}),
    "recomputed": Case({"aux_loss": "batch", "aux_loss_coef": 0.7, "bias_update_rate": 0.1}, reentrant=False),
    "recomputed, reentrant": Case(
        {"aux_loss": "batch", "aux_loss_coef": 0.7, "bias_update_rate": 0.1}, reentrant=True
    ),
    "recomputed, fixed buffers": Case({"capacity_factor": 1.0, "pad_to_capacity": True}, reentrant=False),
}
FIXED = {"capacity_factor": 2.0, "pad_to_capacity": True}
MOST = {
    1: ("softmax", "like gpt-oss", "fixed buffers", "like switch", "recomputed"),
    2: ("fixed buffers, by position",),
    4: ("like deepseek-v3",),
}
"""Of the other numbers of ranks, cases with the most options."""
LOW_PRECISION = ("per sequence, shared experts", "fixed buffers")


IN_EVERY_WAY = (
    "softmax",
    "like deepseek-v3",
    "like gpt-oss",
    "like qwen2-moe",
    "like switch",
    "fixed buffers",
    "fixed buffers, biases",
    "drop by weight",
    "recomputed",
)


def in_every_way(name: str, dtype: torch.dtype, size: int, seed: int, **options: Any) -> LayerCase:
    """The case with a name of IN_EVERY_WAY."""
    case = CASES[name]
    return LayerCase(
        tuple(TOKENS[size]),
        seed,
        dtype,
        {"num_shared_experts": 0, **case.options, **options},
        reentrant=case.reentrant,
        poison_tail=case.poison_tail,
    )


def assert_step_matches(results: list[dict[str, Any]], want: dict[str, Any], bound: float) -> None:
    """Asserts that every number is within `bound` times the largest one of its tensor."""

    def near(got: torch.Tensor, ref: torch.Tensor, what: str) -> None:
        scale = max(ref.abs().max().item(), 1e-3) if ref.numel() else 0.0
        assert_close(got, ref, rtol=0, atol=bound * scale, msg=lambda text: f"{what}: {text}")

    for rank, result in enumerate(results):
        assert result["load"] == want["load"][rank]
        assert result["losses"] == pytest.approx(want["losses"][rank], rel=max(bound, 1e-12))
        near(result["y"], want["y"][rank], f"y of rank {rank}")
        near(result["x.grad"], want["x.grad"][rank], f"x.grad of rank {rank}")
        for name, grad in result["grads"].items():
            if name not in result["experts"]:
                assert torch.equal(grad, results[0]["grads"][name]), f"{name}.grad differs on rank {rank}"
    for name, grad in whole(results, "grads").items():
        near(grad, want["grads"][name], f"{name}.grad")


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 3) for name in CASES), *((name, n) for n in MOST for name in MOST[n])]
)
def test_equals_dense_reference(name: str, ranks: int, pool: Pools, seed: int) -> None:
    case = CASES[name]
    results = pool(ranks)(layer_step, case, seed)
    assert_step_matches(results, reference_step(results, case, seed), 1e-10)
    for result in results:
        if result["counted"] is not None:
            assert result["counted"] == result["load"], "a step is counted once, however often it is computed"


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        *((name, torch.bfloat16, 3) for name in IN_EVERY_WAY),
        *((name, torch.float32, 1) for name in ("softmax", "like gpt-oss", "fixed buffers")),
        *((name, torch.float64, 2) for name in ("softmax", "like qwen2-moe")),
    ],
)
def test_every_way_gives_the_same(pool: Pools, name: str, dtype: torch.dtype, size: int, seed: int) -> None:
    assert pool(size)(check_ways, in_every_way(name, dtype, size, seed)) == [[]] * size


@on_ranks(2)
def test_what_needs_no_gradients(rank: int, world_size: int, seed: int) -> None:
    """Whatever needs no gradient gets none, and the rest what it gets in order."""
    torch.manual_seed(seed)
    config = MoEConfig(**SIZES, num_shared_experts=1, shared_gate=True, dtype=torch.float64)
    layer = MoELayer(config, max_tokens=8).double()
    parameters = dict(layer.named_parameters())
    values = torch.randn(5, 16, dtype=torch.float64)
    for fixed in (
        ("router.weight",),
        ("experts.w_in",),
        ("experts.w_out", "shared.w_in"),
        ("experts.w_in", "experts.w_out", "router.weight"),
        ("shared.w_out", "x"),
        ("shared.w_gate",),
        ("router.weight", "x", "shared.w_in", "shared.w_out"),
    ):
        found = []
        for overlap in (False, True):
            layer.overlap = OverlapConfig(overlap=overlap)
            layer.zero_grad()
            for name, parameter in parameters.items():
                parameter.requires_grad_(name not in fixed)
            x = values.clone().requires_grad_("x" not in fixed)
            layer(x).square().sum().backward()
            found.append({"x": x.grad, **{name: parameter.grad for name, parameter in parameters.items()}})
        for name, grad in found[0].items():
            assert (grad is None) == (name in fixed) == (found[1][name] is None), (name, fixed)
            if grad is not None:
                assert_close(found[1][name], grad, rtol=1e-9, atol=1e-9)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    assert not layer(values).requires_grad


@pytest.mark.parametrize("size", [1, 2])
@on_ranks("size")
def test_timelines(rank: int, world_size: int, seed: int) -> None:
    """Every stage is there, and begins when those have ended that it waits for."""
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
    case = LayerCase((200,) * world_size, seed)
    layer = case.layer()
    x, grad = case.input_here(rank)
    run_layer(layer, x, grad, {})
    assert layer.timelines() == {}
    layer.overlap = replace(layer.overlap, record=True)
    run_layer(layer, x, grad, {"keep": "nothing"})
    found = layer.timelines()
    for timeline in found.values():
        assert 0 < timeline.exposed_seconds <= timeline.seconds
    layer.comm.close()
    found = {name: {span.name: (span.begin, span.end) for span in each.spans} for name, each in found.items()}
    for name, spans in found.items():
        assert spans.keys() == names[name]
        for stage, (begin, end) in spans.items():
            assert 0 <= begin <= end
            assert all(spans[other][1] <= begin + 1e-6 for other in after.get(stage, ()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_repeats_the_jitter(reentrant: bool, pool: Pools, seed: int) -> None:
    case = Case({"jitter": 0.3, "z_loss_coef": 0.1})
    plain = pool(3)(layer_step, case, seed)
    recomputed = pool(3)(layer_step, replace(case, reentrant=reentrant), seed)
    for a, b in zip(plain, recomputed, strict=True):
        assert a["losses"] == b["losses"]
        assert torch.equal(a["x.grad"], b["x.grad"])
        assert all(torch.equal(grad, b["grads"][name]) for name, grad in a["grads"].items())


@pytest.mark.parametrize("name", LOW_PRECISION)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    # Each of a handful of roundings to dtype (rows, inner, activation, expert, partial sum, result), forward
    # and backward, is at most 2^-8, 2^-11, 2^-24 of the number; in float32 those of the sums count as well.
    [(torch.bfloat16, 8 * 2**-8), (torch.float16, 8 * 2**-11), (torch.float32, 32 * 2**-24)],
)
def test_low_precision_stays_within_its_rounding(
    name: str, dtype: torch.dtype, bound: float, pool: Pools, seed: int
) -> None:
    case = CASES[name].with_dtype(dtype)
    results = pool(3)(layer_step, case, seed)
    assert_step_matches(results, reference_step(results, case, seed), bound)


@on_ranks(3)
def test_layers_share_a_communicator_and_accumulate(rank: int, world_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    options = {"aux_loss": "batch", "aux_loss_coef": 0.7, "bias_update_rate": 0.1}
    config = MoEConfig(**SIZES, **options, dtype=torch.float64)
    with Communicator(num_experts=12, hidden=16, top_k=3, max_tokens=16, dtype=torch.float64) as comm:
        layers = [MoELayer(config, comm), MoELayer(config, comm)]
        model = torch.nn.Sequential(*layers)
        x, factor = tokens_of(rank, TOKENS[world_size][rank], torch.float64, seed)

        def backward(times: int) -> list[torch.Tensor]:
            model.zero_grad()
            set_loss_scale(model, 1 / times)
            for _ in range(times):
                ((model(x) * factor).sum() / times).backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        assert_close(backward(3), backward(1), rtol=1e-10, atol=1e-12)
        loads = [layer.router.load_E.tolist() for layer in layers if layer.router.load_E is not None]
        assert loads == [(4 * layer.last_tokens_per_expert).tolist() for layer in layers]
        model.eval()
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
        assert loads == [layer.router.load_E.tolist() for layer in layers if layer.router.load_E is not None]


@on_ranks(2)
def test_input_of_another_dtype(rank: int, world_size: int, seed: int) -> None:
    """float32 in and out of a bfloat16 layer, and inside autocast."""
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SIZES, dtype=torch.bfloat16, num_shared_experts=1), max_tokens=8)
    x = torch.randn(2, 3, 16)
    y = layer(x)
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), y)
    assert layer(torch.empty(0, 3, 16)).shape == (0, 3, 16)


@on_ranks(3)
def test_a_bad_input_on_one_rank_is_refused_on_all(rank: int, world_size: int) -> None:
    layer = MoELayer(MoEConfig(**SIZES), max_tokens=8)
    good = torch.zeros(4, 16)
    for text, bad in {
        "x has shape (4, 15)": (torch.zeros(4, 15), None),
        "x has shape (2, 4, 15)": (torch.zeros(2, 4, 15), None),
        "x has shape (16,)": (torch.zeros(16), None),
        "x has 9 tokens": (torch.zeros(9, 16), None),
        "x is str": ("tokens", None),
        "seq_len is 3, must divide": (good, 3),
    }.items():
        call = partial(layer, *(bad if rank == 1 else (good, None)))
        refused(call, begins=text if rank == 1 else f"rank 1: {text}")
        assert layer(torch.ones(4, 16)).isfinite().all()


@on_ranks(2)
def test_a_layer_that_one_rank_cannot_build_is_refused_on_all(rank: int, world_size: int) -> None:
    """Long before the others' deadline. The next layer can be built."""
    config, folding = MoEConfig(**SIZES), ParallelFolding(world_size=2, ep=2)
    own = {"experts": Linear(16, 16), "overlap": OverlapConfig(keep="rows")}
    for guilty in (0, 1):
        for text, bad in {
            "config is a NoneType": {"config": None},
            "max_tokens is None": {"max_tokens": None},
            "loss_group is 3": {"loss_group": 3},
            "loss_group is 4": {"loss_group": 4, "config": replace(config, aux_loss="global")},
            "overlap is True": {"overlap": True},
            "experts is int": {"experts": 3},
            "OverlapConfig.keep is 'rows'": own,
            "group (or mesh) is given by folding": {"folding": folding, "group": dist.group.WORLD},
            "num_experts is 9": {"folding": folding, "config": replace(config, num_experts=9)},
        }.items():
            others = {"folding": folding} if "folding" in bad else {}
            given: Any = {"config": config, "max_tokens": 8, **(bad if rank == guilty else others)}
            refused(lambda: MoELayer(**given), begins=text if rank == guilty else f"rank {guilty}: {text}")  # noqa: B023
    assert MoELayer(config, max_tokens=8)(torch.ones(4, 16)).isfinite().all()


def test_layer_and_communicator_must_agree() -> None:
    config = MoEConfig(**SIZES)
    with Communicator(num_experts=12, hidden=16, top_k=2, max_tokens=4, dtype=torch.float32) as comm:
        refused(lambda: MoELayer(config, comm), "comm.top_k is 2, must be the config's top_k=3")
        refused(lambda: MoELayer(config, comm, max_tokens=4), "must be None when comm is passed")
    refused(lambda: MoELayer(config), "max_tokens is None")


def test_a_layer_takes_an_overlap_config_as_a_whole() -> None:
    build, says = partial(MoELayer, MoEConfig(**SIZES), max_tokens=4), "must be an OverlapConfig"
    refused(lambda: build(overlap=False), says, begins="overlap is False, ")  # type: ignore[arg-type]
    layer = build(overlap=OverlapConfig(keep="rows"))
    with layer.comm:
        layer.overlap = replace(layer.overlap, record=True)
        layer(torch.ones(2, 16, device=layer.comm.device))
        assert "forward" in layer.timelines()
        for value in (True, {"keep": "rows"}):
            refused(partial(setattr, layer, "overlap", value), says, begins="overlap is ")
        assert layer.overlap == OverlapConfig(keep="rows", record=True)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"overlap": 1}, "True or False"),
        ({"keep": "row"}, "'all', 'rows' or 'nothing'"),
        ({"keep": None}, "'all', 'rows' or 'nothing'"),
        ({"defer_weights": None}, "True or False"),
        ({"record": "yes"}, "True or False"),
        ({"keep": "rows", "overlap": False}, "'all' with overlap=False"),
        ({"keep_shared": False, "overlap": False}, "True with overlap=False"),
        ({"defer_weights": True, "overlap": False}, "False with overlap=False"),
        ({"record": True, "overlap": False}, "False with overlap=False"),
    ],
    ids=str,
)
def test_an_overlap_config_checks_itself(fields: dict[str, Any], bound: str) -> None:
    name = next(iter(fields))
    begins = f"OverlapConfig.{name} is {fields[name]!r}, must be {bound}"
    refused(lambda: OverlapConfig(**fields), begins=begins)


def test_a_copy_shares_the_communicator_and_nothing_else(seed: int) -> None:
    torch.manual_seed(seed)
    layer = MoELayer(MoEConfig(**SIZES, bias_update_rate=0.1), max_tokens=8)
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16), MoELayer(layer.config, layer.comm))
    twin = copy.deepcopy(model)
    x = torch.randn(8, 16)
    assert torch.equal(twin(x), model(x))
    assert twin[0].comm is twin[2].comm is layer.comm
    assert all(is_expert_parameter(parameter) for parameter in twin[0].experts.parameters())
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert ours.isdisjoint(tensor.data_ptr() for tensor in twin.state_dict().values())
