"""The report of a rank: its counters, timeline and curve; and stragglers as data.

Plain data, free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

NOTABLE = 0.1
"""The part of a machine's processor time that, taken by other programs, causes a warning."""
LEAST_SECONDS = 0.25
"""Shorter times say nothing: the system counts processor time in hundredths of a second."""
MAX_POINTS = 60
MAX_SOURCES = 128
"""Ranks that receive from more sources than this do not report how fast messages arrived."""


@dataclass(frozen=True)
class Usage:
    """Processor seconds of a process and of its machine, over the same stretch of time.

    `busy` are those of all programs on the cores, what a hypervisor gave to other machines (which
    are `stolen`) included; each None where the system does not tell.
    """

    machine: str  # equal for processes of one machine
    cores: int  # those that the process may run on
    passed: float  # seconds on the clock
    own: float  # of the process, all of its threads
    busy: float | None
    stolen: float | None = None
    switches: int = 0  # how often a core was taken from a thread that had work to do


def taken_by_others(usages: Sequence[Usage]) -> float | None:
    """Return the mean number of cores that other programs kept busy beside those of `usages`, which
    ran on one machine at the same time; None where the number is not known."""
    longest = max(usages, key=lambda usage: usage.passed, default=None)
    if longest is None or longest.busy is None or longest.passed < LEAST_SECONDS:
        return None
    own = sum(usage.own for usage in usages)
    # Both figures are rounded to hundredths of a second, so that the difference may be negative.
    return min(max(longest.busy - own, 0.0) / longest.passed, float(longest.cores))


def busy_with_others(usages: Iterable[Usage | None]) -> float | None:
    """Return the part of a machine's processor time that other programs took, of several machines
    the largest; None where it is known of none."""
    by_machine: dict[str, list[Usage]] = {}
    for usage in filter(None, usages):
        by_machine.setdefault(usage.machine, []).append(usage)
    known = [(taken_by_others(group), group[0].cores) for group in by_machine.values()]
    return max((taken / cores for taken, cores in known if taken is not None), default=None)


@dataclass(frozen=True)
class Point:
    """The model at one snapshot: samples consumed by the cluster, seconds on the stopwatch.

    `metrics` are on the validation data, else on the test data, the mean loss among them as
    "loss". Where each node has a replica of its own they are the mean over `nodes`, the figures of
    each by rank (of more than 16 `replicas` 16 are evaluated), and `average` those of the average
    of the replicas, which no node has. docs/reference/records.md defines the distances; they and
    `average` are None where all ranks had the same parameters.
    """

    samples: int
    seconds: float
    metrics: dict[str, float]
    consensus_distance: float | None = None
    relative_distance: float | None = None
    average: dict[str, float] | None = None
    nodes: dict[str, dict[str, float]] = field(default_factory=dict)
    replicas: int = 1

    def worst(self, name: str, rising: bool | None = None) -> float | None:
        """Figure `name` of the worst node; None without nodes, or if nobody knows which is worse.
        `rising` says whether more is better; if None, the name tells."""
        rising = is_rising(name) if rising is None else rising
        values = [each[name] for each in self.nodes.values()]
        if not values or rising is None or None in values:  # not finite: null in the file
            return None
        return min(values) if rising else max(values)

    def worst_nodes(self) -> dict[str, float]:
        """Return the figures of the worst node that are known, by name."""
        worst = {name: self.worst(name) for name in self.metrics}
        return {name: value for name, value in worst.items() if value is not None}


def is_rising(name: str) -> bool | None:
    """Return whether more is better of the figure `name`; None where its name does not tell."""
    words = name.lower()
    if any(word in words for word in ("accuracy", "r2", "f1", "score")):
        return True
    falling = ("loss", "error", "mae", "mse", "perplexity")
    return False if any(word in words for word in falling) else None


class MessageKey(NamedTuple):
    """A message of a run: the `number`-th from `source` to `target` with this tag."""

    source: int
    target: int
    tag: int
    number: int


class TimelineSlice(NamedTuple):
    """Something that took from `start` to `end`, in seconds of the rank's clock."""

    flow: int  # the index of the one that did it
    category: str  # compute, send, receive, wait, native or step
    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    message: MessageKey | None = None  # equal for its send and its receive


class Instant(NamedTuple):
    """Something that happened at a moment; to the whole run, or to this rank only."""

    name: str
    at: float
    whole_run: bool = False


@dataclass(frozen=True)
class Timeline:
    """The windows of a run in which one rank wrote down what it did."""

    clock: str  # equal for ranks that read the same clock
    began: float  # when the stopwatch began, on this clock
    flows: tuple[str, ...]  # the names of the threads of work, by index
    slices: list[TimelineSlice] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)


class Counters(NamedTuple):
    """The totals of a rank from its start until the moment `seconds` on the stopwatch.

    `arrived` has for each rank that sent large messages their bytes, and the seconds for which this
    rank was ready to read while one was arriving.
    """

    seconds: float
    steps: int = 0
    samples: int = 0
    compute: float = 0.0  # seconds of the main flow, as are:
    input: float = 0.0  # reading batches
    blocked: float = 0.0  # in the transport
    arrived: tuple[tuple[int, float, float], ...] = ()


