"""The base of strategies whose workers exchange with parameter servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from orchestra import exchange, optimizers, parameter_server
from orchestra.errors import InputError
from orchestra.strategies.base import Footprint, Roles, Strategy

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from orchestra.optimizers.spec import OptimizerPart
    from orchestra.parameter_server.placement import Slice
    from orchestra.transports.protocol import Task
    from orchestra.worker.worker import Worker

NOTHING = Footprint(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a rank without data that serves nothing."""


@dataclass
class ServerStrategyState:
    """A worker has a client, a server its slice; a rank that is both has both.

    `flow` is the background flow of a server beside a worker. `optimizer` is the worker's own,
    where the servers run none. `parts` pushes and pulls while the worker computes.
    """

    slices: list[Slice] = field(metadata=optimizers.TRANSIENT)
    client: parameter_server.Client | None = None
    parts: exchange.PartsClient | None = field(default=None, metadata=optimizers.TRANSIENT)
    server: parameter_server.Server | None = None
    flow: Task[None] | None = field(default=None, metadata=optimizers.TRANSIENT)
    optimizer: Optimizer | None = None
    compression: exchange.CompressionState | None = None


V = TypeVar("V", bound=ServerStrategyState)


@dataclass(frozen=True, repr=False)
class ServerStrategy(Strategy[V]):
    """Servers own slices of the parameters; they serve until all workers pause or have left."""

    def push_and_pull(self, worker: Worker, state: V, into: Tensor) -> None:
        """Push this step's gradient; pull flat `into`; note what the servers say of the step.

        `state.parts` knows by itself where to pull to.
        """
        step, gradients = worker.step, worker.gradients
        client, kept = state.client, state.compression
        assert client is not None
        if kept is not None and step.samples and not kept.used.is_meta:
            flags = kept.used.new_tensor(gradients.used)
            kept.note_used(flags)
            gradients.used = [flag > 0 for flag in flags.tolist()]
        push = parameter_server.Push(
            worker.rank, client.clock + 1, step.samples, step.total_samples, step.loss, step.stop,
            step.rates, tuple(gradients.used), step.position, step.report,
        )  # fmt: skip
        vector, parts = gradients.vector, state.parts
        answers = parts.push(push) if parts else client.push(push, vector, into)
        if self.synchronous:
            step.loss, step.stop = answers[0].loss, any(answer.stop for answer in answers)
            step.agreed = True
        else:
            step.consumed = max(answer.consumed for answer in answers)
            step.staleness = tuple(answer.staleness for answer in answers if not answer.dropped)
            worker.measures.staleness.extend(step.staleness)
            worker.measures.dropped += any(answer.dropped for answer in answers)
        for part, answer in zip(client.slices, answers, strict=True):
            # What any worker has used is used on all: each optimizer passes over the same ones.
            for piece, used in zip(part.pieces, answer.used, strict=True):
                gradients.used[piece.tensor] = used

    def serve(self, worker: Worker, state: V) -> parameter_server.Pause | None:
        assert state.server is not None
        paused = state.server.serve(worker.transport, worker.observe)
        worker.step.consumed = state.server.own.state.consumed
        return paused

    def quiesce(self, worker: Worker, state: V, step: int) -> bool:
        """Wait until every push is applied and every worker is here."""
        assert state.client is not None
        if state.parts is not None:
            state.parts.settle()
        return state.client.pause(step)

    def agree(self, worker: Worker, state: V) -> None:
        """Copy the servers' slices into everybody's parameters."""
        exchange.collect_slices(worker, state.slices, state.server)

    def stop(self, worker: Worker, state: V) -> None:
        """Workers leave; then agree."""
        if state.parts is not None:
            state.parts.close()
        if state.client is not None:
            state.client.leave()
        if state.flow is not None:
            state.flow.wait()
        elif state.server is not None:
            state.server.serve_to_the_end(worker.transport)
        self.agree(worker, state)

    def optimizer_parts(self, worker: Worker, state: V) -> list[OptimizerPart]:
        return [] if state.server is None else state.server.optimizer_parts()


def placed_roles(name: str, ranks: int, servers: int, placement: str, replicas: int = 0) -> Roles:
    """Return the roles with `servers` "dedicated" or "beside" workers, for the strategy `name`."""
    beside = placement == "beside"
    if beside and servers > ranks:
        raise InputError(
            f"{name}: {servers} servers beside workers need as many ranks, "
            f"not {ranks}: lower servers or raise ranks"
        )
    if beside and replicas and servers == ranks:
        raise InputError(
            f"{name}: {servers} servers beside {ranks} workers leave none "
            "that could evaluate after any server's death: lower servers or raise ranks"
        )
    workers = ranks if beside else ranks - servers
    if workers < 1:
        raise InputError(
            f"{name}: {ranks} ranks with {servers} dedicated servers leave no "
            "worker: raise ranks, lower servers, or set placement='beside'"
        )
    owners = range(servers) if beside else range(workers, ranks)
    shares = (1.0,) * workers + (0.0,) * (ranks - workers)
    return Roles(shares, tuple(owners), replicas=replicas)
