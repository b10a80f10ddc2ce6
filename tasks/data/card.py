"""The data card: the problems of a recipe, their sources, and what happened to each row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.answers.choice import option_letters
from eval.report.pages import render
from tasks.data.contamination import MIN_OVERLAP, RUN_WORDS, Hit, Mode

if TYPE_CHECKING:
    from eval.problems.pictures import PictureStore
    from tasks.data.reading import SetCount
    from tasks.data.sources import Source

CARD_JSON, CARD_MARKDOWN = "data_card.json", "data_card.md"
MAX_HITS = 50
MAX_TEXT_CHARS = 300

_KINDS = {  # the first full match applies
    "whole number": re.compile(r"[-+]?\d+(?:,\d{3})*"),
    "decimal": re.compile(r"[-+]?\d*\.\d+"),
    "fraction": re.compile(r"[-+]?(?:\d+\s*/\s*\d+|\\[dt]?frac\s*(?:\{\d+\}|\d)\s*(?:\{\d+\}|\d))"),
}
_FORMULA = re.compile(r"[\d\\^_=<>{}()\[\]+*/|]|^[A-Za-z]$")


def set_entry(source: Source, count: SetCount, pictures: PictureStore) -> dict[str, Any]:
    """The card entry of one set. Rows read are refused (unusable), removed, or kept."""

    def by_reason(counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            reason: {"rows": number, "examples": count.examples.get(reason, [])}
            for reason, number in counts.items()
        }

    return {
        "name": source.benchmark or source.name,
        "use": "train" if source.split == "train" else "benchmark" if source.benchmark else "eval",
        "source": source.origin(),
        "licence": source.known.licence,
        "files": source.files(),
        "columns": source.known.reading,
        "doubt": source.known.doubt,
        "read": count.read,
        "refused": by_reason(count.refused),
        "removed": by_reason(count.removed),
        "kept": count.kept,
        "answers": dict(count.answers.most_common()),
        **({"pictures": _pictures(count, pictures)} if count.images else {}),
    }


def _pictures(count: SetCount, pictures: PictureStore) -> dict[str, Any]:
    """The pictures of a set that are stored: how many, and the sizes of some."""
    found = {name: pictures.sizes[name] for name in count.images if name in pictures.sizes}
    sizes = sorted(found.values(), key=math.prod) or [(0, 0)]
    return {
        "distinct": len(found),
        "scaled": len(pictures.scaled & found.keys()),
        "smallest": sizes[0],
        "median": sizes[len(sizes) // 2],
        "largest": sizes[-1],
    }


def make_card(sets: Sequence[Mapping[str, Any]], hits: Sequence[Hit], mode: Mode) -> dict[str, Any]:
    """The content of data_card.json: set entries, and training problems found in evaluation sets.

    Prompt lengths need the model's tokenizer, so training adds them later.
    """
    found: dict[str, list[Hit]] = {}
    for hit in hits:
        found.setdefault(hit.evaluation_set, []).append(hit)
    card = {
        "sets": list(sets),
        "contamination": {
            "mode": mode,
            "run_words": RUN_WORDS,
            "min_overlap": MIN_OVERLAP,
            "rows": len({(hit.train_set, hit.row) for hit in hits}),
            "sets": {
                name: {
                    "items": len({hit.item for hit in set_hits}),
                    "rows": len({(hit.train_set, hit.row) for hit in set_hits}),
                    "equal_rows": len(
                        {(hit.train_set, hit.row) for hit in set_hits if hit.is_equal}
                    ),
                }
                for name, set_hits in found.items()
            },
            "hits": [
                {
                    **asdict(hit),
                    "train_text": _shortened(hit.train_text),
                    "item_text": _shortened(hit.item_text),
                }
                for hit in hits[:MAX_HITS]
            ],
        },
    }
    return json.loads(json.dumps(card))  # as read from the file: tuples become lists


def write_card(card: Mapping[str, Any], folder: Path) -> None:
    """Write data_card.json and data_card.md; training adds `prompt_lengths` to the first."""
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    # Rows may contain lone surrogates, which UTF-8 cannot encode.
    (folder / CARD_JSON).write_bytes(text.encode(errors="replace"))
    (folder / CARD_MARKDOWN).write_bytes(
        render("data_card.md.j2", card=card).encode(errors="replace")
    )


def answer_kind(gold: str) -> str:
    """Classifies a gold answer: a kind of number, choice options, an expression, or words."""
    plain = gold.strip().strip("$").strip()
    for name, pattern in _KINDS.items():
        if pattern.fullmatch(plain):
            return name
    if plain == option_letters(plain):
        return "options"
    return "expression" if _FORMULA.search(plain) else "words"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + " ..."
