"""Recorded runs: found by part of their id, listed, shown and compared."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from prefect.exceptions import TerminationSignal
from typer.testing import CliRunner

from dapo_core.errors import DataError
from dapo_core.metrics.step_files import ROLLOUTS, StepFiles, step_file
from durable import is_locked, locked
from eval.results.rows import ResultsError
from flows.cli import app
from tasks.artifacts.artifact import StoreError
from tasks.artifacts.stage_key import StageKey
from tasks.execution.command import run_dapo
from tasks.runs.history import (
    artifact_of,
    changed_keys,
    find_evaluation,
    find_run,
    read_report,
    read_runs,
    require_artifact,
    run_before,
    run_folders,
    run_lock_path,
    short_ids,
)
from tasks.runs.run import Run, require_outputs
from tests.recorded_runs import LABELS, Outcome, record_run, small_config


def write_run(store: Path, identity: str, **values: object) -> Path:
    folder = store / "runs" / identity
    folder.mkdir(parents=True)
    artifact = {"artifact": str(store / "probe" / "k" / "1"), "key": "k", "digest": "d"}
    stages = {label: {**artifact, "seconds": 1.0, "cached": label != "b"} for label in "abc"}
    record = {"name": "demo", "flow": "dapo-full", "host": "node1", "pid": 7, "state": "completed"}
    record |= {"stages": stages, "started_at": 1.8e9, "seconds": 3725.4, **values}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def dapo(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def rollout(step: int, number: int, verdict: str, **changes: object) -> dict[str, object]:
    row = {"step": step, "prompt_number": number, "set": "sums", "prompt": f"{number} + 1?"}
    row |= {"response": f"It is \x1b[2J{verdict} {'x' * 5000} end", "answer": None, "gold": "2"}
    row |= {"score": 1.0, "verdict": verdict, "truncated": verdict == "no_answer"}
    return {**row, "response_tokens": 7, **changes}


def test_a_right_and_another_response_to_each_prompt_are_shown(tmp_path: Path) -> None:
    run = record_run(small_config(tmp_path))
    folder = Path(run.stages["train_policy"].artifact)
    show = ("runs", "show", run.folder.name, "--store", tmp_path, "--rollouts")
    for words, refusal in (
        (show, "has saved no responses in .*train.save_rollouts_every=0"),
        (("runs", "show", "latst", "--store", tmp_path, "--rollouts"), "no run latst in"),
    ):
        with pytest.raises(StoreError, match=refusal):
            dapo(*words)
    verdicts = ["no_answer", "wrong", "right", "right"]
    for step in (1, 20):
        rows = [rollout(step, number, one) for number in range(200) for one in verdicts]
        StepFiles(folder, ROLLOUTS).write(step, rows)
    path = step_file(folder, ROLLOUTS, 20)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{torn", "7", *lines[1:]]))
    shown = dapo(*show)
    assert f"Training step 20: 400 right, 200 wrong, 199 no answer\n{path}" in shown
    assert "steps with a file: 1, 20\n2 damaged lines skipped" in shown
    assert shown.count("sums, gold answer '2':\n    0 + 1?\n  wrong, score 1, 7 tokens") == 1
    assert shown.count(" tokens, answer None:") == 8, "two responses to each of four prompts"
    assert "  no answer, cut, score 1" in shown
    assert "It is \\x1b[2Jwrong" in shown, "a response cannot control the terminal"
    assert len(shown) < 20_000
    step_1 = json.loads(dapo(*show, "--step", "1", "--json"))
    assert [row["verdict"] for row in step_1[:2]] == ["no_answer", "right"]
    with pytest.raises(StoreError, match=r"no responses of step 2; it has steps 1, 20"):
        dapo(*show, "--step", "2")
    assert CliRunner().invoke(app, ["runs", "show", "latest", "--step", "2"]).exit_code == 2


IDS = ("20260101T000000.000Z-1", "20260102T000000.123Z-77", "20260102T000000.456Z-1")


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for identity in IDS:
        write_run(tmp_path, identity)
    return tmp_path


def test_a_run_is_found_by_its_folder(three: Path) -> None:
    folder = run_folders(three)[1]
    assert find_run(three / "elsewhere", str(folder)).folder == folder


@pytest.mark.parametrize(
    ("place", "texts"),
    [
        (0, ("latest~2", "20260101")),
        (1, ("123Z-77", "77")),
        (2, ("latest", "latest~0", IDS[2], "6Z-1")),
    ],
)
def test_a_run_is_found_by_a_prefix_or_suffix_of_its_id(
    three: Path, place: int, texts: tuple[str, ...]
) -> None:
    assert {find_run(three, text).id for text in texts} == {IDS[place]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("abc", f"no run abc in .*; the newest are {IDS[2]}, {IDS[1]}, {IDS[0]}$"),
        (
            "latest~3",
            f"no run latest~3 in .*; there are only 3 runs: {IDS[2]}, {IDS[1]}, {IDS[0]}$",
        ),
        ("20260102", f"20260102 matches 2 runs in .*: {IDS[2]}, {IDS[1]}$"),
    ],
)
def test_unknown_and_ambiguous_ids_are_refused_with_candidates(
    three: Path, text: str, said: str
) -> None:
    with pytest.raises(StoreError, match=said):
        find_run(three, text)


def test_short_ids_are_unique_and_never_look_like_options(three: Path) -> None:
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
    with locked(run_lock_path(folder)):
        [run] = read_runs(tmp_path)
        assert run.state == "running"
        assert run.seconds != 5.0  # counted up to this moment
    [run] = read_runs(tmp_path)
    assert run.state == "interrupted"


def test_a_killed_run_took_until_the_last_line_of_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(small_config(tmp_path))
    run.started_at, run.recorded_at = run.started_at - 187, run.recorded_at - 187
    said = "tasks.execution.command.run_command"
    monkeypatch.setattr(said, lambda *_, on_line, **__: on_line("step:1"))
    run_dapo([], run, StageKey("probe", {}, {}, "c", {}))
    run.lock.close()  # as by kill -9
    [found] = read_runs(tmp_path)
    assert found.state == "interrupted"
    assert 187 <= found.seconds < 247


def test_unreadable_run_records_are_logged_and_skipped(
    three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (three / "runs" / IDS[1] / "run.json").write_text('{"id": 1}')
    (three / "runs" / "20260105T000000.000Z-1").mkdir()  # killed before it wrote one
    (broken := three / "runs" / "20260106T000000.000Z-1").mkdir()
    (broken / "run.json").symlink_to("/proc/self/mem")  # whose first byte is unreadable
    assert [run.id for run in read_runs(three)] == [IDS[2], IDS[0]]
    assert f"run skipped: {three}/runs/{IDS[1]}/run.json is not a valid run record" in caplog.text
    assert f"run skipped: {broken}/run.json cannot be read: Input/output error" in caplog.text


@pytest.mark.slow
def test_runs_are_listed_within_a_hundred_columns(tmp_path: Path) -> None:
    report = {"before": 0.4, "after": 0.625, "difference": 0.225, "p": 0.00012, "n": 40}
    write_run(
        tmp_path, IDS[0], report=report, name="a_recipe_with_a_very_long_name", flow="dapo-nightly"
    )
    write_run(tmp_path, IDS[1], state="running")
    write_run(tmp_path, IDS[2], state="failed", error="DataError: no rows", seconds=9.6)
    shown = dapo("runs", "--store", tmp_path, "--limit", "3")
    assert max(map(len, shown.splitlines())) <= 100
    rows = [line for line in shown.splitlines() if re.match(r"\d{4}-\d\d-\d\d", line)]
    assert [re.split(r"\s+", row.strip())[2] for row in rows] == ["6Z-1", "Z-77", "0Z-1"]
    assert rows[0].split()[-3:] == ["failed", "2/1", "0:00:10"]
    assert rows[1].split()[-3:] == ["interrupted", "2/1", "1:02:05"]
    assert rows[2].split()[-6:] == ["2/1", "40.0", "62.5", "+22.5", "0.00012", "1:02:05"]
    listed = json.loads(dapo("runs", "--store", tmp_path, "--json"))
    assert [run["id"] for run in listed] == [IDS[2], IDS[1], IDS[0]]
    assert [run["state"] for run in listed] == ["failed", "interrupted", "completed"]
    assert (listed[0]["error"], listed[2]["report"]) == ("DataError: no rows", report)
    assert listed[0]["stages"]["a"]["path"] is None  # nothing is there
    for number in range(20):
        write_run(tmp_path, f"20250101T0000{number:02}.000Z-1")
    # a program gets them all
    assert len(json.loads(dapo("runs", "--store", tmp_path, "--json"))) == 23
    assert len(json.loads(dapo("runs", "--store", tmp_path, "--json", "--limit", "2"))) == 2
    assert "3 older runs: --limit 23" in dapo("runs", "--store", tmp_path)
    cut = dapo("runs", "--store", tmp_path, "--limit", "1")
    assert "22 older runs: --limit 23" in cut
    assert "0Z-1" not in cut


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in a training key."""
    path = tmp_path_factory.mktemp("history") / "store"
    record_run(small_config(path), Outcome(after="rrww"))
    changed = ("algorithm.clip_ratio_high=0.3", "run.seed=1")
    record_run(small_config(path, *changed), Outcome(weights="other", after="rrrr"))
    return path


