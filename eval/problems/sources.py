"""Files of problems by reference: a local path, a dataset of a hub, or a URL, the last two kept in a cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import downloads
from downloads import DownloadError, Snapshot
from durable import locked
from eval.problems import ProblemsError
from eval.problems.files import FORMATS

logger = logging.getLogger(__name__)


def fetch(source: str | Path, cache: Path | None = None) -> Path:
    """The local file of a source; the folder of one that stands for several files.

    A path is returned as it is. `hf:ORG/NAME[@REVISION][/FILE]`, `modelscope:` likewise and `https://...#sha256=`
    are what downloads.resolve takes. Commits are kept in `cache`, by default dapo/ in XDG_CACHE_HOME or ~/.cache.
    Raises ProblemsError when it is unavailable, or its content is not what was announced.
    """
    text = str(source)
    if not downloads.is_remote(text):
        return Path(source)
    try:
        return fetch_snapshot(downloads.resolve(text, "dataset"), cache)
    except DownloadError as error:
        raise as_problem(error) from error


def fetch_snapshot(snapshot: Snapshot, cache: Path | None = None) -> Path:
    """The cached file of a snapshot, or its folder of several; downloads what is missing. Raises DownloadError."""
    paths = _with_problems([file.path for file in snapshot.files])
    if not paths:
        raise ProblemsError(f"{snapshot.repo} has no file that ends in one of {', '.join(FORMATS)}")
    name = snapshot.repo.replace("/", "--") if snapshot.hub != "url" else ""
    folder = (cache or default_cache()) / snapshot.hub / name / snapshot.commit
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), on_wait=lambda *_: None):  # one process downloads
        if not all((folder / path).is_file() for path in paths):
            logger.info("downloading %s at commit %s", snapshot.repo, snapshot.commit[:12])
        downloads.fetch(snapshot, folder, paths)
    return folder / paths[0] if len(snapshot.files) == 1 else folder


def as_problem(error: DownloadError) -> ProblemsError:
    """The same as an error of problems."""
    problem = ProblemsError(str(error))
    problem.is_lasting = error.is_lasting
    return problem


def default_cache() -> Path:
    """The folder of downloaded files of problems."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"


def _with_problems(paths: list[str]) -> list[str]:
    """The files of one format: of a repository's parquet files, not its lists in JSON."""
    for suffix in FORMATS:
        if found := [path for path in paths if path.endswith(suffix)]:
            return found
    return []
