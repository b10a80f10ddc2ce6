"""Loads a YAML file and `--set` overrides into one resolved, validated configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TextIO, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dapo_core.config.fields import Section, known_fields, plain_types
from dapo_core.errors import ConfigError

Root = TypeVar("Root", bound=Section)

_MERGE_TAG = "tag:yaml.org,2002:merge"  # the key <<
_TEXT_TAG = "tag:yaml.org,2002:str"
_CHANGING_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_ENVIRONMENT = "env"  # key of environment variables; their values stay text
_YAML_TEXT = re.compile(r"""|null|~|"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'""")  # also for text keys
# In a text of one word: a prompt may have a tag <ANSWER> or a formula ${n}$.
_PLACEHOLDER = re.compile(r"^\S*(?:\$\{[^}]*\}|<[A-Z][A-Z0-9_]+>)\S*$")
# Blanks in guides and templates: words in capitals, <NAME>, ${NAME}, "Your ...". Too broad for
# recipes, where such words may be part of a prompt.
TEMPLATE_WORDS = re.compile(r"^[A-Z]+( [A-Z]+)+$|^<.*>$|\$\{\w+\}|^(?i:your) |^YOUR[_-]\w+$|^TODO$")

# What a value must be, by the start of pydantic's error type.
_NOUNS = {
    "int_": "a whole number",
    "float_": "a number",
    "finite_": "a finite number",
    "bool_": "true or false",
    "string_type": "text",
    "tuple_type": "a list, such as [first, second]",
    "dict_type": "a section with keys",
    "literal_error": "{expected}",
}
_BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


