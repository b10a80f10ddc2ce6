"""The README's "Your data and your model", typed with a small model and real rows where there are any."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import build_tiny

ROOT = Path(__file__).parents[2]
SECTION, END = "## Your data and your model", "`dapo init` writes"
NUM_ROWS = 80  # of which 8 are held out
# A random model is right by chance with this scorer; one step is as many as show that it trains.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 2
"""
SHORT = ["custom_reward.path=reward.py", "train.total_steps=1", "rollout.max_response_tokens=32",
         "reward.overlong.buffer_tokens=8", "evaluate.max_response_tokens=32"]  # fmt: skip
pytestmark = pytest.mark.timeout(900)  # on two busy cores


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(SECTION, 1)[1].split(END, 1)[0]
    return [line.partition(" #")[0].strip() for line in re.findall(r"^    (dapo .+)$", text, re.M)]


def write_questions(path: Path) -> None:
    """Rows of GSM8K where they are, else made ones, as a spreadsheet exports them."""
    file = Path(os.environ.get("DAPO_TEST_DATA", "")) / "gsm8k/train.jsonl"
    rows = [(f"Tom has {n} apples and buys {n + 1}. How many has he?", str(2 * n + 1)) for n in range(NUM_ROWS)]
    if file.is_file():
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:NUM_ROWS]]
        rows = [(line["question"], line["answer"].rpartition("#### ")[2]) for line in lines]
    with path.open("w", encoding="utf-8", newline="") as output:
        csv.writer(output).writerows([("Question", "Answer"), *rows])


def typed(line: str, folder: Path, *more: str) -> str:
    """What the command prints; it must end well."""
    words = [sys.executable, "-m", "flows.cli", *shlex.split(line)[1:], *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_three_commands_lead_from_files_to_the_report(tmp_path: Path) -> None:
    build_tiny(tmp_path / "models/Qwen3-0.6B", "qwen3", positions=2048)
    write_questions(tmp_path / "questions.csv")
    (tmp_path / "reward.py").write_text(REWARD)
    init, plan, run = readme_commands()
    assert [line.split()[1] for line in (init, plan, run)] == ["init", "plan", "run"]
    assert "next: dapo plan my.yaml" in typed(init, tmp_path)
    assert re.search(r"preflight: \d+ checks, nothing in the way", typed(plan, tmp_path))
    changes = [word for change in SHORT for word in ("--set", change)]
    typed(run, tmp_path, *changes)
    (report,) = (tmp_path / ".dapo/runs").glob("*/report/report.json")
    found = json.loads(report.read_text())
    assert (found["n"], found["train"]["steps"]) == (8, 1)
