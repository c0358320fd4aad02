"""Pairs of settings: each by itself in the default run, and all of them in the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def by_turns(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs. By default each of the one meets every other of the other, beginning in turn."""
    return [
        pytest.param(
            one,
            other,
            id=f"{one}-{other}",
            marks=pytest.mark.matrix if (row + column) % 2 else (),
        )
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]
