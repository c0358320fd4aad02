"""Plans whose simulations are made up."""

from __future__ import annotations

from pathlib import Path

from tests.support.recorded import recorded

from orchestra.cluster import load_cluster
from orchestra.experiments.experiment import Experiment
from orchestra.planning.api import planned
from orchestra.planning.candidates import Candidate, Space
from orchestra.records.report import Point
from orchestra.settings.reading import Entry
from orchestra.trainer.settings import Target

ACCURACY = Target("accuracy", at_least=0.9)


def points(*values: float) -> list[Point]:
    """A snapshot every 100 samples and 2 seconds."""
    return [Point(100 * n, 2.0 * n, {"accuracy": v}) for n, v in enumerate(values, 1)]


def experiment(**settings: object) -> Experiment:
    given = {"task": "digits", "batch_size": 64, "epochs": 2, "calibration": "none", **settings}
    return planned(None, (), {key: Entry(value, key) for key, value in given.items()})


def found_on(text: str, folder: Path, **settings: object) -> dict[str, Candidate]:
    cluster = load_cluster(text, where="cluster", folder=Path())
    space = Space(experiment(**settings), cluster, folder / "clusters")
    return {each.name: each for each in space.candidates()}


RECORD = recorded(
    name="", strategy="", engine="simulation", ranks=1, workers=1, servers=0, seed=0,
    status="stopped", train_seconds=1.0, seconds={"compute": 1.0},
)  # fmt: skip
