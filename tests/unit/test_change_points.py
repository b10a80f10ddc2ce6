"""Change points: false-alarm rate, detection, and p-values by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.change_points import MIN_RUNS, find_change_points


def test_without_a_change_at_most_one_line_in_twenty_is_marked() -> None:
    rng = np.random.default_rng(7)
    noises = {
        "normal": rng.normal(0.6, 0.02, (300, 12)),
        "thirty items": rng.binomial(30, 0.4, (300, 12)) / 30,
        "some nights fail": np.where(rng.random((300, 12)) < 0.1, 0.1, rng.normal(0.6, 0.02, (300, 12))),
    }
    for name, lines in noises.items():
        marked = sum(bool(find_change_points([line.tolist()], 499)[0]) for line in lines)
        # 300 lines at 5 %: 15 expected, standard deviation 3.8
        assert marked <= 15 + 3 * 3.8, name


@pytest.mark.slow
def test_p_equals_the_share_of_permutations_at_least_as_extreme() -> None:
    line = [0.1, 0.2, 0.3, 0.4, 0.9, 1.0, 1.1, 1.2]
    ((point,),) = find_change_points([line])

    def largest(order: tuple[float, ...]) -> float:
        values = np.array(order) - np.mean(order)
        return max(abs(values[:t].sum()) / np.sqrt(t * (8 - t) / 8) for t in (3, 4, 5))

    observed = largest(tuple(line))
    share = np.mean([largest(order) >= observed - 1e-12 for order in itertools.permutations(line)])
    assert point.p == pytest.approx(share, abs=4 * np.sqrt(share / 9999))
    assert (point.place, point.before, point.after) == (4, pytest.approx(0.25), pytest.approx(1.05))


def test_two_changes_are_found_and_an_outlier_is_ignored() -> None:
    rng = np.random.default_rng(1)
    levels = np.repeat([0.5, 0.6, 0.55], 12)
    (points,) = find_change_points([(levels + rng.normal(0, 0.01, 36)).tolist()])
    assert [point.place for point in points] == [12, 24]
    assert [round(point.after, 2) for point in points] == [
        pytest.approx(0.58, abs=0.03),
        pytest.approx(0.55, abs=0.01),
    ]
    outlier = [0.5, 0.51, 0.49, 0.5, 0.51, 0.49, 0.5, 0.51, 0.49, 0.2]
    assert find_change_points([outlier]) == [[]]


def test_p_is_adjusted_over_lines_and_short_lines_have_no_change_points() -> None:
    line = [0.1, 0.2, 0.3, 0.4, 0.9, 1.0, 1.1, 1.2]  # p of about 0.03
    constant = [0.5] * 20
    assert find_change_points([line, constant]) == [[], []]
    assert find_change_points([line[: MIN_RUNS - 1]]) == [[]]
    assert find_change_points([]) == []
