"""Conversions between verl's keys for KL, group filtering, rewards and validation, and ours, both
ways.
"""

from __future__ import annotations

from typing import Any

from interop.conversions import ACTOR, ROLLOUT, Ours, unsupported
from interop.foreign_config import (
    TO_FOREIGN,
    ForeignConfig,
    Outcome,
    from_foreign,
    taken,
    to_foreign,
)
from interop.table import NOT_SET


@from_foreign("kl_in_loss")
def _kl_in_loss(value: Any, config: ForeignConfig) -> Outcome:
    in_reward = bool(config["algorithm.use_kl_in_reward"])
    return taken(algorithm__kl__place="loss" if value else "reward" if in_reward else "off")


@from_foreign("kl_in_reward")
def _kl_in_reward(value: Any, config: ForeignConfig) -> Outcome:
    in_loss = bool(config[f"{ACTOR}.use_kl_loss"])
    return taken(algorithm__kl__place="reward" if value else "loss" if in_loss else "off")


_ESTIMATORS = {
    "kl": "kl",
    "k1": "kl",
    "abs": "abs",
    "mse": "mse",
    "k2": "mse",
    "low_var_kl": "low_var_kl",
}
_ESTIMATORS |= {"k3": "low_var_kl"}
_ESTIMATORS |= {f"{name}+": f"{ours}+" for name, ours in _ESTIMATORS.items()}
_IN_LOSS = {"kl_loss_coef": "coefficient", "kl_loss_type": "estimator"}
_IN_REWARD = {"kl_coef": "coefficient", "kl_penalty": "estimator"}
_IN_REWARD |= {"type": "controller", "horizon": "horizon", "target_kl": "target"}


def _register_kl(place: str, switch: str, foreign_name: str, name: str) -> None:
    @from_foreign(f"{place}.{foreign_name}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        if not config[switch]:
            return Outcome("meaningless", {}, f"{switch} is off")
        if name == "estimator" and value not in _ESTIMATORS:
            return unsupported(f"algorithm.kl.estimator takes {', '.join(_ESTIMATORS)}")
        converted = _ESTIMATORS[value] if name == "estimator" else value
        return Outcome("taken", {f"algorithm.kl.{name}": converted})

    @to_foreign(f"{place}.{foreign_name}")
    def _foreign(ours: Ours) -> Any:
        return ours[f"algorithm.kl.{name}"] if ours["algorithm.kl.place"] == place else NOT_SET


for _foreign_name, _name in _IN_LOSS.items():
    _register_kl("loss", f"{ACTOR}.use_kl_loss", _foreign_name, _name)
for _foreign_name, _name in _IN_REWARD.items():
    _register_kl("reward", "algorithm.use_kl_in_reward", _foreign_name, _name)


@from_foreign("filter_draws")
def _filter_draws(value: Any, config: ForeignConfig) -> Outcome:
    if not config["algorithm.filter_groups.enable"]:
        return Outcome("meaningless", {}, "algorithm.filter_groups.enable is off")
    if int(value) <= 0:
        return taken(
            "no limit; a step ends after an epoch of groups without signal",
            sampler__max_num_gen_batches=0,
        )
    return taken(sampler__max_num_gen_batches=int(value))


@from_foreign("gen_batch")
def _gen_batch(value: Any, config: ForeignConfig) -> Outcome:
    prompts = config["data.train_batch_size"] if value is None else value
    return taken(sampler__gen_prompts=int(prompts))


def _register_validation(name: str, ours_name: str, greedy: Any) -> None:
    @from_foreign(f"val.{name}")
    def _value(value: Any, config: ForeignConfig) -> Outcome:
        if not config[f"{ROLLOUT}.val_kwargs.do_sample"]:
            return taken(
                "greedy, since val_kwargs.do_sample is off", **{f"validation__{ours_name}": greedy}
            )
        return taken(**{f"validation__{ours_name}": value})


for _foreign_name, _name, _greedy in (
    ("temperature", "temperature", 0.0),
    ("top_p", "top_p", 1.0),
    ("top_k", "top_k", -1),
    ("n", "num_samples", 1),
):
    _register_validation(_foreign_name, _name, _greedy)


@from_foreign("val.do_sample")
def _do_sample(value: Any, config: ForeignConfig) -> Outcome:
    if value:
        return Outcome("default", {}, "validation samples if validation.temperature is above 0")
    return taken(validation__temperature=0.0)


_METRICS = {"acc": "acc", "score": "score", "reward": "seq_reward"}
_METRICS |= {"seq_reward": "seq_reward", "seq_final_reward": "seq_final_reward"}


@from_foreign("filter_metric")
def _filter_metric(value: Any, config: ForeignConfig) -> Outcome:
    if not config["algorithm.filter_groups.enable"]:
        return Outcome("meaningless", {}, "algorithm.filter_groups.enable is off")
    if value not in _METRICS:
        return unsupported(f"sampler.metric takes {', '.join(_METRICS.values())}")
    return taken(sampler__metric=_METRICS[value])


@from_foreign("overlong")
def _overlong(value: Any, config: ForeignConfig) -> Outcome:
    if value and config["reward.reward_manager.name"] != "dapo":
        return Outcome("meaningless", {}, "only read by reward_manager=dapo")
    return taken(reward__overlong__enabled=bool(value))


@from_foreign("overlong_tokens")
def _overlong_tokens(value: Any, config: ForeignConfig) -> Outcome:
    if not config["reward.reward_kwargs.overlong_buffer_cfg.enable"]:
        return Outcome("meaningless", {}, "the penalty is off")
    return taken(reward__overlong__buffer_tokens=int(value))


@from_foreign("custom_name")
def _custom_name(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or config["reward.custom_reward_function.path"] is None:
        return Outcome("meaningless", {}, "custom_reward_function.path is not set")
    return taken(custom_reward__name=str(value))


@from_foreign("top_k")
def _top_k(value: Any, config: ForeignConfig) -> Outcome:
    return taken(rollout__top_k=int(value) if int(value) > 0 else -1)


@from_foreign("all_if_negative")
def _all_if_negative(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or int(value) <= 0:
        return Outcome("default", {}, "all prompts")
    return taken(validation__num_prompts=int(value))


@from_foreign("reference_path")
def _reference_path(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or not (
        config[f"{ACTOR}.use_kl_loss"] or config["algorithm.use_kl_in_reward"]
    ):
        return Outcome("meaningless", {}, "without KL there is no reference")
    return taken(algorithm__kl__reference_path=str(value))


TO_FOREIGN.update(
    {
        "kl_in_loss": lambda ours: ours["algorithm.kl.place"] == "loss",
        "kl_in_reward": lambda ours: ours["algorithm.kl.place"] == "reward",
        "val.do_sample": lambda ours: ours["validation.temperature"] > 0,
        "custom_name": lambda ours: (
            NOT_SET if ours["custom_reward.path"] is None else ours["custom_reward.name"]
        ),
        "all_if_negative": lambda ours: ours["validation.num_prompts"] or -1,
        "reference_path": lambda ours: (
            NOT_SET if (path := ours["algorithm.kl.reference_path"]) is None else path
        ),
    }
)
