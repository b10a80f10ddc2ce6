"""Parsing console logs and metrics files of verl and MindSpeed."""

import json
import math
import os
import textwrap
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from dapo_core.metrics.log import MetricsLog, format_step
from interop.logs import LogParser, Record, metric_names, read_training

METRICS = {
    "global_seqlen/min": 41250,
    "actor/entropy": 0.28117,
    "actor/pg_loss": -0.0410523,
    "actor/pg_clipfrac": 9.125e-05,
    "actor/ppo_kl": -3.25e-06,
    "actor/grad_norm": 0.0525,
    "critic/score/mean": -0.25,
    "critic/rewards/mean": -0.5,
    "response_length/mean": 6120.75,
    "response_length/clip_ratio": 0.03125,
    "val-core/math_dapo/acc/mean@32": 0.125,
    "timing_s/gen": 1200.125,
    "timing_s/step": 1600.5,
    "perf/total_num_tokens": 6420000,
    "perf/throughput": 62.6835,
    "train/num_gen_batches": 2,
}
LINE = format_step(7, METRICS)  # our console line has verl's form
RAY = "\x1b[36m(TaskRunner pid=4711, ip=10.0.0.3)\x1b[0m "
MINDSPEED = (
    "[2025-09-04 01:02:03] iteration: 3 / 200 | timing/all : 612.5000 | timing/update : 101.2500 | "
    "timing/rollout : 430.0000 | timing/old_log_p : 40.5000 | timing/reference_model : 12.0000 | "
    "timing/resharding_to_infer : 6.5000 | timing/adv : 0.2500 | actor/entropy : 0.4100 | "
    "actor/pg_loss : nan | "
    "actor/pg_clipfrac : 0.0002 | grad_norm : 0.1100 | dapo/lr : 0.0000 | dapo/rewards/mean : "
    "-0.2500 | "
    "dapo/score/mean : -0.1250 | response_length/mean : 900.5000 | e2e_tps : 51.2500 | update_tps "
    ": 310.0000 | "
    "acc_for_dapo_rewards/mean : 0.3750 | train/num_gen_batches : 3.0000 "
)


def fed(lines: Iterable[str]) -> Record | None:
    """Return the last record in these lines."""
    parser = LogParser()
    return ([record for line in lines if (record := parser.feed(line))] or [None])[-1]


def test_a_line_of_verl_parses_to_its_last_field() -> None:
    record = fed([LINE])
    assert record == Record(7, METRICS, "verl")
    assert list(record.metrics)[-1] == "train/num_gen_batches"


@pytest.mark.parametrize(
    "glued",
    [
        "在理想情况下,critic/rewards/mean 指标大体",
        " then text - a/b:3",
        "(WorkerDict pid=2) x - y/z:1",
        ".",
    ],
)
def test_text_after_the_last_value_ends_the_record(glued: str) -> None:
    assert fed([LINE + glued]) == Record(7, METRICS, "verl")


@pytest.mark.parametrize(
    "prefix",
    [RAY, "[36m(main_task pid=9)[0m ", "Training Progress:  1%|▏ | 1/100 [00:01]", "12:00:01 "],
)
def test_text_before_the_step_is_ignored(prefix: str) -> None:
    assert fed([prefix + LINE + "\r\n"]) == Record(7, METRICS, "verl")


def test_forms_of_numbers() -> None:
    text = (
        "step:1 - a/b:np.float64(0.5) - a/c:nan - a/d:-inf - a/e:True - a/f:np.int64(3) - "
        "a/g:1.5E+3 - a/My set:.5"
    )
    record = fed([text])
    assert record is not None
    assert math.isnan(record.metrics.pop("a/c"))
    assert record.metrics == {
        "a/b": 0.5,
        "a/d": -math.inf,
        "a/e": 1,
        "a/f": 3,
        "a/g": 1500,
        "a/My set": 0.5,
    }


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step:3",
        "step:3 - done",
        "global_step:3 - a/b:1",
        "iteration: 3/200 ...",
        "iteration: 3 / 9 |  hi",
        "[1]",
        "{'step': 3}",
        '{"step": "3"}',
        '{"data": {}}',
    ],
)
def test_other_lines_are_ignored(line: str) -> None:
    assert fed([line]) is None


@pytest.mark.parametrize("width", range(60, 200))
def test_wrapped_lines_are_joined(width: int) -> None:
    lines = [LINE[start : start + width] for start in range(0, len(LINE), width)]
    interleaved = [
        text
        for line in lines
        for text in (RAY + line, "(WorkerDict pid=5) INFO loading - a/b:1", "")
    ]
    assert fed(interleaved) == Record(7, METRICS, "verl")
    at_spaces = textwrap.wrap(LINE, width, break_long_words=False, break_on_hyphens=False)
    assert fed([*at_spaces, "validation generation end"]) == Record(7, METRICS, "verl")
    numbered = [MINDSPEED[start : start + width] for start in range(0, len(MINDSPEED), width)]
    assert str(fed(numbered)) == str(fed([MINDSPEED]))


