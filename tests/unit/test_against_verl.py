"""Losses and rollout correction match verl's own functions on the same numbers."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dapo_core.algorithm.correction import importance_weights, mask_rollouts
from dapo_core.algorithm.loss import LossTotals, policy_loss
from dapo_core.algorithm.loss_tokens import LossTokens
from dapo_core.config.algorithm import AlgorithmConfig, RolloutCorrectionConfig
from dapo_core.metrics.mismatch import correction_metrics
from tests.batches import random_batch, rows_of
from tests.verl_wheels import verl_folder

VERSION = "0.9.1"
STUBBED = (
    "verl",
    "verl.protocol",
    "verl.utils",
    "verl.utils.import_utils",
    "verl.workers",
    "verl.workers.config",
    "verl.workers.config.actor",
    "verl.trainer",
    "verl.trainer.config",
    "verl.trainer.config.algorithm",
    "omegaconf",
    "tensordict",
)
draw = torch.Generator().manual_seed(0)
LENGTHS = torch.tensor([7, 1, 9, 4, 2, 9, 5])
MASK = torch.arange(9) < LENGTHS.unsqueeze(-1)
OLD = -3 * torch.rand(MASK.shape, generator=draw)
ROLLOUT = OLD + 0.3 * torch.randn(MASK.shape, generator=draw)


def _masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    return (
        torch.where(mask.bool(), values, 0.0).sum(axis)
        if axis is not None
        else values[mask.bool()].sum()
    )


def _masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    return _masked_sum(values, mask, axis) / (mask.sum(axis) if axis is not None else mask.sum())


class _Stubs(SimpleNamespace):
    """Stands in for imports that these verl functions do not use."""

    def __getattr__(self, name: str) -> Any:
        return type(
            name, (), {"from_dict": staticmethod(lambda tensors: SimpleNamespace(batch=tensors))}
        )


@pytest.fixture(scope="module")
def verl() -> Iterator[dict[str, ModuleType]]:
    """verl's rollout correction and loss modules, without verl's dependencies."""
    folder = verl_folder(VERSION) / "verl" / "trainer" / "ppo"
    parts: dict[str, Any] = {name: _Stubs() for name in STUBBED}
    tensors = SimpleNamespace(masked_sum=_masked_sum, masked_mean=_masked_mean)
    parts["verl"].utils = parts["verl.utils"]
    parts["verl.utils.torch_functional"] = parts["verl.utils"].torch_functional = tensors
    parts["verl.utils.import_utils"].deprecated = lambda *_: lambda function: function
    with pytest.MonkeyPatch.context() as patch:
        for name, part in parts.items():
            patch.setitem(sys.modules, name, part)
        yield {
            name: _module(folder / f"{name}.py") for name in ("rollout_corr_helper", "core_algos")
        }


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _both(low: float, high: float, mask: str) -> dict[str, Any]:
    return {"mask": mask, "mask_low": low, "mask_high": high}


def _divergence(kind: str, most: float) -> dict[str, Any]:
    return {"divergence": kind, "divergence_max": most}


WEIGHTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"rollout_is": "token", "rollout_is_threshold": 1.2},
        {"importance": "token", "importance_max": 1.2},
    ),
    (
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
        {"importance": "sequence", "importance_max": 1.5},
    ),
    (
        {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
        {"importance": "token", "importance_min": 0.8, "importance_max": 1.3},
    ),
    (
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_1.5"},
        {"importance": "sequence", "importance_min": 0.5, "importance_max": 1.5},
    ),
]
NORMALIZED = [
    ({**theirs, "rollout_is_batch_normalize": True}, {**ours, "importance_normalize": True})
    for theirs, ours in WEIGHTS
]
MASKS = [
    # k1 bounds the engine's probability over the policy's: 1 / ratio
    ("token_k1", "0.8_1.3", _both(1 / 1.3, 1 / 0.8, "token")),
    ("seq_mean_k1", "0.9_1.2", _both(1 / 1.2, 1 / 0.9, "sequence")),
    ("seq_sum_k1", "0.4_2", _both(1 / 2, 1 / 0.4, "product")),
    *(
        (
            f"{'' if level == 'token' else 'seq_'}{level}_{kind}",
            str(most),
            _divergence(f"{level}-{kind}", most),
        )
        for level, most in (("token", 0.04), ("sum", 0.2), ("mean", 0.04), ("max", 0.1))
        for kind in ("k2", "k3")
    ),
    (
        "token_k1,seq_mean_k3",
        "0.8_1.3,0.03",
        {**_both(1 / 1.3, 1 / 0.8, "token"), **_divergence("mean-k3", 0.03)},
    ),
]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        *WEIGHTS,
        *NORMALIZED,
        *(
            ({"rollout_rs": rs, "rollout_rs_threshold": threshold}, ours)
            for rs, threshold, ours in MASKS
        ),
    ],
    ids=str,
)
def test_rollout_correction_and_its_metrics_equal_verls(
    verl: dict[str, ModuleType], theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    weights, mask, metrics = verl[
        "rollout_corr_helper"
    ].compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, MASK.float(), **theirs)
    settings = RolloutCorrectionConfig.model_validate({"importance": "off", **ours})
    batch = replace(
        random_batch(1, len(MASK)),
        rollout_log_probs=ROLLOUT,
        response_mask=MASK,
        is_stale=torch.zeros_like(MASK),
    )
    if weights is not None:
        found = importance_weights(OLD, ROLLOUT, MASK, batch.is_stale, settings)
        assert found is not None
        torch.testing.assert_close(found[MASK], weights.batch["rollout_is_weights"][MASK])
    kept = mask_rollouts(OLD, ROLLOUT, MASK, settings)
    assert torch.equal(kept, mask.bool())
    assert settings.drops == bool(0 < int(kept.sum()) < int(MASK.sum()))
    # verl has more metrics per rejection criterion
    wanted = {
        name: value for name, value in metrics.items() if "_k" not in name.partition("_rs_")[2]
    }
    found_metrics = correction_metrics(OLD, batch, settings)
    names = {name for name in found_metrics if name.startswith("rollout_corr/")}
    assert names == set(wanted)
    assert {name: found_metrics[name] for name in names} == pytest.approx(
        wanted, rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize(
    "aggregation",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ],
)
@pytest.mark.parametrize("dual", [3.0, 10.0])
def test_the_mini_batch_loss_equals_verls(
    verl: dict[str, ModuleType], aggregation: str, dual: float
) -> None:
    norm = {"loss_norm_tokens": 9} if aggregation.endswith("norm") else {}
    algorithm = AlgorithmConfig.model_validate(
        {"loss_aggregation": aggregation, "clip_ratio_dual": dual, "clip_ratio_high": 0.28, **norm}
    )
    log_probs = OLD + 1.5 * torch.randn(MASK.shape, generator=torch.Generator().manual_seed(1))
    advantages = (
        torch.tensor([1.0, -2.0, -0.5, 0.3, 0.0, -1.0, 2.0]).unsqueeze(-1).expand(MASK.shape)
    )
    weights = (ROLLOUT - OLD).exp()
    config: Any = _ActorConfig(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=dual,
        global_batch_info={},
    )
    loss, metrics = verl["core_algos"].compute_policy_loss_vanilla(
        OLD, log_probs, advantages, MASK.float(), aggregation, config, weights
    )
    totals = LossTotals(int(MASK.sum()), len(MASK))
    token_weights = totals.token_weights(MASK, algorithm)
    tokens = LossTokens(OLD, advantages, MASK, token_weights, rows_of(MASK), weights)
    sums = policy_loss(log_probs, None, tokens, algorithm).sums
    assert sums.pg_loss == pytest.approx(float(loss), rel=1e-5)
    assert sums.clipped / sums.num_tokens == pytest.approx(metrics["actor/pg_clipfrac"])
    assert sums.clipped_dual / sums.num_tokens == pytest.approx(metrics["actor/pg_clipfrac_lower"])
    assert sums.neg_log_ratio / sums.num_tokens == pytest.approx(metrics["actor/ppo_kl"], rel=1e-5)
    assert sums.clipped_dual > 0


class _ActorConfig(SimpleNamespace):
    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)
