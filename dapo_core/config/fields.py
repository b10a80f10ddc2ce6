"""How a configuration field is declared: with a bound, and with a word on whether it changes the result."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo


class _Object(dict[str, JsonValue]):
    """Hashable, as the frozen section that holds it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_Object)]  # the type of a key that holds fields


class Section(BaseModel):
    """A frozen part of the configuration; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            str(name): {} if value is None and name in fields and is_section(fields[name].annotation) else value
            for name, value in values.items()
        }


class Entry(Section):
    """One entry of a list; an unknown key is refused with those that it may have."""

    what: ClassVar[str]  # an entry of which key

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, values: Any) -> Any:
        unknown = sorted(values.keys() - cls.model_fields.keys()) if isinstance(values, dict) else []
        if unknown:
            raise ValueError(f"{cls.what} has no key {', '.join(unknown)}; it has {', '.join(cls.model_fields)}")
        return values


def key(default: Any, description: str, **bounds: Any) -> Any:
    """A field that changes the result: it belongs to the cache key of the stages that read it."""
    return Field(default, description=description, json_schema_extra={"volatile": False}, **bounds)


def volatile(default: Any, description: str, **bounds: Any) -> Any:
    """A field that changes only how the result is reached: places, waiting times, log levels."""
    return Field(default, description=description, json_schema_extra={"volatile": True}, **bounds)


def is_volatile(section: type[BaseModel], name: str) -> bool | None:
    """Whether the field is volatile; None when its declaration does not say (a test refuses that)."""
    extra = section.model_fields[name].json_schema_extra
    return extra.get("volatile") if isinstance(extra, dict) else None  # type: ignore[return-value]


def result_values(section: BaseModel) -> dict[str, Any]:
    """The section as plain JSON values without its volatile fields, and without sections of these alone."""
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
    """Whether a field holds a section rather than a value."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def known_fields(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """The declaration of every key below a section, by its name `section.key`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if is_section(field.annotation):
            fields |= known_fields(field.annotation, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = field
    return fields
