"""Frozen dataclasses of settings: each field knows its meaning and its range, and checks itself.

@dataclass(frozen=True, repr=False)
class LocalSGD(Settings):
    every: int = setting(8, "steps between two averages", low=1)

LocalSGD(0)     # InputError: LocalSGD.every: 0 is below 1
LocalSGD(4)     # its repr is the constructor call: LocalSGD(4)
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import GenericAlias, MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from orchestra.errors import InputError, nearest

_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    NoneType: "none",
}


class Mismatch(ValueError):
    """The value does not fit; the message says what it is and what was expected."""


def convert(value: Any, hint: Any, leaf: Callable[[Any, Any], object] | None = None) -> Any:
    """Return `value` as the annotation `hint` wants it, or raise `Mismatch`.

    `leaf` converts what is neither a union, a literal nor a container; as a setting by default.
    """
    origin, parts = get_origin(hint), get_args(hint)
    container = origin if isinstance(origin, type) else object
    if hint in (Any, object):
        return value
    if origin is Literal:
        return _choice(value, parts)
    if origin in (Union, UnionType):
        return _union(value, hint, leaf)
    if issubclass(container, Mapping):
        if not isinstance(value, Mapping):
            raise _mismatch(value, hint)
        each, of = parts
        return {convert(key, each, leaf): convert(item, of, leaf) for key, item in value.items()}
    if issubclass(container, Sequence):
        if not isinstance(value, list | tuple):
            raise _mismatch(value, hint)
        fixed = origin is tuple and parts[-1] is not Ellipsis
        if fixed and len(parts) != len(value):
            raise Mismatch(f"{value!r} has {len(value)} values, not {len(parts)}")
        hints = parts if fixed else [parts[0]] * len(value)
        items = [convert(item, part, leaf) for item, part in zip(value, hints, strict=True)]
        return tuple(items) if origin is tuple else items
    return (leaf or _setting_value)(value, hint)


def wants_notation(hint: Any) -> bool:
    """Return whether text given for `hint` is the notation of an object, not a value of its own."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [part for part in parts if _is_plain(part)]
    takes_text = any(part is str or get_origin(part) is Literal for part in plain)
    return len(plain) < len(parts) and not takes_text


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if isinstance(origin, type):
        if issubclass(origin, tuple):
            return all(part is Ellipsis or _is_plain(part) for part in get_args(hint))
        return issubclass(origin, Mapping)
    return hint in _NAMES or origin is Literal


def type_text(hint: Any) -> str:
    """Return `hint` in words for users."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Literal, Union, UnionType):
        return " or ".join(map(repr if origin is Literal else type_text, parts))
    if origin is tuple:
        return f"list of {type_text(parts[0])}{'s' if parts[0] in (int, float, str) else ''}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if hint in (Any, object):
        return "object"
    return _NAMES.get(hint) or str(getattr(hint, "__name__", hint))


def _mismatch(value: object, hint: Any) -> Mismatch:
    return Mismatch(f"expected {type_text(hint)}, got {value!r}")


def _choice(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices:
        # 1 == True == 1.0, but only one of them may be meant.
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        hint = nearest(value, [str(choice) for choice in choices])
        raise Mismatch(f"{value!r} is not known; {hint}")
    known = ", ".join(repr(choice) for choice in choices)
    raise Mismatch(f"{value!r} is not one of {known}")


def _union(value: object, hint: Any, leaf: Callable[[Any, Any], object] | None) -> object:
    parts = get_args(hint)
    for part in parts:
        with suppress(Mismatch):
            return convert(value, part, leaf)
    wanted = [part for part in parts if part is not NoneType]
    if isinstance(value, str) and len(wanted) > 1:
        # A text was meant for the part that takes texts: its message names the nearest choice.
        wanted = [part for part in wanted if get_origin(part) is Literal]
    if len(wanted) == 1:
        convert(value, wanted[0], leaf)  # raises again, with the reason of the part that was meant
    raise _mismatch(value, hint)


def _setting_value(value: Any, hint: Any) -> object:
    """Return a number, a text or an object as a setting; numbers are finite."""
    cls = get_origin(hint) or hint
    # To Python `True` is an int.
    if isinstance(value, bool) and hint in (int, float):
        raise _mismatch(value, hint)
    if hint is int and isinstance(value, numbers.Integral):
        return int(value)
    if hint is float and isinstance(value, numbers.Real):
        number = math.inf
        with suppress(OverflowError):
            number = float(value)
        if not math.isfinite(number):
            raise Mismatch(f"{number!r} is not a finite number")
        return number
    # `isinstance` refuses protocols that are not `runtime_checkable`.
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return value  # nothing to check against until it is used
    if isinstance(cls, type) and not isinstance(value, cls):
        raise _mismatch(value, hint)
    # Lone surrogates, as of an argument that is no UTF-8, can be written to no file.
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        raise Mismatch(f"{value!r} is not text in UTF-8")
    return value


def to_plain(value: Any, *, finite: bool = False) -> Any:
    """Return a dataclass as a dict of its fields, a tuple as a list; what is in them, too.

    Args:
        finite: None takes the place of NaN and of infinities, which JSON does not have.
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, finite=finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value


