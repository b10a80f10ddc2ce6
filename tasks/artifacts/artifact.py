"""A finished stage output on disk: the handle that tasks pass on, its manifest, and its files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.errors import DapoError
from tasks.artifacts.stage_key import canonical_json

MANIFEST_NAME = "manifest.json"


class StoreError(DapoError, OSError):
    """The artifact store cannot be written, lacks something, or a stage wrote what cannot be kept."""


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


def hash_file(path: Path) -> str:
    """Returns the sha256 of a file, read block by block."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _raise(error: OSError) -> None:
    raise error
