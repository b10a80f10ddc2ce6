"""Small trainings for tests: their data, their model, and a recipe to vary."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dapo_core.config.warm_start import WarmStartConfig
from dapo_core.demo.arithmetic import Row, generate_problems
from dapo_core.demo.warm_start import build_model
from flows.config import Config, resolve_config

NUM_PROBLEMS = 200

SETTINGS: dict[str, dict[str, Any]] = {
    # what a step keeps must not hang on speed: runs are compared
    "run": {"seed": 3, "deterministic": True},
    "data": {"train": "arithmetic", "eval": "arithmetic", "max_prompt_tokens": 96},
    "model": {"source": "recipe"},
    "reward": {"overlong": {"buffer_tokens": 8}},
    # Without dynamic sampling every group is kept, so a barely trained model will do; 6 prompts
    # drawn for 4 needed leave surplus groups, which checkpoints must carry.
    "sampler": {"gen_prompts": 6, "dynamic": False},
    "rollout": {
        "engine": "hf",
        "group_size": 4,
        "max_response_tokens": 24,
        "threads_per_worker": 1,
    },
    "train": {
        "num_ranks": 2,
        "train_prompts": 4,
        "mini_prompts": 2,
        "micro_batch_tokens": 512,
        "learning_rate": 1e-3,
        # longer than the interrupted part, so the schedule's position must survive as well
        "warmup_steps": 6,
    },
    "checkpoint": {"save_every": 1, "keep_last": 2},
    "serve": {"max_model_len": 192},
    "evaluate": {"max_response_tokens": 24},
}


@dataclass(frozen=True)
class World:
    """Training data and a model that has begun to learn it."""

    data: Path
    model: Path


def write_parquet(rows: list[Row], path: Path) -> None:
    """Write rows as one parquet file with the columns and types of DAPO-Math-17k."""
    pq.write_table(pa.Table.from_pylist(rows), path)


def build_world(folder: Path) -> World:
    """The easiest problems, and a model after a few supervised steps: it gets nothing right."""
    rows = generate_problems(NUM_PROBLEMS, 1, 1, seed=0)[0]
    write_parquet(rows, folder / "train.parquet")
    recipe = WarmStartConfig(hidden_size=32, num_heads=2, num_steps=20, batch_size=8)
    build_model(rows, folder / "model", recipe, seed=0, num_threads=1)
    return World(folder / "train.parquet", folder / "model")


def settings(**changes: dict[str, Any]) -> dict[str, Any]:
    """The recipe with the given keys, by section."""
    return {
        name: {**SETTINGS.get(name, {}), **changes.get(name, {})}
        for name in {**SETTINGS, **changes}
    }


def config_of(**changes: dict[str, Any]) -> Config:
    """The resolved recipe with the given keys, by section."""
    return resolve_config(settings(**changes))
