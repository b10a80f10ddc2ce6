"""The sections of a recipe that the chain of stages reads beside those of the training."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dapo_core.config.fields import JsonObject, Section, key, volatile
from dapo_core.config.training import TrainingConfig
from dapo_core.config.warm_start import ModelCodeConfig, WarmStartConfig
from eval.problems.registry import find_set
from tasks.data_config import DataConfig
from tasks.lengths import Lengths, bounds_of, explain
from tasks.serve_model.config import ServeConfig


class StoreConfig(Section):
    """The artifact store."""

    path: str = volatile(".dapo", "Folder of artifacts and runs; every node must see it.")


class ModelConfig(ModelCodeConfig):
    """The model to improve."""

    source: Literal["path", "recipe", "huggingface", "modelscope", "url"] = key(
        "path",
        "`path` takes a local folder, `recipe` builds a small model, `huggingface` and `modelscope` fetch from a "
        "hub, "
        "`url` from a web server.",
    )
    path: str | None = key(None, "Hugging Face model folder (source: path).")
    id: str | None = key(None, "ORG/NAME of the model (source: huggingface or modelscope).")
    revision: str | None = key(
        None, "Branch, tag or commit, resolved once a run; unset: the hub's default branch."
    )
    urls: tuple[str, ...] = key(
        (), "Addresses of files, or of one archive, each ending in #sha256=DIGEST (source: url)."
    )
    chat_template: str | None = key(
        None, "File with the Jinja chat template of a base model, for training, serving and evaluation."
    )
    allow_pickle: bool = key(
        False, "Take pickled weights of a hub or URL that has no safetensors, and convert them to these."
    )
    recipe: WarmStartConfig = Field(default_factory=WarmStartConfig)

    @model_validator(mode="after")
    def _keys_for_source(self) -> ModelConfig:
        for name, (sources, example) in _MODEL_KEYS.items():
            value = getattr(self, name)
            if self.source in sources and example and not value:
                raise ValueError(
                    f"model.source is {self.source}, but model.{name} is not set; set it to {example}"
                )
            if self.source not in sources and value:
                raise ValueError(
                    f"model.{name}={value} would be ignored by model.source={self.source}; set "
                    f"model.source={' or '.join(sources)} to use it, or remove it"
                )
        if self.id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.id):
            raise ValueError(f"model.id={self.id} is not of the form ORG/NAME, such as Qwen/Qwen3-8B")
        if self.urls:
            from downloads import resolve  # sends nothing

            resolve(self.urls)
        return self


# The sources that read a key, and for a key that they need what it is set to.
_HUBS = ("huggingface", "modelscope")
_MODEL_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "path": (("path",), "a Hugging Face folder"),
    "id": (_HUBS, "ORG/NAME, such as Qwen/Qwen3-8B"),
    "revision": (_HUBS, ""),
    "urls": (("url",), "addresses of its files, or of one archive"),
    "allow_pickle": ((*_HUBS, "url"), ""),
    "chat_template": (("path", *_HUBS, "url"), ""),
}


class MergeConfig(Section):
    """From FSDP shards to a Hugging Face folder."""

    checkpoint: Literal["latest", "best"] = key(
        "latest", "Checkpoint to merge: the last one, or the one with the highest validation/accuracy."
    )
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = key(
        "keep", "Precision of the merged weights; keep: float32, as trained."
    )
    max_shard_bytes: int = key(5 * 1000**3, "Largest size of a safetensors file.", ge=1024)


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible URL that grades responses. Its key: DAPO_JUDGE_API_KEY."""

    base_url: str | None = volatile(None, "Address of the judge; unset: none is asked.", min_length=1)
    model: str | None = key(None, "Name of the judge's model.", min_length=1)
    prompt: str | None = key(
        None, "File that asks for a verdict, with {problem}, {gold} and {response}; unset: the project's own."
    )
    votes: int = key(1, "Times that the judge is asked about each response; the majority decides.", ge=1, le=99)
    temperature: float = key(0.0, "Sampling temperature of the judge.", ge=0, le=10)
    max_response_tokens: int = key(4096, "Length limit of a vote, with the judge's thinking.", ge=1)
    headline: bool = key(False, "Take the judge's verdict as the accuracy in place of the grader's.")

    @model_validator(mode="after")
    def _votes_may_differ(self) -> JudgeConfig:
        if (self.base_url is None) != (self.model is None):
            raise ValueError("evaluate.judge needs both evaluate.judge.base_url and evaluate.judge.model")
        if self.headline and self.model is None:
            raise ValueError("evaluate.judge.headline=true needs evaluate.judge.base_url and evaluate.judge.model")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"evaluate.judge.votes={self.votes} at temperature 0 asks {self.votes} times for the same vote; "
                "set evaluate.judge.temperature, such as 0.7, or evaluate.judge.votes=1"
            )
        return self


