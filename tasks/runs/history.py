"""Recorded runs: reading them, finding one by part of its id, and listing what it used."""

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
from eval.report.report import REPORT_JSON
from redaction import redact
from tasks.artifacts.artifact import Artifact, StoreError, artifact_at
from tasks.artifacts.store import ArtifactStore, Attempt

logger = logging.getLogger(__name__)

RECORD_FILE = "run.json"
CONFIG_FILE = "config.yaml"
REPORT_FOLDER = "report"
STEPS_FILE = "metrics.jsonl"  # METRICS_FILE of dapo_core.metrics.step, without importing it
NUM_NAMED_RUNS = 5  # listed in errors
MIN_SHORT_ID = 4
MAX_VALUE_CHARS = 40
NUM_SHARED_CHARS = 15  # shown before the first difference of two long values
SECRET_KEYS = ("flow.webhook.url",)  # anyone who knows the address can post to the chat
_PLACE = re.compile(r"\w+/\w+/\d+")
_LABEL = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_LATEST = re.compile(r"latest(?:~(\d+))?")
_IN_WORDS = {
    "evaluate_after": "an evaluation after training",
    "train_policy": "a training",
    "report": "a report",
}


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run, as recorded in run.json."""

    cached: bool
    seconds: float
    artifact: str  # path when recorded; the store may have moved since
    key: str
    digest: str

    def __post_init__(self) -> None:
        if not _PLACE.fullmatch(self.place.as_posix()):
            raise ValueError(f"{self.artifact!r} is not the path of an artifact")

    @property
    def place(self) -> Path:
        """The artifact's path in the store: STAGE/KEY16/NUMBER."""
        return Path(*Path(self.artifact).parts[-3:])


@dataclass(frozen=True)
class RecordedRun:
    """A run as recorded in run.json, with its current state."""

    folder: Path
    name: str  # run.name
    flow: str
    host: str
    pid: int
    # running, completed, failed, cancelled, skipped, or interrupted (process or worker gone)
    state: str
    started_at: float  # seconds since the epoch
    seconds: float  # until it ended or was last recorded
    stages: Mapping[str, StageRecord]
    error: str | None
    report: Mapping[str, Any] | None  # the headline: before, after, difference, p, n
    environment: Sequence[Mapping[str, str]] = ()  # variables: name, value, set_by

    def __post_init__(self) -> None:
        if not all(map(_LABEL.fullmatch, self.stages)):  # they name files in exports
            raise ValueError(f"{[*self.stages]} are not labels of stages")

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def store(self) -> Path:
        """The root of the store that contains the run."""
        return self.folder.parent.parent

    @property
    def num_cached(self) -> int:
        """Stages taken from the store."""
        return sum(stage.cached for stage in self.stages.values())

    @property
    def num_built(self) -> int:
        """Stages built by this run."""
        return len(self.stages) - self.num_cached

    def has(self, output: str) -> bool:
        """True if it has this output: the label of a stage, or "report"."""
        return output in self.stages or (output == "report" and self.report is not None)

    def uses(self, attempt: Attempt) -> bool:
        """True if it took or built this artifact."""
        place = attempt.path.relative_to(attempt.path.parents[2])
        return any(stage.place == place for stage in self.stages.values())


def require_store(store: Path) -> None:
    """Raise StoreError if the store does not exist."""
    if not store.is_dir():
        raise StoreError(f"there is no store {store}: run a recipe first, or name one with --store")


def read_runs(store: Path) -> Iterator[RecordedRun]:
    """Yield the runs recorded in a store, newest first.

    Skips folders without a record (the run was killed at its start), and unreadable records, which
    are logged.
    """
    for folder in run_folders(store):
        try:
            yield read_run(folder)
        except StoreError as error:
            logger.warning("run skipped: %s", error)


def run_folders(store: Path) -> list[Path]:
    """Run folders that have a record, newest first."""
    folders = sorted((store / "runs").glob("*Z-*"), reverse=True)
    return [folder.absolute() for folder in folders if (folder / RECORD_FILE).is_file()]


