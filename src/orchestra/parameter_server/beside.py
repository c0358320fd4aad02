"""A server on a worker's rank: both are flows of that rank, and share the memory of the slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from orchestra.parameter_server.held_slice import HeldSlice, Neighbour
from orchestra.parameter_server.messages import Answer, QuietPoint, Request
from orchestra.parameter_server.server import Server
from orchestra.transports.background import Begun, Turns
from orchestra.transports.protocol import Pending, Transport


class ServerBeside(Server):
    """Serves the slice `own`, and takes the pushes of the worker on this rank without messages.

    That worker pushes in its own flows, which take turns with the flow of the server: gradients are
    read from where the worker has them, and values are copied to where it wants them. Its other
    requests, at a rest or without work, are messages: the server's flow waits for these anyhow.
    """

    flow: Pending[None]
    """The server's own flow, from `open` on."""

    def __init__(self, own: HeldSlice, transport: Transport) -> None:
        super().__init__(own)
        self._hand_over = transport.new_hand_over()
        self._turns = Turns(self._hand_over)
        self._neighbour = own.neighbour = Neighbour(transport.rank)
        self._answer: Answer | None = None  # to the worker's push
        self._parts: set[int] = set()  # whose values the worker has
        self._error: BaseException | None = None

    def open(self, transport: Transport) -> Pending[None]:
        """Begin to serve in the background."""
        self.flow = super().open(transport)
        return self.flow

    def serve_to_the_end(self, transport: Transport) -> None:
        """Serve until no worker needs anything more."""
        try:
            super().serve_to_the_end(transport)
        except BaseException as error:
            # Else the worker would wait for ever.
            self._hand_over.tell(partial(setattr, self, "_error", error), transport.traffic)
            raise

    def push(
        self, transport: Transport, request: Request, gradient: Tensor | None, into: Tensor | None
    ) -> Callable[[], Answer]:
        """Take a push of the worker; it gets values in `into`.

        Neither may be changed before the answer is there. Returns a function that waits for it.
        """
        transport.handle()
        with self._turn(transport):
            self._neighbour.into = into
            if gradient is not None:
                gradient = self.own.copy_unless_read_only(gradient)
            decision = self.own.take(transport, request, gradient)
            self.own.reply(transport, decision)
        # Most answers are there at once.
        if self._answer is not None:
            return self._take_answer

        def wait(begun: Begun) -> None:
            self._wait_until(lambda: self._answer is not None, transport)
            begun.result = self._take_answer()

        return transport.done_by(self.flow, wait).wait

    def push_part(
        self, transport: Transport, request: Request, gradient: Tensor, into: Tensor
    ) -> None:
        """Take the next part of a push of the worker; it gets values in `into`; see `part`.

        Neither may be changed before these are there.
        """
        transport.handle()
        self._neighbour.into_parts[request.step] = into
        self._take_part(transport, request, gradient)

    def part(self, transport: Transport, number: int) -> Pending[None]:
        """Return a task that ends when the worker has the values of a part."""

        def wait(begun: Begun) -> None:
            self._wait_until(lambda: number in self._parts, transport)
            self._parts.discard(number)

        return transport.done_by(self.flow, wait)

    def _take(
        self, transport: Transport, request: Request, gradient: Tensor | None
    ) -> QuietPoint | None:
        with self._turn(transport):
            return super()._take(transport, request, gradient)

    def _take_part(self, transport: Transport, request: Request, gradient: Tensor) -> None:
        with self._turn(transport):
            super()._take_part(transport, request, gradient)

    @contextmanager
    def _turn(self, transport: Transport) -> Iterator[None]:
        transport.take_turn(self._turns)
        try:
            yield
        finally:
            self._turns.end(transport.traffic, self._publish)

    def _publish(self) -> None:
        """Show the worker what it was given in this turn, now that others were given theirs."""
        neighbour = self._neighbour
        if neighbour.answer is not None:
            self._answer, neighbour.answer = neighbour.answer, None
        self._parts |= neighbour.parts
        neighbour.parts.clear()

    def _take_answer(self) -> Answer:
        answer, self._answer = self._answer, None
        assert answer is not None
        return answer

    def _wait_until(self, condition: Callable[[], bool], transport: Transport) -> None:
        """Block until the server has done something. Raises what its flow has raised."""
        self._hand_over.wait_until(
            lambda: condition() or self._error is not None, transport.traffic
        )
        if self._error is not None and not condition():
            raise self._error
