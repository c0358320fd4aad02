"""Loss, metric and augmentation for batches of (images, labels)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.worker.batches import Batch


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the batch."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """The share of samples whose largest logit is their label's."""
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return {"accuracy": right.double().mean().item()}


def random_shift(batch: tuple[Tensor, ...], background: float) -> tuple[Tensor, ...]:
    """Shift each image by -1, 0 or 1 pixel in each direction; `background` fills the gap.

    Images have shape (n, channels, height, width). Draws from torch's global generator.
    """
    images, labels = batch
    count, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1), value=background)
    shift = torch.randint(3, (2, count, 1))
    rows = shift[0] + torch.arange(height)
    columns = shift[1] + torch.arange(width)
    samples = torch.arange(count)[:, None, None]
    shifted = padded[samples, :, rows[:, :, None], columns[:, None, :]]
    return shifted.permute(0, 3, 1, 2).contiguous(), labels
