"""Calibrations: the seconds that a machine was measured to take for computation and messages.

Plain data, kept as JSON that reads well; `orchestra calibrate` writes it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestra.cluster.nodes import (
    Jitter,
    LogNormal,
    MemoryCosts,
    Overhead,
    Sharing,
    TransferCosts,
)
from orchestra.cluster.units import BANDWIDTH, SECONDS
from orchestra.errors import InputError
from orchestra.settings.base import from_plain

SCHEMA = 2
NORMAL_QUARTILE = 0.6745
"""Half of the interquartile range of a normal distribution, in standard deviations."""
WIRE = 1538 / 1448
"""Bytes on Ethernet per byte of a full TCP segment (IEEE 802.3, IPv4 and timestamps)."""
MAX_WAITED = 0.1
"""The most of the processor time that others may take from a measurement."""
MAX_SPREAD = 0.3
"""The largest spread of repeats that agree: half of their interquartile range over the median. With
this spread a simulation would draw jitter with a standard deviation of 0.44."""


@dataclass(frozen=True)
class Quality:
    """The conditions under which figures were measured."""

    measured_at: str  # date and time, UTC
    # The part of the processor time that the measurement wanted and other programs took; of several
    # measurements the worst
    waited: float
    # Of the repeats, half of their interquartile range over the median: in the middle of all
    # messages, or of a gradient of the batch that was asked for
    spread: float
    repeats: int = 0  # how many measurements were made again because they had been disturbed
    left_out: tuple[str, ...] = ()  # what there was no time for
    # Whether the figures are not to be trusted, and were kept because the user said so
    kept_anyway: bool = False

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the figures are not to be trusted; none where they are."""
        found = []
        if self.waited > MAX_WAITED:
            found.append(f"other programs took {self.waited:.0%} of the processor time")
        if self.spread > MAX_SPREAD:
            found.append(f"repeats differ by ±{self.spread:.0%}")
        return tuple(found)

    def __str__(self) -> str:
        again = f", {self.repeats} measured again" * (self.repeats > 0)
        text = f"waited {self.waited:.0%}, spread ±{self.spread:.0%}{again}"
        if self.left_out:
            text += f", no time for {', '.join(self.left_out)}"
        return text + ", kept anyway" * self.kept_anyway


def together(qualities: Sequence[Quality]) -> Quality:
    """Return the quality of figures used together: the worst of each, and the oldest date."""
    return Quality(
        measured_at=min(quality.measured_at for quality in qualities),
        # One doubtful figure makes a simulation doubtful
        waited=max(quality.waited for quality in qualities),
        spread=max(quality.spread for quality in qualities),
        repeats=sum(quality.repeats for quality in qualities),
        left_out=tuple(dict.fromkeys(what for q in qualities for what in q.left_out)),
        kept_anyway=any(quality.kept_anyway for quality in qualities),
    )


def marked(quality: Quality | None) -> Quality | None:
    """Return the quality with the mark that it was kept anyway, where there are doubts."""
    return replace(quality, kept_anyway=True) if quality and quality.doubts else quality


@dataclass(frozen=True)
class Curve:
    """Seconds over an amount (samples, elements or bytes), straight between those measured."""

    points: tuple[tuple[float, float], ...]  # (amount, seconds), their amounts rising
    # Of the repeats at each point, half of their interquartile range over the median
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        amounts = [amount for amount, _ in self.points]
        if not amounts or min(amounts) < 1 or amounts != sorted(set(amounts)):
            raise ValueError("the amounts of a curve have to rise, from 1 on")
        # The simulation's compute refuses zero seconds.
        if not all(seconds > 0 and math.isfinite(seconds) for _, seconds in self.points):
            raise ValueError("the seconds of a curve have to be above 0")

    def scaled(self, factor: float) -> Curve:
        """Return the curve with `factor` times the seconds."""
        return replace(self, points=tuple((n, seconds * factor) for n, seconds in self.points))

    def at(self, amount: float) -> float:
        """Return the seconds for `amount`, always above 0.

        The first and the last stretch go on beyond their ends; more never takes less than the
        largest amount did, and less takes at least its proportion of the smallest.
        """
        points = self.points
        (least, first), (most, last) = points[0], points[-1]
        # One point has no slope: in proportion above, and no less than one unit below
        if len(points) == 1:
            return first * max(amount, 1) / least
        # Outside of the measured amounts the first or last stretch goes on.
        place = min(max(bisect_right(points, amount, key=lambda p: p[0]), 1), len(points) - 1)
        (low, before), (high, after) = points[place - 1 : place + 1]
        seconds = before + (after - before) / (high - low) * (amount - low)
        if amount < least:
            # The line through noisy points may cross zero
            return max(seconds, first * max(amount, 1) / least)
        return max(seconds, last) if amount > most else seconds

    def spread_at(self, amount: float) -> float:
        """Return the spread of the repeats at a point; 0 if none were made or noted."""
        known = zip(self.points, self.spread, strict=False)
        return next((spread for point, spread in known if point[0] == amount), 0.0)


