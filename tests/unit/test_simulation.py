"""Simulated engines and steps: hand-computed times, lengths, costs, and the published log."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dapo_core.config.sampler import SamplerConfig
from dapo_core.config.training import TrainingConfig
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.draw.prompts import Prompt
from dapo_core.memory.devices import DEVICES, cpu_rates
from dapo_core.memory.published import published_config
from dapo_core.memory.shape import ModelShape, shape_of
from dapo_core.model.inputs import ModelInput
from dapo_core.simulation import engines as engines_module
from dapo_core.simulation.costs import (
    ANCHOR,
    GENERATE,
    OTHER,
    PUBLISH,
    UPDATE,
    Costs,
    Machine,
    assumed_workload,
    estimate,
    measure,
)
from dapo_core.simulation.engines import EngineCosts, SimulatedEngines
from dapo_core.simulation.steps import Setup, Simulated, simulate
from dapo_core.simulation.workload import (
    Workload,
    chances,
    cut_mean,
    log_normal,
    outcomes,
    with_mean,
)

PAIRS = Workload(group_size=2, prompt_tokens=1, limit=100, log_mean=2.0, log_sigma=0.5)


def lengths_are(monkeypatch: pytest.MonkeyPatch, *lengths: tuple[int, int]) -> None:
    """Groups have these response lengths, in turn; the first response is right."""

    def given(_: Workload, group_id: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array(lengths[group_id % len(lengths)]), np.array([True, False])

    monkeypatch.setattr(engines_module, "outcomes", given)


def request(number: int) -> GroupRequest:
    return GroupRequest(number, Prompt(0, ModelInput((0,)), "simulated", ""), step=1)


def finish(engines: SimulatedEngines) -> dict[int, float]:
    """Finish everything; returns when each group did."""
    times = dict[int, float]()
    while found := engines.finished():
        times |= {group.group_id: engines.now for group in found}
    return times


def test_two_slots_decode_four_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (3, 5), (4, 2))
    engines = SimulatedEngines(PAIRS, EngineCosts(fixed=1.0, num_slots=2), 1)
    engines.submit([request(0), request(1)])
    # 3 and 5 begin; at 3 s the 4 takes a slot (until 7), at 5 s the 2 takes the other (until 7)
    assert finish(engines) == {0: 5.0, 1: 7.0}
    assert engines.usage().tolist() == [14, 0, 0]
    assert {*engines.occupied} == {(0.0, 0.0), (0.0, 1.0), (3.0, 1.0), (5.0, 1.0), (7.0, 0.0)}


def test_a_pass_takes_longer_the_wider_it_is() -> None:
    costs = EngineCosts(fixed=1.0, weights=2.0, context=0.5, sequence=3.0)
    assert costs.token_seconds(1, context=4) == 1 + 2 + 0.5 * 4  # memory
    assert costs.token_seconds(2, context=4) == 1 + 3 * 2  # operations
    drafts = replace(costs, sequence=0.1, tokens_per_pass=2.0)
    assert drafts.token_seconds(32, context=0) == (1 + 0.1 * 32 * 4) / 2  # 3 drafts each
    assert drafts.token_seconds(33, context=0) == 1 + 0.1 * 33  # none where it is wide


def test_contexts_grow_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (4, 4))
    engines = SimulatedEngines(PAIRS, EngineCosts(fixed=0.0, context=1.0), 1)
    engines.submit([request(0)])
    # 4 tokens over contexts from 2 x 1 to 2 x 5: 6 in the mean
    assert finish(engines) == {0: 4 * 6.0}


def test_new_weights_recompute_what_responses_had(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (3, 8))
    workload = replace(PAIRS, prompt_tokens=10)
    engines = SimulatedEngines(workload, EngineCosts(fixed=1.0, prefill=0.1), 1)
    engines.submit([request(0)])
    engines.run(5.0)  # 10 x 0.1 s for the prompt that both share, then 4 tokens
    late, requests = engines.suspend()
    assert not late
    assert [len(one.response_ids) for one in requests[0].responses] == [3, 4]
    assert [one.finish_reason for one in requests[0].responses] == ["stop", "abort"]
    engines.wait(2.0)
    engines.submit(requests)
    # at 7 s: (10 + 4) x 0.1 s, then the other 4 tokens
    assert finish(engines) == {0: pytest.approx(7 + 1.4 + 4)}
    assert engines.usage()[2] == pytest.approx(1.0 + 1.4)


def test_a_full_cache_suspends_the_youngest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (15, 15))
    engines = SimulatedEngines(PAIRS, EngineCosts(fixed=1.0, cache_tokens=20), 1)
    engines.submit([request(0)])
    # 2 x (1 + 9) tokens fill it at 9 s; the second waits until 15 s, then decodes its last 6
    assert finish(engines) == {0: 21.0}
    assert engines.usage()[0] == 2 * 9 + 12


def test_groups_go_to_the_engine_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (9, 1), (2, 2), (3, 3))
    engines = SimulatedEngines(PAIRS, EngineCosts(fixed=1.0, num_slots=2), 2)
    engines.submit([request(0), request(1), request(2)])
    # the third shares the first engine: 3 after 1, beside the 9, then 3
    assert finish(engines) == {1: 2.0, 2: 7.0, 0: 9.0}


def one_at_a_time(is_asynchronous: bool, num_parts: int = 1, **settings: Any) -> Simulated:
    """Steps of one group with 3 and 5 tokens: 10 trained tokens with the prompts."""
    sampler = SamplerConfig(dynamic=False, gen_prompts=1, max_num_gen_batches=0, **settings)
    costs = Costs(
        EngineCosts(fixed=1.0, num_slots=2), anchor=0.1, update=0.2, publish=0.5, other=0.25
    )
    setup = Setup(PAIRS, costs, sampler, 1, 1, is_asynchronous, num_parts)
    return simulate(setup, 3, num_skipped=2)


def test_engines_wait_for_ranks_when_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (3, 5))
    found = one_at_a_time(False, max_staleness=0)
    parts = {GENERATE: 5.0, ANCHOR: 1.0, UPDATE: 2.0, PUBLISH: 0.5, OTHER: 0.25}
    assert found.seconds == pytest.approx(parts)
    assert found.trained_tokens == 10
    assert found.tokens_per_second == pytest.approx(10 / 8.75)
    assert found.idle_share == pytest.approx(1 - (3 + 5) / (2 * 8.75))
    assert (found.waste_ratio, found.mean_age, found.max_age) == (0, 0, 0)


def test_engines_decode_while_ranks_update_when_asynchronous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths_are(monkeypatch, (3, 5))
    found = one_at_a_time(True, max_staleness=1)
    # 3 of the next 5 tokens are decoded in the 3 s of the ranks
    parts = {GENERATE: 2.0, ANCHOR: 1.0, UPDATE: 2.0, PUBLISH: 0.5, OTHER: 0.25}
    assert found.seconds == pytest.approx(parts)
    assert found.idle_share == pytest.approx(1 - (3 + 5) / (2 * 5.75))
    assert (found.mean_age, found.max_age) == (1, 1)


def test_one_of_equal_parts_stands_for_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (3, 5))
    found = one_at_a_time(False, num_parts=4, max_staleness=0)
    assert found.trained_tokens == 40
    assert found.seconds[UPDATE] == pytest.approx(0.2 * 40)
    assert found.seconds[GENERATE] == 5


def test_tokens_without_signal_train_nothing() -> None:
    ease, slope = chances(0.5, 0.25, 2)
    workload = replace(PAIRS, ease=ease, slope=slope)
    sampler = SamplerConfig(gen_prompts=4, max_num_gen_batches=0)
    found = simulate(Setup(workload, Costs(EngineCosts(fixed=1.0)), sampler, 4, 1), 50)
    kept = [group.group_id for draw in found.draws for group in draw.groups]
    assert len(kept) == 200
    assert all(outcomes(workload, number)[1].sum() == 1 for number in kept)
    # groups are as long with signal as without, in the mean
    assert found.waste_ratio == pytest.approx(0.75, abs=0.06)


def test_lengths_have_the_given_mean_and_share_at_the_limit() -> None:
    published = Workload(16, 150, 20480, *log_normal(7385, 20480, 0.039))
    assert published.mean_tokens == pytest.approx(7385)
    assert published.cut_share == pytest.approx(0.039)
    lengths = np.concatenate([outcomes(published, number)[0] for number in range(3000)])
    assert lengths.mean() == pytest.approx(7385, rel=0.02)
    assert (lengths == 20480).mean() == pytest.approx(0.039, rel=0.06)
    squares = (lengths.astype(float) ** 2).mean() / (2 * lengths.mean())
    assert published.mean_context == pytest.approx(150 + squares, rel=0.03)
    log_mean = with_mean(1000, 20480, published.log_sigma)
    assert cut_mean(log_mean, published.log_sigma, 20480) == pytest.approx(1000)


@pytest.mark.parametrize(("accuracy", "signal"), [(0.5, 0.5), (0.2, 0.3), (0.9, 0.4)])
def test_outcomes_have_the_given_accuracy_and_signal(accuracy: float, signal: float) -> None:
    workload = Workload(8, 1, 10**6, 2.0, 0.5, *chances(accuracy, signal, 8))
    assert workload.signal_share == pytest.approx(signal, abs=1e-3)
    right = np.array([outcomes(workload, number)[1] for number in range(4000)])
    assert right.mean() == pytest.approx(accuracy, abs=0.02)
    num_right = right.sum(axis=1)
    assert np.mean((num_right > 0) & (num_right < 8)) == pytest.approx(signal, abs=0.03)


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
        "placement": "colocated",
        "sequence_parallel": 4,
        "train_prompts": 64,
        "mini_prompts": 32,
        "micro_batch_tokens": 5632,
    },
}


def shape(name: str) -> ModelShape:
    published = published_config(name)
    assert published is not None
    return shape_of(published)


def changed(section: str, **keys: object) -> TrainingConfig:
    return TrainingConfig.model_validate({**PUBLISHED, section: {**PUBLISHED[section], **keys}})


def costs_of(config: TrainingConfig) -> Costs:
    return estimate(config, shape("Qwen3-32B"), A3, assumed_workload(config))


def test_the_published_step_is_reproduced_from_its_settings() -> None:
    config = TrainingConfig.model_validate(PUBLISHED)
    workload = replace(assumed_workload(config), prompt_tokens=153)
    costs = estimate(config, shape("Qwen3-32B"), A3, workload)
    found = simulate(Setup(workload, costs, config.sampler, 64, 16), 5)
    assert found.step_seconds == pytest.approx(1738.03, rel=0.15)
    assert found.seconds[GENERATE] == pytest.approx(1315.25 - 8.66, rel=0.15)
    assert found.seconds[ANCHOR] == pytest.approx(116.21, rel=0.25)
    assert found.seconds[UPDATE] == pytest.approx(303.92, rel=0.25)
    assert found.seconds[PUBLISH] == pytest.approx(8.66, rel=0.25)
    assert found.trained_tokens == pytest.approx(7_718_944, rel=0.05)


def test_update_time_grows_with_the_number_of_passes() -> None:
    once, twice = (costs_of(changed("train", passes=passes)) for passes in (1, 2))
    # 2 mini-batches need an anchor anyway
    assert twice == replace(once, update=2 * once.update)


def test_small_micro_batches_are_limited_by_communication() -> None:
    # (205 + 7,385) x 1,024 tokens
    seconds = [
        costs_of(changed("train", sequence_parallel=1, micro_batch_tokens=tokens)).update
        * (205 + 7385.14)
        * 1024
        for tokens in (22528, 282)
    ]
    assert seconds[0] == pytest.approx(361, rel=0.05)  # 2.35e18 operations on 64 x 364e12 x 0.28
    # 7,772,000 tokens / 64 / 282: 431 micro-batches; each gathers 65.5 GB twice and reduces 131 at
    # 0.7 x 196 GB/s
    assert seconds[1] == pytest.approx(431 * 262.1e9 / (0.7 * 196e9), rel=0.01)


def test_costs_of_an_engine_come_from_the_device() -> None:
    costs = costs_of(TrainingConfig.model_validate(PUBLISHED)).engine
    assert costs.fixed == pytest.approx(64 * 0.5e-3)
    assert costs.weights == pytest.approx(65.5e9 / 4 / (0.6 * 1.6e12), rel=0.02)
    assert costs.context == pytest.approx(65536 / (0.6 * 1.6e12))
    assert costs.prefill == pytest.approx(2 * 32e9 / (4 * 364e12 * 0.28), rel=0.03)
    # (0.7 x 61.27 - 16.4 for weights - activations - 1 for graphs) GiB / 64 KiB
    assert 350_000 < costs.cache_tokens < 450_000
    drafts = costs_of(changed("rollout", speculation="ngram")).engine
    assert (costs.tokens_per_pass, drafts.tokens_per_pass) == (None, 1.5)


LINE = {
    "response_length/mean": 20.0,
    "response_length/max": 60.0,
    "prompt_length/mean": 30.0,
    "perf/total_num_tokens": 512.0 * 50,
    "sampler/kept_groups": 16.0,
    "sampler/all_right_groups": 12.0,
    "sampler/all_wrong_groups": 4.0,
    "sampler/accuracy": 0.6,
    "sampler/finished_response_length": 22.0,
    "sampler/finished_clip_ratio": 0.1,
    "timing_s/gen": 3.0,
    "timing_s/old_log_prob": 1.0,
    "timing_s/ref": 0.5,
    "timing_s/update_actor": 2.0,
    "timing_s/weight_sync": 0.25,
    "timing_s/step": 7.0,
}
SMALL = TrainingConfig.model_validate({"rollout": {"max_response_tokens": 64}})


def test_a_log_tells_lengths_signal_and_seconds() -> None:
    warming_up = {**LINE, "timing_s/gen": 90.0, "timing_s/step": 97.0}
    measured = measure(SMALL, [warming_up, LINE, {"training/global_step": 2.0}, LINE])
    assert measured is not None
    assert measured.seconds == {GENERATE: 3, ANCHOR: 1.5, UPDATE: 2, PUBLISH: 0.25, OTHER: 0.25}
    assert measured.workload.mean_tokens == pytest.approx(22, rel=1e-3)
    assert measured.workload.cut_share == pytest.approx(0.1, abs=1e-3)
    assert measured.workload.prompt_tokens == 30
    assert measured.workload.signal_share == pytest.approx(0.5, abs=0.01)  # 16 of 32
    assert measured.num_steps == 2
    one = measure(SMALL, [warming_up])
    assert one is not None
    assert one.seconds[GENERATE] == 90
    assert measure(SMALL, [{"training/global_step": 2.0}]) is None


def test_without_a_cut_response_the_longest_gives_the_spread() -> None:
    measured = measure(SMALL, [{**LINE, "sampler/finished_clip_ratio": 0.0}] * 2)
    assert measured is not None
    # of 512 x 16 responses, the longest has 60 tokens
    share = 1 - Workload(16, 1, 60, *spread(measured.workload)).cut_share
    assert share == pytest.approx(1 - 0.56 / (512 * 16), abs=1e-5)
    assert measured.workload.mean_tokens == pytest.approx(22, rel=0.01)


def spread(workload: Workload) -> tuple[float, float]:
    return workload.log_mean, workload.log_sigma


def test_factors_scale_the_phases() -> None:
    machine = Machine(cpu_rates(1), cpu_rates(2), None)
    costs = estimate(SMALL, shape("Qwen3-0.6B"), machine, assumed_workload(SMALL))
    scaled = costs.scaled({GENERATE: 3.0, UPDATE: 2.0, OTHER: 7.0})
    assert scaled.engine.token_seconds(4, 100) == 3 * costs.engine.token_seconds(4, 100)
    assert (scaled.update, scaled.publish, scaled.other) == (2 * costs.update, costs.publish, 7.0)


def test_finished_groups_are_kept_while_engines_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths_are(monkeypatch, (1, 2), (9, 9))
    engines = SimulatedEngines(PAIRS, EngineCosts(fixed=1.0), 1)
    engines.submit([request(0), request(1)])
    engines.run(4.0)
    assert (engines.now, engines.num_in_flight) == (4.0, 2)  # one of them waits to be taken
    found: list[Group] = engines.finished()
    assert [group.group_id for group in found] == [0]
    assert engines.now == 4.0
