"""Servers with replicas: each slice is held by two servers, so that the run survives one of them.

Both servers take the same requests in the same order, and so hold the same values. Workers ask the
first one. It passes each new request on to the second, and answers nobody before the second has
confirmed it: what a worker knows outlives either server. Where the first dies its workers ask the
second again. A request that it has taken before is not taken twice, and gets the same answer.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestra.coordinator.events import Instruction
from orchestra.errors import PeerLost
from orchestra.optimizers.spec import OptimizerPart
from orchestra.parameter_server.held_slice import HeldSlice, finish_sending
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    QuietPoint,
    Request,
    decode_request,
    encode_reply,
    encode_request,
)
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Decision, ServerState
from orchestra.transports.protocol import Handle, Transport, send_unless_lost
from orchestra.transports.tags import Tag


class ReplicaNotice(enum.IntEnum):
    """A notice to a server, which is no request; it takes the place of a request's kind."""

    CONFIRMED = -1  # by the other replica: it has taken the next request
    DONE = -2  # the worker has all that it wanted of this server


class Addressed(NamedTuple):
    """A request about the slice at `place` among all, of a worker with `points` quiet points behind
    it.

    With `values` a PAUSE wants the values as they are at this quiet point, and a LEAVE those that
    are there when all have left.
    """

    place: int
    request: Request
    points: int = 0
    values: bool = False


def encode_addressed(addressed: Addressed) -> Tensor:
    """Encode a request; one with a push has neither `points` nor `values`."""
    place, request, *more = addressed
    body = encode_request(request)
    head, tail = [place, request.worker], [] if request.push is not None else more
    return torch.cat([body.new_tensor(head), body, body.new_tensor(tail)])


def encode_notice(notice: ReplicaNotice, place: int, worker: int) -> Tensor:
    """Encode a notice about the slice at `place`, and a request of `worker`."""
    return torch.tensor([place, worker, notice, 0, 0, 0], dtype=torch.float64)


def decode_addressed(message: Tensor) -> Addressed | ReplicaNotice:
    """Decode a request, or a notice."""
    place, worker, kind = map(int, message[:3].tolist())
    if kind < 0:
        return ReplicaNotice(kind)
    if kind in (Kind.PUSH, Kind.OPTIONS):
        return Addressed(place, decode_request(message[2:], worker))
    points, values = map(int, message[4:].tolist())
    return Addressed(place, decode_request(message[2:4], worker), points, bool(values))


class Reply(NamedTuple):
    """The reply to `worker`: the answer to its push, a quiet point, its next work; None if all have
    left. With `values` the values come with it."""

    worker: int
    content: Answer | QuietPoint | Instruction | None
    values: bool


class RequestLog:
    """Knows which requests about a slice were taken, and says what has to be replied. Pure.

    Where `backed`, another server takes each request after this one, and nobody is answered before
    it has confirmed that: what a worker knows outlives either server. `points` counts quiet points;
    `quiet_point` is the last one, and `gives_values` says that its workers asked for values.
    """

    def __init__(self, state: ServerState, *, backed: bool) -> None:
        self.state = state
        self.backed = backed
        self.points = 0
        self.quiet_point: QuietPoint | None = None
        self.gives_values = False
        self._pause_gives_values = False  # that was taken last
        self._last: dict[int, Answer | Instruction] = {}  # that a push, or a wait for work, led to
        self._waits: dict[int, int] = {}  # requests for work that were taken of each worker
        self._asking: dict[int, Addressed] = {}
        self._settled: list[int] = []  # workers about whom something was decided, in that order
        self._unconfirmed: deque[list[Reply]] = deque()  # what each request passed on led to

    @property
    def confirmed_all(self) -> bool:
        """True if the other server has confirmed all requests that were passed on."""
        return not self._unconfirmed

    def hear(self, addressed: Addressed) -> bool:
        """Note a request that its worker has sent. True if it is new, and has to be taken."""
        worker, kind = addressed.request.worker, addressed.request.kind
        if kind in (Kind.PUSH, Kind.PAUSE, Kind.WAIT) and worker not in self.state.live:
            return False  # it is lost, and its loss came first
        if kind is Kind.LOST:
            self._asking.pop(worker, None)
        else:
            self._asking[worker] = addressed
        new = self._is_new(addressed)
        # Asked again after a server was lost: the reply is that of the first time.
        if not new:
            self._settled.append(worker)
        elif self.backed:
            # One list for each request that is passed on, in order; `due` fills it.
            self._unconfirmed.append([])
        return new

    def _is_new(self, addressed: Addressed) -> bool:
        state, request = self.state, addressed.request
        worker = request.worker
        if request.push is not None:
            return request.push.clock > state.clocks.get(worker, 0)
        if request.kind is Kind.PAUSE:
            return addressed.points == self.points and worker not in state.paused
        if request.kind is Kind.WAIT:
            return request.step > self._waits.get(worker, 0)
        return worker in state.live

    def note(self, addressed: Addressed, decision: Decision) -> None:
        """Note what a new request has led to; both servers of a slice do so, in the same order."""
        request = addressed.request
        if request.kind is Kind.PAUSE:
            self._pause_gives_values = addressed.values
        elif request.kind is Kind.WAIT:
            self._waits[request.worker] = request.step
        last = {answer.worker: answer for answer in decision.answers} | dict(decision.work)
        self._last.update(last)
        self._settled += last
        if decision.quiet is not None:
            self._settled += sorted(self._asking)
            if self.state.live:
                self.points += 1
                # Servers may hear of a loss at different times, but of who left they agree.
                self.quiet_point = decision.quiet
                self.gives_values = self._pause_gives_values

    def due(self) -> list[Reply]:
        """Return the replies that may be sent now; others are returned by `confirmed`."""
        replies = []
        for worker in self._settled:
            reply = self._reply(self._asking[worker]) if worker in self._asking else None
            if reply is not None:
                replies.append(reply)
                del self._asking[worker]
        self._settled.clear()
        if not self._unconfirmed:
            return replies
        # Behind the last request passed on, since they may show what came of it.
        self._unconfirmed[-1] += replies
        return []

    def _reply(self, addressed: Addressed) -> Reply | None:
        """Return the reply to a request, if it is known."""
        state, request = self.state, addressed.request
        worker = request.worker
        if request.kind is Kind.PAUSE:
            done = self.points > addressed.points
            return Reply(worker, self.quiet_point, addressed.values) if done else None
        if request.kind is Kind.LEAVE:
            return None if state.live else Reply(worker, None, values=True)
        last = self._last.get(worker)
        if request.push is None:
            decided = worker not in state.idle
        else:
            decided = isinstance(last, Answer) and last.clock >= request.push.clock
        if not decided:
            return None
        assert last is not None
        return Reply(worker, last, values=request.kind is Kind.PUSH)

    def confirmed(self) -> list[Reply]:
        """Note that the other server has taken one more request; return the replies due by that."""
        return self._unconfirmed.popleft()

    def backup_lost(self) -> list[Reply]:
        """Note that the other server is lost; return the replies that have waited for it."""
        self.backed = False
        replies = [reply for waiting in self._unconfirmed for reply in waiting]
        self._unconfirmed.clear()
        return replies


