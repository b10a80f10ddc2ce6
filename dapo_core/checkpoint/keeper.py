"""Which steps of a training leave a checkpoint, and the last one of a training that is told to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dapo_core.checkpoint.folder import accuracy_of, latest_checkpoint, step_folder
from dapo_core.checkpoint.state import TrainerState
from dapo_core.checkpoint.writer import CheckpointWriter
from dapo_core.errors import CheckpointError, DapoError, WorkerDied
from dapo_core.stopping import StopRequested

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between looks at the checkpoint in flight


class CheckpointKeeper:
    """Has a writer write what is due, and knows the state after the last step, due or not."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer = writer
        self._state: TrainerState | None = None  # after the last step of this attempt
        self._polled_seconds = 0.0

    def keep(self, state: TrainerState, is_due: bool) -> None:
        """Begin a checkpoint of the step, when one is due or the step validated among the best."""
        self.writer.poll()
        self._state = state
        accuracy = accuracy_of(state.metrics)
        if is_due or (accuracy is not None and self.writer.is_among_best(accuracy)):
            self.writer.begin(state)

    def poll(self) -> None:
        """Publish what is written while groups are waited for: a kill must not cost a checkpoint that is there."""
        started = time.perf_counter()
        self.writer.poll(POLL_SECONDS)
        self._polled_seconds += time.perf_counter() - started

    def take_polled_seconds(self) -> float:
        """Seconds that polls took since the last call."""
        seconds, self._polled_seconds = self._polled_seconds, 0.0
        return seconds

    @contextmanager
    def ending(self) -> Iterator[None]:
        """For the steps of a training: however they end, no checkpoint is lost that can be had.

        After the last step, the final ones are kept. After an error of ours the one in flight is finished. When
        training was asked to stop, the last step has one too: weights, optimizer and random generators must then
        be as they were after it.
        """
        try:
            yield
            self.writer.finish()
            self.writer.keep_final()
        except WorkerDied:
            raise
        except (DapoError, StopRequested) as reason:
            try:
                self.writer.finish()
                if isinstance(reason, StopRequested):
                    self._save_last()
            except (CheckpointError, WorkerDied) as error:  # is not why training ends, and begins nothing again
                logger.error("the checkpoint that was being written is lost: %s", error)
            raise

    def _save_last(self) -> None:
        folder = self.writer.folder
        if self._state is not None and latest_checkpoint(folder) != step_folder(folder, self._state.step):
            self.writer.begin(self._state)
            self.writer.finish()
