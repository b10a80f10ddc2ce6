"""Comparisons and reports: numbers by hand, sentences, refusals, escaping."""

import base64
import hashlib
import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from eval.answers.grading import AISBench, MathGrader
from eval.endpoint import Sampling
from eval.report.breakdown import Speed, measure_speed
from eval.report.compare import ComparisonError, compare, compare_evaluations
from eval.report.pages import format_duration
from eval.report.plots import accuracy_plots, training_plots
from eval.report.report import (
    UNKNOWN,
    Provenance,
    describe_measurement,
    make_report,
    render_markdown,
    verdict,
)
from eval.report.suite_report import Models, write_suite_report
from eval.report.training import (
    consistency,
    read_training_metrics,
    training_totals,
    usage_lines,
    with_derived,
)
from eval.results.rows import Evaluation, ResultsError
from tests.evaluations import (
    compared,
    evaluation,
    make_items,
    make_row,
    make_rows,
    packed_items,
    settings_of,
    write_report,
    write_results,
)

ITEMS = make_items(8)
#         id: 0123 4567; levels 1 and 2
BEFORE = "rrwn wtfr"
AFTER = "rwrr wrrr"
OUTCOMES = ("kept", "all_right", "all_wrong", "all_equal", "surplus")


def write_metrics(path: Path) -> Path:
    """Three steps, the second trained twice, and a torn line."""
    steps: list[dict[str, Any]] = [
        {
            "step": step,
            "critic/score/mean": -0.5 + step / 10,
            "timing_s/gen": 1.0,
            "timing_s/step": 2.5,
            "perf/trained_response_tokens": 100 * step,
            "perf/generated_tokens": 250,
        }
        for step in (1, 2, 3)
    ]
    lines = [
        json.dumps(step)
        for step in (steps[0], {**steps[1], "perf/generated_tokens": 9}, *steps[1:])
    ]
    path.write_text("\n".join(lines) + '\n{"step": 4, "critic')
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both evaluations, metrics.jsonl, and their report."""
    folder = tmp_path_factory.mktemp("report")
    write_suite_report(
        Models(
            write_results(folder / "before", BEFORE, ITEMS, "base"),
            write_results(folder / "after", AFTER, ITEMS, "trained"),
        ),
        write_metrics(folder / "metrics.jsonl"),
        folder / "report",
        Provenance(
            title="A <test>",
            stages={
                "train": {"cached": False, "seconds": 125.0},
                "merge": {"cached": True, "seconds": 0.02},
            },
            artifacts={"merged model": folder / "merged"},
            traces={"step_000002_rank_1": "../train_policy/profiles/step_000002_rank_1.json"},
        ),
    )
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "report.json").read_text())


def test_report_numbers_by_hand(report: dict[str, Any], folder: Path) -> None:
    # Item 6 failed before and is left out: 7 pairs, ids 0-5 and 7.
    # before right: 0, 1, 7 = 3/7; after right: 0, 2, 3, 5, 7 = 5/7. Lost: 1. Gained: 2, 3, 5.
    assert report["n"] == 7
    assert report["before"]["accuracy"] == 3 / 7
    assert report["after"]["accuracy"] == 5 / 7
    assert report["difference"] == 2 / 7
    # 2 * (1 + 4) / 2^4; mid-p (2 * 5 - 4) / 2^4
    assert report["mcnemar"] == {"b": 1, "c": 3, "p": 0.625, "mid_p": 0.375}
    assert (report["test"], report["p"], report["mid_p"]) == ("exact McNemar", 0.625, 0.375)
    assert [flip["id"] for flip in report["flips"]["lost"]] == ["1"]
    assert [flip["id"] for flip in report["flips"]["gained"]] == ["2", "3", "5"]
    rates = ("no_answer_rate", "truncated_rate", "request_failed_rate")
    assert [report["before"][name] for name in rates] == [1 / 7, 1 / 7, 1 / 8]
    assert report["after"]["request_failed_rate"] == 0.0
    levels = {key: (x["n"], x["before"]) for key, x in report["groups"]["level"].items()}
    assert levels == {"1": (4, 0.5), "2": (3, 1 / 3)}
    assert list(report["transitions"]["wrong"].values()) == [1, 1, 0, 0]  # right, wrong, ...
    assert report["ci95"][0] < 2 / 7 < report["ci95"][1]
    # 100 + 200 + 300 trained; step 2 was trained twice, its last line counts: 3 * 250 generated.
    totals = {"steps": 3, "tokens_trained": 600, "tokens_generated": 750, "seconds": 7.5}
    assert report["train"].items() >= totals.items()
    assert report["stages"]["merge"] == {"cached": True, "seconds": 0.02}
    assert report["artifacts"] == {"merged model": str(folder / "merged")}
    trace = "../train_policy/profiles/step_000002_rank_1.json"
    assert f"- [step_000002_rank_1]({trace})" in (folder / "report" / "report.md").read_text()
    page = (folder / "report" / "report.html").read_text()
    assert f'<a href="{trace}">step_000002_rank_1</a>.' in page
    assert report["items"]["1"] == [1, 0]
    assert report["items"]["6"] == [None, 1]
    assert (report["before"]["model"], report["after"]["model"]) == ("base", "trained")
    assert report["settings"]["sampling"]["max_tokens"] == 64
    assert "model" not in report["settings"]
    flip = report["flips"]["gained"][1]
    shown = {"problem": "3 + 1 | <b>?", "gold": "4", "level": "1", "subject": "add"}
    assert shown.items() <= flip.items()
    texts = {"answer": None, "response": "no idea", "num_left_out": 0}
    assert flip["before"] == {"verdict": "no_answer", "num_right": 0, **texts}
    assert flip["after"]["answer"] == "4"


def test_failed_requests_bound_the_difference_over_all_items(report: dict[str, Any]) -> None:
    # Seven pairs changed by +2 together; item 6, right after, would have changed by 0 or by 1: 2/8
    # to 3/8.
    unpaired = {"num_items": 1, "before": 1, "after": 0, "difference_range": [0.25, 0.375]}
    assert report["unpaired"] == unpaired
    assert report["verdict"].endswith(
        "the change over all 8 items lies between +25.0 and +37.5 points."
    )


def test_the_change_is_split_into_format_and_content_and_by_group(report: dict[str, Any]) -> None:
    # Format: items 3 (no answer) and 5 (truncated) became right, none the reverse. Content: 2
    # gained, 1 lost.
    parts = {name: part["difference"] for name, part in report["gain"].items()}
    assert parts == {"format": 2 / 7, "no_answer": 1 / 7, "truncated": 1 / 7, "content": 0.0}
    assert report["gain"]["content"]["ci95"][0] < 0 < report["gain"]["content"]["ci95"][1]
    # Level 1: items 0-3, one lost and two gained, 2 * (1 + 3) / 2^3 = 1. Level 2: one gained of
    # three.
    level = report["groups"]["level"]["1"]
    figures = {"n": 4, "difference": 0.25, "gained": 2, "lost": 1, "p": 1.0}
    assert figures.items() <= level.items()
    assert report["groups"]["level"]["2"]["difference"] == 1 / 3
    assert level["ci95"][0] < 0 < level["ci95"][1]
    assert report["groups"]["subject"]["add"]["p"] == 0.625
    assert report["groups"]["subject"]["add"]["p_holm"] == 1.0  # 3 * 0.625, at most 1
    assert (report["num_groups"], report["expected_false_alarms"]) == (3, pytest.approx(0.15))


@pytest.mark.parametrize("num_samples", [1, 3])
def test_format_and_content_add_up_to_the_difference(num_samples: int) -> None:
    rng = random.Random(num_samples)
    sides = [
        " ".join("".join(rng.choices("rwnt", k=num_samples)) for _ in range(40)) for _ in range(2)
    ]
    result = compared(*sides)
    assert result.gain["format"].difference + result.gain["content"].difference == pytest.approx(
        result.difference
    )
    assert sum(sum(row.values()) for row in result.transitions.values()) == pytest.approx(40)


def test_several_samples_by_hand() -> None:
    # Item 0: 1 to 3 of 4 right, item 1: 2 to 1, item 2: 4 to 4. Changes 2, -1, 0: 1 of 12.
    result = compared("rwwn rrww rrrr", "rrrw rwwt rrrr")
    assert (result.n, result.num_samples) == (3, 4)
    assert (result.before.right, result.before.accuracy) == (7, 7 / 12)
    assert result.difference == pytest.approx(1 / 12)
    # Signs of 2 and 1: sums 3, 1, -1, -3, all at least as far out as 1; two of them further.
    assert (result.test, result.p, result.mid_p) == ("exact sign-flip", 1.0, 0.75)
    assert (result.c, result.b) == (1, 1)
    assert list(result.metrics) == ["avg@4", "pass@2", "pass@4", "maj@4"]
    # Item 0: 2 samples wrong before and 3 right after, of 16 ways to pair them: 6/16 to right; back
    # 1/16. Item 1: 2 wrong and 1 right, 2 right and 2 wrong: 2/16 - 4/16. Content (6 - 1 - 2) / 16
    # / 3.
    assert result.gain["content"].difference == pytest.approx(3 / 48)
    assert result.transitions["wrong"]["right"] == pytest.approx((6 + 2) / 16)
    # The flip shows one sample that was not right before and one that is right after.
    flip = result.gained[0]
    assert (flip.before["verdict"], flip.before["num_right"]) == ("wrong", 1)
    assert (flip.after["verdict"], flip.after["num_right"]) == ("right", 3)
    report = make_report(result, [])
    assert report["mcnemar"] is None
    assert "1 items better, 1 worse, exact sign-flip p = 1" in verdict(result)


def test_both_graders_and_their_disagreements() -> None:
    before = make_rows(ITEMS, "rrrr wwww")
    after = make_rows(ITEMS, "rrrr rrww")
    before[0] = replace(before[0], aisbench=AISBench("1.0", False, False))
    after[7] = replace(after[7], aisbench=AISBench("-1", True, True))
    result = compare_evaluations(
        *(Evaluation.of(settings_of(ITEMS), rows) for rows in (before, after))
    )
    graders = result.graders
    assert (graders.before, graders.after, graders.difference) == (3 / 8, 7 / 8, 0.5)
    assert graders.p == 0.125  # none lost, four gained: 2 / 2^4
    # right for both, for the exact grader only, for AISBench only, for neither
    counts = {side: tuple(found.values()) for side, found in graders.agreement.items()}
    assert counts == {"before": (3, 1, 0, 4), "after": (6, 0, 1, 1)}
    assert graders.raises == {"before": 0, "after": 1}
    assert [
        (row["side"], row["id"], row["aisbench"]["is_right"]) for row in graders.disagreements
    ] == [("before", "0", False), ("after", "7", True)]
    lines = render_markdown(make_report(result, [])).splitlines()
    assert "Disagreements (2):" in lines
    assert [
        line.replace("|", "").split() for line in lines if "exact |" in line or "AISBench |" in line
    ] == [["`0`", "before", "`1`", "exact", "`1`"], ["`7`", "after", "`8`", "AISBench", "`-1`"]]


def test_facts_and_speed_of_the_measurement() -> None:
    items = make_items(4)
    # In flight from 998 to 1002 and, after a pause, from 1102 to 1104: 60 tokens in 6 s.
    ends = (1000.0, 1002.0, 1104.0, 1104.0)
    rows = [
        replace(row, ended_at=end, seconds=2.0, response_tokens=15)
        for row, end in zip(make_rows(items, "rwnt"), ends, strict=True)
    ]
    settings = settings_of(items, "d" * 64, benchmark="math500")
    side = Evaluation.of(settings, rows)
    result = compare_evaluations(side, Evaluation.of({**settings, "model": "trained"}, rows))
    assert result.before.speed == Speed({"50": 2.0, "95": pytest.approx(2.0), "max": 2.0}, 60 / 6)
    assert (result.before.num_finished, result.before.finished_accuracy) == (2, 0.5)
    assert result.before.accuracy == 0.25
    provenance = Provenance(
        "t", "sums", {"before": "qwen"}, {"vllm": "0.32.0"}, "e" * 64, {"recipe": "arith"}
    )
    report = make_report(result, [], provenance)
    assert report["measured"] == {
        "benchmark": "math500, 4 items",
        "model before": "qwen (sha256 dddddddddddd)",
        "model after": "trained",
        "prompt": "given, chat/completions",
        "sampling": "greedy, at most 64 tokens, seed 1234",
        "engine": "vllm 0.32.0",
        "grader": MathGrader.rule,
        "data": "sha256 eeeeeeeeeeee",
    }
    assert report["provenance"] == {"recipe": "arith"}
    lines = render_markdown(report).splitlines()
    assert "- benchmark: math500, 4 items" in lines
    assert any(line.replace(" ", "").startswith("|finishedresponsesonly|50.0%|") for line in lines)
    served = {"before": "vllm-0.32.0-0123abcd", "after": "vllm-0.33.0-4567abcd"}
    sides = {side: replace(getattr(result, side), engine=engine) for side, engine in served.items()}
    engine = describe_measurement(replace(result, **sides), UNKNOWN)["engine"]
    assert engine == "before vllm-0.32.0, after vllm-0.33.0"
    old = [replace(row, ended_at=None) for row in rows]
    assert measure_speed(old).tokens_per_second is None


def test_lengths_are_in_tokens_if_the_server_counted_all() -> None:
    items = make_items(4)
    rows = [make_row(item, "r", response_tokens=10 * (n + 1)) for n, item in enumerate(items)]
    lengths = compare_evaluations(*2 * [Evaluation.of(settings_of(items), rows)]).lengths
    assert lengths.unit == "tokens"
    names = ("5", "25", "50", "75", "95", "mean", "max")
    quantiles = dict(zip(names, (11.5, 17.5, 25.0, 32.5, 38.5, 25.0, 40.0), strict=True))
    assert lengths.quantiles["before"] == pytest.approx(quantiles)
    assert lengths.edges[-1] == 40
    assert sum(lengths.histogram["after"]) == 4
    rows[0] = replace(rows[0], response_tokens=None)
    lengths = compare_evaluations(*2 * [Evaluation.of(settings_of(items), rows)]).lengths
    assert lengths.unit == "characters"
    assert lengths.quantiles["before"]["max"] == len(rows[0].response or "")


def test_html_is_self_contained_and_runs_only_the_bundled_script(folder: Path) -> None:
    page = (folder / "report" / "report.html").read_text()
    assert page.count("<script") == 1
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
    assert f"default-src 'none'; {allowed}" in policy[1]
    index, bodies = packed_items(page)
    assert " ".join(f"{row[0]} {row[4]}" for row in index) == (
        "1 lost 2 gained 3 gained 5 gained 0 right 4 wrong 6 failed 7 right"
    )
    assert all("<script" not in body and "3 + 1 | <b>" not in body for body in bodies)
    assert "&lt;script&gt;hacked = 1&lt;/script&gt;&lt;/script&gt;" in bodies[0]
    assert "3 + 1 | &lt;b&gt;?" in bodies[2]
    assert "HTTP 500: boom" in bodies[6]
    assert "<title>A &lt;test&gt;</title>" in page
    # accuracy by level and subject, components, lengths, transitions; score, seconds and tokens of
    # training
    assert page.count("<svg") == 8
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', page)
    assert labels[0] == "Accuracy before and after, by level"
    assert labels[1].startswith("Components of the difference")  # format and content
    assert not re.search(r"""(?:src|href)=["'](?!#|data:|\.\./train_policy/)""", page)
    assert not re.search(r"#0[0-9a]0[0-9a]0[0-9a]\b", page)  # every placeholder colour was replaced


