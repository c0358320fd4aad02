"""MNIST and CIFAR-10 from files: small ones in the published formats."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from orchestra.errors import InputError
from orchestra.tasks import Cifar10, Mnist, Task, TensorData, load_task
from orchestra.tasks.images import FILES

IMAGES, LABELS = FILES["training images"], FILES["training labels"]


def idx(values: numpy.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def write_mnist(folder: Path, compressed: bool = False) -> dict[str, numpy.ndarray]:
    random = numpy.random.RandomState(0)
    arrays = {}
    for split, count in (("training", 50), ("test", 20)):
        arrays[f"{split} images"] = random.randint(256, size=(count, 28, 28)).astype(numpy.uint8)
        arrays[f"{split} labels"] = random.randint(10, size=count).astype(numpy.uint8)
    for name, values in arrays.items():
        content = idx(values)
        if compressed:
            (folder / f"{FILES[name]}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / FILES[name]).write_bytes(content)
    return arrays


def write_cifar10(folder: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Labels (6, 8) and images (6, 8, 3, 32, 32) of the five training files and the test."""
    random = numpy.random.RandomState(0)
    labels = random.randint(10, size=(6, 8)).astype(numpy.uint8)
    images = random.randint(256, size=(6, 8, 3, 32, 32)).astype(numpy.uint8)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name, some_labels, some_images in zip(names, labels, images, strict=True):
        records = numpy.concatenate([some_labels[:, None], some_images.reshape(8, -1)], 1)
        (folder / name).write_bytes(records.tobytes())
    return labels, images


def raw(task: Task) -> list[tuple[Tensor, ...]]:
    """The tensors of training, validation and test, as they were in the files."""
    parts = (task.train, task.validation, task.test)
    return [part.tensors for part in parts if isinstance(part, TensorData)]


def expect_error(given: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_task(given)
    assert "\n" not in str(error.value)


# MNIST


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_is_read_and_a_part_held_out(tmp_path: Path, compressed: bool) -> None:
    arrays = write_mnist(tmp_path, compressed)
    train, validation, test = raw(load_task(f"mnist('{tmp_path}', validation_samples=10)"))
    assert [tuple(part[0].shape) for part in (train, validation, test)] == [
        (40, 1, 28, 28),
        (10, 1, 28, 28),
        (20, 1, 28, 28),
    ]
    assert torch.equal(test[0][:, 0], torch.from_numpy(arrays["test images"]))
    assert torch.equal(test[1], torch.from_numpy(arrays["test labels"]).long())
    written = zip(arrays["training images"], arrays["training labels"], strict=True)
    read = [
        (image.numpy().tobytes(), label.item())
        for part in (train, validation)
        for image, label in zip(*part, strict=True)
    ]
    assert sorted(read) == sorted((image.tobytes(), label) for image, label in written)


def test_the_same_images_are_held_out_each_time(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    first, second = (Mnist(str(tmp_path), validation_samples=7).build() for _ in range(2))
    for one, other in zip(raw(first), raw(second), strict=True):
        assert all(map(torch.equal, one, other))


def test_a_batch_of_mnist_is_standardised_and_fits_the_model(tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path)
    task = Mnist(str(tmp_path), validation_samples=10).build()
    assert isinstance(task.test, TensorData)
    images, labels = task.test.__getitems__([1, 4])
    expected = (arrays["test images"][[1, 4]] / 255 - 0.1307) / 0.3081
    assert torch.allclose(images[:, 0], torch.from_numpy(expected).float(), atol=1e-6)
    assert task.loss(task.model(), (images, labels)).isfinite()


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def emptied_gzip(folder: Path) -> None:
    (folder / IMAGES).rename(folder / f"{IMAGES}.gz")


def cut_gzip(folder: Path) -> None:
    content = (folder / IMAGES).read_bytes()
    (folder / IMAGES).unlink()
    (folder / f"{IMAGES}.gz").write_bytes(gzip.compress(content)[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / LABELS).unlink(), f"neither {LABELS} nor .*LeCun"),
        (replaced(IMAGES, lambda content: content[:-1]), "announces 39200.*not whole"),
        (replaced(IMAGES, lambda content: content + b"x"), "39201 bytes.*announces 39200"),
        (replaced(IMAGES, lambda content: b"\x89PNG" + content[4:]), "begins with 89 50 4e 47"),
        (replaced(IMAGES, lambda content: content[:7]), "begins with 00 00 08 03"),
        (replaced(IMAGES, lambda content: b""), "begins with nothing"),
        (replaced(LABELS, lambda content: content[:-1] + b"\x0a"), "a label 10; .*0 to 9"),
        (
            replaced(LABELS, lambda content: idx(numpy.zeros(49, numpy.uint8))),
            "50 images, .* 49 labels",
        ),
        (
            replaced(IMAGES, lambda content: idx(numpy.zeros((50, 8, 8), numpy.uint8))),
            "8 x 8 pixels, not 28 x 28",
        ),
        (emptied_gzip, "not a whole gzip file"),
        (cut_gzip, "not a whole gzip file"),
    ],
)
def test_damaged_files_of_mnist_are_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_mnist(tmp_path)
    damage(tmp_path)
    expect_error(f"mnist('{tmp_path}', validation_samples=10)", message)


