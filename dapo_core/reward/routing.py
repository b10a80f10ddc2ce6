"""Which scorer a data source has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import ConfigError, DataError
from dapo_core.reward import gsm8k, math_dapo
from dapo_core.reward.choice import score_choice
from dapo_core.reward.custom import require_function
from dapo_core.reward.geo3k import score_geo3k
from dapo_core.reward.score import Score

if TYPE_CHECKING:
    from dapo_core.config.training import CustomRewardConfig, RewardConfig


@dataclass(frozen=True)
class Scorer:
    """A rule, and how much of the response it reads: the last characters, or everything (None).

    A rule with a window is run without a time limit: it must not raise, and its time must be linear.
    """

    rule: Callable[[str, str], Score]
    window_characters: int | None = None

    def __call__(self, response: str, ground_truth: str) -> Score:
        return self.rule(response, ground_truth)


SCORERS: Mapping[str, Scorer] = {
    "math_dapo": Scorer(math_dapo.score_math, math_dapo.WINDOW_CHARACTERS),
    "choice": Scorer(score_choice),
    "geo3k": Scorer(score_geo3k),
    "gsm8k": Scorer(gsm8k.score_gsm8k, gsm8k.WINDOW_CHARACTERS),
}
# Names of ours, and those that verl's default_compute_score sends to the same rules.
DATA_SOURCES: Mapping[str, str] = {
    "arithmetic": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "math": "math_dapo",
    "aime": "math_dapo",
    "aime24": "math_dapo",
    "aime25": "math_dapo",
    "choice": "choice",
    "cflue": "choice",
    "cflue_mcq": "choice",
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "hiyouga/geometry3k": "geo3k",
    "geometry3k": "geo3k",
}


def routes(entries: Sequence[str] = ()) -> dict[str, str]:
    """The table of data sources and their scorers, with the entries of reward.scorers, which go first.

    Raises ConfigError for an entry that is not DATA_SOURCE=SCORER, names no scorer, or contradicts another.
    """
    added: dict[str, str] = {}
    for entry in entries:
        data_source, sign, name = (part.strip() for part in entry.rpartition("="))
        if not (sign and data_source and name in SCORERS):
            raise ConfigError(
                f"reward.scorers has {entry!r}, which is not DATA_SOURCE=SCORER with a known scorer; "
                f"scorers are {', '.join(sorted(SCORERS))}"
            )
        if added.setdefault(data_source, name) != name:
            raise ConfigError(
                f"reward.scorers gives {data_source!r} two scorers, {added[data_source]} and {name}; remove one"
            )
    return {**DATA_SOURCES, **added}


def scorer_name(data_source: str, table: Mapping[str, str]) -> str:
    """The name of a data source's scorer; raises DataError naming the known sources and scorers."""
    if data_source not in table:
        raise DataError(
            f"data_source {data_source!r} has no scorer; known are {', '.join(sorted(table))}: correct the column "
            f"data_source of the parquet, add {data_source}=SCORER to reward.scorers (scorers are "
            f"{', '.join(sorted(SCORERS))}), or set custom_reward.path to a file with a scorer of your own"
        )
    return table[data_source]


def scorer_for(data_source: str) -> Scorer:
    """The scorer that a data source has without further entries; raises DataError as scorer_name does."""
    return SCORERS[scorer_name(data_source, DATA_SOURCES)]


def require_scorers(data_sources: Collection[str], reward: RewardConfig, custom: CustomRewardConfig) -> None:
    """Raise unless every data source can be scored; runs nothing of the user's file.

    ConfigError for a bad entry of reward.scorers and for a custom_reward.path that is missing, is not Python or
    lacks the function; DataError for a data source without a scorer.
    """
    table = routes(reward.scorers)
    if custom.path is not None:
        require_function(Path(custom.path), custom.name)
        return
    for data_source in sorted(data_sources):
        scorer_name(data_source, table)
