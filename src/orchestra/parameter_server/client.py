"""A worker's side: push slices of the gradient, pull slices of the parameters.

Where each slice has a replica, a worker that loses a server asks the next one again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orchestra.coordinator.batches import BatchQueue, WorkInHand
from orchestra.coordinator.events import Instruction, Take, Wait, instruction_of
from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import PeerLost
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    Request,
    decode_answer,
    decode_quiet_point,
    encode_request,
)
from orchestra.parameter_server.placement import Slice
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag


class Client:
    """Pushes to every server and waits for every answer.

    Where batches come from a `queue`, each answer brings what this worker does next, which `work`
    holds and `take` gives. Where slices have replicas, flat `parameters` take the values that all
    workers agree on, and a request that a lost server has not answered goes to the one after it.
    """

    def __init__(
        self,
        transport: Transport,
        slices: Sequence[Slice],
        queue: BatchQueue | None = None,
        parameters: Tensor | None = None,
        encode: Callable[[Push, Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        self.slices = slices
        self.encode = encode
        self.clock = 0  # the step that this worker has behind it
        self.work = None if queue is None else WorkInHand(queue, transport.rank)
        self._waits = 0  # answers that held no work
        self._has_to_wait = False
        self._transport = transport
        self._parameters = parameters
        self._points = 0  # quiet points behind this worker
        self._failed_over: set[int] = set()  # slices that the next server serves
        self._has_left = False

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        return {"clock": self.clock}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.clock = saved["clock"]

    def take(self) -> Instruction:
        """Return the next instruction; the one before is done."""
        assert self.work is not None
        if self._has_to_wait:
            self._waits += 1
            # The first server holds the coordinator.
            wait = self._ask(0, self._request(Kind.WAIT, step=self._waits))
            self.work.next = instruction_of(wait().tolist())
        instruction = self.work.take()
        self._has_to_wait = isinstance(instruction, Wait)
        return instruction

    def skip(self, values: Tensor) -> None:
        """Push nothing for the last batch, and pull flat `values`."""
        assert self.work is not None
        item, rank = self.work.next, self._transport.rank
        assert isinstance(item, Take)
        used = (False,) * (1 + max(number for part in self.slices for number in part.tensors))
        nothing = Push(rank, self.clock + 1, 0, item.samples, 0.0, False, (), used, item.start)
        self.push(nothing, values, values)  # a server answers when it has read all of them

    def push(
        self, push: Push, gradient: Tensor | None = None, into: Tensor | None = None
    ) -> list[Answer]:
        """Push flat `gradient`, pull flat `into`; return the servers' answers, in their order.

        `push` tells of the whole gradient; its `used` has one entry for each tensor of the model.
        Without tensors the gradient has been pushed in parts, and somebody else pulls.
        """
        waits = []
        payloads = None
        if self.encode is not None and gradient is not None:
            payloads = self.encode(push, gradient)
        for place, part in enumerate(self.slices):
            own = push._replace(used=tuple(map(push.used.__getitem__, part.tensors)))
            request = self._request(Kind.PUSH, own)
            vectors = [gradient, into]
            if len(self.slices) > 1:
                vectors = [v if v is None else v[part.first : part.end] for v in vectors]
            if payloads is not None:
                vectors[0] = payloads[place]
            waits.append(self._ask(place, request, *vectors))
        answers = [decode_answer(push.worker, wait()) for wait in waits]
        # Every server counts the same pushes, so that all clocks are equal.
        self.clock = answers[0].clock
        if self.work is not None:
            assert answers[0].work is not None
            self.work.next = answers[0].work
        return answers

    def pause(self, rest: Rest, *, values: bool = False) -> bool:
        """Push no more until every worker has paused too. True if none has left."""
        request = self._request(Kind.PAUSE, step=rest.code, points=self._points, values=values)
        waits = [self._ask(place, request) for place in range(len(self.slices))]
        pauses = [decode_quiet_point(wait()) for wait in waits]
        self._points += 1
        return all(pause.complete for pause in pauses)

    def agree(self) -> None:
        """With replicas, at a quiet point: let all workers take the same values.

        Nothing is to be done where they took them on leaving.
        """
        if not self._has_left:
            self.pause(Rest(Reason.AGREEMENT), values=True)

    def leave(self) -> None:
        """Push no more; with replicas, take the values that are there when all have left."""
        places = range(len(self.slices))
        if self._parameters is None:
            for place in places:
                self._send(self._request(Kind.LEAVE, step=self.clock), place).wait()
            return
        request = self._request(Kind.LEAVE, values=True)
        for wait in [self._ask(place, request) for place in places]:
            wait()
        for place in places:
            with contextlib.suppress(PeerLost):
                self._send(self._request(Kind.DONE), place).wait()
        self._has_left = True

    def _request(self, kind: Kind, push: Push | None = None, **more: Any) -> Request:
        return Request(self._transport.rank, kind, push, **more)

    def _send(self, request: Request, place: int, to: int | None = None) -> Handle:
        """Begin to send a request about the slice at `place`, to its owner or another rank."""
        message = encode_request(request, None if self._parameters is None else place)
        rank = self.slices[place].rank if to is None else to
        return self._transport.send(message, rank, Tag.REQUEST)

    def _ask(
        self,
        place: int,
        request: Request,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Send `request` to whoever serves the slice at `place`.

        Returns a function that waits for the head of the reply, or for values that come alone.
        """
        if request.values and self._parameters is not None:
            into = self._parameters[self.slices[place].first : self.slices[place].end]
        under_way = self._begin(place, request, gradient, into)

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
                    under_way = self._begin(place, request, gradient, into)

        return wait

    def _begin(
        self, place: int, request: Request, gradient: Tensor | None, into: Tensor | None
    ) -> tuple[list[Handle], list[Handle]]:
        """Begin the receives and sends of a request."""
        transport, rank = self._transport, self._server_of(place)
        answer, values = Tag.ANSWER, Tag.VALUES
        if place in self._failed_over:
            answer, values = Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES
        arriving, sending = [], []
        # Receives are posted before the request, so that values land in place, without a copy.
        if request.kind is not Kind.LEAVE:
            arriving.append(transport.receive(rank, answer))
        if into is not None:
            arriving.append(transport.receive(rank, values, into))
        # The request comes last: a server that reads it has the whole gradient, and never waits
        # for the rest of one whose worker was suspended in mid-message.
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT, more=True))
        sending.append(self._send(request, place, rank))
        return arriving, sending

    def _server_of(self, place: int) -> int:
        """Return the rank that serves the slice at `place` now."""
        return self.slices[(place + (place in self._failed_over)) % len(self.slices)].rank

    def _fail_over(self, lost: PeerLost, place: int) -> None:
        """Ask the next server from now on; raise `lost` where there is none."""
        next_rank = self.slices[(place + 1) % len(self.slices)].rank
        if (
            self._parameters is None
            or lost.rank != self._server_of(place)
            or place in self._failed_over
            or next_rank in self._transport.lost()
        ):
            raise lost
        self._failed_over.add(place)
