"""Generated arithmetic problems are disjoint, reproducible, in the schema, and solved correctly."""

import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo_core.demo import arithmetic
from dapo_core.errors import DataError
from tests.trainings import write_parquet

_NUMBERS_IN_PLAIN_FORM = re.compile(r"^(\d+) ([-+*]) (\d+)(?: - (\d+))? = \?\n")


def _texts(rows: list[arithmetic.Row]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def _operand_keys(rows: list[arithmetic.Row]) -> set[tuple[str, tuple[int, ...]]]:
    """Return subject and operands, ignoring the operand order of additions and multiplications."""
    keys = set()
    for row in rows:
        subject, operands = row["extra_info"]["subject"], row["extra_info"]["operands"]
        first_two = operands[:2] if subject == "subtraction" else sorted(operands[:2])
        keys.add((subject, (*first_two, *operands[2:])))
    return keys


@pytest.mark.parametrize("max_level", [1, 3, 5])
def test_training_and_held_out_problems_are_disjoint(max_level: int) -> None:
    train_rows, eval_rows = arithmetic.generate_problems(2000, 300, max_level, seed=3)
    _, other_eval_rows = arithmetic.generate_problems(1, 300, max_level, seed=4)
    for rows, count in ((train_rows, 2000), (eval_rows, 300), (other_eval_rows, 300)):
        assert len(set(_texts(rows))) == len(rows) == count  # no text comes twice
    for held_out in (eval_rows, other_eval_rows):
        assert not set(_texts(train_rows)) & set(_texts(held_out))
        assert not _operand_keys(train_rows) & _operand_keys(held_out)


def test_the_seed_determines_the_bytes(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        train_rows, _ = arithmetic.generate_problems(300, 10, 3, seed)
        path = tmp_path / f"{name}.parquet"
        write_parquet(train_rows, path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_parquet_has_the_dapo_math_17k_schema(tmp_path: Path) -> None:
    train_rows, _ = arithmetic.generate_problems(40, 1, 5, seed=0)
    write_parquet(train_rows, tmp_path / "train.parquet")
    table = pq.read_table(tmp_path / "train.parquet")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    assert (
        table.schema.field("data_source").type == table.schema.field("ability").type == pa.string()
    )
    assert table.schema.field("prompt").type.value_type == message
    assert table.schema.field("reward_model").type == pa.struct(
        [("ground_truth", pa.string()), ("style", pa.string())]
    )
    assert table.schema.field("extra_info").type.field("index").type == pa.int64()
    assert table.to_pylist() == train_rows


def test_subjects_and_levels_have_equal_shares() -> None:
    # 4 subjects x 5 levels = 20 kinds; 600 rows = 30 of each.
    _, eval_rows = arithmetic.generate_problems(1, 600, 5, seed=0)
    for subject in arithmetic.SUBJECTS:
        for level in range(1, 6):
            kind = (subject, level)
            assert [
                (r["extra_info"]["subject"], r["extra_info"]["level"]) for r in eval_rows
            ].count(kind) == 30


def test_ground_truth_follows_from_the_text() -> None:
    train_rows, _ = arithmetic.generate_problems(2000, 1, 5, seed=1)
    num_checked = 0
    for row in train_rows:
        match = _NUMBERS_IN_PLAIN_FORM.match(row["prompt"][0]["content"])
        assert (match is not None) == (row["extra_info"]["form"] == "plain")
        if match:
            first, sign, second, third = match.groups()
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](
                int(first), int(second)
            )
            assert row["reward_model"]["ground_truth"] == str(value - int(third or 0))
            num_checked += 1
    # Half of 2000 is plain, standard deviation sqrt(2000 / 4) = 22; four of them.
    assert 912 < num_checked < 1088


def test_word_problems_contain_their_operands_in_order() -> None:
    train_rows, _ = arithmetic.generate_problems(500, 1, 5, seed=1)
    for row in train_rows:
        numbers = [int(number) for number in re.findall(r"\d+", row["prompt"][0]["content"])]
        assert numbers == row["extra_info"]["operands"]


@pytest.mark.parametrize("subject", arithmetic.SUBJECTS)
@pytest.mark.parametrize("level", range(1, 6))
def test_solutions_are_correct_step_by_step_and_end_in_the_answer(subject: str, level: int) -> None:
    rng = random.Random(level)
    for _ in range(200):
        operands = arithmetic.draw_operands(subject, level, rng)
        expected = _independent_answer(subject, operands)
        assert expected >= 0
        for solution in (
            arithmetic.worked_solution(subject, operands),
            arithmetic.quick_solution(subject, operands),
        ):
            *steps, last = solution.split("\n")
            assert last == f"\\boxed{{{expected}}}"
            for step in steps:
                left, equals, right = step.partition("=")
                # Terms hold digits and signs only, so evaluating the text checks the step by
                # itself.
                assert re.fullmatch(r"[\d+*-]+", left)
                assert not equals or eval(left) == int(right), step


def _independent_answer(subject: str, operands: tuple[int, ...]) -> int:
    if subject == "multiplication":
        return sum(operands[0] for _ in range(operands[1]))
    signs = {"addition": (1, 1), "subtraction": (1, -1), "two_step": (1, 1, -1)}[subject]
    return sum(sign * operand for sign, operand in zip(signs, operands, strict=True))


def test_solutions_match_hand_worked_examples() -> None:
    # 47 + 85: units 7+5 = 12, tens 4+8 and the carried 1 = 13, together 132.
    assert arithmetic.worked_solution("addition", (47, 85)) == "7+5=12\n4+8+1=13\n\\boxed{132}"
    # 52 - 17: 2 is short of 7, so 12-7 = 5; tens 5-1 less the borrowed 1 = 3.
    assert arithmetic.worked_solution("subtraction", (52, 17)) == "12-7=5\n5-1-1=3\n\\boxed{35}"
    # 78 * 3: 8*3 = 24 carries 2; 7*3+2 = 23.
    assert arithmetic.worked_solution("multiplication", (78, 3)) == "8*3=24\n7*3+2=23\n\\boxed{234}"
    # 9 + 4 - 6: 13, then 13-6 = 7 with the ten borrowed: 1-0-1 = 0.
    assert (
        arithmetic.worked_solution("two_step", (9, 4, 6))
        == "9+4=13\n13\n13-6=7\n1-0-1=0\n\\boxed{7}"
    )
    # Quick: 9 + 4 - 6 = 7, in one go.
    assert arithmetic.quick_solution("two_step", (9, 4, 6)) == "9+4-6=7\n\\boxed{7}"
    assert arithmetic.quick_solution("multiplication", (78, 3)) == "78*3=234\n\\boxed{234}"


def test_an_exhausted_or_invalid_level_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "MAX_DRAWS_PER_PROBLEM", 100)
    with pytest.raises(
        DataError, match=r"of level 1 after \d+ rows.*lower data.arithmetic.num_train or"
    ):
        arithmetic.generate_problems(0, 40_000, 1, seed=0)
    with pytest.raises(DataError, match=r"max_level=6 is out of range; set it to 1 to 5"):
        arithmetic.generate_problems(1, 1, 6, seed=0)
