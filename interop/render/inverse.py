"""Convert our recipe to another trainer's settings: the inverse of an import, by the same table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from interop import ForeignConfigError
from interop.conversions import ESTIMATORS, LOSSES
from interop.foreign_config import Setting, by_name
from interop.table import NOT_SET, Row, load

Ours = Mapping[str, Any]
Inverse = Callable[[Ours], Any]

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ALGORITHM, _CORRECTION = "algorithm", "algorithm.rollout_correction"
_RL, _GENERATE = "rl_config", "generate_config"
_ANY = ".*"

# Values that do not depend on the recipe.
_CONSTANTS: dict[str, dict[str, Any]] = {
    "verl": {
        f"{_ACTOR}.use_dynamic_bsz": True,
        "reward.reward_manager.name": "dapo",
        f"{_ACTOR}.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True,
    },
    "mindspeed-rl": {
        "megatron_training.split": "100,0,0",
        f"{_RL}.verifier_function": ["acc_for_dapo"],
        f"{_RL}.verifier_weight": [1.0],
        f"{_RL}.use_dynamic_bsz": True,
        "megatron_training.bf16": True,
        "actor_config.context_parallel_algo": "ulysses_cp_algo",
        "megatron_training.attention_dropout": 0.0,
        "megatron_training.hidden_dropout": 0.0,
        f"{_GENERATE}.sampling_config.min_p": 0.0,
        f"{_GENERATE}.dtype": "bfloat16",
        f"{_RL}.use_integrated_worker": True,
        f"{_RL}.use_remove_padding": True,
        f"{_RL}.use_dp_batch_balance": True,
        f"{_RL}.clip_higher_enable": True,
    },
}
# MindSpeed-MM copies MindSpeed-RL; it cannot pack sequences with images.
_CONSTANTS["mindspeed-mm"] = _CONSTANTS["mindspeed-rl"] | {
    f"{_RL}.is_multimodal": True,
    f"{_RL}.use_remove_padding": False,
    f"{_RL}.use_dynamic_bsz": False,
}
# Other keys of theirs already express these.
_SKIPPED = (
    f"{_ACTOR}.optim.lr_warmup_steps_ratio",
    "trainer.total_epochs",
    f"{_ACTOR}.ppo_micro_batch_size",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_CORRECTION}.rollout_rs_threshold_lower",
    "megatron_training.data_path",
    f"{_RL}.max_packing_token_size",
)
# Our keys behind theirs that an import does not read.
_ORIGINS = {
    "megatron_training.seq_length": "data.max_prompt_tokens",
    f"{_RL}.clip_higher_enable": "algorithm.clip_ratio_low, algorithm.clip_ratio_high",
    f"{_GENERATE}.enable_expert_parallel": "rollout.expert_parallel",
}
_MASKS = {"token": "token_k1", "product": "seq_sum_k1", "sequence": "seq_mean_k1"}


def settings_for(
    tree: Mapping[str, Any], trainer: str, version: str | None = None
) -> list[Setting]:
    """Return the settings of a trainer's version that are equivalent to a resolved recipe, in table
    order.

    `tree` has every key of the recipe, defaults included. A setting's origin lists the keys of ours
    it covers. Keys that the version does not have or read are left out. Raises ForeignConfigError
    for an unknown version.
    """
    table = load("verl" if trainer == "verl" else "mindspeed-rl")
    version = table.newest if version is None else table.require_version(version)
    ours = by_name(tree)
    _require_known(ours, trainer)
    settings: list[Setting] = []
    for row in sorted(table.rows, key=lambda row: row.is_family):  # exact keys win over families
        names = [] if version in row.ignored else row.names(version)
        if not names:
            continue
        if row.is_family:
            covered = {setting.origin for setting in settings}
            settings += (
                setting
                for setting in _of_family(names[0], row, ours)
                if setting.origin not in covered
            )
        elif set(row.ours) <= ours.keys():
            value = _foreign_value(row, trainer, ours)
            if value is not NOT_SET:
                origin = _ORIGINS.get(row.key, ", ".join(row.ours))
                settings.append(Setting(names[0], value, origin))
    return settings


def _require_known(ours: Ours, trainer: str) -> None:
    """Raise ForeignConfigError for a loss or an advantage that the trainer does not have."""
    is_verl = trainer == "verl"
    known = {
        "algorithm.loss": LOSSES.values() if is_verl else ("dapo",),
        "algorithm.advantage": (*ESTIMATORS.values(), "dr-grpo") if is_verl else ("grpo",),
    }
    for key, names in known.items():
        if ours[key] not in names:
            raise ForeignConfigError(
                f"{key}={ours[key]}: {trainer} does not have it; set one of "
                f"{', '.join(dict.fromkeys(names))}, or train.backend=own"
            )


def _of_family(name: str, row: Row, ours: Ours) -> Iterator[Setting]:
    """Yield the settings of a family of free keys that maps to a family of ours."""
    if len(row.ours) != 1 or not (name.endswith(_ANY) and row.ours[0].endswith(_ANY)):
        return
    section = row.ours[0].removesuffix(_ANY)
    for part, value in (ours.get(section) or {}).items():
        yield Setting(f"{name.removesuffix(_ANY)}.{part}", value, f"{section}.{part}")


def _foreign_value(row: Row, trainer: str, ours: Ours) -> Any:
    """Return the value of a row's key that is equivalent to our keys; NOT_SET if none exists or is
    needed.
    """
    if row.key in _CONSTANTS[trainer]:
        return _CONSTANTS[trainer][row.key]
    if row.key in _INVERSES:
        return _INVERSES[row.key](ours)
    if len(row.ours) != 1 or row.key in _SKIPPED:
        return NOT_SET
    value = ours[row.ours[0]]
    if not row.values:
        return value
    return next((foreign for foreign, known in row.values.items() if known == value), NOT_SET)


def _known(value: Any) -> Any:
    return NOT_SET if value is None else value


def _as_list(name: str) -> Inverse:
    return lambda ours: [ours[name]] if isinstance(ours[name], str) else list(ours[name])


def _kl(name: str, place: str) -> Inverse:
    return lambda ours: ours[f"algorithm.kl.{name}"] if _is_place(ours, place) else NOT_SET


def _of_loss(loss: str, key: str, otherwise: str | None = None) -> Inverse:
    """Return the inverse of a key that only one loss reads; `otherwise` is that of other losses."""

    def value(ours: Ours) -> Any:
        name = key if ours["algorithm.loss"] == loss else otherwise
        return NOT_SET if name is None else ours[f"algorithm.{name}"]

    return value


def _estimator(ours: Ours) -> str:
    name = ours["algorithm.advantage"].replace("dr-grpo", "grpo")
    return next(theirs for theirs, known in ESTIMATORS.items() if known == name)


def _adaptive_kl(name: str) -> Inverse:
    return lambda ours: (
        ours[f"algorithm.kl.{name}"]
        if ours["algorithm.kl.controller"] == "adaptive" and _is_place(ours, "reward")
        else NOT_SET
    )


def _is_place(ours: Ours, place: str) -> bool:
    return bool(ours["algorithm.kl.place"] == place)


def _tracked(tracker: str, name: str) -> Inverse:
    return lambda ours: (
        ours[name] or ours["run.name"] if tracker in ours["train.trackers"] else NOT_SET
    )


def _has_tracker(tracker: str) -> Inverse:
    return lambda ours: tracker in ours["train.trackers"]


def _warmup_steps(ours: Ours) -> Any:
    updates = ours["train.train_prompts"] // ours["train.mini_prompts"] * ours["train.passes"]
    steps, rest = divmod(ours["train.warmup_steps"], updates)
    return NOT_SET if rest else steps


def _warmup_fraction(ours: Ours) -> Any:
    updates = math.ceil(ours["train.train_prompts"] / ours["train.mini_prompts"])
    steps, rest = divmod(ours["train.warmup_steps"], updates * ours["train.passes"])
    return NOT_SET if rest else steps / ours["train.total_steps"]


def _importance_threshold(ours: Ours) -> Any:
    low, high = ours[f"{_CORRECTION}.importance_min"], ours[f"{_CORRECTION}.importance_max"]
    return high if low is None else f"{low}_{high}"


def _divergence(ours: Ours) -> str | None:
    """Return verl's name: token-k2 is token_k2, max-k3 seq_max_k3."""
    how, _, kind = ours[f"{_CORRECTION}.divergence"].partition("-")
    return f"{'' if how == 'token' else 'seq_'}{how}_{kind}" if kind else None


