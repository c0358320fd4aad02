"""Collectives in shared memory: the bits and the traffic of their messages, and who is gone."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.rank_programs import COMPILED, WHERE_COMPILED
from tests.support.socket_counts import COUNTED, sockets_of
from tests.support.timelines import assert_well_formed, traced
from tests.support.training import step_lines
from tests.support.waiting import wait_until

from orchestra.engines.events import Event, Exited, Failed, Notice
from orchestra.engines.processes import launch
from orchestra.errors import RunFailed
from orchestra.schedules import (
    ALL_REDUCE,
    Schedule,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)
from orchestra.transports.host import MAX_MEMORIES, Host
from orchestra.transports.protocol import CollectiveCall, Group
from orchestra.worker.runtime import Runtime

LENGTHS = (1, 7, 20_000, 1_100_000)
"""Elements: fewer than pieces, small, large, and more than there is room for at once."""


def reduced(
    runtime: Runtime, host: Host | None, schedules: Sequence[Schedule], length: int, device: str
) -> tuple[torch.Tensor, list[int]]:
    """What this rank ends with after `schedules`, and what it has counted."""
    sockets = sockets_of(runtime.transport)
    sockets.host = host
    random = torch.Generator().manual_seed(1000 * runtime.rank + length)
    vector = torch.randn(length, generator=random).to(device)
    before = [getattr(sockets.traffic, name) for name in COUNTED]
    for schedule in schedules:
        call = CollectiveCall(schedule, vector, Group(tuple(range(runtime.ranks))), tag=50)
        runtime.transport.collective(call).wait()
    counted = [getattr(sockets.traffic, name) for name in COUNTED]
    return vector, [after - each for after, each in zip(counted, before, strict=True)]


def compared(runtime: Runtime, how: tuple[Sequence[int], str, str]) -> tuple[list[str], int]:
    """Every schedule in memory that is shared inside the nodes, and over sockets: what differs."""
    nodes, os.environ["ORCHESTRA_COMPILED"], device = how
    sockets = sockets_of(runtime.transport)
    starts = [sum(nodes[:place]) for place in range(len(nodes) + 1)]
    neighbours = next(range(*ends) for ends in pairwise(starts) if runtime.rank < ends[1])
    sockets.share_memory(neighbours)
    host, ranks = sockets.host, runtime.ranks
    each = [[make(ranks)] for make in ALL_REDUCE.values()] + [[hierarchical(nodes)]]
    each.append([ring_reduce_scatter(ranks), ring_all_gather(ranks)])
    differ = []
    for schedules in each:
        for length in LENGTHS:
            shared, counted = reduced(runtime, host, schedules, length, device)
            plain, expected = reduced(runtime, None, schedules, length, device)
            if not torch.equal(shared, plain) or counted != expected:
                differ.append(f"{schedules[0].name} of {length}")
    return differ, sockets.traffic.bytes_in_memory


def compiled_or_not(values: Iterable[Any], usual: Collection[tuple[Any, str]]) -> list[Any]:
    """Each value with sums in Python and in C; pairs that are not `usual` are in the lab."""
    cases = []
    for value, compiled in itertools.product(values, "01"):
        marks = [] if (value, compiled) in usual else [pytest.mark.lab]
        if compiled == "1":
            marks.append(WHERE_COMPILED)
        cases.append(pytest.param(value, compiled, marks=marks))
    return cases


NODES = [(2,), (4,), (2, 2), (1, 3), (3,), (5,), (3, 2)]
USUAL = [((2,), "0"), ((2, 2), "1"), ((1, 3), "1")]


@pytest.mark.parametrize(("nodes", "compiled"), compiled_or_not(NODES, USUAL))
def test_the_bits_and_the_traffic_are_those_of_messages(
    nodes: tuple[int, ...], compiled: str
) -> None:
    results = launch(compared, (nodes, compiled, "cpu"), sum(nodes)).results
    for rank, (differ, in_memory) in enumerate(results):
        assert differ == []
        assert (in_memory > 0) == (not (nodes == (1, 3) and rank == 0))


@pytest.mark.cuda
@pytest.mark.parametrize("nodes", [(2,), (2, 2)])
def test_vectors_on_a_gpu_have_the_bits_of_messages(nodes: tuple[int, ...]) -> None:
    for differ, in_memory in launch(compared, (nodes, "1", "cuda"), sum(nodes)).results:
        assert differ == []
        assert in_memory > 0


def refused(runtime: Runtime, _: None) -> list[float]:
    """More memories than a rank takes, of which rank 1 has one already."""
    if runtime.rank:
        host = sockets_of(runtime.transport).host
        assert host is not None
        host._memories[(1,), 0] = torch  # type: ignore[assignment]
    found = []
    for tag in range(MAX_MEMORIES + 1):
        vector = torch.ones(3)
        call = CollectiveCall(ALL_REDUCE["ring"](2), vector, Group((0, 1)), 50 + tag)
        runtime.transport.collective(call).wait()
        found.append(float(vector.sum()))
    return found


def test_who_has_enough_memories_refuses_and_messages_do() -> None:
    assert launch(refused, None, 2).results == ([6.0] * (MAX_MEMORIES + 1),) * 2


def reduce(runtime: Runtime, length: int, *, background: bool = False) -> None:
    group = Group(tuple(range(runtime.ranks)))
    ring = ALL_REDUCE["ring"](runtime.ranks)
    call = CollectiveCall(ring, torch.ones(length), group, 50, background=background)
    runtime.transport.collective(call).wait()


def killed(runtime: Runtime, assignment: tuple[int, str]) -> None:
    """One rank is killed at a random moment of collectives without end."""
    seed, os.environ["ORCHESTRA_COMPILED"] = assignment
    random = Random(seed)
    victim, delay = random.randrange(runtime.ranks), random.uniform(0, 0.05)
    if runtime.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for length in itertools.cycle((10, 30_000, 1_000_000)):
        reduce(runtime, length, background=random.random() < 0.5)


@pytest.mark.parametrize("runs", [2, pytest.param(500, marks=pytest.mark.lab)])
@pytest.mark.timeout(1800)
@COMPILED
def test_a_rank_that_is_killed_at_any_moment_is_named(runs: int, compiled: str) -> None:
    """By the run, and by each rank that notices before any other one may leave."""
    for seed in range(runs):
        victim, told = Random(seed).randrange(3), list[Event | Notice]()
        with pytest.raises(RunFailed, match=rf"^rank {victim} on \S+ was killed by SIGKILL$"):
            launch(killed, (seed, compiled), 3, on_event=told.append)
        before = itertools.takewhile(lambda event: not isinstance(event, Exited), told)
        assert {event.failure.lost for event in before if isinstance(event, Failed)} <= {victim}


def stuck(runtime: Runtime, how: tuple[bool, str]) -> None:
    """Rank 0 waits for a message of rank 1, which waits for rank 0 in a collective."""
    background, os.environ["ORCHESTRA_COMPILED"] = how
    reduce(runtime, 9)
    if runtime.rank == 0:
        runtime.transport.receive(1, tag=60).wait()
    reduce(runtime, 9, background=background)


@pytest.mark.parametrize(
    ("background", "compiled"), some(compiled_or_not([False, True], [(False, "1"), (True, "0")]))
)
def test_ranks_that_wait_for_each_other_are_found(background: bool, compiled: str) -> None:
    waits = r"rank 0 waits for rank 1 \(to receive, tag 60\), rank 1 waits for rank 0 \(in a coll"
    with pytest.raises(RunFailed, match=waits):
        launch(stuck, (background, compiled), 2, patience=1.0)


def interrupted(runtime: Runtime, how: tuple[Path, str]) -> None:
    """Rank 1 joins a collective once a signal was handled in rank 0, which waits for it there."""
    folder, os.environ["ORCHESTRA_COMPILED"] = how
    reduce(runtime, 9)
    if runtime.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (folder / "handled").touch())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        wait_until((folder / "handled").exists, "the signal is handled")
    reduce(runtime, 100_000)


@COMPILED
def test_signals_are_handled_while_a_rank_waits(compiled: str, tmp_path: Path) -> None:
    launch(interrupted, (tmp_path, compiled), 2)


def test_a_timeline_shows_what_was_exchanged_in_memory(tmp_path: Path) -> None:
    """One slice for each collective, with the bytes that the records count."""
    trace = traced('AllReduce("ring")', 3, tmp_path)
    assert_well_formed(trace)
    for rank in range(2):
        for line in step_lines(tmp_path, rank)[:5]:
            slices = [e for e in trace.slices(rank=rank) if e["args"].get("step") == line["step"]]
            (sums,) = [event for event in slices if event["cat"] == "native"]
            assert sums["name"].startswith("all-reduce (ring), ")
            assert sums["args"]["bytes_sent"] == line["bytes_sent"]
            assert not [event for event in slices if event["cat"] in ("send", "receive")]
