"""What the links of an emulated cluster carry while ranks train, as the ranks read it themselves.

Each rank reads all counters before it says that it trains, and no rank's stopwatch starts until all
have said so (`start_together`): the highest readings are those at the start, however late the
launcher hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestra.engines.emulation.network import LinkCounters, Meters
from orchestra.engines.emulation.nodes import TRAINING
from orchestra.worker.runtime import PassingReporter

Readings = dict[str, LinkCounters]


@dataclass
class MeteredReporter(PassingReporter):
    """Reads the counters when its rank begins to train for the first time and whenever it stops."""

    meters: Meters
    before: Readings = field(default_factory=dict)
    after: Readings = field(default_factory=dict)

    def phase(self, name: str) -> None:
        if name in TRAINING and not self.before:
            self.before = self.meters.read()
        elif name not in TRAINING and self.before:
            self.after = self.meters.read()
        super().phase(name)