def test_runs_show_lists_stages_result_and_changed_keys(store: Path) -> None:
    newest, oldest = read_runs(store)
    shown = dapo("runs", "show", "latest", "--store", store)
    assert f"Run {newest.id} of arith_cpu, dapo-full: completed" in shown
    assert "algorithm.clip_ratio_high 0.28 -> 0.3\n" in shown
    assert "run.seed 0 -> 1\n" in shown
    assert "No significant change in accuracy: 25.0 % before, 100.0 % after" in shown
    for label, stage in newest.stages.items():
        row = next(line for line in shown.splitlines() if f" {label} " in line)
        assert stage.key[:16] in row
        assert f"\n{label} {stage.artifact}\n" in shown  # whole, however narrow the terminal
    before = run_before(newest)
    assert before is not None
    assert before.id == oldest.id
    assert run_before(oldest) is None
    shown_json = json.loads(dapo("runs", "show", "latest", "--store", store, "--json"))
    assert shown_json["run_before"] == oldest.id
    assert {"key": "run.seed", "before": "0", "after": "1"} in shown_json["changes"]
    merged = newest.stages["merge_checkpoint"].artifact
    assert shown_json["stages"]["merge_checkpoint"]["path"] == merged
    assert "No earlier run of arith_cpu" in dapo("runs", "show", oldest.id, "--store", store)


