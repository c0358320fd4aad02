"""Measurements on a machine that is shared with other programs: repeated as often as their time
allows, with a note of who was in the way.

In a training inside a measurement the pieces of work are timed one by one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from orchestra.cluster.calibration import Curve
from orchestra.collectives import Group, all_reduce
from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.system import RankPlace, UsageMeter
from orchestra.records.report import Counters, taken_by_others
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import PassingReporter, Runtime, Work

T = TypeVar("T")

Progress = Callable[[str, float], None]
"""Called with the name of the measurement under way, and the part of it that is done (0 to 1)."""
LEAST, MOST = 9, 400  # the fewest and the most repeats of a measurement, if there is time for them
WARM_UP = 3  # the repeats before those that count
FIRST_STEPS = 3  # the first steps of a training, which do not count


def run_ranks(
    program: Callable[..., Any],
    argument: object,
    ranks: int,
    *,
    steps: int,
    what: str = "",
    on_progress: Progress | None = None,
    patience: float = 60.0,
    limit: float | None = None,
    places: Sequence[RankPlace] = (),
    shared_memory: bool = True,
) -> Sequence[Any]:
    """Launch `program` and return the result of each rank, or raise `KeyboardInterrupt` if the user
    stopped it. `on_progress` is called with `what` and the part of its `steps` that rank 0 has
    done; the last four arguments are those of `launch`.
    """

    def tell(event: Event | Notice) -> None:
        if on_progress is not None and isinstance(event, Heartbeat) and event.rank == 0:
            on_progress(what, event.step / steps)

    outcome = launch(
        program, argument, ranks, patience=patience, on_event=tell, limit=limit, places=places,
        shared_memory=shared_memory,
    )  # fmt: skip
    if outcome.stopped:
        raise KeyboardInterrupt
    return outcome.results


@dataclass
class TimeBudget:
    """The time of a measurement, divided evenly over the `figures` that remain."""

    until: float = math.inf  # when all have to be measured, by `clock`
    figures: int = 1
    clock: Callable[[], float] = time.monotonic  # the same for all processes of a machine

    @property
    def over(self) -> bool:
        """True if the time has passed, so that optional figures are left out."""
        return self.clock() >= self.until

    def share(self) -> float:
        """Return the seconds for the next figure; 0 if the time has passed."""
        # A slow figure shortens all later ones alike.
        seconds = max(self.until - self.clock(), 0.0) / max(self.figures, 1)
        self.figures -= 1
        return seconds


@dataclass
class Conditions:
    """The conditions under which a process measured.

    `meters` has, by the number of cores that all ranks of the measurement wanted, the processor
    time that was used meanwhile.
    """

    ran: float = 0.0  # seconds that the measuring thread ran while it was to wait for nothing
    passed: float = 0.0  # seconds that passed meanwhile
    meters: dict[int, UsageMeter] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # figures that there was no time for
    share: float = 1.0  # of a core that the thread may have, less than 1 under a quota

    @property
    def waiting(self) -> float:
        """The part of the time for which the thread had to wait for a processor."""
        return max(0.0, 1 - self.ran / (self.passed * self.share)) if self.passed else 0.0

    @contextmanager
    def watched(self, cores: int) -> Iterator[None]:
        """Record what other programs take while this rank and its peers want so many cores."""
        meter = self.meters.setdefault(cores, UsageMeter())
        meter.running(True)
        try:
            yield
        finally:
            meter.running(False)


def waited(ranks: Sequence[Conditions]) -> float:
    """Return the part of the processor time that a measurement wanted and other programs took,
    in its worst part; from the notes of all `ranks` of the measurement.
    """
    # The larger of both figures counts; where the system does not tell of others, this one alone
    parts = [kept.waiting for kept in ranks]
    for wanted in {wanted for kept in ranks for wanted in kept.meters}:
        usages = [kept.meters[wanted].usage() for kept in ranks if wanted in kept.meters]
        cores, taken = usages[0].cores, taken_by_others(usages)
        if taken is not None:
            # Other programs disturb only as far as they leave fewer cores than the measurement
            # wanted.
            parts.append(max(0.0, 1 - (cores - taken) / min(wanted, cores)))
    return max(parts, default=0.0)


def repeat(
    function: Callable[[], object],
    seconds: float,
    kept: Conditions,
    most: float = math.inf,
) -> list[float]:
    """Return the processor seconds of each call of `function`, for about `seconds`, after a
    warm-up.

    They are those of this thread alone: neither other programs nor torch's threads count. A slow
    function is called fewer than `LEAST` times, so that all calls together take at most `most`
    seconds.
    """
    started = time.perf_counter()
    for _ in range(WARM_UP):
        function()
        # A call that takes seconds may not spend the time on warming up
        if time.perf_counter() - started > most / 3:
            break
    times: list[float] = []
    began, ran = time.perf_counter(), time.thread_time()
    for _ in rounds(seconds, most):
        # The thread's own processor time counts, in which other programs show only by what they do
        # to caches.
        called = time.thread_time()
        function()
        times.append(time.thread_time() - called)
    kept.ran += time.thread_time() - ran
    kept.passed += time.perf_counter() - began
    return times


def rounds(
    seconds: float,
    most: float = math.inf,
    least: int = LEAST,
    limit: float = MOST,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[float]:
    """Yield the seconds that have passed, once for each repeat of a measurement.

    A measurement is repeated at least once, at least `least` times if these fit into `most`
    seconds, and up to `limit` times within `seconds`.

    Args:
        agreed: turns this rank's wish to end into that of all ranks.
    """
    began, passed = time.perf_counter(), 0.0
    for count in itertools.count(1):
        yield passed
        passed = time.perf_counter() - began
        # Ranks read their clocks one after another, so the wish of one has to be that of all
        if agreed(passed >= most or (count >= least and (passed >= seconds or count >= limit))):
            return


def total(transport: Transport, own: float = 0.0, ranks: Sequence[int] | None = None) -> float:
    """Collective over `ranks` (all by default): return the sum of their `own` values."""
    # float64: sizes in bytes are agreed on by it, which float32 rounds from 16 MiB on
    values = torch.tensor([own], dtype=torch.float64)
    group = Group(tuple(range(transport.size) if ranks is None else ranks))
    all_reduce(transport, values, "ring", group, Tag.AGREE)
    return values.item()


def curve_of(
    times: Mapping[int, Sequence[float]],
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> Curve:
    """Return the curve through a `typical` one of repeated measurements, by amount."""
    amounts = sorted(times)
    # Curves and the simulated compute refuse zero.
    points = tuple((float(n), max(typical(times[n]), 1e-9)) for n in amounts)
    return Curve(points, tuple(spread(times[n]) for n in amounts))


def trimmed_mean(times: Sequence[float]) -> float:
    """Return the mean without the longest and the shortest twentieth."""
    # Not the median: many steps take as long as their mean, and where every fifth one begins with
    # cold caches, as under a quota, the median knows nothing of it.
    cut = len(times) // 20
    return statistics.fmean(sorted(times)[cut : len(times) - cut])


def spread(times: Sequence[float]) -> float:
    """Return half the interquartile range over the median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(times, n=4)
    return (upper - lower) / 2 / median if median > 0 else 0.0


