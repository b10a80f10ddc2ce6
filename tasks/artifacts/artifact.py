"""A finished stage output: its handle, its manifest, and verification of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dapo_core.errors import DapoError
from dapo_core.machine.digests import file_digest
from durable import write_atomically
from heartbeat import heartbeat

MANIFEST_NAME = "manifest.json"
# A file written within the clock's granularity of a check could keep its times: such files are
# hashed again.
RACY_NANOSECONDS = 1_000_000_000
STAMP_SUFFIX = ".verified"  # file beside an artifact that records verified digests with file times


class StoreError(DapoError, OSError):
    """The store cannot be written, an artifact is missing, or an output cannot be stored."""


class DamagedArtifact(Exception):
    """An artifact does not match its manifest; the message names the first wrong file."""


@dataclass(frozen=True)
class Artifact:
    """A verified stage output. Small and picklable, so that tasks can pass it on."""

    stage: str
    key: str  # 64 hexadecimal digits
    path: str  # absolute directory
    digest: str  # of names and contents

    def manifest(self) -> dict[str, Any]:
        """Returns manifest.json: files, inputs, config, code, versions, host, times, metrics."""
        return read_manifest(Path(self.path))

    def entries(self) -> list[FileEntry]:
        """Returns the files listed in the manifest.

        Raises DamagedArtifact unless exactly these files exist and `digest` matches them.
        """
        with _as_damage():
            entries = [FileEntry.from_row(row) for row in self.manifest()["files"]]
            if content_digest(entries) != self.digest:
                raise DamagedArtifact(f"{MANIFEST_NAME} belongs to another artifact or was edited")
            _require_same_names(
                {entry.path for entry in entries}, set(content_files(Path(self.path)))
            )
        return entries


@dataclass(frozen=True)
class Output:
    """The result of a stage that hashed files while writing them."""

    metrics: Mapping[str, Any]
    digests: Mapping[str, str]  # relative path -> "ALGORITHM:HEX"


@dataclass(frozen=True, order=True)
class FileEntry:
    """One content file as listed in the manifest."""

    path: str  # relative, with forward slashes
    size: int
    digest: str  # "ALGORITHM:HEX", one of ALGORITHMS

    @property
    def algorithm(self) -> str:
        return self.digest.partition(":")[0]

    def row(self) -> dict[str, Any]:
        """The entry in manifest.json: {"path": ..., "size": ..., ALGORITHM: HEX}."""
        return {"path": self.path, "size": self.size, self.algorithm: self.digest.partition(":")[2]}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> FileEntry:
        """The entry for a manifest row; raises ValueError without exactly one known algorithm."""
        [algorithm] = row.keys() & ALGORITHMS.keys()
        return FileEntry(row["path"], row["size"], f"{algorithm}:{row[algorithm]}")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the parsed manifest.json; raises OSError or ValueError if there is none."""
    manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
    if not isinstance(manifest, dict):
        raise ValueError(f"{directory / MANIFEST_NAME} is not a JSON object")
    return manifest


def artifact_at(directory: Path) -> Artifact | None:
    """Returns the artifact that a manifest describes, unverified; None if it is not readable."""
    try:
        manifest = read_manifest(directory)
        artifact = Artifact(manifest["stage"], manifest["key"], str(directory), manifest["digest"])
    except (OSError, ValueError, KeyError):
        return None
    return artifact if all(isinstance(text, str) for text in vars(artifact).values()) else None


def content_digest(entries: Sequence[FileEntry]) -> str:
    """Returns sha256 over the sorted (path, size, digest) of the files."""
    rows = [
        [entry.path, entry.size, entry.digest.removeprefix("sha256:")] for entry in sorted(entries)
    ]
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def content_files(directory: Path) -> Iterator[str]:
    """Yields the relative path of every file except the manifest.

    Raises StoreError for links, devices, and names with control characters.
    """
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
                    f"{path} is neither a file nor a folder: the target of a link could change or "
                    "vanish unnoticed, so an artifact holds only copies or hard links"
                )
            if not name.isprintable():
                raise StoreError(
                    f"{str(path)!r} has a line break or another control character in its name"
                )


