"""The metrics of the field by name, and how the console line that holds them is read."""

import re

# One pattern for a name and its number, in our line and in the field's; `step` has no `/`.
NAME_VALUE = re.compile(r"(?:^| - )([\w/@.-]+):(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?= - |$)")


def expand(table: str) -> set[str]:
    """The names in a table of NAME or NAME/{parts}, separated by space."""
    return {name for pattern in table.split() for name in _expand(pattern)}


def _expand(pattern: str) -> list[str]:
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    parts, _, tail = rest.partition("}")
    return [full for part in parts.split(",") for full in _expand(head + part + tail)]
