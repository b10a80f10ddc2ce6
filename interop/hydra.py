"""Parse Hydra overrides and verl's YAML files into settings, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from interop import ForeignConfigError
from interop.foreign_config import Setting

KEY = re.compile(
    r"(?P<sign>\+\+|\+|~|)"
    r"(?P<key>[A-Za-z_][\w-]*(?:/[A-Za-z_][\w-]*)+"
    r"|[A-Za-z_$][\w$-]*(?:\.(?:[A-Za-z_$][\w$-]*|\d+))*)"
    r"(?:@(?P<package>[\w$.-]*))?(?P<equal>=[ \t]*)?(?P<value>.*)",
    re.DOTALL | re.ASCII,
)
INTEGER = re.compile(r"[+-]?(?:0|[1-9](?:_?\d)*)")
_UNSIGNED = r"(?:0|[1-9](?:_?\d)*)"
_POINT = rf"(?:{_UNSIGNED}\.|{_UNSIGNED}?\.\d(?:_?\d)*)"
FLOAT = re.compile(
    rf"[+-]?(?:{_POINT}|(?:{_UNSIGNED}|{_POINT})[eE][+-]?\d(?:_?\d)*|inf|nan)", re.IGNORECASE
)
WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
# Part of a bare value: a reference, an escape, blanks, or characters that need no quotes. `~`
# stands for $HOME.
BARE = re.compile(
    r"(?P<reference>\$\{[^}]+\})|(?P<escape>\\[\\()\[\]{}:=, \t])|(?P<colon>[ \t]*:[ \t]*)"
    r"|[ \t]+|[\w/\-\\+.$%*@?|~]",
    re.ASCII,
)
STRIPPED = re.compile(r"[ \t]*((?:\\.|[^\\]|\\$)*?)[ \t]*", re.DOTALL)  # keeps escaped blanks
WHOLE = ("map_keys", "defaults")  # in YAML, keys whose values are mappings
ARROW = re.compile(r"\s<-{2,}.*$", re.MULTILINE)
FUNCTION = re.compile(r"([A-Za-z_][\w-]*)[ \t]*\(")


def setting_of(text: str, origin: str = "") -> Setting:
    """Parse a Hydra 1.3 override, `a.b=c`, `+a=c`, `++a=c` or `~a`; raises ForeignConfigError where
    Hydra fails too.

    References such as `${data.train_batch_size}` stay unresolved. Sweeps and functions are
    rejected.
    """
    whole = f"{origin}: {text!r}" if origin else repr(text)
    match = KEY.fullmatch(text)
    if match is None or (match["equal"] is None and (match["sign"] != "~" or match["value"])):
        raise ForeignConfigError(f"{whole} is not KEY=VALUE")
    key = match["key"] if match["package"] is None else f"{match['key']}@{match['package']}"
    if not match["value"].strip(" \t"):
        return Setting(key, "" if match["equal"] else None, origin)
    reader = _Value(match["value"], whole, len(text))
    value = reader.element()
    if reader.rest().startswith(","):
        raise ForeignConfigError(
            f"{whole} is a sweep, that is, several trainings; write a list as [a,b]"
        )
    if reader.rest():
        raise reader.refusal()
    return Setting(key, value, origin)


class _Value:
    """Parses one value from left to right; `length` is that of the whole override."""

    def __init__(self, text: str, whole: str, length: int) -> None:
        self.text, self.whole, self.length, self.at = text, whole, length, 0

    def rest(self) -> str:
        return self.text[self.at :]

    def refusal(self) -> ForeignConfigError:
        return ForeignConfigError(
            f"{self.whole}: Hydra cannot parse {self.rest()[:20]!r} at character "
            f"{self.length - len(self.rest()) + 1}; quote the value inside the shell's quotes"
        )

    def skip(self, *characters: str) -> bool:
        """Consume one of these characters with the blanks around it; False if none follows."""
        bare = self.rest().lstrip(" \t")
        if not bare.startswith(characters or "\n"):
            return False
        self.at = len(self.text) - len(bare[1:].lstrip(" \t"))
        return True

    def element(self) -> Any:
        """Parse a list, a dictionary, a quoted text, or a bare value."""
        start = self.rest()
        if start.startswith("["):
            return [self.element() for _ in self.items("]")]
        if start.startswith("{"):
            return dict(self.pair() for _ in self.items("}"))
        blank = len(start) - len(start.lstrip(" \t"))
        if start[blank:].startswith(("'", '"')):
            self.at += blank
            return self.quoted()
        if FUNCTION.match(start):
            raise ForeignConfigError(
                f"{self.whole}: functions and sweeps on Hydra's command line are not supported"
            )
        return self.bare(is_key=False)

    def items(self, close: str) -> Iterator[None]:
        """Step from item to item between brackets; the caller parses each."""
        self.skip(self.text[self.at])
        is_first = True
        while not self.skip(close):
            if not is_first and not self.skip(","):
                raise self.refusal()
            is_first = False
            yield

    def pair(self) -> tuple[Any, Any]:
        key = self.bare(is_key=True)
        if not self.skip(":"):
            raise self.refusal()
        return key, self.element()

    def quoted(self) -> str:
        quote = self.text[self.at]
        match = re.compile(rf"{quote}((?:\\\\)*|.*?[^\\](?:\\\\)*){quote}", re.DOTALL).match(
            self.text, self.at
        )
        if match is None:
            raise self.refusal()
        self.at = match.end()
        unescaped = re.sub(rf"\\+{quote}", lambda found: found.group()[1::2], match[1] + quote)
        is_whole = unescaped.endswith(quote) and not match[1].endswith("\\")
        return unescaped[:-1] if is_whole else unescaped

    def bare(self, is_key: bool) -> Any:
        """Parse a value without quotes: a number, a boolean, null, or stripped text."""
        start, escaped = self.at, False
        while match := BARE.match(self.text, self.at):
            if is_key and (match["reference"] or match["colon"]):
                break
            escaped = escaped or bool(match["escape"])
            self.at = match.end()
        match = STRIPPED.fullmatch(self.text[start : self.at])
        if match is None or not match[1]:
            raise self.refusal()
        text = match[1]
        return re.sub(r"\\([\\()\[\]{}:=, \t])", r"\1", text) if escaped else typed(text)


def typed(text: str) -> Any:
    """Convert a bare text to the type that Hydra gives it."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    return float(text) if FLOAT.fullmatch(text) else text


