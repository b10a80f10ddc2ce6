"""The guides' recipes, scaled down to a tiny model of their architecture."""

import importlib.util
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.scaled_recipes import scaled, trained
from tests.tiny_models import Architecture, build_tiny
from tests.tiny_vision import Family, build_tiny_vision, write_picture
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


def geometry(folder: Path, num_rows: int, first: int) -> Path:
    """Problems in the form of Geometry3K's files."""
    pictures = [
        write_picture(folder / f"{first + n}.png", 96, 64, first + n) for n in range(num_rows)
    ]
    rows = [
        {
            "images": [{"bytes": picture.read_bytes(), "path": None}],
            "problem": f"<image>Find x{number}.",
            "answer": "3",
        }
        for number, picture in enumerate(pictures, first)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{first}.parquet")
    return folder / f"{first}.parquet"


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's models that read pictures import it",
)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("qwen3_vl_30b_geo3k", "qwen3_vl_moe", marks=runs_experts),
        ("qwen2_5_vl_7b_geo3k", "qwen2_5_vl"),
    ],
)
def test_a_recipe_with_pictures_trains_a_tiny_model_of_its_architecture(
    name: str, family: Family, tmp_path: Path, ray_address: str
) -> None:
    model = build_tiny_vision(tmp_path / "model", family, num_experts=4)
    data = [
        f"data.train=[{{set: geometry3k, path: {geometry(tmp_path, 12, 0)}}}]",
        f"data.eval={geometry(tmp_path, 2, 100)}",
    ]
    for line in trained(scaled(name, tmp_path, model, ray_address, data), tmp_path):
        assert line["prompt_length/min"] > 24  # tokens of a picture of 96 x 64 pixels
