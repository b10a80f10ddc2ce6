"""What becomes of every setting of another trainer's configuration: nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import interop.conversions
import interop.conversions_algorithm
import interop.conversions_loss
import interop.conversions_mindspeed  # all register the conversions that the tables name
from interop.table import BLOCKING, UNSAID, Fate, Row, Table, load
from interop.theirs import Outcome, Setting, Theirs, nested, outcome_of

__all__ = ["Account", "Entry", "Setting", "account_of", "interop"]

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


@dataclass(frozen=True)
class Entry:
    """One setting and its fate; `ours` are our keys and values, `name` is the newest name of the key."""

    setting: Setting
    fate: Fate
    ours: dict[str, Any]
    note: str
    name: str


@dataclass(frozen=True)
class Account:
    """Every setting with its fate, and what the trainer's defaults imply for keys that nothing sets."""

    trainer: str
    version: str
    entries: tuple[Entry, ...]
    implied: tuple[Entry, ...]

    def of(self, *fates: Fate) -> list[Entry]:
        """The settings with one of these fates."""
        return [entry for entry in self.entries if entry.fate in fates]

    def blocking(self, allowed: Iterable[str] = ()) -> list[Entry]:
        """Settings and implied defaults that stop an import, without the keys that are allowed."""
        allowed = set(allowed)
        return [
            entry
            for entry in (*self.entries, *self.implied)
            if entry.fate in BLOCKING and not {entry.setting.key, entry.name} & allowed
        ]

    def tree(self) -> dict[str, Any]:
        """Our recipe as nested sections: what is taken, then what the trainer's defaults imply."""
        entries = (*self.implied, *self.entries)
        return nested(
            {name: value for each in entries if each.fate == "taken" for name, value in each.ours.items()}
        )


def account_of(
    settings: Sequence[Setting], trainer: str, version: str | None = None, facts: Mapping[str, int] | None = None
) -> Account:
    """The account of a configuration; a key that is set twice holds its last value, as in Hydra.

    Without a version, the newest that has most of the keys. `facts`: `num_train_rows`, the rows of the training
    files, from which epochs become steps. Raises ForeignConfigError for a trainer or version without a table.
    """
    table = load(trainer)
    flat = list(_flat(settings, table))
    version = _version_of(flat, table) if version is None else table.require_version(version)
    rows = [table.resolve(setting.key, version) for setting in flat]
    names = [_name(setting, row) for setting, row in zip(flat, rows, strict=True)]
    theirs = Theirs(
        table, version, {name: each.value for name, each in zip(names, flat, strict=True)}, facts or {}
    )
    last = {name: setting for name, setting in zip(names, flat, strict=True)}
    entries = [
        _entry(setting, row, name, last[name], theirs)
        for setting, row, name in zip(flat, rows, names, strict=True)
    ]
    entries = _without_contradictions(entries, theirs)
    said = {ours for entry in entries for ours in entry.ours}
    implied = [entry for entry in _implied(theirs) if entry.fate in BLOCKING or not entry.ours.keys() <= said]
    account = Account(trainer, version, tuple(entries), tuple(implied))
    assert [entry.setting for entry in account.entries] == flat, "a setting was dropped"
    return account


def _flat(settings: Iterable[Setting], table: Table) -> Iterator[Setting]:
    """Settings of keys: a section that is set as a whole becomes its keys."""
    for key, value, origin in settings:
        row = table.find(key)
        if isinstance(value, dict) and value and (row is None or row.is_family):
            below = [Setting(f"{key}.{name}", child, origin) for name, child in value.items()]
            yield from _flat(below, table)
        else:
            yield Setting(key, value, origin)


def _version_of(settings: Sequence[Setting], table: Table) -> str:
    """The newest version that has most of the keys."""
    held = [set(table.versions_of(name)) for name in {setting.key for setting in settings}]
    return max(
        table.versions, key=lambda each: (sum(each in of_key for of_key in held), table.versions.index(each))
    )


def _name(setting: Setting, row: Row | None) -> str:
    return setting.key if row is None or row.is_family else row.key


