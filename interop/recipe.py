"""Turn an account into a recipe: our keys with their origins as commented YAML, and a tiny one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from interop.account import Account, Entry
from interop.foreign_config import Setting, nested
from interop.table import BLOCKING


@dataclass
class Recipe:
    """Our keys by name, a comment for each, and the settings that have no key of ours."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left: list[Entry] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        """Return the keys as nested sections."""
        return nested(self.values)

    def sort(self, names: Iterable[str]) -> None:
        """Put the keys into the order of `names`; others follow."""
        order = [*(name for name in names if name in self.values), *self.values]
        self.values = {name: self.values[name] for name in order}


def recipe_of(account: Account, defaults: Mapping[str, Any]) -> Recipe:
    """Return the keys that an account sets.

    `defaults` holds our defaults by name; trainer defaults that equal them are left out.
    """
    recipe = Recipe()
    for entry in (*account.implied, *account.entries):
        is_implied = entry.setting.origin.startswith("default of ")
        for name, value in entry.ours.items() if entry.fate == "taken" else ():
            if not (is_implied and (name, value) in defaults.items()):
                recipe.values[name] = value
                note = f"; {entry.note}" if entry.note else ""
                recipe.comments[name] = f"{_shown(entry.setting)}{note}"
        if not (is_implied or entry.fate == "taken"):
            recipe.left.append(entry)
    return recipe


def _shown(setting: Setting) -> str:
    """Return a setting on one line, with its origin."""
    text = " ".join(str(setting.value).split())
    value = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{setting.origin} {setting.key}={value}"


def tiny_of(recipe: Recipe) -> Recipe:
    """Return the same algorithm for a CPU: two prompts, two steps, a freshly built model."""
    tiny = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
    kept = {
        name: value
        for name, value in recipe.values.items()
        if name in tiny["kept"]
        or not any(name == part or name.startswith(f"{part}.") for part in tiny["replaced"])
    }
    values = {**kept, **tiny["values"]}
    ours = {"train.train_prompts": 2, "train.mini_prompts": 1, "rollout.group_size": 4}
    batch, mini, group = (int(recipe.values.get(name, other)) for name, other in ours.items())
    values["train.mini_prompts"] = 1 if batch // mini > 1 else 2
    values["rollout.group_size"] = min(max(group, 2), 4)
    if "reward.overlong.buffer_tokens" in values:
        values["reward.overlong.buffer_tokens"] = 8
    if not Path(values.get("custom_reward.path", "")).expanduser().is_file():
        values = {key: values[key] for key in values if not key.startswith("custom_reward.")}
    same = {key for key in values if (key, values[key]) in recipe.values.items()}
    comments = {key: recipe.comments.get(key, "") if key in same else "--tiny" for key in values}
    return Recipe(values, comments, recipe.left)


def written(recipe: Recipe, header: Sequence[str]) -> str:
    """Return the recipe as YAML with a comment per key, then the settings without a key of ours."""
    lines = [f"# {line}" for line in header]
    lines += _section(recipe.tree, recipe.comments, "")
    if recipe.left:
        lines += ["# Not in this recipe:"]
    for entry in recipe.left:
        text = f"# {_shown(entry.setting)}: {entry.fate}; {entry.note}"
        lines.append(text.replace("\n", " "))
    return "\n".join(lines) + "\n"


def _section(tree: Mapping[str, Any], comments: Mapping[str, str], prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        key = f"{prefix}{name}"
        comment = f" # {comments[key]}".replace("\n", " ") if comments.get(key) else ""
        if isinstance(value, Mapping) and value and key not in comments:
            yield f"{indent}{name}:"
            yield from _section(value, comments, f"{key}.")
        elif isinstance(value, list) and len(value) > 1:
            yield f"{indent}{name}:{comment}"
            yield from (f"{indent}- {_scalar(item)}" for item in value)
        else:
            yield f"{indent}{name}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...").rstrip()


def changing(implied: Iterable[Entry], defaults: Mapping[str, Any]) -> list[Entry]:
    """Return the trainer's defaults that stop an import or differ from ours."""
    return [
        entry
        for entry in implied
        if entry.fate in BLOCKING or not entry.ours.items() <= defaults.items()
    ]


def counts_of(account: Account) -> dict[str, int]:
    """Count the settings by fate; the counts add up to all settings."""
    return dict(Counter(entry.fate for entry in account.entries))


def blocking_first(entries: Iterable[Entry]) -> list[Entry]:
    """Sort the entries: blocking, taken, then the rest, each in file order."""
    order = (*BLOCKING, "taken", "ignored-by-trainer", "other-stage", "default", "meaningless")
    return sorted(entries, key=lambda entry: order.index(entry.fate))
