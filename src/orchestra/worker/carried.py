"""Buffers that travel with the gradient, from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestra.errors import InputError

Named = Sequence[tuple[str, Tensor]]


def require_dense(named: Named) -> None:
    """Raise `InputError` for a buffer into which no values can be copied."""
    for name, tensor in named:
        if tensor.layout is not torch.strided or 0 in tensor.stride():
            raise InputError(
                f"buffer {name!r} is sparse, or expanded from fewer elements, so that no values "
                "can be copied into it: make it dense (to_dense(), or clone()), or persistent=False"
            )


def elements_of(count: int, dtype: torch.dtype, within: torch.dtype) -> int:
    """Return how many elements of dtype `within` carry `count` of `dtype`."""
    return count if _fits(dtype, within) else count * dtype.itemsize


def _fits(dtype: torch.dtype, within: torch.dtype) -> bool:
    """Return whether all values of `dtype` are values of the floating `within`."""
    return dtype.is_floating_point and torch.promote_types(dtype, within) == within


class CarriedBuffers:
    """The buffers that `named` returns, in elements of a vector that all ranks add up.

    The rank that gives them writes its values, every other -0.0, which changes no value that it is
    added to, zeros of either sign included. A buffer of a dtype that the vector's cannot hold goes
    byte by byte, each in an element: any floating dtype holds the numbers to 255.

    Attributes:
        size: elements in a vector of `dtype`.
    """

    def __init__(self, named: Callable[[], Named], dtype: torch.dtype) -> None:
        self._named = named
        self._dtype = dtype
        self.size = sum(elements_of(tensor.numel(), tensor.dtype, dtype) for _, tensor in named())

    def _tensors(self) -> tuple[list[Tensor], dict[torch.dtype, list[Tensor]]]:
        """Return the buffers that go as they are, and others, by dtype."""
        named = self._named()
        require_dense(named)
        whole, others = [], dict[torch.dtype, list[Tensor]]()
        for _, tensor in named:
            if _fits(tensor.dtype, self._dtype):
                whole.append(tensor.detach())
            else:
                others.setdefault(tensor.dtype, []).append(tensor.detach())
        return whole, others

    @torch.no_grad()
    def put(self, vector: Tensor, *, gives: bool) -> None:
        """Write what is to be added up into `vector`, of shape [size]."""
        if not gives:
            vector.fill_(-0.0)
            return
        whole, others = self._tensors()
        _copy(_views(vector, whole), whole)
        at = sum(tensor.numel() for tensor in whole)
        for tensors in others.values():
            content = torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8)
            vector[at : at + len(content)].copy_(content)
            at += len(content)

    @torch.no_grad()
    def take(self, vector: Tensor) -> None:
        """Take the values of the rank that gave them from the sum, `vector`."""
        whole, others = self._tensors()
        _copy(whole, _views(vector, whole))
        at = sum(tensor.numel() for tensor in whole)
        for dtype, tensors in others.items():
            length = dtype.itemsize * sum(tensor.numel() for tensor in tensors)
            content = vector[at : at + length].to(torch.uint8).view(dtype)
            _copy(tensors, _views(content, tensors))
            at += length


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:  # no operation takes lists without a tensor
        torch._foreach_copy_(to, source)


def _views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the first elements of `vector` in the shapes of the tensors in `like`."""
    sizes = [tensor.numel() for tensor in like]
    parts = vector[: sum(sizes)].split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
