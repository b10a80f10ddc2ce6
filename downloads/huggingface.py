"""Repositories of the Hugging Face Hub and its mirrors, through huggingface_hub.

The client finds endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf auth login`) and offline mode
(HF_HUB_OFFLINE), and downloads.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from downloads.errors import (
    AccessDenied,
    DownloadError,
    NotFound,
    Offline,
    Unreachable,
    disk_is_full,
    unreachable,
)
from downloads.nearest import nearest
from downloads.snapshot import PARTS, Kind, RemoteFile, Snapshot
from downloads.transfer import MAX_PARALLEL, Meter, is_right, place

TIMEOUT_SECONDS = 30.0
BUSY = frozenset({408, 425, 429})  # in addition to 5xx


def resolve(repo: str, revision: str | None, kind: Kind) -> Snapshot:
    """A revision's commit and files, in one request (two for a gated repository). Raises
    DownloadError.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    def request() -> Any:
        describe: Any = HfApi().model_info if kind == "model" else HfApi().dataset_info
        info = describe(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        if info.gated and info.siblings:  # anyone may list it; only a file shows who may read it
            first = info.siblings[0].rfilename
            get_hf_file_metadata(hf_hub_url(repo, first, repo_type=kind, revision=info.sha))
        return info

    info = _call(request, repo, revision, kind)
    files = tuple(
        RemoteFile(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in info.siblings or ()
    )
    return Snapshot("hf", repo, str(info.sha), files, kind, revision)


def fetch_files(
    snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, meter: Meter
) -> None:
    """Download the files into the folder, keeping those that are complete. Raises DownloadError."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    received: dict[int, float] = {}

    class Bar(tqdm):  # type: ignore[type-arg]
        """Reports bytes instead of showing them. Xet counts them twice: received and written."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self.counts_bytes:
                received[id(self)] = received.get(id(self), 0) + (n or 0)
                meter.update(PARTS, int(max(received.values())))
            return None

    pending = meter.keep_complete(files, folder)
    if not pending:
        return
    for file in pending:
        part = folder / PARTS / file.path
        if part.is_file() and not is_right(part, file):
            part.unlink()  # the client would keep it

    def download() -> Any:
        return snapshot_download(
            snapshot.repo,
            repo_type=snapshot.kind,
            revision=snapshot.commit,
            local_dir=folder / PARTS,
            allow_patterns=[glob.escape(file.path) for file in pending],
            max_workers=MAX_PARALLEL,
            tqdm_class=Bar,
        )

    _call(download, snapshot.repo, snapshot.revision, snapshot.kind)
    for file in pending:
        place(file, folder, f"{snapshot.repo} at {_endpoint()}")
    meter.update(PARTS, sum(file.size or 0 for file in pending), len(pending))


def _call(request: Callable[[], Any], repo: str, revision: str | None, kind: Kind) -> Any:
    """Call the client; raises its errors as DownloadError."""
    from huggingface_hub import errors

    try:
        return request()
    except errors.LocalEntryNotFoundError as error:  # it looked on the disk after a failed request
        cause = error.__cause__ or error.__context__ or error
        raise _explained(cause, repo, revision, kind) from error
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise _explained(error, repo, revision, kind) from error


def _explained(error: BaseException, repo: str, revision: str | None, kind: Kind) -> DownloadError:
    from huggingface_hub import errors

    match error:
        case errors.OfflineModeIsEnabled():
            return Offline(
                f"HF_HUB_OFFLINE is set, so {repo} cannot be requested; unset it, or use a local "
                "folder with model.source=path (for data: a local file)"
            )
        case errors.GatedRepoError():
            return AccessDenied(f"{repo}: {_denied(repo, kind)}")
        case errors.RevisionNotFoundError():
            near = _nearest_revision(repo, revision, kind)
            return NotFound(f"{repo} has no revision {revision}{near}")
        case errors.RepositoryNotFoundError():
            return NotFound(
                f"there is no {kind} {repo} at {_endpoint()}, or it is private (HTTP "
                f"{error.response.status_code}); {_denied(repo, kind)}"
            )
        case errors.HFValidationError():
            return NotFound(f"{repo} is not a valid {kind} name: {error}")
        case errors.HfHubHTTPError():
            return _http_error(error, repo, kind)
        case errors.FileMetadataError():
            return DownloadError(f"{_endpoint()} does not answer like a hub: {error}")
        case OSError() if (full := disk_is_full(error)) is not None:
            return full
    return unreachable(_endpoint(), error)


def _http_error(error: Any, repo: str, kind: Kind) -> DownloadError:
    status, url = error.response.status_code, error.response.url
    if status in (401, 403):
        return AccessDenied(f"{repo}: {_denied(repo, kind)} (HTTP {status})")
    if status == 404:
        return NotFound(
            f"{url} does not exist (HTTP 404): a mirror may list files that it has not copied; use "
            "another endpoint"
        )
    if status in BUSY or status >= 500:
        return Unreachable(f"{_endpoint()} returned HTTP {status} for {repo}; run it again later")
    return DownloadError(
        f"{_endpoint()} refused the request for {repo}: HTTP {status}: "
        f"{error.server_message or error}"
    )


def _denied(repo: str, kind: Kind) -> str:
    place = f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    return (
        f"accept its terms at {place} if it is gated, and set HF_TOKEN to a token of that account "
        "with read access (or run: hf auth login)"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _nearest_revision(repo: str, revision: str | None, kind: Kind) -> str:
    from huggingface_hub import HfApi, errors

    try:
        refs = HfApi().list_repo_refs(repo, repo_type=kind)
    except (errors.HTTPError, OSError):
        return "; check its name on the hub"
    return nearest(revision or "", [ref.name for ref in (*refs.branches, *refs.tags)])
