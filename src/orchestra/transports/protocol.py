"""What every engine offers for moving tensors: few verbs, blocking semantics, no hidden state.

A transport belongs to one flow of one rank. Communication makes progress only inside `wait`
(and `send`, which starts at once): a flow that wants to communicate while another computes is
started with `spawn`. Tags are integers agreed between the two ends; messages with the same
(source, tag) arrive in the order in which they were sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from orchestra.errors import InputError, PeerLost
from orchestra.schedules import Schedule
from orchestra.transports.background import Background, Begun, HandOver, Turns

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass
class Traffic:
    """What one flow moved, and how long that took.

    `seconds_waiting` is time blocked with nothing to move; `seconds_communicating` is the rest of
    the time inside the transport, blocked for the rest of a message that has begun to arrive
    included: what links take. `seconds_in_background` are those that collectives communicated on
    the background flow of this one. `bytes_sent` counts payload and our headers, when sent; a
    message from a rank to itself costs no bytes. A collective in shared memory counts as the
    messages of its schedule, and `bytes_in_memory` says how many of the bytes sent were such.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds_waiting: float = 0.0
    seconds_communicating: float = 0.0
    seconds_in_background: float = 0.0
    bytes_in_memory: int = 0

    def add(self, more: Traffic) -> None:
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)


class Pending(Protocol[T_co]):
    """Something under way: a background flow, a collective, or a message."""

    def wait(self) -> T_co:
        """Block until it ends, and return its result or raise what it raised."""
        ...

    def done(self) -> bool:
        """Return whether `wait` would return (or raise) at once."""
        ...


class Handle(Pending[Tensor], Protocol):
    """A send or a receive under way.

    `wait` returns the received tensor (or the sent one, free to be changed again). It raises
    `PeerLost` if the other end is gone, `RunAborted` if the watcher ended the run.
    """

    @property
    def source(self) -> int:
        """The rank that sends; known for receives from any source once `done`."""
        ...


