"""MNIST, from the files that it is published in."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Settings, setting
from orchestra.tasks.folder import data_folder, hold_out

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.tasks.task import Task

FILES = {
    "training images": "train-images-idx3-ubyte",
    "training labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
SOURCE = (
    "the four files of MNIST are published by Yann LeCun (yann.lecun.com/exdb/mnist), and come "
    "with torchvision's datasets.MNIST, in its folder MNIST/raw"
)
#: An IDX file begins with two zeros, the type of its values (8: bytes), and its dimensions.
BYTES = 8
#: Of the published training images, with pixels from 0 to 1.
MEAN, DEVIATION = 0.1307, 0.3081


@dataclass(frozen=True, repr=False)
class Mnist(Settings):
    """MNIST: handwritten digits of 28 x 28 pixels, from IDX files that you have.

    60,000 images for training, of which the same ones are always held out for validation, and
    10,000 for the test (LeCun et al., 1998). Files may be compressed (.gz). The model is LeNet-5,
    see the task digits28. Loss: cross entropy; metric: accuracy.
    """

    folder: str = setting(REQUIRED, "where the four files are")
    _: KW_ONLY
    validation_samples: int = setting(
        5000, "training images held out for validation", low=1, high=59_999
    )

    def build(self) -> Task:
        """The images in memory, and a model.

        Raises:
            InputError: a file is missing, damaged or of another kind.
        """
        from functools import partial

        from orchestra.tasks.classification import accuracy, cross_entropy, lenet5, standardised
        from orchestra.tasks.task import Task
        from orchestra.tasks.tensors import TensorData

        folder = data_folder("mnist", self.folder, SOURCE)
        train = mnist_images(folder, "training")
        test = mnist_images(folder, "test")
        rest, validation = hold_out("mnist", train, self.validation_samples)
        transform = partial(standardised, mean=MEAN, deviation=DEVIATION)
        return Task(
            model=lenet5,
            train=TensorData(*rest, transform=transform),
            validation=TensorData(*validation, transform=transform),
            test=TensorData(*test, transform=transform),
            loss=cross_entropy,
            metrics=accuracy,
            collate=TensorData.collate,
        )


def mnist_images(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 28, 28) of dtype uint8, and labels (n,), of the "training" or "test" split.

    Raises:
        InputError: a file is missing, damaged or of another kind, or the two do not fit together.
    """
    images_path = _found(folder, FILES[f"{split} images"])
    labels_path = _found(folder, FILES[f"{split} labels"])
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
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


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The bytes in an IDX file of so many dimensions, as a tensor of that shape, dtype uint8.

    Raises:
        InputError: the file is no such thing, or not whole.
    """
    import torch

    content = _content(path)
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, BYTES, dimensions]) or len(content) < header:
        raise InputError(
            f"task mnist: {path}: begins with {content[:4].hex(' ') or 'nothing'}, not with "
            f"{bytes([0, 0, BYTES, dimensions]).hex(' ')}, as an IDX file of bytes in "
            f"{dimensions} dimensions does; {SOURCE}"
        )
    words = memoryview(content)[4:header]
    shape = [int.from_bytes(words[at : at + 4], "big") for at in range(0, len(words), 4)]
    values = torch.tensor(shape).prod().item()
    if len(content) - header != values:
        raise InputError(
            f"task mnist: {path}: {len(content) - header} bytes follow the header, which "
            f"announces {values}; the file is not whole: fetch it again ({SOURCE})"
        )
    return torch.frombuffer(content, dtype=torch.uint8)[header:].view(shape)


def _found(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(f"task mnist: neither {name} nor {name}.gz is in {folder}; {SOURCE}")


def _content(path: Path) -> bytearray:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return bytearray(content)
    try:
        return bytearray(gzip.decompress(content))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"task mnist: {path}: not a whole gzip file ({error}); fetch it again ({SOURCE})"
        ) from None
