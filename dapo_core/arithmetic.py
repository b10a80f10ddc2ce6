"""The data of the default recipe: arithmetic problems made by code, in the DAPO-Math-17k schema.

The operation is a problem's `subject`, its difficulty the `level` (1 to 5, by digits and terms). Whether a
problem may be trained on or is held out follows from its operands alone, whatever the seed: so no operand
tuple, hence no problem text, is ever in both sets, not even between runs with different seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_core.errors import DataError

Row = dict[str, Any]
Span = tuple[int, int]

DATA_SOURCE = "arithmetic"
INSTRUCTION = "Last line: \\boxed{answer}"
SUBJECTS = ("addition", "subtraction", "multiplication", "two_step")
FORMS = ("plain", "word")
MAX_LEVEL = 5
NUM_BUCKETS = 10
HELD_OUT_BUCKET = 0
MAX_DRAWS_PER_PROBLEM = 10_000

# Inclusive bounds of each operand, level 1 first.
_OPERAND_SPANS: dict[str, tuple[tuple[Span, ...], ...]] = {
    "addition": (
        ((2, 19), (2, 19)),
        ((10, 99), (2, 9)),
        ((10, 99), (10, 99)),
        ((100, 999), (10, 99)),
        ((100, 999), (100, 999)),
    ),
    "subtraction": (
        ((4, 29), (2, 19)),
        ((10, 99), (2, 9)),
        ((10, 99), (10, 99)),
        ((100, 999), (10, 99)),
        ((100, 999), (100, 999)),
    ),
    "multiplication": (
        ((2, 29), (2, 5)),
        ((10, 99), (2, 3)),
        ((10, 99), (4, 5)),
        ((10, 99), (6, 9)),
        ((100, 999), (2, 9)),
    ),
    "two_step": (
        ((2, 9), (2, 9), (2, 9)),
        ((10, 49), (2, 9), (2, 9)),
        ((10, 99), (10, 99), (2, 9)),
        ((10, 99), (10, 99), (10, 99)),
        ((100, 999), (100, 999), (10, 99)),
    ),
}

_PLAIN_FORMS = {
    "addition": "{a} + {b} = ?",
    "subtraction": "{a} - {b} = ?",
    "multiplication": "{a} * {b} = ?",
    "two_step": "{a} + {b} - {c} = ?",
}
_WORD_FORMS = {
    "addition": (
        "{name} has {a} {things} and gets {b} more. How many {things} now?",
        "There are {a} {things} in one box and {b} in another. How many {things} in all?",
        "{name} sold {a} {things} on Monday and {b} on Tuesday. How many in all?",
    ),
    "subtraction": (
        "{name} has {a} {things} and loses {b}. How many {things} are left?",
        "Of {a} {things} in a box, {name} takes {b}. How many are left?",
        "{name} needs {a} {things} and has {b}. How many are missing?",
    ),
    "multiplication": (
        "Each box holds {a} {things}. How many {things} in {b} boxes?",
        "{name} buys {a} {things} on each of {b} days. How many {things} in all?",
    ),
    "two_step": (
        "{name} has {a} {things}, gets {b} more and loses {c}. How many are left?",
        "A box holds {a} {things}. {name} adds {b} and takes {c}. How many now?",
    ),
}
_NAMES = ("Mia", "Tom", "Ana", "Leo", "Eva", "Max", "Zoe", "Ben")
_THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "cups", "shells")


def generate_problems(num_train: int, num_eval: int, max_level: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out, each cycling through every subject at levels 1 to max_level.

    The same arguments give the same rows; every text occurs once. Raises DataError where a level has no more
    different problems to give.
    """
    if not 1 <= max_level <= MAX_LEVEL:
        raise DataError(
            f"max_level is {max_level}; levels are 1 to {MAX_LEVEL}: set data.arithmetic.max_level within them"
        )
    train_rows = _draw_rows(num_train, max_level, random.Random(f"train {seed}"), is_held_out=False)
    eval_rows = _draw_rows(num_eval, max_level, random.Random(f"eval {seed}"), is_held_out=True)
    return train_rows, eval_rows


