"""A rank's connection to the parameter servers: its client, the slice that it serves, or both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.rest import Reason, Rest
from orchestra.exchange.agreement import agree_on_parameters, broadcast_buffers
from orchestra.exchange.compression import CompressionState, SliceCodec
from orchestra.exchange.consensus import Learnt, take_consensus
from orchestra.exchange.parts import PartsClient
from orchestra.exchange.servers import ServerRules, make_server
from orchestra.exchange.slices import learnt_slices
from orchestra.optimizers.spec import OptimizerPart
from orchestra.optimizers.state import restore
from orchestra.parameter_server.client import Client, Encode
from orchestra.parameter_server.messages import Answer, Push, QuietPoint
from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.server import Server
from orchestra.worker.worker import Worker

if TYPE_CHECKING:
    from orchestra.transports.protocol import Task


@dataclass(eq=False)
class ServerChannel:
    """A worker has a `client`, a server its slice; a rank that is both has both.

    `flow` is the background flow of a server beside a worker. `parts` pushes and pulls while the
    worker computes. `compression` keeps what pushes have left out. Checkpoints keep the state of
    client, server and compression.
    """

    worker: Worker
    slices: Sequence[Slice]
    workers: tuple[int, ...]
    leader: int
    rules: ServerRules
    client: Client | None = field(init=False, default=None)
    server: Server | None = field(init=False, default=None)
    compression: CompressionState | None = field(init=False, default=None)
    parts: PartsClient | None = field(init=False, default=None)
    flow: Task[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.worker.rank in self.servers:
            self.server = self._make_server()
        if self.worker.rank in self.workers:
            self.client = self._make_client()

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, at rest."""
        state = {"client": self.client, "server": self.server, "compression": self.compression}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        for name, value in self.state_dict().items():
            restore(value, saved[name])

    def open(self) -> None:
        """Begin to push while the worker computes, and to serve beside it, unless that goes on."""
        worker, rules = self.worker, self.rules
        if self.client is None:
            return
        if rules.parts and self.parts is None:
            self.parts = PartsClient(
                worker,
                self.client,
                rules.parts,
                apply_per_part=rules.apply_per_part,
                averages=not rules.application.holds_model,
            )
        if self.server is not None and self.flow is None:
            self.flow = worker.transport.spawn(self.server.serve_to_the_end)

    @property
    def servers(self) -> list[int]:
        """The ranks that own slices."""
        return [part.rank for part in self.slices]

    def _make_server(self) -> Server:
        return make_server(self.worker, self.slices, self.workers, self.rules)

    def _make_client(self) -> Client:
        return Client(self.worker.transport, self.slices, *self._queue_and_codec())

    def _queue_and_codec(self) -> tuple[BatchQueue | None, Encode | None]:
        """Return the queue of a worker's batches, and what encodes its pushes, if there are any."""
        worker, rules, queue, encode = self.worker, self.rules, None, None
        if rules.queue_shares is not None:
            queue = worker.make_queue(rules.queue_shares)
        if rules.compression is not None:
            self.compression = CompressionState.of(worker, rules.compression)
            codec = SliceCodec(worker, rules.compression)
            encode = partial(codec.encode_push, self.slices, self.compression)
        return queue, encode

    def collect(self) -> None:
        """Gather the gradient into the flat vector, weighted if servers add it up by parts."""
        self.worker.gradients.collect_rest(1.0 if self.parts is None else self.parts.weight)

    def push(self, *, into: Tensor) -> list[Answer]:
        """Push the gradient of this step; pull flat `into`; return the servers' answers.

        `parts` knows by itself where to pull to.
        """
        step, gradients, kept = self.worker.step, self.worker.gradients, self.compression
        assert self.client is not None
        if kept is not None and step.samples and not kept.used.is_meta:
            flags = kept.used.new_tensor(gradients.used)
            kept.note_used(flags)
            gradients.used = [flag > 0 for flag in flags.tolist()]
        push = Push(
            self.worker.rank, self.client.clock + 1, step.samples, step.total_samples, step.loss,
            step.stop, step.rates, tuple(gradients.used), step.position, step.report,
            step.options,
        )  # fmt: skip
        if self.parts is not None:
            answers = self.parts.push(push)
        else:
            answers = self.client.push(push, gradients.vector, into)
        for part, answer in zip(self.slices, answers, strict=True):
            # What any worker has used is used on all: each optimizer passes over the same ones.
            for piece, used in zip(part.pieces, answer.used, strict=True):
                gradients.used[piece.tensor] = used
        return answers

    def serve(self) -> QuietPoint | None:
        """On a rank without data, serve until a quiet point; None once all workers have left."""
        assert self.server is not None
        paused = self.server.serve(self.worker.transport, self.worker.observe)
        self.worker.step.consumed = self.server.own.state.consumed
        return paused

    def rest(self, rest: Rest) -> bool:
        """Wait, on a worker, until every push is applied and every worker is here; at the end,
        leave. Collective over all ranks.

        Return False if some workers have left.
        """
        complete = True
        # All are at the end of the run when it ends, and servers see them leave.
        if self.client is not None and rest.reason is not Reason.END:
            if self.parts is not None:
                self.parts.settle()
            complete = self.client.pause(rest)
        if rest.reason.ends:
            self._leave()
        return complete

    def _leave(self) -> None:
        if self.parts is not None:
            self.parts.close()
        if self.client is not None:
            self.client.leave()
        if self.flow is not None:
            self.flow.wait()
        elif self.server is not None:
            self.server.serve_to_the_end(self.worker.transport)

    def learnt(self) -> Iterable[Learnt]:
        """Return the slices of the model, each of which its server owns, unless workers have it."""
        if not self.rules.application.holds_model:
            return ()
        return learnt_slices(self.worker, self.slices, self.server)

    def take_model(self, *, tolerant: bool) -> None:
        """Collective over all ranks, at rest: let all take the model. See `take_consensus`."""
        worker, rules = self.worker, self.rules
        if not rules.application.holds_model:
            agree_on_parameters(worker)  # servers without data have no model
        else:
            take_consensus(worker, self.learnt(), tolerant=tolerant)
            if self.server is not None:
                self.server.own.all_have_read()
            if rules.when.lockstep:
                broadcast_buffers(worker, worker.everyone)

    @property
    def optimizer_parts(self) -> Sequence[OptimizerPart]:
        """The optimizers of this rank's slices."""
        return () if self.server is None else self.server.optimizer_parts()
