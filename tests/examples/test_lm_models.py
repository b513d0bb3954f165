"""Presets of published models: their size, what a token takes, and that small ones of their kind train."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from moecomm.nn import GroupedExperts, MoEConfig, SharedExperts, TopKRouter
from tests.examples.conftest import EXAMPLES, train_on  # and puts examples/ on the path
from tests.multirank.harness import run_ranks

from lm import options, presets  # isort: skip
from lm.build import assemble, count_parameters, model_vocab, moe_config  # isort: skip
from lm.errors import UsageError  # isort: skip
from lm.metrics import read_metrics  # isort: skip
from lm.speed import flops_per_token  # isort: skip


class Experts(nn.Module):
    """The parameters of a MoELayer, without a communicator."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router, self.experts = TopKRouter(config), GroupedExperts(config)
        self.shared = SharedExperts(config) if config.num_shared_experts else None


def parse(folder: Path, preset: str, *flags: str) -> options.Options:
    return options.parse(["--preset", preset, *flags, "--out", str(folder)])


def counted(chosen: options.Options) -> tuple[int, int]:
    """All parameters, and those that a token meets, of a model on the meta device."""
    with torch.device("meta"):
        model = assemble(chosen, chosen.vocab, lambda: Experts(moe_config(chosen)))
    assert all(parameter.is_meta for parameter in model.parameters())
    return count_parameters(model, chosen, chosen.experts)


PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, True),
    "mixtral-8x22b": (141, 39, True),
    "qwen2-57b-a14b": (57.4, 14.2, True),
    "qwen3-30b-a3b": (30.5, 3.3, True),
    "deepseek-v3": (671, 36.6, False),
    "gpt-oss-20b": (20.91, 3.61, False),
}
"""Billions of parameters, of those of a token, and whether the latter have the embedding, of which a token
looks up one row. 36.6 is in deepseek-ai/DeepSeek-V3's README_WEIGHTS.md; its report rounds it to 37."""
WITHIN = {"qwen3-30b-a3b": 0.02}
"""The two digits 3.3 are said of 3.35: the embedding and the output together have 0.62 of them."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_as_many_parameters_as_published(preset: str, tmp_path: Path) -> None:
    """docs/models.md has the parameters of each preset, too, and the operations of a token."""
    published_total, published_active, with_embedding = PUBLISHED[preset]
    chosen = parse(tmp_path, preset)
    total, active = counted(chosen)
    met = active - (0 if with_embedding else chosen.vocab * chosen.dim)
    assert total / 1e9 == pytest.approx(published_total, rel=0.01)
    assert met / 1e9 == pytest.approx(published_active, rel=WITHIN.get(preset, 0.01))
    page = (EXAMPLES.parent / "docs" / "models.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {preset} |") and " B |" in line]
    assert row.split(" | ")[2:5] == [str(chosen.layers), f"{total / 1e9:.2f} B", f"{active / 1e9:.2f} B"]
    operations = dict(zip(*(line.strip("| ").split(" | ") for line in page.splitlines()[-3::2]), strict=True))
    assert operations[preset] == f"{flops_per_token(chosen, active, chosen.vocab) / 1e9:.1f}"


def test_operations_of_a_token_by_hand(tmp_path: Path) -> None:
    # Mixtral 8x7B: of 12.88 billion the 131 million of the embedding are looked up. A token sees half of 4096
    # keys; for each a product of 128 values with the query and one of 128 with the value, in 32 heads.
    mixtral = parse(tmp_path, "mixtral-8x7b")
    matrices = 32000 * 4096 + 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336)
    keys = 32 * 4096 / 2
    want = 6 * matrices + 6 * keys * 32 * 256
    found = flops_per_token(mixtral, counted(mixtral)[1], mixtral.vocab)
    assert found == pytest.approx(want, rel=1e-3)  # routers and norms are counted as well
    assert found == pytest.approx(79.7e9, rel=1e-3)

    # gpt-oss-20b: every second layer sees 128 keys, all but at the beginning of a window.
    gpt_oss = parse(tmp_path, "gpt-oss-20b", "--seq", "1024")
    attention = 2 * 2880 * 4096 + 2 * 2880 * 512
    matrices = 201088 * 2880 + 24 * (attention + 4 * 3 * 2880 * 2880)
    keys = 12 * 1024 / 2 + 12 * (128 - 128 / 1024 * 128 / 2)
    found = flops_per_token(gpt_oss, counted(gpt_oss)[1], gpt_oss.vocab)
    assert found == pytest.approx(6 * matrices + 6 * keys * 64 * 128, rel=1e-3)
    longer = parse(tmp_path, "gpt-oss-20b", "--seq", "1024", "--window", "2000")
    without = parse(tmp_path, "gpt-oss-20b", "--seq", "1024", "--window", "0")
    both = [flops_per_token(each, 10**9, each.vocab) for each in (longer, without)]
    assert both[0] == both[1] == 6 * (10**9 - 201088 * 2880) + 6 * 24 * 512 * 64 * 128

    # DeepSeek-V3: queries and keys have 128 + 64 values, values 128.
    latent = parse(tmp_path, "deepseek-v3", "--layers", "4")
    assert flops_per_token(latent, 10**9, 0) == 6 * 10**9 + 6 * 4 * 2048 * 128 * (192 + 128)


# -- training ----------------------------------------------------------------------------------------------

TINY = (
    "--device cpu --vocab 300 --dim 32 --layers 2 --heads 4 --head-dim 8 --experts 8 --top-k 2 --ffn 16 "
    "--seq 16 --batch 4 --steps 3 --warmup 1 --lr 0.01 --eval-every 3 --eval-windows 4 --save-every 3 "
    "--log-every 3 --sample 2"
)
KINDS = {
    "mixtral-8x7b": "--kv-heads 2",
    "qwen2-57b-a14b": "--kv-heads 2 --shared-experts 2 --microbatches 2",
    "qwen3-30b-a3b": "--kv-heads 2 --dtype float32",
    "deepseek-v3": "--layers 3 --dense-layers 1 --dense-ffn 48 --q-rank 12 --kv-rank 8 --rope-dim 4 "
    "--value-dim 8 --num-groups 4 --topk-groups 2 --microbatches 2",
    "gpt-oss-20b": "--kv-heads 2 --window 4",
}


def train_all(rank: int, world: int, runs: list[list[str]]) -> None:
    for arguments in runs:
        train_on(rank, world, arguments)


@pytest.mark.slow
def test_small_ones_of_each_kind_train(tmp_path: Path, text_folder: Path) -> None:
    """Three steps, validation and a checkpoint on two ranks, in the presets' bfloat16 but for one of them."""
    runs = [
        f"--preset {preset} {TINY} {flags} --data {text_folder} --out {tmp_path / preset}".split()
        for preset, flags in KINDS.items()
    ]
    run_ranks(2, train_all, runs, timeout=120)
    for preset in KINDS:
        records = read_metrics(tmp_path / preset / "metrics.jsonl")
        losses = [record["loss"] for record in records if "loss" in record]
        assert len(losses) == 3 and all(map(math.isfinite, losses)), preset
        assert losses[0] == pytest.approx(math.log(300) + 0.5, abs=0.3), preset  # logits of variance one
        assert losses[2] < losses[0] - 0.05, preset
        assert math.isfinite(records[-1]["val_loss"]), preset
        assert (tmp_path / preset / "checkpoints" / "step-00000003" / ".metadata").is_file()
    saved = json.loads((tmp_path / "deepseek-v3" / "options.json").read_text())
    assert (saved["attention"], saved["dense_layers"], saved["bias_rate"]) == ("latent", 1, 0.001)


# -- options -----------------------------------------------------------------------------------------------

