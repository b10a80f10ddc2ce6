"""The key of a stage output: everything that can change its bytes, and nothing else."""

from __future__ import annotations

import functools
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.artifact import StoreError, canonical_json, sha256_of

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SHORT_KEY_LENGTH = 16


@dataclass(frozen=True)
class StageKey:
    """The parts of a key, kept separate so that changes can be explained."""

    stage: str
    config: Mapping[str, Any]  # the stage's slice, JSON values, without volatile fields
    inputs: Mapping[str, str]  # name -> content digest
    code_digest: str
    versions: Mapping[str, str]  # package -> version

    @property
    def key(self) -> str:
        """sha256 over the parts' canonical JSON; raises TypeError for values that are not JSON."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns {distribution: version} without imports; "absent" if not installed."""
    from importlib import metadata  # slow to import, and `dapo --help` needs no versions

    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@functools.cache
def code_version() -> str:
    """The package version, with the commit if the code is a git checkout."""
    version = package_versions(("dapo-pipeline",))["dapo-pipeline"]
    git = ["git", "-C", str(PROJECT_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return version
    return f"{version}, commit {done.stdout.strip()}"


@functools.cache
def code_digest(paths: tuple[str, ...], root: Path = PROJECT_ROOT) -> str:
    """Returns sha256 over the names and contents of `code_files`."""
    digest = hashlib.sha256()
    for file in code_files(paths, root):
        digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()


def code_files(paths: tuple[str, ...], root: Path = PROJECT_ROOT) -> list[Path]:
    """Returns all files at and below `paths`, sorted; raises StoreError if one does not exist."""
    return sorted({file for path in paths for file in _files_at(path, root)})


def _files_at(path: str, root: Path) -> Iterator[Path]:
    start = root / path
    if not start.exists():
        raise StoreError(f"{path}, which a stage declares as its code, does not exist in {root}")
    for file in [start] if start.is_file() else start.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file
