"""Settings as Hydra overrides: how keys and values are spelt on a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/~][\w./@+-]*")
_WORDS = ("null", "true", "false", "nan", "inf")  # which Hydra reads as values of another type


def override(key: str, value: Any, is_added: bool = False) -> str:
    """`key=value`, or `++key=value` for a key that the default configuration may lack."""
    return f"{'++' * is_added}{key}={spelt(value)}"


def spelt(value: Any) -> str:
    """A value in Hydra's grammar: `null`, `True`, `1e-06`, a word, a quoted text, `[a,b]` or `{a:b}`."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{spelt(name)}:{spelt(child)}" for name, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelt, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes before a quote count twice
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{trailing * chr(92)}'"
