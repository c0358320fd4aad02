"""The task digits28: its images, their cache, its model."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.support.commands import Started
from tests.support.waiting import wait_until
from torch.utils.data import DataLoader

from orchestra.records.files import cache_folder
from orchestra.tasks import Digits28, Task, TensorData, evaluate, load_task
from orchestra.tasks import classification as module
from orchestra.tasks.classification import cached, distorted_digits, split_digits

#: Of the images at the default distortion: another value needs another RECIPE.
SHA256 = "21b50bef06336718374e9221b381e3b9b44620efb7b0d3cb0c875afd669d03ab"
PARTS = (slice(20_000), slice(20_000, 24_000), slice(24_000, 28_000))


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the images at the default distortion."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHESTRA_CACHE", str(folder))
        distorted_digits(1.0)
    return folder


@pytest.fixture
def cache(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRA_CACHE", str(filled))
    return filled


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path / "new"))
    return tmp_path / "new"


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def splits(task: Task) -> list[tuple[torch.Tensor, ...]]:
    parts = (task.train, task.validation, task.test)
    return [part.tensors for part in parts if isinstance(part, TensorData)]


def test_settings_of_all_tasks_need_no_torch() -> None:
    code = (
        "import sys; from orchestra.tasks import TASKS\n"
        "assert {'characters', 'cifar10', 'digits28', 'images', 'mnist'} <= set(TASKS.names())\n"
        "for name in TASKS.names(): TASKS.resolve(name, where=name)\n"
        "sys.exit(bool({'torch', 'numpy', 'sklearn', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Images


@pytest.mark.usefixtures("cache")
def test_no_original_is_in_two_splits_and_every_one_is_used() -> None:
    _, labels, originals = distorted_digits(1.0)
    digits, target, *expected = split_digits()
    sets = [set(originals[part].tolist()) for part in PARTS]
    assert [len(found) for found in sets] == [1198, 299, 300]
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]
    assert sets == [set(part.tolist()) for part in expected]
    assert torch.equal(labels, target[originals])
    assert len(digits) == sum(map(len, sets))


@pytest.mark.usefixtures("cache")
def test_an_image_shows_the_original_it_is_said_to_be_made_from() -> None:
    images, _, originals = distorted_digits(1.0)
    digits, *_ = split_digits()
    ink = digits.mean((1, 2)) / 16
    total = torch.zeros(len(digits)).index_add(0, originals, images.float().mean((1, 2, 3)) / 255)
    mean = total / originals.bincount(minlength=len(digits))
    assert numpy.corrcoef(ink, mean)[0, 1] > 0.9  # resizing alters the ink, but not on average


def test_without_distortion_each_image_is_its_original_enlarged(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("TRAIN", 60), ("VALIDATION", 20), ("TEST", 20)):
        monkeypatch.setattr(module, name, size)
    images, _, originals = distorted_digits(0.0)
    digits, *_ = split_digits()
    middle = images[:, :, 4:24, 4:24].float()
    assert not images[:, :, :4].any()
    assert not images[:, :, :, 24:].any()
    expected = torch.nn.functional.interpolate(
        digits[originals].unsqueeze(1), size=(20, 20), mode="bicubic"
    )
    # torch's cubic has -0.75 where ours has -0.5: nearly the same image
    assert (middle / 255 - expected.clamp(0, 16) / 16).abs().max() < 0.1
    assert [file.suffix for file in empty.iterdir()].count(".safetensors") == 1


@pytest.mark.usefixtures("cache")
def test_images_are_the_same_everywhere_and_each_is_another() -> None:
    images, *_ = distorted_digits(1.0)
    assert images.shape == (28_000, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert hashlib.sha256(images.numpy().data).hexdigest() == SHA256
    assert len({image.tobytes() for image in images.numpy()}) == 28_000
    train = images[PARTS[0]].float() / 255
    assert train.mean().item() == pytest.approx(module.MEAN, abs=0.001)
    assert train.std().item() == pytest.approx(module.DEVIATION, abs=0.001)


@pytest.mark.usefixtures("cache")
def test_fewer_training_samples_are_the_first_and_hold_all_classes_alike() -> None:
    whole, few = splits(Digits28().build()), splits(Digits28(train_samples=2396).build())
    assert [len(part[1]) for part in few] == [2396, 4000, 4000]
    assert torch.equal(few[0][0], whole[0][0][:2396])
    counts = few[0][1].bincount(minlength=10)
    assert counts.max() <= 1.1 * counts.min()


@pytest.mark.usefixtures("cache")
def test_a_batch_is_standardised() -> None:
    images, labels = Digits28().build().train.__getitems__([5, 3, 9])  # type: ignore[attr-defined]
    raw, every, _ = distorted_digits(1.0)
    assert images.dtype == torch.float32
    expected = (raw[[5, 3, 9]].float() / 255 - module.MEAN) / module.DEVIATION
    assert torch.allclose(images, expected)
    assert torch.equal(labels, every[[5, 3, 9]])


# The model


@pytest.mark.usefixtures("cache")
def test_the_model_is_lenet5() -> None:
    model = Digits28().build().model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 61_706
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.usefixtures("cache", "one_thread")
def test_a_hundred_steps_learn_a_good_part() -> None:
    task = load_task("digits28(train_samples=6400)")
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in DataLoader(task.train, 64, collate_fn=task.collate):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, batch))
        optimizer.step()
    assert task.validation is not None
    assert evaluate(task, model, task.validation, 500)["accuracy"] > 0.5


# The cache


def pair() -> dict[str, torch.Tensor]:
    return {"first": torch.arange(6).reshape(2, 3), "second": torch.ones(3, dtype=torch.uint8)}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def refuse() -> Any:
    raise AssertionError("made again")


def test_tensors_are_made_once(empty: Path) -> None:
    assert equal(cached("pair.safetensors", pair), pair())
    assert equal(cached("pair.safetensors", refuse), pair())
    assert sorted(file.name for file in empty.iterdir()) == ["pair.lock", "pair.safetensors"]


def test_what_one_process_writes_into_them_stays_with_it(empty: Path) -> None:
    cached("pair.safetensors", pair)
    cached("pair.safetensors", refuse)["first"].zero_()
    assert equal(cached("pair.safetensors", refuse), pair())


def cut(content: bytes) -> bytes:
    return content[:-2]


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("damage", [cut, flip_last, lambda content: b"", lambda content: b"junk"])
def test_a_damaged_file_is_made_again(empty: Path, damage: Any) -> None:
    cached("pair.safetensors", pair)
    path = empty / "pair.safetensors"
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert equal(cached("pair.safetensors", pair), pair())
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", ["file/folder", "/proc/nowhere"])
def test_without_a_folder_to_write_tensors_come_from_memory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path / place))
    assert equal(cached("pair.safetensors", pair), pair())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_only_be_read_is_read(empty: Path) -> None:
    cached("pair.safetensors", pair)
    empty.chmod(0o500)
    assert equal(cached("pair.safetensors", refuse), pair())
    assert equal(cached("other.safetensors", pair), pair())
    empty.chmod(0o700)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("ORCHESTRA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/ada/.cache/orchestra")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert cache_folder() == Path("/fast/orchestra")
    monkeypatch.setenv("ORCHESTRA_CACHE", "/own")
    assert cache_folder() == Path("/own")


def test_while_one_makes_them_others_wait(empty: Path) -> None:
    def make() -> dict[str, torch.Tensor]:
        with (empty / "pair.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return pair()

    cached("pair.safetensors", make)


TOGETHER = """\
import os, sys
from pathlib import Path
import torch
from orchestra.tasks.classification import cached

here = Path(sys.argv[1])

def make():
    with (here / "made").open("a") as file:
        file.write("made\\n")
    return {"numbers": torch.arange(2_000_000)}

(here / f"ready-{os.getpid()}").touch()
while not (here / "go").exists():
    pass
assert torch.equal(cached("n.safetensors", make)["numbers"], torch.arange(2_000_000))
"""


def test_processes_that_start_at_once_make_one_file(tmp_path: Path) -> None:
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    command = [sys.executable, str(script), str(tmp_path)]
    variables = {"ORCHESTRA_CACHE": str(tmp_path / "cache")}
    with ExitStack() as stack:
        started = [stack.enter_context(Started(command, tmp_path, variables)) for _ in range(3)]
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "all processes are there")
        (tmp_path / "go").touch()
        assert [process.end().status for process in started] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "made\n"
