"""Unit conversions between MindSpeed's keys and ours, both ways; `convert` in the tables names
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interop.foreign_config import (
    TO_FOREIGN,
    ForeignConfig,
    Outcome,
    from_foreign,
    taken,
    to_foreign,
)
from interop.table import NOT_SET

MEGATRON, ACTOR, RL, GENERATE = "megatron_training", "actor_config", "rl_config", "generate_config"
_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")

Ours = Mapping[str, Any]


def is_dapo(config: ForeignConfig) -> bool:
    """True if the configuration selects DAPO, which has no reference: by stage, else by DAPO's
    switches.
    """
    stage = config[f"{MEGATRON}.stage"]
    if stage is None:
        return bool(config[f"{RL}.clip_higher_enable"] or config[f"{RL}.filter_groups_enable"])
    return stage == "ray_dapo"


def train_prompts(config: ForeignConfig) -> int:
    """Return the prompts per training step."""
    is_filtered = config[f"{RL}.filter_groups_enable"]
    key = f"{RL}.filter_groups_train_batch_size" if is_filtered else f"{MEGATRON}.global_batch_size"
    return int(config[key])


def _updates(config: ForeignConfig) -> int:
    """Return the optimizer steps per training step."""
    return math.ceil(train_prompts(config) / int(config[f"{RL}.mini_batch_size"])) * int(
        config[f"{RL}.epochs"]
    )


def _updates_of(ours: Ours) -> int:
    return math.ceil(ours["train.train_prompts"] / ours["train.mini_prompts"]) * int(
        ours["train.passes"]
    )


def _longest(config: ForeignConfig) -> int:
    """Return the maximum tokens of a prompt with its response."""
    response = (
        config[f"{GENERATE}.sampling_config.max_tokens"] or config[f"{RL}.rollout_max_tokens"]
    )
    return int(config[f"{RL}.max_prompt_length"]) + int(response)


def _off(switch: str) -> Outcome:
    return Outcome("meaningless", {}, f"{switch} is off")


@from_foreign("ms.map_keys")
def _map_keys(value: Any, config: ForeignConfig) -> Outcome:
    problem, answer = (value or {}).get("prompt"), (value or {}).get("response")
    if value is None or (problem == "prompt" and answer == "reward_model"):
        return Outcome("default", {}, "the columns of DAPO-Math-17k")
    if problem and answer and not value.get("query"):
        return taken(data__columns__problem=problem, data__columns__answer=answer)
    return Outcome(
        "unsupported", {}, "set data.columns.problem and data.columns.answer, then allow the key"
    )


@from_foreign("ms.data_path", is_one_way=True)
def _data_path(value: Any, config: ForeignConfig) -> Outcome:
    if config.is_set("preprocess.input"):
        return Outcome(
            "other-stage",
            {},
            "MindSpeed's prepared copy of preprocess.input, which data.train names",
        )
    if str(value).endswith((".parquet", ".jsonl", ".json", ".csv", ".arrow")):
        return Outcome("taken", {"data.train": [value]})
    return Outcome(
        "unsupported",
        {},
        "rows in MindSpeed's own format, which only it reads: also import the configs/datasets "
        "file that made "
        "them (its input becomes data.train), or allow the key and set data.train",
    )


@from_foreign("ms.seq_length")
def _seq_length(value: Any, config: ForeignConfig) -> Outcome:
    return Outcome("meaningless", {}, f"{RL}.max_prompt_length limits the prompts")


@from_foreign("ms.stage")
def _stage(value: Any, config: ForeignConfig) -> Outcome:
    if value == "ray_dapo":
        return taken("MindSpeed's DAPO has no reference", algorithm__kl__place="off")
    if value == "ray_grpo":
        return Outcome("default", {}, f"{RL}.init_kl_coef and {RL}.use_kl_in_reward apply")
    return Outcome("unsupported", {}, "only DAPO (ray_dapo) and GRPO (ray_grpo) are supported")


@from_foreign("ms.kl_in_reward")
def _kl_in_reward(value: Any, config: ForeignConfig) -> Outcome:
    if not value:
        return Outcome("default", {}, f"{RL}.init_kl_coef applies")
    return _without_reference() if is_dapo(config) else taken(algorithm__kl__place="reward")


@from_foreign("ms.kl_coef")
def _kl_coef(value: Any, config: ForeignConfig) -> Outcome:
    if is_dapo(config):
        return _without_reference()
    in_reward = bool(config[f"{RL}.use_kl_in_reward"])
    if not value and not in_reward:
        return taken(algorithm__kl__place="off")
    return taken(
        algorithm__kl__place="reward" if in_reward else "loss", algorithm__kl__coefficient=value
    )


def _without_reference() -> Outcome:
    return Outcome("meaningless", {}, "MindSpeed's DAPO has no reference")


@from_foreign("ms.kl_penalty")
def _kl_penalty(value: Any, config: ForeignConfig) -> Outcome:
    if is_dapo(config):
        return _without_reference()
    if value not in _ESTIMATORS:
        return Outcome("unsupported", {}, f"algorithm.kl.estimator takes {', '.join(_ESTIMATORS)}")
    return taken(algorithm__kl__estimator=value)


@to_foreign("ms.kl_penalty")
def _their_kl_penalty(ours: Ours) -> Any:
    known = ours["algorithm.kl.estimator"] in _ESTIMATORS and ours["algorithm.kl.place"] != "off"
    return ours["algorithm.kl.estimator"] if known else NOT_SET


def _register_kl_control(name: str, ours_name: str) -> None:
    @from_foreign(f"ms.{name}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        is_adaptive = config[f"{RL}.kl_ctrl_type"] == "adaptive"
        if is_dapo(config):
            return _without_reference()
        if not is_adaptive:
            return Outcome("default", {}, "the coefficient is fixed")
        if not config[f"{RL}.use_kl_in_reward"]:
            return Outcome(
                "unsupported", {}, "only KL in the reward can have an adaptive coefficient"
            )
        return Outcome("taken", {f"algorithm.kl.{ours_name}": value})

    @to_foreign(f"ms.{name}")
    def _foreign(ours: Ours) -> Any:
        is_adaptive = (
            ours["algorithm.kl.controller"] == "adaptive" and ours["algorithm.kl.place"] == "reward"
        )
        return ours[f"algorithm.kl.{ours_name}"] if is_adaptive else NOT_SET


for _name, _ours_name in (
    ("kl_control", "controller"),
    ("kl_target", "target"),
    ("kl_horizon", "horizon"),
):
    _register_kl_control(_name, _ours_name)


@from_foreign("ms.clip_higher")
def _clip_higher(value: Any, config: ForeignConfig) -> Outcome:
    decides = "clip_ratio_low and clip_ratio_high apply" if value else "clip_ratio applies"
    return Outcome("default", {}, f"{RL}.{decides}")


@from_foreign("ms.clip_ratio")
def _clip_ratio(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{RL}.clip_higher_enable"]:
        return Outcome(
            "meaningless",
            {},
            f"with {RL}.clip_higher_enable, clip_ratio_low and clip_ratio_high apply",
        )
    return taken(algorithm__clip_ratio_low=value, algorithm__clip_ratio_high=value)


def _register_switched(name: str, switch: str, ours_key: str) -> None:
    """Register a value that is ours unchanged while their switch is on."""

    @from_foreign(f"ms.{name}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        return (
            Outcome("taken", {ours_key: value})
            if config[f"{RL}.{switch}"]
            else _off(f"{RL}.{switch}")
        )


for _name, _switch, _key in (
    ("clip_low", "clip_higher_enable", "algorithm.clip_ratio_low"),
    ("clip_high", "clip_higher_enable", "algorithm.clip_ratio_high"),
    ("buffer", "overlong_buffer_enable", "reward.overlong.buffer_tokens"),
    ("penalty", "overlong_buffer_enable", "reward.overlong.penalty_factor"),
    ("rollout_max_tokens", "overlong_buffer_enable", "rollout.max_response_tokens"),
    ("filtered_batch", "filter_groups_enable", "train.train_prompts"),
):
    _register_switched(_name, _switch, _key)


@from_foreign("ms.draws")
def _draws(value: Any, config: ForeignConfig) -> Outcome:
    if not config[f"{RL}.filter_groups_enable"]:
        return _off(f"{RL}.filter_groups_enable")
    return taken(sampler__max_num_gen_batches=max(int(value), 0))


@from_foreign("ms.global_batch")
def _global_batch(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{RL}.filter_groups_enable"]:
        return taken("prompts per draw", sampler__gen_prompts=int(value))
    return taken(
        "prompts per training step",
        train__train_prompts=int(value),
        sampler__gen_prompts=int(value),
    )


@from_foreign("ms.micro_batch")
def _micro_batch(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{RL}.use_dynamic_bsz"]:
        return Outcome(
            "meaningless", {}, f"with {RL}.use_dynamic_bsz, max_packing_token_size applies"
        )
    ranks = int(config[f"{ACTOR}.context_parallel_size"])
    tokens = math.ceil(int(value) * _longest(config) / ranks)
    return taken(
        f"{value} responses of at most {_longest(config)} tokens", train__micro_batch_tokens=tokens
    )


@to_foreign("ms.micro_batch")
def _their_micro_batch(ours: Ours) -> Any:
    longest = ours["data.max_prompt_tokens"] + ours["rollout.max_response_tokens"]
    return max(1, ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"] // longest)


def _packed(value: Any, config: ForeignConfig) -> Outcome:
    if not config[f"{RL}.use_dynamic_bsz"]:
        return _off(f"{RL}.use_dynamic_bsz")
    return taken(
        train__micro_batch_tokens=math.ceil(
            int(value) / int(config[f"{ACTOR}.context_parallel_size"])
        )
    )


@from_foreign("ms.packing", is_one_way=True)
def _packing(value: Any, config: ForeignConfig) -> Outcome:
    if config.is_set(f"{RL}.update_max_packing_token_size"):
        return Outcome("meaningless", {}, f"{RL}.update_max_packing_token_size applies")
    return _packed(value, config)


from_foreign("ms.update_packing")(_packed)


@from_foreign("ms.min_lr")
def _min_lr(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{ACTOR}.lr_decay_style"] == "constant":
        return Outcome("meaningless", {}, f"{ACTOR}.lr_decay_style=constant")
    return taken(train__min_learning_rate_ratio=float(value or 0) / float(config[f"{ACTOR}.lr"]))


@from_foreign("ms.warmup")
def _warmup(value: Any, config: ForeignConfig) -> Outcome:
    if not value:
        return taken(train__warmup_steps=0)
    steps, updates = round(float(value) * int(config[f"{MEGATRON}.train_iters"])), _updates(config)
    return taken(
        f"{value} of {config[f'{MEGATRON}.train_iters']} training steps x {updates} optimizer "
        "steps each",
        train__warmup_steps=steps * updates,
    )


@to_foreign("ms.warmup")
def _their_warmup(ours: Ours) -> Any:
    updates = _updates_of(ours)
    return (
        NOT_SET
        if ours["train.warmup_steps"] % updates
        else ours["train.warmup_steps"] / updates / ours["train.total_steps"]
    )


@from_foreign("ms.recompute")
def _recompute(value: Any, config: ForeignConfig) -> Outcome:
    return taken(train__gradient_checkpointing=value == "full")


@from_foreign("ms.expert_parallel")
def _expert_parallel(value: Any, config: ForeignConfig) -> Outcome:
    return taken(
        "experts are split over the devices of an engine", rollout__expert_parallel=int(value) > 1
    )


@from_foreign("ms.enable_expert_parallel")
def _enable_expert_parallel(value: Any, config: ForeignConfig) -> Outcome:
    return Outcome("default", {}, f"{GENERATE}.infer_expert_parallel_size applies")


@from_foreign("ms.max_model_len")
def _max_model_len(value: Any, config: ForeignConfig) -> Outcome:
    longest = _longest(config)
    if int(value) < longest:
        return Outcome(
            "unsupported", {}, f"{value} tokens are fewer than the {longest} of prompt and response"
        )
    return Outcome("default", {}, f"engines take {longest} tokens per prompt and response")


@from_foreign("ms.devices")
def _devices(value: Any, config: ForeignConfig) -> Outcome:
    tensor, pipeline = (
        config[f"{GENERATE}.infer_{kind}_parallel_size"] for kind in ("tensor", "pipeline")
    )
    per_engine = int(tensor) * int(pipeline)
    if int(value) % per_engine:
        return Outcome(
            "unsupported", {}, f"{value} devices cannot be split into engines of {per_engine}"
        )
    return taken(
        "ranks and engines share the devices, one rank each",
        train__num_ranks=int(value),
        rollout__num_workers=int(value) // per_engine,
        train__placement="colocated",
        train__device="npu",
    )


@to_foreign("ms.devices")
def _their_devices(ours: Ours) -> Any:
    devices = ours["train.num_ranks"]
    if ours["train.placement"] == "separate":
        devices += (
            ours["rollout.num_workers"]
            * ours["rollout.tensor_parallel"]
            * ours["rollout.pipeline_parallel"]
        )
    return devices


def _register_tracker(name: str) -> None:
    @from_foreign(f"ms.tracker.{name}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        on = {
            each: bool(config[f"{RL}.use_{each}"]) for each in ("tensorboard", "wandb", "swanlab")
        }
        on["tensorboard"] &= not on["wandb"]  # as MindSpeed does
        return taken(
            "metrics.jsonl always gets every step",
            train__trackers=[each for each in on if on[each]],
        )

    @to_foreign(f"ms.tracker.{name}")
    def _foreign(ours: Ours) -> Any:
        return name in ours["train.trackers"]


def _register_tracker_name(kind: str, tracker: str, ours_key: str) -> None:
    @from_foreign(f"ms.{kind}.{tracker}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        if not value:
            return Outcome("default", {}, "unset")
        return (
            Outcome("taken", {ours_key: value})
            if config[f"{RL}.use_{tracker}"]
            else _off(f"{RL}.use_{tracker}")
        )

    @to_foreign(f"ms.{kind}.{tracker}")
    def _foreign(ours: Ours) -> Any:
        return (
            (ours[ours_key] or ours["run.name"]) if tracker in ours["train.trackers"] else NOT_SET
        )


for _name in ("tensorboard", "wandb", "swanlab"):
    _register_tracker(_name)
for _name in ("wandb", "swanlab"):
    _register_tracker_name("project", _name, "train.tracker_project")
    _register_tracker_name("run", _name, "train.tracker_run")


TO_FOREIGN.update(
    {
        "ms.stage": lambda ours: "ray_dapo" if ours["algorithm.kl.place"] == "off" else "ray_grpo",
        "ms.kl_in_reward": lambda ours: ours["algorithm.kl.place"] == "reward",
        "ms.kl_coef": lambda ours: (
            NOT_SET if ours["algorithm.kl.place"] == "off" else ours["algorithm.kl.coefficient"]
        ),
        "ms.clip_higher": lambda ours: True,
        "ms.draws": lambda ours: ours["sampler.max_num_gen_batches"] or -1,
        "ms.global_batch": lambda ours: ours[
            "sampler.gen_prompts" if ours["sampler.dynamic"] else "train.train_prompts"
        ],
        "ms.update_packing": lambda ours: (
            ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"]
        ),
        "ms.min_lr": lambda ours: (
            ours["train.min_learning_rate_ratio"] * ours["train.learning_rate"]
        ),
        "ms.recompute": lambda ours: "full" if ours["train.gradient_checkpointing"] else NOT_SET,
        "ms.expert_parallel": lambda ours: (
            ours["rollout.tensor_parallel"] if ours["rollout.expert_parallel"] else 1
        ),
        "ms.max_model_len": lambda ours: (
            ours["data.max_prompt_tokens"] + ours["rollout.max_response_tokens"]
        ),
    }
)
