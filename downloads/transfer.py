"""Parallel HTTP downloads that resume after disconnects and kills, and verify files before they
appear.

A file grows in the folder PARTS and is moved to its place once size and digest match.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from downloads.errors import (
    AccessDenied,
    DownloadError,
    NotFound,
    Unreachable,
    WrongContent,
    disk_is_full,
    seconds_from_now,
    unreachable,
)
from downloads.snapshot import PARTS, OnProgress, Progress, RemoteFile

MAX_PARALLEL = 8
MAX_ATTEMPTS = 5  # in a row without progress
BACKOFF_SECONDS = 1.0
MAX_WAIT_SECONDS = 600.0  # longest wait that a server may request
TIMEOUT_SECONDS = 60.0
BUSY = frozenset({408, 425, 429})  # in addition to 5xx
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """URL and headers of a file, and advice if access is denied."""

    url: str
    headers: Mapping[str, str]
    if_denied: str


class Meter:
    """Sums files and bytes of parallel downloads and reports the totals."""

    def __init__(self, files: Sequence[RemoteFile], on_progress: OnProgress | None) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._num_files = len(files)
        self._total = sum(file.size or 0 for file in files)
        self._received: dict[str, int] = {}
        self._num_finished = 0

    def update(self, path: str, num_bytes: int, is_finished: bool = False) -> None:
        """Set the bytes received of a file; `is_finished` once it is complete and verified."""
        with self._lock:
            self._received[path] = num_bytes
            self._num_finished += is_finished
            if self._on_progress is not None:
                done = sum(self._received.values())
                self._on_progress(
                    Progress(self._num_finished, self._num_files, done, max(self._total, done))
                )


def fetch_files(
    files: Sequence[RemoteFile],
    request_for: Callable[[RemoteFile], Request],
    folder: Path,
    meter: Meter,
) -> None:
    """Download the files into the folder. Raises the first DownloadError; another call resumes."""
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client:
        download = _Download(client, request_for, folder, meter)
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            largest_first = sorted(files, key=lambda file: -(file.size or 0))
            futures = [pool.submit(download.fetch, file) for file in largest_first]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException as error:
                download.stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                client.close()
                if isinstance(error, OSError) and (full := disk_is_full(error)) is not None:
                    raise full from error
                raise


def size_of(request: Request) -> int | None:
    """File size as reported by the server, None if unknown."""
    headers = {**request.headers, "Accept-Encoding": "identity"}
    try:
        response = httpx.head(
            request.url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS
        )
    except httpx.HTTPError:
        return None  # the download will report the error
    length = response.headers.get("Content-Length", "")
    return int(length) if response.is_success and length.isdigit() else None


def is_right(path: Path, file: RemoteFile) -> bool:
    """True if the file at `path` has the size and digest of the remote file."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return False
    if file.sha256 is not None:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
    if file.git_oid is not None:
        with path.open("rb") as content:
            return git_oid(content.read()) == file.git_oid
    return True


def git_oid(content: bytes) -> str:
    """The git blob sha1 of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def retried(request: Callable[[], T]) -> T:
    """Call `request`, retrying while the server is busy and asks for a short wait."""
    for attempt in range(MAX_ATTEMPTS - 1):
        try:
            return request()
        except Unreachable as error:
            if error.retry_after is None or error.retry_after > MAX_WAIT_SECONDS / 10:
                raise
            time.sleep(max(error.retry_after, BACKOFF_SECONDS * 2**attempt))
    return request()


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds to wait, from Retry-After or the Hugging Face Hub's RateLimit header; 0 without them."""
    window = re.search(r";\s*t\s*=\s*(\d+)", headers.get("RateLimit", ""))
    seconds = seconds_from_now(headers.get("Retry-After", ""))
    return seconds if seconds is not None else float(window[1]) if window else 0.0


