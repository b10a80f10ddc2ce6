"""What Prefect's server refuses of an override `section.key=value`: a JSON schema, made from the configuration.

The server sees a text, and has neither our code nor the recipe. So it refuses what is wrong in every recipe and
plainly written: an unknown key, a decimal number out of bounds, a word that is no choice. `load_config` judges all
else when the flow run begins, such as numbers written in another way and keys that contradict each other.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from dapo_core.config.fields import known_fields
from flows.config import Config

WORD = "[a-z][a-z0-9_+-]*"
listed = ", ".join
DIGITS = r"(\.\d{0,9})?"  # of a fraction; with more of them a float may round to the bound


def override_schema() -> dict[str, Any]:
    """The schema of one override: for each thing that can be wrong its pattern, and what is expected instead.

    So that the server says "'OVERRIDE' is not one of ['EXPECTED']", where a `pattern` of its own would be quoted.
    """
    sections = Config.model_fields
    keys = known_fields(Config)
    subsections = sorted({key.rpartition(".")[0] for key in keys} - set(sections))  # x.y={key: value}
    rules = {rf"(?!\s*({either(sections)})\.)": f"section.key=value, section: {listed(sections)}"}
    for section in sections:
        names = [name.partition(".")[2] for name in (*keys, *subsections) if name.startswith(f"{section}.")]
        rules[rf"{section}\.(?!({either(names)})\s*=)"] = f"{section}.key=value, key: {listed(names)}"
    keys_of = defaultdict(list)
    for key, field in keys.items():
        for wrong, expected in wrong_values(field):
            keys_of[wrong, expected].append(key)
    for (wrong, expected), names in keys_of.items():
        rules[rf"({either(names)})\s*=\s*({wrong})\s*$"] = expected
    return {
        "allOf": [
            {"if": {"pattern": rf"^\s*{wrong}"}, "then": {"enum": [expected]}} for wrong, expected in rules.items()
        ]
    }


def wrong_values(field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Patterns of values that the field surely refuses, each with what is expected instead."""
    is_union = get_origin(field.annotation) in (Union, UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    kind, nothing = kinds[0], ["null"] * (NoneType in kinds)
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        yield other_word([*choices, *nothing]), f"one of {listed([*choices, *nothing])}"
    elif kind is bool:
        yield other_word(["yes", "no", "on", "off", "t", "f", "y", "n"]), "true or false"
    elif kind in (int, float):
        yield other_word(nothing), "a number"
        if kind is int:
            yield r"-?\d{1,9}\.\d{0,5}[1-9]", "a whole number"
        for bound in field.metadata:
            yield beyond(bound)


def other_word(words: Iterable[str]) -> str:
    """Pattern of a word that is none of these, nor true or false, which numbers take as 1 and 0."""
    return rf"(?!({either(['true', 'false', *words])})\s*$){WORD}"


def beyond(bound: Any) -> tuple[str, str]:
    """Pattern of decimals beyond one of pydantic's bounds, a whole number, and the bound in words."""
    [(name, limit)] = dataclasses.asdict(bound).items()
    sign, far = {"ge": (">=", below), "gt": (">", below), "le": ("<=", above), "lt": ("<", above)}[name]
    equal = "" if "=" in sign else rf"|{limit}(\.0{{0,9}})?"
    return far(limit) + equal, f"a number {sign} {limit}"


def above(limit: int) -> str:
    """Pattern of decimals above a number that is not negative."""
    text = str(limit)
    whole = [rf"[1-9]\d{{{len(text)},}}"]
    for place, digit in enumerate(text):
        if digit != "9":
            whole.append(rf"{text[:place]}[{int(digit) + 1}-9]\d{{{len(text) - place - 1}}}")
    return rf"({'|'.join(whole)}){DIGITS}|{limit}\.\d{{0,8}}[1-9]"


def below(limit: int) -> str:
    """Pattern of decimals below a number."""
    if limit <= 0:
        return f"-({above(-limit)})"
    whole = [str(number) for number in range(limit)]
    return rf"-\d+{DIGITS}|({either(whole)}){DIGITS}"


def either(texts: Iterable[str]) -> str:
    """Pattern of any of these texts."""
    return "|".join(re.escape(text) for text in texts)
