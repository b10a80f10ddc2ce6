"""Conversions between verl's keys for optimizer, loss and rollout correction, and ours, both ways."""

from __future__ import annotations

from typing import Any

from interop.conversions import ACTOR, Ours, unsupported
from interop.foreign_config import (
    TO_FOREIGN,
    ForeignConfig,
    Outcome,
    from_foreign,
    taken,
    to_foreign,
)
from interop.table import NOT_SET

CORRECTION = "algorithm.rollout_correction"
IN_BYPASS = (
    f"only used for metrics with {CORRECTION}.bypass_mode, where the ratio in the loss is the "
    "weight"
)
_AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@from_foreign("normalize")
def _normalize(value: Any, config: ForeignConfig) -> Outcome:
    if config["algorithm.adv_estimator"] == "rloo":
        return taken(
            "rloo does not divide by the standard deviation", algorithm__normalize_by_std=False
        )
    return taken(algorithm__normalize_by_std=bool(value))


@from_foreign("loss_aggregation")
def _loss_aggregation(value: Any, config: ForeignConfig) -> Outcome:
    if value not in _AGGREGATIONS:
        return unsupported(f"algorithm.loss_aggregation takes {', '.join(_AGGREGATIONS)}")
    if value != "seq-mean-token-sum-norm":
        return taken(algorithm__loss_aggregation=value)
    constant = config[f"{ACTOR}.loss_scale_factor"] or config["data.max_response_length"]
    return taken(
        "divides by a constant: loss_scale_factor, else the maximum response length",
        algorithm__loss_aggregation=value,
        algorithm__loss_norm_tokens=int(constant),
    )


@from_foreign("loss_norm")
def _loss_norm(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or config[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return Outcome("meaningless", {}, f"{ACTOR}.loss_agg_mode is not seq-mean-token-sum-norm")
    return taken(algorithm__loss_norm_tokens=int(value))


@from_foreign("schedule")
def _schedule(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return Outcome("default", {}, "unset")
    if value not in ("constant", "cosine"):
        return unsupported("only constant and cosine are supported")
    return taken(train__schedule=value)


@from_foreign("min_ratio")
def _min_ratio(value: Any, config: ForeignConfig) -> Outcome:
    if not value or config[f"{ACTOR}.optim.lr_scheduler_type"] != "cosine":
        return Outcome("meaningless", {}, "it is 0, or the schedule is constant")
    return taken(train__min_learning_rate_ratio=float(value))


@from_foreign("betas")
def _betas(value: Any, config: ForeignConfig) -> Outcome:
    first, second = value
    return taken(train__adam_beta1=float(first), train__adam_beta2=float(second))


def _correction(**ours: Any) -> Outcome:
    return Outcome("taken", {f"{CORRECTION}.{name}": value for name, value in ours.items()})


@from_foreign("importance")
def _importance(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return Outcome(
            "default",
            {},
            "off there; here the default weights only tokens sampled by older policy versions",
        )
    if value not in ("token", "sequence"):
        return unsupported(f"{CORRECTION}.importance takes token and sequence")
    if config[f"{CORRECTION}.bypass_mode"]:
        return Outcome("ignored-by-trainer", {}, IN_BYPASS)
    return _correction(importance=value)


@from_foreign("importance_threshold")
def _importance_threshold(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{CORRECTION}.rollout_is"] is None:
        return Outcome("meaningless", {}, f"{CORRECTION}.rollout_is is off")
    if config[f"{CORRECTION}.bypass_mode"]:
        return Outcome("ignored-by-trainer", {}, IN_BYPASS)
    low, _, high = str(value).rpartition("_")
    return _correction(
        **({"importance_min": float(low)} if low else {}), importance_max=float(high)
    )


@to_foreign("importance_threshold")
def _their_importance_threshold(ours: Ours) -> Any:
    low, high = ours[f"{CORRECTION}.importance_min"], ours[f"{CORRECTION}.importance_max"]
    return high if low is None else f"{low}_{high}"


@from_foreign("importance_normalize")
def _importance_normalize(value: Any, config: ForeignConfig) -> Outcome:
    if config[f"{CORRECTION}.rollout_is"] is None:
        return Outcome("meaningless", {}, f"{CORRECTION}.rollout_is is off")
    if config[f"{CORRECTION}.bypass_mode"]:
        return Outcome("ignored-by-trainer", {}, IN_BYPASS)
    return _correction(importance_normalize=bool(value))


@from_foreign("ratio_cap")
def _ratio_cap(value: Any, config: ForeignConfig) -> Outcome:
    if float(value) <= 0:
        return Outcome(
            "default",
            {},
            "off there; here the default weights only tokens sampled by older policy versions",
        )
    return _correction(importance="token", importance_max=float(value))


_MASKS = {"token_k1": "token", "seq_sum_k1": "product", "seq_mean_k1": "sequence"}
_MASKS_BEFORE_0_8 = {"token": "token", "sequence": "product", "geometric": "sequence"}
_DIVERGENCES = {f"token_{k}": f"token-{k}" for k in ("k2", "k3")}
_DIVERGENCES |= {
    f"seq_{how}_{k}": f"{how}-{k}" for how in ("sum", "mean", "max") for k in ("k2", "k3")
}


@from_foreign("rejection")
def _rejection(value: Any, config: ForeignConfig) -> Outcome:
    if value is None:
        return _correction(mask="off", divergence="off")
    ours: dict[str, str] = {}
    for name in str(value).replace(" ", "").split(","):
        if name in _DIVERGENCES and "divergence" not in ours:
            ours["divergence"] = _DIVERGENCES[name]
        elif name in {**_MASKS, **_MASKS_BEFORE_0_8} and "mask" not in ours:
            ours["mask"] = {**_MASKS, **_MASKS_BEFORE_0_8}[name]
        else:
            return unsupported(f"{name}: only one ratio bound and one k2 or k3 bound are supported")
    return _correction(**ours)


@to_foreign("rejection")
def _their_rejection(ours: Ours) -> Any:
    chosen = (
        {mask: name for name, mask in _MASKS.items()},
        {ours: name for name, ours in _DIVERGENCES.items()},
    )
    names = [
        chosen[0].get(ours[f"{CORRECTION}.mask"]),
        chosen[1].get(ours[f"{CORRECTION}.divergence"]),
    ]
    return ",".join(name for name in names if name) or None


@from_foreign("rejection_threshold")
def _rejection_threshold(value: Any, config: ForeignConfig) -> Outcome:
    names = str(config[f"{CORRECTION}.rollout_rs"]).replace(" ", "").split(",")
    if names == ["None"]:
        return Outcome("meaningless", {}, f"{CORRECTION}.rollout_rs is off")
    if names[0] in _MASKS_BEFORE_0_8:
        high = float(config[f"{CORRECTION}.rollout_is_threshold"] if value is None else value)
        low = config[f"{CORRECTION}.rollout_rs_threshold_lower"]
        return _correction(mask_low=1 / high if low is None else float(low), mask_high=high)
    bounds = str(value).replace(" ", "").split(",")
    if len(bounds) not in (1, len(names)):
        return unsupported(f"{len(bounds)} thresholds for {len(names)} rejections")
    ours: dict[str, float] = {}
    for name, bound in zip(
        names, bounds * len(names) if len(bounds) == 1 else bounds, strict=False
    ):
        first, _, last = bound.rpartition("_")
        if name in _DIVERGENCES:
            ours["divergence_max"] = float(last)
        else:
            low = float(first) if first else 1 / float(last)
            ours |= {"mask_low": 1 / float(last), "mask_high": 1 / low}
    return _correction(**ours)


@to_foreign("rejection_threshold")
def _their_rejection_threshold(ours: Ours) -> Any:
    bounds = []
    if ours[f"{CORRECTION}.mask"] != "off":
        low, high = ours[f"{CORRECTION}.mask_low"], ours[f"{CORRECTION}.mask_high"]
        if not low:
            return NOT_SET
        bounds.append(f"{1 / high}_{1 / low}")
    if ours[f"{CORRECTION}.divergence"] != "off":
        bounds.append(str(ours[f"{CORRECTION}.divergence_max"]))
    return ",".join(bounds) or None


@from_foreign("rejection_lower", is_one_way=True)
def _rejection_lower(value: Any, config: ForeignConfig) -> Outcome:
    if value is None or config[f"{CORRECTION}.rollout_rs"] is None:
        return Outcome(
            "meaningless", {}, f"{CORRECTION}.rollout_rs is off, or the lower bound is 1 / upper"
        )
    return _correction(mask_low=float(value))


TO_FOREIGN.update(
    {
        "loss_aggregation": lambda ours: ours["algorithm.loss_aggregation"],
        "loss_norm": lambda ours: (
            NOT_SET if (tokens := ours["algorithm.loss_norm_tokens"]) is None else tokens
        ),
        "schedule": lambda ours: (
            schedule if (schedule := ours["train.schedule"]) in ("constant", "cosine") else NOT_SET
        ),
        "betas": lambda ours: [ours["train.adam_beta1"], ours["train.adam_beta2"]],
        "importance": lambda ours: (
            kind if (kind := ours[f"{CORRECTION}.importance"]) in ("token", "sequence") else None
        ),
    }
)
