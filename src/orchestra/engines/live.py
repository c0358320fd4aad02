"""What the beats of a run under way say: who holds up the others, and how far each rank is.

`LiveFile` writes it down for whoever watches the run; see `orchestra.records.live`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from socket import gethostname

from orchestra.engines.events import Heartbeat
from orchestra.records.live import Live, RankNow, Waiting, remove_live, write_live
from orchestra.records.report import CounterSeries, Straggler
from orchestra.records.stragglers import find
from orchestra.strategies.base import Roles
from orchestra.trainer.settings import Run

WRITE_SECONDS = 1.0
LEAST_PAUSE = 50
"""Between two writes, in times of what the last one took since `due`: 2 % of one core at most."""
BEATS = 20
"""Heartbeats of a rank over which its waits are counted; on processes they span 10 s."""
MAX_NOTICES = 5

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
    """Make what compares the ranks of `run`; stages of a model have unlike work."""
    alike = not run.strategy.divides_model
    return SlowRanks(set(roles.servers) - set(roles.workers), tell, alike=alike)


class LiveFile:
    """Keeps the last beats of all ranks of a run, and writes them to `live.json` in `folder`.

    `slow` knows the stragglers; whoever has the beats tells them to it as well.
    """

    def __init__(
        self, folder: Path, slow: SlowRanks, clock: Callable[[], float] = time.time
    ) -> None:
        self.slow = slow
        self._folder = folder
        self._clock = clock
        self._beats: dict[int, Heartbeat] = {}
        self._waits: dict[int, deque[tuple[int, ...]]] = {}
        self._notices: deque[str] = deque(maxlen=MAX_NOTICES)
        self._since: float | None = None
        self._fraction: float | None = None
        self._fraction_then = 0.0
        self._next = self._began = 0.0

    def due(self) -> bool:
        self._began = self._clock()
        return self._began >= self._next

    def on_beat(self, beat: Heartbeat) -> None:
        self._beats[beat.rank] = beat
        if beat.phase == "training" and self._since is None and beat.step:
            self._since, self._fraction_then = self._clock(), beat.fraction or 0.0
        if beat.phase in ("training", "serving"):
            self._waits.setdefault(beat.rank, deque(maxlen=BEATS)).append(beat.waits_for)
        if beat.fraction is not None:
            self._fraction = max(self._fraction or 0.0, beat.fraction)

    def on_notice(self, text: str) -> None:
        self._notices.append(text)

    def write(self) -> None:
        now = self._clock()
        ranks = tuple(self._now(self._beats[rank]) for rank in sorted(self._beats))
        write_live(
            self._folder,
            Live(
                now,
                gethostname(),
                os.getpid(),
                ranks,
                self._since,
                self._fraction,
                self._fraction_then,
                tuple(self.slow.present),
                tuple(self._notices),
            ),
        )
        ended = self._clock()
        # From `due` on, which begins a write: comparing ranks counts as well.
        self._next = ended + max(WRITE_SECONDS, LEAST_PAUSE * (ended - self._began))

    def remove(self) -> None:
        """Remove the file, after a run that has ended well."""
        remove_live(self._folder)

    def _now(self, beat: Heartbeat) -> RankNow:
        waits = self._waits.get(beat.rank, ())
        counts = Counter(ranks for ranks in waits if ranks)
        counters = beat.counters
        return RankNow(
            beat.rank,
            beat.phase,
            beat.step,
            beat.samples,
            tuple(
                Waiting(ranks, round(count / len(waits), 3))
                for ranks, count in counts.most_common(2)
            ),
            counters.seconds if counters else 0.0,
            counters.arrived if counters else (),
        )


def moments(apart: float) -> Iterator[float]:
    """Yield the time in seconds since 1970, now and again every `apart` seconds."""
    while True:
        yield time.time()
        time.sleep(apart)
