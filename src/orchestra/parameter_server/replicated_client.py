"""A worker's side where each slice has a replica: who loses a server asks the next one again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.parameter_server.client import Client, Home
from orchestra.parameter_server.state import Answer, Push
from orchestra.parameter_server.wire import (
    Kind,
    Request,
    decode_answer,
    decode_pause,
    decode_work,
    encode_request,
)
from orchestra.schedules.work_queue import WorkItem, WorkQueue
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


class ReplicatedClient(Client):
    """As a client; a request that a lost server has not answered goes to the server after it.

    `parameters`, flat, take the values that all workers agree on.
    """

    def __init__(
        self,
        transport: Transport,
        homes: Sequence[Home],
        parameters: Tensor,
        queue: WorkQueue | None = None,
    ) -> None:
        super().__init__(transport, homes, queue)
        self._parameters = parameters
        self._points = 0  # quiet points behind this worker
        self._stands_in: set[int] = set()  # slices that the next server serves
        self._has_left = False

    def _exchange(self, pushes: Sequence[Push], gradient: Tensor, into: Tensor) -> list[Answer]:
        questions = []
        for place, (home, push) in enumerate(zip(self.homes, pushes, strict=True)):
            first, end = home.slice.first, home.slice.end
            request = Request(push.worker, Kind.PUSH, push)
            questions.append(
                _Question(self, place, request, gradient=gradient[first:end], into=into[first:end])
            )
        return [decode_answer(self._transport.rank, question.wait()) for question in questions]

    def _wait_for_work(self) -> WorkItem:
        request = Request(self._transport.rank, Kind.WAIT, step=self._waits)
        return decode_work(self._ask(0, request).wait())

    def pause(self, step: int) -> bool:
        """Push no more until every worker has paused too; whether none has left."""
        return self._pause(step, values=False)

    def agree(self) -> None:
        """At a quiet point: all workers take the same values, unless they did so on leaving."""
        if not self._has_left:
            self._pause(0, values=True)

    def leave(self) -> None:
        """Push no more; take the values that are there when all have left."""
        request = Request(self._transport.rank, Kind.LEAVE, values=True)
        questions = [self._ask(place, request) for place in range(len(self.homes))]
        for question in questions:
            question.wait()
        done = Request(self._transport.rank, Kind.DONE)
        for place, home in enumerate(self.homes):
            with contextlib.suppress(PeerLost):
                self._transport.send(encode_request(place, done), home.rank, Tag.REQUEST).wait()
        self._has_left = True

    def _pause(self, step: int, *, values: bool) -> bool:
        rank = self._transport.rank
        request = Request(rank, Kind.PAUSE, step=step, points=self._points, values=values)
        questions = [self._ask(place, request) for place in range(len(self.homes))]
        pauses = [decode_pause(question.wait()) for question in questions]
        self._points += 1
        return all(pause.complete for pause in pauses)

    def _ask(self, place: int, request: Request) -> _Question:
        part = self.homes[place].slice
        into = self._parameters[part.first : part.end] if request.values else None
        return _Question(self, place, request, into=into)

    def ask(
        self, place: int, request: Request, gradient: Tensor | None, into: Tensor | None
    ) -> tuple[list[Handle], list[Handle]]:
        """What arrives, and what is on its way to, the server of the slice at `place`."""
        transport, rank = self._transport, self.server_of(place)
        stands_in = place in self._stands_in
        arriving, sending = [], []
        if request.kind is not Kind.LEAVE:
            tag = Tag.BACKUP_ANSWER if stands_in else Tag.ANSWER
            arriving.append(transport.receive(rank, tag))
        if into is not None:
            tag = Tag.BACKUP_VALUES if stands_in else Tag.VALUES
            arriving.append(transport.receive(rank, tag, into))
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT))
        sending.append(transport.send(encode_request(place, request), rank, Tag.REQUEST))
        return arriving, sending

    def server_of(self, place: int) -> int:
        """The rank that serves the slice at `place` now."""
        return self.homes[(place + (place in self._stands_in)) % len(self.homes)].rank

    def turn_from(self, lost: PeerLost, place: int) -> None:
        """Ask the next server from now on; raises `lost` where there is none."""
        next_rank = self.homes[(place + 1) % len(self.homes)].rank
        if (
            lost.rank != self.server_of(place)
            or place in self._stands_in
            or next_rank in self._transport.lost()
        ):
            raise lost
        self._stands_in.add(place)


class _Question:
    """A request under way to whoever serves the slice at `place`."""

    def __init__(
        self,
        client: ReplicatedClient,
        place: int,
        request: Request,
        *,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> None:
        self._client = client
        self._place = place
        self._asked = (request, gradient, into)
        self._arriving, self._sending = client.ask(place, *self._asked)

    def wait(self) -> Tensor:
        """The head of the reply, or the values where they come alone."""
        while True:
            try:
                for handle in self._sending:
                    handle.wait()
                first, *_ = [handle.wait() for handle in self._arriving]
                return first
            except PeerLost as lost:
                self._client.turn_from(lost, self._place)
                self._arriving, self._sending = self._client.ask(self._place, *self._asked)
