"""Another trainer's key in a recipe is refused with our key, the converted value and its unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from flows.config import load_config
from flows.keys import explain
from tests.from_verl import page

# 64 prompts per step in two optimizer steps, 2,048 + 20,480 tokens, sequences over 8 ranks.
RECIPE = Path(__file__).resolve().parents[2] / "configs/dapo_qwen3_32b_math.yaml"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def refused(*sets: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(RECIPE, sets)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (
            "data.train_batch_size=64",
            "verl's; here train.train_prompts=64: Prompts per training step in both.",
        ),
        ("data.gen_batch_size=192", "here sampler.gen_prompts=192: Prompts per draw"),
        ("data.max_prompt_length=1024", "here data.max_prompt_tokens=1024"),
        ("data.max_response_length=8192", "here rollout.max_response_tokens=8192"),
        ("data.truncation=left", "here data.too_long=truncate_left"),
        ("data.train_files=[a.parquet, b.parquet]", 'here data.train=["a.parquet", "b.parquet"]'),
        (f"{ROLLOUT}.n=16", "here rollout.group_size=16: Responses per prompt in both."),
        (f"{ROLLOUT}.tensor_model_parallel_size=4", "here rollout.tensor_parallel=4"),
        (f"{ROLLOUT}.gpu_memory_utilization=0.7", "here rollout.memory_utilization=0.7"),
        (f"{ROLLOUT}.enforce_eager=true", "here rollout.engine_args.enforce_eager=true"),
        (f"{ROLLOUT}.val_kwargs.n=4", "here validation.num_samples="),
        (
            f"{ACTOR}.ppo_mini_batch_size=32",
            "here train.mini_prompts=32: Prompts per optimizer step in both",
        ),
        # 2 x (2,048 + 20,480) / 8
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
            "here train.micro_batch_tokens=5632: 2 responses of at most",
        ),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=5632",
            "here train.micro_batch_tokens=5632: Tokens per device",
        ),
        (f"{ACTOR}.ppo_epochs=2", "here train.passes=2"),
        (f"{ACTOR}.optim.lr=1e-6", "here train.learning_rate=1e-06"),
        (
            f"{ACTOR}.optim.lr_warmup_steps=10",
            "here train.warmup_steps=20: 10 training steps x 2 optimizer steps",
        ),
        (f"{ACTOR}.use_kl_loss=true", "here algorithm.kl.place=loss: Two switches become one key."),
        (f"{ACTOR}.clip_ratio_c=10", "here algorithm.clip_ratio_dual=10"),
        (f"{ACTOR}.grad_clip=0.5", "here train.max_grad_norm=0.5"),
        (f"{ACTOR}.fsdp_config.fsdp_size=16", "here train.fsdp_size=16"),
        (
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            "not supported here: Megatron needs train.backend=verl.",
        ),
        ("algorithm.adv_estimator=gae", "not supported here: known are grpo, rloo."),
        ("algorithm.filter_groups.enable=true", "here sampler.dynamic=true"),
        ("algorithm.filter_groups.max_num_gen_batches=-1", "here sampler.max_num_gen_batches=0"),
        (
            "algorithm.kl_ctrl.kl_coef=0.1",
            "its key is algorithm.kl.coefficient: algorithm.use_kl_in_reward is off",
        ),
        ("reward_model.overlong_buffer.len=4096", "here reward.overlong.buffer_tokens=4096"),
        ("custom_reward_function.path=/a.py", "here custom_reward.path=/a.py"),
        (
            "trainer.n_gpus_per_node=16",
            "here train.num_ranks, rollout.num_workers, train.placement: Devices per node",
        ),
        ("trainer.test_freq=-1", "here validation.every=0: Training steps in both"),
        ("trainer.save_freq=5", "here checkpoint.save_every=5"),
        ("trainer.total_training_steps=100", "here train.total_steps=100"),
        ("trainer.logger=[console, wandb]", 'here train.trackers=["wandb"]'),
        ("trainer.critic_warmup=0", "verl's; not needed here: DAPO has no critic."),
        ("rl_config.n_samples_per_prompt=16", "MindSpeed-RL's; here rollout.group_size=16"),
        (
            "rl_config.mini_batch_size=32",
            "here train.mini_prompts=32: Prompts per optimizer step in both",
        ),
        ("megatron_training.global_batch_size=64", "MindSpeed-RL's; here sampler.gen_prompts=64"),
        ("megatron_training.train_iters=100", "here train.total_steps=100"),
        ("megatron_training.save_interval=10", "here checkpoint.save_every=10"),
        ("rl_config.rollout_max_tokens=2048", "here rollout.max_response_tokens=2048"),
        ("rl_config.filter_groups_enable=true", "here sampler.dynamic=true"),
        ("rl_config.filter_groups_max_batches=5", "here sampler.max_num_gen_batches=5"),
        ("rl_config.overlong_buffer=512", "here reward.overlong.buffer_tokens=512"),
        ("rl_config.clip_ratio_high=0.28", "here algorithm.clip_ratio_high=0.28"),
        ("rl_config.entropy_coeff=0.0", "here algorithm.entropy_coefficient=0.0"),
        ("rl_config.token_level_loss=true", "here algorithm.loss_aggregation=token-mean"),
        ("actor_config.lr=1e-6", "here train.learning_rate=1e-06"),
        ("actor_config.weight_decay=0.01", "here train.weight_decay=0.01"),
        ("actor_config.clip_grad=1.0", "here train.max_grad_norm=1.0"),
        ("generate_config.sampling_config.temperature=0.6", "here rollout.temperature=0.6"),
        ("generate_config.infer_tensor_parallel_size=4", "here rollout.tensor_parallel=4"),
        ("generate_config.gpu_memory_utilization=0.8", "here rollout.memory_utilization=0.8"),
    ],
)
def test_a_foreign_key_is_refused_with_ours(typed: str, answer: str) -> None:
    first, hint = refused(typed)
    assert first.startswith(f"unknown key {typed.partition('=')[0]} is ")
    assert answer in first
    assert "dapo import-config" in hint


def test_keys_that_belong_together_are_converted_together() -> None:
    *answers, _ = refused("trainer.n_gpus_per_node=16", "trainer.nnodes=4")
    assert len(answers) == 2
    assert all("here train.num_ranks=64" in answer for answer in answers)


def test_our_misspelt_keys_get_a_suggestion() -> None:
    [first, second, _] = refused("train.learnig_rate=1", "data.train_batch_size=64")
    answers = sorted([first, second])
    assert answers[0].startswith(
        "unknown key data.train_batch_size is verl's; here train.train_prompts=64"
    )
    assert answers[1] == "unknown key train.learnig_rate = 1 (did you mean train.learning_rate?)"
    assert refused("run.bogus=1") == [
        "unknown key run.bogus = 1; `dapo config show` lists all keys"
    ]


def test_explaining_a_foreign_key_names_ours() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown key data\.train_batch_size is verl's; here train\.train_prompts: P",
    ):
        explain("data.train_batch_size")
    with pytest.raises(
        ConfigError, match=r"unknown key trainer\.critic_warmup is verl's: DAPO has no critic\."
    ):
        explain("trainer.critic_warmup")


def test_docs_from_verl_is_current() -> None:
    written = (RECIPE.parents[1] / "docs/from-verl.md").read_text(encoding="utf-8")
    assert written == page(), "type: make from-verl"