def _rejection(ours: Ours) -> Any:
    names = [_MASKS.get(ours[f"{_CORRECTION}.mask"]), _divergence(ours)]
    return ",".join(name for name in names if name) or None


def _rejection_threshold(ours: Ours) -> Any:
    bounds = []
    if ours[f"{_CORRECTION}.mask"] != "off":
        low, high = ours[f"{_CORRECTION}.mask_low"], ours[f"{_CORRECTION}.mask_high"]
        if not low:
            return NOT_SET
        bounds.append(f"{1 / high}_{1 / low}")
    if ours[f"{_CORRECTION}.divergence"] != "off":
        bounds.append(str(ours[f"{_CORRECTION}.divergence_max"]))
    return ",".join(bounds) or None


def _expert_parallel(ours: Ours) -> int:
    return int(ours["rollout.tensor_parallel"]) if ours["rollout.expert_parallel"] else 1


def _bucket(ours: Ours) -> int:
    return -(-int(ours["train.weight_bucket_bytes"]) // 1024**2)


def _longest(ours: Ours) -> int:
    return int(ours["data.max_prompt_tokens"]) + int(ours["rollout.max_response_tokens"])


def _npus(ours: Ours) -> int:
    engines = ours["rollout.num_workers"] * ours["rollout.tensor_parallel"]
    engines *= ours["rollout.pipeline_parallel"] * (ours["train.placement"] == "separate")
    return int(ours["train.num_ranks"] + engines)


def _kl_penalty(ours: Ours) -> Any:
    is_known = ours["algorithm.kl.estimator"] in ("kl", "abs", "mse", "low_var_kl")
    return ours["algorithm.kl.estimator"] if is_known and not _is_place(ours, "off") else NOT_SET


_OF_VERL: dict[str, Inverse] = {
    "data.train_files": _as_list("data.train"),
    "data.val_files": _as_list("data.eval"),
    "data.truncation": lambda ours: "left" if ours["data.too_long"] == "truncate_left" else "error",
    "data.filter_overlong_prompts": lambda ours: ours["data.too_long"] == "drop",
    "data.val_max_samples": lambda ours: ours["validation.num_prompts"] or -1,
    "actor_rollout_ref.model.path": lambda ours: _known(ours["model.id"] or ours["model.path"]),
    "actor_rollout_ref.ref.model.path": lambda ours: _known(ours["algorithm.kl.reference_path"]),
    f"{_ALGORITHM}.adv_estimator": _estimator,
    f"{_ALGORITHM}.norm_adv_by_std_in_grpo": lambda ours: (
        ours["algorithm.advantage"] == "grpo"
        if ours["algorithm.advantage"] in ("grpo", "dr-grpo")
        else NOT_SET
    ),
    f"{_ACTOR}.clip_ratio_low": _of_loss("dppo-tv", "dppo_tv.low", "clip_ratio_low"),
    f"{_ACTOR}.clip_ratio_high": _of_loss("dppo-tv", "dppo_tv.high", "clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_c": _of_loss("dppo-tv", "dppo_tv.ratio_max", "clip_ratio_dual"),
    f"{_ACTOR}.policy_loss.clip_cov_ratio": _of_loss("clip-cov", "clip_cov.ratio"),
    f"{_ACTOR}.policy_loss.clip_cov_lb": _of_loss("clip-cov", "clip_cov.low"),
    f"{_ACTOR}.policy_loss.clip_cov_ub": _of_loss("clip-cov", "clip_cov.high"),
    f"{_ACTOR}.policy_loss.kl_cov_ratio": _of_loss("kl-cov", "kl_cov.ratio"),
    f"{_ACTOR}.policy_loss.ppo_kl_coef": _of_loss("kl-cov", "kl_cov.coefficient"),
    f"{_ACTOR}.policy_loss.dro_beta": _of_loss("dro", "dro.beta"),
    f"{_ACTOR}.tau_pos": _of_loss("sapo", "sapo.tau_positive"),
    f"{_ACTOR}.tau_neg": _of_loss("sapo", "sapo.tau_negative"),
    f"{_ALGORITHM}.use_kl_in_reward": lambda ours: _is_place(ours, "reward"),
    f"{_ALGORITHM}.kl_ctrl.kl_coef": _kl("coefficient", "reward"),
    f"{_ALGORITHM}.kl_ctrl.type": _kl("controller", "reward"),
    f"{_ALGORITHM}.kl_ctrl.horizon": _kl("horizon", "reward"),
    f"{_ALGORITHM}.kl_ctrl.target_kl": _kl("target", "reward"),
    f"{_ALGORITHM}.kl_penalty": _kl("estimator", "reward"),
    f"{_CORRECTION}.rollout_is": lambda ours: (
        kind if (kind := ours[f"{_CORRECTION}.importance"]) in ("token", "sequence") else None
    ),
    f"{_CORRECTION}.rollout_is_threshold": _importance_threshold,
    f"{_CORRECTION}.rollout_rs": _rejection,
    f"{_CORRECTION}.rollout_rs_threshold": _rejection_threshold,
    f"{_ACTOR}.use_kl_loss": lambda ours: _is_place(ours, "loss"),
    f"{_ACTOR}.kl_loss_coef": _kl("coefficient", "loss"),
    f"{_ACTOR}.kl_loss_type": _kl("estimator", "loss"),
    f"{_ACTOR}.loss_agg_mode": lambda ours: ours["algorithm.loss_aggregation"],
    f"{_ACTOR}.loss_scale_factor": lambda ours: _known(ours["algorithm.loss_norm_tokens"]),
    f"{_ACTOR}.optim.lr_warmup_steps": _warmup_steps,
    f"{_ACTOR}.optim.betas": lambda ours: [ours["train.adam_beta1"], ours["train.adam_beta2"]],
    f"{_ACTOR}.fsdp_config.fsdp_size": lambda ours: ours["train.fsdp_size"] or -1,
    f"{_ACTOR}.fsdp_config.dtype": lambda ours: (
        "float32" if ours["train.dtype"] == "float32" else "bfloat16"
    ),
    f"{_ROLLOUT}.val_kwargs.do_sample": lambda ours: ours["validation.temperature"] > 0,
    f"{_ROLLOUT}.expert_parallel_size": _expert_parallel,
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _bucket,
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": _bucket,
    "reward.custom_reward_function.name": lambda ours: (
        NOT_SET if ours["custom_reward.path"] is None else ours["custom_reward.name"]
    ),
    "trainer.test_freq": lambda ours: ours["validation.every"] or -1,
    "trainer.logger": lambda ours: ["console", *ours["train.trackers"]],
    "trainer.resume_mode": lambda ours: {"auto": "auto", "never": "disable"}.get(
        ours["checkpoint.resume"], "resume_path"
    ),
    "trainer.resume_from_path": lambda ours: (
        NOT_SET if ours["checkpoint.resume"] in ("auto", "never") else ours["checkpoint.resume"]
    ),
}
_OF_MINDSPEED: dict[str, Inverse] = {
    "preprocess.input": _as_list("data.train"),
    "megatron_training.stage": lambda ours: "ray_dapo" if _is_place(ours, "off") else "ray_grpo",
    "megatron_training.global_batch_size": lambda ours: ours[
        "sampler.gen_prompts" if ours["sampler.dynamic"] else "train.train_prompts"
    ],
    "megatron_training.recompute_granularity": lambda ours: (
        "full" if ours["train.gradient_checkpointing"] else NOT_SET
    ),
    "megatron_training.seq_length": lambda ours: ours["data.max_prompt_tokens"],
    "actor_config.micro_batch_size": lambda ours: max(
        1, ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"] // _longest(ours)
    ),
    "actor_config.min_lr": lambda ours: (
        ours["train.min_learning_rate_ratio"] * ours["train.learning_rate"]
    ),
    "actor_config.lr_warmup_fraction": _warmup_fraction,
    f"{_RL}.use_kl_in_reward": lambda ours: _is_place(ours, "reward"),
    f"{_RL}.init_kl_coef": lambda ours: (
        NOT_SET if _is_place(ours, "off") else ours["algorithm.kl.coefficient"]
    ),
    f"{_RL}.kl_penalty": _kl_penalty,
    f"{_RL}.kl_ctrl_type": _adaptive_kl("controller"),
    f"{_RL}.kl_target": _adaptive_kl("target"),
    f"{_RL}.kl_horizon": _adaptive_kl("horizon"),
    f"{_RL}.filter_groups_max_batches": lambda ours: ours["sampler.max_num_gen_batches"] or -1,
    f"{_RL}.update_max_packing_token_size": lambda ours: (
        ours["train.micro_batch_tokens"] * ours["train.sequence_parallel"]
    ),
    f"{_RL}.actor_resource.num_npus": _npus,
    f"{_GENERATE}.infer_expert_parallel_size": _expert_parallel,
    f"{_GENERATE}.enable_expert_parallel": lambda ours: ours["rollout.expert_parallel"],
    f"{_GENERATE}.max_model_len": _longest,
}
for _tracker in ("tensorboard", "wandb", "swanlab"):
    _OF_MINDSPEED[f"{_RL}.use_{_tracker}"] = _has_tracker(_tracker)
for _tracker in ("wandb", "swanlab"):
    _OF_MINDSPEED[f"{_RL}.{_tracker}_project"] = _tracked(_tracker, "train.tracker_project")
    _OF_MINDSPEED[f"{_RL}.{_tracker}_exp_name"] = _tracked(_tracker, "train.tracker_run")
_INVERSES = _OF_VERL | _OF_MINDSPEED
