"""What a server refuses of an override: nothing that `load_config` takes, and all that is plainly wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic.fields import FieldInfo

from dapo_core.config.fields import known_fields
from dapo_core.errors import ConfigError
from flows.config import Config, load_config_or_defaults
from flows.dapo_full import dapo_full
from flows.override_schema import override_schema

FIELDS = known_fields(Config)
WRONG = [re.compile(rule["if"]["pattern"]) for rule in override_schema()["allOf"]]
WORDS = [
    "abc",
    "off",
    "on",
    "no",
    "yes",
    "t",
    "f",
    "y",
    "n",
    "null",
    "none",
    "inf",
    "nan",
    "auto",
    "cpu",
    "kl+",
    "group-mean",
]
ODD_TEXTS = [
    *(
        "",
        "~",
        "Null",
        "true",
        "false",
        "TRUE",
        "tRUE",
        "CPU",
        "'2'",
        '"-1"',
        "''",
        "'hf' # engine",
        "[1]",
        "{}",
        "{a: 1}",
        "&a 3",
    ),
    *(
        "+2",
        "-0",
        "-0.0",
        "+0",
        "00",
        "010",
        "0b1",
        "0x10",
        "-0x1",
        "1_0",
        "1_",
        "1:30",
        "!!int 3",
        "- 3",
        "--- 3",
    ),
    *(
        "1e2",
        "1e-6",
        "-1e-400",
        "1e400",
        ".5",
        "-.5",
        "5.",
        ".inf",
        "0.",
        "1.0",
        "1.5.2",
        "3 # -1",
        "3\n# -1",
        "\n3",
    ),
    *(f"-0.{'0' * 400}1", f"0.{'9' * 30}", f"1.{'0' * 30}1", f"15.{'9' * 30}", "9" * 400, "  2  ", "\u00a02", "?"),
]
DECIMAL = re.compile(r"-?[1-9]\d{0,9}|0|-?\d{1,9}\.\d{0,3}[1-9]")
REFUSED = [
    ("run.totl_steps=2", "run.key=value, key: name, seed, deterministic"),
    ("trian.total_steps=2", "section.key=value, section: run, data, algorithm, "),
    ("seed=2", "section.key=value, section: "),
    ("run={seed: 2}", "section.key=value, section: "),
    ("run.seed", "run.key=value, key: "),
    ("run.seed 2=2", "run.key=value, key: "),
    ("flow.webhook.ulr=x", "flow.key=value, key: lock_path, "),
    ("train.total_steps=-1", "a number >= 1"),
    ("train.total_steps = 0", "a number >= 1"),
    ("train.total_steps=many", "a number"),
    ("rollout.top_p=95", "a number <= 1"),
    ("rollout.top_p=1.01", "a number <= 1"),
    ("algorithm.clip_ratio_low=1", "a number < 1"),
    ("serve.port=65536", "a number <= 65535"),
    ("rollout.top_k=-2", "a number >= -1"),
    ("train.device=gpu", "one of cpu, cuda, npu"),
    ("train.total_steps=2.5", "a whole number"),
    ("data.shuffle=perhaps", "true or false"),
]


def is_refused_by_server(override: str) -> bool:
    """Whether a rule finds something wrong; jsonschema itself takes seconds for them all."""
    return any(pattern.search(override) for pattern in WRONG)


def texts_for(field: FieldInfo) -> Iterator[str]:
    """Values to try: words, what YAML makes of odd texts, and numbers around each bound."""
    yield from (*WORDS, *ODD_TEXTS)
    for bound in field.metadata:
        [limit] = dataclasses.asdict(bound).values()
        yield from (str(limit + step) for step in (-1000, -1, -0.5, 0, 0.001, 1, 99 * limit))


def is_refused_by_its_field(key: str, text: str) -> bool:
    """Whether `load_config` refuses the value of this key whatever the other keys are."""
    try:
        load_config_or_defaults(None, [f"{key}={text}"])
    except ConfigError as error:
        return str(error).startswith((f"{key} = ", f"--set '{key}="))
    return False


def is_checked_fully(field: FieldInfo, text: str) -> bool:
    """Whether the server is to refuse all that `load_config` refuses: a word, or a decimal for a number."""
    is_number = field.annotation in (int, float, int | None, float | None)
    is_choice = field.annotation is bool or "Literal" in str(field.annotation)
    return bool((is_number and DECIMAL.fullmatch(text)) or ((is_number or is_choice) and text in WORDS))


@pytest.mark.parametrize("section", dict.fromkeys(key.split(".")[0] for key in FIELDS))
def test_it_agrees_with_the_configuration(section: str) -> None:
    disagreements = []
    for key, field in FIELDS.items():
        for text in texts_for(field) if key.startswith(f"{section}.") else ():
            is_refused = is_refused_by_server(f"{key}={text}")
            is_compared = is_refused or is_checked_fully(field, text)
            if is_compared and is_refused != is_refused_by_its_field(key, text):
                disagreements.append((key, text, is_refused))
    assert disagreements == []


@pytest.mark.parametrize(("override", "expected"), REFUSED)
def test_what_is_wrong_is_told_in_few_words(override: str, expected: str) -> None:
    schema: dict[str, Any] = parameter_schema(dapo_full).model_dump_for_openapi()
    with pytest.raises(ValidationError) as refusal:
        validate({"overrides": ["run.seed=2", override]}, schema, raise_on_error=True)
    message = str(refusal.value)
    assert f"field 'overrides[1]'. Failure reason: {override!r} is not one of ['{expected}" in message
    assert len(message) < 600


def test_every_key_and_every_section_within_a_section_can_be_set() -> None:
    sections = {key.rpartition(".")[0] for key in FIELDS if key.count(".") > 1}
    assert {"reward.overlong", "flow.webhook"} <= sections
    overrides = [f"{space}{name}{space}={{}}" for name in (*FIELDS, *sections) for space in ("", " ")]
    assert [override for override in overrides if is_refused_by_server(override)] == []
