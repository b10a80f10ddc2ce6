"""A fully cached chain: its report is written again without a Prefect server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from flows.cli.chain import print_report
from flows.dapo_full import outcome
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.runs.history import read_runs
from tasks.runs.plan import has_output, is_built
from tasks.runs.report import repeat_chain
from tasks.runs.run import Run
from tests.recorded_runs import record_run, small_config
from tests.webhooks import started_receiver


def built_again(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process without a Prefect server, with PREFECT_HOME in the folder."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    }
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=PROJECT_ROOT,
        env={**environment, "PREFECT_HOME": str(folder / "prefect")},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_failed_gate_is_recorded_named_and_exit_status_3(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store", "evaluate.gates=[pooled >= 0, pooled >= 101]")
    record_run(config)
    with Run.start(config) as run:
        report = repeat_chain(run)
    measured = f"{100 * report['after']['accuracy']:.4g}"
    assert (
        f"GATES FAILED, 1 of 2: pooled >= 101 (measured {measured}, threshold 101 %)."
        in report["verdict"]
    )
    assert next(read_runs(tmp_path / "store")).report["failed_gates"] == ["pooled >= 101"]  # type: ignore[index]
    with pytest.raises(typer.Exit) as ended:
        print_report(run.folder / "report")
    assert ended.value.exit_code == 3
    state = outcome({"run": "", "verdict": report["verdict"], "is_failed": report["is_failed"]})
    assert (state.name, state.is_completed(), state.message) == (
        "GateFailed",
        True,
        report["verdict"],
    )
    assert outcome(passed := {"is_failed": False}) is passed


def test_outputs_count_as_stored_only_if_intact(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    assert not is_built(config)
    run = record_run(config)
    assert is_built(config)
    assert has_output(config, "merge_checkpoint")
    assert not has_output(
        small_config(tmp_path / "store", "merge.dtype=float16"), "merge_checkpoint"
    )
    (Path(run.stages["merge_checkpoint"].artifact) / "weights").write_text("something else")
    assert not is_built(config)
    assert not has_output(config, "merge_checkpoint")


@pytest.mark.slow
def test_dapo_run_of_a_built_chain_starts_no_server(tmp_path: Path) -> None:
    with started_receiver() as receiver:
        config = small_config(tmp_path / "store", f"flow.webhook.url={receiver.url()}")
        record_run(config)
        resolved = tmp_path / "recipe.yaml"
        resolved.write_text(
            next(read_runs(tmp_path / "store")).folder.joinpath("config.yaml").read_text()
        )
        done = built_again(tmp_path, "run", resolved)
    assert done.returncode == 0, done.stderr
    newest = next(read_runs(tmp_path / "store"))
    assert (newest.state, newest.num_built, newest.num_cached) == ("completed", 0, 6)
    assert newest.report is not None
    assert len(re.findall(r" cached, built in ", done.stdout)) == 6
    assert "without a Prefect server" in done.stdout
    assert str(newest.folder / "report" / "report.html") in done.stdout
    assert not (tmp_path / "prefect" / "prefect.db").exists()
    [(_, body)] = receiver.received
    assert (body["event"], body["run"]) == ("report", newest.id)
    record = json.loads((newest.folder / "report" / "report.json").read_text())
    assert all(stage["cached"] for stage in record["stages"].values())


@pytest.mark.slow
def test_dapo_stage_of_a_stored_output_starts_no_server(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    built = record_run(config)
    done = built_again(tmp_path, "stage", "evaluate-model", built.config_path, "--side", "before")
    assert done.returncode == 0, done.stderr
    assert "not starting a Prefect server" in done.stdout
    assert done.stdout.endswith(f"{built.stages['evaluate_before'].artifact}\n")
    newest = next(read_runs(tmp_path / "store"))
    assert (newest.flow, newest.state, newest.num_built) == ("evaluate-model", "completed", 0)
    assert newest.stages["evaluate_before"].cached
    assert not (tmp_path / "prefect" / "prefect.db").exists()
