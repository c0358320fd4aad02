"""Models, tasks and strategies that the package does not know."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from examples.own_strategy import DynamicAveraging
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from orchestra import exchange
from orchestra.settings import setting
from orchestra.strategies.all_reduce import AllReduce, AllReduceMember
from orchestra.strategies.base import Roles
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.traits import Traits, WorkMode
from orchestra.tasks import Digits, Task, TensorData
from orchestra.worker.worker import Worker

CLASSES = 4


def initialised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Parameters from a generator of its own: threads share the global one."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.to(dtype)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(96, 20), nn.ReLU(), nn.Linear(20, CLASSES),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, CLASSES))


def deep() -> nn.Module:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), *hidden, nn.Linear(24, CLASSES)
    )


def compiled() -> nn.Module:
    model = deep()
    model.compile(backend="eager")
    return model


def large() -> nn.Module:
    """Of 2 MB."""
    hidden = [layer for _ in range(12) for layer in (nn.Linear(200, 200), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), *hidden, nn.Linear(200, CLASSES))


def wide() -> nn.Module:
    """Of 276 KB: its messages are large enough to be in memory that both ends map."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1000), nn.Tanh(), nn.Linear(1000, CLASSES))


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)
    )


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Dropout(0.5), nn.Linear(24, CLASSES))


class Tied(nn.Module):
    """One matrix used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.into.weight
        self.out = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.into(images.flatten(1)))
        result: Tensor = self.out(torch.tanh(self.again(hidden)))
        return result


class Partial(nn.Module):
    """`never` is not used at all; `rarely` only for a batch whose first pixel is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, CLASSES)
        self.never = nn.Linear(64, CLASSES)
        self.rarely = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        result: Tensor = self.out(flat)
        return result + self.rarely(flat) if flat[0, 0] > 0 else result


class Pair(nn.Module):
    """Two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(64, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.first(left) + self.second(right)))
        return result


MODELS = {
    "cnn": cnn, "mlp": mlp, "deep": deep, "compiled": compiled, "large": large, "wide": wide,
    "normalised": normalised, "dropping": dropping,
    "tied": Tied, "partial": Partial,
}  # fmt: skip


def data(samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Images (samples, 1, 8, 8), and labels that a linear teacher gives them."""
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 8, 8, generator=generator, dtype=torch.float64)
    teacher = torch.randn(64, CLASSES, generator=torch.Generator().manual_seed(1)).double()
    return images.to(dtype), (images.flatten(1) @ teacher).argmax(1)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def images(
    samples: int = 128,
    model: str = "mlp",
    dtype: str = "float32",
    sample_flops: float | None = None,
) -> Task:
    """A classification of images by one of `MODELS`."""
    kind = getattr(torch, dtype)
    return Task(
        sample_flops=sample_flops,
        model=lambda: initialised(MODELS[model](), kind),
        train=TensorData(*data(samples, kind)),
        test=TensorData(*data(16, kind)),
        loss=cross_entropy,
        collate=TensorData.collate,
    )


class Named(Dataset[dict[str, Tensor]]):
    """Samples that are dicts."""

    def __init__(self, samples: int) -> None:
        self.images, self.labels = data(samples, torch.float64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        flat = self.images[index].flatten()
        return {"left": flat, "right": flat.flip(0), "label": self.labels[index]}


def pairs(samples: int = 128) -> Task:
    """Dict batches and a model of two inputs, in float64."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["left"], batch["right"]), batch["label"])

    return Task(model=lambda: initialised(Pair(), torch.float64), train=Named(samples), loss=loss)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """No length."""

    def __init__(self, samples: int) -> None:
        self.data = data(samples, torch.float64)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*self.data, strict=True))


def stream(samples: int = 50) -> Task:
    """An iterable dataset in its own order, in float64."""
    return Task(
        model=lambda: initialised(mlp(), torch.float64), train=Stream(samples), loss=cross_entropy
    )


class Numbers(Dataset[tuple[int, float]]):
    """Sample i is i, and a number between -3 and 3."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(index % 7) - 3.0


class Weight(nn.Module):
    """One vector; it remembers the samples that losses were computed of, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 130, dtype=torch.float64))
        self.seen: list[list[int]] = []  # the warm-up works on a copy, which has its own


def scripted(ratio: float = 0.9, plateau: int | None = None, samples: int = 400) -> Task:
    """The loss of step k (from 1) is ratio^min(k, plateau), whatever the parameters are.

    Its gradient depends on the samples and the parameters, and is not zero.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Weight)
        model.seen.append(batch[0].tolist())
        step = len(model.seen)
        value = ratio ** (step if plateau is None else min(step, plateau))
        pull = (model.weight - batch[1].double().mean()).square().mean()
        return pull - pull.detach() + value

    return Task(model=Weight, train=Numbers(samples), loss=loss)


