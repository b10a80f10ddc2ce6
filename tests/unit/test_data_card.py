"""The data card: what became of every row, in numbers and in words."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.data.card import (
    CARD_JSON,
    CARD_MARKDOWN,
    MAX_EXAMPLES,
    Refusals,
    SetAccount,
    answer_kinds,
    make_card,
    write_card,
)
from tasks.data.contamination import Hit

LENGTHS = {
    "num_prompts": 90, "mean": 20.5, "quantiles": {"50": 19, "95": 60}, "max": 70, "max_prompt_tokens": 64,
    "num_too_long": 2, "too_long": "drop", "edges": [0, 32, 64, 96], "counts": [80, 8, 2],
}  # fmt: skip


def account(use: str = "train", name: str = "my.jsonl") -> SetAccount:
    refused = Refusals()
    for row in range(MAX_EXAMPLES + 2):
        refused.add(row, {"problem": "a | `b`\nc", "answer": None})
    answers = answer_kinds(["1", "1", r"\frac{1}{2}"])
    return SetAccount(
        name=name, use=use, source="hf:a/b@abc", licence="MIT", files={"x.parquet": "0" * 64}, num_read=100,  # type: ignore[arg-type]
        refused={"no gold answer": refused}, num_repeated=2, num_hit=1, num_kept=90, answers=answers,
    )  # fmt: skip


def test_a_card_says_what_became_of_every_row(tmp_path: Path) -> None:
    hits = [Hit("my.jsonl", 3, "aime24", "7", True, 1.0, "What is 1 + 1?", "what is 1+1")]
    card = make_card([account(), account("eval", "aime24")], hits, "remove")
    write_card(card, tmp_path, LENGTHS)
    stored = json.loads((tmp_path / CARD_JSON).read_text(encoding="utf-8"))
    assert stored == {**card, "prompt_lengths": LENGTHS}
    refused = stored["sets"][0]["refused"]["no gold answer"]
    assert (refused["count"], len(refused["examples"])) == (MAX_EXAMPLES + 2, MAX_EXAMPLES)
    assert stored["contamination"]["sets"] == {"aime24": {"items": 1, "rows": 1, "equal_rows": 1}}
    text = (tmp_path / CARD_MARKDOWN).read_text(encoding="utf-8")
    for words in (
        "| `my.jsonl` |       100 |       7 |        2 |            1 |   90 |",
        "licence MIT",
        "answers: whole number 2, fraction 1",
        "7 refused: no gold answer",
        "the 1 training rows are left out",
        "aime24 `7`, row 3 of my.jsonl, overlap 100.0 %",
        "2 are longer (data.too_long=drop)",
        "| 0 to 32  |      80 |",
    ):
        assert words in text, text
    write_card(make_card([account()], [], "warn"), tmp_path)
    assert "None was found." in (tmp_path / CARD_MARKDOWN).read_text(encoding="utf-8")


def test_text_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    hit = Hit("my.jsonl", 3, "aime24", "7", True, 1.0, "lone \ud800", "lone \ud800")
    write_card(make_card([account()], [hit], "warn"), tmp_path)
    assert json.loads((tmp_path / CARD_JSON).read_bytes())["contamination"]["hits"][0]["item_text"] == "lone ?"


def test_answers_by_kind() -> None:
    golds = {
        "whole number": ["7", "-3", "1,000", "$5$"],
        "decimal": ["3.5", "-.25"],
        "fraction": ["1/2", r"\frac{1}{2}", r"\dfrac12", r"-\frac{3}{4}"],
        "options": ["A", "ACD"],
        "expression": [r"2\sqrt{3}", "x^2+1", "(1, 2)", "x", "5\\pi"],
        "words": ["Tuesday", "right"],
    }
    for kind, examples in golds.items():
        for gold in examples:
            assert answer_kinds([gold]) == {kind: 1}, gold
    assert list(answer_kinds(["A", "7", "8"]).items()) == [("whole number", 2), ("options", 1)]
