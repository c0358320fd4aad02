"""The pairs of a task and a cluster that `studies.regret` plans and simulates."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.cluster import Cluster, Link, NetworkSwitch, Node
from orchestra.experiments.experiment import Experiment
from orchestra.planning.api import planned
from orchestra.settings.reading import Entry as Given

SEED = 2026
"""Of the pairs that the planner was tuned on; drawn once, before the first run."""
SEEDS = (0, 1)
"""Of each training."""
EMULATED_CORES = 1.8

TASKS: Mapping[str, Mapping[str, object]] = {
    "digits": {
        "task": "digits()", "optimizer": "SGD(lr=0.05, momentum=0.9)", "samples": 12_800,
        "target": {"metric": "accuracy", "at_least": 0.95},
    },
    "LeNet-5": {
        "task": "digits28(train_samples=8000)", "optimizer": "Adam(lr=0.002)", "samples": 11_520,
        "target": {"metric": "accuracy", "at_least": 0.85},
    },
    "MLP": {
        "task": "regression()", "optimizer": "Adam(lr=0.003)", "samples": 24_576,
        "target": {"metric": "r2_mean", "at_least": 0.85},
    },
    "spam": {
        "task": "examples.own_task:spam()", "optimizer": "Adam(lr=0.003)", "samples": 15_000,
        "target": {"metric": "accuracy", "at_least": 0.87},
    },
    "transformer": {
        "task": "characters(context=32, layers=1, heads=2, width=32)",
        "optimizer": "Adam(lr=0.004)", "samples": 12_800,
        "target": {"metric": "bits_per_character", "at_most": 4.0},
    },
}  # fmt: skip
LINKS = {"LAN": Link(125e6, 25e-6), "slow": Link(12.5e6, 125e-6), "slowest": Link(1.25e6, 2.5e-3)}
SMALL, LARGE = (2, 4, 6, 8), (16, 32, 64)
KINDS = ("equal", "one slow", "half slow", "rising")


@dataclass(frozen=True)
class Pair:
    """A task, and a cluster of so many nodes with links of a kind.

    `kind` says how unlike the nodes are, `speed` what a core of the fastest has; each has one core.
    """

    number: int
    task: str
    nodes: int
    link: str
    kind: str
    speed: float

    @property
    def small(self) -> bool:
        """Whether the nodes can be emulated."""
        return self.nodes <= SMALL[-1]

    @property
    def batch(self) -> int:
        """Samples in a step of all workers."""
        return 64 if self.small else 128

    @property
    def cluster(self) -> Cluster:
        speeds = relative(self.kind, self.nodes)
        link, loopback = LINKS[self.link], Link(3e9, 15e-6)
        nodes = tuple(
            Node(
                f"node-{place}", 1, speed=round(self.speed * speed, 4), switch="switch", up=link,
                down=link, loopback=loopback,
            )
            for place, speed in enumerate(speeds)
        )  # fmt: skip
        return Cluster(f"pair-{self.number}", nodes, (NetworkSwitch("switch"),), placement="spread")

    def experiment(self, calibration: str) -> Experiment:
        settings = dict(TASKS[self.task])
        samples = settings.pop("samples")
        assert isinstance(samples, int)
        given = {
            **settings, "ranks": 1, "batch_size": self.batch, "steps": samples // self.batch,
            "calibration": calibration, "seeds": list(SEEDS), "name": self.title,
        }  # fmt: skip
        return planned(None, (), {key: Given(value, key) for key, value in given.items()})

    @property
    def title(self) -> str:
        return f"pair {self.number}"


def relative(kind: str, nodes: int) -> list[float]:
    """Speeds of the nodes, where that of the fastest is 1."""
    if kind == "one slow":
        return [1.0] * (nodes - 1) + [0.25]
    if kind == "half slow":
        return [1.0] * (nodes // 2) + [0.5] * (nodes - nodes // 2)
    if kind == "rising":
        return [1 - 0.7 * place / (nodes - 1) for place in range(nodes)]
    return [1.0] * nodes


def pairs(seed: int = SEED) -> list[Pair]:
    """Six with up to eight nodes, which together have `EMULATED_CORES`, and six with more.

    Every size, link and kind is there as often as every other one, in an order drawn by `seed`.
    """
    chance = random.Random(seed)
    found: list[Pair] = []
    for sizes in (SMALL, LARGE):
        columns = [balanced(chance, each) for each in (list(TASKS), sizes, list(LINKS), KINDS)]
        for task, nodes, link, kind, speed in zip(
            *columns, balanced(chance, (0.25, 1.0)), strict=True
        ):
            if sizes is SMALL:
                speed = min(round(EMULATED_CORES / sum(relative(kind, nodes)), 3), 0.9)
            found.append(Pair(len(found) + 1, task, nodes, link, kind, speed))
    return found


def balanced(chance: random.Random, values: Sequence[Any], number: int = 6) -> list[Any]:
    """So many of `values`, each as often as every other one or once more, in an order by chance."""
    order = chance.sample(values, len(values))
    found = [order[place % len(order)] for place in range(number)]
    return chance.sample(found, number)
