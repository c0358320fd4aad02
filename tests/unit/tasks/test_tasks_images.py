"""The task images: synthetic images, and the residual network that learns them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from orchestra.tasks import Images, Task, TensorData, load_task
from orchestra.tasks import images as module
from orchestra.tasks.classification import ResidualBlock, resnet20

#: Of the images at the default noise: another value needs another RECIPE.
SHA256 = "facb06bf8b94ce2a7cb14fc13e9f4b4c7a82e6aca4d2c5b30ca6c663c80a18e2"


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHESTRA_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_task("images")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def splits(task: Task) -> list[tuple[torch.Tensor, ...]]:
    parts = (task.train, task.validation, task.test)
    return [part.tensors for part in parts if isinstance(part, TensorData)]


def test_images_are_the_same_everywhere_and_each_is_another(task: Task) -> None:
    parts = splits(task)
    assert [tuple(images.shape) for images, _ in parts] == [
        (4000, 3, 32, 32),
        (1000, 3, 32, 32),
        (2000, 3, 32, 32),
    ]
    images = torch.cat([part[0] for part in parts])
    assert hashlib.sha256(images.numpy().data).hexdigest() == SHA256
    assert len({image.tobytes() for image in images.numpy()}) == 7000
    train = parts[0][0].float() / 255
    assert train.mean().item() == pytest.approx(module.MEAN, abs=0.001)
    assert train.std().item() == pytest.approx(module.DEVIATION, abs=0.001)


def test_each_split_holds_all_classes_alike(task: Task) -> None:
    for _, labels in splits(task):
        assert labels.bincount().tolist() == [len(labels) // 10] * 10


def test_settings_reach_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path))
    for name, size in (("TRAIN", 40), ("VALIDATION", 10), ("TEST", 10)):
        monkeypatch.setattr(module, name, size)
    clean, noisy = (splits(Images(noise=noise, train_samples=30).build()) for noise in (0.0, 0.2))
    assert len(clean[0][0]) == len(noisy[0][0]) == 30
    # what one pixel differs from the next by: noise, and little else
    rough = [part[0][0].float().diff(dim=3).std() / 255 for part in (clean, noisy)]
    assert rough[1] > rough[0] + 0.1


# The model


def test_the_model_is_resnet20() -> None:
    model = resnet20()
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_shortcut_has_no_parameters_and_passes_its_input_on() -> None:
    for inputs, outputs in ((4, 4), (4, 8)):
        block = ResidualBlock(inputs, outputs)
        for parameter in block.parameters():
            nn.init.zeros_(parameter)
        x = torch.randn(2, inputs, 8, 8)
        stride = outputs // inputs
        y = block(x)
        assert torch.equal(y[:, :inputs], functional.relu(x[:, :, ::stride, ::stride]))
        assert not y[:, inputs:].any()


@pytest.mark.usefixtures("one_thread")
def test_the_loss_falls_within_a_few_steps(task: Task) -> None:
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _, batch in zip(
        range(30), DataLoader(task.train, 16, collate_fn=task.collate), strict=False
    ):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
