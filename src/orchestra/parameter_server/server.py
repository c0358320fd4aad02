"""The loop of a server: it receives requests, lets its slices take them, and replies.

With replicas each slice is held by two servers, which take the same requests in the same order, and
so hold the same values. Workers ask the first one. It passes each new request on to the second, and
answers nobody before the second has confirmed it: what a worker knows outlives either server. Where
the first dies its workers ask the second again. A request that it has taken before is not taken
twice, and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.optimizers.spec import OptimizerPart
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.messages import (
    Kind,
    QuietPoint,
    Request,
    decode_request,
    encode_request,
)
from orchestra.transports.protocol import Transport, send_unless_lost
from orchestra.transports.tags import Tag


class Server:
    """Serves the slice `own`; with a `mirror` it holds a replica of the slice before it, too.

    The servers of slice i are then the ranks ranks[i], which serves it, and the next of `ranks`,
    which serves it once ranks[i] is lost; `place` is that of this server among them. `lost` are the
    ranks that were lost before; `alone` is called with a message about a slice's last replica.
    """

    def __init__(
        self,
        own: HeldSlice,
        mirror: HeldSlice | None = None,
        ranks: Sequence[int] = (),
        place: int = 0,
        *,
        lost: Collection[int] = (),
        alone: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.own = own
        self.mirror = mirror
        self.held = [own]  # the replica last
        self._before = self._after = -1
        if mirror is not None:
            self.held.append(mirror)
            self._before, self._after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
            own.replicate(place, backed=self._after not in lost, is_mirror=False)
            mirror.replicate((place - 1) % len(ranks), backed=False, is_mirror=True)
        for held in self.held:
            held.state.live.difference_update(lost)
        self._alone = alone
        self._expected = set(own.state.live)  # workers that may still want something
        self._lost = set(lost)
        self._points = 0  # quiet points that `serve` has returned
        self._early: list[tuple[Request, Tensor, Tensor | None]] = []  # of the slice before

    def serve_to_the_end(self, transport: Transport) -> None:
        """Serve until no worker needs anything more: the flow of a server beside a worker."""
        while self._expected:
            self.serve(transport)

    def serve(
        self, transport: Transport, observe: Callable[[], None] = lambda: None
    ) -> QuietPoint | None:
        """Serve until nothing is in flight; return the quiet point. None if all workers are done.

        `observe` is called after each request.
        """
        while self._expected:
            try:
                # From any rank: a suspended worker must not hold up the others.
                handle = transport.receive(None, Tag.REQUEST)
                message = handle.wait()
            except PeerLost as lost:
                self._lose(transport, lost)
            else:
                self._hear(transport, handle.source, message)
                observe()
            reached = all(held.log.points > self._points for held in self.held)
            # A quiet point of both slices that are held here; of the own one all is confirmed.
            if reached and self.own.log.confirmed_all:
                self._points += 1
                self._finish_sending()
                return self.own.log.quiet_point
        self._finish_sending()
        return None

    def _finish_sending(self) -> None:
        for held in self.held:
            held.finish_sending()

    def _hear(self, transport: Transport, source: int, message: Tensor) -> None:
        own, mirror = self.own, self.mirror
        if mirror is None:
            place, request = own.place, decode_request(message, source, own.log.points)
            if request.kind is Kind.LEAVE:
                self._expected.discard(source)
        else:
            place, request = int(message[0]), decode_request(message[2:], int(message[1]))
        if request.kind is Kind.CONFIRMED:
            own.send(transport, own.log.confirmed())
            return
        if request.kind is Kind.DONE:
            self._expected.discard(source)
            return
        if request.kind is Kind.PART:
            own.take_part(transport, request, transport.receive(source, Tag.GRADIENT).wait())
            return
        # A rank may be server and worker, so that the source alone does not tell.
        passed_on = place != own.place and source == self._before
        gradient = None
        if request.kind is Kind.PUSH and not own.parts:  # its gradient came before it
            tag = Tag.BACKUP_GRADIENT if passed_on else Tag.GRADIENT
            gradient = transport.receive(source, tag).wait()
        if place == own.place:
            self._answer(transport, own, request, message, gradient)
            return
        assert mirror is not None
        if passed_on:
            mirror.take(transport, request, gradient)
            confirmation = encode_request(Request(request.worker, Kind.CONFIRMED), place)
            send_unless_lost(transport, confirmation, self._before, Tag.REQUEST)
        elif self._before in self._lost:
            self._answer(transport, mirror, request, message, gradient)
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
        if held.log.hear(request):  # `_lose` handles the loss of the other server
            # Before this server takes it: the order in which it passes on is the order for both.
            if held.log.backed:
                if gradient is not None:
                    send_unless_lost(transport, gradient, self._after, Tag.BACKUP_GRADIENT)
                send_unless_lost(transport, message, self._after, Tag.REQUEST)
            held.take(transport, request, gradient)
        held.send(transport, held.log.due())

    def _lose(self, transport: Transport, lost: PeerLost) -> None:
        rank = lost.rank
        self._lost.add(rank)
        self._expected.discard(rank)
        if rank == self._after:
            self.own.send(transport, self.own.log.backup_lost())
            self._alone(f"the slice of rank {transport.rank} has no replica without rank {rank}")
        if rank == self._before:
            self._alone(f"rank {transport.rank} serves the slice of rank {rank}, without a replica")
        for held in self.held if self._before in self._lost else [self.own]:
            # A loss is a request like others, which the replica takes at the same place.
            for worker in sorted(self._lost & held.state.live):
                if not held.state.when.tolerates_loss:
                    raise lost
                request = Request(worker, Kind.LOST)
                self._answer(transport, held, request, encode_request(request, held.place), None)
        if rank == self._before and self.mirror is not None:
            early, self._early = self._early, []
            for request, message, gradient in early:
                self._answer(transport, self.mirror, request, message, gradient)

    def optimizer_parts(self) -> list[OptimizerPart]:
        """Return the optimizers of the slices that are held here, replicas last."""
        return [part for held in self.held for part in held.application.optimizer_parts()]

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        if self.mirror is None:
            return self.own.state_dict()
        return {"own": self.own, "mirror": self.mirror}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.own.load_state_dict(saved if self.mirror is None else saved["own"])
        if self.mirror is not None:
            self.mirror.load_state_dict(saved["mirror"])
