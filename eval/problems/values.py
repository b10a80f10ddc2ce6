"""Texts and chats in the values of a row, however they are stored."""

from __future__ import annotations

import ast
import datetime
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from eval.problems.prompts import Message

PICTURE = "a picture, although training and evaluation read text only"
_PICTURES = re.compile(r"<(?:image|video|audio)(?:_\d+)?>|<\|(?:image|video|vision)_\w+\|>")
_TEXT_KEYS = ("ground_truth", "answer", "text", "content", "value")
_ABOUT_TEXT = {"style", "type", "format", "role", "lang", "language", "answer_start"}
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# `["5"]` or `{"value": "5"}`, but not `[5]`, which may be an answer
_SPELT_TEXTS = re.compile(
    rf"""\s*(?:\[\s*["']|\{{.*?["'](?:{"|".join(_TEXT_KEYS)})["']\s*:)""", re.DOTALL
)
_NUMPY = re.compile(r"array\(((?:\[.*?\]))(?:,\s*dtype=\w+)?\)", re.DOTALL)
_NUMPY_TEXTS = re.compile(r"""(['"])\s+(?=['"])""")


class Unusable(ValueError):
    """A row is not a problem. The message gives the reason without the row's content."""


def text_in(value: Any, name: str = "value") -> str | None:
    """Return a value as text; None if it is missing, blank or not a number.

    A list or an object that holds one text is that text. Raises Unusable for any other, so that no
    part of a value is lost, such as its unit.
    """
    if isinstance(value, str) and not _SPELT_TEXTS.match(value):
        return value if value.strip() else None
    value = parsed(value)
    if isinstance(value, Mapping):
        held = [key for key, one in value.items() if key not in _ABOUT_TEXT and not is_missing(one)]
        if not held:
            return None
        if len(held) > 1 or held[0] not in _TEXT_KEYS or isinstance(value[held[0]], Mapping):
            raise Unusable(f"an object with {', '.join(map(str, held))} as {name}")
        return text_in(value[held[0]], name)
    if isinstance(value, list | tuple):
        texts = dict.fromkeys(filter(None, (text_in(one, name) for one in value)))
        if len(texts) > 1:
            raise Unusable(f"a list of {len(texts)} different values as {name}")
        return next(iter(texts), None)
    if is_missing(value):
        return None
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return format(Decimal(str(value)), "f").removesuffix(".0")
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    if not isinstance(value, int | str | datetime.date):
        raise Unusable(f"a value of type {type(value).__name__} as {name}")
    return str(value)


def parsed(value: Any) -> Any:
    """Return the list or object that a text spells in JSON or Python, else the value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        text = _NUMPY_TEXTS.sub(r"\1, ", _NUMPY.sub(r"\1", value)).strip()
    try:
        spelt = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return spelt if isinstance(spelt, list | dict) else value


def is_missing(value: Any) -> bool:
    """True for None, NaN, blank text, and lists and objects of nothing else."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(is_missing, value.values() if isinstance(value, Mapping) else value))
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def require_no_picture(text: str) -> None:
    """Raise Unusable if a text has a placeholder for a picture."""
    if _PICTURES.search(text):
        raise Unusable(PICTURE)


def chat_of(value: Any) -> tuple[Message, ...] | None:
    """Parse a list of {role, content} or {from, value}, or its text. None if it is none.

    A chat that ends blank is none either. Raises Unusable for a content with pictures.
    """
    value = parsed(value)
    if not isinstance(value, list) or not value or not all(isinstance(m, Mapping) for m in value):
        return None
    roles = [message.get("role") or message.get("from") for message in value]
    contents = [_content(message.get("content", message.get("value"))) for message in value]
    if not all(isinstance(role, str) for role in roles) or None in contents:
        return None
    if roles[-1] in ("assistant", "gpt") and not str(contents[-1]).strip():
        roles, contents = roles[:-1], contents[:-1]  # a place for the answer
    if not contents or not str(contents[-1]).strip():
        return None
    return tuple(
        {"role": _ROLES.get(str(role), str(role)), "content": str(content)}
        for role, content in zip(roles, contents, strict=True)
    )


def _content(value: Any) -> str | None:
    """Return the text of a message, or of its parts."""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        if any("text" not in part.get("type", "text") for part in value):
            raise Unusable(PICTURE)
        value = "".join(str(part.get("text") or "") for part in value)
    return value if isinstance(value, str) else None
