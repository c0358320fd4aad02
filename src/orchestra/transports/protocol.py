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
    message from a rank to itself costs no bytes.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds_waiting: float = 0.0
    seconds_communicating: float = 0.0
    seconds_in_background: float = 0.0

    def add(self, more: Traffic) -> None:
        """Count `more`, too."""
        self.bytes_sent += more.bytes_sent
        self.bytes_received += more.bytes_received
        self.messages_sent += more.messages_sent
        self.messages_received += more.messages_received
        self.seconds_waiting += more.seconds_waiting
        self.seconds_communicating += more.seconds_communicating
        self.seconds_in_background += more.seconds_in_background


class Handle(Protocol):
    """A send or a receive under way."""

    @property
    def source(self) -> int:
        """The rank that sends; known for receives from any source once `done`."""
        ...

    def wait(self) -> Tensor:
        """Block until complete; the received tensor (or the sent one, free to be changed again).

        Raises `PeerLost` if the other end is gone, `RunAborted` if the watcher ended the run.
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


class Task(Protocol[T_co]):
    """A background flow started by `spawn`, or a collective under way."""

    def wait(self) -> T_co:
        """Block until it ends; its result. Raises what it raised."""
        ...

    def done(self) -> bool: ...


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, in the order that a schedule numbers them."""

    ranks: tuple[int, ...]

    def index(self, rank: int) -> int:
        """The place of `rank` in this group."""
        return self.ranks.index(rank)

    def __len__(self) -> int:
        return len(self.ranks)


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

    def collective(
        self,
        schedule: Schedule,
        vector: Tensor,
        group: Group,
        tag: int,
        edges: Sequence[int] | None = None,
        *,
        background: bool = False,
        via: Transport | None = None,
        visible: bool = False,
    ) -> Task[int]:
        """Begin this rank's part in `schedule` on a flat, contiguous `vector`, in its place.

        `wait` ends it, and returns the bytes of buffer used beside `vector`. Several may be under
        way; they are executed in the order in which this flow began them. Without `background`
        they make progress inside `wait` only; with it a background flow executes them, one for
        all, which `end_background` ends.

        Args:
            schedule: who sends which pieces to whom, in rounds.
            vector: shape [elements]; nobody else touches it until `wait` has returned.
            group: the ranks that take part, all of which begin it.
            tag: of its messages.
            edges: where the pieces begin, and the number of elements, the same on all ranks; None:
                pieces as equal as can be.
            background: whether it goes on while this flow does something else.
            via: what its messages are sent over, where it is made of messages: an interceptor that
                looks at them. None: this transport.
            visible: whether somebody wants to see its messages, and an engine that can do without
                them should not.
        """
        ...

    def end_background(self, via: Transport | None = None) -> None:
        """End the background flow behind `collective`, if there is one; `via` as it was there."""
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

    def lost(self) -> frozenset[int]:
        """The ranks known to be gone."""
        ...


class Collectives(Protocol):
    """What a backend does between all ranks at once; each rank calls the same, in one order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of a contiguous `tensor`."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Task[Tensor]:
        """Begin to replace a contiguous `tensor` by its sum over all ranks."""
        ...

    def broadcast(self, tensor: Tensor, root: int) -> Tensor:
        """Replace a contiguous `tensor` by that of rank `root`."""
        ...

    def barrier(self) -> None:
        """Block until every rank is here."""
        ...
