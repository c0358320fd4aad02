"""The network in virtual time: messages from one rank to another, in the order of sending.

A message costs its sender processor time, crosses the network behind those that its rank sent to
the same target before, and costs its receiver processor time once somebody waits for it. The three
go on at the same time, as bytes do that follow each other; the message is there when all are done.
Which message meets which receive is decided by the mailbox that real processes use, too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf

from torch import Tensor

from orchestra.cluster.nodes import Overhead
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Flow, Kernel, Processor, Wait
from orchestra.engines.simulation.route import Reader, Route
from orchestra.engines.simulation.stream import Stream
from orchestra.transports import matching
from orchestra.transports.framing import Header
from orchestra.transports.matching import Incoming, Mailbox
from orchestra.transports.protocol import Task, Traffic


class Message:
    """A `Load` from `send` to its delivery; `payload` is what was there when it was sent, and
    `arriving` what the mailbox knows it by, once it has begun."""

    __slots__ = (
        *("_sending", "_target", "arriving", "both_ways", "crossed", "fair", "frame_bytes"),
        *("header", "held_bytes", "left_at", "payload"),
    )

    def __init__(
        self,
        header: Header,
        payload: Tensor,
        sending: Sending,
        target: Port,
        both_ways: bool | None = None,
        *,
        fair: bool = False,
    ) -> None:
        self.header = header
        self.frame_bytes = header.frame_bytes
        self.held_bytes = 0
        self.both_ways = both_ways
        self.fair = fair
        self.payload = payload
        self.left_at = inf
        self.crossed = False
        self._sending = sending
        self._target = target
        self.arriving: Incoming | None = None

    def begin(self) -> None:
        source = self._sending.port.rank
        self.arriving = self._target.mailbox.begin(source, self.header, self.payload)
        receive = self.arriving.receive
        if receive is None:
            self._target.wake_all()  # it may be a misfit, of which the one who receives it learns
        else:
            receive.began_at = self._target.net.kernel.now()
            self._target.wake(receive)  # whoever waits for it begins to take it in

    def free(self) -> None:
        self._sending.finish()

    def end(self) -> None:
        assert self.arriving is not None
        self._sending.finish()
        self._target.mailbox.complete(self.arriving)
        if self.arriving.receive is not None:
            self._target.wake(self.arriving.receive)

    def fail(self, error: Exception) -> None:
        # Whoever sends it learns of the error, unless it has gone on since.
        if not self._sending.finished:
            self._sending.fail(error)
            self._sending.port.wake(self._sending)


class Meter:
    """Bytes of messages, payload and headers, by the rank that they go to.

    Set-up, checkpoints and evaluation lie outside the stopwatch, as they do in a record. A message
    counts in full when it is sent, one of an all-reduce at once when its rank is through.

    Attributes:
        sent: bytes by rank; without messages from a rank to itself, which cross no link.
        seconds: for which the stopwatch ran.
        uncounted: calls that count what is through by now, before anybody reads what is counted.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.sent: Counter[int] = Counter()
        self.seconds = 0.0
        self.uncounted: list[Callable[[], None]] = []
        self._now = now
        self._began: float | None = None

    def run(self, running: bool) -> None:
        """The stopwatch starts or goes on, or it stops."""
        self.settle()
        if running:
            self._began = self._now()
        elif self._began is not None:
            self.seconds += self._now() - self._began
            self._began = None

    @property
    def running(self) -> bool:
        return self._began is not None

    def settle(self) -> None:
        """Count the messages of collectives that are through by now."""
        for call in self.uncounted:
            call()

    def count(self, target: int, size: int) -> None:
        """A message of `size` bytes goes to `target`."""
        if self._began is not None:
            self.sent[target] += size

    def count_all(self, sent: Mapping[int, int], times: int = 1) -> None:
        """Count `times` times the bytes that `sent` has for each rank."""
        if self._began is not None:
            for target, size in sent.items():  # faster than `Counter.update`
                self.sent[target] += times * size


BeginNativeAllReduce = Callable[[Tensor], Task[int]]
"""Begins to replace a tensor by its sum over all ranks."""


