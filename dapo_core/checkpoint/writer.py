"""Writes checkpoints in the background of training, and keeps the newest and the best."""

from __future__ import annotations

import errno
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dapo_core.checkpoint.folder import (
    CONFIG_FILE,
    DAMAGED,
    HUGGINGFACE_FOLDER,
    LATEST_FILE,
    NAMES_FILE,
    accuracy_of,
    best_checkpoints,
    latest_checkpoint,
    partial_path,
    remove,
    step_folder,
    tidy,
)
from dapo_core.checkpoint.manifest import training_id, write_manifest
from dapo_core.checkpoint.state import TrainerState, read_state_without_groups, state_files
from dapo_core.config.loading import dump_config
from dapo_core.errors import CheckpointError, DapoError, WorkerDied
from dapo_core.machine.digests import Part, content_part
from dapo_core.machine.stopping import StopRequested
from dapo_core.model.folder import copy_model_files, model_files
from dapo_core.model.lora import ADAPTER_CONFIG, adapter_config
from dapo_core.model.tensors import weight_names
from durable import FULL_DISK_ERRORS, publish, sync, write_atomically

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between polls of the ranks while the sampler waits for groups
WAIT_SECONDS = 0.05  # between polls of the ranks while training waits for the shards


class ShardWriter(Protocol):
    """Writes the ranks' shards: cluster.policy_group.PolicyGroup."""

    def save(self, folder: str, asynchronous: bool) -> None: ...

    def is_saved(self) -> bool: ...

    def checkpoint_bytes(self) -> int: ...


@dataclass
class _Write:
    """A checkpoint being written."""

    target: Path
    partial: Path
    accuracy: float | None
    step: int
    files: dict[str, Part] = field(default_factory=dict)  # files not written by ranks
    num_bytes: int = 0  # required disk space
    started_at: float = field(default_factory=time.perf_counter)
    waited_seconds: float = 0.0  # time that training was blocked


