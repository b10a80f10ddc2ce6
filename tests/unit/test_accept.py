"""The acceptance form says what a run recorded, and nothing else."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from dapo_core.memory.devices import GIB
from dapo_core.metrics.log import METRICS_FILE
from flows.cli import app
from tasks.artifacts.artifact import StoreError
from tasks.preflight.memory import plan_of
from tasks.runs.accept import (
    Line,
    Records,
    Reference,
    acceptance,
    is_accepted,
    reference_of,
    require_acceptable,
    to_markdown,
)
from tasks.runs.run import Run
from tests.evaluations import write_results
from tests.recorded_runs import LABELS, record_run, small_config

FACTS = "versions", "environment", "topology", "commit"


def _step(number: int, reward: float, **changes: Any) -> dict[str, Any]:
    compared = {
        "compared_tokens": 1000,
        "log_probs_diff_mean": 3e-3,
        "probs_diff_mean": 2e-4,
        "probs_diff_high_ratio": 0.0,
        "probs_diff_max": 0.05,
    }
    return {
        "step": number,
        "critic/rewards/mean": reward,
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "timing_s/update_actor": 3.9,
        "perf/throughput": 1500.0,
        "perf/mfu/actor": 0.31,
        "perf/max_memory_allocated_gb": 10.0,
        **{f"rollout/fresh_{name}": value for name, value in compared.items()},
        **changes,
    }


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """A run on an accelerator that recorded all, and meets all."""
    noise = random.Random(0)
    plan = plan_of(small_config(tmp_path), gigabytes=64)
    uses = [dataclasses.replace(use, device_bytes=4 * GIB) for use in plan.uses]
    return Records(
        title="recipe, run 1 (completed)",
        steps=[_step(n, 0.2 + 0.003 * n + noise.gauss(0, 0.05)) for n in range(1, 101)],
        after={"accuracy": 0.82, "interval": (0.784, 0.856), "benchmark": "math500"},
        reference=Reference(0.8, "as given"),
        plan=dataclasses.replace(plan, uses=tuple(uses)),
        is_cpu=False,
        samples_among_all=True,
        versions={"torch": "2.10.0"},
        environment="server: A=1",
        topology="16 devices",
        commit="0.1.0, commit abcdef1",
    )


def _line(records: Records, name: str, **changes: Any) -> Line:
    lines = acceptance(dataclasses.replace(records, **changes))
    return next(line for line in lines if line.name == name)


def _steps(records: Records, **changes: Any) -> list[dict[str, Any]]:
    return [{**step, **changes} for step in records.steps]


def _without(records: Records, name: str, num: int = 1) -> list[dict[str, Any]]:
    """The steps, without a metric in the last `num`."""
    kept, cut = records.steps[:-num], records.steps[-num:]
    return [*kept, *({k: v for k, v in step.items() if k != name} for step in cut)]


def test_a_run_that_recorded_and_meets_all_is_accepted(records: Records) -> None:
    lines = acceptance(records)
    assert [line.verdict for line in lines] == ["met"] * len(lines)
    assert is_accepted(lines)
    page = to_markdown(records, lines)
    assert "Accepted: 11 met." in page
    assert "error +2.5 %, -2.0 % to +7.0 %" in page  # 0.82 / 0.8 - 1


@pytest.mark.parametrize("name", ["reward rises", "engine and policy", "step time by phase"])
def test_what_no_step_recorded_is_not_filled_in(records: Records, name: str) -> None:
    assert _line(records, name, steps=[]).verdict == "not recorded"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("tokens per second and device", "perf/throughput"),
        ("MFU of the update", "perf/mfu/actor"),
        ("step time by phase", "timing_s/step"),
    ],
)
def test_one_step_without_the_metric_is_named(records: Records, name: str, metric: str) -> None:
    line = _line(records, name, steps=_without(records, metric))
    assert (line.verdict, line.recorded) == ("not recorded", "99 of 100 steps")


def test_a_reward_that_only_fluctuates_does_not_rise(records: Records) -> None:
    noise = random.Random(1)
    level, flat = 0.0, []
    for number in range(1, 101):  # a random walk that returns to its middle
        level = 0.9 * level + noise.gauss(0, 0.05)
        flat.append(_step(number, level))
    assert _line(records, "reward rises", steps=flat).verdict == "not met"
    few = _line(records, "reward rises", steps=records.steps[:50])
    assert few.verdict == "not met"
    assert "over 50 steps" in few.recorded
    # exactly +0.01 a step
    exact = [_step(number, number / 100) for number in range(1, 101)]
    assert _line(records, "reward rises", steps=exact).recorded.startswith("+1.000 per 100 steps")


def test_engine_and_policy_are_compared_only_where_they_can_be(records: Records) -> None:
    line = _line(records, "engine and policy")
    assert "0.003 nats and 0.0002 in probability per token on average" in line.recorded
    assert "compared in 100 of 100 steps" in line.recorded
    far = _steps(records, **{"rollout/fresh_probs_diff_mean": 0.02})
    assert _line(records, "engine and policy", steps=far).verdict == "not met"
    truncated = _line(records, "engine and policy", samples_among_all=False)
    assert truncated.verdict == "not recorded"
    assert "rollout.top_p" in truncated.recorded


def test_phases_that_miss_a_part_of_the_step_are_not_met(records: Records) -> None:
    line = _line(records, "step time by phase", steps=_steps(records, **{"timing_s/gen": 5.0}))
    assert line.verdict == "not met"  # 8.9 of 10 s
    assert line.recorded == "10.00 s per step: gen 5.00, update_actor 3.90"


def test_memory_beyond_the_plan_is_not_met(records: Records) -> None:
    full = _steps(records, **{"perf/max_memory_allocated_gb": 1000.0})
    assert _line(records, "memory against the plan", steps=full).verdict == "not met"
    of_another = _line(records, "memory against the plan", plan="no plan: unknown model")
    assert (of_another.verdict, of_another.recorded) == ("not recorded", "no plan: unknown model")


def test_an_evaluation_needs_a_reference_within_five_percent(records: Records) -> None:
    assert _line(records, "evaluation", reference=None).verdict == "not recorded"
    assert _line(records, "evaluation", after=None).verdict == "not recorded"
    assert _line(records, "evaluation", reference=Reference(0.87, "x")).verdict == "not met"


@pytest.mark.parametrize("name", FACTS)
def test_missing_facts_are_not_recorded(records: Records, name: str) -> None:
    empty: Any = {} if name == "versions" else ""
    assert _line(records, name, **{name: empty}).verdict == "not recorded"


def test_a_package_without_its_commit_is_not_enough(records: Records) -> None:
    assert _line(records, "commit", commit="0.1.0").verdict == "not recorded"


def test_a_reference_is_a_percentage_a_folder_or_a_run(tmp_path: Path) -> None:
    assert reference_of(tmp_path, "87.5 %") == Reference(0.875, "as given")
    results = write_results(tmp_path / "results", "rrrw")
    (tmp_path / "results" / "summary.json").write_text(json.dumps({"accuracy": 0.75}))
    assert reference_of(tmp_path, str(results)) == Reference(0.75, str(results))
    with pytest.raises(StoreError, match="no accuracy: give percent above 0"):
        reference_of(tmp_path, "840")
    with pytest.raises(StoreError, match="84x is no file or folder, and no run 84x"):
        reference_of(tmp_path, "84x")


def test_a_run_for_acceptance_has_a_hundred_comparable_steps(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.total_steps=60")
    assert require_acceptable(config) == ["train.total_steps=100"]
    assert require_acceptable(small_config(tmp_path, "train.total_steps=200")) == []
    keys = "rollout.top_p=0.9", "sampler.max_staleness=0"
    with pytest.raises(ConfigError, match=r"rollout\.top_p=0\.9, .* set rollout\.top_p=1"):
        require_acceptable(small_config(tmp_path, *keys))


def _accept(store: Path, run: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["runs", "accept", run, "--store", str(store), *options])


def test_the_command_fills_in_finished_and_unfinished_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = small_config(store)
    run = record_run(config)
    steps = [_step(number, number / 100) for number in range(1, 101)]
    path = Path(run.stages["train_policy"].artifact) / METRICS_FILE
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    done = _accept(store, "latest", "--reference", "75", "--output", str(tmp_path / "form.md"))
    assert done.exit_code == 3, done.output  # a CPU's MFU and resident memory are unknown here
    page = (tmp_path / "form.md").read_text()
    assert "| **met** |" in page
    assert "evaluation 75.0 %" in page
    assert "error +0.0 %" in page
    # without an evaluation
    unevaluated = record_run(config, labels=LABELS[:4], flow="train-policy")
    assert _accept(store, "latest").exit_code == 3
    page = (unevaluated.folder / "acceptance.md").read_text()
    assert "the run has no report of an evaluation | **not recorded**" in page


def test_a_run_without_a_training_or_with_a_mistyped_name_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(RuntimeError), Run.start(config):
        raise RuntimeError("the model is gone")
    failed = _accept(tmp_path, "latest")
    assert isinstance(failed.exception, StoreError)
    assert "has no training yet" in str(failed.exception)
    mistyped = _accept(tmp_path, "lates")
    assert "no run lates" in str(mistyped.exception)
