"""The exact rule on labelled tables, AISBench's for MATH on verdicts computed by hand, and its rule
for Geometry3K on verdicts of mathruler 0.1.0 with sympy 1.14 and pylatexenc 2.11.
"""

import json
import os
import re
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from eval.answers.aisbench import extract_aisbench, is_equal_aisbench
from eval.answers.exact import is_equal_exact
from eval.answers.extraction import extract_boxed
from eval.answers.grading import ChoiceGrader, GeometryGrader, Grade, grade, parse_number
from eval.answers.mathruler import extract_mathruler, is_equal_mathruler
from eval.problems.evaluation_sets import load_set
from eval.problems.items import Item
from tests.labelled import rows

# Only predictions may omit a base or brackets, or add an option's text.
ONE_WAY = {
    "52 | 52_8",
    "52_8 | 52",
    "6, 31, -1 | (6,31,-1)",
    "(6, 31, -1) | 6, 31, -1",
    "(1,-2) | 1,-2",
    r"\text{(C) } 12 | \text{(C)}",
    r"(C)\ 12 | \text{(C)}",
    r"选C | \text{C}",
    "(B) (i) and (ii) | (B)",
    "(D) IV | (D)",
    r"\text{C: }5 | \text{(C)}",
    r"c | \text{(C)}",
    r"\textbf{(A)}\ 5 | A",
    r"\textbf{(A)}\ 5 | 5",
    r"\text{A. }5 | 5",
    "(A) 5 | 5",
    "A) 5 | 5",
    r"\textbf{(E)}\ \frac{1}{2} | \frac12",
    r"\text{E} | e",
    r"3:30 | 3:30\text{ PM}",
    "4:30 p.m. | 4:30",
}


def is_right(response: str, gold: str) -> bool:
    return grade(response, "stop", gold).verdict == "right"


@pytest.mark.slow
def test_every_pair_of_the_table_gets_its_label() -> None:
    pairs = rows("pairs")
    assert len(pairs) > 500
    response = "Therefore the answer is $\\boxed{{{}}}$."
    assert [
        pair
        for pair in pairs
        if is_right(response.format(pair["prediction"]), pair["gold"]) != (pair["label"] == "1")
    ] == []


@pytest.mark.parametrize("exam", ["math-verify", "lm-eval", "evalscope", "AISBench"])
def test_the_tests_of_other_graders_get_the_verdicts_that_the_evaluation_page_states(
    exam: str,
) -> None:
    cases = [row for row in rows("exams") if row["exam"] == exam]
    assert len(cases) > 50
    assert [
        case
        for case in cases
        if is_right(case["prediction"], case["gold"]) != (case["label"] == "1")
    ] == []
    page = (Path(__file__).parents[2] / "docs" / "evaluation-measured.md").read_text(
        encoding="utf-8"
    )
    different = [case for case in cases if case["theirs"] != case["label"]]
    assert f"{len(cases) - len(different)} of {len(cases)} of {exam}'s" in page
    assert all(case["reason"].replace("|", "\\|") in page for case in different)


def test_equality_is_symmetric_and_reflexive() -> None:
    pairs = [(row["prediction"], row["gold"], row["label"] == "1") for row in rows("pairs")]
    pairs = [pair for pair in pairs if f"{pair[0]} | {pair[1]}" not in ONE_WAY]
    assert [(p, g) for p, g, label in pairs if is_equal_exact(g, p) != label] == []
    assert [g for _, g, _ in pairs if not is_equal_exact(g, g)] == []


def test_gold_answers_of_different_kinds_are_different() -> None:
    kinds = {row["category"]: row["gold"] for row in rows("pairs")}
    del kinds["ratios"], kinds["names in front"]  # equal a fraction and a point
    golds = kinds.values()
    assert [(a, b) for a in golds for b in golds if a != b and is_equal_exact(a, b)] == []