def test_a_folder_or_samples_that_are_not_there_are_named(tmp_path: Path) -> None:
    expect_error("mnist('nowhere')", "there is no folder .*nowhere; .*MNIST/raw")
    expect_error("cifar10('nowhere')", "there is no folder .*nowhere; .*Krizhevsky")
    write_mnist(tmp_path)
    expect_error(f"mnist('{tmp_path}', validation_samples=50)", "set it below 50")
    expect_error("mnist", "folder")


# CIFAR-10


def test_cifar10_is_read_and_a_part_held_out(tmp_path: Path) -> None:
    labels, images = write_cifar10(tmp_path)
    train, validation, test = raw(load_task(f"cifar10('{tmp_path}', validation_samples=6)"))
    assert [len(part[1]) for part in (train, validation, test)] == [34, 6, 8]
    assert torch.equal(test[0], torch.from_numpy(images[5]))
    assert torch.equal(test[1], torch.from_numpy(labels[5]).long())
    read = [
        (image.numpy().tobytes(), label.item())
        for part in (train, validation)
        for image, label in zip(*part, strict=True)
    ]
    written = zip(images[:5].reshape(40, -1), labels[:5].ravel(), strict=True)
    assert sorted(read) == sorted((image.tobytes(), label) for image, label in written)


def test_training_images_of_cifar10_are_seen_in_other_views(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    plain, augmented = (
        Cifar10(str(tmp_path), validation_samples=6, augment=augment).build().train
        for augment in (False, True)
    )
    assert isinstance(plain, TensorData)
    assert isinstance(augmented, TensorData)
    image = plain[3][0]
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (plain.tensors[0][3] / 255 - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
    assert torch.allclose(image, expected, atol=1e-6)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    views = {
        view[:, row : row + 32, column : column + 32].numpy().tobytes()
        for view in (padded, padded.flip(2))
        for row in range(9)
        for column in range(9)
    }
    torch.manual_seed(0)
    seen = {augmented[3][0].numpy().tobytes() for _ in range(50)}
    assert seen <= views
    assert len(seen) > 25


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "data_batch_4.bin").unlink(),
            r"data_batch_4.bin is not in .*cifar-10-batches-bin",
        ),
        (replaced("test_batch.bin", lambda content: content[:-1]), "test_batch.bin: 24583 bytes"),
        (replaced("test_batch.bin", lambda content: b""), "0 bytes are no whole number"),
        (
            replaced("data_batch_2.bin", lambda content: content[:3073]),
            r"\[8, 1, 8, 8, 8\] images, not equally many",
        ),
        (replaced("data_batch_2.bin", lambda content: b"\xff" + content[1:]), "a label 255"),
    ],
)
def test_damaged_files_of_cifar10_are_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_cifar10(tmp_path)
    damage(tmp_path)
    expect_error(f"cifar10('{tmp_path}', validation_samples=6)", message)


def test_a_batch_of_cifar10_fits_the_model(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    task = Cifar10(str(tmp_path), validation_samples=6).build()
    assert isinstance(task.train, TensorData)
    assert task.loss(task.model(), task.train.__getitems__([0, 1, 2])).isfinite()
