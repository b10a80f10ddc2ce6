"""Tables of another trainer's keys: what each means here, and its name in each version.

`interop/keys/TRAINER.yaml` has `trainer`, `versions` (oldest first) and `sections`, each a title
and rows. A key of one section in `aliases` may be in any of the others. `ignores_unknown` marks a
trainer that silently ignores unknown keys. A row:

    key      newest name, or a list of keys; `a.b.*` is `a.b` and everything below it, any other *
             matches any text
    in       the version that has the name; absent: all
    addition versions that accept the name although their default configuration lacks it
    old      other names, each with its version
    fate     taken when `ours` is set; else default, other-stage, meaningless, unsupported or
             ignored-by-trainer
    only     values for which the fate applies; others are unsupported
    ignored  versions in which the trainer never reads the key
    when     their switch, or `{key: value}`; while it is off, they do not read the key
    without  our value while it is off
    ours     our key, or a list of them
    values   map of their values to ours
    convert  name of a function in interop/conversions, where `values` is not enough
    unset    what applies here if their value means none
    default  their default value; or `{version: value}`
    change   a sentence on how the unit changes
    reason   why the fate is what it is
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from interop import ForeignConfigError

Fate = Literal[
    "taken",
    "default",
    "other-stage",
    "meaningless",
    "unsupported",
    "ignored-by-trainer",
    "misspelt",
    "contradicting",
]
BLOCKING = ("unsupported", "misspelt", "contradicting")  # stop an import unless allowed
TRAINERS = ("verl", "mindspeed-rl")


@dataclass(frozen=True)
class Row:
    """One key of another trainer, or a family of keys; the module docstring explains the fields."""

    key: str
    section: str
    fate: Fate
    versions: frozenset[str]
    additions: frozenset[str]
    old: Mapping[str, frozenset[str]]
    ignored: frozenset[str]
    defaults: Mapping[str, Any]  # by version; empty if it has none
    ours: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    only: tuple[Any, ...] | None = None
    when: str | Mapping[str, str] | None = None
    without: Any = None
    convert: str | None = None
    unset: str = ""
    change: str = ""
    reason: str = ""

    @property
    def is_family(self) -> bool:
        """True if the row matches several keys."""
        return "*" in self.key

    def below(self, key: str) -> str:
        """Return the part of a key below a family `a.b.*`, by any of the family's names."""
        stems = (name.removesuffix("*") for name in self.names() if name.endswith(".*"))
        return next((key.removeprefix(stem) for stem in stems if key.startswith(stem)), "")

    def names(self, version: str | None = None) -> list[str]:
        """Return the key's names in a version, newest first; without a version, all names."""
        own = [self.key] if version is None or version in self.versions | self.additions else []
        return own + [name for name, held in self.old.items() if version is None or version in held]


