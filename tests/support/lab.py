"""What the default run leaves to the lab."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_lab(cases: Iterable[Any]) -> list[Any]:
    """Mark cases; a case is a value or a tuple of values."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.lab)
        for case in cases
    ]


def some(cases: Sequence[Any], every: int = 2) -> list[Any]:
    """Leave every second case, from the first one on, in the default run, or every third."""
    return [case if place % every == 0 else in_lab([case])[0] for place, case in enumerate(cases)]


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
