"""A step's buckets at once, for all ranks: a train of all-reduces.

A step of averaging is always the same: each rank's backward pass hands over one bucket after the
other, its background flow adds them up with the others' in that order, and its main flow waits for
the last one. Where there are no values nothing of that needs a flow: the main flows meet here once
a step, and the times follow from those of each all-reduce (course.py), so that a flow parks once a
step. All times are as if background flows did it.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orchestra.engines.simulation.course import SAME, Course
from orchestra.engines.simulation.kernel import Flow, Timer
from orchestra.engines.simulation.leap import Leap
from orchestra.engines.simulation.meeting import Summed
from orchestra.schedules import Schedule
from orchestra.transports.protocol import Traffic

if TYPE_CHECKING:
    from orchestra.engines.simulation.transport import Net, Port

Floats = NDArray[np.float64]
Ends = tuple[Floats, Floats]
"""Of each rank: when its background flow is done, and when its links are free."""

SIGNAL_BYTES = 8
"""Of the messages between the two flows of a rank."""


@dataclass(frozen=True)
class Line:
    """What all trains of an average carry, and what part of a backward pass has passed when each
    bucket but the last is ready."""

    schedule: Schedule
    ranks: tuple[int, ...]
    tag: int
    buckets: Sequence[Tensor]
    ready: Sequence[float]


class Passed(NamedTuple):
    """Seconds that the hand-overs during the backward pass took, and bytes of buffer needed."""

    seconds: float
    buffer_bytes: int


@dataclass
class Journey:
    """What came of a train that went through the world, and that may come again.

    `given` is as in `Station._ends`; `done` are seconds after `begin`, by place.
    """

    given: Floats
    begin: float
    done: dict[int, float] = field(default_factory=dict)


@dataclass
class Wagon:
    """One rank's part in a train, after a backward pass from `began` to `ended`.

    `waits_from` is when its main flow has handed over the last bucket; `cold` are the seconds that
    its first message takes more. Without `departure` it waits for all others.
    """

    port: Port
    flow: Flow
    began: float
    ended: float
    waits_from: float
    cold: float
    bucket: int = 0
    finished: float | None = None
    departure: Timer | None = None
    journey: Journey | None = None


@dataclass
class Station:
    """Where the ranks of a line meet, once a step."""

    line: Line
    net: Net
    courses: list[Course] = field(init=False)
    bytes_sent: list[int] = field(init=False)
    sent: list[Counter[int]] = field(init=False)
    messages: list[tuple[int, int]] = field(init=False)
    buffer_bytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._kernel, self._net = self.net.kernel, self.net
        line, meetings, overhead = self.line, self._net.meetings, self._net.overhead
        self._summed = [Summed(b, line.schedule, line.ranks, line.tag, None) for b in line.buckets]
        self.courses = [meetings.course(self._net, summed) for summed in self._summed]
        plans = [course.plan for course in self.courses]
        self.bytes_sent = np.sum([plan.bytes_sent for plan in plans], axis=0).tolist()
        self.sent = [
            sum((Counter(course.sent[place]) for course in self.courses), Counter())
            for place in range(len(line.ranks))
        ]
        signals = 2 * len(plans)  # a bucket is handed over, and back
        sent, received = (
            (np.sum(counts, axis=0) + signals).tolist()
            for counts in zip(*((p.messages_sent, p.messages_received) for p in plans), strict=True)
        )
        self.messages = list(zip(sent, received, strict=True))
        self.buffer_bytes = np.max([plan.buffer_bytes for plan in plans], axis=0).tolist()
        self._signal = 0.0 if overhead.local is None else overhead.local.at(SIGNAL_BYTES)
        self._places = {rank: place for place, rank in enumerate(line.ranks)}
        self._wagons: dict[int, Wagon] = {}
        self._departed = False  # somebody has, before all were there
        self._over = inf  # when nothing of the last train was on a link any more
        self._leaps: dict[Course, Leap | None] = {}
        self._follows = all(course.follows for course in self.courses)
        self._alternates = all(course.alternates for course in self.courses)
        self._streams = list(self.courses[0].streams.values()) if self._follows else []
        self._recent: deque[tuple[Floats, Ends]] = deque(maxlen=8)

    @property
    def serves(self) -> bool:
        """Whether the times of its all-reduces follow from one another, ahead of the world."""
        return self._follows or self._alternates

    def pass_through(
        self, rank: int, traffic: Traffic, began: float, ended: float, apart: float
    ) -> Passed:
        """Let the present flow, whose backward pass lasted from `began` to `ended`, wait for the
        end of its train.

        After the step the ranks send nothing but the next train for `apart` seconds on a core of
        speed 1.
        """
        flow, place, port = self._kernel.current, self._places[rank], self._net.ports[rank]
        signal = self._signal / flow.processor.rate
        buckets = len(self.courses)
        waits_from = ended + signal * buckets
        wagon = self._wagons[place] = Wagon(port, flow, began, ended, waits_from, port.warm_up())
        flow.ahead = waits_from
        if not self._follows:
            leaves = max(self._arrival(wagon, self._handed(wagon), wagon.cold), self._kernel.now())
            wagon.departure = self._kernel.at(leaves, functools.partial(self._depart, place, wagon))
        if len(self._wagons) == len(self.line.ranks):
            wagons = [self._wagons[place] for place in range(len(self.line.ranks))]
            self._wagons = {}
            self._go(wagons, apart)
        flow.waits = functools.partial(self._signs, port.rank)
        while wagon.finished is None:
            self._kernel.park()
        flow.waits = None
        flow.ahead = wagon.finished
        traffic.seconds_waiting += wagon.finished - wagon.waits_from
        traffic.seconds_communicating += signal * buckets
        port.bytes_sent += self.bytes_sent[place]
        sent, received = self.messages[place]
        traffic.messages_sent += sent
        traffic.messages_received += received
        port.meter.count_all(self.sent[place])
        return Passed(signal * (buckets - 1), self.buffer_bytes[place])

    def _handed(self, wagon: Wagon) -> float:
        """When the next bucket of `wagon` is handed over."""
        if wagon.bucket == len(self.line.ready):
            return wagon.waits_from
        passed = (wagon.ended - wagon.began) * self.line.ready[wagon.bucket]
        signals = self._signal / wagon.flow.processor.rate * (wagon.bucket + 1)
        return wagon.began + passed + signals

    def _signs(self, rank: int) -> tuple[tuple[int, ...], str]:
        """Whom `rank` waits for, and for what."""
        places, ranks = self._places, self.line.ranks
        missing = tuple(r for r in ranks if self._wagons and places[r] not in self._wagons)
        others = tuple(r for r in ranks if r != rank)
        return missing or others, f"to add up, tag {self.line.tag}"

    def _given(self, wagons: Sequence[Wagon]) -> tuple[Floats, float]:
        """All that the times of a train depend on, a row a rank: when it hands over each bucket, at
        what rate it computes, how cold it is, and when its stream is free; after the beginning."""
        rates = np.array([wagon.flow.processor.rate for wagon in wagons])
        began, ended, last = np.array([(w.began, w.ended, w.waits_from) for w in wagons]).T
        number = np.arange(1, len(self.courses))
        handed = began[:, None] + np.outer(ended - began, self.line.ready)
        handed += np.outer(self._signal / rates, number)
        begin = float(handed[:, 0].min())
        signals = np.column_stack([handed, last]) - begin
        cold = np.array([wagon.cold for wagon in wagons])
        free = np.zeros(len(wagons))
        if self._streams:  # else all links are, as nobody has sent anything since the last train
            free = np.maximum(np.array([stream.free for stream in self._streams]) - begin, 0.0)
        return np.column_stack([signals, rates, cold, free]), begin

    def _go_at_once(
        self, wagons: Sequence[Wagon], given: Floats, begin: float, apart: float
    ) -> bool:
        """Whether all are through before one of them sends anything else: then it is done."""
        ends = self._ends(given, begin)
        if ends is None:
            return False
        done, free = ends
        from_then = np.maximum(given[:, -4], done) + apart / given[:, -3]
        over = max(done.max(), free.max())
        if over > from_then.min():
            return False
        for stream, end in zip(self._streams, (free + begin).tolist(), strict=False):
            stream.free = end
        self._over = begin + float(over)
        present = self._kernel.current
        for wagon, end in zip(wagons, (done + begin).tolist(), strict=True):
            wagon.finished = max(wagon.waits_from, end)
            if wagon.flow is not present:  # it goes ahead of the others, until the next train
                self._kernel.resume(wagon.flow)
        return True

    def _ends(self, given: Floats, begin: float) -> Ends | None:
        """What came of the same before, or comes of it now: clusters repeat themselves."""
        tolerance = SAME * np.spacing(begin + given.max())
        for known, result in self._recent:
            if np.abs(known - given).max() <= tolerance:
                return result
        ends: Ends | None = None
        if self._follows:
            ends = self._follow(given)
        elif self._alternates:
            ends = self._alternate(given)
        if ends is not None:
            self._recent.append((given, ends))
        return ends

    def _begins(self, given: Floats, number: int, done: Floats) -> Floats:
        """When each background flow begins with bucket `number`, after it has `done` the last."""
        rates, cold = given[:, -3], given[:, -2]
        seconds = self.net.overhead.collective + (0.0 if number else cold)
        begins: Floats = np.maximum(given[:, number], done) + seconds / rates
        return begins

    def _follow(self, given: Floats) -> Ends:
        """When each background flow is done, and each stream is free."""
        rates, free = given[:, -3], given[:, -1]
        pairs = list(self.courses[0].streams)
        done = np.full(len(given), -np.inf)
        for number, course in enumerate(self.courses):
            begins = self._begins(given, number, done)
            leap = self._leap(course, rates)
            leapt = None if leap is None else leap.run(begins, free)
            if leapt is None:
                taken = dict(zip(pairs, free.tolist(), strict=True))
                times = course.times(begins.tolist(), taken, tuple(rates.tolist()))
                leapt = times.clock, times.free[[source for source, _ in pairs]]
            done, free = leapt[0] + self._signal / rates, leapt[1]
        return done, free

    def _alternate(self, given: Floats) -> Ends | None:
        """When each is done, and its links are free; None: messages meet on a link."""
        rates = given[:, -3]
        done, up = np.full(len(given), -np.inf), np.zeros(len(given))
        down = up
        for number, course in enumerate(self.courses):
            alternation = course.alternation(tuple(rates.tolist()))
            ends = alternation.run(self._begins(given, number, done), up, down)
            if ends is None:
                return None
            done, up, down = ends[0] + self._signal / rates, ends[1], ends[2]
        return done, np.maximum(up, down)

    def _leap(self, course: Course, rates: Floats) -> Leap | None:
        """For ranks, and links between them, that are all alike."""
        if course not in self._leaps:
            streams = course.streams.values()
            ways = {(stream.latency, stream.bandwidth) for stream in streams}
            leap = None
            if len(ways) == 1 and not np.ptp(rates):
                (latency, bandwidth) = ways.pop()
                overhead, rate = course.overhead, float(rates[0])
                leap = Leap.of(course.plan, overhead, rate, latency, bandwidth)
            self._leaps[course] = leap
        return self._leaps[course]

    def _end(self, wagon: Wagon, done: float) -> None:
        """From an event: the background flow of a rank is `done` then."""
        end = max(wagon.waits_from, done)

        def go_on() -> None:
            wagon.finished = end
            self._kernel.resume(wagon.flow)

        self._kernel.at(max(end, self._kernel.now()), go_on)

    # One after the other, as in the world

    def _go(self, wagons: Sequence[Wagon], apart: float) -> None:
        """All are there: at once, or one after the other as in the world."""
        departed, self._departed = self._departed, False
        given, begin = self._given(wagons)
        if not departed and self._go_at_once(wagons, given, begin, apart):
            for wagon in wagons:
                if wagon.departure is not None:
                    wagon.departure.cancel()
            return
        journey = Journey(given, begin) if begin >= self._over and not self._follows else None
        self._over = 0.0
        for wagon in wagons:
            wagon.journey = journey
            if wagon.departure is None:
                self._approach(wagon, self._handed(wagon), wagon.cold)

    def _depart(self, place: int, wagon: Wagon) -> None:
        """The first bucket of `wagon` is on its way; where others are still missing, so is theirs
        when they come: what is on links at the same time cannot be told from a later time."""
        self._departed = self._departed or self._wagons.get(place) is wagon
        self._arrive(wagon, self._kernel.now())

    def _arrival(self, wagon: Wagon, time: float, cold: float = 0.0) -> float:
        """When the background flow of `wagon` begins with a bucket that it gets at `time`."""
        return time + (self._net.overhead.collective + cold) / wagon.flow.processor.rate

    def _approach(self, wagon: Wagon, time: float, cold: float = 0.0) -> None:
        """The next bucket of `wagon` is handed over at `time`, or was."""
        arrived = self._arrival(wagon, time, cold)
        arrive = functools.partial(self._arrive, wagon, arrived)
        if arrived <= self._kernel.now():
            arrive()
        else:
            self._kernel.at(arrived, arrive)

    def _arrive(self, wagon: Wagon, arrived: float) -> None:
        self._net.meetings.join(
            self._net,
            self._summed[wagon.bucket],
            wagon.port.rank,
            wagon.flow.processor,
            functools.partial(self._leave, wagon),
            arrived=arrived,
        )

    def _leave(self, wagon: Wagon) -> None:
        done = self._kernel.now() + self._signal / wagon.flow.processor.rate
        wagon.bucket += 1
        if wagon.bucket == len(self.courses):
            self._end(wagon, done)
            self._note(wagon, done)
        else:
            self._approach(wagon, max(self._handed(wagon), done))

    def _note(self, wagon: Wagon, done: float) -> None:
        """The background flow of `wagon` is done: once all are, the same need not be gone again.

        All that was sent has then been received, so that no link is in use.
        """
        self._over = max(self._over, done)
        journey = wagon.journey
        if journey is not None:
            journey.done[self._places[wagon.port.rank]] = done - journey.begin
            if len(journey.done) == len(self.line.ranks):
                ends = np.array([journey.done[place] for place in range(len(journey.done))])
                self._recent.append((journey.given, (ends, np.full_like(ends, ends.max()))))
