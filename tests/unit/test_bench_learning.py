"""bench/learning.py: intervals, verdicts, and the variants of the recipe."""

import importlib
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


def test_each_variant_changes_only_its_keys(page: ModuleType) -> None:
    recipe = ROOT / "configs" / "arith_cpu.yaml"
    configs = {name: load_config(recipe, keys) for name, keys in page.VARIANTS.items()}
    assert {*page.LOSSES} == {*LOSS_KINDS} - {"dapo", "custom"}
    assert len(set(configs.values())) == len(configs) == 14
    assert configs["dynamic-sampling"].sampler.gen_prompts == configs["full"].train.train_prompts
    clips = configs["clip-higher"].algorithm
    assert clips.clip_ratio_high == clips.clip_ratio_low
