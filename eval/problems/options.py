"""Options of multiple-choice problems: how rows store them, and how answers name them."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from eval.answers.choice import are_options, option_letters
from eval.problems import ProblemsError
from eval.problems.values import Unusable, parsed, text_in

AnswerAs = Literal["letter", "index", "number", "text"]  # index counts from 0, number from 1

LETTERS = "ABCDEFGHIJ"  # those that the choice grader reads
MEANINGS: dict[AnswerAs, str] = {
    "letter": "an option's letter",
    "index": "an option's index from 0",
    "number": "an option's number from 1",
    "text": "an option's text",
}
NUM_DECIDING = 100_000  # rows
MIN_FITTING = 0.9  # of the answers; the rows of the others are unusable
_TEXT_KEYS, _LABEL_KEYS = ("text", "value", "option", "content"), ("label", "key", "id", "letter")
_LABELS = [  # `A)`, `(A)`, `A.`, ...; `a)`, ...
    [re.compile(rf"(?:^|(?<=[\s,;]))[(\[]?{letter}\s?[)\].:．、]\s*") for letter in letters]
    for letters in (LETTERS, LETTERS.lower())
]
_WHOLE = re.compile(r"\s*(\d{1,3})(?:\.0+)?\s*")
_LISTED = re.compile(r"^\s*\(?([A-J])[.):．、：]\s*\S", re.MULTILINE)
_MARKS = " \t.:()[]"


class Options(NamedTuple):
    """The texts of a problem's options, and how its row labels them."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    has_numbers: bool = False  # in the file, instead of texts


def options_in(values: Mapping[str, Any]) -> Options:
    """Return the options in one column, or in a column for each, by label. Raises Unusable."""
    found: Any = parsed(next(iter(values.values())) if len(values) == 1 else values)
    if isinstance(found, Mapping) and isinstance(found.get("text"), list):  # ARC
        pairs = list(zip(found.get("label") or LETTERS, found["text"], strict=False))
    elif isinstance(found, Mapping):
        pairs = list(found.items())
    elif isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        pairs = [(_first(one, _LABEL_KEYS), _first(one, _TEXT_KEYS)) for one in found]
    elif isinstance(found, list | str):
        pairs = _labelled(found)
    else:
        pairs = []
    named = [(label, text_in(text, "option")) for label, text in pairs]
    kept = [(label, text.strip()) for label, text in named if text is not None]
    if not 2 <= len(kept) <= len(LETTERS):
        raise Unusable(
            f"{len(kept)} readable options instead of 2 to {len(LETTERS)} in "
            f"{', '.join(map(str, values))} (data.columns.options=[] if it has none)"
        )
    labels, texts = zip(*kept, strict=True)
    has_numbers = not any(isinstance(text, str) for _, text in pairs)
    if None in labels:
        return Options(tuple(LETTERS[: len(texts)]), texts, has_numbers)
    return Options(tuple(str(label).strip(_MARKS).upper() for label in labels), texts, has_numbers)


def is_several(value: Any) -> bool:
    """True if a value may hold options."""
    value = parsed(value)
    if isinstance(value, list | Mapping):
        return len(value) > 1
    return isinstance(value, str) and bool(_split_by_labels(value) or _split(value))


def _split(text: str) -> list[str]:
    """Split a text at its lines, else at other marks between options."""
    parts = (list(filter(str.strip, text.split(mark))) for mark in "\n|;；")
    return next((found for found in parts if len(found) > 1), [])


