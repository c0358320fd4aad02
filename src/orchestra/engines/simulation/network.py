"""The network in virtual time: messages from one rank to another, in the order of sending.

A message costs its sender processor time, crosses the network behind those that its rank sent to
the same target before, and costs its receiver processor time once somebody waits for it. The three
go on at the same time, as bytes do that follow each other; the message is there when all are done.
Which message meets which receive is decided by the mailbox that real processes use, too.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Protocol

from torch import Tensor

from orchestra.cluster.costs import Overhead
from orchestra.engines.simulation.fluid import Activity, Fluid, Resource, Route
from orchestra.engines.simulation.kernel import Events, Flow, Kernel, Processor, Wait
from orchestra.transports import matching
from orchestra.transports.framing import Header
from orchestra.transports.matching import Incoming, Mailbox
from orchestra.transports.protocol import Task, Traffic


class Load(Protocol):
    """What a stream carries: a message, or what stands for one.

    The sender has done its part at the time `left_at`, infinite until that is known; `crossed`
    tells whether the network has. `both_ways` tells whether others of the same round of a
    collective go the other way; None: it is none of a collective.
    """

    left_at: float
    crossed: bool
    both_ways: bool | None

    @property
    def frame_bytes(self) -> int:
        """With its header."""
        ...

    def begin(self) -> None:
        """Its first byte is there."""
        ...

    def end(self) -> None:
        """All of it is there."""
        ...

    def fail(self, error: Exception) -> None:
        """It never arrives."""
        ...


class Message:
    """A `Load` from `send` to its delivery; `payload` is what was there when it was sent, and
    `arriving` what the mailbox knows it by, once it has begun."""

    __slots__ = (
        *("_sending", "_target", "arriving", "both_ways", "crossed", "header", "left_at"),
        "payload",
    )

    def __init__(
        self,
        header: Header,
        payload: Tensor,
        sending: Sending,
        target: Port,
        both_ways: bool | None = None,
    ) -> None:
        self.header = header
        self.both_ways = both_ways
        self.payload = payload
        self.left_at = inf
        self.crossed = False
        self._sending = sending
        self._target = target
        self.arriving: Incoming | None = None

    @property
    def frame_bytes(self) -> int:
        return self.header.frame_bytes

    def begin(self) -> None:
        source = self._sending.port.rank
        self.arriving = self._target.mailbox.begin(source, self.header, self.payload)
        if self.arriving.receive is not None:
            self.arriving.receive.began_at = self._target.net.kernel.now()
        self._target.wake()  # whoever waits for it begins to take it in, or learns of a misfit

    def end(self) -> None:
        assert self.arriving is not None
        if self.arriving.tensor is not self.payload:
            self.arriving.tensor.copy_(self.payload)
        self._sending.finish()
        self._target.mailbox.complete(self.arriving)
        self._target.wake()

    def fail(self, error: Exception) -> None:
        # Whoever sends it learns of the error, unless it has gone on since.
        if not self._sending.finished:
            self._sending.fail(error)
            self._sending.port.wake()


class Stream:
    """What one rank sends to another, a message after the other: latency first, then bandwidth.

    `delay(t)` is what a message that is sent at time t takes beyond the latency, in seconds.

    Attributes:
        resources: that it crosses.
        latency: seconds until the first byte is there.
        bandwidth: bytes/s, as long as nothing else crosses them.
        slow_start: of the connection, where it takes long.
    """

    def __init__(
        self,
        net: Net,
        route: Route,
        source: int,
        target: int,
        delay: Callable[[float], float] | None,
    ) -> None:
        self.resources = route.resources
        self.latency = route.latency
        self.bandwidth = min(resource.nominal for resource in route.resources)
        self.slow_start = route.slow_start
        self._route = route
        self._half_duplex = not set(route.resources).isdisjoint(route.back)
        assert len({*route.resources}) == len(route.resources), "a link is crossed twice"
        self._net = net
        self._events: Events = net.kernel
        self._fluid = net.fluid
        self._source = source
        self._target = target
        self._delay = delay
        self._began = 0.0  # when the first byte of what crosses was there
        self._last = 0.0  # when the last one arrives
        self._queue: deque[Load] = deque()
        self._crossing: Activity | None = None  # of the first of them, once it has begun
        self._rest: float | None = None  # of it, in bytes, while it is suspended
        self._back: tuple[Resource, ...] = ()  # what its acknowledgements cross
        self._closed: Exception | None = None
        self._on_crossed = self._crossed  # one object for all messages

    def send(self, load: Load, time: float) -> None:
        """Let `load` follow those before it; it is sent at `time`, now or later.

        Its first byte is there after the latency.
        """
        arrival = time + self.latency
        if self._delay is not None or self.slow_start is not None:
            if self._delay is not None:
                arrival += self._delay(time)
            if self.slow_start is not None:
                arrival += self.slow_start.stall(self.on_wire(load.frame_bytes, None), time)
            self._last = arrival = max(self._last, arrival)
        self._events.call_at(arrival, self.arrive, load)

    def arrive(self, load: Load) -> None:
        """The first byte of `load` is there, or would be if none were before it."""
        if self._closed is not None:
            load.fail(self._closed)
            return
        self._net.before_arrival(self.resources)
        self._queue.append(load)
        if len(self._queue) == 1:
            self._begin(load)

    def suspend(self) -> None:
        """Take what crosses off the links, until `enter` lets the rest of it cross."""
        if self._crossing is not None and not self._queue[0].crossed:
            self._rest = self._crossing.left_at(self._events.now())
            self._fluid.cancel(self._crossing)

    def enter(self, events: Events, fluid: Fluid) -> None:
        """Go on among these `events`, whose present time is the same."""
        self._events, self._fluid = events, fluid
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._cross(rest)

    def leave(self, load: Load, time: float) -> None:
        """The sender has done its part of `load` at `time`, now or later."""
        load.left_at = time
        if load.crossed:
            self._end_once_left(load)

    def go_on(self) -> None:
        """The target takes in messages again."""
        if self._queue and self._crossing is None:
            self._begin(self._queue[0])

    def close(self, error: Exception) -> Load | None:
        """Nothing arrives any more; senders learn of `error`. The message that this cuts off."""
        self._closed = error
        cut_off = None
        if self._crossing is not None:
            self._fluid.cancel(self._crossing)
            cut_off = self._queue[0]
        for load in self._queue:
            load.fail(error)
        self._queue.clear()
        return cut_off

    def moved(self) -> float:
        """Of the message that crosses, the bytes until now."""
        if self._crossing is None:
            return 0.0
        return self._crossing.amount - self._crossing.left_at(self._events.now())

    def _begin(self, load: Load) -> None:
        if self._net.kernel.is_held(self._target):
            return  # a rank that stands still takes in nothing
        load.begin()
        self._began = self._events.now()
        self._back = self._route.back if load.both_ways is None else ()
        self._cross(self.on_wire(load.frame_bytes, load.both_ways))

    def on_wire(self, frame_bytes: int, both_ways: bool | None) -> float:
        """Bytes on each link; with those of acknowledgements, where messages go `both_ways`.

        None: these are for whom they meet.
        """
        counted = both_ways or (self._half_duplex and both_ways is not None)
        others = self._route.acknowledgements if counted else 0.0
        return frame_bytes * self._route.wire * (1 + others)

    def _cross(self, wire_bytes: float) -> None:
        self._crossing = self._fluid.start(
            wire_bytes, self.resources, self._on_crossed, self._back, self._route.weight
        )

    def _crossed(self) -> None:
        load = self._queue[0]
        load.crossed = True
        if self._events is self._net.kernel:  # else it was counted when all of it was evaluated
            seconds = self._events.now() - self._began
            self._net.ports[self._target].mailbox.count(self._source, load.frame_bytes, seconds)
        self._end_once_left(load)

    def _end_once_left(self, load: Load) -> None:
        if load.left_at <= self._events.now():
            self._end(load)
        elif load.left_at < inf:
            self._events.call_at(load.left_at, self._end, load)

    def _end(self, load: Load) -> None:
        if self._closed is not None:
            return
        self._crossing = None
        self._queue.popleft()
        if self.slow_start is not None:
            self.slow_start.use(self._events.now())
        load.end()
        if self._queue:
            self._begin(self._queue[0])


class Meter:
    """Bytes of messages, payload and headers, by the rank that they go to.

    Set-up, checkpoints and evaluation lie outside the stopwatch, as they do in a record. A message
    counts in full when it is sent, one of an all-reduce at once when its rank is through.

    Attributes:
        sent: bytes by rank; without messages from a rank to itself, which cross no link.
        seconds: for which the stopwatch ran.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.sent: Counter[int] = Counter()
        self.seconds = 0.0
        self._now = now
        self._began: float | None = None

    def run(self, running: bool) -> None:
        """The stopwatch starts or goes on, or it stops."""
        if running:
            self._began = self._now()
        elif self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    def count(self, target: int, size: int) -> None:
        """A message of `size` bytes goes to `target`."""
        if self._began is not None:
            self.sent[target] += size

    def count_all(self, sent: Mapping[int, int]) -> None:
        """So many bytes go to each rank."""
        if self._began is not None:
            for target, size in sent.items():  # faster than `Counter.update`
                self.sent[target] += size


