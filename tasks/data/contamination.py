r"""Finds training problems that are also in an evaluation set: equal texts, or runs of 13 words.

Texts are compared by words (letters, numbers, LaTeX commands, single Chinese characters) and signs,
ignoring layout, drawings and instructions, that is, sentences shared by many problems of a set. Two
problems match if all words and signs are equal (including shared sentences, which a template may
have filled in), or if common runs of 13 words cover most of the evaluation problem and the training
problem contains all of its numbers and signs. Runs alone would match variants such as z^4 + z^2 + 1
and z^4 - z^2 + 1. docs/data.md shows what the rule finds in published sets.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from dapo_core.errors import DataError

if TYPE_CHECKING:
    from eval.problems.items import Problem

Mode = Literal["remove", "warn", "error"]

RUN_WORDS = 13  # GPT-3, arXiv:2005.14165, appendix C
MIN_OVERLAP = 0.6  # of the evaluation problem's words
# A sentence in this share of a set's problems, and in so many, may be an instruction.
SHARED_SHARE, SHARED_ROWS = 0.001, 3
WIDELY_SHARED_SHARE = 0.2  # in this many it is one, and its numbers do not count
SAMPLED_ROWS = 20_000  # at most this many are searched for such sentences
BATCH_ROWS = 10_000

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
# A hyphen between two words is not a sign.
_TOKEN = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]+|\d+|(?<![a-z]{{2}})-|-(?![a-z]{{2}})|[+*/^=<>!|]")
_SIGNS = frozenset("+-=<>")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_LAYOUT = re.compile(
    r"\\(?:begin|end)\{[^{}]*\}|\\(?:left|right|[bB]igg?|displaystyle"
    r"|text(?:style|bf|it)?|math(?:rm|bf)|mbox"
    r"|operatorname|limits|quad|qquad|[lc]?dots)(?![a-zA-Z])"
)
_FRACTION = re.compile(r"\\[dtc]?frac(?![a-zA-Z])(?:\s*(\d)(?=\d))?")
_SENTENCE = re.compile(r"(?<=[.?!])\s*(?=[A-Z])|(?<=[。！？])|\n+")


@dataclass(frozen=True)
class Hit:
    """A training row whose problem is also in an evaluation set."""

    train_set: str
    row: int  # among the set's distinct problems
    evaluation_set: str
    item: str  # its id there
    is_equal: bool  # in all words and signs
    overlap: float  # share of the item's words in common runs; 1.0 for equal texts
    train_text: str
    item_text: str


def find_hits(
    train_set: str, texts: Callable[[], Iterator[str]], sets: Mapping[str, Sequence[Problem]]
) -> list[Hit]:
    """The training problems that are also in an evaluation set, ordered by row, then by set.

    `texts` is called twice and yields the texts of the distinct problems. Memory use is bounded by
    the evaluation sets and BATCH_ROWS texts.
    """
    found = [shared_sentences(texts())]
    found += [shared_sentences(problem.text for problem in problems) for problems in sets.values()]
    often, widely = (frozenset().union(*sentences) for sentences in zip(*found, strict=True))
    items = _Items(sets, often, widely)
    hits, start, rows = list[Hit](), 0, texts()
    while batch := list(islice(rows, BATCH_ROWS)):
        hits += items.find(train_set, start, batch)
        start += len(batch)
    return hits


def rows_to_drop(hits: Sequence[Hit], num_rows: int, mode: Mode) -> tuple[set[int], str]:
    """The rows to drop from one training set, and a warning if there are hits.

    All hits are dropped for `remove`, none for `warn`. Raises DataError for any hit with `error`,
    and if no rows would be left.
    """
    rows = {hit.row for hit in hits}
    if not rows:
        return rows, ""
    finding = (
        f"{len(rows)} of {num_rows} training problems of {hits[0].train_set} are also in "
        f"{_counts(hits)}"
    )
    if mode == "error":
        first = "; ".join(f"row {hit.row} is {hit.evaluation_set} {hit.item}" for hit in hits[:3])
        raise DataError(
            f"{finding} ({first}): accuracy would measure memorization. Set "
            "data.contamination=remove to train without them, or warn to keep them"
        )
    if mode == "warn":
        return set(), f"{finding}; they are kept: accuracy there will partly measure memorization"
    if len(rows) == num_rows:
        raise DataError(
            f"{finding}, which leaves none to train on. Change data.train or data.eval, or set "
            "data.contamination=warn to train on the evaluation set anyway"
        )
    return rows, f"{finding}; they are left out"


def _counts(hits: Sequence[Hit]) -> str:
    items = Counter(
        name for name, _ in dict.fromkeys((hit.evaluation_set, hit.item) for hit in hits)
    )
    return ", ".join(f"{name} ({count} of its items)" for name, count in items.items())


def shared_sentences(texts: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Sentences and lines that occur in SHARED_SHARE, and in WIDELY_SHARED_SHARE, of the texts.

    Looks at no more than SAMPLED_ROWS texts, evenly spread.
    """
    sample, step = list[str](), 1
    for row, text in enumerate(texts):
        if row % step == 0:
            sample.append(text)
        if len(sample) > SAMPLED_ROWS:
            sample, step = sample[::2], 2 * step
    counts = Counter(sentence for text in sample for sentence in set(_sentences(text)))
    least = [max(SHARED_ROWS, share * len(sample)) for share in (SHARED_SHARE, WIDELY_SHARED_SHARE)]
    often, widely = (
        frozenset(name for name, count in counts.items() if count >= bound) for bound in least
    )
    return often, widely