def from_plain(hint: Any, value: Any, *, finite: bool = False) -> Any:
    """Return the object of the annotation `hint` that `to_plain` made `value` of, or raise
    `Mismatch`. Fields with a default may be missing. A field with a range is inside of it.

    Args:
        finite: no number is NaN or infinite; None stands for those, and stays.
    """
    return convert(value, hint, partial(_from_plain, finite=finite))


def _from_plain(value: Any, hint: Any, finite: bool) -> Any:
    """Return a dataclass of a dict, a NamedTuple of a list, or a number or text as it is."""
    cls: Any = hint
    if dataclasses.is_dataclass(hint):
        hints, all_fields = type_hints(cls), dataclasses.fields(cls)
        required = {field.name for field in all_fields if default_of(field) is REQUIRED}
        if not isinstance(value, dict):
            raise Mismatch(f"expected a mapping, got {type(value).__name__}")
        if odd := (required - value.keys()) or (value.keys() - hints.keys()):
            lacks = "lacks" if odd <= required else "has the unknown"
            raise Mismatch(f"{lacks} {', '.join(sorted(map(str, odd)))}")
        inside = {}
        for field in all_fields:
            if field.name in value:
                try:
                    item = from_plain(hints[field.name], value[field.name], finite=finite)
                    require_within(field, item)
                except Mismatch as mismatch:
                    raise Mismatch(f"{field.name}: {mismatch}") from None
                inside[field.name] = item
        return cls(**inside)
    if issubclass(hint, tuple):
        fields = GenericAlias(tuple, tuple(type_hints(hint).values()))
        return hint(*from_plain(fields, value, finite=finite))
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and value is None and finite:
        return None
    if type(value) is not hint or (finite and hint is float and not math.isfinite(value)):
        raise _mismatch(value, hint)
    return value


T = TypeVar("T")

_HINTS: dict[type, dict[str, Any]] = {}

#: In place of a default: the caller has to give this setting.
REQUIRED: Final[Any] = dataclasses.MISSING

#: Metadata of a field of a member, or of a dataclass in it: any worker could have kept the same, so
#: that workers who come later get it. Or a function of the dataclass that tells whether that is so.
COMMON: Final[Mapping[str, Any]] = MappingProxyType({"common": True})

