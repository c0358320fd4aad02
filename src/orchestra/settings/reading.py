"""Settings from the entries of a file: each message says the place, the reason and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from orchestra.errors import InputError, nearest
from orchestra.settings.base import (
    REQUIRED,
    Settings,
    checked,
    default_of,
    settings_of,
    type_hints,
)
from orchestra.settings.yaml_text import Entry

S = TypeVar("S", bound=Settings)


def mapping(entry: Entry, key: str, example: str) -> Mapping[Any, Entry]:
    """The entries inside `entry`, which has to be a mapping."""
    if not isinstance(entry.value, Mapping):
        raise InputError(f"{entry.at(key)}: has to be a mapping, such as {example}")
    return entry.inside or {name: Entry(item, entry.where) for name, item in entry.value.items()}


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
            raise InputError(f"{entry.at(key)}: unknown key {name!r}; {hint}")


@dataclass(frozen=True)
class Reader:
    """Reads the settings of one kind of file.

    A quantity is read with its unit, and settings inside of settings as a mapping.

    Attributes:
        examples: by the name of a setting, what it may look like, for messages.
        special: by the name of a setting, the function that reads its entry; called with the
            entry and its dotted key. None (`null`) and the default are never given to it.
    """

    examples: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, Callable[[Entry, str], Any]] = field(default_factory=dict)

    def read_settings(
        self,
        cls: type[S],
        entry: Entry,
        key: str,
        inside: Mapping[Any, Entry] | None = None,
        given: Mapping[str, Any] | None = None,
        also: Iterable[str] = (),
    ) -> S:
        """The settings `cls` that a mapping spells.

        Args:
            key: its dotted key.
            inside: what it holds; by default what `entry` does.
            given: settings that do not come from the mapping.
            also: keys that were read before, for messages.
        """
        where, given = entry.at(key), given or {}
        if inside is None:
            inside = mapping(entry, key, self.examples.get(key.rpartition(".")[2], "{}"))
        fields = {field.name: field for field in settings_of(cls) if field.name not in given}
        refuse_others(inside, key, [*fields, *also])
        required = [field for field in fields.values() if default_of(field) is REQUIRED]
        require(inside, {field.name: self._example(field) for field in required}, where)
        values = {
            name: self._value(cls, field, inside[name], f"{key}.{name}")
            for name, field in fields.items()
            if name in inside
        }
        try:
            return cls(**given, **values)
        except InputError as error:
            text = str(error).removeprefix(f"{cls.__name__}: ")
            reason = text.removeprefix(f"{key}.")
            between = ": " if reason == text else "."
            raise InputError(f"{where}{between}{reason}") from None

    def read_setting(self, cls: type[Settings], name: str, entry: Entry, key: str) -> Any:
        """The value of `entry` as the setting `name` of `cls` wants it."""
        field = next(field for field in settings_of(cls) if field.name == name)
        return self._value(cls, field, entry, key)

    def _example(self, field: Field[Any]) -> str:
        unit = field.metadata.get("unit")
        if unit is not None:
            return str(unit.example.split(",")[0].split(" or ")[0])
        return self.examples[field.name]

    def _value(self, cls: type[Settings], field: Field[Any], entry: Entry, key: str) -> Any:
        value, default = entry.value, default_of(field)
        hint, unit = type_hints(cls)[field.name], field.metadata.get("unit")
        inner = _settings_in(hint)
        if value is None and default is not REQUIRED:
            pass
        elif field.name in self.special:
            if value is not None and value != default:
                value = self.special[field.name](entry, key)
        elif inner is not None:
            return self.read_settings(inner, entry, key)
        elif unit is not None:
            value = unit.read(value, where=entry.at(key))
        try:
            return checked(cls, field, value, hint)
        except InputError as error:
            reason = str(error).removeprefix(f"{cls.__name__}.{field.name}: ")
            raise InputError(f"{entry.at(key)}: {reason}") from None


def _settings_in(hint: Any) -> type[Settings] | None:
    """The class of settings that `hint` is, or is but for None."""
    parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    inner = [part for part in parts if part is not type(None)]
    if len(inner) == 1 and isinstance(inner[0], type) and issubclass(inner[0], Settings):
        return inner[0]
    return None
