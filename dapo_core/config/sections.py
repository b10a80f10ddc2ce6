"""Every key of a recipe; those of reinforcement learning are in training.py.

Concepts and units are verl's: train, gen and mini sizes count prompts; micro sizes count what one device holds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_core.config.fields import Section, key, volatile
from dapo_core.config.operation import FlowConfig
from dapo_core.config.training import (
    MOST_HORIZONS_PER_STEP,
    AlgorithmConfig,
    CheckpointConfig,
    CustomRewardConfig,
    RewardConfig,
    RolloutConfig,
    SamplerConfig,
    TrainConfig,
    ValidationConfig,
)


class RunConfig(Section):
    """What a run is called and what its randomness grows from."""

    name: str = volatile(
        "dapo",
        "Name shown in reports and in Prefect; of a file the file's, if not given.",
        min_length=1,
        max_length=80,
    )
    seed: int = key(0, "Seed of data generation, warm start, shuffling and sampling.", ge=0, le=2**31 - 1)
    deterministic: bool = key(
        False, "Deterministic kernels, and groups judged in prompt order: slower, the same every time."
    )


class StoreConfig(Section):
    """Where artifacts live."""

    path: str = volatile(".dapo", "Folder of artifacts and runs; shared between nodes when there are several.")


class ArithmeticConfig(Section):
    """The generated problems of `data.source: arithmetic`."""

    num_train: int = key(4096, "Training problems.", ge=16, le=1_000_000)
    num_eval: int = key(600, "Held-out problems, disjoint from training.", ge=1, le=100_000)
    max_level: int = key(5, "Hardest difficulty level.", ge=1, le=5)
    seed: int | None = key(None, "Seed of the problems; null: run.seed.", ge=0)


class DataConfig(Section):
    """Training prompts and the held-out evaluation set."""

    source: Literal["arithmetic", "path"] = key("path", "`arithmetic` generates problems, `path` reads parquet.")
    train_path: str | None = key(None, "Training parquet in the DAPO-Math-17k schema (source: path).")
    eval_path: str | None = key(None, "Evaluation parquet or MATH-500 jsonl (source: path).")
    arithmetic: ArithmeticConfig = Field(default_factory=ArithmeticConfig)
    max_prompt_tokens: int = key(
        2048, "Longest prompt in tokens; longer ones are an error with their count.", ge=1
    )
    shuffle: bool = key(True, "Shuffle prompts anew in each epoch.")

    @model_validator(mode="after")
    def _paths_for_source(self) -> DataConfig:
        if self.source == "path" and not (self.train_path and self.eval_path):
            raise ValueError(
                "data.source is path, but data.train_path or data.eval_path is not set; "
                "set both, or data.source=arithmetic for the generated problems"
            )
        if self.source != "path" and (self.train_path or self.eval_path):
            raise ValueError(
                f"data.train_path={self.train_path} and data.eval_path={self.eval_path} would be ignored by "
                f"data.source={self.source}; set data.source=path to use them, or remove them"
            )
        return self


class ModelRecipeConfig(Section):
    """The small Qwen3 that `model.source: recipe` builds and warms up."""

    num_layers: int = key(2, "Decoder layers.", ge=1, le=64)
    hidden_size: int = key(128, "Width of the residual stream.", ge=16, le=8192)
    num_heads: int = key(4, "Attention heads.", ge=1, le=128)
    num_steps: int = key(600, "Supervised steps before reinforcement learning.", ge=1, le=100_000)
    batch_size: int = key(32, "Solutions per supervised step.", ge=1, le=65_536)
    learning_rate: float = key(3e-3, "Peak AdamW rate of the supervised steps.", gt=0, le=1)


class ModelConfig(Section):
    """The model to improve."""

    source: Literal["recipe", "path"] = key("path", "`recipe` builds a small model, `path` takes a local folder.")
    path: str | None = key(None, "Hugging Face model folder (source: path).")
    recipe: ModelRecipeConfig = Field(default_factory=ModelRecipeConfig)

    @model_validator(mode="after")
    def _path_for_source(self) -> ModelConfig:
        if self.source == "path" and not self.path:
            raise ValueError("model.source is path, but model.path is not set; set it to a Hugging Face folder")
        if self.source != "path" and self.path:
            raise ValueError(
                f"model.path={self.path} would be ignored by model.source={self.source}; set model.source=path to "
                "use it, or remove it"
            )
        return self


class MergeConfig(Section):
    """From FSDP shards to a Hugging Face folder."""

    checkpoint: Literal["latest", "best"] = key(
        "latest", "Which checkpoint of the training: the last one, or that of the highest validation/accuracy."
    )
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = key(
        "keep", "Precision of the merged weights; keep: as trained, which is float32."
    )
    max_shard_bytes: int = key(5 * 1000**3, "Size at which a new safetensors file begins.", ge=1024)


# What says it instead. vLLM takes _ for - in long arguments, and = before a value.
_SERVE_KEYS = {
    "--tensor-parallel-size": "serve.tensor_parallel",
    "-tp": "serve.tensor_parallel",
    "--data-parallel-size": "serve.data_parallel",
    "-dp": "serve.data_parallel",
    "--dtype": "serve.dtype",
    "--max-model-len": "serve.max_model_len",
    "--max-num-seqs": "serve.max_num_seqs",
    "--enforce-eager": "serve.eager",
    "--no-enforce-eager": "serve.eager",
    "--gpu-memory-utilization": "serve.memory_utilization",
    "--kv-cache-memory-bytes": "serve.memory_gigabytes",
    "--host": "serve.host",
    "--port": "serve.port",
    "--served-model-name": "nothing: the evaluation asks for its own name",
    "--api-key": "the environment variable VLLM_API_KEY, which `ps` does not show",
}


class ServeConfig(Section):
    """The `vllm serve` processes that answer the evaluation."""

    num_servers: int = volatile(
        1, "Independent servers that share an evaluation, each on devices of its own.", ge=1, le=1024
    )
    tensor_parallel: int = volatile(1, "Devices that share the layers of a server's model.", ge=1, le=1024)
    data_parallel: int = volatile(1, "Copies of the model behind one server, vLLM's own way.", ge=1, le=1024)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "Precision of the served weights.")
    max_model_len: int = key(22528, "Prompt plus response tokens.", ge=2)
    max_num_seqs: int = volatile(24, "Sequences decoded at once.", ge=1)
    eager: bool = key(False, "Compile nothing: a small model is served sooner, a large one slower.")
    memory_utilization: float | None = volatile(
        None, "Share of a device's memory that a server takes; unset: vLLM's default.", gt=0, le=1
    )
    memory_gigabytes: float | None = volatile(
        None,
        "KV cache in place of a share of the memory, as a CPU wants it; unset: what vLLM takes by itself.",
        gt=0,
    )
    host: str = volatile("127.0.0.1", "Address to bind, IPv4 or IPv6.", min_length=1)
    port: int = volatile(
        0, "Port to bind, and those after it for more servers; 0 takes free ones.", ge=0, le=65_535
    )
    startup_seconds: float = volatile(900.0, "Deadline for the first healthy answer of all servers.", gt=0)
    extra_args: tuple[str, ...] = key((), "Further arguments of `vllm serve`, as typed.")

    @property
    def devices_per_server(self) -> int:
        """Devices that one server works on."""
        return self.tensor_parallel * self.data_parallel

    @model_validator(mode="after")
    def _one_word_on_memory(self) -> ServeConfig:
        if self.memory_utilization is not None and self.memory_gigabytes is not None:
            raise ValueError(
                f"serve.memory_utilization={self.memory_utilization:g} would be ignored by serve.memory_gigabytes="
                f"{self.memory_gigabytes:g}, which sizes the KV cache by itself; set one of the two to null"
            )
        return self

    @model_validator(mode="after")
    def _ports_exist(self) -> ServeConfig:
        last = self.port + self.num_servers - 1
        if self.port and last > 65_535:
            raise ValueError(
                f"serve.port={self.port} with serve.num_servers={self.num_servers} needs ports up to {last}, "
                "beyond 65535; lower serve.port, or set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _keys_before_arguments(self) -> ServeConfig:
        for word in self.extra_args:
            name = word.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if name in _SERVE_KEYS:
                raise ValueError(f"serve.extra_args: {word} has a place of its own; use {_SERVE_KEYS[name]}")
        return self


class EvaluateConfig(Section):
    """The before and after measurement."""

    benchmark: (
        Literal[
            "math500", "aime24", "aime25", "amc23", "gsm8k", "olympiadbench", "minerva", "arithmetic", "choice"
        ]
        | None
    ) = key(None, "Known set whose rows are counted and graded as such; unset: a set of your own.")
    api: Literal["chat", "completions"] = key("chat", "completions: no chat template, as AISBench's guide asks.")
    prompt: str = key(
        "default",
        "aisbench, cot, few-shot, bare, given, or a file that says {problem}; default: the benchmark's own.",
    )
    temperature: float = key(0.0, "Sampling temperature; 0 is greedy.", ge=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling mass.", gt=0, le=1)
    top_k: int | None = key(None, "Likeliest tokens that are sampled from; unset: not sent.", ge=1)
    max_response_tokens: int = key(20480, "Length limit of an answer.", ge=1)
    seed: int = key(1234, "Sampling seed sent with each request; sample i of a problem has seed + i.", ge=0)
    num_samples: int = key(1, "Answers to each problem.", ge=1, le=10_000)
    concurrency: int = volatile(48, "Requests in flight at each server.", ge=1, le=10_000)
    requests_per_second: float | None = volatile(None, "Most requests begun in a second; unset: no bound.", gt=0)
    request_timeout_seconds: float = volatile(3600.0, "Time-out of a request as a whole.", gt=0)
    max_attempts: int = volatile(
        8, "Attempts per request; waits of half a second, one, two and so on.", ge=1, le=100
    )
    outage_seconds: float = volatile(
        120.0, "How long a server that takes no connections may need to return.", ge=0
    )
    max_failed_ratio: float = key(0.0, "Share of failed requests above which the stage fails.", ge=0, lt=1)


class Config(Section):
    """One recipe, resolved."""

    run: RunConfig = Field(default_factory=RunConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    data: DataConfig
    model: ModelConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    custom_reward: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)

    @model_validator(mode="after")
    def _batches_divide(self) -> Config:
        num_responses = self.train.mini_prompts * self.rollout.group_size
        if num_responses % self.train.num_data_ranks:
            raise ValueError(
                f"train.mini_prompts={self.train.mini_prompts} x rollout.group_size={self.rollout.group_size} = "
                f"{num_responses} responses per optimizer step do not divide over train.num_ranks="
                f"{self.train.num_ranks} / train.sequence_parallel={self.train.sequence_parallel} = "
                f"{self.train.num_data_ranks} data-parallel ranks; change train.mini_prompts, rollout.group_size "
                "or train.num_ranks"
            )
        most = self.sampler.gen_prompts * self.sampler.max_num_gen_batches
        if most < self.train.train_prompts:
            raise ValueError(
                f"sampler.gen_prompts={self.sampler.gen_prompts} x sampler.max_num_gen_batches="
                f"{self.sampler.max_num_gen_batches} = {most} prompts can never fill train.train_prompts="
                f"{self.train.train_prompts}; raise one of the two or lower train.train_prompts"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        if self.checkpoint.keep_best and not self.validation.every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs accuracies to compare, and "
                "validation.every=0 measures none; set validation.every, or checkpoint.keep_best=0"
            )
        if self.merge.checkpoint == "best" and not self.checkpoint.keep_best:
            raise ValueError(
                "merge.checkpoint=best needs a best checkpoint, and checkpoint.keep_best=0 keeps none; set "
                "checkpoint.keep_best=1, or merge.checkpoint=latest"
            )
        return self

    @model_validator(mode="after")
    def _metric_is_known_while_sampling(self) -> Config:
        if self.sampler.metric == "seq_final_reward" and self.algorithm.kl.place == "reward":
            raise ValueError(
                "sampler.metric=seq_final_reward with algorithm.kl.place=reward would keep every group: KL "
                "differs between any two responses, and is known after sampling; set sampler.metric=seq_reward"
            )
        return self

    @model_validator(mode="after")
    def _one_table_of_scorers(self) -> Config:
        custom = self.custom_reward
        if custom.path is not None and self.reward.scorers:
            raise ValueError(
                f"reward.scorers={list(self.reward.scorers)} would be ignored by custom_reward.path="
                f"{custom.path}, whose function scores every response; remove one of the two"
            )
        if custom.path is None and custom.name != "compute_score":
            raise ValueError(
                f"custom_reward.name={custom.name} would be ignored without custom_reward.path; set the file too, "
                "or remove the name"
            )
        return self

    @model_validator(mode="after")
    def _adaptive_coefficient_stays_positive(self) -> Config:
        kl, num_responses = self.algorithm.kl, self.train.train_prompts * self.rollout.group_size
        if kl.controller == "adaptive" and num_responses >= MOST_HORIZONS_PER_STEP * kl.horizon:
            raise ValueError(
                f"algorithm.kl.horizon={kl.horizon:g} is passed {num_responses / kl.horizon:.1f} times by a step "
                f"of train.train_prompts={self.train.train_prompts} x rollout.group_size="
                f"{self.rollout.group_size} responses: from {MOST_HORIZONS_PER_STEP} on, the adaptive coefficient "
                f"can become 0 or negative; raise algorithm.kl.horizon, for instance to {4 * num_responses}"
            )
        return self

    @model_validator(mode="after")
    def _correction_compares_like_with_like(self) -> Config:
        correction, rollout = self.algorithm.rollout_correction, self.rollout
        is_on = correction.importance != "off" or correction.mask != "off"
        if is_on and (rollout.top_p < 1 or rollout.top_k > 0):
            raise ValueError(
                f"algorithm.rollout_correction (importance={correction.importance}, mask={correction.mask}) with "
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} would correct for the truncation "
                "itself: the engine's log-probs are over the tokens that are left, the policy's over all; set "
                "rollout.top_p=1 and rollout.top_k=-1, or both corrections to off"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Config:
        overlong, limit = self.reward.overlong, self.rollout.max_response_tokens
        if overlong.enabled and overlong.buffer_tokens >= limit:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                f"rollout.max_response_tokens={limit}: every response would be penalised; lower the buffer"
            )
        longest = self.data.max_prompt_tokens + limit
        most = self.train.micro_batch_tokens * self.train.sequence_parallel
        if longest > most:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above "
                f"train.micro_batch_tokens={self.train.micro_batch_tokens} x train.sequence_parallel="
                f"{self.train.sequence_parallel} = {most}: the longest sequence would not fit "
                "into one micro-batch; raise train.micro_batch_tokens"
            )
        served = self.data.max_prompt_tokens + self.evaluate.max_response_tokens
        if served > self.serve.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens + evaluate.max_response_tokens = {served} is above "
                f"serve.max_model_len={self.serve.max_model_len}: the server would refuse requests; "
                "raise serve.max_model_len"
            )
        return self
