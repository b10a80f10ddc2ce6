"""The guides' recipes without pictures, scaled down to a tiny model of their architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scaled_recipes import scaled, trained
from tests.tiny_models import Architecture, build_tiny
from tests.vllm_experts import runs_experts


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("dapo_qwen2_5_32b_math", "qwen2"),
        ("dapo_qwen3_32b_math", "qwen3"),
        ("dapo_qwen3_8b_choice", "qwen3"),
        ("grpo_qwen3_8b_math", "qwen3"),
        pytest.param("gspo_qwen3_30b_a3b_math", "qwen3_moe", marks=runs_experts),
        pytest.param("gspo_qwen3_235b_a22b_math", "qwen3_moe", marks=runs_experts),
    ],
)
def test_a_recipe_trains_a_tiny_model_of_its_architecture_from_rows_to_a_checkpoint(
    name: str, architecture: Architecture, tmp_path: Path, ray_address: str
) -> None:
    sizes: dict[str, Any] = {"num_experts": 4} if architecture == "qwen3_moe" else {}
    model = build_tiny(tmp_path / "model", architecture, **sizes)
    data = ["data.train=arithmetic", "data.eval=arithmetic"]
    data += ["data.arithmetic.num_train=100", "data.arithmetic.num_eval=4"]
    lines = trained(scaled(name, tmp_path, model, ray_address, data), tmp_path)
    assert ("actor/kl_loss" in lines[0]) == name.startswith("grpo")
    assert ("router/load/max" in lines[0]) == (architecture == "qwen3_moe")
