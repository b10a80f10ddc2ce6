"""Estimates what engines and ranks take, from operations, bytes and rates, corrected by a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from dapo_core.draw.account import NO_SIGNAL
from dapo_core.machine.device import device_for
from dapo_core.memory.devices import (
    DECODING_SHARE,
    NETWORK_SHARE,
    SYNC_BYTES,
    TRAINING_SHARE,
    Rates,
)
from dapo_core.memory.engine import engine_memory
from dapo_core.memory.plan import PHASES
from dapo_core.metrics.flops import active_parameters, forward_flops
from dapo_core.simulation.engines import EngineCosts
from dapo_core.simulation.workload import (
    PUBLISHED_CUT,
    PUBLISHED_LIMIT,
    PUBLISHED_MEAN,
    Workload,
    chances,
    correlated,
    cut_mean,
    log_normal,
    with_mean,
)

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

GENERATE, ANCHOR, UPDATE, PUBLISH = PHASES[:4]
OTHER = "other"
PROMPT_SHARE = 0.1  # of data.max_prompt_tokens
SIGNAL_SHARE = 0.5  # of groups under dynamic sampling: responses neither all right nor all wrong
ACCURACY = 0.5
TOKENS_PER_PASS = 1.5  # of a sequence with drafts
METRICS = {  # metrics that add up to a phase
    GENERATE: ("timing_s/gen",),
    ANCHOR: ("timing_s/old_log_prob", "timing_s/ref"),
    UPDATE: ("timing_s/update_actor",),
    PUBLISH: ("timing_s/weight_sync",),
}


@dataclass(frozen=True)
class Machine:
    """Devices of ranks and engines; on a CPU they differ in the number of threads."""

    ranks: Rates
    engines: Rates
    device_bytes: int | None  # of an accelerator


@dataclass(frozen=True)
class Costs:
    """Seconds of the phases of a step; of anchor and update, per token trained on."""

    engine: EngineCosts
    anchor: float = 0.0
    update: float = 0.0
    publish: float = 0.0
    other: float = 0.0

    def scaled(self, factors: Mapping[str, float]) -> Costs:
        """Return the costs with each phase multiplied by its factor; `other` is in seconds."""
        engine = self.engine.scaled(factors.get(GENERATE, 1.0))
        phases = {
            name: getattr(self, name) * factors.get(name, 1.0)
            for name in METRICS
            if name != GENERATE
        }
        return replace(self, engine=engine, **phases, other=factors.get(OTHER, 0.0))


@dataclass(frozen=True)
class Measured:
    """What metrics of a run say about its workload, and its mean seconds by phase."""

    workload: Workload
    seconds: Mapping[str, float]
    tokens_per_pass: float | None
    num_steps: int


def assumed_workload(config: TrainingConfig, mean_tokens: float | None = None) -> Workload:
    """Return the workload assumed without a run: the published lengths, scaled to the limit.

    `mean_tokens` is the mean length of a response, if given.
    """
    limit, group_size = config.rollout.max_response_tokens, config.rollout.group_size
    log_mean, sigma = log_normal(PUBLISHED_MEAN, PUBLISHED_LIMIT, PUBLISHED_CUT)
    log_mean += math.log(limit / PUBLISHED_LIMIT)
    if mean_tokens is not None:
        log_mean = with_mean(mean_tokens, limit, sigma)
    prompt = max(round(PROMPT_SHARE * config.data.max_prompt_tokens), 1)
    odds = chances(ACCURACY, SIGNAL_SHARE, group_size)
    return Workload(group_size, prompt, limit, log_mean, sigma, *odds)


def measure(config: TrainingConfig, steps: Sequence[Mapping[str, float]]) -> Measured | None:
    """Return what lines of a run's metrics.jsonl show; None if no step trained on anything.

    The first step, which also warms up, counts only if it is the only one.
    """
    used = [
        step
        for step in steps
        if step.get("response_length/mean") and step.get("timing_s/update_actor")
    ]
    used = used[1:] or used
    if not used:
        return None
    limit, group_size = config.rollout.max_response_tokens, config.rollout.group_size
    response = fmean(_finished(step, "response_length") for step in used)
    cut = fmean(_finished(step, "clip_ratio") for step in used)
    num_responses = config.train.train_prompts * group_size
    quantile, highest = cut, float(limit)
    if cut * len(used) * num_responses < 1:  # none is cut: the longest of a step is a quantile
        highest = fmean(step["response_length/max"] for step in used)
        quantile = 0.56 / num_responses
    log_mean, sigma = log_normal(min(response, 0.99 * highest), highest, min(quantile, 0.99))
    right = fmean(step.get("sampler/accuracy", ACCURACY) for step in used)
    odds = chances(right / max(1 - cut, 0.01), _signal_share(used), group_size)
    prompt = max(round(fmean(step.get("prompt_length/mean", 1.0) for step in used)), 1)
    workload = Workload(group_size, prompt, limit, log_mean, sigma, *odds)
    if config.sampler.dynamic:
        workload = correlated(workload, fmean(step["response_length/mean"] for step in used))
    seconds = {
        phase: fmean(sum(step.get(name, 0.0) for name in names) for step in used)
        for phase, names in METRICS.items()
    }
    whole = fmean(step.get("timing_s/step", 0.0) for step in used)
    seconds[OTHER] = max(whole - sum(seconds.values()), 0.0)
    passes = [step["rollout/tokens_per_pass"] for step in used if "rollout/tokens_per_pass" in step]
    return Measured(workload, seconds, fmean(passes) if passes else None, len(used))


def estimate(
    config: TrainingConfig,
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    tokens_per_pass: float | None = None,
) -> Costs:
    """Estimate the costs of a recipe; `tokens_per_pass` is measured with rollout.speculation."""
    num_responses = config.train.train_prompts * config.rollout.group_size
    length = workload.prompt_tokens + workload.mean_tokens
    square = cut_mean(2 * workload.log_mean, 2 * workload.log_sigma, workload.limit**2)
    square += workload.prompt_tokens * (workload.prompt_tokens + 2 * workload.mean_tokens)
    trained, num_logits = num_responses * length, num_responses * workload.mean_tokens
    forward = forward_flops(shape, trained, num_responses * square, num_logits)
    update = forward * (4 if config.train.gradient_checkpointing else 3)
    num_passes = config.scores_before_updates + (config.algorithm.kl.place != "off")
    ranks = config, shape, machine.ranks
    return Costs(
        engine=_engine_costs(config, shape, machine, tokens_per_pass),
        anchor=num_passes * _pass_seconds(*ranks, forward, trained, has_backward=False) / trained,
        update=config.train.passes
        * _pass_seconds(*ranks, update, trained, has_backward=True)
        / trained,
        publish=shape.num_parameters
        * device_for(config.train.device).item_bytes(config.rollout.dtype)
        / SYNC_BYTES,
    )


def _pass_seconds(
    config: TrainingConfig,
    shape: ModelShape,
    rates: Rates,
    flops: float,
    trained: float,
    has_backward: bool,
) -> float:
    """Return the seconds of a pass over the step's tokens: computation or communication.

    Each micro-batch gathers the weights once for a forward pass; with a backward pass it gathers
    them twice and reduces float32 gradients. With expert parallelism, ranks gather only their own
    experts.
    """
    train = config.train
    computing = flops / (train.num_ranks * rates.flops * TRAINING_SHARE)
    num_shards = train.fsdp_size or train.num_ranks
    if num_shards == 1:
        return computing
    row = train.micro_batch_tokens * train.sequence_parallel
    num_micro = math.ceil(trained / train.num_data_ranks / row)
    item = device_for(train.device).item_bytes(train.dtype)
    gathered = shape.root_parameters + sum(shape.layer_sizes(train.expert_parallel))
    sent: float = num_micro * gathered * (2 * item + 4 if has_backward else item)
    if train.expert_parallel > 1:  # tokens to their experts and back; a backward pass repeats it
        width = 2 * shape.experts_per_token * shape.hidden * len(shape.layers)
        sent += width * item * trained / train.num_ranks * (3 if has_backward else 1)
    # Data enters a node over all its devices' links; then each device receives all of it within the
    # node.
    speed = (
        rates.inside if num_shards <= rates.node_devices else min(rates.inside, rates.node_network)
    )
    return max(computing, sent / (speed * NETWORK_SHARE))


def _engine_costs(
    config: TrainingConfig, shape: ModelShape, machine: Machine, tokens_per_pass: float | None
) -> EngineCosts:
    """Return an engine's costs: bytes at the memory's rate, operations at training's, launches."""
    rollout, rates = config.rollout, machine.engines
    engine = engine_memory(config, shape, machine.device_bytes)
    reading = rates.memory * DECODING_SHARE
    num_devices = rollout.num_devices / rollout.num_workers
    flops = 2 * (active_parameters(shape) + shape.vocabulary * shape.hidden)
    operations = flops / (num_devices * rates.flops * TRAINING_SHARE)
    has_drafts = rollout.speculation != "off"
    return EngineCosts(
        fixed=len(shape.layers) * rates.layer_seconds,
        weights=engine.weights / reading,
        context=engine.token_bytes / reading,
        sequence=operations,
        prefill=operations,
        num_slots=rollout.max_num_seqs,
        cache_tokens=max(math.inf if engine.cache is None else engine.cache, engine.sequence_bytes)
        / engine.token_bytes,
        tokens_per_pass=(tokens_per_pass or TOKENS_PER_PASS) if has_drafts else None,
    )


def _finished(step: Mapping[str, float], name: str) -> float:
    """Return a metric of all groups that finished in a step, else of those it trained on."""
    trained_on = "response_length/mean" if name == "response_length" else f"response_length/{name}"
    return step.get(f"sampler/finished_{name}", step.get(trained_on, 0.0))


def _signal_share(steps: Sequence[Mapping[str, float]]) -> float:
    """Return the share of finished groups with signal."""
    even = sum(step.get(f"sampler/{fate}_groups", 0.0) for step in steps for fate in NO_SIGNAL)
    kept = sum(step.get("sampler/kept_groups", 0.0) for step in steps)
    kept += steps[-1].get("sampler/surplus_groups", 0.0) - steps[0].get(
        "sampler/surplus_groups", 0.0
    )
    return kept / (kept + even) if kept > 0 else SIGNAL_SHARE
