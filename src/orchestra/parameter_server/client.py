"""A worker's side: push slices of the gradient, pull slices of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orchestra.coordinator.batches import BatchQueue, WorkInHand
from orchestra.coordinator.events import Instruction, Take, Wait, instruction_of
from orchestra.coordinator.rest import Rest
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
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

Encode = Callable[[Push, Tensor], Sequence[Tensor]]
"""Makes the payload of each slice from a push and its flat gradient."""


class Client:
    """Pushes to every server and waits for every answer.

    Where batches come from a `queue`, each answer brings what this worker does next, which `work`
    holds and `take` gives. Pushes travel as they are, or as `encode` makes them.
    """

    def __init__(
        self,
        transport: Transport,
        slices: Sequence[Slice],
        queue: BatchQueue | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.slices = slices
        self.encode = encode
        self.clock = 0  # the step that this worker has behind it
        self.work = None if queue is None else WorkInHand(queue, transport.rank)
        self._waits = 0  # answers that held no work
        self._has_to_wait = False
        self._transport = transport

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
            vectors = [gradient, into]
            if len(self.slices) > 1:
                vectors = [v if v is None else v[part.first : part.end] for v in vectors]
            if payloads is not None:
                vectors[0] = payloads[place]
            waits.append(self._ask(place, self._request(Kind.PUSH, own), *vectors))
        answers = [decode_answer(push.worker, wait()) for wait in waits]
        # Every server counts the same pushes, so that all clocks are equal.
        self.clock = answers[0].clock
        if self.work is not None:
            assert answers[0].work is not None
            self.work.next = answers[0].work
        return answers

    def pause(self, rest: Rest) -> bool:
        """Push no more until every worker has paused too. True if none has left."""
        request = self._request(Kind.PAUSE, step=rest.code)
        waits = [self._ask(place, request) for place in range(len(self.slices))]
        points = [decode_quiet_point(wait()) for wait in waits]
        return all(point.complete for point in points)

    def leave(self) -> None:
        """Push no more."""
        message = encode_request(self._request(Kind.LEAVE, step=self.clock))
        for part in self.slices:
            self._transport.send(message, part.rank, Tag.REQUEST).wait()

    def _request(self, kind: Kind, push: Push | None = None, step: int = 0) -> Request:
        return Request(self._transport.rank, kind, push, step)

    def _ask(
        self,
        place: int,
        request: Request,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Send `request` to the server of the slice at `place`, and take its values `into` memory.

        Returns a function that waits for the head of the reply.
        """
        transport, rank = self._transport, self.slices[place].rank
        # Receives are posted before the request, so that values land in place, without a copy.
        arriving = [transport.receive(rank, Tag.ANSWER)]
        if into is not None:
            arriving.append(transport.receive(rank, Tag.VALUES, into))
        # The request comes last: a server that reads it has the whole gradient, and never waits
        # for the rest of one whose worker was suspended in mid-message.
        sending = []
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT, more=True))
        sending.append(transport.send(encode_request(request), rank, Tag.REQUEST))

        def wait() -> Tensor:
            # Sends first: no answer comes before its request has gone.
            for handle in sending:
                handle.wait()
            head, *_ = [handle.wait() for handle in arriving]
            return head

        return wait