# The key that sets each field of a request. The others may be set by evaluate.extra_body.
_REQUEST_KEYS = {
    "model": "the served model's name",
    "messages": "evaluate.prompt",
    "prompt": "evaluate.prompt",
    "max_tokens": "evaluate.max_response_tokens",
    "max_completion_tokens": "evaluate.max_response_tokens",
    "temperature": "evaluate.temperature",
    "top_p": "evaluate.top_p",
    "top_k": "evaluate.top_k",
    "seed": "evaluate.seed",
    "n": "evaluate.num_samples",
    "best_of": "evaluate.num_samples",
    "stop": "evaluate.prompt, whose template has its own",
    "stream": "nothing: responses are read whole",
    "echo": "evaluate.mode",
    "chat_template_kwargs": "evaluate.chat_template_kwargs",
}


class EvaluateConfig(Section):
    """The before and after measurement."""

    benchmark: str | None = key(
        None,
        "Registered set whose rows a file of data.eval holds; they are counted, asked and graded accordingly.",
    )
    api: Literal["chat", "completions"] = key(
        "chat", "completions sends no chat template, as in AISBench's guide."
    )
    prompt: str = key(
        "default",
        "aisbench, cot, few-shot, bare, given, or a file with {problem}; default: the benchmark's own.",
    )
    system_prompt: str | None = key(
        None, "System message of every prompt, in place of the file's own; unset: the file's, if it has one."
    )
    chat_template_kwargs: JsonObject = key(
        {}, "Arguments of the chat template, such as {enable_thinking: false}; sent with each request of a chat."
    )
    extra_body: JsonObject = key(
        {}, "Further fields of each request, such as {min_p: 0.05}; those with a key of their own are refused."
    )
    mode: Literal["generate", "loglikelihood"] = key(
        "generate",
        "loglikelihood: of the options of a multiple-choice question the likeliest, as a base model is measured.",
    )
    scorer: str | None = key(
        None,
        "Grades in place of the set's grader: a scorer's name, or FILE.py with compute_score (FILE.py:NAME "
        "for another function).",
    )
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    sampling: Literal["settings", "model"] = key(
        "settings",
        "settings: temperature, top_p and top_k below; model: those of the model's generation_config.json.",
    )
    temperature: float = key(0.0, "Sampling temperature; 0 is greedy.", ge=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling mass.", gt=0, le=1)
    top_k: int | None = key(None, "Sample among the k likeliest tokens; unset: not sent.", ge=1)
    max_response_tokens: int = key(20480, "Length limit of an answer.", ge=1)
    seed: int = key(1234, "Sampling seed sent with each request; sample i of a problem has seed + i.", ge=0)
    num_samples: int = key(1, "Answers to each problem.", ge=1, le=10_000)
    concurrency: int = volatile(48, "Requests in flight at each server.", ge=1, le=10_000)
    requests_per_second: float | None = volatile(None, "Most requests started per second; unset: no limit.", gt=0)
    request_timeout_seconds: float = volatile(3600.0, "Time limit of a whole request.", gt=0)
    max_attempts: int = volatile(
        8, "Attempts per request; the pause of half a second doubles each time.", ge=1, le=100
    )
    outage_seconds: float = volatile(120.0, "How long an unreachable server is awaited.", ge=0)
    max_failed_ratio: float = key(0.0, "Largest share of failed requests; above it the stage fails.", ge=0, lt=1)

    @field_validator("benchmark")
    @classmethod
    def _benchmark_is_registered(cls, name: str | None) -> str | None:
        if name is not None:
            find_set(name)
        return name

    @field_validator("extra_body")
    @classmethod
    def _fields_without_a_key(cls, fields: JsonObject) -> JsonObject:
        for name in fields:
            if name in _REQUEST_KEYS:
                raise ValueError(f"evaluate.extra_body.{name} would contradict {_REQUEST_KEYS[name]}; set that")
        return fields

    @model_validator(mode="after")
    def _one_word_on_sampling(self) -> EvaluateConfig:
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(self, name)
            if self.sampling == "model" and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"evaluate.{name}={value} would be ignored by evaluate.sampling=model; set "
                    "evaluate.sampling=settings to use it, or remove it"
                )
        return self

    @model_validator(mode="after")
    def _template_is_used(self) -> EvaluateConfig:
        if self.chat_template_kwargs and (self.api == "completions" or self.mode == "loglikelihood"):
            raise ValueError(
                f"evaluate.chat_template_kwargs={dict(self.chat_template_kwargs)} would be ignored: a request "
                "without a chat has no chat template; set evaluate.api=chat, or remove them"
            )
        return self