def test_a_separate_line_does_not_continue_a_record() -> None:
    for line in ("12", "INFO 1.5 s", "a/b:1", "- item", "step done", "x | y : 1"):
        assert fed([LINE, line]) == Record(7, METRICS, "verl"), line


def test_a_line_of_mindspeed() -> None:
    record = fed(["(RayDAPOTrainer pid=12) " + MINDSPEED])
    assert record is not None
    assert (record.step, record.num_steps, record.trainer) == (3, 200, "mindspeed")
    assert math.isnan(record.metrics.pop("actor/pg_loss"))
    assert record.metrics == {
        "timing_s/step": 612.5,
        "timing_s/update_actor": 101.25,
        "timing_s/gen": 430,
        "timing_s/ref": 12,
        "timing_s/old_log_prob": 40.5,
        "timing_s/weight_sync": 6.5,
        "timing_s/adv": 0.25,
        "actor/entropy": 0.41,
        "actor/pg_clipfrac": 0.0002,
        "actor/grad_norm": 0.11,
        "actor/lr": 0,
        "critic/rewards/mean": -0.25,
        "critic/score/mean": -0.125,
        "response_length/mean": 900.5,
        "perf/throughput": 51.25,
        "update_tps": 310,
        "acc_for_dapo_rewards/mean": 0.375,
        "train/num_gen_batches": 3,
    }


def test_metrics_files_of_verl_and_of_ours(tmp_path: Path) -> None:
    theirs = tmp_path / "run.jsonl"
    rows = [
        {
            "step": step,
            "data": {"timing_s/update_weights": 2.5, "critic/score/mean": step, "x": None},
        }
        for step in (1, 2)
    ]
    theirs.write_text(
        "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows) + '{"step":3,"da'
    )
    training = read_training(theirs)
    assert (training.trainer, training.steps[1]) == (
        "verl",
        {"step": 2, "timing_s/weight_sync": 2.5, "critic/score/mean": 2},
    )
    ours = MetricsLog(tmp_path, None)
    ours.append(1, 4, {"critic/score/mean": 0.5, "actor/pg_loss": math.nan})
    [step] = read_training(ours.path).steps
    assert (step["critic/score/mean"], step["policy_version"], "actor/pg_loss" in step) == (
        0.5,
        4,
        False,
    )


def test_a_restarted_training_keeps_the_later_values(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    first = [format_step(step, {"a/b": step, "a/only_first": 1}) for step in range(1, 9)]
    again = ["INFO resuming from global_step_5", "step:5 - val-core/x/acc/mean@1:0.5"]
    again += [format_step(step, {"a/b": 100 * step}) for step in (6, 7)]
    log.write_text("\n".join([*first, *again]))
    steps = read_training(log).steps
    # 8 belongs to the previous attempt
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert steps[4] == {"step": 5, "a/b": 5, "a/only_first": 1, "val-core/x/acc/mean@1": 0.5}
    assert steps[5]["a/b"] == 600


def test_progress_bars_and_odd_bytes(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    log.write_bytes(
        b"\xff\xfe\n  0%|\r 50%|\r"
        + LINE.encode()
        + b"\r\n"
        + b"x" * 3_000_000
        + b"\nstep:8 - a/b:1"
    )
    assert [metrics["step"] for metrics in read_training(log).steps] == [7, 8]
    log.write_bytes(b"")
    assert read_training(log).steps == []


@pytest.mark.slow
def test_a_long_log_needs_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "verl.log"
    noise = "".join(
        f"(WorkerDict pid={number}) INFO engine line {number} of this worker\n"
        for number in range(2000)
    )
    with log.open("w") as file:
        for step in range(100):
            file.write(f"{RAY}{format_step(step, METRICS)}\n{noise}")
    assert log.stat().st_size > 9_000_000
    tracemalloc.start()
    steps = read_training(log).steps
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(steps) == 100
    assert peak < 2_000_000


@pytest.mark.parametrize("trainer", ["verl", "mindspeed"])
def test_every_renamed_metric_has_a_unit(trainer: str) -> None:
    for name, entry in metric_names(trainer).items():
        assert {"ours", "unit"} <= entry.keys() <= {"ours", "unit", "note"}, name


def test_the_published_log_line() -> None:
    guide = (
        Path(os.environ.get("DAPO_TEST_DATA", "")).parent / "guides" / "002_515b449b55797dd9.txt"
    )
    if not guide.is_file():
        pytest.skip("needs $DAPO_TEST_DATA/../guides")
    [record] = [record for line in guide.read_text().splitlines() if (record := fed([line]))]
    assert list(record.metrics)[-1] == "train/num_gen_batches"
    assert record.metrics["train/num_gen_batches"] == 1
    assert len(record.metrics) == 54
