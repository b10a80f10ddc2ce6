"""Scores responses under a hard time limit in killable processes."""

from __future__ import annotations

import logging
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dapo_core.config.compat import OURS, Compat
from dapo_core.errors import RewardError, RolloutError
from dapo_core.reward.custom import scorer_arguments
from dapo_core.reward.routing import require_scorers, routes, scorer_name
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS, Score
from dapo_core.reward.tail import TailDecoder
from eval.answers.pool import CallFailed, CallTimedOut, Pool, StartFailed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dapo_core.config.training import CustomRewardConfig, RewardConfig

logger = logging.getLogger(__name__)

MAX_FAILURES_LOGGED = 5
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
    prompt_ids: Sequence[int] = ()  # may contain the opening <think>


class _Pending(NamedTuple):
    key: str
    data_source: str
    end: str  # end of the response, for the log


class RewardPool:
    """Scores responses: call `submit`, then `finished` until nothing is pending.

    This process decodes only as much text as the scorer reads, and decides what takes linear time
    (Scorer.quickly), which is cheaper than an inter-process call. Everything else, and the user's
    file, runs in processes that load neither torch nor the tokenizer.
    """

    def __init__(
        self,
        reward: RewardConfig,
        custom: CustomRewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        compat: Compat = OURS,
        on_score: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the processes now for a user's file, otherwise when a rule first needs them.

        `on_score` is called on any thread when a score from a process is ready. Raises ConfigError
        like require_scorers, RewardError if the user's file cannot be loaded, and RolloutError if a
        process cannot start for another reason.
        """
        require_scorers((), reward, custom)
        self.reward = reward
        self.custom = custom
        self._decoder = TailDecoder(tokenizer)
        self._scorers = VERL_SCORERS if compat.math_dapo_to_the_letter else SCORERS
        self._on_score = on_score
        self._routes = routes(reward.scorers)
        self._num_failures_logged = 0
        self._done: list[tuple[str, Score]] = []
        self._pending: dict[Future[Any], _Pending] = {}
        self._replies: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()
        self._processes = Pool(
            "dapo_core.reward.custom:load_scorer",
            scorer_arguments(custom),
            num_processes=reward.num_processes,
            timeout_seconds=reward.timeout_seconds,
        )
        if custom.path is not None:
            try:
                self._processes.start()
            except StartFailed as error:
                self.close()
                raise self._start_error(error) from None

    @property
    def num_pending(self) -> int:
        """Submitted requests whose scores have not been returned."""
        return len(self._done) + len(self._pending)

    @property
    def pids(self) -> set[int]:
        """Process ids of the running scoring processes."""
        return self._processes.pids

    def submit(self, key: str, request: ScoreRequest) -> None:
        """Queue a response; `finished` returns its score with `key`. May raise DataError."""
        is_custom = self.custom.path is not None
        name = None if is_custom else scorer_name(request.data_source, self._routes)
        scorer = None if name is None else self._scorers[name]
        response_ids = request.response_ids
        if scorer is not None and not scorer.reads_thinking:
            response_ids = self._decoder.answer_ids(request.prompt_ids, response_ids)
        text = self._decoder.decode(response_ids, scorer.window_characters if scorer else None)
        score = scorer.quickly(text, request.ground_truth) if scorer else None
        if score is not None:
            self._done.append((key, score))
            return
        call = (name, request.data_source, text, request.ground_truth, dict(request.extra_info))
        reply = self._processes.submit(*call)
        self._pending[reply] = _Pending(key, request.data_source, text[-_LOGGED_CHARACTERS:])
        reply.add_done_callback(self._replies.put)
        reply.add_done_callback(lambda _: self._on_score())

    def finished(self, max_seconds: float = 0.0) -> list[tuple[str, Score]]:
        """Return (key, score) of finished requests; waits up to `max_seconds` for the first.

        Raises the same errors as __init__ if a replacement process does not start.
        """
        scores, self._done = self._done, []
        while self._pending:
            try:
                reply = self._replies.get(timeout=0.0 if scores else max_seconds)
            except queue.Empty:
                break
            scores.append(self._score(reply))
        return scores

    def close(self) -> None:
        """Kill the processes and drop pending requests."""
        self._processes.close()
        self._pending.clear()
        self._done.clear()

    def _score(self, reply: Future[Any]) -> tuple[str, Score]:
        pending = self._pending.pop(reply)
        try:
            return pending.key, Score(*reply.result())
        except CallTimedOut:
            seconds = f"{self.reward.timeout_seconds:g}"
            self._log_failure(pending, f"took longer than reward.timeout_seconds={seconds}")
            return pending.key, Score(0.0, "timeout")
        except CallFailed as error:
            self._log_failure(pending, str(error))
            return pending.key, Score(0.0, "error")
        except StartFailed as error:
            raise self._start_error(error) from None

    def _start_error(self, error: StartFailed) -> RewardError | RolloutError:
        path = self.custom.path
        hint = "" if path is None else f"; fix the file custom_reward.path={path}"
        if error.failure is not None:
            return RewardError(f"the scorer cannot be loaded{hint}:\n{error.failure}")
        process = f"a scoring process {error}, before it could score; its output is in the log"
        if path is not None and error.exit_code != -signal.SIGKILL:
            return RewardError(f"{process}{hint}")
        return RolloutError(
            f"{process}. The kernel kills processes when memory runs out: lower "
            f"reward.num_processes={self.reward.num_processes}"
        )

    def _log_failure(self, pending: _Pending, problem: str) -> None:
        self._num_failures_logged += 1
        if self._num_failures_logged > MAX_FAILURES_LOGGED:
            return
        is_last = self._num_failures_logged == MAX_FAILURES_LOGGED
        problem += " (later ones are counted, not logged)" if is_last else ""
        message = "scoring %s of data_source %s %s; the response ends in %r"
        logger.warning(message, pending.key, pending.data_source, problem, pending.end)