class Replica:
    """One of two replicas of the slice at `place`: what is `held`, and the log of its requests.

    Values are copied when they are decided on, not when they are sent: what a worker is given must
    not hold what only this server has taken. `tags` are those of replies and of their values.
    """

    def __init__(self, held: HeldSlice, place: int, tags: tuple[Tag, Tag], *, backed: bool) -> None:
        self.held, self.place = held, place
        self.log = RequestLog(held.state, backed=backed)
        self._tags = tags
        self._copies: dict[int, Tensor] = {}  # answers that are decided on
        self._agreed: Tensor | None = None  # the values of the last quiet point that gives them
        self._sending: dict[int, list[Handle]] = {}

    def take(self, transport: Transport, addressed: Addressed, gradient: Tensor | None) -> None:
        """Carry out a new request, and apply the updates that follow from it."""
        held = self.held
        decision = held.take(transport, addressed.request, gradient)
        self.log.note(addressed, decision)
        for answer in decision.answers:
            # Now, not when it is sent: further requests may be taken before the confirmation.
            self._copies[answer.worker] = held.copy_answer(answer.worker)
        if decision.quiet is not None and held.state.live and self.log.gives_values:
            self._agreed = held.values.clone()
            held.all_have_read()

    def send(self, transport: Transport, replies: Collection[Reply]) -> None:
        """Send replies; those to this rank's own worker that are no answers come last.

        So all that was sent is counted when that worker goes on.
        """
        own, (head_tag, values_tag) = transport.rank, self._tags
        for reply in sorted(
            replies, key=lambda r: r.worker == own and not isinstance(r.content, Answer)
        ):
            worker, content, handles = reply.worker, reply.content, []
            if content is not None:
                head = encode_reply(content)
                handles.append(transport.send(head, worker, head_tag, more=reply.values))
            if reply.values:
                values = self._values_of(reply)
                handles.append(transport.send(values, worker, values_tag))
            self._sending[worker] = handles

    def _values_of(self, reply: Reply) -> Tensor:
        if isinstance(reply.content, Answer):
            return self._copies[reply.worker]
        if reply.content is None:
            return self.held.values
        assert self._agreed is not None
        return self._agreed

    def finish_sending(self) -> None:
        """Wait until all that was sent has left; a worker that is lost meanwhile is left out."""
        finish_sending(self._sending)


