"""What garbage collection removes and keeps, and what the command reports."""

import json
import os
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from durable import locked
from flows.cli import app
from tasks.artifacts.artifact import StoreError
from tasks.artifacts.stage_key import StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.execution.command import link_log
from tasks.links import link_of
from tasks.runs.collect_garbage import Unused, collect_garbage
from tasks.runs.history import artifact_of, read_runs, short_ids
from tasks.runs.run import Run, current_stage
from tests.garbage import NOW, collect, keys, make_old, nights, own_of, stored_keys
from tests.processes import wait_until
from tests.recorded_runs import Outcome, record_run, small_config


@pytest.mark.slow
def test_only_artifacts_of_no_kept_run_are_removed(tmp_path: Path) -> None:
    first, second, third = nights(tmp_path, "one", "two", "three")
    store = ArtifactStore(tmp_path)
    before = stored_keys(tmp_path)
    for run in (first, second):
        trained = run.stages["train_policy"]
        store.lookup("train_policy", trained.key)
        store.log_path("train_policy", trained.key).parent.mkdir(exist_ok=True)
        store.log_path("train_policy", trained.key).touch()
    would_go = collect(tmp_path, keep_runs=2, is_dry_run=True)
    assert keys(would_go) == own_of(first)
    assert stored_keys(tmp_path) == before
    trained = first.stages["train_policy"]
    size = sum(path.stat().st_size for path in Path(trained.artifact).iterdir())
    [item] = [item for item in would_go if item.attempt.path == Path(trained.artifact)]
    assert (item.frees_bytes, item.last_run) == (size, first.folder.name)
    os.link(Path(trained.artifact) / "weights", tmp_path / "the user's own")  # frees nothing then
    total = sum(item.frees_bytes for item in collect(tmp_path, keep_runs=2))
    assert total == sum(item.frees_bytes for item in would_go) - len("one")
    assert stored_keys(tmp_path) == before - own_of(first)
    assert collect(tmp_path, keep_runs=2) == []
    left = " ".join(
        str(path) for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "runs")
    )
    assert not any(key in left for key in own_of(first))  # logs, locks and stamps are removed too
    assert all(key in left for key in own_of(second) | own_of(third))
    # The run's folder stays, with its report, and names removed artifacts.
    recorded = list(read_runs(tmp_path))[-1]
    assert (recorded.id, (recorded.folder / "report" / "report.json").exists()) == (
        first.folder.name,
        True,
    )
    assert artifact_of(recorded, "train_policy") is None
    assert artifact_of(recorded, "fetch_model") is not None
    shown = CliRunner().invoke(app, ["runs", "show", recorded.id, "--store", str(tmp_path)])
    assert len(re.findall(r"removed \(dapo runs gc, or by hand\)", shown.stdout)) == 3
    # The next run that needs it makes it again.
    again = record_run(small_config(tmp_path, "train.total_steps=60"), Outcome(weights="one"))
    assert not again.stages["train_policy"].cached


