"""The training example's optimizer on GPUs: its compiled kernel against the update of float32 copies."""

from __future__ import annotations

import pytest
import torch

from tests.examples import conftest  # noqa: F401  (puts examples/ on the path)

from lm import optimizer as lm_optimizer  # isort: skip
from lm.optimizer import KERNEL_LEAST, AdamW  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cuda_only")]

SHAPES = [(8, 256, 512), (KERNEL_LEAST // 512, 1024), (100, 30)]


@pytest.mark.parametrize("rows", [lm_optimizer.KERNEL_ROWS, 300], ids=["whole", "parts"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_update_on_cpus(
    weights: torch.dtype, moments: torch.dtype, rows: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step at a time from the same state, of whole tensors and by parts; a kernel may round a product and
    a sum together. In bfloat16 two that are nearly equal may be rounded apart, by one number."""
    monkeypatch.setattr(lm_optimizer, "KERNEL_ROWS", rows)
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(weights)) for shape in SHAPES]
    copies = [torch.nn.Parameter(each.detach().cuda()) for each in parameters]
    ours, theirs = (
        AdamW([{"params": each, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), moments=moments)
        for each in (copies, parameters)
    )
    rounding = 2**-7 if torch.bfloat16 in (weights, moments) else 1e-5
    for step in range(4):
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] = 0.01 / (step + 1)
        for copy, parameter in zip(copies, parameters, strict=True):
            parameter.grad = torch.randn(parameter.shape).to(weights)
            copy.grad = parameter.grad.cuda()
        ours.step()
        theirs.step()
        for copy, parameter in zip(copies, parameters, strict=True):
            torch.testing.assert_close(copy.cpu(), parameter, rtol=rounding, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):
                found, wanted = ours.state[copy][name].cpu(), theirs.state[parameter][name]
                torch.testing.assert_close(found, wanted, rtol=rounding, atol=1e-6)
        ours.load_state_dict(theirs.state_dict())
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.data.copy_(parameter.data)
