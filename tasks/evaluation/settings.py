"""What running servers are asked, as the section `evaluate` says, and the check that they serve one model."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from dapo_core.errors import ConfigError
from eval.endpoint import LOOPBACK, Endpoint, Sampling
from eval.problems.files import columns_of
from eval.problems.items import EvaluationSet
from eval.problems.registry import load_set
from eval.problems.sources import default_cache
from eval.recorder import Benchmark
from eval.results import make_folder
from eval.suite import Member, require_single, write_suite
from redaction import redact
from tasks.config import ChainConfig
from tasks.config.data import SetConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.data.layout import benchmark_file
from tasks.evaluation.graders import grader_for, judge_for
from tasks.serve_model.failure import ServeError, ServerUnreachable

CLIENT_SECONDS = 60.0

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


@dataclass(frozen=True)
class ServedBy:
    """How the user names a server, for errors."""

    url: str = "--base-url"
    model: str = "--model-name"
    key_variable: str = "VLLM_API_KEY"


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


def served_folder(server: Endpoint) -> Path | None:
    """The folder of the served model, if the server names one of this machine."""
    root = Path(_served_models(server, ServedBy()).get(server.model, ""))
    return root if (root / "config.json").is_file() else None


def served_model_identity(servers: Sequence[Endpoint], said: ServedBy = ServedBy()) -> str:
    """A digest of the served model: its folder, and the files there if they are local.

    Raises ServeError when a server does not serve that name, or serves another model than the first one, and
    ServerUnreachable when one does not answer.
    """
    identities = [_identity(server, said) for server in servers]
    for server, identity in zip(servers, identities, strict=True):
        if identity != identities[0]:
            raise ServeError(
                f"{server.base_url} serves {identity[0]}, {servers[0].base_url} {identities[0][0]}, or other "
                f"files of that name: an evaluation is of one model; start all servers with the same folder"
            )
    return hashlib.sha256(repr(identities[0]).encode()).hexdigest()


def _identity(server: Endpoint, said: ServedBy) -> tuple[str, list[tuple[str, int, int]]]:
    url = server.url("models")
    roots = _served_models(server, said)
    if server.model not in roots:
        raise ServeError(f"{url} serves {', '.join(roots)}, not {server.model!r}; set {said.model}")
    folder = Path(roots[server.model])
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))
    ]
    return str(folder), files


def model_client(server: Endpoint, said: ServedBy = ServedBy()) -> httpx.Client:
    """A client with the server's key. One on this machine is reached without the environment's proxy."""
    api_key = server.api_key or ""
    if not (api_key.isascii() and api_key.isprintable()):  # the HTTP library's own refusal would quote it
        raise ServeError(
            f"{said.key_variable} holds a character that HTTP headers forbid, such as a newline; set it again"
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    is_near = urlsplit(server.base_url).hostname in LOOPBACK
    return httpx.Client(headers=headers, timeout=CLIENT_SECONDS, trust_env=not is_near)


def _served_models(server: Endpoint, said: ServedBy) -> dict[str, str]:
    """Served name -> model folder, or the name again if the server does not list the folder."""
    url = server.url("models")
    try:
        with model_client(server, said) as client:
            answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerUnreachable(
            f"{url} does not answer: {str(error) or type(error).__name__}; start it with dapo serve, or check "
            f"{said.url}"
        ) from None
    if answer.status_code in (401, 403):
        why = f"{said.key_variable} is not " + ("the server's" if server.api_key else "set")
        raise ServeError(f"{url} refuses the key: HTTP {answer.status_code}; {why}")
    try:
        models = answer.raise_for_status().json()["data"]
        return {model["id"]: str(model.get("root") or model["id"]) for model in models}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        raise ServeError(
            f"{url} does not list models: HTTP {answer.status_code}, {redact(answer.text)[:100]!r}; {said.url} "
            "must be an OpenAI-compatible server"
        ) from None
