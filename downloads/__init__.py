"""Models and datasets from hubs and web servers: what a reference stands for, and its files.

    snapshot = resolve("hf:Qwen/Qwen3-8B@main")           # commit, files, sizes, digests: no content is moved
    fetch(snapshot, folder, paths=["config.json"])        # resumes, verifies

References: `hf:ORG/NAME[@REVISION][/FILE]`, `modelscope:ORG/NAME[@REVISION][/FILE]`, `https://...#sha256=DIGEST`,
or a list of the latter. FILE may be a folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from downloads.errors import (
    AccessDenied,
    BadReference,
    DiskTooSmall,
    DownloadError,
    NotFound,
    Offline,
    Unreachable,
    WrongContent,
)
from downloads.nearest import nearest
from downloads.snapshot import (
    PARTS,
    Kind,
    OnProgress,
    Progress,
    Reference,
    RemoteFile,
    Snapshot,
    is_remote,
    parse_reference,
)

if TYPE_CHECKING:
    from downloads.transfer import Meter

__all__ = [
    "AccessDenied",
    "BadReference",
    "DiskTooSmall",
    "DownloadError",
    "NotFound",
    "Offline",
    "OnProgress",
    "Progress",
    "RemoteFile",
    "Snapshot",
    "Unreachable",
    "WrongContent",
    "fetch",
    "is_remote",
    "resolve",
]


def resolve(reference: str | Sequence[str], kind: Kind = "model") -> Snapshot:
    """The commit, files, sizes and digests that a reference stands for now; no content is moved.

    Raises BadReference, NotFound, AccessDenied, and Unreachable, of which Offline is a kind.
    """
    from downloads import huggingface, modelscope, urls

    if not isinstance(reference, str) or reference.startswith(("http://", "https://")):
        return urls.resolve([reference] if isinstance(reference, str) else reference, kind)
    parts = parse_reference(reference)
    hub = huggingface if parts.hub == "hf" else modelscope
    snapshot = hub.resolve(parts.repo, parts.revision, kind)
    return snapshot if parts.file is None else replace(snapshot, files=_named(snapshot, parts))


def fetch(
    snapshot: Snapshot,
    folder: Path,
    paths: Collection[str] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Bring files of a snapshot, by default all, into the folder; one archive of a URL is unpacked there.

    What an earlier call left is continued; a file that is there and right is kept. An archive that was unpacked is
    fetched again, for nothing says that its files are still right. `on_progress` is called from several threads,
    one at a time. Raises DiskTooSmall before the first byte, and DownloadError.
    """
    from downloads import huggingface, urls
    from downloads.transfer import Meter, fetch_files, size_of

    files = [file for file in snapshot.files if paths is None or file.path in paths]
    for file in files:
        _require_inside(file)
    folder.mkdir(parents=True, exist_ok=True)
    if snapshot.hub == "url":
        lacking = [file for file in files if not (folder / file.path).is_file()]
        sizes = {file.path: size_of(urls.request_for(snapshot, file)) for file in lacking}
        files = [replace(file, size=sizes.get(file.path)) for file in files]
    _require_room(files, folder)
    meter = Meter(files, on_progress)
    if snapshot.hub == "modelscope":
        _fetch_from_modelscope(snapshot, files, folder, meter)
    else:
        source = huggingface if snapshot.hub == "hf" else urls
        fetch_files(files, lambda file: source.request_for(snapshot, file), folder, meter)
    if snapshot.hub == "url" and len(files) == 1 and urls.is_archive(files[0].path):
        urls.unpack(folder / files[0].path, folder)
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def _fetch_from_modelscope(snapshot: Snapshot, files: list[RemoteFile], folder: Path, meter: Meter) -> None:
    from downloads import modelscope
    from downloads.transfer import is_right

    staged = folder / PARTS
    kept = [file for file in files if (folder / file.path).is_file() and is_right(folder / file.path, file)]
    for file in kept:
        meter.add(file.path, (folder / file.path).stat().st_size)
        meter.finish(file.path)
    pending = [file for file in files if file not in kept]
    modelscope.fetch_files(snapshot, pending, staged, meter.add)
    for file in pending:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (staged / file.path).replace(target)
        meter.finish(file.path)


def _named(snapshot: Snapshot, parts: Reference) -> tuple[RemoteFile, ...]:
    """The files that a reference names by their path or folder."""
    name = str(parts.file)
    files = tuple(
        file for file in snapshot.files if file.path == name or file.path.startswith(f"{name.rstrip('/')}/")
    )
    if not files:
        raise NotFound(f"{parts.repo} has no file {name}{nearest(name, [file.path for file in snapshot.files])}")
    if parts.sha256 is None:
        return files
    if files[0].path != name:
        raise BadReference(f"{name} is a folder of {parts.repo}, which has no sha256; name one file")
    if files[0].sha256 not in (None, parts.sha256):
        raise WrongContent(
            f"{name} of {parts.repo} has sha256 {files[0].sha256} at commit {snapshot.commit}, not "
            f"{parts.sha256}; name the commit that it was taken from as @REVISION, or the new digest"
        )
    return (replace(files[0], sha256=parts.sha256),)


def _require_inside(file: RemoteFile) -> None:
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or "\\" in file.path or path.parts[:1] == (PARTS,):
        raise WrongContent(f"the hub lists a file {file.path!r}, which leads out of the folder")


def _require_room(files: Sequence[RemoteFile], folder: Path) -> None:
    """Raise DiskTooSmall unless what is still to come fits on the disk of the folder."""
    lacking = 0
    for file in files:
        there = [
            path.stat().st_size for path in (folder / file.path, folder / PARTS / file.path) if path.is_file()
        ]
        lacking += max((file.size or 0) - max(there, default=0), 0)
    free = shutil.disk_usage(folder).free
    if lacking > free:
        raise DiskTooSmall(
            f"{lacking:,} bytes are to come, and the disk of {folder} has {free:,} free; make room (dapo gc "
            "removes what no run needs), or set store.path to another disk"
        )
