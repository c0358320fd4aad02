"""Handwritten digits: the first task to try a strategy on, and the same in 28 x 28 pixels."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from numpy import float64, int32, int64, uint8
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from orchestra.errors import InputError
from orchestra.tasks import Digits, Digits28
from orchestra.tasks.classification import (
    cached,
    image_task,
    lenet5,
    random_shift,
    small_cnn,
    split,
    standardised,
)
from orchestra.tasks.task import Task

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
    """Return images, labels, and of which of scikit-learn's digits (0 to 1,796) each is made.

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
    """Interpolate each image linearly at its places, shape (n, 28, 28); background outside.

    In whole numbers, 256 steps a pixel: the last bits of a machine's floating point leave no trace.
    """
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
