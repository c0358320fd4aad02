"""A data set that a rank has no room for trains: its samples are read where they lie.

cd examples && python data_larger_than_memory.py

It writes a file of a gigabyte, and trains one pass over it under several strategies. The kernel
limits each rank: once the task is loaded it may grow by an eighth of the file. Reading the file
whole fails at that limit. Samples come by `os.pread`, so that no page of the file ever belongs to a
process, and the kernel's peak (VmHWM) counts all that a rank held. A numpy.memmap would do as well,
but its pages count as the process's until the kernel takes them back.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from larger_than_memory import MEGABYTE, Batch, memory, watch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

import orchestra
from orchestra import Task

CLASSES = 10
VALUES = 4095
SAMPLE_BYTES = 2 * (1 + VALUES)  # float16: the class, then the values
CHUNK = 1024  # samples that are written at once
STRATEGIES = (
    "Single()",
    'AllReduce("ring")',
    'ParameterServer(consistency="asynchronous", learning_rate="divided")',
    "LocalSGD(8)",
)


class Patterns(Dataset[tuple[Tensor, int]]):
    """The samples of a file, each read when it is asked for; or all of them in memory."""

    def __init__(self, file: str, whole: bool) -> None:
        self.descriptor = os.open(file, os.O_RDONLY)
        self.samples = os.fstat(self.descriptor).st_size // SAMPLE_BYTES
        self.all = numpy.fromfile(file, numpy.float16) if whole else None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.all is None:
            data = os.pread(self.descriptor, SAMPLE_BYTES, index * SAMPLE_BYTES)
            sample = numpy.frombuffer(data, numpy.float16)
        else:
            sample = self.all.reshape(self.samples, -1)[index]
        return torch.from_numpy(sample[1:].astype(numpy.float32)), int(sample[0])


def patterns(
    file: str, whole: bool = False, limit_megabytes: int = 0, notes: str | None = None
) -> Task:
    """Tell noisy patterns apart; a rank may grow by the limit, if there is one, from here on."""
    if limit_megabytes:
        limit = memory("VmData") + limit_megabytes * MEGABYTE
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if notes is not None:
        begun = memory("VmRSS")
        threading.Thread(target=watch, args=(Path(notes), begun), daemon=True).start()
    data = Patterns(file, whole)
    tested = len(data) // 32
    return Task(
        model=lambda: nn.Sequential(nn.Linear(VALUES, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        train=Subset(data, range(len(data) - tested)),
        test=Subset(data, range(len(data) - tested, len(data))),
        loss=loss,
        metrics=metrics,
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy."""
    values, classes = batch
    return functional.cross_entropy(model(values), classes)


def metrics(model: nn.Module, batches: Iterator[Batch]) -> dict[str, float]:
    """The share of samples whose class is found."""
    right = torch.cat([model(values).argmax(1) == classes for values, classes in batches])
    return {"accuracy": right.double().mean().item()}


def write(file: Path, megabytes: int) -> None:
    """Patterns of a class each, under noise of 16 times their strength; a chunk at a time."""
    random = numpy.random.default_rng(0)
    shapes = random.standard_normal((CLASSES, VALUES), dtype=numpy.float32)
    with file.open("wb") as out:
        chunks = megabytes * MEGABYTE // (CHUNK * SAMPLE_BYTES)
        for _ in track(range(chunks), f"writing {megabytes} MB"):
            classes = random.integers(CLASSES, size=CHUNK)
            samples = random.standard_normal((CHUNK, 1 + VALUES), dtype=numpy.float32)
            samples[:, 1:] += shapes[classes] / 16
            samples[:, 0] = classes
            samples.astype(numpy.float16).tofile(out)


def train(strategy: str, arguments: str) -> tuple[float, int]:
    """The accuracy after a pass over the data, and the largest peak of any rank in bytes."""
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryDirectory() as notes:
        record = orchestra.train(
            f"data_larger_than_memory:patterns({arguments}, notes={notes!r})",
            strategy,
            ranks=4,
            epochs=1,
            batch_size=16,
            optimizer="SGD(lr=0.01)",
            snapshots=0,
            out=Path(out) / "run",
            quiet=True,
        )
        peaks = [int(note.read_text()) for note in Path(notes).glob("*.bytes")]
    return record.learned.metrics["accuracy"], max(peaks)


def main() -> None:
    """Print a line for each strategy, and one for reading the file whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the file")
    parser.add_argument("--limit", type=int, help="megabytes a rank may grow by; an eighth")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file lies")
    given = parser.parse_args()
    free = shutil.disk_usage(given.folder).free // MEGABYTE
    if free < given.megabytes:
        parser.error(f"{given.folder} has {free} MB free: choose a --folder with more")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        file = Path(folder) / "patterns.float16"
        write(file, given.megabytes)
        compare(str(file), given.limit or given.megabytes // 8)


def compare(file: str, limit: int) -> None:
    """Train under each strategy with the limit, and once on the file read whole."""
    samples = Path(file).stat().st_size // SAMPLE_BYTES
    print(f"{samples} samples of {SAMPLE_BYTES} bytes; a rank may grow by {limit} MB")
    print(f"the order in which they are read: {8 * samples / MEGABYTE:.1f} MB in each rank")
    arguments = f"{file!r}, limit_megabytes={limit}"
    for strategy in STRATEGIES:
        accuracy, peak = train(strategy, arguments)
        print(f"{strategy}: accuracy {accuracy:.3f}, peak of a rank {peak // MEGABYTE} MB")
    try:
        train("Single()", f"{arguments}, whole=True")
        outcome = "trains"
    except orchestra.RunFailed as failure:
        outcome = "fails: " + str(failure).partition("\n")[0]
    print(f"Single() with the file read whole {outcome}")


if __name__ == "__main__":
    main()
