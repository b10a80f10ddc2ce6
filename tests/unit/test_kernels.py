"""Fused kernels: references equal transformers, and kernels that differ are refused."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dapo_core.errors import ConfigError
from dapo_core.machine import device
from dapo_core.machine.device import Cpu, Npu
from dapo_core.model.pretrained import reads_pictures
from dapo_core.policy import kernels
from dapo_core.policy.experts import install_experts
from dapo_core.policy.kernels import KERNELS, install_kernels, require_parity
from tests.renamed_cpu.device import fake_torch_npu
from tests.tiny_models import ARCHITECTURES, build_tiny
from tests.tiny_vision import FAMILIES, PATCH, build_tiny_vision


class _Fused(Cpu):
    """A CPU that has kernels."""

    def __init__(self, **fused: Callable[..., torch.Tensor]) -> None:
        self._fused = fused

    def fused_kernels(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        return self._fused


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *FAMILIES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build: Any = build_tiny_vision if request.param in FAMILIES else build_tiny
    path: Path = build(tmp_path_factory.mktemp(request.param), request.param, seed=2)
    return path


def _loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The policy's model, whose source file is as it was after the test."""
    is_vision = (folder / "preprocessor_config.json").exists()
    kind = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=torch.float32)
    source = sys.modules[type(model).__module__]
    if hasattr(source, "apply_rotary_pos_emb"):
        monkeypatch.setattr(source, "apply_rotary_pos_emb", source.apply_rotary_pos_emb)
    install_experts(model)
    return model


def _results(model: Any) -> dict[str, torch.Tensor]:
    """Logits of a row, with a picture if the model reads any, and every gradient."""
    ids, picture = torch.arange(40).reshape(2, 20), {}
    if reads_pictures(model.config):
        ids = ids[:1]
        ids[0, 5:9] = model.config.image_token_id
        pixels = torch.linspace(-1, 1, 16 * 2 * 3 * PATCH**2).reshape(16, -1)
        picture = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
        picture["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(ids, use_cache=False, **picture).logits
    logits.square().mean().backward()
    weights = model.named_parameters()
    gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
    return {"logits": logits.detach()} | gradients


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_reference_operations_equal_transformers_bit_for_bit(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _results(_loaded(folder, monkeypatch))
    model, counted = _loaded(folder, monkeypatch), []
    family = model.config.model_type

    def twin(*arguments: Any) -> torch.Tensor:
        counted.append(name)
        return KERNELS[name].reference(*arguments)

    monkeypatch.setattr(kernels, "require_parity", lambda *_: None)
    install_kernels(model, ("auto",), _Fused(**{name: twin}))
    torch.testing.assert_close(_results(model), expected, rtol=0, atol=0)
    # of two layers; rotary of query and key, experts before and after the gate
    calls = {"rms_norm": 2 * 2 + 1, "swiglu": 2, "rotary": 2 * 2, "experts": 2 * 2}
    calls["rms_norm"] += 2 * 2 if family.startswith("qwen3") else 0  # of heads
    calls["experts"] *= family.endswith("moe")
    if not hasattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb"):
        calls["rotary"] = 0  # Qwen2.5-VL in transformers 5.5.4
    assert len(counted) == calls[name]


def test_kernels_of_torch_npu_match_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch_npu's arguments and results, in plain torch."""
    torch_npu = fake_torch_npu()
    monkeypatch.setattr(device, "_import_torch_npu", lambda: torch_npu)
    fused = Npu().fused_kernels()
    for name in KERNELS:
        require_parity(name, fused[name], Cpu())
    assert torch_npu.called == {
        "npu_rms_norm": 1,
        "npu_swiglu": 1,
        "npu_rotary_mul": 1,
        "npu_grouped_matmul": 3,  # and two gradients
    }


def test_a_named_operation_uses_its_reference_and_fails_if_the_model_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _loaded(build_tiny(tmp_path / "dense", "qwen2"), monkeypatch)
    own = model.model.norm.forward
    install_kernels(model, ("auto",), Cpu())
    assert model.model.norm.forward == own  # a CPU has no kernels
    install_kernels(model, ("rms_norm",), Cpu())
    assert model.model.norm.forward != own
    with pytest.raises(
        ConfigError, match="names experts, which cannot be replaced in this qwen2 model"
    ):
        install_kernels(model, ("experts",), Cpu())
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
            "rms_norm",
            lambda states, weight, epsilon: wide(states, 1 + weight, epsilon),
            Cpu(),
            ["swiglu", "rotary"],
        )
    said = str(caught.value)
    assert (
        "more than the 0.02 that bfloat16 explains: set train.fused_kernels=[swiglu,rotary]" in said
    )

    def refused(name: str, fused: Callable[..., torch.Tensor]) -> str:
        with pytest.raises(ConfigError) as caught:
            require_parity(name, fused, Cpu())
        return str(caught.value)

    # the halves the wrong way round
    assert "kernel swiglu" in refused(
        "swiglu", lambda states: KERNELS["swiglu"].reference(states.roll(128, -1))
    )
    # right values without a gradient
    assert "kernel rotary" in refused(
        "rotary", lambda states, *angles: KERNELS["rotary"].reference(states.detach(), *angles)
    )
    # rows of the next expert
    assert "kernel experts" in refused(
        "experts", lambda rows, weight, ends: KERNELS["experts"].reference(rows, weight, ends - 1)
    )
    assert "differs from plain torch by nan" in refused(
        "swiglu", lambda states: KERNELS["swiglu"].reference(states * torch.nan)
    )
