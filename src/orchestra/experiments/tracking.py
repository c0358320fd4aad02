"""Trackers: the steps that ranks write down go to MLflow and Weights & Biases while they train.

A thread of the launcher follows the files of the ranks. So no rank waits for a tracker, a tracker
that fails does not end the run, and every engine can be tracked. The libraries are imported where
they are asked for only.
"""

from __future__ import annotations

import json
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from orchestra.errors import InputError, tell
from orchestra.experiments.experiment import Experiment, alone, on_ranks
from orchestra.experiments.file import to_yaml
from orchestra.records.exports import TRACKERS
from orchestra.records.files import EXPERIMENT, SUMMARY, write_atomically
from orchestra.records.following import PARTS, Line
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder
from orchestra.settings.notation import Call, read
from orchestra.settings.reading import read_json, yaml_value
from orchestra.trainer.settings import Run

TRACKING = "tracking.json"
"""A file in the folder of a run: the run's id in each tracker, and what was logged so far."""
LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
"""How long the end of a run waits for a tracker that is slow or unreachable."""
MAX_RANKS = 32  # the most ranks with charts of their own
MAX_METRICS = 1000  # of one call of MLflow
MAX_TEXT = 500  # of a parameter, for any store of MLflow
STEP = "train/global_step"

Figures = Mapping[str, float]


class About:
    """The description of a run for a tracker: its name, settings, tags and folder."""

    def __init__(self, run: Run, experiment: Experiment, folder: Path) -> None:
        self.experiment, self.folder = experiment.name, folder
        self.name = f"{on_ranks(run)}, seed {run.seed}"
        self.trial = run.judged_on == "validation"
        self.settings = _settings_of(run, experiment)
        tuning = ["tuning"] if self.trial else []
        self.tags = [type(run.strategy).__name__, run.training.engine, *tuning]


def _settings_of(run: Run, experiment: Experiment) -> dict[str, Any]:
    """Return the settings of `run` as its file has them; the optimizer's also by dotted names."""
    settings = yaml_value(to_yaml(alone(experiment, run)))
    assert isinstance(settings, dict)
    del settings["name"], settings["seeds"], settings["devices"], settings["tune"]
    (strategy,) = settings.pop("strategies").values()
    settings |= {"label": run.name, "strategy": strategy, "seed": run.seed}
    for key in ("optimizer", "task", "schedule"):
        for name, value in read(settings[key], where=key).keywords.items():
            settings[f"{key}.{name}"] = str(value) if isinstance(value, Call) else value
    return settings


class Tracker(Protocol):
    """A run in an experiment tracker, and its `id` there, by which it goes on when resumed."""

    id: str

    def log(self, rows: Sequence[tuple[int, Figures]]) -> None:
        """Log the figures of steps; steps of one figure need not come in their order."""

    def finish(self, status: str, figures: Figures) -> None:
        """End the run as "completed", "stopped" or "failed", with these figures."""


class MLflowTracker:
    """A run of MLflow; goes on with the run `known`, if given."""

    def __init__(self, about: About, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._folder = about.folder
        try:
            # Refuses an address for which it lacks a library, as mlflow-skinny does SQLite
            self._client = client = MlflowClient()
            if known is not None:
                self.id = known
                client.update_run(known, status="RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", about.experiment)
            there = client.get_experiment_by_name(name)
            experiment = there.experiment_id if there else client.create_experiment(name)
            tags = {
                "mlflow.source.name": "orchestra",
                "mlflow.source.type": "LOCAL",
                "orchestra.strategy": about.tags[0],
                "orchestra.engine": about.tags[1],
                "orchestra.folder": str(about.folder.absolute()),
            } | ({"orchestra.tuning": "true"} if about.trial else {})
            run_name = os.environ.get("MLFLOW_RUN_NAME", about.name)
            self.id = client.create_run(experiment, tags=tags, run_name=run_name).info.run_id
            texts = {key: str(value)[:MAX_TEXT] for key, value in about.settings.items()}
            client.log_batch(self.id, params=[Param(key, text) for key, text in texts.items()])
        except MlflowException as error:
            raise _refused("mlflow", error) from None

    def log(self, rows: Sequence[tuple[int, Figures]]) -> None:
        from mlflow.entities import Metric

        now = int(datetime.now().timestamp() * 1000)
        metrics = [Metric(name, x, now, step) for step, row in rows for name, x in row.items()]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + MAX_METRICS])

    def finish(self, status: str, figures: Figures) -> None:
        self.log([(0, figures)])
        for name in (EXPERIMENT, SUMMARY):
            if (self._folder / name).exists():
                self._client.log_artifact(self.id, str(self._folder / name))
        states = {"completed": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self.id, states.get(status, "FAILED"))


