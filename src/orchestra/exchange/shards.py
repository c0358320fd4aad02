"""ZeRO: each worker updates its slice of the parameters, and keeps what it needs of the rest.

Stage 1 keeps the optimizer's state of that slice, stage 2 also its gradients, stage 3 also its
parameters (Rajbhandari et al., SC 2020; FSDP: Zhao et al., VLDB 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.exchange.average import Bucket, GradientAverage, ScheduledGroup
from orchestra.exchange.clipping import clip_together
from orchestra.exchange.slices import views_of_pieces
from orchestra.optimizers.spec import (
    OptimizerPart,
    apply_changed_options,
    get_options,
    install_moments,
    set_rates,
)
from orchestra.parameter_server.placement import Piece
from orchestra.schedules import ALL_REDUCE, ring_all_gather, ring_reduce_scatter
from orchestra.transports.protocol import CollectiveCall, Pending
from orchestra.transports.tags import Tag
from orchestra.worker.gathering import Gathering, ShardedWorker, through_layout
from orchestra.worker.layout import ShardUnit, Share, cut_into_units
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


def share_of(ring: Sequence[int], rank: int) -> Share:
    """Return which slices a reduce-scatter around `ring` leaves summed on `rank`."""
    # After N - 1 rounds rank i has added up piece i + 1.
    return Share((ring.index(rank) + 1) % len(ring), len(ring))


class Shards:
    """The ring's first half, an update, its second, for each of the model's units.

    Every unit is cut into one slice per worker. The reduce-scatter leaves each worker the sum of
    one slice, and the worker owns that slice. Tensors are cut only where the optimizer treats each
    element alone. `optimizer` holds the state of this worker's parts, and nothing else. With
    `scatter` gradients have memory only from backward to the reduce-scatter of their unit. On a
    `ShardedWorker`, or one of shapes with `gather`, parameters have memory only while they are in
    use.
    """

    def __init__(
        self, worker: Worker, ring: Group, *, scatter: bool = False, gather: bool = False
    ) -> None:
        self._worker = worker
        self._scatter = scatter
        self._reduce_scatter = ScheduledGroup(ring_reduce_scatter(len(ring)), ring)
        self._all_gather = ScheduledGroup(ring_all_gather(len(ring)), ring)
        # Everybody needs the tail, so that it is summed by itself.
        self._beside = ScheduledGroup(ALL_REDUCE["butterfly"](len(ring)), ring)
        limit = worker.bucket_bytes if worker.overlap or scatter else None
        divisible = worker.optimizer.elementwise
        share = share_of(ring.ranks, worker.rank)
        self.units = cut_into_units(worker.layout, limit, share, divisible=divisible)
        if scatter and not isinstance(worker, ShardedWorker):
            worker.lay_out_gradients(self.units)
        self._sharded = isinstance(worker, ShardedWorker)
        self.gathering = self._gathered() if gather else None
        self._parts: list[tuple[int, Tensor, Tensor]] = []  # slot, values and gradient of each
        tensors = {name: part for unit in self.units for name, part in self._own(unit).items()}
        self.optimizer = worker.optimizer.build({name: t for name, (t, _) in tensors.items()})
        self._options = get_options(self.optimizer)
        install_moments(self.optimizer, tensors, worker.inherited)
        self.part = OptimizerPart(self.optimizer, tensors)

    def _gathered(self) -> Gathering:
        """Make what gathers the parameters of this worker when they are used."""
        worker, transport = self._worker, self._worker.transport

        def gather(unit: ShardUnit, values: Tensor) -> Pending[int]:
            ring = self._all_gather  # on the flow that sums gradients: in the same order everywhere
            call = CollectiveCall(ring.schedule, values, ring.group, Tag.SHARDS, unit.edges)
            return transport.in_background(lambda flow: flow.execute(call))

        if isinstance(worker, ShardedWorker):
            values_of, memory = worker.values_of, worker.memory
            worker.gathering = Gathering(
                self.units, memory.parts, worker.compute,
                lambda unit: gather(unit, values_of(unit)), memory.free, self._all_say,
            )  # fmt: skip
            return worker.gathering
        whole = worker.parameters
        worker.arriving = shapes = Gathering(
            self.units, (), worker.compute,
            lambda unit: gather(unit, whole[unit.first : unit.end]), lambda _: None, self._all_say,
            through_layout(worker.layout, self.units),
        )  # fmt: skip
        return shapes

    def _all_say(self, number: int) -> bool:
        """Collective: return whether all workers call with the same number."""
        group = self._all_gather.group
        moments = torch.tensor([number, number**2], dtype=torch.float64)
        all_reduce(self._worker.transport, moments, "butterfly", group, Tag.AGREE)
        total, squares = moments.tolist()
        # N sum(x^2) = (sum x)^2 only if all x are equal (Cauchy and Schwarz).
        return bool(len(group) * squares == total**2)

    def _own(self, unit: ShardUnit) -> dict[str, tuple[Tensor, int]]:
        """Return, by name, what this worker updates of `unit`; see `views_of_pieces`."""
        worker, first = self._worker, unit.first
        pieces = [
            Piece(unit.first_slot + piece.tensor, first + piece.first, first + piece.end)
            for piece in unit.pieces
        ]
        at = unit.shard_offset if self._sharded else unit.owned_start
        values = views_of_pieces(
            worker.layout, pieces, worker.parameters[at : at + unit.owned_length], unit.owned_start
        )
        gradients = views_of_pieces(
            worker.layout, pieces, worker.gradients.own(unit), unit.owned_start
        )
        for piece, value, gradient in zip(pieces, values.values(), gradients.values(), strict=True):
            self._parts.append((piece.tensor, value[0], gradient[0]))
        return values

    def average(self) -> GradientAverage:
        """Make what sums the gradients: of each unit the slice that this worker owns."""
        if not self._scatter:
            return GradientAverage(self._worker, self.sum)
        return ScatteredAverage(self._worker, self)

    def sum(self, bucket: Bucket, background: bool) -> list[Pending[int]]:
        """Begin the sum of this worker's slice of `bucket`. With the last bucket, begin also the
        sum of the values that travel with the gradient to all workers."""
        transport = self._worker.transport
        unit = next(unit for unit in self.units if unit.first == bucket.first)
        gradient = self._worker.gradients.bucket(unit)
        begun = [
            self._reduce_scatter.begin(transport, gradient, edges=unit.edges, background=background)
        ]
        if unit is self.units[-1]:
            beside = self._worker.gradients.beside
            begun.append(self._beside.begin(transport, beside, background=background))
        return begun

    def update(self) -> None:
        """Clip and step on the own slices; then all parameters are collected, if they are kept."""
        worker = self._worker
        for slot, values, gradient in self._parts:
            values.grad = gradient if worker.gradients.used[slot] else None
        self._clip()
        apply_changed_options(self.optimizer, self._options, worker.step.options)
        set_rates(self.optimizer, worker.step.rates)
        elements = sum(values.numel() for _, values, _ in self._parts)
        worker.compute.run(Work("update", elements), self.optimizer.step)
        if self.gathering is not None:
            return  # they are when they are used
        for unit in self.units:
            values = worker.parameters[unit.first : unit.end]
            self._all_gather.begin(worker.transport, values, Tag.SHARDS, unit.edges).wait()

    def close(self) -> None:
        """Let the next phase have whole gradients again."""
        if self._scatter and not self._sharded:
            self._worker.lay_out_gradients(None)

    def _clip(self) -> None:
        """Clip by the norm of the whole gradient: each worker knows the square of its part."""
        worker, group = self._worker, self._reduce_scatter.group
        if worker.clip_norm is None or len(group) == 1:
            worker.clip()
            return
        gradients = [gradient for _, values, gradient in self._parts if values.grad is not None]
        clip_together(worker.clip_norm, group, "butterfly", worker.transport, *gradients)


@dataclass
class Scattering:
    """The reduce-scatter of `unit` under way; `wait` frees what other workers own of the sum."""

    worker: Worker
    unit: ShardUnit
    task: Pending[int]
    over: bool = False

    def wait(self) -> int:
        size = self.task.wait()
        if not self.over:
            self.worker.gradients.keep_own(self.unit)
            self.over = True
        return size

    def done(self) -> bool:
        return self.task.done()


class ScatteredAverage(GradientAverage):
    """Has the gradients of at most two units at a time: of one under way, and of one in backward.

    That is so for models whose backward pass fills them in the order of their units.
    """

    def __init__(self, worker: Worker, shards: Shards) -> None:
        self._shards = shards
        buckets = [
            Bucket(unit.first, worker.gradients.vector[unit.shard], unit.first_slot, unit.end_slot)
            for unit in shards.units
        ]
        super().__init__(worker, self._begin_unit, buckets)
        worker.gradients.on_ready = self._slots_are_ready

    def finish(self) -> None:
        """After backward: a worker without samples takes part in the gathers of the others."""
        gathering = self._shards.gathering
        if gathering is not None:
            if not self._worker.step.samples:
                gathering.sit_out(self._worker.accumulation, self._sum_nothing)
            gathering.end_pass()
        super().finish()

    def _begin_unit(self, bucket: Bucket, background: bool) -> Sequence[Pending[int]]:
        unit, gathering = self._shards.units[self._next], self._shards.gathering
        # The last unit is summed after the pass, outside of the order that is agreed on.
        if gathering is not None and unit is not self._shards.units[-1]:
            gathering.note_sum(unit)
        scatter, *tail = self._shards.sum(bucket, background)
        return [Scattering(self._worker, unit, scatter), *tail]

    def _slots_are_ready(self, first: int, end: int) -> None:
        for number in range(self._bucket_of[first], self._bucket_of[end - 1] + 1):
            bucket, gathering = self._buckets[number], self._shards.gathering
            if gathering is not None and self._worker.parameters.is_meta:
                gathering.pass_backward(number)
            super()._slots_are_ready(max(first, bucket.first_slot), min(end, bucket.end_slot))
            while len(self._under_way) > 1:
                # To bound memory, one sum at most is under way beside the unit in backward.
                before = self._under_way.pop(0)
                self._worker.compute.wait_before_using(len(self._bucket_of) - 1, before.wait)

    def _sum_nothing(self) -> None:
        """Begin the sum of the next unit, to which this worker adds zeros."""
        bucket = self._buckets[self._next]
        for slot in range(bucket.first_slot, bucket.end_slot):
            self._worker.gradients.collect(slot, 0.0)
        self._begin_next()
        while len(self._under_way) > 1:
            self._under_way.pop(0).wait()
