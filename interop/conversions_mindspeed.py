"""Unit conversions between MindSpeed's keys and ours, both ways; `convert` in the tables names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from interop.table import UNSAID
from interop.theirs import TO_THEIRS, Outcome, Theirs, ours_from, taken, theirs_from

MEGATRON, ACTOR, RL, GENERATE = "megatron_training", "actor_config", "rl_config", "generate_config"
_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")

Ours = Mapping[str, Any]


def is_dapo(theirs: Theirs) -> bool:
    """True if the configuration selects DAPO, which has no reference: by stage, else by DAPO's switches."""
    stage = theirs[f"{MEGATRON}.stage"]
    if stage is None:
        return bool(theirs[f"{RL}.clip_higher_enable"] or theirs[f"{RL}.filter_groups_enable"])
    return stage == "ray_dapo"


def train_prompts(theirs: Theirs) -> int:
    """Return the prompts per training step."""
    is_filtered = theirs[f"{RL}.filter_groups_enable"]
    key = f"{RL}.filter_groups_train_batch_size" if is_filtered else f"{MEGATRON}.global_batch_size"
    return int(theirs[key])


def _updates(theirs: Theirs) -> int:
    """Return the optimizer steps per training step."""
    return math.ceil(train_prompts(theirs) / int(theirs[f"{RL}.mini_batch_size"])) * int(theirs[f"{RL}.epochs"])


def _updates_of(ours: Ours) -> int:
    return math.ceil(ours["train.train_prompts"] / ours["train.mini_prompts"]) * int(ours["train.passes"])


def _longest(theirs: Theirs) -> int:
    """Return the maximum tokens of a prompt with its response."""
    response = theirs[f"{GENERATE}.sampling_config.max_tokens"] or theirs[f"{RL}.rollout_max_tokens"]
    return int(theirs[f"{RL}.max_prompt_length"]) + int(response)


def _off(switch: str) -> Outcome:
    return Outcome("meaningless", {}, f"{switch} is off")


@ours_from("ms.map_keys")
def _map_keys(value: Any, theirs: Theirs) -> Outcome:
    problem, answer = (value or {}).get("prompt"), (value or {}).get("response")
    if value is None or (problem == "prompt" and answer == "reward_model"):
        return Outcome("default", {}, "the columns of DAPO-Math-17k")
    if problem and answer and not value.get("query"):
        return taken(data__columns__problem=problem, data__columns__answer=answer)
    return Outcome("unsupported", {}, "set data.columns.problem and data.columns.answer, then allow the key")


@ours_from("ms.data_path", is_one_way=True)
def _data_path(value: Any, theirs: Theirs) -> Outcome:
    if theirs.is_set("preprocess.input"):
        return Outcome("other-stage", {}, "MindSpeed's prepared copy of preprocess.input, which data.train names")
    if str(value).endswith((".parquet", ".jsonl", ".json", ".csv", ".arrow")):
        return Outcome("taken", {"data.train": [value]})
    return Outcome(
        "unsupported",
        {},
        "rows in MindSpeed's own format, which only it reads: also import the configs/datasets file that made "
        "them (its input becomes data.train), or allow the key and set data.train",
    )


@ours_from("ms.seq_length")
def _seq_length(value: Any, theirs: Theirs) -> Outcome:
    return Outcome("meaningless", {}, f"{RL}.max_prompt_length limits the prompts")


@ours_from("ms.stage")
def _stage(value: Any, theirs: Theirs) -> Outcome:
    if value == "ray_dapo":
        return taken("MindSpeed's DAPO has no reference", algorithm__kl__place="off")
    if value == "ray_grpo":
        return Outcome("default", {}, f"{RL}.init_kl_coef and {RL}.use_kl_in_reward apply")
    return Outcome("unsupported", {}, "only DAPO (ray_dapo) and GRPO (ray_grpo) are supported")


