"""Classification of images: their cache, loss, metric, augmentation, networks; handwritten digits.

The digits are the first task to try a strategy on, and the same in 28 x 28 pixels.
"""

from __future__ import annotations

import fcntl
import importlib.util
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from numpy import float64, int32, int64, uint8
from numpy.random import RandomState
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from orchestra.errors import InputError
from orchestra.records.files import cache_folder, write_atomically
from orchestra.tasks import Digits, Digits28
from orchestra.tasks.task import Task, tensor_task
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
    """Standardise images, mirror each or not, and shift it by up to 4 pixels. Draws from torch's
    global generator."""
    images, labels = standardised(batch, mean, deviation)
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    # After standardisation 0 is the mean colour.
    return random_shift((torch.where(mirrored, images.flip(3), images), labels), 0.0, reach=4)


def random_shift(
    batch: tuple[Tensor, ...], background: float, reach: int = 1
) -> tuple[Tensor, ...]:
    """Shift each image by up to `reach` pixels in each direction; `background` fills the gap.
    Images have shape (n, channels, height, width). Draws from torch's global generator."""
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


# Handwritten digits

Images: TypeAlias = NDArray[uint8]  # (n, 28, 28)
Places: TypeAlias = NDArray[float64]

#: The split is part of the task: it stays the same whatever the seed of a run.
SPLIT_SEED = 0


def digits(chosen: Digits) -> Task:
    """Return the task: scikit-learn's digits, and a small CNN."""
    pixels, labels, *parts = split_digits()
    # Of the training images alone: nothing of the test may be known in training.
    mean, deviation = pixels[parts[0]].mean(), pixels[parts[0]].std()
    images = ((pixels - mean) / deviation).unsqueeze(1)
    shift = partial(random_shift, background=float(-mean / deviation))
    return image_task(
        partial(small_cnn, chosen.channels, chosen.hidden, chosen.dropout, chosen.batch_norm),
        *((images[part], labels[part]) for part in parts),
        augmented=shift if chosen.augment else None,
    )


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return pixels (1797, 8, 8), labels, and places of training, validation and test images."""
    table = numpy.loadtxt(_file(), delimiter=",", dtype=numpy.int64)
    images, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    # RandomState: NumPy promises that its stream never changes. Sorted by class, every sixth
    # image goes to the test and every sixth to the validation: each class in proportion.
    shuffled = numpy.random.RandomState(SPLIT_SEED).permutation(len(target))
    by_class = shuffled[numpy.argsort(target[shuffled], kind="stable")]
    turn = numpy.arange(len(by_class)) % 6
    parts = [by_class[(turn != 0) & (turn != 3)], by_class[turn == 3], by_class[turn == 0]]
    train, validation, test = map(torch.from_numpy, parts)
    pixels, labels = torch.from_numpy(images).float(), torch.from_numpy(target).clone()
    return pixels, labels, train, validation, test


def _file() -> Path:
    """Find the table inside scikit-learn without importing it: that takes over a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise InputError("task digits: its images come with scikit-learn: pip install scikit-learn")
    return Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


#: Raise it with any change of the images: files of another recipe are not read.
RECIPE = 1
#: The images are part of the task: they stay the same whatever the seed of a run.
IMAGE_SEED = 0
TRAIN, VALIDATION, TEST = 20_000, 4_000, 4_000
#: Pixels of an image, and of the digit inside it, as in MNIST.
SIDE, DIGIT = 28, 20
#: Distortions of strength 1: the largest rotation (radians), change of size and shear, the largest
#: shift (pixels), and the standard deviation (pixels) of the elastic pull at GRID x GRID points.
ROTATION, RESIZING, SHEAR, SHIFT, ELASTIC, GRID = 0.35, 0.2, 0.2, 2.0, 0.7, 5
#: Of the training images at the default distortion, with pixels from 0 to 1.
MEAN, DEVIATION = 0.158, 0.286
#: Images that are distorted at a time.
CHUNK = 2_000


def digits28(chosen: Digits28) -> Task:
    """Return the task: distorted digits, and LeNet-5."""
    images, labels, _ = distorted_digits(chosen.distortion)
    splits = split(images, labels, [TRAIN, VALIDATION, TEST], chosen.train_samples)
    transform = partial(standardised, mean=MEAN, deviation=DEVIATION)
    return image_task(lenet5, *splits, transform=transform)


