"""Runs as they were recorded: reading them, finding one by a part of its id, and what it used."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo_core.errors import StoreError
from eval.report import REPORT_JSON
from tasks.artifacts import Artifact, ArtifactStore, is_held
from tasks.runs.differences import Difference, differences_of

logger = logging.getLogger(__name__)

RECORD_FILE = "run.json"
CONFIG_FILE = "config.yaml"
REPORT_FOLDER = "report"
NUM_NAMED_RUNS = 5  # in an error
MIN_SHORT_ID = 4
_LATEST = re.compile(r"latest(?:~(\d+))?")


@dataclass(frozen=True)
class RecordedStage:
    """What a run did about one stage."""

    label: str
    stage: str
    key: str
    digest: str
    path: str  # of the artifact, as recorded; `artifact_of` finds it where it is
    is_cached: bool
    seconds: float


@dataclass(frozen=True)
class RecordedRun:
    """A run as its run.json tells, with its state as it is."""

    folder: Path
    name: str  # run.name
    flow: str
    host: str
    pid: int
    state: str  # running, completed, failed, cancelled, skipped; interrupted: gone silently, or with its worker
    started_at: float  # seconds since the epoch
    seconds: float  # up to its end, or as far as is known
    stages: Mapping[str, RecordedStage]
    error: str | None
    report: Mapping[str, Any] | None  # the headline: before, after, difference, p, n

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def num_cached(self) -> int:
        """Stages whose artifact was there."""
        return sum(stage.is_cached for stage in self.stages.values())

    @property
    def num_built(self) -> int:
        """Stages that it built."""
        return len(self.stages) - self.num_cached

    def has(self, what: str) -> bool:
        """Whether it has the output of a stage, by its label, or its "report"."""
        return what in self.stages or (what == "report" and self.report is not None)

    def uses(self, artifact: Artifact) -> bool:
        """Whether one of its stages took or made this content under this key."""
        return any((s.key, s.digest) == (artifact.key, artifact.digest) for s in self.stages.values())


def require_store(store: Path) -> None:
    """Raise StoreError when there is no folder of that name."""
    if not store.is_dir():
        raise StoreError(f"there is no store {store}; name it with --store")


def read_runs(store: Path) -> Iterator[RecordedRun]:
    """The runs recorded under a store, newest first.

    A folder without a record, whose run ended as it began, is left out; so is a record that cannot be read, which
    is named in the log.
    """
    for folder in run_folders(store):
        try:
            yield read_run(folder)
        except StoreError as error:
            logger.warning("left out: %s", error)


def run_folders(store: Path) -> list[Path]:
    """Folders of runs that have a record, newest first."""
    folders = sorted((store / "runs").glob("*Z-*"), reverse=True)
    return [folder.absolute() for folder in folders if (folder / RECORD_FILE).is_file()]


def read_run(folder: Path) -> RecordedRun:
    """The run of a folder. Raises StoreError when its record is not one."""
    path = folder / RECORD_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        is_going_on = record["state"] == "running" and is_held(run_lock_path(folder))
        if record["state"] == "running" and not is_going_on:  # it may have ended since
            record = json.loads(path.read_text(encoding="utf-8"))
        stages = {label: _stage(label, values) for label, values in record["stages"].items()}
        return RecordedRun(
            folder=folder,
            name=record["name"],
            flow=record["flow"],
            host=record["host"],
            pid=record["pid"],
            state="interrupted" if record["state"] == "running" and not is_going_on else record["state"],
            started_at=record["started_at"],
            seconds=max(0.0, time.time() - record["started_at"]) if is_going_on else record["seconds"],
            stages=stages,
            error=record.get("error"),
            report=record.get("report"),
        )
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; mend that, or move the run's folder away"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is not the record of a run ({error!r}): a run of another version wrote it, or it was edited; "
            "move the run's folder away to do without it and what only it used"
        ) from None


def _stage(label: str, values: Mapping[str, Any]) -> RecordedStage:
    path = values["artifact"]
    stage = Path(path).parent.name
    return RecordedStage(label, stage, values["key"], values["digest"], path, values["cached"], values["seconds"])


def run_lock_path(folder: Path) -> Path:
    """The lock that a run holds as long as it goes on."""
    return folder.parent.parent / ".locks" / f"run-{folder.name}.lock"


def artifact_of(run: RecordedRun, label: str) -> Artifact | None:
    """The artifact that the run took or made as `label`; None when it is no longer there."""
    stage = run.stages[label]
    return ArtifactStore(run.folder.parent.parent).find(stage.stage, stage.key, stage.digest)


def require_artifact(run: RecordedRun, label: str) -> Artifact:
    """As `artifact_of`; raises StoreError, saying why there is none."""
    if label not in run.stages:
        raise StoreError(
            f"the run {run.id} ({run.flow}, {run.state}) has no {label}, but {', '.join(run.stages) or 'no stage'}"
            + (f"; it ended with {run.error}" if run.error else "")
        )
    artifact = artifact_of(run, label)
    if artifact is None:
        store = ArtifactStore(run.folder.parent.parent)
        place = store.directory(run.stages[label].stage, run.stages[label].key)
        raise StoreError(
            f"{label} of the run {run.id} is no longer in the store: {place} was removed, as dapo gc does; "
            f"dapo run {run.folder / CONFIG_FILE} --set store.path={store.root} makes it again"
        )
    return artifact


def find_run(store: Path, text: str, needs: str | None = None) -> RecordedRun:
    """The run whose id begins or ends with `text`; `latest` is the newest, `latest~2` the second before it.

    With `needs`, the label of a stage or "report", these two count only the runs that have it.
    Raises StoreError, naming the runs there are, when no run or more than one is meant.
    """
    folders = run_folders(store)
    if match := _LATEST.fullmatch(text):
        if needs is not None:
            folders = [run.folder for run in read_runs(store) if run.has(needs)]
        found = folders[int(match[1] or 0) :][:1]
    else:
        found = [folder for folder in folders if folder.name.startswith(text) or folder.name.endswith(text)]
        found = [folder for folder in found if folder.name == text] or found
    if len(found) == 1:
        return read_run(found[0])
    if found:
        raise StoreError(f"{text} is the beginning or end of {len(found)} runs in {store}: {_names(found)}")
    which = f" with {needs}" if needs is not None and match else ""
    there = f"the newest{which} are {_names(folders)}" if folders else f"no run{which} is recorded there"
    raise StoreError(f"no run {text} in {store}; {there}")


def find_evaluation(store: Path, text: str) -> tuple[Path, RecordedRun | None]:
    """The results folder that `text` names, and the run it is of, if it is of one.

    A folder is taken as it is; of a run, named by folder or as `find_run` takes it, the evaluation after training.
    """
    path = Path(text)
    if path.exists() and not (path / RECORD_FILE).is_file():
        return path, None
    try:
        run = read_run(path.absolute()) if path.exists() else find_run(store, text, "evaluate_after")
    except StoreError as error:
        raise StoreError(f"{text} is no results folder, and {error}") from None
    return Path(require_artifact(run, "evaluate_after").path), run


def _names(folders: Sequence[Path]) -> str:
    shown = ", ".join(folder.name for folder in folders[:NUM_NAMED_RUNS])
    more = len(folders) - NUM_NAMED_RUNS
    return f"{shown} and {more} more" if more > 0 else shown


def short_ids(store: Path) -> dict[str, str]:
    """By id the shortest end of it that no other run of the store begins or ends with."""
    ids = [folder.name for folder in run_folders(store)]
    lengths = range(MIN_SHORT_ID, max(map(len, ids), default=0))
    ends: dict[str, int] = {}
    for text in (
        part for identity in ids for length in lengths for part in (identity[:length], identity[-length:])
    ):
        ends[text] = ends.get(text, 0) + 1
    return {
        identity: next(
            # One that begins with a dash would be taken for an option.
            (end for length in lengths if ends[end := identity[-length:]] == 1 and not end.startswith("-")),
            identity,
        )
        for identity in ids
    }


def run_before(run: RecordedRun) -> RecordedRun | None:
    """The newest run of the same name that began before this one."""
    store = run.folder.parent.parent
    return next((other for other in read_runs(store) if other.id < run.id and other.name == run.name), None)


def changed_keys(before: RecordedRun, after: RecordedRun) -> list[Difference]:
    """Configuration keys whose value is another one in `after`. Raises StoreError when one cannot be read."""
    return differences_of(_read_config(before), _read_config(after))


def _read_config(run: RecordedRun) -> dict[str, Any]:
    path = run.folder / CONFIG_FILE
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StoreError(f"the configuration of the run {run.id} cannot be read: {error}") from None
    if not isinstance(tree, dict):  # a power cut may leave an empty file
        raise StoreError(f"the configuration of the run {run.id} cannot be read: {path} holds no sections")
    return tree


def read_report(run: RecordedRun) -> dict[str, Any] | None:
    """The content of the run's report.json; None when it has no report. Raises StoreError when it is not JSON."""
    path = run.folder / REPORT_FOLDER / REPORT_JSON
    if run.report is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(
            f"{path} is not JSON ({error}); dapo stage compare {run.folder / CONFIG_FILE} makes the report anew"
        ) from None


