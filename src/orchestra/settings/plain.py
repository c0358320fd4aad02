"""Dataclasses as lists, dicts, texts and numbers, which JSON carries, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any, *, finite: bool = False) -> Any:
    """Return a dataclass as a dict of its fields, a tuple as a list; what is in them, too.

    Args:
        finite: None takes the place of NaN and of infinities, which JSON does not have.
    """
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, finite=finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value


def from_plain(hint: Any, value: Any) -> Any:
    """Return the object of the annotation `hint` that `to_plain` made `value` of.

    Fields with a default may be missing.

    Raises:
        TypeError, ValueError: it is nothing of the kind.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _fields_from_plain(hint, value)
    if origin in (Union, UnionType):  # X | None
        (part,) = (part for part in inner if part is not NoneType)
        return None if value is None else from_plain(part, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: from_plain(inner[1], item) for key, item in dict(value).items()}
    if origin is not None:  # a sequence
        each = origin is tuple and inner[-1] is not Ellipsis
        hints = inner if each else [inner[0]] * len(value)
        items = [from_plain(part, item) for part, item in zip(hints, value, strict=True)]
        return tuple(items) if origin is tuple else items
    if issubclass(hint, tuple):  # a NamedTuple
        parts = zip(get_type_hints(hint).values(), value, strict=True)
        return hint(*(from_plain(part, item) for part, item in parts))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value


def _fields_from_plain(cls: Any, value: Any) -> Any:
    hints = get_type_hints(cls)
    required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    if not isinstance(value, dict) or not required <= value.keys() <= hints.keys():
        raise TypeError(f"{cls.__name__} has {', '.join(hints)}")
    return cls(**{name: from_plain(hints[name], item) for name, item in value.items()})
