"""The record of one rank's steps, and of its seconds by purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestra.records.exports import Scalars
from orchestra.records.report import MAX_SOURCES, Counters, CounterSeries
from orchestra.trainer.checkpoints import writing
from orchestra.worker.worker import Worker

T = TypeVar("T")

# `orchestra watch` and the trackers read the file as it grows (decision 100).
FLUSH_SECONDS = 1.0
SECONDS = ("compute", "communicate", "wait")


@dataclass
class Spent:
    """Seconds of the main flow by purpose, and the bytes that it sent."""

    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0
    bytes_sent: int = 0

    @staticmethod
    def by(worker: Worker) -> Spent:
        """Return all that the main flow of `worker` has spent so far."""
        traffic = worker.transport.traffic
        return Spent(
            worker.compute.seconds,
            # torch.distributed's collectives pass by the transport, so the worker counts them
            traffic.seconds_communicating + worker.measures.native_seconds,
            traffic.seconds_waiting,
            worker.transport.bytes_sent + worker.measures.native_bytes,
        )

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        """Return the sum of both, or the difference with `sign` -1."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Spent(*(own + sign * more for own, more in pairs))


@dataclass
class Totals:
    """Figures of the run so far, while the stopwatch ran; kept in checkpoints."""

    elapsed: float = 0.0
    spent: Spent = field(default_factory=Spent)
    samples: int = 0
    loss: float | None = None


class Recorder:
    """JSON lines of one rank's steps, in the file `path`; without one, sums over the run alone.

    The main figures of each step go to `scalars`, too, if given. `steps` were done before the run
    was resumed. The stopwatch runs between `resume` and `pause`: set-up, checkpoints and evaluation
    are not measured. `series` has counters to compare ranks by, since the run began or resumed.
    """

    def __init__(
        self,
        worker: Worker,
        path: Path | None,
        totals: Totals,
        steps: int = 0,
        scalars: Scalars | None = None,
    ) -> None:
        self.totals = totals
        self._worker = worker
        self._scalars = scalars
        self._path = path
        self._lines: list[str] = []
        self._started_at = self._flushed_at = 0.0
        self._spent_before = self._spent_last = Spent()
        self._seconds_last = totals.elapsed
        self.series = CounterSeries()
        self._steps = steps
        self._reading = self._read_last = 0.0  # seconds
        self._decided = 0  # decisions that are written down
        if path is not None:
            _keep_first(path, steps)

    def resume(self) -> None:
        """Start the stopwatch, or let it go on."""
        self._started_at = self._flushed_at = self._worker.transport.now()
        # The counters go on while the stopwatch stands; what they grew by meanwhile is left out
        self._spent_before = self._spent_last = Spent.by(self._worker)
        # Of a resumed run the decisions before stand in the file already
        self._decided = len(self._worker.measures.decisions)
        self._worker.runtime.stopwatch(True)
        self._keep_counters(self.totals.elapsed, self._spent_before)

    def pause(self) -> None:
        """Stop the stopwatch."""
        self.totals.elapsed = self.elapsed()
        spent = Spent.by(self._worker)
        self._keep_counters(self.totals.elapsed, spent)
        self.totals.spent = self.totals.spent.plus(spent.plus(self._spent_before, -1))
        self._worker.runtime.stopwatch(False)
        self.flush()

    def elapsed(self) -> float:
        """Return the seconds on the running stopwatch."""
        return self.totals.elapsed + self._worker.transport.now() - self._started_at

    def read(self, batch: Callable[[], T]) -> T:
        """Return the batch that `batch` reads; its seconds count as waiting for input."""
        began = self._worker.transport.now()
        result = batch()
        self._reading += self._worker.transport.now() - began
        return result

    def observe(self) -> None:
        """Note that something was done, if not a step."""
        seconds = self.elapsed()
        if self.series.due(seconds):
            self._keep_counters(seconds, Spent.by(self._worker))

    def _keep_counters(self, seconds: float, spent: Spent) -> None:
        arrived = self._worker.transport.arrived()
        # A server of a thousand workers would report a thousand pairs at each moment
        if len(arrived) > MAX_SOURCES:
            arrived = {}
        spent = self.totals.spent.plus(spent.plus(self._spent_before, -1))
        self.series.add(
            Counters(
                seconds,
                self._steps,
                self.totals.samples,
                self._worker.compute.main_seconds,
                self._reading,
                spent.communicate + spent.wait,
                tuple((source, *numbers) for source, numbers in arrived.items()),
            )
        )

    def step(self, number: int) -> None:
        """Write down step `number`, just finished."""
        step = self._worker.step
        self.totals.samples += step.samples
        self._steps = number
        if self._path is None:
            self.observe()
            return
        self.totals.loss = step.loss
        spent = Spent.by(self._worker)
        passed = vars(spent.plus(self._spent_last, -1))
        self._spent_last = spent
        seconds = self.elapsed()
        if self.series.due(seconds):
            self._keep_counters(seconds, spent)
        line: dict[str, Any] = {
            "step": number,
            # Microseconds: more digits would double the file, and are noise
            "seconds": round(seconds, 6),
            "samples": step.samples,
            "consumed": step.consumed,
            "loss": step.loss,
            "rates": step.rates,
            **{name: round(passed[name], 6) for name in SECONDS},
            "input": round(self._reading - self._read_last, 6),
            "bytes_sent": passed["bytes_sent"],
        }
        self._read_last = self._reading
        if step.staleness:
            line["staleness"] = step.staleness
        if (switched := self._worker.measures.switched_at_step) is not None:
            line["switched_at_step"] = switched
        decisions = self._worker.measures.decisions
        # At most one decision lies between two steps
        if len(decisions) > self._decided:
            line["decision"], self._decided = decisions[-1], len(decisions)
        if step.position is not None:
            line["position"] = step.position
        self._lines.append(json.dumps(line) + "\n")
        if self._scalars is not None:
            self._scalars.add(number, self._figures(line["seconds"]))
        if self._worker.transport.now() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def _figures(self, seconds: float) -> dict[str, float]:
        """Return the figures of the step that was finished `seconds` after the start."""
        step = self._worker.step
        passed, self._seconds_last = seconds - self._seconds_last, seconds
        figures = {"loss": step.loss}
        figures |= {f"learning rate/{group}": rate for group, rate in enumerate(step.rates)}
        # A simulated step may take no time
        if passed > 0:
            figures["samples per second"] = step.samples / passed
        if step.staleness:
            figures["staleness"] = max(step.staleness)
        return figures

    def flush(self) -> None:
        """Bring what was written down to disk."""
        if self._path is None:
            return
        with writing(self._path), self._path.open("a") as file:
            file.writelines(self._lines)
            if self._scalars is not None:
                self._scalars.flush()
        self._lines.clear()
        self._flushed_at = self._worker.transport.now()


def _keep_first(path: Path, steps: int) -> None:
    """Drop what a run wrote after the checkpoint that it resumes from, and any damaged line."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= steps:
                kept.append(line)
    with writing(path):
        path.write_text("".join(kept))
