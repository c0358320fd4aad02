"""A worker's side of slices with replicas: if it loses a server it asks the next one again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.parameter_server.client import Client, Encode
from orchestra.parameter_server.messages import Kind, Request
from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.replicas import (
    Addressed,
    Notice,
    encode_addressed,
    encode_notice,
)
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


class ReplicatedClient(Client):
    """A request that a lost server has not answered goes to the one after it.

    Flat `parameters` take the values that all workers agree on.
    """

    def __init__(
        self,
        transport: Transport,
        slices: Sequence[Slice],
        parameters: Tensor,
        queue: BatchQueue | None = None,
        encode: Encode | None = None,
    ) -> None:
        super().__init__(transport, slices, queue, encode)
        self._parameters = parameters
        self._points = 0  # quiet points behind this worker
        self._failed_over: set[int] = set()  # slices that the next server serves
        self._has_left = False

    def pause(self, rest: Rest) -> bool:
        complete = super().pause(rest)
        self._points += 1
        return complete

    def agree(self) -> None:
        """At a quiet point: let all workers take the same values.

        Nothing is to be done where they took them on leaving.
        """
        if not self._has_left:
            self._take_values(self._request(Kind.PAUSE, step=Rest(Reason.AGREEMENT).code))
            self._points += 1

    def leave(self) -> None:
        """Push no more; take the values that are there when all have left."""
        self._take_values(self._request(Kind.LEAVE))
        for place, part in enumerate(self.slices):
            with contextlib.suppress(PeerLost):
                done = encode_notice(Notice.DONE, place, self._transport.rank)
                self._transport.send(done, part.rank, Tag.REQUEST).wait()
        self._has_left = True

    def _take_values(self, request: Request) -> None:
        """Ask all servers for the values, which become the parameters."""
        waits = [
            self._ask(place, request, into=self._parameters[part.first : part.end])
            for place, part in enumerate(self.slices)
        ]
        for wait in waits:
            wait()

    def _ask(
        self,
        place: int,
        request: Request,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        # Only a push is answered with values without being asked for them.
        values = into is not None and request.push is None
        message = encode_addressed(Addressed(place, request, self._points, values))
        has_head = request.kind is not Kind.LEAVE
        under_way = self._begin(place, message, gradient, into, has_head=has_head)

        def wait() -> Tensor:
            nonlocal under_way
            while True:
                try:
                    # Sends first: no answer comes before its request has gone.
                    arriving, sending = under_way
                    for handle in sending:
                        handle.wait()
                    first, *_ = [handle.wait() for handle in arriving]
                    return first
                except PeerLost as lost:
                    # The same request again: by its number a server knows it (`RequestLog`).
                    self._fail_over(lost, place)
                    under_way = self._begin(place, message, gradient, into, has_head=has_head)

        return wait

    def _begin(
        self,
        place: int,
        message: Tensor,
        gradient: Tensor | None,
        into: Tensor | None,
        *,
        has_head: bool,
    ) -> tuple[list[Handle], list[Handle]]:
        """Begin the receives and sends of a request, as `Client` does; the reply may have values
        alone."""
        transport, rank = self._transport, self._server_of(place)
        answer, values = Tag.ANSWER, Tag.VALUES
        if place in self._failed_over:
            answer, values = Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES
        arriving, sending = [], []
        if has_head:
            arriving.append(transport.receive(rank, answer))
        if into is not None:
            arriving.append(transport.receive(rank, values, into))
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT, more=True))
        sending.append(transport.send(message, rank, Tag.REQUEST))
        return arriving, sending

    def _server_of(self, place: int) -> int:
        """Return the rank that serves the slice at `place` now."""
        return self.slices[(place + (place in self._failed_over)) % len(self.slices)].rank

    def _fail_over(self, lost: PeerLost, place: int) -> None:
        """Ask the next server from now on; raise `lost` where there is none."""
        next_rank = self.slices[(place + 1) % len(self.slices)].rank
        if (
            lost.rank != self._server_of(place)
            or place in self._failed_over
            or next_rank in self._transport.lost()
        ):
            raise lost
        self._failed_over.add(place)
