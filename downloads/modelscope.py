"""ModelScope repositories, through its own client, modelscope_hub.

The client finds endpoint (MODELSCOPE_ENDPOINT) and token (MODELSCOPE_API_TOKEN or `ms login`). It
exposes no commit, so a digest of the file listing, which has a sha256 per file, takes its place.
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
from downloads.snapshot import PARTS, Kind, RemoteFile, Snapshot
from downloads.transfer import MAX_PARALLEL, Meter, place

DEFAULT_REVISION = "master"


def resolve(repo: str, revision: str | None, kind: Kind) -> Snapshot:
    """The files of a revision, with the digest of their listing as commit. Raises DownloadError."""
    listed = _call(
        lambda: _api().list_repo_files(repo, kind, revision=revision), repo, revision, kind
    )
    files = tuple(
        RemoteFile(file.path, file.size, file.sha256)
        for file in listed
        if file.type != "tree" and file.path
    )
    rows = sorted((file.path, file.size, file.sha256) for file in files)
    return Snapshot(
        "modelscope", repo, hashlib.sha1(repr(rows).encode()).hexdigest(), files, kind, revision
    )


def fetch_files(
    snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, meter: Meter
) -> None:
    """Download the files into the folder, keeping those that are complete. Raises DownloadError."""
    from modelscope_hub import ProgressCallback

    class Callback(ProgressCallback):
        received = 0

        def update(self, size: int) -> None:
            self.received += size
            meter.update(self.filename, self.received)

    pending = meter.keep_complete(files, folder)
    rows = [
        {"Path": file.path, "Size": file.size, "Sha256": file.sha256, "Type": "blob"}
        for file in pending
    ]

    def download() -> Any:
        return _api().download_repo(
            snapshot.repo,
            snapshot.kind,
            revision=snapshot.revision,
            local_dir=folder / PARTS,
            max_workers=MAX_PARALLEL,
            file_list=rows,
            progress_callbacks=[Callback],
        )

    _call(download, snapshot.repo, snapshot.revision, snapshot.kind)
    for file in pending:
        place(file, folder, f"{snapshot.repo} at {_endpoint()}")
        meter.update(file.path, file.size or 0, 1)


def _api() -> Any:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the only way to turn off its progress bars
    from modelscope_hub.api import HubApi

    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # failures are raised as errors

    return HubApi()


def _call(request: Callable[[], Any], repo: str, revision: str | None, kind: Kind) -> Any:
    """Call the client; raises its errors as DownloadError."""
    from modelscope_hub import errors

    try:
        return request()
    except errors.FileDownloadError as error:
        first = next(iter(error.failed_files.values()), error)
        raise _explained(first, repo, revision, kind) from error
    except (errors.HubError, OSError) as error:
        raise _explained(error, repo, revision, kind) from error


def _explained(error: BaseException, repo: str, revision: str | None, kind: Kind) -> DownloadError:
    from modelscope_hub import errors

    place = f"{kind} {repo} at {_endpoint()}"
    match error:
        case errors.AuthenticationError() | errors.PermissionDeniedError():
            return AccessDenied(
                f"access to {place} is denied (HTTP {error.status_code}): accept its terms on its "
                "page, if any, "
                "and set MODELSCOPE_API_TOKEN to a token with read access"
            )
        case errors.NotExistError():
            return NotFound(
                f"{place} has no revision {revision or DEFAULT_REVISION} or lacks a file that it "
                "lists, does not "
                f"exist, or is private{_revisions(repo, revision, kind)}; correct the name, or set "
                f"MODELSCOPE_API_TOKEN ({error.message})"
            )
        case errors.FileIntegrityError():
            return WrongContent(
                f"a file of {place} does not match its listing: {error.message}. It was discarded; "
                "it may have "
                "changed during the download: run it again"
            )
        case errors.RateLimitError() | errors.ServerError():
            return Unreachable(f"{_endpoint()} is busy: {error}; run it again later")
        case errors.APIError():
            return DownloadError(f"{_endpoint()} refused the request for {place}: {error}")
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
    return nearest(
        revision or DEFAULT_REVISION, [str(row.get("Revision") or row.get("Name")) for row in rows]
    )
