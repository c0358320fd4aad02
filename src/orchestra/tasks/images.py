"""Synthetic images of CIFAR's shape: a task for networks with many layers."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy
import torch
from numpy import float64, uint8
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from orchestra.tasks import settings
from orchestra.tasks.classification import cached, image_task, resnet20, split, standardised
from orchestra.tasks.task import Task

Numbers: TypeAlias = NDArray[float64]

#: Raise it with any change of the images: files of another recipe are not read.
RECIPE = 1
#: The images are part of the task: they stay the same whatever the seed of a run.
IMAGE_SEED = 0
TRAIN, VALIDATION, TEST = 4_000, 1_000, 2_000
SIDE, CLASSES = 32, 10
#: Waves in a texture, and the fewest and most periods of a wave across the image.
WAVES, PERIODS = 2, (1.5, 5.0)
#: The largest turn (radians) and change of size of a texture from one image to the next.
TURN, RESIZING = 0.35, 0.25
#: Of the training images at the default noise, with pixels from 0 to 1.
MEAN, DEVIATION = 0.5, 0.178
#: Images that are drawn at a time.
CHUNK = 500


def images(chosen: settings.Images) -> Task:
    """The images, mapped from the cache, and ResNet-20."""
    name = f"images-recipe{RECIPE}-noise{chosen.noise!r}.safetensors"
    made = cached(name, lambda: _made(chosen.noise))
    sizes = [TRAIN, VALIDATION, TEST]
    splits = split(made["images"], made["labels"], sizes, chosen.train_samples)
    transform = partial(standardised, mean=MEAN, deviation=DEVIATION)
    return image_task(resnet20, *splits, transform=transform)


def _made(noise: float) -> dict[str, Tensor]:
    """Make images (7000, 3, 32, 32) of dtype uint8, and labels: each class in turn."""
    # RandomState: NumPy promises that its stream never changes.
    random = numpy.random.RandomState(IMAGE_SEED)
    waves, colours = _textures(random, CLASSES)
    labels = numpy.arange(TRAIN + VALIDATION + TEST) % CLASSES
    chunks = numpy.split(labels, range(CHUNK, len(labels), CHUNK))
    images = [_drawn(waves[chunk], colours[chunk], noise, random) for chunk in chunks]
    return {
        "images": torch.from_numpy(numpy.concatenate(images)),
        "labels": torch.from_numpy(labels),
    }


def _textures(random: RandomState, count: int) -> tuple[Numbers, Numbers]:
    """Draw wave vectors (count, WAVES, 2) in periods an image, and colours (count, WAVES, 3)."""
    angles = random.uniform(0, numpy.pi, (count, WAVES))
    periods = random.uniform(*PERIODS, (count, WAVES))
    waves = numpy.stack([periods * numpy.cos(angles), periods * numpy.sin(angles)], -1)
    return waves, random.uniform(-1, 1, (count, WAVES, 3))


def _drawn(waves: Numbers, colours: Numbers, noise: float, random: RandomState) -> NDArray[uint8]:
    """Draw an image (3, 32, 32) for each texture: it, in a disc, before another one."""
    count = len(waves)
    varied = _varied(waves, random)
    mixed = (colours + random.uniform(-1, 1, colours.shape)) / 2  # half of any other colour
    figure = _painted(varied, mixed, random)
    ground = _painted(*_textures(random, count), random)
    place = (numpy.arange(SIDE) + 0.5) / SIDE
    middle = random.uniform(0.35, 0.65, (2, count, 1, 1))
    radius = random.uniform(0.3, 0.45, (count, 1, 1))
    distance = numpy.hypot(place[:, None] - middle[0], place[None, :] - middle[1])
    disc = (8 * (radius - distance) + 0.5).clip(0, 1)[:, None]
    pixels = 0.5 + disc * figure + (1 - disc) * ground
    pixels += noise * random.standard_normal(pixels.shape)
    image: NDArray[uint8] = numpy.rint(255 * pixels.clip(0, 1)).astype(numpy.uint8)
    return image


def _varied(waves: Numbers, random: RandomState) -> Numbers:
    """Turn and resize each texture."""
    angle = random.uniform(-TURN, TURN, (len(waves), 1))
    size = 1 + random.uniform(-RESIZING, RESIZING, (len(waves), 1))
    row, column = waves[..., 0], waves[..., 1]
    turned_row = numpy.cos(angle) * row - numpy.sin(angle) * column
    turned_column = numpy.sin(angle) * row + numpy.cos(angle) * column
    return numpy.stack([turned_row / size, turned_column / size], -1)


def _painted(waves: Numbers, colours: Numbers, random: RandomState) -> Numbers:
    """Paint textures (n, 3, 32, 32) around 0, each with phases and a contrast of its own."""
    count = len(waves)
    place = (numpy.arange(SIDE) + 0.5) / SIDE
    phase = random.uniform(0, 1, (count, WAVES, 1, 1))
    rows = waves[..., 0, None, None] * place[:, None]
    columns = waves[..., 1, None, None] * place[None, :]
    heights = numpy.sin(2 * numpy.pi * (rows + columns + phase))
    contrast = random.uniform(0.2, 0.4, (count, 1, 1, 1))
    painted: Numbers = contrast * numpy.einsum("nwc,nwij->ncij", colours, heights)
    return painted