def verify_directory(directory: Path, stage: str, key: str) -> Artifact:
    """Returns the artifact; raises DamagedArtifact unless every size and digest matches."""
    with _as_damage():
        manifest = read_manifest(directory)
        artifact = Artifact(stage, key, str(directory), manifest["digest"])
        if (manifest["stage"], manifest["key"]) != (stage, key):
            raise DamagedArtifact(f"{MANIFEST_NAME} belongs to another artifact or was edited")
        listed = artifact.entries()
        for entry, found in zip(sorted(listed), list_files(directory, listed), strict=True):
            if found.size != entry.size:
                raise DamagedArtifact(
                    f"{entry.path} has {found.size} bytes, the manifest says {entry.size}"
                )
            if found.digest != entry.digest:
                expected, actual = (each.digest.partition(":")[2] for each in (entry, found))
                raise DamagedArtifact(
                    f"{entry.path} has {entry.algorithm} {actual}, the manifest says {expected}"
                )
    return artifact


@heartbeat(lambda: "computing the digests of a stage's output")
def list_files(
    directory: Path,
    listed: Iterable[FileEntry] = (),
    digests: Mapping[str, str] = MappingProxyType({}),
) -> list[FileEntry]:
    """Returns the size and digest of each content file, sorted by path.

    The algorithm comes from the entry in `listed`, else from `algorithm_for` the name. A file is
    not read if it is in `digests`, or if its size, times and inode are unchanged since an earlier
    call.
    """
    stamp_path = directory.with_suffix(STAMP_SUFFIX)
    known = _read_stamp(stamp_path)
    stamp: dict[str, dict[str, Any]] = {}
    algorithms = {entry.path: entry.algorithm for entry in listed}
    entries = []
    for relative in sorted(content_files(directory)):
        path = directory / relative
        status = path.stat()
        if relative in digests:
            entries.append(FileEntry(relative, status.st_size, digests[relative]))
            continue
        algorithm = algorithms.get(relative) or algorithm_for(relative)
        times = [status.st_mtime_ns, status.st_ctime_ns]
        identity = [status.st_size, *times, status.st_ino, algorithm]
        is_racy = max(times) >= time.time_ns() - RACY_NANOSECONDS
        row = known.get(relative, {})
        digest = row["digest"] if row.get("identity") == identity else hash_file(path, algorithm)
        if not is_racy:
            stamp[relative] = {"identity": identity, "digest": digest}
        entries.append(FileEntry(relative, status.st_size, digest))
    if stamp != known:
        with contextlib.suppress(OSError):  # the stamp only saves time; read-only stores still work
            write_atomically(stamp_path, json.dumps(stamp))
    return entries


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ALGORITHMS: Mapping[str, Callable[[Path], str]] = {"sha256": sha256_of, "blake3": file_digest}


def algorithm_for(name: str) -> str:
    """Returns the digest algorithm of a file: blake3 for weights and checkpoints, else sha256."""
    return "blake3" if name.endswith((".safetensors", ".distcp")) else "sha256"


def hash_file(path: Path, algorithm: str) -> str:
    """Returns the digest of a file as "ALGORITHM:HEX"."""
    return f"{algorithm}:{ALGORITHMS[algorithm](path)}"


def canonical_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII. Raises ValueError for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _require_same_names(expected: set[str], present: set[str]) -> None:
    if missing := sorted(expected - present):
        raise DamagedArtifact(f"{missing[0]} is missing ({len(missing)} of {len(expected)} files)")
    if extra := sorted(present - expected):
        raise DamagedArtifact(f"{extra[0]} is not in the manifest ({len(extra)} such files)")


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Turns errors of an incomplete artifact into DamagedArtifact."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedArtifact(f"{Path(error.filename).name} is missing") from error
    except StoreError as error:
        raise DamagedArtifact(str(error)) from error
    except OSError as error:
        raise DamagedArtifact(f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedArtifact(f"{MANIFEST_NAME} is not a manifest: {error!r}") from error


def _read_stamp(stamp_path: Path) -> dict[str, dict[str, Any]]:
    try:
        stamp = json.loads(stamp_path.read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _raise(error: OSError) -> None:
    raise error
