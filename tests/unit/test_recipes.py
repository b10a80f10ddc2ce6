"""The recipes of configs/: each resolves, sets nothing to its default, and means the numbers worked out here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_core.config.derived import Derived, derive
from dapo_core.config.fields import known_fields
from dapo_core.errors import ConfigError
from flows.config import Config, load_config, resolve_config
from flows.tables import print_derived

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
NAMED = (
    "arith_cpu",
    "dapo_qwen2_5_32b_math",
    "dapo_qwen3_32b_math",
    "dapo_qwen3_8b_choice",
    "grpo_qwen3_8b_math",
)


def load(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def keys_set(path: Path) -> Iterator[str]:
    """The keys that a file sets, as `section.key`."""

    def walk(tree: dict[str, Any], prefix: str) -> Iterator[str]:
        for name, value in tree.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield prefix + name

    return walk(yaml.safe_load(path.read_text(encoding="utf-8")), "")


def test_the_named_recipes_are_there() -> None:
    assert {path.stem for path in RECIPES} >= set(NAMED)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_to_a_table_and_is_named_after_its_file(path: Path) -> None:
    config = load_config(path)
    print_derived(derive(config))
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_key_that_a_recipe_sets_is_its_own_choice(path: Path) -> None:
    config = load_config(path)
    defaults = resolve_config({"data": {"train_path": "t", "eval_path": "e"}, "model": {"path": "m"}})
    assert [key for key in keys_set(path) if value_of(config, key) == value_of(defaults, key)] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_paths_are_relative_and_files_of_ours_exist(path: Path) -> None:
    config = load_config(path)
    named = (config.data.train_path, config.data.eval_path, config.model.path, config.custom_reward.path)
    assert not [name for name in named if name and Path(name).is_absolute()]
    if config.custom_reward.path:
        assert (CONFIGS.parent / config.custom_reward.path).is_file()


def test_derived_numbers_of_the_demo() -> None:
    assert derive(load("arith_cpu")) == Derived(
        num_policy_devices=2,
        num_rollout_devices=1,
        num_devices=3,
        num_data_ranks=2,  # 2 ranks / 1 for each sequence
        num_weight_copies=1,
        prompts_per_step=16,
        responses_per_step=128,  # 16 x 8
        most_response_tokens_per_step=7_168,  # 128 x 56
        most_tokens_per_step=15_360,  # 128 x (64 + 56)
        most_prompts_drawn_per_step=320,  # 32 x 10
        optimizer_steps_per_step=2,  # 16 / 8
        num_optimizer_steps=120,  # 2 x 60
        num_warmup_steps=10,
        num_trained_prompts=960,  # 16 x 60
        responses_per_optimizer_step=64,  # 8 x 8
        responses_per_rank=32,  # 64 / 2
        longest_sequence_tokens=120,  # 64 + 56
        most_tokens_per_device=16_384,
        longest_sequences_per_micro_batch=136,  # 16,384 / 120 = 136.5
        num_responses_decoded_at_once=256,  # 1 x 256
        most_cached_tokens_per_engine=30_720,  # 256 x 120
    )


def test_derived_numbers_of_the_papers_recipe() -> None:
    assert derive(load("dapo_qwen2_5_32b_math")) == Derived(
        num_policy_devices=64,
        num_rollout_devices=64,
        num_devices=128,  # 16 nodes x 8
        num_data_ranks=16,  # 64 / 4
        num_weight_copies=1,
        prompts_per_step=512,
        responses_per_step=8_192,  # 512 x 16
        most_response_tokens_per_step=167_772_160,  # 8,192 x 20,480
        most_tokens_per_step=184_549_376,  # 8,192 x 22,528
        most_prompts_drawn_per_step=15_360,  # 1,536 x 10
        optimizer_steps_per_step=16,  # 512 / 32: the paper's 16 gradient updates for each rollout step
        num_optimizer_steps=3_200,  # 16 x 200
        num_warmup_steps=320,  # the paper's 20 rollout steps x 16
        num_trained_prompts=102_400,  # 512 x 200
        responses_per_optimizer_step=512,  # 32 x 16: the paper's mini-batch
        responses_per_rank=32,  # 512 / 16
        longest_sequence_tokens=22_528,  # 2,048 + 16,384 + 4,096
        most_tokens_per_device=22_528,
        longest_sequences_per_micro_batch=4,  # 22,528 x 4 / 22,528
        num_responses_decoded_at_once=16_384,  # 64 x 256
        most_cached_tokens_per_engine=5_767_168,  # 256 x 22,528
    )


def test_derived_numbers_of_qwen3_32b() -> None:
    assert derive(load("dapo_qwen3_32b_math")) == Derived(
        num_policy_devices=32,
        num_rollout_devices=32,
        num_devices=64,  # 4 nodes x 16 dies
        num_data_ranks=8,  # 32 / 4
        num_weight_copies=1,
        prompts_per_step=64,
        responses_per_step=1_024,  # 64 x 16
        most_response_tokens_per_step=20_971_520,  # 1,024 x 20,480
        most_tokens_per_step=23_068_672,  # 1,024 x 22,528
        most_prompts_drawn_per_step=1_920,  # 192 x 10
        optimizer_steps_per_step=2,  # 64 / 32
        num_optimizer_steps=400,  # 2 x 200
        num_warmup_steps=20,  # 10 x 2
        num_trained_prompts=12_800,  # 64 x 200
        responses_per_optimizer_step=512,  # 32 x 16
        responses_per_rank=64,  # 512 / 8
        longest_sequence_tokens=22_528,  # 2,048 + 20,480
        most_tokens_per_device=5_632,
        longest_sequences_per_micro_batch=1,  # 5,632 x 4 / 22,528
        num_responses_decoded_at_once=8_192,  # 32 x 256
        most_cached_tokens_per_engine=5_767_168,  # 256 x 22,528
    )


@pytest.mark.parametrize(
    ("name", "num_prompts_drawn"),
    [
        ("dapo_qwen3_8b_choice", 1_920),  # 192 x 10
        ("grpo_qwen3_8b_math", 640),  # 64 x 10, of which the first 64 are enough
    ],
)
def test_derived_numbers_of_qwen3_8b(name: str, num_prompts_drawn: int) -> None:
    assert derive(load(name)) == Derived(
        num_policy_devices=8,
        num_rollout_devices=8,
        num_devices=16,  # one node
        num_data_ranks=4,  # 8 / 2
        num_weight_copies=1,
        prompts_per_step=64,
        responses_per_step=1_024,  # 64 x 16
        most_response_tokens_per_step=8_388_608,  # 1,024 x 8,192
        most_tokens_per_step=10_485_760,  # 1,024 x 10,240
        most_prompts_drawn_per_step=num_prompts_drawn,
        optimizer_steps_per_step=4,  # 64 / 16
        num_optimizer_steps=400,  # 4 x 100
        num_warmup_steps=40,  # 10 x 4
        num_trained_prompts=6_400,  # 64 x 100
        responses_per_optimizer_step=256,  # 16 x 16
        responses_per_rank=64,  # 256 / 4
        longest_sequence_tokens=10_240,  # 2,048 + 8,192
        most_tokens_per_device=10_240,
        longest_sequences_per_micro_batch=2,  # 10,240 x 2 / 10,240
        num_responses_decoded_at_once=2_048,  # 8 x 256
        most_cached_tokens_per_engine=2_621_440,  # 256 x 10,240
    )


def test_sharding_within_nodes_makes_copies() -> None:
    derived = derive(load("dapo_qwen2_5_32b_math", "train.fsdp_size=8"))
    assert derived.num_weight_copies == 8  # 64 / 8
    assert derived.num_data_ranks == 16  # sharding does not change who sees which response


def test_grpo_differs_from_its_dapo_sibling_in_the_algorithm_and_the_task_alone() -> None:
    grpo, dapo = load("grpo_qwen3_8b_math"), load("dapo_qwen3_8b_choice")
    differing = {key for key in known_fields(Config) if value_of(grpo, key) != value_of(dapo, key)}
    task = {"run.name", "data.train_path", "data.eval_path", "custom_reward.path", "evaluate.benchmark"}
    assert differing - task == {
        "algorithm.clip_ratio_high",
        "algorithm.loss_aggregation",
        "algorithm.kl.place",
        "reward.overlong.enabled",
        "sampler.dynamic",
        "sampler.gen_prompts",
    }
    assert grpo.algorithm.clip_ratio_high == grpo.algorithm.clip_ratio_low
    assert grpo.sampler.gen_prompts == grpo.train.train_prompts


def test_the_papers_recipe_is_the_defaults_but_for_hardware_warm_up_and_evaluation() -> None:
    sections = {key.partition(".")[0] for key in keys_set(CONFIGS / "dapo_qwen2_5_32b_math.yaml")}
    assert sections.isdisjoint({"algorithm", "reward", "sampler"})
    paper = load("dapo_qwen2_5_32b_math")
    assert (paper.train.learning_rate, paper.evaluate.temperature, paper.evaluate.top_p) == (1e-6, 1.0, 0.7)
    assert paper.rollout.max_response_tokens - paper.reward.overlong.buffer_tokens == 16_384
    assert paper.algorithm.kl.place == "off"


def test_a_placeholder_in_a_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path = '<MODEL>' still holds a placeholder"):
        load("dapo_qwen3_32b_math", "model.path=<MODEL>")


@pytest.mark.parametrize(
    ("response", "ground_truth", "is_right"),
    [
        (r"<think>\boxed{A}?</think> It is \boxed{D}.", "D", True),
        (r"<think>\boxed{D}</think> It is \boxed{A}.", "D", False),  # the thinking's box does not count
        (r"<think>so \boxed{D}", "D", False),  # cut while thinking
        (r"It is \boxed{D}.", "D", True),  # a model that does not think aloud
        (r"\boxed{A}\boxed{B}\boxed{D}", "ABD", True),
        (r"\boxed{D, B and A}", "ABD", True),
        (r"\boxed{ABD}", "A,B,D", True),
        (r"\boxed{A}\boxed{B}", "ABD", False),  # not all
        (r"\boxed{ABCD}", "ABD", False),  # one too many
        (r"\boxed{D. Bond}", "D", True),  # the B of a word is no option
        ("The answer is D.", "D", False),  # no box
        (r"\boxed{}", "D", False),
        (r"\boxed{H}", "D", False),
        (r"\boxed{D} " + 300 * ".", "D", False),  # further than 300 characters from the end
    ],
)
def test_the_finance_reward(response: str, ground_truth: str, is_right: bool) -> None:
    custom = load("dapo_qwen3_8b_choice").custom_reward
    spec = importlib.util.spec_from_file_location("finance_choice", CONFIGS.parent / str(custom.path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    verdict = getattr(module, custom.name)("finance", response, ground_truth, None)
    assert (verdict["score"], verdict["acc"]) == ((1.0, True) if is_right else (-1.0, False))