@dataclass
class Profile:
    """Takes the place of a rank's compute, and records when each piece of work began and ended.

    `exchange` is called after each update, as part of the next step.
    """

    clock: Callable[[], float]
    exchange: Callable[[], object] = lambda: None
    seconds: float = 0.0
    main_seconds: float = 0.0
    notes: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def run(self, work: Work, function: Callable[[], T]) -> T:
        began = self.clock()
        result = function()
        ended = self.clock()
        self.seconds += ended - began
        self.main_seconds = self.seconds
        self.notes[work.kind].append((began, ended))
        # After the update, so that the next step finds the caches as an exchange leaves them
        if work.kind == "update":
            self.exchange()
        return result

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        wait()

    def advance_to(self, slot: int) -> None:
        """The clock knows."""

    def steps(self) -> dict[str, list[float]]:
        """Return, for each step but the first ones, the seconds of the gradient, the update, the
        rest, and all three together.
        """
        times: dict[str, list[float]] = defaultdict(list)
        ends = [ended for _, ended in self.notes["update"]]
        # In the first ones memory is taken and kernels are chosen
        for step in range(FIRST_STEPS, len(ends)):
            whole = rest = ends[step] - ends[step - 1]
            for kind in ("gradient", "update"):
                began, ended = self.notes[kind][step]
                times[kind].append(ended - began)
                rest -= ended - began
            times["step"].append(rest)
            times["whole"].append(whole)
        return times


@dataclass
class _Inner(PassingReporter):
    """Reports of a training inside a measurement only that it is alive, with `done` figures."""

    done: int

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.inner.progress(step=self.done, samples=samples)


def train_profiled(
    runtime: Runtime, run: Run, profile: Profile, done: int, folder: str | None
) -> None:
    """Train `run` with `profile` in place of the rank's compute; `done` figures are known so far.

    Its files lie in `folder`, the launcher's, since ranks may be killed.
    """
    reporter = _Inner(runtime.reporter, done)
    runtime = replace(runtime, ranks=run.training.ranks, compute=profile, reporter=reporter)
    with tempfile.TemporaryDirectory(prefix="training-", dir=folder) as own:
        train(runtime, (run, Path(own)))
