"""Grading under hard limits: what strings and plain numbers do not decide runs in a process that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from eval import EvaluationError
from eval.answers.extraction import Found
from eval.answers.grading import Grade, grade_with
from eval.answers.latex import MAX_ANSWER_CHARS

START_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from eval.answers.worker import main; main()"


class Judge:
    """Grades responses; a context manager, usable from several threads.

    A row that takes longer than `timeout_seconds` or more than `memory_bytes` is graded wrong, its process is
    killed and replaced, and `num_killed` counts it. Processes start with the first row that needs one.
    """

    def __init__(self, num_processes: int = 1, timeout_seconds: float = 1.5, memory_bytes: int = 1 << 30) -> None:
        if num_processes < 1:
            raise EvaluationError(f"num_processes = {num_processes}: grading needs at least one process")
        self._workers = [_Worker(timeout_seconds, memory_bytes) for _ in range(num_processes)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._num_killed = 0

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_killed(self) -> int:
        """Rows that went beyond a limit and count as wrong."""
        return self._num_killed

    def grade(self, response: str | None, finish_reason: str | None, gold: str) -> Grade:
        """Verdicts on one response, as eval.answers.grading.grade_with; blocks until they are there."""
        return grade_with(self._is_gold, response, finish_reason, gold)

    def close(self) -> None:
        """End the processes; rows that other threads wait for meanwhile are graded wrong."""
        for worker in self._workers:
            worker.interrupt()
        idle = [self._idle.get() for _ in self._workers]  # all of them, once nobody asks any more
        for worker in idle:
            worker.end()
            self._idle.put(worker)

    def _is_gold(self, found: Found, gold: str) -> bool:
        if len(gold) > MAX_ANSWER_CHARS or max(map(len, found.answers)) > MAX_ANSWER_CHARS:
            return False  # equal strings are right without it
        if sum(map(len, found.boxes)) > MAX_ANSWER_CHARS:
            found = found._replace(boxes=())
        worker = self._idle.get()
        try:
            verdict = worker.ask(found, gold)
        finally:
            self._idle.put(worker)
        if verdict is None:
            with self._lock:
                self._num_killed += 1
        return bool(verdict)


class _Worker:
    """One process and its pipes; started by the first question and again after it was killed."""

    def __init__(self, timeout_seconds: float, memory_bytes: int) -> None:
        self.timeout_seconds = timeout_seconds
        self.memory_bytes = memory_bytes
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, found: Found, gold: str) -> bool | None:
        """The worker's verdict; None when it ended or had to be killed."""
        process = self.process or self._started()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, which reading finds as well
            unwritten = json.dumps([found, gold]).encode() + b"\n"
            while unwritten:
                unwritten = unwritten[os.write(process.stdin.fileno(), unwritten) :]
        line = _read_line(process, self.timeout_seconds)
        if line is None:
            self.end()
            return None
        return bool(json.loads(line))

    def _started(self) -> subprocess.Popen[bytes]:
        limits = (str(self.memory_bytes), str(10 * self.timeout_seconds))
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(_ROOT), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for us: a worker that it ended would make its row wrong
        )
        self.process = process
        if _read_line(process, START_SECONDS) is None:
            self.end()
            raise EvaluationError(
                f"the grading process did not start within {START_SECONDS:g} s (exit code {process.returncode}); "
                f"its output is in the log. A limit of {self.memory_bytes:,} bytes of memory may be too low."
            )
        return process

    def interrupt(self) -> None:
        """Kill the process, if there is one, under whoever waits for it."""
        process = self.process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kill the process, if there is one, and close its pipes."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """The next line of the process's output; None when it ends or the time is over."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    read = b""
    while not read.endswith(b"\n"):
        ready = poll.poll(1000 * max(deadline - time.monotonic(), 0.0))
        chunk = os.read(descriptor, 4096) if ready else b""
        if not chunk:
            return None
        read += chunk
    return read