def read_run(folder: Path) -> RecordedRun:
    """Read the run of a folder. Raises StoreError if its record is invalid."""
    path = folder / RECORD_FILE
    try:
        # checked first: once free, the record is final
        is_active = is_locked(run_lock_path(folder))
        record = json.loads(path.read_text(encoding="utf-8"))
        state = "interrupted" if record["state"] == "running" and not is_active else record["state"]
        seconds = record["seconds"] if state != "running" else time.time() - record["started_at"]
        return RecordedRun(
            folder=folder,
            **{name: record[name] for name in ("name", "flow", "host", "pid")},
            state=state,
            started_at=float(record["started_at"]),
            seconds=float(seconds),
            stages={label: StageRecord(**values) for label, values in record["stages"].items()},
            error=record.get("error"),
            report=record.get("report"),
            # earlier runs listed those of each child process instead
            environment=[row for row in record.get("environment", ()) if "set_by" in row],
        )
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; correct that, or move the run's folder away"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is not a valid run record ({error!r}): another version wrote it, or it was "
            "edited; "
            "move the run's folder away to continue without it and without what only it used"
        ) from None


def run_lock_path(folder: Path) -> Path:
    """The lock a run holds while it is in progress."""
    return folder / ".lock"


def artifact_of(run: RecordedRun, label: str) -> Artifact | None:
    """The artifact of a run's stage, without verification; None if it was removed."""
    stage = run.stages[label]
    artifact = artifact_at(run.store / stage.place)
    return artifact if artifact is not None and artifact.digest == stage.digest else None


def training_folder(run: RecordedRun) -> Path:
    """The output of a run's training, finished or in progress; StoreError without one."""
    if "train_policy" in run.stages:
        return run.store / run.stages["train_policy"].place
    log = run.folder / "train_policy.log"
    if log.is_symlink():  # the training has begun
        stage, _, key = log.readlink().stem.rpartition("-")
        if folder := ArtifactStore(run.store).unfinished(stage, key):
            return folder
    raise StoreError(f"the run {run.id} ({run.flow}, {run.state}) has no training yet")


def require_artifact(run: RecordedRun, label: str) -> Artifact:
    """Like `artifact_of`, but raises StoreError with the reason if there is none."""
    if label not in run.stages:
        stages = ", ".join(run.stages) or "no stages"
        raise StoreError(
            f"the run {run.id} ({run.flow}, {run.state}) has no {label}, only {stages}"
            + (f"; it ended with {run.error}" if run.error else "")
        )
    artifact = artifact_of(run, label)
    if artifact is None:
        raise StoreError(
            f"{label} of the run {run.id} is no longer in the store: "
            f"{run.store / run.stages[label].place} was removed, perhaps by dapo runs gc; dapo run "
            f"{run.folder / CONFIG_FILE} --set store.path={run.store} rebuilds it"
        )
    return artifact


