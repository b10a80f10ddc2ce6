"""Files of web servers, each pinned by its sha256, and archives of files."""

from __future__ import annotations

import hashlib
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urldefrag, urlsplit

from downloads.errors import BadReference, DiskTooSmall, WrongContent
from downloads.snapshot import PARTS, Kind, RemoteFile, Snapshot, require_digest
from downloads.transfer import Request

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
_DENIED = (
    "its server wants credentials, which a recipe must not hold; put the file where it can be read, or use a hub"
)


def resolve(urls: Sequence[str], kind: Kind) -> Snapshot:
    """The files that the addresses name, without asking any server. Raises BadReference."""
    files = []
    for url in urls:
        address, fragment = urldefrag(url)
        parts = urlsplit(address)
        name = PurePosixPath(unquote(parts.path)).name
        if parts.scheme not in ("http", "https") or not parts.netloc or not name:
            raise BadReference(f"{url} is no http or https address of a file")
        if parts.username or parts.password:
            raise BadReference(f"an address of {parts.hostname} holds a user or password: {_DENIED}")
        digest = require_digest(url, fragment.removeprefix("sha256="))
        files.append(RemoteFile(name, None, digest))
    names = [file.path for file in files]
    if len(set(names)) < len(names):
        raise BadReference(f"two of the addresses end in the same file name: {', '.join(sorted(names))}")
    if len(files) > 1 and (archives := [name for name in names if is_archive(name)]):
        raise BadReference(f"{archives[0]} is an archive beside other files; name one archive, or files")
    commit = hashlib.sha1(repr(sorted((file.path, file.sha256) for file in files)).encode()).hexdigest()
    return Snapshot("url", " ".join(urldefrag(url)[0] for url in urls), commit, tuple(files), kind)


def request_for(snapshot: Snapshot, file: RemoteFile) -> Request:
    """Where a file of the snapshot is."""
    for address in snapshot.repo.split(" "):
        if PurePosixPath(unquote(urlsplit(address).path)).name == file.path:
            return Request(address, {}, _DENIED)
    raise BadReference(f"{file.path} is none of {snapshot.repo}")


def is_archive(name: str) -> bool:
    """Whether a file of this name is unpacked."""
    return name.lower().endswith(ARCHIVES)


def unpack(archive: Path, folder: Path) -> None:
    """Put an archive's files into the folder, those of its only top folder without it, and remove the archive.

    A file of the same name is replaced. The archive goes last: whoever is killed before need not fetch it again.
    Raises WrongContent for links, devices and names that lead out of the folder; DiskTooSmall if it does not fit.
    """
    staged = folder / PARTS / "unpacked"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        _unzip(archive, staged) if archive.name.lower().endswith(".zip") else _untar(archive, staged)
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
        _require_room(sum(item.file_size for item in items), folder, archive)
        for item in items:
            _require_plain(item.filename, archive, not stat.S_ISLNK(item.external_attr >> 16))
        content.extractall(folder)


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as content:
        members = content.getmembers()
        _require_room(sum(member.size for member in members), folder, archive)
        for member in members:
            _require_plain(member.name, archive, member.isfile() or member.isdir())
        content.extractall(folder, members, filter="data")


def _require_plain(name: str, archive: Path, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if not is_plain:
        raise WrongContent(f"{archive.name} holds {name}, a link or device")
    if path.is_absolute() or ".." in path.parts:
        raise WrongContent(f"{archive.name} holds {name}, which leads out of the folder")


def _require_room(num_bytes: int, folder: Path, archive: Path) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskTooSmall(
            f"the {num_bytes:,} bytes in {archive.name} do not fit on the disk of {folder}, which has {free:,} "
            "free; make room, or set store.path to another disk"
        )
