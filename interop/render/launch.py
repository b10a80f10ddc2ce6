"""How another trainer is started, and Hydra's form of overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/~][\w./@+-]*")
_WORDS = ("null", "true", "false", "nan", "inf")  # Hydra reads these as other types


@dataclass(frozen=True)
class Places:
    """Files and folders of another trainer's run, as its processes see them."""

    folder: Path  # where Launch.files are written
    model: Path
    train_rows: Path
    held_out_rows: Path
    checkpoints: Path


@dataclass(frozen=True)
class Launch:
    """How another trainer is started: interpreter arguments, environment, files to write."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]  # text by file name in Places.folder
    overrides: tuple[str, ...]  # the ones in argv
    covered: frozenset[str]  # our keys that the launch expresses


def override(key: str, value: Any, is_added: bool = False) -> str:
    """Return `key=value`, or `++key=value` for a key that the defaults may not have."""
    return f"{'++' * is_added}{key}={spelt(value)}"


def spelt(value: Any) -> str:
    """Format a value in Hydra's grammar: `null`, `True`, `1e-06`, a word, a quoted text, `[a,b]` or
    `{a:b}`.
    """
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return (
            "{" + ",".join(f"{spelt(name)}:{spelt(child)}" for name, child in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(spelt, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes before a quote count twice
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{trailing * chr(92)}'"


def shell_value(value: str) -> str:
    """Quote a value of external.env for a shell; $NAME refers to a variable."""
    return f'"{value}"' if re.fullmatch(r"\$[A-Za-z_]\w*", value, re.ASCII) else shlex.quote(value)