@ours_from("ms.kl_in_reward")
def _kl_in_reward(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return Outcome("default", {}, f"{RL}.init_kl_coef applies")
    return _without_reference() if is_dapo(theirs) else taken(algorithm__kl__place="reward")


@ours_from("ms.kl_coef")
def _kl_coef(value: Any, theirs: Theirs) -> Outcome:
    if is_dapo(theirs):
        return _without_reference()
    in_reward = bool(theirs[f"{RL}.use_kl_in_reward"])
    if not value and not in_reward:
        return taken(algorithm__kl__place="off")
    return taken(algorithm__kl__place="reward" if in_reward else "loss", algorithm__kl__coefficient=value)


def _without_reference() -> Outcome:
    return Outcome("meaningless", {}, "MindSpeed's DAPO has no reference")


@ours_from("ms.kl_penalty")
def _kl_penalty(value: Any, theirs: Theirs) -> Outcome:
    if is_dapo(theirs):
        return _without_reference()
    if value not in _ESTIMATORS:
        return Outcome("unsupported", {}, f"algorithm.kl.estimator takes {', '.join(_ESTIMATORS)}")
    return taken(algorithm__kl__estimator=value)


@theirs_from("ms.kl_penalty")
def _their_kl_penalty(ours: Ours) -> Any:
    known = ours["algorithm.kl.estimator"] in _ESTIMATORS and ours["algorithm.kl.place"] != "off"
    return ours["algorithm.kl.estimator"] if known else UNSAID


def _register_kl_control(name: str, ours_name: str) -> None:
    @ours_from(f"ms.{name}")
    def _value(value: Any, theirs: Theirs) -> Outcome:
        is_adaptive = theirs[f"{RL}.kl_ctrl_type"] == "adaptive"
        if is_dapo(theirs):
            return _without_reference()
        if not is_adaptive:
            return Outcome("default", {}, "the coefficient is fixed")
        if not theirs[f"{RL}.use_kl_in_reward"]:
            return Outcome("unsupported", {}, "only KL in the reward can have an adaptive coefficient")
        return Outcome("taken", {f"algorithm.kl.{ours_name}": value})

    @theirs_from(f"ms.{name}")
    def _theirs(ours: Ours) -> Any:
        is_adaptive = ours["algorithm.kl.controller"] == "adaptive" and ours["algorithm.kl.place"] == "reward"
        return ours[f"algorithm.kl.{ours_name}"] if is_adaptive else UNSAID


for _name, _ours_name in (("kl_control", "controller"), ("kl_target", "target"), ("kl_horizon", "horizon")):
    _register_kl_control(_name, _ours_name)


@ours_from("ms.clip_higher")
def _clip_higher(value: Any, theirs: Theirs) -> Outcome:
    decides = "clip_ratio_low and clip_ratio_high apply" if value else "clip_ratio applies"
    return Outcome("default", {}, f"{RL}.{decides}")


@ours_from("ms.clip_ratio")
def _clip_ratio(value: Any, theirs: Theirs) -> Outcome:
    if theirs[f"{RL}.clip_higher_enable"]:
        return Outcome(
            "meaningless", {}, f"with {RL}.clip_higher_enable, clip_ratio_low and clip_ratio_high apply"
        )
    return taken(algorithm__clip_ratio_low=value, algorithm__clip_ratio_high=value)


def _register_switched(name: str, switch: str, ours_key: str) -> None:
    """Register a value that is ours unchanged while their switch is on."""

    @ours_from(f"ms.{name}")
    def _value(value: Any, theirs: Theirs) -> Outcome:
        return Outcome("taken", {ours_key: value}) if theirs[f"{RL}.{switch}"] else _off(f"{RL}.{switch}")


for _name, _switch, _key in (
    ("clip_low", "clip_higher_enable", "algorithm.clip_ratio_low"),
    ("clip_high", "clip_higher_enable", "algorithm.clip_ratio_high"),
    ("buffer", "overlong_buffer_enable", "reward.overlong.buffer_tokens"),
    ("penalty", "overlong_buffer_enable", "reward.overlong.penalty_factor"),
    ("rollout_max_tokens", "overlong_buffer_enable", "rollout.max_response_tokens"),
    ("filtered_batch", "filter_groups_enable", "train.train_prompts"),
):
    _register_switched(_name, _switch, _key)


@ours_from("ms.draws")
def _draws(value: Any, theirs: Theirs) -> Outcome:
    if not theirs[f"{RL}.filter_groups_enable"]:
        return _off(f"{RL}.filter_groups_enable")
    return taken(sampler__max_num_gen_batches=max(int(value), 0))


@ours_from("ms.global_batch")
def _global_batch(value: Any, theirs: Theirs) -> Outcome:
    if theirs[f"{RL}.filter_groups_enable"]:
        return taken("prompts per draw", sampler__gen_prompts=int(value))
    return taken("prompts per training step", train__train_prompts=int(value), sampler__gen_prompts=int(value))


@ours_from("ms.micro_batch")
def _micro_batch(value: Any, theirs: Theirs) -> Outcome:
    if theirs[f"{RL}.use_dynamic_bsz"]:
        return Outcome("meaningless", {}, f"with {RL}.use_dynamic_bsz, max_packing_token_size applies")
    ranks = int(theirs[f"{ACTOR}.context_parallel_size"])
    tokens = math.ceil(int(value) * _longest(theirs) / ranks)
    return taken(f"{value} responses of at most {_longest(theirs)} tokens", train__micro_batch_tokens=tokens)


@theirs_from("ms.micro_batch")
def _their_micro_batch(ours: Ours) -> Any:
    longest = ours["data.max_prompt_tokens"] + ours["rollout.max_response_tokens"]
    return max(1, ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"] // longest)


def _packed(value: Any, theirs: Theirs) -> Outcome:
    if not theirs[f"{RL}.use_dynamic_bsz"]:
        return _off(f"{RL}.use_dynamic_bsz")
    return taken(train__micro_batch_tokens=math.ceil(int(value) / int(theirs[f"{ACTOR}.context_parallel_size"])))


@ours_from("ms.packing", is_one_way=True)
def _packing(value: Any, theirs: Theirs) -> Outcome:
    if theirs.is_set(f"{RL}.update_max_packing_token_size"):
        return Outcome("meaningless", {}, f"{RL}.update_max_packing_token_size applies")
    return _packed(value, theirs)


ours_from("ms.update_packing")(_packed)


@ours_from("ms.min_lr")
def _min_lr(value: Any, theirs: Theirs) -> Outcome:
    if theirs[f"{ACTOR}.lr_decay_style"] == "constant":
        return Outcome("meaningless", {}, f"{ACTOR}.lr_decay_style=constant")
    return taken(train__min_learning_rate_ratio=float(value or 0) / float(theirs[f"{ACTOR}.lr"]))


@ours_from("ms.warmup")
def _warmup(value: Any, theirs: Theirs) -> Outcome:
    if not value:
        return taken(train__warmup_steps=0)
    steps, updates = round(float(value) * int(theirs[f"{MEGATRON}.train_iters"])), _updates(theirs)
    return taken(
        f"{value} of {theirs[f'{MEGATRON}.train_iters']} training steps x {updates} optimizer steps each",
        train__warmup_steps=steps * updates,
    )


@theirs_from("ms.warmup")
def _their_warmup(ours: Ours) -> Any:
    updates = _updates_of(ours)
    return (
        UNSAID
        if ours["train.warmup_steps"] % updates
        else ours["train.warmup_steps"] / updates / ours["train.total_steps"]
    )


@ours_from("ms.recompute")
def _recompute(value: Any, theirs: Theirs) -> Outcome:
    return taken(train__gradient_checkpointing=value == "full")


@ours_from("ms.expert_parallel")
def _expert_parallel(value: Any, theirs: Theirs) -> Outcome:
    return taken("experts are split over the devices of an engine", rollout__expert_parallel=int(value) > 1)


@ours_from("ms.enable_expert_parallel")
def _enable_expert_parallel(value: Any, theirs: Theirs) -> Outcome:
    return Outcome("default", {}, f"{GENERATE}.infer_expert_parallel_size applies")


@ours_from("ms.max_model_len")
def _max_model_len(value: Any, theirs: Theirs) -> Outcome:
    longest = _longest(theirs)
    if int(value) < longest:
        return Outcome("unsupported", {}, f"{value} tokens are fewer than the {longest} of prompt and response")
    return Outcome("default", {}, f"engines take {longest} tokens per prompt and response")


@ours_from("ms.devices")
def _devices(value: Any, theirs: Theirs) -> Outcome:
    tensor, pipeline = (theirs[f"{GENERATE}.infer_{kind}_parallel_size"] for kind in ("tensor", "pipeline"))
    per_engine = int(tensor) * int(pipeline)
    if int(value) % per_engine:
        return Outcome("unsupported", {}, f"{value} devices cannot be split into engines of {per_engine}")
    return taken(
        "ranks and engines share the devices, one rank each",
        train__num_ranks=int(value),
        rollout__num_workers=int(value) // per_engine,
        train__placement="colocated",
        train__device="npu",
    )


@theirs_from("ms.devices")
def _their_devices(ours: Ours) -> Any:
    devices = ours["train.num_ranks"]
    if ours["train.placement"] == "separate":
        devices += (
            ours["rollout.num_workers"] * ours["rollout.tensor_parallel"] * ours["rollout.pipeline_parallel"]
        )
    return devices


def _register_tracker(name: str) -> None:
    @ours_from(f"ms.tracker.{name}")
    def _value(value: Any, theirs: Theirs) -> Outcome:
        on = {each: bool(theirs[f"{RL}.use_{each}"]) for each in ("tensorboard", "wandb", "swanlab")}
        on["tensorboard"] &= not on["wandb"]  # as MindSpeed does
        return taken("metrics.jsonl always gets every step", train__trackers=[each for each in on if on[each]])

    @theirs_from(f"ms.tracker.{name}")
    def _theirs(ours: Ours) -> Any:
        return name in ours["train.trackers"]


def _register_tracker_name(kind: str, tracker: str, ours_key: str) -> None:
    @ours_from(f"ms.{kind}.{tracker}")
    def _value(value: Any, theirs: Theirs) -> Outcome:
        if not value:
            return Outcome("default", {}, "unset")
        return (
            Outcome("taken", {ours_key: value}) if theirs[f"{RL}.use_{tracker}"] else _off(f"{RL}.use_{tracker}")
        )

    @theirs_from(f"ms.{kind}.{tracker}")
    def _theirs(ours: Ours) -> Any:
        return (ours[ours_key] or ours["run.name"]) if tracker in ours["train.trackers"] else UNSAID


for _name in ("tensorboard", "wandb", "swanlab"):
    _register_tracker(_name)
for _name in ("wandb", "swanlab"):
    _register_tracker_name("project", _name, "train.tracker_project")
    _register_tracker_name("run", _name, "train.tracker_run")


TO_THEIRS.update(
    {
        "ms.stage": lambda ours: "ray_dapo" if ours["algorithm.kl.place"] == "off" else "ray_grpo",
        "ms.kl_in_reward": lambda ours: ours["algorithm.kl.place"] == "reward",
        "ms.kl_coef": lambda ours: (
            UNSAID if ours["algorithm.kl.place"] == "off" else ours["algorithm.kl.coefficient"]
        ),
        "ms.clip_higher": lambda ours: True,
        "ms.draws": lambda ours: ours["sampler.max_num_gen_batches"] or -1,
        "ms.global_batch": lambda ours: ours[
            "sampler.gen_prompts" if ours["sampler.dynamic"] else "train.train_prompts"
        ],
        "ms.update_packing": lambda ours: ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"],
        "ms.min_lr": lambda ours: ours["train.min_learning_rate_ratio"] * ours["train.learning_rate"],
        "ms.recompute": lambda ours: "full" if ours["train.gradient_checkpointing"] else UNSAID,
        "ms.expert_parallel": lambda ours: (
            ours["rollout.tensor_parallel"] if ours["rollout.expert_parallel"] else 1
        ),
        "ms.max_model_len": lambda ours: ours["data.max_prompt_tokens"] + ours["rollout.max_response_tokens"],
    }
)
