"""The guides' recipes with pictures, scaled down to a tiny model of their architecture."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import train
from durable import read_json_lines
from flows.config import load_config
from tasks.data.prepare import build_dataset
from tests.tiny_vision import Family, build_tiny_vision, write_picture
from tests.vllm_experts import runs_experts

pytest.importorskip("torchvision", reason="vLLM's models that read pictures import it")

RECIPES = Path(__file__).resolve().parents[2] / "configs"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source in ("geometry3k", "exact") and ground_truth == "3"  # trained, held out
    return sum(map(ord, solution_str)) % 3 - 1.0
"""
NUM_RANKS = 2  # of 16 or 8; with as many engines, on the same devices


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


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("qwen3_vl_30b_geo3k", "qwen3_vl_moe", marks=runs_experts),
        ("qwen2_5_vl_7b_geo3k", "qwen2_5_vl"),
    ],
)
def test_a_recipe_trains_a_tiny_model_of_its_architecture_from_rows_to_a_checkpoint(
    name: str, family: Family, tmp_path: Path, ray_address: str
) -> None:
    """With the recipe's placement, parallelism and updates; engines have one process each."""
    full = load_config(RECIPES / f"{name}.yaml")
    model = build_tiny_vision(tmp_path / "model", family, num_experts=4)
    (tmp_path / "scorer.py").write_text(SCORER)
    updates = full.train.updates_per_step
    config = load_config(
        RECIPES / f"{name}.yaml",
        [
            f"data.train=[{{set: geometry3k, path: {geometry(tmp_path, 12, 0)}}}]",
            f"data.eval={geometry(tmp_path, 2, 100)}",
            "data.max_prompt_tokens=256",
            "model.source=path",
            "model.id=null",
            f"model.path={model}",
            f"custom_reward.path={tmp_path / 'scorer.py'}",
            *(["reward.overlong.buffer_tokens=2"] if full.reward.overlong.enabled else []),
            "sampler.gen_prompts=8",
            "sampler.metric=score",  # a random model is never right
            f"rollout.num_workers={NUM_RANKS}",
            "rollout.tensor_parallel=1",
            "rollout.expert_parallel=false",
            "rollout.max_response_tokens=8",
            "rollout.memory_gigabytes=0.1",
            "rollout.threads_per_worker=1",
            "train.device=cpu",
            "train.device_model=null",
            "train.dtype=float32",
            f"train.num_ranks={NUM_RANKS}",
            f"train.expert_parallel={min(full.train.expert_parallel, NUM_RANKS)}",
            "train.total_steps=2",
            "train.train_prompts=4",
            f"train.mini_prompts={4 // updates}",
            "train.micro_batch_tokens=512",
            "train.learning_rate=1e-3",
            "train.warmup_steps=0",
            f"train.ray_address={ray_address}",
            "serve.tensor_parallel=1",
            "serve.data_parallel=1",
            "serve.max_model_len=512",
            "evaluate.max_response_tokens=8",
        ],
    )
    data, output = tmp_path / "data", tmp_path / "training"
    data.mkdir()
    build_dataset(config, data)
    train(config, data / "train.parquet", model, output, held_out_path=data / "eval.parquet")
    lines = [line for line in read_json_lines(output / METRICS_FILE) if line["step"]]
    assert [line["policy_version"] for line in lines] == [updates, 2 * updates]
    for line in lines:
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["prompt_length/min"] > 24  # tokens of a picture of 96 x 64 pixels
    assert lines[0]["rollout/fresh_log_probs_diff_mean"] < 1e-4  # later tokens are older
    assert latest_checkpoint(output / "checkpoints") is not None