class _Download:
    """State shared by the threads of one download."""

    def __init__(
        self,
        client: httpx.Client,
        request_for: Callable[[RemoteFile], Request],
        folder: Path,
        meter: Meter,
    ) -> None:
        self.client = client
        self.request_for = request_for
        self.folder = folder
        self.meter = meter
        self.stopping = threading.Event()

    def fetch(self, file: RemoteFile) -> None:
        target, part = self.folder / file.path, self.folder / PARTS / file.path
        if not (target.is_file() and is_right(target, file)):
            part.parent.mkdir(parents=True, exist_ok=True)
            self._receive_all(file, part)
            if not is_right(part, file):  # the part may be left over from different content
                part.unlink()
                self._receive_all(file, part)
            if not is_right(part, file):
                raise self._wrong(file, part)
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        self.meter.update(file.path, target.stat().st_size, is_finished=True)

    def _receive_all(self, file: RemoteFile, part: Path) -> None:
        failures = 0
        while True:
            before = _size(part)
            try:
                return self._receive(file, part)
            except Unreachable as error:
                failures = 0 if _size(part) > before else failures + 1
                wait = max(error.retry_after or 0.0, BACKOFF_SECONDS * 2**failures)
                if (
                    error.is_lasting
                    or failures >= MAX_ATTEMPTS
                    or wait > MAX_WAIT_SECONDS
                    or self.stopping.wait(wait)
                ):
                    raise

    def _receive(self, file: RemoteFile, part: Path) -> None:
        """Append the missing bytes to `part`. Raises Unreachable if a retry may help."""
        have = _size(part)
        if file.size is not None and have >= file.size > 0:
            self.meter.update(file.path, have)
            return
        request = self.request_for(file)
        headers = {**request.headers, "Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with self._response(file, request, headers) as response:
            begin = _RANGE.match(response.headers.get("Content-Range", ""))
            resumes = response.status_code == 206 and begin is not None and int(begin[1]) == have
            received = have if resumes else 0
            with part.open("ab" if resumes else "wb") as content:
                for chunk in response.iter_bytes():
                    content.write(chunk)
                    received += len(chunk)
                    self.meter.update(file.path, received)
                    if self.stopping.is_set():
                        raise Unreachable(f"{file.path} was stopped because another file failed")
        if file.size is not None and _size(part) < file.size:
            raise Unreachable(f"{request.url} ended after {_size(part)} of {file.size} bytes")

    @contextlib.contextmanager
    def _response(
        self, file: RemoteFile, request: Request, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """The successful response. Raises DownloadError for any other."""
        try:
            with self.client.stream("GET", request.url, headers=dict(headers)) as response:
                if response.status_code == 416:
                    (self.folder / PARTS / file.path).unlink(missing_ok=True)
                if not response.is_success:
                    raise _refusal(file, request, response)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            url = urlsplit(request.url)
            raise unreachable(f"{url.scheme}://{url.netloc}", error) from error

    def _wrong(self, file: RemoteFile, part: Path) -> WrongContent:
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        size = part.stat().st_size
        part.unlink()
        named = f"sha256 {file.sha256}" if file.sha256 else f"git blob {file.git_oid}"
        sizes = (
            f"{size} bytes instead of {file.size}"
            if file.size not in (None, size)
            else f"{size} bytes"
        )
        return WrongContent(
            f"{self.request_for(file).url} is not the expected file: its sha256 is {found} "
            f"({sizes}), not "
            f"{named}, in two attempts. It was discarded. A mirror may be out of date: use another "
            "endpoint. For "
            "a URL, give the new digest if you want the new content"
        )


def _refusal(file: RemoteFile, request: Request, response: httpx.Response) -> DownloadError:
    status, url = response.status_code, request.url
    if status in (401, 403):
        return AccessDenied(f"access to {url} is denied (HTTP {status}): {request.if_denied}")
    if status in (404, 410):
        return NotFound(
            f"{url} does not exist (HTTP {status}): a mirror may list files that it has not "
            "copied; use another "
            "endpoint, or correct the URL"
        )
    if status == 407:
        return DownloadError(
            f"the proxy for {url} requires a user and password: "
            "HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
        )
    if status == 416:
        return Unreachable(f"{url} is smaller than the partial {file.path} of an earlier attempt")
    if status in BUSY or status >= 500:
        busy = Unreachable(f"{url} returned HTTP {status}; run it again later")
        busy.retry_after = retry_after(response.headers)
        return busy
    return DownloadError(f"{url} returned HTTP {status}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
