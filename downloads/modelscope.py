"""Repositories of ModelScope, asked for and downloaded through its own client, modelscope_hub.

The client finds endpoint (MODELSCOPE_ENDPOINT) and token (MODELSCOPE_API_TOKEN or `ms login`). It shows no commit:
a digest of the listing, which has a sha256 for every file, takes its place.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from downloads.errors import (
    AccessDenied,
    DownloadError,
    NotFound,
    Unreachable,
    WrongContent,
    disk_is_full,
    unreachable,
)
from downloads.nearest import nearest
from downloads.snapshot import Kind, RemoteFile, Snapshot
from downloads.transfer import MAX_PARALLEL, retried

DEFAULT_REVISION = "master"


def resolve(repo: str, revision: str | None, kind: Kind) -> Snapshot:
    """The files of a revision, and the digest of this list as the commit. Raises DownloadError."""
    listed = retried(
        lambda: _asked(lambda: _api().list_repo_files(repo, kind, revision=revision), repo, revision, kind)
    )
    files = tuple(
        RemoteFile(file.path, file.size, file.sha256) for file in listed if file.type != "tree" and file.path
    )
    rows = sorted((file.path, file.size, file.sha256) for file in files)
    return Snapshot("modelscope", repo, hashlib.sha1(repr(rows).encode()).hexdigest(), files, kind, revision)


def fetch_files(
    snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, on_bytes: Callable[[str, int], None]
) -> None:
    """Download the files into the folder; `on_bytes(path, number)` as they come. Raises DownloadError."""
    from modelscope_hub import ProgressCallback

    class Meter(ProgressCallback):
        def update(self, size: int) -> None:
            on_bytes(self.filename, size)

    rows = [{"Path": file.path, "Size": file.size, "Sha256": file.sha256, "Type": "blob"} for file in files]

    def ask() -> Any:
        return _api().download_repo(
            snapshot.repo,
            snapshot.kind,
            revision=snapshot.revision,
            local_dir=folder,
            max_workers=MAX_PARALLEL,
            file_list=rows,
            progress_callbacks=[Meter],
        )

    _asked(ask, snapshot.repo, snapshot.revision, snapshot.kind)


def _api() -> Any:
    os.environ.setdefault("TQDM_DISABLE", "1")  # its bars cannot be switched off otherwise
    from modelscope_hub.api import HubApi

    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # its failures come as errors

    return HubApi()


def _asked(ask: Callable[[], Any], repo: str, revision: str | None, kind: Kind) -> Any:
    """The client's answer, its errors as DownloadError."""
    from modelscope_hub import errors

    try:
        return ask()
    except errors.FileDownloadError as error:
        first = next(iter(error.failed_files.values()), error)
        raise _explained(first, repo, revision, kind) from error
    except (errors.HubError, OSError) as error:
        raise _explained(error, repo, revision, kind) from error


def _explained(error: BaseException, repo: str, revision: str | None, kind: Kind) -> DownloadError:
    from modelscope_hub import errors

    place = f"{kind} {repo} of {_endpoint()}"
    match error:
        case errors.AuthenticationError() | errors.PermissionDeniedError():
            return AccessDenied(
                f"{place} is refused (HTTP {error.status_code}): accept its terms on its page if it has any, and "
                "set MODELSCOPE_API_TOKEN to a token that may read it"
            )
        case errors.NotExistError():
            return NotFound(
                f"{place} has no revision {revision or DEFAULT_REVISION} or lacks a file that it lists, does not "
                f"exist, or is private{_revisions(repo, revision, kind)}; correct the name, or set "
                f"MODELSCOPE_API_TOKEN ({error.message})"
            )
        case errors.FileIntegrityError():
            return WrongContent(
                f"a file of {place} is not the one that is listed: {error.message}. Nothing of it was kept; it "
                "may have changed during the download: run it again"
            )
        case errors.RateLimitError() | errors.ServerError():
            busy = Unreachable(f"{_endpoint()} is busy: {error}; run it again later")
            busy.retry_after = float(getattr(error, "retry_after", None) or 0.0)
            return busy
        case errors.APIError():
            return DownloadError(f"{_endpoint()} refuses {place}: {error}")
        case OSError() if (full := disk_is_full(error)) is not None:
            return full
    return unreachable(_endpoint(), error)


def _endpoint() -> str:
    from modelscope_hub.config import get_default_config

    return str(get_default_config().endpoint)


def _revisions(repo: str, revision: str | None, kind: Kind) -> str:
    from modelscope_hub import errors

    try:
        rows = _api().list_repo_revisions(repo, kind)
    except (errors.HubError, OSError):
        return ""
    return nearest(revision or DEFAULT_REVISION, [str(row.get("Revision") or row.get("Name")) for row in rows])
