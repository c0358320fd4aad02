"""A dataset that is held in memory as tensors, and read a whole batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from orchestra.errors import InputError

Transform = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class TensorData(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal first dimension; sample i is the tuple of their i-th entries.

    A batch is one indexing of each tensor, with no work per sample. Whoever reads it so (a
    DataLoader does) needs `collate=TensorData.collate`.

    Args:
        tensors: each of shape (samples, ...).
        transform: changes each batch when it is read, such as a random augmentation.

    Raises:
        InputError: no tensors, or of unequal length.
    """

    def __init__(self, *tensors: Tensor, transform: Transform | None = None) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise InputError(f"TensorData: give tensors of one equal length; theirs: {lengths}")
        self.tensors = tensors
        self._transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """The batch of the samples `indices`, already collated."""
        batch = tuple(tensor[indices] for tensor in self.tensors)
        return batch if self._transform is None else self._transform(batch)

    @staticmethod
    def collate(samples: Any) -> Any:
        """A tuple is a batch already; a list of samples becomes one as usual."""
        return samples if isinstance(samples, tuple) else default_collate(samples)
