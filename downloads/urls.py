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
    AccessDenied,
    BadReference,
    DownloadError,
    NotFound,
    Unreachable,
    WrongContent,
    disk_is_full,
    require_room,
    unreachable,
)
from downloads.snapshot import PARTS, Kind, RemoteFile, Snapshot, require_digest
from downloads.transfer import Meter, is_right, place

MAX_ATTEMPTS = 5  # in a row without progress
BACKOFF_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
PLAIN = {"Accept-Encoding": "identity"}  # ranges count the file's own bytes
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_DENIED = (
    "the server requires credentials, which must not be in a recipe; publish the file without "
    "them, or use a hub"
)


def resolve(urls: Sequence[str], kind: Kind) -> Snapshot:
    """The files that the URLs name, without contacting a server. Raises BadReference."""
    files = []
    for url in urls:
        address, fragment = urldefrag(url)
        parts = urlsplit(address)
        name = PurePosixPath(unquote(parts.path)).name
        if parts.scheme not in ("http", "https") or not parts.netloc or not name:
            raise BadReference(f"{url} is not an http or https URL of a file")
        if parts.username or parts.password:
            raise BadReference(f"a URL of {parts.hostname} contains a user or password: {_DENIED}")
        digest = require_digest(url, fragment.removeprefix("sha256="))
        files.append(RemoteFile(name, None, digest))
    names = [file.path for file in files]
    if len(set(names)) < len(names):
        raise BadReference(f"two URLs end in the same file name: {', '.join(sorted(names))}")
    if len(files) > 1 and (archives := [name for name in names if is_archive(name)]):
        raise BadReference(
            f"{archives[0]} is an archive next to other files; name a single archive, or only "
            "plain files"
        )
    commit = hashlib.sha1(
        repr(sorted((file.path, file.sha256) for file in files)).encode()
    ).hexdigest()
    return Snapshot("url", " ".join(urldefrag(url)[0] for url in urls), commit, tuple(files), kind)


def fetch_files(
    snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path, meter: Meter
) -> None:
    """Download the files into the folder, keeping those that are complete. Raises DownloadError."""
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client:
        for file in meter.keep_complete(files, folder):
            part = folder / PARTS / file.path
            part.parent.mkdir(parents=True, exist_ok=True)
            url = _url_of(snapshot, file)
            try:
                _receive_all(client, url, file, part, meter)
                if not is_right(part, file):  # the part may be left over from different content
                    part.unlink()
                    _receive_all(client, url, file, part, meter)
            except OSError as error:
                raise disk_is_full(error) or error from error
            place(file, folder, url)
            meter.update(file.path, (folder / file.path).stat().st_size, 1)


def with_sizes(snapshot: Snapshot, files: Sequence[RemoteFile], folder: Path) -> list[RemoteFile]:
    """The files, with the sizes that the server reports for those to download."""
    sized = []
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client:
        for file in files:
            length = ""
            if not (folder / file.path).is_file():
                with contextlib.suppress(httpx.HTTPError):  # the download will report it
                    response = client.head(_url_of(snapshot, file), headers=PLAIN)
                    length = response.headers.get("Content-Length", "") * response.is_success
            sized.append(replace(file, size=int(length) if length.isdigit() else None))
    return sized


def _url_of(snapshot: Snapshot, file: RemoteFile) -> str:
    for address in snapshot.repo.split(" "):
        if PurePosixPath(unquote(urlsplit(address).path)).name == file.path:
            return address
    raise BadReference(f"{file.path} is none of {snapshot.repo}")


def _receive_all(
    client: httpx.Client, url: str, file: RemoteFile, part: Path, meter: Meter
) -> None:
    """Download the missing bytes of `part`, with retries as long as some arrive."""
    failures = 0
    while True:
        before = _size(part)
        try:
            return _receive(client, url, file, part, meter)
        except Unreachable as error:
            failures = 0 if _size(part) > before else failures + 1
            if error.is_lasting or failures >= MAX_ATTEMPTS:
                raise
            time.sleep(BACKOFF_SECONDS * 2**failures)


def _receive(client: httpx.Client, url: str, file: RemoteFile, part: Path, meter: Meter) -> None:
    """Append the missing bytes to `part`. Raises Unreachable if a retry may help."""
    have = _size(part)
    if file.size is not None and have >= file.size > 0:
        return meter.update(file.path, have)
    headers = {**PLAIN, "Range": f"bytes={have}-"} if have else PLAIN
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
            if not response.is_success:
                raise _refusal(url, response)
            begin = _RANGE.match(response.headers.get("Content-Range", ""))
            resumes = response.status_code == 206 and begin is not None and int(begin[1]) == have
            received = have if resumes else 0
            with part.open("ab" if resumes else "wb") as content:
                for chunk in response.iter_bytes():
                    content.write(chunk)
                    received += len(chunk)
                    meter.update(file.path, received)
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        parts = urlsplit(url)
        raise unreachable(f"{parts.scheme}://{parts.netloc}", error) from error
    if file.size is not None and _size(part) < file.size:
        raise Unreachable(f"{url} ended after {_size(part)} of {file.size} bytes")


def _refusal(url: str, response: httpx.Response) -> DownloadError:
    status = response.status_code
    if status in (401, 403):
        return AccessDenied(f"access to {url} is denied (HTTP {status}): {_DENIED}")
    if status in (404, 410):
        return NotFound(f"{url} does not exist (HTTP {status}); correct the URL")
    if status == 407:
        return DownloadError(
            f"the proxy for {url} requires a user and password: "
            "HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
        )
    if status in (408, 416, 425, 429) or status >= 500:
        return Unreachable(f"{url} returned HTTP {status}; run it again later")
    return DownloadError(f"{url} returned HTTP {status}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def is_archive(name: str) -> bool:
    """True if a file with this name is unpacked."""
    return name.lower().endswith(ARCHIVES)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into the folder, without its top folder if it has only one, then remove the
    archive.

    Existing files are replaced. The archive is removed last, so that a kill does not cause another
    download. Raises WrongContent for links, devices and names that lead out of the folder, and
    DiskTooSmall if the files do not fit.
    """
    staged = folder / PARTS / "unpacked"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _unzip(archive, staged) if archive.name.lower().endswith(".zip") else _untar(
            archive, staged
        )
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise WrongContent(f"{archive.name} cannot be unpacked: {error}") from error
    top = list(staged.iterdir())
    source = top[0] if len(top) == 1 and top[0].is_dir() else staged
    for path in [path for path in source.rglob("*") if path.is_file()]:
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    archive.unlink()


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as content:
        items = content.infolist()
        require_room(sum(item.file_size for item in items), folder, f"in {archive.name}")
        for item in items:
            _require_plain(item.filename, archive, not stat.S_ISLNK(item.external_attr >> 16))
        content.extractall(folder)


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        members = content.getmembers()
        require_room(sum(member.size for member in members), folder, f"in {archive.name}")
        for member in members:
            _require_plain(member.name, archive, member.isfile() or member.isdir())
        content.extractall(folder, members, filter="data")


def _require_plain(name: str, archive: Path, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if not is_plain:
        raise WrongContent(f"{archive.name} contains {name}, a link or device")
    if path.is_absolute() or ".." in path.parts:
        raise WrongContent(f"{archive.name} contains {name}, which leads out of the folder")
