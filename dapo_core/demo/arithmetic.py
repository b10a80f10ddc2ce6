"""Dataset of the default recipe: generated arithmetic problems in the DAPO-Math-17k schema.

`subject` is the operation, `level` the difficulty (1 to 5, by digits and terms). Whether a problem
is for training or held out depends only on its operands, not on the seed, so the two sets never
overlap, even between runs with different seeds.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
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

# Inclusive bounds of each operand, starting with level 1.
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


def generate_problems(
    num_train: int, num_eval: int, max_level: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Return training rows and held-out rows, each cycling through every subject at levels 1 to
    max_level.

    Deterministic; no text occurs twice. Raises DataError if a level runs out of new problems.
    """
    if not 1 <= max_level <= MAX_LEVEL:
        raise DataError(
            f"data.arithmetic.max_level={max_level} is out of range; set it to 1 to {MAX_LEVEL}"
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
                f"{MAX_DRAWS_PER_PROBLEM} draws gave no new {subject} problem of level {level} "
                f"after {index} "
                "rows: the level is exhausted; lower data.arithmetic.num_train or "
                "data.arithmetic.num_eval"
            )
        seen.add(text)
        extra_info = {
            "index": index,
            "subject": subject,
            "level": level,
            "form": form,
            "operands": list(operands),
        }
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
    """Draw the operands of one problem such that no intermediate or final result is negative."""
    while True:
        operands = tuple(rng.randint(low, high) for low, high in _OPERAND_SPANS[subject][level - 1])
        if answer(subject, operands) >= 0:
            return operands


def is_operands_held_out(subject: str, operands: Sequence[int]) -> bool:
    """Return whether problems with these operands are held out: one of ten hash buckets.

    Operands that commute are sorted first, so their order does not change the bucket.
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
    """Return the result of the problem."""
    a, b, *rest = operands
    results = {
        "addition": a + b,
        "subtraction": a - b,
        "multiplication": a * b,
        "two_step": a + b - sum(rest),
    }
    return results[subject]


def worked_solution(subject: str, operands: Sequence[int]) -> str:
    r"""Return a solution in single-column steps, units first, ending with \boxed{N}.

    47 + 85 gives "7+5=12", "4+8+1=13", "\boxed{132}": each column carries all but its last digit.
    """
    if subject == "two_step":
        total = operands[0] + operands[1]
        steps = [*_column_steps("addition", operands[0], operands[1]), str(total)]
        steps += _column_steps("subtraction", total, operands[2])
    else:
        steps = _column_steps(subject, operands[0], operands[1])
    return "\n".join([*steps, f"\\boxed{{{answer(subject, operands)}}}"])


def quick_solution(subject: str, operands: Sequence[int]) -> str:
    r"""Return a solution in one step: 47 + 85 gives "47+85=132", "\boxed{132}"."""
    left = _PLAIN_FORMS[subject].removesuffix(" = ?").replace(" ", "").format(**_named(operands))
    result = answer(subject, operands)
    return f"{left}={result}\n\\boxed{{{result}}}"


def _named(operands: Sequence[int]) -> dict[str, int]:
    return dict(zip("abc", operands, strict=False))


def _column_steps(subject: str, first: int, second: int) -> list[str]:
    """Return one line per column, units first; the next column applies the carry or borrow."""
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