class TimeLimitsConfig(Section):
    """Hours after which a stage is ended without a retry; its progress is kept. Unset: no limit."""

    prepare_data_hours: float | None = volatile(2.0, "Limit of prepare-data.", gt=0)
    fetch_model_hours: float | None = volatile(12.0, "Limit of fetch-model.", gt=0)
    evaluate_model_hours: float | None = volatile(24.0, "Limit of evaluate-model, each of the two.", gt=0)
    train_policy_hours: float | None = volatile(None, "Limit of train-policy.", gt=0)
    merge_checkpoint_hours: float | None = volatile(6.0, "Limit of merge-checkpoint.", gt=0)


class FlowConfig(Section):
    """Locks, time limits and logging of a run."""

    lock_path: str | None = volatile(
        None,
        "Lock file that lets one training run at a time; unset: a file in store.path. Stores that share devices "
        "need the same file.",
    )
    unwatched_minutes: float = volatile(
        30.0, "How long training continues after its parent process died; 0 ends it at once.", ge=0
    )
    stop_seconds: float = volatile(120.0, "Time for a stopping training to write its last checkpoint.", ge=0)
    log_lines_per_minute: int = volatile(
        120,
        "Most lines per minute from a stage's output on Prefect's page, plus as many warnings; the log file has "
        "all.",
        ge=1,
    )
    time_limits: TimeLimitsConfig = Field(default_factory=TimeLimitsConfig)


class ChainConfig(TrainingConfig):
    """What the stages of the chain read, checked together."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    data: DataConfig
    model: ModelConfig
    merge: MergeConfig = Field(default_factory=MergeConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)

    @property
    def served(self) -> ServeConfig:
        """`serve` with the argument that model.trust_remote_code stands for."""
        if not self.model.trust_remote_code:
            return self.serve
        return self.serve.model_copy(update={"extra_args": (*self.serve.extra_args, "--trust-remote-code")})

    @model_validator(mode="after")
    def _merged_checkpoint_is_kept(self) -> ChainConfig:
        if self.merge.checkpoint == "best" and not self.checkpoint.keep_best:
            raise ValueError(
                "merge.checkpoint=best needs a best checkpoint, and checkpoint.keep_best=0 keeps none; set "
                "checkpoint.keep_best=1, or merge.checkpoint=latest"
            )
        return self

    @property
    def lengths(self) -> Lengths:
        """The keys that bound tokens of prompts and responses."""
        return Lengths(
            prompt=self.data.max_prompt_tokens,
            response=self.rollout.max_response_tokens,
            buffer=self.reward.overlong.buffer_tokens,
            answer=self.evaluate.max_response_tokens,
            served=self.serve.max_model_len,
            micro_batch=self.train.micro_batch_tokens,
        )

    @model_validator(mode="after")
    def _lengths_fit(self) -> ChainConfig:
        """All contradictions of lengths at once, those of a training and those of the servers."""
        found, advice = explain(self.lengths, bounds_of(self))
        if found:
            raise ValueError("\n".join([*found, advice]))
        return self
