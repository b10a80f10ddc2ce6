"""Where an evaluation file comes from: a local path, a dataset hub or a URL, the last two pinned by a digest."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import ModuleType
from urllib.parse import unquote, urlsplit

import httpx

from durable import locked
from eval.problems import ProblemsError

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HUB_FILE = re.compile(r"(?P<repo>[^/@\s]+/[^/@\s]+)/(?P<file>[^@\s]+?)(?:@(?P<revision>\S+))?")
_REMOTE = re.compile(r"(hf|modelscope|https?):")
_ATTEMPTS = 4
_BACKOFF_SECONDS = 0.5
_TIMEOUT_SECONDS = 60.0
_RETRIED_STATUS = frozenset({408, 425, 429})  # beside every 5xx


def fetch(source: str | Path, cache: Path | None = None) -> Path:
    """The local file of a source.

    A path is returned as it is. `hf:ORG/NAME/FILE` and `modelscope:ORG/NAME/FILE` (both also with @REVISION) are
    datasets of the hubs, at the endpoint that HF_ENDPOINT or MODELSCOPE_ENDPOINT names; `https://...` is a file.
    Each of the three ends in #sha256=DIGEST and is kept in `cache`, by default dapo/ in XDG_CACHE_HOME or
    ~/.cache. Raises ProblemsError when it is unavailable or does not match the digest.
    """
    text = str(source)
    if not _REMOTE.match(text):
        return Path(source)
    address, _, digest = text.partition("#sha256=")
    digest = digest.lower()
    if not _DIGEST.fullmatch(digest):
        raise ProblemsError(
            f"{text} is not pinned: end it in #sha256= and the 64 digits of the file's digest, so that it cannot "
            f"change between two evaluations (sha256sum FILE prints it)"
        )
    scheme, _, rest = address.partition(":")
    name = PurePosixPath(
        unquote(urlsplit(address).path) if scheme.startswith("http") else rest.partition("@")[0]
    ).name
    if not name:
        raise ProblemsError(f"{address} names no file")
    target = (cache or default_cache()) / digest[:16] / name
    if target.is_file() and file_sha256(target) == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / ".lock", on_wait=lambda *_: None):  # one process downloads
        if not target.is_file() or file_sha256(target) != digest:
            logger.info("downloading %s", address)
            part = target.with_name(f".{name}.part")
            if scheme in _HUBS:
                _from_hub(scheme, rest, part)
            else:
                _from_url(address, part)
            _require_digest(part, address, digest)
            part.replace(target)
    return target


def default_cache() -> Path:
    """The folder of downloaded evaluation files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dapo"


def file_sha256(path: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _require_digest(part: Path, address: str, digest: str) -> None:
    found = file_sha256(part)
    if found != digest:
        size = part.stat().st_size
        part.unlink()
        raise ProblemsError(
            f"{address} is not the file that was named: its sha256 is {found} ({size} bytes), not {digest}. "
            f"Nothing of it was kept; if the new content is wanted, name its digest."
        )


def _from_url(url: str, part: Path) -> None:
    """Write the body of a URL to `part`; server errors and broken connections are retried."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            response = httpx.get(url, timeout=_TIMEOUT_SECONDS, follow_redirects=True)
            response.raise_for_status()
            part.write_bytes(response.content)
            return
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            reason, is_final = f"HTTP {status}", status < 500 and status not in _RETRIED_STATUS
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason, is_final = f"{type(error).__name__}: {error}", isinstance(error, httpx.InvalidURL)
        if is_final or attempt == _ATTEMPTS:
            raise ProblemsError(f"{url} cannot be downloaded: {reason}, at attempt {attempt} of {_ATTEMPTS}")
        time.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1))


def _from_hub(scheme: str, rest: str, part: Path) -> None:
    """Write a file of a dataset on a hub to `part`, with that hub's own library."""
    match = _HUB_FILE.fullmatch(rest)
    if match is None:
        raise ProblemsError(f"{scheme}:{rest} is not of the form {scheme}:ORG/NAME/FILE or ...@REVISION")
    try:
        download, errors = _HUBS[scheme]()
    except ImportError as error:
        raise ProblemsError(f"{scheme}:{rest} needs a library that is not installed: {error}") from None
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        try:
            path = download(match["repo"], match["file"], match["revision"], folder)
        except errors as error:
            raise ProblemsError(
                f"{scheme}:{rest} cannot be downloaded: {type(error).__name__}: {error}"
            ) from error
        Path(path).replace(part)


def _hugging_face() -> _Hub:
    from huggingface_hub import errors, hf_hub_download

    def download(repo: str, file: str, revision: str | None, folder: str) -> str:
        return hf_hub_download(repo, file, repo_type="dataset", revision=revision, local_dir=folder)

    return download, _exceptions_of(errors)


def _modelscope() -> _Hub:
    from modelscope.hub import errors
    from modelscope.hub.file_download import dataset_file_download

    def download(repo: str, file: str, revision: str | None, folder: str) -> str:
        return dataset_file_download(repo, file, revision=revision, local_dir=folder)

    return download, _exceptions_of(errors)


def _exceptions_of(module: ModuleType) -> tuple[type[Exception], ...]:
    """The exceptions of a hub's library, and those of files and connections."""
    own = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Exception))
    return (*own, OSError, ValueError, httpx.HTTPError)


_Hub = tuple[Callable[[str, str, "str | None", str], str], tuple[type[Exception], ...]]
_HUBS: dict[str, Callable[[], _Hub]] = {"hf": _hugging_face, "modelscope": _modelscope}
