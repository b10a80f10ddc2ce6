"""`python -m tasks.nodes.leave`: ends the runs of a pod in order, before Kubernetes ends its Ray.

A pod's preStop hook: it sends SIGTERM to each `dapo` here, and returns once the training has written its last
checkpoint. In a pod without a run it waits for the actors of one. terminationGracePeriodSeconds bounds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.processes import supervisor

POLL_SECONDS = 1.0
_ACTOR = "ray::"  # what Ray puts before the title of an actor's process, and of these that are none of a training
_OF_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent", "JobSupervisor")
_SUPERVISOR = Path(supervisor.__file__).name


def commands() -> Iterator[tuple[int, list[str]]]:
    """The pid and words of every process that can be seen here, but this one."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            yield int(folder.name), words


def is_run(words: list[str]) -> bool:
    """True for the console script `dapo`, which an interpreter runs."""
    return any(Path(word).name == "dapo" for word in words[:2])


def is_at_work(words: list[str]) -> bool:
    """True for a run, for what supervises a training, and for an actor."""
    title = words[0].removeprefix(_ACTOR)
    is_actor = title != words[0] and not title.startswith(_OF_RAY)
    return is_run(words) or is_actor or any(Path(word).name == _SUPERVISOR for word in words[:4])


def main() -> None:
    """Ask each run to end, and wait until nothing is at work."""
    for pid, words in commands():
        if is_run(words):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGTERM)
    while any(is_at_work(words) for _, words in commands()):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