class _Loader(yaml.SafeLoader):
    """YAML loader that reads 1e-6 as a number and off as text, and rejects duplicate keys.

    Numbers and dates under the keys in `as_text` stay text: `0022` under `env` does not become 18.
    """

    def __init__(self, stream: str | TextIO, as_text: Sequence[str], is_text: bool) -> None:
        super().__init__(stream)
        self.as_text, self.is_text = as_text, is_text

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if self.is_text and node is not None:
            _keep_as_written(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            name = self.construct_object(key_node, deep=True)
            if name in self.as_text:
                _keep_as_written(value_node)
            if name in names:
                place = str(key_node.start_mark).strip()
                raise ConfigError(
                    f"{name} is written twice, the second time {place}; keep one of the two"
                )
            names.append(name)
        return super().construct_mapping(node, deep)


def _keep_as_written(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag in _CHANGING_TAGS:
        node.tag = _TEXT_TAG
    elif isinstance(node, yaml.MappingNode):
        for _, value_node in node.value:
            _keep_as_written(value_node)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _keep_as_written(item)


class _Dumper(yaml.SafeDumper):
    """YAML dumper whose output `_Loader` reads back: quotes the text "1e-6"."""


_FLOAT = re.compile(
    r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?)$"
)
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
for _first in "yYnNoO":  # yes, no, on, off: pydantic converts them for boolean fields
    _Loader.yaml_implicit_resolvers[_first] = [
        (tag, words)
        for tag, words in _Loader.yaml_implicit_resolvers[_first]
        if tag != "tag:yaml.org,2002:bool"
    ]


def load(root: type[Root], path: str | Path, overrides: Sequence[str] = ()) -> Root:
    """Return the resolved configuration: defaults < file < overrides `section.key=value`.

    `run.name` defaults to the file name. Raises ConfigError for an unreadable file, an unknown key
    (naming the nearest one), a value out of bounds, an unresolved placeholder, or keys that
    contradict each other.
    """
    return resolve(root, overridden(root, read_recipe(Path(path)), overrides))


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the sections and keys that a recipe sets; `run.name` defaults to the file name."""
    tree = read_tree(path)
    if isinstance(run := tree.get("run") or {}, dict):
        tree["run"] = {"name": path.stem, **run}
    return tree


def changed(config: Root, values: Mapping[str, Any]) -> Root:
    """Return the configuration with new values by key, without validation."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def resolve(root: type[Root], tree: Mapping[str, Any]) -> Root:
    """Validate a plain tree of sections and keys; expands a leading `~/`.

    Raises ConfigError that lists all problems.
    """
    problems = list(placeholders(tree))
    required = [name for name, field in root.model_fields.items() if field.is_required()]
    try:
        config = root.model_validate({name: {} for name in required} | _at_home(dict(tree)))
    except ValidationError as error:
        problems += _explained(root, error.errors())
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _at_home(value: Any) -> Any:
    """Expand a leading `~/` in every text of the value."""
    if isinstance(value, dict):
        return {name: _at_home(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_at_home, value))
    is_home = isinstance(value, str) and value.startswith("~/")
    return str(Path(value).expanduser()) if is_home else value


def dump_config(config: Section) -> str:
    """Return the configuration as YAML that `load` reads back unchanged."""
    return yaml.dump(
        config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )


def read_tree(
    path: Path, what: str = "configuration", as_text: Sequence[str] = (_ENVIRONMENT,)
) -> dict[str, Any]:
    """Return the sections and keys that a file sets; numbers under the keys in `as_text` stay text.

    Raises ConfigError if the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            tree = _parse(file, f"{what} {path}", as_text) or {}
    except OSError as error:
        others = path.parent.glob("*.y*ml") if isinstance(error, FileNotFoundError) else ()
        close = difflib.get_close_matches(path.name, [each.name for each in others], n=1)
        meant = f" (did you mean {path.with_name(close[0])}?)" if close else ""
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}{meant}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{what} {path} contains a {type(tree).__name__} instead of sections with keys"
        )
    return tree


def overridden(
    root: type[BaseModel], tree: dict[str, Any], overrides: Sequence[str]
) -> dict[str, Any]:
    """Apply overrides of the form `section.key=value` to the tree, in order; returns it.

    Values are YAML. Those of text keys are text unless quoted: `{problem}`, `Answer: yes`, `007`.
    """
    known = known_fields(root)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name.strip():
            raise ConfigError(
                f"--set {override!r} must have the form section.key=value, such as run.seed=2"
            )
        name = name.strip()
        *sections, leaf = name.split(".")
        kinds = plain_types(known[name].annotation) if name in known else [Any]
        kinds = [str] if _ENVIRONMENT in sections else kinds
        is_environment = leaf == _ENVIRONMENT
        value, node = _typed(text, kinds, is_environment, f"--set {override!r}: the value"), tree
        if not sections and (value is None or isinstance(value, dict)):
            raise ConfigError(
                f"--set {override!r} would replace a whole section; set its keys: {leaf}.KEY=VALUE"
            )
        for section in sections:
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
            if not isinstance(node, dict):
                raise ConfigError(f"--set {name}: {section} is a value, not a section")
        node[leaf] = value
    return tree


def _typed(text: str, kinds: Sequence[Any], is_environment: bool, source: str) -> Any:
    """Return an override's value for a key of these plain types."""
    is_text = all(isinstance(kind, str) or kind in (str, NoneType, ...) for kind in kinds)
    value = text.strip()
    is_list = ... in kinds and value.startswith("[")
    if is_text and not is_list and not _YAML_TEXT.fullmatch(value):
        return value
    return _parse(text, source, is_text=is_text or is_environment)


def _parse(
    text: str | TextIO, source: str, as_text: Sequence[str] = (_ENVIRONMENT,), is_text: bool = False
) -> Any:
    try:
        loader = _Loader(text, as_text, is_text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except ConfigError:
        raise
    # ValueError: not UTF-8, or a date such as 2024-13-01
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from None


def nearest(root: type[BaseModel], name: str) -> str:
    """Return ` (did you mean X?)` for the most similar key, or a pointer to the list of keys.

    Initials count as most similar: train.lr means train.learning_rate. Then a word of a key in the
    same section: checkpoint.every means checkpoint.save_every.
    """
    keys = list(known_fields(root))
    section, _, leaf = name.rpartition(".")
    short = {key: re.sub(r"([a-z])[a-z0-9]*(_|$)", r"\1", key) for key in keys if "_" in key}
    if meant := [key for key in short if f".{short[key]}".endswith(f".{name}")]:
        return f" (did you mean {' or '.join(meant)}?)"
    siblings = [key for key in keys if key.startswith(f"{section}.")]
    if meant := [key for key in siblings if leaf in key.rsplit(".", 1)[-1].split("_")]:
        return f" (did you mean {' or '.join(meant)}?)"
    sections = sorted({key.rsplit(".", 1)[0] for key in keys} - {section})
    leaves = [key.rsplit(".", 1)[-1] for key in keys]
    close = difflib.get_close_matches(name, [*keys, *sections], n=1, cutoff=0.75)
    if not close or leaf in leaves:
        matches = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
        close = [key for key, found in zip(keys, leaves, strict=True) if found in matches]
    if close:
        return f" (did you mean {' or '.join(close)}?)"
    listed = f"explain {section}` lists its" if siblings else "show` lists all"
    return f"; `dapo config {listed} keys"


def placeholders(
    value: Any, pattern: re.Pattern[str] = _PLACEHOLDER, name: str = ""
) -> Iterator[str]:
    """Yield a sentence for each text in a tree that matches the pattern."""
    children = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        children = dict(enumerate(value))
    for child, child_value in children.items():
        yield from placeholders(child_value, pattern, f"{name}.{child}" if name else str(child))
    if isinstance(value, str) and pattern.search(value):
        yield f"{name} = {value!r} still holds a placeholder; put the real value there"


def _explained(root: type[Section], errors: Sequence[ErrorDetails]) -> list[str]:
    """Return a sentence per problem. For keys of other trainers it names ours."""
    extra = [problem for problem in errors if problem["type"] == "extra_forbidden"]
    unknown = {_name(problem): problem["input"] for problem in extra}
    foreign = root.instead_of(unknown) if unknown else {}
    sentences = []
    for problem in errors:
        name = _name(problem)
        answers = [foreign[key] for key in foreign if f"{key}.".startswith(f"{name}.")]
        sentences += answers if name in unknown and answers else [_explain(root, problem)]
    if foreign:
        hint = "`dapo import-config FILE` converts a whole script or configuration to a recipe"
        sentences.append(hint)
    return list(dict.fromkeys(sentences))


def _name(problem: ErrorDetails) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _explain(root: type[BaseModel], problem: ErrorDetails) -> str:
    name, value = _name(problem), problem["input"]
    match problem["type"]:
        case "value_error":
            return problem["msg"].removeprefix("Value error, ")
        case "extra_forbidden":
            return f"unknown key {name} = {value!r}{nearest(root, name)}"
        case "model_type":
            return f"{name} is a section with keys, not the value {value!r}"
    field = known_fields(root).get(name)
    needed = requirement(problem, field.metadata if field else ())
    state = "is empty" if value is None else f"= {value!r} is refused"
    return f"{name} {state}: {needed}"


def requirement(problem: ErrorDetails, metadata: Sequence[Any] = ()) -> str:
    """Return what a value must be, as in `it must be a whole number, at least 1`."""
    kind, context = problem["type"], problem.get("ctx", {})
    limits = context | {
        name: getattr(part, name) for part in metadata for name in _BOUNDS if hasattr(part, name)
    }
    bounds = " and ".join(
        f"{words} {limits[name]}" for name, words in _BOUNDS.items() if name in limits
    )
    nouns = [noun.format(**context) for start, noun in _NOUNS.items() if kind.startswith(start)]
    if nouns or context.keys() & _BOUNDS.keys():
        return f"it must be {', '.join([*nouns, *filter(None, [bounds])])}"
    message = problem["msg"].replace("Input should", "it must", 1)
    return f"{message[0].lower()}{message[1:]}"
