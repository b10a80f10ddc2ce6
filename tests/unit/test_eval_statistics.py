"""Statistics of evaluations, against hand-computed and published values."""

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.answers.grading import grade
from eval.report.breakdown import compare_metrics
from eval.report.compare import compare
from eval.results.rows import Evaluation, ResultsError, load_evaluation
from eval.results.statistics import (
    PValues,
    Stratum,
    change_interval,
    holm,
    measure_change,
    measure_pooled_change,
    pooled_mean,
    pooled_sign_flip_test,
    share_interval,
    sign_flip_test,
)
from eval.results.summary import item_metrics, majority_share, pass_at, same_answer_by, summarise
from tests.evaluations import (
    evaluation,
    make_items,
    make_row,
    make_rows,
    settings_of,
    write_results,
)

IS_SAME = same_answer_by(grade)


def flips(b: int, c: int) -> list[int]:
    """Changes with `b` items worse and `c` better."""
    return [-1] * b + [1] * c + [0] * 100


@pytest.mark.parametrize(
    ("changes", "p", "mid_p"),
    [
        ([0, 0, 0], 1.0, 1.0),
        ([3, 1], 0.5, 0.25),  # sums 4, 2, -2, -4: two of four as far out as 4
        # sums 4, 2, 2, 0, 0, -2, -2, -4; observed 2: six of eight, four of them equal
        ([2, 1, -1], 0.75, 0.5),
        # McNemar's test
        (flips(3, 3), 1.0, 0.84375),  # no split is more even; mid-p 1 - (20 / 64) / 2
        (flips(0, 5), 0.0625, 0.03125),  # 2 * 1 / 2^5; mid-p (2 * 1 - 1) / 2^5
        (flips(1, 5), 0.21875, 0.125),  # 2 * (1 + 6) / 2^6; mid-p (2 * 7 - 6) / 2^6
    ],
)
def test_sign_flips_by_hand(changes: list[int], p: float, mid_p: float) -> None:
    assert sign_flip_test(changes) == PValues(p, mid_p)
    assert sign_flip_test([-change for change in changes]) == PValues(p, mid_p)


@pytest.mark.slow
def test_the_pooled_test_equals_enumeration_of_all_sign_patterns() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        strata = [
            (rng.integers(-3, 4, size=size).tolist(), float(scale))
            for size, scale in zip((4, 5, 3), rng.random(3), strict=True)
        ]
        scaled = np.concatenate([scale * np.array(changes) for changes, scale in strata])
        patterns = np.array(list(itertools.product((-1, 1), repeat=len(scaled)))) @ scaled
        observed = abs(scaled.sum())
        expected = float(np.mean(np.abs(patterns) >= observed - 1e-12))
        assert pooled_sign_flip_test(strata).p == pytest.approx(expected, abs=1e-9)


def test_the_pooled_change_is_a_weighted_mean_whose_interval_agrees_with_its_test() -> None:
    strata = [Stratum(flips(2, 12), 1, 3.0), Stratum([4, -1, 0, 2, 0, 0, 1, 1], 4, 1.0)]
    pooled = measure_pooled_change(strata)
    first, second = (measure_change(stratum.changes, stratum.num_samples) for stratum in strata)
    assert pooled.difference == pytest.approx(0.75 * first.difference + 0.25 * second.difference)
    assert pooled.n == 122
    assert (pooled.p < 0.05) == (pooled.ci95[0] > 0)
    alone = measure_pooled_change([Stratum(flips(4, 9), 1, 7.0)])
    assert alone.ci95 == pytest.approx(measure_change(flips(4, 9), 1).ci95)
    # Two equal halves: the squares of half the distances add up, to 1 / sqrt(2) of one.
    share, interval = pooled_mean([(0.5, (0.4, 0.7), 1.0), (0.5, (0.4, 0.7), 1.0)])
    assert share == 0.5
    assert interval == pytest.approx((0.5 - 0.1 / math.sqrt(2), 0.5 + 0.2 / math.sqrt(2)))


def test_mcnemar_on_the_reference_tables_and_on_many_pairs() -> None:
    assert sign_flip_test(flips(10, 28)).p == pytest.approx(0.0051, abs=5e-5)
    assert sign_flip_test(flips(40, 58)).p == pytest.approx(0.085, abs=5e-4)
    # Normal approximation with continuity correction: z = (|4200 - 3800| - 1) / sqrt(8000) = 4.461.
    expected = math.erfc(399 / math.sqrt(8000) / math.sqrt(2))
    assert sign_flip_test(flips(3800, 4200)).p == pytest.approx(expected, rel=0.02)
    assert sign_flip_test(flips(0, 1500)).p == pytest.approx(0.0, abs=1e-300)


def test_holm_by_hand() -> None:
    # In order 0.01 * 3, 0.03 * 2, 0.04 * 1, and never below the one before.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.slow
