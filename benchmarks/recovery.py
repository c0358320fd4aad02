"""From the kill of a rank to the next step of the others, beside torchft.

Four ranks of one host train the same model, and one of them sends SIGKILL to itself in a forward
pass. Every rank writes down when an optimizer has made a step, by a clock that all processes of the
machine share. Until the first step without the lost rank pass: the notice of the loss, a new group,
and the step itself, made again.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import orchestra
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    read_options,
    write_figures,
)
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.tasks import Task

RANKS, VICTIM = 4, 2
BATCH, FATAL_STEP, STEPS = 32, 12, 30
MODELS = {"0.3 MB": (256, 256), "17 MB": (2048, 2048)}
FOLDER = "ORCHESTRA_RECOVERY"
STRATEGIES = {
    "orchestra: ring, from the last step": "AllReduce('ring')",
    "orchestra: servers, from a checkpoint": (
        "ParameterServer(servers=2, placement='beside', returns='gradients')"
    ),
    "orchestra: ZeRO-3, from a checkpoint": "AllReduce('ring', shard='parameters')",
}
TIMEOUTS: dict[str, dict[str, int]] = {
    "torchft, as it is": {},
    "torchft, short time-outs": {"heartbeat_timeout_ms": 500, "join_timeout_ms": 500},
}
"""Of torchft's lighthouse, in milliseconds; as it is: 5 s for heartbeats, 60 s to join."""
DESCRIPTION = """\
Kill one of 4 ranks of this machine in the middle of a training, and measure the seconds until the
others have made their next step: with min_ranks under three strategies, and with
DistributedDataParallel of torchft where that is installed.
"""


@dataclass(frozen=True)
class Row:
    """What was measured with one contestant."""

    model: str
    label: str
    median: float
    all: list[float]


def model(size: tuple[int, int]) -> nn.Module:
    """Return the model of `size`, the same on all ranks."""
    torch.manual_seed(0)
    inside, outside = size
    layers = nn.Linear(64, inside), nn.ReLU(), nn.Linear(inside, outside), nn.Linear(outside, 10)
    return nn.Sequential(*layers)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 64, generator=generator)
    return TensorDataset(images, torch.randint(10, (samples,), generator=generator))


def watch_steps(rank: int) -> None:
    """Write down each step of an optimizer of this process, as `rank`."""
    path = Path(os.environ[FOLDER]) / f"steps-{rank}"

    def made(*_: Any) -> None:
        with path.open("a") as file:
            file.write(f"{time.monotonic()}\n")

    register_optimizer_step_post_hook(made)


def die() -> None:
    """Write down the moment, and end this process by SIGKILL."""
    (Path(os.environ[FOLDER]) / "kill").write_text(f"{time.monotonic()}")
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(inside: int, outside: int) -> Task:
    """Return the task of Orchestra's ranks, of which one kills itself."""
    import multiprocessing

    rank = int(multiprocessing.current_process().name.removeprefix("rank "))
    calls = 0
    watch_steps(rank)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == VICTIM and calls == FATAL_STEP:
            die()
        inputs, labels = batch
        return nn.functional.cross_entropy(module(inputs), labels)

    return Task(
        model=lambda: model((inside, outside)), train=data(RANKS * BATCH * STEPS), loss=loss
    )


def with_orchestra(strategy: str, size: tuple[int, int], folder: Path) -> None:
    orchestra.train(
        f"benchmarks.recovery:doomed({size[0]}, {size[1]})", strategy, ranks=RANKS,
        out=folder / "run", quiet=True, min_ranks=2, steps=STEPS, batch_size=BATCH, threads=1,
        optimizer="SGD(lr=0.01)", snapshots=0, checkpoint_every=None if "ring')" in strategy else 4,
    )  # fmt: skip


def with_torchft(timeouts: Mapping[str, int], size: tuple[int, int], folder: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **timeouts)
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.recovery_torchft", str(rank), *map(str, size)],
                env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()},
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for rank in ranks:
            rank.wait()
    finally:
        lighthouse.shutdown()


def seconds_lost(train: Callable[[Path], None]) -> float:
    """Return the seconds from the kill to the end of the next step that all others have made."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FOLDER] = name
        train(folder)
        kill = float((folder / "kill").read_text())
        after = []
        for rank in set(range(RANKS)) - {VICTIM}:
            times = map(float, (folder / f"steps-{rank}").read_text().split())
            after.append(min(moment for moment in times if moment > kill))
        return max(after) - kill


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.recovery", DESCRIPTION, rounds=3)
    options = read_options(parser, arguments if arguments is not None else sys.argv[1:])
    contestants: dict[str, Callable[[tuple[int, int], Path], None]] = {
        label: partial(with_orchestra, strategy) for label, strategy in STRATEGIES.items()
    }
    there = importlib.util.find_spec("torchft") is not None
    for label, timeouts in TIMEOUTS.items() if there else ():
        contestants[label] = partial(with_torchft, timeouts)
    found: dict[tuple[str, str], list[float]] = {}
    turns = list(itertools.product(MODELS, contestants)) * options.rounds
    with progress_line() as tell:
        for number, (size, label) in enumerate(turns):
            tell(f"{label}, {size}", number / len(turns))
            seconds = seconds_lost(partial(contestants[label], MODELS[size]))
            found.setdefault((size, label), []).append(seconds)
    rows = [Row(*key, statistics.median(seconds), seconds) for key, seconds in found.items()]
    table = PrintedTable(
        "seconds from the kill of one of 4 ranks to the next step of the others",
        ("trained with", "model", "median", "least", "most"),
        [
            (row.label, row.model, *(f"{s:.2f}" for s in (row.median, min(row.all), max(row.all))))
            for row in rows
        ],
    )
    table.show()
    text = "torchft waits for heartbeats for 5 s, and 60 s for others to join, unless time-outs "
    text += "are short: 0.5 s each."
    print_remarks(text if there else "No figures of torchft: install torchft-nightly.")
    write_figures(options.json, "recovery", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
