"""What a run's ranks could not foresee, written down and given again.

Of all that a program learns from its engine, only this depends on chance: which message a receive
from any source took, whether something was done yet, what the clock said, who was lost, and
whether the user wants to stop. It is written down in order for each flow of a rank. Given the
same answers, a program does the same again, on any engine: no parameter or gradient is needed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from orchestra.errors import InputError
from orchestra.transports.passing import PassingTransport
from orchestra.transports.protocol import Handle, Task, Transport

T = TypeVar("T")
MAIN = "main"


class Ended(InputError):
    """A program asks for more than was written down: it is not the one that was recorded."""


@dataclass
class FlowOrder:
    """What one flow was told, in the order in which it asked.

    Attributes:
        sources: of each receive from any source, who sent what it took.
        done: of each question whether an operation or a flow was done.
        now: of each look at the clock.
        lost: the ranks known to be gone, of each question for them.
    """

    sources: list[int] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    now: list[float] = field(default_factory=list)
    lost: list[list[int]] = field(default_factory=list)


@dataclass
class Order:
    """What one rank was told. A flow is named by the number of its start: "main.0", "main.1.0".

    Attributes:
        seconds: of each look at the seconds that the rank has computed.
        stop: of each question whether the user wants to stop.
        first_step: steps that had been done before: 0, unless the run was resumed.
        shares: the weights of the ranks' parts that were measured, if they were.
    """

    flows: dict[str, FlowOrder] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    stop: list[bool] = field(default_factory=list)
    first_step: int = 0
    shares: list[float] = field(default_factory=list)

    def flow(self, name: str) -> FlowOrder:
        """What the flow `name` was told."""
        return self.flows.setdefault(name, FlowOrder())


class Told(Iterator[T]):
    """Answers that were written down, one after the other."""

    def __init__(self, answers: Sequence[T], what: str) -> None:
        self._answers = iter(answers)
        self._what = what

    def __next__(self) -> T:
        try:
            return next(self._answers)
        except StopIteration:
            raise Ended(
                f"the record of the order ends: {self._what} once more than in the run; was it "
                "made with another version of the program, or was the run cut short?"
            ) from None


class RecordedTransport(PassingTransport):
    """Passes everything on to `inner`, and writes into `order` what its flow is told."""

    def __init__(self, inner: Transport, order: Order, name: str = MAIN) -> None:
        super().__init__(inner)
        self._order = order
        self._name = name
        self._told = order.flow(name)
        self._flows = itertools.count()

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return RecordedHandle(self.inner.send(tensor, to, tag), self._told)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        handle = RecordedHandle(self.inner.receive(source, tag, into), self._told)
        if source is None:
            handle.place = len(self._told.sources)
            self._told.sources.append(-1)  # in the order of the receives, not of their ends
        return handle

    def now(self) -> float:
        now = self.inner.now()
        self._told.now.append(now)
        return now

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        name = f"{self._name}.{next(self._flows)}"
        self._order.flow(name)

        def recorded(transport: Transport) -> T:
            return function(RecordedTransport(transport, self._order, name))

        functools.update_wrapper(recorded, function)
        return RecordedTask(self.inner.spawn(recorded), self._told)

    def lost(self) -> frozenset[int]:
        lost = self.inner.lost()
        self._told.lost.append(sorted(lost))
        return lost


@dataclass
class RecordedHandle:
    """`place` is that of a receive from any source among those of its flow."""

    inner: Handle
    told: FlowOrder
    place: int | None = None

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        tensor = self.inner.wait()
        if self.place is not None:
            self.told.sources[self.place] = self.inner.source
        return tensor

    def done(self) -> bool:
        done = self.inner.done()
        self.told.done.append(done)
        return done


@dataclass
class RecordedTask(Task[T]):
    inner: Task[T]
    told: FlowOrder

    def wait(self) -> T:
        return self.inner.wait()

    def done(self) -> bool:
        done = self.inner.done()
        self.told.done.append(done)
        return done


class ReplayedTransport(PassingTransport):
    """Gives its flow the answers of `order`; the messages are those of `inner`."""

    def __init__(self, inner: Transport, order: Order, name: str = MAIN) -> None:
        super().__init__(inner)
        self._order = order
        self._name = name
        told = order.flow(name)
        where = f"rank {inner.rank}, flow {name},"
        self._sources = Told(told.sources, f"{where} received from any source")
        self._done = Told(told.done, f"{where} asked whether something is done")
        self._now = Told(told.now, f"{where} looked at the clock")
        self._lost = Told(told.lost, f"{where} asked who is lost")
        self._flows = itertools.count()

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        return ReplayedHandle(self.inner.send(tensor, to, tag), self._done)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        """From any source: from who sent what was taken then. A receive that was never completed
        takes nothing now."""
        taken = next(self._sources) if source is None else source
        if taken < 0:
            return Never(self.inner.receive(self.rank, NOBODY))
        return ReplayedHandle(self.inner.receive(taken, tag, into), self._done)

    def now(self) -> float:
        return next(self._now)

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        name = f"{self._name}.{next(self._flows)}"

        def replayed(transport: Transport) -> T:
            return function(ReplayedTransport(transport, self._order, name))

        functools.update_wrapper(replayed, function)
        return ReplayedTask(self.inner.spawn(replayed), self._done)

    def lost(self) -> frozenset[int]:
        return frozenset(next(self._lost))


NOBODY = -1
"""A tag that no message has."""


@dataclass
class Never:
    """A receive whose message never came; it waits for one that never comes."""

    inner: Handle

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        return self.inner.wait()

    def done(self) -> bool:
        return False


@dataclass
class ReplayedHandle:
    inner: Handle
    told: Told[bool]

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> Tensor:
        return self.inner.wait()

    def done(self) -> bool:
        """As it was then; what was done has to be, before the flow goes on."""
        done = next(self.told)
        if done:
            self.inner.wait()
        return done


@dataclass
class ReplayedTask(Task[T]):
    inner: Task[T]
    told: Told[bool]

    def wait(self) -> T:
        return self.inner.wait()

    def done(self) -> bool:
        """As it was then."""
        done = next(self.told)
        if done:
            self.inner.wait()
        return done


def plain(order: Order) -> dict[str, Any]:
    """`order` as JSON."""
    flows = {name: vars(flow) for name, flow in order.flows.items()}
    return {**vars(order), "flows": flows}


def from_plain(data: dict[str, Any]) -> Order:
    """The order that `plain` made into `data`."""
    flows = {name: FlowOrder(**flow) for name, flow in data["flows"].items()}
    return Order(**{**data, "flows": flows})
