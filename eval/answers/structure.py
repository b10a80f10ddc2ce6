"""Parses plain notation (eval.answers.latex) into answers (eval.answers.answers)."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from eval.answers.answers import (
    REALS,
    Answer,
    Approximate,
    Listing,
    Matrix,
    Named,
    Point,
    Region,
    Relation,
    Value,
    Words,
    as_region,
    combined,
    merged,
    region_of_inequality,
)
from eval.answers.expression import Node, parse_expression
from eval.answers.latex import clean, without_outer_braces
from eval.answers.numeric import variables
from eval.answers.units import NUMBER_WORDS, split_unit

MAX_NESTING = 12


_OPEN, _CLOSE = "([{⦃⟨⟦⌊⌈", ")]}⦄⟩⟧⌋⌉"
_RELATION = "=<≤>≥≠∈≡"
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_NAME = re.compile(
    r"""(?:[A-Za-z]|\\[a-zA-Z]+)\s*(?:_\s*(?:\{[^{}]*\}|\S))?\s*(?:'*|\^\s*\{\s*-1\s*\})\s*
        (?:\([^()]*\)|\[[^\[\]]*\])?
    |(?:m\s*)?\\(?:angle|triangle)[\s{]*[A-Z ]+[}\s]*
    | \|?\\?(?:overline|overrightarrow)?[\s{]*[A-Z]{2,5}[}\s]*\|?
    |\[\s*[A-Z ]+\] | "[^"]*"(?:\s*\([^()]*\))?
    | \(\s*[a-zA-Z\\]+\s*(?:,\s*[a-zA-Z\\]+\s*)+\) | [A-Za-z]\s*"[^"]*"
    |[a-z](?:\s*(?:[-+*]\s*)?[a-z])+ | [A-Za-z]_\S+\s*[-+*]\s*[A-Za-z]_\S+
    |(?:\\(?:sin|cos|tan|cot|sec|csc|log|ln)\s*\{?\(?(?:[A-Za-z]|\\(?:angle)?\s*[A-Za-z]*)\)?\}?)
    |(?:[a-z]\s*\^\s*\{?\d\}?\s*[+]\s*)+[a-z]\s*\^\s*\{?\d\}? | \|[a-z](?:\s*[-+]\s*[a-z])?\|
    |\\frac\s*\{\s*[A-Za-z]+\s*\}\s*\{\s*[A-Za-z]+\s*\}
    | [A-Z]{1,3}\s*[/:]\s*[A-Z]{1,3} | [a-z]\s*/\s*[a-z]
    | \\(?:lim|int|iint|oint|sum|prod|det|deg|dim|arg|nabla)(?![a-zA-Z]).* | \\sigma\s*\^\s*\{?2\}?
    | \\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)[^{}]*\}
    | \\(?:bar|dot|ddot)\s*\{?\s*[A-Za-z]\s*\}? | [A-Z]\s*[∪∩∖]\s*[A-Z] | ⦃[a-z,\ ]+⦄
    | [a-zA-Z]\s*\([a-z]\s*\([^()]*\)\)
    | \(?\s*[a-zA-Z]\s*\\circ\s*[a-zA-Z]\s*\)?\s*\([^()]*\)""",
    re.VERBOSE,
)
# "the answer is" before an answer; a reason, a condition or the range of an index after it.
_REMARKS = re.compile(
    r"""(?x)^"[^"]*\b(?:is|are|:)\s*:?"\s*
    | ^"?\s*(?:最终|最后)?答案(?:是|为)?\s*:?\s*"?\s*
    | ^"?\s*[Aa]ll\s*"?\s+(?=[a-z]\s*[<≤>≥≠∈])
    | \s*[,;(]?\s*"\(?(?:(?:since|because|as|where)\b.*|for\ (?:all|any|every|some)\b\D*)$
    | \s*[,;(]\s*(?:"[^"]*"\s*)?[a-z]\s*∈\s*[ℤℕℝℚℂ][^,;]*$"""
)
_EXCEPT = re.compile(
    r"""(?ix)^"?\s*all\s+(?:the\s+)?real\s+(?:numbers|values)(?:\s+of)?["\s]*(?:x["\s]*)?
    (?:except|other\ than|but|excluding)(?:\s+for)?["\s]*(?:x\s*=\s*)?(-?[\w./\\{} ]+)["\s]*$"""
)
_AROUND = r'[\s".(){}]*'
_EMPTY = re.compile(
    rf"(?i){_AROUND}((there (is|are) )?no (real )?(solutions?|roots?)( exists?)?|none|(the "
    rf")?empty( set)?"
    rf"|∅|⦃ *⦄|无解){_AROUND}"
)
_ALL_REALS = re.compile(
    rf"(?i){_AROUND}(all( the)? real( number)?s?( numbers?)?|ℝ|any real number"
    rf"|全体实数|所有实数){_AROUND}"
)


@lru_cache(maxsize=8192)
def read_answer(text: str) -> Answer:
    """Parse an answer; Words if its structure cannot be parsed."""
    plain = clean(text)
    grouped = (
        _GROUPED.sub(lambda match: match.group().replace(",", ""), plain) if "," in plain else plain
    )
    if grouped != plain and not any(bracket in plain for bracket in "([⦃⟨⟦"):
        plain = grouped
    return read(plain)


def read_as_list(plain: str) -> Answer:
    """Parse plain notation in which "or" separates like a comma: `(1,2) or (3,4)` is two points."""
    return read(_JOINED_TEXT.sub(",", plain))


def read(plain: str, nesting: int = 0) -> Answer:
    """Parse plain notation, in which every comma separates: `120,240` is two numbers."""
    plain = without_outer_braces(_REMARKS.sub("", plain).strip())
    if some_reals := _EXCEPT.fullmatch(plain):
        plain = f"ℝ∖⦃{some_reals.group(1)}⦄"
    if nesting > MAX_NESTING or not plain:
        return Words(plain)
    parts, joiners = split_top(plain)
    if len(parts) == 1:
        return read_one(parts[0], nesting)
    items = [read_one(part, nesting + 1) for part in parts]
    if any(
        isinstance(item, Words) and '"' not in part for item, part in zip(items, parts, strict=True)
    ):
        return Words(plain)
    return _combined(items, "or" in joiners)


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`, or -1."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in _OPEN) - (text[index] in _CLOSE)
        if depth == 0:
            return index
    return -1


def split_at(text: str, separators: str) -> tuple[list[str], list[str]]:
    """Split a text into (pieces, separators) at separators outside brackets and quotes."""
    pieces: list[str] = []
    found: list[str] = []
    depth = start = 0
    quoted = False
    for index, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif depth == 0 and character in separators:
            pieces.append(text[start:index].strip())
            found.append(character)
            start = index + 1
    return [*pieces, text[start:].strip()], found


_JOINED_TEXT = re.compile(r'"\s*[,;]?\s*(and|or|和|或)\s*"')


def split_top(plain: str) -> tuple[list[str], list[str]]:
    """Split a list into (answers, joiners), a joiner being "," or "or"."""
    marked = _JOINED_TEXT.sub(
        lambda match: "\x01" if match.group(1) in ("or", "或") else "\x02", plain
    )
    pieces, found = split_at(marked, ",;\x01\x02")
    joiners = ["or" if separator == "\x01" else "," for separator in found]
    return ([piece for piece in pieces if piece] or [plain]), joiners


def _combined(items: list[Answer], has_or: bool) -> Answer:
    """Make a list; different names form a point, intervals joined by "or" a region."""
    names = [item.name for item in items if isinstance(item, Named)]
    values = tuple(item.value if isinstance(item, Named) else item for item in items)
    if names and len(names) == len(items):
        size = len(set(names))
        points = tuple(
            Point("=", "=", values[start : start + size], tuple(names[start : start + size]))
            for start in range(0, len(names), size)
        )
        if size == 1 or any(len(set(point.names)) < size for point in points):
            return Listing(_flattened(values))
        return points[0] if len(points) == 1 else Listing(points)
    regions = [region for item in items if (region := as_region(item)) is not None]
    pieces = tuple(piece for region in regions for piece in region.pieces)
    if all(isinstance(item, Region) for item in items):
        if len(merged(pieces) or ()) == len(pieces):
            return Region(pieces)
        is_one = len({region.variable for region in regions}) == 1
        if is_one and not has_or and (common := combined("∩", regions)):  # x > 2, x < 5
            return common
    return Region(pieces) if has_or and len(regions) == len(items) else Listing(_flattened(values))


def _flattened(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    flat: list[Answer] = []
    for item in items:
        flat += item.items if isinstance(item, Listing) and not item.is_set else (item,)
    return tuple(flat)


_DATE = re.compile(r"(\d{4})([-/])(\d{1,2})\2(\d{1,2})")


def read_date(text: str) -> datetime.date | None:
    """Parse `2024-01-02` or `2024/1/2`, else return None."""
    if (match := _DATE.fullmatch(text)) is None:
        return None
    try:
        return datetime.date(*map(int, match.group(1, 3, 4)))
    except ValueError:
        return None


def read_one(text: str, nesting: int) -> Answer:
    """Parse text that is not a list."""
    text = without_outer_braces(text.strip())
    if not text:
        return Words(text)
    if _EMPTY.fullmatch(text):
        return Listing((), is_set=True)
    if _ALL_REALS.fullmatch(text):
        return Region(REALS)
    if quoted := re.fullmatch(r'\(?\s*"([^"]*)"\s*\)?', text):
        inner = re.sub(r"(?i)\b(and|or)\b", ",", quoted.group(1).strip())
        if inner[:1] == "(" and _closing(inner, 0) == len(inner) - 1:
            inner = inner[1:-1]
        inner = re.sub(r"(?i)^(?:the )?(?:final )?answer is:? ", "", inner)
        if inner.lower() in NUMBER_WORDS:
            return _read_value(str(NUMBER_WORDS[inner.lower()]))
        is_mathematics = any(character.isdigit() for character in inner) and nesting < 2
        return read(inner, nesting + 2) if is_mathematics or "," in inner else Words(text)
    if len(text) == len("2024-01-02") and (day := read_date(text)):
        return Words(day.isoformat())  # not a difference of numbers
    if text.lower() in NUMBER_WORDS:
        return _read_value(str(NUMBER_WORDS[text.lower()]))
    text = re.sub(r"(?<=[\])])\s*\^\s*\{?\s*(?:T|\\top)\s*\}?$", "", text)
    pieces, found = split_at(text, "≈")
    if found and all(pieces):
        return Approximate(tuple(read_one(piece, nesting + 1) for piece in pieces))
    for reader in (_read_case, _read_relation, _read_region, _read_matrix, _read_enclosed):
        answer = reader(text, nesting)
        if answer is not None:
            return answer
    return _read_value(text)


def _read_case(text: str, nesting: int) -> Answer | None:
    """Parse a value and its condition, a row of a function defined by cases."""
    pieces, found = split_at(text, "&")
    if len(found) != 1 or not all(pieces):
        return None
    return Point("&", "&", tuple(read_one(piece, nesting + 1) for piece in pieces))


def _read_relation(text: str, nesting: int) -> Answer | None:
    pieces, operators = split_at(text, _RELATION)
    if not operators:
        return None
    if not all(pieces) or nesting > MAX_NESTING:
        return Words(text)
    if set(operators) <= set("=∈≡"):
        if (
            operators == ["="]
            and _NAME.fullmatch(pieces[1])
            and _is_constant(pieces[0]) > _is_constant(pieces[1])
        ):
            pieces = pieces[::-1]  # 5 = x
        value = read_one(pieces[-1], nesting + 1)
        if not isinstance(value, Words | Relation):
            if _NAME.fullmatch(pieces[0]):
                return _named(pieces[0], value)
            if _is_constant(pieces[0]) and _is_constant(pieces[-1]):
                return Named("", value)  # 2 + 3 = 5
        elif isinstance(value, Words) and _NAME.fullmatch(pieces[0]) and '"' in value.text:
            return _named(pieces[0], value)
    sides = tuple(map(_read_side, pieces))
    known = tuple(side for side in sides if side is not None)
    if len(known) < len(sides) or "∈" in operators:
        return Words(text)
    return region_of_inequality(tuple(operators), known) or Relation(tuple(operators), known)


def _named(name: str, value: Answer) -> Answer:
    """Name a value; `(x, y) = (1, 2)` is the same as `x = 1, y = 2`."""
    name = re.sub(r"\s|m?\\angle(?![a-z])|\\over(?:line|rightarrow)", "", name)
    name = re.sub(r"(?<=_)\{(\w+)\}|^[|{]+([A-Z]{2,})[|}]+$", r"\1\2", name)
    names = tuple(name[1:-1].split(","))
    if isinstance(value, Point) and name[:1] == "(" and len(names) == len(value.items):
        return Point("=", "=", value.items, names)
    return Named(name, value)


def _read_side(text: str) -> Node | None:
    """Parse a side of a relation, without its unit."""
    bare, _, factor = split_unit(text)
    node = parse_expression(bare)
    return None if node is None else _scaled(node, factor)


def _scaled(node: Node, factor: Fraction) -> Node:
    return node if factor == 1 else ("mul", node, ("num", factor))


def _is_constant(text: str) -> bool:
    """True for an expression without variables."""
    node = parse_expression(text)
    return node is not None and not variables(node)


_MINUS = re.compile(r"(?<=ℝ)\s*-\s*|(?<=[)\]])\s*-\s*(?=⦃)")


def _read_region(text: str, nesting: int) -> Answer | None:
    """Parse a union, difference or intersection of intervals and sets."""
    text = _MINUS.sub("∖", text.replace("\\ ", "∖"))
    operator = next((one for one in "∪∖∩" if split_at(text, one)[1]), None)
    if operator is None:
        return None
    parts = [read_one(piece, nesting + 1) for piece in split_at(text, operator)[0]]
    sets = [part for part in parts if isinstance(part, Listing) and part.is_set]
    if operator == "∪" and len(sets) == len(parts):
        return Listing(tuple(item for part in sets for item in part.items), True)
    regions = [region for part in parts if (region := as_region(part)) is not None]
    return combined(operator, regions) if len(regions) == len(parts) else None


_MATRIX = re.compile(r"^(.*?)\s*\*?\s*⟦([^⟦⟧]*)⟧(\s*\^\s*\{?\s*(?:T|\\top\s*)\s*\}?)?$")


def _read_matrix(text: str, nesting: int) -> Answer | None:
    match = _MATRIX.match(text)
    if match is None:
        return None
    scale = parse_expression({"": "1", "-": "-1"}.get(match.group(1).strip(), match.group(1)))
    rows = tuple(
        tuple(read_one(entry, nesting + 1) for entry in split_at(row, "&")[0])
        for row in match.group(2).split("⏎")
        if row.strip()
    )
    if scale is None or len({len(row) for row in rows}) != 1:
        return None
    if scale != ("num", Fraction(1)):
        rows = tuple(
            tuple(
                replace(e, node=("mul", scale, e.node)) if isinstance(e, Value) else e for e in row
            )
            for row in rows
        )
    return Matrix(tuple(zip(*rows, strict=True)) if match.group(3) else rows)


_SUCH_THAT = re.compile(r"[a-z]\s*(?:∈\s*ℝ\s*)?[|:](.*[<≤>≥≠∈].*)$")


def _read_enclosed(text: str, nesting: int) -> Answer | None:
    """Parse text enclosed in one pair of brackets: a point, an interval, a set."""
    if text[0] not in "([⦃⟨" or text[-1] not in ")]⦄⟩" or _closing(text, 0) != len(text) - 1:
        return None
    inner = text[1:-1].strip()
    pieces, found = split_at(inner, ",;")
    if text[0] == "⦃":
        condition = _SUCH_THAT.match(inner)
        if condition:
            return read(condition.group(1), nesting + 1)
        if not inner:
            return Listing((), is_set=True)
        items = _flattened(tuple(read_one(piece, nesting + 1) for piece in pieces if piece))
        return Listing(items, is_set=True)
    if not found:
        return read(inner, nesting + 1) if text[0] == "(" and text[-1] == ")" and inner else None
    items = tuple(read_one(piece, nesting + 1) for piece in pieces if piece)
    signs = [
        index for index, item in enumerate(items) if isinstance(item, Listing) and not item.is_set
    ]
    if len(signs) == 1:
        both = items[signs[0]]
        assert isinstance(both, Listing)
        choices = [(*items[: signs[0]], one, *items[signs[0] + 1 :]) for one in both.items]
        return Listing(tuple(Point(text[0], text[-1], choice) for choice in choices))
    return Point(text[0], text[-1], items)


def _read_value(text: str) -> Answer:
    text = re.sub(r"\s*\(?\s*\\?p?mod\s*\{?\s*\d+\s*\}?\s*\)?$", "", text)
    bare, unit, factor = split_unit(text)
    is_percent = bare.endswith("%")
    if is_percent:
        bare = bare[:-1].strip()
    node = parse_expression(
        re.sub(r"_\s*\{?\s*10\s*\}?$", "", bare) if re.match(r"-?\d", bare) else bare
    )
    if node is None:
        return Words(text)
    node = _scaled(node, factor)
    signed = expanded(node)
    values = tuple(Value(one, unit, is_percent) for one in signed)
    return values[0] if len(values) == 1 else Listing(values)


def expanded(node: Node) -> list[Node]:
    """Return the two expressions that ± stands for, upper signs first, or the expression."""
    upper = _with_sign(node, 1)
    return [node] if upper == node else [upper, _with_sign(node, -1)]


def _with_sign(node: Node, sign: int) -> Node:
    if node[0] == "pm":
        left, right = _with_sign(node[2], sign), _with_sign(node[3], sign)
        return ("add" if node[1] == sign else "sub", left, right)
    return (
        node[0],
        *(_with_sign(child, sign) if isinstance(child, tuple) else child for child in node[1:]),
    )
