"""Schedules carried out over real sockets, ranks being threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.interpreter import buffer_elements, elements_sent, interpret
from tests.support.lab import by_turns, in_lab, some
from tests.support.threads import run_ranks
from torch import Tensor

from orchestra.collectives import Group, all_reduce, broadcast, execute, gather_objects
from orchestra.schedules import ALL_REDUCE, REDUCE, Schedule, hierarchical, ring_reduce_scatter
from orchestra.schedules import broadcast as broadcast_schedule
from orchestra.transports import collective, executor
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import Traffic, Transport
from orchestra.worker.runtime import Runtime

pytestmark = pytest.mark.usefixtures("lanes")
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 64, 97)
TAG = 70
NAMES = [*ALL_REDUCE, "hierarchical"]


@functools.cache
def schedule_of(name: str, ranks: int) -> Schedule:
    """Nodes have two ranks, the last one perhaps one."""
    if name in ALL_REDUCE:
        return ALL_REDUCE[name](ranks)
    return hierarchical([2] * (ranks // 2) + [1] * (ranks % 2))


def sum_up(transport: Transport, vector: Tensor, name: str, group: Group) -> int:
    if name in ALL_REDUCE:
        return all_reduce(transport, vector, name, group, TAG)
    return execute(transport, vector, schedule_of(name, len(group)), group, TAG)


def random_vector(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + length)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def counted(transport: Transport, function: Callable[[], Any]) -> tuple[Any, Traffic]:
    """What `function` returns, and what it moved."""
    before = dataclasses.replace(transport.traffic)
    result = function()
    after = transport.traffic
    return result, Traffic(
        after.bytes_sent - before.bytes_sent,
        after.bytes_received - before.bytes_received,
        after.messages_sent - before.messages_sent,
        after.messages_received - before.messages_received,
    )


def messages_of(schedule: Schedule, length: int) -> list[int]:
    """How many messages each rank sends: one a transfer, unless it is empty."""
    sent, edges = [0] * schedule.ranks, schedule.edges(length)
    for transfers in schedule.rounds():
        for source, _, first, end, _ in transfers.tolist():
            sent[source] += edges[end] > edges[first]
    return sent


def buffer_of(schedule: Schedule, rank: int, length: int) -> int:
    """Elements of extra memory: compiled code adds one run of pieces after the other."""
    if schedule.slots or not executor.is_there():
        return buffer_elements(schedule, rank, length)
    edges, largest = schedule.edges(length), 0
    for transfers in schedule.rounds():
        for _, target, first, end, operation in transfers.tolist():
            if target == rank and operation == REDUCE:
                largest = max(largest, edges[end] - edges[first])
    return largest


@pytest.mark.parametrize(("name", "ranks"), some(by_turns(NAMES, [1, 2, 3, 4, 5])))
def test_all_reduce_gives_the_interpreters_bits_on_all_ranks(name: str, ranks: int) -> None:
    everyone = Group(tuple(range(ranks)))

    def program(runtime: Runtime) -> list[bytes]:
        results = []
        for length in LENGTHS:
            vector = random_vector(runtime.rank, length)
            sum_up(runtime.transport, vector, name, everyone)
            results.append(vector.numpy().tobytes())
        return results

    by_rank = run_ranks(ranks, program)
    for place, length in enumerate(LENGTHS):
        vectors = [random_vector(rank, length).numpy() for rank in range(ranks)]
        expected = interpret(schedule_of(name, ranks), vectors)[0]
        np.testing.assert_allclose(expected, np.sum(vectors, axis=0), rtol=1e-5, atol=1e-5)
        assert [results[place] for results in by_rank] == [expected.tobytes()] * ranks


@pytest.mark.parametrize(("name", "ranks"), some(by_turns(NAMES, [2, 3, 4, 5, 1])))
def test_bytes_and_buffers_are_those_of_the_schedule(name: str, ranks: int) -> None:
    everyone, schedule = Group(tuple(range(ranks))), schedule_of(name, ranks)

    def program(runtime: Runtime) -> list[tuple[int, Traffic]]:
        transport = runtime.transport

        def reduce(length: int) -> int:
            vector = random_vector(runtime.rank, length, torch.float64)
            return sum_up(transport, vector, name, everyone)

        return [counted(transport, partial(reduce, length)) for length in LENGTHS]

    for rank, results in enumerate(run_ranks(ranks, program)):
        for length, (buffer_bytes, traffic) in zip(LENGTHS, results, strict=True):
            messages = messages_of(schedule, length)[rank]
            payload = 8 * elements_sent(schedule, length)[rank]
            assert traffic.messages_sent == messages
            assert traffic.bytes_sent == payload + messages * header_bytes(1)
            assert buffer_bytes == 8 * buffer_of(schedule, rank, length)


@pytest.mark.parametrize("name", NAMES)
def test_long_pieces_travel_in_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, by more messages and with no larger buffer."""
    monkeypatch.setattr(collective, "SEGMENT_BYTES", 64)
    group, schedule, length = Group((0, 1, 2)), schedule_of(name, 3), 403

    def program(runtime: Runtime) -> tuple[bytes, int, Traffic]:
        vector = random_vector(runtime.rank, length)
        buffer_bytes, traffic = counted(
            runtime.transport, lambda: sum_up(runtime.transport, vector, name, group)
        )
        return vector.numpy().tobytes(), buffer_bytes, traffic

    expected = interpret(schedule, [random_vector(rank, length).numpy() for rank in range(3)])
    for rank, (bits, buffer_bytes, traffic) in enumerate(run_ranks(3, program)):
        assert bits == expected[rank].tobytes()
        assert traffic.messages_sent > messages_of(schedule, length)[rank]
        payload = 4 * elements_sent(schedule, length)[rank]
        assert traffic.bytes_sent == payload + traffic.messages_sent * header_bytes(1)
        assert buffer_bytes <= 4 * buffer_of(schedule, rank, length)
        if not schedule.slots and not executor.is_there():
            assert buffer_bytes <= 2 * 2 * 64, "two segments for each rank that it hears at once"


