"""The graders that the section `evaluate` sets in place of a set's own, or beside it."""

from __future__ import annotations

import difflib
from pathlib import Path

from dapo_core.errors import ConfigError
from dapo_core.reward.custom import require_function
from dapo_core.reward.scorers import SCORERS
from eval.answers.grading import Grader
from eval.answers.pool import Pool
from eval.answers.scored import ScorerGrader
from tasks.artifacts.artifact import sha256_of
from tasks.evaluate_config import EvaluateConfig

SCORER_SECONDS = 30.0  # of one call
NUM_SCORERS = 4
SHORT_DIGEST = 12


def grader_for(settings: EvaluateConfig) -> Grader | None:
    """The grader that evaluate.scorer names; None for the set's own. Raises ConfigError."""
    if settings.scorer is None or settings.mode == "loglikelihood":
        return None
    file, rule = scorer_file(settings), f"scorer-{settings.scorer}/1"
    arguments: tuple[str, ...] = ()
    if file is not None:
        arguments = (str(file[0]), file[1])
        rule = f"scorer-{file[0].name}:{file[1]}/{sha256_of(file[0])[:SHORT_DIGEST]}"
    pool = Pool(
        "dapo_core.reward.custom:load_scorer", arguments, num_processes=NUM_SCORERS, timeout_seconds=SCORER_SECONDS
    )
    return ScorerGrader(pool, None if file else settings.scorer, rule)


def scorer_file(settings: EvaluateConfig) -> tuple[Path, str] | None:
    """The file of evaluate.scorer and its function; None for a scorer's name. Raises ConfigError."""
    named = settings.scorer
    if named is None or named in SCORERS:
        return None
    start, suffix, function = named.rpartition(".py")
    if not suffix or (function and not function.startswith(":")):
        close = difflib.get_close_matches(named, SCORERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"scorers are {', '.join(sorted(SCORERS))}"
        raise ConfigError(f"evaluate.scorer={named} is neither a scorer nor FILE.py or FILE.py:FUNCTION; {hint}")
    file = Path(start + suffix), function[1:] or "compute_score"
    require_function(*file, keys=("evaluate.scorer", "evaluate.scorer"))
    return file
