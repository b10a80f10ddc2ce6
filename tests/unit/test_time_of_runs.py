"""`dapo plan CONFIG --time`: the estimate for a recipe, calibrated by a run of the same name."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import AutoTokenizer

from dapo_core.errors import ConfigError
from dapo_core.metrics.log import METRICS_FILE
from flows.config import load_config, resolve_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.runs.history import read_run, require_artifact
from tasks.runs.step_time import run_time, time_of
from tests.recorded_runs import record_run, small_config
from tests.tiny_models import build_tiny_qwen3
from tests.trainings import settings

RECIPE = str(PROJECT_ROOT / "configs/dapo_qwen3_8b_math.yaml")


def test_a_run_of_the_same_name_calibrates_the_estimate(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    plain = time_of(config)
    run = record_run(config)
    metrics = Path(require_artifact(read_run(run.folder), "train_policy").path) / METRICS_FILE
    lengths = {
        "response_length/mean": 20.0,
        "prompt_length/mean": 8.0,
        "perf/total_num_tokens": 448.0,
    }
    seconds = {"timing_s/gen": 30.0, "timing_s/update_actor": 5.0, "timing_s/weight_sync": 1.0}
    metrics.unlink()
    metrics.write_text(json.dumps({**lengths, **seconds, "perf/generated_tokens": 640.0}) + "\n")
    found = time_of(config)
    assert found.seconds["generate"] == pytest.approx(30.0)
    assert found.seconds["update"] == pytest.approx(5.0)
    assert found.seconds["publish"] == pytest.approx(1.0)
    assert "medians of 1 steps of the run" in found.assumptions[0]
    assert "50% of generated tokens" in found.assumptions[0]  # 320 of 640
    fewer = time_of(small_config(tmp_path / "store", "train.train_prompts=8"))  # of 16
    assert fewer.seconds["update"] == pytest.approx(2.5, rel=0.01)
    other = time_of(small_config(tmp_path / "store", "run.name=other"))
    assert other == plain


def test_an_accelerator_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"set train\.device_model to one of Atlas 800T A2"):
        time_of(load_config(RECIPE, ["train.device_model=null"]))


def test_prompts_of_local_files_are_measured_and_the_whole_run_is_estimated(tmp_path: Path) -> None:
    model = build_tiny_qwen3(tmp_path / "model")
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    for name, part in (("train", rows[8:]), ("eval", rows[:8])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
    recipe = settings(data={**data, "max_prompt_tokens": 96, "prompt_template": "{problem}"})
    recipe |= {"model": {"path": str(model)}, "store": {"path": str(tmp_path / "store")}}
    recipe["train"]["total_steps"] = 10
    config = resolve_config(recipe)
    found = run_time(config)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = [[{"role": "user", "content": row["problem"]}] for row in rows[8:]]
    lengths = [
        len(tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"])
        for one in prompts
    ]
    assert found.step.lengths.prompt == pytest.approx(mean(lengths))
    assert (found.num_steps, found.num_evaluations, found.num_responses) == (10, 2, 8)
    per_token = found.step.seconds["generate"] / found.step.generated_tokens
    evaluations = 2 * 8 * found.step.lengths.response * per_token
    assert found.seconds == pytest.approx(10 * found.step.step_seconds + evaluations)
