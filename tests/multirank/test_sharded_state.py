"""A checkpoint written at one number of expert-parallel ranks goes on the same at another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from moecomm.nn import MoEConfig, MoELayer, sharded_state, sync_gradients, update_expert_bias
from tests import seeds
from tests.multirank.harness import run_ranks
from tests.multirank.moe_cases import SIZES, groups_of, whole

GLOBAL_TOKENS = 12


class Model(nn.Module):
    def __init__(self, ep_group: Any) -> None:
        super().__init__()
        options = {"num_shared_experts": 1, "bias_update_rate": 0.01, "dtype": torch.float64}
        self.first = nn.Linear(16, 16, dtype=torch.float64)
        self.moe = MoELayer(MoEConfig(**SIZES, **options), group=ep_group, max_tokens=GLOBAL_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.first(x))
        return y


def train(
    rank: int, world_size: int, ep: int, seed: int, load: Path | None, save: Path | None, steps: int
) -> dict[str, Any]:
    """Trains some steps on the same global tokens, shared out over the ranks; returns model and optimizer."""
    torch.manual_seed(seed)
    ep_group, expert_group = groups_of(rank, world_size, ep)
    model = Model(ep_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if load is None else 123.0, weight_decay=0.1)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        own = {**sharded_state(model, optimizer, ep_group), "step": 0}
        dcp.load(own, checkpoint_id=load)
        assert own["step"] == 77
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, GLOBAL_TOKENS, 16, generator=generator, dtype=torch.float64)
    x, factor = tokens.chunk(world_size, dim=1)[rank]
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) * factor).sum().mul(world_size).backward()
        sync_gradients(model, expert_group=expert_group)
        optimizer.step()
        update_expert_bias(model)
    if save is not None:
        dcp.save({**sharded_state(model, optimizer, ep_group), "step": 77}, checkpoint_id=save)
    names = [n for n, _ in model.named_parameters()]
    experts = [n for n in names if ".experts." in n]
    moments = {f"{n}.{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    model.moe.comm.close()
    return {
        "state": {**sharded_names(model), **moments},
        "experts": [*experts, *(f"{n}.{k}" for n in experts for k in ("exp_avg", "exp_avg_sq"))],
        "lr": optimizer.param_groups[0]["lr"],
    }


def sharded_names(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a model's checkpoint: all but the record of which experts a rank holds."""
    return {name: tensor for name, tensor in model.state_dict().items() if "_extra_state" not in name}


@dataclass(frozen=True)
class Start:
    """A run on two expert-parallel ranks."""

    seed: int
    folder: Path
    saved: dict[str, Tensor]
    """After two steps, when it wrote its checkpoint."""
    gone_on: dict[str, Tensor]
    """After a third step."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    seed, folder = seeds.base(), tmp_path_factory.mktemp("saved")
    saved = run_ranks(2, train, 2, seed, None, folder, 2)
    return Start(
        seed, folder, whole(saved, "state"), whole(run_ranks(2, train, 2, seed, None, None, 3), "state")
    )


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (3, 3), (4, 2), (2, 1)])
def test_goes_on_at_another_ep_size(ranks: int, ep: int, start: Start, tmp_path: Path) -> None:
    loaded = run_ranks(ranks, train, ep, start.seed + 1, start.folder, None, 0)
    assert all(result["lr"] == 0.1 for result in loaded)
    resumed = run_ranks(ranks, train, ep, start.seed, start.folder, tmp_path, 1)
    for first in range(0, ranks, ep):
        assert_same(whole(loaded[first : first + ep], "state"), start.saved)
        assert_same(whole(resumed[first : first + ep], "state"), start.gone_on, tolerance=1e-9)
    back = run_ranks(2, train, 2, start.seed, tmp_path, None, 0)
    assert_same(whole(back, "state"), whole(resumed[:ep], "state"))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name] - tensor).abs().max() <= tolerance, name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_process_groups(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = Model(None)
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save(sharded_state(model), checkpoint_id=tmp_path / "a", no_dist=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(sharded_state(model), checkpoint_id=tmp_path / "a", no_dist=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, want[name]), name