def test_plots_are_well_formed_for_any_level_name() -> None:
    items = [replace(item, level="$x^ <&>", subject="a_$b$ & <c>") for item in ITEMS]
    result = compare_evaluations(evaluation(items, "w" * 8), evaluation(items, "r" * 8))
    plots = accuracy_plots(result)
    words = " ".join(
        text for plot in plots for text in ElementTree.fromstring(plot).itertext()
    ).split()
    assert {"level", "$x^", "<&>", "a_$b$", "&", "<c>"} <= set(words)


def test_markdown_is_narrow_and_its_tables_survive_pipes(tmp_path: Path) -> None:
    changes = {"gold": "1|2", "subject": "a|b"}
    items = [
        replace(item, id=f"test/some_subject/{i}|0.json", **changes) for i, item in enumerate(ITEMS)
    ]
    before = write_results(tmp_path / "b", "w" * 8, items)
    after = write_results(tmp_path / "a", "r" * 8, items)
    write_report(Models(before, after), None, tmp_path / "report")
    lines = (tmp_path / "report" / "report.md").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    tables: list[list[str]] = [[]]
    for line in lines:
        tables[-1].append(line) if line.startswith("|") else tables.append([])
    for table in filter(None, tables):
        assert {len(line) for line in table} == {len(table[0])}
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "## Gained (8)" in lines
    # ids keep their distinguishing end
    assert any("some_subject/7\\|0.json`" in line for line in lines)
    assert "## Training" not in lines


