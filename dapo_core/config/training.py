"""Keys of reinforcement learning: run, reward, sampler, rollout and train, and what they rule out together.

Defaults are the DAPO paper's recipe (arXiv:2503.14476, section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from dapo_core.compat import Compat
from dapo_core.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from dapo_core.config.checkpoint import CheckpointConfig
from dapo_core.config.diagnosis import DiagnosisConfig
from dapo_core.config.fields import Section, key, volatile
from dapo_core.config.rollout import RolloutConfig
from dapo_core.config.sampler import SamplerConfig
from dapo_core.config.updates import UpdatesConfig
from dapo_core.config.validation import ValidationConfig
from dapo_core.config.warm_start import ModelCodeConfig

MOST_HORIZONS_PER_STEP = 5  # adaptive KL changes its coefficient by at most 1/5 for each horizon that passes


class RunConfig(Section):
    """The name and the randomness of a run."""

    name: str = volatile(
        "dapo", "Name in reports and in Prefect; unset: the file's name.", min_length=1, max_length=80
    )
    seed: int = key(0, "Seed of data generation, warm start, shuffling and sampling.", ge=0, le=2**31 - 1)
    deterministic: bool = key(
        False, "Deterministic kernels, and no group left in flight by a step: slower, and reproducible."
    )


class PromptsConfig(Section):
    """How training reads prompts."""

    max_prompt_tokens: int = key(
        2048, "Longest prompt in tokens; too_long says what becomes of longer ones.", ge=1
    )
    too_long: Literal["drop", "truncate_left", "error"] = key(
        "error",
        "Training prompts above max_prompt_tokens: left out, cut to their last tokens, or an error. Held-out ones "
        "are always an error.",
    )
    shuffle: bool = key(True, "Shuffle the prompts in each epoch.")


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO eq. 13)."""

    enabled: bool = key(True, "Penalise responses that come close to the length limit.")
    buffer_tokens: int = key(4096, "Tokens before the limit over which the penalty grows.", ge=1)
    penalty_factor: float = key(1.0, "Penalty at the limit.", ge=0, le=100)


class RewardConfig(Section):
    """The reward of a response."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    mask_truncated: bool = key(False, "Leave responses cut by the length limit out of the loss.")
    scorers: tuple[str, ...] = key(
        (), "More scorers by data source, as DATA_SOURCE=SCORER, such as DAPO-17k=math_dapo."
    )
    timeout_seconds: float = key(10.0, "Time limit of one scoring call; the verdict is then timeout.", gt=0)
    num_processes: int = volatile(2, "Scoring processes of each rollout worker.", ge=1, le=256)


class CustomRewardConfig(Section):
    """A scorer in the user's file: compute_score(data_source, solution_str, ground_truth, extra_info)."""

    path: str | None = key(
        None, "Python file whose function scores every response; unset: a scorer for each data source."
    )
    name: str = key(
        "compute_score", "Function in the file, sync or async; returns a float or a dict with `score`."
    )


