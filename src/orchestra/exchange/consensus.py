"""The model that all ranks have learnt together, and the moments that a next phase inherits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.collectives import all_reduce, broadcast
from orchestra.errors import InputError, PeerLost
from orchestra.exchange.agreement import Packed, average_replicas, pack, ring_sum
from orchestra.optimizers.spec import Moments, OptimizerPart, export_moments
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Learnt:
    """What this rank contributes to the elements of the model from `offset` on.

    The model is the mean of the values of all workers, weighted by `weight`; where values are
    `summed`, as push-sum's x, they are multiplied by their weight already. Where elements have an
    `owner`, that rank alone contributes, and the others have a weight of 0.
    """

    offset: int
    values: Tensor
    weight: float = 1.0
    summed: bool = False
    owner: int | None = None

    @property
    def numerator(self) -> Tensor:
        """The weighted values, in float64."""
        return self.values.double() if self.summed else self.weight * self.values.double()


@dataclass(frozen=True)
class Kept:
    """What a member has at rest: what it has `learnt`, its share of the model, and its moments.

    A worker that has all moments has them in `optimizer`. Where they are spread over several ranks
    each has `parts` of them. `buffers_weight` is that of this worker's buffers in the mean of all.
    """

    learnt: Sequence[Learnt] = ()
    optimizer: Optimizer | None = None
    parts: Sequence[OptimizerPart] = ()
    buffers_weight: float = 1.0
    complete: bool = True  # no worker has finished, so that a checkpoint can be taken
    owes: bool = False  # a lost worker's batch has to be done again before a checkpoint is whole


def take_consensus(worker: Worker, learnt: Sequence[Learnt], *, tolerant: bool) -> None:
    """Collective over all ranks: replace everyone's parameters by the model that was learnt.

    `tolerant`: a rank that is lost meanwhile does without.
    """
    for each in learnt:
        values = worker.parameters[each.offset : each.offset + each.values.numel()]
        if each.owner is not None:
            _take_from_owner(worker, values, each, each.owner, tolerant=tolerant)
        elif len(worker.workers) > 1:
            values.copy_(_mean(worker, each.numerator, each.weight))


def _take_from_owner(
    worker: Worker, values: Tensor, learnt: Learnt, owner: int, *, tolerant: bool
) -> None:
    if worker.rank != owner:
        worker.transport.receive(owner, Tag.COLLECT, values).wait()
        return
    with torch.no_grad():
        values.copy_(learnt.values)
    others = [rank for rank in worker.everyone.ranks if rank != owner]
    for handle in [worker.transport.send(values, rank, Tag.COLLECT) for rank in others]:
        try:
            handle.wait()
        except PeerLost as lost:
            if not tolerant:
                raise
            worker.reporter.notice(f"rank {lost.rank} left before the end")


def _mean(worker: Worker, numerator: Tensor, weight: float) -> Tensor:
    # Summed in float64, where a sum of float32 numbers is exact in practice. The weights travel
    # behind the numerators: one collective in place of two.
    total = torch.cat([numerator, numerator.new_tensor([weight])])
    ring_sum(worker, total, Tag.AGREE)
    return total[:-1] / total[-1]


def exact_mean(worker: Worker) -> None:
    """Replace all workers' parameters by their mean."""
    take_consensus(worker, [Learnt(0, worker.parameters)], tolerant=False)


def exact_mean_of_buffers(worker: Worker, weight: float = 1.0) -> None:
    """Replace floating buffers by their weighted mean, others by those of the first worker."""
    workers = worker.workers
    if len(workers) == 1:
        return
    for packed in pack(worker.buffers):
        if packed.values.is_floating_point():
            packed.values.copy_(_mean(worker, weight * packed.values.double(), weight))
        else:
            broadcast(worker.transport, packed.values, workers.ranks[0], workers, Tag.BUFFERS)
        packed.unpack()


# Moments


def hand_over(worker: Worker, kept: Kept, how: Literal["kept", "averaged", "reset"]) -> None:
    """Let the optimizers that this rank builds next inherit the moments of `kept.optimizer`.

    "averaged": the workers' mean of them, which all workers get. Nobody inherits from parts.
    """
    worker.inherited = {}
    if kept.optimizer is None:
        return
    if how != "reset":
        moments = export_moments(kept.optimizer, worker.named_parameters())
        worker.inherited = _mean_of_moments(worker, moments) if how == "averaged" else moments
    if worker.own_loop:  # the optimizer goes on, with what is inherited and nothing else
        kept.optimizer.state.clear()


def _mean_of_moments(worker: Worker, moments: Moments) -> Moments:
    """Collective over the workers: return the mean of their `moments`, counts of steps included.

    A parameter that some worker has never updated gets none. Tensors are overwritten.
    """
    moments = {name: moments[name] for name in _updated_by_all(worker, moments, "ring")}
    tensors: list[tuple[str, Tensor]] = []
    numbers: list[tuple[dict[str, Any], str]] = []
    for state in moments.values():
        for key, value in sorted(state.items()):
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim()):
                numbers.append((state, key))
            elif isinstance(value, Tensor) and value.is_floating_point():
                tensors.append((key, value))
            else:
                raise InputError(
                    f"moments='averaged': {key!r} in the optimizer's state has no mean: set "
                    "moments='reset'"
                )
    count = len(worker.workers)
    for packed in pack(tensors):
        ring_sum(worker, packed.values.div_(count), Tag.AGREE)
        packed.unpack()
    sums = torch.tensor([float(state[key]) for state, key in numbers], dtype=torch.float64)
    ring_sum(worker, sums, Tag.AGREE)
    for (state, key), total in zip(numbers, sums.tolist(), strict=True):
        # Rounded down where the optimizer keeps a whole number.
        value, mean = state[key], total / count
        like = isinstance(value, Tensor)
        state[key] = torch.full_like(value, mean) if like else type(value)(mean)
    return moments


def _updated_by_all(worker: Worker, moments: Moments, algorithm: str) -> list[str]:
    """Collective over the workers: return the names of the parameters for which every worker has
    `moments`.

    A worker has no moments yet for a parameter that none of its batches has used.
    """
    names = list(worker.named_parameters())
    there = torch.tensor([float(name in moments) for name in names])
    all_reduce(worker.transport, there, algorithm, worker.workers, Tag.AGREE)
    everybody = len(worker.workers)
    return [
        name for name, workers in zip(names, there.tolist(), strict=True) if workers == everybody
    ]


def average_moments(
    worker: Worker, optimizer: Optimizer, algorithm: str, samples: int, total: int | None
) -> None:
    """Replace the moments in `optimizer` by their mean over the workers, as `average_replicas`.
    Those of a parameter that some worker has not updated yet stay as they are."""
    if len(worker.workers) == 1:
        return
    moments = export_moments(optimizer, worker.named_parameters())
    tensors = [
        value
        for name in _updated_by_all(worker, moments, algorithm)
        for _, value in sorted(moments[name].items())
        if isinstance(value, Tensor) and value.dim()
    ]
    if tensors:
        packed = Packed(tensors)
        average_replicas(worker, worker.transport, packed.values, algorithm, samples, total)
        packed.unpack()
