"""Expand the words of a bash script: quotes, expansions, splitting. Unknown values are marked."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from interop.shell.arithmetic import ArithmeticFailure, evaluate
from interop.shell.scope import (
    EVERY_ITEM,
    MARK,
    UNSET,
    Scope,
    ShellError,
    Word,
    joined_marks,
    marks_of,
)
from interop.shell.syntax import BREAK, Piece, braces, closing_quote, end_of, regex_of

NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
BLANKS = re.compile(r"[ \t\n]+|[^ \t\n]+")
BRACED = re.compile(
    r"(?P<length>#(?=[\w@*]))?(?P<indirect>!)?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?P<index>\[[^]]*\])?"
    r"(?P<operator>:[-=?+]|[-=?+]|##?|%%?|//|/#|/%|/|\^\^?|,,?|@|:)?(?P<operand>.*)",
    re.DOTALL,
)


def pieces(text: str, scope: Scope, quoted: bool = False, is_document: bool = False) -> list[Piece]:
    """Expand a word's source into pieces; `is_document` for a here-document, where quotes are
    literal.
    """
    found: list[Piece] = []
    bare = "quoted" if quoted else "literal"
    at = 0
    while at < len(text):
        rest = text[at:]
        if rest[0] == "\\":
            at += 2
            if len(rest) == 1:
                found.append(Piece("\\", bare))
            elif rest[1] != "\n":
                kept = "\\" if quoted and rest[1] not in '$`"\\' else ""
                found.append(Piece(kept + rest[1], "quoted"))
        elif rest.startswith(('"', '$"')) and not is_document and not (quoted and rest[0] == "$"):
            begin = at + rest.index('"') + 1
            at = end_of(text, begin, '"') + 1
            inner = pieces(text[begin : at - 1], scope, quoted=True)
            found.extend(inner or ([Piece("", "quoted")] if begin == at - 1 else []))
        elif rest[0] == "'" and not quoted:
            end = closing_quote(text, at)
            found.append(Piece(text[at + 1 : end], "quoted"))
            at = end + 1
        elif rest.startswith("$'") and not quoted:
            closing = re.compile(r"(?:[^\\']|\\.)*'", re.DOTALL).match(text, at + 2)
            if closing is None:
                raise ShellError(f"{scope.origin}: {rest[:60]!r} has no closing quote")
            found.append(Piece(_ansi(closing.group()[:-1]), "quoted"))
            at = closing.end()
        elif rest[0] in "$`":
            at, expanded = _expansion(text, at, scope, quoted)
            found.extend(expanded)
        else:
            found.append(Piece(rest[0], bare))
            at += 1
    return found


def _ansi(text: str) -> str:
    """Decode the text between $' and '."""
    known = re.sub(r"\\([?\"'])", r"\1", text.replace("\\e", "\x1b").replace("\\E", "\x1b"))
    return codecs.decode(known.encode("latin-1", "backslashreplace"), "unicode_escape")


def _expansion(text: str, at: int, scope: Scope, quoted: bool) -> tuple[int, list[Piece]]:
    """Expand a `$` or a backtick; returns the index after it and the pieces."""
    kind = "quoted" if quoted else "split"
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise ShellError(f"{scope.origin}: {text[at:][:60]!r} has no closing backtick")
        return end + 1, [Piece(scope.substituted(text[at : end + 1]), kind)]
    if text.startswith("$(", at):
        end = end_of(text, at + 2, ")") + 1
        source = text[at:end]
        if source.startswith("$((") and source.endswith("))"):
            return end, [Piece(number(scope, source[3:-2]), kind)]
        return end, [Piece(scope.substituted(source), kind)]
    if text.startswith("${", at):
        end = end_of(text, at + 2, "}", quoted)
        return end + 1, list(_braced(text[at + 2 : end], scope, quoted))
    if match := NAME.match(text, at + 1):
        return match.end(), list(_braced(match.group(), scope, quoted))
    return at + 1, [Piece("$", "quoted" if quoted else "literal")]


def _braced(source: str, scope: Scope, quoted: bool) -> Iterator[Piece]:
    """Yield the pieces of `${source}`."""
    match = BRACED.fullmatch(source)
    if match is None:
        raise ShellError(f"{scope.origin}: cannot parse ${{{source}}}")
    name, operator, operand = match["name"], match["operator"], match["operand"]
    index = match["index"][1:-1] if match["index"] else None
    if match["indirect"]:
        target = scope.need(name)
        if index in EVERY_ITEM or marks_of(target) or not NAME.fullmatch(target):
            yield Piece(
                marks_of(target) or scope.mark(f"${{{source}}}", "not supported here"), "quoted"
            )
            return
        name = target
    if operand and operator is None:
        raise ShellError(f"{scope.origin}: cannot parse ${{{source}}}")
    is_every = name in EVERY_ITEM or index in EVERY_ITEM
    words = _words_of(scope, name, index)
    if match["length"]:
        many = is_every and words is not None
        text = words[0].text if words else scope.need(name)
        yield Piece(str(len(words or ())) if many else marks_of(text) or str(len(text)), "quoted")
        return
    if operator and operator.lstrip(":") in ("-", "=", "?", "+") and operator != ":":
        yield from _defaulted(scope, name, words, operator, operand, quoted)
        return
    if words is None:
        words = [Word(scope.mark(name, UNSET), scope.origin)]
    if operator == ":":
        changed = _slice(words, operand, scope, name if is_every else None)
    else:
        changed = [
            word._replace(text=_changed(word.text, operator, operand, scope)) for word in words
        ]
    yield from _emitted(changed, quoted, is_every, "*" in (name, index))


def _words_of(scope: Scope, name: str, index: str | None) -> list[Word] | None:
    """Return the texts of a variable, several for a whole array; None if it is not set."""
    value = scope.look_up(name)
    if name in EVERY_ITEM or index in EVERY_ITEM:
        items = value if isinstance(value, dict) else {} if value is None else {"0": value}
        return list(items.values()) if items or value is not None else None
    text = scope.text_of(name, None if index is None else index_of(scope, name, index))
    if text is None:
        return [Word("", scope.origin)] if isinstance(value, dict) else None
    return [Word(text, scope.origin)]


def _emitted(words: list[Word], quoted: bool, is_every: bool, is_joined: bool) -> Iterator[Piece]:
    if quoted and is_joined:
        yield Piece(" ".join(word.text for word in words), "quoted")
        return
    for number, word in enumerate(words):
        if number:
            yield BREAK
        yield Piece(word.text, "quoted" if quoted else "split", word.origin if is_every else None)


def _defaulted(
    scope: Scope, name: str, words: list[Word] | None, operator: str, operand: str, quoted: bool
) -> Iterator[Piece]:
    """Expand `${X:-y}`, `${X:=y}`, `${X:?y}` and `${X:+y}`, with or without the colon."""
    joined = " ".join(word.text for word in words or ())
    is_missing = not words or (operator.startswith(":") and not joined)
    alternative = operator.endswith("+")
    if alternative and marks_of(joined) == joined != "":
        yield Piece(joined, "quoted")
    elif alternative != is_missing:
        if operator.endswith("?"):
            yield Piece(scope.mark(name, UNSET), "quoted")
            return
        found = pieces(operand, scope, quoted)
        if operator.endswith("="):
            scope.assign(name, "".join(piece.text for piece in found))
        yield from (
            piece._replace(kind="split") if piece.kind == "literal" else piece for piece in found
        )
        if not found:
            yield Piece("", "quoted" if quoted else "split")
    elif alternative:
        yield Piece("", "quoted" if quoted else "split")
    else:
        yield from _emitted(words or [], quoted, len(words or ()) > 1 or name in EVERY_ITEM, False)


def _slice(words: list[Word], operand: str, scope: Scope, array: str | None) -> list[Word]:
    """Expand `${X:from:count}` for a text or an array."""
    offset_text, _, count_text = operand.partition(":")
    numbers = [number(scope, part) for part in (offset_text, *([count_text] if _ else []))]
    if marks := marks_of("".join(numbers) + ("" if array else words[0].text if words else "")):
        return [Word(marks, scope.origin)]
    offset, count = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else None
    if array is not None:
        items = [Word(scope.name, scope.origin), *words] if array in EVERY_ITEM else words
        start = max(offset + len(items), 0) if offset < 0 else offset
        return items[start:] if count is None else items[start : start + count]
    text = words[0].text if words else ""
    if -offset > len(text):
        return [Word("", scope.origin)]
    start = offset + len(text) if offset < 0 else offset
    end = len(text) if count is None else count + len(text) if count < 0 else start + count
    return [Word(text[start:end], scope.origin)]


def _changed(text: str, operator: str | None, operand: str, scope: Scope) -> str:
    """Apply a prefix or suffix removal, a replacement, or a case change to a text."""
    if not operator or operator == "@":
        return text if not operator else scope.mark(f"${{...@{operand}}}", "not supported here")
    if operator[0] in "^,":
        change = str.upper if operator[0] == "^" else str.lower
        known = text if len(operator) == 2 else text[:1]
        return marks_of(text) or change(known) + text[len(known) :]
    separator = (
        next((at for at in _slashes(operand)), len(operand)) if operator[0] == "/" else len(operand)
    )
    glob = [piece for piece in pieces(operand[:separator], scope) if piece.kind != "break"]
    if marks := marks_of(text + "".join(piece.text for piece in glob)):
        return marks
    expression = regex_of(glob)
    if operator[0] in "#%":
        return _trimmed(text, operator, expression)
    new = "".join(piece.text for piece in pieces(operand[separator + 1 :], scope))
    anchored = {"/#": f"^(?:{expression})", "/%": f"(?:{expression})$"}.get(operator, expression)
    if not glob:
        return text
    return re.sub(
        anchored,
        lambda found: new if found.group() or not text else "",
        text,
        count=0 if operator == "//" else 1,
        flags=re.DOTALL,
    )


def _slashes(operand: str) -> Iterator[int]:
    """Yield the positions of unquoted `/`, which separate a pattern from its replacement."""
    at = 1 if operand.startswith("/") else 0
    while at < len(operand):
        if operand[at] == "\\":
            at += 2
        elif operand[at] in "'\"":
            at = closing_quote(operand, at) + 1
        elif operand.startswith("${", at):
            at = end_of(operand, at + 2, "}") + 1
        else:
            if operand[at] == "/":
                yield at
            at += 1


def _trimmed(text: str, operator: str, expression: str) -> str:
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        if re.fullmatch(expression, part, re.DOTALL):
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text


def fields(source: str, scope: Scope) -> list[Word]:
    """Return the words that bash expands one word's source to."""
    return [word for text in braces(source) for word in _split(pieces(text, scope), scope.origin)]


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
    """Expand a source without splitting: the right side of an assignment, or an operand of a test."""
    return "".join(" " if piece.kind == "break" else piece.text for piece in pieces(source, scope))


def index_of(scope: Scope, name: str, text: str) -> str:
    """Return the key of an array item: a text for `declare -A`, else the value of an expression."""
    plain = scalar(text, scope)
    if name in scope.associative or MARK.search(plain):
        return plain
    value = number(scope, plain)
    if value.startswith("-") and isinstance(items := scope.look_up(name), dict) and items:
        return str(max(map(int, items)) + 1 + int(value))
    return value


def number(scope: Scope, text: str) -> str:
    """Return the value of an arithmetic expression; its marks if it depends on unknown values."""
    plain = "".join(piece.text for piece in pieces(text, scope, quoted=True))
    if marks := MARK.findall(plain):
        return joined_marks(marks)
    found: list[str] = []

    def read(name: str) -> str:
        value = scope.need(name)
        found.extend(MARK.findall(value))
        return "1" if MARK.search(value) else value

    try:
        value = evaluate(plain, read, scope.assign)
    except ArithmeticFailure as failure:
        if found:
            return joined_marks(found)
        raise ShellError(f"{scope.origin}: {failure}") from None
    return joined_marks(found) if found else str(value)
