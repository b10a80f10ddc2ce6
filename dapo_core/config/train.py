"""The `train` section: steps, batches, the optimizer, and how the model is laid out on devices.

Defaults are the DAPO paper's recipe (arXiv:2503.14476, section 4.1).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from dapo_core.config.fields import Section, key, volatile


class ProfileConfig(Section):
    """Profiler traces of policy ranks, written to the training output."""

    steps: tuple[PositiveInt, ...] = volatile((), "Training steps to trace; a trace is megabytes.")
    ranks: tuple[NonNegativeInt, ...] = volatile((0,), "Policy ranks that trace these steps.")


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685), trained in place of the weights."""

    rank: int = key(0, "Rank of the adapters; 0: train all weights instead.", ge=0, le=512)
    alpha: float = key(32.0, "An adapter's product is scaled by alpha / rank.", gt=0)
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "Linear modules with an adapter, by name, in all decoder layers.",
        min_length=1,
    )
    dropout: float = key(0.0, "Dropout of the adapters' inputs in updates.", ge=0, lt=1)

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank


class TrainConfig(Section):
    """Steps, batches, the optimizer, and how the model is laid out on devices."""

    total_steps: int = key(200, "Training steps, whatever dynamic sampling draws.", ge=1)
    train_prompts: int = key(512, "Prompts trained on per training step (P).", ge=1)
    mini_prompts: int = key(32, "Prompts per optimizer step.", ge=1)
    passes: int = key(1, "Optimizer passes over a step's prompts (PPO epochs).", ge=1, le=1000)
    shuffle_passes: bool = key(True, "Reshuffle the mini-batches in every later pass.")
    learning_rate: float = key(1e-6, "Peak AdamW learning rate.", gt=0, le=1)
    warmup_steps: int = key(
        320, "Optimizer steps of linear warm-up; 320: the paper's 20 x 16.", ge=0
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key(
        "constant",
        "Learning rate after warm-up: constant, linear decay, cosine decay, or wsd (warm-up, "
        "stable, then cosine decay over the last `decay_ratio` of the steps).",
    )
    schedule_steps: int | None = key(
        None, "Optimizer step at which the decay ends; unset: the training's last one.", ge=1
    )
    min_learning_rate_ratio: float = key(
        0.0, "Last learning rate as a share of the peak.", ge=0, le=1
    )
    decay_ratio: float = key(0.1, "Share of the steps over which wsd decays.", gt=0, le=1)
    weight_decay: float = key(0.1, "AdamW weight decay.", ge=0, le=1)
    adam_beta1: float = key(0.9, "AdamW beta1: decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = key(0.999, "AdamW beta2: decay of the second moment.", ge=0, lt=1)
    adam_epsilon: float = key(1e-8, "AdamW epsilon.", gt=0, le=1)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    freeze: tuple[Literal["vision"], ...] = key(
        (), "Parts that are not trained; vision: the tower of a model that reads pictures."
    )
    max_grad_norm: float = key(1.0, "Global norm to which gradients are clipped.", gt=0)
    device: Literal["cpu", "cuda", "npu"] = key("cpu", "Device type of policy and engines.")
    placement: Literal["separate", "colocated", "resident"] = volatile(
        "separate",
        "separate: ranks and engines on their own devices; colocated: they share devices and take "
        "turns; resident: they share devices, and both stay on them.",
    )
    device_model: str | None = volatile(
        None, "Device model for the memory plan, such as H100; unset: this machine's."
    )
    allow_oversubscription: bool = volatile(False, "Train even if the memory plan does not fit.")
    num_ranks: int = volatile(1, "FSDP2 ranks, one device each.", ge=1, le=65_536)
    sequence_parallel: int = volatile(1, "Ranks that split each sequence (Ulysses).", ge=1, le=64)
    fsdp_size: int | None = volatile(
        None, "Ranks over which one copy of the weights is sharded (HSDP); unset: all ranks.", ge=1
    )
    expert_parallel: int = volatile(
        1, "Ranks that divide the experts of each layer; tokens travel to them.", ge=1, le=1024
    )
    threads_per_rank: int | None = volatile(
        None,
        "CPU threads per rank; unset: on a CPU all cores, divided over the ranks, else 1.",
        ge=1,
        le=1024,
    )
    micro_batch_tokens: int = volatile(32768, "Maximum tokens per device in one micro-batch.", ge=1)
    logits_chunk_tokens: int = volatile(1024, "Tokens per chunk of logits; bounds memory.", ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Compute precision; auto: bfloat16, on a CPU only if it has bfloat16 instructions and the "
        "model's hidden size is at least 256; else float32.",
    )
    gradient_checkpointing: bool = volatile(True, "Recompute activations: less memory, more time.")
    offload_activations: bool = volatile(
        False, "Keep checkpointed layer inputs in host memory until the backward pass."
    )
    fused_kernels: tuple[Literal["auto", "rms_norm", "swiglu", "rotary", "experts"], ...] = key(
        ("auto",), "Layer operations with a fused kernel; auto: all of the device (NPU); []: none."
    )
    compile: bool = key(False, "Apply torch.compile to each layer; a CPU needs a compiler.")
    reshard_after_forward: bool = volatile(
        True, "Free gathered weights between forward and backward."
    )
    weight_bucket_bytes: int = volatile(
        512 * 1024**2, "Bytes of weights sent to the engines at a time.", ge=1
    )
    offload_parameters: bool = volatile(False, "Keep weights in host memory while engines run.")
    offload_optimizer: bool = volatile(False, "Keep optimizer state on the host between updates.")
    offload_shards: bool = volatile(
        False, "Keep weights, gradients and optimizer state in host memory; run AdamW there."
    )
    max_restarts: int = volatile(
        3, "Restarts after a dead process without a new checkpoint.", ge=0, le=1000
    )
    restart_delay_seconds: float = volatile(5.0, "Delay of the first restart; doubles.", ge=0)
    on_lost_node: Literal["wait", "shrink"] = volatile(
        "wait", "wait: restart once devices suffice again; shrink: with fewer ranks and engines."
    )
    on_mismatch: Literal["stop", "warn"] = volatile(
        "stop", "If engine and policy differ by more than max_mismatch: stop, or log a warning."
    )
    max_mismatch: float | None = volatile(
        None,
        "Mean difference of engine's and policy's log-probs of a step's sampled tokens, in nats; "
        "unset: what the precision explains (float32 0.001, float16 0.1, bfloat16 0.5).",
        gt=0,
    )
    save_rollouts_every: int = volatile(
        10,
        "Training steps between files of responses (rollouts/step_N.jsonl), also at the first and "
        "the last step; 0: never.",
        ge=0,
    )
    num_saved_prompts: int | None = volatile(
        8, "Prompts per such file, with all their responses; unset: all of the step.", ge=1
    )
    record_draws: bool = volatile(
        False,
        "Write the groups of each training step, with their tokens, for `dapo train --replay`.",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow"], ...] = volatile(
        (),
        "Experiment trackers that receive step metrics, some responses and evaluation results.",
    )
    tracker_project: str = volatile(
        "dapo-pipeline", "Project (in MLflow: experiment) in the trackers.", min_length=1
    )
    tracker_run: str | None = volatile(
        None, "Run name in the trackers; unset: run.name.", min_length=1
    )
    tracker_folder: str = volatile(
        ".dapo/trackers", "Local folder for tracker files.", min_length=1
    )
    ray_address: str | None = volatile(None, "Ray cluster to join; unset: start a private one.")
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    nan_guard: bool = volatile(
        True,
        "When an update is skipped for a non-finite gradient norm, rerun it with hooks and log "
        "the first module that produced a non-finite number. At most 3 times per training.",
    )

    @property
    def is_colocated(self) -> bool:
        """Whether ranks and engines share devices."""
        return self.placement != "separate"

    @property
    def takes_turns(self) -> bool:
        """Whether ranks and engines that share devices free them for each other."""
        return self.placement == "colocated"

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel size D: ranks that process different responses."""
        return self.num_ranks // self.sequence_parallel

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps in a full training step."""
        return self.passes * (self.train_prompts // self.mini_prompts)

    @property
    def num_schedule_steps(self) -> int:
        """The optimizer step at which the schedule reaches its final learning rate."""
        return self.schedule_steps or self.total_steps * self.updates_per_step

    @model_validator(mode="after")
    def _mini_divides_train(self) -> TrainConfig:
        if self.train_prompts % self.mini_prompts:
            raise ValueError(
                f"train.train_prompts={self.train_prompts} is not a multiple of "
                f"train.mini_prompts={self.mini_prompts}: the last optimizer step would get only "
                f"{self.train_prompts % self.mini_prompts} prompts; change one of the two"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_room(self) -> TrainConfig:
        fields = type(self).model_fields
        read = {"constant": (), "wsd": ("schedule_steps", "min_learning_rate_ratio", "decay_ratio")}
        names = read.get(self.schedule, ("schedule_steps", "min_learning_rate_ratio"))
        ignored = [
            f"train.{name}={getattr(self, name)}"
            for name in read["wsd"]
            if name not in names and getattr(self, name) != fields[name].default
        ]
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)} would be ignored by train.schedule={self.schedule}; remove "
                f"{'it' if len(ignored) == 1 else 'them'}, or set "
                f"train.schedule={'wsd' if names else 'linear, cosine or wsd'}"
            )
        if self.schedule != "constant" and self.warmup_steps >= self.num_schedule_steps:
            steps = "train.total_steps" if self.schedule_steps is None else "train.schedule_steps"
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} leaves none of the "
                f"{self.num_schedule_steps} optimizer steps for the decay of "
                f"train.schedule={self.schedule}; lower train.warmup_steps or raise {steps}"
            )
        return self

    @model_validator(mode="after")
    def _offloads_make_sense(self) -> TrainConfig:
        if self.offload_shards and (self.offload_parameters or self.offload_optimizer):
            raise ValueError(
                "train.offload_shards=true already keeps weights and optimizer state in host "
                "memory, so train.offload_parameters and train.offload_optimizer have nothing to "
                "move; remove these two"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "train.offload_activations=true with train.gradient_checkpointing=false would "
                "copy every activation and every gathered weight to the host and back; set "
                "train.gradient_checkpointing=true, or train.offload_activations=false"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_exist(self) -> TrainConfig:
        steps, ranks = self.profile.steps, self.profile.ranks
        if max(steps, default=0) > self.total_steps:
            raise ValueError(
                f"train.profile.steps={list(steps)} goes beyond "
                f"train.total_steps={self.total_steps}"
            )
        if max(ranks, default=0) >= self.num_ranks and self.on_lost_node == "wait":
            raise ValueError(
                f"train.profile.ranks={list(ranks)} names a rank that does not exist: with "
                f"train.num_ranks={self.num_ranks} they are 0 to {self.num_ranks - 1}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainConfig:
        for name in ("sequence_parallel", "expert_parallel", "fsdp_size"):
            size = getattr(self, name) or 1
            if self.num_ranks % size:
                raise ValueError(
                    f"train.num_ranks={self.num_ranks} is not a multiple of train.{name}={size}; "
                    "change one of the two"
                )
        return self

    @model_validator(mode="after")
    def _experts_can_be_divided(self) -> TrainConfig:
        if self.expert_parallel == 1:
            return self
        others = {
            f"train.lora.rank={self.lora.rank}": bool(self.lora.rank),
            "train.compile=true": self.compile,
            f"train.fsdp_size={self.fsdp_size}": self.fsdp_size not in (None, self.num_ranks),
        }
        for setting, is_set in others.items():
            if is_set:
                raise ValueError(
                    f"train.expert_parallel={self.expert_parallel} does not work with {setting}; "
                    "change one of the two"
                )
        return self
