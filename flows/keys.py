"""Every key of a recipe in words: default, bounds, meaning, and the stages whose output depends on it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dapo_core.config.fields import is_section, is_volatile
from dapo_core.config.loading import nearest
from dapo_core.errors import ConfigError
from flows.config import Config
from tasks.config.data import SetConfig
from tasks.config.evaluate import BaselineConfig, BenchmarkConfig
from tasks.stages import STAGES

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_SIGNS = (
    ("ge", ">="),
    ("gt", ">"),
    ("le", "<="),
    ("lt", "<"),
    ("min_length", "length >="),
    ("max_length", "length <="),
)
# Keys that name a file: its content, not its place, is an input of the stage that reads it.
_READERS = {"data": "prepare_data", "model": "fetch_model", "custom_reward": "train_policy"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str
    default: str
    values: str  # what it takes
    meaning: str
    stages: str  # whose output depends on it

    def lines(self) -> list[str]:
        """The key as `dapo config explain` prints it."""
        return [
            f"{self.name} = {self.default}",
            f"  {self.meaning}",
            f"  takes {self.values}",
            f"  changes {self.stages}",
        ]


def explain(name: str) -> list[Key]:
    """The key of that name, or all keys of that section; raises ConfigError with the nearest one."""
    keys = all_keys()
    found = [key for key in keys.values() if key.name == name or key.name.startswith(f"{name}.")]
    if not found:
        found = [key for key in keys.values() if key.name.endswith(f".{name}")]
    if not found:
        from interop.foreign import key_of

        raise ConfigError(f"unknown key {key_of(name) or name + nearest(Config, name)}")
    return found


def all_keys() -> dict[str, Key]:
    """Every key by its name `section.key`, in the order of the sections."""
    return {key.name: key for key in _keys(Config, "")}


def keys_page() -> str:
    """docs/keys.md: a table for each section, and what the section is."""
    lines = [
        "# Every key",
        "",
        "Written by `make keys`; `dapo config explain KEY` prints one. A key that names no",
    ]
    lines[-1] += " stage changes no result: places, waiting times, layout on the devices."
    for section, doc, keys in _sections(Config, ""):
        lines += [
            "",
            f"## {section}",
            "",
            doc,
            "",
            "| key | default | takes | meaning | changes |",
            "|---|---|---|---|---|",
        ]
        for key in keys:
            cells = (f"`{key.name}`", f"`{key.default}`", key.values, key.meaning, key.stages)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _sections(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, list[Key]]]:
    """Name, docstring and own keys of each section, outer ones first."""
    if prefix:
        doc = " ".join((section.__doc__ or "").split())
        own = [key for key in _keys(section, prefix) if "." not in key.name.removeprefix(prefix)]
        if own:
            yield prefix.rstrip("."), doc, own
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from _sections(field.annotation, f"{prefix}{name}.")


def _keys(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            bounds = _bounds(field)
            yield Key(
                f"{prefix}{name}",
                _shown(field),
                _values(field.annotation) + (f", {bounds}" if bounds else ""),
                field.description or "",
                "nothing" if is_volatile(section, name) else _stages(f"{prefix}{name}"),
            )


def _shown(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    return json.dumps(list(default) if isinstance(default, tuple) else default, ensure_ascii=False)


def _bounds(field: FieldInfo) -> str:
    found = {name: getattr(part, name) for part in field.metadata for name, _ in _SIGNS if hasattr(part, name)}
    return ", ".join(f"{sign} {found[name]}" for name, sign in _SIGNS if name in found)


def _values(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(parts[0])
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (Union, types.UnionType):
        return " or ".join(_values(part) for part in parts)
    if origin in (tuple, list):
        if parts[0] is BaselineConfig:
            return "a list of models"
        return (
            f"a list of {_values(parts[0])}"
            if parts[0] not in (SetConfig, BenchmarkConfig)
            else "a set, or a list of sets"
        )
    if origin is dict:
        return "names and values"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _stages(name: str) -> str:
    """The first stages that read the key; all that are made from their output follow."""
    readers = dict.fromkeys(
        stage.name
        for stage in STAGES
        if any(name == section or name.startswith(f"{section}.") for section in stage.sections)
    )
    return ", ".join(readers or [_READERS[name.partition(".")[0]]])
