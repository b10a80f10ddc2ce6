"""Restarts of a training after one of its actors dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import read_state_without_groups
from dapo_core.errors import WorkerDied
from dapo_core.machine.stopping import StopRequest

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

MAX_DELAY_SECONDS = 60.0  # limit of the doubling delay, unless a longer one is configured

Result = TypeVar("Result")


def continued_from(config: TrainingConfig, folder: Path) -> str | None:
    """Describe where a stopped training can resume; None without a checkpoint."""
    if (checkpoint := latest_checkpoint(folder)) is None:
        return None
    with_auto = " with --set checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    step = read_state_without_groups(checkpoint).step
    return (
        f" after step {step} of {config.train.total_steps}; its checkpoint is {checkpoint}; the "
        f"same command{with_auto} resumes it"
    )


class Restarts:
    """Limits restarts without a new checkpoint, with a growing delay."""

    def __init__(
        self, max_restarts: int, delay_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.max_restarts = max_restarts
        self.delay_seconds = delay_seconds
        self.is_restart = False
        self._sleep = sleep
        self._num_in_a_row = 0  # without a new checkpoint
        self._latest: Path | None = None  # checkpoint at the last restart

    def until_done(
        self,
        attempt: Callable[[Path | None], Result],
        start: Path | None,
        find_own: Callable[[], Path | None],
        stop: StopRequest,
    ) -> Result:
        """Call `attempt(start)` until it returns; retries on WorkerDied.

        A retry starts from `find_own()`, the training's newest intact checkpoint, or from `start`
        if that is None. A stop request prevents further retries.
        """
        while True:
            try:
                return attempt(start)
            except WorkerDied as error:
                if stop.signal is not None:  # systemd, for example, signals all processes at once
                    logger.error("%s", error)
                stop.check()
                start = find_own() or start
                self.pause(error, start)

    def pause(self, error: WorkerDied, latest: Path | None) -> None:
        """Wait before restarting from checkpoint `latest`, or from the beginning if None.

        Raises WorkerDied after `max_restarts` restarts without a new checkpoint.
        """
        if latest != self._latest:
            self._num_in_a_row, self._latest = 0, latest
        if self._num_in_a_row == self.max_restarts:
            raise WorkerDied(
                f"{error}; giving up after {self.max_restarts} restarts without a new checkpoint: "
                "find out why the process dies, lower checkpoint.save_every, or raise "
                "train.max_restarts"
            ) from error
        max_delay = max(MAX_DELAY_SECONDS, self.delay_seconds)
        seconds = min(self.delay_seconds * 2**self._num_in_a_row, max_delay)
        self._num_in_a_row += 1
        self.is_restart = True
        logger.warning(
            "%s; training restarts in %g s from %s (restart %d of at most %d without a new "
            "checkpoint)",
            error,
            seconds,
            "the beginning" if latest is None else f"checkpoint {latest.name}",
            self._num_in_a_row,
            self.max_restarts,
        )
        self._sleep(seconds)
