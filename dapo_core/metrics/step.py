"""Metrics of a training step: formulas, metrics.jsonl, and the console line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, get_args

import numpy as np

from dapo_core.algorithm.loss import LossTotals
from dapo_core.draw.account import FATES, Draw
from dapo_core.metrics.mismatch import correction_metrics
from dapo_core.reward.scorers import Verdict

if TYPE_CHECKING:
    import torch

    from dapo_core.algorithm.batch import Batch, TokenStats
    from dapo_core.algorithm.update import Update
    from dapo_core.config.algorithm import KLConfig
    from dapo_core.config.training import TrainingConfig
    from dapo_core.draw.groups import Group

# phases that process every token of the batch
PHASES_PER_TOKEN = ("old_log_prob", "ref", "adv", "update_actor")


def draw_metrics(draw: Draw, gen_prompts: int, policy_version: int) -> dict[str, float]:
    """Return the metrics of a draw: groups and tokens by fate, response lengths, staleness.

    Lengths are reported for responses of finished, kept and surplus groups. Staleness is
    the number of optimizer steps between the weights that sampled a token and `policy_version`;
    token_ratio is the share of tokens with staleness above 0. Without a finished group there is no
    accuracy.
    """
    account = draw.account
    counts = {f"sampler/{fate}_groups": float(account.groups[fate]) for fate in FATES}
    counts |= {f"sampler/{fate}_tokens": float(account.tokens[fate]) for fate in FATES}
    if account.num_finished:
        counts["sampler/accuracy"] = account.num_right / account.num_finished
    for name, lengths in account.lengths.items():
        if lengths.num_responses:
            counts[f"sampler/{name}_response_length"] = lengths.num_tokens / lengths.num_responses
            counts[f"sampler/{name}_clip_ratio"] = lengths.num_cut / lengths.num_responses
    for name, scored in account.scores.items():
        if scored:
            score, acc = np.mean(scored, axis=0)
            counts[f"train-core/{name}/score/mean"] = float(score)
            counts[f"train-core/{name}/acc/mean"] = float(acc)
    rollouts = [rollout for group in draw.groups for rollout in group.rollouts]
    if spans := [span for rollout in rollouts for span in rollout.versions]:
        versions, num_tokens = np.array(spans).T
        mean = np.average(versions, weights=num_tokens)
        stale = num_tokens[versions < policy_version].sum()
        counts["sampler/staleness/mean"] = float(policy_version - mean)
        counts["sampler/staleness/max"] = float(policy_version - versions.min())
        counts["sampler/staleness/token_ratio"] = float(stale / num_tokens.sum())
    return {
        **counts,
        "sampler/carried_out_groups": float(account.carried_out_groups),
        "sampler/carried_out_tokens": float(account.carried_out_tokens),
        "sampler/waste_ratio": account.waste_ratio,
        "train/num_gen_batches": draw.num_drawn / gen_prompts,
        "perf/generated_tokens": float(account.generated_tokens),
        "perf/trained_response_tokens": 0.0,  # for a skipped step; batch_metrics overrides it
    }


def training_metrics(
    groups: Sequence[Group],
    drawn: Batch,
    batch: Batch,
    stats: TokenStats,
    updates: Sequence[Update],
    config: TrainingConfig,
) -> dict[str, float]:
    """Return the metrics of a step's engine mismatch, responses, batch, updates and load balance.

    `drawn` is the batch before rollout correction.
    """
    token_weights = LossTotals.of(batch).token_weights(batch.response_mask, config.algorithm)
    return {
        **correction_metrics(stats.log_probs, drawn, config.rollout_correction),
        **response_metrics(groups, batch.rewards, config.data.max_prompt_tokens),
        **batch_metrics(batch, stats.entropy, token_weights),
        **update_metrics(updates, config.algorithm.kl),
        **routing_metrics(updates),
        **seqlen_metrics(batch.lengths, updates, config.train.passes),
    }


def response_metrics(
    groups: Sequence[Group], rewards: torch.Tensor, max_prompt_tokens: int
) -> dict[str, float]:
    """Return scores, rewards, lengths and verdicts of the responses in the batch.

    rewards: [B], Batch.rewards of these groups. Scores and rewards leave out empty responses, which
    the engine aborted, and responses without a score. perf/total_num_tokens counts every token of
    the batch, masked or not, because all pass through the policy.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    response_lengths = np.array([len(rollout.response_ids) for rollout in rollouts])
    prompts = [len(group.prompt.input.token_ids) for group in groups for _ in group.rollouts]
    prompt_lengths = np.array(prompts)
    verdicts = [rollout.verdict for rollout in rollouts]
    is_truncated = [rollout.is_truncated for rollout in rollouts]
    is_penalised = [rollout.overlong_penalty < 0 for rollout in rollouts]
    counts = {name: verdicts.count(name) for name in get_args(Verdict)}
    answered = response_lengths > 0
    scored = answered & np.array([rollout.is_scored for rollout in rollouts])
    return {
        **_summary("critic/score", np.array([rollout.score for rollout in rollouts])[scored]),
        **_summary("critic/rewards", rewards.numpy()[scored]),
        **_summary("response_length", response_lengths),
        **_summary("response_length_non_aborted", response_lengths[answered]),
        "response/aborted_ratio": float(1 - answered.mean()),
        "response_length/clip_ratio": float(np.mean(is_truncated)),
        **_summary("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_tokens).mean()),
        "reward/overlong_ratio": float(np.mean(is_penalised)),
        **{f"reward/{name}_ratio": count / len(verdicts) for name, count in counts.items()},
        "perf/total_num_tokens": float(response_lengths.sum() + prompt_lengths.sum()),
    }


def batch_metrics(
    batch: Batch, entropy: torch.Tensor, token_weights: torch.Tensor
) -> dict[str, float]:
    """Return advantages and entropy over unmasked tokens; without any, only their number.

    entropy: [B, R], of the policy before the update. token_weights: [B, R],
    LossTotals.token_weights over the whole batch, so that entropy is aggregated like the loss.
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


def seqlen_metrics(
    lengths: np.ndarray, updates: Sequence[Update], num_passes: int = 1
) -> dict[str, float]:
    """Return how evenly a pass spreads tokens over D data ranks, with and without balancing.

    lengths: [B], prompt+response tokens. Without balancing, each rank would get a contiguous chunk
    of B / D rows.
    """
    balanced = np.sum([update.rank_tokens for update in updates], axis=0) / num_passes  # [D]
    chunks = [chunk.sum() for chunk in np.array_split(lengths, len(balanced))]
    return {
        "global_seqlen/min": float(min(chunks)),
        "global_seqlen/max": float(max(chunks)),
        "global_seqlen/minmax_diff": float(max(chunks) - min(chunks)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": float(lengths.sum() / len(balanced)),
    }


def update_metrics(updates: Sequence[Update], kl: KLConfig) -> dict[str, float]:
    """Return loss, token-weighted clip shares and gradient norm over the step's optimizer steps.

    Means over nothing are left out: the gradient norm if all updates were skipped, losses and
    shares if no mini-batch was finite, shares if there was no token.
    """
    norms = [update.grad_norm for update in updates if not update.is_skipped]
    metrics = {
        **({"actor/grad_norm": float(np.mean(norms))} if norms else {}),
        "actor/skipped_updates": float(sum(update.is_skipped for update in updates)),
        "actor/lr": updates[-1].learning_rate,
    }
    if kl.place == "loss":
        metrics["actor/kl_coef"] = kl.coefficient
    # A skipped update may contain NaN, which would hide the other mini-batches.
    parts = [update.sums for update in updates if update.sums.is_finite]
    if not parts:
        return metrics
    sums = reduce(add, parts)
    metrics["actor/pg_loss"] = sums.pg_loss / len(parts)
    if kl.place == "loss":
        metrics["actor/kl_loss"] = sums.kl_loss / len(parts)
    if sums.num_tokens:
        metrics["actor/pg_clipfrac"] = sums.clipped / sums.num_tokens
        metrics["actor/pg_clipfrac_lower"] = sums.clipped_dual / sums.num_tokens
        metrics["actor/ppo_kl"] = sums.neg_log_ratio / sums.num_tokens
    return metrics


def routing_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return how a mixture spread the tokens of the step's updates over its E experts.

    router/load/{max,min,std}: of an expert's tokens in one layer / the mean over the layer's
    experts. router/unused_ratio: share of experts without a token, over all layers. router/entropy:
    mean over tokens and layers, in nats; log E if uniform. router/aux_loss: load-balancing loss
    without its coefficient, mean over mini-batches; about top-k if balanced.
    """
    finite = [update for update in updates if update.sums.is_finite]
    parts = [update.routing for update in finite if update.routing is not None]
    if not parts:
        return {}
    sums = reduce(add, parts)
    loads = np.array(sums.loads)
    relative = loads / loads.mean(axis=-1, keepdims=True)  # [layers, E]
    loss = sums.balance_loss
    return {
        **({} if loss is None else {"router/aux_loss": loss / len(parts)}),
        "router/load/max": float(relative.max()),
        "router/load/min": float(relative.min()),
        "router/load/std": float(relative.std()),
        "router/unused_ratio": float((loads == 0).mean()),
        "router/entropy": sums.entropy / (sums.num_tokens * len(loads)),
    }


def timing_metrics(
    seconds: Mapping[str, float], groups: Sequence[Group], num_devices: int
) -> dict[str, float]:
    """Return seconds per phase, milliseconds per trained token, and throughput per device.

    num_devices: devices of ranks and engines. timing_per_token_ms/gen is per trained response
    token, so it includes the cost of groups that dynamic sampling dropped.
    """
    num_response_tokens = sum(group.num_response_tokens for group in groups)
    num_tokens = num_response_tokens + sum(
        len(group.prompt.input.token_ids) * len(group.rollouts) for group in groups
    )
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


def _summary(name: str, values: np.ndarray) -> dict[str, float]:
    kinds = ("mean", "max", "min") if len(values) else ()
    return {f"{name}/{kind}": float(getattr(values, kind)()) for kind in kinds}
