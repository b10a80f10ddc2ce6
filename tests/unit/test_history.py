"""Runs as people look at them: found by a part of their id, listed, shown, compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.exceptions import TerminationSignal
from typer.testing import CliRunner

from dapo_core.config import Config
from dapo_core.errors import DataError, RunSkipped, StoreError
from flows.cli import app
from tasks.artifacts import ArtifactStore, StageKey, held
from tasks.artifacts.code import PROJECT_ROOT
from tasks.runs.history import (
    changed_keys,
    find_evaluation,
    find_run,
    read_runs,
    run_before,
    run_lock_path,
    short_ids,
    write_record,
)
from tasks.runs.run import Run
from tests.recorded_runs import Outcome, record_run, small_config


def write_run(store: Path, identity: str, **values: object) -> Path:
    folder = store / "runs" / identity
    folder.mkdir(parents=True)
    artifact = {"artifact": str(store / "probe" / "a"), "key": "k", "digest": "d"}
    stages = {label: {**artifact, "seconds": 1.0, "cached": label != "b"} for label in "abc"}
    record = {
        "name": "demo",
        "flow": "dapo-full",
        "host": "node1",
        "pid": 7,
        "state": "completed",
        "started_at": 1.8e9,
        "seconds": 3725.4,
        "stages": stages,
        **values,
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def dapo(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


IDS = ("20260101T000000.000Z-1", "20260102T000000.123Z-77", "20260102T000000.456Z-1")


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for identity in IDS:
        write_run(tmp_path, identity)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("latest", 2),
        ("latest~0", 2),
        ("latest~2", 0),
        ("20260101", 0),
        ("123Z-77", 1),
        ("77", 1),
        (IDS[2], 2),
        ("6Z-1", 2),
    ],
)
def test_a_run_is_found_by_either_end_of_its_id(three: Path, text: str, place: int) -> None:
    assert find_run(three, text).id == IDS[place]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abc", f"no run abc in .*; the newest are {IDS[2]}, {IDS[1]}, {IDS[0]}$"),
        ("latest~3", "no run latest~3 in .*; the newest are "),
        ("20260102", f"20260102 is the beginning or end of 2 runs in .*: {IDS[2]}, {IDS[1]}$"),
    ],
)
def test_what_is_not_one_run_is_refused_with_those_there_are(three: Path, text: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        find_run(three, text)


def test_a_store_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run x in .*; no run is recorded there"):
        find_run(tmp_path, "x")


def test_a_short_id_is_unique_and_no_option(three: Path) -> None:
    short = short_ids(three)
    assert short == {IDS[0]: "0Z-1", IDS[1]: "Z-77", IDS[2]: "6Z-1"}
    for identity, end in short.items():
        assert find_run(three, end).id == identity
    write_run(three, "20260103T000000.000Z-4321")
    assert short_ids(three)["20260103T000000.000Z-4321"] == "4321"
    write_run(three, "20260104T000000.000Z-123")  # whose last four characters are -123
    assert short_ids(three)["20260104T000000.000Z-123"] == "Z-123"


def test_a_run_without_its_process_is_interrupted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, IDS[0], state="running", seconds=5.0)
    [run] = read_runs(tmp_path)
    assert (run.state, run.seconds) == ("interrupted", 5.0)
    run_lock_path(folder).parent.mkdir()
    with held(run_lock_path(folder)):
        [run] = read_runs(tmp_path)
        assert run.state == "running"
        assert run.seconds != 5.0  # counted up to this moment
    [run] = read_runs(tmp_path)
    assert run.state == "interrupted"


def test_a_killed_run_is_interrupted_and_a_living_one_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    script = (
        "import sys\nfrom tasks.runs.run import Run\nfrom tests.recorded_runs import small_config\n"
        "run = Run.start(small_config(sys.argv[1]))\nprint('started', flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, config.store.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=PROJECT_ROOT,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        [run] = read_runs(Path(config.store.path))
        assert (run.state, run.pid) == ("running", child.pid)
        child.kill()
    [run] = read_runs(Path(config.store.path))
    assert run.state == "interrupted"


def test_a_record_that_cannot_be_read_is_named_and_left_out(three: Path, caplog: pytest.LogCaptureFixture) -> None:
    (three / "runs" / IDS[1] / "run.json").write_text('{"id": 1}')
    (three / "runs" / "20260105T000000.000Z-1").mkdir()  # killed before it wrote one
    assert [run.id for run in read_runs(three)] == [IDS[2], IDS[0]]
    assert f"left out: {three}/runs/{IDS[1]}/run.json is not the record of a run" in caplog.text


def test_runs_are_listed_in_a_hundred_columns(tmp_path: Path) -> None:
    report = {"before": 0.4, "after": 0.625, "difference": 0.225, "p": 0.00012, "n": 40}
    write_run(tmp_path, IDS[0], report=report, name="a_recipe_with_a_very_long_name", flow="dapo-nightly")
    write_run(tmp_path, IDS[1], state="running")
    write_run(tmp_path, IDS[2], state="failed", error="DataError: no rows", seconds=9.6)
    shown = dapo("runs", "--store", tmp_path, "--limit", "3")
    assert max(map(len, shown.splitlines())) <= 100
    rows = [line for line in shown.splitlines() if re.match(r"\d\d-\d\d-\d\d", line)]
    assert [re.split(r"\s+", row.strip())[2] for row in rows] == ["6Z-1", "Z-77", "0Z-1"]
    assert rows[0].split()[-3:] == ["failed", "2/1", "0:00:10"]
    assert rows[1].split()[-3:] == ["interrupted", "2/1", "1:02:05"]
    assert rows[2].split()[-6:] == ["2/1", "40.0", "62.5", "+22.5", "0.00012", "1:02:05"]
    listed = json.loads(dapo("runs", "--store", tmp_path, "--json"))
    assert [run["id"] for run in listed] == [IDS[2], IDS[1], IDS[0]]
    assert [run["state"] for run in listed] == ["failed", "interrupted", "completed"]
    assert (listed[0]["error"], listed[2]["report"]) == ("DataError: no rows", report)
    assert listed[0]["stages"]["a"]["path"] is None  # nothing is there
    cut = dapo("runs", "--store", tmp_path, "--limit", "1")
    assert "2 older ones: --limit 3" in cut
    assert "0Z-1" not in cut


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nights that differ in a key of training."""
    path = tmp_path_factory.mktemp("history") / "store"
    record_run(small_config(path), Outcome(after="rrww"))
    changed = ("algorithm.clip_ratio_high=0.3", "run.seed=1")
    record_run(small_config(path, *changed), Outcome(weights="other", after="rrrr"))
    return path


def test_show_tells_stages_result_and_changed_keys(store: Path) -> None:
    newest, oldest = read_runs(store)
    shown = dapo("runs", "show", "latest", "--store", store)
    assert f"Run {newest.id} of arith_cpu, dapo-full: completed" in shown
    assert "algorithm.clip_ratio_high 0.28 -> 0.3\n" in shown
    assert "run.seed 0 -> 1\n" in shown
    assert "No significant change in accuracy: 25.0 % before, 100.0 % after" in shown
    for label, stage in newest.stages.items():
        row = next(line for line in shown.splitlines() if f" {label} " in line)
        assert stage.path in row
        assert stage.key[:16] in row
    before = run_before(newest)
    assert before is not None
    assert before.id == oldest.id
    assert run_before(oldest) is None
    told = json.loads(dapo("runs", "show", "latest", "--store", store, "--json"))
    assert told["run_before"] == oldest.id
    assert {"key": "run.seed", "before": "0", "after": "1"} in told["changes"]
    assert told["stages"]["merge_checkpoint"]["path"] == newest.stages["merge_checkpoint"].path
    assert "No earlier run of arith_cpu" in dapo("runs", "show", oldest.id, "--store", store)


def test_two_runs_are_compared_by_their_evaluations_after_training(store: Path) -> None:
    newest, oldest = read_runs(store)
    shown = dapo("compare", "latest~1", "latest", "--store", store)
    assert shown.startswith(f"- before: run {oldest.id} of arith_cpu, ")
    assert f"- after: run {newest.id} of arith_cpu, " in shown
    assert "- configuration: run.seed 0 -> 1; algorithm.clip_ratio_high 0.28 -> 0.3\n" in shown
    assert "50.0 % before, 100.0 % after" in " ".join(shown.split())
    # A run's folder, and a results folder beside a run.
    same = dapo("compare", oldest.folder, newest.stages["evaluate_after"].path, "--store", store)
    assert "50.0 % before, 100.0 % after" in " ".join(same.split())
    assert "- configuration" not in same


