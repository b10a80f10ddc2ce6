"""The section `evaluate`: benchmarks, prompts, sampling, grading, and further models to compare."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_serializer, field_validator, model_validator

from dapo_core.config.fields import Entry, JsonObject, Section, key, volatile
from downloads.nearest import nearest
from eval.endpoint import REQUEST_KEYS, SAMPLING_FIELDS
from eval.problems.registry import POOLED
from eval.report.gates import BEFORE, LAST_NIGHT, parse_gate
from tasks.config.data import ColumnsConfig, listed_sets

_NAME = re.compile(r"\w[\w-]*")


class BenchmarkConfig(Entry):
    """One benchmark of the suite. Unset keys fall back to `evaluate.*`."""

    what = "a benchmark of evaluate.benchmarks"

    set: str = Field(
        description="A registered name, a file or folder, or a hub's id.", min_length=1
    )
    path: str | None = key(
        None, "File or folder with the rows of a registered set, instead of fetching it."
    )
    columns: ColumnsConfig | None = key(None, "Columns of your own rows, as data.columns.")
    name: str | None = key(None, "Name in results and reports; unset: the name of the set or file.")
    weight: float = key(
        1.0, "Weight in the pooled verdict, relative to the other benchmarks.", gt=0, le=1e6
    )
    api: Literal["chat", "completions"] | None = key(None, "As evaluate.api.")
    prompt: str | None = key(None, "As evaluate.prompt.")
    system_prompt: str | None = key(None, "As evaluate.system_prompt.")
    mode: Literal["generate", "loglikelihood"] | None = key(None, "As evaluate.mode.")
    scorer: str | None = key(None, "As evaluate.scorer.")
    sampling: Literal["settings", "model"] | None = key(
        None, "As evaluate.sampling; `settings` if temperature, top_p or top_k is set here."
    )
    temperature: float | None = key(None, "As evaluate.temperature.", ge=0, le=10)
    top_p: float | None = key(None, "As evaluate.top_p.", gt=0, le=1)
    top_k: int | None = key(None, "As evaluate.top_k.", ge=1)
    max_response_tokens: int | None = key(None, "As evaluate.max_response_tokens.", ge=1)
    num_samples: int | None = key(None, "As evaluate.num_samples.", ge=1, le=10_000)

    @property
    def label(self) -> str:
        """The name used in results, gates and reports."""
        if self.name is not None:
            return self.name
        plain = re.sub(r"@[^/]*", "", self.set.partition("#")[0])  # without digest and revision
        return re.sub(r"[^\w-]+", "-", PurePosixPath(plain).stem)


_BASELINE_NAME = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_TAKEN_NAMES = re.compile(rf"before|after|{POOLED}|step[_-]?\d+")
# Per key: the locations that use it.
_READ_WITH = {
    "source": ("id",),
    "revision": ("id",),
    "chat_template": ("path", "id"),
    "stop_tokens": ("path", "id"),
    "trust_remote_code": ("path", "id"),
    "model": ("base_url",),
    "api_key_variable": ("base_url",),
}


class BaselineConfig(Entry):
    """Another model to evaluate: a folder (`path`), a hub's (`id`), or served (`base_url`)."""

    what = "a baseline of evaluate.baselines"

    name: str = Field(description="Name of its column in the report, also used in gates.")
    path: str | None = key(None, "Hugging Face model folder.")
    id: str | None = key(None, "ORG/NAME of a hub model.", pattern=r"^[\w.-]+/[\w.-]+$")
    source: Literal["huggingface", "modelscope"] = key("huggingface", "The hub of `id`.")
    revision: str | None = key(None, "Branch, tag or commit of `id`.")
    chat_template: str | None = key(None, "As model.chat_template.")
    stop_tokens: tuple[str, ...] = key((), "As model.stop_tokens.")
    trust_remote_code: bool = key(False, "As model.trust_remote_code.")
    base_url: str | None = key(
        None, "URL of an OpenAI-compatible server.", pattern=r"^https?://[^/\s]"
    )
    model: str | None = key(None, "Name of the model that base_url serves.", min_length=1)
    api_key_variable: str | None = volatile(
        None, "Environment variable with the API key for base_url.", pattern=r"^[A-Za-z_]\w*$"
    )

    @model_validator(mode="after")
    def _one_place(self) -> BaselineConfig:
        if not _BASELINE_NAME.fullmatch(self.name) or _TAKEN_NAMES.fullmatch(self.name):
            raise ValueError(
                f"evaluate.baselines: {self.name!r} names a column beside before, after, {POOLED} "
                "and steps; it must begin with a letter and contain only letters, digits, _ and -"
            )
        given = [name for name in ("path", "id", "base_url") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(
                f"evaluate.baselines: {self.name} sets {found} of path, id and base_url; set "
                "exactly one"
            )
        for name in self.model_fields_set & _READ_WITH.keys():
            if given[0] not in _READ_WITH[name]:
                raise ValueError(
                    f"evaluate.baselines: {name} of {self.name} would be ignored by {given[0]}; "
                    f"remove it, or use {' or '.join(_READ_WITH[name])} instead"
                )
        if self.base_url is not None and "@" in urlsplit(self.base_url).netloc:
            raise ValueError(
                f"evaluate.baselines: base_url of {self.name} holds a user or password, which runs "
                "would keep in clear text; put the key into an environment variable and name it in "
                "api_key_variable"
            )
        if self.base_url is not None and self.model is None:
            raise ValueError(
                f"evaluate.baselines: {self.name} has base_url; set `model` to the name it serves"
            )
        return self


class EvaluateConfig(Section):
    """The before and after measurement."""

    benchmarks: tuple[BenchmarkConfig, ...] = key(
        (),
        "The suite: one or more sets as in data.eval, each with its own sampling; empty: "
        "data.eval.",
    )
    headline: str | None = key(None, "Benchmark that decides the verdict; unset: the first.")
    gates: tuple[str, ...] = volatile(
        (),
        "Conditions that must hold after training, such as math500 >= before - 1 "
        "(docs/evaluation.md).",
    )
    baselines: tuple[BaselineConfig, ...] = volatile(
        (),
        "Further models to evaluate, each a column: name, and path, id or base_url "
        "(docs/evaluation.md).",
    )
    checkpoints: tuple[int, ...] | str = volatile(
        (),
        "Training steps whose checkpoints are also kept, merged and evaluated: a list, or every N.",
    )
    api: Literal["chat", "completions"] = key(
        "chat", "completions sends prompts without a chat template, as in AISBench's guide."
    )
    prompt: str = key(
        "default",
        "aisbench, cot, few-shot, bare, given, or a file with {problem}; default: the benchmark's "
        "own.",
    )
    system_prompt: str | None = key(
        None, "System message of every prompt, instead of the file's; unset: the file's, if any."
    )
    chat_template_kwargs: JsonObject = key(
        {},
        "Arguments of the chat template, such as {enable_thinking: false}; sent with each chat "
        "request.",
    )
    extra_body: JsonObject = key(
        {},
        "Extra fields of each request, such as {min_p: 0.05}; fields with a key of their own are "
        "refused.",
    )
    renamed_fields: JsonObject = key(
        {},
        "Request fields to send under another name, such as {max_tokens: max_completion_tokens}.",
    )
    mode: Literal["generate", "loglikelihood"] = key(
        "generate",
        "loglikelihood: picks the likeliest option of multiple-choice questions, as usual for base "
        "models.",
    )
    scorer: str | None = key(
        None,
        "Scorer that replaces the set's grader: a name, or FILE.py with compute_score "
        "(FILE.py:NAME for another function).",
        min_length=1,
    )
    sampling: Literal["settings", "model"] = key(
        "settings",
        "settings: temperature, top_p and top_k below; model: values from the model's "
        "generation_config.json.",
    )
    temperature: float | None = key(
        0.0, "Sampling temperature; 0 is greedy; null: not sent.", ge=0, le=10
    )
    top_p: float | None = key(1.0, "Nucleus sampling mass; null: not sent.", gt=0, le=1)
    top_k: int | None = key(None, "Sample from the k likeliest tokens; unset: not sent.", ge=1)
    max_response_tokens: int | None = key(
        20480,
        "Token limit of an answer; null: not sent, so the server's limit applies (vLLM's for "
        "completions is 16 tokens).",
        ge=1,
    )
    seed: int | None = key(
        1234,
        "Sampling seed sent with each request; sample i of a problem has seed + i; null: not sent.",
        ge=0,
    )
    num_samples: int = key(1, "Answers per problem.", ge=1, le=10_000)
    concurrency: int = volatile(48, "Concurrent requests per server.", ge=1, le=10_000)
    requests_per_second: float | None = volatile(
        None, "Maximum requests started per second; unset: no limit.", gt=0
    )
    request_timeout_seconds: float = volatile(3600.0, "Timeout of a request.", gt=0)
    max_attempts: int = volatile(
        8, "Attempts per request; the pause starts at 0.5 s and doubles.", ge=1, le=100
    )
    outage_seconds: float = volatile(120.0, "How long to wait for an unreachable server.", ge=0)
    max_failed_ratio: float = key(
        0.0, "Maximum share of failed requests; above it the stage fails.", ge=0, lt=1
    )

    @field_validator("extra_body")
    @classmethod
    def _fields_without_a_key(cls, fields: JsonObject) -> JsonObject:
        for name in fields.keys() & REQUEST_KEYS.keys():
            raise ValueError(
                f"evaluate.extra_body.{name} is set by {REQUEST_KEYS[name]}; remove it"
            )
        return fields

    @field_validator("renamed_fields")
    @classmethod
    def _names_of_sent_fields(cls, names: JsonObject) -> JsonObject:
        for field, name in names.items():
            if field not in SAMPLING_FIELDS:
                near = nearest(field, sorted(SAMPLING_FIELDS))
                raise ValueError(f"evaluate.renamed_fields: requests have no field {field}{near}")
            is_name = isinstance(name, str) and name and list(names.values()).count(name) == 1
            if not is_name or name in {*SAMPLING_FIELDS, "model", "messages", "prompt"}:
                raise ValueError(
                    f"evaluate.renamed_fields.{field}={name!r} is not a name for this field alone"
                )
        return names

    @model_validator(mode="after")
    def _sampling_is_consistent(self) -> EvaluateConfig:
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            if self.sampling == "model" and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"evaluate.{name}={value} would be ignored by evaluate.sampling=model; set "
                    "evaluate.sampling=settings to use it, or remove it"
                )
        if self.scorer is not None and self.mode == "loglikelihood":
            raise ValueError(
                f"evaluate.scorer={self.scorer} would be ignored by evaluate.mode=loglikelihood, "
                "where the likeliest option is the answer; remove one of the two"
            )
        if self.chat_template_kwargs and self.api == "completions":
            raise ValueError(
                f"evaluate.chat_template_kwargs={dict(self.chat_template_kwargs)} would be ignored "
                "by evaluate.api=completions, which has no chat template; set evaluate.api=chat, "
                "or remove them"
            )
        return self

    @field_validator("benchmarks", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return listed_sets(value)

    @field_validator("benchmarks")
    @classmethod
    def _names_differ(cls, benchmarks: tuple[BenchmarkConfig, ...]) -> tuple[BenchmarkConfig, ...]:
        labels = [one.label for one in benchmarks]
        for label in labels:
            if not _NAME.fullmatch(label) or label == POOLED:
                raise ValueError(
                    f"evaluate.benchmarks: {label!r} names a folder and a column: it may only "
                    f"contain letters, digits, _ and -, and must not be {POOLED!r}; set the "
                    "benchmark's `name`"
                )
            if labels.count(label) > 1:
                raise ValueError(
                    f"evaluate.benchmarks names {label!r} twice; give one of them another `name`, "
                    f"such as {{set: {label}, name: {label}-avg4, num_samples: 4}}"
                )
        return benchmarks

    @field_validator("baselines")
    @classmethod
    def _baselines_differ(cls, baselines: tuple[BaselineConfig, ...]) -> tuple[BaselineConfig, ...]:
        names = [one.name.lower() for one in baselines]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"evaluate.baselines names {twice!r} twice; give one of them another name"
            )
        return baselines

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _steps_or_every(cls, value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"every [1-9]\d*", value):
            return value
        if isinstance(value, list | tuple) and all(type(step) is int for step in value):
            return tuple(sorted(set(value)))
        raise ValueError(
            f"evaluate.checkpoints={value!r} is neither a list of steps, such as [20, 40], nor "
            "every N"
        )

    @field_serializer("baselines")
    def _baselines_as_written(self, baselines: tuple[BaselineConfig, ...]) -> Any:
        return [one.model_dump(exclude_unset=True) for one in baselines]

    @field_serializer("benchmarks")
    def _as_written(self, benchmarks: tuple[BenchmarkConfig, ...]) -> Any:
        dumped = [one.model_dump(exclude_unset=True) for one in benchmarks]
        return [one["set"] if one.keys() == {"set"} else one for one in dumped]

    @model_validator(mode="after")
    def _names_are_known(self) -> EvaluateConfig:
        names = [one.label for one in self.benchmarks]
        if self.headline is not None and self.headline not in names:
            listed = ", ".join(names) or "which is empty"
            raise ValueError(
                f"evaluate.headline={self.headline} is not in evaluate.benchmarks: {listed}"
            )
        for gate in self.gates:
            parse_gate(gate, names, (BEFORE, *(one.name for one in self.baselines), LAST_NIGHT))
        return self

    @property
    def named(self) -> dict[str, BenchmarkConfig]:
        """The benchmarks by name, in order."""
        return {one.label: one for one in self.benchmarks}

    @property
    def headline_name(self) -> str:
        """The benchmark that decides the verdict; "" without a suite."""
        return self.headline or next(iter(self.named), "")

    def steps(self, total_steps: int) -> tuple[int, ...]:
        """The steps of `checkpoints`; "every N" excludes the last, which is evaluated anyway."""
        if not isinstance(self.checkpoints, str):
            return self.checkpoints
        every = int(self.checkpoints.removeprefix("every "))
        return tuple(range(every, total_steps, every))

    def of(self, benchmark: BenchmarkConfig) -> EvaluateConfig:
        """The section for one benchmark alone."""
        overrides = {
            name: value
            for name in type(self).model_fields.keys() & benchmark.model_fields_set
            if (value := getattr(benchmark, name)) is not None
        }
        if overrides.keys() & {"temperature", "top_p", "top_k"}:
            overrides.setdefault("sampling", "settings")
        reset: dict[str, Any] = {"benchmarks": (), "headline": None, "gates": ()}
        return self.model_copy(update=overrides | reset)
