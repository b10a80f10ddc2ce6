"""Trainings with another trainer: a stand-in for verl, a tiny model, prepared data and a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from durable import read_json_lines
from flows.config import Config, resolve_config
from tasks import chain
from tasks.external.launch import Inputs
from tasks.runs.run import Run
from tests.stand_in_trainer import install
from tests.tiny_models import build_tiny

TRAIN = {
    "backend": "verl",
    "device": "cuda",
    "train_prompts": 8,
    "mini_prompts": 4,
    "micro_batch_tokens": 512,
}


def make_place(folder: Path) -> Path:
    """A folder with a model, prepared data, and an environment with the stand-in."""
    install(folder / "site")
    build_tiny(folder / "model", "qwen3", positions=512)
    with Run.start(config_of(folder, folder / "store"), flow="prepare-data") as run:
        data = Path(chain.prepare_data.fn(run).result().path)
    (folder / "data").symlink_to(data)
    return folder


def config_of(place: Path, store: Path, orders: str = "light", **changes: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "other"},
        "store": {"path": str(store)},
        "data": {
            "train": "arithmetic",
            "eval": "arithmetic",
            "max_prompt_tokens": 96,
            "arithmetic": {"num_train": 64, "num_eval": 8},
        },
        "model": {"path": str(place / "model")},
        "reward": {"overlong": {"buffer_tokens": 8}},
        "rollout": {"max_response_tokens": 32, "group_size": 4},
        "sampler": {"gen_prompts": 8},
        "train": {**TRAIN, "total_steps": 6},
        "checkpoint": {"save_every": 2},
        "external": {
            "python": sys.executable,
            "version": "0.9.1",
            "env": {"PYTHONPATH": str(place / "site"), "STAND_IN": orders},
        },
        "serve": {"max_model_len": 256},
        "evaluate": {"max_response_tokens": 32},
    }
    tree = {
        name: {**sections.get(name, {}), **changes.get(name, {})}
        for name in {**sections, **changes}
    }
    return resolve_config(tree)


def inputs(place: Path, output: Path) -> Inputs:
    output.mkdir(exist_ok=True)
    return Inputs(
        place / "data/train.parquet", place / "model", output, place / "data/eval.parquet"
    )


def steps(output: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(output / "metrics.jsonl")]