class CheckpointWriter:
    """Writes one checkpoint at a time to `folder`, which must be locked (`lock_checkpoints`).

    A checkpoint is written under a temporary name and counts only once it is completely on disk;
    until then training would resume from the previous one. If writing fails, the partial checkpoint
    is removed and a CheckpointError gives the reason.
    """

    def __init__(
        self, folder: Path, model_path: Path, shards: ShardWriter, config: TrainingConfig
    ) -> None:
        self.folder = folder
        self.model_path = model_path
        self.shards = shards
        self.config = config
        self._training_id = training_id(folder)
        self._constant_files = {  # the same in every checkpoint
            CONFIG_FILE: dump_config(config).encode(),
            NAMES_FILE: json.dumps(sorted(weight_names(model_path))).encode(),
        }
        if config.train.lora.rank:
            self._constant_files[ADAPTER_CONFIG] = adapter_config(config.train.lora, model_path)
        self._last_state: TrainerState | None = None  # after the latest step, saved or not
        self._in_flight: _Write | None = None
        self._polled_at = -math.inf
        self._polled_seconds = 0.0

    def keep(self, state: TrainerState, is_due: bool) -> None:
        """Start a checkpoint of the step if one is due or its accuracy is among the best."""
        self._complete(wait=False)
        self._last_state = state
        accuracy = accuracy_of(state.metrics)
        if is_due or (accuracy is not None and self._is_among_best(accuracy)):
            self.begin(state)

    def poll(self) -> None:
        """Publish the checkpoint in flight once it is written; asks the ranks once a second.

        Called while waiting for groups, so a kill does not lose a finished checkpoint.
        """
        started = time.perf_counter()
        if started < self._polled_at + POLL_SECONDS:
            return
        self._polled_at = started
        self._complete(wait=False)
        self._polled_seconds += time.perf_counter() - started

    def take_polled_seconds(self) -> float:
        """Return the seconds spent in polls since the last call."""
        seconds, self._polled_seconds = self._polled_seconds, 0.0
        return seconds

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Finish or save checkpoints when the training steps in the block end or fail.

        After the last step, old checkpoints are removed. After a DapoError, the checkpoint in
        flight is finished. After a stop request, the last step is saved too; weights, optimizer and
        random generators must still be in that step's state.
        """
        try:
            yield
            self.finish()
            self._tidy(keep_last=1)
            for damaged in self.folder.glob(f"*{DAMAGED}"):
                remove(damaged)
        except WorkerDied:
            raise
        except (DapoError, StopRequested) as reason:
            try:
                self.finish()
                if isinstance(reason, StopRequested):
                    self._save_last()
            except (CheckpointError, WorkerDied) as error:  # must not mask the original error
                logger.error("lost the checkpoint being written: %s", error)
            raise

    def begin(self, state: TrainerState) -> None:
        """Finish the checkpoint in flight and start the next one.

        With checkpoint.asynchronous, a later call publishes it. Raises CheckpointError before
        writing anything if disk space is short.
        """
        self.finish()
        target = step_folder(self.folder, state.step)
        write = _Write(target, partial_path(target), accuracy_of(state.metrics), state.step)
        with self._writing(write):
            self._write_files(write, state)
            self.shards.save(str(write.partial), self.config.checkpoint.asynchronous)
            self._in_flight = write
        if not self.config.checkpoint.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if any, and publish it."""
        self._complete(wait=True)

    def _is_among_best(self, accuracy: float) -> bool:
        """True if a checkpoint with this validation accuracy would be kept as one of the best."""
        keep_best = self.config.checkpoint.keep_best
        best = best_checkpoints(self.folder, keep_best)
        rivals = [accuracy_of(read_state_without_groups(path).metrics) for path in best]
        if self._in_flight is not None:
            rivals.append(self._in_flight.accuracy)
        return sum(rival is not None and rival >= accuracy for rival in rivals) < keep_best

    def _save_last(self) -> None:
        state, latest = self._last_state, latest_checkpoint(self.folder)
        if state is not None and latest != step_folder(self.folder, state.step):
            self.begin(state)
            self.finish()

    def _write_files(self, write: _Write, state: TrainerState) -> None:
        """Check disk space for the whole checkpoint, then write everything but the shards."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sync(self.folder.parent)
        self._tidy(self.config.checkpoint.keep_last)
        if write.target.exists():
            raise CheckpointError("it already exists: training should have continued from it")
        contents = {**state_files(state), **self._constant_files}
        write.num_bytes = (
            self.shards.checkpoint_bytes()
            + sum(map(len, contents.values()))
            + sum(path.stat().st_size for path in model_files(self.model_path))
        )
        if shutil.disk_usage(self.folder).free < write.num_bytes:
            raise OSError(errno.ENOSPC, "nothing was written")
        write.partial.mkdir()
        for name, content in contents.items():
            write.files[name] = content_part(content)
            (write.partial / name).write_bytes(content)
        copy_model_files(self.model_path, write.partial / HUGGINGFACE_FOLDER)
        for path in model_files(write.partial / HUGGINGFACE_FOLDER):
            name = path.relative_to(write.partial).as_posix()
            write.files[name] = content_part(path.read_bytes())

    def _complete(self, wait: bool) -> None:
        write = self._in_flight
        if write is None:
            return
        with self._writing(write):
            while not self.shards.is_saved():
                if not wait:
                    return
                time.sleep(WAIT_SECONDS)
            self._in_flight = None  # if interrupted here, the next attempt rewrites this step
            write_manifest(write.partial, self._training_id, write.step, write.files)
            publish(write.partial, write.target)
            write_atomically(self.folder / LATEST_FILE, f"{write.target.name}\n")
        logger.info(
            "checkpoint %s: %s bytes in %.1f s; training waited %.1f s",
            write.target.name,
            f"{sum(path.stat().st_size for path in write.target.rglob('*') if path.is_file()):,}",
            time.perf_counter() - write.started_at,
            write.waited_seconds,
        )
        self._tidy(self.config.checkpoint.keep_last)

    def _tidy(self, keep_last: int) -> None:
        settings = self.config.checkpoint
        tidy(self.folder, keep_last, settings.keep_best, settings.keep_steps)

    @contextmanager
    def _writing(self, write: _Write) -> Iterator[None]:
        """Measure the time; on failure remove the partial checkpoint and raise CheckpointError."""
        entered_at = time.perf_counter()
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._in_flight = None
            remove(write.partial)
            raise CheckpointError(self._explain(write, error)) from error
        finally:
            write.waited_seconds += time.perf_counter() - entered_at

    def _explain(self, write: _Write, error: Exception) -> str:
        latest, settings = latest_checkpoint(self.folder), self.config.checkpoint
        fallback = "there is no earlier checkpoint"
        if latest:
            fallback = f"training can continue from {latest.name}"
        name = f"checkpoint {write.target.name}"
        if not _is_disk_full(error):
            return f"{name} could not be written to {self.folder}: {error}; {fallback}"
        return (
            f"{name} needs {write.num_bytes:,} bytes, but only "
            f"{shutil.disk_usage(self.folder).free:,} are free in {self.folder} ({error}); "
            f"{fallback}. Free some space, lower checkpoint.keep_last={settings.keep_last} or "
            f"checkpoint.keep_best={settings.keep_best} (one more must fit besides those), or "
            "choose an --output or a store.path on a larger disk"
        )


def _is_disk_full(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:
            return True
        error = error.__cause__
    return False