@dataclass(frozen=True)
class Parameter:
    """A tensor of a task's model: what part of a gradient's seconds is its own."""

    name: str
    elements: int
    forward: float  # the part that its layer takes in the forward pass, with what follows the layer
    ready: float  # the part that has passed when the tensor has its gradient


@dataclass(frozen=True)
class Timing:
    """The seconds of a worker's step."""

    threads: int  # intra-op threads that it computes with
    gradient: Curve  # forward and backward, over samples
    update: Curve  # the optimizer's, over elements of the parameters
    # All else that a step takes on a worker that is alone, over samples: reading the batch,
    # collecting the gradient, writing down the step
    step: Curve

    def scaled(self, factor: float) -> Timing:
        """Return the same where everything takes `factor` times as long."""
        curves = (self.gradient, self.update, self.step)
        return Timing(self.threads, *(curve.scaled(factor) for curve in curves))


@dataclass(frozen=True)
class TaskCosts:
    """The figures of a task with an optimizer and a precision."""

    task: str
    optimizer: str
    precision: str
    batch_size: int
    # Processor seconds that a step and an exchange take more in turn than each by itself: they push
    # each other out of the caches
    cold: float
    # Of a core in steps while all cores take steps, where it is 1 while one does
    shared_speed: float
    refill: float  # processor seconds that a thread loses on a core that another one had before it
    sample_flops: float  # floating-point operations of a sample's forward and backward
    # With one thread, with more, and last with as many as there are cores
    timings: tuple[Timing, ...]
    parameters: tuple[Parameter, ...]  # the trainable ones, in the model's order
    quality: Quality | None = None  # None in a file of an earlier version

    def __post_init__(self) -> None:
        counts = [timing.threads for timing in self.timings]
        # Amdahl's law beyond the last count goes through that of one thread.
        if counts[:1] != [1] or counts != sorted(set(counts)):
            raise ValueError("the threads of a task's timings have to rise, from 1 on")

    @property
    def one(self) -> Timing:
        return self.timings[0]

    @property
    def all(self) -> Timing:
        return self.timings[-1]

    def seconds(
        self, part: Literal["gradient", "update", "step"], amount: float, threads: int
    ) -> float:
        """Return the seconds of `part` of a step with `threads` threads; see `at_threads`."""
        measured = [(t.threads, getattr(t, part).at(amount)) for t in self.timings]
        return at_threads(measured, threads)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.task, self.optimizer, self.precision

    @property
    def jitter(self) -> Jitter | None:
        """The variation of the durations of gradients on a core that had nothing else to do."""
        # The spread is half of the interquartile range over the median
        sigma = self.one.gradient.spread_at(self.batch_size) / NORMAL_QUARTILE
        return LogNormal(sigma) if sigma > 0 else None

    @property
    def flops(self) -> float:
        """Floating-point operations a second of one thread, at the batch that was asked for."""
        return self.sample_flops * self.batch_size / self.one.gradient.at(self.batch_size)


def at_threads(measured: Sequence[tuple[int, float]], threads: int) -> float:
    """Return the seconds with so many threads, where `measured` are pairs of threads and seconds
    from 1 on.

    Between two counts the seconds are a straight line over 1 / threads. Beyond the last count, m,
    they follow Amdahl's law through the first and the last, T(n) = T(1) (s + (1 - s) / n), with
    s = (T(m) / T(1) - 1 / m) / (1 - 1 / m), the serial fraction of A. Karp and H. Flatt (Measuring
    Parallel Processor Performance, CACM 33, 1990), which holds all that kept m threads from being m
    times as fast. It is at least 0. Where only one thread was measured, more gain nothing.
    """
    most, last = measured[-1]
    if threads >= most:
        if most == 1:
            return last
        # Negative where the threads were more than m times as fast, by chance or by caches
        serial = max((last / measured[0][1] - 1 / most) / (1 - 1 / most), 0.0)
        return last * (serial + (1 - serial) / threads) / (serial + (1 - serial) / most)
    place = bisect_right(measured, threads, key=lambda point: point[0])
    (few, slow), (many, fast) = measured[place - 1 : place + 1]
    # Linear over 1 / threads, which is exact under Amdahl's law.
    part = (1 / few - 1 / threads) / (1 / few - 1 / many)
    return slow + (fast - slow) * part


@dataclass(frozen=True)
class MessageTimes:
    """The seconds of a message between two ranks of the machine, over the bytes with its header."""

    send: Curve  # processor seconds of the sender
    receive: Curve  # processor seconds of the receiver, who was asleep; without adding
    one_way: Curve  # seconds from the sender's call to the receiver's having it


