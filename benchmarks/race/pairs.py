"""The pairs of a task and a cluster whose candidates the oracle of the race knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.cluster import Cluster, Link, NetworkSwitch, Node
from orchestra.experiments.experiment import Experiment
from orchestra.planning.api import planned
from orchestra.settings.reading import Entry
from orchestra.trainer.settings import Target

SEEDS = tuple(range(8))
"""The seeds that are recorded of each learner."""


@dataclass(frozen=True)
class RaceTask:
    """A small task: its settings, the samples of a step of all workers, and those of a run."""

    settings: Mapping[str, str]
    target: Target
    batch: int
    samples: int


TASKS: Mapping[str, RaceTask] = {
    "digits": RaceTask(
        {"task": "digits()", "optimizer": "SGD(lr=0.05, momentum=0.9)"},
        Target("accuracy", at_least=0.93), 64, 5_120,
    ),
    "spam": RaceTask(
        {"task": "examples.own_task:spam()", "optimizer": "Adam(lr=0.004)"},
        Target("accuracy", at_least=0.85), 64, 5_120,
    ),
    "spam, large batch": RaceTask(
        {"task": "examples.own_task:spam()", "optimizer": "Adam(lr=0.01)"},
        Target("accuracy", at_least=0.85), 512, 20_480,
    ),
    "MLP, large batch": RaceTask(
        {"task": "regression()", "optimizer": "Adam(lr=0.02)"},
        Target("r2_mean", at_least=0.83), 768, 46_080,
    ),
    "MLP": RaceTask(
        {"task": "regression()", "optimizer": "Adam(lr=0.01)"},
        Target("r2_mean", at_least=0.83), 96, 9_216,
    ),
    "transformer": RaceTask(
        {
            "task": "characters(context=16, layers=1, heads=2, width=32)",
            "optimizer": "Adam(lr=0.008)",
        },
        Target("bits_per_character", at_most=4.2), 64, 4_480,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RaceCluster:
    """Nodes of one core each behind one switch.

    Attributes:
        speeds: of the nodes, relative to a core that is calibrated or assumed.
        bandwidth, latency: of every link, in bytes/s and seconds.
    """

    name: str
    speeds: Sequence[float]
    bandwidth: float
    latency: float

    @property
    def cluster(self) -> Cluster:
        link, loopback = Link(self.bandwidth, self.latency), Link(3e9, 15e-6)
        nodes = tuple(
            Node(
                f"node-{place}", 1, speed=speed, switch="switch", up=link, down=link,
                loopback=loopback,
            )
            for place, speed in enumerate(self.speeds)
        )  # fmt: skip
        return Cluster(self.name, nodes, (NetworkSwitch("switch"),), placement="spread")


EQUAL = RaceCluster("four slow nodes, 1 Gbit/s", (0.02,) * 4, 125e6, 25e-6)
FAST = RaceCluster("four nodes, 100 Mbit/s", (1.0,) * 4, 12.5e6, 125e-6)
RISING = RaceCluster("four unlike nodes, 1 Gbit/s", (0.04, 0.035, 0.03, 0.025), 125e6, 25e-6)
HALF = RaceCluster("four nodes, half slow, 1 Gbit/s", (0.5, 0.5, 0.25, 0.25), 125e6, 25e-6)
TWO = RaceCluster("two slow nodes, 10 Gbit/s", (0.015,) * 2, 1.25e9, 10e-6)
EIGHT = RaceCluster("eight nodes, 10 Gbit/s", (0.01,) * 7 + (0.005,), 1.25e9, 10e-6)
THIN = RaceCluster("four nodes, 10 Mbit/s", (0.3, 0.3, 0.3, 0.1), 1.25e6, 2.5e-3)

PAIRS = (
    ("digits", EQUAL), ("spam", EQUAL), ("MLP", EQUAL), ("transformer", EQUAL),
    ("digits", FAST), ("spam, large batch", EQUAL), ("MLP, large batch", EQUAL),
    ("transformer", FAST), ("digits", RISING), ("spam", FAST), ("MLP", FAST),
    ("transformer", RISING), ("digits", HALF), ("spam, large batch", RISING),
    ("MLP, large batch", RISING), ("transformer", HALF), ("digits", TWO), ("spam", HALF),
    ("MLP", HALF), ("transformer", TWO), ("digits", THIN), ("spam, large batch", EIGHT),
    ("MLP, large batch", EIGHT), ("transformer", THIN),
)  # fmt: skip
"""Of the 24, about half are to let several nodes win: slow nodes on fast links, with models and
batches whose gradients take longer than the messages."""


@dataclass(frozen=True)
class RacePair:
    """A task on a cluster."""

    number: int
    task: str
    on: RaceCluster

    @property
    def title(self) -> str:
        return f"{self.number}: {self.task}, {self.on.name}"

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment to plan for, with assumed durations, so that all machines agree."""
        task = TASKS[self.task]
        side = "at_least" if task.target.rising else "at_most"
        limit = {"metric": task.target.metric, side: task.target.bound}
        given = {
            **task.settings, "ranks": 1, "batch_size": task.batch,
            "steps": task.samples // task.batch, "calibration": "none", "seeds": [0, 1, 2],
            "target": limit, "name": f"race-{self.number}",
        }  # fmt: skip
        return planned(None, (), {key: Entry(value, key) for key, value in given.items()})


def pairs() -> list[RacePair]:
    """Return all pairs, numbered from 1."""
    return [RacePair(number, *pair) for number, pair in enumerate(PAIRS, 1)]