BeginNativeAllReduce = Callable[[Tensor], Task[int]]
"""Begins to replace a tensor by its sum over all ranks."""


class Net:
    """All ranks' ports, and the routes between them.

    `delay` tells how many seconds later a message from one rank to another arrives if it is sent at
    a time; None: never. `before_arrival` is called before a message begins to cross these links.
    `message` gives the costs of one of so many bytes, its header included.

    Attributes:
        nodes: the name of each rank's node.
        hosts: of each rank, what it has in common with those that it shares memory with; empty:
            nobody does.
    """

    def __init__(
        self,
        kernel: Kernel,
        fluid: Fluid,
        overhead: Overhead,
        route: Callable[[int, int], Route],
        delay: Callable[[int, int, float], float] | None = None,
    ) -> None:
        self.kernel = kernel
        self.fluid = fluid
        self.overhead = overhead
        self.message_cost = functools.lru_cache(maxsize=1024)(overhead.message)
        self.before_arrival: Callable[[Sequence[Resource]], None] = lambda links: None
        self.ports: list[Port] = []
        self.nodes: list[str] = []
        self.hosts: list[Hashable] = []
        self.shared: dict[tuple[tuple[int, ...], int, int], Tensor] = {}  # by ranks, tag, number
        self.shown: dict[Hashable, dict[int, Tensor]] = {}  # by stage and place
        self.streams: dict[tuple[int, int], Stream] = {}
        self._route = route
        self._delay = delay

    def stream(self, source: int, target: int) -> Stream:
        """The stream from one rank to another."""
        key = source, target
        if key not in self.streams:
            delay = None if self._delay is None else partial(self._delay, source, target)
            self.streams[key] = Stream(self, self._route(source, target), source, target, delay)
        return self.streams[key]


