"""The sections of a recipe that the chain reads besides those of training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from dapo_core.config.fields import Section, key, volatile
from dapo_core.config.training import TrainingConfig
from dapo_core.config.warm_start import ModelCodeConfig, WarmStartConfig
from tasks.config.adopt import AdoptConfig
from tasks.config.data import DataConfig
from tasks.config.evaluate import BenchmarkConfig, EvaluateConfig
from tasks.config.lengths import KEYS, Lengths, bounds_of, explain
from tasks.config.serve import ServeConfig
from tasks.stages import BY_COMMAND


class StoreConfig(Section):
    """The artifact store."""

    path: str = volatile(".dapo", "Folder of artifacts and runs; every node must see it.")


class ModelConfig(ModelCodeConfig):
    """The model to improve."""

    source: Literal["path", "recipe", "huggingface", "modelscope", "url"] = key(
        "path",
        "`path` takes a local folder, `recipe` builds a small model, `huggingface` and "
        "`modelscope` fetch from a hub, `url` from a web server.",
    )
    path: str | None = key(None, "Hugging Face model folder (source: path).")
    id: str | None = key(None, "ORG/NAME of the model (source: huggingface or modelscope).")
    revision: str | None = key(
        None, "Branch, tag or commit, resolved once per run; unset: the hub's default branch."
    )
    urls: tuple[str, ...] = key(
        (), "Addresses of files, or of one archive, each ending in #sha256=DIGEST (source: url)."
    )
    chat_template: str | None = key(
        None,
        "File with the Jinja chat template of a base model, for training, serving and evaluation.",
    )
    stop_tokens: tuple[str, ...] = key(
        (),
        "Tokens that end a response besides the model's own, such as <|im_end|> of a chat template "
        "that a base model does not know.",
    )
    allow_pickle: bool = key(
        False, "Accept pickled weights if the hub or URL has no safetensors, and convert them."
    )
    recipe: WarmStartConfig = Field(default_factory=WarmStartConfig)

    @model_validator(mode="after")
    def _keys_for_source(self) -> ModelConfig:
        for name, (sources, example) in _MODEL_KEYS.items():
            value = getattr(self, name)
            if self.source in sources and example and not value:
                raise ValueError(
                    f"model.source is {self.source}, but model.{name} is not set; set it to "
                    f"{example}"
                )
            if self.source not in sources and value:
                raise ValueError(
                    f"model.{name}={value} would be ignored by model.source={self.source}; set "
                    f"model.source={' or '.join(sources)} to use it, or remove it"
                )
        if self.id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.id):
            raise ValueError(
                f"model.id={self.id} is not of the form ORG/NAME, such as Qwen/Qwen3-8B"
            )
        if self.urls:
            from downloads import DownloadError, resolve

            try:
                resolve(self.urls)  # makes no request
            except DownloadError as error:
                raise ValueError(str(error)) from error
        return self


# Per key: the sources that read it, and an example if they require it.
_HUBS = ("huggingface", "modelscope")
_MODEL_KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "path": (("path",), "a Hugging Face folder"),
    "id": (_HUBS, "ORG/NAME, such as Qwen/Qwen3-8B"),
    "revision": (_HUBS, ""),
    "urls": (("url",), "addresses of its files, or of one archive"),
    "allow_pickle": ((*_HUBS, "url"), ""),
    "chat_template": (("path", *_HUBS, "url"), ""),
    "stop_tokens": (("path", *_HUBS, "url"), ""),
}


class MergeConfig(Section):
    """From FSDP shards to a Hugging Face folder."""

    checkpoint: Literal["latest", "best"] = key(
        "latest",
        "Checkpoint to merge: the last one, or the one with the highest validation/accuracy.",
    )
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = key(
        "keep",
        "Precision of the merged weights; keep: float32, as trained (under train.lora, of those "
        "with an adapter).",
    )
    max_shard_bytes: int = key(5 * 1000**3, "Largest size of a safetensors file.", ge=1024)


if TYPE_CHECKING:
    TimeLimitsConfig = Section
else:
    TimeLimitsConfig = create_model(
        "TimeLimitsConfig",
        __base__=Section,
        __doc__="Hours until a stage is stopped without a retry; waiting counts. null: no limit.",
        **{
            f"{stage.name}_hours": (
                float | None,
                volatile(stage.hours, f"Limit of {stage.command}.", gt=0),
            )
            for stage in BY_COMMAND.values()
        },
    )


class FlowConfig(Section):
    """Locks, time limits and logging of a run."""

    lock_path: str | None = volatile(
        None,
        "Lock file that limits training to one at a time; unset: a file in store.path. Stores that "
        "share devices need the same file.",
    )
    stop_seconds: float = volatile(
        120.0, "Time for a stopping training to write its last checkpoint.", ge=0
    )
    log_lines_per_minute: int = volatile(
        120,
        "Maximum lines per minute from a stage's output in the Prefect UI, plus as many warnings; "
        "the log file has all.",
        ge=1,
    )
    time_limits: TimeLimitsConfig = Field(default_factory=TimeLimitsConfig)


class ChainConfig(TrainingConfig):
    """Everything the stages of the chain read, validated together."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    data: DataConfig
    model: ModelConfig
    adopt: AdoptConfig = Field(default_factory=AdoptConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)

    @classmethod
    def instead_of(cls, unknown: Mapping[str, Any]) -> dict[str, str]:
        """Return what to write instead of keys of verl or MindSpeed."""
        from interop.foreign import instead_of

        return instead_of(unknown)

    def for_benchmark(self, benchmark: BenchmarkConfig) -> ChainConfig:
        """The recipe for one benchmark alone."""
        return self.model_copy(update={"evaluate": self.evaluate.of(benchmark)})

    @property
    def served(self) -> ServeConfig:
        """The section `serve`, plus the argument implied by model.trust_remote_code."""
        if not self.model.trust_remote_code:
            return self.serve
        return self.serve.model_copy(
            update={"extra_args": (*self.serve.extra_args, "--trust-remote-code")}
        )

    @property
    def is_adopted(self) -> bool:
        """Whether a checkpoint trained elsewhere takes the place of this recipe's training."""
        return self.adopt.folder is not None

    @model_validator(mode="after")
    def _adopted_is_one_checkpoint(self) -> ChainConfig:
        others = {
            f"merge.checkpoint={self.merge.checkpoint}": self.merge.checkpoint == "best",
            f"evaluate.checkpoints={self.evaluate.checkpoints}": bool(self.checkpoint_steps),
        }
        for other, is_set in others.items():
            if self.is_adopted and is_set:
                raise ValueError(
                    f"adopt.folder is one checkpoint, but {other} needs those of a training; "
                    "remove the key, and adopt other checkpoints in runs of their own"
                )
        return self

    @model_validator(mode="after")
    def _merged_checkpoint_is_kept(self) -> ChainConfig:
        if self.merge.checkpoint == "best" and not self.checkpoint.keep_best:
            raise ValueError(
                "merge.checkpoint=best needs a best checkpoint, and checkpoint.keep_best=0 keeps "
                "none; set checkpoint.keep_best=1, or merge.checkpoint=latest"
            )
        return self

    @property
    def checkpoint_steps(self) -> tuple[int, ...]:
        """The steps of evaluate.checkpoints."""
        return self.evaluate.steps(self.train.total_steps)

    @model_validator(mode="after")
    def _evaluated_checkpoints_are_saved(self) -> ChainConfig:
        self.require_saved("evaluate.checkpoints", self.checkpoint_steps)
        return self

    @property
    def lengths(self) -> Lengths:
        """The recipe's token limits; for a suite, those of its longest answers."""
        asked = [self.lengths_of(one) for one in self.evaluate.benchmarks] or [
            self.lengths_of(None)
        ]
        return max(asked, key=lambda lengths: lengths.answer)

    def lengths_of(self, benchmark: BenchmarkConfig | None) -> Lengths:
        """The token limits with those of one benchmark, or of data.eval."""
        settings, answer_key = self.evaluate, KEYS["answer"]
        if benchmark is not None:
            settings = settings.of(benchmark)
            if benchmark.max_response_tokens is not None:
                answer_key = f"evaluate.benchmarks.{benchmark.label}.max_response_tokens"
        return Lengths(
            prompt=self.data.max_prompt_tokens,
            response=self.rollout.max_response_tokens,
            buffer=self.reward.overlong.buffer_tokens,
            answer=settings.max_response_tokens or 1,  # null: as many as the server has room for
            served=self.serve.max_model_len,
            micro_batch=self.train.micro_batch_tokens,
            answer_key=answer_key,
        )

    @model_validator(mode="after")
    def _lengths_fit(self) -> ChainConfig:
        """Reports all conflicts between token limits at once, of training and of serving."""
        found, advice = explain(self.lengths, bounds_of(self))
        if found:
            raise ValueError("\n".join([*found, advice]))
        return self