def describe_run(run: RecordedRun) -> dict[str, Any]:
    """A run as plain values, with where each artifact is; null for one that is no longer there."""
    stages = {}
    for label, stage in run.stages.items():
        artifact = artifact_of(run, label)
        stages[label] = {**vars(stage), "path": artifact.path if artifact else None}
    return {"id": run.id, **vars(run), "folder": str(run.folder), "stages": stages}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace run.json in one step."""
    partial = folder / f"{RECORD_FILE}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2))
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
    partial.rename(folder / RECORD_FILE)


def write_link(link: Path, target: Path) -> None:
    """Have the link point at the target, relative to itself, so that a store can be moved."""
    partial = link.with_name(f"{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(os.path.relpath(target, link.parent))
    partial.rename(link)


def point_at(run: RecordedRun, artifact: Artifact) -> None:
    """Have the run's links and record name the place where an artifact that it used stands."""
    labels = [s.label for s in run.stages.values() if (s.key, s.digest) == (artifact.key, artifact.digest)]
    labels = [label for label in labels if run.stages[label].path != artifact.path]
    if not labels:
        return
    record = json.loads((run.folder / RECORD_FILE).read_text(encoding="utf-8"))
    for label in labels:
        write_link(run.folder / label, Path(artifact.path))
        record["stages"][label]["artifact"] = artifact.path
    write_record(run.folder, record)