@pytest.mark.slow
def test_characters_that_the_font_lacks_or_utf8_cannot_encode(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    items = [replace(item, subject="基金从业") for item in ITEMS]
    rows = write_results(tmp_path / "before", "n" * 8, items) / "results.jsonl"
    # a server may send this
    rows.write_text(rows.read_text().replace("no idea", "no \\ud800 idea"))
    write_results(tmp_path / "after", "r" * 8, items)
    write_suite_report(Models(tmp_path / "before", tmp_path / "after"), None, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "基金从业" in page
    _, bodies = packed_items(page)
    assert all("no \ud800 idea" in body for body in bodies)
    assert [warning for warning in recwarn if issubclass(warning.category, UserWarning)] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": asdict(Sampling(max_tokens=32, temperature=0.6))},
            "sampling.max_tokens: 64 before, 32 after; sampling.temperature: 0.0 before, 0.6 after",
        ),
        ({"grader": "exact/2"}, r"grader: .* before, exact/2 after.* `dapo grade`"),
    ],
)
def test_different_settings_are_named_and_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    before = write_results(tmp_path / "before", BEFORE)
    after = write_results(tmp_path / "after", AFTER, settings=changes)
    with pytest.raises(ComparisonError, match=message):
        compare(before, after)


def test_different_items_prompts_golds_and_samples_are_counted_and_refused() -> None:
    items = [replace(ITEMS[0], id="other"), replace(ITEMS[1], gold="9"), *ITEMS[2:]]
    items[2] = replace(items[2], prompt=({"role": "user", "content": "changed"},))
    after = evaluation(items, " ".join(["rr"] * 8))
    after.items["3"][0].images = ["other.png"]
    with pytest.raises(ComparisonError) as caught:
        compare_evaluations(evaluation(ITEMS, "r" * 8), after)
    message = str(caught.value)
    assert "responses per item: 1 before, 2 after" in message
    assert "1 of 8 items are only in before (first: '0')" in message
    assert "1 of 8 items are only in after (first: 'other')" in message
    assert "prompts: 1 of 7 shared items differ (first: '2')" in message
    assert "golds: 1 of 7 shared items differ (first: '1')" in message
    assert "images: 1 of 7 shared items differ (first: '3')" in message


