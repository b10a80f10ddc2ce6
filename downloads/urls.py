"""Files from web servers, each pinned by its sha256, and archives."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import stat
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urldefrag, urlsplit

import httpx

from downloads.errors import (
    DownloadError,
    Unreachable,
    failed,
    refused,
    require_room,
    seconds_from_now,
)
from downloads.snapshot import Kind, RemoteFile, Report, Snapshot, require_digest, size_of

MAX_ATTEMPTS = 5  # in a row without progress
BACKOFF_SECONDS = 1.0
MAX_RETRY_AFTER_SECONDS = 60.0
TIMEOUT_SECONDS = 60.0
PLAIN = {"Accept-Encoding": "identity"}  # ranges count the file's own bytes
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_DENIED = (
    "the server requires credentials, which must not be in a recipe; publish the file without "
    "them, or use a hub"
)


def resolve(urls: Sequence[str], kind: Kind) -> Snapshot:
    """The files that the URLs name, without contacting a server. Raises DownloadError."""
    files = []
    for url in urls:
        address, fragment = urldefrag(url)
        parts = urlsplit(address)
        name = _name_in(address)
        if parts.scheme not in ("http", "https") or not parts.netloc or not name:
            raise DownloadError(f"{url} is not an http or https URL of a file")
        if parts.username or parts.password:
            raise DownloadError(f"a URL of {parts.hostname} contains a user or password: {_DENIED}")
        digest = require_digest(url, fragment.removeprefix("sha256="))
        files.append(RemoteFile(name, None, digest))
    names = [file.path for file in files]
    if len(set(names)) < len(names):
        raise DownloadError(f"two URLs end in the same file name: {', '.join(sorted(names))}")
    if len(files) > 1 and (archives := [name for name in names if is_archive(name)]):
        raise DownloadError(
            f"{archives[0]} is an archive next to other files; name a single archive, or only "
            "plain files"
        )
    rows = sorted((file.path, file.sha256) for file in files)
    commit = hashlib.sha1(repr(rows).encode()).hexdigest()
    return Snapshot("url", " ".join(urldefrag(url)[0] for url in urls), commit, tuple(files), kind)


def with_sizes(snapshot: Snapshot, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files with the sizes that the server reports."""
    sized = []
    with _client() as client:
        for file in files:
            length = ""
            with contextlib.suppress(httpx.HTTPError):  # the download will report it
                response = client.head(_url_of(snapshot, file), headers=PLAIN)
                length = response.headers.get("Content-Length", "") * response.is_success
            # 0 from servers that count what they send to HEAD
            sized.append(replace(file, size=int(length) or None if length.isdigit() else None))
    return sized


def download(snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, report: Report) -> None:
    """Download the files into the folder; continue unfinished ones. Raises DownloadError."""
    with _client() as client:
        for file in files:
            _receive_all(client, _url_of(snapshot, file), file, folder / file.path, report)


def read_url(url: str, max_bytes: int) -> bytes:
    """Return what is at the URL, cut after `max_bytes` + 1; nothing if its server has it not.

    Raises DownloadError if the server does not answer, or fails.
    """
    content = b""
    try:
        with _client() as client, client.stream("GET", url, headers=PLAIN) as response:
            if response.status_code in (403, 404, 410):
                return content
            if not response.is_success:
                raise refused(response.status_code, url, _DENIED, "correct the URL")
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > max_bytes:
                    break
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        parts = urlsplit(url)
        raise failed(f"{parts.scheme}://{parts.netloc}", error) from error
    return content[: max_bytes + 1]


def _client() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS)


def _url_of(snapshot: Snapshot, file: RemoteFile) -> str:
    return next(url for url in snapshot.repo.split(" ") if _name_in(url) == file.path)


def _name_in(url: str) -> str:
    return PurePosixPath(unquote(urlsplit(url).path)).name


def _receive_all(
    client: httpx.Client, url: str, file: RemoteFile, part: Path, report: Report
) -> None:
    """Download the missing bytes of `part`, with retries as long as some arrive."""
    failures = 0
    while True:
        before = size_of(part)
        try:
            return _receive(client, url, file, part, report)
        except Unreachable as error:
            failures = 0 if size_of(part) > before else failures + 1
            if error.is_lasting or failures >= MAX_ATTEMPTS:
                raise
            time.sleep(BACKOFF_SECONDS * 2**failures)


def _receive(client: httpx.Client, url: str, file: RemoteFile, part: Path, report: Report) -> None:
    """Append the missing bytes to `part`. Raises Unreachable if a retry may help."""
    have = size_of(part)
    if file.size is not None and have >= file.size > 0:
        return report(file.path, have, 1)
    headers = {**PLAIN, "Range": f"bytes={have}-"} if have else PLAIN
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
            if not response.is_success:
                wait_seconds = seconds_from_now(response.headers.get("Retry-After", "")) or 0.0
                time.sleep(min(wait_seconds, MAX_RETRY_AFTER_SECONDS))
                raise refused(response.status_code, url, _DENIED, "correct the URL")
            begin = _RANGE.match(response.headers.get("Content-Range", ""))
            resumes = response.status_code == 206 and begin is not None and int(begin[1]) == have
            received = have if resumes else 0
            with part.open("ab" if resumes else "wb") as content:
                for chunk in response.iter_bytes():
                    content.write(chunk)
                    received += len(chunk)
                    report(file.path, received, int(received == file.size))
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        parts = urlsplit(url)
        raise failed(f"{parts.scheme}://{parts.netloc}", error) from error
    if file.size is not None and received < file.size:
        raise Unreachable(f"{url} ended after {received} of {file.size} bytes")


def is_archive(name: str) -> bool:
    """True if a file with this name is unpacked."""
    return name.lower().endswith(ARCHIVES)


def unpack(archive: Path, staged: Path, folder: Path) -> None:
    """Unpack an archive into the folder, through `staged`, without its top folder if it has one.

    Existing files are replaced. The archive is removed last, so that a kill does not cause another
    download. Raises DownloadError for links, devices, names that lead out of the folder, and if
    the files do not fit.
    """
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _unpack(archive, staged)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(f"{archive.name} cannot be unpacked: {error}") from error
    top = list(staged.iterdir())
    source = top[0] if len(top) == 1 and top[0].is_dir() else staged
    for path in [path for path in source.rglob("*") if path.is_file()]:
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    archive.unlink()


def _unpack(archive: Path, staged: Path) -> None:
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as zipped:
            for item in zipped.infolist():
                _require_plain(item.filename, archive, not stat.S_ISLNK(item.external_attr >> 16))
            num_bytes = sum(item.file_size for item in zipped.infolist())
            require_room(num_bytes, staged, f"in {archive.name}")
            zipped.extractall(staged)
        return
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            _require_plain(member.name, archive, member.isfile() or member.isdir())
        num_bytes = sum(member.size for member in packed.getmembers())
        require_room(num_bytes, staged, f"in {archive.name}")
        packed.extractall(staged, filter="data")


def _require_plain(name: str, archive: Path, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if not is_plain:
        raise DownloadError(f"{archive.name} contains {name}, a link or device")
    if path.is_absolute() or ".." in path.parts:
        raise DownloadError(f"{archive.name} contains {name}, which leads out of the folder")