def test_score_intervals_by_hand() -> None:
    # None right: Wilson's interval with a correction of half a response, (u - 1/20)^2 10 = z^2 u (1
    # - u), so
    # 13.841459 u^2 - 4.841459 u + 0.025 = 0.
    low, high = share_interval([0.0] * 10)
    assert (low, high) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.344537, abs=1e-6))
    assert share_interval([1.0] * 10) == pytest.approx((1 - 0.344537, 1.0), abs=1e-6)
    # 8 of 10: lower (0.75 - u)^2 10 = z^2 u (1 - u), 13.841459 u^2 - 18.841459 u + 5.625 = 0; upper
    # with 0.85.
    assert share_interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.442181, 0.964573), abs=1e-6)
    # Tango's interval with a correction of half an item, for 28 better and 10 worse of 500.
    low, high = change_interval([1] * 28 + [-1] * 10 + [0] * 462)
    assert (low, high) == pytest.approx((0.0114, 0.0632), abs=1e-4)
    for bound in (low, high):
        excess = 18 / 500 - bound
        # Most likely shares of better and worse items with this difference, by brute force.
        shares = [(q, q - bound) for q in np.linspace(max(bound, 0) + 1e-6, 0.5, 200_000)]
        plus, minus = np.array(shares).T
        likelihood = 28 * np.log(plus) + 10 * np.log(minus) + 462 * np.log1p(-plus - minus)
        best = int(np.nanargmax(np.where(minus > 0, likelihood, -np.inf)))
        variance = plus[best] + minus[best] - bound**2
        distance = (abs(excess) - 0.001) * math.sqrt(500 / variance)
        assert distance == pytest.approx(1.959964, abs=1e-3)
    # Eight unchanged items prove little: each side equals `share_interval` of changes that did not
    # occur.
    assert change_interval([0.0] * 8) == pytest.approx((-0.402297, 0.402297), abs=1e-6)


@pytest.mark.slow
def test_interval_and_test_never_contradict() -> None:
    tables = [(b, c) for b in range(12) for c in range(12)]
    single = [
        [-1] * b + [1] * c + [0] * same for b, c in tables for same in (0, 20, 200) if b + c + same
    ]
    rng = np.random.default_rng(0)
    several = [
        rng.binomial(8, chance, size=12) - rng.binomial(8, 0.5, size=12)
        for chance in rng.uniform(0.3, 0.7, 100)
    ]
    seen = set()
    for changes, k in [*((x, 1) for x in single), *((x.tolist(), 8) for x in several)]:
        change = measure_change(changes, k)
        low, high = change.ci95
        assert -1 <= low <= change.difference <= high <= 1
        assert (low > 0 or high < 0) == (change.p < 0.05)
        seen.add((k, change.p < 0.05))
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(30, 1), (30, 32), (100, 4)])
def test_intervals_cover_the_truth_with_few_items(n: int, k: int) -> None:
    """The percentile bootstrap covers 90.7 % with 30 items; see bench/intervals.py."""
    rng = np.random.default_rng(0)
    hits, changes = [], []
    for _ in range(250):
        chances = rng.beta(0.3, 0.9, size=n)  # mean 1 / 4
        later = np.where(rng.random(n) < 0.5, rng.beta(1.2, 0.9, size=n), chances)  # of mean 4 / 7
        before, after = rng.binomial(k, chances), rng.binomial(k, later)
        low, high = share_interval((before / k).tolist(), 1 / k)
        hits.append(low <= 0.25 <= high)
        low, high = measure_change((after - before).tolist(), k).ci95
        changes.append(low <= 0.5 * (4 / 7 - 1 / 4) <= high)
    assert statistics.mean(hits) > 0.93
    assert statistics.mean(changes) > 0.93


def test_a_detectable_change_by_hand_and_its_power() -> None:
    # 100 changes of half an item: 2.801585 standard errors of 0.05, wider for the correction and
    # the score test.
    assert 0.1401 < measure_change([1, -1] * 50, 2).detectable < 0.1501
    assert measure_change([0] * 500, 1).detectable == pytest.approx(2.801585**2 / 500, rel=1e-5)
    # Simulated: 500 pairs, discordant share 0.2, true difference as returned. The exact test is a
    # little less powerful than the formula assumes.
    d = measure_change([1, -1] * 50 + [0] * 400, 1).detectable
    draws = np.random.default_rng(0).multinomial(
        500, [(0.2 - d) / 2, (0.2 + d) / 2, 0.8], size=2000
    )
    found = sum(sign_flip_test(flips(int(b), int(c))).p < 0.05 for b, c, _ in draws) / len(draws)
    assert 0.74 < found < 0.84


