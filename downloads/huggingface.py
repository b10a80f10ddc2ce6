"""Repositories of the Hugging Face Hub and its mirrors, through huggingface_hub.

The client finds endpoint (HF_ENDPOINT), token (HF_TOKEN or `hf auth login`) and offline mode
(HF_HUB_OFFLINE). Files are downloaded by downloads.transfer, because hf_hub_download of
huggingface_hub 2 restarts a file after a kill.
"""

from __future__ import annotations

from typing import Any

from downloads.errors import (
    AccessDenied,
    DownloadError,
    NotFound,
    Offline,
    Unreachable,
    unreachable,
)
from downloads.nearest import nearest
from downloads.snapshot import Kind, RemoteFile, Snapshot
from downloads.transfer import BUSY, Request, retried, retry_after

TIMEOUT_SECONDS = 30.0


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

    info = retried(lambda: _call(request, repo, revision, kind))
    files = tuple(
        RemoteFile(file.rfilename, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id)
        for file in info.siblings or ()
    )
    return Snapshot("hf", repo, str(info.sha), files, kind, revision)


def request_for(snapshot: Snapshot, file: RemoteFile) -> Request:
    """The request for a file of the snapshot. Raises Offline."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise _offline(snapshot.repo)
    url = hf_hub_url(snapshot.repo, file.path, repo_type=snapshot.kind, revision=snapshot.commit)
    return Request(url, build_hf_headers(), _denied(snapshot.repo, snapshot.kind))


def _call(request: Any, repo: str, revision: str | None, kind: Kind) -> Any:
    from huggingface_hub import errors

    try:
        return request()
    except errors.OfflineModeIsEnabled:
        raise _offline(repo) from None
    except errors.GatedRepoError:
        raise AccessDenied(f"{repo}: {_denied(repo, kind)}") from None
    except errors.RevisionNotFoundError:
        raise NotFound(
            f"{repo} has no revision {revision}{_nearest_revision(repo, revision, kind)}"
        ) from None
    except errors.RepositoryNotFoundError as error:
        raise NotFound(
            f"there is no {kind} {repo} at {_endpoint()}, or it is private (HTTP "
            f"{error.response.status_code})"
            f"; {_denied(repo, kind)}"
        ) from None
    except errors.HFValidationError as error:
        raise NotFound(f"{repo} is not a valid {kind} name: {error}") from None
    except errors.HfHubHTTPError as error:
        raise _http_error(error, repo, kind) from None
    except (errors.HTTPError, OSError) as error:
        raise unreachable(_endpoint(), error) from error


def _http_error(error: Any, repo: str, kind: Kind) -> DownloadError:
    status = error.response.status_code
    if status in (401, 403):
        return AccessDenied(f"{repo}: {_denied(repo, kind)} (HTTP {status})")
    if status in BUSY or status >= 500:
        busy = Unreachable(f"{_endpoint()} returned HTTP {status} for {repo}; run it again later")
        busy.retry_after = retry_after(error.response.headers)
        return busy
    return DownloadError(
        f"{_endpoint()} refused the request for {repo}: HTTP {status}: "
        f"{error.server_message or error}"
    )


def _denied(repo: str, kind: Kind) -> str:
    place = f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    return (
        f"accept its terms at {place} if it is gated, and set HF_TOKEN to a token of that account "
        "with read "
        "access (or run: hf auth login)"
    )


def _offline(repo: str) -> Offline:
    return Offline(
        f"HF_HUB_OFFLINE is set, so {repo} cannot be requested; unset it, or use a local folder "
        "with "
        "model.source=path (for data: a local file)"
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
