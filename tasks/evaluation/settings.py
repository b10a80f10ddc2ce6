"""What the section `evaluate` asks for: sets, sampling, graders, judge and limits."""

from __future__ import annotations

import difflib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from dapo_core.reward.custom import require_function
from dapo_core.reward.scorers import SCORERS
from eval.answers.grading import Grader
from eval.answers.pool import Pool
from eval.answers.scored import ScorerGrader
from eval.dispatch import Limits
from eval.endpoint import Endpoint, Sampling
from eval.judge import PROMPT, Judge
from eval.problems.files import columns_of
from eval.problems.items import EvaluationSet
from eval.problems.registry import load_set
from eval.problems.sources import default_cache
from eval.recorder import Benchmark
from eval.results import make_folder
from eval.suite import Member, require_single, write_suite
from tasks.artifacts.artifact import sha256_of
from tasks.config import ChainConfig
from tasks.config.data import SetConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.data.layout import benchmark_file

logger = logging.getLogger(__name__)

# What generation_config.json may say beside temperature, top_p and top_k, under the names of vLLM's requests.
_FURTHER_SAMPLING = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def set_of(settings: EvaluateConfig, problems: str | Path | None, name: str | None = None) -> EvaluationSet:
    """`load_set` with the settings' prompt and mode; `name` is of the registered set that the problems are."""
    return load_set(problems, name, settings.prompt, settings.api, settings.system_prompt, settings.mode)


def benchmark_of(
    settings: EvaluateConfig, asked: EvaluationSet, output: Path, name: str, model_folder: Path | None
) -> Benchmark:
    """One benchmark with the settings' sampling, grader and judge; `model_folder` is as in `sampling_of`.

    Raises what that, `grader_for` and `judge_for` raise.
    """
    sampling, grader, judge = sampling_of(settings, model_folder), grader_for(settings), judge_for(settings)
    return Benchmark(asked, sampling, output, name, settings.max_failed_ratio, grader, judge)


def load_sets(config: ChainConfig, problems: str | None, name: str | None = None) -> dict[str, EvaluationSet]:
    """The sets of evaluate.benchmarks by name, prepared as in a run, else what is named alone, by "".

    That is `problems`, of the registered set `name` if given, or that set from its default source. data.columns
    hold for a file that has them all, which a prepared one does not.

    Raises ProblemsError for unusable rows.
    """
    settings, columns = config.evaluate, config.data.columns
    is_file = problems is not None and name is None and Path(problems).exists()
    if not settings.benchmarks and not (is_file and columns.is_set):
        return {"": set_of(settings, problems, name)}
    from tasks.data.prepare import write_held_out  # imports pyarrow
    from tasks.data.sources import benchmark_sources, eval_sources

    if not settings.benchmarks:
        path = Path(str(problems))
        if not {one for one in dict(columns).values() if one}.issubset(columns_of(path)):
            return {"": set_of(settings, path)}
        asked = config.data.model_copy(update={"eval": (SetConfig(set=str(path)),)})
        with tempfile.TemporaryDirectory() as work:
            file = Path(work) / f"{path.stem}.parquet"
            write_held_out(config, eval_sources(config.model_copy(update={"data": asked})), file)
            return {"": set_of(settings, file)}
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for name, source in benchmark_sources(config).items():
            file = Path(work) / benchmark_file(name)
            if not source.is_generated:
                source = replace(source, path=source.local(default_cache()))
            write_held_out(config, [source], file)
            found[name] = set_of(settings.of(settings.named[name]), file)
    return found


def asked_into(
    output: Path, settings: EvaluateConfig, sets: Mapping[str, EvaluationSet], model_folder: Path | None
) -> list[Benchmark]:
    """The sets of `load_sets` with their places in an output folder, where suite.json is written for several.

    Raises ResultsError for a folder that holds the other kind.
    """
    named = settings.named
    if not named:
        require_single(output)
        return [benchmark_of(settings, sets[""], output, "", model_folder)]
    write_suite(
        make_folder(output), [Member(name, one.weight) for name, one in named.items()], settings.headline_name
    )
    return [
        benchmark_of(settings.of(named[name]), found, output / name, name, model_folder)
        for name, found in sets.items()
    ]


def sampling_of(settings: EvaluateConfig, model_folder: Path | None) -> Sampling:
    """The sampling of the section `evaluate`; with `sampling: model` that of the folder's generation_config.json.

    Without a folder nothing is sent, so that the server's own default applies, which for vLLM is that file too
    unless it was started with `--generation-config vllm`. Raises ConfigError for a file without sampling.
    """
    if settings.mode == "loglikelihood":  # nothing is sampled
        return Sampling(1, seed=settings.seed, extra_body=settings.extra_body or None)
    sampling = Sampling(
        max_tokens=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        num_samples=settings.num_samples,
        chat_template_kwargs=settings.chat_template_kwargs or None if settings.api == "chat" else None,
        extra_body=settings.extra_body or None,
    )
    if settings.sampling == "settings":
        return sampling
    if model_folder is None:
        logger.warning(
            "evaluate.sampling=model: the model's folder is not on this machine, so temperature, top_p and top_k "
            "are not sent and the server's own defaults apply; settings.json cannot record their values"
        )
        return replace(sampling, temperature=None, top_p=None, top_k=None, source="server")
    named = _read_generation_config(model_folder)
    further = {name: named[name] for name in _FURTHER_SAMPLING if name in named} | settings.extra_body
    return replace(
        sampling,
        temperature=named["temperature"],
        top_p=named.get("top_p", 1.0),
        top_k=named.get("top_k"),
        extra_body=further or None,
        source="model",
    )


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """The values of generation_config.json that are set, with a temperature: vLLM's 1 where it names none."""
    path = folder / "generation_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"evaluate.sampling=model needs {path}: {error}; set evaluate.sampling=settings and a temperature"
        ) from None
    named = {name: value for name, value in named.items() if value is not None} if isinstance(named, dict) else {}
    if "temperature" in named or named.keys() & {"top_p", "top_k"}:
        return {"temperature": 1.0, **named}
    if named.get("do_sample") is False:
        return {**named, "temperature": 0.0}
    raise ConfigError(
        f"evaluate.sampling=model: {path} names no temperature, top_p or top_k, so this model has no sampling of "
        f"its own; set evaluate.sampling=settings and evaluate.temperature"
    )


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
