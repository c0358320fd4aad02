"""Several simulated runs one after the other, to answer a question within a deadline.

The trials of a plan go up to a part of their samples. A run that was stopped before its end goes on
from its checkpoint when the same folder is tried again, so that a longer trial costs only what it
has more. Others are short simulations of time alone: at which bandwidth does one strategy begin to
be faster than another?
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.units import BANDWIDTH
from orchestra.engines.events import Event, Interrupted, Notice, Terminated
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.costs import CostSource
from orchestra.engines.simulation.training import Assignment, carried_out, record_from, simulate_run
from orchestra.errors import InputError, RunFailed
from orchestra.records.live import remove_live
from orchestra.records.record import RunRecord
from orchestra.records.report import Point, RankReport
from orchestra.strategies.base import roles_of
from orchestra.trainer.settings import Run, Tensors
from orchestra.worker.runtime import VARIABLE, RankActivity, usable_cores

if TYPE_CHECKING:
    from orchestra.worker.runtime import Reporter, Runtime

T = TypeVar("T")
PATIENCE = 3600.0
GRACE = 1.0
"""Seconds after its deadline in which a run may end its step, and write a checkpoint."""


@dataclass(frozen=True)
class Trial:
    """A run to simulate, up to the part `until` of its samples, 1 for all."""

    assignment: Assignment
    until: float = 1.0


@dataclass(frozen=True)
class Tried:
    """What became of a trial."""

    record: RunRecord | None = None  # None: it failed, was not begun, or not at the end of a step
    points: Sequence[Point] = ()  # the figures of its snapshots
    failure: str | None = None  # why there is no record; None where there was no time for it
    seconds: float = 0.0  # that it took on the clock


@dataclass
class Until:
    """Passes on what a run reports, and asks for its stop at a part of its samples."""

    inner: Reporter
    part: float
    deadline: float
    reached: float = 0.0

    def progress(self, *, fraction: float | None = None, **facts: Any) -> None:
        self.reached = max(self.reached, fraction or 0.0)
        self.inner.progress(fraction=fraction, **facts)

    def activity(self, activity: RankActivity) -> None:
        self.inner.activity(activity)

    def expendable(self, yes: bool) -> None:
        self.inner.expendable(yes)

    def elastic(self, program: str, *, rests: bool = False) -> None:
        self.inner.elastic(program, rests=rests)

    def notice(self, text: str) -> None:
        """Do nothing: notices of trials are in their records."""

    def stop_requested(self) -> bool:
        over = self.reached >= self.part or time.monotonic() > self.deadline
        return over or self.inner.stop_requested()

    def newcomers_wait(self) -> bool:
        return self.inner.newcomers_wait()

    def group_is_over(self) -> bool:
        return self.inner.group_is_over()


def hand_out(
    ask: Callable[[], tuple[T, Trial] | None],
    told: Callable[[T, Tried], None],
    deadline: float,
    processes: int,
    tell: Callable[[], None],
) -> bool:
    """Carry out trials on long-lived processes. A process that is free gets the next trial.

    Args:
        ask: returns the next trial, and the value to pass to `told` with its outcome; None while
            no trial is ready. It is called again after each outcome. All is over once it returns
            None while no trial is under way.
        deadline: on the clock that all processes of this machine share, at which trials end.
        tell: called now and then.

    Returns:
        Whether the user ended it.
    """
    while True:
        desk = TrialDesk(ask, told)
        if (failure := desk.open(deadline, processes, tell)) is None:
            return desk.stopped
        if not desk.lost:
            raise failure
        # One trial, out of memory say, ended the process of all: apart, only that one fails.
        for item in desk.lost:
            alone: RunFailed | None = failure
            if processes > 1:
                waiting = iter([item])
                apart = TrialDesk(partial(next, waiting, None), told)
                alone = apart.open(deadline, 1, tell)
                if apart.stopped:
                    return True
            if alone is not None:
                told(item[0], Tried(failure=str(alone).splitlines()[0]))


class TrialDesk(Generic[T]):
    """Hands trials to the processes of one launch; a thread for each process waits for it.

    Attributes:
        lost: the trials under way when a process ended.
        stopped: the user ended the launch.
    """

    def __init__(
        self, ask: Callable[[], tuple[T, Trial] | None], told: Callable[[T, Tried], None]
    ) -> None:
        self._ask, self._told = ask, told
        self.lost: list[tuple[T, Trial]] = []
        self.stopped = False
        self._changed = threading.Condition()
        self._under_way = 0
        self._is_over = False
        self._error: BaseException | None = None

    def open(self, deadline: float, processes: int, tell: Callable[[], None]) -> RunFailed | None:
        """Hand out trials until none is left; return why a process ended, if one did."""
        # Half of the cores at most: on a busy machine threads that wait for each other take ten
        # times the processor time of one.
        threads = max(1, len(usable_cores()) // (2 * processes))
        key = secrets.token_bytes(32)
        with Listener(("127.0.0.1", 0), authkey=key) as listener:
            serving = [
                threading.Thread(target=self._serve, args=(listener,), daemon=True)
                for _ in range(processes)
            ]
            for thread in serving:
                thread.start()
            place = TrialPlace(cast("tuple[str, int]", listener.address), key, deadline, threads)
            failure = None
            try:
                launch(
                    carry_out_trials, place, processes, patience=PATIENCE,
                    on_event=lambda event: self._heard(event, tell),
                )  # fmt: skip
            except RunFailed as error:
                failure = None if self.stopped else error
            finally:
                self._end(place.address, serving)
        if self._error is not None:
            raise self._error
        return failure

    def _heard(self, event: Event | Notice, tell: Callable[[], None]) -> None:
        if isinstance(event, Interrupted | Terminated):
            # Processes may be ended before they can say so, by a second Ctrl-C
            self.stopped = True
        tell()

    def _end(self, address: tuple[str, int], serving: Sequence[threading.Thread]) -> None:
        """End all threads, also those whose process has never come."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in serving:
            while thread.is_alive():
                # One that still waits for its process gets a connection that is closed at once
                with contextlib.suppress(OSError):
                    socket.create_connection(address).close()
                thread.join(0.1)

    def _serve(self, listener: Listener) -> None:
        """Hand trials to one process until none is left or the process ends."""
        try:
            with listener.accept() as connection:
                while (item := self._next()) is not None:
                    self._give(connection, item)
                connection.send(None)
        except (OSError, EOFError, AuthenticationError):
            pass  # the process has ended, or none has come; the launch says why
        except BaseException as error:
            self._error = error  # raised where the launch is waited for
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _give(self, connection: Connection[Any, Any], item: tuple[T, Trial]) -> None:
        try:
            connection.send(item[1])
            outcome, stopped = connection.recv()
        except (OSError, EOFError):
            self.lost.append(item)
            raise
        with self._changed:
            self._under_way -= 1
            self.stopped = self.stopped or stopped
            self._is_over = self._is_over or stopped
            self._told(item[0], outcome)
            self._changed.notify_all()

    def _next(self) -> tuple[T, Trial] | None:
        """Wait for the next trial; None once all is over."""
        with self._changed:
            while not self._is_over:
                if (item := self._ask()) is not None:
                    self._under_way += 1
                    return item
                if not self._under_way:
                    self._is_over = True
                    self._changed.notify_all()
                    break
                self._changed.wait()
            return None


