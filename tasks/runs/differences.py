"""What differs between two trees of keys, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_VALUE_CHARS = 40
UNSET = object()


@dataclass(frozen=True)
class Difference:
    """One key with its two values, as text."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def differences_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Keys, dotted, whose values differ, in the order of `after`; those that only `before` has come last."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    keys = [*new, *(key for key in old if key not in new)]
    return [
        Difference(key, _shown(old.get(key, UNSET)), _shown(new.get(key, UNSET)))
        for key in keys
        if old.get(key, UNSET) != new.get(key, UNSET)
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is UNSET:
        return "(unset)"
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
