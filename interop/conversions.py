"""Conversions from verl's keys to ours where a map of values is not enough; `convert` in the table
names them.

A function gets one value and all settings. It returns the value for the row's keys, or an Outcome.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interop.foreign_config import ForeignConfig, Outcome, default, meaningless, taken, unsupported

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
# First parts of paths that look like ORGANIZATION/MODEL.
_FOLDERS = re.compile(r"models?|checkpoints|ckpts?|weights|pretrained|data|outputs?", re.IGNORECASE)


def at_least_0(value: Any, config: ForeignConfig) -> int:
    return max(int(value), 0)


def as_list(value: Any, config: ForeignConfig) -> list[Any]:
    return value if isinstance(value, list) else [value]


def betas(value: Any, config: ForeignConfig) -> Outcome:
    first, second = value
    return taken(train__adam_beta1=float(first), train__adam_beta2=float(second))


def bucket(value: Any, config: ForeignConfig) -> int:
    return int(value) * 1024**2


def top_k(value: Any, config: ForeignConfig) -> int:
    return int(value) if int(value) > 0 else -1


def gen_batch(value: Any, config: ForeignConfig) -> int:
    return int(config["data.train_batch_size"] if value is None else value)


def lora_targets(value: Any, config: ForeignConfig) -> Any:
    if value == "all-linear":
        return default("all linear modules of the decoder layers")
    if isinstance(value, str):
        return unsupported("a pattern of names; list the modules' names")
    return value


def model(value: Any, config: ForeignConfig) -> Outcome:
    is_name = re.fullmatch(r"([A-Za-z0-9][\w.-]*)/[\w.-]+", str(value))
    if is_name is not None and not _FOLDERS.fullmatch(is_name[1]) and not Path(value).exists():
        return taken(model__source="huggingface", model__id=value)
    return taken(model__source="path", model__path=value)


# Validation, checkpoints and trackers


def before_training(value: Any, config: ForeignConfig) -> Any:
    if value and config["trainer.test_freq"] <= 0:
        note = "the chain evaluates the model before training in a separate stage"
        return Outcome("other-stage", {}, note)
    return bool(value)


def at_least_1(value: Any, config: ForeignConfig) -> Any:
    return int(value) if int(value) > 0 else default()


def rollout_files(value: Any, config: ForeignConfig) -> Outcome:
    saved = taken(train__save_rollouts_every=1, train__num_saved_prompts=None)
    return saved if value else default()


def resume(value: Any, config: ForeignConfig) -> Any:
    if value != "resume_path":
        return value
    path = str(config["trainer.resume_from_path"] or "")
    return path or unsupported("needs trainer.resume_from_path, which is not set")


def trackers(value: Any, config: ForeignConfig) -> Any:
    names = as_list(value, config)
    unknown = [str(name) for name in names if name not in (*TRACKERS, "console", "file")]
    if unknown:
        return unsupported(f"train.trackers takes {', '.join(TRACKERS)}, not {', '.join(unknown)}")
    return [name for name in names if name in TRACKERS]


def val_do_sample(value: Any, config: ForeignConfig) -> Any:
    return default("validation samples if validation.temperature is above 0") if value else 0.0


# Devices


def num_devices(config: ForeignConfig) -> int:
    """Return the trainer's device count: devices per node x nodes."""
    return int(config["trainer.n_gpus_per_node"]) * int(config["trainer.nnodes"])


def devices(value: Any, config: ForeignConfig) -> Outcome:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    tensor, pipeline = (int(config[f"{ROLLOUT}.{name}"] or 1) for name in names)
    cluster = {"train__ray_address": "auto"} if int(config["trainer.nnodes"]) > 1 else {}
    return shared_devices(num_devices(config), tensor * pipeline, **cluster)


def shared_devices(num: int, per_engine: int, **others: str) -> Outcome:
    """Return the outcome for `num` devices that ranks and engines share."""
    if num % per_engine:
        return unsupported(f"{num} devices cannot be split into engines of {per_engine}")
    return taken(
        "ranks and engines share the devices, one rank each",
        train__num_ranks=num,
        train__placement="colocated",
        rollout__num_workers=num // per_engine,
        **others,
    )


