"""A strategy of Lightning's whose processes are the workers of a run of Orchestra's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torchmetrics.metric import Metric, jit_distributed_available

from orchestra.collectives import receive_object, send_object
from orchestra.engines.processes.distribute import runtime_beside_loops, strategy_of
from orchestra.engines.processes.environment import detect, rank
from orchestra.errors import InputError
from orchestra.strategies.base import Strategy, roles_of
from orchestra.trainer.own_batches import Batches
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

T = TypeVar("T")

_OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class WorkerGroup:
    """The ranks that have data now. A rank that only serves is a group of its own.

    Every worker makes the same calls in the same order. Copies are the group itself.

    Args:
        transport: its messages belong to the group alone.
        workers: the ranks that have data now; the same on all of them.
    """

    def __init__(self, transport: Transport, workers: Callable[[], tuple[int, ...]]) -> None:
        self._transport = transport
        self._workers = workers

    def __deepcopy__(self, _: Any) -> WorkerGroup:
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in order."""
        workers, own = self._workers(), self._transport.rank
        return workers if own in workers else (own,)

    def is_several(self) -> bool:
        """Whether there are other members."""
        return len(self.ranks) > 1

    def gather(self, tensor: Tensor, group: None = None) -> list[Tensor]:
        """The tensor of each member, in order, on the device of `tensor`; shapes may differ."""
        transport, others = self._transport, [r for r in self.ranks if r != self._transport.rank]
        own = tensor.detach().cpu().contiguous()
        arriving = {r: transport.receive(r, Tag.OBJECTS) for r in others}
        leaving = [transport.send(own, r, Tag.OBJECTS) for r in others]
        arrived = {r: receiving.wait().to(tensor.device) for r, receiving in arriving.items()}
        for sending in leaving:
            sending.wait()
        return [arrived[r] if r in arrived else tensor.detach().clone() for r in self.ranks]

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """The sum, mean ("avg"), product, min, max ... over the members; the same bits on each."""
        name = operation.lower()
        is_mean = name in ("mean", "avg")
        if not is_mean and name not in _OPERATIONS:
            raise InputError(
                f"reduce: operation {operation!r} is not one of mean, {', '.join(_OPERATIONS)}"
            )
        if is_mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        gathered = self.gather(tensor)
        result = reduce(_OPERATIONS["sum" if is_mean else name], gathered)
        return result / len(gathered) if is_mean else result

    def barrier(self) -> None:
        """Return when every member is here."""
        self.gather(torch.zeros(1))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What member `source` calls with: JSON data, such as a path or a decision."""
        if not self.is_several():
            return value
        root = self.ranks[source]
        if self._transport.rank != root:
            return receive_object(self._transport, root)
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"broadcast: {type(value).__name__} is no JSON data, and nothing else is "
                f"accepted from another process: {error}"
            ) from None
        for member in self.ranks:
            if member != root:
                send_object(self._transport, value, member)
        return value


class AmongWorkers(ParallelStrategy):
    """Who and where this process is, and what Lightning does between processes.

    `place` has the arguments of `runtime_beside_loops`.
    """

    def __init__(self, strategy: Strategy[Any] | str, place: dict[str, Any]) -> None:
        super().__init__()
        self._orchestra = strategy_of(strategy)
        self._place = place
        self._launched = detect(os.environ)
        ranks = 1 if self._launched is None else self._launched.ranks
        self._first_workers = roles_of(self._orchestra, ranks).workers
        self._group: WorkerGroup | None = None
        self._batches: Batches | None = None  # once the model is distributed

    @property
    def global_rank(self) -> int:
        return rank()

    @property
    def local_rank(self) -> int:
        return 0 if self._launched is None else self._launched.local_rank

    @property
    def world_size(self) -> int:
        """How many workers there are; ranks that only serve do not count."""
        return 1 if self._serves else len(self._workers)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        ranks = (self.global_rank,) if self._group is None else self._group.ranks
        return {"num_replicas": len(ranks), "rank": ranks.index(self.global_rank)}

    @property
    def _workers(self) -> tuple[int, ...]:
        return self._first_workers if self._batches is None else self._batches.workers

    @property
    def _serves(self) -> bool:
        return self.global_rank not in self._workers

    def set_world_ranks(self) -> None:
        """Let Lightning log and save on the first rank alone."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Come together with the other ranks."""
        super().setup_environment()
        devices = len(self.parallel_devices or ())
        if self._launched is None and devices > 1:
            raise InputError(
                f"{devices} devices, but OrchestraStrategy starts no processes: run the script "
                f"by torchrun --nproc-per-node {devices}, or set Trainer(devices=1)"
            )
        runtime = runtime_beside_loops(**self._place)
        self._reporter = runtime.reporter
        self._group = WorkerGroup(runtime.transport, lambda: self._workers)

    def setup(self, trainer: lightning.Trainer) -> None:
        """Let the metrics of the model come together, too."""
        super().setup(trainer)
        for metric in self._metrics():
            assert self._group is not None
            metric.distributed_available_fn = self._group.is_several
            metric.dist_sync_fn = self._group.gather

    def teardown(self) -> None:
        """As in one process from here on: metrics, too."""
        for metric in self._metrics():
            metric.distributed_available_fn = jit_distributed_available
            metric.dist_sync_fn = None
        super().teardown()

    def _metrics(self) -> list[Metric]:
        """Return those of the model that would ask torch.distributed for the other workers."""
        modules = [] if self.model is None else self.model.modules()
        ours = None if self._group is None else self._group.gather
        metrics = [module for module in modules if isinstance(module, Metric)]
        return [metric for metric in metrics if metric.dist_sync_fn in (None, ours)]

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor | Any:
        """The same on all workers; what is no tensor stays as it is."""
        _check_group(group)
        if not isinstance(tensor, Tensor) or self._group is None:
            return tensor
        return self._group.reduce(tensor, getattr(reduce_op, "name", reduce_op) or "mean")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.reduce(torch.tensor(decision), reduce_op="min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        if self._group is not None:
            self._group.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """JSON data alone, since nothing that arrives is unpickled."""
        result: T = obj if self._group is None else self._group.broadcast(obj, src)
        return result

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """All workers' tensors, of one shape, stacked."""
        _check_group(group)
        if sync_grads:
            raise InputError("all_gather(sync_grads=True): gradients do not flow to other workers")
        if self._group is None or not self._group.is_several():
            return tensor
        return torch.stack(self._group.gather(tensor))


def _check_group(group: Any | None) -> None:
    if group is not None:
        raise InputError("OrchestraStrategy has no process groups: leave out group=")
