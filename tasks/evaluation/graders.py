"""The graders that the section `evaluate` sets in place of a set's own, or beside it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dapo_core.errors import ConfigError
from dapo_core.reward.custom import require_function
from dapo_core.reward.scorers import SCORERS
from eval.answers.grading import Grader
from eval.answers.pool import Pool
from eval.answers.scored import ScorerGrader
from eval.dispatch import Limits
from eval.endpoint import Endpoint, Sampling
from eval.judge import PROMPT, Judge
from tasks.artifacts.artifact import sha256_of
from tasks.config.evaluate import EvaluateConfig

SCORER_SECONDS = 30.0  # of one call
NUM_SCORERS = 4
SHORT_DIGEST = 12
JUDGE_KEY_VARIABLE = "DAPO_JUDGE_API_KEY"


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


def judge_for(settings: EvaluateConfig) -> Judge | None:
    """The judge of evaluate.judge; None without one. Raises ConfigError and InputError for its prompt."""
    named = settings.judge
    if named.base_url is None or named.model is None or settings.mode == "loglikelihood":
        return None
    try:
        prompt = PROMPT if named.prompt is None else Path(named.prompt).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"evaluate.judge.prompt={named.prompt} cannot be read: {error}") from None
    return Judge(
        Endpoint(named.base_url, named.model, os.environ.get(JUDGE_KEY_VARIABLE)),
        Sampling(named.max_response_tokens, named.temperature, seed=settings.seed),
        named.votes,
        prompt,
        named.headline,
        limits_of(settings),
    )


def limits_of(settings: EvaluateConfig) -> Limits:
    """Concurrency, pace and patience of the client."""
    return Limits(
        concurrency=settings.concurrency,
        requests_per_second=settings.requests_per_second,
        timeout_seconds=settings.request_timeout_seconds,
        max_attempts=settings.max_attempts,
        outage_seconds=settings.outage_seconds,
    )


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
