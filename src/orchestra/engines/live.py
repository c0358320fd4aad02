"""The progress of a run under way, for its user on standard error, and for others in `live.json`
(see `orchestra.records.live`): the part that is done, speed, loss, and ranks that hold up others.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Self

from orchestra.cluster.units import clock_text
from orchestra.engines.events import Event, Heartbeat, Interrupted, Joined, Notice, Terminated
from orchestra.errors import tell, visible
from orchestra.records.live import (
    MAX_NOTICES,
    Live,
    RankNow,
    Waiting,
    read_live,
    remove_live,
    write_live,
)
from orchestra.records.report import CounterSeries, StragglerFinding
from orchestra.records.stragglers import find
from orchestra.strategies.base import Roles
from orchestra.strategies.traits import Partition
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import RankActivity

if TYPE_CHECKING:
    from rich import progress as bars

WRITE_SECONDS = 1.0
LEAST_PAUSE = 50
"""Between two writes, in times of what the last one took since `due`: 2 % of one core at most."""
BEATS = 20
"""Heartbeats of a rank over which its waits are counted; on processes they span 10 s."""

LOOK_SECONDS = 2.0  # between two comparisons
LASTING_SECONDS = 5.0  # what lasts less is not told
STALE = 0.75  # of the time: a rank that has reported nothing since may be lost

LINE_SECONDS = 10.0  # between lines of progress where there is no terminal
RUN_LINE_SECONDS = 30.0  # the same of a run, and from its beginning to its first line
WIDE = 100  # columns of a terminal from which on bars and names need not be short
BEHIND = 0.8  # a worker with less than this part of the leader's steps is named


class SlowRanks:
    """Keeps the counters of all ranks, and compares them now and then.

    `tell` is called with a line when a straggler is first found, and when it has recovered; once
    for each of its stretches, however often the figures change. Ranks that have not `alike` work
    are not compared.
    """

    def __init__(
        self,
        servers: Collection[int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        alike: bool = True,
    ) -> None:
        self.hosts: dict[int, str] = {}  # of the ranks, as they join
        self.present: list[StragglerFinding] = []  # of this moment
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
        points = {rank: series.points for rank, series in self._by_rank.items()}
        newest = max(own[-1].seconds for own in points.values())
        found = find(
            {rank: own for rank, own in points.items() if own[-1].seconds >= STALE * newest},
            servers=self._servers,
            nodes=self.hosts if len({*self.hosts.values()}) > 1 else {},
            least_seconds=LASTING_SECONDS,
        )
        self.present = [each for each in found if each.until_seconds is None]
        for each in self.present:
            if each.key not in self._told:
                self._told.add(each.key)
                since = "" if each.since_step is None else f", since step {each.since_step}"
                self._tell(f"{each.text}{since}")
        for key in self._told & {each.key for each in found} - {each.key for each in self.present}:
            self._told.discard(key)
            who = next(each.who for each in found if each.key == key)
            self._tell(f"{who} is as fast as the others again")


def slow_ranks_of(run: Run, roles: Roles, tell: Callable[[str], None]) -> SlowRanks:
    """Make what compares the ranks of `run`; stages of a model have unlike work."""
    alike = run.strategy.traits().partition is not Partition.STAGED
    return SlowRanks(set(roles.servers) - set(roles.workers), tell, alike=alike)


class LiveFile:
    """Keeps the last beats of all ranks of a run, and writes them to `live.json` in `folder`.

    `slow` finds the stragglers. The owner of this object passes each beat to `slow`, too.
    """

    def __init__(
        self, folder: Path, slow: SlowRanks, clock: Callable[[], float] = time.time
    ) -> None:
        self.slow = slow
        self._folder = folder
        self._clock = clock
        self._beats: dict[int, Heartbeat] = {}
        self._waits: dict[int, deque[tuple[int, ...]]] = {}
        before = read_live(folder)
        # A restarted run goes on in the same process, and why it was restarted is still news.
        own = before is not None and (before.host, before.process) == (gethostname(), os.getpid())
        self._notices = deque(before.notices if before and own else (), maxlen=MAX_NOTICES)
        self._since: float | None = None
        self._fraction: float | None = None
        self._fraction_then = 0.0
        self._next = self._began = 0.0

    def due(self) -> bool:
        self._began = self._clock()
        return self._began >= self._next

    def on_beat(self, beat: Heartbeat) -> None:
        self._beats[beat.rank] = beat
        if beat.activity is RankActivity.TRAINING and self._since is None and beat.step:
            self._since, self._fraction_then = self._clock(), beat.fraction or 0.0
        if beat.activity in (RankActivity.TRAINING, RankActivity.SERVING):
            self._waits.setdefault(beat.rank, deque(maxlen=BEATS)).append(beat.waits_for)
        if beat.fraction is not None:
            self._fraction = max(self._fraction or 0.0, beat.fraction)

    def on_notice(self, text: str) -> None:
        self._notices.append(text)

    def write(self) -> None:
        now = self._clock()
        ranks = tuple(self._now(self._beats[rank]) for rank in sorted(self._beats))
        live = Live(
            now, gethostname(), os.getpid(), ranks, self._since, self._fraction,
            self._fraction_then, tuple(self.slow.present), tuple(self._notices),
        )  # fmt: skip
        write_live(self._folder, live)
        ended = self._clock()
        # From `due` on, which begins a write: comparing ranks counts as well.
        self._next = ended + max(WRITE_SECONDS, LEAST_PAUSE * (ended - self._began))

    def remove(self) -> None:
        """Remove the file, after a run that has ended well."""
        remove_live(self._folder)

    def _now(self, beat: Heartbeat) -> RankNow:
        waits = self._waits.get(beat.rank, ())
        most = Counter(ranks for ranks in waits if ranks).most_common(2)
        waiting = tuple(Waiting(ranks, round(count / len(waits), 3)) for ranks, count in most)
        now = RankNow(beat.rank, beat.activity, beat.step, beat.samples, waiting)
        if beat.counters is None:
            return now
        return replace(now, seconds=beat.counters.seconds, arrived=beat.counters.arrived)


def moments(apart: float) -> Iterator[float]:
    """Yield the time in seconds since 1970, now and again every `apart` seconds."""
    while True:
        yield time.time()
        time.sleep(apart)


# On standard error


class Progress:
    """How far a series of `total` runs is, for its user, on standard error.

    On a terminal a bar over all runs stands above that of the run under way; elsewhere each
    finished run is one line. Silent with `quiet`.
    """

    def __init__(
        self, total: int, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quiet = quiet
        self.interrupted = False  # by Ctrl-C during a run
        self.what = ""  # the name of the run under way
        self._total = total
        self._done = 0
        self._seconds: list[float] = []
        self._clock = clock
        self._began = self._run_began = clock()
        self.live = _bars() if sys.stderr.isatty() and not quiet else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
            self._task = self.live.add_task(self._title(), total=None, text=self._text)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def skip(self) -> None:
        """Count one more run that was done before."""
        self._done += 1
        self._show()

    def begin(self, what: str) -> None:
        """Show that the run named `what` begins."""
        self.what = what
        self._run_began = self._clock()
        self._show()

    def finish(self, outcome: str, *, failed: bool = False) -> None:
        """Show that the run has ended; `outcome` says how, in one line."""
        self._seconds.append(self._clock() - self._run_began)
        if failed or self.live is None:
            self._print(f"{self._done + 1}/{self._total} {self.what}: {outcome}")
        self.skip()

    def tell(self, text: str) -> None:
        """Print a notice for the user."""
        self._print(text if self.live is not None else f"orchestra: {text}")

    def _print(self, line: str) -> None:
        if self.live is not None:
            self.live.console.print(line, style="yellow")
        elif not self.quiet:
            print(visible(line), file=sys.stderr, flush=True)

    def _show(self) -> None:
        if self.live is not None:
            state = _state(self._done / self._total)
            self.live.update(self._task, description=self._title(), **state)

    def _title(self) -> str:
        return f"run {min(self._done + 1, self._total)} of {self._total}"

    def _text(self) -> str:
        now = self._clock()
        text = f"{clock_text(now - self._began)} elapsed"
        if self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            left = mean * (self._total - self._done) - min(now - self._run_began, mean)
            text += f", about {clock_text(left)} left"
        return text


class Lines:
    """Progress where there is no terminal: a line on standard error every so many `seconds`, the
    first one `at_once` or after that time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = LINE_SECONDS,
        *,
        at_once: bool = True,
    ) -> None:
        self._clock, self._seconds = clock, seconds
        self._next = -math.inf if at_once else clock() + seconds

    def __call__(self, what: str, part: float) -> None:
        """Show that `part` of `what` is done, if the last line was long enough ago."""
        if self.is_due:
            self._next = self._clock() + self._seconds
            tell(f"{what}, {part:.0%}")

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._next


