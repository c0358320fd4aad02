"""The workers of a run as a group that can gather, reduce and broadcast, and compute metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.metric import Metric, jit_distributed_available

from orchestra.collectives import receive_object, send_object
from orchestra.errors import InputError
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag

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

    All workers make the same calls in the same order. A copy of a group is the group itself.

    Args:
        transport: carries the messages of this group and no others.
        workers: returns the ranks that have data now; the same on all of them.
    """

    def __init__(self, transport: Transport, workers: Callable[[], tuple[int, ...]]) -> None:
        self._transport = transport
        self._workers = workers

    # Lightning and torchmetrics copy metrics, and with them the functions of this group
    def __deepcopy__(self, _: Any) -> WorkerGroup:
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, in order."""
        workers, own = self._workers(), self._transport.rank
        # Whoever serves has nobody to wait for: its own metrics are those of one process
        return workers if own in workers else (own,)

    def is_several(self) -> bool:
        """Return whether there are other members."""
        return len(self.ranks) > 1

    def gather(self, tensor: Tensor, group: None = None) -> list[Tensor]:
        """Return each member's tensor, in order, on the device of `tensor`; shapes may differ."""
        transport, others = self._transport, [r for r in self.ranks if r != self._transport.rank]
        # Transports send the memory as it lies
        own = tensor.detach().cpu().contiguous()
        # Receives first, so that no two members wait for each other to take what they send
        arriving = {r: transport.receive(r, Tag.OBJECTS) for r in others}
        leaving = [transport.send(own, r, Tag.OBJECTS) for r in others]
        arrived = {r: receiving.wait().to(tensor.device) for r, receiving in arriving.items()}
        for sending in leaving:
            sending.wait()
        # A copy, since a caller may change what it gets
        return [arrived[r] if r in arrived else tensor.detach().clone() for r in self.ranks]

    def reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the sum, mean ("avg"), product, minimum, maximum or a bitwise combination over
        the members; it has the same bits on each.
        """
        name = operation.lower()
        is_mean = name in ("mean", "avg")
        if not is_mean and name not in _OPERATIONS:
            known = ", ".join(["mean", *_OPERATIONS])
            raise InputError(f"reduce: operation {operation!r} is not one of {known}")
        # The mean of integers may have a fraction
        if is_mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        gathered = self.gather(tensor)
        # In the order of the members on each of them: the same bits everywhere
        result = reduce(_OPERATIONS["sum" if is_mean else name], gathered)
        return result / len(gathered) if is_mean else result

    def barrier(self) -> None:
        """Wait until every member has called this."""
        self.gather(torch.zeros(1))

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value that member `source` calls this with: JSON data, such as a path."""
        if not self.is_several():
            return value
        root = self.ranks[source]
        if self._transport.rank != root:
            return receive_object(self._transport, root)
        try:
            # Checked at the caller, who made the mistake. The receiver reads JSON and never
            # unpickles.
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


# Metrics of torchmetrics


def connect(model: nn.Module, group: WorkerGroup) -> None:
    """Let the metrics of `model` be computed over the members of `group`.

    By themselves they would ask torch.distributed, which has no group, or one with servers in it.
    """
    for metric in _metrics(model, group):
        metric.distributed_available_fn = group.is_several
        metric.dist_sync_fn = group.gather


def disconnect(model: nn.Module, group: WorkerGroup) -> None:
    """Undo `connect`."""
    for metric in _metrics(model, group):
        metric.distributed_available_fn = jit_distributed_available
        metric.dist_sync_fn = None


def _metrics(model: nn.Module, group: WorkerGroup) -> list[Metric]:
    """Return those without a function of the user's, which stays."""
    metrics = [module for module in model.modules() if isinstance(module, Metric)]
    return [metric for metric in metrics if metric.dist_sync_fn in (None, group.gather)]
