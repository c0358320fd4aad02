"""The record of a run by topic, and the keys of `summary.json` under which its figures stand.

docs/reference/records.md defines each figure. None stands for one that cannot be, or was not known
to the version that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from orchestra.records.report import (
    NOTABLE,
    Membership,
    Regrouping,
    StragglerFinding,
    Usage,
)
from orchestra.settings.base import to_plain
from orchestra.settings.reading import plain_value


@dataclass(frozen=True)
class RankTotals:
    """What a rank reported: an entry of `by_rank`."""

    rank: int
    role: str
    seconds: Mapping[str, float]
    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0
    dropped: int = 0
    threads: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Restart:
    """A restart of a run that had lost a rank: an entry of `restarts`."""

    cause: str  # of the end of the run before it, in one line
    at: float  # when that run had ended, in seconds since 1970
    checkpoint: int | None  # from which the run went on; None: from its beginning
    step: int  # of the first worker in that checkpoint
    steps_again: int  # steps that were done before and were then repeated, the most of any rank


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    name: str  # the label in the experiment
    strategy: str
    engine: str
    ranks: int
    workers: int
    servers: int
    seed: int
    cluster: str | None = None
    judged_on: str = "test"  # the split of the data that the final figures are of
    tuned: Mapping[str, Any] = field(default_factory=dict)  # the settings that trials chose


@dataclass(frozen=True)
class Pacing:
    """Who waits for whom."""

    distributed: bool | None = None
    switches: bool | None = None  # whether a rule could end a phase
    synchronous: bool | None = None
    steps_together: bool | None = None
    work: str | None = None


@dataclass(frozen=True)
class Batching:
    """How many samples a step has, and each worker of them."""

    global_batch: int = 0
    worker_batches: Sequence[int] = ()
    shares: Sequence[float] = ()
    changes: Sequence[Sequence[int]] = ()  # steps done before, and the batch of each rank


@dataclass(frozen=True)
class Ending:
    """How the run ended, and what befell it until then."""

    status: str
    failure: str | None = None
    stopped_by: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    restarts: Sequence[Restart] = ()
    ranks_history: Sequence[Membership] = ()
    regroupings: Sequence[Regrouping] = ()
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class Learned:
    """What was computed, and what the final parameters are worth."""

    steps: int = 0
    samples: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, Any] | None = None
    parameters_sha256: str | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The final loss and the metrics, as far as they are known."""
        figures = {"loss": self.loss, **self.metrics}
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class Durations:
    """Seconds, which are virtual in a simulation, and the speed that follows."""

    training: float | None = None  # on the stopwatch
    setup: float | None = None
    setup_parts: Mapping[str, float] = field(default_factory=dict)
    worker: Mapping[str, float] = field(default_factory=dict)  # compute, communicate and wait
    wall: float | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True)
class ToTarget:
    """Seconds on the stopwatch until the target was reached."""

    seconds: float | None = None
    after: float | None = None  # at the snapshot before
    worst_node: float | None = None
    average: float | None = None


@dataclass(frozen=True)
class BytesSent:
    """Bytes that ranks sent, or kept to send."""

    sent: int = 0
    estimated: bool = False
    peak_buffer: int = 0


@dataclass(frozen=True)
class Updates:
    """How old gradients were when they were applied."""

    staleness: Mapping[str, float] | None = None  # mean and max
    histogram: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0


@dataclass(frozen=True)
class Switching:
    """When the strategy changed, and why."""

    at_step: int | None = None
    at_sample: int | None = None
    decisions: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class MachineUse:
    """What the run computed on, or was simulated on, and how well it used that."""

    threads: int = 1
    by_rank: Sequence[RankTotals] = ()
    node: str | None = None
    costs: str | None = None  # the cost model
    costs_doubts: Sequence[str] = ()
    busy_with_others: float | None = None
    stragglers: Sequence[StragglerFinding] = ()  # those first that cost most
    alone: Mapping[str, float] = field(default_factory=dict)
    heterogeneous_efficiency: float | None = None
    convergence_efficiency: float | None = None

    @property
    def mixed(self) -> bool:
        """True if its nodes are known to be unlike in what they do alone."""
        # To three digits: measured speeds of equal nodes differ in the further ones
        return len({float(f"{speed:.3g}") for speed in self.alone.values()}) > 1

    @property
    def disturbed(self) -> bool:
        """True if other programs took a notable part of the machine: its seconds are too long."""
        return self.busy_with_others is not None and self.busy_with_others > NOTABLE


@dataclass(frozen=True)
class Spending:
    """What the run cost, in money and energy."""

    cost: float | None = None
    cost_to_target: float | None = None
    currency: str | None = None
    joules: float | None = None
    joules_to_target: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """One run, summed up over its ranks: an entry of `summary.json`. All else that the run left
    lies in `folder`."""

    asked: Asked
    pacing: Pacing
    batching: Batching
    ending: Ending
    learned: Learned = Learned()
    time: Durations = Durations()
    to_target: ToTarget = ToTarget()
    traffic: BytesSent = BytesSent()
    updates: Updates = Updates()
    switching: Switching = Switching()
    machine: MachineUse = MachineUse()
    spending: Spending = Spending()
    folder: Path = Path()

    @property
    def threads_by_rank(self) -> list[int]:
        """The threads that each rank computed with; for a rank that was lost, the most of any."""
        known = {part.rank: part.threads for part in self.machine.by_rank}
        ranks = max((*known, *map(int, self.ending.left_out)), default=-1) + 1
        return [known.get(rank, self.machine.threads) for rank in range(ranks)]

    def summary(self) -> dict[str, Any]:
        """Return this run's entry of `summary.json`: figures are finite or null."""
        return {
            key: to_plain(reduce(getattr, path.split("."), self), finite=True)
            for key, path in KEYS.items()
        }


