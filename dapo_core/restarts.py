"""Restarts after a death, counted over all drivers of a training; what a stopped training says."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import read_state_without_groups
from dapo_core.errors import WorkerDied
from dapo_core.stopping import StopRequest

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

MAX_DELAY_SECONDS = 60.0  # of doubled pauses between restarts; a longer configured one stays as it is

Result = TypeVar("Result")


def continued_from(config: TrainingConfig, folder: Path) -> str | None:
    """What a stopped training says of its last checkpoint; None without one."""
    if (checkpoint := latest_checkpoint(folder)) is None:
        return None
    with_auto = " with --set checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    step = read_state_without_groups(checkpoint).step
    return (
        f" after step {step} of {config.train.total_steps}; its checkpoint is {checkpoint}; "
        f"the same command{with_auto} continues"
    )


class _Shared(ctypes.Structure):
    """What a training says to the process that forked it."""

    num_restarts: int  # in all
    num_in_a_row: int
    latest: bytes  # name of the checkpoint at the last restart
    has_begun: bool  # it has found its start: what is in the output is its own
    has_ended: bool  # with a result, or an error of its own
    _fields_ = [
        ("num_restarts", ctypes.c_int),
        ("num_in_a_row", ctypes.c_int),
        ("latest", ctypes.c_char * 256),
        ("has_begun", ctypes.c_bool),
        ("has_ended", ctypes.c_bool),
    ]


class Restarts:
    """Counts consecutive restarts without a new checkpoint, and pauses longer before each.

    Forked processes count together.
    """

    def __init__(
        self, max_restarts: int, delay_seconds: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.max_restarts = max_restarts
        self.delay_seconds = delay_seconds
        self.sleep = sleep
        self.shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))

    def resume(self, resume: str) -> str:
        """checkpoint.resume; after a restart by another process auto in place of never, which counts once."""
        return "auto" if resume == "never" and self.shared.has_begun else resume

    def until_done(
        self,
        attempt: Callable[[Path | None], Result],
        start: Path | None,
        find_own: Callable[[], Path | None],
        stop: StopRequest,
    ) -> Result:
        """What `attempt(checkpoint to start from)` returns, repeated after a death.

        A repetition starts from what `find_own()` returns, the training's own newest sound checkpoint, or from
        `start` if that is None. After a stop request nothing is restarted.
        """
        while True:
            try:
                return attempt(start)
            except WorkerDied as error:
                if stop.signal is not None:  # systemd, for one, signals every process
                    logger.error("%s", error)
                stop.check()
                start = find_own() or start
                self.pause(error, start)

    def pause(self, error: WorkerDied, latest: Path | None) -> None:
        """Wait before the restart from checkpoint `latest`, or from the beginning.

        Raises WorkerDied, with the count, after `max_restarts` restarts without a new checkpoint.
        """
        shared, name = self.shared, b"" if latest is None else latest.name.encode()
        if name != shared.latest:
            shared.num_in_a_row, shared.latest = 0, name
        if shared.num_in_a_row == self.max_restarts:
            raise WorkerDied(
                f"{error}; given up after {self.max_restarts} restarts without a new checkpoint: find out what "
                "ends the process, lower checkpoint.save_every, or raise train.max_restarts"
            ) from error
        longest = max(MAX_DELAY_SECONDS, self.delay_seconds)
        seconds = min(self.delay_seconds * 2**shared.num_in_a_row, longest)
        shared.num_in_a_row += 1
        shared.num_restarts += 1
        logger.warning(
            "%s; training restarts in %g s from %s (restart %d of at most %d without a new checkpoint)",
            error,
            seconds,
            "the beginning" if latest is None else f"checkpoint {latest.name}",
            shared.num_in_a_row,
            self.max_restarts,
        )
        self.sleep(seconds)
