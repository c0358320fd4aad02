"""Contestants take turns in the same processes, block by block.

Whatever else the machine does then falls on all of them alike, and a block is compared only with
the block beside it. Every other round runs in reverse, so that a machine that becomes slower or
faster favours nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from orchestra.worker.runtime import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """The seconds of one block of a contestant: by the clock, and of the processor.

    Of one rank both are its own, all of its threads included. Of all ranks together (see
    `of_all_ranks`) the slowest one's clock counts, and the sum of their processor time.
    """

    wall: float
    processor: float


Blocks = dict[str, list[Block]]
"""The blocks of each contestant, by round."""
Contestants = Mapping[str, Callable[[], object]]


def take_turns(
    runtime: Runtime,
    contestants: Contestants,
    rounds: int,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    surroundings: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    done: int = 0,
) -> list[Blocks]:
    """Run a block of each contestant of each group in each of `rounds` rounds, after one round of
    warm-up. Return the blocks of each group.

    A group is of contestants that are compared with each other: their blocks of a round lie side
    by side. By default all contestants are one group. A contestant of several groups has a block in
    each of them. Every other round runs in reverse. All ranks begin each block together. Ends early
    where the user asks for a stop.

    Args:
        surroundings: entered before a contestant's block, and left after it, by a clock that
            stands: a contestant's background threads may not slow the others.
        done: blocks that the ranks have run before, for the progress.
    """
    groups = [tuple(contestants)] if groups is None else groups
    found: list[Blocks] = [{name: [] for name in group} for group in groups]
    turns = (
        (number, blocks, name)
        for number in range(rounds + 1)
        for blocks in order(found, number)
        for name in order([*blocks], number)
    )
    for turn, (number, blocks, name) in enumerate(turns, start=1):
        # Agreed on, since a rank that ended alone would leave the others at the next barrier; this
        # is also the barrier before a block
        wishes = torch.tensor([float(runtime.reporter.stop_requested())])
        dist.all_reduce(wishes)
        if wishes:
            break
        with (surroundings or {}).get(name, nullcontext)():
            wall, processor = time.perf_counter(), time.process_time()
            contestants[name]()
            block = Block(time.perf_counter() - wall, time.process_time() - processor)
        # The first round warms up
        if number:
            blocks[name].append(block)
        runtime.reporter.progress(step=done + turn, samples=0)
    return found


def order(names: Sequence[T], number: int) -> Sequence[T]:
    """Return the order in round `number`: every other one in reverse."""
    # So that a machine that becomes slower, or busy, favours nobody
    return names if number % 2 else names[::-1]


def of_all_ranks(ranks: Sequence[Blocks]) -> Blocks:
    """Return the blocks of all ranks together, from those of each."""
    return {
        name: [
            Block(max(each.wall for each in one), sum(each.processor for each in one))
            for one in zip(*(blocks[name] for blocks in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def wall(blocks: Sequence[Block]) -> list[float]:
    return [block.wall for block in blocks]


def processor(blocks: Sequence[Block]) -> list[float]:
    return [block.processor for block in blocks]