def print_notice(event: Event | Notice) -> None:
    """Print the notices among what a watcher tells, where nothing else is shown of a run."""
    if isinstance(event, Notice):
        tell(event.text)


class Display:
    """A progress line on standard error, silent with `quiet`; where that is no terminal, a new line
    now and then.

    Notices are printed wherever standard error goes. In a series of runs its line stands under
    that of their `progress`. With a `folder`, `live.json` there says the same to others.
    """

    def __init__(
        self,
        run: Run,
        roles: Roles,
        *,
        quiet: bool = False,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> None:
        self._name = run.name
        self._beats = {rank: Heartbeat(rank) for rank in roles.workers}  # in training
        self._loss: float | None = None
        self._fraction = 0.0
        self._activity = RankActivity.SET_UP
        self._training_since: float | None = None
        self._series = progress
        self._progress = progress or Progress(1, quiet=quiet)
        self._lines = Lines(seconds=RUN_LINE_SECONDS, at_once=False)
        self._slow = slow_ranks_of(run, roles, self._tell)
        self._file = None if folder is None else LiveFile(folder, self._slow)

    def __enter__(self) -> Self:
        if (live := self._progress.live) is not None:
            if self._series is None:
                live.start()
            self._task = live.add_task(self._name, total=None, text=self._text)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._file is not None and kind is None:
            self._file.remove()
        elif self._file is not None:
            self._file.write()
        if (live := self._progress.live) is not None:
            live.remove_task(self._task)
            if self._series is None:
                live.stop()

    def on_event(self, event: Event | Notice) -> None:
        if isinstance(event, Notice):
            self._tell(event.text)
            if self._file is not None:
                self._file.on_notice(event.text)
        elif isinstance(event, Interrupted | Terminated):
            self._progress.interrupted = True
        elif isinstance(event, Joined):
            self._slow.hosts[event.rank] = event.host
        elif isinstance(event, Heartbeat):
            self._slow.on_beat(event)
            self._show(event)
            if self._file is not None:
                self._file.on_beat(event)
                if self._file.due():
                    self._file.write()

    def _tell(self, text: str) -> None:
        prefix = "" if self._series is None else f"{self._series.what}: "
        self._progress.tell(prefix + text)

    def _show(self, event: Heartbeat) -> None:
        if self._progress.quiet:
            return
        if event.activity is not RankActivity.SERVING:
            self._activity = event.activity
        if event.activity is RankActivity.TRAINING and event.rank in self._beats:
            self._training_since = self._training_since or time.monotonic()
            self._beats[event.rank] = event
            self._loss = event.loss if event.loss is not None else self._loss
            self._fraction = max(self._fraction, event.fraction or 0.0)
        if self._progress.live is not None:
            self._progress.live.update(self._task, **_state(self._fraction))
        elif self._lines.is_due:
            name = self._name if self._series is None else self._series.what
            self._lines(f"{name}: {self._text()}", self._fraction)

    def _text(self) -> str:
        samples = sum(beat.samples for beat in self._beats.values())
        training = self._activity is RankActivity.TRAINING
        parts: list[str] = [] if samples and training else [self._activity]
        if self._training_since is not None and samples:
            seconds = max(time.monotonic() - self._training_since, 1e-9)
            parts.append(f"{samples:,} samples, {samples / seconds:,.0f}/s")
            if self._fraction:
                parts.append(f"{seconds * (1 / self._fraction - 1):.0f} s left")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        steps = {rank: beat.step for rank, beat in self._beats.items()}
        enough = BEHIND * max(steps.values()) - 1  # as beats do not come at one moment
        behind = [str(rank) for rank, done in steps.items() if done < enough]
        if slow := self._slow.present:
            parts.append(slow[0].text)
        elif behind:
            parts.append(f"behind: rank {', '.join(behind)}")
        return ", ".join(parts)


def _bars() -> bars.Progress:
    """Make the bars, which rich draws; it is imported only where there is a terminal."""
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    from orchestra.records.terminal import Terminal

    class Status(ProgressColumn):
        """The text that a function returns at the moment of drawing."""

        def render(self, task: Task) -> Text:
            return Text(task.fields["text"](), no_wrap=True, overflow="ellipsis")

    console = Terminal(stderr=True)
    bar, name = (24, 40) if console.width >= WIDE else (8, 14)
    column = Column(no_wrap=True, overflow="ellipsis", max_width=name)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=column),
        BarColumn(bar_width=bar),
        Status(),
        console=console,
        transient=True,
    )


def _state(fraction: float) -> dict[str, Any]:
    """Return what a bar shows; it moves to and fro while the fraction is not known."""
    return {"completed": fraction, "total": 1.0 if fraction else None}
