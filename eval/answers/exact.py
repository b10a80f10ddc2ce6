"""Whether two answers say the same thing: the exact rule. Runs in the grader's process; costs milliseconds.

Decisions where one can differ (each has rows in tests/answers/pairs.tsv):
- a value may be written in any exact form, never rounded: 0.5 is 1/2, 0.33 is not 1/3, 1.414 is not sqrt(2);
- lists, sets and unions have no order, points, vectors and intervals have one; 1, 2 is not (1, 2);
- a unit, name (`x =`) or degree sign may be missing, but two that are there must agree; 50 % is 50 or 0.5;
- a number's base may be missing in the prediction, as the question asked for that base;
- no answer more and none less than the gold ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from eval.answers.answers import (
    Answer,
    Approximate,
    Interval,
    Listing,
    Matrix,
    Named,
    Point,
    Region,
    Relation,
    Value,
    Words,
)
from eval.answers.expression import Node, parse_expression
from eval.answers.latex import clean
from eval.answers.numeric import is_same_value, ratio_of, sign_of_difference
from eval.answers.regions import as_region, merged
from eval.answers.structure import read_answer, read_ungrouped
from eval.answers.units import is_unit_conflict

MAX_LISTED = 200


def is_equal_exact(prediction: str, gold: str) -> bool:
    """True when the prediction says exactly what the gold answer says."""
    plain = clean(prediction), clean(gold)
    if not plain[0] or not plain[1]:
        return prediction.strip() == gold.strip()
    if compact(plain[0]) == compact(plain[1]):
        return True
    for special in (_same_time, _same_base, _same_choice, _same_ratio):
        verdict = special(*plain)
        if verdict is not None:
            return verdict
    answers = read_answer(prediction), read_answer(gold)
    if same(*answers) or _same_words(*plain, *answers):
        return True
    if "," in plain[0] and "," in plain[1] and any(isinstance(answer, Listing) for answer in answers):
        return same(read_ungrouped(prediction), read_ungrouped(gold))
    return False


def compact(plain: str) -> str:
    """An answer in plain notation without the spaces and quotes that do not matter."""
    return re.sub(r'[\s"]', "", re.sub(r"(?<=\w) (?=\w)", "\x01", plain))


def same(prediction: Answer, gold: Answer) -> bool:
    """True when two answers that were read say the same."""
    if isinstance(prediction, Approximate) or isinstance(gold, Approximate):
        predictions = prediction.values if isinstance(prediction, Approximate) else (prediction,)
        golds = gold.values if isinstance(gold, Approximate) else (gold,)
        return any(same(p, g) for p in predictions for g in golds)
    if isinstance(prediction, Named) or isinstance(gold, Named):
        return _same_named(prediction, gold)
    kinds = {type(prediction), type(gold)}
    if kinds == {Listing, Value} or kinds == {Listing, Words}:
        listing, single = (prediction, gold) if isinstance(prediction, Listing) else (gold, prediction)
        return isinstance(listing, Listing) and len(listing.items) == 1 and same(listing.items[0], single)
    if Region in kinds:
        regions = as_region(prediction), as_region(gold)
        return regions[0] is not None and regions[1] is not None and _same_region(regions[0], regions[1])
    if kinds == {Matrix, Point}:
        return _same_vector(prediction, gold)
    if kinds == {Point, Listing}:
        return _same_sequence(prediction, gold)
    if type(prediction) is not type(gold):
        return False
    return _SAME[type(gold)](prediction, gold)


def _same_value(prediction: Value, gold: Value) -> bool:
    if is_unit_conflict(_unit_of(prediction), _unit_of(gold)):
        return False
    if prediction.is_percent == gold.is_percent:
        return is_same_value(prediction.node, gold.node)
    percent, number = (prediction, gold) if prediction.is_percent else (gold, prediction)
    hundredth: Node = ("div", percent.node, ("num", Fraction(100)))
    return is_same_value(percent.node, number.node) or is_same_value(hundredth, number.node)


def _unit_of(value: Value) -> str:
    if value.is_percent:
        return "percent"
    return "degree" if value.node[0] == "deg" and not value.unit else value.unit


def _same_words_answer(prediction: Words, gold: Words) -> bool:
    words = _bare_words(prediction.text), _bare_words(gold.text)
    return compact(prediction.text) == compact(gold.text) or (
        words[0] == words[1] and _WORDY.fullmatch(words[1]) is not None
    )


def _same_listing(prediction: Listing, gold: Listing) -> bool:
    return _same_items(
        _distinct(prediction.items) if prediction.is_set or gold.is_set else prediction.items,
        _distinct(gold.items) if prediction.is_set or gold.is_set else gold.items,
    )


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items[:MAX_LISTED]:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _same_items(predictions: Sequence[Answer], golds: Sequence[Answer]) -> bool:
    """True when each prediction is one gold answer and none is left over; equality is transitive."""
    if len(predictions) != len(golds) or len(golds) > MAX_LISTED:
        return False
    left = list(golds)
    for prediction in predictions:
        found = next((index for index, item in enumerate(left) if same(prediction, item)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_tuple(prediction: Point, gold: Point) -> bool:
    """Equal in order. `[1, 2]` is an interval, `(1, 2)` another one or a point; longer ones are no intervals."""
    if len(prediction.items) != len(gold.items):
        return False
    brackets = [(answer.opening, answer.closing) for answer in (prediction, gold)]
    may_be_interval = len(gold.items) == 2 and all(bracket[0] in "([" for bracket in brackets)
    if brackets[0] != brackets[1] and (may_be_interval or not all(bracket in _PAIRS for bracket in brackets)):
        return False
    return all(same(p, g) for p, g in zip(prediction.items, gold.items, strict=True))


_PAIRS = (("(", ")"), ("[", "]"), ("⟨", "⟩"), ("=", "="))


def _same_vector(prediction: Answer, gold: Answer) -> bool:
    """A matrix of one row or one column is the vector in brackets with these entries."""
    matrix, vector = (prediction, gold) if isinstance(prediction, Matrix) else (gold, prediction)
    if not isinstance(matrix, Matrix) or not isinstance(vector, Point):
        return False
    if len(matrix.rows) > 1 and len(matrix.rows[0]) > 1:
        nested = [item.items for item in vector.items if isinstance(item, Point)]
        return len(nested) == len(vector.items) and _same_matrix(matrix, Matrix(tuple(nested)))
    entries = [entry for row in matrix.rows for entry in row]
    return len(entries) == len(vector.items) and all(map(same, entries, vector.items))


def _same_sequence(prediction: Answer, gold: Answer) -> bool:
    """A point written without brackets: the same order, and nothing that could be read as an interval."""
    listing, point = (prediction, gold) if isinstance(prediction, Listing) else (gold, prediction)
    if not isinstance(listing, Listing) or not isinstance(point, Point) or listing.is_set:
        return False
    if point.opening != "=" and (listing is gold or _may_be_interval(point)):
        return False
    return len(listing.items) == len(point.items) and all(map(same, listing.items, point.items))


def _may_be_interval(point: Point) -> bool:
    low, *rest = point.items
    if len(rest) != 1 or not isinstance(low, Value) or not isinstance(rest[0], Value):
        return False
    return sign_of_difference(low.node, rest[0].node) in (-1, None)


def _same_matrix(prediction: Matrix, gold: Matrix) -> bool:
    return len(prediction.rows) == len(gold.rows) and all(
        len(ours) == len(theirs) and all(map(same, ours, theirs))
        for ours, theirs in zip(prediction.rows, gold.rows, strict=True)
    )


def _same_region(prediction: Region, gold: Region) -> bool:
    if prediction.variable and gold.variable and prediction.variable != gold.variable:
        return False
    pieces = merged(prediction.pieces), merged(gold.pieces)
    if pieces[0] is None or pieces[1] is None:
        pieces = list(prediction.pieces), list(gold.pieces)
    return len(pieces[0] or ()) == len(pieces[1] or ()) and all(
        _same_interval(ours, theirs) for ours, theirs in zip(pieces[0] or (), pieces[1] or (), strict=True)
    )


def _same_interval(prediction: Interval, gold: Interval) -> bool:
    return (
        prediction.low_closed == gold.low_closed
        and prediction.high_closed == gold.high_closed
        and _same_end(prediction.low, gold.low)
        and _same_end(prediction.high, gold.high)
    )


def _same_end(prediction: Node, gold: Node) -> bool:
    return prediction == gold or is_same_value(prediction, gold)


_MIRRORED = str.maketrans("<>≤≥", "><≥≤")


def _same_relation(prediction: Relation, gold: Relation) -> bool:
    """Chains with the same sides in the same or the mirrored order; single ones also up to a constant factor."""
    if len(prediction.sides) != len(gold.sides):
        return False
    mirrored = Relation(
        tuple(operator.translate(_MIRRORED) for operator in reversed(prediction.operators)),
        tuple(reversed(prediction.sides)),
    )
    for ours in (prediction, mirrored):
        if ours.operators == gold.operators and all(map(is_same_value, ours.sides, gold.sides)):
            return True
        if len(gold.operators) == 1 and ours.operators == gold.operators and gold.operators[0] != "≡":
            ratio = ratio_of(_difference(ours), _difference(gold))
            if ratio is not None and (ratio > 0 or gold.operators[0] in "=≠"):
                return True
    return False


def _difference(relation: Relation) -> Node:
    return ("sub", relation.sides[0], relation.sides[1])


def _same_named(prediction: Answer, gold: Answer) -> bool:
    """Values with names: two names must be one, or the two be the same equation; one may be missing."""
    if isinstance(prediction, Named) and isinstance(gold, Named):
        if _same_name(prediction.name, gold.name):
            return same(prediction.value, gold.value)
        return _same_equation(prediction, gold)
    if isinstance(prediction, Relation) or isinstance(gold, Relation):
        return _same_equation(prediction, gold)
    return same(_value_of(prediction), _value_of(gold))


def _value_of(answer: Answer) -> Answer:
    return answer.value if isinstance(answer, Named) else answer


def _same_name(left: str, right: str) -> bool:
    """A word stands for any name, y for a function; letters must agree, but for an index or argument."""
    if left == right or not left or not right or '"' in left + right:
        return True
    functions = [re.fullmatch(r"[a-zA-Z]'*\([^()]*\)", name) is not None for name in (left, right)]
    if any(functions) and not all(functions) and {"y", "z"} & {left, right}:
        return True
    short = [re.match(r"\\?[a-zA-Z]+", name) for name in (left, right)]
    is_indexed = any(re.fullmatch(r"\\?[a-zA-Z]+(_.*|'*\(.*\))", name) for name in (left, right))
    return is_indexed and short[0] is not None and short[1] is not None and short[0].group() == short[1].group()


def _same_equation(prediction: Answer, gold: Answer) -> bool:
    relations = _as_relation(prediction), _as_relation(gold)
    return relations[0] is not None and relations[1] is not None and _same_relation(relations[0], relations[1])


def _as_relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Named) and isinstance(answer.value, Value):
        name = parse_expression(answer.name)
        return None if name is None else Relation(("=",), (name, answer.value.node))
    return answer if isinstance(answer, Relation) else None


_SAME: dict[type, Callable[..., bool]] = {
    Value: _same_value,
    Words: _same_words_answer,
    Listing: _same_listing,
    Point: _same_tuple,
    Matrix: _same_matrix,
    Relation: _same_relation,
}


_WORDY = re.compile(r"[^\W\d_][\w\s.,'-]*")


def _same_words(prediction: str, gold: str, *answers: Answer) -> bool:
    """A word is the same with and without \\text; letters in a row are no word unless one side says so."""
    is_quoted = '"' in prediction + gold
    if not is_quoted and not any(isinstance(answer, Words) for answer in answers):
        return False
    words = _bare_words(prediction), _bare_words(gold)
    if len(words[1]) == 1 and compact(prediction) != compact(gold):
        return False  # a letter's case counts
    return (is_quoted or len(words[1]) > 3) and words[0] == words[1] and _WORDY.fullmatch(words[1]) is not None


def _bare_words(plain: str) -> str:
    """Words in lower case without quotes, the brackets around all, articles and the endings of ordinals."""
    text = re.sub(r"\b(the|an?|is|it|due)\s+(?=\w\w)", " ", plain.replace('"', " ").lower())
    text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text).strip(" .,;:!()")
    return re.sub(r"\s+", " ", text)


_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?::00)?([ap])\.?m\.?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


def _same_time(prediction: str, gold: str) -> bool | None:
    """Verdict on times of day when one has a.m. or p.m.; noon is 12 p.m. A missing one is not filled in."""
    texts = [re.sub(r'[\s"]', "", plain.lower()) for plain in (prediction, gold)]
    minutes = []
    for text in texts:
        half, clock = _TIME.fullmatch(text), _CLOCK.fullmatch(text)
        if half:
            hour = int(half.group(1)) % 12 + (12 if half.group(3) == "p" else 0)
            minutes.append(60 * hour + int(half.group(2) or 0))
        elif clock:
            minutes.append(60 * int(clock.group(1)) + int(clock.group(2)))
    if len(minutes) < 2 or not any(_TIME.fullmatch(text) for text in texts):
        return None
    return minutes[0] == minutes[1]


_BASED = re.compile(r'(-?[0-9A-Z.]+)(?:_\{?\(?"?(?:base)?"?(\w+)"?\)?\}?|"?\(?base"?(\d+)\)?"?)')
_BASE_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def _same_base(prediction: str, gold: str) -> bool | None:
    """Verdict when the gold answer names its base: the same digits, and the same base unless it is left out."""
    texts = [re.sub(r"\s|\\", "", plain) for plain in (prediction, gold)]
    texts = [re.sub(r'^[a-zA-Z]=|(?<=\d)"(?=base)', "", text) for text in texts]
    texts = [re.sub(r"^\(([0-9A-Z.]+)\)(?=_)", r"\1", text) for text in texts]
    ours, theirs = _BASED.fullmatch(texts[0]), _BASED.fullmatch(texts[1])
    if theirs is None or not re.search(r"\d", theirs.group(1)):
        return None
    if ours is None:
        return texts[0].strip('"') == theirs.group(1)
    bases = [match.group(2) or match.group(3) for match in (ours, theirs)]
    bases = [str(_BASE_WORDS.index(base.lower())) if base.lower() in _BASE_WORDS else base for base in bases]
    return ours.group(1) == theirs.group(1) and bases[0] == bases[1]


_CHOICE = re.compile(r'\(?\s*"?\s*\(?\s*([A-Za-z])\s*\)?\s*"?\s*\)?')
_CHOSEN = re.compile(
    r'(?is)\W*(?:(?:option|choice|answer|选项|选)\s*:?\s*)?\(?\s*"?\s*\(?([A-Z])\s*(?:\)|"|[.:](?=\W)|\s*-\s|$)\s*"?\s*\)?(.*)'
)
_FURTHER_LETTER = re.compile(r"\W*(?:(?:and|or)\W*)?[A-Z]\b")


def _same_choice(prediction: str, gold: str) -> bool | None:
    """Verdict when the gold answer is a choice, `(C)` or `\\text{C}`: the letter counts, not its text."""
    theirs = _CHOICE.fullmatch(gold)
    if theirs is None or not re.search(r'["(]|^[A-J]$', gold):
        return None
    ours = _CHOSEN.fullmatch(prediction)
    is_named = ours is not None and (ours.group(2) == "" or re.match(r'\W*("|\(|[A-Z])', prediction) is not None)
    if ours is None or not is_named or _FURTHER_LETTER.match(ours.group(2)):
        return None
    return ours.group(1).upper() == theirs.group(1).upper()


def _same_ratio(prediction: str, gold: str) -> bool | None:
    """Verdict on ratios: 3:2 is 6:4, and the fraction 3/2."""
    bare = [re.sub(r"^[^=]*=", "", plain) for plain in (prediction, gold)]
    sides = [re.sub(r'(?<=\d)\s*"?\s*\bto\b\s*"?\s*(?=\d)', ":", plain).split(":") for plain in bare]
    if max(map(len, sides)) == 1:
        return None
    values = [[read_answer(part) for part in parts] for parts in sides]
    nodes = [[value.node for value in part if isinstance(value, Value)] for part in values]
    if any(len(node) != len(part) for node, part in zip(nodes, sides, strict=True)):
        return None
    ours, theirs = ([*node, ("num", Fraction(1))] if len(node) == 1 else node for node in nodes)
    return len(ours) == len(theirs) and all(
        is_same_value(("mul", ours[0], b), ("mul", theirs[0], a))
        for a, b in zip(ours[1:], theirs[1:], strict=True)
    )


def is_list(gold: str) -> bool:
    """True when the gold answer is a list of several."""
    answer = read_answer(gold)
    return isinstance(answer, Listing) and len(answer.items) > 1
