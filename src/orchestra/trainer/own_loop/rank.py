"""One rank in a loop of the user's own: its worker, its phases, and the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from orchestra.collectives import all_reduce
from orchestra.coordinator.batches import QueuedWork
from orchestra.coordinator.rest import Reason
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.base import Roles, Strategy
from orchestra.strategies.phases import Phases
from orchestra.trainer import checkpoints
from orchestra.trainer.own_loop.ledger import Ledger
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import QueueOf, Worker


class OwnRank:
    """This rank under a strategy, and its place among the others.

    Attributes:
        phases: of the strategy, which `StrategyState` begins, and replaces to resume.
        ledger: of the steps that the user's optimizer has made.
        steps: how many that are.
        loss: what the loop has reported last.
        stopping: all workers stop after this step, since one of them was asked to.
        ended: all workers have left.
    """

    phases: Phases

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        queue_of: QueueOf | None,
        **options: Any,
    ) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self.ledger = Ledger(optimizer)
        self.steps, self.loss = 0, float("nan")
        self.ended = self.stopping = False
        self._queue_of, self._options = queue_of, options
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._make_worker(runtime, model)

    def _make_worker(self, runtime: Runtime, model: nn.Module) -> None:
        self.worker = Worker(
            runtime, model, self.optimizer_spec(), own_optimizer=self.optimizer, **self._options
        )
        if self.worker.layout.device.type != "meta":
            for parameter in self.worker.gradients.parameters:
                # torch.save writes whole storages, of a view the whole model: each parameter gets a
                # storage of its own in the memory of the flat vector.
                parameter.data = from_dlpack(parameter.data)
        self.prepare_start()

    def move(self, runtime: Runtime) -> None:
        """Go on in another group, from where this rank was."""
        before = self.worker
        before.gradients.close()
        self._make_worker(runtime, before.module)
        self.worker.step, self.worker.measures = before.step, before.measures

    def begin_anew(self) -> None:
        """Collective: begin the strategy anew, from a model and moments that all have equal."""
        self.worker.optimizer = self.optimizer_spec()
        self.worker.parameters_equal = True
        self.phases = Phases(self.strategy, self.worker)
        self.worker.parameters_equal = False

    def optimizer_spec(self) -> OptimizerSpec:
        """Return how to make an optimizer with the options that the user's has now."""
        return OptimizerSpec.from_instance(self.optimizer, self._names)

    def prepare_start(self) -> None:
        """Undo what a strategy that has started, and may have changed its phase, has set."""
        worker = self.worker
        worker.set_workers(self.strategy.roles(worker.runtime.ranks).workers)
        worker.queue_of = self._queue_of
        worker.rate_scale = 1.0

    def update(self) -> None:
        """Make the strategy's update; change its phase, if that step was the last one of it."""
        self.phases.before_update()
        self.phases.member.update()
        rest = self.phases.after_step(may_stop=True)
        if rest is not None and rest.reason is Reason.STOP:
            self.stopping = True
        elif rest is not None:
            self.phases.change(rest)

    # Its place among the others

    @property
    def roles(self) -> Roles:
        """The roles in the phase under way."""
        return self.phases.roles

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data now; the others serve."""
        return self.roles.workers

    def is_worker(self) -> bool:
        """Return whether this rank has data in the phase under way."""
        return self.worker.rank in self.workers

    @property
    def synchronous(self) -> bool:
        """True if the workers step together now, on the average of their gradients."""
        return self.phases.traits.lockstep

    @property
    def whole(self) -> bool:
        """True if the user's optimizer has the moments, on a worker."""
        return getattr(self.phases.member, "optimizer", None) is self.optimizer

    def source(self) -> QueuedWork | None:
        """Return the queue from which workers take batches now, or None where these are dealt out.

        Workers that take batches from a queue have unlike numbers of them.
        """
        return self.worker.source

    # Between ranks

    def sum_over_workers(self, numbers: Tensor, tag: Tag = Tag.COUNT) -> Tensor:
        """Collective over the workers: return sums of their `numbers`, in float64 on the CPU."""
        worker = self.worker
        sums = numbers.detach().to("cpu", torch.float64, copy=True)
        all_reduce(worker.transport, sums, "ring", worker.workers, tag)
        return sums

    def alike(self, number: int) -> bool:
        """Collective over the workers: return whether all have the same `number`, of 32 bits."""
        worker = self.worker
        numbers = torch.zeros(len(worker.workers), dtype=torch.float64)
        # float64 holds numbers of 32 bits exactly, and each worker has a place of its own.
        numbers[worker.workers.index(worker.rank)] = number
        return bool((self.sum_over_workers(numbers) == number).all())

    def places(self) -> tuple[int, list[int]]:
        """Return the first worker, and the ranks that serve, of those that are there."""
        workers, everyone = self.workers, self.worker.everyone.ranks
        first = next(rank for rank in workers if rank in everyone)
        return first, [rank for rank in everyone if rank not in workers]

    def hand_out(self, part_of: Callable[[int], Any]) -> Any:
        """Return this rank's part; the first worker gives it to each rank that serves."""
        transport, (first, serving) = self.worker.transport, self.places()
        if self.worker.rank in serving:
            return checkpoints.receive_state(transport, first, {})
        if self.worker.rank == first:
            for rank in serving:
                checkpoints.send_state(transport, part_of(rank), rank)
        return part_of(self.worker.rank)

    def gather(self, own: Any, first: int) -> dict[int, Any]:
        """Collective over all ranks: return the data of each by rank on `first`, else nothing."""
        worker = self.worker
        if worker.rank != first:
            checkpoints.send_state(worker.transport, own, first)
            return {}
        known: checkpoints.Tensors = {}
        return {
            rank: checkpoints.unpack(checkpoints.by_content(own, known), known)
            if rank == first
            else checkpoints.receive_state(worker.transport, rank, known)
            for rank in worker.everyone.ranks
        }