def _first(found: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((found[key] for key in keys if found.get(key) is not None), None)


def _labelled(found: list[Any] | str) -> list[tuple[str | None, Any]]:
    """Return pairs of label and text; a text alone must have labels or lines."""
    if isinstance(found, str):
        return _split_by_labels(found) or [(None, one) for one in _split(found)]
    for labels in _LABELS if len(found) <= len(LETTERS) else ():
        matches = [label.match(str(one).strip()) for label, one in zip(labels, found, strict=False)]
        if all(matches):
            texts = [match.string[match.end() :] for match in matches if match]
            return list(zip(LETTERS, texts, strict=False))
    return [(None, one) for one in found]


def _split_by_labels(text: str) -> list[tuple[str | None, Any]]:
    """Split `A) 38, B) 27` at its labels, which must be in order."""
    for labels in _LABELS:
        starts: list[re.Match[str]] = []
        for label in labels:
            match = label.search(text, starts[-1].end() if starts else 0)
            if match is None:
                break
            starts.append(match)
        if len(starts) > 1 and not text[: starts[0].start()].strip():
            ends = [*(match.start() for match in starts[1:]), len(text)]
            found = [text[match.end() : end] for match, end in zip(starts, ends, strict=True)]
            return list(zip(LETTERS, (one.strip().rstrip(",;") for one in found), strict=False))
    return []


def with_options(question: str, options: Options) -> str:
    """Return the question with its lettered options, unless it lists them itself."""
    letters = LETTERS[: len(options.texts)]
    if "".join(listed_in(question)) == letters:
        return question
    lines = (f"{letter}. {text}" for letter, text in zip(letters, options.texts, strict=True))
    return "\n".join([question, "", *lines])


def listed_in(question: str) -> tuple[str, ...]:
    """Return the letters of the options that a question lists in lines, if A, B, ... in order."""
    found = list(dict.fromkeys(_LISTED.findall(question)))
    return tuple(found) if "".join(found) == LETTERS[: len(found)] else ()


def lists_options(text: str) -> bool:
    """True if a text has the labels A and B anywhere."""
    labels = (rf"(?<![A-Za-z]){letter}\s?[.):．、：）\]]" for letter in "AB")
    return all(re.search(label, text, re.IGNORECASE) for label in labels)


def names_option(gold: str, question: str) -> bool:
    """True if a gold answer is a letter of options; a small one, of those in the question."""
    is_small = gold.islower() and lists_options(question)
    return are_options([gold.upper() if is_small else gold])


def readings(options: Options, answer: Any) -> dict[AnswerAs, str]:
    """Return the letters that an answer names, under each meaning that fits."""
    if not isinstance(answer, str) or not _places("text", options, answer):
        answer = parsed(answer)
    answers = answer if isinstance(answer, list) else [answer]
    try:
        texts = [text_in(one) or "" for one in answers]
    except Unusable:
        return {}
    if len(texts) == len(options.texts) and set(texts) <= {"0", "1"}:  # a flag for each option
        texts = [str(place) for place, flag in enumerate(texts) if flag == "1"]
    found: dict[AnswerAs, str] = {}
    for meaning in MEANINGS:
        named = [_places(meaning, options, text) for text in texts]
        places = list(itertools.chain.from_iterable(named))
        if all(named) and places and len(set(places)) == len(places):
            found[meaning] = "".join(LETTERS[place] for place in sorted(places))
    return found


def _places(meaning: AnswerAs, options: Options, text: str) -> list[int]:
    """Return the places of the options that a text names, or none."""
    num_options = len(options.texts)
    if meaning == "text":
        same = [place for place, one in enumerate(options.texts) if one.split() == text.split()]
        return same[:1]
    if meaning == "letter":
        if (label := text.strip(_MARKS).upper()) in options.labels:
            return [options.labels.index(label)]
        letters = option_letters(text)
        known = all(letter in options.labels for letter in letters)
        return [options.labels.index(letter) for letter in letters] if known else []
    whole = _WHOLE.fullmatch(text)
    place = int(whole[1]) - (meaning == "number") if whole else -1
    return [place] if 0 <= place < num_options else []


def decide(path: object, answered: Iterable[tuple[Options, Any]]) -> AnswerAs:
    """Return what the answers of a set mean: what fits most of them, and nothing else as well.

    Raises ProblemsError if nothing fits, or if a text is also a letter or a number that means
    another option.
    """
    fits, unlike, num_answers = Counter[AnswerAs](), dict[AnswerAs, str](), 0
    examples: dict[frozenset[AnswerAs], str] = {}
    are_integers = True  # a JSON integer is no text
    for options, answer in itertools.islice(answered, NUM_DECIDING):
        num_answers += 1
        are_integers &= type(answer) is int and not options.has_numbers
        found = readings(options, answer)
        fits.update(found.keys())
        shown = f"{answer!r} of the {len(options.texts)} options {list(options.texts)}"
        examples.setdefault(frozenset(found), shown)
        for meaning, letters in found.items():
            if "text" in found and letters != found["text"]:
                unlike.setdefault(meaning, shown)
    if not num_answers:
        return "letter"  # every row is unusable, for another reason
    most = max(fits.values(), default=0)
    fitting = [meaning for meaning in MEANINGS if fits[meaning] == most]
    if most < MIN_FITTING * num_answers:
        counts = ", ".join(f"{fits[meaning]} name {MEANINGS[meaning]}" for meaning in MEANINGS)
        others = (shown for found, shown in examples.items() if fitting[0] not in found)
        raise ProblemsError(
            f"{path}: of {num_answers} answers to problems with options, {counts} (not "
            f"{next(others, 'one')}): correct them, or set data.columns.answer or "
            "data.columns.options ([] if there are none)"
        )
    if fitting[0] in unlike and "text" in fitting and not are_integers:
        raise ProblemsError(
            f"{path}: all answers can be read as {MEANINGS[fitting[0]]} and as {MEANINGS['text']}, "
            f"which differ ({unlike[fitting[0]]}): set data.columns.answer_as to {fitting[0]} or "
            "to text"
        )
    return fitting[0]
