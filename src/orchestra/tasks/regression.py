"""Regression on a noisy nonlinear teacher: a task whose best possible score is known."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.tasks.task import Task

#: Units of the hidden layer, and the standard deviation of what they see before tanh: with 2, a
#: linear model explains about 0.82 of the variance.
TEACHER_HIDDEN = 32
TEACHER_GAIN = 2.0


@dataclass(frozen=True, repr=False)
class Regression(Settings):
    """Learn what a seeded random network says, through Gaussian noise.

    Inputs are standard normal. The teacher is `tanh(x A) B`, each of its outputs scaled to mean 0
    and variance 1 over the whole data; then noise of standard deviation `noise` is added. So no
    model can expect an R² above 1 / (1 + noise²): 0.990 at the default. Teacher, data and split
    follow from `data_seed` alone. The student is a network of two hidden layers with tanh.
    Loss: mean squared error; metrics: see `orchestra.tasks.scores`.
    """

    _: KW_ONLY
    inputs: int = setting(32, "numbers in a sample", low=1, high=100_000)
    outputs: int = setting(16, "numbers to predict", low=1, high=100_000)
    noise: float = setting(
        0.1, "standard deviation of the noise; the signal's is 1", low=0, high=1e6
    )
    hidden: int = setting(128, "units of each hidden layer of the student", low=1, high=100_000)
    train_samples: int = setting(8192, "samples to train on", low=2, high=100_000_000)
    validation_samples: int = setting(1024, "samples for validation", low=2, high=100_000_000)
    test_samples: int = setting(1024, "samples for the test", low=2, high=100_000_000)
    data_seed: int = setting(0, "seed of teacher, samples and noise", low=0, high=2**32 - 1)

    def build(self) -> Task:
        """The data in memory, and a student of these settings."""
        from functools import partial

        import torch

        from orchestra.tasks.classification import mlp
        from orchestra.tasks.scores import regression_scores, squared_error
        from orchestra.tasks.task import Task
        from orchestra.tasks.tensors import TensorData

        inputs, targets = self._data()
        sizes = [self.train_samples, self.validation_samples, self.test_samples]
        train, validation, test = (
            TensorData(*part)
            for part in zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)
        )
        return Task(
            model=partial(mlp, self.inputs, self.hidden, self.outputs),
            train=train,
            validation=validation,
            test=test,
            loss=squared_error,
            metrics=regression_scores,
            collate=TensorData.collate,
        )

    def _data(self) -> tuple[Tensor, Tensor]:
        """Inputs (samples, inputs) and targets (samples, outputs) of all splits, in float32."""
        import numpy
        import torch

        samples = self.train_samples + self.validation_samples + self.test_samples
        # RandomState: NumPy promises that its stream never changes.
        draw = numpy.random.RandomState(self.data_seed).standard_normal
        first = draw((self.inputs, TEACHER_HIDDEN)) * TEACHER_GAIN / self.inputs**0.5
        second = draw((TEACHER_HIDDEN, self.outputs))
        inputs = draw((samples, self.inputs))
        signal = numpy.tanh(inputs @ first) @ second
        signal = (signal - signal.mean(0)) / signal.std(0)
        targets = signal + self.noise * draw(signal.shape)
        return torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()