class Port:
    """One rank's end of the network, shared by its flows.

    `new_processor` makes what one more flow of the rank computes on; `meter` counts what it sends;
    `native` gives what stands for torch.distributed.
    """

    native: Callable[[], BeginNativeAllReduce]

    def __init__(
        self, net: Net, rank: int, new_processor: Callable[[], Processor], meter: Meter
    ) -> None:
        self.net = net
        self.rank = rank
        self.new_processor = new_processor
        self.meter = meter
        self.mailbox = Mailbox(rank)
        self.bytes_sent = 0
        self.shares: Counter[tuple[tuple[int, ...], int]] = Counter()  # of memory, by ranks and tag
        self._cold = False
        self._asleep: dict[Flow, Callable[[], bool]] = {}
        net.ports.append(self)

    @property
    def signal_seconds(self) -> float:
        """Processor seconds of a flow that tells another one of its rank a number of 8 bytes."""
        local = self.net.overhead.local
        return 0.0 if local is None else local.at(8)

    def mark_caches_cold(self) -> None:
        """Let the next message of the rank pay `Overhead.cold`: a step has begun."""
        self.keep_order()
        self._cold = True

    @property
    def shares_caches(self) -> bool:
        """Whether it matters which flow of this rank is the first to send or receive."""
        return self.net.overhead.cold > 0 and self.net.kernel.flows_of[self.rank] > 1

    def keep_order(self) -> None:
        """The present flow is not ahead of others that share its caches."""
        if self.shares_caches:
            self.net.kernel.catch_up()

    @property
    def is_cold(self) -> bool:
        """Whether the next message takes more seconds."""
        return self._cold and self.net.overhead.cold > 0

    def warm_up(self) -> float:
        """The seconds that the message under way takes more, if it is the first."""
        cold, self._cold = self._cold, False
        return self.net.overhead.cold if cold else 0.0

    def spend(self, seconds: float, traffic: Traffic) -> None:
        """Let the present flow compute for so many seconds of a core of speed 1, to communicate."""
        if seconds > 0:
            kernel = self.net.kernel
            started = kernel.here()
            kernel.current.processor.spend(seconds)
            traffic.seconds_communicating += kernel.here() - started

    def sleep_until(self, condition: Callable[[], bool], waits: Callable[[], Wait]) -> float:
        """Park the present flow until `condition` is true after a `wake`; the seconds that pass.

        Meanwhile `waits` tells whom it waits for.
        """
        kernel = self.net.kernel
        started = kernel.here()
        if not condition():
            flow = kernel.current
            flow.waits = waits
            self._asleep[flow] = condition
            while not condition():
                kernel.park()
            self._asleep.pop(flow, None)
            flow.waits = None
        return kernel.here() - started

    def wake(self) -> None:
        """Resume whoever waited for what is so now."""
        for flow, condition in list(self._asleep.items()):
            if condition():
                del self._asleep[flow]
                self.net.kernel.resume(flow)


class Sending(matching.Operation):
    """A send; `wait` returns the tensor."""

    __slots__ = ("port", "tensor", "to")

    def __init__(self, flow: matching.Flow, port: Port, tensor: Tensor, to: int) -> None:
        super().__init__(flow)
        self.port = port
        self.tensor = tensor
        self.to = to

    @property
    def source(self) -> int:
        """The sending rank."""
        return self.flow.rank

    def finish(self) -> None:
        """The tensor is free."""
        self.finished = True
        self.port.wake()

    def wait(self) -> Tensor:
        """The tensor that was sent, free to be changed again."""
        self._finish()
        return self.tensor
