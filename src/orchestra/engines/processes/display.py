"""Live progress of a run on a terminal: how far, how fast, the loss, and who is behind."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from orchestra.engines.processes.events import Beat, Event, Notice
from orchestra.strategies.base import Roles
from orchestra.trainer.settings import Run

BEHIND = 0.8  # a worker with less than this part of the leader's steps is named


class Display:
    """A progress line on standard error; silent with `quiet`, or where that is no terminal.

    Notices are printed wherever standard error goes.
    """

    def __init__(self, run: Run, roles: Roles, *, quiet: bool) -> None:
        self._name = run.name
        self._workers = roles.workers
        self._steps = dict.fromkeys(roles.workers, 0)
        self._samples = dict.fromkeys(roles.workers, 0)
        self._loss: float | None = None
        self._fraction = 0.0
        self._phase = "set-up"
        self._quiet = quiet
        self._training_since: float | None = None
        self._live = _Live() if sys.stderr.isatty() and not quiet else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def on_event(self, event: Event | Notice) -> None:
        """Take in one event of the watcher."""
        if isinstance(event, Notice):
            self._notice(event.text)
        elif isinstance(event, Beat) and self._live is not None:
            self._beat(event)
            self._live.update(self._fraction, self._text())

    def _notice(self, text: str) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._live.print(text)
        else:
            print(f"orchestra: {text}", file=sys.stderr)

    def _beat(self, beat: Beat) -> None:
        pulse = beat.pulse
        if pulse.phase != "serving":
            self._phase = pulse.phase
        if pulse.phase != "training" or beat.rank not in self._steps:
            return
        if self._training_since is None:
            self._training_since = time.monotonic()
        self._steps[beat.rank] = pulse.step
        self._samples[beat.rank] = pulse.samples
        self._loss = pulse.loss if pulse.loss is not None else self._loss
        self._fraction = max(self._fraction, pulse.fraction or 0.0)

    def _text(self) -> str:
        samples = sum(self._samples.values())
        parts = [self._phase]
        if self._training_since is not None and samples:
            seconds = max(time.monotonic() - self._training_since, 1e-9)
            parts.append(f"{samples:,} samples, {samples / seconds:,.0f}/s")
            if self._fraction:
                parts.append(f"{seconds * (1 / self._fraction - 1):.0f} s left")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        leader = max(self._steps.values())
        behind = [str(rank) for rank, steps in self._steps.items() if steps < BEHIND * leader - 1]
        if behind:
            parts.append(f"behind: rank {', '.join(behind)}")
        return ", ".join(parts)


class _Live:
    """The line itself, drawn by rich, which is imported only where there is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[name]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            transient=True,
        )

    def start(self, name: str) -> None:
        self._task = self._progress.add_task("starting", name=name, total=None)
        self._progress.start()

    def update(self, fraction: float, text: str) -> None:
        total = 1.0 if fraction else None
        self._progress.update(self._task, completed=fraction, total=total, description=text)

    def print(self, text: str) -> None:
        self._progress.console.print(text, style="yellow")

    def stop(self) -> None:
        self._progress.stop()
