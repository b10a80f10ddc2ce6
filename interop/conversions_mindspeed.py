"""Conversions from MindSpeed's keys to ours, like those from verl's."""

from __future__ import annotations

import math
from typing import Any

from interop.conversions import as_list, at_least_0, shared_devices, tokens_of, warmup
from interop.foreign_config import ForeignConfig, Outcome, default, meaningless, taken, unsupported

__all__ = ["as_list", "at_least_0"]

MEGATRON, ACTOR, RL, GENERATE = "megatron_training", "actor_config", "rl_config", "generate_config"
_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")
NODE_DEVICES = 16  # at most on a node
NO_REFERENCE = "MindSpeed's DAPO has no reference"
_TRACKERS = ("tensorboard", "wandb", "swanlab")


def _is_dapo(config: ForeignConfig) -> bool:
    """True if the stage, else a switch, selects DAPO, which has no reference."""
    stage = config[f"{MEGATRON}.stage"]
    if stage is None:
        return bool(config[f"{RL}.clip_higher_enable"] or config[f"{RL}.filter_groups_enable"])
    return bool(stage == "ray_dapo")


def _updates(config: ForeignConfig) -> int:
    """Return the optimizer steps per training step."""
    is_filtered = config[f"{RL}.filter_groups_enable"]
    key = f"{RL}.filter_groups_train_batch_size" if is_filtered else f"{MEGATRON}.global_batch_size"
    mini, epochs = int(config[f"{RL}.mini_batch_size"]), int(config[f"{RL}.epochs"])
    return math.ceil(int(config[key]) / mini) * epochs


def _longest(config: ForeignConfig) -> int:
    """Return the maximum tokens of a prompt with its response."""
    sampled = config[f"{GENERATE}.sampling_config.max_tokens"]
    response = sampled or config[f"{RL}.rollout_max_tokens"]
    return int(config[f"{RL}.max_prompt_length"]) + int(response)


def ms_map_keys(value: Any, config: ForeignConfig) -> Outcome:
    problem, answer = (value or {}).get("prompt"), (value or {}).get("response")
    if value is None or (problem == "prompt" and answer == "reward_model"):
        return default("the columns of DAPO-Math-17k")
    if problem and answer and not value.get("query"):
        return taken(data__columns__problem=problem, data__columns__answer=answer)
    return unsupported("set data.columns.problem and data.columns.answer, then allow the key")


def ms_data_path(value: Any, config: ForeignConfig) -> Any:
    if "preprocess.input" in config.values:
        note = "MindSpeed's prepared copy of preprocess.input, which data.train names"
        return Outcome("other-stage", {}, note)
    if str(value).endswith((".parquet", ".jsonl", ".json", ".csv", ".arrow")):
        return [value]
    return unsupported(
        "rows in MindSpeed's own format, which only it reads: also import the configs/datasets "
        "file that made them (its input becomes data.train), or allow the key and set data.train"
    )


def ms_stage(value: Any, config: ForeignConfig) -> Outcome:
    if value == "ray_dapo":
        return taken(NO_REFERENCE, algorithm__kl__place="off")
    if value == "ray_grpo":
        return default(f"{RL}.init_kl_coef and {RL}.use_kl_in_reward apply")
    return unsupported("only DAPO (ray_dapo) and GRPO (ray_grpo) are supported")


def ms_kl_in_reward(value: Any, config: ForeignConfig) -> Any:
    if not value:
        return default(f"{RL}.init_kl_coef applies")
    return meaningless(NO_REFERENCE) if _is_dapo(config) else "reward"


def ms_kl_coef(value: Any, config: ForeignConfig) -> Outcome:
    if _is_dapo(config):
        return meaningless(NO_REFERENCE)
    in_reward = bool(config[f"{RL}.use_kl_in_reward"])
    if not value and not in_reward:
        return taken(algorithm__kl__place="off")
    place = "reward" if in_reward else "loss"
    return taken(algorithm__kl__place=place, algorithm__kl__coefficient=value)


def ms_kl_penalty(value: Any, config: ForeignConfig) -> Any:
    if _is_dapo(config):
        return meaningless(NO_REFERENCE)
    if value not in _ESTIMATORS:
        return unsupported(f"algorithm.kl.estimator takes {', '.join(_ESTIMATORS)}")
    return value


def ms_kl_control(value: Any, config: ForeignConfig) -> Any:
    if _is_dapo(config):
        return meaningless(NO_REFERENCE)
    if config[f"{RL}.kl_ctrl_type"] != "adaptive":
        return default("the coefficient is fixed")
    if not config[f"{RL}.use_kl_in_reward"]:
        return unsupported("only KL in the reward can have an adaptive coefficient")
    return value


def ms_global_batch(value: Any, config: ForeignConfig) -> Outcome:
    num = int(value)
    if config[f"{RL}.filter_groups_enable"]:
        return taken("prompts per draw", sampler__gen_prompts=num)
    return taken("prompts per training step", train__train_prompts=num, sampler__gen_prompts=num)


def ms_micro_batch(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{RL}.use_dynamic_bsz"]:
        return meaningless(f"with {RL}.use_dynamic_bsz, max_packing_token_size applies")
    ranks = int(config[f"{ACTOR}.context_parallel_size"])
    return tokens_of(int(value), _longest(config), ranks)


def ms_packing(value: Any, config: ForeignConfig) -> int:
    return math.ceil(int(value) / int(config[f"{ACTOR}.context_parallel_size"]))


def ms_packing_of_all(value: Any, config: ForeignConfig) -> Any:
    if f"{RL}.update_max_packing_token_size" in config.values:
        return meaningless(f"{RL}.update_max_packing_token_size applies")
    return ms_packing(value, config)


def ms_min_lr(value: Any, config: ForeignConfig) -> Any:
    if config[f"{ACTOR}.lr_decay_style"] == "constant":
        return meaningless(f"{ACTOR}.lr_decay_style=constant")
    return float(value or 0) / float(config[f"{ACTOR}.lr"])


def ms_warmup(value: Any, config: ForeignConfig) -> Any:
    if not value:
        return 0
    steps = int(config[f"{MEGATRON}.train_iters"])
    return warmup(f"{value} of {steps}", round(float(value) * steps), _updates(config))


def ms_expert_parallel(value: Any, config: ForeignConfig) -> bool:
    return int(value) > 1


def ms_max_model_len(value: Any, config: ForeignConfig) -> Outcome:
    longest = _longest(config)
    if int(value) < longest:
        return unsupported(f"{value} tokens are fewer than the {longest} of prompt and response")
    return default(f"engines take {longest} tokens per prompt and response")


def ms_devices(value: Any, config: ForeignConfig) -> Outcome:
    tensor, pipeline = (
        int(config[f"{GENERATE}.infer_{kind}_parallel_size"]) for kind in ("tensor", "pipeline")
    )
    cluster = {"train__ray_address": "auto"} if int(value) > NODE_DEVICES else {}
    return shared_devices(int(value), tensor * pipeline, train__device="npu", **cluster)


def ms_trackers(value: Any, config: ForeignConfig) -> list[str]:
    on = {name: bool(config[f"{RL}.use_{name}"]) for name in _TRACKERS}
    on["tensorboard"] &= not on["wandb"]  # as MindSpeed does
    return [name for name in on if on[name]]
