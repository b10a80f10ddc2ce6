"""Scoring under a hard time limit: every call runs in a process that can be killed and replaced."""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, Any, Literal

from dapo_core.errors import RewardError, RolloutError
from dapo_core.reward import process
from dapo_core.reward.process import Call, decode_outcome
from dapo_core.reward.routing import SCORERS, require_scorers, routes, scorer_name
from dapo_core.reward.score import Score, failed_score
from dapo_core.reward.tail import TailDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import CustomRewardConfig, RewardConfig

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # a user's file may load a library as large as torch
MAX_CALLS_PER_MESSAGE = 64
MAX_FAILURES_LOGGED = 5
MAX_IDLE_ENDS = 100  # in a row, of processes that were not scoring, without a score between
_START = f"from {process.__name__} import main; main()"
_READ_BYTES = 1 << 16
_LOGGED_CHARACTERS = 200


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
            [sys.executable, "-u", "-c", _START, *map(str, (os.getpid(), calls_read, outcomes_write)), *own],
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
        self.since = time.monotonic()  # when its start or its present call began, or a little later
        self._unread = b""

    @property
    def is_busy(self) -> bool:
        return not self.is_ready or bool(self.in_hand)

    @property
    def has_ended(self) -> bool:
        return self.popen.poll() is not None

    def send(self, calls: list[tuple[str, Call]]) -> None:
        """Hand calls to the idle process; raises BrokenPipeError when it has ended."""
        self.since = time.monotonic()
        self.calls.send([tuple(call) for _, call in calls])
        self.in_hand.extend(calls)

    def read_lines(self) -> list[bytes]:
        """The lines it wrote since the last time."""
        chunks = [self._unread]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.outcomes_fd, _READ_BYTES):
                chunks.append(chunk)
        *lines, self._unread = b"".join(chunks).split(b"\n")
        if lines:
            self.since = time.monotonic()  # not when it wrote: with its pipe full it waited for us to read
        return lines

    def kill(self) -> None:
        """End the process and what it started. What it wrote can still be read."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        self.calls.close()
        os.close(self.outcomes_fd)


class RewardPool:
    """Scores responses: call `submit`, then `finished` until nothing is pending.

    The text is decoded here, as little of it as the scorer reads. Rules that read a bounded tail are run here too:
    they cannot hang, and take no longer than it takes to hand a call to a process. Others, and the user's file,
    run in processes, which load neither torch nor the tokenizer; nothing is handed to them or taken back but in
    `finished`. Not thread-safe, and to be used from the thread that made it: the processes die with that thread.
    """

    def __init__(
        self, reward: RewardConfig, custom: CustomRewardConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Start the processes when there is a user's file, otherwise only once a rule needs them.

        Raises ConfigError as require_scorers does, RewardError when the user's file cannot be loaded, and
        RolloutError when a process cannot be started for another reason.
        """
        require_scorers((), reward, custom)
        self.reward = reward
        self.custom = custom
        self._decoder = TailDecoder(tokenizer)
        self._routes = routes(reward.scorers)
        self._queue: deque[tuple[str, Call]] = deque()
        self._num_failures_logged = 0
        self._num_idle_ends = 0
        self._done: list[tuple[str, Score]] = []
        self._workers: list[_Worker] = []
        if custom.path is not None:
            self._start()

    @property
    def num_pending(self) -> int:
        """Requests submitted and not yet handed back."""
        return len(self._done) + len(self._queue) + sum(len(worker.in_hand) for worker in self._workers)

    def submit(self, key: str, request: ScoreRequest) -> None:
        """Take a response, whose score comes from `finished` under `key`; DataError for an unknown source."""
        name = None if self.custom.path is not None else scorer_name(request.data_source, self._routes)
        window = None if name is None else SCORERS[name].window_characters
        text = self._decoder.decode(request.response_ids, window)
        if name is not None and window is not None:
            self._done.append((key, SCORERS[name](text, request.ground_truth)))
            return
        call = Call(name, request.data_source, text, request.ground_truth, request.extra_info)
        self._queue.append((key, call))
        if not self._workers:
            self._start()

    def finished(self, max_seconds: float = 0.0) -> list[tuple[str, Score]]:
        """Scores that are ready as (key, score), waiting up to `max_seconds` until there is one.

        Raises as the start does when a process that is to replace an ended one does not start, and RewardError
        when they keep ending though they score nothing.
        """
        deadline = time.monotonic() + max_seconds
        scores = self._done + self._collect(0.0)
        self._done = []
        while True:
            self._hand_out()
            seconds_left = deadline - time.monotonic()
            if scores or not self.num_pending or seconds_left <= 0:
                return scores
            scores = self._collect(seconds_left)

    def close(self) -> None:
        """Kill the processes; what is pending is dropped."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._queue.clear()
        self._done.clear()

    def _start(self) -> None:
        self._workers = [_Worker(self.custom) for _ in range(self.reward.num_processes)]
        try:
            while not all(worker.is_ready for worker in self._workers):
                self._collect(START_SECONDS)
        except (RewardError, RolloutError):
            self.close()
            raise

    def _hand_out(self) -> None:
        """Give idle processes calls: many at once from a long queue, one by one at its end."""
        for worker in self._workers:
            if self._queue and not worker.is_busy:
                share = -(-len(self._queue) // (2 * len(self._workers)))
                calls = [self._queue.popleft() for _ in range(min(share, MAX_CALLS_PER_MESSAGE))]
                try:
                    worker.send(calls)
                except BrokenPipeError:  # replaced at the next look
                    self._queue.extendleft(reversed(calls))

    def _collect(self, max_seconds: float) -> list[tuple[str, Score]]:
        """The scores that came, waiting for them; processes that ended or took too long are replaced."""
        if max_seconds > 0:
            now = time.monotonic()
            limits = [worker.since + self._limit_seconds(worker) for worker in self._workers if worker.is_busy]
            wait(
                [worker.outcomes_fd for worker in self._workers], max(min([now + max_seconds, *limits]) - now, 0.0)
            )
        scores: list[tuple[str, Score]] = []
        for position, worker in enumerate(self._workers):
            scores += self._read(worker)
            has_ended = worker.has_ended
            is_late = worker.is_busy and time.monotonic() - worker.since > self._limit_seconds(worker)
            if has_ended or is_late:
                scores += self._give_up(worker, "error" if has_ended else "timeout")
                self._workers[position] = _Worker(self.custom)
        return scores

    def _limit_seconds(self, worker: _Worker) -> float:
        return self.reward.timeout_seconds if worker.is_ready else START_SECONDS

    def _read(self, worker: _Worker) -> list[tuple[str, Score]]:
        scores = []
        for line in worker.read_lines():
            if not worker.is_ready:
                self._welcome(worker, line)
                continue
            self._num_idle_ends = 0
            key, call = worker.in_hand.popleft()
            outcome = decode_outcome(line)
            if outcome.failure is not None:
                self._log_failure(key, call, f"raised an exception\n{outcome.failure}")
            is_late = outcome.seconds > self.reward.timeout_seconds
            scores.append((key, self._late(key, call) if is_late else outcome.score))
        return scores

    def _give_up(self, worker: _Worker, verdict: Literal["error", "timeout"]) -> list[tuple[str, Score]]:
        """End a process and blame the call it was at; the others it had go back to the head of the queue."""
        num_before = len(worker.in_hand)
        worker.kill()
        scores = self._read(worker)  # what it wrote between our last look and its end
        if not worker.is_ready:
            raise self._no_start(worker.popen.returncode if verdict == "error" else None)
        if not num_before:
            self._note_idle_end(worker)
        if worker.in_hand and (verdict == "error" or len(worker.in_hand) == num_before):
            key, call = worker.in_hand.popleft()
            if verdict == "timeout":
                scores.append((key, self._late(key, call)))
            else:
                self._log_failure(key, call, f"ended its process (exit code {worker.popen.returncode})")
                scores.append((key, failed_score("error")))
        self._queue.extendleft(reversed(worker.in_hand))
        worker.close()
        return scores

    def _note_idle_end(self, worker: _Worker) -> None:
        self._num_idle_ends += 1
        if self._num_idle_ends > MAX_IDLE_ENDS:
            raise RewardError(
                f"scoring processes ended {self._num_idle_ends} times in a row while they had nothing to score, "
                f"the last with exit code {worker.popen.returncode}: something kills them{self._file_hint()}"
            )

    def _welcome(self, worker: _Worker, line: bytes) -> None:
        failure = json.loads(line).get("failed")
        if failure is not None:
            raise RewardError(f"the scorer cannot be loaded{self._file_hint()}:\n{failure}")
        worker.is_ready = True

    def _no_start(self, exit_code: int | None) -> RewardError | RolloutError:
        """What to raise for a process that ended before it was ready, or (None) took too long for that."""
        what = (
            f"was not ready within {START_SECONDS:g} s" if exit_code is None else f"ended (exit code {exit_code})"
        )
        if self.custom.path is not None and exit_code != -signal.SIGKILL:
            return RewardError(
                f"a scoring process {what} while it loaded the scorer; its output is in the log{self._file_hint()}"
            )
        return RolloutError(
            f"a scoring process {what} before it could score; its output is in the log. The kernel kills "
            f"processes when memory runs out: lower reward.num_processes={self.reward.num_processes}"
        )

    def _late(self, key: str, call: Call) -> Score:
        self._log_failure(key, call, f"took longer than reward.timeout_seconds={self.reward.timeout_seconds:g}")
        return failed_score("timeout")

    def _file_hint(self) -> str:
        return "" if self.custom.path is None else f"; correct the file custom_reward.path={self.custom.path}"

    def _log_failure(self, key: str, call: Call, what: str) -> None:
        self._num_failures_logged += 1
        if self._num_failures_logged > MAX_FAILURES_LOGGED:
            return
        last = "" if self._num_failures_logged < MAX_FAILURES_LOGGED else " (later ones are counted, not logged)"
        logger.warning(
            "scoring %s of data_source %s %s%s; the response ends in %r",
            key, call.data_source, what, last, call.text[-_LOGGED_CHARACTERS:],
        )  # fmt: skip
