"""Runs `dapo track` for each tracker of a training, which waits for none that hangs."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dapo_core.errors import ConfigError
from durable import LockHeld, locked
from tasks.processes import child
from tasks.tracking.clients import CLIENTS
from tasks.tracking.tracker import following_lock, read_record, record_path

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0  # to send what is left once the training has ended
GRACE_SECONDS = 1.0  # between SIGTERM and SIGKILL, after that
POLL_SECONDS = 0.1


def require_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError with the command to install for trackers without their client."""
    find = importlib.util.find_spec
    missing = [name for name in names if not all(map(find, CLIENTS[name][1]))]
    if missing:
        packages = " ".join(CLIENTS[name][2] for name in missing)
        raise ConfigError(
            f"train.trackers includes {', '.join(missing)}, but the client is not installed: pip "
            f"install {packages} (or '.[trackers]' in the project folder for all), or remove it "
            "from train.trackers"
        )


@contextmanager
def tracking(names: Sequence[str], folder: Path, words: Sequence[str]) -> Iterator[Trackers]:
    """Run trackers while the block trains in `folder`, and for CLOSE_SECONDS after it."""
    require_trackers(names)
    with ExitStack() as training, Trackers(folder) as trackers:
        if names:
            try:
                training.enter_context(locked(following_lock(folder)))
                trackers.start(names, words)
            except (LockHeld, OSError) as error:
                logger.warning("trackers did not start: %s", error)
        try:
            yield trackers
        finally:
            training.close()
            trackers.wait(CLOSE_SECONDS)


class Trackers(ExitStack):
    """The `dapo track` processes of one training. The failure of one is a warning with its log."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._has_failed = False
        self._running: dict[str, child.SupervisedProcess] = {}
        self._announced: set[str] = set()

    def start(self, names: Sequence[str], words: Sequence[str]) -> None:
        """Start `dapo track WORDS` for each tracker."""
        for name in dict.fromkeys(names):
            command = child.background_command(
                child.dapo_command("track", *words, "--tracker", name),
                log_path=record_path(self.folder, name).with_suffix(".log"),
                label=f"tracker {name}",
                grace_seconds=GRACE_SECONDS,
            )
            try:
                self._running[name] = self.enter_context(command)
            except (child.ChildProcessFailed, OSError) as error:
                self._fail("tracker %s did not start: %s", name, error)

    def check(self) -> None:
        """Log once for each tracker where its run is, and that it failed."""
        for name, process in list(self._running.items()):
            exit_code = process.poll()
            if name not in self._announced and (place := read_record(self.folder, name).place):
                self._announced.add(name)
                logger.info("tracked by %s: %s; its log is %s", name, place, process.log_path)
            if exit_code is not None:
                del self._running[name]
            if exit_code:
                reason = process.failure().summary
                self._fail("%s: %s", reason, *process.tail(1) or ["(it wrote nothing)"])

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, or name those that have not; True if all succeeded."""
        deadline = time.monotonic() + seconds
        self.check()
        while self._running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self.check()
        for name, process in self._running.items():
            message = "tracker %s did not end within %.0f s and is stopped; its log is %s"
            self._fail(message, name, seconds, process.log_path)
        return not self._has_failed

    def _fail(self, message: str, *arguments: object) -> None:
        self._has_failed = True
        logger.warning(f"{message}. All else goes on; `dapo track` sends the rest", *arguments)
