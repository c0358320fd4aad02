"""A rank's connection to parameter servers: its end as a worker, its own server, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestra.coordinator.rest import Rest
from orchestra.exchange.agreement import agree_on_parameters, broadcast_buffers
from orchestra.exchange.channel import ServerChannel
from orchestra.exchange.consensus import Learnt, take_consensus
from orchestra.exchange.parts import PartedChannel
from orchestra.exchange.servers import ServerRules, make_server
from orchestra.exchange.slices import learnt_slices
from orchestra.optimizers.spec import OptimizerPart
from orchestra.optimizers.state import restore
from orchestra.parameter_server.beside import ServerBeside
from orchestra.parameter_server.messages import QuietPoint
from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.server import Server
from orchestra.worker.worker import Worker

if TYPE_CHECKING:
    from orchestra.transports.protocol import Pending


@dataclass(eq=False)
class Connection:
    """A worker has a `channel`, a server its slice; a rank that is both has both.

    `flow` is the background flow of a server on a worker's rank. Checkpoints keep the state of
    channel and server.
    """

    worker: Worker
    slices: Sequence[Slice]
    workers: tuple[int, ...]
    leader: int
    rules: ServerRules
    channel: ServerChannel | None = field(init=False, default=None)
    server: Server | None = field(init=False, default=None)
    flow: Pending[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.worker.rank in self.servers:
            self.server = self._make_server()
        if self.worker.rank in self.workers:
            self.channel = self._make_channel()

    def _make_server(self) -> Server:
        return make_server(self.worker, self.slices, self.workers, self.rules)

    def _make_channel(self) -> ServerChannel:
        worker, slices, rules = self.worker, self.slices, self.rules
        beside = self.server if isinstance(self.server, ServerBeside) else None
        if rules.parts:
            return PartedChannel(worker, slices, rules, beside)
        return ServerChannel(worker, slices, rules.queue_shares, rules.compression, beside)

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, at rest."""
        state = {"channel": self.channel, "server": self.server}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        for name, value in self.state_dict().items():
            restore(value, saved[name])

    @property
    def servers(self) -> list[int]:
        """The ranks that own slices."""
        return [part.rank for part in self.slices]

    def open(self) -> None:
        """On a worker's rank, open the channel, and begin to serve in the background if it has a
        server that does not serve yet."""
        if self.channel is None:
            return
        self.channel.open()
        if self.server is not None and self.flow is None:
            self.flow = self.server.open(self.worker.transport)

    def serve(self) -> QuietPoint | None:
        """On a rank without data, serve until a quiet point; None once all workers have left."""
        assert self.server is not None
        paused = self.server.serve(self.worker.transport, self.worker.observe)
        self.worker.step.consumed = self.server.own.state.consumed
        return paused

    def rest(self, rest: Rest) -> bool:
        """Wait until nothing is in flight; at the end, leave, and serve all who are to leave yet.
        Then let all take the model, if that comes next.

        Collective over all ranks. Return False if some workers have left.
        """
        complete = self.channel is None or self.channel.rest(rest)
        if rest.reason.ends:
            if self.flow is not None:
                self.flow.wait()
            elif self.server is not None:
                self.server.serve_to_the_end(self.worker.transport)
        if rest.reason.takes_model:
            self.take_model()
        return complete

    @property
    def owes(self) -> bool:
        """True if a batch of a lost worker is to be done again, as far as this rank knows."""
        coordinator = None if self.server is None else self.server.own.state.coordinator
        return coordinator is not None and coordinator.owes

    def learnt(self) -> Sequence[Learnt]:
        """Return the slices of the model, each owned by its server; () where workers have the
        model."""
        if not self.rules.application.holds_model:
            return ()
        return learnt_slices(self.worker, self.slices, self.server)

    def take_model(self) -> None:
        """Collective over all ranks, at rest: let all take the model."""
        worker, rules = self.worker, self.rules
        if not rules.application.holds_model:
            agree_on_parameters(worker)  # servers without data have no model
            return
        # Where nobody waits for a worker, the run goes on without it.
        take_consensus(worker, self.learnt(), tolerant=not rules.when.lockstep)
        if self.server is not None:
            self.server.own.all_have_read()
        if rules.when.lockstep:
            broadcast_buffers(worker, worker.everyone)

    @property
    def optimizer_parts(self) -> Sequence[OptimizerPart]:
        """The optimizers of this rank's slices."""
        return () if self.server is None else self.server.optimizer_parts()
