"""The residual network for small images (He et al., 2016, section 4.2)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
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
        """Shape (n, inputs, height, width) to (n, outputs, height / stride, width / stride)."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.widening))
        return functional.relu(shortcut + self.layers(x))


def resnet20() -> nn.Module:
    """Images of shape (n, 3, 32, 32) to logits of shape (n, 10); 269,722 parameters."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(inputs, outputs) for inputs, outputs in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model
