"""The report's pages in a real browser: no complaint, no request, the numbers, search, filter, phone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.history import make_history, write_page
from eval.report import write_report
from tests.evaluations import make_items, write_results
from tests.integration.browser import Browser

ITEMS = [
    replace(item, level=str(1 + i % 5), subject=("Algebra", "Counting & Probability", "a<b>/c")[i % 3])
    for i, item in enumerate(make_items(60))
]
FORMS: dict[str, Callable[[Any], str]] = {
    "percent": lambda x: f"{100 * x:.1f} %",
    "points": lambda x: f"{round(100 * x, 1) + 0.0:+.1f}",
    "size": lambda x: f"{100 * x:.1f}",
    "interval": lambda x: f"{100 * x[0]:.1f} to {100 * x[1]:.1f}",
    "points_interval": lambda x: " to ".join(f"{round(100 * bound, 1) + 0.0:+.1f}" for bound in x),
    "text": str,
}
TOKENS = {"perf/trained_response_tokens": 1200, "perf/generated_tokens": 2500}
VISIBLE = "[...document.querySelectorAll('details.flip')].filter(flip => flip.offsetParent !== null)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rng = random.Random(1)
    before, after = (
        "".join(rng.choices("rwntf", weights, k=60)) for weights in ((9, 8, 3, 2, 1), (16, 5, 1, 1, 0))
    )
    sides = write_results(folder / "before", before, ITEMS), write_results(folder / "after", after, ITEMS)
    steps = [
        {"step": n, "critic/score/mean": 0.1 * n, "actor/entropy": 1 / n, "timing_s/step": 2, **TOKENS}
        for n in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    write_report(*sides, folder / "metrics.jsonl", folder / "report", stages={}, artifacts={}, title="Pa<ge")
    write_page(make_history([*sides, folder / "report"]), folder)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.resize(1200)
        browser.open(folder / "report" / "report.html")
        yield browser


def shown_flips(browser: Browser, action: str) -> list[list[str]]:
    """[direction, verdict, level, subject, text] of the flips that can be seen after `action` in the form."""
    browser.evaluate(f"{{ const form = document.getElementById('filter'); form.reset(); {action} }}")
    browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    data = ", ".join(f"flip.dataset.{name}" for name in ("direction", "verdict", "level", "subject"))
    flips = browser.evaluate(f"{VISIBLE}.map(flip => [{data}, flip.textContent])")
    total = browser.evaluate("document.querySelectorAll('details.flip').length")
    assert browser.evaluate("document.getElementById('shown').textContent") == f"{len(flips)} of {total} shown"
    return flips


def test_the_numbers_of_the_page_are_those_of_the_json(browser: Browser, report: dict[str, Any]) -> None:
    fields = browser.evaluate(
        "[...document.querySelectorAll('[data-field]')].map(e => [e.dataset.field, e.dataset.form, e.textContent])"
    )
    seen = set()
    for path, form, text in fields:
        value: Any = report
        for key in path.split("/"):
            value = value[key.replace("~1", "/")]
        if form in FORMS:
            assert text == FORMS[form](value), path
        elif form == "count":
            assert float(text.replace(",", "")) == pytest.approx(value, abs=0.06 if value < 100 else 0.5), path
        else:
            number = float(text.removeprefix("= ").removeprefix("< "))
            assert (value < number) if "<" in text else number == pytest.approx(value, rel=0.05), path
        seen.add(path)
    groups = [f"groups/subject/a<b>~1c/{name}" for name in ("difference", "interval", "p_holm")]
    sides = [
        f"{side}/{name}" for side in ("before", "after") for name in ("accuracy", "interval", "truncated_rate")
    ]
    parts = [f"gain/{name}/difference" for name in ("format", "content")]
    assert {"verdict", "difference", "ci95", "p", "mid_p", "graders/ci95", *groups, *sides, *parts} <= seen
    assert len(seen) > 150


def test_every_flip_is_on_the_page_as_the_model_wrote_it(browser: Browser, report: dict[str, Any]) -> None:
    flips = shown_flips(browser, "")
    expected = report["flips"]["gained"] + report["flips"]["lost"]
    assert len(flips) == len(expected) > 20
    for (*_, text), flip in zip(flips, expected, strict=True):
        assert all(flip[side]["response"] in text for side in ("before", "after"))
    assert browser.evaluate("typeof hacked") == "undefined"


def test_search_finds_what_a_person_types(browser: Browser, report: dict[str, Any]) -> None:
    shown_flips(browser, "form.elements.search.focus();")
    browser.call("Input.insertText", text="IDEA no")  # every word, in any order and case
    found = browser.evaluate(f"{VISIBLE}.map(flip => flip.textContent)")
    flips = report["flips"]["gained"] + report["flips"]["lost"]
    assert len(found) == sum("no idea" in (f["before"]["response"], f["after"]["response"]) for f in flips) > 0
    assert all("no idea" in text for text in found)
    assert shown_flips(browser, "form.elements.search.value = 'nowhere to be found';") == []


def test_filters_hold_together(browser: Browser, report: dict[str, Any]) -> None:
    everything = shown_flips(browser, "")
    lost = shown_flips(browser, "form.elements.direction.value = 'lost';")
    assert len(lost) == len(report["flips"]["lost"]) > 0
    assert {flip[0] for flip in lost} == {"lost"}
    chosen = shown_flips(browser, "form.elements.verdict.value = 'wrong'; form.elements.subject.value = 'a<b>/c';")
    assert chosen == [flip for flip in everything if (flip[1], flip[3]) == ("wrong", "a<b>/c")] != []
    level = shown_flips(browser, "form.elements.level.value = '3'; form.elements.search.value = '+ 1';")
    assert level == [flip for flip in everything if flip[2] == "3"] != []
    browser.evaluate("document.querySelector('#filter button').click()")
    assert browser.evaluate(f"new Promise(done => setTimeout(() => done({VISIBLE}.length), 0))") == len(everything)


def test_it_reads_on_a_phone_by_day_and_by_night(browser: Browser, folder: Path) -> None:
    colours = {}
    for page in ("report/report.html", "history.html"):
        for scheme in ("light", "dark"):
            browser.resize(400, scheme=scheme)
            browser.open(folder / page)
            assert browser.evaluate("document.documentElement.scrollWidth") == 400  # no sideways scrolling
            assert browser.evaluate(
                "[...document.querySelectorAll('svg')].every(drawing => drawing.clientHeight > 90)"
            )
            colours[scheme] = [
                browser.evaluate(f"getComputedStyle(document.{element}).{name}")
                for element, name in (
                    ("body", "backgroundColor"),
                    ("body", "color"),
                    ("querySelector('svg text')", "fill"),
                )
            ]
        assert brightness(colours["light"][0]) > 200 > 100 > brightness(colours["light"][1])
        assert brightness(colours["dark"][0]) < 50 < 120 < min(map(brightness, colours["dark"][1:]))


def test_nothing_complained_and_nothing_left_the_machine(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report" / "report.html")
    browser.open(folder / "history.html")
    assert browser.complaints == []
    assert len(browser.requests) >= 2
    assert {url for url in browser.requests if not url.startswith((folder.as_uri(), "data:,"))} == set()


def test_a_complaint_would_be_heard(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(f"<!doctype html>{policy}<script>hacked = 1</script><p>bad")
    known = len(browser.complaints)
    browser.open(page)
    assert "Content Security Policy" in json.dumps(browser.complaints[known:])
    del browser.complaints[known:]
    assert browser.evaluate("typeof hacked") == "undefined"


def brightness(colour: str) -> float:
    """Of `rgb(r, g, b)`, 0 to 255."""
    parts = [float(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(parts) / len(parts)
