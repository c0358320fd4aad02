"""What the ranks of a run write down goes to MLflow and Weights & Biases while they train.

A thread of the launcher follows the files of the ranks. So no rank waits for a tracker, a tracker
that fails does not end the run, and every engine can be tracked.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment
from orchestra.experiments.trackers import About, Figures, MLflowTracker, Tracker, WandbTracker
from orchestra.records.live import Line, Tail
from orchestra.records.record import RunRecord, write_atomically
from orchestra.records.trackers import TRACKERS
from orchestra.report.watching import PARTS, RankTrack
from orchestra.trainer.settings import Run

TRACKING = "tracking.json"
"""In the folder of a run: its id in each tracker, and what was logged so far."""

LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
"""At the end of a run, for a tracker that is slow or cannot be reached."""
MAX_RANKS = 32
"""With charts of their own."""
KINDS = {"mlflow": MLflowTracker, "wandb": WandbTracker}


class Tracking:
    """Follows a run in `folder`, and logs it to trackers."""

    def __init__(self, run: Run, experiment: Experiment, folder: Path) -> None:
        self.record: RunRecord | None = None
        self._run, self._folder = run, folder
        about = About(run, experiment, folder)
        known = _known(folder)
        self._step = int(known.get("step", 0))
        self._samples = int(known.get("samples", -1))
        self._trackers: dict[str, Tracker] = {}
        try:
            for name in KINDS:
                if getattr(run.training, name):
                    self._trackers[name] = KINDS[name](about, known.get(name))
        except InputError:
            self._end("failed", {})
            raise
        self._tracks: dict[int, RankTrack] = {}
        self._consumed: list[tuple[int, int]] = []  # by the cluster, and steps of the first worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)
        self._keep()
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Log what the ranks have written since the last look."""
        news = self._read()
        first = min(self._tracks, default=None)
        if first is None or not news.get(first):
            return
        self._consumed += [(line["consumed"], line["step"]) for line in news[first]]
        lines = [line for line in news[first] if line["step"] > self._step]
        if not lines:
            return
        for line in lines:
            self._log(line["step"], _of_step(line))
        self._step = lines[-1]["step"]
        self._log(self._step, self._of_now())
        self._flush()

    def finish(self, status: str) -> None:
        """The run has ended as "completed", "stopped" or "failed"."""
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            names = " and ".join(TRACKERS[name] for name in self._trackers)
            _tell(f"{names} did not take all figures within {PATIENCE_SECONDS:g} s: given up")
            return
        self.look()
        for line in Tail(self._folder / "curve.jsonl").read():
            if line["samples"] > self._samples:
                self._samples = line["samples"]
                metrics = {f"eval/{name}": value for name, value in line["metrics"].items()}
                self._log(self._step_at(line["samples"]), metrics)
        self._flush()
        self._end(status, {} if self.record is None else _of_record(self.record))

    def _end(self, status: str, final: Figures) -> None:
        for name in list(self._trackers):
            with self._telling(name):
                self._trackers[name].finish(status, final)

    def _read(self) -> dict[int, Sequence[Line]]:
        """The new lines of each rank; without figures of a rank that has none, such as a server."""
        news: dict[int, Sequence[Line]] = {}
        for path in self._folder.glob("steps-rank-*.jsonl"):
            rank = int(path.stem.rpartition("-")[2])
            track = self._tracks.get(rank) or RankTrack(path)
            with suppress(OSError):
                news[rank] = track.look()
            if track.window:
                self._tracks[rank] = track
        return news

    def _of_now(self) -> dict[str, Any]:
        """Speeds and shares of the time of each rank, over its last steps."""
        found: dict[str, Any] = {}
        rows = [track.row(rank, None, 0.0) for rank, track in sorted(self._tracks.items())]
        found["train/samples_per_second"] = sum(row.samples_per_second or 0.0 for row in rows)
        for row in rows[:MAX_RANKS] if len(rows) > 1 else ():
            figures = {
                "loss": row.loss,
                "samples_per_second": row.samples_per_second,
                "bytes_sent_per_second": row.bytes_per_second,
                **{f"{part}_share": row.parts.get(part) for part in PARTS},
            }
            found |= {f"rank_{row.rank}/{name}": value for name, value in figures.items()}
        return found

    def _step_at(self, samples: int) -> int:
        """The step of the first worker at which the cluster had consumed so many samples."""
        place = bisect_left(self._consumed, (samples, 0))
        return self._consumed[min(place, len(self._consumed) - 1)][1] if self._consumed else 0

    def _log(self, step: int, figures: dict[str, Any]) -> None:
        finite = {
            name: float(value)
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        }
        for name in list(self._trackers):
            with self._telling(name):
                self._trackers[name].log(step, finite)

    def _flush(self) -> None:
        for name in list(self._trackers):
            with self._telling(name):
                self._trackers[name].flush()
        self._keep()

    def _keep(self) -> None:
        """Write down as which run it is to go on, if it is resumed."""
        ids = {name: tracker.id for name, tracker in self._trackers.items()}
        state = {**_known(self._folder), **ids, "step": self._step, "samples": self._samples}
        with suppress(OSError):
            write_atomically(self._folder / TRACKING, json.dumps(state) + "\n")

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Go on without a tracker that fails, and say so: the run is worth more."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            _tell(f"{TRACKERS[name]} failed, the run goes on without it: {reason}")


@contextmanager
def tracked(run: Run, experiment: Experiment, folder: Path) -> Iterator[Tracking | None]:
    """Log the run to the trackers that its settings ask for.

    Raises:
        InputError: one does not take it.
    """
    if not any(getattr(run.training, name) for name in KINDS):
        yield None
        return
    tracking = Tracking(run, experiment, folder)
    try:
        yield tracking
    except KeyboardInterrupt:
        tracking.finish("stopped")
        raise
    except BaseException:
        tracking.finish("failed")
        raise
    tracking.finish("completed" if tracking.record is None else tracking.record.status)


def _tell(text: str) -> None:
    print(f"orchestra: {text}", file=sys.stderr, flush=True)


def _known(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / TRACKING).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _of_step(line: Line) -> dict[str, Any]:
    rates = line.get("rates") or ()
    figures = {"train/loss": line["loss"], "train/samples": line["consumed"]}
    for group, rate in enumerate(rates):
        figures["train/learning_rate" + (f"_{group}" if len(rates) > 1 else "")] = rate
    if line.get("staleness"):
        figures["train/staleness"] = max(line["staleness"])
    return figures


def _of_record(record: RunRecord) -> Figures:
    """The figures of a whole run, by the split that the final ones are of."""
    figures = {
        f"{record.judged_on}/loss": record.final_loss,
        **{f"{record.judged_on}/{name}": value for name, value in record.metrics.items()},
        "train_seconds": record.train_seconds,
        "setup_seconds": record.setup_seconds,
        "samples_per_second": record.samples_per_second,
        "bytes_sent": record.bytes_sent,
        "time_to_target_seconds": record.time_to_target_seconds,
        "switched_at_step": record.switched_at_step,
    }
    return {
        name: float(value)
        for name, value in figures.items()
        if value is not None and math.isfinite(value)
    }
