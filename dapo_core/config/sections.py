"""Every key of a recipe. Defaults are the DAPO paper's recipe (arXiv:2503.14476, section 4.1).

Concepts and units are verl's: train, gen and mini sizes count prompts; micro sizes count what one device holds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dapo_core.config.fields import Section, key, volatile


class RunConfig(Section):
    """What a run is called and what its randomness grows from."""

    name: str = volatile("dapo", "Name shown in reports and in Prefect.", min_length=1, max_length=80)
    seed: int = key(0, "Seed of data generation, warm start, shuffling and sampling.", ge=0, le=2**31 - 1)


class StoreConfig(Section):
    """Where artifacts live."""

    path: str = volatile(".dapo", "Folder of artifacts and runs; shared between nodes when there are several.")


class ArithmeticConfig(Section):
    """The generated problems of `data.source: arithmetic`."""

    num_train: int = key(4096, "Training problems.", ge=16, le=1_000_000)
    num_eval: int = key(600, "Held-out problems, disjoint from training.", ge=1, le=100_000)
    max_level: int = key(5, "Hardest difficulty level.", ge=1, le=5)


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


class AlgorithmConfig(Section):
    """Advantage and loss. DAPO by default; GRPO is equal clips and no dynamic sampling."""

    normalize_by_std: bool = key(True, "Divide the group advantage by the group's standard deviation.")
    clip_ratio_low: float = key(0.2, "Lower clip: ratios below 1 - this stop pushing.", ge=0, lt=1)
    clip_ratio_high: float = key(0.28, "Upper clip, higher than the lower one: clip-higher.", ge=0, le=10)
    clip_ratio_dual: float = key(10.0, "Dual clip bound of the ratio where the advantage is negative.", gt=1)
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = key(
        "token-mean", "How token losses become one number."
    )


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO eq. 13)."""

    enabled: bool = key(True, "Penalise responses that come close to the length limit.")
    buffer_tokens: int = key(4096, "Tokens before the limit over which the penalty grows.", ge=1)
    penalty_factor: float = key(1.0, "Penalty at the limit.", ge=0, le=100)


class RewardConfig(Section):
    """What a response is worth."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    mask_truncated: bool = key(False, "Leave responses cut by the length limit out of the loss.")


class SamplerConfig(Section):
    """Dynamic sampling (DAPO section 3.2)."""

    dynamic: bool = key(True, "Keep only groups whose metric takes two different values.")
    metric: Literal["acc", "score", "seq_reward"] = key("acc", "What must differ within a group.")
    gen_prompts: int = key(1536, "Prompts drawn at a time while the step is not full.", ge=1)
    max_num_gen_batches: int = key(10, "Draws per training step before `on_exhausted` applies.", ge=1, le=1000)
    on_exhausted: Literal["raise", "train_partial", "skip_step"] = key(
        "raise", "What follows too few kept groups."
    )
    max_staleness: int = key(1, "Training steps that a surplus group may wait; 0 drops surplus.", ge=0, le=64)


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["vllm", "hf"] = key("vllm", "Inference engine of the rollout workers.")
    num_workers: int = key(1, "Rollout workers, one engine each.", ge=1, le=4096)
    threads_per_worker: int = volatile(2, "CPU threads of an engine.", ge=1, le=1024)
    group_size: int = key(16, "Responses per prompt (G).", ge=2, le=1024)
    temperature: float = key(1.0, "Sampling temperature.", gt=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling mass.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1: all.", ge=-1)
    max_response_tokens: int = key(20480, "Length limit of a response.", ge=1)
    max_num_seqs: int = key(
        256, "Sequences decoded at once per engine; decides which groups finish first.", ge=1, le=65_536
    )
    memory_utilization: float = key(0.8, "Share of device memory an engine takes.", gt=0, le=1)
    memory_gigabytes: float = key(1.0, "KV cache of an engine on a CPU.", gt=0)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "Precision of the engine's weights.")


class TrainConfig(Section):
    """Steps, batches and the optimizer."""

    device: Literal["cpu", "cuda", "npu"] = key("cpu", "What the policy runs on.")
    num_ranks: int = key(1, "FSDP2 ranks, one device each.", ge=1, le=65_536)
    threads_per_rank: int = volatile(1, "CPU threads of a rank.", ge=1, le=1024)
    total_steps: int = key(200, "Training steps, whatever dynamic sampling draws.", ge=1)
    train_prompts: int = key(512, "Prompts trained on per step (P).", ge=1)
    mini_prompts: int = key(32, "Prompts per optimizer step.", ge=1)
    micro_batch_tokens: int = key(32768, "Most tokens, padding included, that a device holds at once.", ge=1)
    learning_rate: float = key(1e-6, "Peak AdamW learning rate.", gt=0, le=1)
    warmup_steps: int = key(10, "Optimizer steps of linear warm-up.", ge=0)
    weight_decay: float = key(0.1, "AdamW weight decay.", ge=0, le=1)
    max_grad_norm: float = key(1.0, "Global gradient norm above which gradients are scaled down.", gt=0)
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto", "Compute precision; auto: float32 on a CPU.")
    save_every: int = volatile(20, "Training steps between checkpoints.", ge=1)
    keep_last: int = volatile(2, "Checkpoints kept.", ge=1)
    ray_address: str | None = volatile(None, "Running Ray cluster to join; unset starts a private one.")

    @model_validator(mode="after")
    def _mini_divides_train(self) -> TrainConfig:
        if self.train_prompts % self.mini_prompts:
            raise ValueError(
                f"train.train_prompts={self.train_prompts} is not a multiple of train.mini_prompts="
                f"{self.mini_prompts}; an optimizer step would get {self.train_prompts % self.mini_prompts} "
                "prompts instead; change one of the two"
            )
        return self


class MergeConfig(Section):
    """From FSDP shards to a Hugging Face folder."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = key(
        "keep", "Precision of the merged weights; keep: as trained, which is float32."
    )
    max_shard_bytes: int = key(5 * 1000**3, "Size at which a new safetensors file begins.", ge=1024)


