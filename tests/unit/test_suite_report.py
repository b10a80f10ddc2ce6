"""Suite reports: numbers by hand, the page, regressions, gates, baselines, checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eval.problems.items import Item
from eval.report.compare import ComparisonError
from eval.report.report import Provenance
from eval.report.suite_comparison import problem_digests
from eval.report.suite_report import Models, write_suite_report
from eval.results.rows import Evaluation
from eval.results.statistics import holm, sign_flip_test
from eval.results.suite import Member, write_suite
from flows.cli import app
from tests.evaluations import make_row, make_rows, write_report, write_results

# rises by 6 of 20, falls by 8 of 20, falls by 1 of 4: McNemar p 2 / 2^6, 2 / 2^8, 1
OUTCOMES = {
    "algebra": ("r" * 4 + "w" * 16, "r" * 10 + "w" * 10),
    "words": ("r" * 16 + "w" * 4, "r" * 8 + "n" * 8 + "w" * 4),
    "tiny": ("rrrw", "rrww"),
}


def items_of(name: str, num_items: int) -> list[Item]:
    return [
        Item(str(i), ({"role": "user", "content": f"{name} {i}"},), str(i), "s", "1")
        for i in range(num_items)
    ]


def write(folder: Path, side: int, weights: dict[str, float], model: str, **texts: str) -> Path:
    """A suite with the outcomes of one side; `texts` renames the problems of some benchmarks."""
    for name in weights:
        outcome = OUTCOMES[name][side]
        write_results(folder / name, outcome, items_of(texts.get(name, name), len(outcome)), model)
    write_suite(
        folder, [Member(name, weight) for name, weight in weights.items()], next(iter(weights))
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides, a baseline without `tiny`, and the written report."""
    folder = tmp_path_factory.mktemp("suite")
    weights = {"algebra": 1.0, "words": 1.0, "tiny": 0.5}
    write(folder / "before", 0, weights, "base")
    write(folder / "after", 1, weights, "trained")
    write(folder / "instruct", 1, {"algebra": 1.0, "words": 1.0}, "instruct <b>")
    models = Models(folder / "before", folder / "after", {"instruct": folder / "instruct"})
    gates = ("words >= before - 1", "algebra >= instruct")
    write_report(models, None, folder / "report", Provenance(title="A <suite>"), gates)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "report.json").read_text())


def test_figures_by_hand(report: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in report["benchmarks"]}
    assert [round(row["difference"], 9) for row in rows.values()] == [0.3, -0.4, -0.25]
    ps = [2 / 2**6, 2 / 2**8, 1.0]
    assert [row["p"] for row in rows.values()] == ps
    assert [row["p_holm"] for row in rows.values()] == holm(ps)
    assert [row["direction"] for row in rows.values()] == ["up", "down", ""]
    pooled = report["pooled"]
    # Weights 1, 1 and 0.5: (0.3 - 0.4 - 0.125) / 2.5
    assert pooled["difference"] == pytest.approx(-0.09)
    assert pooled["before"] == pytest.approx((0.2 + 0.8 + 0.5 * 0.75) / 2.5)
    assert pooled["n"] == 44
    # Changed items weigh 1/50 (algebra, words) and 1/20 (tiny): sums 0.02 * s + 0.05 * t, s the sum
    # of 14 signs. Observed |0.02 * (6 - 8) - 0.05| = 0.09: as far out are |s| >= 2 with t of its
    # sign, |s| >= 7 with the other.
    # P(|s| >= 2), P(|s| >= 8)
    s = (sign_flip_test([1] * 8 + [-1] * 6).p, sign_flip_test([1] * 11 + [-1] * 3).p)
    assert pooled["p"] == pytest.approx((s[0] + s[1]) / 2, abs=1e-9)


def test_the_verdict_names_every_regression_and_failed_gate(report: dict[str, Any]) -> None:
    low, high = (f"{100 * bound:+.1f}" for bound in report["pooled"]["ci95"])
    assert report["sentences"] == [
        "Pooled over 3 benchmarks (44 problems), accuracy changed by -9.0 points, not "
        f"significantly (95 % interval {low} to {high}, p = 0.42), from 55.0 % to 46.0 %.",
        "Headline algebra: 20.0 % to 50.0 %, +30.0 points (p = 0.031, Holm 0.062).",
        "FELL: words -40.0 points (p = 0.0078, Holm 0.023).",
        "Rose: algebra +30.0 points (p = 0.031, Holm 0.062).",
        "Lower, but not significantly: tiny -25.0.",
        "GATES FAILED, 1 of 2: words >= before - 1 (measured 40, threshold 79 %).",
    ]
    assert report["verdict"] == " ".join(report["sentences"])
    assert report["is_failed"]
    assert (report["before"]["accuracy"], report["n"]) == (0.2, 20)  # the headline's own