def test_a_history_of_the_store_writes_only_where_told(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = dapo("compare", "--history", "--store", store)
    assert len([line for line in shown.splitlines() if line.startswith("| 2")]) == 2
    assert dapo("compare", "--history", "latest~1", "latest", "--store", store) == shown
    assert list(tmp_path.iterdir()) == []
    dapo("compare", "--history", "--store", store, "--output", "page")
    assert [path.name for path in (tmp_path / "page").iterdir()] == ["history.html"]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    run = record_run(config, labels=("prepare_data",), flow="prepare-data")
    with pytest.raises(StoreError, match=r"\(prepare-data, completed\) has no evaluate_after, but prepare_data"):
        find_evaluation(run.store.root, "latest")
    with pytest.raises(StoreError, match="nowhere is no results folder, and no run nowhere in"):
        find_evaluation(run.store.root, "nowhere")


def probe(config: Config, content: str, forced: tuple[str, ...] = ()) -> Run:
    """A run of one stage whose output is `content`."""

    def build(folder: Path) -> dict[str, str]:
        (folder / "content").write_text(content)
        return {}

    with Run.start(config, "probe", forced) as run:
        run.produce("probe", StageKey("probe", {}, {}, "code", {}), build)
    return run


def test_a_forced_stage_leaves_old_runs_what_they_had(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    first = probe(config, "one")
    second = probe(config, "two", ("probe",))
    third = probe(config, "never built")
    assert [(run.folder / "probe" / "content").read_text() for run in (first, second, third)] == [
        "one",
        "two",
        "two",
    ]
    records = {run.id: run.stages["probe"] for run in read_runs(first.store.root)}
    old, new = records[first.folder.name], records[second.folder.name]
    assert Path(old.path).name == f"{old.key[:16]}.{old.digest[:16]}"
    assert (Path(new.path).name, new.is_cached) == (new.key[:16], False)
    assert records[third.folder.name].is_cached
    probe(config, "one", ("probe",))  # back again: the copy that is aside already serves both
    fifth = probe(config, "three", ("probe",))
    assert (first.folder / "probe" / "content").read_text() == "one"
    assert (second.folder / "probe" / "content").read_text() == "two"
    assert len(list((fifth.store.root / "probe").iterdir())) == 3
    assert not list((fifth.store.root / ".removed").iterdir())


def test_what_a_run_uses_that_goes_on_is_not_replaced(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    with Run.start(config, "long") as user:
        key = StageKey("probe", {}, {}, "code", {})
        user.produce("probe", key, lambda folder: {"n": (folder / "content").write_text("used")})
        with pytest.raises(
            StoreError, match=rf"the run {user.folder.name} of arith_cpu \(long, pid {os.getpid()} on"
        ):
            probe(config, "other", ("probe",))
        assert (user.folder / "probe" / "content").read_text() == "used"
    assert (probe(config, "other", ("probe",)).folder / "probe" / "content").read_text() == "other"
    assert (user.folder / "probe" / "content").read_text() == "used"


def test_a_run_that_begins_to_use_it_while_it_is_built_keeps_it(tmp_path: Path) -> None:
    """The forced build is complete, yet must not take the place of what another run reads by then."""
    config = small_config(tmp_path / "store")
    probe(config, "used")
    key = StageKey("probe", {}, {}, "code", {})
    users: list[Run] = []

    def build(folder: Path) -> dict[str, str]:
        users.append(Run.start(config, "other"))
        users[0].produce("probe", key, lambda folder: {})
        (folder / "content").write_text("new")
        return {}

    with pytest.raises(StoreError, match="goes on and uses"), Run.start(config, "probe", ("probe",)) as run:
        run.produce("probe", key, build)
    assert (users[0].folder / "probe" / "content").read_text() == "used"
    assert ArtifactStore(config.store.path).lookup("probe", key.key) is not None
    users[0].__exit__(None, None, None)


def test_an_artifact_that_goes_as_it_is_recorded_is_made_again(tmp_path: Path) -> None:
    """Whoever removes artifacts looks at the records after the move: one that came too late must notice."""
    config = small_config(tmp_path / "store")
    probe(config, "one")
    with Run.start(config) as run:
        recorded = run.record

        def remove_then_record(**outcome: object) -> None:
            found = store.lookup("probe", key.key)
            if found is not None and "probe" in run.stages and len(removed) == 0:
                removed.append(store.remove(found, lambda artifact: False))
            recorded(**outcome)

        store, key, removed = run.store, StageKey("probe", {}, {}, "code", {}), list[bool]()
        run.record = remove_then_record  # type: ignore[method-assign]
        made = run.produce("probe", key, lambda folder: {"n": (folder / "content").write_text("again")})
    assert removed == [True]
    assert (Path(made.path) / "content").read_text() == "again"
    assert not run.stages["probe"].cached


def test_a_failure_ends_the_lock(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    with pytest.raises(DataError), Run.start(config) as run:
        raise DataError("no rows")
    assert not run_lock_path(run.folder).exists()
    [recorded] = read_runs(run.store.root)
    assert recorded.state == "failed"


@pytest.mark.parametrize("error", [DataError("no rows"), RunSkipped("another trains"), KeyboardInterrupt()])
def test_a_full_disk_at_the_end_does_not_hide_why_a_run_ended(
    tmp_path: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.start(small_config(tmp_path / "store"))
    (run.folder / "run.json.partial").symlink_to("/dev/full")
    with pytest.raises(type(error)), run:
        raise error
    assert "No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space left"), Run.start(run.config) as run:
        (run.folder / "run.json.partial").symlink_to("/dev/full")


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    write_record(tmp_path, {"state": "running"})
    assert (tmp_path / "run.json").stat().st_ino in synced


@pytest.mark.parametrize(("is_restart", "state"), [(True, "interrupted"), (False, "cancelled")])
def test_a_worker_that_ends_interrupts_a_run_and_cancels_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restart: bool, state: str
) -> None:
    monkeypatch.setattr("tasks.processes.cancellation.is_worker_restart", lambda error: is_restart)
    with pytest.raises(TerminationSignal), Run.start(small_config(tmp_path / "store")) as run:
        raise TerminationSignal(signal.SIGTERM)
    [recorded] = read_runs(run.store.root)
    assert (recorded.state, recorded.error) == (state, "TerminationSignal")


def test_changed_keys_of_equal_runs_are_none(store: Path) -> None:
    newest, oldest = read_runs(store)
    assert changed_keys(newest, newest) == []
    assert [str(change) for change in changed_keys(newest, oldest)] == [
        "run.seed 1 -> 0",
        "algorithm.clip_ratio_high 0.3 -> 0.28",
    ]
