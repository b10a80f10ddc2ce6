"""Estimates the time of a training step from tokens, operations, bytes and the devices' rates.

Before anything ran, it tells which phase dominates and whether a step takes minutes or hours. A
run's metrics calibrate it: lengths become measured ones, and each phase gets a correction factor.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from dapo_core.config.training import TrainingConfig
    from dapo_core.memory.shape import ModelShape

GENERATE, ANCHOR, UPDATE, PUBLISH = PHASES[:4]
# From the published log of Qwen3-32B: mean response / limit, and sigma of a log-normal with 3.9 %
# truncated.
MEAN_SHARE, LOG_SIGMA = 0.36, 0.69
PROMPT_SHARE = 0.1  # of data.max_prompt_tokens
KEPT_SHARE = 0.5  # of groups under dynamic sampling: responses neither all right nor all wrong
NUM_QUANTILES = 512
METRICS = {  # metrics that add up to a phase
    GENERATE: ("timing_s/gen",),
    ANCHOR: ("timing_s/old_log_prob", "timing_s/ref"),
    UPDATE: ("timing_s/update_actor",),
    PUBLISH: ("timing_s/weight_sync",),
}


@dataclass(frozen=True)
class Lengths:
    """Sequence lengths in tokens, and the share of generated tokens that is trained on."""

    prompt: float  # mean
    response: float  # mean
    limit: int  # of a response
    kept: float  # share of generated response tokens
    source: str = "assumed"

    def responses(self) -> list[float]:
        """Return typical lengths: quantiles of a log-normal with this mean and limit."""
        normal = NormalDist()
        shape = [
            math.exp(LOG_SIGMA * normal.inv_cdf((number + 0.5) / NUM_QUANTILES))
            for number in range(NUM_QUANTILES)
        ]
        low, high = 0.0, float(self.limit)
        for _ in range(60):  # bisect: the truncated mean grows with the median
            middle = (low + high) / 2
            is_short = fmean(min(middle * length, self.limit) for length in shape) < min(
                self.response, self.limit
            )
            low, high = (middle, high) if is_short else (low, middle)
        return [min(low * length, self.limit) for length in shape]


@dataclass(frozen=True)
class StepTime:
    """An estimated step."""

    lengths: Lengths
    seconds: Mapping[str, float]  # by phase
    trained_tokens: float  # prompts and responses
    generated_tokens: float
    forward_flops: float
    update_flops: float  # including recomputation
    assumptions: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Machine:
    """Devices of ranks and engines; on a CPU they differ in the number of threads."""

    ranks: Rates
    engines: Rates
    device_bytes: int | None  # of an accelerator


def assumed_lengths(config: TrainingConfig) -> Lengths:
    """Return the lengths assumed without a run."""
    limit = config.rollout.max_response_tokens
    kept = KEPT_SHARE if config.sampler.dynamic else 1.0
    return Lengths(PROMPT_SHARE * config.data.max_prompt_tokens, MEAN_SHARE * limit, limit, kept)


def step_time(
    config: TrainingConfig,
    shape: ModelShape,
    machine: Machine,
    lengths: Lengths,
    factors: Mapping[str, float] | None = None,
) -> StepTime:
    """Estimate a step; `factors` from `calibrate` multiply the phases."""
    num_responses = config.train.train_prompts * config.rollout.group_size
    responses = lengths.responses()
    trained = num_responses * (lengths.prompt + lengths.response)
    squares = num_responses * fmean((lengths.prompt + length) ** 2 for length in responses)
    forward = forward_flops(shape, trained, squares, num_responses * lengths.response)
    update = forward * (4 if config.train.gradient_checkpointing else 3)
    update_seconds = _pass_seconds(config, shape, machine.ranks, update, trained, has_backward=True)
    num_passes = config.scores_before_updates + (config.algorithm.kl.place != "off")
    anchor = num_passes * _pass_seconds(
        config, shape, machine.ranks, forward, trained, has_backward=False
    )
    seconds = {
        GENERATE: _generate_seconds(config, shape, machine, lengths),
        ANCHOR: anchor,
        UPDATE: config.train.passes * update_seconds,
        PUBLISH: shape.num_parameters
        * device_for(config.train.device).item_bytes(config.rollout.dtype)
        / SYNC_BYTES,
    }
    return StepTime(
        lengths,
        {phase: value * (factors or {}).get(phase, 1.0) for phase, value in seconds.items()},
        trained,
        num_responses * lengths.response / lengths.kept,
        forward,
        config.train.passes * update,
        _assumptions(machine, lengths, factors),
    )


def calibrate(
    config: TrainingConfig,
    shape: ModelShape,
    machine: Machine,
    steps: Sequence[Mapping[str, float]],
) -> tuple[Lengths, dict[str, float]] | None:
    """Return lengths and phase factors from lines of a run's metrics.jsonl and its configuration.

    None if no step trained on anything. A phase's factor is the median of measured / estimated
    seconds over steps.
    """
    used = [
        step
        for step in steps
        if step.get("response_length/mean") and step.get("timing_s/update_actor")
    ]
    if not used:
        return None
    lengths = [_lengths_of(config, step) for step in used]
    estimates = [
        step_time(config, shape, machine, step_lengths).seconds for step_lengths in lengths
    ]
    factors = {
        phase: median(
            sum(step.get(name, 0.0) for name in names) / estimate[phase]
            for step, estimate in zip(used, estimates, strict=True)
        )
        for phase, names in METRICS.items()
        if estimates[0][phase]
    }
    middle = {
        name: median(getattr(step_lengths, name) for step_lengths in lengths)
        for name in ("prompt", "response", "kept")
    }
    return replace(lengths[0], **middle, source=f"medians of {len(used)} steps of the run"), factors


def forward_flops(shape: ModelShape, tokens: float, squares: float, num_logits: float) -> float:
    """Return the operations of a forward pass, counted like dapo_core.metrics.flops.training_flops.

    `squares` is the sum of squared sequence lengths; `num_logits` the number of positions with
    logits.
    """
    pairs = (squares + tokens) / 2 * len(shape.layers) * 2 * shape.heads * shape.head_dim
    return 2 * (
        _active_parameters(shape) * tokens + pairs + shape.vocabulary * shape.hidden * num_logits
    )


def _active_parameters(shape: ModelShape) -> float:
    """Return the layer parameters that a token is multiplied with, counting only its experts."""
    share = shape.experts_per_token / (shape.num_experts or 1)
    matrices = [tensor for layer in shape.layers for tensor in layer if len(tensor) > 1]
    return sum(math.prod(tensor) * (share if len(tensor) == 3 else 1) for tensor in matrices)


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


def _generate_seconds(
    config: TrainingConfig, shape: ModelShape, machine: Machine, lengths: Lengths
) -> float:
    """Return the seconds for decoding a step's responses, including groups without signal.

    A decoding step reads the weights once and the KV cache of its sequences, and costs
    `layer_seconds` per layer. Prefill runs at training speed.
    """
    rollout, rates = config.rollout, machine.engines
    engine = engine_memory(config, shape, machine.device_bytes)
    # per engine
    drawn = config.train.train_prompts * rollout.group_size / lengths.kept / rollout.num_workers
    responses = lengths.responses()
    mean_square = fmean(length**2 for length in responses)
    context = lengths.prompt + mean_square / (2 * lengths.response)  # of a decoded token
    slots = float(rollout.max_num_seqs)
    if engine.cache is not None:
        slots = min(slots, max(engine.cache / (engine.token_bytes * context), 1.0))
    num_steps = _decoding_steps(config, lengths, responses, drawn, slots)
    reading = rates.memory * DECODING_SHARE
    devices = rollout.num_devices / rollout.num_workers
    weights = num_steps * engine.weights / reading
    caches = drawn * lengths.response * context * engine.token_bytes / reading
    # siblings share their prompt
    tokens = drawn * (lengths.response + lengths.prompt / rollout.group_size)
    computing = 2 * (_active_parameters(shape) + shape.vocabulary * shape.hidden) * tokens
    computing /= devices * rates.flops * TRAINING_SHARE
    return max(weights + caches, computing) + num_steps * len(shape.layers) * rates.layer_seconds


def _decoding_steps(
    config: TrainingConfig, lengths: Lengths, responses: Sequence[float], drawn: float, slots: float
) -> float:
    """Return the decoding steps per training step, each with at most `slots` sequences.

    If groups carry over into later steps, engines stay full and a response of maximum length
    spreads over as many steps as it may wait. Otherwise the step lasts until the last response
    ends.
    """
    sampler, rollout = config.sampler, config.rollout
    if config.samples_ahead and not config.run.deterministic:
        slots = min(slots, sampler.gen_prompts * rollout.group_size / rollout.num_workers)
        num_steps: float = sampler.max_staleness
        if not sampler.window:  # it is waited for at the head of the line
            num_steps = min(num_steps, sampler.gen_prompts / config.train.train_prompts - 1)
        return max(drawn * lengths.response / slots, responses[-1] / num_steps)
    order = [
        responses[number * len(responses) // math.ceil(drawn)] for number in range(math.ceil(drawn))
    ]
    random.Random(0).shuffle(order)
    ends = [0.0] * min(max(int(slots), 1), len(order))
    for length in order:
        heapq.heapreplace(ends, ends[0] + length)
    return max(*ends, responses[-1])


def _lengths_of(config: TrainingConfig, step: Mapping[str, float]) -> Lengths:
    """Return the lengths and the kept share in a line of metrics.jsonl."""
    response, prompt = step["response_length/mean"], step.get("prompt_length/mean", 0.0)
    trained = step["perf/total_num_tokens"] * response / (response + prompt)
    kept = trained / max(step.get("perf/generated_tokens", trained), trained)
    return Lengths(prompt, response, config.rollout.max_response_tokens, kept, "measured")


def _assumptions(
    machine: Machine, lengths: Lengths, factors: Mapping[str, float] | None
) -> tuple[str, ...]:
    rates, engines = machine.ranks, machine.engines
    lines = (
        f"lengths ({lengths.source}): prompts {lengths.prompt:,.0f} tokens, responses "
        f"{lengths.response:,.0f} "
        f"of at most {lengths.limit:,}; {lengths.kept:.0%} of generated tokens are trained on",
        f"per device: {rates.flops / 1e12:,.3g} TFLOP/s, {TRAINING_SHARE:.0%} reached in training "
        "and prefill; "
        f"{engines.memory / 1e12:.3g} TB/s of memory, {DECODING_SHARE:.0%} reached in decoding",
        f"each layer of a decoding step takes {engines.layer_seconds * 1000:.2f} ms besides memory "
        "traffic",
        f"between ranks: {rates.inside / 1e9:.0f} GB/s per device within a node, "
        f"{rates.network / 1e9:.0f} between nodes, {NETWORK_SHARE:.0%} reached while computing; "
        f"weights into engines: {SYNC_BYTES / 1e9:.0f} GB/s",
    )
    if not factors:
        return lines
    corrected = ", ".join(f"{phase} x {factor:.2f}" for phase, factor in factors.items())
    return (*lines, f"calibrated by a run: {corrected}")
