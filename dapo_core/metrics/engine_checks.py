"""Checks that engines have the policy's weights and sample from its distribution."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from dapo_core.engines.base import Sequences
from dapo_core.errors import RolloutError
from dapo_core.model.inputs import ModelInput

if TYPE_CHECKING:
    import torch

    from dapo_core.algorithm.batch import Batch
    from dapo_core.config.training import TrainingConfig

logger = logging.getLogger(__name__)

# Mean nats per token that rounding explains; train.max_mismatch replaces it for sampled tokens.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


def probe_difference(
    engine_log_probs: Callable[[Sequences], list[list[list[float]]]],
    probe: Batch,
    log_probs: torch.Tensor,
    dtypes: Collection[torch.dtype],
) -> float:
    """Return how far the worst engine is from the policy's `log_probs` [B, R], in nats per token.

    This is the mean absolute difference of log-probs over the probe's response tokens at
    temperature 1. Raises RolloutError if an engine omits tokens, or if the difference exceeds what
    the less precise of `dtypes` (policy and engine) explains, because the engine then does not have
    the policy's weights.
    """
    coarsest = _coarsest(dtypes)
    lengths = zip(probe.prompt_lengths.tolist(), probe.response_lengths.tolist(), strict=True)
    images = probe.images or [()] * probe.num_responses
    rows = zip(probe.token_ids.tolist(), images, lengths, strict=True)
    sequences = [
        (ModelInput(tuple(ids[:start]), shown), ids[start : start + length])
        for ids, shown, (start, length) in rows
    ]
    expected = [
        value
        for row, (_, response_ids) in zip(log_probs.tolist(), sequences, strict=True)
        for value in row[: len(response_ids)]
    ]
    means = [_mean_difference(expected, rows) for rows in engine_log_probs(sequences)]
    worst = next((mean for mean in means if math.isnan(mean)), max(means))  # max() can miss NaN
    if not worst <= MAX_DIFFERENCE[coarsest]:
        raise RolloutError(
            f"after a weight sync an engine's log-probs differ from the policy's by {worst:.4g} "
            f"nats per token, more than the {MAX_DIFFERENCE[coarsest]:g} that {coarsest} "
            "explains: the engine does not have the policy's weights. Set train.dtype=float32 and "
            "rollout.dtype=float32 to rule out precision, or try another rollout.engine"
        )
    return worst


def check_sampled_alike(
    log_probs: torch.Tensor, batch: Batch, config: TrainingConfig, dtypes: Collection[torch.dtype]
) -> None:
    """Check that the step's tokens were sampled from the policy's distribution.

    If not, raises RolloutError under train.on_mismatch=stop, and logs a warning under `warn`.
    Unlike the probe, which scores given tokens at temperature 1, this checks the sampled tokens at
    the rollout's temperature. It compares on-policy tokens with `log_probs` [B, R], the policy's
    before its first update. With top_p, top_k or algorithm.old_log_probs=engine, there is nothing
    to compare.
    """
    is_fresh = batch.is_fresh
    is_comparable = config.rollout.samples_among_all and config.algorithm.old_log_probs == "policy"
    if not is_comparable or not is_fresh.any():
        return
    if not_finite := int((~log_probs[is_fresh].isfinite()).sum()):
        raise RolloutError(
            f"{not_finite} of the policy's {int(is_fresh.sum())} log-probs are not finite; with "
            "train.nan_guard=true, a warning above names the module. Try train.fused_kernels=[], "
            "or train.dtype=float32"
        )
    coarsest = _coarsest(dtypes)
    limit, source = config.train.max_mismatch, "train.max_mismatch allows"
    if limit is None:
        limit = MAX_DIFFERENCE[coarsest] / min(config.rollout.temperature, 1.0)
        source = f"{coarsest} explains"
    mean = float((log_probs - batch.rollout_log_probs)[is_fresh].double().abs().mean())
    if mean <= limit:
        return
    found = (
        f"the engines' log-probs of the {int(is_fresh.sum())} tokens they sampled differ from the "
        f"policy's at rollout.temperature={config.rollout.temperature:g} by {mean:.4g} nats per "
        f"token, more than the {limit:g} that {source}: the engine samples from another "
        "distribution, or reports the log-probs of another. Check rollout.engine_args, or try "
        "another rollout.engine"
    )
    if config.train.on_mismatch == "stop":
        raise RolloutError(f"{found}; train.on_mismatch=warn trains on")
    logger.warning("%s", found)


def _coarsest(dtypes: Collection[torch.dtype]) -> str:
    """Return the name of the least precise dtype."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return max(names, key=MAX_DIFFERENCE.__getitem__)


def _mean_difference(expected: list[float], engine_rows: list[list[float]]) -> float:
    values = [value for row in engine_rows for value in row]
    if len(values) != len(expected):
        raise RolloutError(
            f"an engine returned {len(values)} log-probs for a probe of {len(expected)} response "
            "tokens, so its weights cannot be verified; try another rollout.engine"
        )
    differences = [abs(one - other) for one, other in zip(expected, values, strict=True)]
    return sum(differences) / max(len(differences), 1)
