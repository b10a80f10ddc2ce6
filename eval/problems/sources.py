"""Fetches problem files from a local path, a hub or a web server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import downloads
from downloads import OnProgress, Snapshot
from durable import locked
from eval.problems.files import of_split
from eval.problems.rows import Split

logger = logging.getLogger(__name__)


def fetch(
    source: str | Path,
    cache: Path | None = None,
    split: Split = "test",
    on_progress: OnProgress | None = None,
) -> Path:
    """Return the local file or folder of a source, downloading it if necessary.

    Paths are returned unchanged. Files of remote references (see `downloads`) are kept in `cache`,
    one folder per commit, and verified against their digests each time. Raises ProblemsError for a
    repository without rows of the split, and DownloadError.
    """
    if not downloads.is_remote(str(source)):
        return Path(source)
    snapshot = rows_of(str(source), split)
    folder = (cache or default_cache()) / snapshot.commit[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", waiting=f"which downloads {snapshot.repo}"):
        if not all(file.is_at(folder / file.path) for file in snapshot.files):
            logger.info("downloading %s", str(source).partition("#")[0])
            downloads.fetch(snapshot, folder, on_progress=on_progress)
    names = [file.path for file in snapshot.files]
    return folder / (names[0] if len(names) == 1 else os.path.commonpath(names))


def rows_of(
    reference: str,
    split: Split,
    resolve: Callable[[str, downloads.Kind], Snapshot] = downloads.resolve,
) -> Snapshot:
    """Resolve the files of a reference that hold the rows of a split, without downloading content.

    In a repository these are the files of `of_split`. Raises ProblemsError and DownloadError.
    """
    snapshot = resolve(reference, "dataset")
    chosen = of_split(reference, [file.path for file in snapshot.files], split)
    files = tuple(file for file in snapshot.files if file.path in chosen)
    return replace(snapshot, files=files)


def default_cache() -> Path:
    """Return the default folder of downloaded problem files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"
