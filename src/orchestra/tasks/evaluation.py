"""Figures of a model on one split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from orchestra.errors import InputError
from orchestra.tasks.task import Task
from orchestra.worker.batches import Batch, to_device


def evaluate(
    task: Task, model: nn.Module, dataset: Dataset[Any], batch_size: int
) -> dict[str, float]:
    """`{"loss": mean over the samples of dataset, **metrics}` of `model`, on its own device.

    The dataset is read in order, in batches of `batch_size`. The model is in evaluation mode
    meanwhile, and each of its modules gets its own mode back. No random number is drawn.

    Raises:
        InputError: the metrics are not a dict of numbers.
    """
    with evaluation_mode(model), torch.no_grad():
        figures = {"loss": _mean_loss(task, model, dataset, batch_size)}
        if task.metrics is not None:
            metrics = task.metrics(model, _batches(task, model, dataset, batch_size))
            figures |= _checked(metrics)
    return figures


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each module's own mode back outside."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _mean_loss(task: Task, model: nn.Module, dataset: Dataset[Any], batch_size: int) -> float:
    sized: Any = dataset
    samples = len(sized)
    total = 0.0
    for number, batch in enumerate(_batches(task, model, dataset, batch_size)):
        total += task.loss(model, batch).item() * min(batch_size, samples - number * batch_size)
    return total / samples


def _batches(
    task: Task, model: nn.Module, dataset: Dataset[Any], batch_size: int
) -> Iterator[Batch]:
    # A generator of its own: a DataLoader draws a number from the global one when it starts.
    loader = DataLoader(dataset, batch_size, collate_fn=task.collate, generator=torch.Generator())
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for batch in loader:
        yield to_device(batch, device)


def _checked(metrics: object) -> dict[str, float]:
    if not isinstance(metrics, dict):
        raise InputError(
            f"Task.metrics returned a {type(metrics).__name__}; return a dict of names and numbers"
        )
    if "loss" in metrics:
        raise InputError("Task.metrics returned 'loss', which is the mean of Task.loss; rename it")
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Task.metrics returned a value that is no number: {error}") from None