class _Loader(yaml.SafeLoader):
    """Parses YAML like OmegaConf: 1e-6 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
        r"|\.[\d_]+(?:[eE][-+]?\d+)?|\.(?:inf|nan))$"
    ),
    list("-+0123456789."),
)


def settings_of_yaml(text: str, name: str) -> list[Setting]:
    """Return the settings of a YAML file, each with its line; a list of strings is a list of
    overrides.

    The guides' tabs and remarks, `true   <------- default`, are dropped. Raises ForeignConfigError
    if it is not YAML or has no keys.
    """
    try:
        loader = _Loader(ARROW.sub("", text.replace("\t", "    ")))
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode):
            return list(_leaves(loader, node, name))
        if isinstance(node, yaml.SequenceNode):
            items = [(loader.construct_object(item, deep=True), item) for item in node.value]
            return [setting_of(str(item), f"{name}:{at.start_mark.line + 1}") for item, at in items]
    except yaml.YAMLError as error:
        raise ForeignConfigError(f"{name} is not valid YAML: {error}") from None
    raise ForeignConfigError(f"{name} has no keys: it is neither a mapping nor a list of overrides")


def _leaves(
    loader: _Loader, node: yaml.MappingNode, name: str, prefix: str = ""
) -> Iterator[Setting]:
    loader.flatten_mapping(node)
    for key_node, value in node.value:
        part = str(loader.construct_object(key_node))
        key = f"{prefix}{part}"
        if isinstance(value, yaml.MappingNode) and value.value and part not in WHOLE:
            yield from _leaves(loader, value, name, f"{key}.")
        else:
            origin = f"{name}:{key_node.start_mark.line + 1}"
            yield Setting(key, loader.construct_object(value, deep=True), origin)
