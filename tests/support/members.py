"""Members whose methods a test has a hand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M")


def wrapped(member: M, name: str, wrapper: Callable[[Callable[[], Any]], Any]) -> M:
    """Let `wrapper(method)` take the place of the method `name`, which has no arguments."""
    method = getattr(member, name)
    setattr(member, name, lambda: wrapper(method))
    return member
