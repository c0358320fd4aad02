"""Writes down how far a run under way is, for whoever watches it; see `orchestra.records.live`."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestra.engines.events import Heartbeat
from orchestra.engines.processes.slow_ranks import SlowRanks
from orchestra.records.live import Live, RankNow, Waiting, host_name, remove_live, write_live

WRITE_SECONDS = 1.0
LEAST_PAUSE = 50
"""Between two writes, in times of what the last one took since `due`: 2 % of one core at most."""
BEATS = 20
"""Of a rank: of so many the waits are counted, 10 s of them on processes."""
MAX_NOTICES = 5


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
        """Whether it is time to write."""
        self._began = self._clock()
        return self._began >= self._next

    def on_beat(self, beat: Heartbeat) -> None:
        """Take in one heartbeat."""
        self._beats[beat.rank] = beat
        if beat.phase == "training" and self._since is None and beat.step:
            self._since, self._fraction_then = self._clock(), beat.fraction or 0.0
        if beat.phase in ("training", "serving"):
            self._waits.setdefault(beat.rank, deque(maxlen=BEATS)).append(beat.waits_for)
        if beat.fraction is not None:
            self._fraction = max(self._fraction or 0.0, beat.fraction)

    def on_notice(self, text: str) -> None:
        """Take in one line for the user."""
        self._notices.append(text)

    def write(self) -> None:
        """Write what is known now."""
        now = self._clock()
        ranks = tuple(self._now(self._beats[rank]) for rank in sorted(self._beats))
        write_live(
            self._folder,
            Live(
                now,
                host_name(),
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
        self._next = ended + max(WRITE_SECONDS, LEAST_PAUSE * (ended - self._began))

    def remove(self) -> None:
        """The run has ended well."""
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
    """The time in seconds since 1970, now and again whenever `apart` seconds have passed."""
    while True:
        yield time.time()
        time.sleep(apart)
