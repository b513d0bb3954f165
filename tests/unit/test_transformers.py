"""What moecomm.transformers finds before it registers anything."""

import sys

import pytest
import torch
from torch.nn import functional

from moecomm.errors import Unsupported


@pytest.mark.parametrize("version", ["4.57.1", "5.22.0", None])
def test_versions_without_a_place_for_it(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moecomm.setup.version.version_of", lambda package: version)
    monkeypatch.delitem(sys.modules, "moecomm.transformers", raising=False)
    with pytest.raises(
        Unsupported, match=r"needs transformers 5.23 or newer.*pip install 'transformers>=5.23'"
    ):
        import moecomm.transformers  # noqa: F401


def test_a_communicator_has_some_room() -> None:
    pytest.importorskip("transformers")
    from moecomm.shared import round_up

    for tokens in [*range(300), 4095, 4096, 4097, 5000]:
        assert max(tokens, 16) <= round_up(tokens) <= max(tokens * 1.25, tokens + 16)
    assert len({round_up(tokens) for tokens in range(4096, 8193)}) <= 6


@pytest.mark.parametrize("name", ["swiglu", "swiglu_interleaved", "swiglu_clamped", "gelu", None])
def test_activations_are_found_by_what_they_compute(name: str | None) -> None:
    pytest.importorskip("transformers")
    from moecomm.kernels.activation import weighted_activation
    from moecomm.transformers.experts import activation_of

    class Experts(torch.nn.Module):
        has_gate = name != "gelu"

        def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
            if name is None:
                return torch.relu(inner[:, ::2]) * inner[:, 1::2]
            return weighted_activation(inner, activation=name)

        act_fn = _apply_gate

    assert activation_of(Experts()) == name
    with torch.device("meta"):  # as torch.set_default_device does
        assert activation_of(Experts()) == name


@pytest.mark.parametrize("limits", [(10.0, torch.inf), (torch.inf, 10.0), (1e4, 1e4)])
def test_a_limit_is_another_activation(limits: tuple[float, float]) -> None:
    """DeepSeek-V4's gate limits its inputs to 10, and is SwiGLU for smaller ones."""
    pytest.importorskip("transformers")
    from moecomm.transformers.experts import activation_of

    class Experts(torch.nn.Module):
        has_gate = True

        def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
            gate, up = inner.chunk(2, dim=1)
            return functional.silu(gate.clamp(max=limits[0])) * up.clamp(-limits[1], limits[1])

    assert activation_of(Experts()) is None
