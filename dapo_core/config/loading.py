"""From a YAML file and `--set` overrides to one resolved, checked configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dapo_core.config.sections import Config
from dapo_core.errors import ConfigError

_MERGE_TAG = "tag:yaml.org,2002:merge"  # the key <<
_PLACEHOLDER = re.compile(r"\$\{[^}]*\}|<[A-Z][A-Z0-9_]+>")


class _Loader(yaml.SafeLoader):
    """YAML with 1e-6 as a number, off as a word, and a key written twice refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = []
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            name = self.construct_object(key_node, deep=True)
            if name in names:
                place = str(key_node.start_mark).strip()
                raise ConfigError(f"{name} is written twice, the second time {place}; keep one of the two")
            names.append(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML that `_Loader` reads back: the text "1e-6" in quotes."""


_FLOAT = re.compile(r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?)$")
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
for _first in "yYnNoO":  # yes, no, on, off: pydantic makes switches of them
    _Loader.yaml_implicit_resolvers[_first] = [
        (tag, words) for tag, words in _Loader.yaml_implicit_resolvers[_first] if tag != "tag:yaml.org,2002:bool"
    ]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration: defaults < the file < overrides of the form `section.key=value`.

    The file's name is the default of `run.name`, by which runs of one recipe are found. Raises ConfigError, before
    anything starts, for an unreadable file, an unknown key (with the nearest known one), a value out of bounds, an
    unresolved placeholder, or keys that contradict each other.
    """
    tree = _read_tree(Path(path))
    for override in overrides:
        _apply_override(tree, override)
    if isinstance(run := tree.get("run") or {}, dict):
        tree["run"] = {"name": Path(path).stem, **run}
    return resolve_config(tree)


def load_config_or_defaults(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """`load_config`, or with no file the defaults and overrides, for commands that read one section only."""
    if path is not None:
        return load_config(path, overrides)
    tree: dict[str, Any] = {"data": {"source": "arithmetic"}, "model": {"source": "recipe"}}
    for override in overrides:
        _apply_override(tree, override)
    return resolve_config(tree)


def resolve_config(tree: dict[str, Any]) -> Config:
    """The checked configuration for a plain tree of sections and keys; raises ConfigError."""
    problems = [*_unknown_keys(tree), *_placeholders(tree)]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return Config.model_validate({"data": {}, "model": {}, **_without_empty_sections(tree)})
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def dump_config(config: Config) -> str:
    """The resolved tree as YAML that `load_config` reads back to the same configuration."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 2024-13-01
        raise ConfigError(f"configuration {path} is not valid YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration {path} holds {type(tree).__name__}, not sections with keys")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or "." not in name:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value, such as run.seed=2")
    *sections, leaf = name.strip().split(".")
    node = tree
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        child = node[section]
        if not isinstance(child, dict):
            raise ConfigError(f"--set {name}: {section} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from None


def known_fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the tree as `section.key`, with its declaration."""
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from known_fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def known_keys() -> Iterator[str]:
    """Every key of the tree as `section.key`."""
    return (key for key, _ in known_fields())


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _without_empty_sections(tree: dict[str, Any], section: type[BaseModel] = Config) -> dict[str, Any]:
    """The tree without `section:` lines that nothing follows, which YAML reads as null."""
    kept = {}
    for name, value in tree.items():
        annotation = section.model_fields[name].annotation
        if _is_section(annotation):
            if isinstance(value, dict):
                kept[name] = _without_empty_sections(value, annotation)
        else:
            kept[name] = value
    return kept


def _unknown_keys(tree: dict[str, Any], section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        field = section.model_fields.get(str(name))
        if field is None:
            yield f"unknown key {prefix}{name} = {value!r}{_nearest(f'{prefix}{name}')}"
        elif _is_section(field.annotation):
            if isinstance(value, dict):
                yield from _unknown_keys(value, field.annotation, f"{prefix}{name}.")
            elif value is not None:
                yield f"{prefix}{name} is a section with keys, not the value {value!r}"


def _nearest(name: str) -> str:
    """` (did you mean X?)` for the known key or section nearest in spelling, also in another section."""
    keys = list(known_keys())
    sections = sorted({key.rsplit(".", 1)[0] for key in keys} - {name.rsplit(".", 1)[0]})
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in keys}
    close = difflib.get_close_matches(name, [*keys, *sections], n=1, cutoff=0.75)
    if not close or name.rsplit(".", 1)[-1] in by_leaf:
        close = [
            by_leaf[leaf] for leaf in difflib.get_close_matches(name.rsplit(".", 1)[-1], by_leaf, n=1, cutoff=0.75)
        ]
    return f" (did you mean {close[0]}?)" if close else "; `dapo config show` lists all keys"


def _placeholders(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for child, child_value in value.items():
            yield from _placeholders(child_value, f"{name}.{child}" if name else str(child))
    elif isinstance(value, list):
        for number, child_value in enumerate(value):
            yield from _placeholders(child_value, f"{name}.{number}")
    elif isinstance(value, str) and _PLACEHOLDER.search(value):
        yield f"{name} = {value!r} still holds a placeholder; put the real value there"


def _explain(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    if problem["type"] == "tuple_type":
        message = "input should be a list, such as [first, second]"
    return f"{name} = {problem['input']!r} is refused: {message[0].lower()}{message[1:]}"
