"""Grading in a process: the same verdicts as in place, within limits for any text."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eval import EvaluationError
from eval.answers.grading import MathGrader, grade
from eval.answers.pool import CallFailed, Pool
from eval.problems.items import Item

FAR = 100.0
MAX_ROW_SECONDS = 2.0  # of CPU time in this process; the worker has a time limit


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with MathGrader() as grader:
        grader.grade(r"\boxed{\sqrt{2}}", "stop", "1")  # starts the process
        yield grader


HOSTILE = {
    "boxes that never close": "\\boxed{" * 20_000,
    "tower": r"\boxed{9^9^9^9}",
    "braced tower": r"\boxed{9^{9^{9^{9}}}}",
    "tower of factorials": r"\boxed{1000!!!!}",
    "factorial": r"\boxed{99999999!}",
    "binomial": r"\boxed{\binom{10^9}{10^8}}",
    "exponentials": r"\boxed{e^{e^{e^{e^{e}}}}}",
    "huge sine": r"\boxed{\sin(10^{10^{9}})}",
    "exponent": r"\boxed{1e99999}",
    "nested fractions": "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "nested roots": "\\boxed{" + "\\sqrt{" * 500 + "2" + "}" * 500 + "}",
    "parentheses": "\\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    "signs": "\\boxed{" + "-" * 3000 + "1}",
    "product": "\\boxed{" + "(x+1)" * 600 + "}",
    "sum": "\\boxed{" + "+".join(f"x^{{{i}}}" for i in range(250)) + "}",
    "list": "\\boxed{" + ",".join(f"\\sqrt{{{i}}}" for i in range(400)) + "}",
    "intervals": "\\boxed{" + "[1,2)\\cup " * 400 + "[3,4)}",
    "empty entries": "\\boxed{\\begin{pmatrix}" + "1&" * 1000 + "\\end{pmatrix}}",
    "bars": "\\boxed{" + "|" * 1000 + "}",
    "spaces": "\\boxed{5" + " " * 3900 + "x}",
    "lone surrogate": "\\boxed{\ud800}",
    "surrogates in a formula": "\\boxed{\\sqrt{\udfff}+\ud800}",
    "digits": "\\boxed{" + "9" * 200_000 + "}",
    "letters": "a" * 200_000,
    "braces": "{" * 200_000,
    "many boxes": "\\boxed{1}" * 20_000,
    "openings": "\\text{(" * 20_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_graded_quickly_and_never_right(grader: MathGrader, name: str) -> None:
    for gold in ("5", r"\sqrt{2}", "1,2", r"\text{Evelyn}"):
        started = time.process_time()
        graded = grader.grade(HOSTILE[name], "stop", gold)
        assert time.process_time() - started < MAX_ROW_SECONDS
        assert graded.verdict in ("wrong", "no_answer")


def test_grading_in_a_process_and_in_place_agree(grader: MathGrader) -> None:
    rows = [
        (r"\boxed{2\sqrt3}", r"\sqrt{12}"),
        (r"\boxed{2,1}", "1,2"),
        ("none", "1"),
        (r"\boxed{1.41}", r"\sqrt2"),
        ("\\boxed{\x00\\frac{1}{2}}", "0.5"),
    ]
    grades = [grader.grade(response, "stop", gold) for response, gold in rows]
    assert grades == [grade(response, "stop", gold) for response, gold in rows]
    assert [graded.verdict for graded in grades] == [
        "right",
        "right",
        "no_answer",
        "wrong",
        "right",
    ]


@pytest.mark.slow
def test_a_row_that_exceeds_a_limit_is_wrong_and_counted() -> None:
    hard, gold = r"\boxed{\sqrt{8}}", r"2\sqrt2"
    with MathGrader(timeout_seconds=FAR) as grader:
        assert grader.grade(hard, "stop", gold).verdict == "right"
        [process] = grader._pool._processes
        [pid] = grader._pool.pids
        process.timeout_seconds = 0.2
        os.kill(pid, signal.SIGSTOP)  # never answers
        started = time.perf_counter()
        assert grader.grade(hard, "stop", gold).verdict == "wrong"
        assert time.perf_counter() - started < FAR / 2
        assert (grader.num_killed, grader._pool.pids) == (1, set())
        process.timeout_seconds = FAR
        assert grader.grade(hard, "stop", gold).verdict == "right"
        [second] = grader._pool.pids
        os.kill(second, signal.SIGKILL)  # an idle process: no row is lost
        os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
        assert grader.grade(hard, "stop", gold).verdict == "right"
        assert grader.num_killed == 1


@pytest.mark.slow
def test_quick_grades_need_no_process_and_equal_full_ones() -> None:
    responses = [
        *HOSTILE.values(),
        r"\boxed{42}",
        r"\boxed{41}",
        "no answer",
        r"\boxed{\frac{84}{2}}",
    ]
    with MathGrader() as grader:
        item = Item("a", "", "42")
        quick = [grader.grade_quickly(response, "stop", item, True) for response in responses]
        assert grader._pool.pids == set()
        assert quick[-4:-1] == [grade(response, "stop", "42") for response in responses[-4:-1]]
        assert quick[-1] is None
        decided = [
            (quickly, text)
            for quickly, text in zip(quick, responses, strict=True)
            if quickly is not None
        ]
        assert all(quickly == grader.grade(text, "stop", "42", True) for quickly, text in decided)
        assert grader._pool.pids == set()


def test_threads_share_one_process_that_starts_on_demand_and_ends_with_the_grader() -> None:
    with MathGrader() as grader:
        for answer, gold in (("42", "42"), ("41", "42"), ("$0.50$", "0.5")):  # strings and numbers
            expected = "wrong" if answer == "41" else "right"
            assert grader.grade(f"\\boxed{{{answer}}}", "stop", gold).verdict == expected
        assert grader._pool.pids == set()
        # sqrt(4 (n + 2))
        rows = [(f"\\boxed{{\\sqrt{{{4 * n + 8}}}}}", f"2\\sqrt{{{n + 2}}}") for n in range(80)]
        with ThreadPoolExecutor(4) as threads:
            verdicts = list(
                threads.map(lambda row: grader.grade(row[0], "stop", row[1]).verdict, rows)
            )
        [pid] = grader._pool.pids
    assert verdicts == ["right"] * 80
    assert not Path(f"/proc/{pid}").exists()


def test_a_too_low_memory_limit_is_reported_and_exceeding_it_fails_the_call() -> None:
    with (
        MathGrader(memory_bytes=1 << 20) as grader,
        pytest.raises(EvaluationError, match="1,048,576 bytes"),
    ):
        grader.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2")
    pool = Pool("builtins:eval", ("bytearray",), timeout_seconds=60.0, memory_bytes=1 << 30)
    assert pool.submit(1 << 20).exception() is not None  # a bytearray is not JSON
    with pytest.raises(CallFailed, match="MemoryError"):
        pool.submit(1 << 31).result()
    pool.close()
