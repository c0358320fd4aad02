"""The loop of a server: it receives requests, lets its slice take them, and replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.optimizers.spec import OptimizerPart
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.messages import Kind, QuietPoint, Request, decode_request
from orchestra.transports.protocol import Pending, Transport
from orchestra.transports.tags import Tag


class Server:
    """Serves the slice `own` to workers on other ranks."""

    def __init__(self, own: HeldSlice) -> None:
        self.own = own

    @property
    def expected(self) -> Set[int]:
        """The workers that may still want something."""
        return self.own.state.live

    def open(self, transport: Transport) -> Pending[None]:
        """Begin to serve in the background, while the worker on this rank trains."""
        return transport.spawn(self.serve_to_the_end)

    def serve_to_the_end(self, transport: Transport) -> None:
        """Serve until no worker needs anything more."""
        while self.expected:
            self.serve(transport)

    def serve(
        self, transport: Transport, observe: Callable[[], None] = lambda: None
    ) -> QuietPoint | None:
        """Serve until nothing is in flight; return the quiet point. None if all workers are done.

        `observe` is called after each request.
        """
        quiet = None
        self._expect_pushes(transport)
        while self.expected and quiet is None:
            try:
                # From any rank: a suspended worker must not hold up the others.
                handle = transport.receive(None, Tag.REQUEST)
                message = handle.wait()
            except PeerLost as lost:
                quiet = self._lose(transport, lost)
            else:
                quiet = self._hear(transport, handle.source, message)
                observe()
        self._finish_sending()
        return quiet

    def _expect_pushes(self, transport: Transport) -> None:
        self.own.expect_pushes(transport)

    def _finish_sending(self) -> None:
        self.own.finish_sending()

    def _hear(self, transport: Transport, source: int, message: Tensor) -> QuietPoint | None:
        """Carry out a request; return the quiet point that it leads to, if any."""
        own, request = self.own, decode_request(message, source)
        if request.kind is Kind.PART:
            self._take_part(transport, request, transport.receive(source, Tag.GRADIENT).wait())
            return None
        gradient = None
        if request.kind is Kind.PUSH and not own.apply_per_part:
            gradient = own.receive(transport, source)
        if source not in own.state.live:
            return None  # it is lost, and its loss came first
        return self._take(transport, request, gradient)

    def _lose(self, transport: Transport, lost: PeerLost) -> QuietPoint | None:
        """Go on without a worker, if the rule can; return the quiet point that follows, if any."""
        own = self.own
        if lost.rank not in own.state.live:
            return None
        if not own.state.when.tolerates_loss:
            raise lost
        return self._take(transport, Request(lost.rank, Kind.LOST), None)

    def _take(
        self, transport: Transport, request: Request, gradient: Tensor | None
    ) -> QuietPoint | None:
        decision = self.own.take(transport, request, gradient)
        self.own.reply(transport, decision)
        return decision.quiet if self.own.state.live else None

    def _take_part(self, transport: Transport, request: Request, gradient: Tensor) -> None:
        self.own.take_part(transport, request, gradient)

    def optimizer_parts(self) -> list[OptimizerPart]:
        """Return the optimizers of the slices that are held here."""
        return self.own.application.optimizer_parts()

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        return self.own.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.own.load_state_dict(saved)