def test_a_baseline_is_compared_with_both_sides_and_its_missing_benchmarks_are_named(
    report: dict[str, Any],
) -> None:
    (baseline,) = report["baselines"]
    assert baseline["missing"] == {"tiny": "it was not evaluated"}
    assert [row["difference"] for row in baseline["after"]["benchmarks"]] == [0, 0]
    assert [round(row["difference"], 9) for row in baseline["before"]["benchmarks"]] == [-0.3, 0.4]
    assert baseline["before"]["benchmarks"][0]["before"] == 0.5


@pytest.mark.slow
def test_a_fall_below_last_night_is_named_despite_the_average(folder: Path) -> None:
    nights = {"last-night": folder / "before"}
    provenance = Provenance(
        facts={"since the first night": "better than the first night, 20260101 (+3.0 points)"}
    )
    report = write_suite_report(
        Models(folder / "before", folder / "after", nights), None, None, provenance
    )
    sentence = next(one for one in report["sentences"] if "last night" in one)
    assert sentence.startswith(
        "The trained model is not significantly different from last night's: pooled over 3 "
        "benchmarks, -9.0 points"
    )
    assert sentence.endswith("BELOW last night: words -40.0 points (p = 0.0078, Holm 0.023).")
    assert "The trained model is better than the first night, 20260101" in report["verdict"]
    words = {side: folder / side / "words" for side in ("before", "after")}
    models = Models(**words, baselines={"last-night": words["before"]})
    alone = write_suite_report(models, None, None)
    assert "The trained model is WORSE than last night's: -40.0 points" in alone["verdict"]
    assert "BELOW" not in alone["verdict"]


def test_the_page_agrees_with_the_json(folder: Path, report: dict[str, Any]) -> None:
    page = (folder / "report" / "report.html").read_text()
    fields = dict(re.findall(r'data-field="([^"]*)"[^>]*>([^<]*)<', page))
    assert fields["benchmarks/1/difference"] == "-40.0"
    assert fields["pooled/difference"] == "-9.0"
    assert fields["baselines/0/before/benchmarks/1/difference"] == "+40.0"
    # benchmarks, gates, baseline: red marks regressions and failures
    assert re.findall('<tr class="(up|down|total)"', page)[:4] == ["up", "down", "total", "down"]
    assert "<b>" not in page.replace("instruct &lt;b&gt;", "")
    assert "<script" not in page
    assert all(f'href="{name}/report.html"' in page for name in OUTCOMES)
    text = (folder / "report" / "report.md").read_text()
    assert re.search(r"\| words +\| +20 \| 80.0 % \| 40.0 % \| +-40.0 .* FELL \|", text)
    assert max(map(len, text.splitlines())) <= 100
    own = json.loads((folder / "report" / "words" / "report.json").read_text())
    assert (own["title"], own["num_lost"]) == ("A <suite>: words", 8)
    assert own["measured"]["benchmark"] == "words, 20 items"


def test_a_problem_shared_by_two_benchmarks_counts_once_in_the_pool(tmp_path: Path) -> None:
    # The four problems of `tiny` are the first four of `algebra`, which are right on both sides
    # there.
    weights = dict.fromkeys(OUTCOMES, 1.0)
    before = write(tmp_path / "before", 0, weights, "base", tiny="algebra")
    after = write(tmp_path / "after", 1, weights, "trained", tiny="algebra")
    report = write_suite_report(Models(before, after), None, None)
    assert [row["num_elsewhere"] for row in report["benchmarks"]] == [0, 0, 4]
    assert report["pooled"]["n"] == 40
    assert report["pooled"]["difference"] == pytest.approx((0.3 - 0.4) / 2)
    assert report["benchmarks"][2]["difference"] == -0.25  # its own row keeps them
    assert report["notes"][0].startswith("4 problems of tiny also occur in an earlier benchmark")


def test_the_common_benchmarks_are_compared_and_the_others_named(tmp_path: Path) -> None:
    before = write(tmp_path / "before", 0, {"tiny": 1.0, "algebra": 1.0}, "base")
    after = write(tmp_path / "after", 1, {"words": 1.0, "algebra": 1.0, "tiny": 1.0}, "trained")
    report = write_report(Models(before, after), None, tmp_path / "report")
    assert [row["name"] for row in report["benchmarks"]] == ["algebra", "tiny"]
    assert report["headline"] == "tiny"  # before's, since after's is not shared
    assert report["not_compared"] == {"before": [], "after": ["words"]}
    for name in ("report.md", "report.html"):
        assert "Not compared: words (only after)." in (tmp_path / "report" / name).read_text()


