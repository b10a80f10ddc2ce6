"""Removes artifacts that no kept run uses."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from durable import is_locked
from tasks.artifacts.artifact import MANIFEST_NAME, StoreError, artifact_at
from tasks.artifacts.store import DAMAGED, FINISHED, PARTIAL, ArtifactStore, Attempt
from tasks.runs.history import RECORD_FILE, RecordedRun, read_run, run_folders
from tasks.runs.nights import last_nights

MARGIN_SECONDS = 3600.0  # a younger artifact may belong to a run that has not recorded it yet
RESUMABLE_SECONDS = 24 * 3600.0  # a run or attempt can be continued for that long after its last change


@dataclass(frozen=True)
class Unused:
    """An attempt that no kept run uses."""

    attempt: Attempt
    frees_bytes: int  # files that other folders share by hard links free nothing
    last_run: str | None  # id of the newest run that used it
    left: str = ""  # why it stays; empty if it goes


def collect_garbage(
    root: Path,
    keep_runs: int,
    *,
    has_unfinished: bool = False,
    has_damaged: bool = False,
    is_dry_run: bool = False,
    margin_seconds: float = MARGIN_SECONDS,
) -> list[Unused]:
    """Remove unused attempts, or with `is_dry_run` only list them; returns them with those that stay anyway.

    Kept are the newest `keep_runs` runs with a report, all runs newer than the last of these, the newest night of
    each recipe, runs in progress, and those without a report that changed within a day. Run folders stay. Attempts
    not continued for a day go with `has_unfinished`, damaged and half-written artifacts with `has_damaged`.
    Raises StoreError when a run's record cannot be read, since everything that run uses would count as unused.
    """
    if not (root / "runs").is_dir():  # in any other folder everything would look unused
        raise StoreError(
            f"there is no store {root}: it has no folder runs, which a run makes; name the store with --store"
        )
    store = ArtifactStore(root)
    options = {PARTIAL: "" if has_unfinished else "--unfinished", DAMAGED: "" if has_damaged else "--damaged"}
    with contextlib.nullcontext() if is_dry_run else store.collecting():
        runs = [read_run(folder) for folder in run_folders(root)]
        kept = _kept(store, runs, keep_runs)
        found = []
        for attempt in store.attempts():
            users = [run.id for run in runs if run.uses(attempt)]
            if not _is_garbage(store, attempt, is_kept=not kept.isdisjoint(users)):
                continue
            left = f"{option} removes it" if (option := options.get(attempt.state)) else ""
            if attempt.state == FINISHED and _age_seconds(attempt.path / MANIFEST_NAME) < margin_seconds:
                left = f"younger than {margin_seconds / 60:.0f} min"
            found.append(Unused(attempt, _own_bytes(attempt.path), users[0] if users else None, left))
        return found if is_dry_run else [_remove(store, item) for item in found]


def _kept(store: ArtifactStore, runs: list[RecordedRun], keep_runs: int) -> set[str]:
    """Ids of the runs that keep their artifacts."""
    reported = [run.id for run in runs if run.report is not None]  # newest first
    oldest = reported[:keep_runs][-1] if len(reported) >= keep_runs else ""
    # Training can outlive the run that started it, and reads that run's data and model.
    has_commands = any(is_locked(path) for path in (store.root / ".logs").glob("*.log"))
    nights = {run.id for run in last_nights(runs).values()}
    return {run.id for run in runs if run.id >= oldest or run.id in nights or _may_go_on(store, run, has_commands)}


def _may_go_on(store: ArtifactStore, run: RecordedRun, has_commands: bool) -> bool:
    if run.state == "running" or (run.state == "interrupted" and has_commands):
        return True
    return run.report is None and _age_seconds(*_traces(store, run)) < RESUMABLE_SECONDS


def _traces(store: ArtifactStore, run: RecordedRun) -> Iterator[Path]:
    """The paths that change while the run is in progress: its record, and the attempts of its commands."""
    yield run.folder / RECORD_FILE
    for link in filter(Path.is_symlink, run.folder.glob("*.log")):
        stage, _, key = link.readlink().stem.rpartition("-")
        if stage and (attempt := store.unfinished(stage, key)):
            yield attempt


def _is_garbage(store: ArtifactStore, attempt: Attempt, is_kept: bool) -> bool:
    """True if no kept run and no builder needs the attempt."""
    if attempt.state == FINISHED:
        artifact = artifact_at(attempt.path)
        is_in_place = artifact and store.key_folder(artifact.stage, artifact.key) == attempt.path.parent
        return not is_kept and bool(is_in_place)  # elsewhere it is a user's copy
    if attempt.state == PARTIAL:
        places = (store.lock_path, store.log_path)
        is_built = any(is_locked(place(attempt.stage, attempt.short_key)) for place in places)
        return not is_built and _age_seconds(attempt.path) >= RESUMABLE_SECONDS
    return True


def _remove(store: ArtifactStore, item: Unused) -> Unused:
    if item.left or store.remove(item.attempt):
        return item
    return replace(item, left="in use, or being built")


def _own_bytes(folder: Path) -> int:
    """Bytes that removing the folder frees."""
    return sum(
        status.st_size for status in _statuses(folder) if stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    )


def _age_seconds(*paths: Path) -> float:
    """Seconds since the last change at or below these paths."""
    return time.time() - max((status.st_mtime for path in paths for status in _statuses(path)), default=0.0)


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of the path and of everything below it; vanished files are left out."""
    below = (Path(place, name) for place, folders, files in os.walk(path) for name in (*folders, *files))
    for each in itertools.chain([path], below):
        with contextlib.suppress(FileNotFoundError):
            yield os.lstat(each)