def nan_at(sample: int = 40, samples: int = 96) -> Task:
    """A batch that holds `sample` has a loss that is not a number."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Weight)
        bad = math.nan if bool((batch[0] == sample).any()) else 1.0
        return model.weight.square().mean() * bad

    return Task(model=Weight, train=Numbers(samples), loss=loss)


def drawing(samples: int = 64) -> Task:
    """The loss is a random number, drawn from torch's global generator."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(model, Weight)
        return model.weight.mean() * 0.0 + torch.rand(())

    return Task(model=Weight, train=Numbers(samples), loss=loss)


def deterministic_digits() -> Task:
    """With dropout, and operations that give the same bits again, on a GPU as well."""
    torch.use_deterministic_algorithms(True)
    return Digits(dropout=0.3).build()


def digits_in_one_thread(dropout: float = 0.0) -> Task:
    """Bit equality is claimed at equal numbers of threads; a run of one rank would keep torch's.

    The curve is on the test data, so that its end can be compared with the final metrics.
    """
    torch.set_num_threads(1)
    return replace(Digits(dropout=dropout, channels=8, hidden=32).build(), validation=None)


@dataclass(frozen=True, repr=False)
class Unequal(AllReduce):
    """All-reduce in which the rank r has r + 1 parts of the data."""

    def roles(self, ranks: int) -> Roles:
        whole = ranks * (ranks + 1) / 2
        return Roles(tuple((rank + 1) * ranks / whole for rank in range(ranks)))


@dataclass(frozen=True, repr=False)
class FirstDecides(AllReduce):
    """Only the first rank has an optimizer; the others take its parameters after each step."""

    every: int = setting(1, "steps between two hand-overs", low=1)

    def member(self, worker: Worker) -> Any:
        return FirstDecidesMember(**vars(super().member(worker)))


class FirstDecidesMember(AllReduceMember):
    def update(self) -> None:
        if self.worker.rank == 0:
            super().update()
        exchange.agree_on_parameters(self.worker)


@dataclass(frozen=True, repr=False)
class NeverUpdates(AllReduce):
    """Fails in the first step, with and without values."""

    def member(self, worker: Worker) -> Any:
        return NeverUpdatesMember(**vars(super().member(worker)))


class NeverUpdatesMember(AllReduceMember):
    def update(self) -> None:
        raise ValueError("no update")


@dataclass(frozen=True, repr=False)
class Signs(LocalSGD):
    """Takes the sign of each worker's own gradient, which the guide calls `current()`."""

    def reduce(self, worker: Worker, state: Any) -> None:
        exchange.keep_gradient(worker)
        worker.gradients.current().sign_()


@dataclass(frozen=True, repr=False)
class ReadsValues(DynamicAveraging):
    """Reads parameters to decide, and does not say so."""

    def traits(self, work: WorkMode = "shared") -> Traits:
        return replace(super().traits(work), reads_values=False)


@dataclass(frozen=True, repr=False)
class Logs(AllReduce):
    """All-reduce that logs numbers of its own."""

    def member(self, worker: Worker) -> Any:
        worker.log(begun=True)
        return LogsMember(**vars(super().member(worker)))


class LogsMember(AllReduceMember):
    def update(self) -> None:
        super().update()
        self.worker.log(rank=-1, norm=self.worker.parameters.norm())
        self.worker.log(rank=self.worker.rank)


REFUSED: tuple[dict[str, Any], ...] = (
    {"x": math.nan}, {"x": math.inf}, {"x": 10**5000}, {"x": "1"}, {"x": None}, {"x": 1j},
    {"x": torch.ones(2)}, {"x": torch.tensor(1j)}, {"x": torch.empty(0)}, {"a b": 1.0},
    {"x\n": 1.0}, {"../x": 1.0}, {"x" * 101: 1.0},
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class LogsWrongly(AllReduce):
    """Logs what `worker.log` refuses: the entry `which` of `REFUSED`."""

    which: int = setting(0, "place in REFUSED", low=0)

    def member(self, worker: Worker) -> Any:
        worker.log(**REFUSED[self.which])
        return super().member(worker)
