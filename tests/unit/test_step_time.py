"""Step time estimates: the published log, operations, decoding waves, calibration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo_core.config.training import TrainingConfig
from dapo_core.memory.devices import DEVICES, cpu_rates
from dapo_core.memory.published import published_config
from dapo_core.memory.shape import ModelShape, shape_of
from dapo_core.memory.step_time import (
    ANCHOR,
    GENERATE,
    PUBLISH,
    UPDATE,
    Lengths,
    Machine,
    assumed_lengths,
    calibrate,
    forward_flops,
    step_time,
)
from dapo_core.metrics.flops import training_flops

DIE = DEVICES["Atlas 800T A3"]
A3 = Machine(DIE.rates, DIE.rates, DIE.num_bytes)
# Settings of the published log: Qwen3-32B on 64 dies, engines over four, all responses of a step at
# once.
PUBLISHED: dict[str, Any] = {
    "data": {"max_prompt_tokens": 2048},
    "sampler": {"dynamic": False, "gen_prompts": 64, "max_staleness": 0},
    "rollout": {
        "num_workers": 16,
        "tensor_parallel": 4,
        "group_size": 16,
        "max_response_tokens": 20480,
        "memory_utilization": 0.7,
    },
    "train": {
        "device": "npu",
        "num_ranks": 64,
        "sequence_parallel": 4,
        "train_prompts": 64,
        "mini_prompts": 32,
        "micro_batch_tokens": 5632,
    },
}
# 8.66 s of generation are weight sync
SECONDS = {GENERATE: 1315.25 - 8.66, ANCHOR: 116.21, UPDATE: 303.92}
STEP_SECONDS = 1738.03


def shape(name: str) -> ModelShape:
    published = published_config(name)
    assert published is not None
    return shape_of(published)


def changed(section: str, **keys: object) -> TrainingConfig:
    return TrainingConfig.model_validate({**PUBLISHED, section: {**PUBLISHED[section], **keys}})


def seconds_of(config: TrainingConfig, phase: str) -> float:
    lengths = assumed_lengths(TrainingConfig.model_validate(PUBLISHED))
    return step_time(config, shape("Qwen3-32B"), A3, lengths).seconds[phase]


def test_the_published_log_is_reproduced_from_its_settings() -> None:
    config = TrainingConfig.model_validate(PUBLISHED)
    for lengths in (assumed_lengths(config), Lengths(152.89, 7385.14, 20480, 1.0)):
        found = step_time(config, shape("Qwen3-32B"), A3, lengths)
        assert found.step_seconds == pytest.approx(STEP_SECONDS, rel=0.25)
        for phase, seconds in SECONDS.items():
            assert found.seconds[phase] == pytest.approx(seconds, rel=0.25), phase
    assert found.trained_tokens == pytest.approx(7_718_944, rel=1e-5)
    assert "364 TFLOP/s, 28% reached in training and prefill" in found.assumptions[1]


def test_update_time_grows_with_the_number_of_passes() -> None:
    configs = (changed("train", passes=passes) for passes in (1, 2))
    once, twice = (
        step_time(config, shape("Qwen3-32B"), A3, assumed_lengths(config)) for config in configs
    )
    # 2 mini-batches need an anchor anyway
    assert twice.seconds == {**once.seconds, UPDATE: 2 * once.seconds[UPDATE]}
    assert twice.update_flops == 2 * once.update_flops


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_a_forward_pass_is_a_third_of_the_training_operations(name: str) -> None:
    config = SimpleNamespace(mlp_only_layers=[], **(published_config(name) or {}))
    config.get_text_config = lambda: config
    lengths = np.array([100.0, 2000.0])
    tokens, squares = float(lengths.sum()), float((lengths**2).sum())
    whole = training_flops(config, lengths, 1500)  # type: ignore[arg-type]
    assert 3 * forward_flops(shape(name), tokens, squares, 1500) == pytest.approx(whole)


def test_response_quantiles_have_the_given_mean_and_published_truncation() -> None:
    responses = Lengths(153, 7385, 20480, 1.0).responses()
    assert np.mean(responses) == pytest.approx(7385, rel=1e-3)
    assert np.mean(np.array(responses) == 20480) == pytest.approx(0.039, abs=0.003)


def test_few_slots_decode_in_waves_and_carried_groups_fill_them() -> None:
    narrow = changed("rollout", max_num_seqs=8)
    wave = seconds_of(narrow, GENERATE)
    whole = seconds_of(TrainingConfig.model_validate(PUBLISHED), GENERATE)
    # 64 sequences with a mean of 0.36 of the longest, in 8 slots: 2.9 times the steps, plus the
    # tails
    assert 2.5 < wave / whole < 4
    ahead = changed("sampler", gen_prompts=192, max_staleness=2)
    assert seconds_of(ahead.model_copy(update={"rollout": narrow.rollout}), GENERATE) < 0.95 * wave
    half = seconds_of(ahead, GENERATE)
    assert 0.4 * whole < half < 0.6 * whole  # a response of maximum length spreads over two steps
    third = changed("sampler", gen_prompts=192, max_staleness=3)
    assert seconds_of(third, GENERATE) < 0.8 * half
    in_line = changed("sampler", gen_prompts=192, max_staleness=3, window=0)
    assert seconds_of(in_line, GENERATE) == half  # three steps are open, the first one is full


def test_small_micro_batches_are_limited_by_communication() -> None:
    seconds = [
        seconds_of(changed("train", sequence_parallel=1, micro_batch_tokens=tokens), UPDATE)
        for tokens in (22528, 282)
    ]
    assert seconds[0] == pytest.approx(361, rel=0.05)  # 2.35e18 operations on 64 x 364e12 x 0.28
    # 7,759,462 tokens / 64 / 282: 430 micro-batches; each gathers 65.5 GB twice and reduces 131 at
    # 0.7 x 196 GB/s
    assert seconds[1] == pytest.approx(430 * 262.1e9 / (0.7 * 196e9), rel=0.01)


def test_a_run_calibrates_lengths_and_phases() -> None:
    config = TrainingConfig.model_validate(
        {
            "algorithm": {"kl": {"place": "loss"}},
            "rollout": {"max_response_tokens": 64},
            "train": {"mini_prompts": 32},
        }
    )
    machine = Machine(cpu_rates(1), cpu_rates(2), None)
    small = replace(shape("Qwen3-0.6B"), is_tied=True)
    truth = Lengths(30.0, 20.0, 64, 0.8)
    one = step_time(config, small, machine, truth)
    number = config.train.train_prompts * config.rollout.group_size
    line = {
        "response_length/mean": 20.0,
        "prompt_length/mean": 30.0,
        "perf/total_num_tokens": number * 50.0,
        "perf/generated_tokens": number * 20 / 0.8,
        "timing_s/gen": 2 * one.seconds[GENERATE],
        "timing_s/old_log_prob": 2 * one.seconds[ANCHOR],
        "timing_s/ref": one.seconds[ANCHOR],
        "timing_s/update_actor": 0.5 * one.seconds[UPDATE],
        "timing_s/weight_sync": one.seconds[PUBLISH],
    }
    skipped = {"training/global_step": 2.0}
    found = calibrate(config, small, machine, [line, skipped, line])
    assert found is not None
    lengths, factors = found
    assert (lengths.prompt, lengths.response, lengths.kept) == pytest.approx((30, 20, 0.8))
    assert factors == pytest.approx({GENERATE: 2, ANCHOR: 3, UPDATE: 0.5, PUBLISH: 1})
    again = step_time(config, small, machine, lengths, factors)
    assert again.seconds[GENERATE] == pytest.approx(line["timing_s/gen"])
    assert "medians of 2 steps" in again.assumptions[0]
    assert "generate x 2.00" in again.assumptions[-1]
    assert calibrate(config, small, machine, [skipped]) is None
