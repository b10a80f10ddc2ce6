"""The paired comparison of scores, `eval.paired`, on arrays and tables with known answers."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from eval import paired
from eval.report.gates import GateError
from eval.results.scores import Response, ScoresError
from eval.results.statistics import sign_flip_test

PAGE = Path(__file__).resolve().parents[2] / "docs/paired.md"


def flipped(gained: int, lost: int, kept: int) -> tuple[list[int], list[int]]:
    """Right or wrong before and after: `kept` items stay right."""
    return [0] * gained + [1] * (lost + kept), [1] * gained + [0] * lost + [1] * kept


def test_single_responses_are_tested_by_mcnemar_and_both_directions_are_found() -> None:
    before, after = flipped(gained=10, lost=28, kept=462)
    result = paired.compare(before, after)
    # binomial, 38 flips: 2 * P(at most 10) = 0.0051
    assert result.p == pytest.approx(0.0051, abs=5e-5)
    assert (result.direction, result.difference) == ("worse", pytest.approx(-18 / 500))
    assert result.ci95[0] < result.difference < result.ci95[1] < 0
    assert "10 better, 28 worse" in result.verdict
    back = paired.compare(after, before)
    assert (back.direction, back.p) == ("better", result.p)
    assert back.ci95 == pytest.approx((-result.ci95[1], -result.ci95[0]))


def test_samples_of_an_item_are_averaged_and_not_counted_as_items() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.integers(0, 2, (40, 4)), rng.integers(0, 2, (40, 4))
    result = paired.compare(before, after)
    changes = (after.sum(axis=1) - before.sum(axis=1)).tolist()
    assert result.p == sign_flip_test(changes).p
    assert (result.benchmarks[0].n, result.benchmarks[0].samples) == (40, (4, 4))
    assert result.difference == pytest.approx(after.mean() - before.mean())


def test_scores_of_any_scale_have_the_exact_p_of_all_sign_patterns() -> None:
    before = [3.0, 7.25, 1.5, 9.0, 4.0, 2.0, 8.5, 6.0]
    after = [4.5, 7.75, 3.5, 8.0, 6.25, 2.0, 9.5, 7.0]
    changes = np.subtract(after, before)
    signs = np.array(list(itertools.product((-1, 1), repeat=len(changes))))
    exact = (np.abs(signs @ changes) >= abs(changes.sum()) - 1e-9).mean()
    result = paired.compare(before, after)
    assert result.p == pytest.approx(exact)
    assert result.difference == pytest.approx(changes.mean())
    assert "5.156 before, 6.062 after, +0.906 (95" in result.verdict
    # a grid of 2**17 units cannot hold these exactly; the p of the rounded changes is close
    odd = [x + x**0.5 / 1000 for x in before]
    assert paired.compare(odd, after).p == pytest.approx(exact, abs=0.02)


def test_a_table_of_any_kind_is_the_array_it_lists() -> None:
    before, after = flipped(3, 9, 8)
    expected = paired.compare(before, after)
    columns = [{"item": range(20), "score": side} for side in (before, after)]
    rows = [
        [{"id": i, "correct": bool(x), "note": "-"} for i, x in enumerate(side)]
        for side in (before, after)
    ]
    arrow = [pa.table({"Item": list(range(20)), "Score": side}) for side in (before, after)]
    texts = [
        [{"item": i, "score": {0: "False", 1: " 1.0"}[x]} for i, x in enumerate(side)]
        for side in (before, after)
    ]
    shuffled = [rows[0], rows[1][::-1]]
    for sides in (columns, rows, arrow, texts, shuffled):
        found = paired.compare(*sides)
        assert (found.p, found.ci95) == (expected.p, expected.ci95)


def test_benchmarks_are_adjusted_by_holm_and_pooled() -> None:
    one, two = flipped(2, 12, 86), flipped(10, 8, 82)
    result = paired.compare({"a": one[0], "b": two[0]}, {"a": one[1], "b": two[1]})
    a, b = result.benchmarks
    assert a.p == sign_flip_test([1] * 2 + [-1] * 12).p == pytest.approx(0.0129, abs=1e-4)
    assert (a.p_holm, b.p_holm) == (pytest.approx(2 * a.p), b.p)
    assert (a.direction, b.direction) == ("worse", "")
    assert result.pooled is not None
    assert result.difference == pytest.approx((-0.10 + 0.02) / 2)
    assert "pooled over 2 benchmarks" in result.sentences[0]
    assert result.sentences[1].startswith("Worse: a -10.0 (p = 0.013, Holm 0.026)")
    assert result.markdown().count("| pooled") == 1


def test_benchmarks_with_different_units_are_not_pooled() -> None:
    result = paired.compare({"a": [0, 1] * 9, "b": [7, 9] * 9}, {"a": [1, 1] * 9, "b": [7, 8] * 9})
    assert result.pooled is None
    assert "Better: a +50.0" in result.verdict
    assert "Worse: b -0.5" in result.verdict
    with pytest.raises(ScoresError, match="units or directions"):
        _ = result.p
    assert "b" in result.markdown()
    assert "b" in result.html()


def test_a_lower_score_is_better_where_it_is_named() -> None:
    before, after = flipped(gained=2, lost=12, kept=86)
    sides = {"wer": before, "acc": before}, {"wer": after, "acc": after}
    result = paired.compare(*sides, lower_is_better=["wer"])
    wer, acc = result.benchmarks
    assert (wer.difference, wer.p, wer.ci95) == (acc.difference, acc.p, acc.ci95)
    assert (wer.direction, wer.num_better, wer.num_worse) == ("better", 12, 2)
    assert (acc.direction, acc.num_better, acc.num_worse) == ("worse", 2, 12)
    assert [(flip.before, flip.after) for flip in result.better if flip.benchmark == "wer"] == [
        (1, 0)
    ] * 12
    assert result.pooled is None  # directions differ
    assert "Better: wer ↓ -10.0" in result.verdict
    assert "| wer ↓ " in result.markdown()
    alone = paired.compare(before, after, lower_is_better=True)
    assert alone.verdict.startswith("Better: lower is better, 98.0 % before, 88.0 % after, -10.0")
    assert paired.compare(after, before, lower_is_better=True).direction == "worse"
    with pytest.raises(ScoresError, match="no benchmark cer on both sides"):
        paired.compare(*sides, lower_is_better="cer")


def test_a_benchmark_named_pooled_is_not_taken_for_all_together() -> None:
    sides = {"pooled": [0, 1], "math": [1, 1]}, {"pooled": [0, 1], "math": [0, 0]}
    with pytest.raises(ScoresError, match="named pooled, which stands for all 2 together"):
        paired.compare(*sides)
    result = paired.compare({"pooled": [1, 1]}, {"pooled": [1, 0]}).check(["pooled >= before"])
    assert [gate.is_passed for gate in result.gates] == [False]


def test_what_has_no_counterpart_is_left_out_and_counted() -> None:
    before = [
        Response("x", 1.0, sample="0"),
        Response("x", 0.0, sample="1"),
        Response("y", 1.0),
        Response("z", None),
    ]
    after = [Response("x", 1.0), Response("z", 1.0), Response("y", 0.0), Response("w", 1.0)]
    result = paired.compare(before, after)
    assert (result.benchmarks[0].n, result.difference) == (2, -0.5)
    assert result.notes == (
        "items without a scored counterpart, left out: 1 before, 2 after.",
        "samples without a counterpart, left out: 1 before, 0 after.",
    )


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ([], [1], "before: no scores"),
        ([[[1]]], [1], "before: an array of 3 dimensions"),
        (["good"], [1], "neither an array of numbers nor a table"),
        ([{"item": "a", "score": "B+"}], [1], r"before, row 1: the score 'B\+' is no number"),
        ([{"item": "a", "score": float("inf")}], [1], "row 1: the score is infinite"),
        ([{"item": np.nan, "score": 1}], [1], "row 1: no item"),
        ([{"name": "a", "points": 1}], [1], r"no column item .* its columns are name, points"),
        ([{"item": "a", "points": 1}], [1], r"no column score .*Rename the one .* the score"),
        ({"score": [1, 2], "item": ["a"]}, [1], "columns of different lengths"),
        ([{"item": "a", "score": 1, "epoch": 1}] * 2, [1], "'a' has two scores for sample '1'"),
        ([{"item": "a", "score": 1}], [{"item": "b", "score": 1}], "compare evaluations of the"),
        ({"a": [1, 0]}, {"a": [1, 0, 1]}, "a: 2 items before and 3 after: arrays hold the same"),
        ({"a": [1]}, {"b": [1]}, "no common benchmark: a before; b after"),
        (
            {"score": [1], "name": ["x"]},
            {"score": [1]},
            "before, name: neither an array of numbers",
        ),
        (
            [{"item": "a", "score": 1, "target": "4"}],
            [{"item": "a", "score": 1, "target": "5"}],
            "the gold differs in 1 of 1 items",
        ),
    ],
)
def test_scores_that_cannot_be_paired_are_refused_with_the_place(
    before: Any, after: Any, fault: str
) -> None:
    with pytest.raises(ScoresError, match=fault):
        paired.compare(before, after)


def test_gates_pass_fail_and_name_the_nearest_benchmark() -> None:
    before, after = flipped(gained=2, lost=4, kept=94)
    result = paired.compare({"math500": before}, {"math500": after})
    checked = result.check(["math500 >= before - 2", "pooled >= before - 1", "math500 > 95"])
    assert [gate.is_passed for gate in checked.gates] == [True, False, True]
    assert checked.is_failed
    assert "GATES FAILED, 1 of 3: pooled >= before - 1 (measured 96" in checked.verdict
    with pytest.raises(GateError, match=r"no benchmark math50 \(did you mean math500\?\)"):
        result.check(["math50 >= before"])
    with pytest.raises(GateError, match="is not of the form"):
        result.check(["math500 => before"])


def test_flips_show_the_responses_that_changed_and_the_page_escapes_them() -> None:
    before = [Response("q", 1.0, problem="2+2?", gold="4", response="<b>4</b>")]
    after = [Response("q", 0.0, problem="2+2?", gold="4", response="<script>5</script>")]
    result = paired.compare(before, after)
    assert [(one.item, one.response_before) for one in result.worse] == [("q", "<b>4</b>")]
    page = result.html()
    assert "&lt;script&gt;5" in page
    assert "<script>5" not in page
    assert result.to_json()["worse"][0]["response_after"] == "<script>5</script>"


def test_ten_thousand_items_are_compared_in_seconds() -> None:
    rng = np.random.default_rng(1)
    before = rng.random(10_000)
    result = paired.compare(before, np.clip(before + rng.normal(0.01, 0.3, 10_000), 0, 1))
    assert result.benchmarks[0].n == 10_000
    assert len(result.html()) < 1_000_000


def test_the_examples_of_the_page_run_and_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, scores in (("before", "101100"), ("after", "111110")):
        lines = [f"{number},{score}" for number, score in enumerate(scores)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["item,score", *lines]))
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE.read_text(), re.MULTILINE)
    examples = [block for block in blocks if "paired.compare" in block]
    assert len(examples) == 3
    for block in examples:
        code = "\n".join(line[4:] for line in block.splitlines())
        exec(code, {})
        expected = re.findall(r"# prints (.*)", code)
        printed = capsys.readouterr().out.splitlines()
        assert expected
        assert [line for line in printed if line in expected] == expected


@pytest.mark.slow
def test_the_library_loads_no_package_of_the_chain() -> None:
    code = "from eval import paired; import eval.logs.scored, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "ray", "vllm", "prefect", "transformers", "matplotlib"}
