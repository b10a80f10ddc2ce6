"""The judge: the same verdicts as in place, and limits that hold whatever the text."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from eval import EvaluationError
from eval.answers.grading import grade
from eval.answers.judge import Judge

MAX_ROW_SECONDS = 2.0  # of this process; its worker is killed by the clock


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as judge:
        judge.grade(r"\boxed{\sqrt{2}}", "stop", "1")  # its start is not part of a row
        yield judge


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
    "digits": "\\boxed{" + "9" * 1_000_000 + "}",
    "a megabyte": "a" * 1_000_000,
    "braces": "{" * 1_000_000,
    "many boxes": "\\boxed{1}" * 100_000,
    "openings": "\\text{(" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_long_or_raises_or_is_right(judge: Judge, name: str) -> None:
    for gold in ("5", r"\sqrt{2}", "1,2", r"\text{Evelyn}"):
        started = time.process_time()
        graded = judge.grade(HOSTILE[name], "stop", gold)
        assert time.process_time() - started < MAX_ROW_SECONDS
        assert graded.verdict in ("wrong", "no_answer")


def test_nul_bytes_are_left_out(judge: Judge) -> None:
    assert judge.grade("\\boxed{\x00\\frac{1}{2}}", "stop", "0.5").verdict == "right"


def test_judge_and_in_place_grading_agree(judge: Judge) -> None:
    rows = [(r"\boxed{2\sqrt3}", r"\sqrt{12}"), (r"\boxed{2,1}", "1,2"), ("no", "1"), (r"\boxed{1.41}", r"\sqrt2")]
    grades = [judge.grade(response, "stop", gold) for response, gold in rows]
    assert grades == [grade(response, "stop", gold) for response, gold in rows]
    assert [graded.verdict for graded in grades] == ["right", "right", "no_answer", "wrong"]


def test_a_process_that_ends_costs_its_row_only() -> None:
    with Judge(timeout_seconds=5.0) as judge:
        assert judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2").verdict == "right"
        process = judge._workers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2").verdict == "wrong"
        assert judge.num_killed == 1
        assert judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2").verdict == "right"
        assert judge.num_killed == 1


def test_a_row_over_the_time_limit_is_wrong_and_counted() -> None:
    with Judge(timeout_seconds=5.0) as judge:
        assert judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2").verdict == "right"
        worker = judge._workers[0]
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGSTOP)  # never answers
        worker.timeout_seconds = 0.2
        started = time.perf_counter()
        assert judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2").verdict == "wrong"
        assert time.perf_counter() - started < 4.0
        assert (judge.num_killed, worker.process) == (1, None)


def test_threads_share_the_processes() -> None:
    verdicts: list[str] = []

    def work(judge: Judge) -> None:
        for number in range(20):
            graded = judge.grade(f"\\boxed{{\\sqrt{{{4 * number + 8}}}}}", "stop", f"2\\sqrt{{{number + 2}}}")
            verdicts.append(graded.verdict)

    with Judge(num_processes=2) as judge:
        threads = [threading.Thread(target=work, args=(judge,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        processes = [worker.process for worker in judge._workers]
    assert verdicts == ["right"] * 80  # sqrt(4 (n + 2)) = 2 sqrt(n + 2)
    assert all(process is not None and process.returncode is not None for process in processes)


def test_strings_and_numbers_start_no_process() -> None:
    with Judge() as judge:
        assert judge.grade(r"\boxed{42}", "stop", "42").verdict == "right"
        assert judge.grade(r"\boxed{41}", "stop", "42").verdict == "wrong"
        assert judge.grade(r"\boxed{0.5}", "stop", r"\frac12").verdict == "right"
        assert judge._workers[0].process is None


def test_no_processes_and_too_little_memory_are_refused() -> None:
    with pytest.raises(EvaluationError, match="at least one process"):
        Judge(num_processes=0)
    with Judge(memory_bytes=1 << 20) as judge, pytest.raises(EvaluationError, match="1,048,576 bytes of memory"):
        judge.grade(r"\boxed{\sqrt{8}}", "stop", r"2\sqrt2")
