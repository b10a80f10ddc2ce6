"""Sections that training reads, and the checks that span several of them.

Defaults are the DAPO paper's recipe (arXiv:2503.14476, section 4.1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from dapo_core.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from dapo_core.config.compat import Compat
from dapo_core.config.fields import JsonObject, Section, key, volatile
from dapo_core.config.rollout import RolloutConfig
from dapo_core.config.sampler import SamplerConfig
from dapo_core.config.train import LoraConfig, TrainConfig
from dapo_core.config.validation import ValidationConfig
from dapo_core.config.warm_start import ModelCodeConfig

MOST_HORIZONS_PER_STEP = 5  # adaptive KL changes its coefficient by at most 1/5 per horizon


class RunConfig(Section):
    """Name and seed of a run."""

    name: str = volatile(
        "dapo",
        "Name in reports and in Prefect. A recipe without it is named after its file.",
        min_length=1,
        max_length=80,
    )
    seed: int = key(0, "Seed of data, warm start, shuffling and sampling.", ge=0, le=2**31 - 1)
    deterministic: bool = key(
        False, "Use deterministic kernels, and finish every group within its step; slower."
    )


class PromptsConfig(Section):
    """Limits and order of training prompts."""

    max_prompt_tokens: int = key(2048, "Maximum prompt length in tokens; see too_long.", ge=1)
    too_long: Literal["drop", "truncate_left", "error"] = key(
        "error",
        "Training prompts longer than max_prompt_tokens: drop them, keep their last tokens, or "
        "fail. Held-out prompts always fail.",
    )
    shuffle: bool = key(True, "Shuffle the prompts in each epoch.")


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO eq. 13)."""

    enabled: bool = key(True, "Penalise responses close to the length limit.")
    buffer_tokens: int = key(4096, "Tokens before the limit with a growing penalty.", ge=1)
    penalty_factor: float = key(1.0, "Penalty at the limit.", ge=0, le=100)


class RewardConfig(Section):
    """Scoring of responses."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    mask_truncated: bool = key(False, "Exclude responses cut at the length limit from the loss.")
    scorers: tuple[str, ...] = key(
        (), "Extra scorers by data source, as DATA_SOURCE=SCORER, such as DAPO-17k=math_dapo."
    )
    timeout_seconds: float = key(10.0, "Limit per scoring call; then `timeout`.", gt=0)
    num_processes: int = volatile(2, "Scoring processes per rollout worker.", ge=1, le=256)


class CustomRewardConfig(Section):
    """A user's scorer: compute_score(data_source, solution_str, ground_truth, extra_info)."""

    path: str | None = key(None, "Python file with a function that scores every response.")
    name: str = key(
        "compute_score",
        "Function in the file, sync or async. Returns a float, or a dict with `score`.",
    )
    arguments: JsonObject = key(
        {},
        "More keyword arguments of the function, such as {url: http://judge:8000/v1}. They are "
        "recorded; secrets belong in environment variables.",
    )

    @field_validator("arguments")
    @classmethod
    def _arguments_have_names(cls, arguments: JsonObject) -> JsonObject:
        for name in arguments:
            if not name.isidentifier():
                raise ValueError(
                    f"custom_reward.arguments: {name!r} is not the name of an argument; YAML needs "
                    "a space after a colon, as in {bonus: 2}"
                )
        return arguments


class CheckpointConfig(Section):
    """Which checkpoints training keeps, and where it resumes."""

    save_every: int = volatile(20, "Training steps between checkpoints.", ge=1)
    keep_last: int = volatile(2, "Latest checkpoints kept; the finished output keeps one.", ge=1)
    keep_best: int = key(0, "Checkpoints with the best validation/accuracy also kept.", ge=0)
    keep_steps: tuple[PositiveInt, ...] = volatile(
        (), "Steps always kept, besides those in evaluate.checkpoints."
    )
    asynchronous: bool = volatile(
        True, "Write checkpoints during training, from a copy in host memory."
    )
    resume: str = volatile(
        "auto", "auto: from the output's latest checkpoint; never: start over; or a path."
    )
    on_damage: Literal["previous", "stop"] = volatile(
        "previous", "If the latest checkpoint is damaged: resume from the one before, or stop."
    )
    allow_changed: tuple[str, ...] = volatile(
        (), "Keys that may differ from the checkpoint's, such as train.learning_rate."
    )


