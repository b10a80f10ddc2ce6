"""Read MindSpeed-RL and MindSpeed-MM configurations, and their data preparation files, as settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from interop.foreign_config import Setting
from interop.hydra import settings_of_yaml
from interop.table import content_of

SECTIONS = (
    "megatron_training",
    "actor_config",
    "ref_config",
    "reward_config",
    "critic_config",
    "vit_config",
    "rl_config",
    "generate_config",
    "profiler_config",
    "msprobe_config",
)
PREPROCESS = "preprocess"  # our name for the section of a configs/datasets file, which has none
_NAMES = (
    "defaults",
    "model",
    "megatron_training.model",
    "actor_config.model",
    "vit_config.model",
)  # of architectures
_ARROW = re.compile(
    r"\s<-{2,}.*$", re.MULTILINE
)  # the guides' remarks after values: <------- on by default


def trainer_of(settings: list[Setting]) -> str:
    """Tell the two trainers apart: MindSpeed-MM's configuration is multimodal or names a model's
    JSON file.
    """
    for key, value, _ in settings:
        if key.startswith("vit_config") or (key == "rl_config.is_multimodal" and value):
            return "mindspeed-mm"
        if key == "model" and isinstance(value, str):
            return "mindspeed-mm"
    return "mindspeed-rl"


def is_mindspeed(text: str) -> bool:
    """True if a YAML text is (part of) a MindSpeed configuration or one of its data preparation
    files.
    """
    found = re.findall(r"^([ \t]*)([\w.-]+)[ \t]*:", text, re.MULTILINE)
    least = min((len(indent) for indent, _ in found), default=0)
    names = {
        name.replace("-", "_").partition(".")[0] for indent, name in found if len(indent) == least
    }
    return (
        bool(names & set(SECTIONS)) or _prepares(names) or (bool(names) and names <= _home().keys())
    )


def read_yaml(text: str, name: str, folder: Path | None = None) -> list[Setting]:
    """Return the settings of a YAML text, each with `name:LINE` as its origin.

    Remarks such as `true   <------- default` are dropped. Keys outside a section, as in excerpts,
    get their section. Keys of the file that `defaults` names are read from `folder`/model, if it
    exists, unless the text sets them. Raises ForeignConfigError if the text is not a YAML mapping.
    """
    plain = _ARROW.sub("", text.replace("\t", "    ").lstrip("\ufeff"))
    settings = settings_of_yaml(plain, name, whole=("map_keys", "defaults"))
    settings = list(
        _placed([setting._replace(key=setting.key.replace("-", "_")) for setting in settings])
    )
    if folder is not None:
        settings = [*_of_model_files(settings, folder), *settings]
    return sorted(
        settings, key=lambda setting: not setting.key.startswith("megatron_training.")
    )  # actor_config wins


def _placed(settings: list[Setting]) -> Iterator[Setting]:
    """Yield the settings, adding the section to keys that have none."""
    alone = {setting.key for setting in settings if "." not in setting.key}
    prepares = _prepares(alone)
    for setting in settings:
        first = setting.key.partition(".")[0]
        if prepares and first not in SECTIONS:
            yield setting._replace(key=f"{PREPROCESS}.{setting.key}")
        elif first in SECTIONS or first not in _home():
            yield setting
        else:
            yield setting._replace(key=f"{_home()[first]}.{setting.key}")


def _prepares(names: set[str]) -> bool:
    """True for the keys of a configs/datasets file."""
    return "input" in names and bool(names & {"output_prefix", "handler_name"})


def _of_model_files(settings: list[Setting], folder: Path) -> Iterator[Setting]:
    """Yield the settings of the files in `defaults: [{model: [NAME]}]` that nothing else sets."""
    set_names = {setting.key.partition(".")[2] for setting in settings}
    for model in _model_files(settings):
        file = folder / "model" / f"{model}.yaml"
        read = read_yaml(file.read_text(encoding="utf-8"), file.name) if file.is_file() else []
        for key, value, origin in read:
            if (name := key.removeprefix(f"{model}.")) not in set_names:
                yield Setting(f"megatron_training.{name}", value, origin)


def _model_files(settings: list[Setting]) -> Iterator[str]:
    """Yield the names under `model` in the list `defaults`."""
    lists = [
        setting.value
        for setting in settings
        if setting.key == "defaults" and isinstance(setting.value, list)
    ]
    for group in (each for listed in lists for each in listed if isinstance(each, Mapping)):
        named = group.get("model", ())
        yield from map(str, named if isinstance(named, list | tuple) else [named])


@cache
def key_list() -> dict[str, tuple[str, Any]]:
    """Return {section.key: (type, default)} of MindSpeed's classes; Megatron's keys appear in every
    section.
    """
    keys: dict[str, tuple[str, Any]] = {}
    for entry in content_of("mindspeed_classes")["classes"]:
        places = (
            ("megatron_training", "actor_config", "vit_config")
            if entry["section"] == "megatron"
            else (entry["section"],)
        )
        keys |= {
            f"{place}.{name}": (field[0], field[1])
            for place in places
            for name, field in entry["keys"].items()
        }
    return keys


@cache
def _home() -> dict[str, str]:
    """Return {first part of a key: section} for keys that exist in one class only."""
    homes: dict[str, set[str]] = {}
    for key in key_list():
        section, _, name = key.partition(".")
        if section in ("megatron_training", "rl_config", "generate_config"):
            homes.setdefault(name.partition(".")[0], set()).add(section)
    return {name: min(sections) for name, sections in homes.items() if len(sections) == 1}


def wrong_values(tree: Mapping[str, Any]) -> list[str]:
    """List what MindSpeed's classes reject in a rendered configuration: unknown names, wrong types."""
    wrong = []
    for key, value in _leaves(tree):
        known = key_list().get(key)
        if key in _NAMES or key.startswith("model."):
            continue
        if known is None:
            wrong.append(f"MindSpeed's classes have no key {key}")
        elif value is not None and type(value) not in _TYPES[known[0]]:
            wrong.append(f"{key}={value!r} is not of type {known[0]}")
    return wrong


_TYPES = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_leaf = key_list().get(key, ("", None))[0] == "dict" or not isinstance(value, Mapping)
        if is_leaf:
            yield key, value
        else:
            yield from _leaves(value, f"{key}.")
