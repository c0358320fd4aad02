"""What messages between two ranks of this machine take, and work that is the same for all tasks."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from orchestra.bench.calibrate.stopwatch import Budget, Kept, curve_of, repeat
from orchestra.bench.turns import Progress, check_stopped, teller
from orchestra.cluster.calibration import Curve, Messages
from orchestra.collectives import Group, all_reduce, gather_objects
from orchestra.engines.processes.environment import Launched
from orchestra.engines.processes.launch import launch
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

SIZES = (4, 4096, 65_536, 262_144, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
"""Bytes of the messages that are measured."""
ELEMENTS = (256, 4096, 65_536, 1 << 18, 1 << 20, 4 << 20)
KINDS = 3
"""Kinds of work on elements."""
SMALL = SIZES[:5]
"""Bytes of messages of a rank to itself."""
REDUCED, ROUNDS = 65_536, 200
"""Bytes of a message in an all-reduce that is measured, and how often."""
FIRST = 10
"""Times that a message goes back and forth before anybody looks at the clock."""
PASSES = 3
TAG = 1
GO = 2
Times = dict[int, list[float]]
LONG_AGO = 0.002
"""Seconds after which a rank that waits is asleep."""


@dataclass(frozen=True)
class MessageTimes:
    """What one of the two ranks found out.

    `two_rounds` and `one_round` are processor seconds of all-reduces over two ranks.
    """

    send: Curve
    receive: Curve
    one_way: Curve
    local: Curve
    work: dict[str, Curve]
    two_rounds: float
    one_round: float
    buffer_bytes: int


def measure_messages(runtime: Runtime, allowed: tuple[float, float]) -> tuple[MessageTimes, Kept]:
    """On two ranks: back and forth in every size; then, on the first alone, the rest."""
    torch.set_num_threads(1)
    transport, kept, (seconds, until) = runtime.transport, Kept(), allowed
    budget = Budget(until, PASSES * (len(SIZES) + len(SMALL)) + KINDS * len(ELEMENTS) + 1)
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    with kept.watched(2):
        passes: list[dict[int, tuple[list[float], ...]]] = []
        while len(passes) < PASSES and (not passes or _goes_on(transport, not budget.over)):
            times: dict[int, tuple[list[float], ...]] = {}
            for done, size in enumerate(SIZES, start=len(passes) * len(SIZES) + 1):
                frame = size // 4 * 4 + header_bytes(1)
                times[frame] = _back_and_forth(transport, size, seconds / PASSES, budget.share())
                runtime.reporter.progress(step=done, samples=0)
            passes.append(times)
        two_rounds, one_round = _all_reduces(transport, budget.share())
    send, receive, one_way = (
        curve_of(_best([{frame: found[k] for frame, found in times.items()} for times in passes]))
        for k in range(3)
    )
    buffer_bytes = _buffer_bytes(transport)
    work, local = {}, curve_of({1: [1.0]})
    if transport.rank == 0:
        passes_of_one: list[Times] = []
        while len(passes_of_one) < PASSES and not (passes_of_one and budget.over):
            passes_of_one.append(
                {size: _local(transport, size, seconds / 8, budget.share()) for size in SMALL}
            )
        local = curve_of(_best(passes_of_one))
        with kept.watched(1):
            work = elementwise(seconds, kept, budget)
    _goes_on(transport, False)  # the other rank waits for this one
    found = MessageTimes(send, receive, one_way, local, work, two_rounds, one_round, buffer_bytes)
    return found, kept


def _goes_on(transport: Transport, wish: bool) -> bool:
    """Return what rank 0 wishes; both know it then."""
    if transport.rank == 0:
        transport.send(torch.tensor([float(wish)]), 1, GO).wait()
        return wish
    return bool(transport.receive(0, GO).wait())


def _best(passes: Sequence[Times]) -> Times:
    """Take of each size the pass with the lowest median: a machine that wakes up, or has other
    things to do for a second, only adds."""
    return {
        size: min((times[size] for times in passes), key=statistics.median) for size in passes[0]
    }


def _back_and_forth(
    transport: Transport, size: int, seconds: float, most: float
) -> tuple[list[float], ...]:
    """Send messages of one size back and forth; return seconds to send, to receive, and one way.

    They go as often as rank 0 finds time for: for `seconds`, and at least 20 times if that takes no
    more than `most`. The first times warm up; they count where there are no others.
    """
    peer = 1 - transport.rank
    leaving, arriving = torch.zeros(size // 4), torch.zeros(size // 4)

    def send() -> None:
        transport.send(leaving, peer, TAG).wait()

    def receive() -> None:
        transport.receive(peer, TAG, arriving).wait()

    rounds: list[tuple[float, float, float]] = []
    began, go_on = time.perf_counter(), True
    while go_on:
        for _ in range(FIRST):
            started = time.perf_counter()
            if transport.rank == 0:
                sent, received = _processor_seconds(send), _processor_seconds(receive)
            else:
                received, sent = _processor_seconds(receive), _processor_seconds(send)
            rounds.append((sent, received, (time.perf_counter() - started) / 2))
        passed = time.perf_counter() - began
        wanted = len(rounds) < 2 * FIRST or passed < seconds
        go_on = _goes_on(transport, wanted and passed < most)
    return tuple(map(list, zip(*(rounds[FIRST:] or rounds), strict=True)))


def _processor_seconds(function: Callable[[], None]) -> float:
    began = time.thread_time()
    function()
    return time.thread_time() - began


def _all_reduces(transport: Transport, most: float) -> tuple[float, float]:
    """Return medians of many, in turn; as many as `most` seconds suffice for.

    Of two rounds with messages of the same size, added in the first; and of the first alone.
    """
    group = Group((0, 1))
    whole, half = torch.zeros(REDUCED // 2), torch.zeros(REDUCED // 4)

    def ring() -> None:
        all_reduce(transport, whole, "ring", group, TAG)

    def butterfly() -> None:
        all_reduce(transport, half, "butterfly", group, TAG)

    two: list[float] = []
    one: list[float] = []
    began = time.perf_counter()
    while not two or _goes_on(transport, len(two) < ROUNDS and time.perf_counter() - began < most):
        for _ in range(FIRST):
            two.append(_processor_seconds(ring))
            one.append(_processor_seconds(butterfly))
    return statistics.median(two), statistics.median(one)


def _buffer_bytes(transport: Transport) -> int:
    """Find the largest size that leaves a sender free while nobody receives."""
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


def _local(transport: Transport, size: int, seconds: float, most: float) -> list[float]:
    """Time a message from a flow to another of the same rank, and half of the answer."""
    there, back = 11, 12
    values = torch.zeros(size // 4)
    task = transport.spawn(lambda inner: _echo(inner, there, back))

    count = 0

    def once() -> None:
        nonlocal count
        transport.send(values, transport.rank, there)
        transport.receive(transport.rank, back).wait()
        count += 1

    began = time.process_time()
    repeat(once, seconds, Kept(), most)  # it waits for the other flow, so that nothing is kept
    spent = (time.process_time() - began) / count / 2
    transport.send(torch.zeros(0), transport.rank, there)
    task.wait()
    return [spent]


def _echo(transport: Transport, there: int, back: int) -> None:
    while (message := transport.receive(transport.rank, there).wait()).numel():
        transport.send(message, transport.rank, back)


def elementwise(seconds: float, kept: Kept, budget: Budget) -> dict[str, Curve]:
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
            times[elements] = repeat(once, seconds / KINDS, kept, budget.share())
        curves[kind] = curve_of(times)
    return curves


def messages_of(first: MessageTimes, second: MessageTimes, cores: int) -> Messages:
    """The mean of what both ranks measured.

    Between ranks of one machine only processors move bytes: the bandwidth that all of them share
    is set to what `cores` pairs would move whose slower end is the limit.
    """
    send, receive = _mean(first.send, second.send), _mean(first.receive, second.receive)
    one_way = _mean(first.one_way, second.one_way)
    one = statistics.mean((first.one_round, second.one_round))
    two = statistics.mean((first.two_rounds, second.two_rounds))
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


REPEATS = 15

Matrix = list[list[float]]


def calibrate_links(
    ranks: int, size: int, launched: Launched | None = None, on_progress: Progress | None = None
) -> Matrix | None:
    """Seconds of a message of `size` bytes, one way, from each rank (row) to each (column).

    Between processes of this machine, or those that a launcher started (`launched`): then rank 0
    has the result, and the others None.
    """
    if launched is not None:
        from orchestra.engines.processes.rank import join

        outcome = join(measure_links, size, launched)
        return outcome.results[0] if launched.rank == 0 else None
    tell = teller(on_progress, "links", ranks * (ranks - 1) // 2)
    outcome = launch(measure_links, size, ranks, on_event=tell)
    check_stopped(outcome)
    matrix: Matrix = outcome.results[0]
    return matrix


def measure_links(runtime: Runtime, size: int) -> Matrix | None:
    """On each rank: pair after pair, so that none is in the way of another."""
    everyone = Group(tuple(range(runtime.ranks)))
    own: dict[str, float] = {}
    for done, (one, other) in enumerate(combinations(everyone.ranks, 2), start=1):
        all_reduce(runtime.transport, torch.zeros(1), "ring", everyone, Tag.AGREE)
        if runtime.rank in (one, other):
            seconds = _one_way(runtime, other if runtime.rank == one else one, size)
            if runtime.rank == one:
                own[str(other)] = seconds
        runtime.reporter.progress(step=done, samples=0)
    rows = gather_objects(runtime.transport, own, everyone, 0)
    return _matrix(rows) if runtime.rank == 0 else None


def _one_way(runtime: Runtime, peer: int, size: int) -> float:
    """Return half of the median time there and back."""
    transport = runtime.transport
    leaving, arriving = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        if runtime.rank < peer:
            transport.send(leaving, peer, TAG).wait()
            transport.receive(peer, TAG, arriving).wait()
        else:
            transport.receive(peer, TAG, arriving).wait()
            transport.send(leaving, peer, TAG).wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) / 2


def _matrix(rows: Sequence[dict[str, float]]) -> Matrix:
    count = len(rows)
    matrix = [[0.0] * count for _ in range(count)]
    for one in range(count):
        for other, seconds in rows[one].items():
            matrix[one][int(other)] = matrix[int(other)][one] = seconds
    return matrix