class ServeConfig(Section):
    """The `vllm serve` process that answers the evaluation."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "Precision of the served weights.")
    max_model_len: int = key(22528, "Prompt plus response tokens.", ge=2)
    max_num_seqs: int = volatile(24, "Sequences decoded at once.", ge=1)
    eager: bool = key(False, "Compile nothing: a small model is served sooner, a large one slower.")
    memory_gigabytes: float | None = volatile(None, "KV cache; unset: what vLLM takes by itself.", gt=0)
    host: str = volatile("127.0.0.1", "Address to bind.")
    port: int = volatile(0, "Port to bind; 0 takes a free one.", ge=0, le=65_535)
    startup_seconds: float = volatile(900.0, "Deadline for the first healthy answer.", gt=0)
    extra_args: tuple[str, ...] = key((), "Further arguments of `vllm serve`, as typed.")


class EvaluateConfig(Section):
    """The before and after measurement."""

    temperature: float = key(0.0, "Sampling temperature; 0 is greedy.", ge=0, le=10)
    top_p: float = key(1.0, "Nucleus sampling mass.", gt=0, le=1)
    max_response_tokens: int = key(20480, "Length limit of an answer.", ge=1)
    seed: int = key(1234, "Sampling seed sent with each request.", ge=0)
    concurrency: int = volatile(48, "Requests in flight.", ge=1, le=10_000)
    request_timeout_seconds: float = volatile(3600.0, "Time-out of one request.", gt=0)
    max_attempts: int = volatile(4, "Attempts per request.", ge=1, le=100)
    max_failed_ratio: float = key(0.0, "Share of failed requests above which the stage fails.", ge=0, lt=1)


class Config(Section):
    """One recipe, resolved."""

    run: RunConfig = Field(default_factory=RunConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    data: DataConfig
    model: ModelConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    merge: MergeConfig = Field(default_factory=MergeConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)

    @model_validator(mode="after")
    def _batches_divide(self) -> Config:
        num_responses = self.train.mini_prompts * self.rollout.group_size
        if num_responses % self.train.num_ranks:
            raise ValueError(
                f"train.mini_prompts={self.train.mini_prompts} x rollout.group_size={self.rollout.group_size} = "
                f"{num_responses} responses per optimizer step do not divide over train.num_ranks="
                f"{self.train.num_ranks}; change train.mini_prompts, rollout.group_size or train.num_ranks"
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
    def _lengths_fit(self) -> Config:
        overlong, limit = self.reward.overlong, self.rollout.max_response_tokens
        if overlong.enabled and overlong.buffer_tokens >= limit:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                f"rollout.max_response_tokens={limit}: every response would be penalised; lower the buffer"
            )
        longest = self.data.max_prompt_tokens + limit
        if longest > self.train.micro_batch_tokens:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} is above "
                f"train.micro_batch_tokens={self.train.micro_batch_tokens}: the longest sequence would not fit "
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
