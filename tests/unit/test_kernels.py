"""Fused kernels: references equal transformers, and kernels that differ are refused."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_core.errors import ConfigError
from dapo_core.machine.device import Cpu
from dapo_core.policy import kernels
from dapo_core.policy.kernels import KERNELS, install_kernels, require_parity
from tests.tiny_models import ARCHITECTURES, Architecture, build_tiny


class _Fused(Cpu):
    """A CPU that has kernels."""

    def __init__(self, **fused: Callable[..., torch.Tensor]) -> None:
        self._fused = fused

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        return self._fused


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    return build_tiny(tmp_path_factory.mktemp(architecture), architecture, seed=2)


def _loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, whose source file is as it was after the test."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    source = sys.modules[type(model).__module__]
    monkeypatch.setattr(source, "apply_rotary_pos_emb", source.apply_rotary_pos_emb)  # type: ignore[attr-defined]
    return model


def _results(model: Any) -> dict[str, torch.Tensor]:
    """Logits of a row, and every gradient."""
    logits = model(torch.arange(40).reshape(2, 20), use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {
        name: weight.grad for name, weight in model.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_reference_operations_equal_transformers_bit_for_bit(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _results(_loaded(folder, monkeypatch))
    model, counted = _loaded(folder, monkeypatch), []
    has_dense = not (name == "swiglu" and model.config.model_type == "qwen3_moe")

    def twin(*arguments: Any) -> torch.Tensor:
        counted.append(name)
        return KERNELS[name].reference(*arguments)

    monkeypatch.setattr(kernels, "require_parity", lambda *_: None)
    install_kernels(model, ("auto",), _Fused(**{name: twin}))
    torch.testing.assert_close(_results(model), expected, rtol=0, atol=0)
    calls = {"rms_norm": 2 * 2 + 1, "swiglu": 2, "rotary": 2 * 2}[name]  # two layers; query and key
    # of heads
    calls += 2 * 2 if name == "rms_norm" and model.config.model_type.startswith("qwen3") else 0
    assert len(counted) == (calls if has_dense else 0)


def test_a_named_operation_uses_its_reference_and_fails_if_the_model_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _loaded(build_tiny(tmp_path / "dense", "qwen2"), monkeypatch)
    own = model.model.norm.forward
    install_kernels(model, ("auto",), Cpu())
    assert model.model.norm.forward == own  # a CPU has no kernels
    install_kernels(model, ("rms_norm",), Cpu())
    assert model.model.norm.forward != own
    experts = _loaded(build_tiny(tmp_path / "experts", "qwen3_moe"), monkeypatch)
    with pytest.raises(
        ConfigError, match="names swiglu, which cannot be replaced in this qwen3_moe model"
    ):
        install_kernels(experts, ("swiglu",), Cpu())
    model.config.model_type = "gemma3"
    install_kernels(model, ("auto",), _Fused(rms_norm=KERNELS["rms_norm"].reference))
    with pytest.raises(
        ConfigError, match="names rotary, which cannot be replaced in this gemma3 model"
    ):
        install_kernels(model, ("rotary",), Cpu())


def test_a_kernel_that_differs_from_its_reference_is_refused() -> None:
    def wide(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Rounds once, at the end, as fused kernels do."""
        return (
            KERNELS["rms_norm"]
            .reference(states.double(), weight.double(), epsilon)
            .to(states.dtype)
        )

    require_parity("rms_norm", wide, Cpu())
    with pytest.raises(ConfigError) as caught:
        require_parity(
            "rms_norm", lambda states, weight, epsilon: wide(states, 1 + weight, epsilon), Cpu()
        )
    said = str(caught.value)
    assert (
        "more than the 0.02 that bfloat16 explains: set train.fused_kernels=[swiglu,rotary]" in said
    )
    with pytest.raises(ConfigError, match="fused kernel swiglu"):  # the halves the wrong way round
        require_parity("swiglu", lambda gate, up: KERNELS["swiglu"].reference(up, gate), Cpu())
    with pytest.raises(ConfigError, match="fused kernel rotary"):  # right values without a gradient
        require_parity(
            "rotary",
            lambda states, *angles: KERNELS["rotary"].reference(states.detach(), *angles),
            Cpu(),
        )
    with pytest.raises(ConfigError, match="differs from plain torch by nan"):
        require_parity("swiglu", lambda gate, up: gate * up * torch.nan, Cpu())
