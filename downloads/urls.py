"""Files from web servers, each pinned by its sha256, and archives."""

from __future__ import annotations

import hashlib
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urldefrag, urlsplit

from downloads.errors import BadReference, WrongContent, require_room
from downloads.snapshot import PARTS, Kind, RemoteFile, Snapshot, require_digest
from downloads.transfer import Request

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


def request_for(snapshot: Snapshot, file: RemoteFile) -> Request:
    """The request for a file of the snapshot."""
    for address in snapshot.repo.split(" "):
        if PurePosixPath(unquote(urlsplit(address).path)).name == file.path:
            return Request(address, {}, _DENIED)
    raise BadReference(f"{file.path} is none of {snapshot.repo}")


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
