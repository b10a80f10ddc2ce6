"""`dapo simulate CONFIG`: a recipe's step, its alternatives, and corrections by a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dapo_core.draw.report import NotEnoughSignal
from dapo_core.errors import ConfigError
from dapo_core.metrics.log import METRICS_FILE
from eval.report.training import usage_lines
from eval.results.rows import ResultsError
from flows.cli import app
from flows.config import load_config
from tasks.artifacts.artifact import StoreError
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.config.chain import ModelConfig
from tasks.preflight.memory import model_config
from tasks.runs.history import read_run, require_artifact
from tasks.runs.report import advice_of
from tasks.runs.simulate import Simulation, advice, basis_of, describe, setup_of, simulate_recipe
from tests.recorded_runs import record_run, small_config

CONFIGS = PROJECT_ROOT / "configs"
LINE = {
    "response_length/mean": 20.0,
    "response_length/max": 50.0,
    "prompt_length/mean": 8.0,
    "perf/total_num_tokens": 128 * 28.0,
    "sampler/kept_groups": 16.0,
    "sampler/all_wrong_groups": 16.0,
    "sampler/accuracy": 0.4,
    "sampler/finished_response_length": 20.0,
    "sampler/finished_clip_ratio": 0.05,
    "timing_s/gen": 30.0,
    "timing_s/update_actor": 5.0,
    "timing_s/weight_sync": 1.0,
    "timing_s/step": 38.0,
}


def write_log(path: Path, *lines: dict[str, Any]) -> Path:
    rows = [{"step": number, **line} for number, line in enumerate(lines, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def seconds_of(simulation: Simulation) -> dict[str, float]:
    return simulation.own.found.seconds


def test_a_run_corrects_every_phase(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    run = record_run(config)
    metrics = Path(require_artifact(read_run(run.folder), "train_policy").path) / METRICS_FILE
    metrics.unlink()
    write_log(metrics, *[LINE] * 3)
    found = simulate_recipe(config, "latest")
    seconds = seconds_of(found)
    assert seconds["generate"] == pytest.approx(30, rel=0.02)
    assert seconds["update"] == pytest.approx(5, rel=0.05)  # by the simulated tokens
    assert (seconds["publish"], seconds["other"]) == (pytest.approx(1), pytest.approx(2))
    assert "3 steps of latest" in found.about[0] or "2 steps of latest" in found.about[0]
    assert "50% of groups have signal" in found.about[1]
    fewer = small_config(tmp_path / "store", "train.train_prompts=8")  # of 16
    half = seconds_of(simulate_recipe(fewer, "latest"))
    assert half["update"] == pytest.approx(2.5, rel=0.05)
    by_path = seconds_of(simulate_recipe(config, str(metrics)))
    assert by_path == seconds


def test_a_report_has_the_simulators_advice_or_why_there_is_none(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    metrics = write_log(tmp_path / METRICS_FILE, *[LINE] * 3)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(model_config(config.model))))
    expected = simulate_recipe(config, str(metrics)).verdict
    assert advice(config, folder, metrics) == expected
    from_hub = config.model_copy(
        update={"model": ModelConfig(source="huggingface", id="nobody/unpublished")}
    )
    assert advice(from_hub, folder, metrics) == expected
    stopped = write_log(tmp_path / "stopped.jsonl", {"timing_s/step": 3.0})
    assert advice(config, folder, stopped).startswith("no advice: --from")
    (line,) = usage_lines({"advice": expected})
    assert line == f"the simulator on the next training: {expected}"


def test_a_run_with_a_stored_training_names_the_command_instead(tmp_path: Path) -> None:
    """The simulation would take longer than a run with everything stored."""
    config = small_config(tmp_path / "store")
    first, second = record_run(config), record_run(config)
    training = require_artifact(read_run(first.folder), "train_policy")
    write_log(Path(training.path) / METRICS_FILE, *[LINE] * 3)
    metrics = Path(training.path) / METRICS_FILE
    fetched = Path(first.stages["fetch_model"].artifact)
    assert advice_of(first, training) == advice(config, fetched, metrics)
    told = f"dapo simulate {second.config_path} --from {second.folder.name}"
    assert advice_of(second, training) == told


def test_a_log_fits_a_run_whose_engines_ran_ahead(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store", "rollout.schedule=asynchronous")
    waiting = {**LINE, "timing_s/gen": 4.0, "timing_s/step": 12.0}
    log = write_log(tmp_path / "metrics.jsonl", waiting, waiting)
    assert seconds_of(simulate_recipe(config, str(log)))["generate"] == pytest.approx(4, abs=0.3)


def test_alternatives_change_the_keys_of_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # 2 ranks, 1 engine
    config = small_config(tmp_path / "store", "sampler.gen_prompts=16", "sampler.window=0.3")
    found = simulate_recipe(config, num_steps=10)
    own, best = found.own, found.best
    assert own.keys == {}
    assert [one.keys for one in found.alternatives].count(best.keys) == 1
    assert best.found.tokens_per_second > 1.2 * own.found.tokens_per_second
    assert {"sampler.gen_prompts": 64} in [one.keys for one in found.alternatives]  # (1 + 3) x 16
    assert {"rollout.schedule": "asynchronous"}.items() <= best.keys.items()
    assert not any("train.placement" in one.keys for one in found.alternatives)  # on a CPU
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    crowded = simulate_recipe(config, num_steps=2).alternatives
    assert {one.config.rollout.schedule for one in crowded} == {"synchronous"}
    content = json.loads(json.dumps(describe(found)))
    assert [row["is_best"] for row in content["alternatives"]].count(True) == 1
    assert "--set rollout.schedule=asynchronous" in content["verdict"]


def test_devices_are_divided_where_the_recipe_allows(tmp_path: Path) -> None:
    path = CONFIGS / "grpo_qwen3_8b_math.yaml"  # 8 ranks and 8 engines
    found = simulate_recipe(load_config(path), num_steps=2)
    placed = [one for one in found.alternatives if "train.placement" in one.keys]
    # 12 ranks do not divide 256 responses, and 4 have too little memory
    assert {one.config.train.num_ranks for one in placed} == {16}
    assert {one.config.num_devices for one in found.alternatives} == {16}
    apart = [one for one in found.alternatives if "train.placement" not in one.keys]
    assert "asynchronous" in [one.config.rollout.schedule for one in apart]


def test_a_large_step_is_simulated_in_part() -> None:
    config = load_config(CONFIGS / "dapo_qwen2_5_32b_math.yaml")  # 512 x 16 on 32 engines
    setup = setup_of(config, basis_of(config, None, None))
    assert (setup.num_parts, setup.train_prompts, setup.num_engines) == (8, 64, 4)
    assert setup.sampler.gen_prompts == config.sampler.gen_prompts / 8
    small = load_config(CONFIGS / "dapo_qwen3_32b_math.yaml")  # 64 x 16
    assert setup_of(small, basis_of(small, None, None)).num_parts == 1


def test_the_length_of_responses_can_be_given() -> None:
    config = load_config(CONFIGS / "arith_cpu.yaml")
    short, long = (simulate_recipe(config, mean_tokens=mean, num_steps=3) for mean in (5, 40))
    assert "responses of 5 in the mean" in short.about[1]
    assert "responses of 40 in the mean" in long.about[1]
    assert seconds_of(long)["generate"] > 2 * seconds_of(short)["generate"]


def test_what_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    config = small_config(tmp_path / "store")
    with pytest.raises(StoreError, match=r"no such file or folder, and no store .*store\.path"):
        simulate_recipe(config, "nowhere")
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError, match="nowhere is neither a training log nor a folder"):
        simulate_recipe(config, "nowhere")
    with pytest.raises(ConfigError, match=r"not below rollout\.max_response_tokens=56"):
        simulate_recipe(config, mean_tokens=56)
    with pytest.raises(
        NotEnoughSignal, match=r"fewer than \d+ groups .* responses are cut, which counts"
    ) as short:
        simulate_recipe(config, mean_tokens=55.9)  # nearly all are cut, and wrong
    assert "->" not in str(short.value)  # no made-up responses
    empty = tmp_path / "metrics.jsonl"
    empty.write_text("")
    with pytest.raises(ResultsError, match="holds no training step"):
        simulate_recipe(config, str(empty))
    write_log(empty, {"timing_s/step": 1.0})
    with pytest.raises(ConfigError, match="none of 1 steps trained on anything"):
        simulate_recipe(config, str(empty))
    elsewhere = load_config(CONFIGS / "dapo_qwen3_8b_math.yaml", ["train.device_model=null"])
    with pytest.raises(ConfigError, match=r"set train\.device_model to one of Atlas 800T A2"):
        simulate_recipe(elsewhere)
    large = load_config(CONFIGS / "dapo_qwen3_8b_one_gpu.yaml", ["train.device_model=L4"])
    found = simulate_recipe(large, num_steps=2)
    assert "the recipe does not fit: a device needs" in found.about[-1]


def test_times_of_another_engine_are_refused(tmp_path: Path) -> None:
    run = record_run(
        small_config(tmp_path / "store"), labels=["prepare_data", "fetch_model", "train_policy"]
    )
    metrics = Path(require_artifact(read_run(run.folder), "train_policy").path) / METRICS_FILE
    metrics.unlink()
    write_log(metrics, LINE)
    other = small_config(tmp_path / "store", "rollout.engine=vllm")
    with pytest.raises(ConfigError, match=r"another rollout\.engine \(hf, not vllm\)"):
        simulate_recipe(other, run.folder.name)


def test_the_command_writes_a_timeline(tmp_path: Path) -> None:
    arguments = ["simulate", str(CONFIGS / "arith_cpu.yaml"), "--steps", "2", "--output"]
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "the recipe's own" in done.stdout
    assert f"timeline: {tmp_path / 'out' / 'timeline.html'}" in done.stdout
    page = (tmp_path / "out" / "timeline.html").read_text()
    content = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert "<svg" in page
    assert "ranks wait for the draw" in page
    assert "#0" not in page.partition("<svg")[2].partition("</svg>")[0]  # the page's colours
    assert content["verdict"] in done.stdout.replace("\n", "")
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