class ReplicatedServer(Server):
    """Serves the slice `own`, and holds a replica of the slice before it, the `mirror`.

    The servers of slice i are the ranks ranks[i], which serves it, and the next of `ranks`, which
    serves it once ranks[i] is lost; `place` is that of this server among them. `lost` are the ranks
    that were lost before; `alone` is called with a message about a slice's last replica.
    """

    def __init__(
        self,
        own: HeldSlice,
        mirror: HeldSlice,
        ranks: Sequence[int],
        place: int,
        *,
        lost: Collection[int],
        alone: Callable[[str], None],
    ) -> None:
        super().__init__(own)
        self.mirror = mirror
        self._before, self._after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        tags, place_before = (Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES), (place - 1) % len(ranks)
        self._own = Replica(own, place, (Tag.ANSWER, Tag.VALUES), backed=self._after not in lost)
        self._mirror = Replica(mirror, place_before, tags, backed=False)
        self.replicas = [self._own, self._mirror]
        for replica in self.replicas:
            replica.held.state.live.difference_update(lost)
        self._alone = alone
        self._expected = set(own.state.live)
        self._lost = set(lost)
        self._points = 0  # quiet points that `serve` has returned
        # Of the slice before: what workers ask before this server hears of the other's loss
        self._early: list[tuple[Addressed, Tensor, Tensor | None]] = []

    @property
    def expected(self) -> Set[int]:
        """The workers that may still want something, values included."""
        return self._expected

    def _expect_pushes(self, transport: Transport) -> None:
        """Expect none: which of the two slices a gradient is for, only its request tells."""

    def _finish_sending(self) -> None:
        for replica in self.replicas:
            replica.finish_sending()

    def _hear(self, transport: Transport, source: int, message: Tensor) -> QuietPoint | None:
        addressed = decode_addressed(message)
        if addressed is ReplicaNotice.CONFIRMED:
            self._own.send(transport, self._own.log.confirmed())
        elif addressed is ReplicaNotice.DONE:
            self._expected.discard(source)
        else:
            assert isinstance(addressed, Addressed)
            self._hear_request(transport, source, addressed, message)
        return self._new_quiet_point()

    def _hear_request(
        self, transport: Transport, source: int, addressed: Addressed, message: Tensor
    ) -> None:
        is_own = addressed.place == self._own.place
        # A rank may be server and worker, so that the source alone does not tell.
        passed_on = not is_own and source == self._before
        gradient = None
        if addressed.request.kind is Kind.PUSH:  # its gradient came before it
            tag = Tag.BACKUP_GRADIENT if passed_on else Tag.GRADIENT
            gradient = transport.receive(source, tag).wait()
        if is_own:
            self._answer(transport, self._own, addressed, message, gradient)
        elif passed_on:
            self._mirror.take(transport, addressed, gradient)
            confirmation = encode_notice(
                ReplicaNotice.CONFIRMED, addressed.place, addressed.request.worker
            )
            send_unless_lost(transport, confirmation, self._before, Tag.REQUEST)
        elif self._before in self._lost:
            self._answer(transport, self._mirror, addressed, message, gradient)
        else:  # what the server before this one passed on comes first
            self._early.append((addressed, message, gradient))

    def _answer(
        self,
        transport: Transport,
        replica: Replica,
        addressed: Addressed,
        message: Tensor,
        gradient: Tensor | None,
    ) -> None:
        log = replica.log
        if log.hear(addressed):  # `_lose` handles the loss of the other server
            # Before this server takes it: the order in which it passes on is the order for both.
            if log.backed:
                if gradient is not None:
                    send_unless_lost(transport, gradient, self._after, Tag.BACKUP_GRADIENT)
                send_unless_lost(transport, message, self._after, Tag.REQUEST)
            replica.take(transport, addressed, gradient)
        replica.send(transport, log.due())

    def _lose(self, transport: Transport, lost: PeerLost) -> QuietPoint | None:
        rank, own = lost.rank, self._own
        self._lost.add(rank)
        self._expected.discard(rank)
        if rank == self._after:
            own.send(transport, own.log.backup_lost())
            self._alone(f"the slice of rank {transport.rank} has no replica without rank {rank}")
        if rank == self._before:
            self._alone(f"rank {transport.rank} serves the slice of rank {rank}, without a replica")
        for replica in self.replicas if self._before in self._lost else [own]:
            # A loss is a request like others, which the replica takes at the same place.
            state = replica.held.state
            for worker in sorted(self._lost & state.live):
                if not state.when.tolerates_loss:
                    raise lost
                addressed = Addressed(replica.place, Request(worker, Kind.LOST))
                self._answer(transport, replica, addressed, encode_addressed(addressed), None)
        if rank == self._before:
            early, self._early = self._early, []
            for each in early:
                self._answer(transport, self._mirror, *each)
        return self._new_quiet_point()

    def _new_quiet_point(self) -> QuietPoint | None:
        """Return the next quiet point of both slices that are held here, once it is there, and of
        the own one all is confirmed."""
        own = self._own.log
        reached = all(replica.log.points > self._points for replica in self.replicas)
        if not (reached and own.confirmed_all):
            return None
        self._points += 1
        return own.quiet_point

    def optimizer_parts(self) -> list[OptimizerPart]:
        """Return the optimizers of the slices that are held here, replicas last."""
        return [*super().optimizer_parts(), *self.mirror.application.optimizer_parts()]

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        return {"own": self.own, "mirror": self.mirror}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.own.load_state_dict(saved["own"])
        self.mirror.load_state_dict(saved["mirror"])
