"""How fast the ranks of a run are, measured before its stopwatch starts, and the parts of the data
that follow from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median

import torch

from orchestra.collectives import Group, all_reduce
from orchestra.trainer.random_state import undisturbed
from orchestra.transports.tags import Tag
from orchestra.worker.batches import Batch, to_device
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.worker import Worker

GRADIENTS = 7
"""That each rank computes; the median of their seconds counts."""


def measured_speeds(
    runtime: Runtime, worker: Worker, read: Callable[[], Batch]
) -> tuple[float, ...]:
    """Collective over all ranks: how many gradients a second each one computes, all at once.

    They are of the batch that `read` gives, on a copy of the model; random streams go on as if it
    had not been. All ranks return the same figures.
    """
    everyone = Group(tuple(range(runtime.ranks)))
    speeds = torch.zeros(runtime.ranks, dtype=torch.float64)
    all_reduce(runtime.transport, speeds, "butterfly", everyone, Tag.AGREE)  # all are there
    speeds[runtime.rank] = 1 / median(_seconds(runtime, worker, read))
    all_reduce(runtime.transport, speeds, "butterfly", everyone, Tag.AGREE)
    return tuple(speeds.tolist())


def _seconds(runtime: Runtime, worker: Worker, read: Callable[[], Batch]) -> list[float]:
    now, device, seconds = runtime.transport.now, worker.layout.device, []
    with undisturbed():
        module, batch = copy.deepcopy(worker.module), to_device(read(), device)
        work = Work("gradient", worker.count_samples(batch))

        def gradient() -> None:
            for part, _ in worker.micro_batches(batch):
                worker.loss_of(module, part).backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        for _ in range(GRADIENTS):
            began = now()
            runtime.compute.run(work, gradient)
            seconds.append(now() - began)
    return seconds


def shares_of(speeds: Sequence[float]) -> tuple[float, ...]:
    """The weights of the parts of ranks that are that fast: 1 in the mean, to three decimals."""
    mean = sum(speeds) / len(speeds)
    return tuple(max(round(speed / mean, 3), 0.001) for speed in speeds)
