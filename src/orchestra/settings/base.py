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
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self, TypeVar, get_type_hints, overload

from orchestra.errors import InputError, nearest
from orchestra.settings.annotations import Mismatch, convert, type_text

T = TypeVar("T")

_HINTS: dict[type[Settings], dict[str, Any]] = {}


class Required:
    """The type of `REQUIRED`."""

    def __repr__(self) -> str:
        return "REQUIRED"


#: In place of a default: the caller has to give this setting.
REQUIRED: Final = Required()

#: Of a run, servers included, and of nodes: 16 times as many as were ever simulated here.
MOST_RANKS: Final = 2**14
#: Of a run, and of what is counted in steps or epochs: 30 years of one a second.
MOST_STEPS: Final = 10**9
#: What torch and NumPy seed a generator with.
MOST_SEED: Final = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """The range of a number; in a tuple, of each of its numbers."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def complaint(self, value: float) -> str | None:
        """What is wrong with `value`, or None."""
        if self.above is not None and value <= self.above:
            return f"{value!r} is not above {self.above!r}"
        if self.low is not None and value < self.low:
            return f"{value!r} is below {self.low!r}"
        if self.high is not None and value > self.high:
            return f"{value!r} is above {self.high!r}"
        return None

    def __str__(self) -> str:
        words = []
        if self.low is not None:
            words.append(f"at least {self.low!r}")
        if self.above is not None and self.low is None:
            words.append(f"above {self.above!r}")
        if self.high is not None:
            words.append(f"at most {self.high!r}")
        return ", ".join(words)


@overload
def setting(
    default: Required,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any: ...
@overload
def setting(
    default: T,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> T: ...
def setting(
    default: object,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A field of a `Settings` class: its default, what it means, and its range.

    `low` and `high` belong to the range, `above` does not. `REQUIRED` stands for no default. A
    list, dict or set given as default is copied for each object.
    """
    metadata = {"meaning": meaning, "limits": Limits(low, high, above)}
    if isinstance(default, Required):
        return dataclasses.field(metadata=metadata)
    if type(default).__hash__ is None:
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, repr=False)
class Settings:
    """Base of every frozen dataclass of settings; subclass with `frozen=True, repr=False`.

    Construction checks each field against its annotation and range, and converts what can be
    converted without loss (an int for a float, a list for a tuple).

    Raises:
        InputError: a value of the wrong type, out of range, or an unknown choice.
    """

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in settings_of(type(self)):
            value = checked(type(self), field, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Rules that span several fields; raise `InputError` where one is broken."""

    def with_setting(self, name: str, value: object) -> Self:
        """A copy with the setting `name` replaced, and checked again."""
        require_setting(type(self), name)
        return dataclasses.replace(self, **{name: value})

    def __repr__(self) -> str:
        return call_text(self, repr)


class Described(NamedTuple):
    """One setting, in words."""

    name: str
    type: str
    default: str
    range: str
    meaning: str


def describe(cls: type[Settings]) -> list[Described]:
    """The settings of `cls` in words, in the order of its constructor."""
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
    """The fields that the constructor of `cls` takes."""
    return tuple(field for field in dataclasses.fields(cls) if field.init)


def type_hints(cls: type[Settings]) -> dict[str, Any]:
    """The annotations of `cls`, evaluated on first use."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def default_of(field: dataclasses.Field[Any]) -> object:
    """The default of `field`, or `REQUIRED`."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def require_setting(cls: type[Settings], name: str) -> None:
    """Raise `InputError`, with the nearest known one, unless `cls` has a setting `name`."""
    known = [field.name for field in settings_of(cls)]
    if name not in known:
        hint = nearest(name, known) if known else "it has no settings"
        raise InputError(f"{cls.__name__} has no setting {name!r}; {hint}")


def checked(
    cls: type[Settings], field: dataclasses.Field[Any], value: object, hint: object
) -> object:
    """`value` converted to `hint` and inside the range of `field`."""
    try:
        value = convert(value, hint)
    except Mismatch as mismatch:
        raise InputError(f"{cls.__name__}.{field.name}: {mismatch}") from None
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float):
            complaint = _limits(field).complaint(number)
            if complaint:
                raise InputError(f"{cls.__name__}.{field.name}: {complaint}")
    return value


def call_text(
    settings: Settings,
    text: Callable[[object], str],
    name: str | None = None,
) -> str:
    """The constructor call of `settings`, its values written by `text`.

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


def _limits(field: dataclasses.Field[Any]) -> Limits:
    limits = field.metadata.get("limits", Limits())
    assert isinstance(limits, Limits)
    return limits