class TrainingConfig(Section):
    """All sections that training reads."""

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
        """Devices of policy ranks and rollout workers; shared devices count once."""
        return self.train.num_ranks + (0 if self.train.is_colocated else self.rollout.num_devices)

    @property
    def threads_per_rank(self) -> int:
        """CPU threads of a rank."""
        return self.train.threads_per_rank or self._threads(self.train.num_ranks, 1)

    @property
    def threads_per_worker(self) -> int:
        """CPU threads of an engine part."""
        return self.rollout.threads_per_worker or self._threads(self.rollout.num_devices, 2)

    def _threads(self, num_processes: int, elsewhere: int) -> int:
        """Return each process's share of this machine's cores, or `elsewhere` on other machines.

        Ranks and engines each get all cores, since they wait for each other, unless the schedule
        is asynchronous.
        """
        if self.train.device != "cpu" or self.train.ray_address is not None:
            return elsewhere
        if self.rollout.schedule == "asynchronous":
            num_processes = self.num_devices
        return max(len(os.sched_getaffinity(0)) // num_processes, 1)

    @property
    def num_cpus(self) -> int:
        """CPUs that ranks and engines request from Ray; those on one device share theirs."""
        per_rank, per_engine = self.threads_per_rank, self.threads_per_worker
        if self.train.is_colocated:
            return self.train.num_ranks * max(per_rank, per_engine)
        return self.train.num_ranks * per_rank + self.rollout.num_devices * per_engine

    @model_validator(mode="after")
    def _colocated_devices_match(self) -> TrainingConfig:
        if self.train.is_colocated and self.train.num_ranks != self.rollout.num_devices:
            raise ValueError(
                "train.placement=colocated needs one policy rank and one engine part on each "
                f"device, but train.num_ranks={self.train.num_ranks} and "
                f"rollout.num_workers={self.rollout.num_workers} engines take "
                f"{self.rollout.num_devices // self.rollout.num_workers} devices each; set "
                f"train.num_ranks={self.rollout.num_devices}, change rollout.num_workers, or set "
                "train.placement=separate"
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> TrainingConfig:
        num_responses = self.train.mini_prompts * self.rollout.group_size
        if num_responses % self.train.num_data_ranks:
            raise ValueError(
                f"train.mini_prompts={self.train.mini_prompts} x "
                f"rollout.group_size={self.rollout.group_size} = {num_responses} responses per "
                f"optimizer step do not divide evenly over train.num_ranks={self.train.num_ranks} "
                f"/ train.sequence_parallel={self.train.sequence_parallel} = "
                f"{self.train.num_data_ranks} data-parallel ranks; change train.mini_prompts, "
                "rollout.group_size or train.num_ranks"
            )
        max_drawn = self.sampler.gen_prompts * self.sampler.max_num_gen_batches
        if 0 < max_drawn < self.train.train_prompts:
            raise ValueError(
                f"sampler.gen_prompts={self.sampler.gen_prompts} x "
                f"sampler.max_num_gen_batches={self.sampler.max_num_gen_batches} = {max_drawn} "
                f"prompts can never fill train.train_prompts={self.train.train_prompts}; raise "
                "one of the two or lower train.train_prompts"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_validation(self) -> TrainingConfig:
        if self.checkpoint.keep_best and not self.validation.every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} needs validation accuracies, "
                "but validation.every=0 disables validation; set validation.every, or "
                "checkpoint.keep_best=0"
            )
        return self

    def require_saved(self, name: str, steps: Iterable[int]) -> None:
        """Raise ValueError if a step has no checkpoint; `name` is the key that lists the steps."""
        every, total = self.checkpoint.save_every, self.train.total_steps
        for step in steps:
            if not 0 < step <= total:
                raise ValueError(
                    f"{name} lists step {step}, but train.total_steps={total}; use steps 1 to "
                    f"{total}"
                )
            if step % every and step != total:
                raise ValueError(
                    f"{name} lists step {step}, but checkpoint.save_every={every} does not save "
                    f"it; set checkpoint.save_every={math.gcd(step, every)}, or use multiples of "
                    f"{every}"
                )

    @model_validator(mode="after")
    def _kept_steps_are_saved(self) -> TrainingConfig:
        self.require_saved("checkpoint.keep_steps", self.checkpoint.keep_steps)
        return self

    @model_validator(mode="after")
    def _metric_is_known_while_sampling(self) -> TrainingConfig:
        if self.sampler.metric == "seq_final_reward" and self.algorithm.kl.place == "reward":
            raise ValueError(
                "sampler.metric=seq_final_reward with algorithm.kl.place=reward would keep every "
                "group, since KL differs between any two responses; it is also unknown until "
                "sampling ends. Set sampler.metric=seq_reward"
            )
        return self

    @model_validator(mode="after")
    def _one_table_of_scorers(self) -> TrainingConfig:
        custom = self.custom_reward
        if custom.path is not None and self.reward.scorers:
            raise ValueError(
                f"reward.scorers={list(self.reward.scorers)} would be ignored, because "
                f"custom_reward.path={custom.path} scores every response; remove one of the two"
            )
        for name, default in (("name", "compute_score"), ("arguments", {})):
            if custom.path is None and (value := getattr(custom, name)) != default:
                raise ValueError(
                    f"custom_reward.{name}={value} would be ignored without custom_reward.path; "
                    f"set the path, or remove {name}"
                )
        return self

    @model_validator(mode="after")
    def _adaptive_coefficient_stays_positive(self) -> TrainingConfig:
        kl, num_responses = self.algorithm.kl, self.train.train_prompts * self.rollout.group_size
        if kl.controller == "adaptive" and num_responses >= MOST_HORIZONS_PER_STEP * kl.horizon:
            raise ValueError(
                f"train.train_prompts={self.train.train_prompts} x "
                f"rollout.group_size={self.rollout.group_size} responses per step are "
                f"{num_responses / kl.horizon:.1f} times algorithm.kl.horizon={kl.horizon:g}; at "
                f"{MOST_HORIZONS_PER_STEP} times or more the adaptive coefficient can become 0 or "
                f"negative. Raise algorithm.kl.horizon, for instance to {4 * num_responses}"
            )
        return self

    @model_validator(mode="after")
    def _correction_compares_like_with_like(self) -> TrainingConfig:
        correction, rollout = self.algorithm.rollout_correction, self.rollout
        is_weighed = correction.importance in ("token", "sequence")
        is_anchor = self.algorithm.old_log_probs == "engine"
        chosen = (
            f"algorithm.rollout_correction (importance={correction.importance}, "
            f"mask={correction.mask}, divergence={correction.divergence})"
        )
        off = "importance=stale or off, mask=off and divergence=off"
        if is_weighed and is_anchor:
            raise ValueError(
                f"algorithm.rollout_correction.importance={correction.importance} with "
                "algorithm.old_log_probs=engine would correct twice, because the loss ratio is "
                "then already policy/engine; set importance=stale or off, or old_log_probs=policy"
            )
        if (is_weighed or correction.drops or is_anchor) and not rollout.samples_among_all:
            raise ValueError(
                f"{'algorithm.old_log_probs=engine' if is_anchor else chosen} with "
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} would correct for "
                "the truncation itself: the engine's log-probs cover the remaining tokens, the "
                "policy's the whole vocabulary; set rollout.top_p=1 and rollout.top_k=-1, or "
                + ("old_log_probs=policy" if is_anchor else off)
            )
        return self

    @property
    def samples_ahead(self) -> bool:
        """Whether groups of later steps may be sampled before the weights change."""
        is_wider = self.sampler.gen_prompts > self.train.train_prompts
        runs_ahead = self.rollout.schedule == "asynchronous"
        return self.sampler.max_staleness > 0 and (is_wider or runs_ahead)

    @model_validator(mode="after")
    def _engines_can_run_ahead(self) -> TrainingConfig:
        if self.rollout.schedule == "synchronous":
            return self
        excluded = {
            f"train.placement={self.train.placement}, where ranks and engines share devices; set "
            "train.placement=separate": self.train.is_colocated,
            "sampler.max_staleness=0, which lets no step train on what earlier weights sampled; "
            "set sampler.max_staleness=1 or more": self.sampler.max_staleness == 0,
            "run.deterministic=true, which finishes every group within its step; set "
            "run.deterministic=false": self.run.deterministic,
        }
        for conflict, is_set in excluded.items():
            if is_set:
                raise ValueError(
                    f"rollout.schedule=asynchronous does not work with {conflict}, or "
                    "rollout.schedule=synchronous"
                )
        return self

    @model_validator(mode="after")
    def _older_tokens_can_be_weighed(self) -> TrainingConfig:
        rollout = self.rollout
        is_weighed = self.rollout_correction.importance == "stale"
        if is_weighed and self.samples_ahead and not rollout.samples_among_all:
            raise ValueError(
                f"sampler.max_staleness={self.sampler.max_staleness} with "
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k} would train tokens "
                "of older weights as if the current ones had sampled them: the engine's log-probs "
                "cover the remaining tokens, the policy's the whole vocabulary, so their ratio is "
                "no importance weight. Set sampler.max_staleness=0, which samples nothing ahead, "
                "or rollout.top_p=1 and rollout.top_k=-1; "
                "algorithm.rollout_correction.importance=off trains such tokens without weights"
            )
        return self

    @model_validator(mode="after")
    def _experts_run_whole_on_accelerators(self) -> TrainingConfig:
        if self.rollout.expert_parallel and self.train.device == "cpu":
            raise ValueError(
                "rollout.expert_parallel=true with train.device=cpu crashes: vLLM's CPU kernel "
                "assumes that every expert is in its process; set expert_parallel=false, which "
                "splits each expert by rows instead"
            )
        return self

    @model_validator(mode="after")
    def _engine_records_routing(self) -> TrainingConfig:
        rollout, device = self.rollout, self.train.device
        if self.algorithm.routing_replay != "rollout" or rollout.engine == "hf":
            return self
        if rollout.pipeline_parallel > 1 or rollout.speculation != "off":
            raise ValueError(
                f"algorithm.routing_replay=rollout with rollout.pipeline_parallel="
                f"{rollout.pipeline_parallel} and rollout.speculation={rollout.speculation}: the "
                "routing of vLLM is known in one pipeline stage and without drafts; set "
                "routing_replay=policy, or rollout.engine=hf"
            )
        if device == "npu" and rollout.expert_parallel:
            raise ValueError(
                "algorithm.routing_replay=rollout with train.device=npu and "
                "rollout.expert_parallel=true: vllm-ascend 0.23 then captures the routing of a "
                "part of the tokens; set expert_parallel=false, or routing_replay=policy, which "
                "keeps the policy's own routing through a step's updates (try loss=gspo)"
            )
        return self

    @model_validator(mode="after")
    def _device_has_invariant_kernels(self) -> TrainingConfig:
        if self.rollout.batch_invariant and self.train.device == "cpu":
            raise ValueError(
                "rollout.batch_invariant=true with train.device=cpu: vLLM has batch-invariant "
                "kernels for cuda (compute capability 8.0 and above) and npu (Atlas A2 and A3) "
                "alone; set batch_invariant=false"
            )
        return self

    @model_validator(mode="after")
    def _adapters_are_possible(self) -> TrainingConfig:
        rollout, train, rank = self.rollout, self.train, self.train.lora.rank
        is_merged, is_on_host = rollout.lora == "merged", train.takes_turns or train.offload_shards
        fault = ""
        if not rank and (is_merged or train.lora != LoraConfig()):
            ignored = "rollout.lora=merged" if is_merged else "the other keys of train.lora"
            fault = f"{ignored} would be ignored by train.lora.rank=0; set it, for instance to 16"
        elif is_merged and rollout.dtype != "float32":
            fault = (
                f"rollout.lora=merged with rollout.dtype={rollout.dtype} would lose the updates "
                "(in bfloat16, 98 % of the weights stay equal after 10 steps of 1e-5); set "
                "rollout.lora=adapter, or rollout.dtype=float32"
            )
        elif is_merged and is_on_host and train.device != "cpu":
            key = "offload_shards=true" if train.offload_shards else "placement=colocated"
            fault = (
                f"rollout.lora=merged with train.{key} on {train.device} cannot send weights: they "
                "are in host memory then, and adapters are merged on the device; set "
                "rollout.lora=adapter"
            )
        elif rank and not is_merged and train.device == "cpu" and rollout.pipeline_parallel > 1:
            fault = (
                f"train.lora with rollout.pipeline_parallel={rollout.pipeline_parallel} fails on a "
                "CPU, where vLLM runs adapters without the warm-up that stages need; set "
                "rollout.pipeline_parallel=1"
            )
        elif rank and self.algorithm.kl.refresh_every:
            fault = (
                f"algorithm.kl.refresh_every={self.algorithm.kl.refresh_every} copies the policy "
                "into the reference model, but under train.lora the reference is the policy "
                "without its adapters; set algorithm.kl.refresh_every=0"
            )
        if fault:
            raise ValueError(fault)
        return self

    @property
    def anchors_before_updates(self) -> bool:
        """Whether old log-probs are needed before the update.

        KL in the reward, rollout correction and some losses need them; with dropout, those of an
        update are not the policy's.
        """
        correction = self.rollout_correction
        if self.algorithm.old_log_probs == "engine":
            return correction.drops
        is_corrected = (
            correction.importance == "sequence"
            or correction.importance_normalize
            or correction.drops
        )
        is_needed = self.algorithm.kl.place == "reward" or self.algorithm.selects_tokens
        return is_corrected or is_needed or self.train.lora.dropout > 0

    @property
    def scores_before_updates(self) -> bool:
        """Whether a full step has a forward pass for old log-probs; a single update has its own."""
        has_updates = self.algorithm.old_log_probs == "policy" and self.train.updates_per_step > 1
        return self.anchors_before_updates or has_updates

    @property
    def rollout_correction(self) -> RolloutCorrectionConfig:
        """algorithm.rollout_correction as applied: `stale` is turned off where it does not apply.

        It does not apply with the engine's log-probs as the anchor, and with compat=verl, which
        treats every token as on-policy.
        """
        correction, algorithm = self.algorithm.rollout_correction, self.algorithm
        is_anchor = algorithm.old_log_probs == "engine"
        is_ignored = is_anchor or Compat.of(algorithm).stale_is_fresh
        if correction.importance != "stale" or not is_ignored:
            return correction
        return correction.model_copy(
            update={"importance": "off", "importance_min": None, "importance_normalize": False}
        )
