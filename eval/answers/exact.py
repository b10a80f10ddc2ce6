"""The exact rule: decides in milliseconds whether two answers mean the same.

Design choices (each has rows in tests/answers/pairs.tsv):
- a value may be written in any exact form, but not rounded: 0.5 is 1/2, 0.33 is not 1/3;
- lists, sets and unions are unordered; points, vectors and intervals are ordered;
- a unit, name or degree sign may be missing, but two must agree; 50 % is 50 or 0.5;
- named values are compared by name, equations as relations; 2x = 6 is not its solution x = 3;
- the prediction may omit a number's base, since the question states it;
- an ISO date is not arithmetic and equals only the same day: 2024-01-02 is 2024/01/02, not 2021;
- a list must have exactly as many answers as the gold one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    as_region,
    merged,
)
from eval.answers.expression import Node, parse_expression
from eval.answers.latex import clean
from eval.answers.numeric import is_same_value, ratio_of, sign_of_difference, substituted, variables
from eval.answers.structure import (
    read,
    read_answer,
    read_as_list,
    read_date,
)
from eval.answers.units import NUMBER_WORDS, digits, is_unit_conflict, quantities

MAX_LISTED = 200


def is_equal_exact(prediction: str, gold: str) -> bool:
    """True if the prediction means exactly the same as the gold answer."""
    plain = clean(prediction), clean(gold)
    if not plain[0] or not plain[1]:
        return prediction.strip() == gold.strip()
    if compact(plain[0]) == compact(plain[1]):
        return True
    for special in _SPECIAL:
        is_same = special(*plain)
        if is_same is not None:
            return is_same
    answers = read_answer(prediction), read_answer(gold)
    if same(*answers) or _same_words(*plain, *answers):
        return True
    return any(same(*others) for others in _other_readings(plain, answers))


def _other_readings(
    plain: tuple[str, str], answers: tuple[Answer, Answer]
) -> Iterator[tuple[Answer, Answer]]:
    """Yield lists joined by "or", `five apples` as 5, `(A) 5` as 5, and `120,240` as a list."""
    if any('"or"' in text for text in plain):
        lists = read_as_list(plain[0]), read_as_list(plain[1])
        if all(isinstance(one, Listing) for one in lists):
            yield lists
    first, second = (digits(text.replace('"', "").lstrip()) for text in plain)
    if first is not None and second is None:
        yield read(first), answers[1]
    if second is not None and first is None:
        yield answers[0], read(second)
    if labelled := _LABELLED.fullmatch(plain[0].replace('"', " ").strip()):
        yield read_answer(labelled.group(1)), answers[1]
    has_list = any(isinstance(answer, Listing) for answer in answers)
    if has_list and all("," in text for text in plain):
        yield read(plain[0]), read(plain[1])


def compact(plain: str) -> str:
    """Strip insignificant spaces and quotes from an answer in plain notation."""
    plain = re.sub(r"(?<=[_^])\{(\w)\}", r"\1 ", plain)
    return re.sub(r'[\s"]', "", re.sub(r"(?<=\w) (?=\w)", "\x01", plain))


def same(prediction: Answer, gold: Answer) -> bool:
    """True if two parsed answers mean the same."""
    match prediction, gold:
        case Approximate(values), _:
            return any(same(value, gold) for value in values)
        case _, Approximate(values):
            return any(same(prediction, value) for value in values)
        case (Named(), _) | (_, Named()):
            return _same_named(prediction, gold)
        case (Listing((item,)), Value() | Words() as single) | (
            Value() | Words() as single,
            Listing((item,)),
        ):
            return same(item, single)
        case (Region(), _) | (_, Region()):
            left, right = as_region(prediction), as_region(gold)
            return left is not None and right is not None and _same_region(left, right)
        case (Matrix() as matrix, Point() as vector) | (Point() as vector, Matrix() as matrix):
            return _same_vector(matrix, vector)
        case (Value(node, ""), Point(items=items)) | (Point(items=items), Value(node, "")):
            return _is_combination(node, items)
        case Listing(items, False), Point("=", _, others):
            return _all_same(items, others)
        case Listing(items, False), Point() as point:  # a point without brackets
            return not _may_be_interval(point) and _all_same(items, point.items)
        case Point("=", _, items), Listing(others, False):
            return _all_same(others, items)
    if type(prediction) is not type(gold):
        return False
    return _SAME[type(gold)](prediction, gold)


def _all_same(predictions: Sequence[Answer], golds: Sequence[Answer]) -> bool:
    return len(predictions) == len(golds) and all(map(same, predictions, golds))


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
    texts = prediction.text, gold.text
    return compact(texts[0]) == compact(texts[1]) or _same_wording(*texts)


def _same_listing(prediction: Listing, gold: Listing) -> bool:
    if prediction.is_set or gold.is_set:
        return _same_items(_distinct(prediction.items), _distinct(gold.items))
    return _same_items(prediction.items, gold.items)


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    kept: list[Answer] = []
    for item in items[:MAX_LISTED]:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return kept


def _same_items(predictions: Sequence[Answer], golds: Sequence[Answer]) -> bool:
    """True if predictions and gold answers pair up one to one (equality is transitive)."""
    if len(predictions) != len(golds) or len(golds) > MAX_LISTED:
        return False
    left = list(golds)
    for prediction in predictions:
        found = next((index for index, item in enumerate(left) if same(prediction, item)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_point(prediction: Point, gold: Point) -> bool:
    """Compare in order. Two items may be an interval, whose brackets count."""
    brackets = [(answer.opening, answer.closing) for answer in (prediction, gold)]
    may_be_interval = len(gold.items) == 2 and any("[" in bracket for bracket in brackets)
    if brackets[0] != brackets[1] and (
        may_be_interval or not all(bracket in _PAIRS for bracket in brackets)
    ):
        return False
    items, names = prediction.items, prediction.names
    if sorted(names) == sorted(gold.names):  # y = 2, x = 1
        items = tuple(items[names.index(name)] for name in gold.names) or items
    elif names and gold.names and not all(map(_same_name, names, gold.names)):
        return False
    return _all_same(items, gold.items)


_PAIRS = (("(", ")"), ("[", "]"), ("⟨", "⟩"), ("=", "="))


def _same_vector(matrix: Matrix, vector: Point) -> bool:
    """A matrix with one row or one column equals the vector with the same entries."""
    if len(matrix.rows) > 1 and len(matrix.rows[0]) > 1:
        nested = tuple(item.items for item in vector.items if isinstance(item, Point))
        return len(nested) == len(vector.items) and _same_matrix(matrix, Matrix(nested))
    return _all_same([entry for row in matrix.rows for entry in row], vector.items)


def _is_combination(node: Node, items: Sequence[Answer]) -> bool:
    """True if 2i + 3j, of unit vectors, has these components."""
    units: list[Node] = [("const", "i"), ("var", "j"), ("var", "k")]
    if not {"j", "k"} & variables(node) or len(items) > len(units):
        return False
    total: Node = ("num", Fraction(0))
    for item, unit in zip(items, units, strict=False):
        if not isinstance(item, Value):
            return False
        total = ("add", total, ("mul", item.node, unit))
    return is_same_value(node, total)


def _may_be_interval(point: Point) -> bool:
    match point.items:
        case Value(low), Value(high):
            return sign_of_difference(low, high) in (-1, None)
    return False


def _same_matrix(prediction: Matrix, gold: Matrix) -> bool:
    rows = prediction.rows, gold.rows
    return len(rows[0]) == len(rows[1]) and all(map(_all_same, *rows))


def _same_region(prediction: Region, gold: Region) -> bool:
    if prediction.variable and gold.variable and prediction.variable != gold.variable:
        return False
    predicted, expected = merged(prediction.pieces), merged(gold.pieces)
    if predicted is None or expected is None:
        predicted, expected = list(prediction.pieces), list(gold.pieces)
    return len(predicted) == len(expected) and all(map(_same_interval, predicted, expected))


def _same_interval(prediction: Interval, gold: Interval) -> bool:
    return (
        (prediction.low_closed, prediction.high_closed) == (gold.low_closed, gold.high_closed)
        and is_same_value(prediction.low, gold.low)
        and is_same_value(prediction.high, gold.high)
    )


_MIRRORED = str.maketrans("<>≤≥", "><≥≤")


def _same_relation(prediction: Relation, gold: Relation) -> bool:
    """Compare sides, possibly mirrored; a single relation may differ by a constant factor."""
    if len(prediction.sides) != len(gold.sides):
        return False
    mirrored = Relation(
        tuple(operator.translate(_MIRRORED) for operator in reversed(prediction.operators)),
        tuple(reversed(prediction.sides)),
    )
    for predicted in (prediction, mirrored):
        if predicted.operators != gold.operators:
            continue
        if all(map(is_same_value, predicted.sides, gold.sides)):
            return True
        if len(gold.operators) == 1 and gold.operators[0] != "≡":
            ratio = ratio_of(_difference(predicted), _difference(gold))
            if ratio is not None and (ratio > 0 or gold.operators[0] in "=≠"):
                return True
    return False


def _is_unsolved(sides: Sequence[Node]) -> bool:
    """True for an equation in one variable such as 2x = 6; x - 3 = 0 may be a line."""
    names = frozenset().union(*map(variables, sides))
    return len(names) == 1 and ("num", Fraction(0)) not in sides


def _difference(relation: Relation) -> Node:
    return ("sub", relation.sides[0], relation.sides[1])


def _same_named(prediction: Answer, gold: Answer) -> bool:
    """Compare values if the names match or one is missing; else compare as equations."""
    if isinstance(prediction, Named) and isinstance(gold, Named):
        prediction = _renamed(prediction, gold)
    match prediction, gold:
        case Named(predicted, value), Named(expected, other) if _same_name(predicted, expected):
            return same(value, other)
        case (Relation(_, sides), Named()) | (Named(), Relation(_, sides)) if _is_unsolved(sides):
            return False
        case (Named(), Named()) | (Relation(), _) | (_, Relation()):
            left, right = _as_relation(prediction), _as_relation(gold)
            return left is not None and right is not None and _same_relation(left, right)
        case (Named(_, value), other):
            return same(value, other)
        case other, Named(_, value):
            return same(other, value)
    return False


_DEFINED = re.compile(r"(\\?[A-Za-z]+'*)(?:\(([a-z])\)|_([i-n]))")


def _renamed(prediction: Named, gold: Named) -> Named:
    """Return f(n) = n + 1 as f(x) = x + 1 if that is the letter of the gold answer."""
    names = _DEFINED.fullmatch(prediction.name), _DEFINED.fullmatch(gold.name)
    if not names[0] or not names[1] or names[0].group(1) != names[1].group(1):
        return prediction
    old, new = (name.group(2) or name.group(3) for name in names if name)
    if not isinstance(prediction.value, Value) or new in variables(prediction.value.node):
        return prediction
    node = substituted(prediction.value.node, ("var", old), ("var", new))
    return Named(gold.name, replace(prediction.value, node=node))


def _same_name(left: str, right: str) -> bool:
    """A word matches any name, y any function, and a letter itself with an index or argument."""
    if left == right or not left or not right or '"' in left + right:
        return True
    functions = [re.fullmatch(r"[a-zA-Z]'*\([^()]*\)", name) is not None for name in (left, right)]
    if any(functions) and not all(functions) and {"y", "z"} & {left, right}:
        return True
    letters = [re.findall(r"^\\?[a-zA-Z]+", name) for name in (left, right)]
    is_indexed = any(re.fullmatch(r"\\?[a-zA-Z]+(_.*|'*\(.*\))", name) for name in (left, right))
    marks = [re.findall(r"'|\^", name) for name in (left, right)]
    have_indices = "_" in left and "_" in right
    return is_indexed and not have_indices and letters[0] == letters[1] and marks[0] == marks[1]


def _as_relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Named) and isinstance(answer.value, Value):
        name = parse_expression(answer.name)
        return None if name is None else Relation(("=",), (name, answer.value.node))
    return answer if isinstance(answer, Relation) else None


_SAME: dict[type, Callable[..., bool]] = {
    Value: _same_value,
    Words: _same_words_answer,
    Listing: _same_listing,
    Point: _same_point,
    Matrix: _same_matrix,
    Relation: _same_relation,
}
_WORD = re.compile(r"[A-Z]?[a-z]{2,}")
_ARTICLE = re.compile(r"^(?:the|an?) (?=[A-Za-z]{3})")
# What a question is answered with whose gold answer is true or false.
_TRUTHS = [set("yes true correct 是 对 正确".split()), set("no false incorrect 否 错 错误".split())]
_WORDY = re.compile(r"[^\W\d_][\w\s.,'-]*")


def _same_words(prediction: str, gold: str, *answers: Answer) -> bool:
    """Words match with or without \\text; a run of letters is a word only if one side quotes it."""
    prediction, gold = (_ARTICLE.sub("", plain) for plain in (prediction, gold))
    if prediction == gold:
        return True
    if any({_bare_words(prediction), _bare_words(gold)} <= words for words in _TRUTHS):
        return True
    is_quoted = '"' in prediction + gold
    if prediction.lower() == gold.lower() and (
        _WORD.fullmatch(prediction) and _WORD.fullmatch(gold)
    ):
        return True
    if not is_quoted and not any(isinstance(answer, Words) for answer in answers):
        return False
    length = len(_bare_words(gold))
    if length == 1 and compact(prediction) != compact(gold):
        return False  # single letters are case-sensitive
    return (is_quoted or length > 3) and _same_wording(prediction, gold)


def _same_wording(prediction: str, gold: str) -> bool:
    words = _bare_words(gold)
    return _bare_words(prediction) == words and _WORDY.fullmatch(words) is not None


def _bare_words(plain: str) -> str:
    """Lower-case words without quotes, outer brackets, articles and ordinal endings."""
    text = re.sub(r"\b(the|an?|is|it|due)\s+(?=\w\w)", " ", plain.replace('"', " ").lower())
    text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text).strip(" .,;:!()")
    text = "does not exist" if text == "dne" else text
    return re.sub(r"\s+", " ", text)


_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?(?::00)?([ap])\.?m\.?")
_CLOCK = re.compile(r"(\d{1,3}):([0-5]\d)(?::([0-5]\d))?")
_HALF_DAY = 12 * 3600


def _same_time(prediction: str, gold: str) -> bool | None:
    """Compare times of day; None unless both are one. `3:00` and `5:00` are not ratios.

    If the gold answer has no a.m. or p.m., either matches. If only the gold answer has one, 16:30
    is 4:30 p.m., but 4:30 is not.
    """
    times = [
        _read_time(re.sub(r'[\s"]', "", plain.lower().rpartition("=")[2]))
        for plain in (prediction, gold)
    ]
    if times[0] is None or times[1] is None:
        return None
    (seconds, has_half), (expected, gold_has_half) = times[0], times[1]
    if has_half and not gold_has_half and 3600 <= expected < 13 * 3600:
        return (seconds - expected) % _HALF_DAY == 0
    return seconds == expected


def _read_time(text: str) -> tuple[int, bool] | None:
    """Parse `4:30p.m.` or `16:30` into (seconds since midnight, has a.m. or p.m.), else None."""
    half, clock = _TIME.fullmatch(text), _CLOCK.fullmatch(text)
    if half:
        hour = int(half.group(1)) % 12 + (12 if half.group(3) == "p" else 0)
        return 3600 * hour + 60 * int(half.group(2) or 0), True
    if clock:
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 3600 * hours + 60 * minutes + seconds, False
    return None


def _same_quantities(prediction: str, gold: str) -> bool | None:
    """Compare `2 hours 30 minutes` part by part; None unless both have parts in known units."""
    parts = quantities(prediction), quantities(gold)
    units = {unit for side in parts for _, unit in side}
    return None if not all(parts) or None in units else parts[0] == parts[1]


def _same_date(prediction: str, gold: str) -> bool | None:
    """Compare dates; None unless both are one. `2024-01-02` is not a difference."""
    days = [read_date(re.sub(r'[\s"]', "", plain)) for plain in (prediction, gold)]
    return None if None in days else days[0] == days[1]


_BASED = re.compile(r'(-?[0-9A-Z.]+)(?:_\{?\(?"?(?:base)?"?(\w+)"?\)?\}?|"?\(?base"?(\d+)\)?"?)')


def _same_base(prediction: str, gold: str) -> bool | None:
    """Compare digits and bases, if the prediction has one; None if the gold answer has no base."""
    texts = [re.sub(r"\s|\\", "", plain) for plain in (prediction, gold)]
    texts = [re.sub(r'^[a-zA-Z]=|(?<=\d)"(?=base)', "", text) for text in texts]
    texts = [re.sub(r"^\(([0-9A-Z.]+)\)(?=_)", r"\1", text) for text in texts]
    predicted, expected = _BASED.fullmatch(texts[0]), _BASED.fullmatch(texts[1])
    if expected is None or not re.search(r"\d", expected.group(1)):
        return None
    if predicted is None:
        return texts[0].strip('"') == expected.group(1)
    bases = [(match.group(2) or match.group(3)).lower() for match in (predicted, expected)]
    bases = [str(NUMBER_WORDS.get(base, base)) for base in bases]
    return predicted.group(1) == expected.group(1) and bases[0] == bases[1]


_CHOICE = re.compile(r'\(?\s*"?\s*\(?\s*([A-Za-z])\s*\)?\s*"?\s*\)?')
_CHOSEN = re.compile(
    r'(?is)\W*(?:(?:option|choice|answer|选项|选)\s*:?\s*)?\(?\s*"?\s*\(?([A-Z])\s*'
    r'(?:\)|"|[.:](?=\W)|\s*-\s|$)\s*"?\s*\)?(.*)'
)
_LABELLED = re.compile(r"(?:\(\s*[A-J]\s*\)|[A-J]\s*[.:)](?=\s))\s*(.+)")  # `(A) 5` answers 5, too
_FURTHER = re.compile(r'\W*(?:(?:and|or)|[A-Z])\b|[\s"]*[,;&/]\W*(?:[IVX]+\b|(?:[a-j]|[ivx]+)\))')


def _same_choice(prediction: str, gold: str) -> bool | None:
    """Compare option letters; None unless the gold answer is an option, `(C)` or `\\text{C}`."""
    expected = _CHOICE.fullmatch(gold)
    if expected is None or not re.search(r'["(]|^[A-J]$', gold):
        return None
    predicted = _CHOSEN.fullmatch(prediction)
    if predicted is None or _FURTHER.match(predicted.group(2)):
        return None
    if predicted.group(2) and not re.match(r'\W*("|\(|[A-Z])', prediction):
        return None
    return predicted.group(1).upper() == expected.group(1).upper()


def _same_ratio(prediction: str, gold: str) -> bool | None:
    """Compare ratios; None if neither is one. 3:2 equals 6:4 and the fraction 3/2."""
    bare = [re.sub(r"^[^=]*=", "", plain) for plain in (prediction, gold)]
    sides = [
        re.sub(r'(?<=\d)\s*"?\s*\bto\b\s*"?\s*(?=\d)', ":", plain).split(":") for plain in bare
    ]
    if max(map(len, sides)) == 1:
        return None
    values = [[read_answer(part) for part in parts] for parts in sides]
    nodes = [[value.node for value in part if isinstance(value, Value)] for part in values]
    if any(len(node) != len(part) for node, part in zip(nodes, sides, strict=True)):
        return None
    predicted, expected = (
        [*node, ("num", Fraction(1))] if len(node) == 1 else node for node in nodes
    )
    return len(predicted) == len(expected) and all(
        is_same_value(("mul", predicted[0], b), ("mul", expected[0], a))
        for a, b in zip(predicted[1:], expected[1:], strict=True)
    )


_SPECIAL = (_same_time, _same_quantities, _same_date, _same_base, _same_choice, _same_ratio)


def is_list(gold: str) -> bool:
    """True if the gold answer is a list of several answers."""
    answer = read_answer(gold)
    return isinstance(answer, Listing) and len(answer.items) > 1
