"""A worker that holds its shard of the parameters, and of the others no more than it is using."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.transports.protocol import Pending
from orchestra.worker.batches import Batch, tensors_of
from orchestra.worker.gradients import ShardedGradients
from orchestra.worker.layout import (
    Layout,
    ShardUnit,
    Share,
    UnitMemory,
    buffer_places,
    cut_into_units,
    shard_size,
)
from orchestra.worker.runtime import Compute, Runtime
from orchestra.worker.snapshots import ModelRange
from orchestra.worker.worker import Worker

NO_ORDER = (
    "shard='parameters': the model does not use its parameters in the same order on all workers "
    "and in every pass, so that they would wait for different ones: set shard='gradients'"
)
Wait = Callable[[ShardUnit, Callable[[], object]], object]
"""wait(unit, until): `until` returns once the parameters of `unit` are there."""


class Gathering(TorchDispatchMode):
    """While it is active, an operation on parameters first gathers their units; others are freed.

    It sees every operation of torch, those of the backward pass included, by the memory that the
    operation reads: whichever module a parameter belongs to, and whatever view of it autograd has
    saved. In the first pass the workers agree on each gather, and on each sum of gradients between
    them. From then on they follow the same order, and the next unit is gathered in the background
    while one is used, so that two have memory (more, where one operation uses several).
    """

    def __init__(
        self,
        units: Sequence[ShardUnit],
        memory: Sequence[Tensor],  # the parameters of each unit, flat; none in a run of shapes
        compute: Compute,
        begin: Callable[
            [ShardUnit], Pending[int]
        ],  # makes room for a unit, and begins to gather it
        free: Callable[[ShardUnit], None],  # gives the memory of a unit back
        agree: Callable[[int], bool],  # whether all workers call with the same number
        order: Sequence[int] = (),  # of a pass in a run of shapes, as `through_layout` guesses it
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units, self._compute = units, compute
        self._begin_gather, self._free, self._agree = begin, free, agree
        self._unit_of = {part.untyped_storage()._cdata: n for n, part in enumerate(memory)}
        self._guess = order
        self._there: set[int] = set()
        self._arriving: tuple[int, Pending[int]] | None = None
        self._order: list[int] = []  # of the gathers of a pass, once that is known
        self._events: list[int] = []  # of a step's last pass: what was used, and ~n for a sum of n
        self._noted: list[int] | None = None  # the same of the pass under way
        self._place = 0
        self._last = True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        needed = {
            self._unit_of[key]: None
            for tensor in tensors_of((args, kwargs or {}))
            # Sparse tensors have no storage.
            if tensor.layout is torch.strided
            and (key := tensor.untyped_storage()._cdata) in self._unit_of
        }
        if needed:
            # torch numbers the backward passes under way: -1 outside of them.
            backward = torch._C._current_graph_task_id() >= 0
            self.need(needed, self.in_backward if backward else self.in_forward)
        return func(*args, **(kwargs or {}))

    def begin_pass(self, *, last: bool) -> None:
        """Begin a forward and a backward pass, the `last` of a step or one before it."""
        self.end_pass()
        self._noted, self._place, self._last = [], 0, last

    def end_pass(self) -> None:
        """End the pass: check its order, and free all units."""
        if self._noted is None:
            return
        if not self._order and not self._agree(0):
            raise InputError(NO_ORDER)
        noted, self._noted = self._noted, None
        order = [event for event in noted if event >= 0]
        if self._arriving is not None or (self._order and order != self._order):
            raise InputError(NO_ORDER)
        self._order = order
        if self._last:
            # For a worker without samples, which follows them: sums have places among gathers.
            self._events = noted
        self._free_but(())

    def need(self, numbers: Collection[int], wait: Wait) -> None:
        """Gather the units `numbers`, and begin to gather the next one; `wait` waits for each."""
        missing = [number for number in numbers if number not in self._there]
        if not missing:
            return
        assert self._noted is not None, "parameters are used outside of a pass"
        # Before others are gathered, so that no more than these and the next one have memory.
        self._free_but(numbers)
        for number in missing:
            if self._arriving is None:
                self._begin(number, wait)
            assert self._arriving is not None
            arriving, task = self._arriving
            wait(self._units[arriving], task.wait)
            if arriving != number:
                raise InputError(NO_ORDER)
            self._arriving = None
            self._there.add(number)
            self._noted.append(number)
        if self._place < len(self._order):
            self._begin(self._order[self._place], wait)

    def note_sum(self, unit: ShardUnit) -> None:
        """Note that the sum of the gradients of `unit` begins: it has a place in the order."""
        if self._noted is not None:
            self._agree_on(-1 - unit.number, lambda until: self.in_backward(unit, until))
            self._noted.append(~unit.number)

    def _begin(self, number: int, wait: Wait) -> None:
        unit = self._units[number]
        if self._order and self._order[self._place : self._place + 1] != [number]:
            raise InputError(NO_ORDER)
        self._agree_on(1 + number, lambda until: wait(unit, until))
        self._place += 1
        self._arriving = number, self._begin_gather(unit)

    def _agree_on(self, event: int, wait: Callable[[Callable[[], object]], object]) -> None:
        """In the first pass, check that all workers begin the same `event`."""
        agreed = [True]
        if not self._order:
            wait(lambda: agreed.append(self._agree(event)))
        if not agreed[-1]:
            raise InputError(NO_ORDER)

    def _free_but(self, numbers: Collection[int]) -> None:
        for number in self._there.difference(numbers):
            self._free(self._units[number])
            self._there.remove(number)

    # Where a pass waits

    def in_forward(self, unit: ShardUnit, until: Callable[[], object]) -> None:
        """Charge what precedes `unit` in forward: its last slot is that of the first layer."""
        self._compute.wait_before_using(unit.end_slot - 1, until)

    def in_backward(self, unit: ShardUnit, until: Callable[[], object]) -> None:
        """Charge what precedes `unit` in backward: the slots before it have their gradients."""
        if self._last and unit.first_slot:
            self._compute.advance_to(unit.first_slot - 1)
        self._compute.wait_before_using(self._units[-1].end_slot - 1, until)

    # Passes in which nothing is computed

    def follow(self, passes: int) -> None:
        """Inside a gradient: take part in passes that are not a step's last."""
        for _ in range(passes):
            self.begin_pass(last=False)
            for number in self._guess or self._known(self._order):
                self.need((number,), self.in_backward)

    def sit_out(self, passes: int, begin_sum: Callable[[], None]) -> None:
        """Take part in the `passes` of a step without samples, as they were in the step before."""
        for left in range(passes, 0, -1):
            events = self._known(self._events if left == 1 else self._order)
            self.begin_pass(last=left == 1)
            for event in events:
                if event < 0:
                    begin_sum()
                else:
                    self.need((event,), lambda _, until: until())

    def _known(self, events: list[int]) -> list[int]:
        if not events:
            raise InputError(
                "shard='parameters': a worker without samples in its first step does not know the "
                "order in which the model uses its parameters: raise batch_size"
            )
        return events

    # In a run of shapes

    def await_for(self, slot: int) -> None:
        """In forward: gather the units from the last one to that of `slot`."""
        for unit in reversed(self._units):
            if unit.end_slot > slot:
                self.need((unit.number,), self.in_forward)

    def pass_backward(self, number: int) -> None:
        """In backward: gather unit `number`, if backward needs it."""
        if number in self._guess[len(self._units) :]:
            self.need((number,), self.in_backward)


