"""What the page asks about: a model, a cluster, and how long a worker computes. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestra.cluster import Cluster
from orchestra.cluster.nodes import Link, LogNormal, Node, Switch
from orchestra.cluster.presets import LOOPBACK
from orchestra.engines.simulation.cost_source import FLOPS
from orchestra.errors import InputError, nearest
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import Settings, parse, setting
from orchestra.settings.base import settings_of
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run, Training

BATCH = 32
"""Samples of a worker's batch; only the scale of samples/s depends on it."""
TENSORS = 4
"""Of the model, of equal sizes, each a bucket: what can overlap with the backward pass."""
MOST_WORKERS = 64


@dataclass(frozen=True, repr=False)
class Situation(Settings):
    """A data-parallel training, as far as the time of its steps depends on it."""

    megabytes: float = setting(100.0, "of parameters, in float32", low=0.1, high=1000)
    workers: int = setting(8, "that compute gradients", low=2, high=MOST_WORKERS)
    megabits: float = setting(
        1000.0, "Mbit/s of each node's link, in each direction", low=1, high=100_000
    )
    latency_us: float = setting(
        100.0, "microseconds from node to node, one way", low=1, high=100_000
    )
    compute_ms: float = setting(
        100.0, "milliseconds of a gradient of one worker's batch", low=1, high=10_000
    )
    slow: float = setting(
        1.0, "how many times as long the last worker takes to compute", low=1, high=10
    )
    variation: float = setting(
        5.0, "percent by which each duration of compute varies", low=0, high=50
    )

    @staticmethod
    def read(values: Mapping[str, str]) -> Situation:
        """The situation that the texts of a query describe; what is left out has its default.

        Raises:
            InputError: a name that is not known, a text that is no number, or a number that is too
                small or too large.
        """
        kinds = {name: int if name == "workers" else float for name in NAMES}
        found: dict[str, float] = {}
        for name, text in values.items():
            if name not in kinds:
                raise InputError(f"unknown setting {name!r}; {nearest(name, kinds)}")
            try:
                found[name] = kinds[name](text)
            except ValueError:
                kind = "a whole number" if kinds[name] is int else "a number"
                raise InputError(f"{name}: {text!r} is not {kind}") from None
        return Situation(**found)  # type: ignore[arg-type]

    def with_workers(self, workers: int) -> Situation:
        """The same on another number of workers."""
        return replace(self, workers=workers)

    def cluster(self, nodes: int) -> Cluster:
        """Equal nodes at one switch; that of the last worker computes more slowly."""
        link = Link(self.megabits * 1e6 / 8, self.latency_us * 1e-6 / 2)
        jitter = LogNormal(self.variation / 100) if self.variation else None
        return Cluster(
            "studio",
            tuple(
                Node(
                    f"worker-{index}" if index < self.workers else f"server-{index}", 4,
                    speed=1 / self.slow if index == self.workers - 1 else 1.0,
                    jitter=jitter, switch="switch", up=link, down=link, loopback=LOOPBACK,
                )
                for index in range(nodes)
            ),
            (Switch("switch"),),
            placement="spread",
        )  # fmt: skip


NAMES = tuple(field.name for field in settings_of(Situation))


@dataclass(frozen=True)
class Question:
    """How long `steps` steps of one strategy take; with `watched` also who sends what, when."""

    situation: Situation
    notation: str
    steps: int
    watched: bool = False

    def run(self) -> Run:
        """The run that answers it: of shapes, with assumed costs.

        Raises:
            InputError: the strategy cannot have that many workers.
        """
        situation = self.situation
        strategy = parse(self.notation, STRATEGIES, where="strategy")
        assert isinstance(strategy, Strategy)
        dedicated = getattr(strategy, "servers", 0)
        if getattr(strategy, "placement", "dedicated") != "dedicated":
            dedicated = 0
        parameters = round(situation.megabytes * 1e6 / 4)
        sample_flops = situation.compute_ms * 1e-3 * FLOPS / BATCH
        samples = situation.workers * self.steps * BATCH
        training = Training(
            ranks=situation.workers + dedicated,
            batch_size=BATCH,
            equal="worker_batch",
            epochs=1,
            optimizer=Optimizer("SGD", {"lr": 0.1}),
            engine="simulation",
            tensors="shapes",
            calibration="none",
            threads=1,
            snapshots=0,
            trace_steps=0,
            bucket_megabytes=situation.megabytes / TENSORS,
        )
        task = (
            f"synthetic({parameters}, tensors={TENSORS}, samples={samples}, "
            f"sample_flops={sample_flops!r})"
        )
        return Run("studio", task, strategy, training=training)
