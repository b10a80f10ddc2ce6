"""All items of a comparison, packed into report.html: an index plus the texts in compressed chunks.

The browser unpacks a chunk when one of its items is opened, so a page with ten thousand items still
loads.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from eval.problems.pictures import IMAGES
from eval.report.compare import MAX_RESPONSE_CHARS, shown_sample
from eval.report.formulas import Formulas
from eval.report.pages import render
from eval.results.pictures import data_url
from eval.results.rows import Evaluation, Row, Samples, is_answered, num_right
from redaction import redact

MAX_PAGE_CHARS = 24_000_000  # over all responses; beyond it the page refers to results.jsonl
MIN_RESPONSE_CHARS = 400
MAX_FORMULAS = 20_000  # about a third of a millisecond each
MAX_PICTURE_CHARS = 12_000_000  # of data URLs over all items; beyond it the page names the files
CHUNK_CHARS = 500_000  # of HTML, before compression
_MAX_CELL_CHARS = 100  # per answer in the list


@dataclass(frozen=True)
class PackedItems:
    """Items as gzipped, base64-encoded JSON: the index, and chunks of HTML."""

    num_items: int
    index: str
    chunks: list[str]


def pack_items(before: Evaluation, after: Evaluation) -> PackedItems:
    """Pack all items of two comparable evaluations; changed items get page space first."""
    pairs = [(samples, after.items[identity]) for identity, samples in before.items.items()]
    pairs.sort(key=_place)
    rows = [row for pair in pairs for samples in pair for row in samples]
    texts = _Texts(len(rows) + sum(row.reasoning is not None for row in rows))
    pictures = _Pictures([one.folder for one in (before, after) if one.folder is not None])
    chunks: list[list[str]] = [[]]
    size = 0
    index = []
    for pair in pairs:
        if size > CHUNK_CHARS:
            chunks.append([])
            size = 0
        body = _body(pair, texts, pictures)
        index.append([*_index_entry(pair), len(chunks) - 1, len(chunks[-1])])
        chunks[-1].append(body)
        size += len(body)
    return PackedItems(len(pairs), _packed(index), [_packed(chunk) for chunk in chunks])


def direction_of(pair: tuple[Samples, Samples]) -> str:
    """How an item changed: gained, lost, unchanged (right, wrong or mixed), or failed."""
    before, after = pair
    if not (is_answered(before) and is_answered(after)):
        return "failed"
    counts = num_right(before), num_right(after)
    if counts[0] != counts[1]:
        return "gained" if counts[1] > counts[0] else "lost"
    return {0: "wrong", len(before): "right"}.get(counts[0], "mixed")


def _place(pair: tuple[Samples, Samples]) -> int:
    """Sort key: larger changes first, the rest in their order."""
    has_changed = direction_of(pair) in ("gained", "lost")
    return -abs(num_right(pair[1]) - num_right(pair[0])) if has_changed else 0


class _Texts:
    """Renders the ends of texts until the page is full."""

    def __init__(self, num_texts: int) -> None:
        share = MAX_PAGE_CHARS // max(1, num_texts)
        self._max_chars = min(MAX_RESPONSE_CHARS, max(MIN_RESPONSE_CHARS, share))
        self._left = MAX_PAGE_CHARS
        self._formulas = Formulas(MAX_FORMULAS)

    def end_of(self, text: str, num_chars: int | None = None) -> tuple[int, Markup | None]:
        """(characters cut, end of the text as HTML); the HTML is None once the page is full.

        `num_chars` is the length of the whole text, if `text` is only its end.
        """
        num_cut = 0 if num_chars is None else num_chars - len(text)
        if self._left <= 0:
            return num_cut + len(text), None
        start = _start_of_end(text, self._max_chars, num_cut > 0)
        self._left -= len(text) - start
        return num_cut + start, self._formulas.render(text[start:])


class _Pictures:
    """Inlines pictures of results folders until the page is full."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._left = MAX_PICTURE_CHARS

    def url_of(self, name: str) -> str | None:
        """The picture as a data URL; None if its file is missing or the page is full."""
        files = (folder / IMAGES / name for folder in self._folders)
        file = next((file for file in files if file.is_file()), None)
        if file is None or file.stat().st_size * 4 > self._left * 3:
            return None
        url = data_url(file)
        self._left -= len(url)
        return url


def _start_of_end(text: str, max_chars: int, is_cut: bool) -> int:
    """Start of the last `max_chars`, moved to a paragraph, line or word to keep formulas whole."""
    if len(text) <= max_chars and not is_cut:
        return 0
    start = max(0, len(text) - max_chars)
    for mark in ("\n\n", "\n", " "):
        found = text.find(mark, start, start + max_chars // 4)
        if found >= 0:
            return found + len(mark)
    return start


def _index_entry(pair: tuple[Samples, Samples]) -> list[Any]:
    """Index entry: id, level, subject, gold answer, direction, then four values per side."""
    first, direction = pair[0][0], direction_of(pair)
    sides = []
    for samples, right in zip(pair, (direction == "lost", direction == "gained"), strict=True):
        shown = samples[shown_sample(samples, right)]
        answer = None if shown.answer is None else shown.answer[:_MAX_CELL_CHARS]
        verdicts = sorted({row.verdict for row in samples})
        sides += [shown.verdict, answer, num_right(samples), verdicts]
    groups = first.level or "", first.subject or ""
    return [first.id, *groups, first.gold[:_MAX_CELL_CHARS], direction, *sides]


def _body(pair: tuple[Samples, Samples], texts: _Texts, pictures: _Pictures) -> str:
    direction = direction_of(pair)
    sides = [
        {"name": name, "samples": _samples(samples, texts), "shown": shown_sample(samples, right)}
        for name, samples, right in (
            ("before", pair[0], direction == "lost"),
            ("after", pair[1], direction == "gained"),
        )
    ]
    first = pair[0][0]
    return render(
        "item.html.j2",
        problem=texts.end_of(first.problem),
        pictures=[(name, pictures.url_of(name)) for name in first.images or ()],
        gold=first.gold,
        sides=sides,
    )


def _samples(samples: Sequence[Row], texts: _Texts) -> list[dict[str, Any]]:
    shown = []
    for row in samples:
        num_thinking, num_chars = row.num_chars
        if row.response is None:
            num_left_out, text = texts.end_of(row.failure or "")
        else:
            num_left_out, text = texts.end_of(row.response, num_chars)
        thinking = texts.end_of(row.reasoning, num_thinking) if row.reasoning else None
        shown.append({"row": row, "num_left_out": num_left_out, "text": text, "thinking": thinking})
    return shown


def _packed(value: Any) -> str:
    # Redacted here, because exports cannot look into the packed text.
    text = redact(json.dumps(value, ensure_ascii=True, separators=(",", ":")))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