def fsdp_size(value: Any, config: ForeignConfig) -> Any:
    if value is None or int(value) <= 0 or int(value) >= num_devices(config):
        return default("the weights are sharded over all ranks")
    return int(value)


def expert_parallel(value: Any, config: ForeignConfig) -> Any:
    of_engine = int(config[f"{ROLLOUT}.tensor_model_parallel_size"])
    if int(value) not in (1, of_engine):
        note = f"experts are split over all {of_engine} devices of an engine, or not at all"
        return unsupported(note)
    return int(value) > 1


# Batches and steps


def updates_per_step(config: ForeignConfig) -> int:
    """Return the optimizer steps per training step."""
    batch, mini = int(config["data.train_batch_size"]), int(config[f"{ACTOR}.ppo_mini_batch_size"])
    return math.ceil(batch / mini) * int(config[f"{ACTOR}.ppo_epochs"] or 1)


def _is_warmup_of_steps(config: ForeignConfig) -> bool:
    """True if lr_warmup_steps takes precedence over the ratio: from 0 in 0.7.0, then from 1."""
    steps = config[f"{ACTOR}.optim.lr_warmup_steps"]
    return steps is not None and int(steps) >= int(config.version != "0.7.0")


def warmup_steps(value: Any, config: ForeignConfig) -> Outcome:
    if not _is_warmup_of_steps(config):
        return default(f"{ACTOR}.optim.lr_warmup_steps_ratio applies")
    return warmup(value, int(value), updates_per_step(config))


def warmup(said: Any, num_steps: int, updates: int) -> Outcome:
    """Return the outcome for warm-up over `num_steps` training steps of `updates` each."""
    note = f"{said} training steps x {updates} optimizer steps each"
    return taken(note, train__warmup_steps=num_steps * updates)


def warmup_ratio(value: Any, config: ForeignConfig) -> Any:
    if _is_warmup_of_steps(config):
        return meaningless(f"{ACTOR}.optim.lr_warmup_steps applies")
    if not value:
        return 0
    if (total := _total_steps(config)) is None:
        note = "a fraction of an unknown number of steps; set trainer.total_training_steps"
        return unsupported(note)
    return warmup(f"{value} of {total}", int(value * total), updates_per_step(config))


def _total_steps(config: ForeignConfig) -> int | None:
    """Return the number of training steps; None if the number of training rows is unknown."""
    steps = config["trainer.total_training_steps"]
    rows = config.facts.get("num_train_rows")
    if rows is None:
        return None if steps is None else int(steps)
    batch = int(config["data.gen_batch_size"] or config["data.train_batch_size"])
    of_epochs = rows // batch * int(config["trainer.total_epochs"])
    return of_epochs if steps is None else min(int(steps), of_epochs)


def total_steps(value: Any, config: ForeignConfig) -> Any:
    if (steps := _total_steps(config)) is None or steps == int(value):
        return int(value)
    return _of_epochs(config["trainer.total_epochs"], steps, config)


def epochs(value: Any, config: ForeignConfig) -> Outcome:
    if config["trainer.total_training_steps"] is not None:
        return meaningless("trainer.total_training_steps applies, unless the epochs end first")
    if (steps := _total_steps(config)) is None:
        return unsupported(
            f"the steps in {value} epochs depend on the rows of data.train_files, which are "
            "unknown: set trainer.total_training_steps, or give the row count "
            "(--set-env num_train_rows=N)"
        )
    return _of_epochs(value, steps, config)


def _of_epochs(num_epochs: Any, steps: int, config: ForeignConfig) -> Outcome:
    rows = f"{num_epochs} epochs of {config.facts['num_train_rows']} rows in full batches"
    if steps <= 0:
        return unsupported(f"{rows} make no training step")
    return taken(rows, train__total_steps=steps)


