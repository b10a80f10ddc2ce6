"""The sampler on simulated engines does not select groups by length, or warns about it."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dapo_core.config.sampler import SamplerConfig
from dapo_core.draw.account import LengthWatch, expected_length
from dapo_core.engines.base import Response
from tests.batches import make_group

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def selection(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("selection")


def simulate(selection: ModuleType, **settings: Any) -> Any:
    """Twenty steps of 16 groups on four engines that hold two steps' responses."""
    values = {"gen_prompts": 48, "max_seconds_without_kept": 1e12, **settings}
    return selection.simulate(SamplerConfig(**values), 20, 16, num_engines=4, num_slots=128)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of: progress, by a clock of thousands of seconds, is left out."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_stream_order_does_not_select_by_length(
    selection: ModuleType, max_staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = simulate(selection, max_staleness=max_staleness)
    assert abs(found.difference) < 0.01
    assert found.cut_share > 0.01
    assert found.max_age == max_staleness
    assert warnings(caplog) == []


@pytest.mark.slow
def test_stream_order_is_as_fast_as_finishing_order(selection: ModuleType) -> None:
    stream, finish = simulate(selection), simulate(selection, order="finish")
    assert stream.ticks_per_step < finish.ticks_per_step
    assert stream.waste_ratio < finish.waste_ratio / 2


def test_finishing_order_selects_short_groups_and_warns(
    selection: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    found = simulate(selection, order="finish")
    assert found.difference < -0.2
    assert found.cut_share < 0.001
    assert len(warnings(caplog)) == 2  # once in ten steps
    assert "set sampler.order=stream" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("responses", "mean"),
    [
        ([(2, True), (4, True), (9, True)], 5.0),
        # of four, one ends at 2; of the three left one is stopped at 3; of two, one ends at 4; the
        # last at 10 shares longer than 2: 3/4; than 4: 3/4 * 1/2; 2 + 3/4 * 2 + 3/8 * 6
        ([(2, True), (3, False), (4, True), (10, True)], 5.75),
        ([(4, True), (8, False)], 6.0),  # at least 8
        ([(0, False), (0, False), (5, True), (7, True)], 6.0),  # those without a token say nothing
    ],
)
def test_mean_length_accounts_for_aborted_responses(
    responses: list[tuple[int, bool]], mean: float
) -> None:
    assert expected_length(responses) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("dropped", "is_said"),
    [
        ([], False),
        ([Response("", [7] * 12, [], "abort")], True),  # 10, 10 and at least 12: 10.67
        ([Response("", [7] * 11, [], "abort")], False),  # 10.33
        ([Response("", [7] * 9, [], "abort")], False),  # may have become as long as the others
        ([Response("", [7] * 10, [], "stop")], False),
        ([Response("", [7] * 13, [], "stop")], True),  # 11
    ],
)
def test_a_length_difference_over_ten_steps_is_logged(
    dropped: list[Response], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = LengthWatch()
    for step in range(10):
        assert caplog.messages == [], step
        watch.add_step([make_group([1.0, -1.0], num_response_tokens=10)], dropped)
    assert bool(caplog.messages) == is_said