def test_one_common_benchmark_is_reported_alone_and_none_refused(tmp_path: Path) -> None:
    before = write(tmp_path / "before", 0, {"algebra": 1.0, "tiny": 1.0}, "base")
    after = write(tmp_path / "after", 1, {"algebra": 1.0, "words": 1.0}, "trained")
    report = write_report(Models(before, after), None, tmp_path / "report")
    assert report["verdict"].endswith("Not compared: tiny (only before); words (only after).")
    assert report["difference"] == pytest.approx(0.3)
    with pytest.raises(ComparisonError) as error:
        write_suite_report(Models(before / "tiny", after), None, None)
    assert "no common benchmark: own before; algebra, words after" in str(error.value)


def test_one_stored_evaluation_on_both_sides_is_reported_as_such(tmp_path: Path) -> None:
    side = write(tmp_path / "before", 0, dict.fromkeys(OUTCOMES, 1.0), "base")
    report = write_suite_report(Models(side, side), None, None)
    [sentence] = report["sentences"]
    assert sentence.startswith("Both sides are the same stored evaluations of 3 benchmarks")


@pytest.mark.parametrize(
    ("gate", "status"), [("words >= before - 50", 0), ("words >= before - 1", 3)]
)
def test_a_failed_gate_is_exit_status_3(folder: Path, gate: str, status: int) -> None:
    words = ["compare", str(folder / "before"), str(folder / "after"), "--gate", gate]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == status
    assert ("GATES FAILED" in done.stdout) == (status == 3)


def test_gates_of_a_single_benchmark_are_in_its_own_report(folder: Path, tmp_path: Path) -> None:
    models = Models(
        folder / "before" / "words",
        folder / "after" / "words",
        {"other": folder / "after" / "words"},
    )
    gates = ("words.no_answer <= 5", "pooled >= other")
    report = write_report(models, None, tmp_path / "report", Provenance(), gates)
    assert [gate["is_passed"] for gate in report["gates"]] == [False, True]
    assert report["verdict"].endswith(
        "GATES FAILED, 1 of 2: words.no_answer <= 5 (measured 40, threshold 5 %)."
    )
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h2>Gates</h2>" in page
    assert "<h2>Compared with other</h2>" in page
    assert "`words.no_answer <= 5`" in (tmp_path / "report" / "report.md").read_text()


def test_the_best_checkpoint_is_chosen_on_one_half_and_measured_on_the_other(
    tmp_path: Path,
) -> None:
    items = items_of("curve", 60)
    by_problem = {item.id: digest for item, digest in zip(items, digests(items), strict=True)}
    second = [int(by_problem[item.id][-1], 16) % 2 == 1 for item in items]

    def evaluated(name: str, first_half: int, second_half: int) -> Path:
        """An evaluation with this many right responses in each half."""
        left = {False: first_half, True: second_half}
        letters = ""
        for half in second:
            letters += "r" if left[half] > 0 else "w"
            left[half] -= 1
        return write_results(tmp_path / name, letters, items, name)

    models = Models(
        evaluated("before", 2, 2),
        evaluated("after", 10, 20),
        checkpoints={20: evaluated("s20", 15, 5), 40: evaluated("s40", 12, 22)},
        last_step=60,
        absent={"step 50": "no room"},
    )
    report = write_report(models, None, tmp_path / "report", Provenance(title="T"))
    curve, best = report["checkpoints"], report["checkpoints"]["best"]
    assert curve["steps"] == (0, 20, 40, 60)
    assert [share["accuracy"] for share in curve["pooled"]] == [4 / 60, 20 / 60, 34 / 60, 30 / 60]
    # Step 20 wins on the first half by luck and is far behind on the second.
    assert (best["step"], best["num_reported_on"]) == (20, sum(second))
    assert best["reported"]["accuracy"] == 5 / sum(second)
    assert best["change"]["difference"] == pytest.approx((5 - 20) / sum(second))
    page = (tmp_path / "report" / "checkpoints.html").read_text()
    assert f"The best of 4 steps is 20, chosen on {60 - sum(second)} of the problems" in page
    assert page.count("<svg") == 1
    assert 'href="checkpoints.html"' in (tmp_path / "report" / "report.html").read_text()
    assert "step 50 is not shown: no room" in (tmp_path / "report" / "report.md").read_text()


def test_one_question_about_two_pictures_is_two_problems() -> None:
    item = items_of("How many?", 1)[0]
    rows = [make_row(item, "r", id=name, images=[name]) for name in ("a.png", "b.png")]
    assert len({*problem_digests(Evaluation.of({}, rows)).values()}) == 2


def digests(items: list[Item]) -> list[str]:
    rows = Evaluation.of({}, make_rows(items, "r" * len(items)))
    return list(problem_digests(rows).values())