class Net:
    """All ranks' ports, and the routes between them.

    `delay` tells how many seconds later a message from one rank to another arrives if it is sent at
    a time; without it no message is delayed. `draw_share` draws the weight of the next message
    between two ranks, where it shares a link; without it weights are even. `before_arrival` is
    called before a message begins to cross these links. `message_cost` gives the costs of one, from
    its bytes with the header, and whether its ranks share memory.

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
        draw_share: Callable[[int, int], float] | None = None,
    ) -> None:
        self.kernel = kernel
        self.fluid = fluid
        self.overhead = overhead
        self.message_cost = functools.lru_cache(maxsize=1024)(overhead.message)
        self.before_arrival: Callable[[Sequence[Resource]], None] = lambda links: None
        self.ports: list[Port] = []
        self.nodes: list[str] = []
        self.hosts: list[Hashable] = []
        self._host_numbers: list[int] = []
        self.shared: dict[tuple[tuple[int, ...], int, int], Tensor] = {}  # by ranks, tag, number
        self.shown: dict[Hashable, dict[int, Tensor]] = {}  # by stage and place
        self.streams: dict[tuple[int, int], Stream] = {}
        self._route = route
        self._delay = delay
        self._draw_share = draw_share

    def host(self, rank: int) -> int:
        """Return a number that is equal for ranks that share memory."""
        if not self._host_numbers:
            hosts = self.hosts or range(len(self.ports))
            numbers = {host: number for number, host in enumerate(hosts)}
            self._host_numbers = [numbers[host] for host in hosts]
        return self._host_numbers[rank]

    def is_near(self, source: int, target: int) -> bool:
        """Return whether two ranks share memory."""
        return self.host(source) == self.host(target)

    def stream(self, source: int, target: int) -> Stream:
        """Return the stream from one rank to another; it is made when it is first used."""
        key = source, target
        if key not in self.streams:
            route = self._route(source, target)
            delay = None if self._delay is None else partial(self._delay, source, target)
            draw = None if self._draw_share is None else partial(self._draw_share, source, target)
            self.streams[key] = Stream(self, route, source, target, delay, draw)
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
        self.reader = Reader(net.kernel)
        self.mailbox = Mailbox(rank)
        self.bytes_sent = 0
        self.shares: Counter[tuple[tuple[int, ...], int]] = Counter()  # of memory, by ranks and tag
        self._cold = False
        # Looked up by what has happened: with many servers a rank has many flows, and asking each
        # of them after every message was slow (docs/decisions/0103-who-is-woken.md).
        self._asleep: dict[object, dict[Flow, Callable[[], bool]]] = {}  # by what they wait for
        net.ports.append(self)

    @property
    def signal_seconds(self) -> float:
        """Processor seconds for telling another flow of this rank a number of 8 bytes."""
        local = self.net.overhead.local
        return 0.0 if local is None else local.at(8)

    def mark_caches_cold(self) -> None:
        """Let the next message of the rank pay `Overhead.cold`: a step has begun."""
        self.keep_order()
        self._cold = True

    @property
    def shares_caches(self) -> bool:
        """True if the order in which flows of this rank send and receive changes their costs."""
        return self.net.overhead.cold > 0 and self.net.kernel.flows_of[self.rank] > 1

    def keep_order(self) -> None:
        """Let the current flow catch up with virtual time, if others share its caches."""
        # Only the first message of a step is cold. A flow that is ahead must not take that from a
        # message that another flow sends before it in virtual time
        # (docs/decisions/0029-shapes-only.md).
        if self.shares_caches:
            self.net.kernel.catch_up()

    @property
    def is_cold(self) -> bool:
        """True if the next message takes more seconds."""
        return self._cold and self.net.overhead.cold > 0

    def warm_up(self) -> float:
        """Return the extra seconds of the message under way: 0 but for the first of a step."""
        cold, self._cold = self._cold, False
        return self.net.overhead.cold if cold else 0.0

    def spend(self, seconds: float, traffic: Traffic) -> None:
        """Let the current flow compute `seconds` core-seconds, counted in `traffic`."""
        if seconds > 0:
            kernel = self.net.kernel
            started = kernel.here()
            kernel.current.processor.spend(seconds)
            traffic.seconds_communicating += kernel.here() - started

    def sleep_until(
        self, condition: Callable[[], bool], waits: Callable[[], Wait], what: object
    ) -> float:
        """Park the current flow until `condition` is true at a call of `wake(what)`.

        Meanwhile `waits` tells whom it waits for. Returns the virtual seconds that pass.
        """
        if condition():
            return 0.0
        kernel = self.net.kernel
        flow, started = kernel.current, kernel.here()
        flow.waits = waits
        self._asleep.setdefault(what, {})[flow] = condition
        while not condition():
            kernel.park()
        flow.waits = None
        return kernel.here() - started

    def wake(self, what: object) -> None:
        """Resume the flows that sleep for `what` and whose condition is true now."""
        asleep = self._asleep.get(what)
        if asleep is None:
            return
        for flow, condition in list(asleep.items()):
            if condition():
                del asleep[flow]
                self.net.kernel.resume(flow)
        if not asleep:
            del self._asleep[what]

    def wake_all(self) -> None:
        """Resume all sleeping flows whose condition is true now."""
        for what in list(self._asleep):
            self.wake(what)


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
        self.port.wake(self)

    def wait(self) -> Tensor:
        """The tensor that was sent, free to be changed again."""
        self._finish()
        return self.tensor
