"""What a run on processes leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A run that ended well.

    Attributes:
        results: what the program returned, by rank; None for a rank that was left out.
        left_out: why, for each rank that the run went on without.
        stopped: whether the user asked for an orderly stop.
        notices: what the user was told on the way, one line each.
        setup: seconds before the program began: `import`, only in the first launch of a process,
            until the process that all ranks are forked from had imported torch; `processes`, from
            there until every rank was there; `connections`, until all were connected to each other.
    """

    results: tuple[Any, ...]
    left_out: dict[int, str]
    stopped: bool
    notices: tuple[str, ...]
    setup: dict[str, float]
