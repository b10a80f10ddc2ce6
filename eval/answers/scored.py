"""A scorer of trainings as the grader of an evaluation: what a reward calls right."""

from __future__ import annotations

import logging
import threading

from eval import EvaluationError, InputError
from eval.answers.grading import Asked, Grade, Grader, Verdict, grade, is_cut
from eval.answers.pool import CallFailed, Pool, StartFailed

logger = logging.getLogger(__name__)

_PATIENCE = 16  # failed calls of a scorer that never gave a score


class ScorerGrader(Grader):
    """Right when the scorer's `acc` (else its score) is at least 1; the score itself is in the details.

    The scorer runs in processes that can be killed and reads what a training's reads: the whole text, with any
    thinking that no server took out. A call that fails or takes too long gives wrong and is counted; a scorer
    whose first 16 calls all fail is not called again. AISBench's columns hold the verdict too, without regard to
    how the response ended.
    """

    def __init__(self, pool: Pool, scorer: str | None, rule: str) -> None:
        """`pool` calls dapo_core.reward.custom.load_scorer's function; `scorer` is its first argument."""
        self.rule = rule
        self._pool, self._scorer = pool, scorer
        self._lock = threading.Lock()
        self._has_scored = False
        self._first_failure: CallFailed | None = None

    def grade(self, response: str | None, finish_reason: str | None, gold: str, is_chat: bool = False) -> Grade:
        """By the exact rule: whether two answers are one answer (maj@k)."""
        return grade(response, finish_reason, gold, is_chat)

    def grade_item(self, response: str | None, finish_reason: str | None, item: Asked, is_chat: bool) -> Grade:
        """The scorer's verdict on a response; None stands for a failed request."""
        if response is None:
            return Grade(None, "request_failed", None, False, False)
        if self.num_killed >= _PATIENCE and not self._has_scored:
            error = f"was not called, because its first {self.num_killed} calls failed: {self._first_failure}"
            return Grade(None, _ended(finish_reason, "wrong"), None, False, False, {"error": error})
        call = (self._scorer, item.data_source or "", response, item.gold, dict(item.extra_info))
        try:
            score, verdict, answer, acc = self._pool.submit(*call).result()
        except CallFailed as error:
            with self._lock:
                self.num_killed += 1
                self._first_failure = self._first_failure or error
            logger.info("scoring %r %s", response[-100:], error)
            return Grade(None, _ended(finish_reason, "wrong"), None, False, False, {"error": str(error)})
        except StartFailed as error:
            kind = EvaluationError if error.failure is None else InputError
            raise kind(
                f"{self.rule}: a scoring process {error}; correct evaluate.scorer\n{error.failure or ''}"
            ) from None
        self._has_scored = True
        details = {"score": score, "acc": acc}
        return Grade(answer, _ended(finish_reason, verdict), answer, verdict == "right", False, details)

    def grade_quickly(
        self, response: str | None, finish_reason: str | None, item: Asked, is_chat: bool
    ) -> Grade | None:
        """None: every response needs a process."""
        return None

    def close(self) -> None:
        """Stop the processes."""
        self._pool.close()


def _ended(finish_reason: str | None, verdict: Verdict) -> Verdict:
    return "truncated" if is_cut(finish_reason) else verdict
