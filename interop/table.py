"""Tables of another trainer's keys: what each means here, and its name in each version.

`interop/keys/TRAINER.yaml` has `trainer`, `versions` (oldest first) and `sections`, each a title
and rows. `like` names a table whose other rows apply too. Keys of one section in `aliases` may be
in any of the others. `ignores_unknown` marks a trainer that silently ignores unknown keys. A row:

    key      newest name, or a list of keys; `a.b.*` is `a.b` and everything below it, any other * matches any text
    in       versions that have the name: `0.6.0-0.7.0`, `0.8.0-`, several with commas; absent: all
    addition versions that accept the name although their default configuration lacks it
    old      other names, each with its versions
    fate     taken when `ours` is set; else default, other-stage, meaningless, unsupported or ignored-by-trainer
    only     values for which the fate applies; others are unsupported
    ignored  versions in which the trainer never reads the key
    ours     our key, or a list of them
    values   map of their values to ours
    convert  name of a conversion function, where `values` is not enough
    default  their default value; or `{versions: value}`
    change   a sentence on how the unit changes
    reason   why the fate is what it is
    export   constant value to export, whatever our keys say
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
BLOCKING = (
    "unsupported",
    "misspelt",
    "contradicting",
)  # an import stops at these unless they are allowed
TRAINERS = ("verl", "mindspeed-rl", "mindspeed-mm")


class _NotSet:
    def __repr__(self) -> str:
        return "NOT_SET"


NOT_SET: Any = _NotSet()  # for a value that is not set, or that a trainer cannot express


@dataclass(frozen=True)
class Row:
    """One key of another trainer, or a family of keys; the module docstring explains the fields."""

    key: str
    section: str
    fate: Fate
    versions: frozenset[str]
    additions: frozenset[str]
    old: Mapping[str, frozenset[str]]
    ours: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    only: tuple[Any, ...] | None = None
    ignored: frozenset[str] = frozenset()
    convert: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    change: str = ""
    reason: str = ""
    export: Any = NOT_SET

    @property
    def is_family(self) -> bool:
        """True if the row matches several keys."""
        return "*" in self.key

    def names(self, version: str | None = None) -> list[str]:
        """Return the key's names in a version, newest first; without a version, all names."""
        own = [self.key] if version is None or version in self.versions | self.additions else []
        return own + [name for name, held in self.old.items() if version is None or version in held]

    def default(self, version: str) -> Any:
        """Return the trainer's default in a version; NOT_SET if the table does not have it."""
        return self.defaults.get(version, NOT_SET)


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
        """Return the table's version to use for a version: itself, else the newest older one.

        Raises ForeignConfigError for one older than all, or for something that is not a version.
        """
        if version in self.versions:
            return version
        numbers = _numbers(version)
        older = [each for each in self.versions if numbers and _numbers(each) <= numbers]
        if not older:
            raise ForeignConfigError(
                f"{self.trainer} {version} is not supported; use one of {', '.join(self.versions)}"
            )
        return older[-1]

    def find(self, name: str, version: str | None = None) -> Row | None:
        """Return the row of a name in one or any version; exact names before families, longest
        family first.
        """
        exact = [row for row in self._exact.get(name, ()) if name in row.names(version)]
        if exact:
            return exact[0]
        for pattern, expression, row in self._families:
            if expression.fullmatch(name) and pattern in row.names(version):
                return row
        return None

    def resolve(self, name: str, version: str) -> Row | None:
        """Return the row of a name as written: an exact name of another version before a family of
        this one.
        """
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
        is_section = isinstance(value, str) and group in self._sections
        return group if group != name or "/" in group or is_section else None

    def nearest(self, name: str) -> str | None:
        """Return the closest known name, first among those with the same last part; None if none is
        close.
        """
        leaf = name.rpartition(".")[2]
        same_leaf = [known for known in self._exact if known.rpartition(".")[2] == leaf]
        for candidates, cutoff in ((same_leaf, 0.6), (list(self._exact), 0.8)):
            close = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
            if close:
                return close[0]
        return None

    @functools.cached_property
    def _exact(self) -> dict[str, list[Row]]:
        rows: dict[str, list[Row]] = {}
        for row in self.rows:
            for name in row.names():
                if "*" not in name:
                    rows.setdefault(name, []).append(row)
        return rows

    @functools.cached_property
    def _sections(self) -> frozenset[str]:
        parts = (known.split(".") for known in self._exact)
        return frozenset(
            ".".join(names[:depth]) for names in parts for depth in range(1, len(names))
        )

    @functools.cached_property
    def _families(self) -> list[tuple[str, re.Pattern[str], Row]]:
        found = [
            (name, _expression(name), row)
            for row in self.rows
            for name in row.names()
            if "*" in name
        ]
        return sorted(found, key=lambda each: -len(each[0].replace("*", "")))