def find_run(store: Path, text: str, needs: str | None = None) -> RecordedRun:
    """Find a run by its folder, a prefix or suffix of its id, `latest`, or `latest~2`.

    With `needs`, a stage label or "report", `latest` counts only runs that have it. Raises
    StoreError if the store does not exist, or if no run or several runs match; the message lists
    the candidates.
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
        found = [one for one in folders if one.name.startswith(text) or one.name.endswith(text)]
        found = [one for one in found if one.name == text] or found
    if len(found) == 1:
        return read_run(found[0])
    if found:
        raise StoreError(f"{text} matches {len(found)} runs in {store}: {_names(found)}")
    which = f" with {_IN_WORDS.get(needs, needs)}" if needs is not None and match else ""
    if not folders:
        raise StoreError(f"no run {text} in {store}; no run{which} is recorded there")
    only = "is only one run" if len(folders) == 1 else f"are only {len(folders)} runs"
    there = f"there {only}{which}:" if match else "the newest are"
    raise StoreError(f"no run {text} in {store}; {there} {_names(folders)}")


def find_evaluation(store: Path, text: str) -> tuple[Path, RecordedRun | None]:
    """The results folder for `text`, and its run, if any.

    `text` is a results folder, or a run as for `find_run`, which stands for its evaluation after
    training.
    """
    path = Path(text)
    if path.exists() and not (path / RECORD_FILE).is_file():
        return path, None
    try:
        run = find_run(store, text, "evaluate_after")
    except StoreError as error:
        is_path = not _LATEST.fullmatch(text)
        raise StoreError(
            f"{text} is no file or folder, and {error}" if is_path else str(error)
        ) from None
    return Path(require_artifact(run, "evaluate_after").path), run


def find_training_log(store: Path, text: str) -> Path:
    """The training metrics for `text`: a log file, an output folder of `dapo train`, or a run."""
    path = Path(text)
    if path.is_file():
        return path
    if (path / STEPS_FILE).is_file():
        return path / STEPS_FILE
    try:
        run = find_run(store, text, "train_policy")
    except StoreError as error:
        raise StoreError(
            f"{text} is neither a training log nor a folder with {STEPS_FILE}, and {error}"
        ) from None
    steps = Path(require_artifact(run, "train_policy").path) / STEPS_FILE
    if not steps.is_file():
        raise StoreError(
            f"the run {run.id} adopted a checkpoint without the log of its training; adopt it with "
            "that log: dapo adopt FOLDER CONFIG --log FILE"
        )
    return steps


def _names(folders: Sequence[Path]) -> str:
    shown = ", ".join(folder.name for folder in folders[:NUM_NAMED_RUNS])
    more = len(folders) - NUM_NAMED_RUNS
    return f"{shown} and {more} more" if more > 0 else shown


def short_ids(store: Path) -> dict[str, str]:
    """Map each run id to its shortest suffix that names no other run."""
    ids = [folder.name for folder in run_folders(store)]
    lengths = range(MIN_SHORT_ID, max(map(len, ids), default=0))
    uses = collections.Counter(
        part for run_id in ids for length in lengths for part in (run_id[:length], run_id[-length:])
    )
    short = {}
    for run_id in ids:
        ends = (run_id[-length:] for length in lengths)
        # A suffix that starts with a dash would look like an option.
        short[run_id] = next(
            (end for end in ends if uses[end] == 1 and not end.startswith("-")), run_id
        )
    return short


def run_before(run: RecordedRun) -> RecordedRun | None:
    """The previous run of the same name."""
    return next(
        (other for other in read_runs(run.store) if other.id < run.id and other.name == run.name),
        None,
    )


def changed_keys(before: RecordedRun, after: RecordedRun) -> list[Difference]:
    """Configuration keys that differ between two runs. Raises StoreError."""
    return differences_of(read_config(before), read_config(after))


def read_config(run: RecordedRun) -> dict[str, Any]:
    """The content of the run's config.yaml. Raises StoreError if it is unreadable."""
    path = run.folder / CONFIG_FILE
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StoreError(f"the configuration of the run {run.id} cannot be read: {error}") from None
    if not isinstance(tree, dict):  # a power cut may leave an empty file
        raise StoreError(
            f"the configuration of the run {run.id} cannot be read: {path} has no sections"
        )
    return tree


def read_report(run: RecordedRun) -> dict[str, Any] | None:
    """The content of the run's report.json; None without a report. Raises StoreError."""
    path = run.folder / REPORT_FOLDER / REPORT_JSON
    if run.report is None or not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} is not a report ({error}); dapo stage compare {run.folder / CONFIG_FILE} "
            "writes it again"
        ) from None


def describe_run(run: RecordedRun) -> dict[str, Any]:
    """A run as plain values, with the path of each artifact (None if removed)."""
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
    """A key with its old and new value, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        places = range(min(len(self.before), len(self.after)))
        shared = next(
            (place for place in places if self.before[place] != self.after[place]), len(places)
        )
        return f"{self.key} {_shortened(self.before, shared)} -> {_shortened(self.after, shared)}"


def differences_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Dotted keys with different values, in the order of `after`; removed keys come last."""
    found = differences(before, after)
    return [Difference(key, _text(key, old), _text(key, new)) for key, old, new in found]


def _text(key: str, value: Any) -> str:
    if value is UNSET:
        return "(unset)"
    if key in SECRET_KEYS and value is not None:
        return "(secret)"
    return json.dumps(value) if value is None or isinstance(value, bool) else redact(str(value))


def _shortened(text: str, shared: int) -> str:
    """The part of a long text around its first difference, after `shared` characters."""
    if len(text) <= MAX_VALUE_CHARS:
        return text
    start = max(0, shared - NUM_SHARED_CHARS)
    shown = ("..." if start else "") + text[start:]
    return shown if len(shown) <= MAX_VALUE_CHARS else shown[: MAX_VALUE_CHARS - 3] + "..."
