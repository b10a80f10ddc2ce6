"""`make demo-smollm2`, shortened: a pretrained chat model answers, trains and is compared."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_core.metrics.log import METRICS_FILE
from durable import read_json_lines
from tasks.runs.history import REPORT_FOLDER, read_runs

ROOT = Path(__file__).parents[2]
NUM_EVAL, NUM_STEPS = 60, 2
SHORT = (f"train.total_steps={NUM_STEPS}", "validation.every=0")
pytestmark = pytest.mark.timeout(1500)  # on two busy cores


def commands() -> list[list[str]]:
    """The Makefile's three commands: download, conversion, chain."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndemo-smollm2:", 1)[1]
    found = re.findall(r"^\t\$\(BIN\)/(.+)$", lines.split("\n\n", 1)[0], re.M)
    return [shlex.split(line.replace("configs/", f"{ROOT}/configs/")) for line in found]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    modules = {"pip": ["-m", "pip"], "dapo": ["-m", "flows.cli"], "python": []}
    return subprocess.run(
        [sys.executable, *modules[words[0]], *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_pretrained_model_answers_trains_and_is_compared(tmp_path: Path) -> None:
    download, convert, chain = commands()
    fetched = run(download, tmp_path)
    if fetched.returncode:
        pytest.skip(f"pip cannot download the model here: {fetched.stderr.strip()[-300:]}")
    converted = run(convert, tmp_path)
    assert converted.returncode == 0, converted.stderr[-3000:]
    held_out = tmp_path / ".smollm2/eval.csv"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[: NUM_EVAL + 1]))
    changes = [word for change in SHORT for word in ("--set", change)]
    done = run([*chain, *changes, "--set", f"store.path={tmp_path / 'store'}"], tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [finished] = read_runs(tmp_path / "store")
    report = json.loads((finished.folder / REPORT_FOLDER / "report.json").read_text())
    # 28.7 % before training, and an answer in the right form almost always (docs/real-model.md)
    before = report["before"]
    assert (before["n"], report["n"]) == (NUM_EVAL, NUM_EVAL)
    assert 0.1 < before["accuracy"] < 0.6
    assert before["no_answer_rate"] + before["truncated_rate"] <= 0.1
    assert before["model"] != report["after"]["model"]
    training = Path(finished.stages["train_policy"].artifact)
    steps = list(read_json_lines(training / METRICS_FILE))
    assert len(steps) == NUM_STEPS
    # the engine and the policy hold the same weights, and each step has 16 groups with signal
    assert all(step["rollout/fresh_probs_diff_mean"] < 0.05 for step in steps)
    assert all(step["perf/max_rss_gb"] < 3.6 for step in steps)  # GiB; the plan says 3.22
