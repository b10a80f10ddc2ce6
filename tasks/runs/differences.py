"""What differs between two trees of keys, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from durable import UNSET, differences

MAX_VALUE_CHARS = 40
NUM_SHARED_CHARS = 15  # of these before the place where two long values begin to differ
SECRET_KEYS = ("flow.webhook.url",)  # whoever knows the address may write to the chat


@dataclass(frozen=True)
class Difference:
    """One key with its two values, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        places = range(min(len(self.before), len(self.after)))
        shared = next((place for place in places if self.before[place] != self.after[place]), len(places))
        return f"{self.key} {_shortened(self.before, shared)} -> {_shortened(self.after, shared)}"


def differences_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Keys, dotted, with different values, in the order of `after`; those that only `before` has come last."""
    return [Difference(key, _text(key, old), _text(key, new)) for key, old, new in differences(before, after)]


def _text(key: str, value: Any) -> str:
    if value is UNSET:
        return "(unset)"
    if key in SECRET_KEYS and value is not None:
        return "(secret)"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _shortened(text: str, shared: int) -> str:
    """The part of a long text where it begins to differ from another one, after `shared` characters."""
    if len(text) <= MAX_VALUE_CHARS:
        return text
    start = max(0, shared - NUM_SHARED_CHARS)
    shown = ("..." if start else "") + text[start:]
    return shown if len(shown) <= MAX_VALUE_CHARS else shown[: MAX_VALUE_CHARS - 3] + "..."
