"""Tasks: what a user may give, how a model is evaluated, and the two that come along."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from orchestra.errors import InputError
from orchestra.tasks import Digits, Regression, Task, TensorData, evaluate, load_task
from orchestra.tasks.classification import random_shift
from orchestra.tasks.regression import scores


def squared(model: nn.Module, batch: Any) -> Tensor:
    (values,) = batch
    loss: Tensor = (model(values) ** 2).mean()
    return loss


def tiny(**changes: Any) -> Task:
    data = TensorDataset(torch.arange(10.0).reshape(10, 1))
    parts: dict[str, Any] = {"model": nn.Identity, "train": data, "test": data}
    return Task(**{**parts, "loss": squared, **changes})


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def not_a_task() -> dict[str, int]:
    return {"model": 1}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads that fight over busy cores take many times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(task: Task, epochs: int, learning_rate: float) -> nn.Module:
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    loader = DataLoader(task.train, 64, shuffle=True, collate_fn=task.collate)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            torch.autograd.backward(task.loss(model, batch))
            optimizer.step()
    return model


# What a user may give


@pytest.mark.parametrize(
    "given",
    [
        "digits",
        "digits(hidden=5)",
        "regression",
        Digits(),
        Digits,
        tiny(),
        tiny,
        f"{__name__}:tiny",
    ],
)
def test_a_task_is_found_behind_whatever_names_it(given: object) -> None:
    task = load_task(given)
    assert isinstance(task, Task)
    assert given is task or not isinstance(given, Task)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("digitz", "unknown task 'digitz'.*'digits'"),
        ("digits(dropuot=1)", "'dropuot'.*'dropout'"),
        (f"{__name__}:not_a_task", r"not_a_task' does not say .* def not_a_task\(...\) -> Task:"),
        ("os:system('touch called')", "'os:system' does not say that it makes a task"),
        ("digits(channels=os:system('touch called'))", "'os:system' does not say"),
        (not_a_task, "not_a_task gives a dict, not an orchestra.tasks.Task"),
        (3, "3 gives a int"),
    ],
)
def test_what_is_no_task_is_refused_in_one_line(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_task(given, where="x.yaml: task")
    assert str(error.value).startswith("x.yaml: task: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(1, 1)}, "Task.model is a model"),
        ({"loss": None}, "Task.loss: expected a function, got None"),
        ({"metrics": 3}, "Task.metrics: expected a function, got 3"),
        ({"train": []}, "Task.train: the dataset has no samples"),
        ({"train": iter([])}, "Task.train: .* an IterableDataset"),
        ({"test": Endless()}, "Task.test: .* collect its samples in a list"),
        ({"validation": Dataset[int]()}, "Task.validation: .*__len__"),
    ],
)
def test_a_part_of_the_wrong_kind_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(**changes)


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, orchestra.tasks as tasks; tasks.Digits(), tasks.Regression(); "
        "sys.exit(bool({'torch', 'numpy', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Evaluation


def test_the_loss_is_the_mean_over_samples_whatever_the_batch_size() -> None:
    expected = (torch.arange(10.0) ** 2).mean().item()
    task = tiny()
    assert task.test is not None
    for batch_size in (1, 4, 7, 100):
        figures = evaluate(task, nn.Identity(), task.test, batch_size)
        assert figures == {"loss": pytest.approx(expected)}


def test_evaluation_leaves_modes_and_random_numbers_as_they_were() -> None:
    seen: list[object] = []

    def metrics(model: nn.Module, batches: Iterator[Any]) -> dict[str, float]:
        seen.extend(module.training for module in model.modules())
        seen.append(torch.is_grad_enabled())
        return {"samples": sum(len(values) for (values,) in batches)}

    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1))
    model[1].eval()  # a frozen normalisation stays frozen
    before = torch.get_rng_state()
    task = tiny(metrics=metrics)
    assert task.test is not None
    assert evaluate(task, model, task.test, 3)["samples"] == 10
    assert seen == [False, False, False, False]
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()

    def failing(model: nn.Module, batches: Iterator[Any]) -> dict[str, float]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        evaluate(tiny(metrics=failing), model, task.test, 3)
    assert model.training


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda model, batches: 3, "returned a int; return a dict"),
        (lambda model, batches: {"loss": 1.0}, "rename it"),
        (lambda model, batches: {"a": torch.ones(2)}, "no number"),
    ],
)
def test_metrics_of_the_wrong_kind_are_refused(metrics: Any, message: str) -> None:
    task = tiny(metrics=metrics)
    assert task.test is not None
    with pytest.raises(InputError, match=message):
        evaluate(task, nn.Identity(), task.test, 3)


# Tensors in memory


def test_tensor_data_gives_the_same_batches_as_sample_by_sample() -> None:
    tensors = torch.rand(9, 2), torch.arange(9)
    fast, slow = TensorData(*tensors), TensorDataset(*tensors)
    assert len(fast) == 9
    assert all(map(torch.equal, fast[4], slow[4]))
    picked = Subset(fast, [8, 1, 5, 2])
    for fast_batch, slow_batch in zip(
        DataLoader(picked, 3, collate_fn=TensorData.collate),
        DataLoader(Subset(slow, [8, 1, 5, 2]), 3, collate_fn=TensorData.collate),
        strict=True,
    ):
        assert all(map(torch.equal, fast_batch, slow_batch))
    with pytest.raises(InputError, match=r"\[9, 8\]"):
        TensorData(torch.rand(9), torch.rand(8))


# Digits


def test_digits_are_split_once_for_all_and_in_proportion() -> None:
    task, again = Digits().build(), Digits(hidden=5).build()
    splits = [task.train, task.validation, task.test]
    parts = [split for split in splits if isinstance(split, TensorData)]
    assert [len(part) for part in parts] == [1198, 299, 300]
    assert isinstance(again.test, TensorData)
    assert torch.equal(again.test.tensors[0], parts[2].tensors[0])
    shares = [part.tensors[1].bincount(minlength=10) / len(part) for part in parts]
    assert all((share - shares[0]).abs().max() < 0.005 for share in shares)
    images = torch.cat([part.tensors[0] for part in parts]).flatten(1)
    assert images.shape == (1797, 64)
    assert (
        len({tuple(image) for image in images.tolist()}) == 1797
    )  # no image twice: none is in two splits
    train = parts[0].tensors[0]
    assert abs(train.mean().item()) < 1e-5
    assert train.std().item() == pytest.approx(1)


@pytest.mark.usefixtures("one_thread")
def test_digits_are_learned() -> None:
    task = Digits().build()
    assert task.test is not None
    assert evaluate(task, trained(task, 15, 0.1), task.test, 256)["accuracy"] > 0.97


def test_settings_of_digits_reach_the_network() -> None:
    def kinds(**settings: Any) -> list[type]:
        return [type(module) for module in Digits(**settings).build().model().modules()]

    assert nn.BatchNorm2d in kinds(batch_norm=True)
    assert nn.BatchNorm2d not in kinds()
    model = Digits(channels=3, hidden=7, dropout=0.25).build().model()
    assert [list(p.shape) for p in model.parameters() if p.dim() > 1] == [
        [3, 1, 3, 3],
        [6, 3, 3, 3],
        [7, 96],
        [10, 7],
    ]
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25]


def test_augmentation_shifts_by_a_pixel_at_most_and_draws_from_the_global_generator() -> None:
    image = torch.rand(1, 2, 8, 8).repeat(200, 1, 1, 1)
    torch.manual_seed(0)
    shifted, labels = random_shift((image, torch.arange(200)), background=-1.0)
    assert torch.equal(labels, torch.arange(200))
    padded = nn.functional.pad(image[0], (1, 1, 1, 1), value=-1.0)
    shifts = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    found = [[torch.equal(one, shift) for shift in shifts].index(True) for one in shifted]
    assert set(found) == set(range(9))

    train = Digits(augment=True).build().train
    first, second = train[0][0], [train[0][0] for _ in range(20)]
    assert any(not torch.equal(first, other) for other in second)
    torch.manual_seed(1)
    drawn = train[3][0]
    torch.manual_seed(1)
    assert torch.equal(train[3][0], drawn)


def test_a_batch_goes_through_the_model_once_for_loss_and_metrics() -> None:
    calls = []

    class Doubling(nn.Module):
        def forward(self, numbers: Tensor) -> Tensor:
            calls.append(len(numbers))
            return 2 * numbers

    def loss(model: nn.Module, batch: Any) -> Tensor:
        mean: Tensor = model(batch[0]).mean()
        return mean

    def metrics(model: nn.Module, batches: Any) -> dict[str, float]:
        first = model(next(batches)[0])
        return {"spoilt": float(first.mul_(100).max()), "other": float(model(torch.ones(1)))}

    data = TensorData(torch.arange(1.0, 6.0))
    task = Task(
        model=Doubling, train=data, test=data, loss=loss, metrics=metrics, collate=data.collate
    )
    model = Doubling()
    assert evaluate(task, model, data, 2) == {"loss": 6.0, "spoilt": 400.0, "other": 2.0}
    assert calls == [2, 1, 2, 1]  # the metrics asked for something of their own in between
    assert "forward" not in model.__dict__


# Regression


def test_scores_are_what_their_names_say() -> None:
    torch.manual_seed(0)
    targets = torch.randn(50, 3) * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.0, 5.0, -1.0])
    predictions = targets + torch.randn(50, 3)
    figures = scores(predictions, targets)
    y, p = targets.double().numpy(), predictions.double().numpy()
    assert figures["test_variance"] == pytest.approx(y.var(), rel=1e-12)
    assert figures["r2_pooled"] == pytest.approx(r2_score(y.ravel(), p.ravel()), rel=1e-12)
    assert figures["r2_pooled"] == pytest.approx(1 - figures["mse"] / y.var(), rel=1e-12)
    assert figures["r2_mean"] == pytest.approx(r2_score(y, p), rel=1e-12)
    assert figures["mae"] == pytest.approx(abs(y - p).mean(), rel=1e-12)
    assert scores(targets, targets)["r2_pooled"] == 1
    diverged = scores(torch.full_like(targets, float("nan")), targets)
    assert diverged["mse"] != diverged["mse"]


def test_the_noise_sets_the_best_possible_score() -> None:
    tests = [Regression(noise=noise, test_samples=20000).build().test for noise in (0.0, 0.5)]
    clean, noisy = tests
    assert isinstance(clean, TensorData)
    assert isinstance(noisy, TensorData)
    assert torch.equal(clean.tensors[0], noisy.tensors[0])
    best = scores(clean.tensors[1], noisy.tensors[1])  # the teacher itself
    assert best["r2_pooled"] == pytest.approx(1 / (1 + 0.5**2), abs=0.005)


@pytest.mark.usefixtures("one_thread")
def test_the_data_follow_from_their_seed_and_a_student_beats_a_line() -> None:
    task, other = Regression().build(), Regression(data_seed=1).build()
    train, test = task.train, task.test
    assert isinstance(train, TensorData)
    assert isinstance(test, TensorData)
    assert isinstance(other.train, TensorData)
    assert [tuple(tensor.shape) for tensor in train.tensors] == [(8192, 32), (8192, 16)]
    assert not torch.equal(train.tensors[0], other.train.tensors[0])
    inputs, targets = train.tensors
    line = torch.linalg.lstsq(inputs, targets).solution
    linear = scores(test.tensors[0] @ line, test.tensors[1])["r2_pooled"]
    learned = evaluate(task, trained(task, 5, 0.2), test, 256)
    assert learned["r2_pooled"] > 0.95 > 0.9 > linear
    assert learned["loss"] == pytest.approx(learned["mse"], rel=1e-5)
