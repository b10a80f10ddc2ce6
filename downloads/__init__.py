"""Resolves and downloads models and datasets from hubs and web servers.

    snapshot = resolve("hf:Qwen/Qwen3-8B@main")     # commit, files, sizes, digests; no content
    fetch(snapshot, folder, paths=["config.json"])  # resumes and verifies

References: `hf:ORG/NAME[@REVISION][/FILE]`, `modelscope:ORG/NAME[@REVISION][/FILE]`,
`https://...#sha256=DIGEST`, or a list of such URLs. FILE may be a folder.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

from downloads.errors import DownloadError, Unreachable, require_room
from downloads.nearest import nearest
from downloads.snapshot import (
    Kind,
    OnProgress,
    Progress,
    Reference,
    RemoteFile,
    Report,
    Snapshot,
    is_remote,
    parse_reference,
    size_of,
)

__all__ = [
    "DownloadError",
    "Kind",
    "OnProgress",
    "Progress",
    "RemoteFile",
    "Snapshot",
    "Unreachable",
    "fetch",
    "is_remote",
    "resolve",
]

MAX_PARALLEL = 8  # files that are verified at a time
PARTS = ".parts"  # unverified files by commit, inside the download's folder


def resolve(reference: str | Sequence[str], kind: Kind = "model") -> Snapshot:
    """Resolve a reference to its current commit, files, sizes and digests; downloads no content.

    Raises DownloadError; Unreachable if the hub does not answer.
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
    """Download files of a snapshot (default: all) into the folder; unpack a URL's single archive.

    Keeps complete files whose digest matches. An unpacked archive is downloaded again, because its
    files have no digests to check. `on_progress` is called from several threads, one at a time.
    Raises DownloadError; before the first byte if the disk is too small.
    """
    from downloads import huggingface, modelscope, urls

    files = [file for file in snapshot.files if paths is None or file.path in paths]
    for file in files:
        _require_inside(file)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        complete = list(pool.map(lambda file: file.is_at(folder / file.path), files))
    pending = [file for file, is_kept in zip(files, complete, strict=True) if not is_kept]
    kept_bytes = sum(size_of(folder / file.path) for file in {*files} - {*pending})
    if snapshot.hub == "url":
        pending = urls.with_sizes(snapshot, pending)
    parts = folder / PARTS / snapshot.commit  # content of different commits does not mix
    parts.mkdir(parents=True, exist_ok=True)
    for unfinished in (parts / ".cache").rglob("*.incomplete"):
        unfinished.unlink()  # huggingface_hub does not continue them
    missing = sum(max((file.size or 0) - size_of(parts / file.path), 0) for file in pending)
    require_room(missing, folder, "to download")
    if pending:
        hub = {"hf": huggingface, "modelscope": modelscope, "url": urls}[snapshot.hub]
        report = _reporter(len(files), kept_bytes, pending, on_progress)
        hub.download(snapshot, pending, parts, report)
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        list(pool.map(lambda file: _place(file, parts, folder, snapshot.repo), pending))
    if on_progress is not None:
        total = sum(size_of(folder / file.path) for file in files)
        on_progress(Progress(len(files), len(files), total, total))
    if snapshot.hub == "url" and len(files) == 1 and urls.is_archive(files[0].path):
        urls.unpack(folder / files[0].path, parts / "unpacked", folder)
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def _named(snapshot: Snapshot, parts: Reference) -> tuple[RemoteFile, ...]:
    """The files that a reference names by path or folder."""
    name = str(parts.file)
    inside = f"{name.rstrip('/')}/"
    files = [each for each in snapshot.files if each.path == name or each.path.startswith(inside)]
    if not files:
        near = nearest(name, [file.path for file in snapshot.files])
        raise DownloadError(f"{parts.repo} has no file {name}{near}")
    if parts.sha256 is None:
        return tuple(files)
    if files[0].path != name:
        raise DownloadError(f"{name} is a folder of {parts.repo} and has no sha256; name one file")
    if files[0].sha256 not in (None, parts.sha256):
        raise DownloadError(
            f"{name} of {parts.repo} has sha256 {files[0].sha256} at commit {snapshot.commit}, not "
            f"{parts.sha256}; pin the original commit with @REVISION, or give the new digest"
        )
    return (replace(files[0], sha256=parts.sha256),)


def _require_inside(file: RemoteFile) -> None:
    path = PurePosixPath(file.path)
    if path.is_absolute() or ".." in path.parts or "\\" in file.path or path.parts[:1] == (PARTS,):
        raise DownloadError(f"the hub lists the file {file.path!r}, which leads out of the folder")


def _reporter(
    num_files: int, kept_bytes: int, pending: Sequence[RemoteFile], on_progress: OnProgress | None
) -> Report:
    """Sums the bytes and files of parallel downloads and reports the totals."""
    received = {"": (kept_bytes, num_files - len(pending))}
    total = kept_bytes + sum(file.size or 0 for file in pending)
    lock = threading.Lock()

    def report(name: str, num_bytes: int, num_done: int) -> None:
        with lock:
            received[name] = (num_bytes, num_done)
            done, num_complete = map(sum, zip(*received.values(), strict=True))
            if on_progress is not None:
                on_progress(Progress(num_complete, num_files, done, max(total, done)))

    return report


def _place(file: RemoteFile, parts: Path, folder: Path, source: str) -> None:
    """Move a finished file to its place. Raises DownloadError for other content."""
    part, target = parts / file.path, folder / file.path
    if not part.is_file():
        raise Unreachable(f"{source} did not deliver {file.path}; run it again later")
    if not file.is_at(part):
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        size = size_of(part)
        part.unlink()
        expected = f"sha256 {file.sha256}" if file.sha256 else f"git blob {file.git_oid}"
        raise DownloadError(
            f"{file.path} of {source} is not the expected file: it has {size} bytes and sha256 "
            f"{found}, not {file.size or size} bytes and {expected}. It was discarded. A mirror "
            "may be out of date: use another endpoint. For a URL, give the new digest if you want "
            "the new content"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
