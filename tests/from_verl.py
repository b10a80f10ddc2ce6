"""Prints docs/from-verl.md (`make from-verl`): verl's keys beside ours, from the table in interop/keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from interop.table import Row, Table, load

_HEAD = """# From verl

Written by `make from-verl` from `interop/keys/verl.yaml`, which a test compares with the configurations in verl's
wheels {first} to {last}.

`dapo import-config run.sh --output configs/mine.yaml` makes a recipe of a whole script and accounts for every key;
`dapo export-config configs/mine.yaml --for verl` goes the other way. A key of verl typed into a recipe, or given
to `dapo config explain`, is answered with ours. What differs although the keys agree: [departures](departures.md).
`train.backend=verl` hands a recipe to verl itself ([backends](backends.md)).

`a.` is `actor_rollout_ref.actor.`, `r.` is `actor_rollout_ref.rollout.`, `f.` is `actor_rollout_ref.ref.`, `m.` is
`actor_rollout_ref.model.`; `x.*` is every key below `x`.
"""
_SHORT = {
    f"actor_rollout_ref.{section}.": f"{letter}."
    for section, letter in (("actor", "a"), ("rollout", "r"), ("ref", "f"), ("model", "m"))
}
_TITLES = {
    "default": "The same here",
    "other-stage": "Said elsewhere",
    "meaningless": "Without a counterpart",
    "unsupported": "Not supported",
    "ignored-by-trainer": "Read nowhere by verl itself",
}


def page() -> str:
    """The page as Markdown: for each section a table of the keys that have ours, and the others by reason."""
    table = load("verl")
    lines = [_HEAD.format(first=table.versions[0], last=table.newest)]
    for section in dict.fromkeys(row.section for row in table.rows):
        rows = [row for row in table.rows if row.section == section]
        lines += [f"## {section}", ""]
        having = [row for row in rows if row.ours]
        if having:
            lines += ["| verl | here | what changes |", "|---|---|---|"]
            lines += [f"| {_names(row)} | {_ours(row)} | {_change(row, table)} |" for row in having]
            lines.append("")
        lines += _others([row for row in rows if not row.ours], table)
    return "\n".join(lines).rstrip() + "\n"


def _others(rows: Sequence[Row], table: Table) -> Iterator[str]:
    for fate, title in _TITLES.items():
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.fate == fate:
                by_reason.setdefault(row.reason, []).append(_names(row) + _only(row) + _ignored(row, table))
        for reason, names in by_reason.items():
            yield f"- {title}: {', '.join(names)}. {reason}"
        if by_reason:
            yield ""


def _names(row: Row) -> str:
    names = [f"`{_short(name)}`" for name in row.names()]
    return names[0] if len(names) == 1 else f"{names[0]} (also {', '.join(names[1:])})"


def _short(name: str) -> str:
    for long, letter in _SHORT.items():
        if name.startswith(long):
            return letter + name.removeprefix(long)
    return name


def _ours(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.ours)


def _ignored(row: Row, table: Table) -> str:
    return f" (read nowhere by verl {_span(row.ignored, table)})" if row.ignored else ""


def _only(row: Row) -> str:
    return f" = {' or '.join(_spelt(value) for value in row.only)}" if row.only is not None else ""


def _spelt(value: object) -> str:
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def _change(row: Row, table: Table) -> str:
    said = [row.change] if row.change else []
    pairs = {theirs: ours for theirs, ours in row.values.items() if theirs != ours}
    said += [f"{_spelt(theirs)} becomes {_spelt(ours)}." for theirs, ours in pairs.items()]
    if row.ignored:
        said.append(f"Read nowhere by verl {_span(row.ignored, table)}.")
    said += [row.reason] if row.reason else []
    return " ".join(said) or "the name"


def _span(versions: frozenset[str], table: Table) -> str:
    held = [version for version in table.versions if version in versions]
    return f"{held[0]} to {held[-1]}" if len(held) > 1 else held[0]


if __name__ == "__main__":
    sys.stdout.write(page())
