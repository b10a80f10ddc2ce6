"""Responses as text: shortened for messages."""

from __future__ import annotations

SHOWN_CHARACTERS = 240


def shortened(text: str, num_characters: int = SHOWN_CHARACTERS) -> str:
    """Return the text, or its first third and its end with `...` between them."""
    if len(text) <= num_characters:
        return text
    num_first = num_characters // 3
    return f"{text[:num_first]} ... {text[num_first - num_characters :]}"
