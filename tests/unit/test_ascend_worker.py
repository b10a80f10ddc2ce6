"""What vllm-ascend's worker does to a model, with its own code from the wheel of the newest set."""

import ast
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

from dapo_core.engines.vllm_engine import VllmEngine
from dapo_core.machine.versions import sets
from tests.tiny_models import tiny_engine_settings
from tests.wheels import wheel

NUM_EXPERTS, HIDDEN, WIDTH = 4, 8, 6


def of_wheel(file: str, name: str, values: dict[str, Any]) -> Any:
    """Return a function of vllm-ascend that sees only these global values."""
    version = sets()["npu-newest"].packages["vllm-ascend"]
    with zipfile.ZipFile(wheel("vllm-ascend", version)) as archive:
        tree = ast.parse(archive.read(f"vllm_ascend/{file}"))
    named = (node for node in ast.walk(tree) if getattr(node, "name", "") == name)
    source = "from __future__ import annotations\n" + ast.unparse(next(named))
    exec(compile(source, file, "exec"), values)
    return values[name]


class Experts(nn.Module):
    """Experts as they are on an NPU after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.rand(NUM_EXPERTS, HIDDEN, 2 * WIDTH))
        self.w2_weight = nn.Parameter(torch.rand(NUM_EXPERTS, WIDTH, HIDDEN))


class Worker:
    """The engine of one NPUWorker."""

    def __init__(self, model: nn.Module) -> None:
        text = SimpleNamespace(hidden_size=HIDDEN)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=text), quant_config=None
        )
        self.model_runner = SimpleNamespace(model=model)
        self._sleep_saved_buffers = dict[str, torch.Tensor]()

    def apply_model(self, function: Callable[[nn.Module], Any]) -> list[Any]:
        return [function(self.model_runner.model)]

    def wake_up(self, tags: Sequence[str]) -> None:
        allocator = SimpleNamespace(wake_up=lambda tags: None)
        values = {
            "torch": torch,
            "get_ascend_config": lambda: SimpleNamespace(weight_nz_mode=0),
            "CaMemAllocator": SimpleNamespace(get_instance=lambda: allocator),
        }
        of_wheel("worker/worker.py", "wake_up", values)(self, tags)


def test_experts_keep_the_layout_of_their_kernels_when_an_engine_wakes() -> None:
    model = nn.Sequential(Experts(), nn.Linear(HIDDEN, HIDDEN))
    before = dict(model.named_parameters())
    engine = VllmEngine.__new__(VllmEngine)
    engine.settings = replace(tiny_engine_settings(), sleep_level=1)
    engine._engine = Worker(model)
    engine._wake(["weights"])

    assert all(after is before[name] for name, after in model.named_parameters())
    Worker(model).wake_up(["weights"])  # if it transposes no longer, `_put_back` can go
    assert model.get_parameter("0.w13_weight").shape == (NUM_EXPERTS, 2 * WIDTH, HIDDEN)


@pytest.mark.slow
def test_the_memory_of_a_reload_is_free_before_keys_and_values_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dapo_core.weights import vllm_transfer

    calls = Mock()
    monkeypatch.setattr(vllm_transfer, "device_for", calls.device_for)
    vllm_transfer.replace_weights(calls.engine, [])
    assert calls.mock_calls[-1] == call.device_for().module().empty_cache()
