"""Extraction of final answers: formats that models write, and texts made to be slow."""

import time

import pytest

from eval.answers.extraction import find_answer
from tests.labelled import rows


@pytest.mark.parametrize("row", rows("extraction"), ids=lambda row: row["response"][:40])
def test_the_final_answer_is_extracted(row: dict[str, str]) -> None:
    assert [*find_answer(row["response"]).answers, ""][0] == row["answer"]


def test_a_formula_in_a_sentence_is_a_reading_unless_the_sentence_states_another_value() -> None:
    assert (
        "\\frac12" in find_answer("The answer is that the probability is $\\frac12$ here.").answers
    )
    found = find_answer("Final Answer: The number of primes below $34$ is 11.").answers
    assert (found[0], "34" in found) == ("11", False)


def test_hostile_text_is_read_in_linear_time() -> None:
    nowhere = ("\\boxed{" * 20_000, "{" * 100_000, "Answer:" + " " * 200_000)
    for text in (
        *nowhere,
        "\\" * 50_001,
        "Answer" * 20_000,
        "answer is" * 20_000,
        "#" * 200_000,
        "$" * 200_000,
        "<think>" * 20_000,
        "a}" + " " * 50_000 + "x",
        "The answer is" + " " * 50_000,
    ):
        start = time.process_time()
        find_answer(text)
        assert time.process_time() - start < 1.0, text[:20]
    assert not any(find_answer(text).answers for text in nowhere)