class TrainConfig(UpdatesConfig, DiagnosisConfig):
    """Steps, batches, the optimizer, and the model's layout on the devices."""

    backend: Literal["own", "verl", "mindspeed-rl", "mindspeed-mm"] = key(
        "own", "The trainer: our own, or another one, which the section external describes."
    )
    device: Literal["cpu", "cuda", "npu"] = key("cpu", "Kind of device of the policy.")
    placement: Literal["separate", "colocated"] = volatile(
        "separate", "Ranks and engines on devices of their own, or taking turns on the same ones."
    )
    device_model: str | None = volatile(
        None,
        "Model of the devices, such as H100 or Atlas 800T A3, whose memory the plan counts; unset: this one's.",
    )
    allow_oversubscription: bool = volatile(
        False, "Train although the memory plan says that it does not fit the devices."
    )
    num_ranks: int = volatile(1, "FSDP2 ranks, one device each.", ge=1, le=65_536)
    sequence_parallel: int = volatile(1, "Ranks that share each sequence (Ulysses).", ge=1, le=64)
    fsdp_size: int | None = volatile(
        None, "Ranks that a copy of the weights is sharded over (HSDP); unset: all, one copy.", ge=1
    )
    threads_per_rank: int = volatile(1, "CPU threads of a rank.", ge=1, le=1024)
    micro_batch_tokens: int = volatile(32768, "Most tokens of a micro-batch on a device.", ge=1)
    logits_chunk_tokens: int = volatile(1024, "Tokens whose logits are in memory at once.", ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto", "Compute precision; auto: float32 on a CPU.")
    gradient_checkpointing: bool = volatile(
        True, "Recompute activations in the backward pass: less memory, more time."
    )
    offload_activations: bool = volatile(
        False, "Keep what gradient checkpointing saves, each layer's input, in host memory until it is needed."
    )
    fused_kernels: tuple[Literal["auto", "rms_norm", "swiglu", "rotary"], ...] = key(
        ("auto",),
        "Operations of a layer by a fused kernel; auto: all that the device has (NPUs); [] for none.",
    )
    compile: bool = key(False, "torch.compile each decoder layer; needs a C++ compiler on a CPU.")
    reshard_after_forward: bool = volatile(True, "Free whole weights between forward and backward: less memory.")
    weight_bucket_bytes: int = volatile(
        512 * 1024**2,
        "Bytes of weights gathered at once on their way to the engines; at least those of the largest tensor.",
        ge=1,
    )
    offload_parameters: bool = volatile(False, "Keep weights in host memory while the engines generate.")
    offload_optimizer: bool = volatile(False, "Keep the optimizer's state in host memory between updates.")
    offload_shards: bool = volatile(
        False,
        "Keep weights, gradients and the optimizer's state in host memory, where AdamW steps; layers come to the "
        "device as they are gathered.",
    )
    max_restarts: int = volatile(
        3, "Restarts after a dead rank, worker or driver before a new checkpoint is written.", ge=0, le=1000
    )
    restart_delay_seconds: float = volatile(5.0, "Pause before the first restart; it doubles each time.", ge=0)
    on_lost_node: Literal["wait", "shrink"] = volatile(
        "wait", "wait: restart when its devices are back; shrink: with fewer ranks and engines on the others."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow"], ...] = volatile(
        (), "Trackers that get each step, validations' responses and the results of the evaluations."
    )
    tracker_project: str = volatile("dapo-pipeline", "Project (MLflow: experiment) at the trackers.", min_length=1)
    tracker_run: str | None = volatile(None, "Name of the run at the trackers; unset: run.name.", min_length=1)
    tracker_folder: str = volatile(
        ".dapo/trackers", "Folder of what trackers write on this machine.", min_length=1
    )
    ray_address: str | None = volatile(None, "Ray cluster to join; unset starts a private one.")

    @property
    def is_colocated(self) -> bool:
        """Whether ranks and engines share devices."""
        return self.placement == "colocated"

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel size D: ranks that see different responses."""
        return self.num_ranks // self.sequence_parallel

    @model_validator(mode="after")
    def _few_activations_to_offload(self) -> TrainConfig:
        if self.offload_shards and (self.offload_parameters or self.offload_optimizer):
            raise ValueError(
                "train.offload_shards=true keeps weights and optimizer in host memory all the time, so that "
                "train.offload_parameters and train.offload_optimizer have nothing to move; remove these two"
            )
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "train.offload_activations=true with train.gradient_checkpointing=false would copy every "
                "activation and every gathered weight of a pass to the host and back; set "
                "train.gradient_checkpointing=true, or train.offload_activations=false"
            )
        return self

    @model_validator(mode="after")
    def _traced_steps_are_taken(self) -> TrainConfig:
        steps, ranks = self.profile.steps, self.profile.ranks
        if max(steps, default=0) > self.total_steps:
            raise ValueError(f"train.profile.steps={list(steps)} goes beyond train.total_steps={self.total_steps}")
        if max(ranks, default=0) >= self.num_ranks and self.on_lost_node == "wait":
            raise ValueError(
                f"train.profile.ranks={list(ranks)} names a rank that train.num_ranks={self.num_ranks} "
                f"does not have; they are 0 to {self.num_ranks - 1}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainConfig:
        for name in ("sequence_parallel", "fsdp_size"):
            size = getattr(self, name) or 1
            if self.num_ranks % size:
                raise ValueError(
                    f"train.num_ranks={self.num_ranks} is not a multiple of train.{name}={size}; "
                    "change one of the two"
                )
        return self


class TrainingConfig(Section):
    """The sections that a training reads."""

    run: RunConfig = Field(default_factory=RunConfig)
    data: PromptsConfig = Field(default_factory=PromptsConfig)
    model: ModelCodeConfig = Field(default_factory=ModelCodeConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    custom_reward: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)

    @property
    def num_devices(self) -> int:
        """Devices of the policy's ranks and of the rollout workers; shared ones count once."""
        return self.train.num_ranks + (0 if self.train.is_colocated else self.rollout.num_devices)

    @property
    def num_cpus(self) -> int:
        """CPUs that ranks and engines ask Ray for; those that share a device share CPUs."""
        of_rank, of_engine = self.train.threads_per_rank, self.rollout.threads_per_worker
        if self.train.is_colocated:
            return self.train.num_ranks * max(of_rank, of_engine)
        return self.train.num_ranks * of_rank + self.rollout.num_devices * of_engine

    @model_validator(mode="after")
    def _each_shared_device_has_both(self) -> TrainingConfig:
        if self.train.is_colocated and self.train.num_ranks != self.rollout.num_devices:
            raise ValueError(
                "train.placement=colocated puts a policy rank and a part of an engine on each device; there are "
                f"train.num_ranks={self.train.num_ranks} ranks and rollout.num_workers={self.rollout.num_workers} "
                f"engines of {self.rollout.num_devices // self.rollout.num_workers} devices; set train.num_ranks="
                f"{self.rollout.num_devices}, change rollout.num_workers, or set train.placement=separate"
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> TrainingConfig:
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
        if 0 < most < self.train.train_prompts:
            raise ValueError(
                f"sampler.gen_prompts={self.sampler.gen_prompts} x sampler.max_num_gen_batches="
                f"{self.sampler.max_num_gen_batches} = {most} prompts can never fill train.train_prompts="
                f"{self.train.train_prompts}; raise one of the two or lower train.train_prompts"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> TrainingConfig:
        if self.checkpoint.keep_best and not self.validation.every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs accuracies to compare, and "
                "validation.every=0 measures none; set validation.every, or checkpoint.keep_best=0"
            )
        return self

    def require_saved(self, name: str, steps: Iterable[int]) -> None:
        """Raise ValueError for a step that has no checkpoint; `name` is the key that names the steps."""
        every, total = self.checkpoint.save_every, self.train.total_steps
        for step in steps:
            if not 0 < step <= total:
                raise ValueError(
                    f"{name} names step {step}, and train.total_steps is {total}; name steps 1 to {total}"
                )
            if step % every and step != total:
                raise ValueError(
                    f"{name} names step {step}, and checkpoint.save_every={every} saves none there; set "
                    f"checkpoint.save_every={math.gcd(step, every)}, or name multiples of {every}"
                )

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> TrainingConfig:
        self.require_saved("checkpoint.keep_steps", self.checkpoint.keep_steps)
        return self

    @model_validator(mode="after")
    def _metric_is_known_while_sampling(self) -> TrainingConfig:
        if self.sampler.metric == "seq_final_reward" and self.algorithm.kl.place == "reward":
            raise ValueError(
                "sampler.metric=seq_final_reward with algorithm.kl.place=reward would keep every group: KL "
                "differs between any two responses, and is known after sampling; set sampler.metric=seq_reward"
            )
        return self

    @model_validator(mode="after")
    def _one_table_of_scorers(self) -> TrainingConfig:
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
    def _adaptive_coefficient_stays_positive(self) -> TrainingConfig:
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
    def _correction_compares_like_with_like(self) -> TrainingConfig:
        correction, rollout = self.algorithm.rollout_correction, self.rollout
        is_weighed = correction.importance in ("token", "sequence")
        is_anchor = self.algorithm.old_log_probs == "engine"
        chosen = (
            f"algorithm.rollout_correction (importance={correction.importance}, mask={correction.mask}, "
            f"divergence={correction.divergence})"
        )
        off = "importance=stale or off, mask=off and divergence=off"
        if is_weighed and is_anchor:
            raise ValueError(
                f"algorithm.rollout_correction.importance={correction.importance} with algorithm.old_log_probs="
                "engine would correct twice: the loss's ratio is then policy over engine already; set importance="
                "stale or off, or old_log_probs=policy"
            )
        if (is_weighed or correction.drops or is_anchor) and not rollout.samples_among_all:
            raise ValueError(
                f"{'algorithm.old_log_probs=engine' if is_anchor else chosen} with "
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} would correct for the truncation "
                "itself: the engine's log-probs are over the tokens that are left, the policy's over all; set "
                "rollout.top_p=1 and rollout.top_k=-1, or " + ("old_log_probs=policy" if is_anchor else off)
            )
        return self

    @model_validator(mode="after")
    def _experts_run_whole_on_accelerators(self) -> TrainingConfig:
        if self.rollout.expert_parallel and self.train.device == "cpu":
            raise ValueError(
                "rollout.expert_parallel=true with train.device=cpu: vLLM's CPU kernel takes every expert to be "
                "in its process, and crashes where only some are; set expert_parallel=false, which shares out the "
                "rows of each expert"
            )
        return self

    @property
    def anchors_before_updates(self) -> bool:
        """Whether something but the loss reads the policy's old log-probs, so that they must be known first."""
        correction = self.rollout_correction
        if self.algorithm.old_log_probs == "engine":
            return correction.drops
        is_corrected = correction.importance == "sequence" or correction.importance_normalize or correction.drops
        return is_corrected or self.algorithm.kl.place == "reward"

    @property
    def scores_before_updates(self) -> bool:
        """Whether a full step has a forward pass for old log-probs; a single update measures its own."""
        has_updates = self.algorithm.old_log_probs == "policy" and self.train.updates_per_step > 1
        return self.anchors_before_updates or has_updates

    @property
    def rollout_correction(self) -> RolloutCorrectionConfig:
        """algorithm.rollout_correction as it acts: `stale` is off where it has nothing to compare.

        That is where the engine samples among some tokens only, where its log-probs are the anchor, and under
        compat=verl, which counts every token as sampled by the policy of the step.
        """
        correction, algorithm = self.algorithm.rollout_correction, self.algorithm
        is_comparable = self.rollout.samples_among_all and algorithm.old_log_probs == "policy"
        if correction.importance != "stale" or (is_comparable and not Compat.of(algorithm).stale_is_fresh):
            return correction
        return correction.model_copy(
            update={"importance": "off", "importance_min": None, "importance_normalize": False}
        )
