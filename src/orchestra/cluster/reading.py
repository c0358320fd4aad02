"""Settings from the entries of a file: each message says the place, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any, TypeVar

from orchestra.cluster.jitter import DEFAULT, Drift, JitterSetting
from orchestra.cluster.registry import CLUSTERS
from orchestra.errors import InputError, nearest
from orchestra.settings import REQUIRED, Settings, parse
from orchestra.settings.base import checked, default_of, settings_of, type_hints
from orchestra.settings.yaml_text import Entry

S = TypeVar("S", bound=Settings)

LINK = "{bandwidth: 1 Gbit/s, latency: 50 us}"
LINE = "{fixed: 20 us, each: 0.3 ns/B}"
_EXAMPLES = {
    "cores": "4",
    "down": LINK,
    "factor": "4",
    "local": LINE,
    "loopback": LINK,
    "node": "worker-3",
    "of": "worker-3",
    "receive": LINE,
    "send": LINE,
    "up": LINK,
    "wire": "1.06",
}
"""What a required setting that has no unit may look like."""


def mapping(entry: Entry, key: str, example: str) -> Mapping[Any, Entry]:
    """The entries inside `entry`, which has to be a mapping."""
    if not isinstance(entry.value, Mapping):
        raise InputError(f"{entry.where} {key}: has to be a mapping, such as {example}")
    return entry.inside


def require(inside: Mapping[Any, Entry], examples: Mapping[str, str], where: str) -> None:
    """Refuse a mapping that lacks a key of `examples`, which say what it may look like."""
    for name, example in examples.items():
        if name not in inside:
            raise InputError(f"{where}: {name} is missing; add it, such as {name}: {example}")


def refuse_others(inside: Mapping[Any, Entry], key: str, known: Iterable[str]) -> None:
    """Refuse a mapping, at the dotted `key` of the file or at its root, with an unknown key."""
    names = list(known)
    for name, entry in inside.items():
        if name not in names:
            hint = nearest(str(name), names)
            where = f"{entry.where} {key}".rstrip()
            raise InputError(f"{where}: unknown key {name!r}; {hint}")


def read_settings(
    cls: type[S],
    inside: Mapping[Any, Entry],
    where: str,
    key: str,
    given: Mapping[str, Any] | None = None,
    also: Iterable[str] = (),
) -> S:
    """The settings `cls` that a mapping spells.

    Args:
        where: the place of the mapping, for what it lacks.
        key: its dotted key.
        given: settings that do not come from the mapping.
        also: keys that were read before, for messages.
    """
    given = given or {}
    fields = {field.name: field for field in settings_of(cls) if field.name not in given}
    refuse_others(inside, key, [*fields, *also])
    required = [field for field in fields.values() if default_of(field) is REQUIRED]
    require(inside, {field.name: _example(field) for field in required}, f"{where} {key}")
    values = {
        name: _value(cls, field, inside[name], f"{key}.{name}")
        for name, field in fields.items()
        if name in inside
    }
    try:
        return cls(**given, **values)
    except InputError as error:
        raise InputError(f"{where} {key}: {error}") from None


def read_field(cls: type[Settings], name: str, entry: Entry, key: str) -> Any:
    """The value of `entry` as the setting `name` of `cls` wants it."""
    field = next(field for field in settings_of(cls) if field.name == name)
    return _value(cls, field, entry, key)


def _example(field: Field[Any]) -> str:
    unit = field.metadata.get("unit")
    return str(unit.example.split(",")[0].split(" or ")[0]) if unit else _EXAMPLES[field.name]


def _value(cls: type[Settings], field: Field[Any], entry: Entry, key: str) -> Any:
    where = f"{entry.where} {key}"
    hint = type_hints(cls)[field.name]
    value = entry.value
    unit = field.metadata.get("unit")
    if isinstance(hint, type) and issubclass(hint, Settings):
        inside = mapping(entry, key, _EXAMPLES[field.name])
        return read_settings(hint, inside, entry.where, key)
    if unit is not None and (value is not None or default_of(field) is REQUIRED):
        value = unit.read(value, where=where)
    elif hint == Drift | None and value is not None:
        example = "{sigma: 0.1, time_constant: 60 s}"
        return read_settings(Drift, mapping(entry, key, example), entry.where, key)
    elif hint == JitterSetting and value not in (None, DEFAULT):
        value = parse(value, CLUSTERS, where=where)
    try:
        return checked(cls, field, value, hint)
    except InputError as error:
        raise InputError(f"{where}: {str(error).partition(': ')[2]}") from None