def _draw_rows(num_rows: int, max_level: int, rng: random.Random, is_held_out: bool) -> list[Row]:
    kinds = [(subject, level) for level in range(1, max_level + 1) for subject in SUBJECTS]
    rows: list[Row] = []
    seen: set[str] = set()
    for index in range(num_rows):
        subject, level = kinds[index % len(kinds)]
        for _ in range(MAX_DRAWS_PER_PROBLEM):
            operands = draw_operands(subject, level, rng)
            form = rng.choice(FORMS)
            text = _phrase(subject, operands, form, rng)
            if is_operands_held_out(subject, operands) == is_held_out and text not in seen:
                break
        else:
            raise DataError(
                f"{MAX_DRAWS_PER_PROBLEM} draws gave no further new {subject} problem of level {level} after "
                f"{index} rows: the level is used up; lower data.arithmetic.num_train or data.arithmetic.num_eval"
            )
        seen.add(text)
        extra_info = {"index": index, "subject": subject, "level": level, "form": form, "operands": list(operands)}
        rows.append(_row(text, extra_info))
    return rows


def _row(text: str, extra_info: Row) -> Row:
    ground_truth = str(answer(extra_info["subject"], extra_info["operands"]))
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{text}\n{INSTRUCTION}"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": extra_info,
    }


def draw_operands(subject: str, level: int, rng: random.Random) -> tuple[int, ...]:
    """Operands of one problem, drawn so that no intermediate or final result is below zero."""
    while True:
        operands = tuple(rng.randint(low, high) for low, high in _OPERAND_SPANS[subject][level - 1])
        if answer(subject, operands) >= 0:
            return operands


def is_operands_held_out(subject: str, operands: Sequence[int]) -> bool:
    """Whether problems with these operands are for evaluation only: one bucket in ten of a hash of them.

    Where the order of two operands does not change the result, it does not change the bucket either.
    """
    canonical = list(operands)
    if subject != "subtraction":
        canonical[:2] = sorted(canonical[:2])
    digest = hashlib.sha256(f"{subject} {canonical}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % NUM_BUCKETS == HELD_OUT_BUCKET


def _phrase(subject: str, operands: Sequence[int], form: str, rng: random.Random) -> str:
    pattern = _PLAIN_FORMS[subject] if form == "plain" else rng.choice(_WORD_FORMS[subject])
    return pattern.format(name=rng.choice(_NAMES), things=rng.choice(_THINGS), **_named(operands))


def answer(subject: str, operands: Sequence[int]) -> int:
    """The result of the problem."""
    a, b, *rest = operands
    results = {"addition": a + b, "subtraction": a - b, "multiplication": a * b, "two_step": a + b - sum(rest)}
    return results[subject]


def is_generated(extra_info: Mapping[str, Any]) -> bool:
    """Whether a row with this extra_info is a generated problem, whose solution is known."""
    return bool(extra_info.get("operands"))


def worked_solution(subject: str, operands: Sequence[int]) -> str:
    r"""A chain of one-column steps, units first, ending in a line \boxed{N}.

    47 + 85 gives "7+5=12", "4+8+1=13", "\boxed{132}": each column's result passes all but its last digit on.
    """
    if subject == "two_step":
        total = operands[0] + operands[1]
        steps = [*_column_steps("addition", operands[0], operands[1]), str(total)]
        steps += _column_steps("subtraction", total, operands[2])
    else:
        steps = _column_steps(subject, operands[0], operands[1])
    return "\n".join([*steps, f"\\boxed{{{answer(subject, operands)}}}"])


def quick_solution(subject: str, operands: Sequence[int]) -> str:
    r"""The same answer with the whole sum done in one go: 47 + 85 gives "47+85=132", "\boxed{132}"."""
    left = _PLAIN_FORMS[subject].removesuffix(" = ?").replace(" ", "").format(**_named(operands))
    result = answer(subject, operands)
    return f"{left}={result}\n\\boxed{{{result}}}"


def _named(operands: Sequence[int]) -> dict[str, int]:
    return dict(zip("abc", operands, strict=False))


def _column_steps(subject: str, first: int, second: int) -> list[str]:
    """One line for each column, units first; what a column passes on to the next is added, or taken off, there."""
    sign = {"addition": "+", "subtraction": "-", "multiplication": "*"}[subject]
    sign_of_carry = "-" if subject == "subtraction" else "+"
    first_digits = [int(digit) for digit in reversed(str(first))]
    second_digits = [int(digit) for digit in reversed(str(second))]
    if subject == "multiplication":
        second_digits *= len(first_digits)
    steps, carry = [], 0
    for left, right in itertools.zip_longest(first_digits, second_digits, fillvalue=0):
        if subject == "subtraction" and left < right + carry:
            left += 10
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        result += -carry if subject == "subtraction" else carry
        steps.append(f"{left}{sign}{right}{f'{sign_of_carry}{carry}' if carry else ''}={result}")
        carry = int(left > 9) if subject == "subtraction" else result // 10
    return steps
