"""Effects of training options on the metrics of one or two steps."""

import importlib
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dapo_core import trainer
from dapo_core.checkpoint.folder import latest_checkpoint
from dapo_core.checkpoint.state import read_state
from dapo_core.draw.groups import Group, GroupRequest
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import train
from durable import read_json_lines
from flows.config import load_config
from tests.in_process import without_ray
from tests.metric_names import NAME_VALUE
from tests.trainings import World, config_of

RECIPES = Path(__file__).resolve().parents[2] / "configs"
NUM_RESPONSES = 16  # 4 prompts x 4 responses
LIMIT = 24  # tokens of a response
# The barely trained model gives no right answers, and equal rewards give no signal: score by
# length.
LENGTH_SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) % 3, "acc": 0}
"""
ASCII_SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(each.isascii() for each in solution_str) / (len(solution_str) or 1)}
"""
ONE_UPDATE = {"mini_prompts": 4, "learning_rate": 1e-2, "warmup_steps": 0}
NO_OVERLONG = {"overlong": {"enabled": False}}

Start = Callable[..., list[dict[str, float]]]


@pytest.fixture
def start(world: World, request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Train with the given keys, by section; returns the lines of metrics.jsonl. A single rank runs
    without Ray.

    `scorer` is the source code for custom_reward.path, `name` the output folder, `model` the
    folder of another model, `replay` the output whose draws to train on.
    """

    def run(
        scorer: str | None = None,
        name: str = "run",
        model: Path = world.model,
        replay: Path | None = None,
        **changes: dict[str, Any],
    ) -> list[dict[str, float]]:
        changes["train"] = {"num_ranks": 1, "total_steps": 1, **changes.get("train", {})}
        is_single = changes["train"]["num_ranks"] == 1
        if not is_single:
            changes["train"]["ray_address"] = request.getfixturevalue("ray_address")
        if scorer is not None:
            (tmp_path / "scorer.py").write_text(scorer)
            changes["custom_reward"] = {"path": str(tmp_path / "scorer.py")}
        with without_ray() if is_single else nullcontext():
            train(config_of(**changes), world.data, model, tmp_path / name, replay=replay)
        return read_json_lines(tmp_path / name / METRICS_FILE)

    return run


def test_kl_in_the_loss(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """With leave-one-out advantages and a constant loss divisor."""
    caplog.set_level(logging.INFO, "dapo_core.trainer")
    first, second = lines = start(
        LENGTH_SCORER,
        algorithm={
            "advantage": "rloo",
            "loss_aggregation": "seq-mean-token-sum-norm",
            "loss_norm_tokens": LIMIT,
            "kl": {"place": "loss", "coefficient": 0.5, "estimator": "low_var_kl+"},
            "rollout_correction": {"importance": "off"},
        },
        reward={**NO_OVERLONG, "mask_truncated": True},
        train={**ONE_UPDATE, "total_steps": 2},
    )
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-9)  # the policy still is the reference
    assert second["actor/kl_loss"] > 1e-4
    assert first["actor/kl_coef"] == 0.5
    for line in lines:
        assert line["timing_s/ref"] > 0
        num_truncated = line["response_length/clip_ratio"] * NUM_RESPONSES
        assert 0 < num_truncated < NUM_RESPONSES
        num_tokens = line["perf/trained_response_tokens"]
        assert num_tokens == line["sampler/kept_tokens"] - num_truncated * LIMIT
        # rewards 0, 1 or 2: R - (sum of the other three) / 3 is a third of a whole number
        for name in ("min", "max"):
            thirds = 3 * line[f"critic/advantages/{name}"]
            assert thirds == pytest.approx(round(thirds), abs=1e-5)
        # ratios are 1, so the loss is that of -A: a mean over tokens, times tokens / (responses x
        # constant)
        norm = num_tokens / ((NUM_RESPONSES - num_truncated) * LIMIT)
        assert line["actor/pg_loss"] == pytest.approx(
            -line["critic/advantages/mean"] * norm, rel=1e-4, abs=1e-6
        )
    printed = [record.message for record in caplog.records if record.message.startswith("step:")]
    for text, line in zip(printed, lines, strict=True):
        expected = {
            name: value
            for name, value in line.items()
            if name not in ("wall_time", "policy_version")
        }
        assert {name: float(value) for name, value in NAME_VALUE.findall(text)} == expected


def test_kl_in_the_reward_with_an_adaptive_coefficient(start: Start) -> None:
    """Responses have one token, so the KL sum of a response is its mean."""
    adaptive = {"controller": "adaptive", "target": 0.1, "horizon": 32.0}
    lines = start(
        LENGTH_SCORER,
        algorithm={"kl": {"place": "reward", "coefficient": 2.0, "estimator": "mse", **adaptive}},
        reward=NO_OVERLONG,
        rollout={"max_response_tokens": 1},
        train={**ONE_UPDATE, "total_steps": 3},
    )
    assert [line["response_length/mean"] for line in lines] == [1, 1, 1]
    kl, coefficient = [line["actor/reward_kl_penalty"] for line in lines], 2.0
    assert kl[0] == pytest.approx(0, abs=1e-9)  # the policy still is the reference
    assert min(kl[1:]) > 1e-4
    for line in lines:
        assert line["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-12)
        penalty = coefficient * line["actor/reward_kl_penalty"]
        assert line["critic/rewards/mean"] == pytest.approx(
            line["critic/score/mean"] - penalty, rel=1e-6
        )
        assert line["timing_s/ref"] > 0
        assert "actor/kl_loss" not in line
        error = min(max(line["actor/reward_kl_penalty"] / 0.1 - 1, -0.2), 0.2)
        coefficient *= 1 + error * NUM_RESPONSES / 32  # Ziegler et al., section 2.2


def test_rollout_correction_applies_to_a_partial_step(start: Start) -> None:
    """The engine computes in bfloat16; groups with an even answer give no signal."""
    (line,) = start(
        LENGTH_SCORER.replace("len(solution_str)", "(int(ground_truth) % 2) * len(solution_str)"),
        algorithm={
            "rollout_correction": {
                "importance": "token",
                "importance_max": 0.5,
                "mask": "sequence",
                "mask_low": 0.9995,
                "mask_high": 1.0005,
            }
        },
        reward=NO_OVERLONG,
        sampler={
            "gen_prompts": 8,
            "dynamic": True,
            "metric": "score",
            "max_num_gen_batches": 1,
            "on_exhausted": "train_partial",
        },
        rollout={"dtype": "bfloat16"},
        train={"train_prompts": 8, "mini_prompts": 8},
    )
    assert line["sampler/kept_groups"] + line["sampler/all_wrong_groups"] == 8
    assert 0 < line["sampler/kept_groups"] < 8
    assert line["policy_version"] == 1
    assert 0 < line["perf/trained_response_tokens"] < line["sampler/kept_tokens"]
    assert 1e-6 < line["rollout/k3_kl"] < 1e-3
    # every ratio is near 1, so every importance weight is its limit; tokens of masked responses are
    # not divided by
    assert line["critic/advantages/mean"] != pytest.approx(0, abs=1e-3)
    assert line["actor/pg_loss"] == pytest.approx(-0.5 * line["critic/advantages/mean"], rel=1e-5)


def test_a_single_update_step_reports_all_metrics_without_an_extra_pass(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps, the later ones with stale tokens; then the same with the pass."""
    settings: dict[str, Any] = {
        "run": {"deterministic": True},
        "reward": NO_OVERLONG,
        "sampler": {"gen_prompts": 12, "metric": "score"},
        "rollout": {"dtype": "bfloat16"},
        "train": {**ONE_UPDATE, "total_steps": 3},
    }
    lines = start(LENGTH_SCORER, **settings)
    monkeypatch.setattr(type(config_of()), "anchors_before_updates", True)
    anchored = start(LENGTH_SCORER, "anchored", **settings)
    for line, with_pass in zip(lines, anchored, strict=True):
        assert "timing_s/old_log_prob" not in line
        assert with_pass["timing_s/old_log_prob"] > 0
        for name in with_pass:
            if not name.startswith(("timing", "perf/", "wall_time")):
                assert line[name] == with_pass[name], name
        assert line["rollout/k3_kl"] > 1e-6
        assert line["actor/entropy"] > 0
    first, *later = lines
    assert first["sampler/staleness/token_ratio"] == 0
    assert "rollout/importance_mean" not in first
    for line in later:
        assert 0 < line["sampler/staleness/token_ratio"] <= 1
        assert 0 < line["rollout/importance_mean"] <= 2
        assert 0 <= line["rollout/importance_truncated_ratio"] < 1


def test_an_asynchronous_training_samples_while_it_updates(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps, in two parts; then its recorded draws again, which give the same bits."""
    settings: dict[str, Any] = {
        "run": {"deterministic": False},
        "reward": NO_OVERLONG,
        "sampler": {"gen_prompts": 12, "metric": "score", "max_staleness": 2},
        "rollout": {"schedule": "asynchronous"},
        "train": {**ONE_UPDATE, "total_steps": 2, "record_draws": True},
        "checkpoint": {"save_every": 1, "keep_last": 5},
    }
    start(LENGTH_SCORER, **settings)
    state = read_state(tmp_path / "run" / "checkpoints" / "step_000002")
    ahead: list[Group | GroupRequest] = [*state.surplus, *state.unfinished]
    assert max(item.num_response_tokens for item in ahead) > 0  # sampled during the update

    settings["train"]["total_steps"] = 5
    lines = start(LENGTH_SCORER, **settings)
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4, 5]
    fates = ("kept", "all_right", "all_wrong", "all_equal", "surplus")
    for line, after in pairwise(lines):
        assert 0 < after["sampler/staleness/max"] <= 2
        if after["step"] != 3:  # resumed: the checkpoint's tokens are carried in
            carried = line["sampler/surplus_tokens"] + line["sampler/carried_out_tokens"]
            went = sum(after[f"sampler/{fate}_tokens"] for fate in fates)
            went += after["sampler/carried_out_tokens"]
            assert after["perf/generated_tokens"] + carried == went
        assert after["rollout/importance_mean"] > 0

    settings["rollout"] = {}
    start(LENGTH_SCORER, "again", replay=tmp_path / "run", **settings)
    monkeypatch.syspath_prepend(str(RECIPES.parent / "bench"))
    crash = importlib.import_module("crash")
    same = crash.differences(tmp_path / "run", tmp_path / "again", crash.OF_THE_DRAW)
    assert same == []
    damaged = tmp_path / "run" / "draws" / "step_000005" / "carried_tokens.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"draw .*step_000005 cannot be read .*steps=4"):
        start(LENGTH_SCORER, "damaged", replay=tmp_path / "run", **settings)
    settings["train"]["total_steps"] = 6
    with pytest.raises(ConfigError, match="draws of 5 steps, and not that of step 6"):
        start(LENGTH_SCORER, "longer", replay=tmp_path / "run", **settings)


def test_time_in_the_driver_shows_in_the_phases_of_a_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function that a step calls in the driver takes half a second more."""
    delayed = ("draw_metrics", "shuffled", "build_batch", "check_sampled_alike", "weigh")
    for name in (*delayed, "training_metrics", "probe_difference", "TrainerState"):
        call = getattr(trainer, name)
        monkeypatch.setattr(
            trainer,
            name,
            lambda *given, _call=call, **named: (
                time.sleep(0.5) or _call(*given, **named)  # type: ignore[func-returns-value]
            ),
        )
    lines = start(LENGTH_SCORER, sampler={"metric": "score"}, train={"total_steps": 2})
    unseen = []
    for line in lines:
        phases = [each for each in line if each.startswith("timing_s/") and each != "timing_s/step"]
        unseen.append(line["timing_s/step"] - sum(line[phase] for phase in phases))
        assert line["timing_s/step"] > 8 * 0.5
    assert min(unseen) < 0.25, unseen  # another process may delay one step


def test_engine_log_probs_can_be_the_anchor(start: Start) -> None:
    """Two updates without a separate pass; the engine computes in bfloat16."""
    (line,) = start(
        LENGTH_SCORER,
        algorithm={"old_log_probs": "engine"},
        reward=NO_OVERLONG,
        sampler={"metric": "score"},
        rollout={"dtype": "bfloat16"},
        train={"learning_rate": 1e-2, "warmup_steps": 0},
    )
    assert line["policy_version"] == 2
    assert "timing_s/old_log_prob" not in line
    assert line["actor/entropy"] > 0
    assert line["rollout/k3_kl"] > 1e-6
    # The anchor is the engine's, so that the loss's mean log-ratio is the mismatch of the passes
    # themselves
    assert line["actor/ppo_kl"] == pytest.approx(line["rollout/kl"], rel=1e-4)


def test_the_grpo_recipe_trains(start: Start) -> None:
    """The recipe's differences from DAPO, with two optimizer steps and a custom scorer."""
    recipe = load_config(RECIPES / "grpo_qwen3_8b_math.yaml")
    (line,) = start(
        LENGTH_SCORER,
        algorithm=recipe.algorithm.model_dump(),
        reward=recipe.reward.model_dump(),
        sampler={"dynamic": recipe.sampler.dynamic},
        train={"learning_rate": 1e-2, "warmup_steps": 0},
    )
    # all have acc 0
    assert (line["sampler/kept_groups"], line["sampler/all_wrong_groups"]) == (4, 0)
    assert (line["critic/score/min"], line["critic/score/max"]) == (0, 2)
    assert line["reward/overlong_ratio"] == 0
    assert line["critic/rewards/mean"] == line["critic/score/mean"]
    assert line["response_length/clip_ratio"] > 0  # responses that DAPO would penalise
    assert line["policy_version"] == 2
    assert line["actor/kl_coef"] == 0.001
    # in the second update the policy differs from the reference
    assert line["actor/kl_loss"] > 1e-4
    assert line["actor/ppo_kl"] > 1e-4  # and from its anchor
    assert line["actor/pg_clipfrac"] > 0


def test_compat_verl_trains_on_rounding_noise(start: Start) -> None:
    """Seven rewards of -1.4 have a std of 2e-16 in float64, so verl's filter keeps the group."""
    (line,) = start(
        "def compute_score(**_):\n    return -1.4\n",
        algorithm={"compat": "verl"},
        reward=NO_OVERLONG,
        sampler={"gen_prompts": 2, "dynamic": True, "metric": "score", "max_num_gen_batches": 1},
        rollout={"group_size": 7},
        train={"train_prompts": 2, "mini_prompts": 2},
    )
    assert line["sampler/kept_groups"] == 2
    assert line["critic/rewards/min"] == line["critic/rewards/max"] == -1.4
    # in float32: -1.4 - mean is one rounding, 1.2e-7, and so is the deviation: 1.2e-7 / (1.3e-7 +
    # 1e-6)
    assert abs(line["critic/advantages/mean"]) == pytest.approx(0.106, abs=0.02)
    # ratios are 1 and advantages equal: the mean over means over micro-batches is that of one token
    assert line["actor/pg_loss"] == pytest.approx(-line["critic/advantages/mean"], rel=1e-4)
    assert line["actor/grad_norm"] > 0.01


def test_a_skipped_step_advances_the_data_but_not_the_policy(start: Start, tmp_path: Path) -> None:
    (line,) = start(
        sampler={"dynamic": True, "max_num_gen_batches": 1, "on_exhausted": "skip_step"}
    )
    assert (line["sampler/all_wrong_groups"], line["sampler/kept_groups"]) == (6, 0)
    assert line["policy_version"] == 0
    assert line["perf/throughput"] == 0
    assert [name for name in line if name.startswith(("actor/", "critic/"))] == []
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert read_state(checkpoint).prompt_position == 6
