"""The key of a stage's output: everything that can change its bytes, and nothing else."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.artifact import StoreError, canonical_json, sha256_of

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SHORT_KEY_LENGTH = 16


@dataclass(frozen=True)
class StageKey:
    """The parts a stage's key is made of, kept apart so that a changed key can be explained."""

    stage: str
    config: Mapping[str, Any]  # the stage's own slice, JSON values only, volatile fields left out
    inputs: Mapping[str, str]  # input name -> content digest of its artifact
    code_digest: str
    versions: Mapping[str, str]  # package -> version, of the packages that matter to this stage

    @property
    def key(self) -> str:
        """sha256 over the canonical JSON of the parts. Raises TypeError on values JSON cannot hold."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns {distribution: version}, without importing any; "absent" for one that is not installed."""
    from importlib import metadata  # a third of this module's import time, and `dapo --help` needs no version

    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


@functools.cache
def code_digest(paths: tuple[str, ...], without: tuple[str, ...] = (), root: Path = PROJECT_ROOT) -> str:
    """Returns sha256 over the names and contents of `code_files`."""
    digest = hashlib.sha256()
    for file in code_files(paths, without, root):
        digest.update(f"{file.relative_to(root).as_posix()}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()


def code_files(paths: tuple[str, ...], without: tuple[str, ...] = (), root: Path = PROJECT_ROOT) -> list[Path]:
    """Returns the files at `paths`, which are files or folders with everything below them, sorted.

    A path in `without` is left out of the folder that holds it, unless `paths` names it.
    Raises StoreError for a path in `paths` that does not exist.
    """
    return sorted({file for path in paths for file in _files_at(path, without, root)})


def _files_at(path: str, without: tuple[str, ...], root: Path) -> Iterator[Path]:
    start = root / path
    if not start.exists():
        raise StoreError(f"{path}, which a stage declares as its code, does not exist in {root}")
    left_out = [root / other for other in without if other != path and (root / other).is_relative_to(start)]
    for file in [start] if start.is_file() else start.rglob("*"):
        is_code = file.is_file() and "__pycache__" not in file.parts
        if is_code and not any(file.is_relative_to(other) for other in left_out):
            yield file
