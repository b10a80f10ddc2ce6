"""Bash syntax inside one word: matching brackets and quotes, brace lists, globs."""

from __future__ import annotations

import re
from typing import NamedTuple

from interop.shell.scope import ShellError


class Piece(NamedTuple):
    """A part of a word: "literal" (unquoted), "quoted", "split" (from an unquoted expansion), or
    "break".
    """

    text: str
    kind: str
    origin: str | None = None


BREAK = Piece("", "break")


def end_of(text: str, start: int, close: str, quoted: bool = False) -> int:
    """Return the index of the bracket or quote that closes the one before `start`."""
    at = start
    while at < len(text) and text[at] != close:
        if text[at] == "\\":
            at += 2
        elif text[at] == '"' or (text[at] == "'" and not quoted and close != '"'):
            at = closing_quote(text, at) + 1
        elif text.startswith("${", at):
            at = end_of(text, at + 2, "}", quoted or close == '"') + 1
        elif text.startswith("$(", at):
            at = end_of(text, at + 2, ")") + 1
        elif text[at] == "(" and close == ")":
            at = end_of(text, at + 1, ")") + 1
        else:
            at += 1
    if at >= len(text):
        raise ShellError(f"{text[:60]!r} has no closing {close}")
    return at


def closing_quote(text: str, at: int) -> int:
    """Return the index of the quote that closes the one at `at`."""
    if text[at] == '"':
        return end_of(text, at + 1, '"')
    end = text.find("'", at + 1)
    if end < 0:
        raise ShellError(f"{text[at:][:60]!r} has no closing quote")
    return end


def regex_of(glob: list[Piece]) -> str:
    """Convert a glob to a regular expression; quoted parts match literally."""
    text = "".join(
        re.sub(r"(.)", r"\\\1", piece.text, flags=re.DOTALL)
        if piece.kind == "quoted"
        else piece.text
        for piece in glob
    )
    found, at = "", 0
    while at < len(text):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            found += re.escape(text[at + 1])
            at += 1
        elif char == "[" and (end := text.find("]", at + 2)) > 0:
            inner = text[at + 1 : end].replace("\\", "\\\\")
            found += "[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
            at = end
        else:
            found += {"*": ".*", "?": "."}.get(char, re.escape(char))
        at += 1
    return found


def braces(text: str) -> list[str]:
    """Expand `a{b,c}` and `{1..3}` to words, as source; quoted braces and `${` are kept."""
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"":
            at = (
                end_of(text, at + 1, text[at], quoted=True) + 1
                if text[at] == '"'
                else text.index("'", at + 1) + 1
            )
        elif text.startswith(("${", "$("), at):
            at = end_of(text, at + 2, "}" if text[at + 1] == "{" else ")") + 1
        elif text[at] == "{" and (found := _brace_list(text, at)):
            end, items = found
            return [text[:at] + item + rest for item in items for rest in braces(text[end:])]
        else:
            at += 1
    return [text]


def _brace_list(text: str, start: int) -> tuple[int, list[str]] | None:
    """Return the index after the closing brace and the items of a brace list; None if it is not
    one.
    """
    depth, items, begin, at = 0, [], start + 1, start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "'\"":
            at = closing_quote(text, at)
        elif text.startswith("${", at):
            at = end_of(text, at + 2, "}")
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}" and depth:
            depth -= 1
        elif text[at] == "," and not depth:
            items.append(text[begin:at])
            begin = at + 1
        elif text[at] == "}":
            items.append(text[begin:at])
            break
        at += 1
    else:
        return None
    if len(items) > 1:
        return at + 1, [word for item in items for word in braces(item)]
    if ends := re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?", items[0]):
        first, last, step = int(ends[1]), int(ends[2]), abs(int(ends[3] or 1)) or 1
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        return at + 1, [str(number) for number in numbers]
    return None
