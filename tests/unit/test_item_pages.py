"""Items in report.html: order, shortened texts, samples, and the page's size limit."""

import base64
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from eval.answers.grading import AISBench
from eval.report import item_pages
from eval.report.compare import compare_evaluations
from eval.report.item_pages import PackedItems, pack_items
from eval.report.report import make_report, render_html
from eval.results.rows import Evaluation
from tests.evaluations import evaluation, make_items, make_rows, no_plots, settings_of


def unpacked(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def bodies(packed: PackedItems) -> dict[str, str]:
    chunks = [unpacked(chunk) for chunk in packed.chunks]
    return {row[0]: chunks[row[-2]][row[-1]] for row in unpacked(packed.index)}


def test_an_item_lists_all_samples_and_opens_the_one_that_shows_the_change() -> None:
    items = make_items(4)
    packed = pack_items(evaluation(items, "rww rrr wwt rwf"), evaluation(items, "rrw rrr wrt rwr"))
    assert [row[:9] for row in unpacked(packed.index)] == [
        ["0", "1", "add", "1", "gained", "wrong", "-1", 1, ["right", "wrong"]],
        ["2", "1", "add", "3", "gained", "wrong", "-1", 0, ["truncated", "wrong"]],
        ["1", "1", "add", "2", "right", "right", "2", 3, ["right"]],
        ["3", "1", "add", "4", "failed", "wrong", "-1", 1, ["request_failed", "right", "wrong"]],
    ]
    body = bodies(packed)["0"]
    before, _, after = body.partition("<h3>after</h3>")
    assert before.count("<summary>sample ") == after.count("<summary>sample ") == 3
    assert "<details open><summary>sample 1: wrong, <code>-1</code>" in before
    assert "<details open><summary>sample 0: right, <code>1</code>" in after


def test_long_responses_show_their_end_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    items = make_items(1)
    [row] = make_rows(items, "r")
    words = "word " * 3000 + "\n\nTherefore $x = \\frac12$ and \\boxed{1} sk-0123456789."
    sides = [Evaluation.of(settings_of(items), [replace(row, response=words)])] * 2
    body = bodies(pack_items(*sides))["0"]
    # of 15,055 characters the last 6,000 are shown
    assert body.count("Shortened: the first 9,0") == 2
    assert body.count("<mfrac>") == 2
    assert body.count('class="boxed"') == 2
    assert "word" in body
    assert "sk-0123" not in body


def test_changed_items_get_their_texts_before_the_page_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_items = 40
    monkeypatch.setattr(item_pages, "MAX_PAGE_CHARS", 20_000)
    monkeypatch.setattr(item_pages, "CHUNK_CHARS", 4000)
    items = make_items(num_items)
    sides = [
        Evaluation.of(
            settings_of(items),
            [
                replace(row, response=row.response and row.response + "x" * 5000)
                for row in make_rows(items, letters)
            ],
        )
        for letters in ("w" * num_items, "w" * (num_items - 2) + "rr")
    ]
    packed = pack_items(*sides)
    assert len(packed.chunks) > 3
    found = bodies(packed)
    assert list(found)[:2] == ["38", "39"]
    shown = [identity for identity, body in found.items() if "xxx" in body]
    assert {"38", "39"} <= set(shown)
    assert sum(body.count("x") for body in found.values()) < 25_000
    assert "Not shown: the page is at its size limit." in found["37"]


@pytest.mark.slow
def test_long_answers_and_many_disagreements_keep_the_page_small() -> None:
    items = make_items(300)
    rows = make_rows(items, "w" * 300)
    long = [
        replace(row, aisbench=AISBench("y" * 20_000, True, False), answer="z" * 20_000)
        for row in rows
    ]
    before, after = Evaluation.of(settings_of(items), rows), Evaluation.of(settings_of(items), long)
    result = compare_evaluations(before, after)
    packed = pack_items(before, after)
    page = render_html(make_report(result, []), no_plots(result, []), packed)
    assert page.count("yyy</code>") == 0
    assert page.count("yyy...</code>") == page.count("zzz...</code>") == 200
    assert "300 disagreements, first 200; all are in report.json" in page
    assert len(page) < 500_000
    assert max(map(len, bodies(packed).values())) < 3000
