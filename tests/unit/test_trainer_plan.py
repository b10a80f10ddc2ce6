"""What `dapo plan` shows for another trainer, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_core.config.loading import dump_config
from dapo_core.errors import ConfigError
from flows.cli import app
from flows.config import Config, load_config
from tasks.external.launch import planned_start
from tasks.preflight.memory import plan_of
from tasks.stage_inputs import training_files

ROOT = Path(__file__).resolve().parents[2]


def plan(config: str, *changes: str) -> str:
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "flows.cli", "plan", f"configs/{config}.yaml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr  # external.python is not there
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_plan_shows_the_command_without_secrets_and_missing_parts(tmp_path: Path) -> None:
    said = plan(
        "grpo_qwen3_8b_math",
        f"store.path={tmp_path}",
        "train.backend=verl",
        "train.max_restarts=5",
        "sampler.max_staleness=1",
        "external.version=0.9.1",
        "external.env={HF_TOKEN: $MY_TOKEN, PYTHONPATH: 'a b'}",
        "external.overrides=[++actor_rollout_ref.actor.freeze_vision_tower=True]",
    )
    lines = [line.strip().removesuffix(" \\") for line in said.splitlines()]
    command = lines[lines.index("train_policy starts verl:") + 1 :]
    assert {'HF_TOKEN="$MY_TOKEN"', "PYTHONPATH='a b'"} <= set(command)
    assert "verl.trainer.main_ppo" in command
    # GRPO's KL loss: conversions of every module are there, whoever is imported first.
    assert "actor_rollout_ref.actor.use_kl_loss=True" in command
    assert "actor_rollout_ref.actor.kl_loss_coef=0.001" in command
    assert "++actor_rollout_ref.actor.freeze_vision_tower=True" in command
    assert "external.python is not set" in said
    keys = said.partition("│ keys")[2].partition("│ serving")[0]
    for name in ("train.max_restarts", "sampler.max_staleness"):
        assert name in keys
    for name in ("algorithm.kl.place", "train.num_ranks", "rollout.group_size"):
        assert name not in keys


def test_the_command_is_shown_without_the_model(tmp_path: Path) -> None:
    recipe = str(ROOT / "configs/grpo_qwen3_8b_math.yaml")
    changes = [
        "train.backend=verl",
        "model.source=path",
        "model.id=null",
        "model.path=models/none",
        f"store.path={tmp_path}",
        "external.version=0.9.1",
    ]
    done = CliRunner().invoke(
        app, ["plan", recipe, *(word for one in changes for word in ("--set", one))]
    )
    assert "train_policy starts verl:" in done.stdout
    assert "verl.trainer.main_ppo" in done.stdout
    assert "models/none" in str(done.exception)  # which still ends the plan


MEGATRON = "actor_rollout_ref.actor.megatron."


def recipe_235b(overrides: str, *sets: str) -> Config:
    """Qwen3-235B-A22B on 128 devices of 64 GiB with verl's Megatron."""
    return load_config(
        ROOT / "configs" / "dapo_qwen3_32b_math.yaml",
        (
            "train.backend=verl",
            "model.path=models/Qwen3-235B-A22B",
            "external.strategy=megatron",
            "external.num_nodes=8",
            f"external.overrides=[{overrides}]",
            "train.num_ranks=128",
            "train.sequence_parallel=1",
            "train.device_model=null",
            "train.micro_batch_tokens=22528",
            "rollout.num_workers=8",
            "rollout.tensor_parallel=16",
            *sets,
        ),
    )


def test_indivisible_splits_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_model_parallel_size=8 does not divide the model's 4 key heads"
    ):
        plan_of(recipe_235b(f"{MEGATRON}tensor_model_parallel_size=8"), gigabytes=64)


def test_own_rows_replace_prepared_ones_and_their_content_is_in_the_key(tmp_path: Path) -> None:
    rows = tmp_path / "images.parquet"
    rows.write_bytes(b"one")
    config = load_config(
        ROOT / "configs/verl_qwen3_vl_30b_geo3k.yaml", [f"external.train_rows={rows}"]
    )
    assert f"data.train_files={rows}" in planned_start(config).argv
    assert (
        f"data.val_files={Path('data/geo3k/test.parquet').absolute()}" in planned_start(config).argv
    )
    with pytest.raises(
        ConfigError, match=r"external\.held_out_rows=data/geo3k/test\.parquet cannot be read"
    ):
        training_files(config)
    config = load_config(
        ROOT / "configs/verl_qwen3_vl_30b_geo3k.yaml",
        [f"external.train_rows={rows}", f"external.held_out_rows={rows}"],
    )
    before = training_files(config)
    rows.write_bytes(b"two")
    assert training_files(config) != before


def test_an_imported_megatron_script_renders_the_same_command(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    words = [
        "algorithm.adv_estimator=grpo data.train_files=/d/train.parquet "
        "data.val_files=/d/test.parquet",
        "data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=8192",
        f"actor_rollout_ref.model.path=models/Qwen3-235B-A22B {actor}.ppo_mini_batch_size=64",
        f"{actor}.strategy=megatron {actor}.use_dynamic_bsz=True "
        f"{actor}.ppo_max_token_len_per_gpu=10240",
        "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8",
        f"{actor}.megatron.tensor_model_parallel_size=4 "
        f"{actor}.megatron.pipeline_model_parallel_size=8",
        f"{actor}.megatron.param_offload=True actor_rollout_ref.ref.megatron.param_offload=True",
        f"+{actor}.megatron.override_transformer_config.recompute_granularity=selective",
        "trainer.n_gpus_per_node=16 trainer.nnodes=8 trainer.total_training_steps=10 "
        "trainer.device=npu",
        "trainer.logger=console trainer.val_before_train=False",
    ]
    script, output = tmp_path / "run.sh", tmp_path / "mine.yaml"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer " + " ".join(words)
    )
    done = CliRunner().invoke(
        app, ["import-config", str(script), "--backend", "verl", "--output", str(output)]
    )
    assert done.exit_code == 0, done.output
    argv = planned_start(load_config(output)).argv
    assert argv[3] == "--config-name=ppo_megatron_trainer"
    assert f"{actor}.megatron.param_offload=True" in argv  # by train.offload_parameters
    assert "++actor_rollout_ref.ref.megatron.param_offload=True" in argv
    recomputed = [word for word in argv if "recompute_granularity" in word]
    assert recomputed == [
        f"++{actor}.megatron.override_transformer_config.recompute_granularity=selective"
    ]
    assert [word for word in argv if "nnodes" in word or "n_gpus" in word] == [
        "trainer.n_gpus_per_node=16",
        "trainer.nnodes=8",
    ]


def test_environment_variables_keep_their_text(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = (
        "data: {train: arithmetic, eval: arithmetic}\nmodel: {source: recipe}\ntrain: {backend: "
        "verl}\n"
    )
    text += "external: {env: {UMASK: 0022, VERSION: 2.10, START: 12:30}}\n"
    recipe.write_text(text, encoding="utf-8")
    config = load_config(recipe, ["external.env.UMASK=0077", "external.env.IDS=1_2"])
    assert config.external.env == {
        "UMASK": "0077",
        "VERSION": "2.10",
        "START": "12:30",
        "IDS": "1_2",
    }
    config = load_config(recipe, ["external.env={UMASK: 0007, DAY: 2026-01-31}"])
    assert config.external.env == {"UMASK": "0007", "DAY": "2026-01-31"}
    recipe.write_text(dump_config(config), encoding="utf-8")
    assert load_config(recipe).external.env == config.external.env
