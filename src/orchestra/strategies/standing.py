"""Which strategies have been seen best: read from a table that `studies/standing.py` measures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestra.errors import InputError
from orchestra.settings import parse, write
from orchestra.strategies.registry import STRATEGIES

NEAR = 1.05
"""As good as the best: at most this many times its seconds to the target."""


@dataclass(frozen=True)
class Standing:
    """Seconds to the target of each task, of each strategy in its normal notation.

    Of all seeds the median; None: not reached. `remark` tells how that was measured.
    """

    seconds: dict[str, dict[str, float | None]]
    remark: str

    @classmethod
    def shipped(cls) -> Standing:
        """The table that comes with Orchestra."""
        table = json.loads(Path(__file__).with_name("standing.json").read_text())
        seconds = {task: measured["seconds"] for task, measured in table["tasks"].items()}
        return cls(seconds, table["remark"])

    @cached_property
    def _good_on(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for task, measured in self.seconds.items():
            reached = {name: value for name, value in measured.items() if value is not None}
            for name, value in reached.items():
                if value <= NEAR * min(reached.values()):
                    found.setdefault(name, []).append(task)
        return found

    def good_on(self, notation: str) -> list[str]:
        """The tasks on which this strategy was the best, or within 5 % of that."""
        return self._good_on.get(normal(notation), [])


def normal(notation: str) -> str:
    """The one text for all ways to write a strategy."""
    try:
        return write(parse(notation, STRATEGIES, where="standing"), STRATEGIES)
    except InputError:  # a plug-in's that cannot do without arguments
        return notation
