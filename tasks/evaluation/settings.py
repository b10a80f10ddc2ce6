"""Turns the section `evaluate` into evaluation sets, sampling, graders and client limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from dapo_core.reward.custom import require_function
from dapo_core.reward.scorers import SCORERS, scorer_hint
from eval.answers.grading import Grader, ScorerGrader
from eval.answers.pool import Pool
from eval.endpoint import Sampling
from eval.problems.columns import Layout
from eval.problems.evaluation_sets import load_set
from eval.problems.files import columns_of
from eval.problems.items import EvaluationSet
from eval.problems.rows import PREPARED
from eval.problems.sources import default_cache
from eval.requests.dispatch import Limits
from eval.requests.recorder import Benchmark
from eval.results.rows import make_folder
from eval.results.suite import Member, require_single, write_suite
from tasks.artifacts.artifact import sha256_of
from tasks.config import ChainConfig
from tasks.config.data import SetConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.data.layout import benchmark_file

logger = logging.getLogger(__name__)

# Further sampling keys of generation_config.json, named as in vLLM requests.
_FURTHER_SAMPLING = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def set_of(
    settings: EvaluateConfig,
    problems: str | Path | None,
    name: str | None = None,
    pictures: Path | None = None,
) -> EvaluationSet:
    """`load_set` with the settings' prompt and mode; `name` is the registered set, if any."""
    prompt, system = settings.prompt, settings.system_prompt
    return load_set(problems, name, prompt, settings.api, system, settings.mode, pictures)


def benchmark_of(
    settings: EvaluateConfig,
    asked: EvaluationSet,
    output: Path,
    name: str,
    model_folder: Path | None,
) -> Benchmark:
    """A benchmark with the settings' sampling and grader; `model_folder` as in `sampling_of`."""
    sampling, grader = sampling_of(settings, model_folder), grader_for(settings)
    return Benchmark(asked, sampling, output, name, settings.max_failed_ratio, grader)


def load_sets(
    config: ChainConfig, work: Path, problems: str | None = None, name: str | None = None
) -> dict[str, EvaluationSet]:
    """The sets of evaluate.benchmarks by name, prepared as in a run; else one set under "".

    That set is `problems` (of the registered set `name`, if given), or set `name` from its default
    source. data.columns and data.prompt_template, or those of a set of data.eval that names this
    file or its columns, apply to files that have all columns and are not prepared. Pictures are
    stored in the folder `work`. Raises ProblemsError for bad rows.
    """
    settings = config.evaluate
    own = None if problems is None or name is not None else _own_set(config, Path(problems))
    if not settings.benchmarks and own is None:
        return {"": set_of(settings, problems, name, work)}
    from eval.problems.pictures import PictureStore
    from tasks.data.prepare import write_held_out  # imports pyarrow
    from tasks.data.sources import benchmark_sources, eval_sources

    if own is not None and not settings.benchmarks:
        asked = config.data.model_copy(update={"eval": (own,)})
        file = work / f"{Path(own.set).stem}.parquet"
        sources = eval_sources(config.model_copy(update={"data": asked}))
        write_held_out(config, sources, file, PictureStore(work))
        return {"": set_of(settings, file)}
    found = {}
    for name, source in benchmark_sources(config).items():
        file = work / benchmark_file(name)
        write_held_out(config, [source.here(default_cache())], file, PictureStore(work))
        found[name] = set_of(settings.of(settings.named[name]), file)
    return found


def _own_set(config: ChainConfig, path: Path) -> SetConfig | None:
    """The file as a set of data.eval, with the recipe's columns and prompt; None without any."""
    if not path.exists():
        return None
    columns = columns_of(path)
    if set(PREPARED.columns).issubset(columns):
        return None
    for one in map(config.data.of, (*config.data.eval, SetConfig(set=str(path)))):
        layout = one.columns.layout if one.columns else Layout()
        names = {name if name in columns else name.partition(".")[0] for name in layout.columns}
        is_this = Path(one.set).exists() and path.samefile(one.set)
        has_prompt = one.prompt_template is not None or one.system_prompt is not None
        if names.issubset(columns) and (layout.names_columns or (is_this and has_prompt)):
            return one.model_copy(update={"set": str(path), "path": None})
    return None


def benchmarks_into(
    output: Path,
    settings: EvaluateConfig,
    sets: Mapping[str, EvaluationSet],
    model_folder: Path | None,
) -> list[Benchmark]:
    """Benchmarks for the sets of `load_sets`, with a folder each; writes suite.json for a suite.

    Raises ResultsError if the output folder holds a single evaluation and this is a suite, or vice
    versa.
    """
    named = settings.named
    if not named:
        require_single(output)
        return [benchmark_of(settings, sets[""], output, "", model_folder)]
    write_suite(
        make_folder(output),
        [Member(name, one.weight) for name, one in named.items()],
        settings.headline_name,
    )
    return [
        benchmark_of(settings.of(named[name]), found, output / name, name, model_folder)
        for name, found in sets.items()
    ]


