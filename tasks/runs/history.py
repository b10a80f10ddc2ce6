"""Recorded runs: reading them, finding one by a part of its id, and what it used."""

from __future__ import annotations

import collections
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from durable import UNSET, differences, is_locked
from eval.report import REPORT_JSON
from redaction import redact
from tasks.artifacts.artifact import Artifact, StoreError, artifact_at
from tasks.artifacts.store import Attempt

logger = logging.getLogger(__name__)

RECORD_FILE = "run.json"
CONFIG_FILE = "config.yaml"
REPORT_FOLDER = "report"
STEPS_FILE = "metrics.jsonl"  # METRICS_FILE of dapo_core.metrics, which loads torch
NUM_NAMED_RUNS = 5  # in an error
MIN_SHORT_ID = 4
MAX_VALUE_CHARS = 40
NUM_SHARED_CHARS = 15  # of these before the place where two long values begin to differ
SECRET_KEYS = ("flow.webhook.url",)  # whoever knows the address may write to the chat
_PLACE = re.compile(r"\w+/\w+/\d+")
_LABEL = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_LATEST = re.compile(r"latest(?:~(\d+))?")


@dataclass(frozen=True)
class StageRecord:
    """What a run did about one stage, as run.json has it."""

    cached: bool
    seconds: float
    artifact: str  # its path when it was recorded; the store may have moved since
    key: str
    digest: str

    def __post_init__(self) -> None:
        if not _PLACE.fullmatch(self.place.as_posix()):
            raise ValueError(f"{self.artifact!r} is no place of an artifact")

    @property
    def place(self) -> Path:
        """Where the artifact is in its store: STAGE/KEY16/NUMBER."""
        return Path(*Path(self.artifact).parts[-3:])


@dataclass(frozen=True)
class RecordedRun:
    """A run as its run.json describes it, with its current state."""

    folder: Path
    name: str  # run.name
    flow: str
    host: str
    pid: int
    state: str  # running, completed, failed, cancelled, skipped; interrupted: its process or worker is gone
    started_at: float  # seconds since the epoch
    seconds: float  # until its end, or until its last record
    stages: Mapping[str, StageRecord]
    error: str | None
    report: Mapping[str, Any] | None  # the headline: before, after, difference, p, n
    environment: Sequence[Mapping[str, Any]] = ()  # set for child processes: name, value, children, why, stages

    def __post_init__(self) -> None:
        if not all(map(_LABEL.fullmatch, self.stages)):  # they also name files of an export
            raise ValueError(f"{[*self.stages]} are not labels of stages")

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def store(self) -> Path:
        """The folder of the store that it is recorded in."""
        return self.folder.parent.parent

    @property
    def num_cached(self) -> int:
        """Stages whose artifact was in the store."""
        return sum(stage.cached for stage in self.stages.values())

    @property
    def num_built(self) -> int:
        """Stages that it built."""
        return len(self.stages) - self.num_cached

    def has(self, what: str) -> bool:
        """Whether it has the output of a stage, by its label, or its "report"."""
        return what in self.stages or (what == "report" and self.report is not None)

    def uses(self, attempt: Attempt) -> bool:
        """Whether it took or made this artifact."""
        place = attempt.path.relative_to(attempt.path.parents[2])
        return any(stage.place == place for stage in self.stages.values())


def require_store(store: Path) -> None:
    """Raise StoreError when there is no folder of that name."""
    if not store.is_dir():
        raise StoreError(f"there is no store {store}; name it with --store")


