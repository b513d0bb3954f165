"""What goes wrong around experts of one's own, parameters that are added to a layer's experts, and hooks: it
is right, or refused, and never silent.
"""

import copy
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.testing import assert_close

from moecomm.nn import (
    GroupedExperts,
    MoEConfig,
    MoELayer,
    OverlapConfig,
    clip_grad_norm,
    fully_shard_experts,
    is_expert_parameter,
    sharded_state,
    sync_gradients,
)
from moecomm.nn.guards import watchers_of
from tests.multirank.catching import catch, refused
from tests.multirank.conftest import own_pool
from tests.multirank.moe_cases import SIZES, groups_of, wrapped
from tests.multirank.moe_cases import LinearThenMoE as Model
from tests.multirank.moe_cases import OwnExperts as Own
from tests.multirank.on_ranks import on_ranks
from tests.ranks import gathered

pool = own_pool()

CONFIG = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64)
EXPERTS, HIDDEN = CONFIG.num_experts, CONFIG.hidden
TOKENS = [5, 0, 7, 4]


def tokens(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(y: Tensor) -> Tensor:
    return (y.square() + y).sum()


def own_model(rank: int, world: int, ep: int, norm: nn.Module | None = None) -> Model:
    torch.manual_seed(0)
    count = EXPERTS // ep
    experts = Own(rank % ep * count, count, norm)
    group = groups_of(rank, world, ep)[0]
    return Model(MoELayer(CONFIG, group=group, max_tokens=max(TOKENS), experts=experts), norm)


def model_of(rank: int, world: int, config: MoEConfig = CONFIG, **layer: Any) -> Model:
    torch.manual_seed(0)
    moe = MoELayer(config, group=groups_of(rank, world, world)[0], max_tokens=max(TOKENS), **layer)
    return Model(moe, dtype=config.dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
    return found


# -- fully_shard around experts of one's own ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("ep", "how"),
    [
        (2, "over all ranks"),
        (2, "the layer"),
        (2, "the experts"),
        (2, "before the layer"),
        (4, "in the wrong order"),
    ],
)
@on_ranks(4)
def test_fully_shard_of_own_experts_is_refused(rank: int, world: int, ep: int, how: str) -> None:
    model = own_model(rank, world, ep)
    if how == "before the layer":
        experts = Own(rank % ep * EXPERTS // ep, EXPERTS // ep)
        fully_shard(experts)
        model.moe = MoELayer(CONFIG, model.moe.comm, experts=experts)
    elif how == "over all ranks":
        fully_shard(model)
    elif how == "the layer":
        fully_shard(model.moe)
    elif how == "the experts":
        fully_shard(model.moe.experts)
    elif how == "in the wrong order":
        fully_shard(model)
        fully_shard_experts(model)  # at EP = world it has nothing to shard
    says = "inner.weight of the experts is sharded over ranks [0, 1, 2, 3] by fully_shard"
    with model.moe.comm:
        refused_mixed(lambda: model(tokens(rank)), rank, ep, says)


def refused_mixed(call: Callable[[], Any], rank: int, ep: int, *says: str) -> None:
    """Asserts that the error of a call says which shards mix which experts, and what to do."""
    first, count = rank % ep * EXPERTS // ep, EXPERTS // ep
    held = f"this rank holds experts {first}..{first + count - 1} of {EXPERTS}"
    refused(call, held, "Call moecomm.nn.fully_shard_experts(model) first", *says)


@on_ranks(2)
def test_own_parameters_that_are_replaced(rank: int, world: int) -> None:
    """Parameters that take the place of others are marked by the next forward."""
    model = own_model(rank, world, world)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with model.moe.comm:
        want = model(tokens(rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_state_dict(state, assign=True)
        assert torch.equal(model(tokens(rank)), want)
        assert is_expert_parameter(model.moe.experts.inner.weight)


# -- fully_shard around experts whose weights are all parametrized -----------------------------------------
class Adapter(nn.Module):
    def __init__(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(shape[0], shape[1], 2, generator=generator).to(dtype) * 0.1)
        self.b = nn.Parameter(torch.randn(shape[0], 2, shape[2], generator=generator).to(dtype) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def parametrized(rank: int, world: int, ep: int, config: MoEConfig = CONFIG) -> Model:
    torch.manual_seed(0)
    moe = MoELayer(config, group=groups_of(rank, world, ep)[0], max_tokens=max(TOKENS))
    model = Model(moe, dtype=config.dtype)
    for name in ("w_in", "w_out"):
        adapter = Adapter(getattr(model.moe.experts, name).shape, config.dtype)
        parametrize.register_parametrization(model.moe.experts, name, adapter)
    return model


@pytest.mark.parametrize(
    ("ep", "how"),
    [
        (2, "over the replicas"),
        (4, "behind a forward"),
        (4, "in a wrapper"),
        (4, "the experts"),
        (4, "an adapter"),
        (4, "in the wrong order"),
        (4, "compiled"),
    ],
)
@on_ranks(4)
def test_fully_shard_of_parametrized_experts_is_refused(rank: int, world: int, ep: int, how: str) -> None:
    """A forward raises, and each of those that come after it by itself."""
    model = parametrized(rank, world, ep)
    call: Callable[..., Any] = model
    if how == "behind a forward":
        model(tokens(rank))
    if how == "in a wrapper":
        model.moe.experts = checkpoint_wrapper(model.moe.experts)
    experts: Any = model.moe.experts
    if how == "over the replicas":
        fully_shard(
            experts, mesh=init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("dp", "ep"))["dp"]
        )
    elif how == "the experts":
        fully_shard(experts)
    elif how == "an adapter":
        fully_shard(experts.parametrizations.w_out[0])
    else:
        fully_shard(model)
    if how == "in the wrong order":
        fully_shard_experts(model)  # at EP = world it has nothing to shard
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(model, backend="eager")
    over = f"[{rank % ep}, {rank % ep + 2}]" if how == "over the replicas" else "[0, 1, 2, 3]"
    takers = (sync_gradients, functools.partial(clip_grad_norm, max_norm=1.0), sharded_state)
    with model.moe.comm:
        for each in (lambda: call(tokens(rank)), *(functools.partial(each, model) for each in takers)):
            refused_mixed(each, rank, ep, "parametrizations.w_", f"is sharded over ranks {over} by")


@on_ranks(2)
def test_fully_shard_of_parametrized_experts_with_main_grad_is_refused(rank: int, world: int) -> None:
    """fully_shard around parametrized experts that are all on each rank."""
    config = dataclasses.replace(CONFIG, dtype=torch.float32, main_grad=True)
    model = parametrized(rank, world, 1, config)
    fully_shard(model)
    with model.moe.comm:
        begins = "main_grad is True, must be False under fully_shard, which has sharded"
        refused(lambda: model(tokens(rank, torch.float32)), begins=begins)


@pytest.mark.parametrize(
    ("make", "ep", "policy"),
    [
        *((own_model, 1, False), (own_model, 2, True), (own_model, 4, True)),
        *((parametrized, 1, True), (parametrized, 2, False), (parametrized, 4, True)),
    ],
)
@on_ranks(4)
def test_experts_that_are_sharded_rightly(
    rank: int, world: int, make: Callable[..., Model], ep: int, policy: bool
) -> None:
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy()} if policy else {}
    plain, model = make(rank, world, ep), make(rank, world, ep)
    wrapped(model, "fsdp", **options)
    with plain.moe.comm, model.moe.comm:
        for _ in range(2):
            loss_of(model(tokens(rank))).backward()
            loss_of(plain(tokens(rank))).backward()
        for each in (plain, model):
            sync_gradients(each)
        assert_close(gradients(model), gradients(plain), rtol=1e-9, atol=1e-9)
        assert_close(clip_grad_norm(model, 1.0), clip_grad_norm(plain, 1.0))
        names = plain.state_dict() if make is own_model else sharded_state(plain)["model"]
        assert sharded_state(model)["model"].keys() == names.keys()


# -- states of experts of one's own ------------------------------------------------------------------------
@on_ranks(2)
def test_a_state_of_another_ranks_own_experts_is_refused(rank: int, world: int) -> None:
    model = own_model(rank, world, world)
    experts = model.moe.experts
    weight = experts.inner.weight
    names = set(model.state_dict())
    assert names == {name for name, _ in model.named_parameters()} | {
        name for name, _ in model.named_buffers()
    }
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    told = gathered(file.getvalue())
    mine, other = (torch.load(io.BytesIO(each)) for each in (told[rank], told[1 - rank]))
    before = weight.detach().clone()
    copied = copy.deepcopy(model)
    for module in (model, copied, pickle.loads(pickle.dumps(experts))):
        part = module is not model and module is not copied
        prefix = "moe.experts."
        wrong, right = other, mine
        if part:
            wrong, right = (
                type(each)((n.removeprefix(prefix), t) for n, t in each.items() if n.startswith(prefix))
                for each in (other, mine)
            )
            for each, whole in ((wrong, other), (right, mine)):
                each._metadata = {"": whole._metadata["moe.experts"]}
        half = EXPERTS // 2
        held = [f"experts {r * half}..{r * half + half - 1} of {EXPERTS}" for r in (1 - rank, rank)]
        begins = f"the state holds {held[0]}, this module {held[1]}"
        refused(functools.partial(module.load_state_dict, wrong), begins=begins)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert str(module.load_state_dict(right)) == "<All keys matched successfully>"
    assert torch.equal(weight, before)

    # A state of an earlier version has no record, and loads.
    old = dict(mine)
    with pytest.warns(UserWarning, match=r"no record in its metadata of which experts moe\.experts holds"):
        assert str(model.load_state_dict(old)) == "<All keys matched successfully>"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is nothing of the experts in it
        model.load_state_dict({"first.bias": mine["first.bias"]}, strict=False)

    # In another layer a module holds what that layer says.
    single = MoELayer(CONFIG, group=groups_of(rank, world, 1)[0], max_tokens=8, experts=Own(0, EXPERTS))
    all_of = single.experts.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single.experts.load_state_dict(dict(all_of))  # every rank has all of them
    again = MoELayer(CONFIG, model.moe.comm, experts=model.moe.experts)
    assert again.state_dict()._metadata["experts"] == model.state_dict()._metadata["moe.experts"]  # type: ignore[attr-defined]
    model.moe.comm.close()
    single.comm.close()


# -- main_grad beside parameters that were added -----------------------------------------------------------
def adapted(rank: int, world: int, main_grad: bool, frozen: bool, overlap: OverlapConfig) -> Model:
    config = MoEConfig(**SIZES, main_grad=main_grad)
    model = model_of(rank, world, config, overlap=overlap)
    for name in ("w_in", "w_out"):
        weight = getattr(model.moe.experts, name)
        weight.requires_grad_(not frozen)
        parametrize.register_parametrization(model.moe.experts, name, Adapter(weight.shape))
    return model


@pytest.mark.parametrize("overlap", [OverlapConfig(), OverlapConfig(overlap=False)], ids=["over", "order"])
@pytest.mark.parametrize("frozen", [True, False])
@on_ranks(2)
def test_adapters_have_a_grad_beside_main_grad(
    rank: int, world: int, frozen: bool, overlap: OverlapConfig
) -> None:
    models = [adapted(rank, world, main, frozen, overlap) for main in (False, True)]
    for model in models:
        with model.moe.comm:
            loss_of(model(tokens(rank, torch.float32))).backward()
            sync_gradients(model)
            norm = clip_grad_norm(model, 1e9)
        if model is models[0]:
            want_norm = norm
    assert_close(norm, want_norm)
    for (name, want), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if not got.requires_grad:
            assert got.grad is None and not hasattr(got, "main_grad"), name
            continue
        in_main = name.endswith("original")
        assert in_main == hasattr(got, "main_grad") and in_main == (got.grad is None), name
        assert_close(got.main_grad if in_main else got.grad, want.grad, msg=name)  # type: ignore[attr-defined]


# -- parameters of experts that are in another place too ---------------------------------------------------
@pytest.mark.parametrize("ep", [2, 1])
@on_ranks(2)
def test_a_parameter_of_experts_and_of_another_module_is_refused(rank: int, world: int, ep: int) -> None:
    """But where all experts are on every rank."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(HIDDEN, dtype=torch.float64)
    model = own_model(rank, world, ep, norm)
    with model.moe.comm:
        loss_of(model(tokens(rank))).backward()
        for take in (sync_gradients, functools.partial(clip_grad_norm, max_norm=1.0)):
            if ep == 1:
                take(model)
            else:
                begins = "moe.experts.norm.weight is the same parameter as norm.weight"
                refused(functools.partial(take, model), begins=begins)


@on_ranks(2)
def test_experts_may_have_a_second_name(rank: int, world: int) -> None:
    model = own_model(rank, world, world)
    model.also = nn.ModuleList([model.moe.experts])
    with model.moe.comm:
        loss_of(model(tokens(rank))).backward()
        sync_gradients(model)


# -- hooks -------------------------------------------------------------------------------------------------
FIXED = {"capacity_factor": 12.0, "pad_to_capacity": True}


@pytest.mark.parametrize("only", [False, True], ids=["all ranks", "rank 0 alone"])
@pytest.mark.parametrize("options", [{}, FIXED], ids=["dropless", "capacity"])
@pytest.mark.parametrize("what", ["experts", "shared"])
@on_ranks(2)
def test_hooks_see_what_a_module_computes(
    rank: int, world: int, what: str, options: dict[str, Any], only: bool
) -> None:
    """Compares what hooks of a module see, the result and the gradients with those of a layer in order.
    `only`: the hooks are on rank 0 alone."""
    options = {**options, "dtype": torch.float64}
    found: dict[str, Any] = {}
    for way in (OverlapConfig(), OverlapConfig(overlap=False)):
        model = model_of(rank, world, MoEConfig(**SIZES, num_shared_experts=1, **options), overlap=way)
        module, seen = getattr(model.moe, what), {}
        if not only or rank == 0:

            def before(_: nn.Module, args: Any, s: dict[str, Any] = seen) -> None:
                s["end"] = args[1][-1] if len(args) > 1 else None  # rows past the last offset are unspecified
                s["input"] = args[0].detach()[: s["end"]]

            def after(_: nn.Module, args: Any, y: Tensor, s: dict[str, Any] = seen) -> None:
                s["output"] = y.detach()[: s["end"]]

            def behind(_: nn.Module, grad_x: Any, grad_y: Any, s: dict[str, Any] = seen) -> None:
                end = s.pop("end")
                s |= {"grad_input": grad_x[0][:end].clone(), "grad_output": grad_y[0][:end].clone()}

            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
            module.register_full_backward_hook(behind)
        with model.moe.comm:
            y = model(tokens(rank))
            loss_of(y).backward()
        result = {"y": y.detach(), **gradients(model)}
        if not only or rank == 0:
            assert seen.keys() == {"input", "output", "grad_input", "grad_output"}
        for name, value in {**seen, **result}.items():
            if way.overlap:
                found[name] = value
            else:
                assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def twice(before: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    return 2 * before(*args, **options)


class Doubled(GroupedExperts):
    def forward(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(*args, **options)


@pytest.mark.parametrize("how", ["hook", "subclass", "method"])
@on_ranks(2)
def test_hooks_and_methods_change_what_they_would_in_order(rank: int, world: int, how: str) -> None:
    results = []
    for way in (OverlapConfig(), OverlapConfig(overlap=False)):
        model = model_of(rank, world, overlap=way)
        layer = model.moe
        if how == "hook":
            layer.shared.register_forward_hook(lambda _, args, y: y * 0)
        elif how == "subclass":
            layer.experts.__class__ = Doubled
        elif how == "method":
            layer.experts.forward = functools.partial(twice, layer.experts.forward)
        with layer.comm:
            results.append(model(tokens(rank)).detach())
    assert_close(*results, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_settings_that_hooks_leave_without_effect_are_refused(rank: int, world: int) -> None:
    """One rank has a hook, and all a setting that has no effect in order."""
    config = MoEConfig(**SIZES, num_shared_experts=1, dtype=torch.float64)
    model = model_of(rank, world, config)
    model.moe.overlap = OverlapConfig(keep="rows")
    hook = model.moe.shared.register_forward_hook(lambda *_: None) if rank == 1 else None
    named = ("shared has a hook (test_settings_", "<locals>.<lambda>), which is to see its own")
    with model.moe.comm:
        refused(lambda: model(tokens(rank)), *named, "OverlapConfig.keep is")
        if hook is not None:
            hook.remove()
        assert model(tokens(rank)).isfinite().all()


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("router forward hook", False),
        ("experts forward pre hook", False),
        ("experts forward hook", True),
        ("shared forward pre hook", True),
        ("shared forward hook", False),
    ],
)
@on_ranks(2)
def test_hooks_that_raise_are_told(rank: int, world: int, what: str, own: bool) -> None:
    """The other rank waits for no deadline, and the communicator goes on. Rank 1 has a hook that raises; all
    ranks use the layer afterwards."""
    model = own_model(rank, world, world) if own else model_of(rank, world)

    def raises(*_: Any) -> None:
        raise KeyError("told")

    with model.moe.comm:
        module, _, when = what.partition(" ")
        register = getattr(model.moe.get_submodule(module), f"register_{when.replace(' ', '_')}")
        hook = register(raises) if rank == 1 else None
        found = catch(lambda: model(tokens(rank)))
        if hook is not None:
            hook.remove()
        for _ in range(2):
            loss_of(model(tokens(rank))).backward()
    assert found is not None and found.name == ("InvalidArgument", "KeyError")[rank]
    assert found.text == ("rank 1: KeyError: 'told'", "'told'")[rank]


@pytest.mark.parametrize("overlap", [True, False], ids=["", "in order"])
@pytest.mark.parametrize(("what", "checkpointed"), [("experts", True), ("shared", False)])
@on_ranks(2)
def test_products_that_raise_are_told(
    rank: int, world: int, what: str, checkpointed: bool, overlap: bool
) -> None:
    """Rank 1 has a weight of another shape. The other rank waits for no deadline, and the communicator goes
    on."""
    model = model_of(rank, world, overlap=OverlapConfig(overlap=overlap))
    module = model.moe.get_submodule(what)

    def call() -> Tensor:
        if not checkpointed:
            return model(tokens(rank))
        y: Tensor = torch.utils.checkpoint.checkpoint(model, tokens(rank), use_reentrant=False)
        return y

    with model.moe.comm:
        right = module.w_out
        if rank == 1:
            module.w_out = nn.Parameter(right.detach()[..., :1, :1].clone())
        found = catch(call)
        module.w_out = right
        for _ in range(2):
            loss_of(call()).backward()
    told = gathered(found)
    ours, theirs = told
    assert theirs is not None and theirs.name in ("RuntimeError", "InvalidArgument")
    kind = "RuntimeError: " if theirs.name == "RuntimeError" else ""
    assert ours is not None and ours.name == "InvalidArgument"
    assert ours.text == f"rank 1: {kind}{theirs.text}"


@on_ranks(2)
def test_hooks_that_gather_weights_leave_the_overlap(rank: int, world: int) -> None:
    """Hooks of FSDP2, and those that make weights ready, leave the layer with its overlap."""
    models = [model_of(rank, world) for _ in range(3)]
    fully_shard_experts(models[0])
    fully_shard_experts(models[1], mp_policy=MixedPrecisionPolicy())
    for model in models[:2]:
        fully_shard(model.moe.shared)
        fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(models[2].moe.experts, "w_in")
    for model in models:
        assert watchers_of(model.moe) is None
        with model.moe.comm:
            loss_of(model(tokens(rank))).backward()
