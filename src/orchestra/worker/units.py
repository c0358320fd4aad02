"""A model in units: runs of parameters that are gathered, or whose gradients are summed, at once.

Of each unit every worker owns one slice (ZeRO: Rajbhandari et al., SC 2020; FSDP: Zhao et al., VLDB
2023). The slices that a worker owns lie end to end in one vector, its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from orchestra.parameter_server.placement import Piece, place
from orchestra.worker.layout import Gradients, Layout


@dataclass(frozen=True)
class Unit:
    """The slots from `first_slot` to before `end_slot`: elements [first, end) of the flat vector.

    `edges` are those of the workers' slices, counted from `first`. This worker owns elements
    [own, own + size) of the flat vector, which consist of `pieces` and begin at `at` of its shard.
    """

    number: int
    first: int
    end: int
    first_slot: int
    end_slot: int
    edges: tuple[int, ...]
    own: int
    size: int
    pieces: tuple[Piece, ...]
    at: int

    @property
    def owned(self) -> slice:
        """This worker's elements, counted from `first`."""
        return slice(self.own - self.first, self.own - self.first + self.size)

    @property
    def shard(self) -> slice:
        """The same elements in this worker's shard."""
        return slice(self.at, self.at + self.size)


@dataclass(frozen=True)
class Share:
    """A worker's place among the `workers` that share a model: it owns slice `index` of a unit."""

    index: int
    workers: int


def bucket_edges(layout: Layout, limit: int | None) -> list[tuple[int, int]]:
    """Where runs of whole slots of about `limit` bytes begin, as (slot, element), and the end.

    None: one run.
    """
    edges = [(0, 0)]
    for index, slot in enumerate(layout.slots[1:], start=1):
        if limit is None:
            break
        if (slot.offset - edges[-1][1]) * layout.dtype.itemsize >= limit:
            edges.append((index, slot.offset))
    return [*edges, (len(layout.slots), layout.size)]


def cut_into_units(
    layout: Layout, limit: int | None, share: Share, *, divisible: bool
) -> list[Unit]:
    """Units of about `limit` bytes; if `divisible`, owners may have a part of a tensor.

    They follow the layout, not the modules: what lies side by side is used one after the other.
    """
    units: list[Unit] = []
    at = 0
    edges = pairwise(bucket_edges(layout, limit))
    for number, ((slot, first), (end_slot, end)) in enumerate(edges):
        spans = [(s.offset - first, s.size) for s in layout.slots[slot:end_slot]]
        slices = place(spans, end - first, share.workers, divisible=divisible)
        mine = slices[share.index]
        cuts = (*(part.first for part in slices), end - first)
        size = mine.end - mine.first
        units.append(
            Unit(
                number, first, end, slot, end_slot, cuts, first + mine.first, size, mine.pieces, at
            )
        )
        at += size
    return units


def shard_size(units: Sequence[Unit]) -> int:
    """The elements that this worker owns of all `units`."""
    return units[-1].at + units[-1].size


class UnitMemory:
    """A flat vector in parts, one a unit, each of which has memory only while it is held.

    As in FSDP, tensors stay the same objects, views of a part, when its memory comes and goes.
    """

    def __init__(self, layout: Layout, units: Sequence[Unit]) -> None:
        self.parts: list[Tensor] = []
        self.views: list[Tensor] = []
        self._held = [False] * len(units)
        for unit in units:
            part = torch.empty(unit.end - unit.first, dtype=layout.dtype, device=layout.device)
            for slot in layout.slots[unit.first_slot : unit.end_slot]:
                start = slot.offset - unit.first
                self.views.append(part[start : start + slot.size].view(slot.shape))
            part.untyped_storage().resize_(0)
            self.parts.append(part)

    def hold(self, unit: Unit) -> Tensor:
        """The part of `unit`, with memory: what it holds is arbitrary if there was none.

        It is another tensor on that memory: once a transport has looked at one through NumPy, torch
        does not give its memory back.
        """
        part = self.parts[unit.number]
        if not self._held[unit.number]:
            part.untyped_storage().resize_(part.nbytes)
            self._held[unit.number] = True
        return from_dlpack(part)

    def free(self, unit: Unit) -> None:
        """Give the memory of `unit` back; what it held is lost."""
        if self._held[unit.number]:
            self.parts[unit.number].untyped_storage().resize_(0)
            self._held[unit.number] = False


class ShardedGradients(Gradients):
    """Gradients that are whole only until the workers have summed them, unit by unit.

    `vector` has the sums of the elements that this worker owns: shape [shard_size(units)].
    """

    def __init__(
        self, module: nn.Module, layout: Layout, ranks: int, units: Sequence[Unit]
    ) -> None:
        self._units = units
        self._unit_of = [unit for unit in units for _ in range(unit.first_slot, unit.end_slot)]
        super().__init__(module, layout, ranks)

    def _allocate(self, tail: int) -> None:
        layout = self.layout
        self._memory = UnitMemory(layout, self._units)
        self.views = self._memory.views
        self.vector = torch.zeros(shard_size(self._units), dtype=layout.dtype, device=layout.device)
        self.tail = torch.zeros(tail, dtype=layout.dtype, device=layout.device)

    def bucket(self, unit: Unit) -> Tensor:
        return self._memory.hold(unit)

    def own(self, unit: Unit) -> Tensor:
        return self.vector[unit.shard]

    def keep_own(self, unit: Unit) -> None:
        self.own(unit).copy_(self._memory.parts[unit.number][unit.owned])
        for parameter in self.parameters[unit.first_slot : unit.end_slot]:
            parameter.grad = None
        self._memory.free(unit)

    def collect(self, index: int, scale: float) -> None:
        self._memory.hold(self._unit_of[index])
        super().collect(index, scale)

    def _collect_all(self, scale: float) -> bool:
        return False  # one after the other, as memory comes

    def forget_unused(self) -> None:
        """None has a gradient but in `vector`."""