def tokens_of(text: str, *excluded: Set[str]) -> list[str]:
    """The words and signs of a text, without the first `excluded` sentences that leave text."""
    sentences = _sentences(text)
    for shared in excluded:
        if kept := [sentence for sentence in sentences if sentence not in shared]:
            sentences = kept
            break
    text = " ".join(sentences)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    if "\\" in text:
        text = _FRACTION.sub(r"\\frac \1 ", _LAYOUT.sub(" ", text))
    return _TOKEN.findall(text.lower())


def _sentences(text: str) -> list[str]:
    if "[asy]" in text:
        text = _DRAWING.sub(" ", text)
    return [sentence for part in _SENTENCE.split(text) if (sentence := part.strip())]


def _words(tokens: Sequence[str]) -> list[str]:
    return [token for token in tokens if token.isalnum()]


def _marks(tokens: Sequence[str]) -> Counter[str]:
    """Numbers and signs, which distinguish a problem from its variants."""
    return Counter(token for token in tokens if token in _SIGNS or token.isdigit())


def _has_in_order(tokens: Iterable[str], expected: Iterable[str]) -> bool:
    rest = iter(tokens)
    return all(token in rest for token in expected)


class _Items:
    """The evaluation problems, as tokens and as hashes of word runs."""

    def __init__(
        self, sets: Mapping[str, Sequence[Problem]], often: Set[str], widely: Set[str]
    ) -> None:
        self.items = [(name, problem) for name, problems in sets.items() for problem in problems]
        self.shared = (often, widely)
        self.tokens = [tokens_of(problem.text, often, widely) for _, problem in self.items]
        # Templated problems differ within shared sentences, so only instructions are excluded here.
        self.asked = [tokens_of(problem.text, widely) for _, problem in self.items]
        self.marks = [_marks(tokens) for tokens in self.asked]
        self.by_tokens: dict[tuple[str, ...], list[int]] = {}
        for number, tokens in enumerate(self.tokens):
            self.by_tokens.setdefault(tuple(tokens), []).append(number)
        words = [_words(tokens) for tokens in self.tokens]
        self.num_words = [len(row) for row in words]
        self.vocabulary = {
            word: number
            for number, word in enumerate(dict.fromkeys(chain.from_iterable(words)), start=1)
        }
        weights = np.random.default_rng(0).integers(
            1, 2**63, len(self.vocabulary) + 1, dtype=np.uint64
        )
        self.weights = weights * np.uint64(2) + np.uint64(1)
        hashes, rows = self._run_hashes(words)
        # hash of a run -> [(item, index of its first word)]
        self.places: dict[int, list[tuple[int, int]]] = {}
        firsts = np.cumsum([0, *(length + 1 for length in self.num_words)])
        for place in np.flatnonzero(hashes).tolist():
            item = int(rows[place])
            self.places.setdefault(int(hashes[place]), []).append((item, place - int(firsts[item])))
        self.known = np.unique(hashes[hashes != 0])

    def find(self, train_set: str, start: int, texts: Sequence[str]) -> Iterator[Hit]:
        """The hits of consecutive training rows, beginning with row `start`."""
        tokens = [tokens_of(text, *self.shared) for text in texts]
        overlaps = self._overlaps([_words(row) for row in tokens])
        for row, text in enumerate(texts):
            equal = self.by_tokens.get(tuple(tokens[row]), []) if tokens[row] else []
            found = {
                item: share for item, share in overlaps.get(row, {}).items() if share >= MIN_OVERLAP
            }
            whole = tokens_of(text) if found or equal else []
            marks = _marks(whole)
            found = {item: share for item, share in found.items() if not self.marks[item] - marks}
            equal = [item for item in equal if _has_in_order(whole, self.asked[item])]
            found |= dict.fromkeys(equal, 1.0)
            for item, overlap in sorted(found.items()):
                name, problem = self.items[item]
                is_equal, overlap = item in equal, round(overlap, 3)
                yield Hit(
                    train_set, start + row, name, problem.id, is_equal, overlap, text, problem.text
                )

    def _overlaps(self, words: Sequence[Sequence[str]]) -> dict[int, dict[int, float]]:
        """{row: {item: share of the item's words in runs shared with the row}}."""
        hashes, rows = self._run_hashes(words)
        covered: dict[tuple[int, int], set[int]] = {}
        common = np.flatnonzero(np.isin(hashes, self.known))
        runs = zip(rows[common].tolist(), hashes[common].tolist(), strict=True)
        for row, run in dict.fromkeys(runs):  # a text may repeat a run thousands of times
            for item, first in self.places[run]:
                covered.setdefault((row, item), set()).update(range(first, first + RUN_WORDS))
        overlaps: dict[int, dict[int, float]] = {}
        for (row, item), places in covered.items():
            overlaps.setdefault(row, {})[item] = len(places) / self.num_words[item]
        return overlaps

    def _run_hashes(self, words: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
        """A hash per run of words (0 if none of any item, or past the row), and the run's row."""
        known = self.vocabulary.get
        numbers = np.array([known(word, 0) for row in words for word in (*row, "")], dtype=np.int64)
        rows = np.repeat(np.arange(len(words)), [len(row) + 1 for row in words])
        num_runs = max(0, len(numbers) - RUN_WORDS + 1)
        hashes = np.zeros(num_runs, dtype=np.uint64)
        is_whole = np.ones(num_runs, dtype=bool)
        for offset in range(RUN_WORDS):
            part = numbers[offset : offset + num_runs]
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + self.weights[part]
            is_whole &= part != 0
        return np.where(is_whole, hashes, np.uint64(0)), rows[:num_runs]
