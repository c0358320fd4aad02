"""The flat vector of a model's parameters: where each tensor lies in it, and its units.

A unit is a run of parameters that are gathered, or whose gradients are summed, at once. Of each
unit every worker owns one slice (ZeRO: Rajbhandari et al., SC 2020; FSDP: Zhao et al., VLDB 2023).
The slices that a worker owns lie end to end in one vector, its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from orchestra.errors import InputError
from orchestra.parameter_server.placement import Piece, place
from orchestra.worker.carried import CarriedBuffers

ALIGNMENT_BYTES = 64  # other alignments change the last bits of some kernels


@dataclass(frozen=True)
class Slot:
    """One tensor's place: `offset` and `size` in elements."""

    name: str
    shape: torch.Size
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Tensors of one dtype and device, end to end, each beginning on a 64-byte boundary.

    The parameters stand in the reverse of their order in the module: roughly the order in which
    backward fills their gradients, so that a prefix of the vector is ready first.
    """

    slots: tuple[Slot, ...]
    size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """The bytes of a flat vector."""
        return self.size * self.dtype.itemsize

    @staticmethod
    def of_module(module: nn.Module) -> Layout:
        """Lay out the trainable parameters of `module`; a tied one stands once."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
        if not named:
            raise InputError("the model has no parameter that needs a gradient: nothing to train")
        first_name, first = named[0]
        for name, tensor in named:
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise InputError(
                    f"parameter {name!r} is {tensor.dtype} on {tensor.device}, but {first_name!r} "
                    f"is {first.dtype} on {first.device}: give all parameters one dtype and one "
                    "device (use autocast for mixed precision)"
                )
        grain = max(1, ALIGNMENT_BYTES // first.element_size())
        slots, offset = [], 0
        for name, tensor in named:
            slots.append(Slot(name, tensor.shape, offset, tensor.numel()))
            offset += -(-tensor.numel() // grain) * grain
        return Layout(tuple(slots), offset, first.dtype, first.device)

    def allocate(self, extra: int = 0) -> Tensor:
        """Return a zeroed flat vector of this layout, with `extra` elements behind it."""
        return torch.zeros(self.size + extra, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the tensors inside `vector`, in the layout's order, sharing its memory."""
        return [vector[s.offset : s.offset + s.size].view(s.shape) for s in self.slots]


class FlatModel:
    """A module whose trainable parameters are views of one flat vector: shape [layout.size].

    They move there, and stay the same objects.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layout = Layout.of_module(module)
        self.parameters = self.layout.allocate()
        self._buffers = buffer_places(module)
        by_name = dict(module.named_parameters())
        views = self.layout.views(self.parameters)
        with torch.no_grad():
            for slot, view in zip(self.layout.slots, views, strict=True):
                view.copy_(by_name[slot.name])
                by_name[slot.name].data = view

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        """The module's persistent buffers, by name."""
        return [(name, getattr(owner, attribute)) for name, owner, attribute in self._buffers]

    def carried(self) -> CarriedBuffers:
        """Make what lets the buffers travel with gradients."""
        return CarriedBuffers(lambda: self.buffers, self.layout.dtype)

    def keep(self) -> Callable[[], None]:
        """Copy parameters and buffers; return what puts them back."""

        def tensors() -> list[Tensor]:
            return [self.parameters, *(buffer for _, buffer in self.buffers)]

        kept = [tensor.clone() for tensor in tensors()]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, values in zip(tensors(), kept, strict=True):
                    tensor.copy_(values)

        return put_back


def buffer_places(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return name, owner and attribute of each persistent buffer (as BatchNorm's statistics)."""
    persistent = module.state_dict(keep_vars=True).keys()
    names = [name for name, _ in module.named_buffers() if name in persistent]
    return [(name, *owner_of(module, name)) for name in names]


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the owner of the parameter or buffer `name`, and its attribute there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


# Units


@dataclass(frozen=True)
class ShardUnit:
    """The slots from `first_slot` to before `end_slot`: elements [first, end) of the flat vector.

    `edges` are those of the workers' slices, counted from `first`. This worker owns elements
    [owned_start, owned_start + owned_length) of the flat vector, which consist of `pieces`. They
    begin at `shard_offset` of its shard.
    """

    number: int
    first: int
    end: int
    first_slot: int
    end_slot: int
    edges: tuple[int, ...]
    owned_start: int
    owned_length: int
    pieces: tuple[Piece, ...]
    shard_offset: int

    @property
    def owned(self) -> slice:
        """This worker's elements, counted from `first`."""
        start = self.owned_start - self.first
        return slice(start, start + self.owned_length)

    @property
    def shard(self) -> slice:
        """The same elements in this worker's shard."""
        return slice(self.shard_offset, self.shard_offset + self.owned_length)


@dataclass(frozen=True)
class Share:
    """A worker's place among the `workers` that share a model: it owns slice `index` of a unit."""

    index: int
    workers: int


def bucket_edges(layout: Layout, limit: int | None) -> list[tuple[int, int]]:
    """Return the starts (slot, element) of runs of whole slots of about `limit` bytes, and the end.
    None: one run."""
    edges = [(0, 0)]
    for index, slot in enumerate(layout.slots):
        size = (slot.offset - edges[-1][1]) * layout.dtype.itemsize
        if limit is not None and index > 0 and size >= limit:
            edges.append((index, slot.offset))
    return [*edges, (len(layout.slots), layout.size)]


def cut_into_units(
    layout: Layout, limit: int | None, share: Share, *, divisible: bool
) -> list[ShardUnit]:
    """Cut into units of about `limit` bytes; if `divisible`, owners may have a part of a tensor.

    They follow the layout, not the modules: what lies side by side is used one after the other.
    """
    units: list[ShardUnit] = []
    at = 0
    edges = pairwise(bucket_edges(layout, limit))
    for number, ((slot, first), (end_slot, end)) in enumerate(edges):
        spans = [(s.offset - first, s.size) for s in layout.slots[slot:end_slot]]
        slices = place(spans, end - first, share.workers, divisible=divisible)
        mine = slices[share.index]
        cuts = (*(part.first for part in slices), end - first)
        own, size = first + mine.first, mine.end - mine.first
        units.append(
            ShardUnit(number, first, end, slot, end_slot, cuts, own, size, mine.pieces, at)
        )
        at += size
    return units


def shard_size(units: Sequence[ShardUnit]) -> int:
    """Return how many elements this worker owns of all `units`."""
    return units[-1].shard_offset + units[-1].owned_length


class UnitMemory:
    """A flat vector in parts, one per unit. A part has memory only while it is held.

    As in FSDP, tensors stay the same objects, views of a part, when its memory comes and goes.
    """

    def __init__(self, layout: Layout, units: Sequence[ShardUnit]) -> None:
        self.parts: list[Tensor] = []
        self.views: list[Tensor] = []
        self._held = [False] * len(units)
        for unit in units:
            part = torch.empty(unit.end - unit.first, dtype=layout.dtype, device=layout.device)
            for slot in layout.slots[unit.first_slot : unit.end_slot]:
                start = slot.offset - unit.first
                self.views.append(part[start : start + slot.size].view(slot.shape))
            # Views keep their offsets and shapes, and are valid again once the storage has memory.
            part.untyped_storage().resize_(0)
            self.parts.append(part)

    def hold(self, unit: ShardUnit) -> Tensor:
        """Return the part of `unit`, with memory, whose content is arbitrary if there was none.

        It is another tensor on that memory: torch does not resize the storage of a tensor that was
        shown to NumPy, as transports do.
        """
        part = self.parts[unit.number]
        if not self._held[unit.number]:
            part.untyped_storage().resize_(part.nbytes)
            self._held[unit.number] = True
        return from_dlpack(part)

    def free(self, unit: ShardUnit) -> None:
        """Give the memory of `unit` back; what it held is lost."""
        if self._held[unit.number]:
            self.parts[unit.number].untyped_storage().resize_(0)
            self._held[unit.number] = False
