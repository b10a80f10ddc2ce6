"""A training's driver as a child process, which is forked again when it dies without an error of its own.

    dapo train -> driver (own process group) -> Ray and what it starts

Ray ends the process that uses it when its raylet dies, and the kernel kills one when memory runs out.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import WorkerDied
from dapo_core.stopping import SIGNALS, StopRequest, raising_stopped
from tasks.processes.child import describe_exit
from tasks.processes.supervisor import (
    KILL_SECONDS,
    LINGER_SECONDS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    SCAN_SECONDS,
    descendants,
)

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.restarts import Restarts


@contextmanager
def forked_driver(config: TrainingConfig, output: Path) -> Iterator[Restarts]:
    """Run the block in a child process; this process passes SIGTERM and SIGINT on, and ends as the child does.

    A child that dies inside the block is followed by another, as `Restarts` has it. None outlives this process.
    Call it while there is no other thread.
    """
    waiting = _WaitingProcess(stop := StopRequest())
    # Not before: numpy starts threads, which would take the signals that this one blocks.
    from dapo_core.checkpoint.folder import CHECKPOINTS, latest_checkpoint
    from dapo_core.checkpoint.resume import MODES
    from dapo_core.restarts import Restarts, continued_from

    folder, resume = output / CHECKPOINTS, config.checkpoint.resume
    restarts = waiting.restarts = Restarts(
        config.train.max_restarts, config.train.restart_delay_seconds, waiting.pause
    )

    def newest() -> Path | None:
        return latest_checkpoint(folder) if restarts.resume(resume) != "never" else None

    with raising_stopped(stop, lambda: continued_from(config, folder)):
        start = None if resume in MODES else Path(resume)
        exit_code = restarts.until_done(lambda _: waiting.fork(), start, newest, stop)
    if exit_code is not None:
        sys.exit(exit_code)
    restarts.sleep = time.sleep
    try:
        yield restarts
    finally:
        restarts.shared.has_ended = True


class _WaitingProcess:
    """This process, which takes signals only where it waits."""

    restarts: Restarts

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.signals = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        self.libc = ctypes.CDLL(None)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how the child ended
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self.signals, signal.SIGCHLD})

    def fork(self) -> int | None:
        """None in a child; here its exit status, once it has ended. Raises WorkerDied when it just died."""
        sys.stdout.flush()
        parent = os.getpid()
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)  # a terminal signals this process, which passes it on
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            return None
        code = os.waitstatus_to_exitcode(self._wait_for(child))
        if self.restarts.shared.has_ended:
            return code if code >= 0 else 128 - code
        self._end_what_is_left()
        if self.stop.signal is not None and code == -self.stop.signal:  # before it listened
            return 128 - code
        raise WorkerDied(f"the training's driver (pid {child}) {describe_exit(code)}, without an error of its own")

    def pause(self, seconds: float) -> None:
        """Wait; a signal raises KeyboardInterrupt."""
        received = signal.sigtimedwait(self.signals, seconds)
        if received is not None:
            self.stop.signal = signal.Signals(received.si_signo)
            raise KeyboardInterrupt

    def _wait_for(self, child: int) -> int:
        while True:
            number = signal.sigwait({*self.signals, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                self.stop.signal = self.stop.signal or signal.Signals(number)
                os.kill(child, number)
            while (reaped := _reap())[0]:
                if reaped[0] == child:
                    return reaped[1]

    def _end_what_is_left(self) -> None:
        """End what the child leaves to us, unless it ends by itself: another child needs its memory."""
        began = time.monotonic()
        while (left := descendants(os.getpid())) and time.monotonic() < began + KILL_SECONDS:
            if time.monotonic() > began + LINGER_SECONDS:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(SCAN_SECONDS)
            _reap()


def _reap() -> tuple[int, int]:
    """Pid and status of a child that has ended; 0 and 0 if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
