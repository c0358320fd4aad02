"""Handwritten digits: the first task to try a strategy on."""

from __future__ import annotations

import importlib.util
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.tasks.task import Task

#: The split is part of the task: it stays the same whatever the seed of a run.
SPLIT_SEED = 0


@dataclass(frozen=True, repr=False)
class Digits(Settings):
    """scikit-learn's digits: 1,797 images of real handwriting, 8 x 8 pixels, ten classes.

    The split is fixed and stratified: 1,198 images for training, 299 for validation, 300 for the
    test. Pixels are scaled by the mean and standard deviation of the training images. The model
    is a CNN of two convolutions and two linear layers; loss: cross entropy; metric: accuracy.
    """

    _: KW_ONLY
    channels: int = setting(
        16, "channels of the first convolution; the second has twice as many", low=1, high=10_000
    )
    hidden: int = setting(128, "units of the hidden linear layer", low=1, high=100_000)
    dropout: float = setting(0.0, "share of hidden units dropped in training", low=0, high=1)
    batch_norm: bool = setting(False, "normalise each batch after the convolutions")
    augment: bool = setting(False, "shift each training image by up to one pixel, at random")

    def build(self) -> Task:
        """The data in memory, and a model of these settings."""
        from functools import partial

        from orchestra.tasks.classification import accuracy, cross_entropy, random_shift
        from orchestra.tasks.networks import small_cnn
        from orchestra.tasks.task import Task
        from orchestra.tasks.tensors import TensorData

        pixels, labels, train, validation, test = split_digits()
        mean, deviation = pixels[train].mean(), pixels[train].std()
        images = ((pixels - mean) / deviation).unsqueeze(1)
        background = float(-mean / deviation)
        shift = partial(random_shift, background=background) if self.augment else None
        return Task(
            model=partial(small_cnn, self.channels, self.hidden, self.dropout, self.batch_norm),
            train=TensorData(images[train], labels[train], transform=shift),
            validation=TensorData(images[validation], labels[validation]),
            test=TensorData(images[test], labels[test]),
            loss=cross_entropy,
            metrics=accuracy,
            collate=TensorData.collate,
        )


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pixels (1797, 8, 8), labels, and the places of training, validation and test images."""
    import numpy
    import torch

    table = numpy.loadtxt(_file(), delimiter=",", dtype=numpy.int64)
    images, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    # RandomState: NumPy promises that its stream never changes. Sorted by class, every sixth
    # image goes to the test and every sixth to the validation: each class in proportion.
    shuffled = numpy.random.RandomState(SPLIT_SEED).permutation(len(target))
    by_class = shuffled[numpy.argsort(target[shuffled], kind="stable")]
    turn = numpy.arange(len(by_class)) % 6
    parts = [by_class[(turn != 0) & (turn != 3)], by_class[turn == 3], by_class[turn == 0]]
    train, validation, test = (torch.from_numpy(part) for part in parts)
    return (
        torch.from_numpy(images).float(),
        torch.from_numpy(target).clone(),
        train,
        validation,
        test,
    )


def _file() -> Path:
    """The table inside scikit-learn, found without importing it: that takes over a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise InputError("task digits: its images come with scikit-learn: pip install scikit-learn")
    return Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
