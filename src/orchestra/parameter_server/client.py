"""A worker's side: push slices of the gradient, pull slices of the parameters.

Where each slice has a replica, a worker that loses a server asks the next one again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.state import Answer, Push
from orchestra.parameter_server.wire import (
    Kind,
    Request,
    decode_answer,
    decode_pause,
    decode_work,
    encode_push,
    encode_request,
    request,
)
from orchestra.schedules.work_queue import Kind as WorkKind
from orchestra.schedules.work_queue import WorkInHand, WorkItem, WorkQueue
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


@dataclass(frozen=True)
class Home:
    """A server as its workers know it."""

    rank: int
    slice: Slice


class Client:
    """Pushes to every server and waits for every answer.

    Where batches come from a queue, each answer brings what this worker does next, which `work`
    holds and `take` gives.
    """

    def __init__(
        self, transport: Transport, homes: Sequence[Home], queue: WorkQueue | None = None
    ) -> None:
        self.homes = homes
        self.clock = 0  # the step that this worker has behind it
        self.work = None if queue is None else WorkInHand(queue, transport.rank)
        self._has_to_wait = False
        self._waits = 0  # answers that held no work
        self._transport = transport

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        return {"clock": self.clock}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.clock = saved["clock"]

    def take(self) -> WorkItem:
        """The next item of work; the one before is done."""
        assert self.work is not None
        if self._has_to_wait:
            self._waits += 1
            self.work.item = self._wait_for_work()
        item = self.work.take()
        self._has_to_wait = item.kind is WorkKind.WAIT
        return item

    def skip(self, values: Tensor) -> None:
        """A push of nothing for the last item; `values`, flat, are pulled."""
        assert self.work is not None
        item = self.work.item
        self.push(
            values,
            values,  # a server answers when it has read all of them
            samples=0,
            step_samples=item.samples,
            loss=0.0,
            stop=False,
            rates=(),
            used=[False] * (1 + max(n for home in self.homes for n in home.slice.tensors)),
            position=item.start,
        )

    def _wait_for_work(self) -> WorkItem:
        server = self.homes[0].rank
        self._transport.send(request(Kind.WAIT, self._waits), server, Tag.REQUEST).wait()
        return decode_work(self._transport.receive(server, Tag.ANSWER).wait())

    def push(
        self,
        gradient: Tensor,
        into: Tensor,
        *,
        samples: int,
        step_samples: int,
        loss: float,
        stop: bool,
        rates: tuple[float, ...],
        used: Sequence[bool],
        position: int | None = None,
        report: tuple[float, ...] = (),
    ) -> list[Answer]:
        """Push flat `gradient`, pull flat `into`; the servers' answers, in their order."""
        pushes = []
        for home in self.homes:
            flags = tuple(map(used.__getitem__, home.slice.tensors))
            push = Push(
                self._transport.rank, self.clock + 1, samples, step_samples, loss, stop,
                rates, flags, position, report,
            )  # fmt: skip
            pushes.append(push)
        answers = self._exchange(pushes, gradient, into)
        self.clock = answers[0].clock
        if self.work is not None:
            assert answers[0].work is not None
            self.work.item = answers[0].work
        return answers

    def _exchange(self, pushes: Sequence[Push], gradient: Tensor, into: Tensor) -> list[Answer]:
        sending = []
        arriving = []
        for home, push in zip(self.homes, pushes, strict=True):
            first, end = home.slice.first, home.slice.end
            head = self._transport.receive(home.rank, Tag.ANSWER)
            body = self._transport.receive(home.rank, Tag.VALUES, into[first:end])
            arriving.append((head, body))
            # The request comes last: a server that reads it has the whole gradient, and never
            # waits for the rest of one whose worker was suspended in mid-message.
            sending.append(self._transport.send(gradient[first:end], home.rank, Tag.GRADIENT))
            sending.append(self._transport.send(encode_push(push), home.rank, Tag.REQUEST))
        answers = []
        for head, body in arriving:
            answers.append(decode_answer(self._transport.rank, head.wait()))
            body.wait()
        for handle in sending:
            handle.wait()  # all has gone: a server answers what it has read to the end
        return answers

    def pause(self, step: int) -> bool:
        """Push no more until every worker has paused too; whether none has left."""
        for home in self.homes:
            self._transport.send(request(Kind.PAUSE, step), home.rank, Tag.REQUEST).wait()
        answers = [self._transport.receive(home.rank, Tag.ANSWER).wait() for home in self.homes]
        return all(decode_pause(answer).complete for answer in answers)

    def leave(self) -> None:
        """Tell every server that this worker has finished."""
        for home in self.homes:
            self._transport.send(request(Kind.LEAVE, self.clock), home.rank, Tag.REQUEST).wait()


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
        self._failed_over: set[int] = set()  # slices that the next server serves
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
        """Send `request` to the server of the slice at `place`: receives, and sends, under way."""
        transport, rank = self._transport, self.server_of(place)
        failed_over = place in self._failed_over
        arriving, sending = [], []
        if request.kind is not Kind.LEAVE:
            tag = Tag.BACKUP_ANSWER if failed_over else Tag.ANSWER
            arriving.append(transport.receive(rank, tag))
        if into is not None:
            tag = Tag.BACKUP_VALUES if failed_over else Tag.VALUES
            arriving.append(transport.receive(rank, tag, into))
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT))
        sending.append(transport.send(encode_request(place, request), rank, Tag.REQUEST))
        return arriving, sending

    def server_of(self, place: int) -> int:
        """The rank that serves the slice at `place` now."""
        return self.homes[(place + (place in self._failed_over)) % len(self.homes)].rank

    def fail_over(self, lost: PeerLost, place: int) -> None:
        """Ask the next server from now on; raises `lost` where there is none."""
        next_rank = self.homes[(place + 1) % len(self.homes)].rank
        if (
            lost.rank != self.server_of(place)
            or place in self._failed_over
            or next_rank in self._transport.lost()
        ):
            raise lost
        self._failed_over.add(place)


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
                self._client.fail_over(lost, self._place)
                self._arriving, self._sending = self._client.ask(self._place, *self._asked)
