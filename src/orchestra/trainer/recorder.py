"""What one rank writes down of its steps, and its seconds by what they went to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.records.tensorboard import Scalars
from orchestra.trainer.writing import writing
from orchestra.worker.worker import Worker

FLUSH_SECONDS = 1.0
SECONDS = ("compute", "communicate", "wait")


@dataclass
class Spent:
    """Seconds of the main flow by what they went to, and the bytes that it sent."""

    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0
    bytes_sent: int = 0

    @staticmethod
    def by(worker: Worker) -> Spent:
        """All that the main flow of `worker` has spent so far."""
        traffic = worker.transport.traffic
        return Spent(
            worker.compute.seconds,
            traffic.seconds_communicating + worker.measures.native_seconds,
            traffic.seconds_waiting,
            worker.transport.bytes_sent + worker.measures.native_bytes,
        )

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        """The sum of both, or the difference with `sign` -1."""
        return Spent(
            self.compute + sign * other.compute,
            self.communicate + sign * other.communicate,
            self.wait + sign * other.wait,
            self.bytes_sent + sign * other.bytes_sent,
        )


@dataclass
class Totals:
    """Sums over the run so far, while the stopwatch ran; kept in checkpoints."""

    elapsed: float = 0.0
    spent: Spent = field(default_factory=Spent)
    samples: int = 0
    loss: float | None = None


class Recorder:
    """JSON lines of one rank's steps: `steps-rank-N.jsonl` in the run's folder.

    The main figures of each step go to `scalars`, too, where there are any.
    The stopwatch runs between `resume` and `pause`: set-up, checkpoints and evaluation are out.
    """

    def __init__(
        self,
        worker: Worker,
        folder: Path,
        totals: Totals,
        steps: int,
        scalars: Scalars | None = None,
    ) -> None:
        self.totals = totals
        self._worker = worker
        self._scalars = scalars
        self._path = folder / f"steps-rank-{worker.rank}.jsonl"
        self._lines: list[dict[str, Any]] = []
        self._started_at = 0.0
        self._flushed_at = 0.0
        self._spent_before = Spent()
        self._spent_last = Spent()
        self._seconds_last = totals.elapsed
        _keep_first(self._path, steps)

    def resume(self) -> None:
        """Start the stopwatch, or let it go on."""
        self._started_at = self._flushed_at = self._worker.transport.now()
        self._spent_before = self._spent_last = Spent.by(self._worker)
        self._worker.runtime.stopwatch(True)

    def pause(self) -> None:
        """Stop the stopwatch."""
        self.totals.elapsed = self.elapsed()
        passed = Spent.by(self._worker).plus(self._spent_before, -1)
        self.totals.spent = self.totals.spent.plus(passed)
        self._worker.runtime.stopwatch(False)
        self.flush()

    def elapsed(self) -> float:
        """Seconds on the running stopwatch."""
        return self.totals.elapsed + self._worker.transport.now() - self._started_at

    def step(self, number: int) -> None:
        """Write down step `number`, just finished."""
        step, spent = self._worker.step, Spent.by(self._worker)
        self.totals.samples += step.samples
        self.totals.loss = step.loss
        line: dict[str, Any] = {
            "step": number,
            "seconds": round(self.elapsed(), 6),
            "samples": step.samples,
            "consumed": step.consumed,
            "loss": step.loss,
            "rates": step.rates,
            **vars(spent.plus(self._spent_last, -1)),
        }
        if step.staleness:
            line["staleness"] = step.staleness
        if step.position is not None:
            line["position"] = step.position
        self._spent_last = spent
        self._lines.append(line)
        if self._scalars is not None:
            self._scalars.add(number, self._main_figures(line))
        if self._worker.transport.now() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def _main_figures(self, line: dict[str, Any]) -> dict[str, float]:
        seconds, self._seconds_last = line["seconds"] - self._seconds_last, line["seconds"]
        figures = {"loss": line["loss"]}
        for group, rate in enumerate(line["rates"]):
            figures[f"learning rate/{group}"] = rate
        if seconds > 0:
            figures["samples per second"] = line["samples"] / seconds
        if "staleness" in line:
            figures["staleness"] = max(line["staleness"])
        return figures

    def flush(self) -> None:
        """Bring what was written down to disk."""
        with writing(self._path), self._path.open("a") as file:
            file.writelines(json.dumps(_rounded(line)) + "\n" for line in self._lines)
            if self._scalars is not None:
                self._scalars.flush()
        self._lines.clear()
        self._flushed_at = self._worker.transport.now()


def histogram(staleness: Iterable[int]) -> dict[str, int]:
    """How often each staleness occurred."""
    return {str(value): count for value, count in sorted(Counter(staleness).items())}


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    """With what its seconds went to, to the microsecond."""
    return {name: round(line[name], 6) if name in SECONDS else line[name] for name in line}


def _keep_first(path: Path, steps: int) -> None:
    """Drop what a run wrote after the checkpoint that it resumes from."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    with writing(path):
        path.write_text("".join(lines[:steps]))
