"""Prompts: templates, chat and text, and template files."""

import re
from pathlib import Path

import pytest

from eval.answers.extraction import extract_boxed
from eval.problems import ProblemsError
from eval.problems.prompts import TEMPLATES, Template, find_template, make_prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2 + 1 = ?"}


def test_the_aisbench_prompt_is_exact() -> None:
    problem = "What is $\\frac{1}{2}$?"
    asked = f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    assert make_prompt(TEMPLATES["aisbench"], "completions", problem, None) == asked
    assert make_prompt(TEMPLATES["aisbench"], "chat", problem, None) == (
        {"role": "user", "content": asked},
    )
    # Other braces are kept.
    assert (
        Template("mine", "{a} {problem} {}").render("{problem} {0} %s") == "{a} {problem} {0} %s {}"
    )


def test_given_messages_are_kept_or_joined() -> None:
    given = TEMPLATES["given"]
    assert make_prompt(given, "chat", USER["content"], (SYSTEM, USER)) == (SYSTEM, USER)
    assert (
        make_prompt(given, "completions", USER["content"], (SYSTEM, USER))
        == "Be brief.\n\n2 + 1 = ?"
    )
    # Other templates use the problem, which is the last message.
    assert make_prompt(TEMPLATES["bare"], "chat", USER["content"], (SYSTEM, USER)) == (USER,)
    assert make_prompt(given, "chat", "2 + 1 = ?", None) == (USER,)


def test_the_few_shot_prompt_starts_with_four_solved_problems() -> None:
    template = TEMPLATES["few-shot"]
    text = template.render("1 + 1 = ?")
    assert text.count("Problem:\n") == text.count("Solution:\n") == 5
    assert text.endswith("Problem:\n1 + 1 = ?\n\nSolution:\n")
    assert template.stop == ("\nProblem:",)  # otherwise a base model continues with a sixth problem
    shots = re.findall(r"Solution:\n(.*?)\n\n", text, re.DOTALL)
    boxes = ["[-2\\sqrt{2}, 2\\sqrt{2}]", "1", "\\frac{15}{28}", "\\frac{36}{5}"]
    assert [extract_boxed(shot) for shot in shots] == boxes


def test_templates_are_found_by_name() -> None:
    for name, template in TEMPLATES.items():
        assert template.text.count("{problem}") == 1
        assert find_template(name, "bare") is template
    assert find_template("default", "cot") is TEMPLATES["cot"]
    with pytest.raises(ProblemsError, match=r"has no aisbnch \(did you mean aisbench\?\)"):
        find_template("aisbnch", "bare")


def test_a_template_file_has_exactly_one_place_for_the_problem(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Q: {problem}\nA:\n")  # editors add the last newline
    assert find_template(str(path), "bare") == Template("mine.txt", "Q: {problem}\nA:")
    for text, times in (("Q:", 0), ("{problem} {problem}", 2)):
        path.write_text(text)
        with pytest.raises(
            ProblemsError, match=rf"mine.txt contains {{problem}} {times} times; .*exactly once"
        ):
            find_template(str(path), "bare")
