"""A run in MLflow, and in Weights & Biases; their libraries are imported where asked for only."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestra.errors import InputError
from orchestra.experiments.experiment import Experiment, alone, on_ranks
from orchestra.experiments.file import to_yaml
from orchestra.records.trackers import TRACKERS
from orchestra.settings.notation import Call, read
from orchestra.settings.reading import yaml_value
from orchestra.trainer.settings import Run

MAX_METRICS = 1000  # of one call of MLflow
MAX_TEXT = 500  # of a parameter, for any store of MLflow
STEP = "train/global_step"

Figures = Mapping[str, float]


class About:
    """What a tracker is told of a run: its name, settings, tags and folder."""

    def __init__(self, run: Run, experiment: Experiment, folder: Path) -> None:
        self.experiment = experiment.name
        self.name = f"{on_ranks(run)}, seed {run.seed}"
        self.folder = folder
        self.trial = run.judged_on == "validation"
        self.settings = settings_of(run, experiment)
        self.tags = [type(run.strategy).__name__, run.training.engine]
        if self.trial:
            self.tags.append("tuning")


def settings_of(run: Run, experiment: Experiment) -> dict[str, Any]:
    """The settings of `run` by name, as its file has them; those of the optimizer by dotted names,
    too."""
    settings = yaml_value(to_yaml(alone(experiment, run)))
    assert isinstance(settings, dict)
    del settings["name"], settings["seeds"], settings["devices"], settings["tune"]
    (strategy,) = settings.pop("strategies").values()
    settings |= {"label": run.name, "strategy": strategy, "seed": run.seed}
    for key in ("optimizer", "task", "schedule"):
        call = read(settings[key], where=key)
        settings |= {
            f"{key}.{name}": str(value) if isinstance(value, Call) else value
            for name, value in call.keywords.items()
        }
    return settings


class Tracker(ABC):
    """A run in an experiment tracker.

    Attributes:
        id: of the run there, by which it goes on when it is resumed.
    """

    id: str

    @abstractmethod
    def log(self, step: int, figures: Figures) -> None:
        """The figures of a step; steps of one figure need not come in their order."""

    @abstractmethod
    def flush(self) -> None:
        """Hand over what was logged."""

    @abstractmethod
    def finish(self, status: str, figures: Figures) -> None:
        """The run has ended as "completed", "stopped" or "failed", with these figures."""


class MLflowTracker(Tracker):
    """A run of MLflow; goes on with the run `known`, if given."""

    def __init__(self, about: About, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = client = MlflowClient()
        self._folder = about.folder
        self._metrics: list[Any] = []
        try:
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
                **({"orchestra.tuning": "true"} if about.trial else {}),
            }
            run_name = os.environ.get("MLFLOW_RUN_NAME", about.name)
            self.id = client.create_run(experiment, tags=tags, run_name=run_name).info.run_id
            texts = {key: str(value)[:MAX_TEXT] for key, value in about.settings.items()}
            client.log_batch(self.id, params=[Param(key, text) for key, text in texts.items()])
        except MlflowException as error:
            raise _refused("mlflow", error) from None

    def log(self, step: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(datetime.now().timestamp() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in figures.items()]

    def flush(self) -> None:
        while self._metrics:
            self._client.log_batch(self.id, metrics=self._metrics[:MAX_METRICS])
            del self._metrics[:MAX_METRICS]

    def finish(self, status: str, figures: Figures) -> None:
        self.log(0, figures)
        self.flush()
        for name in ("experiment.yaml", "summary.json"):
            if (self._folder / name).exists():
                self._client.log_artifact(self.id, str(self._folder / name))
        states = {"completed": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self.id, states.get(status, "FAILED"))


class WandbTracker(Tracker):
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
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        except Error as error:
            raise _refused("wandb", error) from None

    def log(self, step: int, figures: Figures) -> None:
        self._run.log({**figures, STEP: step})

    def flush(self) -> None:
        pass  # a process of its own takes what is logged

    def finish(self, status: str, figures: Figures) -> None:
        self._run.summary.update({**figures, "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)


def _refused(name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    where = {"mlflow": "MLFLOW_TRACKING_URI", "wandb": "WANDB_MODE=offline"}[name]
    return InputError(
        f"{name}: {TRACKERS[name]} does not take the run: {reason}; set {where}, or {name}=false"
    )