@dataclass(frozen=True)
class Messages(MessageTimes):
    """The same of messages over sockets, and what else is known of messages."""

    local: Curve  # processor seconds of a message between two flows of one rank, at both ends
    handling: float  # processor seconds of a strategy around a message, at either end
    collective: float  # processor seconds of an all-reduce beside its messages and additions
    buffer_bytes: int  # up to this size a send is over at once, whatever the receiver does
    latency: float  # seconds of a small message beyond those of both processors, one way
    bandwidth: float  # bytes/s that all ranks of the machine together can be taken to move


@dataclass(frozen=True)
class Calibration:
    """All figures of one machine."""

    measured_at: str  # date and time, UTC
    machine: Mapping[str, Any]  # what `records.environment` says of it
    cores: int
    busy_with_others: float  # the part of the processor time that others took, where it was most
    time_slice: float  # seconds for which a thread keeps a core while others wait for it
    # Seconds over elements of each kind of work that is the same for every task
    work: Mapping[str, Curve]
    messages: Messages  # through sockets over loopback
    tasks: tuple[TaskCosts, ...] = ()
    # Of all but the tasks, which have their own; None in a file of an earlier version
    quality: Quality | None = None
    # Collectives in shared memory; None in a file of an earlier version
    in_memory: MemoryCosts | None = None
    # Messages between ranks that share memory; None in a file of an earlier version
    near: MessageTimes | None = None
    # Transfers of collectives through sockets; None in a file of an earlier version
    transfers: MessageTimes | None = None

    def quality_of(self, task: TaskCosts) -> Quality:
        """Return the quality of all figures together that a simulation of `task` goes by."""
        # Files of earlier versions say only how much others took
        known = [quality for quality in (self.quality, task.quality) if quality is not None]
        return together(known or [Quality(self.measured_at, self.busy_with_others, 0.0)])

    def task(self, task: str, optimizer: str, precision: str) -> TaskCosts | None:
        """Return the figures of a task; None where it was not measured with these."""
        return next((t for t in self.tasks if t.key == (task, optimizer, precision)), None)

    def with_task(self, costs: TaskCosts) -> Calibration:
        """Return a copy in which `costs` are the figures of their task."""
        # The newest figures of a task replace those before
        others = tuple(other for other in self.tasks if other.key != costs.key)
        return replace(self, tasks=(*others, costs))

    def marked(self) -> Calibration:
        """Return a copy that says of itself that it was kept although it is not to be trusted."""
        tasks = tuple(replace(t, quality=marked(t.quality)) for t in self.tasks)
        return replace(self, quality=marked(self.quality), tasks=tasks)

    def overhead(self, task: TaskCosts) -> Overhead:
        """Return the costs of messages in training `task`, in addition to the links they cross."""
        points = self.work["add"].points
        (fewer, short), (more, long) = points[0], points[-1]
        in_memory = self.in_memory or MemoryCosts()
        if self.near is not None:
            in_memory = replace(in_memory, send=self.near.send, receive=self.near.receive)
        return Overhead(
            send=self.messages.send,
            receive=self.messages.receive,
            # The slope alone: what an addition has beside its bytes is small, and in no figure.
            add=(long - short) / (more - fewer) / 4,
            buffer=self.messages.buffer_bytes,
            wire=WIRE,
            local=self.messages.local,
            cold=task.cold,
            collective=self.messages.collective,
            handling=self.messages.handling,
            in_memory=in_memory,
            transfers=(
                TransferCosts(self.transfers.send, self.transfers.receive)
                if self.transfers is not None
                else TransferCosts()
            ),
        )

    def sharing(self, task: TaskCosts) -> Sharing:
        """Return how threads share cores, in a training of `task`."""
        return Sharing(task.shared_speed, self.time_slice, task.refill)

    @property
    def cluster(self) -> str:
        """The notation of this machine as a cluster."""
        bandwidth = BANDWIDTH.write(float(f"{self.messages.bandwidth:.3g}"))
        # The measured latency of loopback is close to zero and may be negative.
        latency = SECONDS.write(float(f"{max(self.messages.latency, 1e-9):.3g}"))
        return f'one_host({self.cores}, bandwidth="{bandwidth}", latency="{latency}")'

    def to_json(self) -> str:
        """Return the text of a file that `read_calibration` understands."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


def read_calibration(path: Path) -> Calibration:
    """Return what was measured, from the file at `path`.

    Raises:
        InputError: the file is missing, damaged, or of another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("it is no mapping")
        if (schema := document.pop("schema", None)) != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, not {SCHEMA}")
        calibration: Calibration = from_plain(Calibration, document)
    except FileNotFoundError:
        raise InputError(f"calibration: there is no file {path}; run orchestra calibrate") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"calibration: {path} is damaged or of another version ({error}); delete it and run "
            "orchestra calibrate again"
        ) from None
    return calibration
