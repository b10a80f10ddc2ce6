"""Thinking of served models: stored, counted, shown, truncated, and never graded."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.answers.extraction import split_thinking
from eval.answers.grading import grade
from eval.endpoint import Endpoint, Sampling
from eval.logs.regrade import regrade
from eval.report.compare import compare
from eval.report.item_pages import pack_items
from eval.report.report import make_report, render_html, render_markdown
from eval.results.rows import Row, load_evaluation, read_rows, write_rows
from eval.results.summary import Budget, Summary, Thinking, by_limit, measure_thinking
from tests.evaluations import evaluate, make_items, make_row, no_plots, packed_items
from tests.integration.arithmetic_server import ArithmeticServer, Handler, make_set

SAMPLING = Sampling(max_tokens=64)
RIGHT, WRONG = "So \\boxed{%d}", "Or \\boxed{-1}?"


def answered(
    server: ArithmeticServer, folder: Path, *said: tuple[Mapping[str, Any], str, Mapping[str, Any]]
) -> tuple[Summary, list[Row]]:
    """Evaluate `i + 1 = ?`, answered with a message, finish reason and usage each."""

    def behave(handler: Handler, prompt: str, attempt: int) -> bool:
        message, finish_reason, usage = said[int(prompt.split()[0])]
        return handler.say(message["content"], finish_reason, usage, **message)

    server.behave = behave
    summary = evaluate(make_set(len(said)), Endpoint(server.url, "m"), SAMPLING, folder)
    return summary, list(read_rows(folder).values())


def tokens(count: int, thinking: int | None = None) -> dict[str, Any]:
    details = (
        {} if thinking is None else {"completion_tokens_details": {"reasoning_tokens": thinking}}
    )
    return {"completion_tokens": count, **details}


def test_thinking_separated_by_the_server_is_stored_and_counted_under_both_field_names(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    summary, rows = answered(
        server,
        tmp_path,
        ({"reasoning": WRONG, "content": RIGHT % 1}, "stop", tokens(30, 20)),
        ({"reasoning_content": WRONG, "content": RIGHT % 2}, "stop", tokens(10, 4)),
        # no end: no answer
        ({"reasoning": f"surely {RIGHT % 3}", "content": None}, "length", tokens(64, 64)),
        ({"reasoning": None, "content": RIGHT % 4}, "stop", tokens(4, 0)),
    )
    assert [row.verdict for row in rows] == ["right", "right", "truncated", "right"]
    assert [row.reasoning for row in rows] == [WRONG, WRONG, f"surely {RIGHT % 3}", None]
    assert [row.reasoning_tokens for row in rows] == [20, 4, 64, 0]
    assert [row.is_right_by_aisbench for row in rows] == [True, True, False, True]
    # 88 of 108 tokens, over 4 responses.
    assert summary.thinking == Thinking(3, 22.0, 5.0, "server")
    assert summary.mean_response_tokens == 27.0


def test_a_count_of_zero_thinking_tokens_beside_thinking_is_ignored(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    """vLLM counts from an opening tag, which is missing if the chat template has it."""
    summary, rows = answered(
        server, tmp_path, ({"reasoning": "x" * 30, "content": RIGHT % 1}, "stop", tokens(40, 0))
    )
    assert [row.reasoning_tokens for row in rows] == [None]
    share = 30 / (30 + len(RIGHT % 1))
    assert summary.thinking == Thinking(
        1, pytest.approx(40 * share), pytest.approx(40 * (1 - share)), "share of text"
    )


def test_responses_that_a_reasoning_parser_swallows_are_reported(
    server: ArithmeticServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swallowed = ({"reasoning_content": RIGHT % 1, "content": None}, "stop", tokens(9))
    _, rows = answered(server, tmp_path, swallowed, ({"content": ""}, "stop", tokens(1)))
    assert [row.verdict for row in rows] == ["no_answer", "no_answer"]
    assert "2 responses have no text, 1 of them only thinking" in caplog.text


def test_thinking_in_tags_is_split_off_and_graders_still_see_the_original_text(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    texts = [
        f"<think>{WRONG}</think>\n{RIGHT % 1}",
        f"{WRONG}</think>{RIGHT % 2}",  # the template opened the thinking
        f"<think>surely {RIGHT % 3}",  # unclosed despite the finish reason
        f"<think>a</think>b<think>c</think>{RIGHT % 4}",
        f"</think>{'x' * 12}",
        RIGHT % 6,
    ]
    summary, rows = answered(
        server, tmp_path, *(({"content": text}, "stop", tokens(16)) for text in texts)
    )
    assert {row.id: row.verdict for row in rows if row.verdict != "right"} == {
        "item-2": "truncated",
        "item-4": "no_answer",
    }
    responses = [f"\n{RIGHT % 1}", RIGHT % 2, "", RIGHT % 4, "x" * 12, RIGHT % 6]
    assert [row.response for row in rows] == responses
    for text, row in zip(texts, rows, strict=True):
        assert row.text == text
        graded = grade(text, "stop", row.gold, is_chat=True)
        assert row.aisbench == graded.aisbench
        assert row.verdict in (graded.verdict, "truncated")
    assert rows[2].is_right_by_aisbench  # AISBench strips only closed thinking
    assert summary.thinking is not None
    assert (summary.thinking.num_responses, summary.thinking.counted) == (5, "share of text")
    shares = [len(row.reasoning or "") / len(text) for text, row in zip(texts, rows, strict=True)]
    assert summary.thinking.mean_tokens == pytest.approx(16 * sum(shares) / 6)
    # Imported logs have the whole text as the response; regrading splits it.
    write_rows(tmp_path, [replace(row, response=row.text, reasoning=None) for row in rows])
    assert regrade(tmp_path).summary.thinking == summary.thinking
    assert list(read_rows(tmp_path).values()) == rows


@pytest.mark.parametrize(
    "text", ["", "5", "<think>", "</think>", "a</think>b</think>", "<think>a</think>b<think>c"]
)
def test_thinking_and_response_together_are_the_whole_text(text: str) -> None:
    reasoning, response = split_thinking(text)
    assert (reasoning or "") + response == text


def test_lower_limits_truncate_longer_responses_and_the_report_shows_thinking_and_limits(
    server: ArithmeticServer, tmp_path: Path
) -> None:
    long = "thought " * 2000 + "<b>"
    counts = [(7, 3), (20, 12), (33, 30), (60, 50)]
    message = {"reasoning": long, "content": ""}
    said = [
        ({**message, "content": RIGHT % (i + 1)}, "stop", tokens(*count))
        for i, count in enumerate(counts)
    ]
    summary, _ = answered(server, tmp_path / "before", *said)
    # 64: all; 32: items 0 and 1; 16, 8: item 0; 4: none.
    expected = ((64, 1.0, 0.0), (32, 0.5, 0.5), (16, 0.25, 0.75), (8, 0.25, 0.75), (4, 0.0, 1.0))
    assert summary.by_limit == [Budget(*one) for one in expected]
    shorter = [(said[0][0], "stop", tokens(8)), *said[1:3], (message, "length", tokens(64, 64))]
    answered(server, tmp_path / "after", *shorter)
    comparison = compare(tmp_path / "before", tmp_path / "after")
    assert comparison.by_limit[1] == (Budget(32, 0.5, 0.5), Budget(32, 0.5, 0.5))
    report = make_report(comparison, [])
    markdown = render_markdown(report)
    assert [line.split() for line in markdown.splitlines() if "| mean " in line] == [
        ["|", "mean", "thinking", "tokens", "|", "23.8", "|", "28.5", "|", "|"],
        ["|", "mean", "answer", "tokens", "|", "6.2", "|", "2.8", "|", "|"],
    ]
    assert "Simulated from this run" in markdown
    packed = pack_items(*(load_evaluation(tmp_path / side) for side in ("before", "after")))
    page = render_html(report, no_plots(comparison, []), packed)
    assert page.count("estimated from characters") == 2  # one row of the new side was not counted
    _, bodies = packed_items(page)
    body = next(body for body in bodies if "4 + 1" in body or "3 + 1" in body)
    assert "<summary>thinking, 50 tokens</summary>" in body
    assert "thought &lt;b&gt;" in body
    assert "<b>" not in body


def test_nothing_is_reported_without_thinking_or_token_counts() -> None:
    items = make_items(2)
    rows = [make_row(item, "r") for item in items]
    assert measure_thinking(rows) is None
    assert by_limit(64, rows)[0] == (Budget(64, 1.0, 0.0),)
    # 10 tokens each: no limit down to 2560 / 2^7 = 20 cuts anything.
    assert by_limit(2560, rows) == by_limit(None, rows) == by_limit(64, []) == []
    uncounted = [replace(row, response_tokens=None, reasoning="so") for row in rows]
    assert measure_thinking(uncounted) is None
    assert by_limit(64, uncounted) == []
