"""JSON Schema of settings, for editors that complete and check a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from orchestra.settings.base import (
    REQUIRED,
    NumberRange,
    Settings,
    default_of,
    settings_of,
    type_hints,
)

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

_PLAIN: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    NoneType: "null",
}


def object_schema(
    properties: Mapping[str, Schema], required: Iterable[str] = (), description: str = ""
) -> Schema:
    """Return the schema of a mapping with these keys and no others."""
    schema: Schema = {"type": "object", "properties": dict(properties)}
    schema |= {"additionalProperties": False}
    if names := sorted(required):
        schema["required"] = names
    return schema | ({"description": description} if description else {})


def settings_schema(
    cls: type[Settings],
    special: Mapping[str, Schema] | None = None,
    leave_out: Iterable[str] = (),
) -> Schema:
    """Return the schema of a mapping that spells the settings of `cls`.

    Args:
        special: by name, the schemas of settings that a file writes in a way of its own.
        leave_out: settings that a file does not have.
    """
    out, special, hints = {*leave_out}, special or {}, type_hints(cls)
    fields = [field for field in settings_of(cls) if field.name not in out]
    properties = {
        field.name: described(special.get(field.name) or _of_field(field, hints[field.name]), field)
        for field in fields
    }
    required = [field.name for field in fields if default_of(field) is REQUIRED]
    return object_schema(properties, required)


def described(schema: Schema, field: Field[Any]) -> Schema:
    """Return `schema` with what `field` means, and its default where JSON has that value."""
    default = default_of(field)
    known = default is None or isinstance(default, str | int | float | bool)
    meaning = {"description": field.metadata["meaning"]} if "meaning" in field.metadata else {}
    unit = field.metadata.get("unit")
    return schema | meaning | ({"default": default} if known and unit is None else {})


def _of_field(field: Field[Any], hint: Any) -> Schema:
    if unit := field.metadata.get("unit"):
        names = "|".join(sorted(map(_escaped, unit.factors), key=len, reverse=True))
        text = {"type": "string", "pattern": rf"^\s*[-+0-9.eE]+\s*({names})\s*$"}
        return {"anyOf": [text, {"type": "null"}]} if NoneType in get_args(hint) else text
    return value_schema(hint, field.metadata.get("limits") or NumberRange())


def _escaped(unit: str) -> str:
    return unit.replace("/", r"\/")


def value_schema(hint: Any, limits: NumberRange) -> Schema:
    """Return the schema of a value that the annotation `hint` accepts in a file."""
    origin, parts = get_origin(hint), get_args(hint)
    container = origin if isinstance(origin, type) else object
    if origin is Literal:
        return {"enum": [*parts]}
    if origin in (Union, UnionType):
        return {"anyOf": [value_schema(part, limits) for part in parts]}
    if issubclass(container, Mapping):
        return {"type": "object", "additionalProperties": value_schema(parts[1], limits)}
    if issubclass(container, Sequence):
        return {"type": "array", "items": value_schema(parts[0], limits)}
    if hint in _PLAIN:
        numeric = hint in (int, float)
        return {"type": _PLAIN[hint]} | (_bounds(limits) if numeric else {})
    if isinstance(hint, type) and issubclass(hint, Settings):
        return settings_schema(hint)
    return {}


def _bounds(limits: NumberRange) -> Schema:
    bounds = {
        "minimum": limits.low,
        "maximum": limits.high,
        "exclusiveMinimum": limits.above,
    }
    return {name: value for name, value in bounds.items() if value is not None}
