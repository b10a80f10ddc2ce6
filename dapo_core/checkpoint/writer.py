"""Writes a training's checkpoints while it goes on, and keeps those that are the newest or the best."""

from __future__ import annotations

import errno
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dapo_core.checkpoint.folder import (
    CONFIG_FILE,
    HUGGINGFACE_FOLDER,
    LATEST_FILE,
    NAMES_FILE,
    PARTIAL,
    accuracy_of,
    best_checkpoints,
    checkpoint_folders,
    copy_model_files,
    latest_checkpoint,
    model_files,
    step_folder,
    step_folders,
)
from dapo_core.checkpoint.state import TrainerState, read_step_metrics, state_files
from dapo_core.config.loading import dump_config
from dapo_core.durable import sync, sync_tree
from dapo_core.errors import CheckpointError
from dapo_core.model_folder import weight_names

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShardWriter(Protocol):
    """What holds the weights and the optimizer's state, and can write them."""

    def save(self, folder: str, asynchronous: bool) -> None:
        """Write all shards into the folder; asynchronous: return when the state is copied, and write meanwhile."""

    def is_saved(self) -> bool:
        """Whether the asynchronous save has ended; raises the OSError or CheckpointError that ended it."""

    def checkpoint_bytes(self) -> int:
        """What the shards take on disk."""


@dataclass(frozen=True)
class Published:
    """A checkpoint that is complete, and what it took."""

    path: Path
    num_bytes: int
    write_seconds: float  # from the beginning until it was complete
    waited_seconds: float  # those of them in which training did not go on


@dataclass
class _Write:
    """A checkpoint being written."""

    target: Path
    partial: Path
    accuracy: float | None
    num_bytes: int = 0  # that it needs
    begun_at: float = field(default_factory=time.perf_counter)
    waited_seconds: float = 0.0


