"""`dapo run configs/arith_cpu_moe.yaml`, shortened: a mixture learns, and is merged and served."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_core.metrics.log import METRICS_FILE
from durable import read_json_lines
from tasks.runs.history import REPORT_FOLDER, read_runs

ROOT = Path(__file__).parents[2]
NUM_EVAL, NUM_STEPS = 40, 16
SHORT = {
    "data.arithmetic.num_eval": NUM_EVAL,
    "train.total_steps": NUM_STEPS,
    "validation.every": 0,
}
pytestmark = pytest.mark.timeout(1500)  # on two busy cores


def test_a_mixture_of_experts_learns_through_the_whole_chain(tmp_path: Path) -> None:
    changes = {**SHORT, "store.path": tmp_path / "store"}
    overrides = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "flows.cli", "run", "configs/arith_cpu_moe.yaml", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [finished] = read_runs(tmp_path / "store")
    report = json.loads((finished.folder / REPORT_FOLDER / "report.json").read_text())
    assert report["n"] == NUM_EVAL
    assert report["before"]["model"] != report["after"]["model"]
    lines = read_json_lines(Path(finished.stages["train_policy"].artifact) / METRICS_FILE)
    accuracy = [line["sampler/accuracy"] for line in lines]
    assert len(accuracy) == NUM_STEPS
    assert sum(accuracy[-5:]) / 5 > sum(accuracy[:5]) / 5 + 0.05
    for line in lines:
        assert line["router/load/max"] >= 1 >= line["router/load/min"]
        assert line.get("rollout/fresh_log_probs_diff_mean", 0.0) < 1e-4
    merged = Path(finished.stages["merge_checkpoint"].artifact) / "config.json"
    assert json.loads(merged.read_text())["model_type"] == "qwen3_moe"
