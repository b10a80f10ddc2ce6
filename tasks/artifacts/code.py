"""The digest of the source files that a stage runs; nothing is imported."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from tasks.artifacts.artifact import StoreError, hash_file

PROJECT_ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def code_digest(paths: tuple[str, ...], without: tuple[str, ...] = (), root: Path = PROJECT_ROOT) -> str:
    """Returns sha256 over the names and contents of `code_files`."""
    digest = hashlib.sha256()
    for file in code_files(paths, without, root):
        digest.update(f"{file.relative_to(root).as_posix()}\0{hash_file(file)}\n".encode())
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