WRONG = {
    "kv heads": ("mixtral-8x7b", "--kv-heads 5", "--heads 32 must be a multiple of --kv-heads 5"),
    "odd head": ("small", "--head-dim 7", "--head-dim 7 must be even"),
    "window of latent": ("deepseek-v3", "--window 128", "--window is of --attention grouped"),
    "sinks of latent": ("deepseek-v3", "--sinks", "--sinks is of --attention grouped"),
    "rank of grouped": ("small", "--kv-rank 8", "--kv-rank is of --attention latent"),
    "latent without a rank": ("small", "--attention latent --head-dim 8", "latent needs --q-rank, above 0"),
    "odd position": ("deepseek-v3", "--rope-dim 63", "--rope-dim 63 must be even"),
    "dense layers alone": ("deepseek-v3", "--layers 3", "--dense-layers 3 must be less than --layers 3"),
    "dense layers without a width": ("small", "--dense-layers 1", "--dense-layers 1 needs --dense-ffn"),
    "negative window": ("small", "--window -1", "-1 is not a number of at least 0"),
    "base of zero": ("small", "--rope-base 0", "0 is not a number above 0"),
    "unknown preset": ("gpt-oss-120b", "", "invalid choice: 'gpt-oss-120b'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_do_not_fit(case: str, tmp_path: Path) -> None:
    preset, flags, message = WRONG[case]
    with pytest.raises(UsageError) as caught:
        parse(tmp_path, preset, *flags.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ("--num-groups 3 --topk-groups 1", "num_groups"),
        ("--num-groups 4", "topk_groups"),
        ("--pre-softmax", "pre_softmax"),
        ("--shared-gate", "shared_gate"),
    ],
)
def test_routing_that_does_not_fit(flags: str, field: str, tmp_path: Path) -> None:
    chosen = parse(tmp_path, "small", *flags.split())
    with pytest.raises(UsageError, match=rf"the layers with experts: MoEConfig\.{field} is"):
        moe_config(chosen)


def test_vocabulary_is_padded(tmp_path: Path) -> None:
    assert model_vocab(parse(tmp_path, "small"), 257) == 257
    assert model_vocab(parse(tmp_path, "mixtral-8x7b"), 257) == 32_000
    with pytest.raises(UsageError, match="--vocab 256 is less than the 257 of the tokenizer"):
        model_vocab(parse(tmp_path, "small", "--vocab", "256"), 257)


# -- older runs --------------------------------------------------------------------------------------------
def test_options_of_an_older_run(tmp_path: Path) -> None:
    """A run that was saved before there were these flags has what they stood for, and keeps it."""
    parse(tmp_path, "small").save(tmp_path)
    saved = json.loads((tmp_path / options.FILE_NAME).read_text())
    older = {name: value for name, value in saved.items() if name not in presets.PLAIN}
    (tmp_path / options.FILE_NAME).write_text(json.dumps(older))
    again = parse(tmp_path, "auto", "--resume")
    assert {name: getattr(again, name) for name in presets.PLAIN} == presets.PLAIN
    assert again.save(tmp_path) == {}
    with pytest.raises(UsageError, match="this run has --qk-norm False, which cannot become True"):
        parse(tmp_path, "auto", "--resume", "--qk-norm")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"steps": 5', "Expecting ',' delimiter"),
        ("[1]", "does not hold a run's options"),
        ('{"step": 5}', "there is no option 'step'"),
        ('{"layers": "5"}', """'layers' cannot be "5\""""),
        ('{"tied": 1}', "'tied' cannot be 1"),
        ('{"data": "a.txt"}', """'data' cannot be "a.txt\""""),
        ('{"recompute": ["x"]}', "argument --recompute: invalid choice: 'x'"),
        ('{"lr": true}', "argument --lr: 'True' is not a number"),
        ('{"batch": null}', "argument --batch: 'None' is not a whole number"),
    ],
)
def test_damaged_options_of_a_run(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / options.FILE_NAME
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        parse(tmp_path, "auto", "--resume")
    assert str(caught.value).startswith(f"--resume: {path}") and says in str(caught.value)


def test_blocks_are_compiled_once_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By dynamo alone: inductor's code is torch's."""
    from lm.attention import AttentionConfig
    from lm.model import ModelConfig, Transformer
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(0)
    attention = AttentionConfig(dim=32, heads=4, kv_heads=2, head_dim=8, qk_norm=True)
    config = ModelConfig(
        vocab=16, dim=32, layers=3, max_seq=8, attention=attention, tied=False, norm_eps=1e-6
    )
    model = Transformer(config, lambda layer: torch.nn.Linear(32, 32))
    tokens_BS = torch.randint(16, (2, 8))

    def trained() -> list[torch.Tensor]:
        model.zero_grad()
        logits_BSV = model(tokens_BS)
        logits_BSV.square().mean().backward()
        return [logits_BSV.detach(), *(each.grad.clone() for each in model.parameters())]

    wanted, names = trained(), list(model.state_dict())
    backend, compiled = CompileCounterWithBackend("eager"), torch.compile
    options = {"backend": backend, "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, **options))
    torch._dynamo.reset()
    model.compile_blocks()
    torch.testing.assert_close(trained(), wanted)
    assert backend.frame_count == 1 and list(model.state_dict()) == names
    torch._dynamo.reset()
