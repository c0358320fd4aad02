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


def standardised(
    batch: tuple[Tensor, ...], mean: float | Tensor, deviation: float | Tensor
) -> tuple[Tensor, ...]:
    """Images of dtype uint8 as float32: from 0 to 1, less `mean`, divided by `deviation`.

    Images have shape (n, channels, height, width); mean and deviation are numbers, or tensors of
    shape (channels, 1, 1).
    """
    images, labels = batch
    return (images.float() / 255 - mean) / deviation, labels


def random_view(
    batch: tuple[Tensor, ...], mean: float | Tensor, deviation: float | Tensor
) -> tuple[Tensor, ...]:
    """`standardised`, then each image mirrored or not, and shifted by up to 4 pixels.

    Draws from torch's global generator.
    """
    images, labels = standardised(batch, mean, deviation)
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return random_shift((torch.where(mirrored, images.flip(3), images), labels), 0.0, reach=4)


def random_shift(
    batch: tuple[Tensor, ...], background: float, reach: int = 1
) -> tuple[Tensor, ...]:
    """Shift each image by up to `reach` pixels in each direction; `background` fills the gap.

    Images have shape (n, channels, height, width). Draws from torch's global generator.
    """
    images, labels = batch
    count, _, height, width = images.shape
    padded = functional.pad(images, (reach, reach, reach, reach), value=background)
    shift = torch.randint(2 * reach + 1, (2, count, 1))
    rows = shift[0] + torch.arange(height)
    columns = shift[1] + torch.arange(width)
    samples = torch.arange(count)[:, None, None]
    shifted = padded[samples, :, rows[:, :, None], columns[:, None, :]]
    return shifted.permute(0, 3, 1, 2).contiguous(), labels
