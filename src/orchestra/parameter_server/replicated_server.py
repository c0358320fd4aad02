"""A slice on two servers: the loop of each, and what may be answered when.

Both replicas take the same requests in the same order, and so hold the same values. Workers ask the
first one. It passes each new request on to the second, and answers nobody before the second has
confirmed it: what a worker knows outlives either server. Where the first dies its workers ask the
second again. A request that it has taken before is not taken twice, and gets the same answer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Answer, Decision, Pause, ServerState
from orchestra.parameter_server.wire import (
    Kind,
    Request,
    decode_request,
    encode_reply,
    encode_request,
)
from orchestra.schedules.work_queue import WorkItem
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


@dataclass(frozen=True)
class Reply:
    """The reply to `worker`: the answer to its push, a quiet point, its next work; None if all have
    left. With `values` the values come with it."""

    worker: int
    content: Answer | Pause | WorkItem | None
    values: bool


class Replica:
    """One replica of a slice's state, and the replies that are still due. No input or output.

    `backed`: another server takes the requests that this one passes on. `points` counts quiet
    points; `pause` is the last one, and `gives_values` says that its workers asked for values.
    """

    def __init__(self, state: ServerState, *, backed: bool) -> None:
        self.state = state
        self.backed = backed
        self.points = 0
        self.pause = Pause(0, complete=True)
        self.gives_values = False
        self._last_pause: Request
        self._answers: dict[int, Answer] = {}
        self._work: dict[int, WorkItem] = {}
        self._waits: dict[int, int] = {}  # requests for work that were taken of each worker
        self._asking: dict[int, Request] = {}
        self._left: set[int] = set()
        self._unconfirmed: deque[list[Reply]] = deque()  # what each request passed on led to

    @property
    def confirmed_all(self) -> bool:
        """Nobody has to wait for the other replica."""
        return not self._unconfirmed

    def hear(self, request: Request) -> bool:
        """A request has come from its worker; True if it is new, and so to be taken."""
        worker = request.worker
        if request.kind in (Kind.PUSH, Kind.PAUSE, Kind.WAIT) and worker not in self.state.live:
            return False  # it is lost, and its loss came first
        if request.kind is Kind.LOST:
            self._asking.pop(worker, None)
        else:
            self._asking[worker] = request
        new = self._is_new(request)
        if new and self.backed:
            self._unconfirmed.append([])
        return new

    def take(self, request: Request) -> Decision:
        """Let a new request count; both replicas do, in one order."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            assert request.push is not None
            decision = state.push(request.push)
        elif request.kind is Kind.PAUSE:
            self._last_pause = request
            decision = state.pause(worker)
        elif request.kind is Kind.WAIT:
            self._waits[worker] = request.step
            decision = state.wait(worker)
        else:
            if request.kind is Kind.LEAVE:
                self._left.add(worker)
            decision = state.leave(worker)
        self._answers.update((answer.worker, answer) for answer in decision.answers)
        self._work.update(decision.work)
        if decision.quiet and state.live:
            self.points += 1
            self.pause = Pause(self._last_pause.step, complete=not self._left)
            self.gives_values = self._last_pause.values
            state.resume()
        return decision

    def due(self) -> list[Reply]:
        """The replies for now; those that wait for the other replica come with `confirmed`."""
        replies = []
        for worker in sorted(self._asking):
            reply = self._reply(self._asking[worker])
            if reply is not None:
                replies.append(reply)
                del self._asking[worker]
        if not self._unconfirmed:
            return replies
        self._unconfirmed[-1] += replies
        return []

    def confirmed(self) -> list[Reply]:
        """The other replica has taken the oldest request that it had not confirmed."""
        return self._unconfirmed.popleft()

    def backup_lost(self) -> list[Reply]:
        """The other replica is lost: nobody waits for it any more."""
        self.backed = False
        replies = [reply for waiting in self._unconfirmed for reply in waiting]
        self._unconfirmed.clear()
        return replies

    def _is_new(self, request: Request) -> bool:
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            assert request.push is not None
            seen = request.push.clock <= state.clocks.get(worker, 0)
            return not seen and worker not in state.pending
        if request.kind is Kind.PAUSE:
            return request.points == self.points and worker not in state.paused
        if request.kind is Kind.WAIT:
            return request.step > self._waits.get(worker, 0)
        return worker in state.live

    def _reply(self, request: Request) -> Reply | None:
        """The reply to `request`, if it is known."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            done = worker not in state.pending and worker not in state.waiting
            return Reply(worker, self._answers[worker], values=True) if done else None
        if request.kind is Kind.PAUSE:
            done = self.points > request.points
            return Reply(worker, self.pause, request.values) if done else None
        if request.kind is Kind.WAIT:
            done = worker not in state.idle
            return Reply(worker, self._work[worker], values=False) if done else None
        return None if state.live else Reply(worker, None, values=True)


@dataclass
class HeldSlice:
    """A slice as one of its two servers holds it; `place` is that of the slice among all.

    `given` are the values that each worker's last answer holds, `agreed` those of the last quiet
    point that was to give them.
    """

    place: int
    server: Server
    replica: Replica
    answer_tag: int
    values_tag: int
    given: dict[int, Tensor] = field(default_factory=dict)
    agreed: Tensor | None = None
    sending: dict[int, list[Handle]] = field(default_factory=dict)

    def take(self, transport: Transport, request: Request, gradient: Tensor | None) -> None:
        """Let a new request count, in the values too."""
        if gradient is not None:
            self.server.keep(request.worker, gradient)
        elif request.kind is Kind.LOST:
            self.server.forget(request.worker)
        decision = self.replica.take(request)
        self.server.apply(transport, decision.apply)
        for answer in decision.answers:
            self.given[answer.worker] = self.server.copy_for(answer.worker)
        if decision.quiet and self.replica.state.live and self.replica.gives_values:
            self.agreed = self.server.values.clone()
            self.server.all_have_read()

    def send(self, transport: Transport, replies: Collection[Reply]) -> None:
        """Tell the workers; the one on this rank last: then all that was sent is counted."""
        for reply in sorted(replies, key=lambda reply: reply.worker == transport.rank):
            worker, content, handles = reply.worker, reply.content, []
            if content is not None:
                handles.append(transport.send(encode_reply(content), worker, self.answer_tag))
            if reply.values:
                handles.append(transport.send(self._values_of(reply), worker, self.values_tag))
            self.sending[worker] = handles

    def _values_of(self, reply: Reply) -> Tensor:
        if isinstance(reply.content, Answer):
            return self.given[reply.worker]
        if reply.content is None:
            return self.server.values
        assert self.agreed is not None
        return self.agreed

    def finish_sending(self) -> None:
        """Until all that was sent has left; a worker that is lost meanwhile is left out."""
        for handles in self.sending.values():
            with contextlib.suppress(PeerLost):
                for handle in handles:
                    handle.wait()
        self.sending.clear()


class ReplicatedServer:
    """Serves the slice at `place`, and keeps a replica of the slice before it.

    `own` and `mirror` are the two slices. The servers of slice i are the ranks ranks[i], which
    serves it, and the next of `ranks`, which serves it once ranks[i] is lost. `lost` are the ranks
    that were lost before; `alone` is called with a message about a slice that has no other
    replica now.
    """

    def __init__(
        self,
        own: Server,
        mirror: Server,
        ranks: tuple[int, ...],
        place: int,
        *,
        lost: Collection[int],
        alone: Callable[[str], None],
    ) -> None:
        for server in (own, mirror):
            server.state.live.difference_update(lost)
        self._before, self._after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        backed = self._after not in lost
        self._own = HeldSlice(place, own, Replica(own.state, backed=backed), Tag.ANSWER, Tag.VALUES)
        self._mirror = HeldSlice(
            (place - 1) % len(ranks), mirror, Replica(mirror.state, backed=False),
            Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES,
        )  # fmt: skip
        self._alone = alone
        self._workers = frozenset(own.state.live)
        self._lost = set(lost)
        self._done: set[int] = set()
        self._points = 0  # quiet points that `serve` has returned
        self._early: list[tuple[Request, Tensor, Tensor | None]] = []  # of the slice before

    @property
    def state(self) -> ServerState:
        """The state of the own slice."""
        return self._own.server.state

    @property
    def servers(self) -> list[tuple[int, Server]]:
        """Of each slice that is held here its place, and what holds it; the replica last."""
        return [(held.place, held.server) for held in (self._own, self._mirror)]

    def serve_to_the_end(self, transport: Transport) -> None:
        """Serve until no worker needs anything more: the flow of a server beside a worker."""
        while self._expected():
            self.serve(transport)

    def serve(self, transport: Transport) -> Pause | None:
        """Serve until nothing is in flight; the quiet point, None if all workers are done."""
        while self._expected():
            try:
                handle = transport.receive(None, Tag.REQUEST)
                message = handle.wait()
            except PeerLost as lost:
                self._lose(transport, lost)
            else:
                self._hear(transport, handle.source, message)
            if self._is_quiet():
                self._points += 1
                self._finish_sending()
                return self._own.replica.pause
        self._finish_sending()
        return None

    def _expected(self) -> frozenset[int]:
        """Return the workers that may still want something."""
        return self._workers - self._done - self._lost

    def _is_quiet(self) -> bool:
        replicas = (self._own.replica, self._mirror.replica)
        reached = all(replica.points > self._points for replica in replicas)
        return reached and self._own.replica.confirmed_all

    def _finish_sending(self) -> None:
        self._own.finish_sending()
        self._mirror.finish_sending()

    def _hear(self, transport: Transport, source: int, message: Tensor) -> None:
        place, request = decode_request(message)
        if request.kind is Kind.CONFIRMED:
            self._own.send(transport, self._own.replica.confirmed())
            return
        if request.kind is Kind.DONE:
            self._done.add(source)
            return
        passed_on = place != self._own.place and source == self._before
        gradient = None
        if request.kind is Kind.PUSH:  # its gradient came before it
            tag = Tag.BACKUP_GRADIENT if passed_on else Tag.GRADIENT
            gradient = transport.receive(source, tag).wait()
        if passed_on:
            self._mirror.take(transport, request, gradient)
            confirmation = encode_request(Request(request.worker, Kind.CONFIRMED), place)
            _send(transport, confirmation, self._before, Tag.REQUEST)
        elif place == self._own.place:
            self._answer(transport, self._own, request, message, gradient)
        elif self._before in self._lost:
            self._answer(transport, self._mirror, request, message, gradient)
        else:  # what the server before this one passed on comes first
            self._early.append((request, message, gradient))

    def _answer(
        self,
        transport: Transport,
        held: HeldSlice,
        request: Request,
        message: Tensor,
        gradient: Tensor | None,
    ) -> None:
        if held.replica.hear(request):
            if held.replica.backed:
                if gradient is not None:
                    _send(transport, gradient, self._after, Tag.BACKUP_GRADIENT)
                _send(transport, message, self._after, Tag.REQUEST)
            held.take(transport, request, gradient)
        held.send(transport, held.replica.due())

    def _lose(self, transport: Transport, lost: PeerLost) -> None:
        rank = lost.rank
        self._lost.add(rank)
        if rank == self._after:
            self._own.send(transport, self._own.replica.backup_lost())
            self._alone(f"the slice of rank {transport.rank} has no replica without rank {rank}")
        if rank == self._before:
            self._alone(f"rank {transport.rank} serves the slice of rank {rank}, without a replica")
        for held in self._served():
            for worker in sorted(self._lost & held.replica.state.live):
                if not held.replica.state.consistency.tolerates_loss:
                    raise lost
                request = Request(worker, Kind.LOST)
                message = encode_request(request, held.place)
                self._answer(transport, held, request, message, None)
        if rank == self._before:
            early, self._early = self._early, []
            for request, message, gradient in early:
                self._answer(transport, self._mirror, request, message, gradient)

    def _served(self) -> Iterator[HeldSlice]:
        """The slices whose workers ask here."""
        yield self._own
        if self._before in self._lost:
            yield self._mirror

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        return {"own": self._own.server, "mirror": self._mirror.server}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self._own.server.load_state_dict(saved["own"])
        self._mirror.server.load_state_dict(saved["mirror"])


def _send(transport: Transport, tensor: Tensor, to: int, tag: int) -> None:
    """Until it has left; the loss of its receiver is heard of in its turn."""
    with contextlib.suppress(PeerLost):
        transport.send(tensor, to, tag).wait()