@functools.cache
def load(trainer: str) -> Table:
    """Return the table of `verl`, `mindspeed-rl` or `mindspeed-mm`; raises ForeignConfigError for
    any other.
    """
    if trainer not in TRAINERS:
        raise ForeignConfigError(f"unknown trainer {trainer}; known are {', '.join(TRAINERS)}")
    return read(content_of(trainer.replace("-", "_")))


def content_of(name: str) -> dict[str, Any]:
    """Load a table's YAML file, with the sections of its base table under `like`."""
    import yaml

    file = Path(__file__).parent / "keys" / f"{name}.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    return (
        {**content, "like": content_of(content["like"])["sections"]}
        if "like" in content
        else content
    )


def read(content: Mapping[str, Any]) -> Table:
    """Build a table from a YAML file's content."""
    versions, aliases = (
        tuple(str(version) for version in content["versions"]),
        content.get("aliases", ()),
    )
    rows = list(_rows(content["sections"], versions, aliases))
    own = {row.key for row in rows}
    rows += (row for row in _rows(content.get("like", ()), versions, aliases) if row.key not in own)
    return Table(content["trainer"], versions, tuple(rows), content.get("ignores_unknown", False))


def _rows(
    sections: Sequence[Mapping[str, Any]], versions: tuple[str, ...], aliases: Sequence[str]
) -> Iterator[Row]:
    """Yield a row for each key, with its names in all alias sections."""
    for section in sections:
        for fields in section["rows"]:
            for key in fields["key"] if isinstance(fields["key"], list) else [fields["key"]]:
                names = {key: fields.get("in", "-"), **fields.get("old", {})}
                old = dict(fields.get("old", {})) | _elsewhere(names, aliases)
                yield _row({**fields, "key": key, "old": old}, section["title"], versions)


def _elsewhere(names: Mapping[str, Any], aliases: Sequence[str]) -> dict[str, Any]:
    """Return the names in the other alias sections, with their versions."""
    parts = {name: name.partition(".") for name in names}
    return {
        f"{other}.{rest}": names[name]
        for name, (section, _, rest) in parts.items()
        for other in aliases
        if section in aliases and other != section
    }


def _row(fields: dict[str, Any], section: str, versions: tuple[str, ...]) -> Row:
    ours = fields.get("ours", ())
    ours = (ours,) if isinstance(ours, str) else tuple(ours)
    addition = fields.get("addition")
    only = fields.get("only")
    return Row(
        key=fields["key"],
        section=section,
        fate=fields.get("fate", "taken"),
        versions=_range("-" if addition is None else "", versions, fields.get("in")),
        additions=_range("", versions, addition),
        old={name: _range("-", versions, held) for name, held in fields.get("old", {}).items()},
        ours=ours,
        values=fields.get("values", {}),
        only=None if only is None else tuple(only if isinstance(only, list) else [only]),
        ignored=_range("", versions, fields.get("ignored")),
        convert=fields.get("convert"),
        defaults=dict(_defaults(fields.get("default", NOT_SET), versions)),
        change=fields.get("change", ""),
        reason=fields.get("reason", ""),
        export=fields.get("export", NOT_SET),
    )


def _defaults(value: Any, versions: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    is_by_version = (
        isinstance(value, dict) and value and all(re.match(r"\d|-$", str(name)) for name in value)
    )
    by_range = value if is_by_version else {"-": value}
    for held, of_range in by_range.items():
        for version in _range("-", versions, held) if of_range is not NOT_SET else ():
            yield version, of_range


def _range(absent: str, versions: tuple[str, ...], text: Any) -> frozenset[str]:
    """Expand `0.6.0-0.7.0, 0.9.1`, `0.8.0-`, or `-` for all versions."""
    held: set[str] = set()
    for part in str(absent if text is None else text).replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not part:
            continue
        start = versions.index(first) if first else 0
        stop = versions.index(last) if last else (len(versions) - 1 if dash else start)
        held.update(versions[start : stop + 1])
    return frozenset(held)


def _expression(pattern: str) -> re.Pattern[str]:
    below = pattern.endswith(".*")
    text = re.escape(pattern.removesuffix(".*") if below else pattern).replace(r"\*", ".*")
    return re.compile(text + r"(\..*)?" if below else text)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()
