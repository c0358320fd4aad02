"""A model that one rank has no room for trains when each of four holds a part of it.

cd examples && python larger_than_memory.py

First it trains without a limit, on one rank, in stages and in shards on two and four, and each rank
measures its peak of memory, beyond what it had when the task was loaded. Then the kernel limits
that: to five times the parameters, of which these, their gradients and Adam's state take four.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import orchestra
from orchestra import Task

MEGABYTE = 1 << 20
Batch = tuple[Tensor, Tensor]


def network(
    width: int = 2048, layers: int = 8, limit_megabytes: int = 0, notes: str | None = None
) -> Task:
    """Layers of width x width; a rank may grow by the limit, if there is one, from here on."""
    if limit_megabytes:
        limit = memory("VmData") + limit_megabytes * MEGABYTE
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if notes is not None:
        begun = memory("VmRSS")
        threading.Thread(target=watch, args=(Path(notes), begun), daemon=True).start()
    samples = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    return Task(
        model=lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]),
        train=TensorDataset(samples, samples.roll(1, 1)),
        loss=loss,
    )


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean square error."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def memory(kind: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def watch(folder: Path, begun: int) -> None:
    """Write down the peak of this process beyond `begun`, again and again."""
    draft = folder / f"{threading.get_native_id()}.draft"
    while True:
        draft.write_text(str(memory("VmHWM") - begun))
        draft.rename(draft.with_suffix(".bytes"))  # appears whole
        threading.Event().wait(0.02)


def peak_megabytes(strategy: str, ranks: int, size: str) -> int:
    """The largest peak of any rank."""
    with tempfile.TemporaryDirectory() as folder:
        train(strategy, ranks, f"{size}, notes={folder!r}")
        return max(int(note.read_text()) for note in Path(folder).glob("*.bytes")) // MEGABYTE


def train(strategy: str, ranks: int, arguments: str) -> float | None:
    """The loss after four steps of Adam with 32 samples."""
    with tempfile.TemporaryDirectory() as out:
        record = orchestra.train(
            f"larger_than_memory:network({arguments})",
            strategy,
            ranks=ranks,
            steps=4,
            batch_size=32 // ranks,
            bucket_megabytes=8.0,
            optimizer="Adam(lr=1e-4)",
            snapshots=0,
            out=Path(out) / "run",
            quiet=True,
        )
    return record.learned.loss


RUNS = (
    ("Single()", 1),
    ("Pipeline(2)", 2),
    ("Pipeline(4)", 4),
    ('AllReduce(shard="parameters")', 2),
    ('AllReduce(shard="parameters")', 4),
)


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    size = f"width={given.width}, layers={given.layers}"
    parameters = given.layers * (given.width + 1) * given.width * 4
    print(f"parameters: {parameters // MEGABYTE} MB, Adam's state: {2 * parameters // MEGABYTE} MB")
    peaks = {run: peak_megabytes(*run, size) for run in RUNS}
    for run, peak in peaks.items():
        part = peak / peaks[RUNS[0]]
        print(f"{name(*run)}: peak of a rank {peak} MB, {part:.2f} of Single's")
    limit = 5 * parameters // MEGABYTE
    for run in (RUNS[0], RUNS[2], RUNS[4]):
        try:
            loss = train(*run, f"{size}, limit_megabytes={limit}")
            outcome = f"trains, loss {loss:.4f}"
        except orchestra.RunFailed as failure:
            outcome = "fails: " + str(failure).partition("\n")[0]
        print(f"{name(*run)} with a limit of {limit} MB {outcome}")


def name(strategy: str, ranks: int) -> str:
    """The strategy, and the ranks where it does not tell."""
    return f"{strategy} on {ranks}" if "AllReduce" in strategy else strategy


if __name__ == "__main__":
    main()
