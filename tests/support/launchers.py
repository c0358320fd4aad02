"""Ranks that a launcher starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.commands import DEADLINE_SECONDS, Started


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Processes of a test, which end with it, and so does what they started."""
    processes: list[Started] = []
    yield processes
    forget(processes)


def forget(started: list[Started]) -> None:
    """End whatever is left of them."""
    while started:
        started.pop().__exit__(None, None, None)


def ended(process: Started) -> tuple[int, str]:
    return process.process.wait(DEADLINE_SECONDS), process.err()
