"""What to learn: a model, its data, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from orchestra.errors import InputError
from orchestra.worker.batches import Batch

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
