"""DC-ASGD's premise (Zheng et al., ICML 2017): lambda g*g is close to the Hessian's diagonal.

    python studies/dc_asgd_premise.py --seeds 5

Trains a small network on scikit-learn's digits with plain SGD, and along the way compares three
vectors of one number for each parameter: the true diagonal of the Hessian of the mean training
loss (float64, by differentiating twice, nothing sampled), the square of one batch's
gradient, which is what DC-ASGD has, and the mean of the squares of the samples' gradients. Prints a
Markdown table: means over the seeds, with the smallest and largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from orchestra.tasks.task import load_task

HIDDEN, RATE, BATCH, CHUNK, SHUFFLES = 16, 0.1, 32, 128, 20
POINTS = (0, 10, 37, 110, 370, 1110)  # steps; an epoch has 37

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """What is seen at one point of a training."""

    step: float
    loss: float
    batch: float  # cosine of the batch gradient's square and the diagonal
    batch_shuffled: float  # the same, the square's elements in random order
    samples: float  # cosine of the mean of the samples' squares and the diagonal
    negative: float  # share of the diagonal below 0, by absolute value
    strength: float  # lambda for which lambda g*g is nearest to the diagonal


def hessian_diagonal(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """d^2 loss / d at_i^2 for each i; shape of the flat vector `at`."""

    def element(direction: Tensor) -> Tensor:
        row: Tensor = grad(lambda w: grad(loss)(w) @ direction)(at)
        return row @ direction

    diagonal: Tensor = vmap(element, chunk_size=CHUNK)(torch.eye(len(at), dtype=at.dtype))
    return diagonal


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


def network(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Loss]:
    """A perceptron with one hidden layer: its flat parameters, and its loss as their function."""
    model = nn.Sequential(nn.Linear(images.shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10))
    named = {name: parameter.shape for name, parameter in model.named_parameters()}
    sizes = [shape.numel() for shape in named.values()]
    scales = [images.shape[1] ** -0.5] * 2 + [HIDDEN**-0.5] * 2
    start = torch.cat(
        [
            scale * (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
            for size, scale in zip(sizes, scales, strict=True)
        ]
    )

    def loss(flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        parts = zip(named.items(), flat.split(sizes), strict=True)
        parameters = {name: part.view(shape) for (name, shape), part in parts}
        return nn.functional.cross_entropy(functional_call(model, parameters, (inputs,)), labels)

    return start, loss


def follow(seed: int, images: Tensor, labels: Tensor) -> list[Row]:
    """One training, seen at `POINTS`."""
    generator = torch.Generator().manual_seed(seed)
    w, loss = network(images, generator)
    rows = []
    for step in range(POINTS[-1] + 1):
        chosen = torch.randperm(len(images), generator=generator)[:BATCH]
        g = grad(loss)(w, images[chosen], labels[chosen])
        if step in POINTS:
            rows.append(look(step, w, g * g, loss, images, labels, generator))
        w = w - RATE * g
    return rows


def look(
    step: int, w: Tensor, square: Tensor, loss: Loss, images: Tensor, labels: Tensor,
    generator: torch.Generator,
) -> Row:  # fmt: skip
    diagonal = hessian_diagonal(lambda at: loss(at, images, labels), w)
    of_samples = vmap(grad(loss), in_dims=(None, 0, 0))(w, images.unsqueeze(1), labels.unsqueeze(1))
    orders = [torch.randperm(len(w), generator=generator) for _ in range(SHUFFLES)]
    return Row(
        step=step,
        loss=float(loss(w, images, labels)),
        batch=cosine(square, diagonal),
        batch_shuffled=sum(cosine(square[order], diagonal) for order in orders) / SHUFFLES,
        samples=cosine(of_samples.square().mean(0), diagonal),
        negative=float(diagonal.clamp(max=0).abs().sum() / diagonal.abs().sum()),
        strength=float(square @ diagonal / (square @ square)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5, help="trainings to take the mean of")
    seeds = parser.parse_args().seeds
    data: Any = load_task("digits").train
    images = torch.stack([image.flatten() for image, _ in data]).double()
    labels = torch.tensor([int(label) for _, label in data])
    trainings = [follow(seed, images, labels) for seed in range(seeds)]
    print("| " + " | ".join(field.name.replace("_", " ") for field in fields(Row)) + " |")
    print("|" + " ---: |" * len(fields(Row)))
    for rows in zip(*trainings, strict=True):
        columns = zip(*map(astuple, rows), strict=True)
        print("| " + " | ".join(map(cell, columns)) + " |")


def cell(values: tuple[float, ...]) -> str:
    """The mean, and the range where there is one."""
    low, high = min(values), max(values)
    mean = f"{sum(values) / len(values):.3g}"
    return mean if low == high else f"{mean} ({low:.2g} to {high:.2g})"


if __name__ == "__main__":
    main()
