"""Changes to settings that are still as they are written: mappings of a file, and notations.

A file, the command line and Python make one tree of entries. All changes are applied to it; then
it is built, and checked, once: settings that go together only may be changed in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestra.errors import InputError, nearest
from orchestra.settings.base import (
    REQUIRED,
    Settings,
    default_of,
    require_setting,
    settings_of,
    type_hints,
    wants_notation,
)
from orchestra.settings.notation import Call, Registry, bound, build, read, read_any, write
from orchestra.settings.reading import Entry, mapping

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class SettingChange:
    """A new value for what lies at a path.

    Attributes:
        path: names, from the outside inwards.
        where: opens the message of an error that comes from it ("--set optimizer.lr").
    """

    path: tuple[str, ...]
    value: object
    where: str

    @property
    def inwards(self) -> SettingChange:
        """The same change, for what lies at the first name."""
        return SettingChange(self.path[1:], self.value, self.where)


def changed_entry(
    entry: Entry,
    change: SettingChange,
    key: str,
    registry: Registry | None,
    *,
    only_known: bool = False,
) -> Entry:
    """Return `entry`, a mapping or a notation, with a change inside of it.

    Args:
        key: the dotted key of `entry`, for messages.
        registry: resolves the names in notations; None where `entry` has no notations.
        only_known: a mapping gets no further keys.

    Raises:
        InputError: nothing lies at the path.
    """
    where = _together(entry.where, change.where)
    if isinstance(entry.value, Mapping):
        inside = {str(name): item for name, item in mapping(entry, key, "{}").items()}
        name = change.path[0]
        if name not in inside and (only_known or len(change.path) > 1):
            raise InputError(f"{change.where}: there is no {name!r}; {nearest(name, inside)}")
        item = Entry(change.value, change.where)
        if len(change.path) > 1:
            item = changed_entry(inside[name], change.inwards, f"{key}.{name}", registry)
        inside[name] = item
        return Entry({name: each.value for name, each in inside.items()}, where, inside)
    if registry is not None and isinstance(entry.value, str | Call):
        call = read(entry.value, where=entry.at(key))
        return Entry(changed_call(call, change, registry, entry.at(key)), where)
    raise InputError(f"{change.where}: {_no_settings(key, entry.value)}")


def changed_call(call: Call, change: SettingChange, registry: Registry, place: str) -> Call:
    """Return `call` with another argument, or with a change inside of one.

    `place` opens the message of an error in `call` itself.
    """
    cls = _class_of(call, registry, place)
    name, where = change.path[0], change.where
    hint: Any = str
    default: object = REQUIRED
    if cls is not None:
        fields = {field.name: field for field in settings_of(cls)}
        _require(cls, name, where)
        by_position = zip(fields, call.positional, strict=False)
        call = Call(call.name, (), {**dict(by_position), **call.keywords})
        hint, default = type_hints(cls)[name], default_of(fields[name])
    if len(change.path) == 1:
        return call.with_setting(name, _as_argument(change, hint, registry))
    inner = call.keywords.get(name, default)
    if inner is REQUIRED:
        raise InputError(f"{where}: there is no {name!r}; {nearest(name, call.keywords)}")
    if isinstance(inner, Settings):
        inner = read(write(inner, registry), where=where)
    return call.with_setting(name, _changed_argument(inner, change, registry, place))


def _changed_argument(
    inner: object, change: SettingChange, registry: Registry, place: str
) -> object:
    if isinstance(inner, Call):
        return changed_call(inner, change.inwards, registry, place)
    if isinstance(inner, Mapping):
        return changed_entry(Entry(inner, place), change.inwards, change.path[0], registry).value
    raise InputError(f"{change.where}: {_no_settings(change.path[0], inner)}")


def rebuilt(settings: S, changes: Mapping[str, object], registry: Registry, *, where: str) -> S:
    """Return `settings` with the value at each dotted path of `changes`, built once.

    Raises:
        InputError: there is no such setting (the nearest one is offered), or a refused value.
    """
    call = read(write(settings, registry), where=where)
    for path, value in changes.items():
        call = changed_call(
            call, SettingChange(tuple(path.split(".")), value, where), registry, where
        )
    made: S = build(call, registry, where=where)
    return made


def _class_of(call: Call, registry: Registry, place: str) -> type[Settings] | None:
    """Return the class of settings that `call` names; None for a function, or what may be one."""
    # A function is imported when it is called: a task of the user's own imports torch.
    if registry.makes is not None and (":" in call.name or not registry.knows(call.name)):
        return None
    target = bound(call, registry, where=place)
    return target if isinstance(target, type) and issubclass(target, Settings) else None


def _require(cls: type[Settings], name: str, where: str) -> None:
    try:
        require_setting(cls, name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _as_argument(change: SettingChange, hint: Any, registry: Registry) -> object:
    """Return the value of a change as an argument: a text may be the notation of an object."""
    text = change.value
    if not (isinstance(text, str) and wants_notation(hint)):
        return text
    if text.strip()[:1] in ("[", "("):
        return read_any(text, where=change.where)
    call = read(text, where=change.where)
    bound(call, registry, where=change.where)  # an unknown name is told as that of an object
    return call


def _no_settings(name: str, value: object) -> str:
    return f"{name} is {value!r}, which has no settings of its own"


def _together(where: str, further: str) -> str:
    """Return the place of a value that a change, or one change more, has touched."""
    option, _, key = further.partition(" ")
    return f"{where}, {key}" if where.startswith(f"{option} ") else further
