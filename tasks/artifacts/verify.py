"""Checks an artifact directory against its manifest, without reading again what has provably not changed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo_core.errors import StoreError
from tasks.artifacts.artifact import (
    MANIFEST_NAME,
    Artifact,
    FileEntry,
    content_digest,
    content_files,
    hash_file,
    read_manifest,
)

# A write within the clock's granularity of our check could leave the same times: such files are read again.
RACY_NANOSECONDS = 1_000_000_000

Identity = list[int]


class DamagedArtifact(Exception):
    """Says which file of an artifact directory is wrong, and how; the store catches it."""


def verify_directory(
    directory: Path, stage: str, key: str, stamp_path: Path, *, keeps_stamp: bool = True
) -> Artifact:
    """Returns the artifact in `directory` when each file has the size and sha256 its manifest lists.

    A file whose size, times and inode are those in the stamp of an earlier check is not read again; with
    `keeps_stamp` this check leaves one too. Raises DamagedArtifact, naming the first file that is wrong.
    """
    try:
        manifest = read_manifest(directory)
        entries = [FileEntry(row["path"], row["size"], row["sha256"]) for row in manifest["files"]]
        described = (manifest["stage"], manifest["key"], manifest["digest"])
        if described != (stage, key, content_digest(entries)):
            raise DamagedArtifact(f"{MANIFEST_NAME} is of another artifact, or was edited")
        _check_file_names(directory, entries)
        identities = _check_contents(directory, entries, _read_stamp(stamp_path))
        if identities is not None and keeps_stamp:
            write_stamp(stamp_path, identities, entries)
    except FileNotFoundError as error:
        raise DamagedArtifact(f"{Path(error.filename).name} is missing") from error
    except StoreError as error:
        raise DamagedArtifact(str(error)) from error
    except OSError as error:
        raise DamagedArtifact(f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedArtifact(f"{MANIFEST_NAME} is not a manifest: {error!r}") from error
    return Artifact(stage=stage, key=key, path=str(directory), digest=manifest["digest"])


def identify(path: Path) -> Identity:
    """Returns [size, times, inode] of a file, to be asked before it is read; [] while a write could go unseen."""
    status = path.stat()
    if max(status.st_mtime_ns, status.st_ctime_ns) >= time.time_ns() - RACY_NANOSECONDS:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def write_stamp(stamp_path: Path, identities: Mapping[str, Identity], entries: Iterable[FileEntry]) -> None:
    """Records which files were found right, so that the next check need not read them."""
    stamp = {entry.path: [*identities[entry.path], entry.sha256] for entry in entries if identities[entry.path]}
    # A stamp only saves time: a store that cannot be written is still read.
    with contextlib.suppress(OSError):
        stamp_path.parent.mkdir(parents=True, exist_ok=True)
        beside = stamp_path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(stamp))
        beside.replace(stamp_path)


def _check_file_names(directory: Path, entries: list[FileEntry]) -> None:
    listed = {entry.path for entry in entries}
    present = set(content_files(directory))
    if missing := sorted(listed - present):
        raise DamagedArtifact(f"{missing[0]} is missing ({len(missing)} of {len(listed)} files are)")
    if extra := sorted(present - listed):
        raise DamagedArtifact(f"{extra[0]} is not in the manifest ({len(extra)} such files)")


def _check_contents(
    directory: Path, entries: list[FileEntry], stamp: Mapping[str, Any]
) -> dict[str, Identity] | None:
    """Returns the files' identities, or None when the stamp has them all."""
    identities: dict[str, Identity] = {}
    has_new = False
    for entry in entries:
        path = directory / entry.path
        if (size := path.stat().st_size) != entry.size:
            raise DamagedArtifact(f"{entry.path} has {size} bytes, the manifest says {entry.size}")
        identities[entry.path] = identify(path)
        if stamp.get(entry.path) == [*identities[entry.path], entry.sha256]:
            continue
        if (found := hash_file(path)) != entry.sha256:
            raise DamagedArtifact(f"{entry.path} has sha256 {found}, the manifest says {entry.sha256}")
        has_new = True
    return identities if has_new else None


def _read_stamp(stamp_path: Path) -> dict[str, Any]:
    try:
        stamp = json.loads(stamp_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}