def test_evaluations_without_common_answers_are_refused() -> None:
    with pytest.raises(ComparisonError, match="none of the 2 items was answered on both sides"):
        compared("fr", "rf")


def test_a_report_says_where_time_and_tokens_went() -> None:
    step = {"timing_s/gen": 6.0, "timing_s/update_actor": 3.0, "timing_s/step": 10.0, "step": 1}
    step |= {"perf/engine_idle_ratio": 0.25, "perf/engine_idle_slot_ratio": 0.5}
    step |= {"sampler/kept_tokens": 60.0, "sampler/all_wrong_tokens": 30.0}
    step |= {"sampler/surplus_tokens": 20.0, "sampler/carried_out_tokens": 20.0}
    later = {**step, "step": 2, "timing_s/step": 30.0, "timing_s/gen": 25.0}
    later |= {"perf/engine_idle_ratio": 0.05, "perf/engine_idle_slot_ratio": 0.3}
    assert usage_lines(training_totals([step, later])) == [
        # 31 + 6 + 3 of 40 s; of 220 tokens 120 were trained on, 60 all wrong, and 40 are left
        "time: generate 78%, update 15%, other 8%",
        # (10 x 0.25 + 30 x 0.05) / 40 and (10 x 0.5 + 30 x 0.3) / 40
        "engines decoded nothing for 10% of the time; on average, 35% of rollout.max_num_seqs were "
        "idle",
        "response tokens: trained on 55%, all wrong 27%, for later steps 18%",
    ]


