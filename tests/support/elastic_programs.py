"""Programs whose ranks are lost, and go on in a new group."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.support.rank_programs import TAG, arrive

from orchestra.collectives import Group, all_reduce
from orchestra.errors import GroupChanged, PeerLost
from orchestra.worker.runtime import RankActivity, Runtime


@dataclass(frozen=True)
class Losses:
    """Rank `slot` ends by `how` before step `step` of its own, for each (slot, step)."""

    folder: Path
    at: tuple[tuple[int, int], ...]
    steps: int = 12
    numbers: int = 300_000
    how: signal.Signals = signal.SIGKILL


def sums(runtime: Runtime, losses: Losses) -> tuple[tuple[int, ...], list[int]]:
    """Add up a vector of each rank, step after step; return the last group and the sums.

    Each rank contributes two to the power of its number at the start, so that a sum tells who was
    there. A step that was given up is made again by those that are left.
    """
    reporter, first = runtime.reporter, runtime.slot
    reporter.elastic("sums")
    reporter.activity(RankActivity.TRAINING)
    arrive(runtime, losses.folder)
    found: list[int] = []
    while len(found) < losses.steps:
        if (runtime.slot, len(found)) in losses.at:
            os.kill(os.getpid(), losses.how)
        vector = torch.full((losses.numbers,), 2.0**first)
        try:
            all_reduce(runtime.transport, vector, "ring", Group(tuple(range(runtime.ranks))), TAG)
        except (PeerLost, GroupChanged) as error:
            assert runtime.regroup is not None
            while True:
                try:
                    runtime = runtime.regroup(error)
                    found = _newest(runtime, found)
                    break
                except (PeerLost, GroupChanged) as again:
                    error = again
            continue
        assert len(set(vector.tolist())) == 1
        found.append(int(vector[0]))
        reporter.progress(step=len(found), samples=len(found))
    reporter.elastic("")
    return runtime.members, found


def _newest(runtime: Runtime, found: list[int]) -> list[int]:
    """Return the longest of the ranks' lists: some have finished the step that others gave up."""
    counts = torch.zeros(runtime.ranks)
    counts[runtime.rank] = len(found)
    everyone = Group(tuple(range(runtime.ranks)))
    all_reduce(runtime.transport, counts, "ring", everyone, TAG)
    assert counts.max() - counts.min() <= 1
    donor = int(counts.argmax())
    if runtime.rank == donor:
        for rank in range(runtime.ranks):
            if rank != donor:
                numbers = torch.tensor(found, dtype=torch.int64)
                runtime.transport.send(numbers, rank, TAG).wait()
        return found
    return runtime.transport.receive(donor, TAG).wait().tolist()


def fails_in_a_step(runtime: Runtime, folder: Path) -> None:
    """Rank 1 raises an exception of its own: no loss, whatever the others make of it."""
    runtime.reporter.elastic("sums")
    arrive(runtime, folder)
    if runtime.rank == 1:
        raise ValueError("a mistake of the program")
    try:
        runtime.transport.receive(1, TAG).wait()
    except (PeerLost, GroupChanged) as error:
        assert runtime.regroup is not None
        runtime.regroup(error)
