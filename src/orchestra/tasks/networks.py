"""The small networks of the tasks that come with the package."""

from __future__ import annotations

from torch import nn


def small_cnn(channels: int, hidden: int, dropout: float, batch_norm: bool) -> nn.Module:
    """Images of shape (n, 1, 8, 8) to logits of shape (n, 10)."""

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
    """LeNet-5 (LeCun et al., 1998): images of shape (n, 1, 28, 28) to logits of shape (n, 10).

    61,706 parameters. As built today: padding in place of inputs of 32 x 32 pixels, ReLU, maximum
    in place of trained averages, each map of the second convolution sees all of the first.
    """
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


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Two hidden layers with tanh: shape (n, inputs) to shape (n, outputs)."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )
