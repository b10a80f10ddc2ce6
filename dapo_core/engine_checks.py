"""Checks that engines hold the policy's weights and sample from them: a probe, and the step's own tokens."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from dapo_core.errors import RolloutError

if TYPE_CHECKING:
    import torch

    from dapo_core.batch import Batch
    from dapo_core.cluster.rollout_group import RolloutGroup
    from dapo_core.config.training import TrainingConfig

MAX_PROBE_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}  # mean nats per token


def probe_difference(
    rollouts: RolloutGroup, probe: Batch, log_probs: torch.Tensor, dtypes: Collection[torch.dtype]
) -> float:
    """How far the worst engine is from the policy, whose `log_probs` [B, R] are given, in nats per token.

    That is the mean |log-prob of the policy - log-prob of the engine| over the probe's response tokens at
    temperature 1. Raises RolloutError when an engine left tokens out, or when the difference is more than the
    coarser of `dtypes`, the policy's and the engine's, explains: the engine does not hold the policy's weights.
    """
    coarsest = _coarsest(dtypes)
    lengths = zip(probe.prompt_lengths.tolist(), probe.response_lengths.tolist(), strict=True)
    sequences = [
        (row[:num_prompt].tolist(), row[num_prompt : num_prompt + num_response].tolist())
        for row, (num_prompt, num_response) in zip(probe.token_ids, lengths, strict=True)
    ]
    expected = [
        value
        for row, (_, response_ids) in zip(log_probs.tolist(), sequences, strict=True)
        for value in row[: len(response_ids)]
    ]
    means = [_mean_difference(expected, rows) for rows in rollouts.log_probs(sequences)]
    worst = next((mean for mean in means if math.isnan(mean)), max(means))  # max() alone overlooks NaN
    if not worst <= MAX_PROBE_DIFFERENCE[coarsest]:
        raise RolloutError(
            f"after a weight sync an engine's log-probs differ from the policy's by {worst:.4g} nats per token, "
            f"more than the {MAX_PROBE_DIFFERENCE[coarsest]:g} that {coarsest} explains: the engine does not hold "
            "the policy's weights; set train.dtype=float32 and rollout.dtype=float32 to rule out precision, or "
            "try another rollout.engine"
        )
    return worst


def require_sampled_alike(
    log_probs: torch.Tensor, batch: Batch, config: TrainingConfig, dtypes: Collection[torch.dtype]
) -> None:
    """Raise RolloutError when the step's tokens were drawn from another distribution than the policy's.

    The probe asks for log-probs of given tokens at temperature 1; this looks at what was sampled, at the rollout's
    own temperature. Compared are tokens of the step's policy, `log_probs` [B, R] being its own before the step's
    first update; nothing where top_p, top_k or algorithm.old_log_probs=engine leave nothing to compare.
    """
    is_fresh = batch.response_mask & ~batch.is_stale
    if not config.rollout.samples_among_all or config.algorithm.old_log_probs == "engine" or not is_fresh.any():
        return
    if not_finite := int((~log_probs[is_fresh].isfinite()).sum()):
        raise RolloutError(
            f"{not_finite} of the policy's {int(is_fresh.sum())} log-probs are not finite; "
            "with train.nan_guard=true a warning above names the module; try train.fused_kernels=[], or "
            "train.dtype=float32"
        )
    coarsest = _coarsest(dtypes)
    most = MAX_PROBE_DIFFERENCE[coarsest] / min(config.rollout.temperature, 1.0)
    mean = float((log_probs - batch.rollout_log_probs)[is_fresh].double().abs().mean())
    if not mean <= most:
        raise RolloutError(
            f"the log-probs that engines gave for the {int(is_fresh.sum())} tokens they sampled differ from the "
            f"policy's at rollout.temperature={config.rollout.temperature:g} by {mean:.4g} nats per token, more "
            f"than the {most:g} that {coarsest} explains: the engine samples from another distribution than the "
            "policy's, or reports log-probs of another; look at rollout.engine_args, or try another rollout.engine"
        )


def _coarsest(dtypes: Collection[torch.dtype]) -> str:
    """The name of the least precise of the types."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return max(names, key=MAX_PROBE_DIFFERENCE.__getitem__)


def _mean_difference(expected: list[float], engine_rows: list[list[float]]) -> float:
    values = [value for row in engine_rows for value in row]
    if len(values) != len(expected):
        raise RolloutError(
            f"an engine gave {len(values)} log-probs for a probe of {len(expected)} response tokens; its weights "
            "cannot be proven; try another rollout.engine"
        )
    return sum(abs(one - other) for one, other in zip(expected, values, strict=True)) / max(len(values), 1)
