"""The base of strategies with parameter servers, and which settings of these do not go together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from orchestra import exchange, optimizers, parameter_server
from orchestra.errors import InputError
from orchestra.parameter_server.when import When
from orchestra.strategies.base import Roles
from orchestra.strategies.stateful import Stateful
from orchestra.strategies.traits import Footprint

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from orchestra.exchange import Kept, Learnt
    from orchestra.parameter_server.placement import Slice
    from orchestra.strategies.parameter_server import ParameterServer
    from orchestra.transports.protocol import Task
    from orchestra.worker.worker import Worker

NOTHING = Footprint(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of a rank without data that serves nothing."""


@dataclass
class ServerStrategyState:
    """A worker has a client, a server its slice; a rank that is both has both.

    `flow` is the background flow of a server beside a worker. `optimizer` is the worker's own,
    where the servers run none. `parts` pushes and pulls while the worker computes. Under
    `lockstep` the servers' answers hold the mean loss of all workers.
    """

    slices: list[Slice] = field(metadata=optimizers.TRANSIENT)
    client: parameter_server.Client | None = None
    parts: exchange.PartsClient | None = field(default=None, metadata=optimizers.TRANSIENT)
    server: parameter_server.Server | None = None
    flow: Task[None] | None = field(default=None, metadata=optimizers.TRANSIENT)
    optimizer: Optimizer | None = None
    compression: exchange.CompressionState | None = None
    lockstep: bool = field(default=False, metadata=optimizers.TRANSIENT)


V = TypeVar("V", bound=ServerStrategyState)


@dataclass(frozen=True, repr=False)
class ServerStrategy(Stateful[V]):
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
            step.options,
        )  # fmt: skip
        vector, parts = gradients.vector, state.parts
        answers = parts.push(push) if parts else client.push(push, vector, into)
        if state.lockstep:
            step.loss, step.stop = answers[0].loss, any(answer.stop for answer in answers)
            step.agreed = True
        else:
            step.consumed = max(answer.consumed for answer in answers)
            step.staleness = tuple(answer.staleness for answer in answers if not answer.dropped)
            worker.measures.count_staleness(step.staleness)
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

    def stop(self, worker: Worker, state: V) -> None:
        if state.parts is not None:
            state.parts.close()
        if state.client is not None:
            state.client.leave()
        if state.flow is not None:
            state.flow.wait()
        elif state.server is not None:
            state.server.serve_to_the_end(worker.transport)

    def learnt(self, worker: Worker, state: V) -> Iterable[Learnt]:
        """Return the slices, each of which its server owns."""
        return exchange.learnt_slices(worker, state.slices, state.server)

    def kept(self, worker: Worker, state: V) -> Kept:
        parts = () if state.server is None else state.server.optimizer_parts()
        return exchange.Kept(state.optimizer, parts)


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


# Which settings of `ParameterServer` do not go together, and why

ON_ARRIVAL = "consistency='asynchronous', or 'bounded' with a staleness above 0"


def contradictions(given: ParameterServer) -> Iterator[str]:
    """Yield what is wrong with settings that do not go together."""
    yield from _wrong_consistency(given)
    yield from _wrong_replicas(given) if given.replicas else ()
    if isinstance(given.slices, tuple) and len(given.slices) != given.servers:
        yield f"slices={given.slices} is not one weight for each of {given.servers} servers"
    if given.lambda0 is not None and given.delay_compensation == "none":
        yield "lambda0 needs delay_compensation='constant' or 'adaptive'"
    if given.mean_square is not None and given.delay_compensation != "adaptive":
        yield "mean_square needs delay_compensation='adaptive'"
    if given.compression is not None and not given.compression.decodable_alone:
        yield (
            f"a server cannot read a payload of {given.compression!r} without those of all "
            "workers: take AllReduce, or another compressor (SignSGD with vote=False)"
        )
    if given.backup and (given.servers > 1 or given.returns == "gradients"):
        yield (
            "backup needs servers=1 and returns='parameters': several servers would not drop "
            "the same gradients, and a late worker would miss updates"
        )
    if given.backup and given.compression is not None:
        yield (
            "backup does not go with compression: what waits for a later step would count on "
            "gradients that are dropped"
        )


def contradictions_with(given: ParameterServer, worker: Worker) -> Iterator[str]:
    """Yield what is wrong with settings, given what `worker` has."""
    if given.backup and worker.own_loop:
        yield (
            "backup needs orchestra's own loop (orchestra train): a late worker passes over "
            "batches, which a loop of your own cannot"
        )
    if given.replicas and given.averages and worker.clip_norm is not None:
        yield (
            f"replicas=1 with clip_norm needs {ON_ARRIVAL}, where workers clip: synchronous "
            "servers clip together, and the death of one would cut that short"
        )


def _wrong_consistency(given: ParameterServer) -> Iterator[str]:
    """Yield what does not go with `consistency`."""
    bounded = given.consistency == "bounded"
    same = "a synchronous server averages gradients of the same parameters"
    if given.staleness is not None and not bounded:
        yield f"staleness={given.staleness} needs consistency='bounded', not {given.consistency!r}"
    if given.staleness is None and bounded:
        yield (
            "consistency='bounded' needs its bound: give both, as in ParameterServer("
            "consistency='bounded', staleness=1), or set consistency='asynchronous'"
        )
    if given.averages and given.learning_rate != "kept":
        yield f"learning_rate={given.learning_rate!r} needs {ON_ARRIVAL}: {same}"
    if given.averages and given.delay_compensation != "none":
        yield f"delay_compensation={given.delay_compensation!r} needs {ON_ARRIVAL}: {same}"
    if given.returns == "gradients" and not given.averages:
        yield (
            f"returns='gradients' needs consistency='synchronous': a server that is "
            f"{given.consistency} has no average to return"
        )
    if given.backup and (isinstance(given.consistency, When) or not given.averages):
        yield (
            f"backup needs consistency='synchronous': where it is {given.consistency!r}, no "
            "gradient comes too late"
        )


def _wrong_replicas(given: ParameterServer) -> Iterator[str]:
    """Yield what does not go with `replicas`."""
    if given.servers < 2:
        yield (
            "replicas=1 needs servers=2 or more: the replica of a server's slice lies on the "
            "next server"
        )
    if given.returns == "gradients":
        yield (
            "replicas=1 needs returns='parameters': servers that only average keep nothing "
            "that could be lost"
        )
    if given.averages and given.placement == "beside":
        yield (
            f"replicas=1 beside workers needs {ON_ARRIVAL}: with a server its worker dies, "
            "and a synchronous step needs all workers; or set placement='dedicated'"
        )
