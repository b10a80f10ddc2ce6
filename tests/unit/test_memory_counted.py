"""The memory plan of a rank matches what its code allocates, counted with fake tensors."""

import importlib
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from dapo_core.config.training import TrainingConfig
from dapo_core.memory.published import published_config

LISTED_BLOCKS = ("deepstack_visual_indexes", "fullatt_block_indexes")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("memory_plan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_ranks", "sequence_parallel", "expert_parallel"),
    [
        ("Qwen3-8B", 16, 2, 1),
        ("Qwen3-VL-30B-A3B", 16, 4, 8),
        ("Qwen2.5-VL-7B", 8, 1, 1),
    ],
)
def test_the_plan_matches_what_the_code_allocates(
    model: str,
    num_ranks: int,
    sequence_parallel: int,
    expert_parallel: int,
    bench: ModuleType,
    tmp_path: Path,
) -> None:
    train = {
        "num_ranks": num_ranks,
        "sequence_parallel": sequence_parallel,
        "expert_parallel": expert_parallel,
        "dtype": "bfloat16",
    }
    lengths = {"data": {"max_prompt_tokens": 512}, "rollout": {"max_response_tokens": 7680}}
    config = TrainingConfig.model_validate(
        {**lengths, "train": {**train, "micro_batch_tokens": 8192 // sequence_parallel}}
    )
    _counts_as_planned(_with_two_layers(model), config, bench, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [1, 16])
def test_the_plan_counts_the_rows_of_tokens_that_go_to_experts(
    expert_parallel: int, bench: ModuleType, tmp_path: Path
) -> None:
    """On long rows, eight copies of each token, one for each of its experts, are the peak."""
    published, config = _with_two_layers("Qwen3-30B-A3B"), _long_rows(expert_parallel)
    counts = _counts_as_planned(published, config, bench, tmp_path)
    rows = 8 * 32_832 * 2048 * 2  # experts x tokens x hidden x bytes
    held = counts["old_log_probs"]["Activation"]
    assert 2 * rows < held < 3 * rows  # never more than two copies of them


@pytest.mark.slow
def test_siblings_that_share_a_prompt_take_no_more_than_the_plan(
    bench: ModuleType, tmp_path: Path
) -> None:
    """2,048 + 8 x 320 tokens, and a quarter of the prompt for each of 7 siblings: 8,192."""
    published, sections = _with_two_layers("Qwen3-30B-A3B"), {}
    sections["data"] = {"max_prompt_tokens": 2048}
    sections["rollout"] = {"max_response_tokens": 320}
    sections["train"] = {
        "num_ranks": 16,
        "expert_parallel": 16,
        "dtype": "bfloat16",
        "micro_batch_tokens": 8192,
    }
    config = TrainingConfig.model_validate(sections)
    model_config = AutoConfig.for_model(**published)
    counted = bench.fake_policy.count(model_config, config, tmp_path, num_siblings=8)
    planned = bench.planned_bytes(config, published)
    for phase in ("old_log_probs", "update"):
        held = counted[phase][bench.fake_policy.TOTAL]
        assert 0.85 * planned[phase] < held <= planned[phase]


def _long_rows(expert_parallel: int) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "data": {"max_prompt_tokens": 32_768},
            "rollout": {"max_response_tokens": 64},
            "train": {
                "num_ranks": 16,
                "expert_parallel": expert_parallel,
                "dtype": "bfloat16",
                "micro_batch_tokens": 32_832,
            },
        }
    )


@pytest.mark.slow
def test_the_plan_counts_what_a_tower_allocates(bench: ModuleType, tmp_path: Path) -> None:
    """With long prompts, its pass is the peak of old log-probs."""
    published, config = _with_two_layers("Qwen3-VL-30B-A3B"), _long_rows(expert_parallel=16)
    counts = bench.fake_policy.count(AutoConfig.for_model(**published), config, tmp_path)
    counted = counts["old_log_probs"][bench.fake_policy.TOTAL]
    assert bench.planned_bytes(config, published)["old_log_probs"] == pytest.approx(
        counted, rel=0.1
    )
    decoder = {**published["text_config"], "model_type": "qwen3_moe"}
    assert counted > 1.5 * bench.planned_bytes(config, decoder)["old_log_probs"]


def _counts_as_planned(
    published: dict[str, Any], config: TrainingConfig, bench: ModuleType, folder: Path
) -> dict[str, dict[str, int]]:
    """The bytes by phase and category, whose totals must be the plan's."""
    counts = bench.fake_policy.count(AutoConfig.for_model(**published), config, folder)
    counted = {phase: parts[bench.fake_policy.TOTAL] for phase, parts in counts.items()}
    assert bench.planned_bytes(config, published) == pytest.approx(counted, rel=0.1)
    return counts


def _with_two_layers(model: str) -> dict[str, Any]:
    """A published model's config.json with two decoder layers, and as many blocks of a tower."""
    published: dict[str, Any] = deepcopy({**(published_config(model) or {})})
    published.get("text_config", published)["num_hidden_layers"] = 2
    if "vision_config" in published:
        shown = published["vision_config"]
        shown |= {"depth": 2, **{name: [1] for name in LISTED_BLOCKS if name in shown}}
    return published
