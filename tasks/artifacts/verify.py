"""Checks an artifact against its manifest, without reading again what provably did not change."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from durable import write_atomically
from tasks.artifacts.artifact import (
    MANIFEST_NAME,
    Artifact,
    FileEntry,
    StoreError,
    content_digest,
    content_files,
    hash_file,
    read_manifest,
)

# A write within the clock's granularity of our check could leave the same times: such files are read again.
RACY_NANOSECONDS = 1_000_000_000
STAMP_SUFFIX = ".verified"  # of the file beside an artifact that records which digests its files had, and when


class DamagedArtifact(Exception):
    """An artifact is not what its manifest says; the message names the first file that is wrong, and how."""


def verify_directory(directory: Path, stage: str, key: str) -> Artifact:
    """Returns the artifact in `directory` when each file has the size and sha256 its manifest lists.

    Raises DamagedArtifact.
    """
    try:
        manifest = read_manifest(directory)
        listed = [FileEntry(row["path"], row["size"], row["sha256"]) for row in manifest["files"]]
        if (manifest["stage"], manifest["key"], manifest["digest"]) != (stage, key, content_digest(listed)):
            raise DamagedArtifact(f"{MANIFEST_NAME} is of another artifact, or was edited")
        _compare(listed, list_files(directory))
    except FileNotFoundError as error:
        raise DamagedArtifact(f"{Path(error.filename).name} is missing") from error
    except StoreError as error:
        raise DamagedArtifact(str(error)) from error
    except OSError as error:
        raise DamagedArtifact(f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedArtifact(f"{MANIFEST_NAME} is not a manifest: {error!r}") from error
    return Artifact(stage, key, str(directory), manifest["digest"])


def list_files(directory: Path) -> list[FileEntry]:
    """Returns size and sha256 of each content file as they are on disk.

    A file whose size, times and inode are those of an earlier call is not read again.
    """
    stamp_path = directory.with_suffix(STAMP_SUFFIX)
    known = _read_stamp(stamp_path)
    stamp: dict[str, dict[str, Any]] = {}
    entries = []
    for relative in sorted(content_files(directory)):
        path = directory / relative
        status = path.stat()
        identity = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        is_racy = max(status.st_mtime_ns, status.st_ctime_ns) >= time.time_ns() - RACY_NANOSECONDS
        row = known.get(relative, {})
        sha256 = row["sha256"] if row.get("identity") == identity else hash_file(path)
        if not is_racy:
            stamp[relative] = {"identity": identity, "sha256": sha256}
        entries.append(FileEntry(relative, status.st_size, sha256))
    if stamp != known:
        with contextlib.suppress(OSError):  # a stamp only saves time: a store that cannot be written is still read
            write_atomically(stamp_path, json.dumps(stamp))
    return entries


def _compare(listed: list[FileEntry], found: list[FileEntry]) -> None:
    expected = {entry.path: entry for entry in listed}
    present = {entry.path: entry for entry in found}
    if missing := sorted(expected.keys() - present.keys()):
        raise DamagedArtifact(f"{missing[0]} is missing ({len(missing)} of {len(expected)} files are)")
    if extra := sorted(present.keys() - expected.keys()):
        raise DamagedArtifact(f"{extra[0]} is not in the manifest ({len(extra)} such files)")
    for path, entry in expected.items():
        if present[path].size != entry.size:
            raise DamagedArtifact(f"{path} has {present[path].size} bytes, the manifest says {entry.size}")
        if present[path].sha256 != entry.sha256:
            raise DamagedArtifact(f"{path} has sha256 {present[path].sha256}, the manifest says {entry.sha256}")


def _read_stamp(stamp_path: Path) -> dict[str, dict[str, Any]]:
    try:
        stamp = json.loads(stamp_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}
