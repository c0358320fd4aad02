"""Loss and metrics for batches of (inputs, targets), with targets of shape (n, outputs)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestra.worker.batches import Batch


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the batch and the outputs."""
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def regression_scores(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """`scores` of what `model` predicts for all of `batches`."""
    pairs = [(model(inputs), targets) for inputs, targets in batches]
    predictions, targets = (torch.cat(parts).cpu() for parts in zip(*pairs, strict=True))
    return scores(predictions, targets)


def scores(predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Figures of a regression, all computed in float64; both tensors have shape (n, outputs).

    - `mae`, `mse`: mean absolute and mean squared error over all n x outputs numbers.
    - `test_variance`: the population variance (divided by the count) of all n x outputs targets
      as one pool; the one mean of that whole pool is subtracted.
    - `r2_pooled`: 1 - (sum of squared errors) / (sum of squared deviations from that one mean);
      so it is 1 - mse / test_variance.
    - `r2_mean`: the plain mean of the R² of each output, from that output's own mean.
    """
    predictions, targets = predictions.double(), targets.double()
    errors = targets - predictions
    mse = errors.square().mean().item()
    variance = targets.var(correction=0).item()
    unexplained = errors.square().sum() / (targets - targets.mean()).square().sum()
    assert math.isnan(mse) or math.isclose(unexplained.item(), mse / variance, rel_tol=1e-9)
    deviations = (targets - targets.mean(0)).square().sum(0)
    each = 1 - errors.square().sum(0) / deviations
    return {
        "mae": errors.abs().mean().item(),
        "mse": mse,
        "test_variance": variance,
        "r2_pooled": 1 - unexplained.item(),
        "r2_mean": each.mean().item(),
    }
