"""How often training is started again after one of its processes died, and when it is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.errors import WorkerDied
from dapo_core.stopping import StopRequest

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_DELAY_SECONDS = 60.0  # of doubled pauses; a configured one that is longer stays as it is


class Restarts:
    """Counts the restarts in a row without a new checkpoint between, and pauses longer before each."""

    def __init__(
        self, max_restarts: int, delay_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.max_restarts = max_restarts
        self.delay_seconds = delay_seconds
        self.sleep = sleep
        self._num_in_a_row = 0
        self._latest: Path | None = None  # checkpoint at the last restart

    def until_done(
        self, attempt: Callable[[Path | None], Result], start: Path | None, folder: Path, stop: StopRequest
    ) -> Result:
        """What `attempt`, given the checkpoint to start from, returns when nothing dies in it.

        `folder` is where its checkpoints are. Once asked to stop, training does not start again.
        """
        while True:
            try:
                return attempt(start)
            except WorkerDied as error:
                start = latest_checkpoint(folder) or start
                if stop.signal is not None:  # which may have gone to all processes, as systemd's does
                    logger.error("%s", error)
                stop.check()
                self.note(error, start)

    def note(self, error: WorkerDied, latest: Path | None) -> None:
        """Return when training may start again, from checkpoint `latest` or from the beginning.

        Raises WorkerDied, with the count, after `max_restarts` restarts that brought no new checkpoint.
        """
        if latest != self._latest:
            self._num_in_a_row, self._latest = 0, latest
        if self._num_in_a_row == self.max_restarts:
            raise WorkerDied(
                f"{error}; given up after {self.max_restarts} restarts without a new checkpoint: find out what "
                "ends the process, lower checkpoint.save_every, or raise train.max_restarts"
            ) from error
        longest = max(MAX_DELAY_SECONDS, self.delay_seconds)
        seconds = min(self.delay_seconds * 2**self._num_in_a_row, longest)
        self._num_in_a_row += 1
        logger.warning(
            "%s; training starts again in %g s from %s (restart %d of at most %d without a new checkpoint)",
            error,
            seconds,
            "the beginning" if latest is None else f"checkpoint {latest.name}",
            self._num_in_a_row,
            self.max_restarts,
        )
        self.sleep(seconds)
