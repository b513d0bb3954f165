"""The operators that torch.compile sees, on one rank: descriptions, order, and what breaks a graph."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moecomm
from moecomm.autograd import library as operators

SIZES: dict[str, Any] = {"num_experts": 4, "hidden": 8, "top_k": 2, "max_tokens": 9, "dtype": torch.float32}
CAPACITY = 20


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def comm() -> Iterator[moecomm.Communicator]:
    with moecomm.Communicator(**SIZES, device="cpu") as made:
        yield made


@pytest.fixture
def seen(comm: moecomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that the communicator has run."""
    names, native = list[str](), comm._open()
    real = native.run

    def run(name: str, operation: Callable[[], Any]) -> Any:
        names.append(name.removeprefix("moecomm "))
        return real(name, operation)

    monkeypatch.setattr(native, "run", run)
    return names


def _inputs(tokens: int = 5, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids_TK = torch.rand(tokens, 4, generator=generator).topk(2).indices
    ids_TK[:1, 1] = -1
    x_TH, weights_TK = (torch.randn(tokens, width, generator=generator) for width in (8, 2))
    return x_TH.requires_grad_(grad), ids_TK, weights_TK.requires_grad_(grad)


def _layer(comm: moecomm.Communicator, layout: Any = "expert") -> Callable[..., tuple[torch.Tensor, Any]]:
    def layer(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Any:
        out = comm.dispatch(x_TH * 2, ids_TK, weights_TK, layout=layout, capacity=CAPACITY)
        y_TH = comm.combine(out.tokens.sin(), out.handle, weights=out.weights if layout == "expert" else None)
        return y_TH.cos(), out

    return layer


def _compare(comm: moecomm.Communicator, layout: Any, backend: str) -> None:
    layer = _layer(comm, layout)
    compiled = torch.compile(layer, backend=backend, fullgraph=layout == "expert")
    for tokens in (5, 5, 9, 2):
        results = []
        for each in (layer, compiled):
            x_TH, ids_TK, weights_TK = _inputs(tokens, grad=True)
            y_TH, out = each(x_TH, ids_TK, weights_TK)
            y_TH.square().sum().backward()
            results.append((y_TH, x_TH.grad, weights_TK.grad, out))
        torch.testing.assert_close(results[1][:3], results[0][:3])
        eager_out, traced_out = results[0][3], results[1][3]
        for name in ("offsets", "tokens_per_expert", "overflow"):
            assert torch.equal(getattr(traced_out, name), getattr(eager_out, name)), name
        real = int(eager_out.offsets[-1])
        assert torch.equal(traced_out.tokens[:real], eager_out.tokens[:real])
        if layout == "rank":
            assert torch.equal(traced_out.topk_idx[:real], eager_out.topk_idx[:real])
        # A handle from a graph serves outside it.
        again = comm.combine(traced_out.tokens.detach(), traced_out.handle)
        assert torch.equal(again, comm.combine(eager_out.tokens.detach(), eager_out.handle))


def test_keys_of_plans_begin_anew(comm: moecomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key has 31 bits, which a long job uses up."""
    monkeypatch.setattr(comm._open(), "_plan_keys", itertools.count(2**31 - 2))
    _compare(comm, "expert", "eager")


@pytest.mark.parametrize("layout", ["expert", "rank"])  # the rank layout breaks the graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager on cuda"])
def test_same_results(backend: str, layout: str, request: pytest.FixtureRequest) -> None:
    backend, _, cuda = backend.partition(" on ")
    if cuda:
        request.getfixturevalue("loopback")
    with moecomm.Communicator(**SIZES, device=None if cuda else "cpu") as comm:
        _compare(comm, layout, backend)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_order_is_that_of_the_program(
    comm: moecomm.Communicator, seen: list[str], backend: str, grad: bool
) -> None:
    """Four dispatches that do not depend on each other, combined last first, and two that nobody uses. Around
    them stand products of matrices alone, for which inductor needs no C++ compiler."""
    twice = 2 * torch.eye(8)

    def program(x_TH: list[torch.Tensor], ids_TK: torch.Tensor) -> list[torch.Tensor]:
        outs = [comm.dispatch(x_TH[i] @ twice, ids_TK, capacity=CAPACITY + i) for i in range(6)]
        return [comm.combine(out.tokens @ twice, out.handle) for out in reversed(outs[:4])]

    expected = None
    for each in (program, torch.compile(program, backend=backend, fullgraph=True)):
        x_TH, ids_TK, _ = _inputs(grad=grad)
        ids_TK[ids_TK < 0] = 3  # no unused rows: they would be anything
        seen.clear()
        y_TH = each([x_TH + i for i in range(6)], ids_TK)
        assert seen == ["dispatch"] * 6 + ["combine"] * 4
        if grad:
            torch.cat(y_TH).sum().backward()
            assert sorted(seen[10:]) == ["combine backward"] * 4 + ["dispatch backward"] * 4
        if expected is None:
            expected = y_TH
        torch.testing.assert_close(y_TH, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
def test_no_operator_is_left_out_without_tokens(
    comm: moecomm.Communicator, seen: list[str], backend: str, grad: bool
) -> None:
    """Results have no elements then, and gradients that are zero follow from nothing; and one combine is used
    by nobody. All of x, ids and weights are at hand in the backward, which must not dispatch again. (Without
    tokens inductor needs no C++ compiler here.)"""
    router_HE, twice = torch.randn(8, 4).requires_grad_(grad), 2 * torch.eye(8)

    def program(x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        weights_TK = (x_TH @ router_HE)[:, :2]
        out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=CAPACITY)
        y_TH = comm.combine(out.tokens @ twice, out.handle, weights=out.weights)
        comm.combine(out.tokens, out.handle)
        scale_T1 = torch.gather(x_TH * x_TH, 1, ids_TK).sum(1, keepdim=True)
        return x_TH + y_TH * scale_T1 * weights_TK.pow(3).sum(1, keepdim=True)

    compiled, runs = torch.compile(program, backend=backend, fullgraph=True), []
    for tokens in (0, 5, 0) if backend == "aot_eager" else (0, 0):
        for each in (program, compiled):
            seen.clear()
            x_TH, ids_TK, _ = _inputs(tokens, grad)
            y_TH = each(x_TH, ids_TK.clamp(min=0))
            assert y_TH.shape == (tokens, 8)
            before = list(seen)
            if grad:
                y_TH.square().sum().backward()
            runs.append((before, seen[len(before) :]))
    backward = ["combine backward", "dispatch backward"] if grad else []
    assert runs == [(["dispatch", "combine", "combine"], backward)] * len(runs)


def test_tokens_make_a_chain(comm: moecomm.Communicator) -> None:
    """Every operator in the graph, forward and backward, takes the token of the one before it."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    def program(x_TH: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        outs = [comm.dispatch(x_TH * i, ids_TK, capacity=CAPACITY) for i in range(1, 4)]
        return sum((comm.combine(out.tokens, out.handle) for out in outs), x_TH.new_zeros(()))

    x_TH, ids_TK, _ = _inputs(grad=True)
    torch.compile(program, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x_TH, ids_TK).sum()
    (graph,) = graphs
    program(x_TH, ids_TK).sum().backward()
    before = None
    found = 0
    for node in graph.graph.nodes:
        if "moecomm" not in str(node.target):
            continue
        assert str(node.target).endswith("_in_order.default"), node.target
        if before is not None:
            token = node.args[0]
            assert token.target.__name__ == "getitem" and token.args == (before, 0)
        before, found = node, found + 1
    assert found == 6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_views_of_a_plan_are_first_read_in_a_graph(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cuda":
        request.getfixturevalue("loopback")

    def share(out: moecomm.DispatchOutput) -> torch.Tensor:
        rows = out.tokens[: out.tokens_per_expert.shape[0]].sum() * out.offsets[-1]
        return rows + out.overflow

    with moecomm.Communicator(**SIZES, device="cpu") as comm:
        x_TH, ids_TK, _ = _inputs()
        expected = share(comm.dispatch(x_TH, ids_TK))
        assert torch.equal(
            torch.compile(share, backend="eager", fullgraph=True)(comm.dispatch(x_TH, ids_TK)), expected
        )
        broken = torch.compile(lambda: share(comm.dispatch(x_TH, ids_TK)) + 1, backend="eager")
        assert torch.equal(broken(), expected + 1)


def test_checkpointing_in_a_graph(comm: moecomm.Communicator) -> None:
    """A part that the backward computes again communicates again, and the sums stay the same."""
    from torch.utils.checkpoint import checkpoint

    def layer(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out = comm.dispatch(x_TH, ids_TK, weights_TK, capacity=CAPACITY)
        return x_TH + comm.combine(out.tokens.sin(), out.handle, weights=out.weights)

    def model(x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x_TH = checkpoint(layer, x_TH, ids_TK, weights_TK, use_reentrant=False)
        return x_TH

    grads = []
    for each in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        x_TH, ids_TK, weights_TK = _inputs(grad=True)
        each(x_TH, ids_TK, weights_TK).square().sum().backward()
        grads.append((x_TH.grad, weights_TK.grad))
    torch.testing.assert_close(grads[1], grads[0])


def test_shapes_are_checked_while_tracing(comm: moecomm.Communicator) -> None:
    layer = torch.compile(_layer(comm), backend="eager", fullgraph=True)
    x_TH, ids_TK, weights_TK = _inputs()
    with pytest.raises(Exception, match="InvalidArgument"):
        layer(x_TH[:, :4], ids_TK, weights_TK)
    broken = torch.compile(_layer(comm), backend="eager")
    with pytest.raises(moecomm.InvalidArgument, match="x has shape"):
        broken(x_TH[:, :4], ids_TK, weights_TK)


def test_after_close() -> None:
    comm = moecomm.Communicator(**SIZES, device="cpu")
    layer = torch.compile(_layer(comm), backend="eager", fullgraph=True)
    layer(*_inputs())
    comm.close()
    with pytest.raises(moecomm.CommunicatorClosed):
        layer(*_inputs())


def test_operators_are_what_they_say(comm: moecomm.Communicator) -> None:
    """torch.library.opcheck: schema, fake implementation, registration of gradients."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    ops = torch.ops.moecomm
    x_TH, ids_TK, weights_TK = _inputs()
    token = torch.empty(0, dtype=torch.uint8)
    arguments = (token, comm._id, x_TH, ids_TK, weights_TK, 1, CAPACITY)
    torch.library.opcheck(ops.dispatch_in_order.default, arguments, test_utils=checks)
    without = (*arguments[:4], None, *arguments[5:])
    torch.library.opcheck(ops.dispatch_in_order.default, without, test_utils=checks)
    _, tokens_PH, weights, blob = ops.dispatch_in_order(*arguments)
    plan = (blob, 5, CAPACITY)
    tokens_PH, factors = torch.randn_like(tokens_PH), torch.rand(CAPACITY)
    for name, values in {
        "combine": [(tokens_PH, None), (tokens_PH, factors)],
        "dispatch_backward": [(tokens_PH, weights), (None, weights), (tokens_PH, None)],
        "combine_backward": [(x_TH, None, None), (x_TH, factors, tokens_PH)],
    }.items():
        for each in values:
            operator = getattr(ops, f"{name}_in_order").default
            torch.library.opcheck(operator, (token, comm._id, *each, *plan), test_utils=checks)


@pytest.mark.usefixtures("loopback")
def test_shapes_on_a_device_that_is_not_there() -> None:
    comm = moecomm.Communicator(**{**SIZES, "hidden": 144}, wire="fp8")
    with FakeTensorMode():
        x_TH, weights_TK = torch.empty(5, 144, device="meta"), torch.empty(5, 2, device="meta")
        ids_TK = torch.empty(5, 2, dtype=torch.int64, device="meta")
        found = torch.ops.moecomm.dispatch(comm._id, x_TH, ids_TK, weights_TK, 8, CAPACITY)
        assert [tuple(each.shape) for each in found] == [(20, 144), (20,), (comm._plan_fields.words,)]
        assert all(each.device.type == "meta" for each in found)
        y_TH = torch.ops.moecomm.combine(comm._id, found[0], None, found[2], 5, 20)
        assert y_TH.shape == (5, 144) and y_TH.dtype == torch.float32


def test_a_plan_lives_as_long_as_its_tensor(comm: moecomm.Communicator) -> None:
    x_TH, ids_TK, _ = _inputs()
    backend: Any = comm._open()
    out = torch.compile(_layer(comm), backend="eager")(x_TH, ids_TK, None)[1]
    assert len(backend._plans) == 1
    copy = out.handle.plan._replace(blob=out.handle.plan.blob.clone())
    assert torch.equal(backend.combine(copy, out.tokens, None, None)[0], comm.combine(out.tokens, out.handle))
    del out
    assert len(backend._plans) == 0
    with pytest.raises(moecomm.InvalidArgument, match="copy of its plan"):
        backend.combine(copy, torch.zeros(CAPACITY, 8), None, None)


def test_numbers_are_not_reused() -> None:
    numbers = set()
    for _ in range(3):
        with moecomm.Communicator(**SIZES, device="cpu") as comm:
            numbers.add(comm._id)
    assert len(numbers) == 3
    with pytest.raises(moecomm.CommunicatorClosed):
        operators._backend(max(numbers))
