"""The store of stage outputs: returns a finished one, or builds and publishes it atomically.

ROOT/STAGE/KEY16/3          the third attempt at a key: content and manifest.json, finished,
verified on each use ROOT/STAGE/KEY16/3.partial  being built; the next attempt of a resumable stage
continues it ROOT/STAGE/KEY16/3.damaged  failed verification or has no manifest; never used or
continued ROOT/STAGE/KEY16/3.removed  being deleted by garbage collection
ROOT/STAGE/KEY16/3.verified files that passed verification, with their times ROOT/.locks  ROOT/.logs
locks of builders and users of the store; output of stage commands ROOT/.served
weights observed behind served baselines

The newest finished attempt is the artifact of the key. Earlier ones are kept for the runs that link
to them.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_core.memory.devices import describe_bytes
from durable import FULL_DISK_ERRORS, LockHeld, find_holder, is_locked, locked, publish, sync
from heartbeat import heartbeat
from redaction import redacted
from tasks.artifacts.artifact import (
    ALGORITHMS,
    MANIFEST_NAME,
    STAMP_SUFFIX,
    Artifact,
    DamagedArtifact,
    Output,
    StoreError,
    content_digest,
    list_files,
    read_manifest,
    verify_directory,
)
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH, StageKey, code_version

logger = logging.getLogger(__name__)

Build = Callable[[Path], Mapping[str, Any] | Output]

UNWRITABLE_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
UNLOCKABLE_ERRORS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a mount without locks
# From mkdir: a file has that name, or the file system is like /proc.
NO_FOLDER_ERRORS = (errno.EEXIST, errno.ENOENT)
PROBE_BYTES = 64 * 1024
LOCKS, LOGS = ".locks", ".logs"
FINISHED, PARTIAL, DAMAGED, REMOVED = "", ".partial", ".damaged", ".removed"
_ATTEMPT = re.compile(r"(\d+)(|\.partial|\.damaged|\.removed)")
_KEY_FOLDER = re.compile(rf"\w+/[0-9a-f]{{{SHORT_KEY_LENGTH}}}")


@dataclass(frozen=True)
class Attempt:
    """One attempt at an artifact: a numbered folder below its key."""

    path: Path
    number: int
    state: str  # FINISHED, PARTIAL, DAMAGED or REMOVED; the suffix of its name

    @property
    def stage(self) -> str:
        return self.path.parent.parent.name

    @property
    def short_key(self) -> str:
        return self.path.parent.name


class ArtifactStore:
    """Artifacts in one directory, which several processes and hosts may share."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def key_folder(self, stage: str, key: str) -> Path:
        """Returns the folder with the attempts at a key."""
        return self.root / stage / key[:SHORT_KEY_LENGTH]

    def log_path(self, stage: str, key: str) -> Path:
        """Returns the log file of a stage's commands, which is not part of the content.

        All attempts at a key share it, so that a new command waits for processes left by a killed
        one.
        """
        return self.root / LOGS / f"{stage}-{key[:SHORT_KEY_LENGTH]}.log"

    def lock_path(self, stage: str, key: str) -> Path:
        """Returns the lock held while the key is built."""
        return self.root / LOCKS / f"{stage}-{key[:SHORT_KEY_LENGTH]}.lock"

    def check_writable(self) -> None:
        """Writes and removes a small file in the store; raises StoreError if that fails."""
        with self.disk_errors(NO_FOLDER_ERRORS):
            locks = self.root / LOCKS
            locks.mkdir(parents=True, exist_ok=True)
            probe = locks / f".probe-{platform.node()}-{os.getpid()}"
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
                sync(probe)
            finally:
                probe.unlink(missing_ok=True)

    def lookup(self, stage: str, key: str) -> Artifact | None:
        """Returns the finished, verified artifact, or None; logs a damaged one."""
        try:
            return self.check(stage, key)
        except DamagedArtifact as damage:
            logger.warning("artifact %s is damaged: %s", self._newest(stage, key), damage)
            return None

    def check(self, stage: str, key: str) -> Artifact | None:
        """Like `lookup`, but raises DamagedArtifact for a damaged artifact."""
        directory = self._newest(stage, key)
        if directory is None:
            return None
        try:
            return verify_directory(directory, stage, key)
        except DamagedArtifact:
            if directory.exists():
                raise
            return None  # removed by garbage collection

    def builder(self, stage: str, key: str) -> str | None:
        """Returns the builder of this key, as "pid 12 on node3 since TIME", or None."""
        return find_holder(self.lock_path(stage, key))

    def unfinished(self, stage: str, key: str) -> Path | None:
        """Returns the folder of the newest attempt at the key if it is unfinished."""
        attempts = _attempts_in(self.key_folder(stage, key))
        begun = [attempt for attempt in attempts if attempt.state in (FINISHED, PARTIAL)]
        return begun[-1].path if begun and begun[-1].state == PARTIAL else None

    def attempts(self) -> list[Attempt]:
        """Returns every attempt at every key, ignoring links and unrelated files."""
        folders = [
            folder
            for folder in sorted(self.root.glob("*/*"))
            if _KEY_FOLDER.fullmatch(folder.relative_to(self.root).as_posix())
            and not folder.is_symlink()
            and not folder.parent.is_symlink()
        ]
        return [attempt for folder in folders for attempt in _attempts_in(folder)]

    def finished(self, stage: str) -> list[tuple[Path, dict[str, Any]]]:
        """Returns folders and manifests of finished attempts, newest first, unverified."""
        found = []
        for attempt in self.attempts():
            if (attempt.stage, attempt.state) == (stage, FINISHED):
                with contextlib.suppress(OSError, ValueError):  # damaged; a lookup logs it
                    found.append((attempt.path, read_manifest(attempt.path)))
        return sorted(found, key=lambda pair: pair[1]["ended_at"], reverse=True)

    def produce(
        self, parts: StageKey, build: Build, *, resumable: bool = False, force: bool = False
    ) -> tuple[Artifact, bool]:
        """Returns the artifact of this key and whether it was cached; else calls `build`.

        `build` writes its files into the given directory and returns the metrics for the manifest,
        or an Output with the digests of files it hashed while writing; these are verified on the
        next use. Only one process builds a key: others wait, and use its result.
        `force` builds even if an artifact exists, which is kept as an earlier attempt. A
        `resumable` build gets the directory of an unfinished newest attempt, otherwise the
        directory is empty. Raises StoreError if the store is full or not writable, and whatever
        `build` raises.
        """
        stage, key = parts.stage, parts.key
        if not force and (artifact := self.lookup(stage, key)) is not None:
            return artifact, True
        self.check_writable()
        with self.disk_errors(), contextlib.ExitStack() as lock:
            purpose = f"which builds {stage} {key[:SHORT_KEY_LENGTH]}"
            lock.enter_context(locked(self.lock_path(stage, key), waiting=purpose))
            if not force and (artifact := self._lookup_or_set_aside(stage, key)) is not None:
                return artifact, True
            partial = self._open_attempt(stage, key, resumable)
            started_at, start = _utc_now(), time.monotonic()
            built = build(partial)
            output = built if isinstance(built, Output) else Output(built, {})
            times = {
                "started_at": started_at,
                "ended_at": _utc_now(),
                "seconds": time.monotonic() - start,
            }
            return self._publish(parts, partial, output, times), False

    def in_use(self) -> AbstractContextManager[None]:
        """Blocks garbage collection, so that artifacts can be recorded or copied."""
        return self._store_locked(True, "which collects garbage")

    def collecting(self) -> AbstractContextManager[None]:
        """Waits until no process is inside `in_use`, and keeps others out meanwhile."""
        return self._store_locked(False, "or for exports and runs that use the store")

    def remove(self, attempt: Attempt) -> bool:
        """Deletes an attempt, and the rest of its key with the last one. Call inside `collecting`.

        Returns False if the key is being built, possibly by a command that outlived its run.
        """
        stage, key = attempt.stage, attempt.short_key
        with self.disk_errors():
            try:
                with locked(self.lock_path(stage, key)):
                    if is_locked(self.log_path(stage, key)):
                        return False
                    # a crash must not leave half an artifact
                    removed = attempt.path.with_suffix(REMOVED)
                    attempt.path.rename(removed)
                    shutil.rmtree(removed)
                    removed.with_suffix(STAMP_SUFFIX).unlink(missing_ok=True)
                    if not _attempts_in(attempt.path.parent):
                        self._forget(stage, key)
            except LockHeld:
                return False
        return True

    @contextlib.contextmanager
    def disk_errors(self, further_errors: tuple[int, ...] = ()) -> Iterator[None]:
        """Turns errors about a full, read-only or unlockable store into StoreError."""
        try:
            yield
        except OSError as error:
            problems = dict.fromkeys((*UNWRITABLE_ERRORS, *further_errors), "cannot be written")
            problems |= dict.fromkeys(FULL_DISK_ERRORS, "has no space left")
            problems |= dict.fromkeys(UNLOCKABLE_ERRORS, "is mounted without locks")
            problem = problems.get(error.errno or 0)
            if isinstance(error, StoreError) or not problem or not self._is_about_store(error):
                raise
            raise StoreError(
                f"the artifact store {self.root} {problem}: {error}. {_describe_space(self.root)}. "
                "Finished artifacts are untouched. Free space (dapo runs gc removes unused "
                "artifacts), correct permissions or mount (Lustre: -o flock), or set store.path to "
                "another directory"
            ) from error

    def _forget(self, stage: str, key: str) -> None:
        """Deletes the folder, logs and lock of a locked key without attempts."""
        with contextlib.suppress(OSError):  # not empty
            self.key_folder(stage, key).rmdir()
        log_path = self.log_path(stage, key)
        for path in log_path.parent.glob(f"{log_path.stem}*"):  # also those of several servers
            if not is_locked(path):
                path.unlink()
        self.lock_path(stage, key).unlink()

    def _newest(self, stage: str, key: str) -> Path | None:
        """The folder of the newest finished attempt."""
        attempts = _attempts_in(self.key_folder(stage, key))
        return next(
            (attempt.path for attempt in reversed(attempts) if attempt.state == FINISHED), None
        )

    def _lookup_or_set_aside(self, stage: str, key: str) -> Artifact | None:
        """The newest attempt that passes verification; damaged ones are renamed."""
        while (directory := self._newest(stage, key)) is not None:
            try:
                return verify_directory(directory, stage, key)
            except DamagedArtifact as damage:
                aside = directory.with_suffix(DAMAGED)
                directory.rename(aside)
                logger.warning("renamed %s to %s: it is damaged: %s", directory, aside.name, damage)
        return None

    def _open_attempt(self, stage: str, key: str, resumable: bool) -> Path:
        left = self.unfinished(stage, key)
        if left is not None and resumable:
            logger.info("%s resumes an earlier attempt in %s", stage, left)
            (left / MANIFEST_NAME).unlink(missing_ok=True)
            return left
        if left is not None:
            aside = left.with_suffix(DAMAGED)
            left.rename(aside)
            logger.warning("renamed %s to %s: the attempt did not finish", left, aside.name)
        folder = self.key_folder(stage, key)
        number = 1 + max((attempt.number for attempt in _attempts_in(folder)), default=0)
        partial = folder / f"{number}{PARTIAL}"
        partial.mkdir(parents=True)
        return partial

    @heartbeat(lambda: "publishing a stage's output")
    def _publish(
        self, parts: StageKey, partial: Path, output: Output, times: Mapping[str, Any]
    ) -> Artifact:
        """Write the manifest and rename the directory to its final name, durably and atomically."""
        if (partial / MANIFEST_NAME).exists():
            raise StoreError(
                f"stage {parts.stage} wrote {partial / MANIFEST_NAME}, a name reserved for the "
                "store"
            )
        entries = list_files(partial, digests=output.digests)
        unwritten = output.digests.keys() - {entry.path for entry in entries}
        if unwritten or any(entry.algorithm not in ALGORITHMS for entry in entries):
            raise StoreError(
                f"stage {parts.stage} returned digests for files it did not write, or with an "
                f"unknown algorithm: {dict(output.digests)}"
            )
        digest = content_digest(entries)
        manifest = {
            "stage": parts.stage,
            "key": parts.key,
            "digest": digest,
            "files": [entry.row() for entry in entries],
            "inputs": dict(parts.inputs),
            "config": redacted(parts.config),
            "code_digest": parts.code_digest,
            "code": code_version(),
            "versions": dict(parts.versions),
            "host": platform.node(),
            **times,
            "metrics": redacted(output.metrics),
        }
        (partial / MANIFEST_NAME).write_text(
            json.dumps(manifest, indent=2, default=_plain_number) + "\n"
        )
        final = partial.with_suffix(FINISHED)
        publish(partial, final)
        for folder in (final.parent.parent, self.root):  # may hold new names
            sync(folder)
        return Artifact(parts.stage, parts.key, str(final), digest)

    @contextlib.contextmanager
    def _store_locked(self, shared: bool, waiting: str) -> Iterator[None]:
        path = self.root / LOCKS / "store.lock"
        with contextlib.ExitStack() as lock:
            with self.disk_errors():
                path.parent.mkdir(exist_ok=True)
                lock.enter_context(locked(path, shared=shared, waiting=waiting))
            yield

    def _is_about_store(self, error: OSError) -> bool:
        if error.filename is None:
            return error.errno in FULL_DISK_ERRORS  # write() on an open file does not name it
        place = Path(os.fsdecode(error.filename))
        return place.is_relative_to(self.root) or self.root.is_relative_to(place)


def stage_log_of(output: Path) -> Path | None:
    """The log of the stage whose output this folder in a store is; None for other folders."""
    key_folder = output.resolve().parent
    store, stage, key = key_folder.parent.parent, key_folder.parent.name, key_folder.name
    is_in_store = _KEY_FOLDER.fullmatch(f"{stage}/{key}") and (store / LOCKS).is_dir()
    return ArtifactStore(store).log_path(stage, key) if is_in_store else None


def _attempts_in(folder: Path) -> list[Attempt]:
    """The attempts in the folder of a key, by number; empty if there is no such folder."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    attempts = [
        Attempt(path, int(match[1]), match[2])
        for path in paths
        if (match := _ATTEMPT.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(attempts, key=lambda attempt: attempt.number)


def _describe_space(path: Path) -> str:
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    usage = shutil.disk_usage(existing)
    return f"{describe_bytes(usage.free)} of {describe_bytes(usage.total)} are free"


def _utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _plain_number(value: Any) -> Any:
    """Converts a NumPy or torch scalar to a plain number."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a metric of type {type(value).__name__} cannot be written to {MANIFEST_NAME}")
