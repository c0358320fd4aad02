"""What messages between two ranks of this machine take, and work that is the same for all tasks."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.bench.calibrate.stopwatch import Kept, curve_of, repeat
from orchestra.cluster.calibration import Curve, Messages
from orchestra.collectives import Group, all_reduce
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import Runtime

SIZES = (4, 4096, 65_536, 262_144, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
"""Bytes of the messages that are measured."""
ELEMENTS = (256, 4096, 65_536, 1 << 18, 1 << 20, 4 << 20)
REDUCED, ROUNDS = 65_536, 200
"""Bytes of a message in an all-reduce that is measured, and how often."""
PASSES = 3
TAG = 1
GO = 2
Times = dict[int, list[float]]
LONG_AGO = 0.002
"""Seconds after which a rank that waits is asleep."""


@dataclass(frozen=True)
class Measured:
    """What one of the two ranks found out."""

    send: Curve
    receive: Curve
    one_way: Curve
    local: Curve
    work: dict[str, Curve]
    reduced: Reduced
    buffer_bytes: int
    kept: Kept


def measure_messages(runtime: Runtime, seconds: float) -> Measured:
    """On two ranks: back and forth in every size; then, on the first alone, the rest."""
    torch.set_num_threads(1)
    transport, kept = runtime.transport, Kept()
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    passes = [_sizes(runtime, seconds / PASSES, number) for number in range(PASSES)]
    send, receive, one_way = (curve_of(_best(several)) for several in zip(*passes, strict=True))
    reduced = _all_reduces(transport)
    buffer_bytes = _buffer_bytes(transport)
    work, local = {}, curve_of({1: [1.0]})
    if transport.rank == 0:
        small = SIZES[:5]
        passes_of_one = [
            {size: _local(transport, size, seconds / 8, kept) for size in small}
            for _ in range(PASSES)
        ]
        local = curve_of(_best(passes_of_one))
        work = elementwise(seconds, kept)
        transport.send(torch.zeros(1), 1, GO).wait()
    else:
        transport.receive(0, GO).wait()
    return Measured(
        send=send,
        receive=receive,
        one_way=one_way,
        local=local,
        work=work,
        reduced=reduced,
        buffer_bytes=buffer_bytes,
        kept=kept,
    )


def _sizes(runtime: Runtime, seconds: float, number: int) -> tuple[Times, Times, Times]:
    """Messages of all sizes, back and forth: sending, receiving, one way."""
    sends, receives, ways = {}, {}, {}
    for done, size in enumerate(SIZES, start=1):
        pair = _Pair(runtime.transport, size)
        pair.run(seconds)
        sends[pair.frame], receives[pair.frame] = pair.sends, pair.receives
        ways[pair.frame] = pair.one_way
        runtime.reporter.progress(step=number * len(SIZES) + done, samples=0)
    return sends, receives, ways


def _best(passes: Sequence[Times]) -> Times:
    """Of each size the pass with the lowest median: a machine that wakes up, or has other things
    to do for a second, only adds."""
    return {
        size: min((times[size] for times in passes), key=statistics.median) for size in passes[0]
    }


class _Pair:
    """Messages of one size, back and forth between ranks 0 and 1; this rank's part in it."""

    def __init__(self, transport: Transport, size: int) -> None:
        self.frame = size // 4 * 4 + header_bytes(1)
        self.sends: list[float] = []
        self.receives: list[float] = []
        self.one_way: list[float] = []
        self._transport = transport
        self._peer = 1 - transport.rank
        self._leaving = torch.zeros(size // 4)
        self._arriving = torch.zeros(size // 4)

    def run(self, seconds: float) -> None:
        """As often as rank 0 finds time for."""
        count, began = 0, time.perf_counter()
        go_on = torch.ones(1)
        while bool(go_on):
            for _ in range(10):
                self._round(counts=count > 0)
            count += 10
            if self._transport.rank == 0:
                late = time.perf_counter() - began > seconds
                go_on = torch.tensor([float(not late or count < 20)])
                self._transport.send(go_on, 1, GO).wait()
            else:
                go_on = self._transport.receive(0, GO).wait()

    def _round(self, *, counts: bool) -> None:
        started = time.perf_counter()
        functions = [self._send, self._receive]
        if self._transport.rank > 0:
            functions.reverse()
        times = {function: _processor_seconds(function) for function in functions}
        if counts:
            self.sends.append(times[self._send])
            self.receives.append(times[self._receive])
            self.one_way.append((time.perf_counter() - started) / 2)

    def _send(self) -> None:
        self._transport.send(self._leaving, self._peer, TAG).wait()

    def _receive(self) -> None:
        self._transport.receive(self._peer, TAG, self._arriving).wait()


def _processor_seconds(function: Callable[[], None]) -> float:
    began = time.thread_time()
    function()
    return time.thread_time() - began


@dataclass(frozen=True)
class Reduced:
    """Processor seconds of all-reduces over two ranks, by what they do.

    `two_rounds` and `one_round`: with messages of the same size in each round, added in the first.
    """

    two_rounds: float
    one_round: float


def _all_reduces(transport: Transport) -> Reduced:
    """Medians over many, in turn."""
    group = Group((0, 1))
    whole, half = torch.zeros(REDUCED // 2), torch.zeros(REDUCED // 4)

    def ring() -> None:
        all_reduce(transport, whole, "ring", group, TAG)

    def butterfly() -> None:
        all_reduce(transport, half, "butterfly", group, TAG)

    two, one = [], []
    for _ in range(ROUNDS):
        two.append(_processor_seconds(ring))
        one.append(_processor_seconds(butterfly))
    return Reduced(statistics.median(two), statistics.median(one))


def _buffer_bytes(transport: Transport) -> int:
    """The largest of the sizes that leaves a sender free while nobody receives."""
    free = SIZES[0]
    for size in SIZES:
        if transport.rank == 0:
            handle = transport.send(torch.zeros(size // 4), 1, TAG)
            began = time.perf_counter()
            while not handle.done() and time.perf_counter() - began < LONG_AGO:
                pass
            if handle.done():
                free = size
            transport.send(torch.zeros(1), 1, GO)
            handle.wait()
        else:
            time.sleep(2 * LONG_AGO)
            transport.receive(0, TAG).wait()
            transport.receive(0, GO).wait()
    return free


def _local(transport: Transport, size: int, seconds: float, kept: Kept) -> list[float]:
    """A message from a flow to another of the same rank, and half of the answer."""
    there, back = 11, 12
    values = torch.zeros(size // 4)
    task = transport.spawn(lambda inner: _echo(inner, there, back))

    def once() -> None:
        transport.send(values, transport.rank, there)
        transport.receive(transport.rank, back).wait()

    began = time.process_time()
    count = len(repeat(once, seconds, kept)) + 3
    spent = (time.process_time() - began) / count / 2
    transport.send(torch.zeros(0), transport.rank, there)
    task.wait()
    return [spent]


def _echo(transport: Transport, there: int, back: int) -> None:
    while (message := transport.receive(transport.rank, there).wait()).numel():
        transport.send(message, transport.rank, back)


def elementwise(seconds: float, kept: Kept) -> dict[str, Curve]:
    """Work over elements of float32, the same for every task."""
    kinds: dict[str, Callable[[Tensor, Tensor], object]] = {
        "add": lambda own, other: own.add_(other),
        "mix": lambda own, other: own.add_(other, alpha=0.5),
        "encode": lambda own, other: own.clone(),
    }
    curves = {}
    for kind, function in kinds.items():
        times = {}
        for elements in ELEMENTS:
            own, other = torch.zeros(elements), torch.ones(elements)
            once = functools.partial(function, own, other)
            times[elements] = repeat(once, seconds / len(kinds), kept)
        curves[kind] = curve_of(times)
    return curves


def messages_of(first: Measured, second: Measured, cores: int) -> Messages:
    """The mean of what both ranks measured.

    Between ranks of one machine only processors move bytes: the bandwidth that all of them share
    is set to what `cores` pairs would move whose slower end is the limit.
    """
    send, receive = _mean(first.send, second.send), _mean(first.receive, second.receive)
    one_way = _mean(first.one_way, second.one_way)
    one = statistics.mean((first.reduced.one_round, second.reduced.one_round))
    two = statistics.mean((first.reduced.two_rounds, second.reduced.two_rounds))
    round_seconds = two - one  # the second round of a ring adds nothing
    transported = send.at(REDUCED) + receive.at(REDUCED)
    small, large = one_way.points[0][0], one_way.points[-1][0]
    return Messages(
        send=send,
        receive=receive,
        local=first.local,
        one_way=one_way,
        handling=max(round_seconds - transported, 0.0),
        collective=max(one - round_seconds - first.work["add"].at(REDUCED / 4), 0.0),
        buffer_bytes=first.buffer_bytes,
        latency=max(one_way.at(small) - send.at(small) - receive.at(small), 1e-6),
        bandwidth=cores * large / max(send.at(large), receive.at(large)),
    )


def _mean(one: Curve, other: Curve) -> Curve:
    points = tuple(
        (amount, statistics.mean((a, b)))
        for (amount, a), (_, b) in zip(one.points, other.points, strict=True)
    )
    return Curve(points, tuple(map(max, one.spread, other.spread)))
