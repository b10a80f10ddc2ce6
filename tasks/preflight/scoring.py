"""Scores texts with a recipe's scorers, as its training does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo_core.reward.custom import scorer_arguments
from dapo_core.reward.routing import routes, scorer_name
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS, Score
from eval.answers.pool import Pool
from tasks.config import ChainConfig


class Scoring:
    """The recipe's scorers; custom ones and those that may hang run in a killable process."""

    def __init__(self, config: ChainConfig) -> None:
        custom = config.custom_reward
        self.is_custom = custom.path is not None
        self._table = routes(config.reward.scorers)
        self._scorers = VERL_SCORERS if config.algorithm.compat == "verl" else SCORERS
        self._pool = Pool(
            "dapo_core.reward.custom:load_scorer",
            scorer_arguments(custom),
            timeout_seconds=config.reward.timeout_seconds,
        )

    def close(self) -> None:
        """Kill the process."""
        self._pool.close()

    def name(self, source: str) -> str:
        """The source's scorer, as messages name it. Raises DataError for an unknown source."""
        return "custom_reward.path" if self.is_custom else scorer_name(source, self._table)

    def score(self, source: str, response: str, gold: str, extra_info: Mapping[str, Any]) -> Score:
        """Score one response. Raises CallFailed or StartFailed if the scorer fails."""
        name = None if self.is_custom else scorer_name(source, self._table)
        scorer = None if name is None else self._scorers[name]
        if scorer is not None and scorer.window_characters is not None:
            response = response[-scorer.window_characters :]
        score = scorer.quickly(response, gold) if scorer else None
        if score is None:
            call = (name, source, response, gold, dict(extra_info))
            score = Score(*self._pool.submit(*call).result())
        return score
