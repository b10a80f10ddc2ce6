"""Expand the words of a bash script: quotes, expansions, splitting. Unknown values are marked."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterator
from typing import NamedTuple

from interop.shell.arithmetic import evaluate
from interop.shell.scope import EVERY_ITEM, UNSET, Scope, ShellError, Word, marks_of

NOT_READ = "bash that is not read here"
NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
BLANKS = re.compile(r"[ \t\n]+|[^ \t\n]+")
PLAIN = re.compile(r"[^\\'\"$`]+")
BRACE_LIST = re.compile(r"\{([^{}\s]*(?:,|\.\.)[^{}\s]*)\}")
EXTENDED = re.compile(r"[?*+@!]\(")  # begins a part of a pattern that fnmatch does not know
CHANGED = re.compile(  # a variable, and an operator that changes it
    r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&^|]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
BRACED = re.compile(
    r"(?P<length>#(?=[\w@*]))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?P<index>\[[^]]*\])?"
    r"(?P<operator>:[-=?+]|[-=?+]|##?|%%?|//?|:)?(?P<operand>.*)",
    re.DOTALL,
)


class Piece(NamedTuple):
    """A part of a word: "literal", "quoted", "split" (an unquoted expansion), or "break"."""

    text: str
    kind: str
    origin: str | None = None


def end_of(text: str, start: int, close: str) -> int:
    """Return the index of the bracket or quote that closes the one before `start`."""
    at = start
    while at < len(text) and text[at] != close:
        if text[at] == "\\":
            at += 2
        elif text[at] == '"' or text.startswith(("${", "$("), at):
            width = 1 if text[at] == '"' else 2
            inner = {'"': '"', "{": "}", "(": ")"}[text[at + width - 1]]
            at = end_of(text, at + width, inner) + 1
        elif text[at] == "'" and close == ")":
            at = text.find("'", at + 1) + 1 or len(text)
        elif text[at] == "(" and close == ")":
            at = end_of(text, at + 1, ")") + 1
        else:
            at += 1
    if at >= len(text):
        raise ShellError(f"{text[:60]!r} has no closing {close}")
    return at


def pieces(text: str, scope: Scope, quoted: bool = False, is_document: bool = False) -> list[Piece]:
    """Expand a word's source into pieces; in a here-document, quotes are literal."""
    found: list[Piece] = []
    bare = "quoted" if quoted else "literal"
    at = 0
    while at < len(text):
        char = text[at]
        if match := PLAIN.match(text, at):
            found.append(Piece(match.group(), bare))
            at = match.end()
        elif char == "\\":
            after = text[at + 1 : at + 2]
            kept = "\\" if not after or (quoted and after not in '$`"\\\n') else ""
            if after != "\n":
                found.append(Piece(kept + after, "quoted"))
            at += 2
        elif char == '"' and not is_document:
            end = end_of(text, at + 1, '"')
            inner = text[at + 1 : end]
            is_word = "$" not in inner  # "${@:2}" of one argument is none
            found += pieces(inner, scope, quoted=True) or [Piece("", "quoted")] * is_word
            at = end + 1
        elif char == "'" and not quoted:
            if (end := text.find("'", at + 1)) < 0:
                raise ShellError(f"{scope.origin}: {text[at:][:60]!r} has no closing quote")
            found.append(Piece(text[at + 1 : end], "quoted"))
            at = end + 1
        elif char in "$`":
            at, expanded = _expansion(text, at, scope, quoted)
            found += expanded
        else:
            found.append(Piece(char, bare))
            at += 1
    return found


def _expansion(text: str, at: int, scope: Scope, quoted: bool) -> tuple[int, list[Piece]]:
    """Expand a `$` or a backtick; returns the index after it and the pieces."""
    kind = "quoted" if quoted else "split"
    if text[at] == "`":
        end = end_of(text, at + 1, "`")
        return end + 1, [Piece(scope.substituted(text[at : end + 1]), kind)]
    if text.startswith("$(", at):
        end = end_of(text, at + 2, ")") + 1
        source = text[at:end]
        if source.startswith("$((") and source.endswith("))"):
            return end, [Piece(number(scope, source[3:-2]), kind)]
        return end, [Piece(scope.substituted(source), kind)]
    if text.startswith("${", at):
        end = end_of(text, at + 2, "}")
        return end + 1, list(_braced(text[at + 2 : end], scope, quoted))
    if match := NAME.match(text, at + 1):
        return match.end(), list(_braced(match.group(), scope, quoted))
    if not quoted and text[at + 1 : at + 2] in ("'", '"'):
        return len(text), [Piece(scope.mark(text[at:], NOT_READ), kind)]
    if quoted and text[at + 1 :]:
        return at + 1, [Piece("$", "quoted")]
    return at + 1, [Piece(scope.mark("$", "no variable's name follows"), "quoted")]


