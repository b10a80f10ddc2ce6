"""The data card: what a recipe's problems are, where they came from, and what became of every row."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eval.answers.choice import option_letters
from eval.pages import render
from tasks.data.contamination import MIN_OVERLAP, RUN_WORDS, Hit, Mode

CARD_JSON, CARD_MARKDOWN = "data_card.json", "data_card.md"
MAX_EXAMPLES = 5  # of each reason for which rows were refused
MAX_HITS = 50
MAX_TEXT_CHARS = 300

_KINDS = {  # the first that matches the whole answer
    "whole number": re.compile(r"[-+]?\d+(?:,\d{3})*"),
    "decimal": re.compile(r"[-+]?\d*\.\d+"),
    "fraction": re.compile(r"[-+]?(?:\d+\s*/\s*\d+|\\[dt]?frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))"),
}
_FORMULA = re.compile(r"[\d\\^_=<>{}()\[\]+*/|]|^[A-Za-z]$")


@dataclass
class Refusals:
    """Rows refused for one reason."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, row: int, content: Any) -> None:
        """Count a row, and keep the beginning of its content if it is among the first."""
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"row {row}: {_shortened(json.dumps(content, ensure_ascii=False, default=str))}")


@dataclass(frozen=True)
class SetAccount:
    """One set of a recipe and what became of its rows: num_read = refused + num_repeated + num_hit + num_kept."""

    name: str  # as data.train or data.eval has it
    use: Literal["train", "eval"]
    source: str  # where its rows came from, with the commit of a hub
    licence: str
    files: Mapping[str, str]  # name -> sha256
    num_read: int
    refused: Mapping[str, Refusals]  # by reason
    num_repeated: int  # rows with the prompt of an earlier one
    num_hit: int  # left out as problems of an evaluation set
    num_kept: int
    answers: Mapping[str, int]  # of the kept rows, by kind


def make_card(sets: Sequence[SetAccount], hits: Sequence[Hit], mode: Mode) -> dict[str, Any]:
    """The content of data_card.json, but for prompt lengths, which need the model's tokenizer."""
    found: dict[str, list[Hit]] = {}
    for hit in hits:
        found.setdefault(hit.evaluation_set, []).append(hit)
    card = {
        "sets": [asdict(account) for account in sets],
        "contamination": {
            "mode": mode,
            "run_words": RUN_WORDS,
            "min_overlap": MIN_OVERLAP,
            "rows": len({(hit.train_set, hit.row) for hit in hits}),
            "sets": {
                name: {
                    "items": len({hit.item for hit in ours}),
                    "rows": len({(hit.train_set, hit.row) for hit in ours}),
                    "equal_rows": len({(hit.train_set, hit.row) for hit in ours if hit.is_equal}),
                }
                for name, ours in found.items()
            },
            "hits": [
                {**asdict(hit), "train_text": _shortened(hit.train_text), "item_text": _shortened(hit.item_text)}
                for hit in hits[:MAX_HITS]
            ],
        },
    }
    return json.loads(json.dumps(card))  # as a reader of the file gets it: tuples become lists


def render_card(card: Mapping[str, Any], lengths: Mapping[str, Any] | None = None) -> str:
    """data_card.md; `lengths` are the prompt lengths that a training measured (dapo_core.tokenizing)."""
    return render("data_card.md.j2", card=card, lengths=lengths)


def write_card(card: Mapping[str, Any], folder: Path, lengths: Mapping[str, Any] | None = None) -> None:
    """Write data_card.json and data_card.md into the folder."""
    content = dict(card) if lengths is None else {**card, "prompt_lengths": lengths}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # A row may contain a lone surrogate, which UTF-8 cannot encode.
    (folder / CARD_JSON).write_bytes(text.encode(errors="replace"))
    (folder / CARD_MARKDOWN).write_bytes(render_card(card, lengths).encode(errors="replace"))


def answer_kinds(golds: Iterable[str]) -> dict[str, int]:
    """How many gold answers are of each kind, the most frequent first."""
    counts = Counter(golds)
    kinds: Counter[str] = Counter()
    for gold, count in counts.items():
        kinds[_kind_of(gold)] += count
    return dict(kinds.most_common())


def _kind_of(gold: str) -> str:
    plain = gold.strip().strip("$").strip()
    for name, pattern in _KINDS.items():
        if pattern.fullmatch(plain):
            return name
    if plain == option_letters(plain):
        return "options"
    return "expression" if _FORMULA.search(plain) else "words"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."
