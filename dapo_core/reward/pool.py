"""Scoring under a hard time limit: every call runs in a process that can be killed and replaced."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from dapo_core.errors import RolloutError
from dapo_core.reward import process
from dapo_core.reward.process import Call, decode_outcome
from dapo_core.reward.routing import SCORERS, require_scorers, routes
from dapo_core.reward.score import Score, failed_score
from dapo_core.reward.tail import decode_tail

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config import CustomRewardConfig, RewardConfig

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # a user's file may load a library as large as torch
MAX_CALLS_PER_MESSAGE = 64
MAX_FAILURES_LOGGED = 5
_START = f"from {process.__name__} import main; main()"
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score.

    Example: ScoreRequest("math_dapo", [3, 17, 2], "34", {"index": 0})
    """

    data_source: str
    response_ids: Sequence[int]
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)


class _Worker:
    """One scoring process as the pool sees it: its pipes, and the calls it has in hand."""

    def __init__(self, custom: CustomRewardConfig) -> None:
        calls_read, calls_write = os.pipe()
        outcomes_read, outcomes_write = os.pipe()
        own = [] if custom.path is None else [custom.path, custom.name]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, (os.getpid(), calls_read, outcomes_write)), *own],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what the user's code prints belongs in the log
            pass_fds=(calls_read, outcomes_write),
            start_new_session=True,  # killed as a group: what the user's code started goes too
        )
        os.close(calls_read)
        os.close(outcomes_write)
        os.set_blocking(outcomes_read, False)
        self.calls = Connection(calls_write, readable=False)
        self.outcomes_fd = outcomes_read
        self.is_ready = False
        self.in_hand: deque[tuple[str, Call]] = deque()
        self.since = time.monotonic()  # when its present call, or its start, began
        self._unread = b""

    def fileno(self) -> int:
        return self.outcomes_fd

    def send(self, calls: list[tuple[str, Call]]) -> None:
        """Hand calls to an idle process."""
        self.in_hand.extend(calls)
        self.since = time.monotonic()
        try:
            self.calls.send([tuple(call) for _, call in calls])
        except BrokenPipeError:  # it died while idle; reading finds that out
            return

    def read_lines(self) -> tuple[list[bytes], bool]:
        """The lines it wrote since the last time, and whether it ended."""
        chunks = [self._unread]
        has_ended = False
        while not has_ended:
            try:
                chunks.append(os.read(self.outcomes_fd, _READ_BYTES))
            except BlockingIOError:
                break
            has_ended = not chunks[-1]
        *lines, self._unread = b"".join(chunks).split(b"\n")
        if lines:
            self.since = time.monotonic()  # it may have waited for us to read, so not when it wrote
        return lines, has_ended or self.popen.poll() is not None

    def kill(self) -> None:
        """End the process and what it started. What it wrote can still be read."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()

    def close(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        self.calls.close()
        os.close(self.outcomes_fd)


class RewardPool:
    """Scores responses in processes of its own; the owner calls `submit`, then `finished` until nothing is pending.

    The text is decoded here, as little of it as the scorer reads; processes load neither torch nor the tokenizer.
    Nothing moves between calls of `finished`. Not thread-safe, and to be used from the thread that made it: its
    processes die with that thread.
    """

    def __init__(
        self, reward: RewardConfig, custom: CustomRewardConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Start the processes and wait for them.

        Raises ConfigError as require_scorers does, and RolloutError when the user's file cannot be loaded.
        """
        require_scorers((), reward, custom)
        self.reward = reward
        self.custom = custom
        self.tokenizer = tokenizer
        self._routes = routes(reward.scorers)
        self._queue: deque[tuple[str, Call]] = deque()
        self._num_failures_logged = 0
        self._workers: list[_Worker] = []
        raise NotImplementedError

    @property
    def num_pending(self) -> int:
        """Requests submitted and not yet handed back."""
        return len(self._queue) + sum(len(worker.in_hand) for worker in self._workers)

    def submit(self, key: str, request: ScoreRequest) -> None:
        """Queue a response; its score comes from `finished` under `key`. Raises DataError for an unknown source."""
        raise NotImplementedError

    def finished(self, max_seconds: float = 0.0) -> list[tuple[str, Score]]:
        """Scores that are ready as (key, score), waiting up to `max_seconds` for the first one."""
        raise NotImplementedError

    def close(self) -> None:
        """Kill the processes; what is pending is dropped."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._queue.clear()
