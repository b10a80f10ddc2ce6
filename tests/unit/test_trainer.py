"""Parts of the training step that need no rank and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dapo_core.batch import build_batch
from dapo_core.data import Prompt, PromptStream
from dapo_core.identity import training_identity
from dapo_core.metrics import response_metrics
from dapo_core.trainer import Trainer
from flows.config import Config
from tasks.stages import TRAIN_POLICY
from tests.batches import UNSCORED, make_group
from tests.configs import make_config
from tests.tiny_models import build_tiny_qwen3

PROMPTS = [Prompt(index, (index + 5,), "arithmetic", "1") for index in range(7)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model"))


def _trainer(model_path: Path, **sections: dict[str, Any]) -> Trainer:
    config = make_config(model_path, **sections)
    cluster: Any = SimpleNamespace(policy=SimpleNamespace(device_name=lambda: "cpu"), rollouts=None)
    stream = PromptStream(PROMPTS, config.run.seed, config.data.shuffle)
    return Trainer(config, cluster, stream, model_path, model_path, training_identity(config, stream, model_path))


def _stage_keys(config: Config) -> set[str]:
    """Keys that the stage's cache key holds, as section.key."""

    def names(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from names(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return set(names(TRAIN_POLICY.key(config, {}).config))


def test_attempts_share_whatever_the_cache_key_says_changes_the_training(model_path: Path) -> None:
    trainer = _trainer(model_path)
    # A training may become longer; what is measured and kept on the way does not change it.
    watched = {"validation.every", "validation.num_prompts", "checkpoint.keep_best"}
    assert _stage_keys(trainer.config) - trainer.identity.keys() == {"train.total_steps", *watched}


def test_another_order_of_the_data_is_another_training(model_path: Path) -> None:
    shuffled, in_order = (_trainer(model_path, data={"shuffle": flag}).identity for flag in (True, False))
    assert {name for name in shuffled if shuffled[name] != in_order[name]} == {"data.shuffle"}


def test_a_scorer_edited_while_training_goes_on_is_another_one(model_path: Path, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def compute_score(*_): return 1", encoding="utf-8")
    trainer = _trainer(model_path, custom_reward={"path": str(scorer)})
    begun = dict(trainer.identity)
    scorer.write_text("def compute_score(*_): return 2", encoding="utf-8")
    assert trainer.identity == begun
    assert _trainer(model_path, custom_reward={"path": str(scorer)}).identity != begun


def test_mini_batches_do_not_sort_groups_by_how_soon_they_finished(model_path: Path) -> None:
    """A mini-batch of the shortest responses would give each of their tokens more weight than long ones have."""
    trainer = _trainer(model_path, run={"seed": 3})
    as_finished = [make_group([1.0, -1.0], number, num_response_tokens=number + 1) for number in range(64)]
    groups = trainer._mixed(as_finished)
    assert sorted(group.prompt.index for group in groups) == list(range(64))
    tokens = np.array([group.num_response_tokens for group in groups]).reshape(4, 16).sum(axis=1)
    # 4 mini-batches of 16: as finished they have 272, 784, 1296 and 1808 tokens, at random 1040 +- 129
    assert tokens.min() > 1040 - 3 * 129
    assert tokens.max() < 1040 + 3 * 129
    assert trainer._mixed(as_finished) == groups  # a step continued from a checkpoint is the same
    trainer.step = 1
    assert trainer._mixed(as_finished) != groups


def test_a_response_that_trains_nothing_loses_its_kl_like_its_siblings(model_path: Path) -> None:
    kl = {"place": "reward", "estimator": "kl", "coefficient": 0.1}
    trainer = _trainer(model_path, algorithm={"kl": kl}, reward={"mask_truncated": True})
    group = make_group([1.0, -1.0], num_response_tokens=[3, 2])
    group.rollouts[1] = replace(group.rollouts[1], finish_reason="length")
    batch = build_batch([group], mask_truncated=True)
    batch = replace(batch, old_log_probs=batch.rollout_log_probs, ref_log_probs=batch.rollout_log_probs - 0.5)
    rewards, told = trainer._rewards([group], batch)
    # KL 0.5 a token: 1 - 0.1 * 3 * 0.5 and -1 - 0.1 * 2 * 0.5
    assert rewards == pytest.approx([0.85, -1.1])
    assert told == {"actor/reward_kl_penalty": pytest.approx(0.5), "actor/reward_kl_penalty_coeff": 0.1}


def test_a_response_without_a_score_is_in_no_mean_of_scores() -> None:
    group = make_group([1.0, UNSCORED, 0.5])
    told = response_metrics([group], np.array(group.rewards), max_prompt_tokens=9)
    assert (told["critic/score/mean"], told["critic/score/min"]) == (0.75, 0.5)  # (1 + 0.5) / 2, without the 0.0
    assert told["critic/rewards/mean"] == 0.75
    assert told["reward/timeout_ratio"] == pytest.approx(1 / 3)


def test_a_response_without_a_score_is_no_sibling(model_path: Path) -> None:
    trainer = _trainer(model_path, rollout={"group_size": 3}, algorithm={"normalize_by_std": False})
    batch = build_batch([make_group([1.0, UNSCORED, -1.0])], mask_truncated=False)
    weighed = trainer._weigh(batch, np.array([1.0, 0.6, -1.0]), np.array([True, False, True]))
    assert weighed.advantages.tolist() == [1.0, 0.0, -1.0]