class CounterSeries:
    """A rank's sums at up to `MAX_POINTS` moments, spread evenly over the time until now."""

    def __init__(self) -> None:
        self.points: list[Counters] = []
        self._apart = self._next = 0.0

    def due(self, seconds: float) -> bool:
        """Return whether a point at this moment would be kept."""
        return seconds >= self._next

    def add(self, counters: Counters) -> None:
        """Keep `counters`, the latest so far."""
        points = self.points
        # Virtual time may stand still between two of them; the later one has all
        if points and points[-1].seconds >= counters.seconds:
            points.pop()
        points.append(counters)
        # Twice as far apart as the points could be: about half of them stay.
        apart = 2 * (counters.seconds - points[0].seconds) / MAX_POINTS
        if len(points) > MAX_POINTS:
            kept = points[:1]
            for point in points[1:-1]:
                if point.seconds - kept[-1].seconds >= apart:
                    kept.append(point)
            self.points = [*kept, points[-1]]
            self._apart = apart
        self._next = counters.seconds + self._apart


@dataclass(frozen=True)
class Membership:
    """A part of a run that had one number of ranks: an entry of `ranks_history`."""

    ranks: int  # the setting
    workers: int  # at its start
    sample: int  # of the run at which it began
    checkpoint: int | None = None  # from which it went on; None: from the beginning


@dataclass(frozen=True)
class Regrouping:
    """A change of the ranks that train together. Their numbers are those of the files of steps."""

    lost: tuple[int, ...]
    joined: tuple[int, ...]
    ranks: int  # that went on
    step: int  # of the run, the last one whose result they had
    noticed: float  # in seconds on the stopwatch
    seconds: float  # from there until they went on
    steps_voided: int  # under way, and made again
    samples_again: int  # that were dealt out once more with it


@dataclass(frozen=True)
class RankReport:
    """One rank's part in a run.

    `setup` are the seconds before the stopwatch by what they went to: task (data and model),
    group (the strategy's start), first_step (the warm-up, and waiting for the others).
    `seconds` are compute, communicate and wait of its main flow while the stopwatch ran;
    `bytes_sent` are those of all its flows; `staleness` counts updates by their staleness.
    `timeline` is None where none was to be kept; `dropped` counts gradients that came too late;
    `memory` is what the formula says that it keeps, in bytes by what for, and `peak_memory_bytes`
    the most that its process had, None where it has none of its own.
    `shares` are the weights of all ranks' parts, where they were measured, and `speeds` what they
    follow from: gradients of a worker's batch that each rank computes in a second, all at once.
    `batches` are those that a rule has chosen (steps done before, and from there on the batch of
    each rank), on the first worker; `usage` is that of the machine while the stopwatch ran, None
    where it was not real. `history` are the numbers of ranks that the run has had, and `begun_on`
    is that by which the samples of a step count. `node` is the name of its machine, and `counters`
    what it did until when.
    """

    rank: int
    role: str
    steps: int
    samples: int
    setup: dict[str, float]
    train_seconds: float
    seconds: dict[str, float]
    bytes_sent: int
    bytes_estimated: bool
    staleness: dict[str, int]
    peak_buffer_bytes: int
    switched_at_step: int | None
    stopped: bool
    threads: int
    leader: LeaderReport | None = None
    timeline: Timeline | None = None
    dropped: int = 0
    switched_at_sample: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    regroupings: list[Regrouping] = field(default_factory=list)
    consumed: int = 0  # samples of the whole run, as far as the rank knows
    shares: tuple[float, ...] = ()
    batches: list[list[int]] = field(default_factory=list)
    speeds: tuple[float, ...] = ()
    usage: Usage | None = None
    memory: dict[str, int] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    node: str = ""
    counters: tuple[Counters, ...] = ()
    history: tuple[Membership, ...] = ()
    begun_on: int | None = None


@dataclass(frozen=True)
class LeaderReport:
    """The findings of the leader: the worth of the final parameters, and of those before.

    `final_loss` and `metrics` are on the test data. Without test data `final_loss` is the last
    training loss. A run without values has no loss, no metrics and no hash.
    """

    final_loss: float | None
    metrics: dict[str, float]
    parameters_sha256: str | None
    curve: list[Point] = field(default_factory=list)


def changes_in(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in words those `decisions` of a run by which another strategy went on."""
    return [
        f"after step {each['step']} to {each['then']}: {each['reason']}"
        for each in decisions
        if each["then"] != each["under"]
    ]


Cause = Literal["compute", "link", "input"]


@dataclass(frozen=True)
class StragglerFinding:
    """A slow rank, and what that cost; docs/reference/records.md has the fields."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    cause: Cause
    factor: float
    since_seconds: float
    since_step: int | None
    until_seconds: float | None
    until_step: int | None
    lost_seconds: float

    @property
    def key(self) -> tuple[tuple[int, ...], Cause]:
        """A key that is equal for the same ranks and cause."""
        return self.ranks, self.cause

    @property
    def who(self) -> str:
        """The ranks in words: "rank 2 (node-2)", "a link of rank 2 or 3"."""
        *most, last = map(str, self.ranks)
        joined, node = (" and ", f" ({self.nodes[0]})") if len(self.nodes) == 1 else (" or ", "")
        text = f"rank {', '.join(most)}{joined * bool(most)}{last}{node}"
        return f"a link of {text}" if self.cause == "link" else text

    @property
    def text(self) -> str:
        """The straggler in a line: "rank 2 is 3.9x slower (compute), 41 s lost to it"."""
        lost = f", {self.lost_seconds:.0f} s lost to it" if self.lost_seconds >= 1 else ""
        return f"{self.who} is {self.factor:.1f}x slower ({self.cause}){lost}"
