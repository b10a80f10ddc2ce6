"""`dapo plan CONFIG --time`: the estimate for a recipe, calibrated by a run of the same name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from dapo_core.metrics.log import METRICS_FILE
from flows.config import load_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.runs.history import read_run, require_artifact
from tasks.runs.step_time import time_of
from tests.recorded_runs import record_run, small_config

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