def test_collection_works_on_a_full_disk(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # each write to a file fails
    try:
        assert keys(collect(tmp_path)) == own_of(first)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert own_of(first).isdisjoint(stored_keys(tmp_path))


@pytest.mark.slow
def test_a_run_in_progress_keeps_its_artifacts(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    with Run.start(first.config, "evaluate-model") as user:
        user.take("train_policy")
        make_old(user.folder)
        record_run(small_config(tmp_path, "train.total_steps=61"))
        assert keys(collect(tmp_path)) == own_of(first) - {first.stages["train_policy"].key[:16]}


def test_a_long_training_keeps_its_inputs_for_a_day_after_its_last_change(tmp_path: Path) -> None:
    """Its run has recorded nothing for days, since the previous stage."""
    begun = ("prepare_data", "fetch_model", "evaluate_before")
    run = record_run(small_config(tmp_path), labels=begun, flow="train-policy")
    key = link_of(run.config, "train_policy").key(*map(run.take, begun[:2]))
    current = current_stage.set("train_policy")
    link_log(run, run.store.log_path(key.stage, key.key))
    current_stage.reset(current)
    attempt = run.store.key_folder(key.stage, key.key) / "1.partial"
    (attempt / "checkpoints").mkdir(parents=True)
    record_run(small_config(tmp_path, "run.seed=5"))
    make_old(run.folder, attempt)
    (attempt / "checkpoints" / "step_000002").mkdir()
    assert collect(tmp_path) == []
    make_old(attempt)
    assert keys(collect(tmp_path)) == {stage.key[:16] for stage in run.stages.values()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "days", "is_kept"),
    [
        ("running", 30, False),  # its process is gone
        ("failed", 0.9, True),
        ("cancelled", 1.1, False),
    ],
)
def test_a_run_without_a_report_is_kept_while_it_may_continue(
    tmp_path: Path, state: str, days: float, is_kept: bool
) -> None:
    run = record_run(small_config(tmp_path), labels=("prepare_data",), flow="prepare-data")
    record = run.folder / "run.json"
    record.write_text(record.read_text().replace('"completed"', f'"{state}"'))
    make_old(run.folder, days=days)
    record_run(small_config(tmp_path, "run.seed=5"))
    assert (collect(tmp_path) == []) is is_kept


@pytest.mark.slow
def test_an_artifact_replaced_by_force_is_removed_with_its_last_run(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    old = record_run(config, Outcome(weights="old"))
    record_run(config, Outcome(weights="new"), ("train_policy",), "train-policy", ("train_policy",))
    record_run(config, Outcome(weights="new", after="rrww"))
    assert collect(tmp_path, keep_runs=2) == []
    assert old.stages["train_policy"].artifact in {
        str(item.attempt.path) for item in collect(tmp_path)
    }
    current = ArtifactStore(tmp_path).lookup("train_policy", old.stages["train_policy"].key)
    assert current is not None
    assert (Path(current.path) / "weights").read_text() == "new"


def test_damaged_artifacts_need_an_option_and_leftovers_of_a_killed_collection_do_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").mkdir()
    store = ArtifactStore(tmp_path)
    key = StageKey("probe", {}, {}, "c", {})
    folder = store.key_folder("probe", key.key)
    made, _ = store.produce(key, lambda folder: {"n": (folder / "content").write_text("text")})
    (Path(made.path) / "content").write_text("damaged")
    store.produce(key, lambda folder: {"n": (folder / "content").write_text("text")})
    (folder / "2").rename(folder / "2.removed")
    [kept, gone] = collect(tmp_path)
    assert (kept.attempt.path, kept.kept_reason) == (folder / "1.damaged", "--damaged removes it")
    assert (gone.attempt.path, gone.kept_reason, gone.attempt.path.exists()) == (
        folder / "2.removed",
        "",
        False,
    )
    collect(tmp_path, has_damaged=True)
    assert not folder.exists()


@pytest.mark.slow
def test_unfinished_attempts_older_than_a_day_need_an_option(tmp_path: Path) -> None:
    run = record_run(small_config(tmp_path))
    store = ArtifactStore(tmp_path)
    key = run.stages["train_policy"].key
    attempt = store.key_folder("train_policy", key) / "2.partial"  # by force
    attempt.mkdir()
    (attempt / "checkpoint").write_text("a" * 1000)
    log_path = store.log_path("train_policy", key)
    log_path.parent.mkdir()
    log_path.touch()
    make_old(attempt, run.folder)
    record_run(small_config(tmp_path, "run.seed=5"))
    # the attempt does not keep the artifact it should replace
    assert key[:16] in keys(collect(tmp_path))
    [kept] = collect(tmp_path, is_dry_run=True)
    assert (kept.attempt.path, kept.frees_bytes, kept.kept_reason) == (
        attempt,
        1000,
        "--unfinished removes it",
    )
    assert log_path.exists()
    for lock_path in (log_path, store.lock_path("train_policy", key)):
        with locked(lock_path):
            assert collect(tmp_path, has_unfinished=True) == []
    (attempt / "checkpoint").touch()
    assert collect(tmp_path, has_unfinished=True) == []
    make_old(attempt)
    [gone] = collect(tmp_path, has_unfinished=True)
    assert (gone.attempt.path, gone.kept_reason) == (attempt, "")
    assert not any(
        path.exists() for path in (attempt.parent, log_path, store.lock_path("train_policy", key))
    )


@pytest.mark.slow
def test_artifacts_in_use_or_recent_are_kept_with_a_reason(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    trained, merged = first.stages["train_policy"], first.stages["merge_checkpoint"]
    store = ArtifactStore(tmp_path)
    log_path = store.log_path("train_policy", trained.key)  # of a training that is still stopping
    log_path.parent.mkdir()
    assert {item.kept_reason for item in collect_garbage(tmp_path, 1)} == {"younger than 60 min"}
    with locked(log_path), locked(store.lock_path("merge_checkpoint", merged.key)):
        found = collect(tmp_path)
    assert keys(found, is_left=True) == {trained.key[:16], merged.key[:16]}
    assert {item.kept_reason for item in found if item.kept_reason} == {"in use, or being built"}
    assert keys(found) == own_of(first) - keys(found, is_left=True)
    assert {trained.key[:16], merged.key[:16]} <= stored_keys(tmp_path)


@pytest.mark.slow
def test_an_artifact_taken_during_a_collection_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = nights(tmp_path, "one", "two")
    caplog.set_level("INFO", logger="durable")
    found: list[Unused] = []
    with ArtifactStore(tmp_path).in_use():
        collection = threading.Thread(target=lambda: found.extend(collect(tmp_path)))
        collection.start()
        wait_until(
            lambda: "exports and runs that use the store" in caplog.text, "the collection to wait"
        )
        user = Run.start(first.config, "evaluate-model")
        user.take("train_policy")
    collection.join()
    user.__exit__(None, None, None)
    assert keys(found) == own_of(first) - {first.stages["train_policy"].key[:16]}


def test_other_folders_and_stores_with_unreadable_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "file", "none"):
        with pytest.raises(
            StoreError, match=rf"there is no store .*{name}: .* name the store with --store"
        ):
            collect(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    (run := tmp_path / "runs" / "20260301T020000.000Z-1").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    with pytest.raises(StoreError, match=r"run\.json is not a valid run record"):
        collect(tmp_path)


def test_unrelated_files_in_a_store_are_not_touched(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    trained = Path(first.stages["train_policy"].artifact)
    key = trained.parent.name
    odd = [
        tmp_path / folder / name
        for folder in ("mine", "train_policy", f"train_policy/{key}", "runs", ".logs")
        for name in ("link", "broken", "folder", "7", f"train_policy-{'f' * 16}.log")
    ]
    for path in odd:
        path.parent.mkdir(exist_ok=True)
        if path.name == "folder":
            path.mkdir()
        else:
            path.symlink_to("nowhere" if path.name == "broken" else trained)
    (tmp_path / "linked").symlink_to(trained.parent.parent)
    shutil.copytree(trained, tmp_path / "mine" / key / "1")  # the user's own copy
    for number, text in enumerate(
        ("", "[]", "{}", json.dumps({"stage": 1, "key": 2, "digest": [3]}))
    ):
        unreadable = tmp_path / "train_policy" / f"{number:016}" / "1"
        unreadable.mkdir(parents=True)
        (unreadable / "manifest.json").write_text(text)
        odd.append(unreadable)
    (tmp_path / "train_policy" / ("f" * 16) / "1" / "manifest.json").mkdir(parents=True)
    found = collect_garbage(tmp_path, 1, margin_seconds=NOW, has_damaged=True, has_unfinished=True)
    assert keys(found) == own_of(first)
    assert all(os.path.lexists(path) for path in [*odd, tmp_path / "mine" / key / "1"])
    assert not trained.exists()


@pytest.mark.slow
def test_the_gc_command_reports_what_it_frees(tmp_path: Path) -> None:
    first, _ = nights(tmp_path, "one", "two")
    make_old(*tmp_path.glob("*_*"))
    command = ["runs", "gc", "--keep-runs", "1", "--store", str(tmp_path)]
    planned = CliRunner().invoke(app, [*command, "--dry-run"], catch_exceptions=False).stdout
    total = sum(item.frees_bytes for item in collect_garbage(tmp_path, 1, is_dry_run=True))
    assert f"3 folders would be removed, {total:,} bytes in total" in planned
    rows = [line.split() for line in planned.splitlines() if line.endswith("would be removed")]
    assert {row[0] for row in rows} == {f"{key}/1" for key in own_of(first)}
    assert {row[3] for row in rows} == {short_ids(tmp_path)[first.folder.name]}
    done = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert f"3 folders removed, {total:,} bytes in total" in done
    assert stored_keys(tmp_path).isdisjoint(own_of(first))
