"""`python -m tasks.nodes.leave`: a pod's preStop hook, which stops its work before its Ray.

It has the training write its last checkpoint and returns once that is done. In a pod without the
training it waits for the training's actors. terminationGracePeriodSeconds limits it.
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
_ACTOR = "ray::"  # starts the process title of actors, and of these processes of Ray itself:
_RAY_PROCESSES = ("IDLE", "DashboardAgent", "RuntimeEnvAgent", "JobSupervisor")
_SUPERVISOR = Path(supervisor.__file__).name


def commands() -> Iterator[tuple[int, list[str]]]:
    """Yield the pid and command line of every visible process except this one."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            yield int(folder.name), words


def is_run(words: list[str]) -> bool:
    """True for the console script `dapo`, run by an interpreter."""
    return any(Path(word).name == "dapo" for word in words[:2])


def is_training(words: list[str]) -> bool:
    """True for the supervisor of `dapo train`, which forwards the first SIGTERM only."""
    return _is_supervisor(words) and words[6:9] == ["-m", "flows.cli", "train"]


def is_at_work(words: list[str]) -> bool:
    """True for a run, its supervised processes, and actors."""
    title = words[0].removeprefix(_ACTOR)
    is_actor = title != words[0] and not title.startswith(_RAY_PROCESSES)
    return is_run(words) or is_actor or _is_supervisor(words)


def _is_supervisor(words: list[str]) -> bool:
    return any(Path(word).name == _SUPERVISOR for word in words[:4])


def main() -> None:
    """Send SIGTERM to the training, or to a run at another stage, and wait until all have ended.

    Never to both: Ray may have signalled the run already, and a second signal kills its training.
    """
    found = dict(commands())
    trainings = [pid for pid, words in found.items() if is_training(words)]
    for pid in trainings or [pid for pid, words in found.items() if is_run(words)]:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)
    while any(is_at_work(words) for _, words in commands()):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
