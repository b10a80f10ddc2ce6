"""A scoring process: gets calls, runs each, says what came of it. Started by the pool; loads nothing heavy.

Calls come as pickled lists through one pipe, one line of JSON for each goes back through another as soon as it is
done. The user's code may print: standard output is the log.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from dapo_core.reward.custom import call_function, load_function
from dapo_core.reward.routing import SCORERS
from dapo_core.reward.score import Score, failed_score

PR_SET_PDEATHSIG = 1
MAX_TRACEBACK_CHARACTERS = 4000
MAX_ANSWER_CHARACTERS = 300


class Call(NamedTuple):
    """One response to score. `text` is as much of its end as the scorer reads."""

    scorer: str | None  # a name in SCORERS; None: the user's function
    data_source: str
    text: str
    ground_truth: str
    extra_info: Mapping[str, Any]


class Outcome(NamedTuple):
    """What came of a call."""

    score: Score
    seconds: float
    failure: str | None  # traceback of a scorer that raised


def encode_outcome(outcome: Outcome) -> bytes:
    """The outcome as a line."""
    score = outcome.score
    answer = None if score.answer is None else score.answer[:MAX_ANSWER_CHARACTERS]
    fields = (score.value, score.verdict, answer, score.acc, outcome.seconds, outcome.failure)
    return json.dumps(fields).encode() + b"\n"


def decode_outcome(line: bytes) -> Outcome:
    """The outcome of a line."""
    value, verdict, answer, acc, seconds, failure = json.loads(line)
    return Outcome(Score(value, verdict, answer, acc), seconds, failure)


class ScoringProcess:
    """The loop of a scoring process over its two pipes."""

    def __init__(self, calls_fd: int, outcomes_fd: int) -> None:
        self.calls = Connection(calls_fd, writable=False)
        self.outcomes_fd = outcomes_fd
        self.runner = asyncio.Runner()
        self.function: Any = None

    def run(self, path: str | None, name: str) -> None:
        """Load the user's file if there is one, then score until the pool closes the pipe."""
        try:
            if path is not None:
                self.function = load_function(path, name)
        except Exception:  # noqa: BLE001 - the user's file may raise anything
            self._write(json.dumps({"failed": _traceback()}).encode() + b"\n")
            return
        self._write(b"{}\n")
        while True:
            try:
                calls = self.calls.recv()
            except EOFError:
                return
            for call in calls:
                self._write(encode_outcome(self._score(Call(*call))))

    def _score(self, call: Call) -> Outcome:
        started = time.monotonic()
        failure = None
        try:
            if call.scorer is None:
                score = call_function(self.function, self.runner, call[1:])
            else:
                score = SCORERS[call.scorer](call.text, call.ground_truth)
        except Exception:  # noqa: BLE001 - and so may the scorer, which then is an error, not the pool's end
            score, failure = failed_score("error"), _traceback()
        return Outcome(score, time.monotonic() - started, failure)

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self.outcomes_fd, line) :]


def _traceback() -> str:
    return traceback.format_exc()[-MAX_TRACEBACK_CHARACTERS:]


def main() -> None:
    """Entry point: PARENT_PID CALLS_FD OUTCOMES_FD [PATH NAME]."""
    parent_pid, calls_fd, outcomes_fd = (int(argument) for argument in sys.argv[1:4])
    path, name = sys.argv[4:6] if len(sys.argv) > 4 else (None, "")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        return
    for fd in (calls_fd, outcomes_fd):
        os.set_inheritable(fd, False)
    ScoringProcess(calls_fd, outcomes_fd).run(path, name)
