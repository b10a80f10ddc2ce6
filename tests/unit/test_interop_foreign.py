"""Another trainer's key in a recipe is refused with our key and its unit."""

from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from flows.config import load_config
from flows.keys import explanation
from tests.from_verl import page

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
        ("data.truncation=left", "here data.too_long: left becomes truncate_left"),
        (f"{ROLLOUT}.enforce_eager=true", "here rollout.engine_args.enforce_eager=true"),
        (
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
            "here train.micro_batch_tokens: Responses per device become tokens per device",
        ),
        (f"{ACTOR}.optim.lr=1e-6", "here train.learning_rate=1e-06"),
        (f"{ACTOR}.use_kl_loss=true", "here algorithm.kl.place: Two switches become one key."),
        (
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            "not needed here: Megatron's layout and kernels.",
        ),
        (
            "trainer.n_gpus_per_node=16",
            "here train.num_ranks, rollout.num_workers, train.placement, train.ray_address: Device",
        ),
        ("trainer.critic_warmup=0", "verl's; not needed here: DAPO has no critic."),
        ("rl_config.n_samples_per_prompt=16", "MindSpeed-RL's; here rollout.group_size=16"),
    ],
)
def test_a_foreign_key_is_refused_with_ours(typed: str, answer: str) -> None:
    first, hint = refused(typed)
    assert first.startswith(f"unknown key {typed.partition('=')[0]} is ")
    assert answer in first
    assert "dapo import-config" in hint


def test_our_misspelt_keys_get_a_suggestion() -> None:
    [first, second, _] = refused("train.learnig_rate=1", "data.train_batch_size=64")
    answers = sorted([first, second])
    assert answers[0].startswith(
        "unknown key data.train_batch_size is verl's; here train.train_prompts=64"
    )
    assert answers[1] == "unknown key train.learnig_rate = 1 (did you mean train.learning_rate?)"


def test_explaining_a_foreign_key_explains_ours() -> None:
    said, *ours = explanation("data.train_batch_size")
    assert said.startswith("data.train_batch_size is verl's; here train.train_prompts: P")
    assert ours == explanation("train.train_prompts")
    (said,) = explanation("trainer.critic_warmup")
    assert said.startswith("trainer.critic_warmup is verl's: DAPO has no critic.")
    (_, first, *_) = explanation("actor_rollout_ref.rollout.enforce_eager")
    assert first.startswith("rollout.engine_args = ")


def test_docs_from_verl_is_current() -> None:
    written = (RECIPE.parents[1] / "docs/from-verl.md").read_text(encoding="utf-8")
    assert written == page(), "type: make from-verl"
