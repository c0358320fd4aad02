"""Ranks whose messages arrive in an order drawn by chance, and one that dies in the midst of it.

No sockets and no time. Flows are threads of which one runs; after each of its waits chance says
who goes on, or which message arrives. What a dead rank had sent arrives as far as chance says,
and then the others hear of its loss, each at a moment of its own.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.without_time import WithoutTime
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports.framing import Header
from orchestra.transports.large_messages import byte_view
from orchestra.transports.matching import Flow, Incoming, Mailbox, Operation, Receive, Send
from orchestra.transports.protocol import Traffic

DEADLINE_SECONDS = 120.0


Pair = tuple[int, int]


class Killed(BaseException):
    """Ends the flows of a rank that dies."""


@dataclass
class Fiber:
    """A flow that runs only when it is told to."""

    rank: int
    thread: threading.Thread | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    awaits: Callable[[], bool] = lambda: True
    waits_for: str = "its start"
    result: Any = None
    error: BaseException | None = None
    ended: bool = False


class Network:
    """`size` ranks; `chance` decides about everything."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.size = size
        self.chance = chance
        self.mailboxes = [Mailbox(rank) for rank in range(size)]
        pairs = list(itertools.permutations(range(size), 2))
        self.queued: dict[Pair, deque[tuple[Send, int]]] = {pair: deque() for pair in pairs}
        self.under_way: dict[Pair, deque[tuple[Tensor, int]]] = {pair: deque() for pair in pairs}
        self.slowness = {pair: chance.choice([1, 1, 10]) for pair in pairs}
        self.arriving: dict[Pair, Incoming] = {}
        self.fibers: list[Fiber] = []
        self.dead: set[int] = set()
        self.cut_off: dict[Pair, Incoming] = {}
        self.unheard: set[Pair] = set()  # (dead rank, one that has not heard of it)
        self._parked = threading.Semaphore(0)

    def run(
        self, programs: Sequence[Callable[[Port], Any]], deaths: Sequence[tuple[int, int]] = ()
    ) -> list[Any]:
        """What each program returns, or the first error; a death is (what happens before, rank)."""
        mains = [
            self.start(rank, functools.partial(program, Port(self, rank)))
            for rank, program in enumerate(programs)
        ]
        due = sorted(deaths)
        self.moment = 0
        try:
            while self._alive() and not self._errors():
                while due and due[0][0] <= self.moment:
                    self._kill(due.pop(0)[1])
                choices = self._choices()
                assert choices, f"all wait: {[(f.rank, f.waits_for) for f in self._alive()]}"
                self.chance.choice(choices)()
                self.moment += 1
        finally:
            self._kill_all()
        for error in self._errors():
            raise error
        return [fiber.result for fiber in mains]

    def start(self, rank: int, function: Callable[[], Any]) -> Fiber:
        fiber = Fiber(rank)

        def body() -> None:
            fiber.go.acquire()
            try:
                if rank not in self.dead:
                    fiber.result = function()
            except Killed:
                pass
            except BaseException as error:
                fiber.error = error
            fiber.ended = True
            self._parked.release()

        fiber.thread = threading.Thread(target=body, daemon=True)
        fiber.thread.start()
        self.fibers.append(fiber)
        return fiber

    def park(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run; go on once `ready`."""
        fiber = next(f for f in self.fibers if f.thread is threading.current_thread())
        fiber.awaits, fiber.waits_for = ready, what
        self._parked.release()
        fiber.go.acquire()
        if fiber.rank in self.dead:
            raise Killed

    def _alive(self) -> list[Fiber]:
        return [fiber for fiber in self.fibers if not fiber.ended]

    def _errors(self) -> list[BaseException]:
        return [fiber.error for fiber in self.fibers if fiber.error is not None]

    def _choices(self) -> list[Callable[[], None]]:
        """What may happen next; on a slow link, it is one of ten to come to that."""
        choices: list[Callable[[], None]] = [
            functools.partial(self._resume, fiber) for fiber in self._alive() if fiber.awaits()
        ]
        moves: list[tuple[int, Callable[[], None]]] = []
        for pair, slowness in self.slowness.items():
            if self.queued[pair]:
                moves.append((1, functools.partial(self._take_up, pair)))
            if pair in self.arriving or self.under_way[pair]:
                moves.append((slowness, functools.partial(self._move, pair)))
            elif pair in self.unheard:
                moves.append((slowness, functools.partial(self._hear, pair)))
        likely = [move for slowness, move in moves if self.chance.random() < 1 / slowness]
        return choices + likely or [move for _, move in moves]

    def _resume(self, fiber: Fiber) -> None:
        fiber.go.release()
        assert self._parked.acquire(timeout=DEADLINE_SECONDS), "a flow hangs"

    def _take_up(self, pair: Pair) -> None:
        """A message is on its way, and its sender may change it."""
        send, tag = self.queued[pair].popleft()
        self.under_way[pair].append((send.tensor.detach().clone(), tag))
        send.finished = True

    def _move(self, pair: Pair) -> None:
        """A message begins to arrive, or is there."""
        source, target = pair
        mailbox = self.mailboxes[target]
        if pair in self.arriving:
            mailbox.complete(self.arriving.pop(pair))
            return
        tensor, tag = self.under_way[pair].popleft()
        header = Header(0, tensor.dtype, tuple(tensor.shape), tag, tensor.nbytes)
        self.arriving[pair] = mailbox.begin(source, header)
        self.arriving[pair].view[:] = byte_view(tensor)

    def _hear(self, pair: Pair) -> None:
        self.unheard.remove(pair)
        dead, rank = pair
        self.mailboxes[rank].depart(dead, "killed", self.cut_off.pop(pair, None), lost=True)

    def _kill(self, rank: int) -> None:
        self.dead.add(rank)
        for other in set(range(self.size)) - {rank}:
            there, back = (rank, other), (other, rank)
            self.queued[there].clear()
            kept = self.chance.randint(0, len(self.under_way[there]))
            if there in self.arriving and self.chance.random() < 0.5:
                self.cut_off[there] = self.arriving.pop(there)
                kept = 0
            while len(self.under_way[there]) > kept:
                self.under_way[there].pop()
            for send, _ in self.queued[back]:
                send.finished = True
            self.queued[back].clear()
            self.under_way[back].clear()
            self.arriving.pop(back, None)
            self.unheard.discard(back)
            self.unheard.add(there)
        self._end(fiber for fiber in self._alive() if fiber.rank == rank)

    def _kill_all(self) -> None:
        self.dead.update(range(self.size))
        self._end(self._alive())

    def _end(self, fibers: Iterable[Fiber]) -> None:
        for fiber in list(fibers):
            self._resume(fiber)
            assert fiber.ended


class Port(WithoutTime):
    """The transport of one flow."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.size = network.size
        self.flow = Flow(rank, self)
        self.traffic = Traffic()

    def send(
        self,
        tensor: Tensor,
        to: int,
        tag: int,
        *,
        buffer: Tensor | None = None,
        more: bool = False,
    ) -> Send:
        assert tensor.is_contiguous()
        tensor = tensor if buffer is None else buffer.copy_(tensor)
        send = Send(self.flow, to, tensor, b"", memoryview(b""), tag)
        mailbox = self.network.mailboxes[self.rank]
        if to == self.rank:
            mailbox.deliver_local(tensor.detach().clone(), tag)
            send.finished = True
        elif to in mailbox.gone:
            send.fail(PeerLost(to, "killed"))
        elif to in self.network.dead:
            send.finished = True
        else:
            self.network.queued[self.rank, to].append((send, tag))
        return send

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Receive:
        receive = Receive(self.flow, source, tag, into)
        self.network.mailboxes[self.rank].post(receive)
        return receive

    def withdraw(self, receive: Receive) -> None:
        self.network.mailboxes[self.rank].withdraw(receive)

    def wait(self, operation: Operation) -> None:
        """For the handles."""
        self.network.park(lambda: operation.finished, f"{type(operation).__name__} of {self.rank}")

    def test(self, operation: Operation) -> bool:
        """For the handles."""
        return operation.finished

    def spawn(self, function: Callable[[Any], Any]) -> Any:
        port = Port(self.network, self.rank)
        return Spawned(self, self.network.start(self.rank, lambda: function(port)))

    def lost(self) -> frozenset[int]:
        return frozenset(self.network.mailboxes[self.rank].lost)


@dataclass
class Spawned:
    """A background flow."""

    port: Port
    fiber: Fiber

    def wait(self) -> Any:
        self.port.network.park(lambda: self.fiber.ended, f"a flow of {self.port.rank}")
        if self.fiber.error is not None:
            raise self.fiber.error
        return self.fiber.result
