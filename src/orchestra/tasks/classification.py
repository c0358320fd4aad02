"""Classification of images: their cache, loss, metric, augmentation, and the networks."""

from __future__ import annotations

import fcntl
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from orchestra.records.record import cache_folder, write_atomically
from orchestra.tasks.task import tensor_task
from orchestra.worker.batches import Batch

Tensors: TypeAlias = dict[str, Tensor]


def cached(name: str, make: Callable[[], Tensors]) -> Tensors:
    """Return the tensors of `make`, from the file `name` in the cache folder if it is whole.

    Otherwise it is made and kept there, by one process of those that ask at the same time; the
    others wait for it. A damaged file is replaced. Where the folder cannot be written, each process
    makes its own. The tensors are mapped from the file, so that processes share the memory;
    whatever is written to them stays with the writer. `name`: names the content: other content
    needs another name. `make`: gives the tensors by name; CPU, contiguous.
    """
    try:
        path = cache_folder() / name
    except RuntimeError:
        return make()
    tensors = _read(path)
    if tensors is None:
        with ExitStack() as stack:
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                # A file of its own: the content is renamed into place, and a lock would stay with
                # the old file.
                lock = stack.enter_context(path.with_suffix(".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            tensors = _read(path)  # another process may have made them meanwhile
            if tensors is None:
                tensors = make()
                with suppress(OSError):
                    write_atomically(path, save(tensors, {"crc32": _checksum(tensors)}))
    return tensors


def _read(path: Path) -> Tensors | None:
    """Return the tensors in `path`; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get("crc32")
            tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    # safetensors has no checksum: a file whose middle was damaged would be read.
    return tensors if expected == _checksum(tensors) else None


def _checksum(tensors: Tensors) -> str:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(tensors[name].numpy().data, checksum)
    return f"{checksum:08x}"


def split(
    images: Tensor, labels: Tensor, sizes: list[int], train_samples: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield splits of these `sizes`, one after the other; of the first one, its first samples."""
    for part in zip(torch.split(images, sizes), torch.split(labels, sizes), strict=True):
        yield part[0][:train_samples], part[1][:train_samples]
        train_samples = len(images)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy over the batch."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """Return the share of samples whose largest logit is their label's."""
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return {"accuracy": right.double().mean().item()}


image_task = partial(tensor_task, loss=cross_entropy, metrics=accuracy)
"""A task that classifies images."""


def standardised(
    batch: tuple[Tensor, ...], mean: float | Tensor, deviation: float | Tensor
) -> tuple[Tensor, ...]:
    """Return images of dtype uint8 as float32: from 0 to 1, less `mean`, divided by `deviation`.

    Images have shape (n, channels, height, width); mean and deviation are numbers, or tensors of
    shape (channels, 1, 1).
    """
    images, labels = batch
    return (images.float() / 255 - mean) / deviation, labels


def random_view(
    batch: tuple[Tensor, ...], mean: float | Tensor, deviation: float | Tensor
) -> tuple[Tensor, ...]:
    """Standardise images, mirror each or not, and shift it by up to 4 pixels.

    Draws from torch's global generator.
    """
    images, labels = standardised(batch, mean, deviation)
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    # After standardisation 0 is the mean colour.
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


def small_cnn(channels: int, hidden: int, dropout: float, batch_norm: bool) -> nn.Module:
    """Map images of shape (n, 1, 8, 8) to logits of shape (n, 10)."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        norm: list[nn.Module] = [nn.BatchNorm2d(outputs)] if batch_norm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU()]

    return nn.Sequential(
        *convolution(1, channels),
        *convolution(channels, 2 * channels),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, 10),
    )


def lenet5() -> nn.Module:
    """LeNet-5 as the task digits28 has it: images of shape (n, 1, 28, 28) to logits (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


class ResidualBlock(nn.Module):
    """Two convolutions, each with batch normalisation, and the input added to what they give.

    Where the block halves the image and widens it, every second row and column of the input is
    added, with zeros for the new channels (the paper's option A: no parameters).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.widening = outputs - inputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (n, inputs, height, width) to (n, outputs, height / stride, width / stride)."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.widening))
        return functional.relu(shortcut + self.layers(x))


def resnet20() -> nn.Module:
    """Map images of shape (n, 3, 32, 32) to logits of shape (n, 10); 269,722 parameters."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(ResidualBlock(inputs, outputs) for inputs, outputs in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model
