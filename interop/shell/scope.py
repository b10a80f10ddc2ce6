"""The variables of a bash script at one line, and marks for values known only on the script's
machine.

A value that cannot be known (a command's output, a variable that the script does not set) is a mark
in the text. Marks propagate, so every value derived from an unknown can be traced back to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from interop import ForeignConfigError

MARK = re.compile("\ue000(\\d+)\ue001")
EVERY_ITEM = ("@", "*")
KEPT = {"HOME": "~", "PWD": "."}  # their replacements
UNSET = "not set by the script"
OUTPUT = "a command's output"


class ShellError(ForeignConfigError):
    """The script has an error before its training, or uses bash that is not supported here."""


class Word(NamedTuple):
    """A text in the script and its origin, "run.sh:41"."""

    text: str
    origin: str


class Unknown(NamedTuple):
    """A value known only on the script's machine: its --set-env name, origin, and the reason."""

    name: str
    origin: str
    why: str


@dataclass
class Scope:
    """The variables of a script at one line; an array is a list."""

    name: str
    given: dict[str, str]  # from --set-env
    variables: dict[str, Word | list[Word]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    positional: list[Word] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)  # notes on the names in KEPT
    line: int = 0

    def copy(self) -> Scope:
        """Copy the variables; unknowns and used names stay shared."""
        return replace(self, variables=dict(self.variables), exported=set(self.exported))

    @property
    def origin(self) -> str:
        return f"{self.name}:{self.line}"

    def mark(self, name: str, why: str) -> str:
        """Return a mark for an unknown value, or the value if --set-env gives one."""
        if name in self.given:
            self.used.add(name)
            return self.given[name]
        for number, unknown in enumerate(self.unknowns):
            if unknown.name == name and (why == unknown.why or unknown.origin == self.origin):
                return f"\ue000{number}\ue001"
        self.unknowns.append(Unknown(name, self.origin, why))
        return f"\ue000{len(self.unknowns) - 1}\ue001"

    def substituted(self, text: str) -> str:
        """Return the mark of a command substitution, whose output is never known but for `pwd`."""
        if text in ("$(pwd)", "`pwd`"):
            return self.need("PWD")
        return self.mark(" ".join(text.split()), OUTPUT)

    def look_up(self, name: str) -> Word | list[Word] | None:
        """Return a variable's value; None if it is not set."""
        if name.isdigit():
            words = [Word(self.name, self.origin), *self.positional]
            return words[int(name)] if int(name) < len(words) else None
        if name in EVERY_ITEM:
            return self.positional
        if name == "#":
            return Word(str(len(self.positional)), self.origin)
        if name == "BASH_SOURCE":
            return [Word(self.name, self.origin)]
        if name in self.variables:
            return self.variables[name]
        if name in self.given:
            self.used.add(name)
            return Word(self.given[name], self.origin)
        if name in KEPT:
            self.kept.setdefault(name, f"{self.origin}: ${name} is replaced by {KEPT[name]}")
            return Word(KEPT[name], self.origin)
        return None

    def text_of(self, name: str, index: str = "0") -> str | None:
        """Return the text of a variable or of one array item; None if it is not set."""
        value = self.look_up(name)
        if isinstance(value, Word) and MARK.search(value.text):
            return value.text
        items = [value] if isinstance(value, Word) else value or []
        try:
            return items[int(index)].text
        except (IndexError, ValueError):
            return None

    def need(self, name: str) -> str:
        """Return the text of a variable; a mark if it is not set."""
        text = self.text_of(name)
        return self.mark(name, UNSET) if text is None else text

    def assign(self, name: str, text: str) -> None:
        """Set a variable; the first item, if it is an array."""
        word, value = Word(text, self.origin), self.variables.get(name)
        self.variables[name] = [word, *value[1:]] if isinstance(value, list) else word


def marks_of(text: str) -> str:
    """Return only the marks in a text, to mark a value computed from it."""
    return "".join(f"\ue000{number}\ue001" for number in dict.fromkeys(MARK.findall(text)))


def shown(text: str, unknowns: list[Unknown]) -> str:
    """Return a text for display, with unknowns shown by name."""

    def name_of(match: re.Match[str]) -> str:
        name = unknowns[int(match[1])].name
        return f"${{{name}}}" if re.fullmatch(r"\w+", name) else name

    return MARK.sub(name_of, text)
