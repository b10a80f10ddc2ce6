"""The data card: an account of every row, in numbers and words."""

import hashlib
import json
from pathlib import Path
from typing import Any

from eval.problems.pictures import PictureStore
from eval.problems.registry import OWN
from eval.problems.rows import Split
from eval.report.compare import compare_evaluations
from eval.report.item_pages import pack_items
from eval.report.plots import prompt_length_plot
from eval.report.report import Provenance, make_report, render_html, render_markdown
from tasks.config.data import SetConfig
from tasks.data.card import CARD_JSON, CARD_MARKDOWN, answer_kind, make_card, set_entry, write_card
from tasks.data.contamination import Hit
from tasks.data.prompt_format import PromptFormat
from tasks.data.reading import MAX_EXAMPLES, SetCount
from tasks.data.sources import Source
from tests.evaluations import evaluation, make_items, no_plots

LENGTHS = {
    "num_prompts": 90,
    "mean": 20.5,
    "quantiles": {"50": 19, "95": 60},
    "max": 70,
    "max_prompt_tokens": 64,
    "num_too_long": 2,
    "too_long": "drop",
    "edges": [0, 32, 64, 96],
    "counts": [80, 8, 2],
}


def entry(folder: Path, split: Split = "train", name: str = "my.jsonl") -> dict[str, Any]:
    path = folder / name
    path.write_text("{}", encoding="utf-8")
    prompt_format = PromptFormat("given", True, "{problem}", ())
    source = Source(
        "data.train.0", name, split, OWN, None, path, 1.0, prompt_format, False, SetConfig(set=name)
    )
    count = SetCount(name, read=100, kept=93)
    for row in range(MAX_EXAMPLES + 4):
        count.refuse(row, "no gold answer", {"problem": "a | `b`\nc", "answer": None})
    for row in range(3):
        count.remove("the same problem again", f"{row}: What is 1 + 1?")
    count.answers.update({"fraction": 10, "whole number": 80})
    return set_entry(source, count, PictureStore(Path()))


def test_the_card_accounts_for_every_row(tmp_path: Path) -> None:
    hits = [Hit("my.jsonl", 3, "aime24", "7", True, 1.0, "What is 1 + 1?", "what is 1+1")]
    card = make_card([entry(tmp_path), entry(tmp_path, "test", "aime24.jsonl")], hits, "remove")
    write_card({**card, "prompt_lengths": LENGTHS}, tmp_path)
    stored = json.loads((tmp_path / CARD_JSON).read_text(encoding="utf-8"))
    assert stored == {**card, "prompt_lengths": LENGTHS}
    refused = stored["sets"][0]["refused"]["no gold answer"]
    assert (refused["rows"], len(refused["examples"])) == (MAX_EXAMPLES + 4, MAX_EXAMPLES)
    assert stored["sets"][0]["kept"] == 90
    assert stored["sets"][0]["files"] == {"my.jsonl": hashlib.sha256(b"{}").hexdigest()}
    assert stored["contamination"]["sets"] == {"aime24": {"items": 1, "rows": 1, "equal_rows": 1}}
    text = (tmp_path / CARD_MARKDOWN).read_text(encoding="utf-8")
    for words in (
        "| `my.jsonl` |       100 |       7 |       3 |   90 |",
        f"licence {OWN.licence}",
        "answers: whole number 80, fraction 10",
        "3 removed: the same problem again",
        "7 refused: no gold answer",
        "1 training row is left out",
        "aime24 `7`, problem 3 of my.jsonl, overlap 100.0 %",
        "2 are longer (data.too_long=drop)",
        "| 0 to 32  |      80 |",
    ):
        assert words in text, text
    write_card(make_card([entry(tmp_path)], [], "warn"), tmp_path)
    assert "None found." in (tmp_path / CARD_MARKDOWN).read_text(encoding="utf-8")


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    hit = Hit("my.jsonl", 3, "aime24", "7", True, 1.0, "lone \ud800", "lone \ud800")
    write_card(make_card([entry(tmp_path)], [hit], "warn"), tmp_path)
    assert (
        json.loads((tmp_path / CARD_JSON).read_bytes())["contamination"]["hits"][0]["item_text"]
        == "lone ?"
    )


def test_answers_are_classified() -> None:
    golds = {
        "whole number": ["7", "-3", "1,000", "$5$"],
        "decimal": ["3.5", "-.25"],
        "fraction": ["1/2", r"\frac{1}{2}", r"\dfrac12", r"-\frac{3}{4}"],
        "options": ["A", "ACD"],
        "expression": [r"2\sqrt{3}", "x^2+1", "(1, 2)", "x", "5\\pi"],
        "words": ["Tuesday", "right"],
    }
    for kind, examples in golds.items():
        assert {answer_kind(gold) for gold in examples} == {kind}, kind


def test_the_report_shows_the_data_card() -> None:
    lengths = {
        "num_prompts": 9,
        "mean": 20.5,
        "quantiles": {"50": 19, "95": 60},
        "max": 700,
        "max_prompt_tokens": 64,
        "num_too_long": 2,
        "too_long": "drop",
        "edges": [0, 32, 64, 701],
        "counts": [5, 2, 2],
    }
    reasons = {"no gold answer": {"rows": 3, "examples": ["row 1: <b>"]}}
    one = {
        "name": "my.jsonl",
        "use": "train",
        "read": 1200,
        "refused": reasons,
        "removed": {},
        "kept": 1197,
    }
    card = {
        "sets": [one],
        "contamination": {"mode": "remove", "rows": 4},
        "prompt_lengths": lengths,
    }
    items = make_items(4)
    sides = [evaluation(items, letters, name) for letters, name in (("rwww", "a"), ("rrrw", "b"))]
    comparison = compare_evaluations(*sides)
    report = make_report(comparison, [], Provenance(card=card))
    assert report["data"] == card
    text = " ".join(render_markdown(report).split())
    assert "| my.jsonl | training | 1,200 | 3 | 0 | 1,197 |" in text
    assert (
        "4 training problems also appear in an evaluation set; they were left out of training."
        in text
    )
    plots = {**no_plots(comparison, []), "prompts": [prompt_length_plot(lengths)]}
    page = render_html(report, plots, pack_items(*sides))
    assert 'href="data_card.md"' in page
    assert "Prompt lengths in tokens" in page
