"""`python -m tasks.nodes.leave`: ends what runs in a pod in order, before Kubernetes ends its Ray.

A pod's preStop hook: it has the training write its last checkpoint and returns once that is done. In a pod with
no training it waits for the actors of one. terminationGracePeriodSeconds bounds it.
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


def is_training(words: list[str]) -> bool:
    """True for the supervisor of a detached command, which passes the first SIGTERM on and ignores others."""
    return _is_supervisor(words) and '"detached": null' not in "".join(words[:5])


def is_at_work(words: list[str]) -> bool:
    """True for a run, for what it supervises, and for an actor."""
    title = words[0].removeprefix(_ACTOR)
    is_actor = title != words[0] and not title.startswith(_OF_RAY)
    return is_run(words) or is_actor or _is_supervisor(words)


def _is_supervisor(words: list[str]) -> bool:
    return any(Path(word).name == _SUPERVISOR for word in words[:4])


def main() -> None:
    """Ask the training to end, or a run that is at another stage, and wait until nothing is at work.

    Not both: Ray may have asked the run already, and a second signal to a run ends its training at once.
    """
    found = list(commands())
    for pid, _ in [each for each in found if is_training(each[1])] or [each for each in found if is_run(each[1])]:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)
    while any(is_at_work(words) for _, words in commands()):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
