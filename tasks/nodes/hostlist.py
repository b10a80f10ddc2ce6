"""SLURM's compressed lists of hosts: `a[01-03,7],b5` is a01, a02, a03, a7, b5."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from dapo_core.errors import ConfigError

MAX_HOSTS = 65_536  # SLURM's own bound of a list
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(hosts: str) -> list[str]:
    """The names of a compressed list, in its order; several brackets in a name multiply, the last running fastest.

    Raises ConfigError for what is no such list.
    """
    names = [name for item in _items(hosts) for name in _names(item, hosts)]
    if not names:
        raise ConfigError("the list of hosts is empty")
    return names


def _items(hosts: str) -> Iterator[str]:
    """The parts between commas outside of brackets."""
    item, is_inside = "", False
    for letter in f"{hosts.strip()},":
        is_inside = letter == "[" or (is_inside and letter != "]")
        if letter != "," or is_inside:
            item += letter
            continue
        if item.strip():
            yield item.strip()
        item = ""
    if item:
        raise ConfigError(f"{hosts!r} is no list of hosts: a bracket is not closed")


def _names(item: str, hosts: str) -> Iterator[str]:
    matches = list(_PARTS.finditer(item))
    if "".join(match.group() for match in matches) != item:
        raise ConfigError(
            f"{hosts!r} is no list of hosts: {item!r} has a bracket in brackets, a stray one or a blank"
        )
    parts = [[match[2]] if match[2] else _numbers(match[1], hosts) for match in matches]
    for name in itertools.product(*parts):
        yield "".join(name)


def _numbers(ranges: str, hosts: str) -> list[str]:
    """The numbers of a bracket, with the leading zeros of each range's first."""
    numbers: list[str] = []
    for part in ranges.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            raise ConfigError(f"{hosts!r} is no list of hosts: {part!r} is neither a number nor a range of them")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise ConfigError(f"{hosts!r} is no list of hosts: {part} runs backwards or has more than {MAX_HOSTS}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