def test_damaged_lines_of_a_training_log_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\x00": 2}\n{"step": 3}\n{"step": 4')  # the last is torn
    assert [line["step"] for line in read_training_metrics(path)] == [1, 3]
    assert "1 of 3 lines are damaged and left out" in caplog.text


def test_missing_training_metrics_are_unknown_not_zero(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ResultsError, match="holds no training step"):
        read_training_metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(ResultsError, match="does not exist"):
        read_training_metrics(tmp_path / "none.jsonl")
    totals = training_totals([{"step": 1, "timing_s/step": float("nan")}])
    unknown = ("tokens_trained", "tokens_generated", "seconds", "engine_idle", "slots_idle")
    nothing = {"steps": 1, "phases": {}, "token_fates": {}, **dict.fromkeys(unknown)}
    assert totals == nothing
    assert usage_lines(totals) == []
    counts = dict(zip(OUTCOMES, (4, 3, 2, 1, 6), strict=True))
    steps = with_derived(
        [{f"sampler/{outcome}_groups": count for outcome, count in counts.items()}, {"step": 2}]
    )
    assert steps[0]["sampler/kept_share"] == 0.25  # 4 of 16 groups
    assert steps[1] == {"step": 2}


def test_a_report_says_whether_engine_and_policy_agree() -> None:
    # 900 tokens at 1e-4 and 100 at 1.1e-3: (900 * 1e-4 + 100 * 1.1e-3) / 1000 = 2e-4
    steps = [
        {"step": 0},
        _compared(1, tokens=900, mean=1e-4, high=1 / 900),
        _compared(2, tokens=100, mean=1.1e-3, high=2 / 100),
    ]
    assert str(consistency(steps)) == (
        "Engine and policy agree to 0.0002 in a token's probability; "
        "3 of 1,000 tokens differ by more than 0.1."
    )
    assert "policy DIFFER by 0.02 in" in str(consistency([_compared(1, 10, mean=0.02, high=0.3)]))
    assert consistency([{"step": 1, "rollout/fresh_probs_diff_mean": 0.1}]) is None
    plots = {
        re.search(r"Engine and policy", plot) is not None: plot for plot in training_plots(steps)
    }
    assert "share &gt; 0.1" in plots[True] or "share > 0.1" in plots[True]


def _compared(step: int, tokens: int, mean: float, high: float) -> dict[str, Any]:
    values = {"compared_tokens": tokens, "probs_diff_mean": mean, "probs_diff_high_ratio": high}
    values |= {"log_probs_diff_mean": mean, "probs_diff_max": 0.5, "kl": -mean, "k3_kl": mean**2}
    return {"step": step, **{f"rollout/fresh_{name}": value for name, value in values.items()}}


def test_durations() -> None:
    texts = {0.04: "0.0 s", 59.6: "1 min 00 s", 125: "2 min 05 s", 7800: "2 h 10 min"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts
