"""The store of stage outputs: finds a finished one, or has it built once and publishes it in one step.

ROOT/STAGE/KEY16/           content and manifest.json: finished, verified on each use
ROOT/STAGE/KEY16.DIGEST16/  what stood there before it was built again by force, for the runs that used it
ROOT/.work/STAGE-KEY16/     being built; kept after a failed attempt of a resumable stage; KEY16.forced by force
ROOT/.damaged/STAGE-KEY16-TIME/   moved aside, never deleted
ROOT/.removed/STAGE-KEY16-TIME/   no longer part of the store, being deleted
ROOT/.locks  ROOT/.verified       who builds what; which files were found right, and when
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from pathlib import Path
from typing import Any

from dapo_core.durable import sync, sync_tree
from dapo_core.errors import StoreError
from tasks.artifacts import lock
from tasks.artifacts.artifact import (
    MANIFEST_NAME,
    Artifact,
    artifact_at,
    content_digest,
    content_files,
    file_entry,
    read_manifest,
    subfolders,
)
from tasks.artifacts.stage_key import SHORT_KEY_LENGTH, StageKey
from tasks.artifacts.verify import DamagedArtifact, identify, verify_directory, write_stamp

logger = logging.getLogger(__name__)

Build = Callable[[Path], Mapping[str, Any]]
Replace = Callable[[Artifact], None]

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
NO_FOLDER_ERRORS = (errno.EEXIST, errno.ENOENT)  # from mkdir: a file of that name, or a file system like /proc
PROBE_BYTES = 64 * 1024
_NAME = re.compile(rf"(\w+)-([0-9a-f]{{{SHORT_KEY_LENGTH}}})")


class ArtifactStore:
    """Artifacts under one directory, which several processes and hosts may share."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def directory(self, stage: str, key: str) -> Path:
        """Returns where the artifact of this key is, or would be."""
        return self.root / stage / key[:SHORT_KEY_LENGTH]

    def superseded_directory(self, stage: str, key: str, digest: str) -> Path:
        """Returns where the artifact of this content is, or would be, once another has taken its place."""
        return self.root / stage / f"{key[:SHORT_KEY_LENGTH]}.{digest[:SHORT_KEY_LENGTH]}"

    def working_directory(self, stage: str, key: str, is_forced: bool = False) -> Path:
        """Returns where the artifact of this key is being built, or a failed attempt was left."""
        return self.root / ".work" / (_name(stage, key) + (".forced" if is_forced else ""))

    def log_path(self, stage: str, key: str) -> Path:
        """Returns where the commands of a stage log: outside the content, whose digest a log would change.

        It is the same for each attempt at a key, so that run_command there waits for what a killed one left.
        """
        return self.root / ".logs" / f"{_name(stage, key)}.log"

    def check_writable(self) -> None:
        """Writes and removes a small file in the store; raises StoreError when that cannot be done."""
        with self._disk_errors(NO_FOLDER_ERRORS):
            for folder in (".work", ".locks", ".damaged"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            probe = self.root / ".work" / f".probe-{platform.node()}-{os.getpid()}"
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
                sync(probe)
            finally:
                probe.unlink(missing_ok=True)

    def lookup(self, stage: str, key: str) -> Artifact | None:
        """Returns the finished, verified artifact, or None; a damaged one is moved aside and named in the log."""
        with self._disk_errors():
            directory = self.directory(stage, key)
            if not directory.is_dir():
                return None
            try:
                return self._verify(stage, key)
            except DamagedArtifact as damage:
                logger.warning("artifact %s is damaged: %s", directory, damage)
            self._lock_path(stage, key).parent.mkdir(exist_ok=True)
            # Moved only under the lock: its holder may just have put a good one in its place.
            with lock.held_if_free(self._lock_path(stage, key)) as is_held:
                return self._lookup_locked(stage, key) if is_held else None

    def peek(self, stage: str, key: str) -> Artifact | None:
        """As `lookup`, but changes nothing in the store: raises DamagedArtifact for a damaged one."""
        directory = self.directory(stage, key)
        if not directory.is_dir():
            return None
        return verify_directory(directory, stage, key, self._stamp_path(stage, key), keeps_stamp=False)

    def builder(self, stage: str, key: str) -> str | None:
        """Returns who builds the artifact of this key, as "pid 12 on node3 since TIME"; None when nobody does."""
        path = self._lock_path(stage, key)
        return lock.read_holder(path) if lock.is_held(path) else None

    def find(self, stage: str, key: str, digest: str) -> Artifact | None:
        """Returns the artifact of this content, also a superseded one, or None; only its manifest is read."""
        for directory in (self.directory(stage, key), self.superseded_directory(stage, key, digest)):
            if _digest_at(directory) == digest:
                return Artifact(stage=stage, key=key, path=str(directory), digest=digest)
        return None

    def produce(
        self, parts: StageKey, build: Build, *, resumable: bool = False, replace: Replace | None = None
    ) -> tuple[Artifact, bool]:
        """Returns the artifact of this key and whether it was there already; else has `build` make it.

        `build` writes its files into the directory it is given and returns the metrics to keep in the manifest.
        It runs in one process at a time: others wait, and find its result. What a failed attempt of a
        `resumable` build left is given to the next attempt; of any other, it is moved aside.
        Raises StoreError when the store is full or cannot be written, and whatever `build` raises.

        With `replace` it is built although it is there, and what is there stays until the new one is complete.
        Then the old one moves to `superseded_directory`, unless both have the same bytes, when it stays and the
        new one is dropped. A crash in between leaves the old one there and none under the key. `replace` is told
        the old one twice: where it stands before the build, and where it has moved to; it raises to keep it.
        A forced attempt resumes an earlier forced one, never one that was not: its folder is its own.
        """
        stage, key = parts.stage, parts.key
        if replace is None and (artifact := self.lookup(stage, key)) is not None:
            return artifact, True
        self.check_writable()
        with self._disk_errors(), lock.held(self._lock_path(stage, key)):
            old = self._lookup_locked(stage, key)
            if old is not None:
                if replace is None:
                    return old, True
                replace(old)
            work = self._open_working_directory(parts, resumable, is_forced=replace is not None)
            started_at, start = _utc_now(), time.monotonic()
            metrics = dict(build(work))
            times = {"started_at": started_at, "ended_at": _utc_now(), "seconds": time.monotonic() - start}
            return self._publish(parts, work, {**times, "metrics": metrics}, old, replace), False

    def remove(self, artifact: Artifact, is_used: Callable[[Artifact], bool]) -> bool:
        """Deletes an artifact, with all else of its key if it is the last of it; returns False when it stays.

        It stays while its key is being built, when another stands in its place, and when `is_used`, asked once
        nobody can find it anymore, says so or raises: a run may have found it a moment before.
        """
        stage, key, directory = artifact.stage, artifact.key, Path(artifact.path)
        with self._claimed(stage, key) as is_ours:
            if not is_ours or _digest_at(directory) != artifact.digest:
                return False
            removed = self._move_to(".removed", directory, _name(stage, key))
            with contextlib.ExitStack() as undo:
                undo.callback(os.rename, removed, directory)
                if is_used(artifact):
                    return False
                undo.pop_all()
            sync(directory.parent)
            if not self.directory(stage, key).exists():
                self._stamp_path(stage, key).unlink(missing_ok=True)
            self._tidy(stage, key)
        with self._disk_errors():
            shutil.rmtree(removed)
        return True

    def abandoned_attempts(self) -> list[Path]:
        """Returns the folders of .work at which nobody is, not even a command that outlived its run."""
        return [
            folder
            for folder in subfolders(self.root / ".work")
            if (name := _NAME.fullmatch(folder.name.removesuffix(".forced")))
            and not any(map(lock.is_held, (self._lock_path(*name.groups()), self.log_path(*name.groups()))))
        ]

    def remove_attempt(self, folder: Path, is_wanted: Callable[[], bool]) -> bool:
        """Deletes what an attempt left; returns False when it stays: somebody is at it, or `is_wanted` says so."""
        stage, _, key = folder.name.removesuffix(".forced").rpartition("-")
        with self._claimed(stage, key) as is_ours:
            if not is_ours or not folder.exists() or is_wanted():
                return False
            shutil.rmtree(self._move_to(".removed", folder, folder.name))
            self._tidy(stage, key)
        return True

    def clear_removed(self, is_used: Callable[[Artifact], bool]) -> None:
        """Deletes what a killed process left in .removed; what `is_used` names goes to where `find` looks."""
        for folder in subfolders(self.root / ".removed"):
            if (name := _NAME.match(folder.name)) is None:
                continue  # not ours
            artifact = artifact_at(folder)
            with self._claimed(*name.groups()) as is_ours:
                if not is_ours:
                    continue
                if artifact and not self.find(artifact.stage, artifact.key, artifact.digest) and is_used(artifact):
                    place = self.directory(artifact.stage, artifact.key)
                    if place.exists():
                        place = self.superseded_directory(artifact.stage, artifact.key, artifact.digest)
                    os.rename(folder, place)
                else:
                    shutil.rmtree(folder)
                    self._tidy(*name.groups())

    @contextlib.contextmanager
    def kept_in_place(self, artifact: Artifact) -> Iterator[None]:
        """Has the artifact neither removed nor replaced for the block; waits while its key is being built.

        Several may keep one at once. It may be elsewhere or gone by the time the block begins: look again then.
        """
        with contextlib.ExitStack() as stack:
            with self._disk_errors():
                lock_path = self._lock_path(artifact.stage, artifact.key)
                lock_path.parent.mkdir(exist_ok=True)
                stack.enter_context(lock.shared(lock_path))
            yield

    @contextlib.contextmanager
    def _claimed(self, stage: str, key: str) -> Iterator[bool]:
        """Yields whether nobody builds the key, not even a command on its own; nobody can for the block."""
        with self._disk_errors(), lock.held_if_free(self._lock_path(stage, key)) as is_ours:
            yield is_ours and not lock.is_held(self.log_path(stage, key))

    def _tidy(self, stage: str, key: str) -> None:
        """Deletes logs and lock of a claimed key of which nothing else is left."""
        name = _name(stage, key)
        places = ((self.root / stage).glob(f"{key[:SHORT_KEY_LENGTH]}*"), (self.root / ".work").glob(f"{name}*"))
        if any(any(found) for found in places):
            return
        for path in (self.root / ".logs").glob(f"{name}*"):  # of its commands, and by which they are watched
            if not lock.is_held(path):
                path.unlink()
        self._lock_path(stage, key).unlink()

    def _verify(self, stage: str, key: str) -> Artifact:
        return verify_directory(self.directory(stage, key), stage, key, self._stamp_path(stage, key))

    def _lookup_locked(self, stage: str, key: str) -> Artifact | None:
        directory = self.directory(stage, key)
        if not directory.exists():
            return None
        try:
            return self._verify(stage, key)
        except DamagedArtifact as damage:
            self._move_aside(directory, _name(stage, key), f"it is damaged: {damage}")
            return None

    def _open_working_directory(self, parts: StageKey, resumable: bool, is_forced: bool) -> Path:
        work = self.working_directory(parts.stage, parts.key, is_forced)
        if work.exists() and resumable:
            logger.info("%s resumes what an earlier attempt left in %s", parts.stage, work)
            (work / MANIFEST_NAME).unlink(missing_ok=True)
        elif work.exists():
            self._move_aside(work, work.name, "it is half-written: the attempt that made it did not finish")
        work.mkdir(parents=True, exist_ok=True)
        return work

    def _publish(
        self,
        parts: StageKey,
        work: Path,
        outcome: Mapping[str, Any],
        old: Artifact | None,
        replace: Replace | None,
    ) -> Artifact:
        """Puts the content of the working directory in its final place, durably and in one step."""
        if (work / MANIFEST_NAME).exists():
            raise StoreError(f"stage {parts.stage} wrote {work / MANIFEST_NAME}, a name the store needs itself")
        identities = {relative: identify(work / relative) for relative in sorted(content_files(work))}
        entries = [file_entry(work, relative) for relative in identities]
        digest = content_digest(entries)
        manifest = {
            "stage": parts.stage,
            "key": parts.key,
            "digest": digest,
            "files": [vars(entry) for entry in entries],
            "inputs": dict(parts.inputs),
            "config": dict(parts.config),
            "code_digest": parts.code_digest,
            "versions": dict(parts.versions),
            "host": platform.node(),
            **outcome,
        }
        (work / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2, default=_number) + "\n")
        sync_tree(work)
        if old is not None and replace is not None:
            if old.digest == digest:
                logger.info("built again, with the same bytes: %s stays", old.path)
                shutil.rmtree(work)
                return old
            self._supersede(old, replace)
        final = self.directory(parts.stage, parts.key)
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(work, final)
        sync(final.parent)
        sync(self.root)
        if (other := self.working_directory(parts.stage, parts.key)).exists():
            self._move_aside(other, other.name, "its key was built by force meanwhile, so that nothing resumes it")
        write_stamp(self._stamp_path(parts.stage, parts.key), identities, entries)
        return Artifact(stage=parts.stage, key=parts.key, path=str(final), digest=digest)

    def _supersede(self, old: Artifact, replace: Replace) -> None:
        """Moves the old artifact to where the runs that used it find it; back, when `replace` raises."""
        aside = self.superseded_directory(old.stage, old.key, old.digest)
        has_twin = _digest_at(aside) == old.digest  # of a replacement before
        if has_twin:
            moved = self._move_to(".removed", Path(old.path), _name(old.stage, old.key))
        else:
            os.rename(old.path, moved := aside)
        with contextlib.ExitStack() as undo:
            undo.callback(os.rename, moved, old.path)
            replace(dataclasses.replace(old, path=str(aside)))
            undo.pop_all()
        logger.info("%s made way for a new one; runs that used it find it in %s", old.path, aside)
        if has_twin:
            shutil.rmtree(moved)

    def _move_aside(self, directory: Path, name: str, reason: str) -> None:
        aside = self._move_to(".damaged", directory, name)
        logger.warning("moved %s aside to %s: %s", directory, aside, reason)

    def _move_to(self, folder: str, directory: Path, name: str) -> Path:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        target = self.root / folder / f"{name}-{now}"
        target.parent.mkdir(exist_ok=True)
        os.rename(directory, target)
        return target

    def _lock_path(self, stage: str, key: str) -> Path:
        return self.root / ".locks" / f"{_name(stage, key)}.lock"

    def _stamp_path(self, stage: str, key: str) -> Path:
        return self.root / ".verified" / f"{_name(stage, key)}.json"

    @contextlib.contextmanager
    def _disk_errors(self, further_errors: tuple[int, ...] = ()) -> Iterator[None]:
        """Turns what the operating system says about a full or unwritable store into a StoreError."""
        try:
            yield
        except OSError as error:
            codes = (*FULL_DISK_ERRORS, *UNWRITABLE_ERRORS, *further_errors)
            if isinstance(error, StoreError) or error.errno not in codes or not self._is_about_store(error):
                raise
            what = "has no room left" if error.errno in FULL_DISK_ERRORS else "cannot be written"
            raise StoreError(
                f"the artifact store {self.root} {what}: {error}. {_describe_space(self.root)}. "
                "Finished artifacts are untouched. Make room (nothing reads what .damaged in it holds), "
                "mend the permissions, or set store.path to another directory"
            ) from error

    def _is_about_store(self, error: OSError) -> bool:
        if error.filename is None:
            return error.errno in FULL_DISK_ERRORS  # write() on an open file does not say which
        place = Path(os.fsdecode(error.filename))
        return place.is_relative_to(self.root) or self.root.is_relative_to(place)


def _digest_at(directory: Path) -> str | None:
    """Returns the content digest of the artifact there; None where there is none, or none that can be read."""
    try:
        return read_manifest(directory).get("digest")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _name(stage: str, key: str) -> str:
    return f"{stage}-{key[:SHORT_KEY_LENGTH]}"


def _describe_space(path: Path) -> str:
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    usage = shutil.disk_usage(existing)
    mebi = 1024 * 1024
    return f"{usage.free / mebi:.1f} of {usage.total / mebi:.1f} MiB are free there"


def _utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _number(value: Any) -> Any:
    """Returns a NumPy or torch scalar among the metrics as the number it holds."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"a metric of type {type(value).__name__} cannot be written to {MANIFEST_NAME}")
