"""mean@N, best@n, worst@n and maj@n: by hand, and against draws as verl makes them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dapo_core.draw.groups import Rollout
from dapo_core.validation import sample_metrics
from tests.batches import make_group

TEMPLATE = make_group([1.0]).rollouts[0]


def rollouts(accs: Sequence[float], answers: Sequence[str | None] | None = None) -> list[Rollout]:
    answers = answers or [None] * len(accs)
    return [
        replace(TEMPLATE, acc=acc, score=2 * acc - 1, overlong_penalty=-0.5, answer=answer)
        for acc, answer in zip(accs, answers, strict=True)
    ]


def test_metric_names_are_verls() -> None:
    one = sample_metrics("gsm8k", [rollouts([1.0])], 1)
    assert set(one) == {
        "val-core/gsm8k/acc/mean@1",
        "val-aux/gsm8k/score/mean@1",
        "val-aux/gsm8k/reward/mean@1",
    }
    names = set(sample_metrics("a/b", [rollouts([1.0] * 6, ["1"] * 6)], 6))
    parts = {"best", "worst", "maj"}
    ofs = {
        f"{part}@{n}/{number}" for part in parts for n in (2, 4, 6) for number in ("mean", "std")
    }
    core = {"mean@6", *(name for name in ofs if "@6" in name and not name.startswith("worst"))}
    expected = {f"val-core/a/b/acc/{name}" for name in core}
    expected |= {f"val-aux/a/b/acc/{name}" for name in (ofs | {"std@6"}) - core}
    expected |= {
        f"val-aux/a/b/{value}/{name}"
        for value in ("score", "reward")
        for name in ofs | {"mean@6", "std@6"}
    }
    assert names == expected


def test_matches_hand_computed_values() -> None:
    """Two prompts: one right of four, and all right."""
    metrics = sample_metrics("set", [rollouts([0.0, 1.0, 0.0, 0.0]), rollouts([1.0] * 4)], 4)
    assert metrics["val-core/set/acc/mean@4"] == 0.625
    assert metrics["val-aux/set/acc/std@4"] == pytest.approx(np.sqrt(3 / 16) / 2)
    best = 1 - 0.75**2  # of two draws one at least is the right one
    assert metrics["val-aux/set/acc/best@2/mean"] == pytest.approx((best + 1) / 2)
    assert metrics["val-aux/set/acc/best@2/std"] == pytest.approx(np.sqrt(best * (1 - best)) / 2)
    assert metrics["val-aux/set/acc/worst@2/mean"] == pytest.approx((1 / 16 + 1) / 2)  # both are
    assert metrics["val-core/set/acc/best@4/mean"] == pytest.approx((1 - 0.75**4 + 1) / 2)
    assert metrics["val-aux/set/score/worst@4/mean"] == pytest.approx((2 / 256 - 1 + 1) / 2)
    assert metrics["val-aux/set/reward/mean@4"] == pytest.approx(0.25 - 0.5)


def drawn(
    values: Sequence[float], n: int, choose: Callable[[list[int]], int]
) -> tuple[float, float]:
    """Mean and std of what 20,000 draws of n give."""
    draw = random.Random(0)
    taken = [values[choose([draw.randrange(len(values)) for _ in range(n)])] for _ in range(20_000)]
    return float(np.mean(taken)), float(np.std(taken))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4, 8, 11])
def test_best_and_worst_equal_many_random_draws(n: int) -> None:
    accs = [0.0, 0.25, 1.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.75, 0.0, 0.1]
    answers = ["7", "8", "9", "8", "7", "9", None, None, "8", None, None]

    def majority(places: list[int]) -> int:
        counts: dict[str | None, list[int]] = {}
        for place in places:
            counts.setdefault(answers[place], []).append(place)
        return max(counts.values(), key=len)[0]  # of equals the first, its first response

    metrics = sample_metrics("set", [rollouts(accs, answers)], len(accs))
    choices: dict[str, Callable[[list[int]], int]] = {
        "best": lambda places: max(places, key=accs.__getitem__),
        "worst": lambda places: min(places, key=accs.__getitem__),
        "maj": majority,
    }
    for name, choose in choices.items():
        section = "val-core" if n == len(accs) and name != "worst" else "val-aux"
        mean, std = drawn(accs, n, choose)
        close = 0.05 if name == "maj" else 0.01  # 1,000 draws instead of all
        assert metrics[f"{section}/set/acc/{name}@{n}/mean"] == pytest.approx(mean, abs=close)
        assert metrics[f"{section}/set/acc/{name}@{n}/std"] == pytest.approx(std, abs=close)


def test_majority_voting_is_deterministic_and_needs_answers() -> None:
    asked = [
        rollouts([1.0, 0.0, 0.0, 1.0], ["1", "2", "3", "1"]),
        rollouts([0.0] * 3, ["1", "2", "3"]),
    ]
    metrics = sample_metrics("set", asked, 4)
    assert metrics == sample_metrics("set", asked, 4)
    # 0.594 of the first, none of the second
    assert 0.25 < metrics["val-core/set/acc/maj@4/mean"] < 0.35
    assert not [name for name in sample_metrics("set", [rollouts([1.0] * 4)], 4) if "maj" in name]
