"""bench/learning.py: intervals, verdicts, and the page."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from dapo_core.config.losses import LOSS_KINDS
from flows.config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("learning_page")


@pytest.mark.parametrize(
    ("differences", "mean", "half_width", "verdict"),
    [
        # t of 2 degrees of freedom 4.303, standard deviation 2: 4.303 * 2 / sqrt(3) = 4.969, more
        # than 4
        ([-2.0, -4.0, -6.0], -4.0, 4.9687, "within noise"),
        # standard deviation 1: 4.303 / sqrt(3) = 2.484, less than 4
        ([-3.0, -4.0, -5.0], -4.0, 2.4843, "worse"),
        ([3.0, 4.0, 5.0], 4.0, 2.4843, "better"),
        # 1 degree of freedom 12.706, standard deviation sqrt(2): 12.706 * sqrt(2) / sqrt(2)
        ([1.0, 3.0], 2.0, 12.706, "within noise"),
        ([0.0, 0.0, 0.0], 0.0, 0.0, "within noise"),
    ],
)
def test_verdicts_follow_the_paired_interval(
    page: ModuleType, differences: list[float], mean: float, half_width: float, verdict: str
) -> None:
    comparison = page.Comparison(differences)
    assert comparison.mean == mean
    assert comparison.half_width == pytest.approx(half_width, abs=1e-4)
    assert comparison.verdict == verdict
    one_seed = page.Comparison([-20.0])
    assert (one_seed.half_width, one_seed.verdict) == (None, "one seed: noise unknown")


def outcomes(page: ModuleType, accuracies: dict[str | None, list[float]]) -> list[object]:
    """Trainings of 6 steps with these held-out accuracies by seed; None is the model before."""
    curve = [6.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    return [
        page.Outcome(
            page.Job(variant, seed, None, "store"),
            accuracy,
            answer_tokens=20.0,
            curves={} if variant is None else dict.fromkeys(page.CURVES, curve),
            generated_tokens=12_345_678.0,
            num_items=600,
        )
        for variant, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]


def test_the_page_shows_figures_and_a_verdict_per_comparison(page: ModuleType) -> None:
    accuracies: dict[str | None, list[float]] = {
        None: [0.3, 0.4, 0.5],
        "full": [0.60, 0.70, 0.80],
        "clip-higher": [0.59, 0.73, 0.78],  # -1, +3, -2 points: mean 0
        "token-mean": [0.57, 0.66, 0.75],  # -3, -4, -5
        "gspo": [0.57, 0.66, 0.75],
    }
    text = page.render(
        outcomes(page, accuracies)[::-1], "bench/learning.py"
    )  # the order in which they end does not matter
    assert (
        "| full recipe | 70.0 (60.0..80.0) |  | 3.000 (3.000..3.000) |" in text
    )  # mean of 1, 2, 3, 4, 5
    assert "| 12,346 (12,346..12,346) |" in text
    assert "| without token-mean | 66.0 (57.0..75.0) | -4.0 [-6.5, -1.5] |" in text
    assert re.search(
        r"\*\*Clip-higher\*\* .*: \+0\.0 points without it, \*\*within noise\*\*", text
    )
    assert re.search(
        r"\*\*Token-mean\*\* .*: -4\.0 points without it, \*\*worse\*\* .*\(-6\.5 to -1\.5\)", text
    )
    assert "Before training: 40.0 (30.0..50.0) %" in text
    assert "about 14 of 100 such pages" in text  # 1 - 0.95^3 = 0.1426
    ingredients, losses = text.split("## Losses")
    assert "gspo" not in ingredients
    assert "| loss gspo | 66.0 (57.0..75.0) | -4.0 [-6.5, -1.5] |" in losses
    assert "| full recipe | 70.0" in losses


def test_a_step_that_finished_no_group_leaves_a_point_of_the_curve_to_its_neighbours(
    page: ModuleType,
) -> None:
    assert page._running_mean([1.0, math.nan, 3.0]) == [1.0, 1.0, 2.0]


@pytest.mark.slow
def test_the_plot_is_drawn(page: ModuleType, tmp_path: Path) -> None:
    page.draw(
        outcomes(page, {None: [0.3], "full": [0.6], "dynamic-sampling": [0.5]}),
        tmp_path / "plot.png",
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_each_variant_changes_only_its_keys(page: ModuleType) -> None:
    recipe = ROOT / "configs" / "arith_cpu.yaml"
    configs = {name: load_config(recipe, keys) for name, keys in page.VARIANTS.items()}
    assert {*page.LOSSES} == {*LOSS_KINDS} - {"dapo", "custom"}
    assert len(set(configs.values())) == len(configs) == 14
    assert configs["dynamic-sampling"].sampler.gen_prompts == configs["full"].train.train_prompts
    clips = configs["clip-higher"].algorithm
    assert clips.clip_ratio_high == clips.clip_ratio_low
