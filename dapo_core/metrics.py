"""One training step in numbers: the field's names and formulas, metrics.jsonl, and the console line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, get_args

import numpy as np

from dapo_core.errors import CheckpointError
from dapo_core.reward.scorers import Verdict
from dapo_core.sampler import FATES, Draw

if TYPE_CHECKING:
    import torch

    from dapo_core.batch import Batch
    from dapo_core.config.training import KLConfig
    from dapo_core.policy import UpdateSums
    from dapo_core.rollout import Group

METRICS_FILE = "metrics.jsonl"
PHASES_PER_TOKEN = ("old_log_prob", "ref", "adv", "update_actor")  # whose work is with every token of the batch


class PhaseTimer:
    """Wall seconds of a step's phases."""

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

    def attribute(self, seconds: float, source: str, target: str) -> None:
        """Count that much of phase `source`, at most all of it, as phase `target`; their sum stays."""
        seconds = min(seconds, self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds of every phase so far, and of the whole `step`."""
        return {**self.seconds, "step": time.perf_counter() - self.started}


def draw_metrics(draw: Draw) -> dict[str, float]:
    """What sampling cost: draws, and the account of groups and response tokens.

    Carried out are groups to be continued in the next step. What is carried in is the surplus and the carried-out
    part of the step before.
    """
    account = draw.account
    counts = {f"sampler/{fate}_groups": float(account.groups[fate]) for fate in FATES}
    counts |= {f"sampler/{fate}_tokens": float(account.tokens[fate]) for fate in FATES}
    return {
        **counts,
        "sampler/carried_out_groups": float(account.carried_out_groups),
        "sampler/carried_out_tokens": float(account.carried_out_tokens),
        "sampler/waste_ratio": account.waste_ratio,
        "sampler/accuracy": account.num_right / max(account.num_finished, 1),
        "train/num_gen_batches": float(draw.num_gen_batches),
        "perf/generated_tokens": float(account.generated_tokens),
    }


def response_metrics(groups: Sequence[Group], rewards: np.ndarray, max_prompt_tokens: int) -> dict[str, float]:
    """Scores, rewards, lengths and verdicts of the responses in the batch.

    rewards: [B], what the advantages are made of, in the order of groups and of siblings. Scores and rewards leave
    out empty responses, which the engine aborted, and those whose scorer failed, which have no score.
    perf/total_num_tokens counts every token of the batch: all go through the policy, also those that
    reward.mask_truncated keeps out of the loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    response_lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
    prompt_lengths = np.array([len(group.prompt.prompt_ids) for group in groups for _ in group.rollouts])
    verdicts = [rollout.verdict for rollout in rollouts]
    answered = response_lengths > 0
    scored = answered & np.array([rollout.is_scored for rollout in rollouts])
    return {
        **_summary("critic/score", np.array([rollout.score for rollout in rollouts])[scored]),
        **_summary("critic/rewards", rewards[scored]),
        **_summary("response_length", response_lengths),
        **_summary("response_length_non_aborted", response_lengths[answered]),
        "response/aborted_ratio": float(1 - answered.mean()),
        "response_length/clip_ratio": float(np.mean([rollout.is_truncated for rollout in rollouts])),
        **_summary("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_tokens).mean()),
        "reward/overlong_ratio": float(np.mean([rollout.overlong_penalty < 0 for rollout in rollouts])),
        **{f"reward/{name}_ratio": verdicts.count(name) / len(verdicts) for name in get_args(Verdict)},
        "perf/total_num_tokens": float(response_lengths.sum() + prompt_lengths.sum()),
    }


def batch_metrics(batch: Batch, entropy: torch.Tensor, token_weights: torch.Tensor) -> dict[str, float]:
    """Advantages and entropy over the tokens under the mask; of a batch that trains no token, only their number.

    entropy: [B, R], of the policy before the update. token_weights: [B, R], the loss's over the whole batch
    (LossTotals.token_weights), so that the entropy is aggregated as the loss is.
    """
    mask = batch.response_mask
    num_tokens = mask.sum(dim=-1).numpy()  # [B]
    trained = {"perf/trained_response_tokens": float(num_tokens.sum())}
    if not num_tokens.sum():
        return trained
    advantages = np.repeat(batch.advantages.double().numpy(), num_tokens)
    return {
        **_summary("critic/advantages", advantages),
        **_summary("critic/returns", advantages),
        "actor/entropy": float((token_weights * entropy)[mask].sum()),
        **trained,
    }


def seqlen_metrics(lengths: np.ndarray, rank_rows: Sequence[np.ndarray]) -> dict[str, float]:
    """How evenly the batch's tokens lie on the D data-parallel ranks, before and after balancing.

    lengths: [B], prompt and response tokens. rank_rows: for each rank the rows it trained on, over all
    mini-batches. Before balancing, each rank would have had a contiguous chunk of B / D rows.
    """
    chunks = [chunk.sum() for chunk in np.array_split(lengths, len(rank_rows))]
    balanced = [lengths[rows].sum() for rows in rank_rows]
    return {
        "global_seqlen/min": float(min(chunks)),
        "global_seqlen/max": float(max(chunks)),
        "global_seqlen/minmax_diff": float(max(chunks) - min(chunks)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(lengths.sum() / len(rank_rows)),
    }


def update_metrics(updates: Sequence[UpdateSums], kl: KLConfig) -> dict[str, float]:
    """Loss, clip shares and norms over the step's optimizer steps; shares are weighted by tokens.

    What would be a mean over nothing is left out: the gradient norm without an update that took place, losses and
    shares without a mini-batch whose numbers are finite, shares without a token.
    """
    norms = [update.grad_norm for update in updates if not update.is_skipped]
    metrics = {
        **({"actor/grad_norm": float(np.mean(norms))} if norms else {}),
        "actor/skipped_updates": float(sum(update.is_skipped for update in updates)),
        "actor/lr": updates[-1].learning_rate,
    }
    if kl.place == "loss":
        metrics["actor/kl_coef"] = kl.coefficient
    # A skipped update may hold NaN, which would hide the other mini-batches.
    finite = [update for update in updates if math.isfinite(update.loss + update.kl_loss + update.neg_log_ratio)]
    if not finite:
        return metrics
    metrics["actor/pg_loss"] = float(np.mean([update.loss for update in finite]))
    if kl.place == "loss":
        metrics["actor/kl_loss"] = float(np.mean([update.kl_loss for update in finite]))
    num_tokens = sum(update.num_tokens for update in finite)
    if num_tokens:
        metrics["actor/pg_clipfrac"] = sum(update.clipped for update in finite) / num_tokens
        metrics["actor/pg_clipfrac_lower"] = sum(update.clipped_dual for update in finite) / num_tokens
        metrics["actor/ppo_kl"] = sum(update.neg_log_ratio for update in finite) / num_tokens
    return metrics


def timing_metrics(
    seconds: Mapping[str, float], num_response_tokens: int, num_tokens: int, num_devices: int
) -> dict[str, float]:
    """Seconds of phases (PhaseTimer.read), milliseconds per token of the batch, and throughput per device.

    num_tokens: prompt and response tokens of the batch, 0 when the step trained on nothing; num_devices: those of
    ranks and of engines. Milliseconds of `gen` are per response token of the batch, so what dynamic sampling threw
    away shows in it.
    """
    per_token = {"gen": num_response_tokens, **dict.fromkeys(PHASES_PER_TOKEN, num_tokens)}
    return {
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        **{
            f"timing_per_token_ms/{name}": seconds[name] * 1000 / count
            for name, count in per_token.items()
            if count and name in seconds
        },
        "perf/time_per_step": seconds["step"],
        "perf/throughput": num_tokens / (seconds["step"] * num_devices),
    }


def format_step(step: int, metrics: dict[str, float]) -> str:
    """The console line `step:N - key:value - ...` that parsers of verl's log read."""
    return " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())])


class MetricsLog:
    """metrics.jsonl: one line a step; continuing at step n forgets the lines of later steps.

    Raises CheckpointError when it cannot be written.
    """

    def __init__(self, folder: Path, last_step: int) -> None:
        self.path = folder / METRICS_FILE
        kept = [line for line in read_metrics(self.path) if line["step"] <= last_step]
        partial = self.path.with_suffix(".partial")
        with self._writing():
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept)
                _sync(file)
            partial.rename(self.path)
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # else lines to come could be on disk in a file without a name
            finally:
                os.close(descriptor)

    def append(self, step: int, policy_version: int, metrics: dict[str, float]) -> None:
        """Have one step's line on the disk; a number that is not finite becomes null, which JSON can hold."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "wall_time": time.time(), "policy_version": policy_version, **finite}
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            _sync(file)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise CheckpointError for what the system refuses: the next attempt would end here as well."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error}; make room, or take an --output or a store.path on a "
                "larger disk: training then goes on from its latest checkpoint"
            ) from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, [] when there is none; a torn last line is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _sync(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }
