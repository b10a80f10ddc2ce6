"""The commands of the README's "Your data and your model", with a small model and real rows if
available.
"""

import csv
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import heartbeat
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import train
from durable import read_json_lines
from flows.cli import app
from flows.config import load_config
from tasks.preflight.finding import OK, WARN
from tasks.preflight.run import examine
from tests.in_process import without_ray
from tests.tiny_models import Architecture, build_tiny

ROOT = Path(__file__).parents[2]
SECTION, END = "## Your data and your model", "`dapo init` writes"
NUM_ROWS = 80  # of which 8 are held out
# A random model is right by chance with this scorer; one step is enough to show that it trains.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 2
"""
SHORT = [
    "custom_reward.path=reward.py",
    "train.total_steps=1",
    "rollout.max_response_tokens=32",
    "reward.overlong.buffer_tokens=8",
    "evaluate.max_response_tokens=32",
]
pytestmark = pytest.mark.timeout(900)  # on two busy cores


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(SECTION, 1)[1].split(END, 1)[0]
    return [line.partition(" #")[0].strip() for line in re.findall(r"^    (dapo .+)$", text, re.M)]


def rows_of(path: str) -> Any:
    """The first rows of a benchmark file; None if it is missing."""
    file = Path(os.environ.get("DAPO_TEST_DATA", "missing")) / path
    if not file.is_file():
        return None
    if file.suffix == ".parquet":
        return pq.read_table(file).slice(0, NUM_ROWS).to_pylist()
    text = file.read_text(encoding="utf-8")
    rows = (
        json.loads(text)
        if file.suffix == ".json"
        else [json.loads(line) for line in text.splitlines()]
    )
    return rows[:NUM_ROWS]


def write_gsm8k(path: Path) -> None:
    """Questions and answers as a spreadsheet exports them."""
    found = rows_of("gsm8k/train.jsonl")
    rows = [
        (f"Tom has {n} apples and buys {n + 1}. How many has he?", str(2 * n + 1))
        for n in range(NUM_ROWS)
    ]
    if found is not None:
        rows = [(row["question"], row["answer"].rpartition("#### ")[2]) for row in found]
    with path.open("w", encoding="utf-8", newline="") as output:
        csv.writer(output).writerows([("Question", "Answer"), *rows])


def write_dapo_math(path: Path) -> None:
    """Rows in verl's schema."""
    made = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {n} + {n}? Answer: $Answer"}],
            "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
            "extra_info": {"index": str(n)},
        }
        for n in range(NUM_ROWS)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows_of("dapo_math_17k/sample_original_schema.parquet") or made), path
    )


def write_choices(path: Path) -> None:
    """Multiple-choice questions as instruction and output, the gold one in boxes, as CFLUE is
    published.
    """
    made = [
        {
            "instruction": f"单选题。\n{n} + 1 = （）。\nA. {n}\nB. {n + 1}\n"
            "请把答案放到\\boxed{}中。",
            "output": "<think>\n\n</think>\n<answer>\n答案选项为\\boxed{B}。\n</answer>",
        }
        for n in range(NUM_ROWS)
    ]
    rows = rows_of("cflue/cflue_mcq_dianjin_shape.json") or made
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def typed(line: str, folder: Path, *more: str) -> str:
    """The output of a command, which must succeed."""
    words = [sys.executable, "-m", "flows.cli", *shlex.split(line)[1:], *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def called(line: str) -> str:
    """The output of a command that succeeds in this process."""
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def commands() -> list[str]:
    """init, plan and run from the README."""
    commands = readme_commands()
    assert [line.split()[1] for line in commands] == ["init", "plan", "run"]
    return commands


def test_the_three_readme_commands_lead_from_files_to_a_report(
    commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `run` is a process of its own; it samples with the engine that starts fastest."""
    monkeypatch.chdir(tmp_path)
    build_tiny(tmp_path / "models/Qwen3-0.6B", "qwen3", positions=4096)
    write_gsm8k(tmp_path / "questions.csv")
    (tmp_path / "reward.py").write_text(REWARD)
    init, plan, run = commands
    assert "next: dapo plan my.yaml" in called(init)
    assert re.search(r"preflight: \d+ checks passed", called(plan))
    changes = [word for change in (*SHORT, "rollout.engine=hf") for word in ("--set", change)]
    typed(run, tmp_path, *changes)
    (report,) = (tmp_path / ".dapo/runs").glob("*/report/report.json")
    found = json.loads(report.read_text())
    assert (found["n"], found["train"]["steps"]) == (8, 1)


def test_a_try_shows_what_the_model_answers_and_what_to_change_without_signal(
    commands: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A random model answers nothing right, unless a scorer says so by chance."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "SECONDS", 1.0)
    build_tiny(tmp_path / "models/Qwen3-0.6B", "qwen3", positions=4096)
    write_gsm8k(tmp_path / "questions.csv")
    (tmp_path / "reward.py").write_text(REWARD)
    called(commands[0])
    changes = [*SHORT[1:], "rollout.engine=hf"]
    for chance in ([], SHORT[:1]):
        settings = load_config(Path("my.yaml"), [*changes, *chance])
        with caplog.at_level(logging.INFO, "heartbeat"), heartbeat.heartbeat(lambda: "trying"):
            found = examine(settings, is_sampled=True)
        assert "hf samples 8 x 8 responses (" in caplog.text
        [sampling] = [finding for finding in found if finding.check == "sampling"]
        shares = r"(\S+)% right, (\S+)% no answer, (\S+)% cut, (\d+) tokens each"
        line = rf"8 prompts x 8 responses at temperature 1: {shares}; (\d) of 8 groups have signal"
        match = re.match(line, sampling.found)
        assert match is not None, sampling
        right, _, _, tokens, num_with_signal = match.groups()
        assert int(tokens) <= 32
        if chance:
            assert sampling.status == OK
            assert float(right) > 10
            assert int(num_with_signal) > 0
        else:
            assert (sampling.status, float(right), int(num_with_signal)) == (WARN, 0.0, 0)
            assert "solved examples" in sampling.advice
            assert sampling.advice.count(" -> ") == 2  # two responses with verdict and gold


@pytest.mark.parametrize(
    ("architecture", "data", "write"),
    [("qwen2", "math.parquet", write_dapo_math), ("llama", "choices.json", write_choices)],
)
def test_other_file_formats_and_models_plan_clean_and_train(
    commands: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    architecture: Architecture,
    data: str,
    write: Callable[[Path], None],
) -> None:
    """In this process; tests of merging and of the engines serve models of each architecture."""
    monkeypatch.chdir(tmp_path)
    model = build_tiny(tmp_path / "models/Qwen3-0.6B", architecture, positions=4096)
    write(tmp_path / data)
    (tmp_path / "reward.py").write_text(REWARD)
    lines = [line.replace("questions.csv", data) for line in commands[:2]]
    said = [called(line) for line in (*lines, "dapo prepare-data my.yaml --output prepared")]
    assert re.search(r"preflight: \d+ checks passed", said[1])
    assert re.fullmatch(r"prepared: 72 training and 8 held-out problems", said[2].strip())
    config = load_config(Path("my.yaml"), [*SHORT, "rollout.engine=hf"])
    with without_ray():
        train(
            config,
            Path("prepared/train.parquet"),
            model,
            Path("output"),
            held_out_path=Path("prepared/eval.parquet"),
        )
    (step,) = read_json_lines(Path("output") / METRICS_FILE)
    assert step["actor/grad_norm"] > 0