def through_layout(layout: Layout, units: Sequence[ShardUnit]) -> list[int]:
    """Return the units that a pass through the layers in their order gathers, in turn.

    Backward needs no bias, nor the matrix of the first layer, whose inputs need no gradient.
    """
    weights = [n for n, slot in enumerate(layout.slots) if not slot.name.endswith("bias")]
    if weights and len(layout.slots[weights[-1]].shape) == 2:
        weights.pop()
    again = [
        unit.number
        for unit in units[1:]
        if any(unit.first_slot <= slot < unit.end_slot for slot in weights)
    ]
    return [*range(len(units) - 1, -1, -1), *again]


class ShardedWorker(Worker):
    """`parameters` are this rank's shard, flat: shape [shard_size(units)].

    The module's parameters have no memory but inside `gathering`, which a strategy puts there.
    """

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        optimizer: OptimizerSpec,
        *,
        share: Share,
        bucket_bytes: int,
        **options: Any,
    ) -> None:
        layout = Layout.of_module(module)
        self.units = cut_into_units(layout, bucket_bytes, share, divisible=optimizer.elementwise)
        self.gathering: Gathering | None = None
        super().__init__(runtime, module, optimizer, bucket_bytes=bucket_bytes, **options)
        buffers = sum(buffer.numel() for _, buffer in self.buffers)
        self.snapshots.places = {
            "parameters": [
                ModelRange(u.shard_offset, u.shard_offset + u.owned_length, u.owned_start)
                for u in self.units
            ],
            "buffers": [ModelRange(0, buffers, 0)] if runtime.rank == 0 else [],
        }

    def _lay_out(self, module: nn.Module) -> None:
        self.module = module
        self.layout = layout = Layout.of_module(module)
        self._buffers = buffer_places(module)
        self.memory = UnitMemory(layout, self.units)
        self.parameters = torch.zeros(
            shard_size(self.units), dtype=layout.dtype, device=layout.device
        )
        named = dict(module.named_parameters())
        for unit in self.units:
            part = self.memory.hold(unit).zero_()
            for index in range(unit.first_slot, unit.end_slot):
                parameter, view = named[layout.slots[index].name], self.memory.views[index]
                view.copy_(parameter.detach())
                parameter.data = view
            self.parameters[unit.shard] = part[unit.owned]
            self.memory.free(unit)
        ranks, carried = self.runtime.ranks, self.carried()
        self.gradients = ShardedGradients(module, layout, ranks, carried, self.units)

    def values_of(self, unit: ShardUnit) -> Tensor:
        """Return memory for the parameters of `unit`, filled with what this rank has of them."""
        part = self.memory.hold(unit)
        part[unit.owned] = self.parameters[unit.shard]
        return part

    def _accumulate(self, batch: Batch) -> float:
        assert self.gathering is not None
        self.gathering.follow(self.accumulation - len(self.micro_batches(batch)))
        with self.gathering:
            return super()._accumulate(batch)

    def loss_of(self, module: nn.Module, batch: Batch) -> Tensor:
        assert self.gathering is not None
        self.tell_if_compiled()
        self.gathering.begin_pass(last=self.gradients.last_backward)
        return super().loss_of(module, batch)
