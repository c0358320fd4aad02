"""Images: synthetic ones of CIFAR's shape, and MNIST and CIFAR-10 from their published files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from numpy import float64, uint8
from numpy.random import RandomState
from numpy.typing import NDArray
from torch import Tensor

from orchestra.errors import InputError
from orchestra.tasks import Cifar10, Images, Mnist
from orchestra.tasks.classification import (
    cached,
    image_task,
    lenet5,
    random_view,
    resnet20,
    split,
    standardised,
)
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


def images(chosen: Images) -> Task:
    """Return the task: images mapped from the cache, and ResNet-20."""
    name = f"images-recipe{RECIPE}-noise{chosen.noise!r}.safetensors"
    made = cached(name, lambda: _made(chosen.noise))
    splits = split(made["images"], made["labels"], [TRAIN, VALIDATION, TEST], chosen.train_samples)
    transform = partial(standardised, mean=MEAN, deviation=DEVIATION)
    return image_task(resnet20, *splits, transform=transform)


def _made(noise: float) -> dict[str, Tensor]:
    """Make images (7000, 3, 32, 32) of dtype uint8, and labels: each class in turn."""
    # RandomState: NumPy promises that its stream never changes.
    random = numpy.random.RandomState(IMAGE_SEED)
    waves, colours = _textures(random, CLASSES)
    # Each class in turn, so that every split has all of them equally often.
    labels = numpy.arange(TRAIN + VALIDATION + TEST) % CLASSES
    chunks = numpy.split(labels, range(CHUNK, len(labels), CHUNK))
    drawn = [_drawn(waves[chunk], colours[chunk], noise, random) for chunk in chunks]
    images = torch.from_numpy(numpy.concatenate(drawn))
    return {"images": images, "labels": torch.from_numpy(labels)}


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


# MNIST and CIFAR-10, from the files that they are published in

#: Which images are held out is part of the task: it stays the same whatever the seed of a run.
SPLIT_SEED = 0


def data_folder(task: str, folder: str, source: str) -> Path:
    """Return the folder of the files of `task`; `source` says where they come from. Raises
    InputError: there is no such folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"task {task}: there is no folder {path.absolute()}; {source}")
    return path


def hold_out(
    task: str, tensors: tuple[Tensor, ...], samples: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return tensors of equal first dimension without `samples` entries, and these; always the same
    ones. Raises InputError: nothing would be left to train on."""
    count = len(tensors[0])
    if samples >= count:
        raise InputError(
            f"task {task}: validation_samples={samples} leaves none of {count} training images; "
            f"set it below {count}"
        )
    # RandomState: NumPy promises that its stream never changes.
    order = torch.from_numpy(numpy.random.RandomState(SPLIT_SEED).permutation(count))
    held, rest = order[:samples], order[samples:]
    return tuple(tensor[rest] for tensor in tensors), tuple(tensor[held] for tensor in tensors)


FILES = {
    "training images": "train-images-idx3-ubyte",
    "training labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
MNIST_SOURCE = (
    "the four files of MNIST are published by Yann LeCun (yann.lecun.com/exdb/mnist), and come "
    "with torchvision's datasets.MNIST, in its folder MNIST/raw"
)
#: An IDX file begins with two zeros, the type of its values (8: bytes), and its dimensions.
BYTES = 8
#: Of the published training images, with pixels from 0 to 1.
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081


def mnist(chosen: Mnist) -> Task:
    """Return the task: images in memory, and LeNet-5."""
    folder = data_folder("mnist", chosen.folder, MNIST_SOURCE)
    rest, held = hold_out("mnist", mnist_images(folder, "training"), chosen.validation_samples)
    transform = partial(standardised, mean=MNIST_MEAN, deviation=MNIST_DEVIATION)
    return image_task(lenet5, rest, held, mnist_images(folder, "test"), transform=transform)


def mnist_images(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) of dtype uint8, and labels (n,), for "training" or "test".
    InputError if a file is missing, damaged or of another kind, or the two do not fit together."""
    images_path, images = read_idx(folder, FILES[f"{split} images"], 3)
    labels_path, labels = read_idx(folder, FILES[f"{split} labels"], 1)
    if images.shape[1:] != (28, 28):
        size = " x ".join(map(str, images.shape[1:]))
        raise InputError(f"task mnist: {images_path}: images of {size} pixels, not 28 x 28")
    if len(images) != len(labels):
        raise InputError(
            f"task mnist: {images_path} holds {len(images)} images, {labels_path} {len(labels)} "
            "labels; take both from the same set"
        )
    if len(labels) == 0 or labels.max() > 9:
        found = f"a label {labels.max().item()}" if len(labels) else "no labels"
        raise InputError(f"task mnist: {labels_path}: {found}; MNIST has the labels 0 to 9")
    return images.unsqueeze(1), labels.long()


def read_idx(folder: Path, name: str, dimensions: int) -> tuple[Path, Tensor]:
    """Return the IDX file `name`, compressed or not, of `dimensions` dimensions: where it is, and
    its bytes as a tensor of that shape, dtype uint8.

    Raises InputError: the file is missing, no such thing, or not whole.
    """
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise InputError(f"task mnist: neither {name} nor {name}.gz is in {folder}; {MNIST_SOURCE}")
    content = bytearray(path.read_bytes())
    try:
        content = bytearray(gzip.decompress(content)) if path.suffix == ".gz" else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"task mnist: {path}: not a whole gzip file ({error}); fetch it again ({MNIST_SOURCE})"
        ) from None
    header, magic = 4 + 4 * dimensions, bytes([0, 0, BYTES, dimensions])
    if content[:4] != magic or len(content) < header:
        raise InputError(
            f"task mnist: {path}: begins with {content[:4].hex(' ') or 'nothing'}, not with "
            f"{magic.hex(' ')}, as an IDX file of bytes in {dimensions} dimensions does; "
            f"{MNIST_SOURCE}"
        )
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) - header != math.prod(shape):
        raise InputError(
            f"task mnist: {path}: {len(content) - header} bytes follow the header, which "
            f"announces {math.prod(shape)}; the file is not whole: fetch it again ({MNIST_SOURCE})"
        )
    # A bytearray, since torch warns of memory that cannot be written.
    return path, torch.frombuffer(content, dtype=torch.uint8)[header:].view(shape)


