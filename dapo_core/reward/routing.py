"""Maps data sources to scorers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dapo_core.errors import ConfigError, DataError
from dapo_core.reward.custom import PARAMETERS, require_function
from dapo_core.reward.scorers import DATA_SOURCES, REPLACED, SCORERS, scorer_hint
from eval.problems.registry import SETS

if TYPE_CHECKING:
    from dapo_core.config.training import CustomRewardConfig, RewardConfig


def routes(entries: Sequence[str] = ()) -> dict[str, str]:
    """Return the scorer of each data source: registered sets, known names, reward.scorers.

    Entries take precedence. Raises ConfigError for an entry that is not DATA_SOURCE=SCORER, names
    an unknown scorer or contradicts another entry.
    """
    added: dict[str, str] = {}
    for entry in entries:
        data_source, sign, name = (part.strip() for part in entry.rpartition("="))
        if not (sign and data_source and name in SCORERS):
            raise ConfigError(
                f"reward.scorers has {entry!r}, which is not DATA_SOURCE=SCORER with a known "
                f"scorer; {scorer_hint(name)}"
            )
        if added.setdefault(data_source, name) != name:
            raise ConfigError(
                f"reward.scorers maps {data_source!r} to two scorers, {added[data_source]} and "
                f"{name}; remove one"
            )
    registered = {problem_set.name: problem_set.scorer for problem_set in SETS.values()}
    return {**registered, **DATA_SOURCES, **added}


def scorer_name(data_source: str, table: Mapping[str, str]) -> str:
    """Return the name of a data source's scorer. Raises DataError for an unknown source."""
    if data_source not in table:
        known = f"known are {', '.join(sorted(table))}"
        raise DataError(
            f"data_source {data_source!r} has no scorer; "
            f"{scorer_hint(data_source) if data_source in REPLACED else known}: fix the column "
            f"data_source of the parquet, add {data_source}=SCORER to reward.scorers (scorers are "
            f"{', '.join(sorted(SCORERS))}), or set custom_reward.path to your own scorer"
        )
    return table[data_source]


def require_scorers(
    data_sources: Collection[str], reward: RewardConfig, custom: CustomRewardConfig
) -> None:
    """Raise unless every data source can be scored; the user's file is not executed.

    ConfigError for a bad entry of reward.scorers, or a custom_reward.path that is missing, not
    Python or lacks the function; DataError for a data source without a scorer.
    """
    table = routes(reward.scorers)
    if custom.path is not None:
        if taken := custom.arguments.keys() & set(PARAMETERS):
            raise ConfigError(
                f"custom_reward.arguments.{min(taken)} would be ignored: every call sets it to the "
                "response's own; remove it"
            )
        parameters = (*PARAMETERS, *custom.arguments)
        require_function(Path(custom.path), custom.name, parameters=parameters)
        return
    for data_source in sorted(data_sources):
        scorer_name(data_source, table)
