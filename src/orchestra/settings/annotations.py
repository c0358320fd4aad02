"""A value against an annotation: converted where nothing is lost, refused with words otherwise."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from orchestra.errors import nearest

_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}


class Mismatch(Exception):
    """The value does not fit; the message says what it is and what was expected."""


def convert(value: object, hint: Any) -> object:
    """`value` as the annotation `hint` wants it; `Mismatch` where it does not fit."""
    origin = get_origin(hint)
    if hint in (Any, object):
        return value
    if origin is Literal:
        return _choice(value, get_args(hint))
    if origin in (Union, types.UnionType):
        return _union(value, hint)
    if origin is tuple:
        return _tuple(value, hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(value, hint)
    if hint in (int, float, bool, str):
        return _scalar(value, hint)
    return _instance(value, hint)


def wants_notation(hint: Any) -> bool:
    """Whether text given for `hint` is the notation of an object, not a value of its own."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [part for part in parts if _is_plain(part)]
    takes_text = any(part is str or get_origin(part) is Literal for part in plain)
    return len(plain) < len(parts) and not takes_text


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if isinstance(origin, type):
        return issubclass(origin, tuple | Mapping)
    return hint in _NAMES or origin is Literal


def type_text(hint: Any) -> str:
    """`hint` in words a user would use."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part) for part in parts)
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
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
        hint = nearest(value, [str(choice) for choice in choices])
        raise Mismatch(f"{value!r} is not known; {hint}")
    known = ", ".join(repr(choice) for choice in choices)
    raise Mismatch(f"{value!r} is not one of {known}")


def _union(value: object, hint: Any) -> object:
    parts = get_args(hint)
    for part in parts:
        try:
            return convert(value, part)
        except Mismatch:
            continue
    wanted = [part for part in parts if part is not type(None)]
    if isinstance(value, str) and len(wanted) > 1:
        wanted = [part for part in wanted if get_origin(part) is Literal]
    if len(wanted) == 1:
        convert(value, wanted[0])  # raises again, with the reason of the part that was meant
    raise _mismatch(value, hint)


def _tuple(value: object, hint: Any) -> tuple[object, ...]:
    parts = get_args(hint)
    if not isinstance(value, list | tuple):
        raise _mismatch(value, hint)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(convert(item, parts[0]) for item in value)
    if len(parts) != len(value):
        raise Mismatch(f"{value!r} has {len(value)} values, not {len(parts)}")
    return tuple(convert(item, part) for item, part in zip(value, parts, strict=True))


def _mapping(value: object, hint: Any) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise _mismatch(value, hint)
    key_hint, value_hint = get_args(hint) or (object, object)
    return {convert(key, key_hint): convert(item, value_hint) for key, item in value.items()}


def _scalar(value: object, hint: type) -> object:
    if isinstance(value, bool) or hint is bool:
        if isinstance(value, bool) and hint is bool:
            return value
        raise _mismatch(value, hint)
    if hint is int and isinstance(value, numbers.Integral):
        return int(value)
    if hint is float and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise Mismatch(f"{number!r} is not a finite number")
        return number
    if hint is str and isinstance(value, str):
        if not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise Mismatch(f"{value!r} is not text in UTF-8")
        return value
    raise _mismatch(value, hint)


def _instance(value: object, hint: Any) -> object:
    cls = get_origin(hint) or hint
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return value  # nothing to check against until it is used
    if isinstance(cls, type) and not isinstance(value, cls):
        raise _mismatch(value, hint)
    return value