def read_runs(store: Path) -> Iterator[RecordedRun]:
    """The runs recorded under a store, newest first.

    A folder without a record, left by a run that was killed at its start, is left out. So is a record that cannot
    be read, which is named in the log.
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
        is_going_on = is_locked(run_lock_path(folder))  # asked first: if it is free, the record is the last one
        record = json.loads(path.read_text(encoding="utf-8"))
        state = "interrupted" if record["state"] == "running" and not is_going_on else record["state"]
        return RecordedRun(
            folder=folder,
            **{name: record[name] for name in ("name", "flow", "host", "pid")},
            state=state,
            started_at=float(record["started_at"]),
            seconds=float(time.time() - record["started_at"] if state == "running" else record["seconds"]),
            stages={label: StageRecord(**values) for label, values in record["stages"].items()},
            error=record.get("error"),
            report=record.get("report"),
            environment=record.get("environment", ()),
        )
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; correct that, or move the run's folder away"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is not the record of a run ({error!r}): a run of another version wrote it, or it was edited; "
            "move the run's folder away to do without it and what only it used"
        ) from None


def run_lock_path(folder: Path) -> Path:
    """The lock that a run holds until it ends."""
    return folder / ".lock"


def artifact_of(run: RecordedRun, label: str) -> Artifact | None:
    """The artifact that the run took or made as `label`, its files unchecked; None if it was removed."""
    stage = run.stages[label]
    artifact = artifact_at(run.store / stage.place)
    return artifact if artifact is not None and artifact.digest == stage.digest else None


def require_artifact(run: RecordedRun, label: str) -> Artifact:
    """As `artifact_of`, but raises StoreError with the reason if there is none."""
    if label not in run.stages:
        raise StoreError(
            f"the run {run.id} ({run.flow}, {run.state}) has no {label}, but {', '.join(run.stages) or 'no stage'}"
            + (f"; it ended with {run.error}" if run.error else "")
        )
    artifact = artifact_of(run, label)
    if artifact is None:
        raise StoreError(
            f"{label} of the run {run.id} is no longer in the store: {run.store / run.stages[label].place} was "
            f"removed, as dapo gc does; dapo run {run.folder / CONFIG_FILE} --set store.path={run.store} makes it "
            "again"
        )
    return artifact


def find_run(store: Path, text: str, needs: str | None = None) -> RecordedRun:
    """The run of the folder `text`, or whose id begins or ends with it; `latest~2` is the one two before `latest`.

    With `needs`, the label of a stage or "report", these two count only the runs that have it.
    Raises StoreError without such a store and, naming the runs there are, when none matches or more than one.
    """
    if (Path(text) / RECORD_FILE).is_file():
        return read_run(Path(text).absolute())
    require_store(store)
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
    """The results folder that `text` names, and the run that it belongs to, if any.

    A folder is taken as it is. A run, named by its folder or as for `find_run`, stands for its evaluation after
    training.
    """
    path = Path(text)
    if path.exists() and not (path / RECORD_FILE).is_file():
        return path, None
    try:
        run = find_run(store, text, "evaluate_after")
    except StoreError as error:
        raise StoreError(f"{text} is no results folder, and {error}") from None
    return Path(require_artifact(run, "evaluate_after").path), run


def find_training_log(store: Path, text: str) -> Path:
    """The file with the training steps that `text` names: a log, a folder of `dapo train`, or a run."""
    path = Path(text)
    if path.is_file():
        return path
    if (path / STEPS_FILE).is_file():
        return path / STEPS_FILE
    try:
        run = find_run(store, text, "train_policy")
    except StoreError as error:
        raise StoreError(
            f"{text} is neither a log of a training nor a folder with its {STEPS_FILE}, and {error}"
        ) from None
    return Path(require_artifact(run, "train_policy").path) / STEPS_FILE


def _names(folders: Sequence[Path]) -> str:
    shown = ", ".join(folder.name for folder in folders[:NUM_NAMED_RUNS])
    more = len(folders) - NUM_NAMED_RUNS
    return f"{shown} and {more} more" if more > 0 else shown


def short_ids(store: Path) -> dict[str, str]:
    """Per run id, its shortest suffix that is unique among the beginnings and ends of all ids in the store."""
    ids = [folder.name for folder in run_folders(store)]
    lengths = range(MIN_SHORT_ID, max(map(len, ids), default=0))
    uses = collections.Counter(
        part for run_id in ids for length in lengths for part in (run_id[:length], run_id[-length:])
    )
    short = {}
    for run_id in ids:
        ends = (run_id[-length:] for length in lengths)
        # An end that begins with a dash would be taken for an option.
        short[run_id] = next((end for end in ends if uses[end] == 1 and not end.startswith("-")), run_id)
    return short


def run_before(run: RecordedRun) -> RecordedRun | None:
    """The newest run of the same name that began before this one."""
    return next((other for other in read_runs(run.store) if other.id < run.id and other.name == run.name), None)


def changed_keys(before: RecordedRun, after: RecordedRun) -> list[Difference]:
    """Configuration keys with another value in `after`. Raises StoreError when one cannot be read."""
    return differences_of(read_config(before), read_config(after))


def read_config(run: RecordedRun) -> dict[str, Any]:
    """The sections of the run's config.yaml. Raises StoreError when it cannot be read."""
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
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} is no report ({error}); dapo stage compare {run.folder / CONFIG_FILE} makes it again"
        ) from None


def describe_run(run: RecordedRun) -> dict[str, Any]:
    """A run as plain values, with the path of each artifact; None for a removed one."""
    stages = {}
    for label, stage in run.stages.items():
        artifact = artifact_of(run, label)
        stages[label] = {
            "stage": stage.place.parts[0],
            "key": stage.key,
            "digest": stage.digest,
            "path": artifact.path if artifact else None,
            "is_cached": stage.cached,
            "seconds": stage.seconds,
        }
    return {"id": run.id, **vars(run), "folder": str(run.folder), "stages": stages}


@dataclass(frozen=True)
class Difference:
    """One key with its two values, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        places = range(min(len(self.before), len(self.after)))
        shared = next((place for place in places if self.before[place] != self.after[place]), len(places))
        return f"{self.key} {_shortened(self.before, shared)} -> {_shortened(self.after, shared)}"


def differences_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Keys, dotted, with different values, in the order of `after`; those that only `before` has come last."""
    return [Difference(key, _text(key, old), _text(key, new)) for key, old, new in differences(before, after)]


def _text(key: str, value: Any) -> str:
    if value is UNSET:
        return "(unset)"
    if key in SECRET_KEYS and value is not None:
        return "(secret)"
    return json.dumps(value) if value is None or isinstance(value, bool) else redact(str(value))


def _shortened(text: str, shared: int) -> str:
    """The part of a long text where it begins to differ from another one, after `shared` characters."""
    if len(text) <= MAX_VALUE_CHARS:
        return text
    start = max(0, shared - NUM_SHARED_CHARS)
    shown = ("..." if start else "") + text[start:]
    return shown if len(shown) <= MAX_VALUE_CHARS else shown[: MAX_VALUE_CHARS - 3] + "..."