def sampling_of(settings: EvaluateConfig, model_folder: Path | None) -> Sampling:
    """The sampling settings; with `sampling: model`, those of generation_config.json.

    Without a folder no values are sent and the server's defaults apply. For vLLM these come from
    the same file, unless it was started with `--generation-config vllm`. Raises ConfigError if the
    file sets no sampling.
    """
    if settings.mode == "loglikelihood":  # nothing is sampled
        return Sampling(1, seed=settings.seed, extra_body=settings.extra_body or None)
    kwargs = settings.chat_template_kwargs if settings.api == "chat" else None
    sampling = Sampling(
        max_tokens=settings.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        num_samples=settings.num_samples,
        chat_template_kwargs=kwargs or None,
        extra_body=settings.extra_body or None,
        renamed_fields=settings.renamed_fields or None,
    )
    if settings.sampling == "settings":
        return sampling
    if model_folder is None:
        logger.warning(
            "evaluate.sampling=model: the model's folder is not on this machine, so temperature, "
            "top_p and top_k are not sent and the server's defaults apply; settings.json cannot "
            "record their values"
        )
        return replace(sampling, temperature=None, top_p=None, top_k=None, source="server")
    named = _read_generation_config(model_folder)
    further = {name: named[name] for name in _FURTHER_SAMPLING if name in named}
    return replace(
        sampling,
        temperature=named["temperature"],
        top_p=named.get("top_p", 1.0),
        top_k=named.get("top_k"),
        extra_body=further | settings.extra_body or None,
        source="model",
    )


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """The values set in generation_config.json, with temperature 1 if unset, like vLLM."""
    path = folder / "generation_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"evaluate.sampling=model needs {path}: {error}; set evaluate.sampling=settings and a "
            "temperature"
        ) from None
    named = named if isinstance(named, dict) else {}
    named = {name: value for name, value in named.items() if value is not None}
    if "temperature" in named or named.keys() & {"top_p", "top_k"}:
        return {"temperature": 1.0, **named}
    if named.get("do_sample") is False:
        return {**named, "temperature": 0.0}
    raise ConfigError(
        f"evaluate.sampling=model: {path} sets no temperature, top_p or top_k, so the model has no "
        "default sampling; set evaluate.sampling=settings and evaluate.temperature"
    )


SCORER_SECONDS = 120.0  # per call; a judge may think
NUM_SCORERS = 4
SHORT_DIGEST = 12


def grader_for(settings: EvaluateConfig) -> Grader | None:
    """The grader for evaluate.scorer; None to use the set's grader. Raises ConfigError."""
    if settings.scorer is None or settings.mode == "loglikelihood":
        return None
    file, rule = scorer_file(settings), f"scorer-{settings.scorer}/2"
    arguments: tuple[str, ...] = ()
    if file is not None:
        arguments = (str(file[0]), file[1])
        rule = f"scorer-{file[0].name}:{file[1]}/{sha256_of(file[0])[:SHORT_DIGEST]}"
    pool = Pool(
        "dapo_core.reward.custom:load_scorer",
        arguments,
        num_processes=NUM_SCORERS,
        timeout_seconds=SCORER_SECONDS,
    )
    return ScorerGrader(pool, None if file else settings.scorer, rule)


def limits_of(settings: EvaluateConfig) -> Limits:
    """Concurrency, request rate and timeouts of the client."""
    return Limits(
        concurrency=settings.concurrency,
        requests_per_second=settings.requests_per_second,
        timeout_seconds=settings.request_timeout_seconds,
        max_attempts=settings.max_attempts,
        outage_seconds=settings.outage_seconds,
    )


def scorer_file(settings: EvaluateConfig) -> tuple[Path, str] | None:
    """File and function of evaluate.scorer; None for a built-in scorer. Raises ConfigError."""
    scorer = settings.scorer
    if scorer is None or scorer in SCORERS:
        return None
    start, suffix, function = scorer.rpartition(".py")
    if not suffix or (function and not function.startswith(":")):
        raise ConfigError(
            f"evaluate.scorer={scorer} is not a scorer, FILE.py or FILE.py:FUNCTION; "
            f"{scorer_hint(scorer)}"
        )
    file = Path(start + suffix), function[1:] or "compute_score"
    require_function(*file, keys=("evaluate.scorer", "evaluate.scorer"))
    return file