class ReceiveHandle(Handle, Protocol):
    """A receive under way."""

    def withdraw(self) -> None:
        """Take no message, unless one has begun to arrive; nobody waits for it."""
        ...


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, in the order that a schedule numbers them."""

    ranks: tuple[int, ...]

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)

    def __len__(self) -> int:
        return len(self.ranks)


class CollectiveCall(NamedTuple):
    """One rank's part in a collective on a flat, contiguous `vector`, in its place.

    Attributes:
        schedule: who sends which pieces to whom, in rounds. None: the all-reduce of the backend,
            torch.distributed (gloo or NCCL), among all ranks of the run.
        vector: shape [elements]; nobody else touches it until `wait` has returned.
        group: the ranks that take part; each of them begins it.
        tag: of its messages.
        edges: where the pieces begin, and the number of elements, the same on all ranks; None:
            pieces as equal as can be.
        background: whether it goes on while this flow does something else.
        message_by_message: whether the engine has to send each message of the collective. Otherwise
            a simulation may compute the result and the times for all ranks at once, without sending
            any. Interceptors that record messages set it, by `Operation.message_by_message`;
            strategies leave it false. Real processes do not heed it.
    """

    schedule: Schedule | None
    vector: Tensor
    group: Group
    tag: int
    edges: Sequence[int] | None = None
    background: bool = False
    message_by_message: bool = False


@dataclass(frozen=True)
class SharedTensor:
    """Memory that several ranks read and write, in no order that anybody keeps.

    Attributes:
        values: the flat tensor that all of them see.
        catch_up: where time is virtual, returns when others have done what they do before now.
    """

    values: Tensor
    catch_up: Callable[[], object] = lambda: None


class Transport(ABC):
    """Point-to-point messages of tensors between `size` ranks, and collectives over them.

    A flow that begins collectives has two queues. Those of the foreground are executed by the flow
    itself, when it waits for one of them; those of the background by one more flow, which is made
    for the first of them. An interceptor's transport has queues of its own, so that the flow behind
    them is intercepted.

    Attributes:
        traffic: counters of this flow alone.
    """

    rank: int
    size: int
    traffic: Traffic
    _foreground: deque[Begun] | None = None
    _background: dict[int, Background] | None = None  # by lane

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Payload and headers sent by all flows of this rank."""

    @abstractmethod
    def send(
        self,
        tensor: Tensor,
        to: int,
        tag: int,
        *,
        buffer: Tensor | None = None,
        more: bool = False,
    ) -> Handle:
        """Start sending a contiguous `tensor`; it may be changed after `wait` returned.

        Sending to oneself is allowed, as from flow to flow: the tensor is copied at once.

        Args:
            buffer: `tensor` may be changed as soon as this returns; `buffer`, which is like it, may
                be used until `wait` returned (a buffered send, as of MPI).
            more: another message to the same rank follows at once, and may take this one along, as
                with `MSG_MORE` of a socket.
        """

    @abstractmethod
    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> ReceiveHandle:
        """Start receiving from `source`, or from any rank where it is None.

        With `into` (contiguous, of the sent dtype and number of elements) the message lands there
        without a copy; without, a new tensor of the sent shape and dtype is made. A receive from
        any source raises `PeerLost` once for each rank that is lost, after the complete messages
        of that rank have been delivered.
        """

    @abstractmethod
    def add(self, own: Tensor, *arrived: Tensor) -> None:
        """Add all that has arrived to what is there; where time is virtual, it takes time."""

    @abstractmethod
    def now(self) -> float:
        """Seconds: monotonic on real engines, virtual under simulation."""

    def blocked(self) -> float:
        """Return the seconds for which this flow has waited and communicated so far.

        A replay gives the recorded answer, so that decisions by it are repeated.
        """
        return self.traffic.seconds_waiting + self.traffic.seconds_communicating

    @abstractmethod
    def spawn(self, function: Callable[[Transport], T]) -> Pending[T]:
        """Run `function(transport of the new flow)` in the background."""

    @abstractmethod
    def arrived(self) -> dict[int, tuple[float, float]]:
        """For each rank that sent messages large enough to take time: their bytes, and the seconds
        for which one was on its way while this rank was ready to read it.

        Of all flows. What ranks of one host send each other in shared memory is not counted.
        """

    @abstractmethod
    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""

    @abstractmethod
    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now, and return the bytes of buffer used.

        `over`: an interceptor of this transport, which takes its messages. None: this transport.
        """

    def collective(self, call: CollectiveCall) -> Pending[int]:
        """Begin this rank's part in a collective; `wait` ends it.

        `wait` returns the bytes of buffer used in addition to the vector. Several may be under way;
        they are executed in the order in which this flow began them. Those that are not
        in the `background` make progress inside `wait` only; for the others there is one
        background flow, which `end_background` ends.

        Raises `InputError` where the engine has no backend, and `call` asks for its all-reduce.
        """
        if call.schedule is None:
            return self.native_all_reduce(call.vector)
        if call.background:
            return self.in_background(lambda transport: transport.execute(call))
        self._foreground = deque() if self._foreground is None else self._foreground
        begun = Begun(lambda transport: transport.execute(call), self._execute_up_to)
        self._foreground.append(begun)
        return begun

    def in_background(self, function: Callable[[Transport], T], lane: int = 0) -> Pending[T]:
        """Run `function(transport of the background flow)` behind what was begun before on `lane`.

        There is one flow a lane, unlike with `spawn`; that of 0 executes collectives, too.
        """
        lanes = self._background = {} if self._background is None else self._background
        if lane not in lanes:
            lanes[lane] = Background(self)
        return lanes[lane].begin(function)

    def done_by(self, flow: Pending[Any], finish: Callable[[Begun], None]) -> Pending[Any]:
        """Return a task that ends by what the background `flow` does.

        `finish` blocks until then, and sets the task's result.
        """
        return Begun(lambda _: None, finish, flow)

    def _execute_up_to(self, last: Begun) -> None:
        assert self._foreground is not None
        while not last.finished:
            # In the order in which they were begun, which is the same on all ranks: messages of one
            # tag must not change places.
            begun = self._foreground.popleft()
            begun.execute(self)
            begun.finished = True
            if begun.error is not None:
                raise begun.error

    def end_background(self) -> None:
        """End the background flows, if there are any, once all that was begun is done."""
        # Forgotten first: a collective that is begun later makes a new flow.
        lanes, self._background = self._background or {}, None
        for background in lanes.values():
            background.end()

    def executed(  # noqa: B027  (only interceptors look)
        self, call: CollectiveCall, start: float, moving: float, sent: int
    ) -> None:
        """For interceptors: a part of `call` was carried out without messages, until now.

        It began at `start`, waited for other ranks until `moving`, and stands for messages of
        `sent` bytes from this rank.
        """

    def native_all_reduce(self, vector: Tensor) -> Pending[int]:
        """Begin the all-reduce of the backend. Only some transports have one."""
        raise InputError("this engine has no native collectives: name a schedule instead")

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        """Collective over `group`: memory as large as the flat tensor `like`, for all of them.

        It holds the values that `like` has on the first rank of the group. Raises `InputError`
        where the ranks are not on one host, or the tensor is on a GPU.
        """
        raise InputError("this engine has no memory that ranks share")

    def handle(self) -> None:  # noqa: B027  (only virtual time passes)
        """Stand for a strategy's own code around what flows of this rank exchange without messages,
        which on real engines takes its time."""

    def new_hand_over(self) -> HandOver:
        """Make what a flow and one behind it wait on."""
        return HandOver()

    def take_turn(self, turns: Turns) -> None:
        """Block until it is this flow's turn, which lasts until `turns.end`.

        A replay repeats the order in which flows took turns.
        """
        turns.wait(turns.take_number(), self.traffic)


def send_unless_lost(transport: Transport, tensor: Tensor, to: int, tag: int) -> None:
    """Send `tensor`, and wait until it has left; the loss of `to` is seen to elsewhere."""
    with suppress(PeerLost):
        transport.send(tensor, to, tag).wait()
