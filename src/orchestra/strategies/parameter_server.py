"""Parameter servers (Li et al., OSDI 2014): parameters in slices, each owned by one server."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers, parameter_server
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.strategies.base import Roles, Strategy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.parameter_server import Client, Home, Pause, Server
    from orchestra.transports.protocol import Task
    from orchestra.worker.worker import Worker


@dataclass
class ParameterServerState:
    """A worker has a client, a server its slice; a rank that is both has both.

    `flow` is the background flow of a server beside a worker. `optimizer` is the worker's own,
    where the servers return gradients.
    """

    homes: list[Home] = field(metadata=optimizers.TRANSIENT)
    client: Client | None = None
    server: Server | None = None
    flow: Task[None] | None = field(default=None, metadata=optimizers.TRANSIENT)
    optimizer: Optimizer | None = None


@dataclass(frozen=True, repr=False)
class ParameterServer(Strategy[ParameterServerState]):
    """Workers push gradients to servers, which update their slices, and pull parameters.

    Synchronous: one update a step, from the average over all workers. Asynchronous: each push is
    applied on arrival, to parameters that others may have changed since they were read; the
    number of those updates is its staleness.
    """

    _: KW_ONLY
    servers: int = setting(1, "servers that the parameters are cut over, balanced by bytes", low=1)
    consistency: Literal["synchronous", "asynchronous"] = setting(
        "synchronous", "whether a pull waits for the pushes of all workers"
    )
    placement: Literal["dedicated", "beside"] = setting(
        "dedicated", "servers on the last ranks, without data; or beside the first workers"
    )
    returns: Literal["parameters", "gradients"] = setting(
        "parameters", "gradients: servers only average, and each worker runs the optimizer"
    )

    def check(self) -> None:
        """Averaged gradients exist only where the servers wait for everybody."""
        if self.returns == "gradients" and self.consistency != "synchronous":
            raise InputError(
                "ParameterServer: returns='gradients' needs consistency='synchronous': "
                "an asynchronous server has no average to return"
            )

    @property
    def synchronous(self) -> bool:
        """Whether all workers take each step together."""
        return self.consistency == "synchronous"

    @property
    def hands_over_moments(self) -> bool:
        """Only where the workers have them; servers keep theirs, in slices."""
        return self.returns == "gradients"

    def roles(self, ranks: int) -> Roles:
        """Dedicated servers come out of the budget of ranks; servers beside workers do not."""
        if self.placement == "beside":
            if self.servers > ranks:
                raise InputError(
                    f"ParameterServer: {self.servers} servers beside workers need as many ranks, "
                    f"not {ranks}: lower servers or raise ranks"
                )
            return Roles((1.0,) * ranks, tuple(range(self.servers)))
        workers = ranks - self.servers
        if workers < 1:
            raise InputError(
                f"ParameterServer: {ranks} ranks with {self.servers} dedicated servers leave no "
                "worker: raise ranks, lower servers, or set placement='beside'"
            )
        return Roles((1.0,) * workers + (0.0,) * self.servers, tuple(range(workers, ranks)))

    def start(self, worker: Worker) -> ParameterServerState:
        """Everyone begins with the parameters of the first rank; each server takes its slice."""
        exchange.agree_on_parameters(worker)
        roles, updates = self.roles(worker.budget_ranks), self.returns == "parameters"
        state = ParameterServerState(exchange.homes_of(worker, roles.servers, updates=updates))
        if worker.rank in roles.servers:
            state.server = exchange.make_server(
                worker, state.homes, roles.workers, self.consistency, updates=updates
            )
        if worker.rank in roles.workers:
            state.client = parameter_server.Client(worker.transport, state.homes)
            state.optimizer = None if updates else worker.local_optimizer()
            if state.server is not None:
                state.flow = worker.transport.spawn(state.server.serve_to_the_end)
        worker.reporter.expendable(not self.synchronous and worker.rank not in roles.servers)
        return state

    def before_forward(self, worker: Worker, state: ParameterServerState) -> None:
        """Under synchronous servers everyone takes the first worker's buffers."""
        if self.synchronous:
            exchange.broadcast_buffers(worker, worker.workers)

    def reduce(self, worker: Worker, state: ParameterServerState) -> None:
        """Averaged gradients come back before anybody reads them; else each clips its own."""
        worker.gradients.collect_rest()
        if self.returns == "gradients":
            assert state.client is not None
            vector = worker.gradients.vector
            exchange.push_and_pull(worker, state.client, vector, synchronous=True)
        worker.gradients.forget_unused()

    def update(self, worker: Worker, state: ParameterServerState) -> None:
        """Push the gradient and pull parameters; or step on the averaged gradient."""
        assert state.client is not None
        if state.optimizer is not None:
            worker.clip()
            worker.update_locally(state.optimizer)
            if worker.rank == worker.workers.ranks[0]:
                worker.snapshots.offer(worker.step.consumed, worker.parameters)
            return
        if not self.synchronous:
            worker.clip()
        exchange.push_and_pull(
            worker, state.client, worker.parameters, synchronous=self.synchronous
        )

    def serve(self, worker: Worker, state: ParameterServerState) -> Pause | None:
        """Serve until all workers pause or have left."""
        assert state.server is not None
        paused = state.server.serve(worker.transport)
        worker.step.consumed = state.server.state.consumed
        return paused

    def quiesce(self, worker: Worker, state: ParameterServerState, step: int) -> bool:
        """Wait until every push is applied and every worker is here."""
        assert state.client is not None
        return state.client.pause(step)

    def agree(self, worker: Worker, state: ParameterServerState) -> None:
        """The servers' slices, or the workers' replica, become everybody's parameters."""
        if self.returns == "gradients":
            exchange.agree_on_parameters(worker)
            return
        exchange.collect_slices(worker, state.homes, state.server)
        if self.synchronous:
            exchange.broadcast_buffers(worker, worker.everyone)

    def stop(self, worker: Worker, state: ParameterServerState) -> None:
        """Workers leave; then agree."""
        if state.client is not None:
            state.client.leave()
        if state.flow is not None:
            state.flow.wait()
        elif state.server is not None:
            state.server.serve_to_the_end(worker.transport)
        self.agree(worker, state)

    def optimizer_of(self, state: ParameterServerState) -> Optimizer | None:
        """The workers' optimizer, where they have one."""
        return state.optimizer
