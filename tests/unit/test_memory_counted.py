"""The memory plan of a rank against what its own code allocates, counted on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from bench.fake_policy import TOTAL, count
from bench.memory_plan import planned_bytes
from dapo_core.config.training import TrainingConfig
from dapo_core.memory.published import published_config


@pytest.mark.parametrize(("model", "num_ranks", "sequence_parallel"), [("Qwen3-8B", 16, 2), ("Qwen2.5-7B", 4, 1)])
def test_plan_is_what_the_code_allocates(
    model: str, num_ranks: int, sequence_parallel: int, tmp_path: Path
) -> None:
    published: dict[str, Any] = {**(published_config(model) or {}), "num_hidden_layers": 2}
    train = {"num_ranks": num_ranks, "sequence_parallel": sequence_parallel, "dtype": "bfloat16"}
    lengths = {"data": {"max_prompt_tokens": 512}, "rollout": {"max_response_tokens": 7680}}
    config = TrainingConfig.model_validate(
        {**lengths, "train": {**train, "micro_batch_tokens": 8192 // sequence_parallel}}
    )
    counted = count(AutoConfig.for_model(**published), config, tmp_path)
    planned = planned_bytes(config, published)
    assert planned == {phase: pytest.approx(parts[TOTAL], rel=0.1) for phase, parts in counted.items()}