class CheckpointWriter:
    """Writes one checkpoint at a time into `folder`, which it must have to itself (`locked`).

    A checkpoint is written into a folder of another name, and counts when all of it is on disk. Until then the
    one before it stays what a training goes on from, however the writer ends. What cannot be written is removed,
    and told in a CheckpointError.
    """

    def __init__(self, folder: Path, model_path: Path, shards: ShardWriter, config: TrainingConfig) -> None:
        self.folder = folder
        self.model_path = model_path
        self.shards = shards
        self.config = config
        self._texts = {  # of files that are the same in every checkpoint
            CONFIG_FILE: dump_config(config),
            NAMES_FILE: json.dumps(sorted(weight_names(model_path))),
        }
        self._in_flight: _Write | None = None
        self._polled_at = -math.inf

    def begin(self, state: TrainerState) -> Published | None:
        """Write a checkpoint; with checkpoint.asynchronous, a later `poll`, `finish` or `begin` publishes it.

        The one in flight is finished first. Returns what was published, this one or that, if any.
        Raises CheckpointError before it writes when the disk lacks the room.
        """
        published = self.finish()
        target = step_folder(self.folder, state.step)
        write = _Write(target, _partial(target), accuracy_of(state.metrics))
        with self._writing(write):
            self._write_files(write, state)
            self.shards.save(str(write.partial), self.config.checkpoint.asynchronous)
            if self.config.checkpoint.asynchronous:
                self._in_flight = write
                return published
            self._publish(write)
        return self._conclude(write)

    def poll(self, every_seconds: float = 0.0) -> Published | None:
        """Publish the checkpoint in flight if its shards are written; else None.

        However often called, it looks once in so many seconds only.
        """
        now = time.monotonic()
        if now < self._polled_at + every_seconds:
            return None
        self._polled_at = now
        return self._complete(wait=False)

    def finish(self) -> Published | None:
        """Publish the checkpoint in flight, if any, waiting for its shards."""
        return self._complete(wait=True)

    def keep_final(self) -> None:
        """Leave what a finished training keeps: the last checkpoint and the checkpoint.keep_best best.

        Also when this attempt wrote none: one that was killed here left more.
        """
        tidy(self.folder, 1, self.config.checkpoint.keep_best)

    def is_among_best(self, accuracy: float) -> bool:
        """Whether a checkpoint of this validation/accuracy would now be kept as one of the best."""
        keep_best = self.config.checkpoint.keep_best
        rivals = [accuracy_of(read_step_metrics(path)) for path in best_checkpoints(self.folder, keep_best)]
        if self._in_flight is not None:
            rivals.append(self._in_flight.accuracy)
        return sum(rival is not None and rival >= accuracy for rival in rivals) < keep_best

    def _write_files(self, write: _Write, state: TrainerState) -> None:
        """Everything of a checkpoint but the shards, for which there is room as well."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync(self.folder.parent)
        tidy(self.folder, self.config.checkpoint.keep_last, self.config.checkpoint.keep_best)
        if write.target.exists():
            raise CheckpointError("there is one already, from which this training should have gone on")
        texts = {**state_files(state), **self._texts}
        write.num_bytes = (
            self.shards.checkpoint_bytes()
            + sum(len(text.encode()) for text in texts.values())
            + sum(path.stat().st_size for path in model_files(self.model_path))
        )
        if shutil.disk_usage(self.folder).free < write.num_bytes:
            raise OSError(errno.ENOSPC, "nothing was written")
        write.partial.mkdir()
        for name, text in texts.items():
            (write.partial / name).write_text(text, encoding="utf-8")
        copy_model_files(self.model_path, write.partial / HUGGINGFACE_FOLDER)

    def _complete(self, wait: bool) -> Published | None:
        write = self._in_flight
        if write is None:
            return None
        with self._writing(write):
            while not self.shards.is_saved():
                if not wait:
                    return None
                time.sleep(POLL_SECONDS)
            self._publish(write)
        return self._conclude(write)

    def _publish(self, write: _Write) -> None:
        """All of it on disk, its name, `latest`; what needs room comes before the first rename."""
        self._in_flight = None  # an interrupt in here leaves it to the next attempt, which begins it anew
        sync_tree(write.partial)
        latest = _partial(self.folder / LATEST_FILE)
        latest.write_text(f"{write.target.name}\n", encoding="utf-8")
        sync(latest)
        write.partial.rename(write.target)
        sync(self.folder)
        latest.replace(self.folder / LATEST_FILE)
        sync(self.folder)

    def _conclude(self, write: _Write) -> Published:
        """Say what was published, and remove what it replaces."""
        published = Published(
            path=write.target,
            num_bytes=sum(path.stat().st_size for path in write.target.rglob("*") if path.is_file()),
            write_seconds=time.perf_counter() - write.begun_at,
            waited_seconds=write.waited_seconds,
        )
        logger.info(
            "checkpoint %s: %s bytes in %.1f s, of which training waited %.1f s",
            write.target.name,
            f"{published.num_bytes:,}",
            published.write_seconds,
            published.waited_seconds,
        )
        tidy(self.folder, self.config.checkpoint.keep_last, self.config.checkpoint.keep_best)
        return published

    @contextmanager
    def _writing(self, write: _Write) -> Iterator[None]:
        """Count the time inside; remove and explain what cannot be written."""
        entered_at = time.perf_counter()
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._in_flight = None
            _remove(write.partial)
            raise CheckpointError(self._explain(write, error)) from error
        finally:
            write.waited_seconds += time.perf_counter() - entered_at

    def _explain(self, write: _Write, error: Exception) -> str:
        latest, settings = latest_checkpoint(self.folder), self.config.checkpoint
        way_on = f"training can go on from {latest.name}" if latest else "there is none yet to go on from"
        if not _is_for_want_of_room(error):
            return f"checkpoint {write.target.name} could not be written to {self.folder}: {error}; {way_on}"
        return (
            f"checkpoint {write.target.name} needs {write.num_bytes:,} bytes, and "
            f"{shutil.disk_usage(self.folder).free:,} are free in {self.folder} ({error}); {way_on}. Make room, "
            f"lower checkpoint.keep_last={settings.keep_last} or checkpoint.keep_best={settings.keep_best}, "
            "beside which one more must fit, or take an --output or a store.path on a larger disk"
        )


def tidy(folder: Path, keep_last: int, keep_best: int) -> None:
    """Remove what killed attempts left, and all checkpoints but the newest and the best."""
    for leftover in folder.glob(f"*{PARTIAL}"):
        _remove(leftover)
    kept = {*checkpoint_folders(folder)[-keep_last:], *best_checkpoints(folder, keep_best)}
    for path in step_folders(folder):
        if path not in kept:
            logger.info("checkpoint %s is removed", path.name)
            _remove(path)


def _partial(path: Path) -> Path:
    """A name beside it of this attempt alone: what still runs of a killed one must not write there."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _is_for_want_of_room(error: BaseException | None) -> bool:
    """Also when that is what led to the error, as in a CheckpointError of a rank."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            return True
        error = error.__cause__
    return False


def _remove(path: Path) -> None:
    """Remove a checkpoint or a leftover; what cannot be removed only takes room, and is tried again."""
    try:
        if path.suffix != PARTIAL:  # half removed, it must not look complete
            path = path.rename(_partial(path))
            sync(path.parent)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed and takes room: %s", path, error)