def test_two_runs_are_compared_by_their_evaluations_after_training(store: Path) -> None:
    newest, oldest = read_runs(store)
    shown = dapo("compare", "latest~1", "latest", "--store", store)
    assert shown.startswith(f"- before: run {oldest.id} of arith_cpu, ")
    assert f"- after: run {newest.id} of arith_cpu, " in shown
    assert "- configuration: run.seed 0 -> 1; algorithm.clip_ratio_high 0.28 -> 0.3\n" in shown
    assert "50.0 % before, 100.0 % after" in " ".join(shown.split())
    with pytest.raises(StoreError, match="only 2 runs with an evaluation"):
        find_evaluation(store, "latest~2")
    # A run's folder, and a results folder beside a run.
    after = newest.stages["evaluate_after"].artifact
    same = dapo("compare", oldest.folder, after, "--store", store)
    assert "50.0 % before, 100.0 % after" in " ".join(same.split())
    assert "- configuration" not in same


def test_compare_history_writes_no_files_by_default(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = dapo("compare", "--history", "--store", store)
    assert len([line for line in shown.splitlines() if line.startswith("| 2")]) == 2
    assert dapo("compare", "--history", "latest~1", "latest", "--store", store) == shown
    assert list(tmp_path.iterdir()) == []


def test_runs_without_an_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    run = record_run(config, labels=("prepare_data",), flow="prepare-data")
    with pytest.raises(StoreError, match="no run with an evaluation after training is recorded"):
        find_evaluation(run.store.root, "latest")
    with pytest.raises(StoreError, match="has no evaluate_after, only prepare_data"):
        find_evaluation(run.store.root, run.folder.name)
    with pytest.raises(StoreError, match="nowhere is no file or folder, and no run nowhere in"):
        find_evaluation(run.store.root, "nowhere")


@pytest.fixture
def own(store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may damage."""
    return Path(shutil.copytree(store, tmp_path / "own", symlinks=True))


def test_latest_counts_only_runs_with_the_needed_output(own: Path) -> None:
    newest, oldest = read_runs(own)
    record_run(small_config(own), labels=("prepare_data",), flow="prepare-data")
    with pytest.raises(DataError), Run.start(small_config(own)):
        raise DataError("no rows")
    shown = dapo("compare", "latest~1", "latest", "--store", own)
    assert f"- before: run {oldest.id} of " in shown
    assert f"- after: run {newest.id} of " in shown
    assert find_run(own, "latest", "report").id == newest.id
    assert find_run(own, "latest").id > newest.id


def test_a_missing_upstream_output_names_the_command_that_builds_it(own: Path) -> None:
    config = small_config(own)
    artifacts = require_outputs(config, LABELS)
    assert list(artifacts) == list(LABELS)
    for label, command in (
        ("evaluate_before", "evaluate-model CONFIG --side before"),
        ("merge_checkpoint", "merge-checkpoint CONFIG"),
    ):
        shutil.rmtree(artifacts[label].path)
        with pytest.raises(StoreError, match=f"no output of {label} .*dapo stage {command}"):
            require_outputs(config, (label,))


def test_a_removed_artifact_is_reported_with_the_path_in_a_copied_store(
    store: Path, own: Path
) -> None:
    """Records in a copied store name the original store."""
    newest, _ = read_runs(own)
    artifact = artifact_of(newest, "evaluate_after")
    assert artifact is not None
    assert artifact.path.startswith(str(own))
    shutil.rmtree(artifact.path)
    said = (
        re.escape(f"{artifact.path} was removed")
        + rf".*config\.yaml --set store\.path={own} rebuilds it"
    )
    with pytest.raises(StoreError, match=said):
        require_artifact(newest, "evaluate_after")


@pytest.mark.slow
def test_a_damaged_run_names_the_unreadable_file(store: Path, own: Path) -> None:
    newest, oldest = read_runs(own)
    (oldest.folder / "config.yaml").unlink()
    with pytest.raises(StoreError, match=f"of the run {oldest.id} cannot be read: .*config.yaml"):
        changed_keys(oldest, newest)
    (oldest.folder / "config.yaml").touch()
    with pytest.raises(StoreError, match=f"run {oldest.id} cannot be read: .* has no sections"):
        changed_keys(oldest, newest)
    # of which the one before is not the subject
    shown = dapo("runs", "show", "latest", "--store", own)
    assert f"Configuration changes since {oldest.id}: unknown, one cannot be read" in shown
    assert json.loads(dapo("runs", "show", "latest", "--store", own, "--json"))["changes"] is None
    (newest.folder / "report" / "report.json").write_text("{")
    with pytest.raises(StoreError, match=r"report\.json is not a report .*dapo stage compare"):
        read_report(newest)
    sides = ("latest~1", newest.stages["evaluate_after"].artifact)
    with pytest.raises(ResultsError, match="/proc/no/where cannot be created: "):
        dapo("compare", *sides, "--store", own, "--output", "/proc/no/where")


@pytest.mark.parametrize("error", [DataError("no rows"), KeyboardInterrupt()])
def test_a_full_disk_does_not_hide_why_a_run_ended(
    tmp_path: Path,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("durable.secrets.token_hex", lambda _: "x")

    def fill_disk(run: Run) -> None:
        (run.folder / ".run.json.x.partial").symlink_to("/dev/full")

    run = Run.start(small_config(tmp_path / "store"))
    fill_disk(run)
    with pytest.raises(type(error)), run:
        raise error
    assert "No space left on device" in caplog.text
    assert not is_locked(run_lock_path(run.folder))
    with pytest.raises(OSError, match="No space left"), Run.start(run.config) as run:
        fill_disk(run)


def test_a_signalled_run_is_recorded_as_cancelled(tmp_path: Path) -> None:
    with pytest.raises(TerminationSignal), Run.start(small_config(tmp_path / "store")) as run:
        raise TerminationSignal(signal.SIGTERM)
    [recorded] = read_runs(run.store.root)
    assert (recorded.state, recorded.error) == ("cancelled", "TerminationSignal")
