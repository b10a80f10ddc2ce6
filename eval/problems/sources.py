"""Fetches problem files from a local path, a hub or a web server."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

import downloads
from downloads import OnProgress, Snapshot
from durable import locked
from eval.problems import ProblemsError
from eval.problems.files import FORMATS
from eval.problems.rows import Split

logger = logging.getLogger(__name__)

# Split names in file paths.
_SPLITS = {
    name: re.compile(rf"(?:^|[/_.-]){name}(?:[/_.-]|$)")
    for name in ("train", "test", "validation", "dev")
}


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

    In a repository these are the parquet files, else the files of another format, whose paths name
    the split or no split. Raises ProblemsError if that is ambiguous, and DownloadError.
    """
    snapshot = resolve(reference, "dataset")
    rows = [file for file in snapshot.files if PurePosixPath(file.path).suffix in FORMATS]
    if len(snapshot.files) > 1:
        parquet = [file for file in rows if file.path.endswith(".parquet")]
        rows = [file for file in parquet or rows if _SPLITS[split].search(file.path)] or [
            file
            for file in parquet or rows
            if not any(pattern.search(file.path) for pattern in _SPLITS.values())
        ]
    formats = {PurePosixPath(file.path).suffix for file in rows}
    if len(formats) != 1:
        listed = ", ".join(file.path for file in snapshot.files[:20])
        raise ProblemsError(
            f"{reference} has "
            f"{'files of several formats' if formats else f'no rows to {_USES[split]}'}: name one "
            f"of its files or folders as {reference}/FILE; it has {listed}"
        )
    return replace(snapshot, files=tuple(rows))


_USES: dict[Split, str] = {"train": "train on", "test": "evaluate with"}


def default_cache() -> Path:
    """Return the default folder of downloaded problem files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"
