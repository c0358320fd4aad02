"""Contestants that take turns in the same processes, block by block.

Whatever else the machine does then falls on all of them alike, and a block is compared with the
block of its own round only. Every other round runs in reverse, so that a machine that becomes
slower or faster favours nobody.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.processes.launch import launch
from orchestra.worker.runtime import Runtime

T = TypeVar("T")
Blocks = dict[str, list[float]]
"""Seconds of each contestant's blocks, by round."""

Progress = Callable[[str, float], None]
"""Told what is being measured, and the part of it that is done."""


def join_gloo(runtime: Runtime, store: str, interface: str = "") -> None:
    """torch.distributed's default group on gloo, through the file `store`, on loopback or on the
    network `interface`.

    It is left to the end of the process. Destroying it can hang: that holds the interpreter and
    joins gloo's threads, which may need the interpreter to let go of a tensor (torch 2.13).
    """
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if interface or loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface or loopback[0])
    files = FileStore(store, runtime.ranks)
    dist.init_process_group("gloo", store=files, rank=runtime.rank, world_size=runtime.ranks)


def take_turns(
    runtime: Runtime, contestants: Mapping[str, Callable[[], None]], rounds: int
) -> Blocks:
    """Run a block of each contestant in each of `rounds` rounds, after one that warms up.

    All ranks begin each block together. Ends early where the user asks for a stop.
    """
    blocks: Blocks = {name: [] for name in contestants}
    done = 0
    for number in range(rounds + 1):
        for name in order(list(contestants), number):
            if _somebody_stops(runtime):
                return blocks
            started = time.perf_counter()
            contestants[name]()
            if number:
                blocks[name].append(time.perf_counter() - started)
            done += 1
            runtime.reporter.progress(step=done, samples=0)
    return blocks


def order(names: Sequence[T], number: int) -> Sequence[T]:
    """The order in round `number`: every other one in reverse."""
    return names if number % 2 else names[::-1]


def _somebody_stops(runtime: Runtime) -> bool:
    """Return whether any rank is to stop; also the barrier before a block."""
    wishes = torch.tensor([float(runtime.reporter.stop_requested())])
    dist.all_reduce(wishes)
    return bool(wishes)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over the rounds of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def run_ranks(
    program: Callable[..., Any],
    argument: object,
    ranks: int,
    *,
    steps: int,
    what: str = "",
    on_progress: Progress | None = None,
    **limits: Any,
) -> Sequence[Any]:
    """Launch `program` and return what each rank did; `on_progress` hears how many of its `steps`
    rank 0 has done. `limits` are those of `launch`.

    Raises:
        KeyboardInterrupt: the user stopped it: it has no result.
    """

    def tell(event: Event | Notice) -> None:
        if on_progress is not None and isinstance(event, Heartbeat) and event.rank == 0:
            on_progress(what, event.step / steps)

    outcome = launch(program, argument, ranks, on_event=tell, **limits)
    if outcome.stopped:
        raise KeyboardInterrupt
    return outcome.results
