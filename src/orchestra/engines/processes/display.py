"""Live progress of a run, or of a series of runs, on standard error: fraction, speed, loss."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestra.cluster.units import clock_text
from orchestra.engines.events import Event, Heartbeat, Interrupted, Joined, Notice
from orchestra.engines.live import LiveFile, slow_ranks_of
from orchestra.strategies.base import Roles
from orchestra.trainer.settings import Run

if TYPE_CHECKING:
    from rich import progress as bars

LINE_SECONDS = 10.0  # between lines of progress where there is no terminal
WIDE = 100  # columns of a terminal from which on bars and names need not be short
BEHIND = 0.8  # a worker with less than this part of the leader's steps is named


class Progress:
    """How far a series of `total` runs is, for its user, on standard error.

    On a terminal a bar over all runs stands above that of the run under way; elsewhere each
    finished run is one line. Silent with `quiet`.

    Attributes:
        interrupted: Ctrl-C was pressed during a run.
        what: names the run under way.
    """

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.interrupted = False
        self.what = ""
        self._total = total
        self._done = 0
        self._seconds: list[float] = []
        self._began = self._run_began = time.monotonic()
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
        self._run_began = time.monotonic()
        self._show()

    def finish(self, outcome: str, *, failed: bool = False) -> None:
        """Show that the run has ended; `outcome` says how, in one line."""
        self._seconds.append(time.monotonic() - self._run_began)
        if failed or self.live is None:
            self._print(f"{self._done + 1}/{self._total} {self.what}: {outcome}")
        self.skip()

    def tell(self, text: str) -> None:
        """Print a notice for the user."""
        self._print(text if self.live is not None else f"orchestra: {text}")

    def _print(self, line: str) -> None:
        if self.live is not None:
            self.live.console.print(line, style="yellow", markup=False, highlight=False)
        elif not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def _show(self) -> None:
        if self.live is not None:
            state = _state(self._done / self._total)
            self.live.update(self._task, description=self._title(), **state)

    def _title(self) -> str:
        return f"run {min(self._done + 1, self._total)} of {self._total}"

    def _text(self) -> str:
        now = time.monotonic()
        text = f"{clock_text(now - self._began)} elapsed"
        if self._seconds:
            mean = sum(self._seconds) / len(self._seconds)
            left = mean * (self._total - self._done) - min(now - self._run_began, mean)
            text += f", about {clock_text(left)} left"
        return text


class Lines:
    """Progress where there is no terminal: a line on standard error at first, and now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_at: float | None = None

    def __call__(self, what: str, part: float) -> None:
        """Show that `part` of `what` is done, if the last line was long enough ago."""
        now = self._clock()
        if self._told_at is None or now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            print(f"orchestra: {what}, {part:.0%}", file=sys.stderr, flush=True)


def print_notice(event: Event | Notice) -> None:
    """Print the notices among what a watcher tells, where nothing else is shown of a run."""
    if isinstance(event, Notice):
        print(f"orchestra: {event.text}", file=sys.stderr, flush=True)


class Display:
    """A progress line on standard error; silent with `quiet`, or where that is no terminal.

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
        self._phase = "set-up"
        self._training_since: float | None = None
        self._series = progress
        self._progress = progress or Progress(1, quiet=quiet)
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
        elif isinstance(event, Interrupted):
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
        if self._progress.live is not None:
            if event.phase != "serving":
                self._phase = event.phase
            if event.phase == "training" and event.rank in self._beats:
                self._training_since = self._training_since or time.monotonic()
                self._beats[event.rank] = event
                self._loss = event.loss if event.loss is not None else self._loss
                self._fraction = max(self._fraction, event.fraction or 0.0)
            self._progress.live.update(self._task, **_state(self._fraction))

    def _text(self) -> str:
        samples = sum(beat.samples for beat in self._beats.values())
        parts = [] if samples and self._phase == "training" else [self._phase]
        if self._training_since is not None and samples:
            seconds = max(time.monotonic() - self._training_since, 1e-9)
            parts.append(f"{samples:,} samples, {samples / seconds:,.0f}/s")
            if self._fraction:
                parts.append(f"{seconds * (1 / self._fraction - 1):.0f} s left")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        steps = {rank: beat.step for rank, beat in self._beats.items()}
        # A step less than that: beats do not come at one moment.
        enough = BEHIND * max(steps.values()) - 1
        behind = [str(rank) for rank, done in steps.items() if done < enough]
        if slow := self._slow.present:
            parts.append(slow[0].text)
        elif behind:
            parts.append(f"behind: rank {', '.join(behind)}")
        return ", ".join(parts)


def _bars() -> bars.Progress:
    """Make the bars, which rich draws; it is imported only where there is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Status(ProgressColumn):
        """The text that a function returns at the moment of drawing."""

        def render(self, task: Task) -> Text:
            return Text(task.fields["text"](), no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
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
