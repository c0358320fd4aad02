"""Measure messages between two ranks of this machine, and work that is the same for all tasks."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orchestra.calibration.timing import (
    FIRST_STEPS,
    Conditions,
    Profile,
    TimeBudget,
    curve_of,
    repeat,
    rounds,
    total,
    train_profiled,
)
from orchestra.cluster.calibration import Curve, Messages, MessageTimes
from orchestra.collectives import Group, all_reduce, broadcast
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.trainer.settings import Run, Training
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import RankActivity, Runtime

SIZES = (4, 4096, 65_536, 262_144, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
"""The bytes of the measured messages."""
ELEMENTS = (256, 4096, 65_536, 1 << 18, 1 << 20, 4 << 20)
KINDS = 3  # the kinds of work on elements
SMALL = SIZES[:5]  # the bytes of messages of a rank to itself
REDUCED, ROUNDS = 65_536, 200
"""The bytes of a message in a measured all-reduce or of a server, and the number of its repeats."""
FIRST = 10  # the messages back and forth between two looks at the clock
PASSES = 3
TAG = 1
CALL = 1e-6  # the seconds that a call to the kernel takes at least
LONG_AGO = 0.002  # the seconds after which a waiting rank is asleep


@dataclass(frozen=True)
class MessageFigures:
    """The measurements of one of the two ranks.

    `transfers` are those of broadcasts, with what a collective takes besides. `two_rounds` and
    `one_round` are processor seconds of all-reduces over two ranks; `served` those of a server's
    round, besides its work: it receives two messages and sends two. A worker has none.
    """

    times: MessageTimes
    transfers: MessageTimes
    local: Curve
    work: dict[str, Curve]
    two_rounds: float
    one_round: float
    served: float
    buffer_bytes: int


def measure_near(runtime: Runtime, allowed: tuple[float, float]) -> tuple[MessageTimes, Conditions]:
    """Measure messages back and forth in every size on two ranks that share memory."""
    kept, (seconds, until) = Conditions(), allowed
    budget = TimeBudget(until, PASSES * len(SIZES))
    with kept.watched(2):
        return _in_every_size(runtime, seconds, budget, itertools.count(1)), kept


def measure_messages(
    runtime: Runtime, allowed: tuple[float, float, str]
) -> tuple[MessageFigures, Conditions]:
    """Measure messages back and forth in every size on two ranks; then the rest on the first one
    alone. `allowed`: seconds for each figure, until when, and a folder for files meanwhile.
    """
    transport, kept, (seconds, until, folder) = runtime.transport, Conditions(), allowed
    budget = TimeBudget(until, PASSES * (2 * len(SIZES) + len(SMALL)) + KINDS * len(ELEMENTS) + 1)
    with kept.watched(2):
        done = itertools.count(1)
        times = _in_every_size(runtime, seconds, budget, done)
        transfers = _in_every_size(runtime, seconds, budget, done, by_collectives=True)
        two_rounds, one_round = _all_reduces(transport, budget.share())
        served = _served(runtime, folder)
    buffer_bytes = _buffer_bytes(transport)
    # The second rank's are not used
    work, local = {}, curve_of({1: [1.0]})
    if transport.rank == 0:
        (local,) = _best_of_passes(
            SMALL,
            lambda size: [_local(transport, size, seconds / 8, budget.share())],
            lambda: budget.over,
        )
        with kept.watched(1):
            work = elementwise(seconds, kept, budget)
    total(transport)  # the other rank waits for this one
    return MessageFigures(
        times, transfers, local, work, two_rounds, one_round, served, buffer_bytes
    ), kept


def _in_every_size(
    runtime: Runtime,
    seconds: float,
    budget: TimeBudget,
    done: Iterator[int],
    by_collectives: bool = False,
) -> MessageTimes:
    torch.set_num_threads(1)
    transport = runtime.transport
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there

    def between(size: int) -> Sequence[list[float]]:
        times = back_and_forth(
            transport, (0, 1), size, seconds / PASSES, budget.share(), by_collectives=by_collectives
        )
        runtime.reporter.progress(step=next(done), samples=0)
        return times

    # Until both agree: one that measured on would wait for the other for ever.
    return MessageTimes(
        *_best_of_passes(SIZES, between, lambda: total(transport, budget.over) > 0, header_bytes(1))
    )


def _best_of_passes(
    sizes: Sequence[int],
    measure: Callable[[int], Sequence[list[float]]],
    is_over: Callable[[], bool],
    header: int = 0,
) -> list[Curve]:
    """Measure all sizes several times; return a curve for each kind of times, of each size from the
    pass with the lowest median: a machine that wakes up, or has other things to do, only adds.
    """
    passes: list[list[Sequence[list[float]]]] = []
    while len(passes) < PASSES and not (passes and is_over()):
        # All sizes before the next pass, so that the passes of one size lie apart in time
        passes.append([measure(size) for size in sizes])
    best = [
        [min(of_kind, key=statistics.median) for of_kind in zip(*of_size, strict=True)]
        for of_size in zip(*passes, strict=True)
    ]
    # Messages are charged by their bytes with headers
    amounts = [size + header for size in sizes]
    return [curve_of(dict(zip(amounts, times, strict=True))) for times in zip(*best, strict=True)]


def back_and_forth(
    transport: Transport,
    pair: tuple[int, int],
    size: int,
    seconds: float = 0.0,
    most: float = math.inf,
    answer: int | None = None,
    by_collectives: bool = False,
) -> Sequence[list[float]]:
    """Send messages of one size back and forth; return the seconds to send, to receive, and of
    one way.

    With an `answer` of another size, "one way" is half of the way there and back. Messages are
    sent for `seconds`, and at least 20 times if that takes no more than `most`. The first ones
    are a warm-up, and count only if there are no others. `by_collectives`: broadcasts take the
    place of the messages.
    """
    leads = transport.rank == pair[0]
    peer = pair[1] if leads else pair[0]
    there, back = (torch.zeros(count, dtype=torch.uint8) for count in (size, answer or size))
    leaving, arriving = (there, back) if leads else (back, there)

    group = Group(pair)

    def send() -> None:
        if by_collectives:
            broadcast(transport, leaving, transport.rank, group, TAG)
        else:
            transport.send(leaving, peer, TAG).wait()

    def receive() -> None:
        if by_collectives:
            broadcast(transport, arriving, peer, group, TAG)
        else:
            transport.receive(peer, TAG, arriving).wait()

    found: list[tuple[float, float, float]] = []
    for _ in rounds(seconds, most, 2, math.inf, lambda own: total(transport, own, pair) > 0):
        for _ in range(FIRST):
            started = time.perf_counter()
            # The ends take turns, so that both are measured sending and receiving in the same loop
            if leads:
                sent, received = _processor_seconds(send), _processor_seconds(receive)
            else:
                received, sent = _processor_seconds(receive), _processor_seconds(send)
            # Clocks of two processes are not compared: half of the way there and back is one way
            found.append((sent, received, (time.perf_counter() - started) / 2))
    return [list(times) for times in zip(*(found[FIRST:] or found), strict=True)]


def _processor_seconds(function: Callable[[], object]) -> float:
    began = time.thread_time()
    function()
    return time.thread_time() - began


def _all_reduces(transport: Transport, most: float) -> tuple[float, float]:
    """Return the median seconds of two kinds of all-reduces that take turns; as many as fit into
    `most` seconds.

    The first has two rounds with messages of the same size, which are added in the first round;
    the second has that first round only.
    """
    # A ring of two sends halves of its vector, a butterfly all of it: equal messages
    whole, half = torch.zeros(REDUCED // 2), torch.zeros(REDUCED // 4)

    def seconds(schedule: str, vector: Tensor) -> float:
        group = Group((0, 1))
        return _processor_seconds(lambda: all_reduce(transport, vector, schedule, group, TAG))

    two: list[float] = []
    one: list[float] = []
    for _ in rounds(0.0, most, ROUNDS // FIRST, agreed=lambda own: total(transport, own) > 0):
        for _ in range(FIRST):
            # In turn, so that both see the same machine
            two.append(seconds("ring", whole))
            one.append(seconds("butterfly", half))
    return statistics.median(two), statistics.median(one)


def _served(runtime: Runtime, folder: str) -> float:
    """Train under a parameter server, which is rank 1; return its processor seconds of a round
    besides its work, in the median.
    """
    profile = Profile(time.thread_time)
    training = Training(
        ranks=2, batch_size=1, equal="worker_batch", steps=ROUNDS, snapshots=0, trace_steps=0
    )
    run = Run("calibration", f"synthetic({REDUCED // 4})", ParameterServer(), training=training)
    train_profiled(runtime, run, profile, PASSES * len(SIZES), folder)
    if runtime.rank == 0:
        return 0.0
    updates, encodings = profile.notes["update"], profile.notes["encode"]
    # Between two updates the server encodes the values, answers, and receives the next gradient
    between = zip(updates, encodings, updates[1:], strict=False)
    times = [
        began - ended - (encoded - encoding)
        for (_, ended), (encoding, encoded), (began, _) in between
    ]
    return statistics.median(times[FIRST_STEPS:])


def _buffer_bytes(transport: Transport) -> int:
    """Return the largest size that a sender can send while the receiver does not receive."""
    free = SIZES[0]
    for size in SIZES:
        if transport.rank == 0:
            handle = transport.send(torch.zeros(size // 4), 1, TAG)
            began = time.perf_counter()
            # The receiver sleeps: only the kernel's buffers take bytes
            while not handle.done() and time.perf_counter() - began < LONG_AGO:
                pass
            if handle.done():
                free = size
            handle.wait()
        else:
            # Longer than the sender looks
            time.sleep(2 * LONG_AGO)
            transport.receive(0, TAG).wait()
        total(transport)
    return free


def _local(transport: Transport, size: int, seconds: float, most: float) -> list[float]:
    """Time a message from one flow to another of the same rank; half of the time there and back."""
    there, back = 11, 12
    values = torch.zeros(size // 4)
    count = 0

    def send_back(inner: Transport) -> None:
        while (message := inner.receive(inner.rank, there).wait()).numel():
            inner.send(message, inner.rank, back)

    def once() -> None:
        nonlocal count
        transport.send(values, transport.rank, there)
        transport.receive(transport.rank, back).wait()
        count += 1

    task = transport.spawn(send_back)
    # Both flows are threads of this process, so the thread's own clock has half of it
    began = time.process_time()
    repeat(
        once, seconds, Conditions(), most
    )  # it waits for the other flow, so that nothing is kept
    spent = (time.process_time() - began) / count / 2
    transport.send(torch.zeros(0), transport.rank, there)
    task.wait()
    return [spent]


def elementwise(seconds: float, kept: Conditions, budget: TimeBudget) -> dict[str, Curve]:
    """Return the seconds of work on elements of float32, which is the same for every task."""
    kinds: dict[str, Callable[[Tensor, Tensor], object]] = {
        "add": lambda own, other: own.add_(other),
        "mix": lambda own, other: own.add_(other, alpha=0.5),
        # Stands for any compressor: a pass that reads and writes
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


def transfers_of(first: MessageFigures, second: MessageFigures, collective: float) -> MessageTimes:
    """Return the means of what both ranks measured, without the seconds of a `collective`."""

    def without(curve: Curve) -> Curve:
        return replace(curve, points=tuple((n, max(s - collective, CALL)) for n, s in curve.points))

    times = mean_times(first.transfers, second.transfers)
    return MessageTimes(without(times.send), without(times.receive), times.one_way)


def messages_of(
    first: MessageFigures, second: MessageFigures, near: MessageTimes, cores: int
) -> Messages:
    """Return the means of what both ranks measured.

    Between ranks of one machine only processors move bytes: the bandwidth that all of them share
    is set to what `cores` pairs would move whose slower end is the limit, and which share memory.
    """
    times = mean_times(first.times, second.times)
    one = statistics.mean((first.one_round, second.one_round))
    two = statistics.mean((first.two_rounds, second.two_rounds))
    round_seconds = two - one  # the second round of a ring adds nothing
    small, large = near.one_way.points[0][0], near.one_way.points[-1][0]
    # A request and a gradient come in, an answer and the values go out
    both_ends = [each.at(size) for each in (times.send, times.receive) for size in (small, REDUCED)]
    return Messages(
        send=times.send,
        receive=times.receive,
        one_way=times.one_way,
        local=first.local,
        # The strategy's own code around a message: decoding a request, choosing an answer.
        handling=max(second.served - sum(both_ends), 0.0) / 4,
        collective=max(one - round_seconds - first.work["add"].at(REDUCED / 4), 0.0),
        buffer_bytes=first.buffer_bytes,
        # What is left of a small message's way; on a machine's own loopback next to nothing.
        latency=max(near.one_way.at(small) - near.send.at(small) - near.receive.at(small), 1e-6),
        # Only processors move bytes here, so a link would count them twice: it is as wide as they
        # are.
        bandwidth=cores * large / max(near.send.at(large), near.receive.at(large)),
    )


def mean_times(one: MessageTimes, other: MessageTimes) -> MessageTimes:
    """Return the means of what both ranks measured, point by point."""

    def mean(a: Curve, b: Curve) -> Curve:
        pairs = zip(a.points, b.points, strict=True)
        points = tuple((amount, statistics.mean((x, y))) for (amount, x), (_, y) in pairs)
        # The larger spread: a doubt about either is a doubt about the mean
        return Curve(points, tuple(map(max, a.spread, b.spread)))

    send, receive = mean(one.send, other.send), mean(one.receive, other.receive)
    return MessageTimes(send, receive, mean(one.one_way, other.one_way))
