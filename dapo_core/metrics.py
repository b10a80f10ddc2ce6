"""One training step in numbers: the field's names and formulas, metrics.jsonl, and the console line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from dapo_core.reward import Verdict
from dapo_core.sampler import FATES, Draw

if TYPE_CHECKING:
    import torch

    from dapo_core.batch import Batch
    from dapo_core.config import AlgorithmConfig
    from dapo_core.loss import LossTotals
    from dapo_core.policy import UpdateSums
    from dapo_core.rollout import Group

METRICS_FILE = "metrics.jsonl"


class PhaseTimer:
    """Wall seconds of a step's phases, as timing_s/PHASE."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """timing_s/ of every phase, and of the whole step so far."""
        phases = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        return {**phases, "timing_s/step": time.perf_counter() - self.started}


def draw_metrics(draw: Draw) -> dict[str, float]:
    """What sampling cost: draws, and the account of groups and response tokens."""
    account = draw.account
    counts = {f"sampler/{fate}_groups": float(account.groups[fate]) for fate in FATES}
    counts |= {f"sampler/{fate}_tokens": float(account.tokens[fate]) for fate in FATES}
    return {
        **counts,
        "sampler/waste_ratio": account.waste_ratio,
        "sampler/accuracy": account.num_right / max(account.num_finished, 1),
        "train/num_gen_batches": float(draw.num_gen_batches),
        "perf/generated_tokens": float(account.generated_tokens),
    }


def response_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Scores, rewards, lengths and verdicts of the responses trained on.

    Scores and rewards leave out empty responses, which the engine aborted.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    response_lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
    prompt_lengths = np.array([len(group.prompt.prompt_ids) for group in groups for _ in group.rollouts])
    verdicts = [rollout.verdict for rollout in rollouts]
    answered = response_lengths > 0
    return {
        **_summary("critic/score", np.array([rollout.score for rollout in rollouts])[answered]),
        **_summary("critic/rewards", np.array([rollout.reward for rollout in rollouts])[answered]),
        **_summary("response_length", response_lengths),
        **_summary("response_length_non_aborted", response_lengths[answered]),
        "response/aborted_ratio": float(1 - answered.mean()),
        **_summary("prompt_length", prompt_lengths),
        "response_length/clip_ratio": float(np.mean([rollout.is_truncated for rollout in rollouts])),
        "reward/overlong_ratio": float(np.mean([rollout.overlong_penalty < 0 for rollout in rollouts])),
        "perf/trained_response_tokens": float(response_lengths.sum()),
        "perf/total_num_tokens": float(response_lengths.sum() + prompt_lengths.sum()),
        **{f"reward/{name}_ratio": verdicts.count(name) / len(verdicts) for name in get_args(Verdict)},
    }


def batch_metrics(
    batch: Batch, entropy: torch.Tensor, totals: LossTotals, algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Advantages, entropy, and how far the engine's log-probs are from the policy's on the same tokens.

    entropy: [B, R]. With r = exp(old_log_probs - rollout_log_probs) over the tokens under the mask: rollout/kl is
    the mean of -log r (k1), rollout/k3_kl the mean of r - 1 - log r, rollout/ess = (sum r)^2 / (tokens * sum r^2),
    and rollout/ppl_ratio the mean over responses of the policy's perplexity over the engine's.
    """
    mask = batch.response_mask
    num_tokens = mask.sum(dim=-1)
    advantages = np.repeat(batch.advantages.double().numpy(), num_tokens.numpy())
    weights = totals.token_weights(mask, algorithm)
    log_ratio = (batch.old_log_probs - batch.rollout_log_probs)[mask].double()
    ratio = log_ratio.exp()
    probs_diff = (batch.old_log_probs[mask].exp() - batch.rollout_log_probs[mask].exp()).abs()
    if not len(log_ratio):
        return {}
    per_response = log_ratio.split(num_tokens[num_tokens > 0].tolist())
    ppl_ratios = [float((-part.mean()).exp()) for part in per_response]
    return {
        **_summary("critic/advantages", advantages),
        **_summary("critic/returns", advantages),
        "actor/entropy": float((weights * entropy)[mask].sum()),
        "rollout/probs_diff_mean": float(probs_diff.mean()),
        "rollout/probs_diff_max": float(probs_diff.max()),
        "rollout/kl": float(-log_ratio.mean()),
        "rollout/k3_kl": float((ratio - 1 - log_ratio).mean()),
        "rollout/ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "rollout/ppl_ratio": float(np.mean(ppl_ratios)),
    }


def update_metrics(updates: Sequence[UpdateSums]) -> dict[str, float]:
    """Loss, clip shares and norms over the step's optimizer steps; shares are weighted by tokens.

    The gradient norm is that of the updates that took place; without any it is left out.
    """
    num_tokens = max(sum(update.num_tokens for update in updates), 1.0)
    norms = [update.grad_norm for update in updates if not update.is_skipped]
    return {
        "actor/pg_loss": float(np.mean([update.loss for update in updates])),
        "actor/pg_clipfrac": sum(update.clipped for update in updates) / num_tokens,
        "actor/pg_clipfrac_lower": sum(update.clipped_dual for update in updates) / num_tokens,
        "actor/ppo_kl": sum(update.neg_log_ratio for update in updates) / num_tokens,
        **({"actor/grad_norm": float(np.mean(norms))} if norms else {}),
        "actor/skipped_updates": float(sum(update.is_skipped for update in updates)),
        "actor/lr": updates[-1].learning_rate,
    }


def speed_metrics(metrics: dict[str, float], num_devices: int) -> dict[str, float]:
    """Times per token and throughput per device, from the step's other metrics.

    timing_per_token_ms/gen is per response token trained on, so what dynamic sampling threw away shows in it.
    """
    seconds, tokens = metrics["timing_s/step"], metrics.get("perf/total_num_tokens", 0.0)
    speeds = {"perf/time_per_step": seconds, "perf/throughput": tokens / (seconds * num_devices)}
    if metrics.get("perf/trained_response_tokens"):
        speeds["timing_per_token_ms/gen"] = (
            metrics["timing_s/gen"] * 1000 / metrics["perf/trained_response_tokens"]
        )
    for phase in ("old_log_prob", "adv", "update_actor"):
        if tokens and f"timing_s/{phase}" in metrics:
            speeds[f"timing_per_token_ms/{phase}"] = metrics[f"timing_s/{phase}"] * 1000 / tokens
    return speeds


def format_step(step: int, metrics: dict[str, float]) -> str:
    """The console line `step:N - key:value - ...` that parsers of verl's log read."""
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())])


class MetricsLog:
    """metrics.jsonl: one line a step; continuing at step n forgets the lines of later steps."""

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / METRICS_FILE
        kept = [line for line in read_metrics(self.path) if line["step"] <= last_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        partial.rename(self.path)

    def append(self, step: int, policy_version: int, metrics: dict[str, float]) -> None:
        """Write one step's line and flush it; a number that is not finite becomes null, which JSON can hold."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "wall_time": time.time(), "policy_version": policy_version, **finite}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, [] when there is none; a torn last line is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
