"""dtype `auto` on a CPU is the faster precision that works there."""

from pathlib import Path

import pytest

from dapo_core.config.rollout import RolloutConfig
from dapo_core.config.training import TrainingConfig
from dapo_core.machine import device
from dapo_core.machine.device import cpu_multiplies_bfloat16, device_for
from dapo_core.model.precision import with_cpu_dtypes, with_model_dtypes
from tasks.config.serve import ServeConfig
from tasks.serve_model import command
from tasks.serve_model.command import on_this_device
from tests.tiny_models import build_tiny_qwen3


def test_bfloat16_instructions_are_found_as_torch_finds_them() -> None:
    import torch

    flags = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
    assert cpu_multiplies_bfloat16() is any(flags.get(name, False) for name in names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        (None, False),
    ],
)
def test_flags_decide_on_bfloat16(tmp_path: Path, text: str | None, expected: bool) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo") is expected


@pytest.mark.parametrize(
    ("has_instructions", "hidden_size", "head_dim", "dtype"),
    [
        (True, 128, 32, "float32"),
        (True, 768, 64, "bfloat16"),
        (True, 768, 48, "float32"),
        (False, 768, 64, "float32"),
    ],
)
def test_auto_trains_in_the_faster_precision_and_a_set_one_stays(
    monkeypatch: pytest.MonkeyPatch,
    has_instructions: bool,
    hidden_size: int,
    head_dim: int,
    dtype: str,
) -> None:
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: has_instructions)
    config = TrainingConfig(rollout=RolloutConfig(dtype="float16"))
    resolved = with_cpu_dtypes(config, hidden_size, head_dim)
    assert (resolved.train.dtype, resolved.rollout.dtype) == (dtype, "float16")
    cuda = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda"})})
    assert with_cpu_dtypes(cuda, hidden_size, head_dim) is cuda
    assert device_for("cuda").item_bytes("auto") == 2


def test_a_tiny_model_trains_in_float32(tmp_path: Path) -> None:
    config = with_model_dtypes(TrainingConfig(), build_tiny_qwen3(tmp_path / "model"))
    assert (config.train.dtype, config.rollout.dtype) == ("float32", "float32")


@pytest.mark.parametrize(
    ("kind", "has_instructions", "head_dim", "dtype"),
    [
        ("cpu", False, 64, "float32"),
        ("cpu", True, 64, "auto"),
        ("cpu", True, 16, "float32"),  # vLLM's bfloat16 attention refuses it
        ("cuda", False, 16, "auto"),
    ],
)
def test_auto_serves_in_float32_only_where_bfloat16_is_slow_or_fails(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_instructions: bool, head_dim: int, dtype: str
) -> None:
    model = {"hidden_size": 768, "num_attention_heads": 768 // head_dim}
    monkeypatch.setattr(command, "vllm_device", lambda: device.device_for(kind))
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: has_instructions)
    assert on_this_device(ServeConfig(), model).dtype == dtype
    assert on_this_device(ServeConfig(dtype="float16"), model).dtype == "float16"
