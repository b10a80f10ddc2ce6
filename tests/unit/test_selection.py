"""The sampler on simulated engines does not select groups by length."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dapo_core.config.sampler import SamplerConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("selection")


def simulate(selection: ModuleType, **settings: Any) -> Any:
    """Twenty steps of 16 groups on four engines that hold two steps' responses."""
    values = {"gen_prompts": 48, "max_seconds_without_kept": 1e12, **settings}
    return selection.simulate(SamplerConfig(**values), 20, 16, num_engines=4, num_slots=128)


@pytest.mark.parametrize("window", [0, 0.3])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_prompt_is_trained_on_however_long_its_responses(
    selection: ModuleType, max_staleness: int, window: float
) -> None:
    found = simulate(selection, max_staleness=max_staleness, window=window)
    assert abs(found.difference) < 0.01
    assert found.cut_share > 0.01
    assert found.max_age == max_staleness


def test_a_window_saves_decoding_steps(selection: ModuleType) -> None:
    strict, default = (simulate(selection, **values) for values in ({"window": 0}, {}))
    assert default.ticks_per_step < 0.9 * strict.ticks_per_step
    assert default.mean_age < strict.mean_age
    assert strict.max_age < default.max_age == 3  # max_staleness
