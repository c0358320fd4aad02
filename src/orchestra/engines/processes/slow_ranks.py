"""Who holds up the others of a run under way: from what heartbeats say, for the display."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from orchestra.engines.events import Heartbeat
from orchestra.records.report import CounterSeries
from orchestra.records.stragglers import Straggler, find
from orchestra.strategies.base import Roles
from orchestra.trainer.settings import Run

LOOK_SECONDS = 2.0  # between two comparisons
LASTING_SECONDS = 5.0  # what lasts less is not told
STALE = 0.75  # of the time: a rank that has reported nothing since may be lost


class SlowRanks:
    """Keeps the counters of all ranks, and compares them now and then.

    `tell` is called with a line when a straggler is first found, and when it has recovered; once
    for each of its stretches, however often the figures change. Ranks that have not `alike` work
    are not compared.

    Attributes:
        hosts: of the ranks, as they join.
        present: the stragglers of this moment.
    """

    def __init__(
        self,
        servers: Collection[int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        alike: bool = True,
    ) -> None:
        self.hosts: dict[int, str] = {}
        self.present: list[Straggler] = []
        self._servers = servers
        self._alike = alike
        self._tell = tell
        self._clock = clock
        self._by_rank: dict[int, CounterSeries] = {}
        self._told: set[tuple[object, ...]] = set()
        self._look_at = 0.0

    def on_beat(self, beat: Heartbeat) -> None:
        """Take in one heartbeat."""
        if beat.counters is None or not self._alike:
            return
        series = self._by_rank.setdefault(beat.rank, CounterSeries())
        if not series.points or beat.counters.seconds > series.points[-1].seconds:
            series.add(beat.counters)
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + LOOK_SECONDS
            self._look()

    def _look(self) -> None:
        newest = max(series.points[-1].seconds for series in self._by_rank.values())
        several = len({*self.hosts.values()}) > 1
        found = find(
            {
                rank: series.points
                for rank, series in self._by_rank.items()
                if series.points[-1].seconds >= STALE * newest
            },
            servers=self._servers,
            nodes=self.hosts if several else {},
            least_seconds=LASTING_SECONDS,
        )
        self.present = [each for each in found if each.until_seconds is None]
        for each in self.present:
            if each.key not in self._told:
                self._told.add(each.key)
                since = "" if each.since_step is None else f", since step {each.since_step}"
                self._tell(f"{each.text}{since}")
        for key in {each.key for each in found} - {each.key for each in self.present}:
            if key in self._told:
                self._told.discard(key)
                who = next(each.who for each in found if each.key == key)
                self._tell(f"{who} is as fast as the others again")


def slow_ranks_of(run: Run, roles: Roles, tell: Callable[[str], None]) -> SlowRanks:
    """What compares the ranks of `run`; stages of a model have unlike work."""
    alike = not run.strategy.divides_model
    return SlowRanks(set(roles.servers) - set(roles.workers), tell, alike=alike)