# Computed by hand from AISBench's rules.
@pytest.mark.parametrize(
    ("answer", "gold", "is_equal"),
    [
        ("1,2", "12", True),  # a comma between digits is dropped
        (r"3 \cdot 4", "34", True),  # \cdot is dropped
        ("0.5", r"\frac12", False),
        (r"\sqrt{12}", r"2\sqrt3", False),  # no numbers, no algebra
        (r"\frac12", r"\dfrac{1}{2}", True),
        ("1/2", r"\frac{1}{2}", True),
        ("x/2", r"\frac{x}{2}", False),  # int("x") raises there, so this step is lost
        (r"x/2\text{ cm}", "x/2", True),  # normalising alone drops "cm" and the empty \text
        (r"x/2\text{ mm}", "x/2", False),  # but not "mm"
        # from the first \text{ to a last brace is a unit
        (r"5 \text{ and } \frac{1}{2}", "5", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{(C)}", "C", True),
        (r"\text{C}", r"\text{(C)}", True),
        ("(C)", r"\text{(C)}", False),  # parentheses are dropped only with \text
        (r"36^\circ", "36", True),
        (r"\$32,\!348", "32348", True),
        (r"2.00", "2", True),
        ("x=5", "5", True),
        ("xyz=5", "5", False),  # a name of at most two characters
        (r"\mbox{ cm}15", "15", True),
        ("3j", "3i", True),
        (r"(-\infty, 2]", r"(-inf,2]", True),
        ("square 5", "5", True),
        ("42", "43", False),
        ("2,1", "1,2", False),
        ("", "0", False),
    ],
)
def test_aisbench_equality(answer: str, gold: str, is_equal: bool) -> None:
    assert is_equal_aisbench(answer, gold) is is_equal


@pytest.mark.parametrize(
    ("text", "answer", "raises"),
    [
        (r"so \boxed{42}.", "42", False),
        (r"\boxed{1}, then \boxed{2}", "2", False),
        (r"\boxed{{42}}", "42", False),  # outer braces are stripped
        (r"\boxed{{1}+{2}}", "1}+{2", False),  # and these too, which is AISBench's bug
        (r"\fbox{9}", "9", True),
        (r"\fbox{9} or \boxed{8} or \fbox{7}", "8", False),
        (r"\boxed {5}", "5", True),
        (r"\boxed{1} and then \boxed{2", r"1andthen\boxed{2", False),  # the first piece, normalised
        (r"I think. The answer is 7. Sure.", "7", False),
        ("The result is 7. Sure.", "Theresultis7", False),
        (r"\boxed{}. The final answer is 3.5", "3", False),  # pieces end at each full stop
        ("<think>\\boxed{1}</think> So 2.", "1", False),  # thinking counts
        ("", "", False),
    ],
)
def test_aisbench_extraction(text: str, answer: str, raises: bool) -> None:
    assert extract_aisbench(text) == (answer, raises)


def test_the_rule_for_geometry3k_has_mathrulers_verdicts() -> None:
    """Rows with a reason are those where it differs."""
    table = rows("mathruler")
    assert len(table) == 300
    for row in table:
        verdict = is_equal_mathruler(row["prediction"], row["gold"])
        assert (verdict == (row["label"] == "1")) == (not row["reason"]), row


def test_the_rule_for_geometry3k_reads_hostile_answers_in_bounded_time() -> None:
    hostile = (
        "9" * 5000,
        "(" * 3000 + "1",
        "\\sqrt" * 3000,
        "\\frac{1}" * 1000,
        "-" * 3000 + "1",
        "1e999999999x",
        "x" * 4000,
        "{" * 4000,
        "9^9" + "*9^9" * 900,
    )
    started = time.process_time()
    for answer in hostile:
        assert not is_equal_mathruler(answer, "5 \\sqrt { 3 }")
        assert not is_equal_mathruler(answer, "x+1")
    assert time.process_time() - started < 5


def test_geometry3k_is_graded_by_value_beside_mathrulers_rule() -> None:
    cases = [
        ("\\boxed{5\\sqrt{3}}", "5 \\sqrt { 3 }", "stop", ("right", True)),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", "stop", ("right", False)),  # not reduced
        ("\\boxed{\\sqrt{169}}", "13", "stop", ("right", False)),  # not written as an integer
        ("\\boxed{\\sqrt{75}}", "5 \\sqrt { 3 }", "length", ("truncated", True)),
        ("the answer is 13", "13", "stop", ("right", False)),  # no box
        ("<think>\\boxed{13}</think> none", "13", "stop", ("no_answer", False)),
    ]
    with GeometryGrader() as grader:
        for response, gold, reason, expected in cases:
            item = Item("0", "?", gold)
            graded = grader.grade_quickly(response, reason, item, True)
            graded = graded or grader.grade_item(response, reason, item, True)
            assert (graded.verdict, is_right_by_aisbench(graded)) == expected, response
        assert grader.num_killed == 0
    assert extract_mathruler("\\boxed{1} or \\boxed{ {2} }.") == "{2}"
    assert extract_mathruler("\\boxed{1} or \\boxed{2") == "None"


def is_right_by_aisbench(graded: Grade) -> bool:
    return graded.aisbench is not None and graded.aisbench.is_right


def test_aisbench_strips_thinking_from_chat_responses_only() -> None:
    for response, chat, text in (
        ("<think>\\boxed{1}</think> The answer is 2", "2", "1"),
        ("so \\boxed{1}</think>\\boxed{2}</think>The answer is 3", "3", "2"),
        ("<think>a</think>\\boxed{1} <think>\\boxed{2}</think>", "1", "2"),
        ("<think>so \\boxed{1}", "1", "1"),  # AISBench keeps unclosed thinking
    ):
        assert is_right_by_aisbench(grade(response, "stop", chat, is_chat=True))
        assert is_right_by_aisbench(grade(response, "stop", text))
        assert is_right_by_aisbench(grade(response, "stop", text, is_chat=True)) is (chat == text)


def test_the_two_rules_disagree_where_one_is_wrong() -> None:
    for response, finish_reason, gold, expected in (
        # AISBench ignores how it ended
        (r"\boxed{7} but wait", "length", "7", ("truncated", True, False)),
        (r"\fbox{7}", "stop", "7", ("right", True, True)),
        (r"\boxed{1,2}", "stop", "12", ("wrong", True, False)),
        (r"\boxed{0.5}", "stop", r"\frac{1}{2}", ("right", False, False)),
    ):
        graded = grade(response, finish_reason, gold)
        assert graded.aisbench is not None
        assert (graded.verdict, graded.aisbench.is_right, graded.aisbench.raises) == expected


def test_hostile_equations_are_read_in_bounded_time() -> None:
    started = time.process_time()
    for answer in (r"x^2 \pm y = z + 1", "a b " * 15 + "1 = 5", "\\sin " * 600):
        assert not is_equal_exact(answer, "x^2 + y = z + 1")
    assert time.process_time() - started < 2


def test_numbers_are_parsed_exactly_and_other_text_is_not() -> None:
    assert parse_number("0.1") == Fraction(1, 10)
    assert parse_number("1,234,567.5") == Fraction(2469135, 2)
    nothing = ["9" * 5000, "4 2", "1 3/4", "2, 500", "", *"1,2 1/2 9^9 x . 1e5 1234,567".split()]
    assert [parse_number(text) for text in nothing] == [None] * len(nothing)


@pytest.mark.parametrize(
    ("response", "finish_reason", "verdict", "gold"),
    [
        ("Answer: 7", "stop", "right", "7"),
        ("Answer: 8", "stop", "wrong", "7"),
        ("Answer: C. 7", "stop", "right", "7"),  # an option with its text
        ("Answer: C. 7", "stop", "right", r"\text{(C)}"),
        ("Answer: C. 8", "stop", "wrong", "7"),
        ("seven, I think", "stop", "no_answer", "7"),
        ("Answer: 7\nbut let me check", "length", "truncated", "7"),
        (r"\boxed{7}", "length", "truncated", "7"),
        ("still thinking", "length", "truncated", "7"),
        ("<think>so \\boxed{7}", "stop", "no_answer", "7"),
        ("<think>so \\boxed{7}", None, "truncated", "7"),
        (r"\boxed{7", "stop", "no_answer", "7"),
        (r"\boxed{7", None, "truncated", "7"),
        (
            r"\boxed{7}. Let me double check this by putting it into the equation: 7 +",
            None,
            "truncated",
            "7",
        ),
        (
            r"\boxed{7}. Let me double check this by putting it into the equation: 7 + 1 = 8.",
            None,
            "right",
            "7",
        ),
        (r"\boxed{7} square units", None, "right", "7"),
        (r"\boxed{2} or \boxed{7}", "stop", "wrong", "7"),  # one answer too many
        (r"\boxed{7}, that is $\boxed{\frac{14}{2}}$", "stop", "right", "7"),
        (None, None, "request_failed", "7"),
        # Several boxes are a list of answers.
        (r"$x = \boxed{-2}$ or $x = \boxed{1}$.", "stop", "right", "-2,1"),
        (
            r"First case: \boxed{1}. In the second case we get another root, \boxed{-2}.",
            "stop",
            "right",
            "-2,1",
        ),
        (
            r"First case: \boxed{1}. In the second case we get another root, \boxed{3}.",
            "stop",
            "wrong",
            "-2,1",
        ),
        (r"\boxed{1}", "stop", "wrong", "-2,1"),
    ],
)
def test_finish_reason_and_answer_give_the_verdict(
    response: str | None, finish_reason: str | None, verdict: str, gold: str
) -> None:
    assert grade(response, finish_reason, gold).verdict == verdict


@pytest.mark.parametrize(
    ("finish_reason", "verdict"),
    [
        *((reason, "right") for reason in ("STOP", "eos", "FinishReason.STOP", "endOfTurn", "")),
        *((reason, "right") for reason in ("COMPLETE", "tool_calls", "FINISH_REASON_STOP")),
        *((reason, "truncated") for reason in ("abort", "content_filter", "error")),
        *((reason, "truncated") for reason in ("MAX_TOKENS", "Length", "model_length", "SAFETY")),
        ("unheard_of", "right"),
    ],
)
def test_no_spelling_of_a_finish_reason_turns_a_right_answer_into_a_truncated_one(
    finish_reason: str, verdict: str
) -> None:
    assert grade(r"\boxed{7}", finish_reason, "7").verdict == verdict
    assert ChoiceGrader().grade(r"\boxed{B}", finish_reason, "B").verdict == verdict
    # without a known reason the text decides
    is_unknown = finish_reason in ("", "unheard_of")
    cut = "truncated" if is_unknown or verdict == "truncated" else "no_answer"
    assert grade(r"\boxed{7", finish_reason, "7").verdict == cut


needs_benchmarks = pytest.mark.skipif(
    "DAPO_TEST_DATA" not in os.environ, reason="the real benchmark files are not on every machine"
)
REWRITES = (
    (r"\\frac", r"\\dfrac"),
    (r",", ", "),
    (r"\^(\w)", r"^{\1}"),
    (r"\^\{(\d+)\}", r"^\1"),  # of two digits, too
    (r"(\d)e([-+]?)0*(\d+)", r"\1 \\times 10^{\2\3}"),
    (r"(\d)e([-+]?)0*(\d+)", r"\1 * 10^\2\3"),
    (r"(\d\.\d+)(?![\de])", r"\g<1>0"),
    (r"\\sqrt\{(\w)\}", r"\\sqrt \1"),
    (r"(?<![\w}])(?<!\d )\\frac\{(\w+)\}\{(\w+)\}", r"(\1)/(\2)"),
)


@needs_benchmarks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["math500", "minerva_math", "olympiadbench"])
def test_gold_answers_of_real_benchmarks_written_in_another_way_are_right(name: str) -> None:
    text = (Path(os.environ["DAPO_TEST_DATA"]) / name / "test.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    golds = {
        gold
        for row in rows
        for gold in row.get("final_answer") or [row.get("answer") or extract_boxed(row["solution"])]
    }
    rewritten = {(re.sub(old, new, gold), gold) for gold in golds for old, new in REWRITES}
    assert len(rewritten) > 300
    assert [pair for pair in rewritten if not is_right(f"\\boxed{{{pair[0]}}}", pair[1])] == []


@needs_benchmarks
def test_gold_solutions_of_real_benchmarks_grade_right() -> None:
    data = Path(os.environ["DAPO_TEST_DATA"])
    path = data / "math500" / "test.jsonl"
    solutions = [
        json.loads(line)["solution"] for line in path.read_text(encoding="utf-8").splitlines()
    ]
    items = load_set(path, "math500").items
    grades = [grade(s, "stop", item.gold) for s, item in zip(solutions, items, strict=True)]
    counts = Counter((graded.verdict, is_right_by_aisbench(graded)) for graded in grades)
    assert counts == {("right", True): 500}
    golds = dict.fromkeys(("aime24", "aime25", "amc23"), "answer")
    golds["olympiadbench"] = "final_answer"
    wrong = []
    for name, column in golds.items():
        for line in (data / name / "test.jsonl").read_text(encoding="utf-8").splitlines():
            gold = json.loads(line)[column]
            for one in gold if isinstance(gold, list) else [str(gold)]:
                spaced = one.replace("frac", "dfrac").replace(",", ", ")
                wrong += [] if is_right(f"\\boxed{{{spaced}}}", one) else [(name, one)]
    assert wrong == []
