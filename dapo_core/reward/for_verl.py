"""This project's scorers as a verl `custom_reward_function`, with light imports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from dapo_core.reward.routing import routes, scorer_name
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS, Score
from eval.answers.pool import CallFailed, CallTimedOut, Pool

logger = logging.getLogger(__name__)

ComputeScore = Callable[..., dict[str, Any]]


def compute_score_for(
    entries: Sequence[str], timeout_seconds: float, is_as_verl: bool
) -> ComputeScore:
    """Return the function that verl calls.

    `entries` is reward.scorers. Rules that may be slow run in a separate process for at most
    `timeout_seconds`; the first such call starts it. Every result has the same fields: `score` and
    `acc` as in this project's training, `pred` for maj@N, and the flags `no_answer` and `failed`
    (0.0 or 1.0).
    """
    table = routes(entries)
    scorers = VERL_SCORERS if is_as_verl else SCORERS
    pool = Pool("dapo_core.reward.custom:load_scorer", timeout_seconds=timeout_seconds)

    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
    ) -> dict[str, Any]:
        name = scorer_name(data_source, table)
        score = scorers[name].quickly(solution_str, ground_truth)
        if score is not None:
            return _fields(score)
        call = pool.submit(name, data_source, solution_str, ground_truth, {})
        try:
            return _fields(Score(*call.result()))
        except CallTimedOut:
            return _fields(Score(0.0, "timeout"))
        except CallFailed as error:
            logger.warning("scoring a response of data_source %s: %s", data_source, error)
            return _fields(Score(0.0, "error"))

    return compute_score


def _fields(score: Score) -> dict[str, Any]:
    return {
        "score": score.value,
        "acc": score.acc,
        "pred": score.answer or "",
        "no_answer": float(score.verdict == "no_answer"),
        "failed": float(score.verdict in ("error", "timeout")),
    }
