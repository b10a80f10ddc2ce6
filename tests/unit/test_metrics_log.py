"""Phase times and throughput, the console line, and metrics.jsonl across a resume."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dapo_core.errors import CheckpointError
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.log import MetricsLog, format_step
from dapo_core.metrics.step import timing_metrics
from durable import read_json_lines
from tests.metric_names import NAME_VALUE
from tests.sources import Clock

EXAMPLE_LINE = (
    "step:1 - global_seqlen/min:33676 - global_seqlen/max:326471 - global_seqlen/minmax_diff:292795"
    " - global_seqlen/balanced_min:120597 - global_seqlen/balanced_max:120614 - "
    "global_seqlen/mean:120608.5"
    " - actor/entropy:0.31534484028816223 - actor/pg_loss:0.06752552084314327"
    " - actor/pg_clipfrac:9.875712657958502e-05 - actor/ppo_kl:-3.158243763815941e-05"
    " - actor/pg_clipfrac_lower:0.0 - actor/grad_norm:0.04106094129383564 - actor/lr:0.0"
    " - critic/score/mean:-0.4141845703125 - response_length/mean:7385.140625"
    " - response_length/clip_ratio:0.0390625 - timing_s/gen:1315.2451746799998"
    " - timing_s/step:1738.0274970199998 - perf/total_num_tokens:7718944"
    " - perf/throughput:69.3938963605546 - train/num_gen_batches:1"
)


def test_the_published_step() -> None:
    # 1024 responses on 64 devices: (7385.140625 + 152.890625) * 1024 = 7718944 tokens
    prompt_ids, num_response_tokens = range(7718944 - 7562384), 7562384  # 7385.140625 * 1024
    group: Any = SimpleNamespace(
        num_response_tokens=num_response_tokens,
        prompt=SimpleNamespace(input=SimpleNamespace(token_ids=prompt_ids)),
        rollouts=[None],
    )
    seconds = {
        "gen": 1315.2451746799998,
        "ref": 77.18944,
        "adv": 7.718944,
        "update_actor": 303.9206,
    }
    speeds = timing_metrics({**seconds, "step": 1738.0274970199998}, [group], 64)
    assert speeds == pytest.approx(
        {
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "timing_s/step": 1738.0274970199998,
            "timing_per_token_ms/gen": 0.173919,  # 1315245.17 / (7385.140625 * 1024)
            "timing_per_token_ms/ref": 0.01,
            "timing_per_token_ms/adv": 0.001,
            "timing_per_token_ms/update_actor": 0.0393733,  # 303920.6 / 7718944
            "perf/time_per_step": 1738.0274970199998,
            "perf/throughput": 69.3938963605546,  # 7718944 / (1738.0275 * 64)
        },
        rel=3e-6,
    )
    skipped = {
        "timing_s/gen": 1.0,
        "timing_s/step": 2.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 0.0,
    }
    assert timing_metrics({"gen": 1.0, "step": 2.0}, [], 1) == skipped


def _fail_after(seconds: float, clock: Clock) -> None:
    clock.now += seconds
    raise ValueError("no room")


def test_phase_times_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("gen"):
            clock.now += 2.0
    with pytest.raises(ValueError, match="no room"), timer.phase("adv"):  # booked all the same
        _fail_after(3.0, clock)
    seconds = timer.read()
    assert list(seconds) == ["gen", "adv", "step"]
    assert list(seconds.values()) == [4.0, 3.0, 7.0]  # nothing happens outside the phases


def test_scoring_time_is_moved_out_of_generation() -> None:
    timer = PhaseTimer()
    timer.seconds = {"gen": 4.0, "adv": 1.0}
    timer.attribute(1.5, "gen", "reward")
    assert timer.seconds == {"gen": 2.5, "adv": 1.0, "reward": 1.5}
    timer.attribute(9.0, "gen", "reward")  # clocks may differ by a little: never below zero
    assert timer.seconds == {"gen": 0.0, "adv": 1.0, "reward": 4.0}


def test_verl_log_parsers_read_our_console_line() -> None:
    fields = dict(NAME_VALUE.findall(EXAMPLE_LINE))
    assert len(fields) == EXAMPLE_LINE.count(" - ") + 1 == 22
    assert (fields["step"], fields["actor/ppo_kl"]) == ("1", "-3.158243763815941e-05")
    values = {
        "actor/ppo_kl": -3.1e-05,
        "perf/total_num_tokens": 7718944.0,
        "response_length/clip_ratio": 0.0,
        "timing_s/gen": 0.125,
        "actor/lr": 1e-6,
    }
    line = format_step(12, values)
    assert line.startswith("step:12 - actor/ppo_kl:-3.1e-05 - ")
    assert {name: float(value) for name, value in NAME_VALUE.findall(line)} == {
        "step": 12.0,
        **values,
    }


def test_a_resume_truncates_metrics_to_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, last_step=0)
    for step in (1, 2, 3):
        log.append(step, step * 2, {"timing_s/step": 0.5 + step})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{}\n[1]\n{"step": null}\n{"step": 4, "wall_ti')
    resumed = MetricsLog(tmp_path, last_step=2)
    resumed.append(3, 6, {"timing_s/step": 9.0})
    lines = [json.loads(line) for line in resumed.path.read_text(encoding="utf-8").splitlines()]
    assert [(line["step"], line["policy_version"]) for line in lines] == [(1, 2), (2, 4), (3, 6)]
    assert [line["timing_s/step"] for line in lines] == [1.5, 2.5, 9.0]
    assert time.time() - 60 < lines[0]["wall_time"] <= lines[-1]["wall_time"] <= time.time()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    # a new run begins with an empty one
    assert read_json_lines(MetricsLog(tmp_path, last_step=0).path) == []


def test_non_finite_metrics_are_written_as_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.append(1, 1, {"actor/pg_loss": float("nan"), "rollout/ess": float("inf"), "actor/lr": 0.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(log.path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert (line["actor/pg_loss"], line["rollout/ess"], line["actor/lr"]) == (None, None, 0.5)


def test_a_full_disk_is_reported_without_losing_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path, 0)
    log.append(1, 2, {"timing_s/step": 0.5})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused = rf"{log.path} cannot be written: .*No space left on device; free disk space, or"
    with pytest.raises(CheckpointError, match=refused):
        MetricsLog(tmp_path, 0)
    assert [line["step"] for line in read_json_lines(log.path)] == [1]
    with pytest.raises(CheckpointError, match=refused):
        log.append(2, 4, {"timing_s/step": 0.5})
