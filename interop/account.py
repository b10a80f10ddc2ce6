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
    nested,
    unsupported,
)
from interop.table import BLOCKING, NOT_SET, Fate, Row, Table, load

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
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

    def of(self, *fates: Fate) -> list[Entry]:
        """Return the settings with one of these fates."""
        return [entry for entry in self.entries if entry.fate in fates]

    def blocking(self, allowed: Iterable[str] = ()) -> list[Entry]:
        """Return settings and defaults that stop an import, except for allowed keys."""
        allowed = set(allowed)
        return [
            entry
            for entry in (*self.entries, *self.implied)
            if entry.fate in BLOCKING and not {entry.setting.key, entry.name} & allowed
        ]

    def tree(self) -> dict[str, Any]:
        """Return our recipe as sections: the trainer's defaults, overridden by what is set."""
        entries = (*self.implied, *self.entries)
        return nested(
            {
                name: value
                for each in entries
                if each.fate == "taken"
                for name, value in each.ours.items()
            }
        )


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
    trainer or version.
    """
    table = load(trainer)
    flat = list(split_sections(settings, table))
    version = _version_of(flat, table) if version is None else table.require_version(version)
    rows = [table.resolve(setting.key, version) for setting in flat]
    names = [_name(setting, row) for setting, row in zip(flat, rows, strict=True)]
    config = ForeignConfig(
        table,
        version,
        {name: each.value for name, each in zip(names, flat, strict=True)},
        facts or {},
    )
    last = {name: setting for name, setting in zip(names, flat, strict=True)}
    entries = [
        _entry(setting, row, name, last[name], config)
        for setting, row, name in zip(flat, rows, names, strict=True)
    ]
    entries = _without_contradictions(entries, config)
    set_keys = {ours for entry in entries for ours in entry.ours}
    implied = [
        entry
        for entry in _implied(config)
        if entry.fate in BLOCKING or not entry.ours.keys() <= set_keys
    ]
    return Account(trainer, version, tuple(entries), tuple(implied))


def outcome_of(row: Row, key: str, value: Any, config: ForeignConfig) -> Outcome:
    """Convert a value of a row's key; for a family, the key determines ours."""
    if config.version in row.ignored:
        return Outcome("ignored-by-trainer", {}, row.reason)
    if row.is_family and (value is None or value == {}) and key == row.key.removesuffix(".*"):
        return default("empty")
    if row.when is not None and not config[row.when]:
        return meaningless(f"{row.when} is off")
    if row.convert is not None:
        return _converted(row, row.convert, value, config)
    if value is None and None not in row.values and row.ours:
        return default("unset")
    if row.values and value not in list(row.values):
        known = ", ".join(str(each) for each in row.values)
        return unsupported(f"known are {known}. {row.reason}".strip())
    if row.only is not None and value not in row.only:
        return unsupported(row.reason)
    if not row.ours:
        return Outcome(row.fate, {}, row.reason)
    value = row.values[value] if row.values else value
    if row.is_family:
        below = key.removeprefix(row.key.removesuffix("*"))
        return Outcome(
            "taken", {name.removesuffix("*") + below: value for name in row.ours}, row.change
        )
    return Outcome("taken", dict.fromkeys(row.ours, value), row.change)


def _converted(row: Row, name: str, value: Any, config: ForeignConfig) -> Outcome:
    try:
        found = _CONVERSIONS[config.table.trainer][name](value, config)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        return unsupported(f"cannot be converted with the keys it depends on: {error}")
    if not isinstance(found, Outcome):
        found = Outcome("taken", dict.fromkeys(row.ours, found))
    return found if found.note or found.fate != "taken" else replace(found, note=row.change)


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


def _name(setting: Setting, row: Row | None) -> str:
    return setting.key if row is None or row.is_family else row.key


