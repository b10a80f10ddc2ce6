"""Account for every setting of another trainer's configuration: none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from interop import conversions, conversions_mindspeed
from interop.foreign_config import (
    ForeignConfig,
    Outcome,
    Setting,
    default,
    meaningless,
    unsupported,
)
from interop.table import BLOCKING, Fate, Row, Table, load

_CONVERSIONS = {"verl": vars(conversions), "mindspeed-rl": vars(conversions_mindspeed)}


@dataclass(frozen=True)
class Entry:
    """One setting and its fate: `ours` are our keys and values, `name` is the key's newest name."""

    setting: Setting
    fate: Fate
    ours: dict[str, Any]
    note: str
    name: str


@dataclass(frozen=True)
class Account:
    """Every setting with its fate, and the trainer's defaults for keys that are not set."""

    trainer: str
    version: str
    entries: tuple[Entry, ...]
    implied: tuple[Entry, ...]

    def blocking(self, allowed: Iterable[str] = ()) -> list[Entry]:
        """Return settings and defaults that stop an import, except for allowed keys."""
        entries = [each for each in (*self.entries, *self.implied) if each.fate in BLOCKING]
        return [each for each in entries if not {each.setting.key, each.name} & {*allowed}]


def account_of(
    settings: Sequence[Setting],
    trainer: str,
    version: str | None = None,
    facts: Mapping[str, int] | None = None,
) -> Account:
    """Return the account of a configuration. If a key is set twice, the last value wins, as in
    Hydra.

    Without a version, takes the newest one that has the most keys. `facts` may give
    `num_train_rows`, which converts epochs to steps. Raises ForeignConfigError for an unknown
    version.
    """
    table = load(trainer)
    flat = list(split_sections(settings, table))
    version = _version_of(flat, table) if version is None else table.require_version(version)
    rows = [table.resolve(setting.key, version) for setting in flat]
    named = [
        (each, row, each.key if row is None or row.is_family else row.key)
        for each, row in zip(flat, rows, strict=True)
    ]
    last = {name: setting for setting, _, name in named}
    values = {name: setting.value for name, setting in last.items()}
    config = ForeignConfig(table, version, values, facts or {})
    entries = [_entry(setting, row, name, last[name], config) for setting, row, name in named]
    entries = _without_contradictions(entries)
    set_keys = {ours for entry in entries for ours in entry.ours}
    return Account(trainer, version, tuple(entries), tuple(_implied(config, set_keys)))


def outcome_of(row: Row, key: str, value: Any, config: ForeignConfig) -> Outcome:
    """Convert a value of a row's key; for a family, the key determines ours."""
    if config.version in row.ignored:
        return Outcome("ignored-by-trainer", {}, row.reason)
    is_section = key in [name.removesuffix(".*") for name in row.names() if name.endswith(".*")]
    if is_section and (value is None or value == {}):
        return default("empty")
    if row.when is not None and (why := _off(row.when, config)):
        off = Outcome("taken", dict.fromkeys(row.ours, row.without), row.change)
        return meaningless(why) if row.without is None else off
    is_unset = value is None and None not in row.values and bool(row.ours)
    if is_unset and (row.unset or row.convert is None):
        return default(row.unset or "unset")
    if row.values and value not in list(row.values):
        known = ", ".join("null" if each is None else str(each) for each in row.values)
        return unsupported(f"known are {known}. {row.reason}".strip())
    value = row.values[value] if row.values else value
    if row.convert is not None:
        return _converted(row, row.convert, value, config)
    if row.only is not None and value not in row.only:
        return unsupported(row.reason)
    if not row.ours:
        return Outcome(row.fate, {}, row.reason)
    ours = {name.removesuffix("*") + row.below(key): value for name in row.ours}
    return Outcome("taken", ours, row.change)


def _off(when: str | Mapping[str, str], config: ForeignConfig) -> str:
    """Return why a row's switch is off; "" if it is on."""
    if isinstance(when, str):
        return "" if config[when] else f"{when} is {'not set' if config[when] is None else 'off'}"
    [(key, value)] = when.items()
    return "" if config[key] == value else f"{key} is {config[key]}"