def _braced(source: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the pieces of `${source}`."""
    match = BRACED.fullmatch(source)
    if match is None or (match["operand"] and match["operator"] is None):
        yield Piece(scope.mark(f"${{{source}}}", NOT_READ), "quoted" if quoted else "split")
        return
    name, operator, operand = match["name"], match["operator"], match["operand"]
    index = match["index"][1:-1] if match["index"] else None
    is_every = name in EVERY_ITEM or index in EVERY_ITEM
    words = _words_of(scope, name, index)
    if match["length"]:
        text = words[0].text if words else scope.need(name)
        is_count = is_every and words is not None
        length = str(len(words or ())) if is_count else marks_of(text) or str(len(text))
        yield Piece(length, "quoted")
        return
    if operator and operator[-1] in "-=?+":
        yield from _defaulted(scope, name, words, operator, operand, quoted)
        return
    if words is None:
        words = [Word(scope.mark(name, UNSET), scope.origin)]
    if operator == ":":
        words = _slice(words, source, operand, scope, is_every)
    elif operator:  # a prefix, a suffix or a replacement
        marks = marks_of("".join(word.text for word in words))
        words = [Word(marks or scope.mark(f"${{{source}}}", NOT_READ), scope.origin)]
    yield from _emitted(words, quoted, is_every, "*" in (name, index))


def _words_of(scope: Scope, name: str, index: str | None) -> list[Word] | None:
    """Return the texts of a variable, several for a whole array; None if it is not set."""
    value = scope.look_up(name)
    if name in EVERY_ITEM or index in EVERY_ITEM:
        return [value] if isinstance(value, Word) else value
    at = "0" if index is None else number(scope, index)
    text = marks_of(at) or scope.text_of(name, at)
    if text is None:
        return [Word("", scope.origin)] if isinstance(value, list) else None
    return [Word(text, scope.origin)]


def _emitted(words: list[Word], quoted: bool, is_every: bool, is_joined: bool) -> Iterator[Piece]:
    if quoted and is_joined:
        yield Piece(" ".join(word.text for word in words), "quoted")
        return
    for place, word in enumerate(words):
        if place:
            yield Piece("", "break")
        yield Piece(word.text, "quoted" if quoted else "split", word.origin if is_every else None)


def _defaulted(
    scope: Scope, name: str, words: list[Word] | None, operator: str, operand: str, quoted: bool
) -> Iterator[Piece]:
    """Expand `${X:-y}`, `${X:=y}`, `${X:?y}` and `${X:+y}`, with or without the colon."""
    joined = " ".join(word.text for word in words or ())
    is_missing = not words or (operator.startswith(":") and not joined)
    wants_set = operator.endswith("+")
    if wants_set and marks_of(joined) == joined != "":
        yield Piece(joined, "quoted")
    elif operator.endswith("?") and is_missing:
        yield Piece(scope.mark(name, UNSET), "quoted")
    elif wants_set != is_missing:
        found = pieces(operand, scope, quoted)
        if operator.endswith("="):
            scope.assign(name, "".join(piece.text for piece in found))
        for piece in found or [Piece("", "literal")]:
            bare = "quoted" if quoted else "split"
            yield piece._replace(kind=bare) if piece.kind == "literal" else piece
    elif wants_set:
        yield Piece("", "quoted" if quoted else "split")
    else:
        yield from _emitted(words or [], quoted, len(words or ()) > 1 or name in EVERY_ITEM, False)


def _slice(
    words: list[Word], source: str, operand: str, scope: Scope, is_array: bool
) -> list[Word]:
    """Expand `${X[@]:from:count}` of an array or of the positional parameters."""
    bounds = [number(scope, part) for part in operand.split(":")]
    if not is_array or not all(bound.isdigit() for bound in bounds):
        marks = marks_of("".join(bounds)) or scope.mark(f"${{{source}}}", NOT_READ)
        return [Word(marks, scope.origin)]
    start, count = int(bounds[0]), int(bounds[1]) if len(bounds) > 1 else None
    items = [Word(scope.name, scope.origin), *words] if source[0] in EVERY_ITEM else words
    return items[start:] if count is None else items[start : start + count]


def regex_of(found: list[Piece]) -> str:
    """Convert a glob to a regular expression; quoted parts match literally."""
    parts = (glob.escape(piece.text) if piece.kind == "quoted" else piece.text for piece in found)
    return fnmatch.translate("".join(parts)).removesuffix(r"\Z")


def fields(source: str, scope: Scope) -> list[Word]:
    """Return the words that bash expands one word's source to."""
    match = BRACE_LIST.search(source)
    if match is not None and "," in match[1] and not re.search(r"['\"\\]|\$[({]", source):
        before, after = source[: match.start()], source[match.end() :]
        expanded = (fields(f"{before}{item}{after}", scope) for item in match[1].split(","))
        return [word for words in expanded for word in words]
    found = pieces(source, scope)
    if BRACE_LIST.search("".join(each.text if each.kind == "literal" else "x" for each in found)):
        return [Word(scope.mark(source, NOT_READ), scope.origin)]
    return list(_split(found, scope.origin))


def _split(found: list[Piece], origin: str) -> Iterator[Word]:
    """Join pieces into words, splitting unquoted expansions at blanks and after array items."""
    current: Word | None = None
    for piece in found:
        for part in BLANKS.findall(piece.text) if piece.kind == "split" else [piece.text]:
            if piece.kind != "break" and not (piece.kind == "split" and part.isspace()):
                before, at = current or Word("", origin)
                current = Word(before + part, piece.origin or at)
            elif current is not None:
                yield current
                current = None
    if current is not None:
        yield current


def scalar(source: str, scope: Scope) -> str:
    """Expand a source without splitting: the value of an assignment, or an operand of a test."""
    return "".join(" " if piece.kind == "break" else piece.text for piece in pieces(source, scope))


def number(scope: Scope, text: str) -> str:
    """Return the value of an arithmetic expression.

    Returns marks if it depends on unknown values, or is not read here, such as assignments, whose
    variables are unknown from there on.
    """
    expression = "".join(piece.text for piece in pieces(text, scope, quoted=True))
    marks = [marks_of(expression)]

    def read(name: str) -> str:
        text = scope.need(name)
        marks.append(marks_of(text))
        return "1" if marks[-1] else text

    value = None if marks[0] else evaluate(expression, read)
    result = marks_of("".join(marks))
    if not result:
        result = scope.mark(f"$(({expression}))", NOT_READ) if value is None else str(value)
    for match in CHANGED.finditer(expression):
        scope.assign(match[1] or match[2], result)
    return result
