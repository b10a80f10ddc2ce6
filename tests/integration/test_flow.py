"""The whole chain by its real command, small: real training, merge, two real servers; then what a rerun does."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = [
    "prepare_data",
    "fetch_model",
    "evaluate_before",
    "train_policy",
    "merge_checkpoint",
    "evaluate_after",
]
SMALL = (
    "data.arithmetic.num_train=128",
    "data.arithmetic.num_eval=24",
    "model.recipe.num_steps=20",
    "sampler.dynamic=false",
    "sampler.gen_prompts=4",
    "rollout.engine=hf",
    "rollout.group_size=4",
    "train.total_steps=2",
    "train.train_prompts=4",
    "train.mini_prompts=4",
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """A `dapo run` that ended well."""

    output: str
    seconds: float
    record: dict[str, Any]
    report: dict[str, Any]
    folder: Path


def dapo(folder: Path, command: str, *changes: str) -> subprocess.CompletedProcess[str]:
    """`dapo COMMAND`, one word or more, with the small recipe in its own process; all its files in the folder."""
    changes = (f"store.path={folder / 'store'}", *SMALL, *changes)
    overrides = [word for change in changes for word in ("--set", change)]
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *command.split(), "configs/arith_cpu.yaml", *overrides],
        cwd=ROOT,
        env={**os.environ, "PREFECT_HOME": str(folder / "prefect"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def run_chain(folder: Path) -> Finished:
    started = time.monotonic()
    done = dapo(folder, "run")
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    newest = max((folder / "store" / "runs").iterdir())
    record = json.loads((newest / "run.json").read_text())
    report = json.loads((newest / "report" / "report.json").read_text())
    logger.info("dapo run took %.1f s, stages %s", seconds, {k: v["seconds"] for k, v in record["stages"].items()})
    return Finished(done.stdout, seconds, record, report, newest)


def which_cached(finished: Finished) -> dict[str, bool]:
    return {label: stage["cached"] for label, stage in finished.record["stages"].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def first(folder: Path) -> Finished:
    return run_chain(folder)


@pytest.fixture(scope="module")
def second(folder: Path, first: Finished) -> Finished:
    return run_chain(folder)


def test_the_report_has_what_machines_read(first: Finished) -> None:
    report = first.report
    for side in ("before", "after"):
        assert report[side]["n"] == 24
        assert sum(level["n"] for level in report[side]["by_level"].values()) == 24
        for rate in ("accuracy", "no_answer_rate", "truncated_rate"):
            assert 0 <= report[side][rate] <= 1
    assert report["difference"] == pytest.approx(report["after"]["accuracy"] - report["before"]["accuracy"])
    low, high = report["ci95"]
    assert low <= report["difference"] <= high
    assert (report["mcnemar"]["b"], report["mcnemar"]["c"]) == (
        len(report["flips"]["lost"]),
        len(report["flips"]["gained"]),
    )
    assert 0 < report["mcnemar"]["p"] <= 1
    # without dynamic sampling every generated token is trained on
    train = report["train"]
    assert (train["steps"], train["tokens_trained"]) == (2, train["tokens_generated"])
    assert train["tokens_trained"] >= 2 * 4 * 4  # steps x prompts x responses, each at least one token
    assert list(report["stages"]) == STAGES == list(report["artifacts"])
    assert not any(stage["cached"] for stage in report["stages"].values())
    assert all(Path(path).is_dir() for path in report["artifacts"].values())


def test_the_run_folder_records_and_links_everything(first: Finished) -> None:
    record = first.record
    assert (record["name"], record["id"], list(record["stages"])) == ("arith_cpu", first.folder.name, STAGES)
    assert record["report"]["n"] == 24
    assert 0 < sum(stage["seconds"] for stage in record["stages"].values()) < record["seconds"] < first.seconds
    for label, stage in record["stages"].items():
        link = first.folder / label
        assert link.is_symlink()
        assert str(link.resolve()) == stage["artifact"]
        assert json.loads((link / "manifest.json").read_text())["key"] == stage["key"]
    assert (first.folder / "merge_checkpoint" / "model.safetensors").is_file()
    assert len((first.folder / "train_policy" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (first.folder / "report" / "report.html").stat().st_size > 10_000


def test_the_model_did_change(first: Finished) -> None:
    before = (first.folder / "fetch_model" / "model.safetensors").read_bytes()
    assert (first.folder / "merge_checkpoint" / "model.safetensors").read_bytes() != before


def test_the_console_names_each_stage_once_it_is_built(first: Finished) -> None:
    lines = first.output.splitlines()
    for label in STAGES:
        assert sum(f"{label:<16} built in " in line for line in lines) == 1
    assert "Finished in state" not in first.output
    timed = [line for line in lines if line[2:3] == ":" == line[5:6]]
    assert len(timed) == len(set(timed)) > 20


def test_plan_finds_everything_cached(folder: Path, first: Finished) -> None:
    done = dapo(folder, "plan")
    rows = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [(label, "cached") for label in STAGES]
    assert [row[4].strip() for row in rows] == [stage["key"][:16] for stage in first.record["stages"].values()]


def test_a_second_run_is_all_cached_and_quick(first: Finished, second: Finished) -> None:
    assert which_cached(second) == dict.fromkeys(STAGES, True)
    assert second.seconds < 60  # about 20 s on two idle cores, most of them Prefect's start
    assert second.report["artifacts"] == first.report["artifacts"]
    assert second.report["after"] == first.report["after"]
    for label in STAGES:
        assert f"{label:<16} cached, built in " in second.output


def test_the_report_alone_is_written_again_from_the_store(folder: Path, first: Finished) -> None:
    done = dapo(folder, "stage compare")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = max((folder / "store" / "runs").iterdir())
    record = json.loads((run / "run.json").read_text())
    assert (record["flow"], record["state"]) == ("compare", "completed")
    assert record["report"] == first.record["report"]
    assert {stage["artifact"] for stage in record["stages"].values()} == set(first.report["artifacts"].values())
    assert f"Report with plots: {run / 'report' / 'report.html'}" in done.stdout.replace("\n", "")


def test_an_error_that_a_retry_cannot_mend_is_told_once(folder: Path, first: Finished) -> None:
    done = dapo(folder, "run", "data.max_prompt_tokens=1")
    said = done.stdout + done.stderr
    assert done.returncode == 2
    assert said.count("prompts are longer than data.max_prompt_tokens=1") == 1
    assert done.stderr.startswith("ChildProcessFailed: train_policy ended with exit code 2; its log is ")
    assert "the next one begins" not in said
    assert "Traceback" not in said


def test_only_a_damaged_model_is_made_again_even_when_prefect_forgot_all(
    folder: Path, first: Finished, second: Finished
) -> None:
    shutil.rmtree(folder / "prefect")
    weights = (first.folder / "merge_checkpoint" / "model.safetensors").resolve()
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    mended = run_chain(folder)
    # The same shards give the same bytes, so what depends on the model is still valid.
    assert which_cached(mended) == {label: label != "merge_checkpoint" for label in STAGES}
    assert weights.read_bytes() == good
    [aside] = (folder / "store" / ".damaged").glob("merge_checkpoint-*")
    assert (aside / "model.safetensors").read_bytes() != good
    assert "is damaged: model.safetensors" in mended.output
