"""Artifacts that no kept run uses: which they are, and their removal."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_core.errors import StoreError
from tasks.artifacts import MANIFEST_NAME, Artifact, ArtifactStore, held_if_free, is_held
from tasks.artifacts.artifact import artifact_at, subfolders
from tasks.runs.history import RECORD_FILE, RecordedRun, read_run, run_folders

MARGIN_SECONDS = 3600.0  # an artifact younger than this may be of a run that has no record yet
RESUMABLE_SECONDS = 24 * 3600.0  # so long after its last trace a run or attempt can be continued
UNFINISHED = "unfinished"  # in place of the stage


@dataclass(frozen=True)
class Unused:
    """A folder of the store that no kept run uses."""

    path: Path
    stage: str  # "damaged" for what was moved aside, "unfinished" for what a failed or killed attempt left
    frees_bytes: int  # files that other folders share by hard links free nothing
    last_run: str | None  # id of the newest run that used it
    left: str = ""  # why it stays; empty: it goes
    artifact: Artifact | None = None


def collect_garbage(
    root: Path,
    keep_runs: int,
    *,
    has_unfinished: bool = False,
    has_damaged: bool = False,
    is_dry_run: bool = False,
    margin_seconds: float = MARGIN_SECONDS,
) -> list[Unused]:
    """What was, or with `is_dry_run` would be, removed, and what stays although no kept run uses it.

    Kept are the newest `keep_runs` runs with a report, all runs newer than the last of these, runs that go on, and
    those without a report that are less than a day old. Run folders stay. What attempts left that nobody went on
    with for a day goes with `has_unfinished`, what was moved aside with `has_damaged`.
    Raises StoreError when the record of a run cannot be read, since what it uses would count as unused, and when
    another collection goes on.
    """
    if not (root / "runs").is_dir():  # elsewhere every folder would look unused
        raise StoreError(
            f"there is no store {root}: it has no folder runs, which a run makes; name the store with --store"
        )
    store = ArtifactStore(root)
    with contextlib.nullcontext() if is_dry_run else _alone(store):
        runs = [read_run(folder) for folder in run_folders(root)]
        expired = {run.id for run in runs} - _kept(root, runs, keep_runs)
        unused = list(_unused(store, runs, expired, margin_seconds))
        unused += _unfinished(store, has_unfinished)
        unused += _damaged(root) if has_damaged else []
        if is_dry_run:
            return unused

        def is_used(artifact: Artifact) -> bool:
            """Whether a run has recorded it that does not expire, be it one that began a moment ago."""
            return any(run.id not in expired and run.uses(artifact) for run in map(read_run, run_folders(root)))

        store.clear_removed(is_used)
        for lock_path in (root / ".locks").glob("run-*.lock"):  # of a run that was killed
            with held_if_free(lock_path) as is_free:
                if is_free:
                    lock_path.unlink()
        return [_remove(store, item, is_used) for item in unused]


@contextlib.contextmanager
def _alone(store: ArtifactStore) -> Iterator[None]:
    store.check_writable()
    with held_if_free(store.root / ".locks" / "gc.lock") as is_ours:
        if not is_ours:
            raise StoreError(f"another dapo gc goes on in {store.root}; try again when it has ended")
        yield


def _kept(root: Path, runs: list[RecordedRun], keep_runs: int) -> set[str]:
    """Ids of the runs whose artifacts stay."""
    reported = [run.id for run in runs if run.report is not None]  # newest first
    oldest = reported[:keep_runs][-1] if len(reported) >= keep_runs else ""
    # Training can outlive the run that started it, and reads that run's data and model.
    has_commands = any(is_held(path) for path in (root / ".logs").glob("*.log"))
    return {run.id for run in runs if run.id >= oldest or _may_go_on(run, has_commands)}


def _may_go_on(run: RecordedRun, has_commands: bool) -> bool:
    if run.state == "running" or (run.state == "interrupted" and has_commands):
        return True
    return run.report is None and _is_fresh(*_traces(run))


def _traces(run: RecordedRun) -> list[Path]:
    """What changes while the run goes on: its record, and what its commands write, also once they outlived it."""
    store = run.folder.parent.parent
    names = [Path(os.readlink(link)).stem for link in run.folder.glob("*.log") if link.is_symlink()]
    return [run.folder / RECORD_FILE, *(path for name in names for path in (store / ".work").glob(f"{name}*"))]


def _unused(
    store: ArtifactStore, runs: list[RecordedRun], expired: set[str], margin_seconds: float
) -> Iterator[Unused]:
    for artifact in _artifacts(store):
        users = [run.id for run in runs if run.uses(artifact)]
        if not expired.issuperset(users):
            continue
        path = Path(artifact.path)
        age_seconds = time.time() - _touched_at(path / MANIFEST_NAME)
        left = f"younger than {margin_seconds / 60:.0f} min" if age_seconds < margin_seconds else ""
        yield Unused(path, artifact.stage, _own_bytes(path), users[0] if users else None, left, artifact)


def _artifacts(store: ArtifactStore) -> Iterator[Artifact]:
    for stage in subfolders(store.root):
        if stage.name.startswith(".") or stage.name == "runs":
            continue
        for folder in subfolders(stage):
            # One that is not where it belongs is damaged, or not ours.
            if (artifact := artifact_at(folder)) and folder in (
                store.directory(artifact.stage, artifact.key),
                store.superseded_directory(artifact.stage, artifact.key, artifact.digest),
            ):
                yield artifact


def _unfinished(store: ArtifactStore, is_wanted: bool) -> Iterator[Unused]:
    left = "" if is_wanted else "--unfinished removes it"
    for attempt in store.abandoned_attempts():
        if not _is_fresh(attempt):
            yield Unused(attempt, UNFINISHED, _own_bytes(attempt), None, left)


def _damaged(root: Path) -> Iterator[Unused]:
    for folder in subfolders(root / ".damaged"):
        yield Unused(folder, "damaged", _own_bytes(folder), None)


def _remove(store: ArtifactStore, item: Unused, is_used: Callable[[Artifact], bool]) -> Unused:
    if item.left:
        return item
    if item.artifact is not None:
        is_removed = store.remove(item.artifact, is_used)
    elif item.stage == UNFINISHED:
        is_removed = store.remove_attempt(item.path, lambda: _is_fresh(item.path))
    else:
        shutil.rmtree(item.path)
        is_removed = True
    return item if is_removed else replace(item, left="in use, or being built")


def _own_bytes(folder: Path) -> int:
    """Bytes that removing the folder frees."""
    return sum(
        status.st_size for status in _statuses(folder) if stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    )


def _is_fresh(*paths: Path) -> bool:
    """Whether something there changed within the time in which it can be continued."""
    return time.time() - _touched_at(*paths) < RESUMABLE_SECONDS


def _touched_at(*paths: Path) -> float:
    """When something there was last changed, in seconds since the epoch."""
    return max((status.st_mtime for path in paths for status in _statuses(path)), default=0.0)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """Of the path and all below it, but for what vanishes meanwhile."""
    below = (Path(place, name) for place, folders, files in os.walk(path) for name in (*folders, *files))
    for each in itertools.chain([path], below):
        with contextlib.suppress(FileNotFoundError):
            yield os.lstat(each)