def test_pass_at_k_by_hand() -> None:
    assert pass_at(1, 4, 1) == 0.25
    assert pass_at(2, 4, 1) == 0.5  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
    assert pass_at(2, 4, 3) == 1.0  # two of four cannot both be the one wrong
    assert pass_at(4, 4, 0) == 0.0
    choices = list(itertools.combinations([True, True, False, False, False, False, False], 3))
    assert pass_at(3, 7, 2) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("7 7 9", 1.0),
        ("7 9 9", 0.0),
        ("7 7 9 9", 0.5),  # a tie of two, split evenly
        ("7 8 9", 1 / 3),
        ("7 1/2 0.5", 0.0),  # one answer written in two ways
        ("7 7 1/2 0.5", 0.5),
        ("7 - - -", 1.0),  # no answer has no vote
        ("7 t5 t5", 1.0),  # nor has what was cut off
        ("- - -", 0.0),
        ("9 9 -", 0.0),
    ],
)
def test_majority_by_hand(answers: str, expected: float) -> None:
    item = make_items(7)[6]  # its answer is 7
    rows = [
        make_row(item, letter, sample, answer=None if letter == "n" else text)
        for sample, text in enumerate(answers.split())
        for letter in [{"-": "n", "7": "r", "t5": "t"}.get(text, "w")]
    ]
    assert majority_share(tuple(rows), IS_SAME) == expected


def test_metrics_of_four_samples_by_hand() -> None:
    items = list(evaluation(make_items(2), "rwwn rrrw").items.values())
    # Item 0: 1 of 4; item 1: 3 of 4. pass@2: 1/2 and 1. Majority of item 0: two equal wrong ones
    # against one.
    assert item_metrics(items, IS_SAME) == {
        "avg@4": [0.25, 0.75],
        "pass@2": [0.5, 1.0],
        "pass@4": [1.0, 1.0],
        "maj@4": [0.0, 1.0],
    }
    change = compare_metrics(items, list(reversed(items)), IS_SAME)["avg@4"]
    assert (change.before, change.after, change.difference) == (0.5, 0.5, 0.0)
    assert change.ci95[0] == pytest.approx(-change.ci95[1])


def test_maj_intervals_are_as_wide_as_for_single_responses() -> None:
    # 16 samples each, all right or all wrong: maj@16 and pass@16 are single outcomes, pass@8 may
    # move by 8 / 16.
    measured = evaluation(make_items(30), " ".join(["r" * 16] * 9 + ["w" * 16] * 21))
    items, outcomes = list(measured.items.values()), [1.0] * 9 + [0.0] * 21
    metrics, summary = compare_metrics(items, items, IS_SAME), summarise(measured, IS_SAME)
    assert summary.samples is not None
    for name, step in (("avg@16", 1 / 16), ("pass@8", 1 / 2), ("pass@16", 1.0), ("maj@16", 1.0)):
        assert metrics[name].before_interval == share_interval(outcomes, step)
        assert metrics[name].after_interval == share_interval(outcomes, step)
        assert metrics[name].ci95 == change_interval([0.0] * 30, step)
        assert summary.samples[name]["ci95"] == share_interval(outcomes, step)
    # Exact coverage for 30 items of which the majority is right with 30 %: 92.98 % with a
    # sixteenth.
    held = [share_interval([1.0] * r + [0.0] * (30 - r)) for r in range(31)]
    chances = [math.comb(30, r) * 0.3**r * 0.7 ** (30 - r) for r in range(31)]
    assert sum(p for p, (low, high) in zip(chances, held, strict=True) if low <= 0.3 <= high) > 0.95


def test_repeated_samples_do_not_narrow_an_interval() -> None:
    """Samples are nested in items: four greedy samples carry no more information than one."""
    shares = [1.0, 0.0, 1.0, 1.0, 0.0] * 8
    once, fourfold = share_interval(shares, 1), share_interval(shares, 1 / 4)
    spread = 1.96 * math.sqrt(0.6 * 0.4 / 40)
    assert fourfold == pytest.approx((0.6 - spread, 0.6 + spread), abs=0.03)
    assert once == pytest.approx(fourfold, abs=0.01)  # a quarter of the correction


def test_stored_rows_with_the_same_prompt_are_samples_of_one_item(tmp_path: Path) -> None:
    """Imported logs may have one item per row; here 4 problems with 3 rows each."""
    items = [
        replace(item, prompt=make_items(4)[number % 4].prompt, gold="1")
        for number, item in enumerate(make_items(12))
    ]
    write_results(tmp_path / "before", "wwrr" * 3, items)
    write_results(tmp_path / "after", "rwrw" * 3, items)
    result = compare(tmp_path / "before", tmp_path / "after")
    assert (result.n, result.num_samples, result.b, result.c) == (4, 3, 1, 1)
    assert result.p == pytest.approx(1.0)
    write_results(tmp_path / "uneven", "wwrr" * 2 + "ww", items[:10])
    uneven = load_evaluation(tmp_path / "uneven")
    assert (len(uneven.items), uneven.num_samples, len(uneven.rows)) == (4, 2, 8)


def test_items_with_missing_samples_are_refused() -> None:
    items = make_items(2)
    rows = make_rows(items, "rw rw")
    with pytest.raises(
        ResultsError, match=r"1 of 2 items do not have the samples 0 to 1 \(first: '1'\)"
    ):
        Evaluation.of(settings_of(items), rows[:3])
