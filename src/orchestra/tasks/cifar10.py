"""CIFAR-10, from the files of its binary version."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.settings import REQUIRED, Settings, setting
from orchestra.tasks.folder import data_folder, hold_out

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.tasks.task import Task

TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
SOURCE = (
    "the binary version of CIFAR-10 is published by Alex Krizhevsky "
    "(www.cs.toronto.edu/~kriz/cifar.html); its archive holds the folder cifar-10-batches-bin"
)
#: An image in a file: its label, then its red, green and blue pixels, row by row.
RECORD = 1 + 3 * 32 * 32
#: Of the published training images: red, green, blue, from 0 to 1.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, repr=False)
class Cifar10(Settings):
    """CIFAR-10: photographs of 32 x 32 pixels in ten classes, from binary files that you have.

    50,000 images for training, of which the same ones are always held out for validation, and
    10,000 for the test (Krizhevsky, 2009). The model is ResNet-20, see the task images.
    Loss: cross entropy; metric: accuracy.
    """

    folder: str = setting(REQUIRED, "where the six files are")
    _: KW_ONLY
    validation_samples: int = setting(
        5000, "training images held out for validation", low=1, high=49_999
    )
    augment: bool = setting(
        True, "mirror each training image or not, and shift it by up to 4 pixels, at random"
    )

    def build(self) -> Task:
        """The images in memory, and a model.

        Raises:
            InputError: a file is missing, damaged or of another kind.
        """
        from functools import partial

        import torch

        from orchestra.tasks.classification import (
            accuracy,
            cross_entropy,
            random_view,
            resnet20,
            standardised,
        )
        from orchestra.tasks.task import Task
        from orchestra.tasks.tensors import TensorData

        folder = data_folder("cifar10", self.folder, SOURCE)
        train, test = training_images(folder), cifar10_images(folder / TEST)
        rest, validation = hold_out("cifar10", train, self.validation_samples)
        mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, DEVIATION))
        plain = partial(standardised, mean=mean, deviation=deviation)
        augmented = partial(random_view, mean=mean, deviation=deviation)
        return Task(
            model=resnet20,
            train=TensorData(*rest, transform=augmented if self.augment else plain),
            validation=TensorData(*validation, transform=plain),
            test=TensorData(*test, transform=plain),
            loss=cross_entropy,
            metrics=accuracy,
            collate=TensorData.collate,
        )


def training_images(folder: Path) -> tuple[Tensor, Tensor]:
    """The images and labels of the five training files, one after the other.

    Raises:
        InputError: a file is missing, damaged, or holds another number of images than the rest.
    """
    import torch

    parts = [cifar10_images(folder / name) for name in TRAINING]
    counts = [len(labels) for _, labels in parts]
    if len(set(counts)) > 1:
        raise InputError(
            f"task cifar10: the training files in {folder} hold {counts} images, not equally "
            f"many; the smaller ones are not whole: fetch them again ({SOURCE})"
        )
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)


def cifar10_images(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) of dtype uint8, and labels (n,), of one file.

    Raises:
        InputError: it is missing, not whole, or no file of CIFAR-10.
    """
    import torch

    if not path.is_file():
        raise InputError(f"task cifar10: {path.name} is not in {path.parent}; {SOURCE}")
    content = bytearray(path.read_bytes())
    if not content or len(content) % RECORD:
        raise InputError(
            f"task cifar10: {path}: {len(content)} bytes are no whole number of images of "
            f"{RECORD} bytes; fetch it again ({SOURCE})"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].long()
    if labels.max() > 9:
        raise InputError(
            f"task cifar10: {path}: a label {labels.max().item()}; CIFAR-10 has the labels 0 to 9 "
            f"({SOURCE})"
        )
    return records[:, 1:].reshape(-1, 3, 32, 32), labels
