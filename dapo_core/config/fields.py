"""Declares configuration fields: default, description, bounds, and effect on the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeGuard, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError


class _Object(dict[str, JsonValue]):
    """A hashable dict, as frozen sections require."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


# for keys that hold free-form fields
JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_Object)]


class Section(BaseModel):
    """A frozen section. Rejects unknown keys, infinities, NaN, and booleans as numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def instead_of(cls, unknown: Mapping[str, Any]) -> dict[str, str]:
        """Return what to write instead of unknown keys that another trainer has, by key."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            str(name): {}
            if value is None and name in fields and is_section(fields[name].annotation)
            else value
            for name, value in values.items()
        }

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_not_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        values = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, bool) for one in values):
            types = plain_types(cls.model_fields[str(info.field_name)].annotation)
            if bool not in types and (int in types or float in types):
                raise PydanticKnownError("int_type" if int in types else "float_type")
        return value


def plain_types(annotation: Any) -> list[Any]:
    """Return the types that a union or list is made of."""
    parts = get_args(annotation)
    return [kind for part in parts for kind in plain_types(part)] if parts else [annotation]


class Entry(Section):
    """One entry of a list. An unknown key is rejected with the list of known ones."""

    what: ClassVar[str]  # description for messages

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, values: Any) -> Any:
        known = cls.model_fields
        if isinstance(values, dict) and (unknown := sorted(values.keys() - known.keys())):
            raise ValueError(
                f"{cls.what} has no key {', '.join(unknown)}; it has {', '.join(known)}"
            )
        return values


def key(default: Any, description: str, **bounds: Any) -> Any:
    """Declare a field that affects the result: it is part of the stages' cache keys."""
    return Field(default, description=description, json_schema_extra={"volatile": False}, **bounds)


def volatile(default: Any, description: str, **bounds: Any) -> Any:
    """Declare a field that does not affect the result, such as a path, a timeout or a log level."""
    return Field(default, description=description, json_schema_extra={"volatile": True}, **bounds)


def is_volatile(section: type[BaseModel], name: str) -> bool | None:
    """Return whether the field is volatile; None if it is not declared (a test fails on that)."""
    extra = section.model_fields[name].json_schema_extra
    return extra.get("volatile") if isinstance(extra, dict) else None  # type: ignore[return-value]


def result_values(section: BaseModel) -> dict[str, Any]:
    """Return the section as plain JSON values, without volatile fields and empty sections."""
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            if inner := result_values(value):
                values[name] = inner
        elif not is_volatile(type(section), name):
            values[name] = value
    return values


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether a field holds a section rather than a value."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def known_fields(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Return the declaration of every key below a section, by its name `section.key`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            fields |= known_fields(field.annotation, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = field
    return fields
