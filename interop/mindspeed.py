"""Read MindSpeed-RL's configurations and data preparation files as settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from interop.foreign_config import Setting
from interop.hydra import settings_of_yaml
from interop.table import load

SECTIONS = (
    "megatron_training actor_config ref_config reward_config critic_config vit_config rl_config "
    "generate_config profiler_config msprobe_config"
).split()
PREPROCESS = "preprocess"  # our name for the section of a configs/datasets file, which has none


def is_mindspeed(settings: list[Setting]) -> bool:
    """True for (part of) a MindSpeed configuration or one of its data preparation files."""
    names = {setting.key.partition(".")[0].replace("-", "_") for setting in settings}
    return bool(names & {*SECTIONS}) or _prepares(names) or names <= _home().keys()


def sectioned(settings: list[Setting], folder: Path | None = None) -> list[Setting]:
    """Return the settings with the sections that excerpts leave out.

    Keys of the file that `defaults` names are read from `folder`/model, if it exists, unless
    `settings` has them.
    """
    spelt = [setting._replace(key=setting.key.replace("-", "_")) for setting in settings]
    settings = list(_placed(spelt))
    if folder is not None:
        settings = [*_of_model_files(settings, folder), *settings]
    # actor_config wins
    return sorted(settings, key=lambda each: not each.key.startswith("megatron_training."))


def _placed(settings: list[Setting]) -> Iterator[Setting]:
    """Yield the settings, adding the section to keys that have none."""
    alone = {setting.key for setting in settings if "." not in setting.key}
    prepares = _prepares(alone)
    for setting in settings:
        first = setting.key.partition(".")[0]
        home = PREPROCESS if prepares else _home().get(first)
        is_placed = first in SECTIONS or home is None
        yield setting if is_placed else setting._replace(key=f"{home}.{setting.key}")


def _prepares(names: set[str]) -> bool:
    """True for the keys of a configs/datasets file."""
    return "input" in names and bool(names & {"output_prefix", "handler_name"})


def _of_model_files(settings: list[Setting], folder: Path) -> Iterator[Setting]:
    """Yield the settings of the files in `defaults: [{model: [NAME]}]` that nothing else sets."""
    set_names = {setting.key.partition(".")[2] for setting in settings}
    lists = [setting.value for setting in settings if setting.key == "defaults"]
    groups = [each for listed in lists if isinstance(listed, list) for each in listed]
    named = [each.get("model", []) for each in groups if isinstance(each, Mapping)]
    for model in (name for each in named for name in (each if isinstance(each, list) else [each])):
        file = folder / "model" / f"{model}.yaml"
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
        for key, value, origin in sectioned(settings_of_yaml(text, file.name)):
            if (name := key.removeprefix(f"{model}.")) not in set_names:
                yield Setting(f"megatron_training.{name}", value, origin)


@cache
def _home() -> dict[str, str]:
    """Return {first part of a key: section} for keys that exist in one section only."""
    homes: dict[str, set[str]] = {}
    for row in load("mindspeed-rl").rows:
        section, _, name = row.key.partition(".")
        if section == "actor_config":  # Megatron's keys, which may be in either section
            section = "megatron_training"
        if section in ("megatron_training", "rl_config", "generate_config") and name != "model":
            homes.setdefault(name.partition(".")[0], set()).add(section)
    return {name: min(sections) for name, sections in homes.items() if len(sections) == 1}
