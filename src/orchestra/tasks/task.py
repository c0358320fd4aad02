"""Tasks: a model, its data, its loss and its metrics; and its figures on a split."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from orchestra.errors import InputError
from orchestra.settings import Settings, parse
from orchestra.tasks import TASKS
from orchestra.worker.batches import Batch, to_device

Loss: TypeAlias = Callable[[nn.Module, Batch], Tensor]
Metrics: TypeAlias = Callable[[nn.Module, Iterator[Batch]], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to train, and all that is needed for it.

        def spam() -> Task:
            def loss(model, batch):
                texts, labels = batch
                return functional.cross_entropy(model(texts), labels)

            def metrics(model, batches):
                right = [model(texts).argmax(1) == labels for texts, labels in batches]
                return {"accuracy": torch.cat(right).float().mean().item()}

            return Task(model=SpamNet, train=Mails("train"), test=Mails("test"),
                        loss=loss, metrics=metrics)

    Args:
        model: makes the model. It is called once on each rank, under the run's seed, so that
            every rank begins with equal parameters.
        train: a map-style dataset, or an `IterableDataset` that gives the same samples in the
            same order on every rank.
        loss: the mean loss over the samples of a batch, a scalar that can be differentiated.
        test: a map-style dataset, for the metrics of the final model.
        validation: a map-style dataset, for choices made during training.
        metrics: further figures of a model, from an iterator over the batches of a split (read
            once, in order). Called in evaluation mode, without gradients.
        collate: makes a batch from a list of samples; by default, torch's `default_collate`. A
            dataset with `__getitems__` (a batch at a time) is collated from what that returns.
        sample_flops: floating-point operations of the gradient of one sample, for a simulation
            without a calibration; by default they are counted.

    Raises:
        InputError: a part of the wrong kind, or an empty dataset.
    """

    model: Callable[[], nn.Module]
    train: Dataset[Any]
    loss: Loss
    test: Dataset[Any] | None = None
    validation: Dataset[Any] | None = None
    metrics: Metrics | None = None
    collate: Callable[[Any], Batch] | None = None
    sample_flops: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            raise InputError(
                "Task.model is a model; give a function that makes it, with no arguments"
            )
        for name in ("model", "loss", "metrics", "collate"):
            part = getattr(self, name)
            if not callable(part) and not (part is None and name in ("metrics", "collate")):
                raise InputError(f"Task.{name}: expected a function, got {part!r}")
        if not isinstance(self.train, IterableDataset):
            _check_map_style("train", self.train)
        for name in ("test", "validation"):
            if getattr(self, name) is not None:
                _check_map_style(name, getattr(self, name))


def _check_map_style(name: str, dataset: object) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        remedy = "an IterableDataset" if name == "train" else "collect its samples in a list"
        raise InputError(
            f"Task.{name}: a {type(dataset).__name__} has no __getitem__ and __len__; give a "
            f"map-style dataset, or {remedy}"
        )
    if len(dataset) == 0:
        raise InputError(f"Task.{name}: the dataset has no samples")


