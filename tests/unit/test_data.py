"""Training data: rows refused with their counts, prompts tokenised, and an order that resumes anywhere."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_core.data import Prompt, PromptStream, load_tokenizer, read_held_out, read_rows, tokenize_prompts
from dapo_core.errors import DataError, ModelError
from dapo_core.reward.scorers import score_math
from tests.tiny_models import tiny_tokenizer

PROMPTS = [Prompt(index, (index,), "arithmetic", str(index)) for index in range(5)]


def _row(content: str | None = "What is 1 + 1?", ground_truth: str | None = "2") -> dict[str, Any]:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
    }


def _write(folder: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    path = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


def _order(stream: PromptStream, count: int) -> list[int]:
    return [prompt.index for prompt in stream.take(count)]


def test_position_counts_prompts_and_epochs_are_permutations_that_differ() -> None:
    stream = PromptStream(PROMPTS * 4, seed=3, shuffle=True)
    epochs = [[prompt.index for prompt in stream.take(20)] for _ in range(3)]
    assert (stream.position, stream.epoch) == (60, 3.0)
    assert all(sorted(epoch) == sorted([0, 1, 2, 3, 4] * 4) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream.take(5)
    assert (stream.position, stream.epoch) == (65, 3.25)


def test_the_seed_alone_decides_the_order() -> None:
    orders = [_order(PromptStream(PROMPTS * 4, seed, shuffle=True), 60) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_without_shuffling_the_file_order_repeats() -> None:
    stream = PromptStream(PROMPTS, seed=0, shuffle=False)
    assert _order(stream, 3) == [0, 1, 2]
    assert _order(stream, 9) == [3, 4, 0, 1, 2, 3, 4, 0, 1]  # larger than the set, over two boundaries
    assert stream.position == 12
    assert _order(stream, 0) == []


@settings(deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(0, 13), max_size=6), st.booleans())
def test_a_stream_resumed_at_any_position_gives_the_uninterrupted_order(
    position: int, takes: list[int], shuffle: bool
) -> None:
    whole = _order(PromptStream(PROMPTS, 7, shuffle), position + sum(takes))
    resumed = PromptStream(PROMPTS, 7, shuffle, position)
    assert [index for count in takes for index in _order(resumed, count)] == whole[position:]
    assert resumed.position == position + sum(takes)


def test_rows_come_back_whole(tmp_path: Path) -> None:
    rows = [_row(), _row("What is 3 - 3?", "0")]
    assert read_rows(_write(tmp_path, rows)) == rows


def test_a_ground_truth_of_zero_as_a_number_is_a_ground_truth(tmp_path: Path) -> None:
    rows = [{**_row(), "reward_model": {"ground_truth": 0}}]
    read = read_rows(_write(tmp_path, rows))
    assert tokenize_prompts(read, tiny_tokenizer(), 100)[0].ground_truth == "0"


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = _write(tmp_path, [{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}])
    with pytest.raises(DataError, match=r"lacks the columns data_source, reward_model \(it has prompt, answer\)"):
        read_rows(path)


def test_empty_prompts_are_counted_and_refused(tmp_path: Path) -> None:
    empty = [_row(""), _row("  \n"), _row(None), {**_row(), "prompt": []}, {**_row(), "prompt": None}]
    path = _write(tmp_path, [_row(), *empty, _row(), _row("")])
    with pytest.raises(
        DataError,
        match=r"6 of 8 rows have an empty prompt or one that is not chat messages \(rows 1, 2, 3, 4, 5, \.\.\.\)",
    ):
        read_rows(path)


def test_rows_without_ground_truth_are_counted_and_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, [_row(), _row(ground_truth=" "), _row(ground_truth=None)])
    with pytest.raises(DataError, match=r"2 of 3 rows have no reward_model\.ground_truth \(rows 1, 2\)"):
        read_rows(path)


def test_a_prompt_that_is_not_chat_messages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 1 rows have an empty prompt or one that is not chat messages"):
        read_rows(_write(tmp_path, [{**_row(), "prompt": "What is 1 + 1?"}]))


@pytest.mark.parametrize("extra_info", [{"when": datetime(2026, 1, 1)}, {"image": b"x"}, "text", [1]])
def test_extra_info_that_no_checkpoint_could_hold_is_refused(tmp_path: Path, extra_info: Any) -> None:
    rows = [{**_row(), "extra_info": None}, {**_row(), "extra_info": extra_info}]
    with pytest.raises(DataError, match=r"1 of 2 rows have an extra_info that is not a struct .* \(rows 1\)"):
        read_rows(_write(tmp_path, rows))


def test_extra_info_goes_with_the_prompt(tmp_path: Path) -> None:
    info = {"index": 7, "split": "train", "answers": [1.5, None], "more": {"level": 3}}
    rows = read_rows(_write(tmp_path, [{**_row(), "extra_info": info}, {**_row(), "extra_info": None}]))
    with_info, without = tokenize_prompts(rows, tiny_tokenizer(), 100)
    assert with_info.extra_info == info
    assert without.extra_info == tokenize_prompts([_row()], tiny_tokenizer(), 100)[0].extra_info == {}
    assert PromptStream([with_info], 0, False).digest != PromptStream([without], 0, False).digest


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    schema = pa.Table.from_pylist([_row()]).schema
    with pytest.raises(DataError, match=r"has no rows; check data\.train_path"):
        read_rows(_write(tmp_path, [], schema))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"not parquet at all")
    for path in (tmp_path / "train.parquet", tmp_path / "absent.parquet", tmp_path):
        with pytest.raises(DataError, match=rf"^{path} cannot be read as parquet: .*check data\.train_path"):
            read_rows(path)


def _math_item(number: int, **changes: Any) -> dict[str, Any]:
    item = {
        "problem": f"What is {{{number}}} + 1?",
        "solution": f"Not $\\boxed{{0}}$ but $\\boxed{{\\frac{{{number}}}{{2}}}}$.",
        "answer": "not read where the solution has a box",
        "unique_id": f"test/{number}.json",
    }
    return item | changes


def _write_jsonl(folder: Path, items: list[Any]) -> Path:
    path = folder / "eval.jsonl"
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return path


def test_a_held_out_parquet_is_read_as_training_s_is(tmp_path: Path) -> None:
    path = _write(tmp_path, [_row()])
    assert read_held_out(path) == read_rows(path)
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"cannot be read as parquet: .*; check data\.eval_path"):
        read_held_out(path)


def test_math_problems_become_rows_that_tokenise_and_score(tmp_path: Path) -> None:
    without_box = _math_item(2, solution="five, \u2028 or so", answer=5)
    rows = read_held_out(_write_jsonl(tmp_path, [_math_item(3), without_box]))
    asked = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert rows == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {{{number}}} + 1?{asked}"}],
            "reward_model": {"ground_truth": ground_truth},
        }
        for number, ground_truth in ((3, "\\frac{3}{2}"), (2, 5))
    ]
    prompts = tokenize_prompts(rows, tiny_tokenizer(), 10_000)
    assert [prompt.ground_truth for prompt in prompts] == ["\\frac{3}{2}", "5"]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([_math_item(1), [1], "x"], r"2 of 3 rows have something else than a JSON object \(rows 1, 2\)"),
        ([{}, _math_item(1), _math_item(2, problem=" ")], r"2 of 3 rows have no problem \(rows 0, 2\)"),
        (
            [_math_item(1), _math_item(2, solution="five", answer=" "), {"problem": "1 + 1"}],
            r"2 of 3 rows have neither an answer nor a boxed solution \(rows 1, 2\)",
        ),
        ([], r"has no rows; check data\.eval_path"),
    ],
)
def test_math_rows_that_cannot_be_asked_or_scored_are_counted(tmp_path: Path, items: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_held_out(_write_jsonl(tmp_path, items))


def test_a_held_out_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    torn = _write_jsonl(tmp_path, [_math_item(1)])
    torn.write_text(torn.read_text()[:-9])
    with pytest.raises(DataError, match=r"1 of 1 rows have something else than a JSON object"):
        read_held_out(torn)
    torn.write_bytes(b"\xff\xfe")
    for path in (torn, tmp_path / "absent.jsonl"):
        with pytest.raises(DataError, match=rf"^{path} cannot be read as text: .*; check data\.eval_path"):
            read_held_out(path)
    with pytest.raises(DataError, match=r"ends in '\.json'; set data\.eval_path to a \.parquet or .* \.jsonl"):
        read_held_out(tmp_path / "eval.json")


if "DAPO_TEST_DATA" in os.environ:
    MATH_500 = Path(os.environ["DAPO_TEST_DATA"]) / "math500" / "test.jsonl"

    def test_gold_answers_of_the_real_math500_score_right_and_others_do_not() -> None:
        truths = [row["reward_model"]["ground_truth"] for row in read_held_out(MATH_500)]
        ending = "Therefore, the final answer is: $\\boxed{{{}}}$. I hope it is correct."
        assert [score_math(ending.format(truth), truth).verdict for truth in truths] == ["right"] * 500
        assert [score_math(ending.format(f"{truth}1"), truth).verdict for truth in truths] == ["wrong"] * 500
        solutions = [json.loads(line)["solution"] for line in MATH_500.read_text(encoding="utf-8").splitlines()]
        verdicts = Counter(score_math(*pair).verdict for pair in zip(solutions, truths, strict=True))
        # 22 boxes begin more than 300 characters before the end; 2 solutions have another `answer:` after the box
        assert verdicts == {"right": 476, "no_answer": 22, "wrong": 2}


def test_prompts_go_through_the_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    (prompt,) = tokenize_prompts([_row()], tokenizer, 100)
    assert tokenizer.decode(list(prompt.prompt_ids)) == "<|user|>\nWhat is 1 + 1?<|end|>\n<|assistant|>\n"
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (0, "arithmetic", "2")


def test_prompts_that_are_too_long_are_counted_with_the_longest() -> None:
    tokenizer, rows = tiny_tokenizer(), [_row(), _row("What is 1 + 1? " * 3), _row("What is 1 + 1? " * 9)]
    lengths = [len(prompt.prompt_ids) for prompt in tokenize_prompts(rows, tokenizer, 10_000)]
    assert lengths == sorted(lengths)
    assert len(tokenize_prompts(rows, tokenizer, lengths[2])) == 3  # the limit itself is allowed
    expected = (
        rf"2 of 3 prompts are longer than data\.max_prompt_tokens={lengths[0]} \(longest {lengths[2]} tokens"
    )
    with pytest.raises(DataError, match=expected):
        tokenize_prompts(rows, tokenizer, lengths[0])


def test_a_tokenizer_without_chat_template_or_none_at_all_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").chat_template == tokenizer.chat_template
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelError, match="plain has no chat template; use an instruction-tuned model"):
        load_tokenizer(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"(?s)empty has no readable tokenizer: .*check model\.path"):
        load_tokenizer(tmp_path / "empty")