#: Of a run, servers included, and of nodes: 16 times as many as were ever simulated here.
MAX_RANKS: Final = 2**14
#: Of a run, and of what is counted in steps or epochs: 30 years of one a second.
MAX_STEPS: Final = 10**9
#: What torch and NumPy seed a generator with.
MAX_SEED: Final = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class NumberRange:
    """The range of a number; in a tuple, of each of its numbers."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def complaint(self, value: float) -> str | None:
        """Return a complaint about `value`, or None. NaN is outside of every range."""
        if self.above is not None and not value > self.above:
            return f"{value!r} is not above {self.above!r}"
        if self.low is not None and not value >= self.low:
            return f"{value!r} is below {self.low!r}"
        if self.high is not None and not value <= self.high:
            return f"{value!r} is above {self.high!r}"
        return None

    def __str__(self) -> str:
        words = []
        if self.low is not None:
            words.append(f"at least {self.low!r}")
        elif self.above is not None:
            words.append(f"above {self.above!r}")
        if self.high is not None:
            words.append(f"at most {self.high!r}")
        return ", ".join(words)


def setting(
    default: T,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    **more: object,
) -> T:
    """Return a field of a `Settings` class: its default, what it means, and its range.

    `low` and `high` belong to the range, `above` does not. `REQUIRED` stands for no default. A
    list, dict or set given as default is copied for each object. `more` is kept as metadata.
    """
    metadata = {"meaning": meaning, "limits": NumberRange(low, high, above), **more}
    # dataclasses refuse mutable defaults, which all objects would share.
    if type(default).__hash__ is None:
        factory = partial(copy.deepcopy, default)
        return dataclasses.field(default_factory=factory, metadata=metadata)
    field: T = dataclasses.field(default=default, metadata=metadata)
    return field


def redefault(base: type[Settings], name: str, default: T) -> T:
    """Return the setting `name` of `base` again, in a subclass, with another default."""
    field: T = dataclasses.field(default=default, metadata=base.__dataclass_fields__[name].metadata)
    return field


@dataclasses.dataclass(frozen=True, repr=False)
class Settings:
    """Base of every frozen dataclass of settings; subclass with `frozen=True, repr=False`.

    Construction checks each field against its annotation and range, and converts what can be
    converted without loss (an int for a float, a list for a tuple).

    Raises:
        InputError: a value of the wrong type, out of range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        for field in settings_of(type(self)):
            value = checked(type(self), field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Check rules that span several fields; raise `InputError` where one is broken."""

    def with_setting(self, name: str, value: object) -> Self:
        """Return a copy with the setting `name` replaced, and checked again."""
        require_setting(type(self), name)
        return dataclasses.replace(self, **{name: value})

    def __repr__(self) -> str:
        return call_text(self, repr)


class Described(NamedTuple):
    name: str
    type: str
    default: str
    range: str
    meaning: str


def describe(cls: type[Settings]) -> list[Described]:
    """Return the settings of `cls` in words, in the order of its constructor."""
    hints = type_hints(cls)
    return [
        Described(
            field.name,
            type_text(hints[field.name]),
            repr(default) if (default := default_of(field)) is not REQUIRED else "required",
            str(_limits(field)),
            str(field.metadata.get("meaning", "")),
        )
        for field in settings_of(cls)
    ]


def settings_of(cls: type[Settings]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields that the constructor of `cls` takes, in order: keyword-only ones last.

    Raises:
        InputError: `cls` has settings of its own, and is not decorated.
    """
    require_decorated(cls, "@dataclass(frozen=True, repr=False)")
    taken = (field for field in dataclasses.fields(cls) if field.init)
    return tuple(sorted(taken, key=lambda field: bool(field.kw_only)))


def require_decorated(cls: type, decorator: str) -> None:
    """Raise `InputError` if `cls` has fields of its own but lacks the `decorator` of dataclasses.

    Python would take them for plain attributes of the class, without a word.
    """
    if "__dataclass_fields__" not in vars(cls) and inspect.get_annotations(cls):
        raise InputError(f"{cls.__name__} is not a dataclass: decorate it with {decorator}")


class Completed:
    """A base of abstract dataclasses that others derive from: one that its author has not completed
    is refused in one line.
    """

    def __new__(cls, *values: object, **named: object) -> Self:
        if missing := getattr(cls, "__abstractmethods__", ()):
            names = ", ".join(sorted(missing))
            raise InputError(f"{cls.__name__} is not complete: it has to define {names}")
        require_decorated(cls, "@dataclass(eq=False)")
        return super().__new__(cls)


def type_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of `cls`, evaluated on first use."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def default_of(field: dataclasses.Field[Any]) -> object:
    """Return the default of `field`, or `REQUIRED`."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def require_setting(cls: type[Settings], name: str) -> None:
    """Raise `InputError`, with the nearest known one, unless `cls` has a setting `name`."""
    known = [field.name for field in settings_of(cls)]
    if name not in known:
        hint = nearest(name, known) if known else "it has no settings"
        raise InputError(f"{cls.__name__} has no setting {name!r}; {hint}")


def checked(cls: type[Settings], field: dataclasses.Field[Any], value: object) -> object:
    """Return `value` as `field`, a setting of `cls`, wants it, and inside its range."""
    try:
        value = convert(value, type_hints(cls)[field.name])
        require_within(field, value)
    except Mismatch as mismatch:
        raise InputError(f"{cls.__name__}.{field.name}: {mismatch}") from None
    return value


def require_within(field: dataclasses.Field[Any], value: object) -> None:
    """Raise `Mismatch` for a number, or one in a tuple, outside of the range of `field`."""
    if "limits" not in field.metadata:
        return
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and (complaint := _limits(field).complaint(number)):
            raise Mismatch(complaint)


def call_text(settings: Settings, text: Callable[[object], str], name: str | None = None) -> str:
    """Return the constructor call of `settings`, its values written by `text`.

    Positional settings always stand, keyword-only ones where they differ from their default.
    """
    arguments = []
    for field in settings_of(type(settings)):
        value = getattr(settings, field.name)
        if not field.kw_only:
            arguments.append(text(value))
        elif value != default_of(field):
            arguments.append(f"{field.name}={text(value)}")
    return f"{name or type(settings).__name__}({', '.join(arguments)})"


def _limits(field: dataclasses.Field[Any]) -> NumberRange:
    limits: NumberRange = field.metadata.get("limits", NumberRange())
    return limits