def _entry(
    setting: Setting, row: Row | None, name: str, last: Setting, config: ForeignConfig
) -> Entry:
    if row is None:
        if (group := config.table.group_of(setting.key, setting.value)) is not None:
            note = (
                f"selects a file from Hydra's group {group}, which is not available; import that "
                "file with the "
                "script, or write out its keys instead"
            )
            return Entry(setting, "unsupported", {}, note, name)
        near = config.table.nearest(setting.key)
        if near is None and config.table.ignores_unknown:
            note = f"{config.table.trainer} silently ignores unknown keys, and this is one"
            return Entry(setting, "ignored-by-trainer", {}, note, name)
        hint = f"did you mean {near}?" if near else f"no version of {config.table.trainer} has it"
        return Entry(setting, "misspelt", {}, hint, name)
    if setting != last and setting.value != last.value:
        fate: Fate = "meaningless" if setting.key == last.key else "contradicting"
        return Entry(setting, fate, {}, f"{last.origin} sets {last.key}={last.value}", name)
    outcome = outcome_of(
        row, setting.key, config[name] if _is_reference(setting.value) else setting.value, config
    )
    held = config.table.versions_of(setting.key)
    note = outcome.note
    if config.version not in held:
        of_this = row.names(config.version)
        instead = f", which calls it {of_this[0]}" if of_this else ""
        note = f"exists in {' and '.join(held)}, not in {config.version}{instead}. {note}".strip()
    return Entry(setting, outcome.fate, outcome.ours, note, name)


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _without_contradictions(entries: list[Entry], config: ForeignConfig) -> list[Entry]:
    """Return the entries, marking as `contradicting` those that disagree with each other."""
    against = _contradictions(config)
    first: dict[str, Entry] = {}
    for entry in entries:
        for name, value in entry.ours.items():
            other = first.setdefault(name, entry)
            if other.ours[name] != value:
                for one, by in ((entry, other), (other, entry)):
                    against.setdefault(
                        one.name,
                        f"{name} would be {one.ours[name]}, but {by.name} makes it {by.ours[name]}",
                    )
    return [
        replace(entry, fate="contradicting", ours={}, note=against[entry.name])
        if entry.name in against and entry.fate != "misspelt"
        else entry
        for entry in entries
    ]


def _contradictions(config: ForeignConfig) -> dict[str, str]:
    """Return, by key, why a setting contradicts another setting or a default of verl."""
    found: dict[str, str] = {}
    if config.table.trainer == "verl":
        for keys, why in (
            *_algorithm_contradictions(config),
            *_micro_batch_contradictions(config),
            *_batch_contradictions(config),
        ):
            found |= dict.fromkeys(keys, why)
    return found


Contradiction = tuple[tuple[str, ...], str]  # keys, and why


def _algorithm_contradictions(config: ForeignConfig) -> Iterator[Contradiction]:
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if config[in_loss] is True and config[in_reward] is True:
        why = f"{in_loss} and {in_reward} are both on; algorithm.kl.place is either loss or reward"
        yield (in_loss, in_reward), why
    actor, ref, fsdp = f"{ACTOR}.strategy", f"{REF}.strategy", ("fsdp", "fsdp2")
    are_set = config.is_set(actor) and config.is_set(ref)
    if are_set and (config[actor] in fsdp) != (config[ref] in fsdp):
        why = f"{actor}={config[actor]} and {ref}={config[ref]}: policy and reference use the same "
        yield (actor, ref), f"{why}strategy"
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if config[mode] == "resume_path" and config[path] is None:
        yield (mode,), f"resume_path needs {path}, which is not set"


def _micro_batch_contradictions(config: ForeignConfig) -> Iterator[Contradiction]:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    sizes = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size")
    given = [name for name in sizes if config.is_set(name) and config[name] is not None]
    if len(given) == 2:
        yield sizes, f"{given[0]} and {given[1]} are both set; keep one"
        return
    if config[dynamic] is not True:
        return
    if given and config.is_set(dynamic) and not config.is_set(tokens):
        why = f"{dynamic} is on, so {given[0]} is not read and {tokens} applies instead, but it is "
        yield (dynamic, given[0]), f"{why}not set"
        return
    is_megatron = config[f"{ACTOR}.strategy"] == "megatron"
    sharing = "megatron.context" if is_megatron else "ulysses_sequence"
    ranks = config[f"{ACTOR}.{sharing}_parallel_size"] or 1
    lengths = config["data.max_prompt_length"], config["data.max_response_length"]
    numbers = (config[tokens], ranks, *lengths)
    if not config.is_set(tokens) or not all(type(number) is int for number in numbers):
        return
    if config[tokens] * ranks < (longest := sum(lengths)):
        why = (
            f"{config[tokens]} tokens on each of {ranks} ranks hold no sequence of {longest}; set "
        )
        yield (tokens,), f"{why}{-(-longest // ranks)}"


def _batch_contradictions(config: ForeignConfig) -> Iterator[Contradiction]:
    step, mini = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    batch, part = config[step], config[mini]
    keys = tuple(name for name in (step, mini) if config.is_set(name))
    if keys and type(batch) is int and type(part) is int and batch < part:
        yield (
            keys,
            f"{step}={batch} prompts per step are fewer than {mini}={part} per optimizer step",
        )


def _implied(config: ForeignConfig) -> Iterator[Entry]:
    for row in config.table.rows:
        value = row.defaults.get(config.version, NOT_SET)
        if (
            value is NOT_SET
            or not (row.ours and row.names(config.version))
            or row.is_family
            or config.is_set(row.key)
        ):
            continue
        outcome: Outcome = outcome_of(row, row.key, config[row.key], config)
        origin = f"default of {config.table.trainer} {config.version}"
        if outcome.fate in ("taken", *BLOCKING):
            setting = Setting(row.key, config[row.key], origin)
            yield Entry(setting, outcome.fate, outcome.ours, outcome.note, row.key)
