"""Runs the training driver in a child process, and forks a new one if it dies without reporting an
error.

    dapo train -> driver (own process group) -> Ray and its processes

Ray kills the driver when its raylet dies, and the kernel may kill it when memory runs out.
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
from dapo_core.machine.stopping import SIGNALS, StopRequest, raising_stopped
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
    from dapo_core.cluster.restarts import Restarts
    from dapo_core.config.training import TrainingConfig


@contextmanager
def forked_driver(config: TrainingConfig, output: Path) -> Iterator[Restarts]:
    """Run the block in a child process; the parent forwards SIGTERM and SIGINT, and exits like the
    child.

    A child that dies inside the block is restarted as `Restarts` allows. No child outlives the
    parent. Call it before any other thread exists.
    """
    waiting = _WaitingProcess(stop := StopRequest())
    # Imported here because numpy starts threads, which would receive the signals that this thread
    # blocks.
    from dapo_core.checkpoint.folder import CHECKPOINTS, latest_checkpoint
    from dapo_core.checkpoint.resume import MODES
    from dapo_core.cluster.restarts import Restarts, continued_from

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
    """The parent process, which receives signals only while waiting."""

    restarts: Restarts

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.signals = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
        self.libc = ctypes.CDLL(None)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # an inherited "ignore" would hide how the child ended
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self.signals, signal.SIGCHLD})

    def fork(self) -> int | None:
        """None in the child, its exit code in the parent. Raises WorkerDied if it died without an
        error.
        """
        sys.stdout.flush()
        parent = os.getpid()
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)  # the terminal signals the parent, which forwards
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            return None
        code = os.waitstatus_to_exitcode(self._wait_for(child))
        if self.restarts.shared.has_ended:
            return code if code >= 0 else 128 - code
        self._kill_leftovers()
        if (
            self.stop.signal is not None and code == -self.stop.signal
        ):  # before its handlers were installed
            return 128 - code
        raise WorkerDied(
            f"the training's driver (pid {child}) {describe_exit(code)} without reporting an error"
        )

    def pause(self, seconds: float) -> None:
        """Sleep; a signal raises KeyboardInterrupt."""
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

    def _kill_leftovers(self) -> None:
        """Kill descendants that do not exit by themselves, because the next child needs their
        memory.
        """
        started = time.monotonic()
        while (left := descendants(os.getpid())) and time.monotonic() < started + KILL_SECONDS:
            if time.monotonic() > started + LINGER_SECONDS:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(SCAN_SECONDS)
            _reap()


def _reap() -> tuple[int, int]:
    """Pid and status of a child that has ended; (0, 0) if there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
