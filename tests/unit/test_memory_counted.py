"""The memory plan of a rank matches what its code allocates, counted with fake tensors."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from dapo_core.config.training import TrainingConfig
from dapo_core.memory.published import published_config

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
        ("Qwen2.5-7B", 4, 1, 1),
        ("Qwen3-30B-A3B", 16, 4, 1),
        ("Qwen3-30B-A3B", 16, 4, 16),
        ("Qwen3-235B-A22B", 128, 8, 8),
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
    published: dict[str, Any] = {**(published_config(model) or {}), "num_hidden_layers": 2}
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
    counts = bench.fake_policy.count(AutoConfig.for_model(**published), config, tmp_path)
    counted = {phase: parts[bench.fake_policy.TOTAL] for phase, parts in counts.items()}
    planned = bench.planned_bytes(config, published)
    assert planned == pytest.approx(counted, rel=0.1)
