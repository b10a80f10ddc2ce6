"""Garbage collection: removes artifacts that no kept run uses."""

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

MARGIN_SECONDS = 3600.0  # younger artifacts may not be recorded by their run yet
RESUMABLE_SECONDS = 24 * 3600.0  # how long after its last change an attempt may be resumed


@dataclass(frozen=True)
class Unused:
    """An attempt that no kept run uses."""

    attempt: Attempt
    frees_bytes: int  # without files that are hard-linked elsewhere
    last_run: str | None  # id of the newest run that used it
    kept_reason: str = ""  # why it stays; empty if it is removed


def collect_garbage(
    root: Path,
    keep_runs: int,
    *,
    has_unfinished: bool = False,
    has_damaged: bool = False,
    is_dry_run: bool = False,
    margin_seconds: float = MARGIN_SECONDS,
) -> list[Unused]:
    """Remove unused attempts, or only list them; returns all, kept ones included.

    Kept runs: the newest `keep_runs` runs with a report and all runs newer than the oldest of
    these, the newest nightly run of each recipe, runs in progress, and runs without a report that
    changed within a day. Run folders are never removed. `has_unfinished` also removes attempts not
    resumed for a day, `has_damaged` damaged artifacts. Raises StoreError if the record of a run
    cannot be read, because everything it uses would count as unused.
    """
    if not (root / "runs").is_dir():  # in another folder everything would look unused
        raise StoreError(
            f"there is no store {root}: it has no folder runs; name the store with --store"
        )
    store = ArtifactStore(root)
    options = {
        PARTIAL: "" if has_unfinished else "--unfinished",
        DAMAGED: "" if has_damaged else "--damaged",
    }
    with contextlib.nullcontext() if is_dry_run else store.collecting():
        runs = [read_run(folder) for folder in run_folders(root)]
        kept = _kept(store, runs, keep_runs)
        found = []
        for attempt in store.attempts():
            users = [run.id for run in runs if run.uses(attempt)]
            if not _is_garbage(store, attempt, is_kept=not kept.isdisjoint(users)):
                continue
            kept_reason = f"{option} removes it" if (option := options.get(attempt.state)) else ""
            is_finished, manifest = attempt.state == FINISHED, attempt.path / MANIFEST_NAME
            if is_finished and _age_seconds(manifest) < margin_seconds:
                kept_reason = f"younger than {margin_seconds / 60:.0f} min"
            last_run = users[0] if users else None
            found.append(Unused(attempt, _own_bytes(attempt.path), last_run, kept_reason))
        return found if is_dry_run else [_remove(store, item) for item in found]


def _kept(store: ArtifactStore, runs: list[RecordedRun], keep_runs: int) -> set[str]:
    """Ids of the runs whose artifacts are kept."""
    reported = [run.id for run in runs if run.report is not None]  # newest first
    oldest = reported[:keep_runs][-1] if len(reported) >= keep_runs else ""
    nights = {run.id for run in last_nights(runs).values()}
    return {
        run.id for run in runs if run.id >= oldest or run.id in nights or _may_continue(store, run)
    }


def _may_continue(store: ArtifactStore, run: RecordedRun) -> bool:
    if run.state == "running":
        return True
    return run.report is None and _age_seconds(*_traces(store, run)) < RESUMABLE_SECONDS


def _traces(store: ArtifactStore, run: RecordedRun) -> Iterator[Path]:
    """Paths that change while the run is in progress: its record and its attempts."""
    yield run.folder / RECORD_FILE
    for link in filter(Path.is_symlink, run.folder.glob("*.log")):
        stage, _, key = link.readlink().stem.rpartition("-")
        if stage and (attempt := store.unfinished(stage, key)):
            yield attempt


def _is_garbage(store: ArtifactStore, attempt: Attempt, is_kept: bool) -> bool:
    """True if no kept run and no builder needs the attempt."""
    if attempt.state == FINISHED:
        if is_kept or (artifact := artifact_at(attempt.path)) is None:
            return False
        # elsewhere it is a user's copy
        return store.key_folder(artifact.stage, artifact.key) == attempt.path.parent
    if attempt.state == PARTIAL:
        places = (store.lock_path, store.log_path)
        is_built = any(is_locked(place(attempt.stage, attempt.short_key)) for place in places)
        return not is_built and _age_seconds(attempt.path) >= RESUMABLE_SECONDS
    return True


def _remove(store: ArtifactStore, item: Unused) -> Unused:
    if item.kept_reason or store.remove(item.attempt):
        return item
    return replace(item, kept_reason="in use, or being built")


def _own_bytes(folder: Path) -> int:
    """Bytes freed by removing the folder."""
    return sum(
        status.st_size
        for status in _statuses(folder)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    )


def _age_seconds(*paths: Path) -> float:
    """Seconds since the last change at or below the paths."""
    return time.time() - max(
        (status.st_mtime for path in paths for status in _statuses(path)), default=0.0
    )


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of the path and everything below it; skips files that vanish."""
    below = (
        Path(place, name) for place, folders, files in os.walk(path) for name in (*folders, *files)
    )
    for each in itertools.chain([path], below):
        with contextlib.suppress(FileNotFoundError):
            yield os.lstat(each)
