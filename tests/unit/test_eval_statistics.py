"""Paired statistics against hand-computed and published values."""

from __future__ import annotations

import math

import pytest

from eval.statistics import mcnemar_exact, minimal_detectable_difference, paired_bootstrap, wilson_interval


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),  # nothing changed
        (3, 3, 1.0),  # twice the tail is (1 + 6 + 15 + 20) * 2 / 64 = 1.3125, bounded by 1
        (0, 5, 0.0625),  # 2 * 1 / 2^5
        (1, 5, 0.21875),  # 2 * (1 + 6) / 2^6
    ],
)
def test_mcnemar_equals_the_binomial_tail_by_hand(b: int, c: int, p: float) -> None:
    assert mcnemar_exact(b, c) == p
    assert mcnemar_exact(c, b) == p


def test_mcnemar_on_the_reference_tables() -> None:
    assert mcnemar_exact(10, 28) == pytest.approx(0.0051, abs=5e-5)
    assert mcnemar_exact(40, 58) == pytest.approx(0.085, abs=5e-4)


def test_mcnemar_of_many_pairs_does_not_overflow() -> None:
    # Normal approximation with continuity correction: z = (|4200 - 3800| - 1) / sqrt(8000) = 4.461.
    expected = math.erfc(399 / math.sqrt(8000) / math.sqrt(2))
    assert mcnemar_exact(3800, 4200) == pytest.approx(expected, rel=0.02)


def test_bootstrap_interval_of_the_reference_table() -> None:
    before = [1] * 10 + [0] * 28 + [1] * 462
    after = [0] * 10 + [1] * 28 + [1] * 462
    # The resampled difference is trinomial; its exact 2.5 % and 97.5 % quantiles (by convolution) are
    # 6/500 and 30/500.
    assert paired_bootstrap(before, after) == pytest.approx((0.012, 0.060))
    assert paired_bootstrap(after, before) == pytest.approx((-0.060, -0.012))


def test_bootstrap_is_reproducible_and_degenerate_without_change() -> None:
    before, after = [1, 0, 1, 1] * 20, [1, 1, 0, 1] * 20
    assert paired_bootstrap(before, after, seed=3) == paired_bootstrap(before, after, seed=3)
    assert paired_bootstrap(before, before) == (0.0, 0.0)


def test_bootstrap_takes_averages_of_several_responses_per_item() -> None:
    # Every item changes by exactly 0.25: no resampling can move the mean.
    assert paired_bootstrap([0.25, 0.5, 0.75], [0.5, 0.75, 1.0]) == (0.25, 0.25)


def test_wilson_interval_by_hand() -> None:
    # 8 of 10, z = 1.959964: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    # half width 1.959964 / 1.384146 * sqrt(0.016 + 0.0096036) = 0.226578.
    assert wilson_interval(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(0, 10)  # high = z^2 / (n + z^2) = 3.841459 / 13.841459
    assert (low, high) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.277533, abs=1e-6))


def test_minimal_detectable_difference_solves_its_equation() -> None:
    d = minimal_detectable_difference(500, 38)
    z1, z2, q = 1.959964, 0.841621, 38 / 500
    assert d * math.sqrt(500) == pytest.approx(z1 * math.sqrt(q) + z2 * math.sqrt(q - d * d), rel=1e-5)


def test_minimal_detectable_difference_with_few_discordant_pairs_goes_one_way() -> None:
    # 3 of 500 changed: 0.6 points cannot be found, so the bound is q = d: d n = (z1 + z2 sqrt(1 - d))^2.
    d = minimal_detectable_difference(500, 3)
    assert d * 500 == pytest.approx((1.959964 + 0.841621 * math.sqrt(1 - d)) ** 2, rel=1e-5)
    assert minimal_detectable_difference(500, 0) == d


def test_minimal_detectable_difference_has_the_promised_power() -> None:
    # Simulated: 500 pairs, discordant share 0.2, true difference as returned. McNemar's normal form is what
    # the formula assumes; the exact test is a little more conservative.
    import numpy as np

    n, q = 500, 0.2
    d = minimal_detectable_difference(n, int(n * q))
    draws = np.random.default_rng(0).multinomial(n, [(q - d) / 2, (q + d) / 2, 1 - q], size=4000)
    found = sum(mcnemar_exact(int(b), int(c)) < 0.05 for b, c, _ in draws) / len(draws)
    assert 0.74 < found < 0.84