def _entry(setting: Setting, row: Row | None, name: str, last: Setting, theirs: Theirs) -> Entry:
    if row is None:
        if (group := theirs.table.group_of(setting.key, setting.value)) is not None:
            note = (
                f"chooses a file of Hydra's group {group}, whose keys are not here; name that file beside the "
                "script, or write its keys in place of this"
            )
            return Entry(setting, "unsupported", {}, note, name)
        near = theirs.table.nearest(setting.key)
        if near is None and theirs.table.ignores_unknown:
            note = f"{theirs.table.trainer} says nothing of keys that it does not know, and reads this one nowhere"
            return Entry(setting, "ignored-by-trainer", {}, note, name)
        hint = f"did you mean {near}?" if near else f"no version of {theirs.table.trainer} has it"
        return Entry(setting, "misspelt", {}, hint, name)
    if setting != last and setting.value != last.value:
        fate: Fate = "meaningless" if setting.key == last.key else "contradicting"
        return Entry(setting, fate, {}, f"{last.origin} sets {last.key}={last.value}", name)
    outcome = outcome_of(row, setting.key, theirs[name] if _is_reference(setting.value) else setting.value, theirs)
    held = theirs.table.versions_of(setting.key)
    note = outcome.note
    if theirs.version not in held:
        of_this = row.names(theirs.version)
        instead = f", which has {of_this[0]}" if of_this else ""
        note = f"a key of {_span(held)}, not of {theirs.version}{instead}. {note}".strip()
    return Entry(setting, outcome.fate, outcome.ours, note, name)


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _span(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def _without_contradictions(entries: list[Entry], theirs: Theirs) -> list[Entry]:
    """The entries, with the fate `contradicting` where two of them, or what they mean together, disagree."""
    against = _contradictions(theirs)
    said: dict[str, Entry] = {}
    for entry in entries:
        for name, value in entry.ours.items():
            other = said.setdefault(name, entry)
            if other.ours[name] != value:
                for one, by in ((entry, other), (other, entry)):
                    against.setdefault(
                        one.name, f"{name} would be {one.ours[name]}, and {by.ours[name]} by {by.name}"
                    )
    return [
        replace(entry, fate="contradicting", ours={}, note=against[entry.name])
        if entry.name in against and entry.fate != "misspelt"
        else entry
        for entry in entries
    ]


def _contradictions(theirs: Theirs) -> dict[str, str]:
    """By key, why it contradicts another that is set as well, or a default of the trainer."""
    if theirs.table.trainer != "verl":
        return {}
    return _of_loss(theirs) | _of_micro_batches(theirs) | _of_batches(theirs) | _of_places(theirs)


def _of_loss(theirs: Theirs) -> dict[str, str]:
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if theirs[in_loss] is not True or theirs[in_reward] is not True:
        return {}
    why = f"{in_loss} and {in_reward} are both on; algorithm.kl.place has one of loss and reward"
    return {in_loss: why, in_reward: why}


def _of_micro_batches(theirs: Theirs) -> dict[str, str]:
    dynamic, tokens = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    sizes = [f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size"]
    given = [name for name in sizes if theirs.is_set(name) and theirs[name] is not None]
    if len(given) == 2:
        return dict.fromkeys(given, f"{given[0]} and {given[1]} are both set; keep one")
    if theirs[dynamic] is not True:
        return {}
    if given and theirs.is_set(dynamic) and not theirs.is_set(tokens):
        why = (
            f"{dynamic} is on, so that {given[0]} is read nowhere, and {tokens}, which counts instead, is not set"
        )
        return {dynamic: why, given[0]: why}
    is_megatron = theirs[f"{ACTOR}.strategy"] == "megatron"
    ranks = theirs[f"{ACTOR}.{'megatron.context' if is_megatron else 'ulysses_sequence'}_parallel_size"] or 1
    lengths = theirs["data.max_prompt_length"], theirs["data.max_response_length"]
    numbers = (theirs[tokens], ranks, *lengths)
    if theirs.is_set(tokens) and all(type(number) is int for number in numbers):
        room, longest = theirs[tokens] * ranks, sum(lengths)
        if room < longest:
            return {
                tokens: f"{theirs[tokens]} tokens on each of {ranks} ranks hold no sequence of {longest}; set "
                f"{-(-longest // ranks)}"
            }
    return {}


def _of_batches(theirs: Theirs) -> dict[str, str]:
    step, mini = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
    sizes = theirs[step], theirs[mini]
    if not (theirs.is_set(step) or theirs.is_set(mini)) or not all(type(size) is int for size in sizes):
        return {}
    if sizes[0] >= sizes[1]:
        return {}
    why = f"{step}={sizes[0]} prompts a step are fewer than {mini}={sizes[1]} of an optimizer step"
    return {name: why for name in (step, mini) if theirs.is_set(name)}


def _of_places(theirs: Theirs) -> dict[str, str]:
    found: dict[str, str] = {}
    actor, ref = f"{ACTOR}.strategy", f"{REF}.strategy"
    fsdp = ("fsdp", "fsdp2")
    if theirs.is_set(actor) and theirs.is_set(ref) and (theirs[actor] in fsdp) != (theirs[ref] in fsdp):
        why = f"{actor}={theirs[actor]} and {ref}={theirs[ref]}: policy and reference have one"
        found |= {actor: why, ref: why}
    if theirs["trainer.resume_mode"] == "resume_path" and theirs["trainer.resume_from_path"] is None:
        found["trainer.resume_mode"] = "resume_path needs trainer.resume_from_path, which is not set"
    return found


def _implied(theirs: Theirs) -> Iterator[Entry]:
    for row in theirs.table.rows:
        value = row.default(theirs.version)
        if (
            value is UNSAID
            or not (row.ours and row.names(theirs.version))
            or row.is_family
            or theirs.is_set(row.key)
        ):
            continue
        outcome: Outcome = outcome_of(row, row.key, theirs[row.key], theirs)
        origin = f"default of {theirs.table.trainer} {theirs.version}"
        if outcome.fate in ("taken", *BLOCKING):
            setting = Setting(row.key, theirs[row.key], origin)
            yield Entry(setting, outcome.fate, outcome.ours, outcome.note, row.key)
