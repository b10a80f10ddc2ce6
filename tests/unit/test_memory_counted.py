"""The memory plan of a rank matches what its code allocates, counted with fake tensors."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from dapo_core.config.training import TrainingConfig
from dapo_core.memory.published import published_config

ROOT = Path(__file__).resolve().parents[2]
FREED = """
from pathlib import Path
from dapo_core.machine.device import device_for

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

device_for("cpu").prepare({}, is_shared=False)
bytearray(28 * 2**20)  # once freed, glibc's default keeps blocks of this size
before = resident()
pairs = [(bytearray(4 * 2**20), bytearray(2**10)) for _ in range(50)]
small = [pair[1] for pair in pairs]
del pairs
print(resident() - before)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("memory_plan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_ranks", "sequence_parallel"), [("Qwen3-8B", 16, 2), ("Qwen2.5-7B", 4, 1)]
)
def test_the_plan_matches_what_the_code_allocates(
    model: str, num_ranks: int, sequence_parallel: int, bench: ModuleType, tmp_path: Path
) -> None:
    published: dict[str, Any] = {**(published_config(model) or {}), "num_hidden_layers": 2}
    train = {"num_ranks": num_ranks, "sequence_parallel": sequence_parallel, "dtype": "bfloat16"}
    lengths = {"data": {"max_prompt_tokens": 512}, "rollout": {"max_response_tokens": 7680}}
    config = TrainingConfig.model_validate(
        {**lengths, "train": {**train, "micro_batch_tokens": 8192 // sequence_parallel}}
    )
    counts = bench.fake_policy.count(AutoConfig.for_model(**published), config, tmp_path)
    counted = {phase: parts[bench.fake_policy.TOTAL] for phase, parts in counts.items()}
    planned = bench.planned_bytes(config, published)
    assert planned == pytest.approx(counted, rel=0.1)


def test_a_rank_on_a_cpu_does_not_keep_freed_memory() -> None:
    """Otherwise a training of a 135M model grows to 1.6 times the plan."""
    done = subprocess.run(
        [sys.executable, "-c", FREED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 2**20  # 32 MiB without `prepare`
