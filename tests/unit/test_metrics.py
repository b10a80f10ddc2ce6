"""A step's metrics from hand-made batches, the console line, and metrics.jsonl across a resume."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dapo_core.batch import build_batch
from dapo_core.config import AlgorithmConfig
from dapo_core.data import Prompt
from dapo_core.engines import FinishReason
from dapo_core.loss import LossTotals
from dapo_core.metrics import (
    MetricsLog,
    PhaseTimer,
    batch_metrics,
    draw_metrics,
    format_step,
    read_metrics,
    response_metrics,
    speed_metrics,
    update_metrics,
)
from dapo_core.policy import UpdateSums
from dapo_core.reward import Verdict
from dapo_core.rollout import Group, Rollout
from dapo_core.sampler import Draw, TokenAccount
from tests.batches import make_group

KEY_VALUE = re.compile(r" - ([\w/]+):([-+.\deE]+|nan|-?inf)(?= - |$)")
EXAMPLE_LINE = (
    "step:1 - global_seqlen/min:1200 - actor/pg_clipfrac:9.5e-05 - actor/ppo_kl:-3.1e-05 - actor/lr:0.0"
    " - critic/score/mean:-0.4375 - timing_s/gen:15.25 - train/num_gen_batches:1"
)


def _rollout(num_tokens: int, score: float, verdict: Verdict, finish: FinishReason, penalty: float) -> Rollout:
    return Rollout(
        [7] * num_tokens, [-1.0] * num_tokens, finish, score, penalty, verdict, float(verdict == "right")
    )


def _groups() -> list[Group]:
    first = [_rollout(3, 1.0, "right", "stop", 0.0), _rollout(4, -1.0, "wrong", "length", -0.5)]
    second = [_rollout(1, -1.0, "no_answer", "stop", 0.0), _rollout(0, -1.0, "no_answer", "abort", 0.0)]
    return [
        Group(Prompt(0, (5, 6), "arithmetic", "1"), first, 0),
        Group(Prompt(1, (5, 6, 7), "arithmetic", "1"), second, 0),
    ]


def test_responses() -> None:
    assert response_metrics(_groups()) == pytest.approx(
        {
            "critic/score/mean": -1 / 3,  # (1 - 1 - 1) / 3 without the empty response
            "critic/score/max": 1.0,
            "critic/score/min": -1.0,
            "critic/rewards/mean": -0.5,  # (1 - 1.5 - 1) / 3
            "critic/rewards/max": 1.0,
            "critic/rewards/min": -1.5,
            "response_length/mean": 2.0,  # (3 + 4 + 1 + 0) / 4
            "response_length/max": 4.0,
            "response_length/min": 0.0,
            "response_length_non_aborted/mean": 8 / 3,
            "response_length_non_aborted/max": 4.0,
            "response_length_non_aborted/min": 1.0,
            "response/aborted_ratio": 0.25,
            "prompt_length/mean": 2.5,  # (2 + 2 + 3 + 3) / 4
            "prompt_length/max": 3.0,
            "prompt_length/min": 2.0,
            "response_length/clip_ratio": 0.25,
            "reward/overlong_ratio": 0.25,
            "perf/trained_response_tokens": 8.0,
            "perf/total_num_tokens": 18.0,  # 8 + 2 + 2 + 3 + 3
            "reward/right_ratio": 0.25,
            "reward/wrong_ratio": 0.25,
            "reward/no_answer_ratio": 0.5,
        }
    )


def test_the_clip_ratio_is_of_the_finish_reason_not_of_the_longest() -> None:
    longest = make_group([1.0, -1.0, 1.0, 1.0], num_response_tokens=[9, 2, 9, 1])
    assert response_metrics([longest])["response_length/clip_ratio"] == 0.0
    cut = replace(longest, rollouts=[replace(longest.rollouts[0], finish_reason="length"), *longest.rollouts[1:]])
    assert response_metrics([cut])["response_length/clip_ratio"] == 0.25


def test_only_empty_responses_have_no_score() -> None:
    metrics = response_metrics([make_group([1.0, 1.0], num_response_tokens=0)])
    assert metrics["response/aborted_ratio"] == 1.0
    assert not [name for name in metrics if name.startswith(("critic/", "response_length_non_aborted/"))]


@pytest.mark.parametrize(("aggregation", "entropy"), [("token-mean", 2.0), ("seq-mean-token-mean", 2.25)])
def test_batch(aggregation: str, entropy: float) -> None:
    # responses of 2 and 1 tokens; probabilities engine .5 .25 | .25, policy .25 .75 | .5: r = 0.5, 3, 2
    group = make_group([1.0, 1.0], num_response_tokens=[2, 1])
    batch = build_batch([group], np.array([1.0, -2.0]), mask_truncated=False)
    nan = float("nan")
    batch = replace(
        batch,
        rollout_log_probs=torch.tensor([[0.5, 0.25], [0.25, nan]]).log(),
        old_log_probs=torch.tensor([[0.25, 0.75], [0.5, nan]]).log(),
    )
    algorithm = AlgorithmConfig.model_validate({"loss_aggregation": aggregation})
    metrics = batch_metrics(batch, torch.tensor([[1.0, 2.0], [3.0, nan]]), LossTotals(3, 2), algorithm)
    assert metrics == pytest.approx(
        {
            "critic/advantages/mean": 0.0,  # (1 + 1 - 2) / 3: weighted by length
            "critic/advantages/max": 1.0,
            "critic/advantages/min": -2.0,
            "critic/returns/mean": 0.0,
            "critic/returns/max": 1.0,
            "critic/returns/min": -2.0,
            "actor/entropy": entropy,  # (1 + 2 + 3) / 3, or (1.5 + 3) / 2
            "rollout/probs_diff_mean": 1 / 3,  # (0.25 + 0.5 + 0.25) / 3
            "rollout/probs_diff_max": 0.5,
            "rollout/kl": -math.log(3) / 3,  # ln 0.5 + ln 3 + ln 2 = ln 3
            "rollout/k3_kl": (5.5 - 3 - math.log(3)) / 3,  # sum r = 5.5
            "rollout/ess": 30.25 / 39.75,  # 5.5^2 / (3 * (0.25 + 9 + 4))
            "rollout/ppl_ratio": (1.5**-0.5 + 0.5) / 2,  # mean log r: ln 1.5 / 2 and ln 2
        },
        rel=1e-6,
        abs=1e-9,
    )


def test_a_batch_that_trains_no_token_has_no_batch_metrics() -> None:
    batch = build_batch([make_group([1.0, 1.0])], np.zeros(2), mask_truncated=False)
    masked = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    assert batch_metrics(masked, torch.zeros(2, 3), LossTotals(0, 0), AlgorithmConfig()) == {}


def _sums(loss: float, num_tokens: float, grad_norm: float, is_skipped: bool = False) -> UpdateSums:
    return UpdateSums(
        loss, 0.0, num_tokens, num_tokens / 10, 1.0, num_tokens / 20 - 1, grad_norm, is_skipped, loss / 100
    )


def test_updates_are_weighted_by_tokens() -> None:
    assert update_metrics([_sums(0.2, 10, 1.0), _sums(0.4, 30, 3.0)]) == pytest.approx(
        {
            "actor/pg_loss": 0.3,  # mean over mini-batches
            "actor/pg_clipfrac": 0.1,  # (1 + 3) / 40
            "actor/pg_clipfrac_lower": 0.05,  # (1 + 1) / 40
            "actor/ppo_kl": 0.0,  # (-0.5 + 0.5) / 40
            "actor/grad_norm": 2.0,
            "actor/skipped_updates": 0.0,
            "actor/lr": 0.004,  # of the last
        }
    )


def test_skipped_updates_are_counted_and_leave_the_norm_finite() -> None:
    skipped = _sums(0.4, 30, float("inf"), is_skipped=True)
    metrics = update_metrics([_sums(0.2, 10, 1.0), skipped])
    assert (metrics["actor/grad_norm"], metrics["actor/skipped_updates"]) == (1.0, 1.0)
    assert "actor/grad_norm" not in update_metrics([skipped])


def test_the_account_of_a_draw() -> None:
    account = TokenAccount(generated_tokens=70, num_right=3, num_finished=12)
    account.add("kept", 2, 30)
    account.add("all_wrong", 1, 10)
    account.add("surplus", 1, 20)
    account.add("aborted", 3, 10)
    metrics = draw_metrics(Draw([], 2, account))
    assert metrics["sampler/waste_ratio"] == pytest.approx(0.4)  # (10 + 10) / (10 + 10 + 30): surplus is open
    assert metrics["sampler/accuracy"] == 0.25
    assert (metrics["train/num_gen_batches"], metrics["perf/generated_tokens"]) == (2.0, 70.0)
    assert (metrics["sampler/kept_groups"], metrics["sampler/kept_tokens"]) == (2.0, 30.0)
    assert (metrics["sampler/aborted_groups"], metrics["sampler/aborted_tokens"]) == (3.0, 10.0)
    assert (metrics["sampler/stale_groups"], metrics["sampler/all_right_tokens"]) == (0.0, 0.0)


def test_speeds_of_the_published_step() -> None:
    # 1024 responses on 64 devices: (7385.140625 + 152.890625) * 1024 = 7718944 tokens
    speeds = speed_metrics(
        {
            "timing_s/step": 1738.0274970199998,
            "timing_s/gen": 1315.2451746799998,
            "timing_s/update_actor": 303.9206,
            "timing_s/adv": 7.718944,
            "perf/trained_response_tokens": 7385.140625 * 1024,
            "perf/total_num_tokens": 7718944.0,
            "perf/generated_tokens": 9e6,  # more was generated than trained on
        },
        num_devices=64,
    )
    assert speeds == pytest.approx(
        {
            "perf/time_per_step": 1738.0274970199998,
            "perf/throughput": 69.3938963605546,  # 7718944 / (1738.0275 * 64)
            "timing_per_token_ms/gen": 0.173919,  # 1315245.17 / (7385.140625 * 1024)
            "timing_per_token_ms/update_actor": 0.0393733,  # 303920.6 / 7718944
            "timing_per_token_ms/adv": 0.001,
        },
        rel=1e-5,
    )


def test_a_skipped_step_has_a_throughput_of_zero() -> None:
    metrics = {"timing_s/step": 2.0, "timing_s/gen": 1.0, "perf/generated_tokens": 100.0}
    assert speed_metrics(metrics, 1) == {"perf/time_per_step": 2.0, "perf/throughput": 0.0}


def _fail_after(seconds: float) -> None:
    time.sleep(seconds)
    time.sleep(-1)


def test_phases_add_up_to_the_step() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("gen"):
            time.sleep(0.02)
    with pytest.raises(ValueError, match="sleep length"), timer.phase("adv"):  # booked all the same
        _fail_after(0.02)
    metrics = timer.metrics()
    assert list(metrics) == ["timing_s/gen", "timing_s/adv", "timing_s/step"]
    assert metrics["timing_s/gen"] >= 0.04
    assert metrics["timing_s/adv"] >= 0.02
    parts = metrics["timing_s/gen"] + metrics["timing_s/adv"]
    assert parts <= metrics["timing_s/step"]
    assert metrics["timing_s/step"] - parts < 0.02  # nothing happens outside the phases


def test_the_console_line_is_read_by_what_reads_the_fields_line() -> None:
    assert len(KEY_VALUE.findall(EXAMPLE_LINE)) == EXAMPLE_LINE.count(" - ") == 7
    values = {
        "actor/ppo_kl": -3.1e-05,
        "perf/total_num_tokens": 7718944.0,
        "timing_s/gen": 0.125,
        "actor/lr": 1e-6,
    }
    line = format_step(12, values)
    assert line.startswith("step:12 - actor/ppo_kl:-3.1e-05 - ")
    assert {name: float(value) for name, value in KEY_VALUE.findall(line)} == values


def test_the_log_forgets_later_steps_and_a_torn_line_on_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=0)
    for step in (1, 2, 3):
        log.append(step, step * 2, {"timing_s/step": 0.5 + step})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "wall_ti')
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3]
    resumed = MetricsLog(tmp_path, last_step=2)
    resumed.append(3, 6, {"timing_s/step": 9.0})
    lines = [json.loads(line) for line in resumed.path.read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["policy_version"]) for line in lines] == [(1, 2), (2, 4), (3, 6)]
    assert [line["timing_s/step"] for line in lines] == [1.5, 2.5, 9.0]
    assert time.time() - 60 < lines[0]["wall_time"] <= lines[-1]["wall_time"] <= time.time()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_begins_with_an_empty_log(tmp_path: Path) -> None:
    MetricsLog(tmp_path, 0).append(1, 1, {"timing_s/step": 1.0})
    assert read_metrics(MetricsLog(tmp_path, 0).path) == []
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_numbers_that_are_not_finite_stay_readable_as_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.append(1, 1, {"actor/pg_loss": float("nan"), "rollout/ess": float("inf"), "actor/lr": 0.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(log.path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert (line["actor/pg_loss"], line["rollout/ess"], line["actor/lr"]) == (None, None, 0.5)
