"""Ctrl-C while a run trains: a last checkpoint, no process left, and the same command continues from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.operated import CONFIG, ROOT, SMALL, Site, describe

NUM_STEPS = 12
START_SECONDS = 180.0
GONE_SECONDS = 40.0
# Only the last step is due to be saved.
CHANGES = (f"train.total_steps={NUM_STEPS}", "checkpoint.save_every=100", "validation.every=0")


def metrics_lines(folder: Path) -> list[bytes]:
    return [line for path in folder.glob("metrics.jsonl") for line in path.read_bytes().splitlines()]


def records(site: Site) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in site.store.glob("runs/*/run.json")]
    return sorted(found, key=lambda record: record["started_at"])


def test_a_training_that_ctrl_c_cancels_continues_from_its_last_step(tmp_path: Path) -> None:
    site = Site(tmp_path, (*SMALL, *CHANGES))
    for stage in ("prepare-data", "fetch-model"):
        done = site.dapo_chain("stage", stage)
        assert done.returncode == 0, done.stdout + done.stderr
    command = [sys.executable, "-m", "flows.cli", "stage", "train-policy", CONFIG]
    command += [word for change in site.changes() for word in ("--set", change)]
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **site.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        site.wait_for(
            "two steps",
            lambda: (
                run.poll() is not None
                or any(len(metrics_lines(folder)) >= 2 for folder in site.store.glob(".work/train_policy-*"))
            ),
            START_SECONDS,
        )
        assert run.poll() is None, log.read_text()
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        run.wait(GONE_SECONDS)
        assert describe(site.processes()) == []
    finally:
        site.end_everything()
        run.wait(GONE_SECONDS)
    said = log.read_text()
    assert run.returncode == 130, said
    assert "Traceback" not in said
    assert records(site)[-1]["state"] == "cancelled"
    [folder] = site.store.glob(".work/train_policy-*")
    before = metrics_lines(folder)
    assert 2 <= len(before) < NUM_STEPS
    assert (folder / "checkpoints/latest").read_text().strip() == f"step_{len(before):06d}"

    again = site.dapo_chain("stage", "train-policy")
    assert again.returncode == 0, again.stdout + again.stderr
    assert describe(site.processes()) == []
    [folder] = site.store.glob("train_policy/*")
    lines = metrics_lines(folder)
    assert lines[: len(before)] == before
    assert [json.loads(line)["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert records(site)[-1]["state"] == "completed"