@pytest.mark.parametrize("ranks", [3, *in_lab([2, 4])])
def test_what_leaves_is_what_was_there_before_the_round(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partners of the butterfly add to what they send: more of it than a connection holds."""
    monkeypatch.setattr(collective, "SEGMENT_BYTES", 1 << 20)
    group, length = Group(tuple(range(ranks))), 8_000_000

    def program(runtime: Runtime) -> Tensor:
        vector = torch.full((length,), 2.0**runtime.rank)
        all_reduce(runtime.transport, vector, "butterfly", group, TAG)
        return vector

    for result in run_ranks(ranks, program):
        assert result.unique().tolist() == [2.0**ranks - 1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_pieces_may_be_cut_elsewhere(ranks: int) -> None:
    """Here the last piece has all elements but a few."""
    group, length = Group(tuple(range(ranks))), 40
    schedule, edges = ring_reduce_scatter(ranks), [*range(ranks), length]

    def program(runtime: Runtime) -> tuple[Tensor, Traffic]:
        vector = random_vector(runtime.rank, length, torch.float64)
        _, traffic = counted(
            runtime.transport,
            lambda: execute(runtime.transport, vector, schedule, group, TAG, edges),
        )
        return vector, traffic

    results = run_ranks(ranks, program)
    vectors = [random_vector(rank, length, torch.float64) for rank in range(ranks)]
    total = torch.stack(vectors).sum(0)
    for rank, (vector, traffic) in enumerate(results):
        own = slice(edges[(rank + 1) % ranks], edges[(rank + 1) % ranks + 1])
        torch.testing.assert_close(vector[own], total[own])
        passed_on = length - (own.stop - own.start)
        assert traffic.bytes_sent == 8 * passed_on + (ranks - 1) * header_bytes(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_sums_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    group = Group((0, 1, 2))

    def program(runtime: Runtime) -> Tensor:
        vector = torch.arange(17, dtype=dtype) + runtime.rank
        sum_up(runtime.transport, vector, name, group)
        return vector

    for result in run_ranks(3, program):
        assert result.dtype == dtype
        assert result.tolist() == [3 * i + 3 for i in range(17)]


@pytest.mark.parametrize("name", NAMES)
def test_disjoint_groups_work_at_the_same_time(name: str) -> None:
    """A schedule numbers the ranks by their place in the group, which need not be sorted."""
    groups = [Group((4, 0, 2)), Group((3, 1)), Group((5,))]

    def program(runtime: Runtime) -> Tensor:
        group = next(group for group in groups if runtime.rank in group.ranks)
        vector = torch.arange(11.0) * 10.0**runtime.rank
        sum_up(runtime.transport, vector, name, group)
        return vector

    results = run_ranks(6, program)
    for group in groups:
        total = sum(10.0**rank for rank in group.ranks)
        for rank in group.ranks:
            assert results[rank].tolist() == [i * total for i in range(11)]


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (3, 1), (2,), (1, 2, 0)])
def test_broadcast_from_every_root_of_a_group(members: tuple[int, ...]) -> None:
    group = Group(members)

    def program(runtime: Runtime) -> list[tuple[bytes, Traffic]]:
        results = []
        for root in members if runtime.rank in members else ():
            vector = random_vector(runtime.rank, 33)

            def share(vector: Tensor = vector, root: int = root) -> None:
                broadcast(runtime.transport, vector, root, group, TAG)

            _, traffic = counted(runtime.transport, share)
            results.append((vector.numpy().tobytes(), traffic))
        return results

    by_rank = run_ranks(4, program)
    for place, root in enumerate(members):
        schedule = broadcast_schedule(len(members), group.index(root))
        for rank in members:
            bits, traffic = by_rank[rank][place]
            assert bits == random_vector(root, 33).numpy().tobytes()
            sent = int(elements_sent(schedule, 33)[group.index(rank)]) // 33
            assert traffic.bytes_sent == sent * (4 * 33 + header_bytes(1))


def test_gather_objects_in_the_order_of_the_group() -> None:
    group = Group((3, 0, 2))

    def value_of(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "é" * rank, "pair": (1, None), "x": 0.1 * rank}

    def program(runtime: Runtime) -> list[Any]:
        if runtime.rank not in group.ranks:
            return []
        value = value_of(runtime.rank)
        return [list(gather_objects(runtime.transport, value, group, root)) for root in group.ranks]

    results = run_ranks(4, program)
    expected = [{**value_of(rank), "pair": [1, None]} for rank in group.ranks]
    for rank in group.ranks:
        for root, gathered in zip(group.ranks, results[rank], strict=True):
            assert gathered == (expected if root == rank else [])