def distorted_digits(distortion: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels, and for each image the index of its scikit-learn digit (0 to 1,796).

    Images have shape (28000, 1, 28, 28) and dtype uint8: 20,000 for training, 4,000 for
    validation, 4,000 for the test. From the cache, or made and put there.
    """
    name = f"digits28-recipe{RECIPE}-distortion{distortion!r}.safetensors"
    made = cached(name, lambda: _made(distortion))
    return made["images"], made["labels"], made["originals"]


def _made(distortion: float) -> dict[str, Tensor]:
    pixels, labels, *parts = split_digits()
    # RandomState: NumPy promises that its stream never changes.
    random = numpy.random.RandomState(IMAGE_SEED)
    sizes = zip(parts, (TRAIN, VALIDATION, TEST), strict=True)
    # Split before distorting: two distortions of one original would be in training and test.
    originals = numpy.concatenate([_in_turns(part.numpy(), size, random) for part, size in sizes])
    large = _enlarged(pixels.double().numpy())
    chunks = numpy.split(originals, range(CHUNK, len(originals), CHUNK))
    images = [_distorted(large[chunk], distortion, random) for chunk in chunks]
    return {
        "images": torch.from_numpy(numpy.concatenate(images)).unsqueeze(1),
        "labels": labels[originals],
        "originals": torch.from_numpy(originals),
    }


def _in_turns(originals: NDArray[int64], size: int, random: RandomState) -> NDArray[int64]:
    """Return `size` of `originals`: all of them in a new order, again and again."""
    turns = -(-size // len(originals))
    return numpy.concatenate([random.permutation(originals) for _ in range(turns)])[:size]


def _enlarged(pixels: Places) -> Images:
    """Turn (n, 8, 8), pixels from 0 to 16, into a digit in the middle of (n, 28, 28)."""
    matrix = _cubic(DIGIT, pixels.shape[1])
    large = numpy.clip(matrix @ pixels @ matrix.T, 0, 16)
    margin = (SIDE - DIGIT) // 2
    # Many levels lie halfway between two: rounded first, they fall to the same side everywhere.
    levels = numpy.rint(numpy.round(large * 255 / 16, 6)).astype(numpy.uint8)
    return numpy.pad(levels, ((0, 0), (margin, margin), (margin, margin)))


def _cubic(outputs: int, inputs: int) -> Places:
    """Return the (outputs, inputs) matrix of cubic interpolation (Keys, 1981), ends repeated."""
    places = (numpy.arange(outputs) + 0.5) * inputs / outputs - 0.5
    nearest = numpy.floor(places).astype(int)
    matrix = numpy.zeros((outputs, inputs))
    for offset in range(-1, 3):
        away = abs(places - nearest - offset)
        near = 1.5 * away**3 - 2.5 * away**2 + 1
        far = -0.5 * away**3 + 2.5 * away**2 - 4 * away + 2
        column = numpy.clip(nearest + offset, 0, inputs - 1)
        numpy.add.at(
            matrix, (numpy.arange(outputs), column), numpy.where(away <= 1, near, far * (away < 2))
        )
    return matrix


def _distorted(images: Images, strength: float, random: RandomState) -> Images:
    """Give each of `images` a distortion of its own."""
    count = len(images)
    draws = strength * random.uniform(-1, 1, (6, count, 1, 1))
    turn, shear = ROTATION * draws[0], SHEAR * draws[1]
    height, width = 1 + RESIZING * draws[2:4]
    down, right = SHIFT * draws[4:6]
    pull = strength * ELASTIC * random.standard_normal((2, count, GRID, GRID))
    smooth = _cubic(SIDE, GRID)
    pull_rows, pull_columns = smooth @ pull @ smooth.T
    # Where in the enlarged original each pixel comes from, counted from the middle.
    middle = (SIDE - 1) / 2
    place = numpy.arange(SIDE) - middle
    row, column = place[:, None], place[None, :]
    rows = numpy.cos(turn) * row - numpy.sin(turn) * column
    columns = numpy.sin(turn) * row + numpy.cos(turn) * column + shear * rows
    return _sampled(
        images,
        rows / height + down + pull_rows + middle,
        columns / width + right + pull_columns + middle,
    )


def _sampled(images: Images, rows: Places, columns: Places) -> Images:
    """Interpolate each image linearly at its places, shape (n, 28, 28); background outside. In
    whole numbers, 256 steps a pixel: the last bits of a machine's floating point leave no trace."""
    padded = numpy.pad(images, ((0, 0), (1, 1), (1, 1))).astype(numpy.int32)

    def fixed(places: Places) -> tuple[NDArray[int32], NDArray[int32]]:
        steps = numpy.rint(256 * (places + 1)).clip(0, 256 * (SIDE + 1) - 1).astype(numpy.int32)
        return steps >> 8, steps & 255

    (top, down), (left, right) = fixed(rows), fixed(columns)
    width = SIDE + 2
    corner = numpy.arange(len(images))[:, None, None] * width**2 + top * width + left
    pixels = padded.ravel()
    upper = pixels[corner] * (256 - right) + pixels[corner + 1] * right
    lower = pixels[corner + width] * (256 - right) + pixels[corner + width + 1] * right
    mixed = (upper * (256 - down) + lower * down + 2**15) >> 16
    sampled: Images = mixed.astype(numpy.uint8)
    return sampled
