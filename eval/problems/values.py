"""Texts and chats in the values of a row, however they are stored."""

from __future__ import annotations

import ast
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from eval.problems.prompts import IMAGE, Message

MEDIA = "a video or a sound, although only texts and pictures are read"
_MEDIA = re.compile(r"<(?:video|audio)(?:_\d+)?>|<\|video_\w+\|>")
_FOREIGN = re.compile(r"<image_\d+>|<\|(?:image|vision)_\w+\|>")
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


def num_places(text: str) -> int:
    """Return how many pictures a text has places for. Raises Unusable for other placeholders."""
    if _MEDIA.search(text):
        raise Unusable(MEDIA)
    if found := _FOREIGN.search(text):
        raise Unusable(f"{found[0]} in its text; write {IMAGE} for a picture")
    return text.count(IMAGE)


def images_in(row: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return the pictures in these columns, each as the row holds it: bytes, a path or a URL."""
    values = [parsed(row[name]) for name in names if not is_missing(row.get(name))]
    listed = [one if isinstance(one, list | tuple) else [one] for one in values]
    return [image for images in listed for image in images]


def chat_of(value: Any) -> tuple[Message, ...] | None:
    """Parse a list of {role, content} or {from, value}, or its text. None if it is none.

    A chat that ends blank is none either. A part that is a picture becomes `<image>`. Raises
    Unusable for other media.
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
        value = "".join(map(_text_of_part, value))
    return value if isinstance(value, str) else None


def _text_of_part(part: Mapping[str, Any]) -> str:
    kind = str(part.get("type", "text"))
    if kind in ("image", "image_url"):
        return IMAGE
    if "text" not in kind:
        raise Unusable(MEDIA)
    return str(part.get("text") or "")


def images_in_chat(value: Any) -> list[Any]:
    """Return the pictures that a chat holds itself, as `{image: ...}` or `{image_url: {url}}`."""
    contents = [message.get("content") for message in parsed(value)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    held = [part.get("image_url", part.get("image")) for part in parts if isinstance(part, Mapping)]
    urls = [one.get("url", one) if isinstance(one, Mapping) else one for one in held]
    return [one for one in urls if not is_missing(one)]
