"""ModelScope repositories, through its own client, modelscope_hub.

The client finds endpoint (MODELSCOPE_ENDPOINT) and token (MODELSCOPE_API_TOKEN or `ms login`). It
exposes no commit, so a digest of the file listing, which has a sha256 per file, takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from downloads.errors import DownloadError, failed, refused
from downloads.nearest import nearest
from downloads.snapshot import Kind, RemoteFile, Report, Snapshot

DENIED = (
    "accept its terms on its page, if any, and set MODELSCOPE_API_TOKEN to a token with read access"
)
MAX_PARALLEL = 8


def resolve(repo: str, revision: str | None, kind: Kind) -> Snapshot:
    """The files of a revision, with the digest of their listing as commit. Raises DownloadError."""
    with _explained(repo, revision, kind):
        listed = _api().list_repo_files(repo, kind, revision=revision)
    files = tuple(
        RemoteFile(file.path, file.size, file.sha256)
        for file in listed
        if file.type != "tree" and file.path
    )
    rows = sorted((file.path, file.size, file.sha256) for file in files)
    commit = hashlib.sha1(repr(rows).encode()).hexdigest()
    return Snapshot("modelscope", repo, commit, files, kind, revision)


def download(snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, report: Report) -> None:
    """Download the files into the folder, except those it holds. Raises DownloadError."""
    from modelscope_hub import ProgressCallback

    class Callback(ProgressCallback):
        received = 0

        def update(self, size: int) -> None:
            self.received += size
            is_done = self.received == self.file_size
            report(self.filename, self.received, int(is_done))

    with _explained(snapshot.repo, snapshot.revision, snapshot.kind):
        _api().download_repo(
            snapshot.repo,
            snapshot.kind,
            revision=snapshot.revision,
            local_dir=folder,
            max_workers=MAX_PARALLEL,
            file_list=[
                {"Path": file.path, "Size": file.size, "Sha256": file.sha256} for file in files
            ],
            progress_callbacks=[Callback],
        )


def _api() -> Any:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the only way to turn off its progress bars
    from modelscope_hub.api import HubApi

    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)  # failures are raised as errors
    return HubApi()


@contextlib.contextmanager
def _explained(repo: str, revision: str | None, kind: Kind) -> Iterator[None]:
    """Raise the client's errors as DownloadError."""
    from modelscope_hub import errors

    try:
        yield
    except errors.FileDownloadError as error:
        first = next(iter(error.failed_files.values()), error)
        raise _explanation(first, repo, revision, kind) from error
    except (errors.HubError, OSError) as error:
        raise _explanation(error, repo, revision, kind) from error


def _explanation(
    error: BaseException, repo: str, revision: str | None, kind: Kind
) -> DownloadError:
    from modelscope_hub import errors
    from modelscope_hub.config import get_default_config

    endpoint = str(get_default_config().endpoint)
    place = f"{kind} {repo} at {endpoint}"
    match error:
        case errors.NotExistError():
            return DownloadError(
                f"{place} has no revision {revision or 'master'} or lacks a file that it lists, "
                f"does not exist, or is private{_revisions(repo, revision, kind)}; correct the "
                f"name, or set MODELSCOPE_API_TOKEN ({error.message})"
            )
        case errors.AuthenticationError() | errors.PermissionDeniedError():
            return refused(403, place, DENIED, "")
        case errors.FileIntegrityError():
            return DownloadError(
                f"a file of {place} does not match its listing: {error.message}. It was discarded; "
                "it may have changed during the download: run it again"
            )
        case errors.APIError(status_code=int(status)):
            return refused(status, place, DENIED, str(error))
    return failed(endpoint, error)


def _revisions(repo: str, revision: str | None, kind: Kind) -> str:
    from modelscope_hub import errors

    try:
        rows = _api().list_repo_revisions(repo, kind)
    except (errors.HubError, OSError):
        return ""
    names = [str(row.get("Revision") or row.get("Name")) for row in rows]
    return nearest(revision or "master", names)