def micro_batch_of_all(value: Any, config: ForeignConfig) -> Any:
    ranks = int(config[f"{ACTOR}.ulysses_sequence_parallel_size"] or 1)
    return micro_batch_responses(int(value) * ranks // num_devices(config), config)


def micro_batch_responses(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{ACTOR}.use_dynamic_bsz"]:
        return meaningless(f"with {ACTOR}.use_dynamic_bsz, ppo_max_token_len_per_gpu applies")
    longest = int(config["data.max_prompt_length"]) + int(config["data.max_response_length"])
    ranks = int(config[f"{ACTOR}.ulysses_sequence_parallel_size"] or 1)
    return tokens_of(int(value), longest, ranks)


def tokens_of(num_responses: int, longest: int, ranks: int) -> Outcome:
    """Return the outcome for a micro-batch that `ranks` devices share."""
    return taken(
        f"{num_responses} responses of at most {longest} tokens, over {ranks} ranks that share "
        "each sequence",
        train__micro_batch_tokens=math.ceil(num_responses * longest / ranks),
    )


def drop_too_long(value: Any, config: ForeignConfig) -> Any:
    if value:
        return "drop"
    if config["data.truncation"] == "left":
        note = "overlong prompts are truncated, as data.truncation says"
        return taken(note, data__too_long="truncate_left")
    return default("data.truncation applies")


# Algorithm and reward


def kl_place(value: Any, config: ForeignConfig) -> Any:
    in_loss, in_reward = config[f"{ACTOR}.use_kl_loss"], config["algorithm.use_kl_in_reward"]
    if in_loss and in_reward:
        return unsupported("algorithm.kl.place is either loss or reward; both are on")
    return "loss" if in_loss else "reward" if in_reward else "off"


def reference_path(value: Any, config: ForeignConfig) -> Any:
    if value is None or kl_place(value, config) == "off":
        return meaningless("without KL there is no reference")
    return str(value)


_NO_STD = "opo rloo rloo_vectorized reinforce_plus_plus reinforce_plus_plus_baseline".split()
_UNCLIPPED = ("sapo", "kl_cov", "dro", "gpg")
_NO_DUAL_CLIP = (*_UNCLIPPED, "gspo", "cispo", "geo_mean", "clip_cov")


def advantage(value: Any, config: ForeignConfig) -> Any:
    is_raw = not config["algorithm.norm_adv_by_std_in_grpo"]
    return "dr-grpo" if is_raw and value == "grpo" else value


def normalize(value: Any, config: ForeignConfig) -> Any:
    estimator = config["algorithm.adv_estimator"]
    if estimator in _NO_STD:
        return meaningless(f"{estimator} does not divide by the group's standard deviation")
    return "grpo" if value else "dr-grpo"


def _clip(ours: str, of_dppo: str) -> Callable[[Any, ForeignConfig], Any]:
    """Return the conversion of a clip, whose meaning depends on the loss."""

    def convert(value: Any, config: ForeignConfig) -> Any:
        loss = config[f"{ACTOR}.policy_loss.loss_mode"]
        if loss == "dppo_tv":
            return Outcome("taken", {f"algorithm.dppo_tv.{of_dppo}": value})
        if loss in (_NO_DUAL_CLIP if ours == "clip_ratio_dual" else _UNCLIPPED):
            return meaningless(f"loss_mode={loss} does not read it")
        return Outcome("taken", {f"algorithm.{ours}": value})

    return convert


clip_low, clip_high = _clip("clip_ratio_low", "low"), _clip("clip_ratio_high", "high")
clip_dual = _clip("clip_ratio_dual", "ratio_max")


def loss_aggregation(value: Any, config: ForeignConfig) -> Outcome:
    if (loss := config[f"{ACTOR}.policy_loss.loss_mode"]) in ("geo_mean", "sapo"):
        note = f"{loss} ignores it, and averages responses"
        return taken(note, algorithm__loss_aggregation="seq-mean-token-mean")
    if value != "seq-mean-token-sum-norm":
        return taken(algorithm__loss_aggregation=value)
    constant = config[f"{ACTOR}.loss_scale_factor"] or config["data.max_response_length"]
    return taken(
        "divides by a constant: loss_scale_factor, else the maximum response length",
        algorithm__loss_aggregation=value,
        algorithm__loss_norm_tokens=int(constant),
    )


def filter_draws(value: Any, config: ForeignConfig) -> Any:
    if int(value) > 0:
        return int(value)
    note = "no limit; a step ends after an epoch of groups without signal"
    return taken(note, sampler__max_num_gen_batches=0)


def overlong(value: Any, config: ForeignConfig) -> Any:
    if value and config["reward.reward_manager.name"] != "dapo":
        return meaningless("only read by reward_manager=dapo")
    return bool(value)


# Rollout correction

_MASKS = {"token_k1": "token", "seq_sum_k1": "product", "seq_mean_k1": "sequence"}
_MASKS_OF_0_7 = {"token": "token", "sequence": "product", "geometric": "sequence"}
_DIVERGENCES = {f"token_{k}": f"token-{k}" for k in ("k2", "k3")} | {
    f"seq_{how}_{k}": f"{how}-{k}" for how in ("sum", "mean", "max") for k in ("k2", "k3")
}


def _correction(**ours: Any) -> Outcome:
    return Outcome("taken", {f"{CORRECTION}.{name}": value for name, value in ours.items()})


def _without_importance(config: ForeignConfig) -> Outcome | None:
    """Return why verl does not weight the loss; None if it does."""
    if config[f"{CORRECTION}.rollout_is"] is None:
        return meaningless(f"{CORRECTION}.rollout_is is off")
    if not config[f"{CORRECTION}.bypass_mode"]:
        return None
    note = f"only used for metrics with {CORRECTION}.bypass_mode, where the ratio in the loss is "
    return Outcome("ignored-by-trainer", {}, f"{note}the weight")


def importance(value: Any, config: ForeignConfig) -> Any:
    return _without_importance(config) or value


def importance_threshold(value: Any, config: ForeignConfig) -> Outcome:
    low, _, high = str(value).rpartition("_")
    lowest = {"importance_min": float(low)} if low else {}
    return _without_importance(config) or _correction(**lowest, importance_max=float(high))


def rejection(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return _correction(mask="off", divergence="off")
    ours: dict[str, str] = {}
    masks = {**_MASKS, **_MASKS_OF_0_7}
    for name in str(value).replace(" ", "").split(","):
        if name in _DIVERGENCES and "divergence" not in ours:
            ours["divergence"] = _DIVERGENCES[name]
        elif name in masks and "mask" not in ours:
            ours["mask"] = masks[name]
        else:
            return unsupported(f"{name}: only one ratio bound and one k2 or k3 bound are supported")
    return _correction(**ours)


def rejection_threshold(value: Any, config: ForeignConfig) -> Outcome:
    names = str(config[f"{CORRECTION}.rollout_rs"]).replace(" ", "").split(",")
    if names == ["None"]:
        return meaningless(f"{CORRECTION}.rollout_rs is off")
    if names[0] in _MASKS_OF_0_7:
        high = float(config[f"{CORRECTION}.rollout_is_threshold"] if value is None else value)
        low = config[f"{CORRECTION}.rollout_rs_threshold_lower"]
        return _correction(mask_low=1 / high if low is None else float(low), mask_high=high)
    bounds = str(value).replace(" ", "").split(",")
    if len(bounds) not in (1, len(names)):
        return unsupported(f"{len(bounds)} thresholds for {len(names)} rejections")
    ours: dict[str, float] = {}
    for name, bound in zip(names, bounds * (len(names) // len(bounds)), strict=True):
        first, _, last = bound.rpartition("_")
        if name in _DIVERGENCES:
            ours["divergence_max"] = float(last)
        else:
            low = float(first) if first else 1 / float(last)
            ours |= {"mask_low": 1 / float(last), "mask_high": 1 / low}
    return _correction(**ours)