@dataclass(frozen=True)
class Table:
    """All keys of a trainer."""

    trainer: str
    versions: tuple[str, ...]
    rows: tuple[Row, ...]
    ignores_unknown: bool = False

    @property
    def newest(self) -> str:
        """The newest version in the table."""
        return self.versions[-1]

    def require_version(self, version: str) -> str:
        """Return the table's version with the same minor version, or the newest for a newer one.

        Raises ForeignConfigError for any other.
        """
        minor = _minor(version)
        for known in self.versions:
            if _minor(known) == minor:
                return known
        if minor > _minor(self.newest):
            return self.newest
        raise ForeignConfigError(
            f"{self.trainer} {version} is not supported; use one of {', '.join(self.versions)}"
        )

    def find(self, name: str, version: str | None = None) -> Row | None:
        """Return the row of a name in one or any version: an exact one, else the longest family."""
        for row in self._exact.get(name, ()):
            if name in row.names(version):
                return row
        for pattern, expression, row in self._families:
            if expression.fullmatch(name) and pattern in row.names(version):
                return row
        return None

    def resolve(self, name: str, version: str) -> Row | None:
        """Return the row of a name: exact in another version before a family of this one."""
        rows = self._exact.get(name, ())
        exact = [row for row in rows if name in row.names(version)] or list(rows)
        return exact[0] if exact else self.find(name, version) or self.find(name)

    def versions_of(self, name: str) -> list[str]:
        """Return the versions that have a name, oldest first."""
        rows = self._exact.get(name)
        if rows:
            return [each for each in self.versions if any(name in row.names(each) for row in rows)]
        return [version for version in self.versions if self.find(name, version) is not None]

    def group_of(self, name: str, value: Any) -> str | None:
        """Return the Hydra config group that an override selects from; None if it sets a key.

        `group@place=file` and `folder/group=file` do; so does `section=file`, since a section
        cannot hold text.
        """
        group = name.partition("@")[0]
        below = (known for known in self._exact if known.startswith(f"{group}."))
        is_section = isinstance(value, str) and any(below)
        return group if group != name or "/" in group or is_section else None

    def nearest(self, name: str) -> str | None:
        """Return the closest known name, first among those with the same last part, or None."""
        leaf = name.rpartition(".")[2]
        same_leaf = [known for known in self._exact if known.rpartition(".")[2] == leaf]
        for candidates, cutoff in ((same_leaf, 0.6), (list(self._exact), 0.8)):
            if close := difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff):
                return close[0]
        return None

    @functools.cached_property
    def sections(self) -> set[str]:
        """The first parts of all keys."""
        return {name.partition(".")[0] for row in self.rows for name in row.names()}

    @functools.cached_property
    def _exact(self) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            for name in row.names():
                if "*" not in name:
                    rows.setdefault(name, []).append(row)
        return rows

    @functools.cached_property
    def _families(self) -> list[tuple[str, re.Pattern[str], Row]]:
        named = [(name, row) for row in self.rows for name in row.names() if "*" in name]
        found = [(name, _expression(name), row) for name, row in named]
        return sorted(found, key=lambda each: -len(each[0].replace("*", "")))


@functools.cache
def load(trainer: str) -> Table:
    """Return the table of one of TRAINERS."""
    import yaml

    file = Path(__file__).parent / "keys" / f"{trainer.replace('-', '_')}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    versions = tuple(str(version) for version in content["versions"])
    rows = tuple(_rows(content["sections"], versions, content.get("aliases", ())))
    return Table(content["trainer"], versions, rows, content.get("ignores_unknown", False))


def _rows(
    sections: Sequence[Mapping[str, Any]], versions: tuple[str, ...], aliases: Sequence[str]
) -> Iterator[Row]:
    """Yield a row for each key, with its names in all alias sections."""
    for section in sections:
        for fields in section["rows"]:
            for key in fields["key"] if isinstance(fields["key"], list) else [fields["key"]]:
                names = {key: fields.get("in", "-"), **fields.get("old", {})}
                for name, held in list(names.items()):
                    first, _, rest = name.partition(".")
                    names |= {f"{each}.{rest}": held for each in aliases if first in aliases}
                del names[key]
                yield _row({**fields, "key": key, "old": names}, section["title"], versions)


def _row(fields: dict[str, Any], section: str, versions: tuple[str, ...]) -> Row:
    def held(text: str) -> frozenset[str]:
        return frozenset(versions) if text == "-" else frozenset({text} & {*versions})

    def listed(name: str) -> tuple[Any, ...]:
        value = fields.get(name, ())
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    default = fields.get("default")
    if not (isinstance(default, dict) and default and default.keys() <= {*versions}):
        default = dict.fromkeys(versions if "default" in fields else (), default)
    return Row(
        key=fields["key"],
        section=section,
        fate=fields.get("fate", "taken"),
        versions=held(fields.get("in", "" if "addition" in fields else "-")),
        additions=held(fields.get("addition", "")),
        old={name: held(version) for name, version in fields["old"].items()},
        ignored=held(fields.get("ignored", "")),
        defaults=default,
        ours=listed("ours"),
        only=listed("only") if "only" in fields else None,
        **{
            name: fields[name]
            for name in ("values", "when", "without", "convert", "unset", "change", "reason")
            if name in fields
        },
    )


def _expression(pattern: str) -> re.Pattern[str]:
    below = pattern.endswith(".*")
    text = re.escape(pattern.removesuffix(".*") if below else pattern).replace(r"\*", ".*")
    return re.compile(text + r"(\..*)?" if below else text)


def _minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
