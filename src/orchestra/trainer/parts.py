"""Where ranks hold parts of a model: what lies where, and how the whole is put together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from orchestra.strategies.base import ModelPart
from orchestra.trainer.evaluation import set_buffers
from orchestra.worker.layout import Layout, buffer_places
from orchestra.worker.snapshots import Part, Place, Places

Extents = dict[str, tuple[int, int]]


def places_of(part: ModelPart, whole: nn.Module) -> Places:
    """Where in the vectors of `whole` the tensors lie that `part` answers for."""
    return {
        "parameters": _places(_slots(part.module), _slots(whole), part.owned),
        "buffers": _places(_buffers(part.module), _buffers(whole), part.owned),
    }


def _slots(module: nn.Module) -> Extents:
    """First element and end of each trainable parameter, with the gap behind it."""
    layout = Layout.of_module(module)
    edges = [*(slot.offset for slot in layout.slots), layout.size]
    return dict(zip((slot.name for slot in layout.slots), pairwise(edges), strict=True))


def _buffers(module: nn.Module) -> Extents:
    named = [(name, getattr(owner, leaf).numel()) for name, owner, leaf in buffer_places(module)]
    edges = [0, *accumulate(size for _, size in named)]
    return dict(zip((name for name, _ in named), pairwise(edges), strict=True))


def _places(part: Extents, whole: Extents, owned: Iterable[str]) -> Sequence[Place]:
    """One place for each run of tensors that lie side by side in both."""
    names = frozenset(owned) & whole.keys()
    places: list[Place] = []
    for name, (first, end) in part.items():
        if name not in names:
            continue
        offset = whole[name][0]
        last = places[-1] if places else None
        if last is not None and (last.end, last.offset + last.end - last.first) == (first, offset):
            places[-1] = Place(last.first, end, last.offset)
        else:
            places.append(Place(first, end, offset))
    return places


def release(whole: nn.Module, part: nn.Module) -> None:
    """Free the memory of all parameters of `whole` that are not in `part`."""
    kept = {id(parameter) for parameter in part.parameters()}
    for parameter in whole.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.new_empty(0)


def put_together(module: nn.Module, parts: Sequence[Part]) -> None:
    """Give `module` the values in all ranks' `parts`."""
    named = dict(module.named_parameters())
    with torch.no_grad():
        for slot in Layout.of_module(module).slots:
            for part in parts:
                first = slot.offset - part.offset
                if part.kind == "parameters" and 0 <= first < part.values.numel():
                    values = part.values[first : first + slot.size]
                    named[slot.name].copy_(values.view(slot.shape))
    buffers = [(name, getattr(owner, leaf)) for name, owner, leaf in buffer_places(module)]
    set_buffers(buffers, [part for part in parts if part.kind == "buffers"])
