"""What every engine offers for moving tensors: few verbs, blocking semantics, no hidden state.

A transport belongs to one flow of one rank. Communication makes progress only inside `wait`
(and `send`, which starts at once): a flow that wants to communicate while another computes is
started with `spawn`. Tags are integers agreed between the two ends; messages with the same
(source, tag) arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from orchestra.schedules import Schedule

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


class Task(Protocol[T_co]):
    """Something under way: a background flow, a collective, or a message."""

    def wait(self) -> T_co:
        """Block until it ends; its result. Raises what it raised."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


class Handle(Task[Tensor], Protocol):
    """A send or a receive under way.

    `wait` returns the received tensor (or the sent one, free to be changed again). It raises
    `PeerLost` if the other end is gone, `RunAborted` if the watcher ended the run.
    """

    @property
    def source(self) -> int:
        """The rank that sends; known for receives from any source once `done`."""
        ...


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, in the order that a schedule numbers them."""

    ranks: tuple[int, ...]

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's part in a collective on a flat, contiguous `vector`, in its place.

    Attributes:
        schedule: who sends which pieces to whom, in rounds. None: the all-reduce of the backend,
            torch.distributed (gloo or NCCL), among all ranks of the run.
        vector: shape [elements]; nobody else touches it until `wait` has returned.
        group: the ranks that take part, all of which begin it.
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


class SharedTensor(Protocol):
    """Memory that several ranks read and write, in no order that anybody keeps."""

    @property
    def values(self) -> Tensor:
        """The flat tensor that all of them see."""
        ...

    def catch_up(self) -> None:
        """Where time is virtual: return when others have done what they do before now."""
        ...


class HandOver(Protocol):
    """How two flows of a rank tell each other of what has changed; the engine's."""

    def look(self) -> None:
        """Return when all that has been told until now can be seen."""
        ...

    def wait_until(self, condition: Callable[[], bool], traffic: Traffic) -> None:
        """Block until `condition`, which counts as waiting in `traffic`."""
        ...

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        """Make `change`, and let whoever waits look again."""
        ...


class Transport(Protocol):
    """Point-to-point messages of tensors between `size` ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic:
        """Counters of this flow alone."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Payload and headers sent by all flows of this rank."""
        ...

    def send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Start sending a contiguous `tensor`; it may be changed after `wait` returned.

        Sending to oneself is allowed (a server beside a worker): the tensor is copied at once.
        """
        ...

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Handle:
        """Start receiving from `source`, or from any rank where it is None.

        With `into` (contiguous, of the sent dtype and number of elements) the message lands there
        without a copy; without, a new tensor of the sent shape and dtype is made. A receive from
        any source raises `PeerLost` once for each rank that is lost, after the complete messages
        of that rank have been delivered.
        """
        ...

    def collective(self, call: CollectiveCall) -> Task[int]:
        """Begin this rank's part in a collective; `wait` ends it.

        `wait` returns the bytes of buffer used beside the vector. Several may be under way; they
        are executed in the order in which this flow began them. Those that are not
        in the `background` make progress inside `wait` only; for the others there is one
        background flow, which `end_background` ends.

        Raises `InputError` where the engine has no backend, and `call` asks for its all-reduce.
        """
        ...

    def in_background(self, function: Callable[[Transport], T], lane: int = 0) -> Task[T]:
        """Run `function(transport of the background flow)` behind what was begun before on `lane`.

        There is one flow a lane, unlike with `spawn`; that of 0 executes collectives, too.
        """
        ...

    def end_background(self) -> None:
        """End the background flows, if there are any, once all that was begun is done."""
        ...

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now: the bytes of buffer used. For those that implement `collective`.

        `over`: an interceptor of this transport, which takes its messages. None: this transport.
        """
        ...

    def executed(self, call: CollectiveCall, start: float, moving: float, sent: int) -> None:
        """For interceptors: a part of `call` was carried out without messages, until now.

        It began at `start`, waited for other ranks until `moving`, and stands for messages of
        `sent` bytes from this rank.
        """
        ...

    def native_all_reduce(self, vector: Tensor) -> Task[int]:
        """Begin the all-reduce of the backend. For those that implement `collective`."""
        ...

    def share(self, like: Tensor, group: Group, tag: int) -> SharedTensor:
        """Collective over `group`: memory as large as the flat tensor `like`, for all of them.

        It holds the values that `like` has on the first rank of the group. Raises `InputError`
        where the ranks are not on one host, or the tensor is on a GPU.
        """
        ...

    def new_hand_over(self) -> HandOver:
        """Make what a flow and one behind it wait on. For those that implement `collective`."""
        ...

    def add(self, own: Tensor, *arrived: Tensor) -> None:
        """Add all that has arrived to what is there; where time is virtual, it takes time."""
        ...

    def now(self) -> float:
        """Seconds: monotonic on real engines, virtual under simulation."""
        ...

    def spawn(self, function: Callable[[Transport], T]) -> Task[T]:
        """Run `function(transport of the new flow)` in the background."""
        ...

    def arrived(self) -> dict[int, tuple[float, float]]:
        """For each rank that sent messages large enough to take time: their bytes, and the seconds
        for which one was on its way while this rank was ready to read it.

        Of all flows. What ranks of one host read from each other's memory is not counted.
        """
        ...

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""
        ...
