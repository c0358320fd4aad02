"""What the default run leaves to the lab."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

_PARAM = type(pytest.param())


def in_lab(cases: Iterable[Any]) -> list[Any]:
    """Mark cases; a case is a value, a tuple of values, or a `pytest.param`."""
    return [_marked(case) for case in cases]


def _marked(case: Any) -> Any:
    if isinstance(case, _PARAM):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.lab])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.lab)


def some(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Leave every second case, from the first one on, in the default run, or every third. Cases
    that are in the lab do not count."""
    usual = itertools.count()
    return [
        case if _is_in_lab(case) or next(usual) % every == 0 else _marked(case) for case in cases
    ]


def _is_in_lab(case: Any) -> bool:
    return isinstance(case, _PARAM) and any(mark.name == "lab" for mark in case.marks)


def by_turns(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs. By default, each value of one meets every second one of the other."""
    return [
        pytest.param(
            one,
            other,
            id=f"{one}-{other}",
            marks=pytest.mark.lab if (row + column) % 2 else (),
        )
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