def _converted(row: Row, name: str, value: Any, config: ForeignConfig) -> Outcome:
    try:
        found = _CONVERSIONS[config.table.trainer][name](value, config)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        return unsupported(f"cannot be converted with the keys it depends on: {error}")
    if not isinstance(found, Outcome):
        found = Outcome("taken", dict.fromkeys(row.ours, found))
    notes = {"taken": row.change, "default": row.unset}
    return replace(found, note=found.note or notes.get(found.fate, ""))


def split_sections(settings: Iterable[Setting], table: Table) -> Iterator[Setting]:
    """Yield one setting per key; a section set as a whole is split into its keys."""
    for key, value, origin in settings:
        row = table.find(key)
        if isinstance(value, dict) and value and (row is None or row.is_family):
            below = [Setting(f"{key}.{name}", child, origin) for name, child in value.items()]
            yield from split_sections(below, table)
        else:
            yield Setting(key, value, origin)


def _version_of(settings: Sequence[Setting], table: Table) -> str:
    """Return the newest of the versions that have the most keys."""
    held = [set(table.versions_of(name)) for name in {setting.key for setting in settings}]
    return max(
        table.versions,
        key=lambda each: (sum(each in of_key for of_key in held), table.versions.index(each)),
    )


def _entry(
    setting: Setting, row: Row | None, name: str, last: Setting, config: ForeignConfig
) -> Entry:
    if row is None:
        outcome = _unknown(setting, config.table)
    elif setting != last and setting.value != last.value:
        fate: Fate = "meaningless" if setting.key == last.key else "contradicting"
        outcome = Outcome(fate, {}, f"{last.origin} sets {last.key}={last.value}")
    else:
        value = config[name] if str(setting.value).startswith("${") else setting.value
        outcome = outcome_of(row, setting.key, value, config)
        held = config.table.versions_of(setting.key)
        if config.version not in held:
            of_this = row.names(config.version)
            instead = f", which calls it {of_this[0]}" if of_this else ""
            where = f"exists in {' and '.join(held)}, not in {config.version}{instead}."
            outcome = replace(outcome, note=f"{where} {outcome.note}".strip())
    return Entry(setting, outcome.fate, outcome.ours, outcome.note, name)


def _unknown(setting: Setting, table: Table) -> Outcome:
    if (group := table.group_of(setting.key, setting.value)) is not None:
        return unsupported(
            f"selects a file from Hydra's group {group}, which is not available; import that "
            "file with the script, or write out its keys instead"
        )
    near = table.nearest(setting.key)
    if near is None and table.ignores_unknown:
        note = f"{table.trainer} silently ignores unknown keys, and this is one"
        return Outcome("ignored-by-trainer", {}, note)
    hint = f"did you mean {near}?" if near else f"no version of {table.trainer} has it"
    return Outcome("misspelt", {}, hint)


def _without_contradictions(entries: list[Entry]) -> list[Entry]:
    """Return the entries, marking as `contradicting` those that disagree on a key of ours."""
    against: dict[str, str] = {}
    first: dict[str, Entry] = {}
    for entry in entries:
        for name, value in entry.ours.items():
            other = first.setdefault(name, entry)
            for one, by in ((entry, other), (other, entry)) if other.ours[name] != value else ():
                why = f"{name} would be {one.ours[name]}, but {by.name} makes it {by.ours[name]}"
                against.setdefault(one.name, why)
    return [
        replace(entry, fate="contradicting", ours={}, note=against[entry.name])
        if entry.name in against and entry.fate != "misspelt"
        else entry
        for entry in entries
    ]


def _implied(config: ForeignConfig, set_keys: set[str]) -> Iterator[Entry]:
    """Yield the defaults that set a key of ours beyond `set_keys`, or stop an import."""
    origin = f"default of {config.table.trainer} {config.version}"
    for row in config.table.rows:
        has_default = config.version in row.defaults
        is_ours = row.ours and row.names(config.version) and not row.is_family
        if has_default and is_ours and row.key not in config.values:
            value = config[row.key]
            outcome = outcome_of(row, row.key, value, config)
            if outcome.fate in BLOCKING or outcome.ours.keys() - set_keys:
                setting = Setting(row.key, value, origin)
                yield Entry(setting, outcome.fate, outcome.ours, outcome.note, row.key)
