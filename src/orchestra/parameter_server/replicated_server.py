"""The loop of a server whose slice has a replica on the next server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.parameter_server.replica import Replica, Reply
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Answer, Pause, ServerState
from orchestra.parameter_server.wire import (
    Kind,
    Request,
    decode_request,
    encode_answer,
    encode_pause,
    encode_request,
    encode_work,
)
from orchestra.schedules.work_queue import WorkItem
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


@dataclass
class Held:
    """A slice as one of its two servers holds it; `home` is the place of the slice among all.

    `given` are the values that each worker's last answer holds, `agreed` those of the last quiet
    point that was to give them.
    """

    home: int
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
                handles.append(transport.send(_encode(content), worker, self.answer_tag))
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
    """Serves the slice of `home`, and keeps a replica of the slice of the home before it.

    `own` and `mirror` are the two slices. The servers of slice i are the ranks homes[i], which
    serves it, and the next of `homes`, which serves it once homes[i] is lost. `lost` are the ranks
    that were lost before; `alone` is told, in words, of a slice that has no other replica now.
    """

    def __init__(
        self,
        own: Server,
        mirror: Server,
        homes: tuple[int, ...],
        home: int,
        *,
        lost: Collection[int],
        alone: Callable[[str], None],
    ) -> None:
        for server in (own, mirror):
            server.state.live.difference_update(lost)
        self._before, self._after = homes[home - 1], homes[(home + 1) % len(homes)]
        backed = self._after not in lost
        self._own = Held(home, own, Replica(own.state, backed=backed), Tag.ANSWER, Tag.VALUES)
        self._mirror = Held(
            (home - 1) % len(homes), mirror, Replica(mirror.state, backed=False),
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
        """What is known of the workers here."""
        return self._own.server.state

    @property
    def servers(self) -> list[tuple[int, Server]]:
        """Of each slice that is held here its place, and what holds it; the replica last."""
        return [(held.home, held.server) for held in (self._own, self._mirror)]

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
        """The workers that may still want something."""
        return self._workers - self._done - self._lost

    def _is_quiet(self) -> bool:
        replicas = (self._own.replica, self._mirror.replica)
        reached = all(replica.points > self._points for replica in replicas)
        return reached and self._own.replica.confirmed_all

    def _finish_sending(self) -> None:
        self._own.finish_sending()
        self._mirror.finish_sending()

    def _hear(self, transport: Transport, source: int, message: Tensor) -> None:
        home, request = decode_request(message)
        if request.kind is Kind.CONFIRMED:
            self._own.send(transport, self._own.replica.confirmed())
            return
        if request.kind is Kind.DONE:
            self._done.add(source)
            return
        passed_on = home != self._own.home and source == self._before
        gradient = None
        if request.kind is Kind.PUSH:  # its gradient came before it
            tag = Tag.BACKUP_GRADIENT if passed_on else Tag.GRADIENT
            gradient = transport.receive(source, tag).wait()
        if passed_on:
            self._mirror.take(transport, request, gradient)
            confirmation = encode_request(home, Request(request.worker, Kind.CONFIRMED))
            _send(transport, confirmation, self._before, Tag.REQUEST)
        elif home == self._own.home:
            self._answer(transport, self._own, request, message, gradient)
        elif self._before in self._lost:
            self._answer(transport, self._mirror, request, message, gradient)
        else:  # what the server before this one passed on comes first
            self._early.append((request, message, gradient))

    def _answer(
        self,
        transport: Transport,
        held: Held,
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
            self._own.send(transport, self._own.replica.left_alone())
            self._alone(f"the slice of rank {transport.rank} has no replica without rank {rank}")
        if rank == self._before:
            self._alone(f"rank {transport.rank} serves the slice of rank {rank}, without a replica")
        for held in self._served():
            for worker in sorted(self._lost & held.replica.state.live):
                if not held.replica.state.consistency.tolerates_loss:
                    raise lost
                request = Request(worker, Kind.LOST)
                message = encode_request(held.home, request)
                self._answer(transport, held, request, message, None)
        if rank == self._before:
            early, self._early = self._early, []
            for request, message, gradient in early:
                self._answer(transport, self._mirror, request, message, gradient)

    def _served(self) -> Iterator[Held]:
        """The slices whose workers ask here."""
        yield self._own
        if self._before in self._lost:
            yield self._mirror

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps; taken at a quiet point."""
        return {"own": self._own.server, "mirror": self._mirror.server}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self._own.server.load_state_dict(saved["own"])
        self._mirror.server.load_state_dict(saved["mirror"])


def _encode(content: Answer | Pause | WorkItem) -> Tensor:
    if isinstance(content, Answer):
        return encode_answer(content)
    return encode_pause(content) if isinstance(content, Pause) else encode_work(content)


def _send(transport: Transport, tensor: Tensor, to: int, tag: int) -> None:
    """Until it has left; the loss of its receiver is heard of in its turn."""
    with contextlib.suppress(PeerLost):
        transport.send(tensor, to, tag).wait()