@dataclass(frozen=True)
class TrialPlace:
    """Where processes get their trials, until when these may take, and with how many threads."""

    address: tuple[str, int]
    key: bytes
    deadline: float
    threads: int


def carry_out_trials(runtime: Runtime, place: TrialPlace) -> None:
    """Carry out trials until none is left; the program of a process."""
    os.environ[VARIABLE] = str(place.threads)
    reporter = runtime.reporter
    reporter.activity(RankActivity.TRAINING)
    with Client(place.address, authkey=place.key) as connection:
        done = itertools.count(1)
        while (trial := connection.recv()) is not None:
            outcome = tried(reporter, trial, place.deadline)
            connection.send((outcome, reporter.stop_requested()))
            reporter.progress(step=next(done), samples=0)


class _Late(KeyboardInterrupt):
    """The time of a trial is over, in the middle of a step."""


@contextmanager
def _ended_at(moment: float) -> Iterator[None]:
    """Raise `_Late` in the block, in the process's main thread, when `moment` has come."""

    def end(*_: object) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, min(max(moment - time.monotonic(), 1e-3), 1e6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def tried(reporter: Reporter, trial: Trial, deadline: float) -> Tried:
    """Carry out a trial in this process, until a deadline, and return what became of it."""
    began = time.monotonic()
    folder: Path = trial.assignment.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # A step of many ranks that all send to all can take longer than everything may
        with _ended_at(deadline + GRACE):
            outcome = carried_out(trial.assignment, Until(reporter, trial.until, deadline))
        record = record_from(trial.assignment, outcome)
    except _Late:
        remove_live(folder)  # the run goes on in a later trial, or never
        return Tried(seconds=time.monotonic() - began)
    except (InputError, RunFailed) as error:
        return Tried(failure=str(error).splitlines()[0], seconds=time.monotonic() - began)
    reports: list[RankReport | None] = list(outcome.results)
    points = next(r.leader.curve for r in reports if r is not None and r.leader is not None)
    return Tried(record, points, seconds=time.monotonic() - began)


# Where a technique pays

STRIDE = 4.0
"""Ratio of the bandwidths that are tried first."""
FURTHEST = 5
"""How many of these strides away the search ends: a thousand times as much, or as little."""
FURTHEST_FACTOR = STRIDE**FURTHEST
HALVINGS = 4
"""Of the stride in which the two change places: it is known to 9 % then."""
MOST_STEPS, FEWEST_STEPS = 100, 16
RANK_STEPS = 4000
"""Steps of all ranks together that a simulation has where it can have fewer than `MOST_STEPS`."""


@dataclass(frozen=True)
class Rival:
    """A run, and how many of its steps it needs: to the target, or for the samples of all."""

    run: Run
    steps: float
    source: CostSource


@dataclass(frozen=True)
class BreakEven:
    """Where a technique pays, as far as was searched."""

    pays: Literal["below", "above", "always", "never"] | None = None  # None: it is not known
    factor: float | None = None  # the bandwidth below or above which it pays, over the cluster's
    bandwidth: float | None = None  # of the slowest link at that factor, in bytes/s
    equal: bool = True  # whether all links have that bandwidth
    reason: str | None = None  # why it is not known

    def __str__(self) -> str:
        if self.pays is None:
            return f"not known: {self.reason}"
        if self.bandwidth is None:
            most = f"{FURTHEST_FACTOR:.0f}"
            return f"{self.pays}, from 1/{most} to {most} times the bandwidth"
        links = "links of" if self.equal else "a slowest link of"
        return f"{self.pays} {links} {BANDWIDTH.write(float(f'{self.bandwidth:.2g}'))}"


def search(faster: Callable[[float], bool]) -> tuple[Literal["below", "above"], float] | bool:
    """Find the factor on the bandwidth at which `faster(factor)` changes, and the side it holds on.

    From a factor of 1 the search goes up first if it holds there, else down, and then the other
    way. Returns a bool if it is the same everywhere within `FURTHEST` strides.
    """
    now = faster(1.0)
    for sign in (1, -1) if now else (-1, 1):
        for stride in range(1, FURTHEST + 1):
            if faster(STRIDE ** (sign * stride)) is not now:
                # Bisect in the exponent: bandwidths are searched by ratios.
                inner, outer = float(sign * (stride - 1)), float(sign * stride)
                for _ in range(HALVINGS):
                    middle = (inner + outer) / 2
                    if faster(STRIDE**middle) is now:
                        inner = middle
                    else:
                        outer = middle
                side: Literal["below", "above"] = "below" if now is (sign > 0) else "above"
                return side, STRIDE ** ((inner + outer) / 2)
    return now


@dataclass(frozen=True)
class Question:
    """Where is `technique` faster than `plain`? To be answered within so many seconds."""

    technique: Rival
    plain: Rival
    seconds: float


def find_break_even(runtime: Runtime, question: Question) -> BreakEven:
    """Answer the question; the program of a process."""
    from orchestra.worker.runtime import SilentReporter

    name = question.plain.run.training.cluster
    cluster = load_cluster(name, where="cluster", folder=Path())
    links = cluster.links
    if not links:
        return BreakEven(reason="the cluster is one node, without links")
    reporter, done = SilentReporter(), itertools.count(1)
    deadline = time.monotonic() + question.seconds

    def seconds(rival: Rival, factor: float) -> float:
        runtime.reporter.progress(step=next(done), samples=0)
        if runtime.reporter.stop_requested():
            raise InputError("stopped")
        try:
            with _ended_at(deadline):
                there = cluster.scaled(bandwidth=factor)
                return rival.steps * _step_seconds(rival, there, reporter)
        except _Late:
            raise InputError(f"not found within {question.seconds:g} s") from None

    def faster(factor: float) -> bool:
        return seconds(question.technique, factor) < seconds(question.plain, factor)

    try:
        found = search(faster)
    except InputError as error:
        return BreakEven(reason=str(error))
    if isinstance(found, bool):
        return BreakEven("always" if found else "never")
    side, factor = found
    equal = len({link.bandwidth for link in links}) == 1
    return BreakEven(side, factor, min(link.bandwidth for link in links) * factor, equal)


def _step_seconds(rival: Rival, cluster: Cluster, reporter: Reporter) -> float:
    """Return the seconds of a step, in a simulation of time alone; if that fails, with values.

    Raises:
        InputError: the simulation fails with values, too.
    """
    run, training = rival.run, rival.run.training
    most = min(max(RANK_STEPS // training.ranks, FEWEST_STEPS), MOST_STEPS)
    steps = max(1, min(most, math.ceil(rival.steps)))
    training = replace(
        training,
        epochs=None, steps=steps, clip_norm=None, target=None,
        checkpoint_every=None, snapshots=0, trace_steps=0, record_order=False, tensorboard=False,
    )  # fmt: skip
    ranks = len(roles_of(run.strategy, training.ranks).shares)
    problem: str | None = None
    kinds: tuple[Tensors, ...] = ("shapes", "real")
    for tensors in kinds:
        try:
            short = replace(run, training=replace(training, tensors=tensors))
            with tempfile.TemporaryDirectory(prefix="orchestra-search-") as place:
                folder = Path(place)  # runs with values write files
                outcome, *_ = simulate_run(short, rival.source, cluster, ranks, folder, reporter)
            problem = outcome.bad_input or outcome.failure
        except InputError as error:
            problem = str(error)
        if problem is None:
            reports = [report for report in outcome.results if report is not None]
            return float(max(report.train_seconds for report in reports) / steps)
    # Without the traceback that may follow
    raise InputError((problem or "").splitlines()[0])
