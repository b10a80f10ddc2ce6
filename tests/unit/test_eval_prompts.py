"""What is sent for a problem: templates, the two styles, and a file of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.answers.extraction import extract_boxed
from eval.problems import ProblemsError
from eval.problems.prompts import TEMPLATES, Template, find_template, make_prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2 + 1 = ?"}


def test_aisbench_s_prompt_to_the_letter() -> None:
    asked = "What is $\\frac{1}{2}$?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert make_prompt(TEMPLATES["aisbench"], "completions", "What is $\\frac{1}{2}$?", None) == asked
    assert make_prompt(TEMPLATES["aisbench"], "chat", "What is $\\frac{1}{2}$?", None) == (
        {"role": "user", "content": asked},
    )


def test_braces_of_a_problem_are_left_alone() -> None:
    template = Template("mine", "{a} {problem} {}")
    assert template.render("{problem} {0} %s") == "{a} {problem} {0} %s {}"


def test_given_messages_are_kept_or_joined() -> None:
    given = TEMPLATES["given"]
    assert make_prompt(given, "chat", USER["content"], (SYSTEM, USER)) == (SYSTEM, USER)
    assert make_prompt(given, "completions", USER["content"], (SYSTEM, USER)) == "Be brief.\n\n2 + 1 = ?"
    # Another template asks the problem, which is the last message.
    assert make_prompt(TEMPLATES["bare"], "chat", USER["content"], (SYSTEM, USER)) == (USER,)
    assert make_prompt(given, "chat", "2 + 1 = ?", None) == (USER,)


def test_four_worked_problems_come_before_the_one_that_is_asked() -> None:
    template = TEMPLATES["few-shot"]
    text = template.render("1 + 1 = ?")
    assert text.count("Problem:\n") == text.count("Solution:\n") == 5
    assert text.endswith("Problem:\n1 + 1 = ?\n\nSolution:\n")
    assert template.stop == ("\nProblem:",)  # or a base model goes on with a sixth problem
    shots = re.findall(r"Solution:\n(.*?)\n\n", text, re.DOTALL)
    assert [extract_boxed(shot) for shot in shots] == [
        "[-2\\sqrt{2}, 2\\sqrt{2}]",
        "1",
        "\\frac{15}{28}",
        "\\frac{36}{5}",
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_has_one_place_for_the_problem(name: str) -> None:
    assert TEMPLATES[name].text.count("{problem}") == 1
    assert find_template(name, "bare") is TEMPLATES[name]


def test_a_file_is_a_template_and_its_last_newline_is_the_editor_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Q: {problem}\nA:\n")
    assert find_template(str(path), "bare") == Template("mine.txt", "Q: {problem}\nA:")
    assert find_template("default", "cot") is TEMPLATES["cot"]


@pytest.mark.parametrize(("text", "times"), [("Q:", 0), ("{problem} {problem}", 2)])
def test_a_file_without_one_place_for_the_problem_is_refused(tmp_path: Path, text: str, times: int) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(ProblemsError, match=rf"mine.txt says {{problem}} {times} times; .*exactly once"):
        find_template(str(path), "bare")


def test_a_misspelt_template_is_told_the_nearest() -> None:
    with pytest.raises(ProblemsError, match=r"evaluate.prompt=aisbnch is neither .*; did you mean 'aisbench'\?"):
        find_template("aisbnch", "bare")
