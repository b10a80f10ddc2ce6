"""What a collection removes, what it leaves, and what its command says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.tables import print_garbage
from tasks.artifacts import ArtifactStore, StageKey, held
from tasks.runs.collect_garbage import Unused, _kept, collect_garbage
from tasks.runs.history import artifact_of, read_runs, short_ids
from tasks.runs.run import Run, current_stage
from tasks.stage_command import link_log
from tasks.stages import LINKS
from tests.garbage import artifacts, collect, make_old, names, nights, own_of
from tests.recorded_runs import Outcome, record_run, small_config


def test_what_no_kept_run_uses_goes_and_the_rest_stays(tmp_path: Path) -> None:
    first, second, third = nights(tmp_path, "one", "two", "three")
    before = artifacts(tmp_path)
    would_go = collect(tmp_path, keep_runs=2, is_dry_run=True)
    assert names(would_go) == own_of(first)
    assert artifacts(tmp_path) == before
    freed = {item.path.name: item for item in would_go}
    trained = first.stages["train_policy"]
    size = sum(path.stat().st_size for path in Path(trained.artifact).iterdir())
    assert (freed[trained.key[:16]].frees_bytes, freed[trained.key[:16]].last_run) == (size, first.folder.name)
    assert collect(tmp_path, keep_runs=2) == would_go
    assert artifacts(tmp_path) == before - own_of(first)
    assert collect(tmp_path, keep_runs=2) == []
    left = {path.name.partition("-")[2].partition(".")[0] for folder in (".locks", ".verified", ".logs")
            for path in tmp_path.glob(f"{folder}/*")}  # fmt: skip
    assert left.isdisjoint(own_of(first))
    assert own_of(second) | own_of(third) <= left
    assert list((tmp_path / ".removed").iterdir()) == []
    # The run's folder stays, with its report; what is gone is said to be.
    recorded = list(read_runs(tmp_path))[-1]
    assert (recorded.id, (recorded.folder / "report" / "report.json").exists()) == (first.folder.name, True)
    assert artifact_of(recorded, "train_policy") is None
    assert artifact_of(recorded, "fetch_model") is not None
    shown = CliRunner().invoke(app, ["runs", "show", recorded.id, "--store", str(tmp_path)])
    assert len(re.findall("removed, by dapo gc or by hand", shown.stdout)) == 3
    # And is made again when it is wanted.
    again = record_run(small_config(tmp_path, "train.total_steps=60"), Outcome(weights="one"))
    assert not again.stages["train_policy"].cached


def test_fewer_reports_than_are_kept_keep_everything(tmp_path: Path) -> None:
    nights(tmp_path, "one", "two")
    assert collect(tmp_path, keep_runs=3) == []


def test_a_run_that_goes_on_keeps_what_it_uses(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    with Run.start(first.config, "evaluate-model") as user:
        user.take("train_policy")
        make_old(user.folder)
        record_run(small_config(tmp_path, "train.total_steps=61"))
        gone = names(collect(tmp_path))
        assert gone == own_of(first) - {first.stages["train_policy"].key[:16]}


def test_a_run_without_a_report_can_be_continued_for_a_day(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    failed = record_run(config, labels=("prepare_data", "fetch_model"), flow="fetch-model")
    nights_config = small_config(tmp_path, "run.seed=5")
    record_run(nights_config)
    assert collect(tmp_path) == []
    make_old(failed.folder)
    assert names(collect(tmp_path)) == {stage.key[:16] for stage in failed.stages.values()}


def test_a_long_training_can_be_continued_for_a_day_after_its_last_word(tmp_path: Path) -> None:
    """Its run recorded nothing since the stage before, days ago."""
    begun = ("prepare_data", "fetch_model", "evaluate_before")
    run = record_run(small_config(tmp_path), labels=begun, flow="train-policy")
    key = LINKS["train_policy"].key(run.config, {label: run.take(label) for label in begun[:2]})
    current = current_stage.set("train_policy")
    link_log(run, run.store.log_path(key.stage, key.key))
    current_stage.reset(current)
    for is_forced in (False, True):
        attempt = run.store.working_directory(key.stage, key.key, is_forced)
        (attempt / "checkpoints").mkdir(parents=True)
        record_run(small_config(tmp_path, "run.seed=5"))
        make_old(run.folder, *(tmp_path / ".work").iterdir())
        (attempt / "checkpoints" / "step_000002").mkdir()
        assert names(collect(tmp_path)) == set()
    make_old(*(tmp_path / ".work").iterdir())
    assert names(collect(tmp_path)) == {stage.key[:16] for stage in run.stages.values()}


@pytest.mark.parametrize(
    ("state", "days", "has_commands", "is_kept"),
    [
        ("running", 30, False, True),
        ("interrupted", 30, True, True),
        ("interrupted", 30, False, False),
        ("failed", 30, True, False),
        ("failed", 0.9, False, True),
        ("cancelled", 1.1, False, False),
    ],
)
def test_a_run_without_a_report_is_kept_while_it_may_go_on(
    tmp_path: Path, state: str, days: float, has_commands: bool, is_kept: bool
) -> None:
    run = record_run(small_config(tmp_path), labels=("prepare_data",), flow="prepare-data")
    make_old(run.folder, days=days)
    [recorded] = read_runs(tmp_path)
    newer = replace(recorded, folder=recorded.folder.with_name("30000101T000000.000Z-1"), report={})
    runs = [newer, replace(recorded, state=state)]
    (tmp_path / ".logs").mkdir()
    with held(tmp_path / ".logs" / "train_policy-0.log") if has_commands else contextlib.nullcontext():
        assert _kept(tmp_path, runs, 1) == {run.id for run in runs[: 1 + is_kept]}


def test_an_interrupted_run_keeps_its_inputs_while_a_command_goes_on(tmp_path: Path) -> None:
    """Training outlives the run that started it, and reads its data and model."""
    config = small_config(tmp_path)
    begun = record_run(config, labels=("prepare_data",), flow="prepare-data")
    record = json.loads((begun.folder / "run.json").read_text())
    (begun.folder / "run.json").write_text(json.dumps({**record, "state": "running"}))
    make_old(begun.folder)
    record_run(small_config(tmp_path, "run.seed=5"))
    (tmp_path / ".logs").mkdir()
    with held(tmp_path / ".logs" / "train_policy-0.log"):
        assert collect(tmp_path) == []
    assert names(collect(tmp_path)) == {begun.stages["prepare_data"].key[:16]}


def test_what_was_replaced_goes_with_its_last_user(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    old = record_run(config, Outcome(weights="old"))
    record_run(config, Outcome(weights="new"), ("train_policy",), "train-policy", ("train_policy",))
    record_run(config, Outcome(weights="new", after="rrww"))
    aside = f"{old.stages['train_policy'].key[:16]}.{old.stages['train_policy'].digest[:16]}"
    assert aside in artifacts(tmp_path)
    assert collect(tmp_path, keep_runs=2) == []
    assert aside in names(collect(tmp_path))
    current = ArtifactStore(tmp_path).lookup("train_policy", old.stages["train_policy"].key)
    assert current is not None
    assert (Path(current.path) / "weights").read_text() == "new"


def test_hard_links_free_nothing(tmp_path: Path) -> None:
    run = record_run(small_config(tmp_path), labels=("prepare_data", "fetch_model"), flow="fetch-model")
    record_run(small_config(tmp_path, "run.seed=5"))
    make_old(run.folder)
    artifact = Path(run.stages["fetch_model"].artifact)
    os.link(artifact / "weights", tmp_path / "the user's own")
    [item] = [item for item in collect(tmp_path, is_dry_run=True) if item.stage == "fetch_model"]
    assert item.frees_bytes == (artifact / "manifest.json").stat().st_size


def test_what_was_moved_aside_goes_on_demand(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    store = ArtifactStore(tmp_path)
    key = StageKey("probe", {}, {}, "c", {})
    made, _ = store.produce(key, lambda folder: {"n": (folder / "content").write_text("text")})
    (Path(made.path) / "content").write_text("damaged")
    assert store.lookup("probe", key.key) is None
    made_again, _ = store.produce(key, lambda folder: {"n": (folder / "content").write_text("text")})
    (tmp_path / ".removed").mkdir()  # of a collection that was killed
    shutil.copytree(made_again.path, tmp_path / ".removed" / f"probe-{key.key[:16]}-20260301T020000.000000Z")
    shutil.rmtree(made_again.path)
    (tmp_path / ".locks" / "run-1.lock").touch()  # of a run that was
    assert collect(tmp_path) == []
    assert list((tmp_path / ".removed").iterdir()) == []
    assert not (tmp_path / ".locks" / "run-1.lock").exists()
    [item] = collect(tmp_path, has_damaged=True)
    assert (item.stage, item.path.exists()) == ("damaged", False)


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_nobody_went_on_with_goes_on_demand(tmp_path: Path, is_forced: bool) -> None:
    run = record_run(small_config(tmp_path))
    trained = run.stages["train_policy"]
    store = ArtifactStore(tmp_path)
    key = trained.key if is_forced else "0" * 64
    attempt = store.working_directory("train_policy", key, is_forced)
    attempt.mkdir()
    (attempt / "checkpoint").write_text("a" * 1000)
    log_path = store.log_path("train_policy", key)
    log_path.parent.mkdir()
    files = [log_path.with_suffix(suffix) for suffix in (".log", ".stop", ".json")]
    for file in files:
        file.touch()
    make_old(attempt, run.folder)
    record_run(small_config(tmp_path, "run.seed=5"))
    assert trained.key[:16] in names(collect(tmp_path))  # a forced attempt does not pin what it was to replace
    [kept] = collect(tmp_path, is_dry_run=True)
    assert (kept.path, kept.stage, kept.left) == (attempt, "unfinished", "--unfinished removes it")
    assert kept.frees_bytes == 1000
    assert all(file.exists() for file in files)
    for lock_path in (log_path, tmp_path / ".locks" / f"train_policy-{key[:16]}.lock"):
        with held(lock_path):
            assert collect(tmp_path, has_unfinished=True) == []
    (attempt / "checkpoint").touch()
    assert collect(tmp_path, has_unfinished=True) == []
    make_old(attempt)
    [gone] = collect(tmp_path, has_unfinished=True)
    assert (gone.path, gone.left) == (attempt, "")
    assert not any(path.exists() for path in (attempt, *files))
    assert not (tmp_path / ".locks" / f"train_policy-{key[:16]}.lock").exists()


def test_the_command_says_what_it_frees(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    make_old(*tmp_path.glob("*_*"))
    command = ["gc", "--keep-runs", "1", "--store", str(tmp_path)]
    planned = CliRunner().invoke(app, [*command, "--dry-run"], catch_exceptions=False).stdout
    total = sum(item.frees_bytes for item in collect_garbage(tmp_path, 1, is_dry_run=True))
    assert f"3 folders would go, {total:,} bytes in all" in planned
    rows = [line.split() for line in planned.splitlines() if line.endswith("would go")]
    assert {row[0] for row in rows} == own_of(first)
    assert {row[3] for row in rows} == {short_ids(tmp_path)[first.folder.name]}
    done = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert f"3 folders removed, {total:,} bytes in all" in done
    assert artifacts(tmp_path).isdisjoint(own_of(first))


def test_a_narrow_table_cuts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = f"evaluate_model-{'a' * 16}-20260301T020000.000000Z"
    superseded = f"{'b' * 16}.{'c' * 16}"
    found = [
        Unused(Path(damaged), "damaged", 12_345_678_901, None),
        Unused(
            Path(superseded),
            "merge_checkpoint",
            12_345_678_901,
            "20260301T020000.000Z-12345",
            "in use, or being built",
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.tables.WIDTH", 80)
        print_garbage(found, True, {"20260301T020000.000Z-12345": "12345"})
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    first_cells = "".join(line.split()[0] for line in shown.splitlines() if line[:1].strip())
    assert damaged in first_cells
    assert superseded in first_cells
    assert re.search(r"merge_checkpoint +12,345,678,901 +12345", shown)
