"""Where each parameter tensor lies in the flat vectors that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestra.errors import InputError

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
        """Of a flat vector."""
        return self.size * self.dtype.itemsize

    @staticmethod
    def of(named: Sequence[tuple[str, Tensor]]) -> Layout:
        """The layout of `named` tensors, in the given order."""
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

    @staticmethod
    def of_module(module: nn.Module) -> Layout:
        """The layout of the trainable parameters of `module`; a tied one stands once."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return Layout.of(named[::-1])

    def allocate(self, extra: int = 0) -> Tensor:
        """A zeroed flat vector of this layout, with `extra` elements behind it."""
        return torch.zeros(self.size + extra, dtype=self.dtype, device=self.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The tensors inside `vector`, in the layout's order, sharing its memory."""
        return [vector[s.offset : s.offset + s.size].view(s.shape) for s in self.slots]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The tensors inside `vector` by name."""
        return {s.name: view for s, view in zip(self.slots, self.views(vector), strict=True)}


def adopt(module: nn.Module, layout: Layout) -> Tensor:
    """Move the trainable parameters of `module` into one flat vector, keeping their identity."""
    vector = layout.allocate()
    by_name = dict(module.named_parameters())
    with torch.no_grad():
        for slot, view in zip(layout.slots, layout.views(vector), strict=True):
            parameter = by_name[slot.name]
            view.copy_(parameter)
            parameter.data = view
    return vector


class FlatModel:
    """A module whose trainable parameters are views of one flat vector: shape [layout.size]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layout = Layout.of_module(module)
        self.parameters = adopt(module, self.layout)
        self._buffers = buffer_places(module)

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        """The module's persistent buffers, by name."""
        return [(name, getattr(owner, attribute)) for name, owner, attribute in self._buffers]


def buffer_places(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Name, owner and attribute of each buffer (BatchNorm statistics and the like) in its state."""
    persistent = module.state_dict(keep_vars=True).keys()
    return [
        (name, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, _ in module.named_buffers()
        if name in persistent
    ]
