"""A finished stage output: the handle that tasks pass on, its manifest, and the check of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.errors import DapoError
from durable import write_atomically

MANIFEST_NAME = "manifest.json"
# A write within the clock's granularity of our check could leave the same times: such files are read again.
RACY_NANOSECONDS = 1_000_000_000
STAMP_SUFFIX = ".verified"  # of the file beside an artifact that records which digests its files had, and when


class StoreError(DapoError, OSError):
    """The artifact store cannot be written, lacks something, or a stage wrote what cannot be kept."""


class DamagedArtifact(Exception):
    """An artifact is not what its manifest says; the message names the first file that is wrong, and how."""


@dataclass(frozen=True)
class Artifact:
    """A verified output of a stage; small and picklable, so it is what tasks hand to each other."""

    stage: str
    key: str  # 64 hexadecimal digits
    path: str  # absolute directory
    digest: str  # of the content: equal bytes under equal names give equal digests

    def manifest(self) -> dict[str, Any]:
        """Returns manifest.json: files, inputs, config, code_digest, versions, host, times, metrics."""
        return read_manifest(Path(self.path))


@dataclass(frozen=True, order=True)
class FileEntry:
    """One content file as the manifest lists it."""

    path: str  # relative, with forward slashes
    size: int
    sha256: str


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the parsed manifest.json. Raises OSError or ValueError when it is missing or not JSON."""
    manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
    if not isinstance(manifest, dict):
        raise ValueError(f"{directory / MANIFEST_NAME} holds no JSON object")
    return manifest


def artifact_at(directory: Path) -> Artifact | None:
    """Returns the artifact that the manifest describes, its files unchecked; None without a readable manifest."""
    try:
        manifest = read_manifest(directory)
        artifact = Artifact(manifest["stage"], manifest["key"], str(directory), manifest["digest"])
    except (OSError, ValueError, KeyError):
        return None
    return artifact if all(isinstance(text, str) for text in vars(artifact).values()) else None


def content_digest(entries: Sequence[FileEntry]) -> str:
    """Returns sha256 over the sorted (path, size, sha256) of the files."""
    rows = [[entry.path, entry.size, entry.sha256] for entry in sorted(entries)]
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def content_files(directory: Path) -> Iterator[str]:
    """Yields the relative path of every file but the manifest; raises StoreError on links and devices."""
    for folder, folder_names, file_names in os.walk(directory, onerror=_raise):
        folder_names.sort()
        for name in sorted([*file_names, *folder_names]):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(directory).as_posix()
            if stat.S_ISREG(mode):
                if relative != MANIFEST_NAME:
                    yield relative
            elif not stat.S_ISDIR(mode):
                raise StoreError(
                    f"{path} is neither a file nor a folder: a link's target could change or vanish unseen, "
                    "so an artifact holds copies (or hard links) only"
                )


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


def hash_file(path: Path) -> str:
    """Returns the sha256 of a file, read block by block."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: keys sorted, no spaces, ASCII. Raises ValueError for not-a-number."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


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


def _raise(error: OSError) -> None:
    raise error