CIFAR_TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_SOURCE = (
    "the binary version of CIFAR-10 is published by Alex Krizhevsky "
    "(www.cs.toronto.edu/~kriz/cifar.html); its archive holds the folder cifar-10-batches-bin"
)
#: An image in a file: its label, then its red, green and blue pixels, row by row.
RECORD = 1 + 3 * 32 * 32
#: Of the published training images: red, green, blue, from 0 to 1.
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def cifar10(chosen: Cifar10) -> Task:
    """Return the task: images in memory, and ResNet-20."""
    folder = data_folder("cifar10", chosen.folder, CIFAR_SOURCE)
    rest, held = hold_out("cifar10", training_images(folder), chosen.validation_samples)
    test = cifar10_images(folder / CIFAR_TEST)
    mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in (CIFAR_MEAN, CIFAR_DEVIATION))
    view = partial(random_view, mean=mean, deviation=deviation) if chosen.augment else None
    transform = partial(standardised, mean=mean, deviation=deviation)
    return image_task(resnet20, rest, held, test, transform=transform, augmented=view)


def training_images(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the images and labels of the five training files, one after the other. Raises
    InputError: a file is missing, damaged, or holds another number of images than the rest."""
    parts = [cifar10_images(folder / name) for name in CIFAR_TRAINING]
    counts = [len(labels) for _, labels in parts]
    if len(set(counts)) > 1:
        raise InputError(
            f"task cifar10: the training files in {folder} hold {counts} images, not equally "
            f"many; the smaller ones are not whole: fetch them again ({CIFAR_SOURCE})"
        )
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def cifar10_images(path: Path) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32) of dtype uint8, and labels (n,), of one file. Raises InputError:
    it is missing, not whole, or no file of CIFAR-10."""
    if not path.is_file():
        raise InputError(f"task cifar10: {path.name} is not in {path.parent}; {CIFAR_SOURCE}")
    content = bytearray(path.read_bytes())
    if not content or len(content) % RECORD:
        raise InputError(
            f"task cifar10: {path}: {len(content)} bytes are no whole number of images of "
            f"{RECORD} bytes; fetch it again ({CIFAR_SOURCE})"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].long()
    if labels.max() > 9:
        raise InputError(
            f"task cifar10: {path}: a label {labels.max().item()}; CIFAR-10 has the labels 0 to 9 "
            f"({CIFAR_SOURCE})"
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), labels
