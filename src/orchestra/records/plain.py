"""What a rank reports, as lists, dicts, texts and numbers, and back: what JSON carries."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """A dataclass as a dict of its fields, a tuple as a list; what is in them, too."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(hint: Any, value: Any) -> Any:
    """What `to_plain` made of an object that the annotation `hint` describes.

    Raises:
        KeyError, TypeError, ValueError: it is nothing of the kind.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else from_plain(inner[0], value)
    if origin is list:
        return [from_plain(inner[0], item) for item in value]
    if origin is tuple:  # tuple[X, ...]
        return tuple(from_plain(inner[0], item) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return {key: from_plain(inner[1], item) for key, item in value.items()}
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{f.name: from_plain(hints[f.name], value[f.name]) for f in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple
        inside = get_type_hints(hint).values()
        return hint(*(from_plain(one, item) for one, item in zip(inside, value, strict=True)))
    return value
