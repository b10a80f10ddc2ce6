"""What all sources share: progress over parallel files, and the check of a finished file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from downloads.errors import WrongContent
from downloads.snapshot import PARTS, OnProgress, Progress, RemoteFile

MAX_PARALLEL = 8


class Meter:
    """Sums files and bytes of parallel downloads and reports the totals."""

    def __init__(self, files: Sequence[RemoteFile], on_progress: OnProgress | None) -> None:
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._num_files = len(files)
        self._total = sum(file.size or 0 for file in files)
        self._received: dict[str, int] = {}
        self._num_finished = 0

    def update(self, name: str, num_bytes: int, num_finished: int = 0) -> None:
        """Set the bytes received under a name; `num_finished` more files are complete."""
        with self._lock:
            self._received[name] = num_bytes
            self._num_finished += num_finished
            if self._on_progress is not None:
                done = sum(self._received.values())
                total = max(self._total, done)
                self._on_progress(Progress(self._num_finished, self._num_files, done, total))

    def keep_complete(self, files: Sequence[RemoteFile], folder: Path) -> list[RemoteFile]:
        """Count the files that are complete in the folder; return the others."""
        pending = []
        for file in files:
            target = folder / file.path
            if target.is_file() and is_right(target, file):
                self.update(file.path, target.stat().st_size, 1)
            else:
                pending.append(file)
        return pending


def is_right(path: Path, file: RemoteFile) -> bool:
    """True if the file at `path` has the size and digest of the remote file."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        return False
    with path.open("rb") as content:
        if file.sha256 is not None:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.sha256
        if file.git_oid is not None:
            blob = b"blob %d\0" % size + content.read()
            return hashlib.sha1(blob).hexdigest() == file.git_oid
    return True


def place(file: RemoteFile, folder: Path, source: str) -> None:
    """Move a finished file from PARTS to its place. Raises WrongContent if it is not the right one."""
    part, target = folder / PARTS / file.path, folder / file.path
    if not is_right(part, file):
        size = part.stat().st_size
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        part.unlink()
        expected = f"sha256 {file.sha256}" if file.sha256 else f"git blob {file.git_oid}"
        raise WrongContent(
            f"{file.path} of {source} is not the expected file: it has {size} bytes and sha256 "
            f"{found}, not {file.size or size} bytes and {expected}. It was discarded. A mirror may "
            "be out of date: use another endpoint. For a URL, give the new digest if you want the "
            "new content"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
