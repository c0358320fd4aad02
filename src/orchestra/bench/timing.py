"""Timing on a machine that others use, too: contestants that take turns, and repeated measurements.

Contestants take turns in the same processes, block by block. Whatever else the machine does then
falls on all of them alike, and a block is compared with the block of its own round only. Every
other round runs in reverse, so that a machine that becomes slower or faster favours nobody.

A repeated measurement has a time: it is made as often as that allows, and it is noted who was in
the way.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from orchestra.cluster.calibration import Curve
from orchestra.collectives import Group, all_reduce
from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.system import UsageMeter
from orchestra.records.report import taken_by_others
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

T = TypeVar("T")
Blocks = dict[str, list[float]]
"""Seconds of each contestant's blocks, by round."""

Progress = Callable[[str, float], None]
"""Told what is being measured, and the part of it that is done."""
LEAST, MOST = 9, 400
"""Repeats of a measurement, where there is time for them."""
WARM_UP = 3
"""Repeats before those that count."""


def join_gloo(runtime: Runtime, store: str, interface: str = "") -> None:
    """torch.distributed's default group on gloo, through the file `store`, on loopback or on the
    network `interface`.

    It is left to the end of the process. Destroying it can hang: that holds the interpreter and
    joins gloo's threads, which may need the interpreter to let go of a tensor (torch 2.13).
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if interface or loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or loopback[0])
    files = FileStore(store, runtime.ranks)
    dist.init_process_group("gloo", store=files, rank=runtime.rank, world_size=runtime.ranks)


def take_turns(
    runtime: Runtime, contestants: Mapping[str, Callable[[], None]], rounds: int
) -> Blocks:
    """Run a block of each contestant in each of `rounds` rounds, after one that warms up.

    All ranks begin each block together. Ends early where the user asks for a stop.
    """
    blocks: Blocks = {name: [] for name in contestants}
    done = 0
    for number in range(rounds + 1):
        for name in order(list(contestants), number):
            if _somebody_stops(runtime):
                return blocks
            started = time.perf_counter()
            contestants[name]()
            if number:
                blocks[name].append(time.perf_counter() - started)
            done += 1
            runtime.reporter.progress(step=done, samples=0)
    return blocks


def order(names: Sequence[T], number: int) -> Sequence[T]:
    """Return the order in round `number`: every other one in reverse."""
    return names if number % 2 else names[::-1]


def _somebody_stops(runtime: Runtime) -> bool:
    """Return whether any rank is to stop; also the barrier before a block."""
    wishes = torch.tensor([float(runtime.reporter.stop_requested())])
    dist.all_reduce(wishes)
    return bool(wishes)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median over the rounds of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def run_ranks(
    program: Callable[..., Any],
    argument: object,
    ranks: int,
    *,
    steps: int,
    what: str = "",
    on_progress: Progress | None = None,
    **limits: Any,
) -> Sequence[Any]:
    """Launch `program` and return what each rank did; `on_progress` hears how many of its `steps`
    rank 0 has done. `limits` are those of `launch`.

    Raises:
        KeyboardInterrupt: the user stopped it: it has no result.
    """

    def tell(event: Event | Notice) -> None:
        if on_progress is not None and isinstance(event, Heartbeat) and event.rank == 0:
            on_progress(what, event.step / steps)

    outcome = launch(program, argument, ranks, on_event=tell, **limits)
    if outcome.stopped:
        raise KeyboardInterrupt
    return outcome.results


@dataclass
class Budget:
    """The time of a measurement, divided evenly over the figures that are still to come.

    Attributes:
        until: when all of them have to be there, by `clock`, which is one for all processes of a
            machine.
        figures: how many are still to come.
    """

    until: float = math.inf
    figures: int = 1
    clock: Callable[[], float] = time.monotonic

    @property
    def over(self) -> bool:
        """True if the time has passed: what can be left out is left out."""
        return self.clock() >= self.until

    def share(self) -> float:
        """Return the seconds for the next figure, 0 where the time has passed."""
        seconds = max(self.until - self.clock(), 0.0) / max(self.figures, 1)
        self.figures -= 1
        return seconds


@dataclass
class Kept:
    """Under what conditions a process measured.

    Attributes:
        ran: seconds that the measuring thread ran, where it was never to wait for anything.
        passed: seconds that passed meanwhile.
        meters: by how many cores all ranks of the measurement wanted: what was used meanwhile.
        left_out: what there was no time for.
    """

    ran: float = 0.0
    passed: float = 0.0
    meters: dict[int, UsageMeter] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> float:
        """The part of the time in which the thread was kept from a processor."""
        return max(0.0, 1 - self.ran / self.passed) if self.passed else 0.0

    @contextmanager
    def watched(self, cores: int) -> Iterator[None]:
        """Notes what others take while this rank and its like want so many `cores`."""
        meter = self.meters.setdefault(cores, UsageMeter())
        meter.running(True)
        try:
            yield
        finally:
            meter.running(False)


def waited(ranks: Sequence[Kept]) -> float:
    """Return the part of the processor time that a measurement wanted and other programs took,
    where that was worst; from what all of its `ranks` noted.
    """
    parts = [kept.waiting for kept in ranks]
    for wanted in {wanted for kept in ranks for wanted in kept.meters}:
        usages = [kept.meters[wanted].usage() for kept in ranks if wanted in kept.meters]
        cores, taken = usages[0].cores, taken_by_others(usages)
        if taken is not None:
            parts.append(max(0.0, 1 - (cores - taken) / min(wanted, cores)))
    return max(parts, default=0.0)


def repeat(
    function: Callable[[], object], seconds: float, kept: Kept, most: float = math.inf
) -> list[float]:
    """Processor seconds of each call of `function`, for about `seconds`, after a warm-up.

    Of this thread alone: other work on the machine does not count, nor do threads that torch has.
    A slow function is called less often than `LEAST` times, so that it all takes `most` seconds.
    """
    started = time.perf_counter()
    for _ in range(WARM_UP):
        function()
        if time.perf_counter() - started > most / 3:
            break
    times: list[float] = []
    began, ran = time.perf_counter(), time.thread_time()
    for _ in rounds(seconds, most):
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

    There is at least one. There are `least` of them within `most` seconds, and up to `limit` within
    `seconds`.

    Args:
        agreed: makes of this rank's wish to end that of all.
    """
    began, passed, count = time.perf_counter(), 0.0, 0
    enough = False
    while not enough:
        yield passed
        count += 1
        passed = time.perf_counter() - began
        enough = agreed(
            passed >= most or (count >= least and (passed >= seconds or count >= limit))
        )


def total(transport: Transport, own: float = 0.0, ranks: Sequence[int] | None = None) -> float:
    """Return the sum of what each of `ranks` gives, all by default; each waits for the others."""
    values = torch.tensor([own], dtype=torch.float64)
    group = Group(tuple(range(transport.size) if ranks is None else ranks))
    all_reduce(transport, values, "ring", group, Tag.AGREE)
    return values.item()


def curve_of(times: Mapping[int, Sequence[float]]) -> Curve:
    """Return the curve through the medians of repeated measurements, by amount."""
    amounts = sorted(times)
    points = tuple((float(n), max(statistics.median(times[n]), 1e-9)) for n in amounts)
    return Curve(points, tuple(spread(times[n]) for n in amounts))


def spread(times: Sequence[float]) -> float:
    """Return half the interquartile range over the median; 0 where there is only one."""
    if len(times) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(times, n=4)
    return (upper - lower) / 2 / median if median > 0 else 0.0
