"""Resolves and downloads models and datasets from hubs and web servers.

    snapshot = resolve("hf:Qwen/Qwen3-8B@main")           # commit, files, sizes, digests; downloads nothing
    fetch(snapshot, folder, paths=["config.json"])        # resumes and verifies

References: `hf:ORG/NAME[@REVISION][/FILE]`, `modelscope:ORG/NAME[@REVISION][/FILE]`,
`https://...#sha256=DIGEST`, or a list of such URLs. FILE may be a folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from downloads.errors import (
    AccessDenied,
    BadReference,
    DiskTooSmall,
    DownloadError,
    NotFound,
    Offline,
    Unreachable,
    WrongContent,
    require_room,
)
from downloads.nearest import nearest
from downloads.snapshot import (
    PARTS,
    HubName,
    Kind,
    OnProgress,
    Progress,
    Reference,
    RemoteFile,
    Snapshot,
    is_remote,
    parse_reference,
)

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
    """Resolve a reference to its current commit, files, sizes and digests, without downloading
    content.

    Raises BadReference, NotFound, AccessDenied, and Unreachable or its subclass Offline.
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
    """Download files of a snapshot (default: all) into the folder; a single archive from a URL is
    unpacked there.

    Resumes partial files and keeps complete ones whose digest matches. An unpacked archive is
    downloaded again, because its files have no digests to check. `on_progress` is called from
    several threads, one at a time. Raises DiskTooSmall before the first byte, and DownloadError.
    """
    from downloads import huggingface, modelscope, urls
    from downloads.transfer import Meter

    files = [file for file in snapshot.files if paths is None or file.path in paths]
    for file in files:
        _require_inside(file)
    folder.mkdir(parents=True, exist_ok=True)
    if snapshot.hub == "url":
        files = urls.with_sizes(snapshot, files, folder)
    require_room(_missing_bytes(files, folder), folder, "to download")
    sources: dict[HubName, Any] = {"hf": huggingface, "modelscope": modelscope, "url": urls}
    sources[snapshot.hub].fetch_files(snapshot, files, folder, Meter(files, on_progress))
    if snapshot.hub == "url" and len(files) == 1 and urls.is_archive(files[0].path):
        urls.unpack(folder / files[0].path, folder)
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def _named(snapshot: Snapshot, parts: Reference) -> tuple[RemoteFile, ...]:
    """The files that a reference names by path or folder."""
    name = str(parts.file)
    files = tuple(
        file
        for file in snapshot.files
        if file.path == name or file.path.startswith(f"{name.rstrip('/')}/")
    )
    if not files:
        raise NotFound(
            f"{parts.repo} has no file "
            f"{name}{nearest(name, [file.path for file in snapshot.files])}"
        )
    if parts.sha256 is None:
        return files
    if files[0].path != name:
        raise BadReference(
            f"{name} is a folder of {parts.repo} and has no sha256; name a single file"
        )
    if files[0].sha256 not in (None, parts.sha256):
        raise WrongContent(
            f"{name} of {parts.repo} has sha256 {files[0].sha256} at commit {snapshot.commit}, not "
            f"{parts.sha256}; pin the original commit with @REVISION, or give the new digest"
        )
    return (replace(files[0], sha256=parts.sha256),)


def _require_inside(file: RemoteFile) -> None:
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or "\\" in file.path or path.parts[:1] == (PARTS,):
        raise WrongContent(f"the hub lists the file {file.path!r}, which leads out of the folder")


def _missing_bytes(files: Sequence[RemoteFile], folder: Path) -> int:
    """Bytes still to download."""
    missing = 0
    for file in files:
        parts = [
            path for path in (folder / file.path, folder / PARTS / file.path) if path.is_file()
        ]
        missing += max(
            (file.size or 0) - max((part.stat().st_size for part in parts), default=0), 0
        )
    return missing
