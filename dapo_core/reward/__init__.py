"""What a response is worth: a scorer chosen by data source, run under a time limit, plus overlong shaping."""

from __future__ import annotations

from dapo_core.reward.overlong import overlong_penalty
from dapo_core.reward.pool import RewardPool, ScoreRequest
from dapo_core.reward.routing import SCORERS, Scorer, require_scorers, scorer_for
from dapo_core.reward.score import Score, Verdict

__all__ = [
    "SCORERS",
    "RewardPool",
    "Score",
    "ScoreRequest",
    "Scorer",
    "Verdict",
    "overlong_penalty",
    "require_scorers",
    "scorer_for",
]
