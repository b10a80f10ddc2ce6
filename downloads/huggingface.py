"""Repositories of the Hugging Face Hub and its mirrors, through huggingface_hub.

The client finds endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf auth login`) and offline mode
(HF_HUB_OFFLINE), and downloads.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from downloads.errors import DownloadError, Unreachable, failed, refused
from downloads.nearest import nearest
from downloads.snapshot import Kind, RemoteFile, Report, Snapshot

TIMEOUT_SECONDS = 30.0
MISSING = "a mirror may list files that it has not copied; use another endpoint"


def resolve(repo: str, revision: str | None, kind: Kind) -> Snapshot:
    """A revision's commit and files, in one request (two if gated). Raises DownloadError."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    describe: Any = HfApi().model_info if kind == "model" else HfApi().dataset_info
    with _explained(repo, revision, kind):
        info = describe(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        if info.gated and info.siblings:  # anyone may list it; only a file shows who may read it
            first = info.siblings[0].rfilename
            get_hf_file_metadata(hf_hub_url(repo, first, repo_type=kind, revision=info.sha))
    files = tuple(
        RemoteFile(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in info.siblings or ()
    )
    return Snapshot("hf", repo, str(info.sha), files, kind, revision)


def download(snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, report: Report) -> None:
    """Download the files into the folder, except those it holds. Raises DownloadError."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    received: dict[int, float] = {}
    num_done = 0

    class Bar(tqdm):
        """Reports bytes instead of showing them. Xet counts them twice: received and written."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal num_done
            if self.counts_bytes:
                received[id(self)] = received.get(id(self), 0) + (n or 0)
            else:
                num_done += int(n or 0)
            report("all", int(max(received.values(), default=0)), num_done)
            return None

    with _explained(snapshot.repo, snapshot.revision, snapshot.kind):
        snapshot_download(
            snapshot.repo,
            repo_type=snapshot.kind,
            revision=snapshot.commit,
            local_dir=folder,
            allow_patterns=[glob.escape(file.path) for file in files],
            tqdm_class=Bar,
        )


@contextlib.contextmanager
def _explained(repo: str, revision: str | None, kind: Kind) -> Iterator[None]:
    """Raise the client's errors as DownloadError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.LocalEntryNotFoundError as error:  # it looked on the disk after a failed request
        cause = error.__cause__ or error.__context__ or error
        raise _explanation(cause, repo, revision, kind) from error
    except (errors.HFValidationError, errors.HTTPError, OSError) as error:
        raise _explanation(error, repo, revision, kind) from error


def _explanation(
    error: BaseException, repo: str, revision: str | None, kind: Kind
) -> DownloadError:
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    page = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    denied = (
        f"accept its terms at {page} if it is gated, and set HF_TOKEN to a token of that account "
        "with read access (or run: hf auth login)"
    )
    match error:
        case errors.OfflineModeIsEnabled():
            return Unreachable(
                f"HF_HUB_OFFLINE is set, so {repo} cannot be requested; unset it, or use a local "
                "folder with model.source=path (for data: a local file)",
                is_lasting=True,
            )
        case errors.RevisionNotFoundError():
            near = _nearest_revision(repo, revision, kind)
            return DownloadError(f"{repo} has no revision {revision}{near}")
        case errors.GatedRepoError():
            return refused(403, page, denied, MISSING)
        case errors.RepositoryNotFoundError(response=response):
            return DownloadError(
                f"there is no {kind} {repo} at {endpoint}, or it is private (HTTP "
                f"{response.status_code}); {denied}"
            )
        case errors.HFValidationError():
            return DownloadError(f"{repo} is not a valid {kind} name: {error}")
        case errors.HfHubHTTPError(response=response):
            address = str(response.url).partition("?")[0]  # without a signature
            return refused(response.status_code, address, denied, MISSING)
        case errors.FileMetadataError():
            return DownloadError(f"{endpoint} does not answer like a hub: {error}")
    return failed(endpoint, error)


def _nearest_revision(repo: str, revision: str | None, kind: Kind) -> str:
    from huggingface_hub import HfApi, errors

    try:
        refs = HfApi().list_repo_refs(repo, repo_type=kind)
    except (errors.HTTPError, OSError):
        return "; check its name on the hub"
    return nearest(revision or "", [ref.name for ref in (*refs.branches, *refs.tags)])