KEYS = {
    "name": "asked.name",
    "strategy": "asked.strategy",
    "engine": "asked.engine",
    "ranks": "asked.ranks",
    "workers": "asked.workers",
    "servers": "asked.servers",
    "seed": "asked.seed",
    "status": "ending.status",
    "setup_seconds": "time.setup",
    "setup": "time.setup_parts",
    "train_seconds": "time.training",
    "steps": "learned.steps",
    "samples": "learned.samples",
    "samples_per_second": "time.samples_per_second",
    "final_loss": "learned.loss",
    "metrics": "learned.metrics",
    "judged_on": "asked.judged_on",
    "tuned": "asked.tuned",
    "nodes": "learned.nodes",
    "time_to_target_seconds": "to_target.seconds",
    "time_to_target_after_seconds": "to_target.after",
    "time_to_target_worst_node_seconds": "to_target.worst_node",
    "time_to_target_average_seconds": "to_target.average",
    "bytes_sent": "traffic.sent",
    "bytes_estimated": "traffic.estimated",
    "seconds": "time.worker",
    "staleness": "updates.staleness",
    "staleness_histogram": "updates.histogram",
    "dropped": "updates.dropped",
    "switched_at_step": "switching.at_step",
    "switched_at_sample": "switching.at_sample",
    "decisions": "switching.decisions",
    "parameters_sha256": "learned.parameters_sha256",
    "peak_buffer_bytes": "traffic.peak_buffer",
    "global_batch": "batching.global_batch",
    "worker_batches": "batching.worker_batches",
    "distributed": "pacing.distributed",
    "switches": "pacing.switches",
    "synchronous": "pacing.synchronous",
    "steps_together": "pacing.steps_together",
    "work": "pacing.work",
    "shares": "batching.shares",
    "batches": "batching.changes",
    "threads": "machine.threads",
    "by_rank": "machine.by_rank",
    "left_out": "ending.left_out",
    "restarts": "ending.restarts",
    "ranks_history": "ending.ranks_history",
    "regroupings": "ending.regroupings",
    "notices": "ending.notices",
    "failure": "ending.failure",
    "stopped_by": "ending.stopped_by",
    "cluster": "asked.cluster",
    "wall_seconds": "time.wall",
    "costs": "machine.costs",
    "node": "machine.node",
    "costs_doubts": "machine.costs_doubts",
    "busy_with_others": "machine.busy_with_others",
    "stragglers": "machine.stragglers",
    "alone": "machine.alone",
    "heterogeneous_efficiency": "machine.heterogeneous_efficiency",
    "convergence_efficiency": "machine.convergence_efficiency",
    "cost": "spending.cost",
    "cost_to_target": "spending.cost_to_target",
    "currency": "spending.currency",
    "energy_joules": "spending.joules",
    "energy_to_target_joules": "spending.joules_to_target",
}
"""Each key of an entry of `summary.json`, in the order of the file, and its path in the record."""

_PARTS = {
    "by_rank": RankTotals, "restarts": Restart, "ranks_history": Membership,
    "regroupings": Regrouping, "stragglers": StragglerFinding,
}  # fmt: skip
"""The keys whose values are lists of entries."""


def records_of(entries: object, where: Path) -> list[RunRecord]:
    """Return the records in `entries`, the `runs` of the summary in the file `where`; the folder of
    each is that of the file. Unknown keys, of a later version, are ignored. Raises `InputError` if
    it is damaged."""
    found: list[dict[str, Any]] = plain_value(list[dict[str, Any]], entries, str(where))
    topics = [by_topic(entry) for entry in found]
    records: list[RunRecord] = plain_value(list[RunRecord], topics, str(where))
    return [replace(record, folder=where.parent) for record in records]


def by_topic(entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an entry of `summary.json` as a record's topics, each with its known figures."""
    # An old entry has these two in the notation of its strategy alone, and one number of threads.
    name = str(entry.get("strategy")).partition("(")[0]
    entry = {"distributed": name != "Single", "switches": name == "Switch", **entry}
    threads = {"threads": entry.get("threads", 1)}
    topics: dict[str, dict[str, Any]] = {"asked": {}, "pacing": {}, "batching": {}, "ending": {}}
    for key, path in KEYS.items():
        if key not in entry:
            continue
        value = entry[key]
        if key in _PARTS and isinstance(value, list):
            known = {each.name for each in fields(_PARTS[key])}
            given = threads if key == "by_rank" else {}
            value = [
                given | {name: part[name] for name in part if name in known}
                if isinstance(part, dict)
                else part
                for part in value
            ]
        topic, _, name = path.partition(".")
        topics.setdefault(topic, {})[name] = value
    return topics