Transform = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class TensorData(Dataset[tuple[Tensor, ...]]):
    """Tensors of equal first dimension; sample i is the tuple of their i-th entries.

    A batch is one indexing of each tensor, with no work per sample. A reader of such batches (a
    DataLoader is one) needs `collate=TensorData.collate`.

    Args:
        tensors: each of shape (samples, ...).
        transform: changes each batch when it is read, such as a random augmentation.

    Raises:
        InputError: no tensors, or of unequal length.
    """

    def __init__(self, *tensors: Tensor, transform: Transform | None = None) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise InputError(f"TensorData: give tensors of one equal length; theirs: {lengths}")
        self.tensors = tensors
        self._transform = transform

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return the batch of the samples `indices`, already collated."""
        # torch's loaders ask for a whole batch at once where a dataset has `__getitems__`.
        batch = tuple(tensor[indices] for tensor in self.tensors)
        return batch if self._transform is None else self._transform(batch)

    @staticmethod
    def collate(samples: Any) -> Any:
        """Return a tuple, a batch already, as it is; collate a list of samples as usual."""
        return samples if isinstance(samples, tuple) else default_collate(samples)


def tensor_task(
    model: Callable[[], nn.Module],
    *splits: tuple[Tensor, ...],
    loss: Loss,
    metrics: Metrics,
    transform: Transform | None = None,
    augmented: Transform | None = None,
) -> Task:
    """Return a task whose samples are in memory: tensors for training, validation and test.
    `transform` changes each batch when it is read; `augmented`, if given, each training batch."""
    train, validation, test = splits
    return Task(
        model=model,
        train=TensorData(*train, transform=augmented or transform),
        validation=TensorData(*validation, transform=transform),
        test=TensorData(*test, transform=transform),
        loss=loss,
        metrics=metrics,
        collate=TensorData.collate,
    )


def load_task(given: object, *, where: str = "task") -> Task:
    """Return the task that `given` stands for.

    Args:
        given: a `Task`; settings with a `build()`; a function or class that gives either when it
            is called without arguments; or the notation of one of these as text, such as
            "digits", "digits(dropout=0.5)" or "package.module:function".
        where: opens the message of an error.

    Raises:
        InputError: an unknown name or argument, or something that does not give a `Task`.
    """
    try:
        made = _made(given, where)
    except OSError as error:
        if error.filename is None:
            raise
        reason = f"cannot read {error.filename}: {error.strerror}"
        raise InputError(f"{where}: {given}: {reason}") from error
    if not isinstance(made, Task):
        name = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
        model = "a model, " * isinstance(made, nn.Module)
        raise InputError(
            f"{where}: {name} gives {model}a {type(made).__name__}, not an orchestra.tasks.Task: "
            "return Task(model=..., train=..., loss=...), in which model is a function that makes "
            "the model"
        )
    return made


def _made(given: object, where: str) -> Any:
    if isinstance(given, str):
        made = parse(given, TASKS, where=where)
    elif callable(given) and not isinstance(given, nn.Module):
        made = given()
    else:
        made = given
    return made.build() if isinstance(made, Settings) and hasattr(made, "build") else made


def evaluate(
    task: Task, model: nn.Module, dataset: Dataset[Any], batch_size: int
) -> dict[str, float]:
    """Return `{"loss": mean over the samples of dataset, **metrics}` of `model`, on its own
    device.

    The dataset is read in order, in batches of `batch_size`. The model is in evaluation mode
    meanwhile, and each of its modules gets its own mode back. No random number is drawn. InputError
    if the metrics are not a dict of numbers.
    """
    total = 0.0
    sized: Any = dataset
    # A generator of its own: a DataLoader draws a number from the global one when it starts.
    loader = DataLoader(dataset, batch_size, collate_fn=task.collate, generator=torch.Generator())
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def measured() -> Iterator[Batch]:
        nonlocal total
        left = len(sized)
        for batch in (to_device(batch, device) for batch in loader):
            total += task.loss(model, batch).item() * min(batch_size, left)
            left -= batch_size
            yield batch

    with evaluation_mode(model), torch.no_grad(), one_forward_each(model):
        batches = measured()
        metrics = _checked(task.metrics(model, batches)) if task.metrics is not None else {}
        # The loss is of all batches, also of those that the metrics left unread.
        for _ in batches:
            pass
    return {"loss": total / len(sized), **metrics}


@contextmanager
def one_forward_each(model: nn.Module) -> Iterator[None]:
    """Remember the last outputs inside: a second call with the same inputs returns them. The loss
    of a batch is computed before its metrics, so the metrics may change the outputs in place."""
    before = model.__dict__.get("forward")
    forward = model.forward
    known: tuple[tuple[Any, ...], Any] = ((), None)

    def remembered(*inputs: Any, **named: Any) -> Any:
        nonlocal known
        if named or not inputs:
            return forward(*inputs, **named)
        # By identity: the last inputs are held, so that no other tensor can have their place.
        same = len(known[0]) == len(inputs) and all(map(operator.is_, known[0], inputs))
        if not same:
            known = (inputs, forward(*inputs))
        return known[1]

    # On the object, in front of its class: hooks and `__call__` find it there.
    model.__dict__["forward"] = remembered
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode inside; restore each module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
