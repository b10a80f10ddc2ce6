"""Extraction of final answers: formats that models write, and texts made to be slow."""

from __future__ import annotations

import time

import pytest

from eval.answers.extraction import extract_answer, find_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, so finally \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (
            r"\boxed{\left\{ 1, 2 \right.}",
            r"\left\{ 1, 2 \right.",
        ),  # an escaped brace opens nothing
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7.", "7"),
        (r"\\boxed{3}", "3"),  # a model that doubles its backslashes
        (r"\fbox{9}", "9"),
        (r"\framebox{204}", "204"),
        (r"\fbox{9} or \boxed{8} or \fbox{7}", "8"),
        (r"\boxed{d}", "d"),
        (r"\boxed{5}. I put the answer within \boxed{}.", "5"),
        (r"\boxed{5}, as asked within \boxed{...}", "5"),
        (r"\boxed{1} and then \boxed{2", None),  # truncated inside its answer
        (r"\boxed{1} or \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", "1, 2, 3"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        ("$\\boxed{5}$\n\n**Final Answer**\n$\\boxed{5}$", "5"),
        (r"$\boxed{5}$, $\boxed{5}$", "5"),
        ("Answer: 12\nno wait\nAnswer: 13", "13"),
        ("**Answer:** $13$.", "13"),
        ("**Final Answer**: 13", "13"),
        ("Final answer : 13\n", "13"),
        ("### Final Answer\n\n13\n", "13"),
        ("# Answer\n\n13", "13"),
        ("#### 13", "13"),
        ("The answer is 13. I hope it is correct.", "13"),
        ("Final Answer: The final answer is $13$. I hope it is correct.", "13"),
        ("The answer is 3.5.", "3.5"),
        ("The answer to this problem is: 13", "13"),
        ("答案是：13。", "13"),
        ("因此答案为 $13$。", "13"),
        ("故选：C", "C"),
        ("<answer>13</answer>", "13"),
        ("\\boxed{4}\nAnswer: 5", "4"),
        ("<think>\\boxed{1}</think> Answer: 2", "2"),
        ("<think>\\boxed{1}</think> I give up", None),
        ("thoughts \\boxed{1}</think>\\boxed{2}", "2"),
        ("<think>still", None),
        ("<think>a</think> again <think>\\boxed{3}", None),
        (
            "\\boxed{1}<|im_end|>\n<|im_start|>user\nAnd 2+2? \\boxed{4}",
            "1",
        ),  # the next turn is made up
        ("13", "13"),
        ("$\\frac{1}{2}$", r"\frac{1}{2}"),
        ("C", "C"),
        (r"\text{Evelyn}", r"\text{Evelyn}"),
        (r"\cot x", r"\cot x"),
        (r"\[ \text{Final answer: } 42 \]", "42"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("**Final Answer**\n\nThe largest $n$ is **34**, which is even.", "34"),
        ("Final answer: the number of ways is $\\binom{9}{2}-2 = 34$.", r"\binom{9}{2}-2 = 34"),
        ("Final Answer: There are 34 such numbers.", "34 such numbers"),
        ("最终答案：最大的$n$是34。", "34"),
        ("Final Answer: The largest $n$ is not 34.", "not 34"),
        ("Final Answer: $n$ is at least 34.", "at least 34"),
        (
            "Final Answer: The smallest is 12 and the largest is 34.",
            "The smallest is 12 and the largest is 34",
        ),
        ("\\boxed{5}</s>", "5"),
        ("</s>\\boxed{5}</s>\\boxed{6}", "5"),
        ("not <s>4</s> but \\boxed{5}", "5"),
        ("maybe 13", None),
        ("the answer might be 5", None),
        ("Answer:", None),
        ("\\boxed{}", None),
        ("", None),
    ],
)
def test_the_final_answer_is_extracted(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


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
    assert [extract_answer(text) for text in nowhere] == [None] * 3
