"""Report pages in a real browser: errors, requests, numbers, search, filters, small screens."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.report.compare import compare_evaluations
from eval.report.history import make_history, write_page
from eval.report.item_pages import pack_items
from eval.report.report import Provenance, make_report, render_html
from eval.report.suite_report import Models, write_suite_report
from eval.results.suite import Member, write_suite
from tests.evaluations import evaluation, make_items, no_plots, write_results
from tests.integration.browser import Browser

ITEMS = [
    replace(
        item, level=str(1 + i % 5), subject=("Algebra", "Counting & Probability", "a<b>/c")[i % 3]
    )
    for i, item in enumerate(make_items(60))
]
FORMS: dict[str, Callable[[Any], str]] = {
    "percent": lambda x: f"{100 * x:.1f} %",
    "points": lambda x: f"{round(100 * x, 1) + 0.0:+.1f}",
    "size": lambda x: f"{100 * x:.1f}",
    "interval": lambda x: f"{100 * x[0]:.1f} to {100 * x[1]:.1f}",
    "points_interval": lambda x: " to ".join(f"{round(100 * bound, 1) + 0.0:+.1f}" for bound in x),
    "seconds": lambda x: f"{x:.1f} s" if x >= 1 else f"{1000 * x:.0f} ms",
    "text": str,
}
TOKENS = {"perf/trained_response_tokens": 1200, "perf/generated_tokens": 2500}
TABLES = "[...document.querySelectorAll('.scroll')]"
ITEM = "[...document.querySelectorAll('details.item')]"
LATEX = (
    "We get $x^2 = \\frac{1}{4}$, so \\boxed{\\text{<img src=x onerror=hacked=1>}} and "
    "$\\href{http://a}{1}$."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rng = random.Random(1)
    before, after = (
        "".join(rng.choices("rwntf", weights, k=60))
        for weights in ((9, 8, 3, 2, 1), (16, 5, 1, 1, 0))
    )
    sides = (
        write_results(folder / "before", before, ITEMS),
        write_results(folder / "after", after, ITEMS),
    )
    rows = sides[1] / "results.jsonl"
    rows.write_text(rows.read_text().replace('"no idea"', json.dumps(LATEX + " no idea")))
    steps = [
        {
            "step": n,
            "critic/score/mean": 0.1 * n,
            "actor/entropy": 1 / n,
            "timing_s/step": 2,
            **TOKENS,
        }
        for n in range(1, 9)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    write_suite_report(
        Models(*sides), folder / "metrics.jsonl", folder / "report", Provenance(title="Pa<ge")
    )
    write_page(make_history([*sides, folder / "report"]), folder)
    write_suite_pages(folder, dict(zip(("before", "after"), sides, strict=True)))
    return folder


def write_suite_pages(folder: Path, sides: dict[str, Path]) -> None:
    """Write a suite report of two benchmarks, with gates, a baseline and checkpoints."""
    suites = {name: folder / f"suite-{name}" for name in ("before", "after", "other")}
    names = ("first", "second-benchmark")
    for name, suite in suites.items():
        for number, benchmark in enumerate(names):
            shutil.copytree(
                sides["after" if (name == "after") == (number == 0) else "before"],
                suite / benchmark,
            )
        write_suite(suite, [Member(benchmark) for benchmark in names], "first")
    models = Models(
        suites["before"], suites["after"], {"other": suites["other"]}, {20: suites["other"]}, 40
    )
    gates = ("first >= before - 1", "second-benchmark >= other + 5", "first.truncated <= 1")
    write_suite_report(
        models, folder / "metrics.jsonl", folder / "suite", Provenance(title="Su<ite"), gates
    )


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.resize(1200)
        browser.open(folder / "report" / "report.html")
        browser.wait_for("document.documentElement.dataset.items === 'ready'")
        yield browser


def shown_items(browser: Browser, action: str) -> list[dict[str, str]]:
    """Data (id, direction, level, subject) of the listed items after `action` on the form."""
    browser.evaluate(
        f"{{ const form = document.getElementById('filter'); form.reset(); {action} }}"
    )
    browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.evaluate("new Promise(done => setTimeout(done, 300))")
    found = browser.evaluate(f"{ITEM}.map(item => ({{...item.dataset}}))")
    count = browser.evaluate("document.getElementById('shown').textContent")
    assert count.startswith(f"{len(found)} of 60 items") or len(found) == 50
    return found


def opened(browser: Browser, identity: str) -> str:
    """The text of an item after clicking it."""
    item = f"document.querySelector('details.item[data-id=\"{identity}\"]')"
    browser.evaluate(f"{item}.querySelector('summary').click()")
    browser.wait_for(f"{item}.querySelector('.inside')?.textContent")
    text: str = browser.evaluate(f"{item}.textContent")
    return text


def test_the_page_shows_the_numbers_of_the_json(browser: Browser, report: dict[str, Any]) -> None:
    fields = browser.evaluate(
        "[...document.querySelectorAll('[data-field]')].map(e => [e.dataset.field, e.dataset.form, "
        "e.textContent])"
    )
    seen = set()
    for path, form, text in fields:
        value: Any = report
        for key in path.split("/"):
            value = value[key.replace("~1", "/")]
        if form in FORMS:
            assert text == FORMS[form](value), path
        elif form == "count":
            assert float(text.replace(",", "")) == pytest.approx(
                value, abs=0.06 if value < 100 else 0.5
            ), path
        else:
            number = float(text.removeprefix("= ").removeprefix("< "))
            assert (value < number) if "<" in text else number == pytest.approx(value, rel=0.05), (
                path
            )
        seen.add(path)
    groups = [f"groups/subject/a<b>~1c/{name}" for name in ("difference", "ci95", "p_holm")]
    sides = [
        f"{side}/{name}"
        for side in ("before", "after")
        for name in ("accuracy", "interval", "truncated_rate")
    ]
    parts = [f"gain/{name}/difference" for name in ("format", "content")]
    assert {
        "verdict",
        "difference",
        "ci95",
        "p",
        "mid_p",
        "graders/ci95",
        *groups,
        *sides,
        *parts,
    } <= seen
    assert len(seen) > 150


def test_every_item_shows_the_response_as_written(browser: Browser, report: dict[str, Any]) -> None:
    flips = report["flips"]["gained"] + report["flips"]["lost"]
    assert {item["id"] for item in shown_items(browser, "")} == {flip["id"] for flip in flips}
    for flip in flips:
        text = opened(browser, flip["id"])
        for side in ("before", "after"):
            words, _, box = flip[side]["response"].partition("\\boxed")
            assert words.partition("$")[0] in text
            assert f"\\boxed{box.partition('}')[0]}" in text or not box  # the formula's source
    assert len(shown_items(browser, "form.elements.direction.value = '';")) == 50  # of 60
    browser.evaluate("document.querySelector('#pager [name=next]').click()")
    assert browser.evaluate(f"{ITEM}.length") == 10
    assert (
        browser.evaluate("document.getElementById('shown').textContent")
        == "60 of 60 items, 51 to 60"
    )


def test_formulas_are_drawn_and_cannot_run_scripts(
    browser: Browser, report: dict[str, Any]
) -> None:
    choose = "form.elements.direction.value = ''; form.elements.search.value = 'onerror';"
    [found, *_] = shown_items(browser, choose)
    opened(browser, found["id"])
    body = f"document.querySelector('details.item[data-id=\"{found['id']}\"] .inside')"
    names = browser.evaluate(
        f"[...new Set([...{body}.querySelectorAll('*')].map(e => e.localName))]"
    )
    assert {"math", "mfrac", "msup", "mtext"} <= set(names)
    assert set(names).isdisjoint({"img", "a", "script", "svg", "iframe"})
    fraction = f"{body}.querySelector('mfrac').getBoundingClientRect()"
    assert browser.evaluate(f"{fraction}.height") > 15
    assert (
        browser.evaluate(f"getComputedStyle({body}.querySelector('.boxed')).borderTopWidth")
        == "1px"
    )
    browser.evaluate("document.getElementById('source').click()")
    assert browser.evaluate(f"{fraction}.height") == 0
    assert browser.evaluate(f"{body}.querySelector('annotation').getBoundingClientRect().width") > 5
    browser.evaluate("document.getElementById('source').click()")
    assert browser.evaluate("typeof hacked") == "undefined"


def test_search_and_filters_combine(browser: Browser, report: dict[str, Any]) -> None:
    flips = report["flips"]["gained"] + report["flips"]["lost"]
    everything = shown_items(browser, "")
    # every word, in any order and case
    found = shown_items(browser, "form.elements.search.value = 'IDEA no';")
    expected = {
        f["id"] for f in flips if "no idea" in f["before"]["response"] + f["after"]["response"]
    }
    assert {item["id"] for item in found} == expected != set()
    assert shown_items(browser, "form.elements.search.value = 'nowhere to be found';") == []
    lost = shown_items(browser, "form.elements.direction.value = 'lost';")
    assert (
        {item["id"] for item in lost} == {flip["id"] for flip in report["flips"]["lost"]} != set()
    )
    chosen = shown_items(
        browser, "form.elements.subject.value = 'a<b>/c'; form.elements.level.value = '3';"
    )
    assert (
        chosen
        == [item for item in everything if (item["subject"], item["level"]) == ("a<b>/c", "3")]
        != []
    )
    failed = shown_items(browser, "form.elements.direction.value = 'failed';")
    assert len(failed) == report["unpaired"]["num_items"] > 0
    assert "HTTP 500: boom" in opened(browser, failed[0]["id"])
    browser.evaluate("document.querySelector('#filter button').click()")
    assert browser.evaluate(
        f"new Promise(done => setTimeout(() => done({ITEM}.length), 300))"
    ) == len(everything)


def test_ten_thousand_items_open_and_can_be_searched(browser: Browser, folder: Path) -> None:
    items = make_items(10_000, per_level=5000)
    sides = [
        evaluation(items, letters * 5000, name)
        for letters, name in (("wr", "base"), ("rr", "trained"))
    ]
    packed = pack_items(*sides)
    few = compare_evaluations(*(evaluation(items[:40], letters * 20) for letters in ("wr", "rr")))
    page = folder / "many.html"
    page.write_text(render_html(make_report(few, []), no_plots(few, []), packed))
    assert page.stat().st_size < 3_000_000
    started = time.monotonic()
    browser.open(page)
    browser.wait_for("document.documentElement.dataset.items === 'ready'")
    assert time.monotonic() - started < 300
    assert (
        browser.evaluate("document.getElementById('shown').textContent")
        == "5000 of 10000 items, 1 to 50"
    )
    browser.evaluate("document.getElementById('filter').elements.search.value = '9998 + 1'")
    browser.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.wait_for("document.getElementById('shown').textContent === '1 of 10000 items'")
    assert "9999" in opened(browser, "9998")


def test_pages_fit_a_phone_in_light_and_dark_mode(browser: Browser, folder: Path) -> None:
    colours = {}
    for page in (
        "report/report.html",
        "history.html",
        "suite/report.html",
        "suite/checkpoints.html",
    ):
        for scheme in ("light", "dark"):
            browser.resize(380, scheme=scheme)
            browser.open(folder / page)
            # no horizontal scrolling
            assert browser.evaluate("document.documentElement.scrollWidth") == 380
            # No column is cut off, and tables can be reached by keyboard.
            assert (
                browser.evaluate(
                    f"{TABLES}.filter(one => one.scrollWidth > one.clientWidth).length"
                )
                == 0
            )
            assert browser.evaluate(f"{TABLES}.every(one => one.tabIndex === 0 && one.ariaLabel)")
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


def test_no_page_logs_errors_or_makes_requests(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report" / "report.html")
    browser.open(folder / "history.html")
    assert browser.complaints == []
    assert len(browser.requests) >= 2
    assert {
        url for url in browser.requests if not url.startswith((folder.as_uri(), "data:,"))
    } == set()


def test_the_browser_reports_policy_violations(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(f"<!doctype html>{policy}<script>hacked = 1</script><p>bad")
    known = len(browser.complaints)
    browser.open(page)
    assert "Content Security Policy" in json.dumps(browser.complaints[known:])
    del browser.complaints[known:]
    assert browser.evaluate("typeof hacked") == "undefined"


def brightness(colour: str) -> float:
    """Brightness of `rgb(r, g, b)`, 0 to 255."""
    parts = [float(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(parts) / len(parts)