class WandbTracker:
    """A run of Weights & Biases; goes on with the run `known`, if given."""

    def __init__(self, about: About, known: str | None) -> None:
        import wandb
        from wandb.errors import Error

        def unless_set(variable: str, value: str) -> str | None:
            return None if os.environ.get(variable) else value

        try:
            # It would take over what goes to the terminal, and with it the progress.
            console = None if os.environ.get("WANDB_CONSOLE") else wandb.Settings(console="off")
            self._run = wandb.init(
                id=known,
                resume="allow" if known else None,
                project=unless_set("WANDB_PROJECT", "orchestra"),
                name=unless_set("WANDB_NAME", about.name),
                group=unless_set("WANDB_RUN_GROUP", about.experiment),
                tags=about.tags,
                config=None if known else about.settings,
                dir=unless_set("WANDB_DIR", str(about.folder)),
                settings=console,
            )
            self.id = self._run.id
            # A metric of our own for steps: W&B's must not fall, and evaluations come at the end.
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        except Error as error:
            raise _refused("wandb", error) from None

    def log(self, rows: Sequence[tuple[int, Figures]]) -> None:
        for step, figures in rows:
            self._run.log({**figures, STEP: step})

    def finish(self, status: str, figures: Figures) -> None:
        self._run.summary.update({**figures, "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)


def _refused(name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    where = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_MODE=offline"}[name]
    return InputError(
        f"{name}: {TRACKERS[name]} does not take the run: {reason}; set {where}, or {name}=false"
    )


KINDS: dict[str, Callable[[About, str | None], Tracker]] = {
    "mlflow": MLflowTracker, "wandb": WandbTracker,
}  # fmt: skip


class Tracking:
    """Follows a run in `folder`, and logs it to trackers."""

    def __init__(self, run: Run, experiment: Experiment, folder: Path) -> None:
        self.record: RunRecord | None = None
        self._folder = folder
        about = About(run, experiment, folder)
        known = _known(folder)
        self._step = int(known.get("step", 0))
        self._samples = int(known.get("samples", -1))
        self._trackers: dict[str, Tracker] = {}
        try:
            for name, kind in KINDS.items():
                if getattr(run.training, name):
                    self._trackers[name] = kind(about, known.get(name))
        except InputError:
            self._with_each(lambda tracker: tracker.finish("failed", {}))
            raise
        self._run = RunFolder(folder).follow()
        self._consumed: list[tuple[int, int]] = []  # by the cluster, and steps of the first worker
        self._stop = threading.Event()
        # The thread runs in the launcher, so that no rank imports a tracker's library or waits for
        # its network.
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)
        self._keep()
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Log what the ranks have written since the last look."""
        news = self._run.poll_steps()
        # Ranks without figures, such as servers, have no lines
        first = min(
            (rank for rank, track in self._run.tracks.items() if track.window), default=None
        )
        if first is None or not news.get(first):
            return
        self._consumed += [(line["consumed"], line["step"]) for line in news[first]]
        lines = [line for line in news[first] if line["step"] > self._step]
        if lines:
            self._step = lines[-1]["step"]
            rows = [(line["step"], _of_step(line)) for line in lines]
            self._log([*rows, (self._step, self._of_now())])

    def finish(self, status: str) -> None:
        """Log the rest, and end the run as "completed", "stopped" or "failed"."""
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        # A tracker that cannot be reached must not keep a finished run from ending.
        if self._thread.is_alive():
            names = " and ".join(TRACKERS[name] for name in self._trackers)
            tell(f"{names} did not take all figures within {PATIENCE_SECONDS:g} s: given up")
            return
        self.look()
        rows = []
        for point in RunFolder(self._folder).curve:
            if point.samples > self._samples:
                self._samples = point.samples
                metrics = {f"eval/{name}": value for name, value in point.metrics.items()}
                # A snapshot is evaluated at the end, but is of the step at which it was taken.
                rows.append((self._step_at(point.samples), metrics))
        self._log(rows)
        final = {} if self.record is None else _of_record(self.record)
        self._with_each(lambda tracker: tracker.finish(status, _finite(final)))

    def _of_now(self) -> dict[str, Any]:
        """Return the speeds and shares of the time of each rank, over its last steps."""
        tracks = sorted(self._run.tracks.items())
        rows = [track.view(rank, 0.0) for rank, track in tracks if track.window]
        speed = sum(row.samples_per_second or 0.0 for row in rows)
        found: dict[str, Any] = {"train/samples_per_second": speed}
        for row in rows[:MAX_RANKS] if len(rows) > 1 else ():
            of_rank = f"rank_{row.rank}"
            found[f"{of_rank}/loss"] = row.loss
            found[f"{of_rank}/samples_per_second"] = row.samples_per_second
            found[f"{of_rank}/bytes_sent_per_second"] = row.bytes_per_second
            found |= {f"{of_rank}/{part}_share": row.parts.get(part) for part in PARTS}
        return found

    def _step_at(self, samples: int) -> int:
        """Return the step of the first worker at which the cluster had consumed `samples`."""
        place = bisect_left(self._consumed, (samples, 0))
        return self._consumed[min(place, len(self._consumed) - 1)][1] if self._consumed else 0

    def _log(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        finite = [(step, _finite(figures)) for step, figures in rows]
        self._with_each(lambda tracker: tracker.log(finite))
        self._keep()

    def _with_each(self, call: Callable[[Tracker], None]) -> None:
        """Call `call` with each tracker; go on without one that fails, and say so."""
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._trackers[name]
                reason = " ".join(str(error).split()) or type(error).__name__
                tell(f"{TRACKERS[name]} failed, the run goes on without it: {reason}")

    def _keep(self) -> None:
        """Write down the run's id in each tracker, and how far it was logged, for a resumption."""
        ids = {name: tracker.id for name, tracker in self._trackers.items()}
        state = {**_known(self._folder), **ids, "step": self._step, "samples": self._samples}
        with suppress(OSError):
            write_atomically(self._folder / TRACKING, json.dumps(state) + "\n")


@contextmanager
def tracked(run: Run, experiment: Experiment, folder: Path) -> Iterator[Tracking | None]:
    """Log the run to the trackers that its settings ask for; `InputError` if one refuses it."""
    if not any(getattr(run.training, name) for name in KINDS):
        yield None
        return
    tracking, status = Tracking(run, experiment, folder), "failed"
    try:
        yield tracking
        status = "completed" if tracking.record is None else tracking.record.ending.status
    except KeyboardInterrupt:
        status = "stopped"
        raise
    finally:
        tracking.finish(status)


def _known(folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = {}
    with suppress(FileNotFoundError, InputError):
        known = read_json(folder / TRACKING, dict[str, Any])
    return known


def _of_step(line: Line) -> dict[str, Any]:
    rates = line.get("rates") or ()
    figures = {"train/loss": line["loss"], "train/samples": line["consumed"]}
    for group, rate in enumerate(rates):
        figures["train/learning_rate" + (f"_{group}" if len(rates) > 1 else "")] = rate
    if line.get("staleness"):
        figures["train/staleness"] = max(line["staleness"])
    return figures | {f"logged/{name}": value for name, value in line.get("logged", {}).items()}


def _of_record(record: RunRecord) -> dict[str, Any]:
    """Return the figures of a whole run, by the split that the final ones are of."""
    return {
        f"{record.asked.judged_on}/loss": record.learned.loss,
        **{
            f"{record.asked.judged_on}/{name}": value
            for name, value in record.learned.metrics.items()
        },
        "train_seconds": record.time.training,
        "setup_seconds": record.time.setup,
        "samples_per_second": record.time.samples_per_second,
        "bytes_sent": record.traffic.sent,
        "time_to_target_seconds": record.to_target.seconds,
        "switched_at_step": record.switching.at_step,
    }


def _finite(figures: Mapping[str, Any]) -> Figures:
    known = ((name, value) for name, value in figures.items() if value is not None)
    return {name: float(value) for name, value in known if math.isfinite(value)}
