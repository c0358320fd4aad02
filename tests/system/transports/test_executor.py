"""The compiled executor of schedules, over socket pairs: its bits, short reads and writes, ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from tests.support.all_schedules import schedules
from tests.support.interpreter import interpret
from tests.support.lab import some
from tests.support.meshes import in_threads, same
from tests.support.played_rows import memory_before, plan, played, random_vectors
from tests.support.threads import run_ranks
from torch import Tensor

from orchestra.collectives import Group
from orchestra.collectives import execute as execute_in_python
from orchestra.errors import InputError
from orchestra.schedules import ALL_REDUCE, Schedule, hierarchical
from orchestra.transports import executor
from orchestra.transports.executor import (
    DONE,
    ENDED,
    LOOK,
    MISMATCH,
    SUMMED,
    Job,
    Plan,
    Wire,
    plan_of,
)
from orchestra.transports.framing import DTYPES
from orchestra.worker.runtime import Runtime

pytestmark = pytest.mark.skipif(not executor.is_there(), reason="the executor is not compiled")

LANE = 7
Pair = Callable[[], tuple[socket.socket, socket.socket]]


def unix_pair() -> tuple[socket.socket, socket.socket]:
    """With the least room that the kernel gives."""
    pair = socket.socketpair()
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return pair


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class Ranks:
    """The wires of `size` ranks in this process, each to each."""

    def __init__(self, size: int, pair: Pair = unix_pair) -> None:
        self.wires: list[dict[int, Wire]] = [{} for _ in range(size)]
        for one, other in combinations(range(size), 2):
            self.wires[one][other], self.wires[other][one] = map(Wire, pair())

    def job(
        self, plan: Plan, rank: int, vector: Tensor, lane: int = LANE, news: int = -1,
        patience: int = -1,
    ) -> Job:  # fmt: skip
        wires = [self.wires[rank][peer] for peer in plan.peers]
        job = Job(plan, vector.dtype, wires, lane, news, patience)
        job.begin(vector)
        return job

    def carry_out(
        self, schedule: Schedule, vectors: Sequence[Tensor], edges: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Carry out `schedule` on all ranks at once; return what they end with."""
        memories = [memory_before(schedule, rank, each) for rank, each in enumerate(vectors)]

        def run(rank: int) -> None:
            finish(self.job(plan(schedule, rank, memories[rank], edges), rank, memories[rank]))

        in_threads([lambda rank=rank: run(rank) for rank in range(len(vectors))])  # type: ignore[misc]
        return [sum_of(schedule, memory) for memory in memories]

    def close(self) -> None:
        for wires in self.wires:
            for wire in wires.values():
                wire.connection.close()


@contextlib.contextmanager
def ranks(size: int, pair: Pair = unix_pair) -> Iterator[Ranks]:
    made = Ranks(size, pair)
    try:
        yield made
    finally:
        made.close()


def sum_of(schedule: Schedule, memory: Tensor) -> Tensor:
    """As the transport's `execute`: in the order of the ranks."""
    if not schedule.slots:
        return memory
    slots = memory.view(schedule.pieces, -1)
    total = slots[0].clone()
    for other in slots[1:]:
        total.add_(other)
    return total


def finish(job: Job) -> None:
    while (status := job.run()) == LOOK:
        pass
    assert status == DONE


# --- bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", some([1, 2, 3, 4, 5, 8, pytest.param(17, marks=pytest.mark.lab)]))
def test_all_schedules_give_the_interpreters_bits(size: int) -> None:
    """Lengths with empty pieces, and more than a connection holds."""
    with ranks(size) as group:
        for schedule in schedules(size):
            for length in (0, 1, size - 1, 97, 7001):
                vectors = random_vectors(size, length)
                expected = interpret(schedule, [each.numpy() for each in vectors])
                for rank, result in enumerate(group.carry_out(schedule, vectors)):
                    assert result.numpy().tobytes() == expected[rank].tobytes(), schedule


def test_pieces_may_be_cut_anywhere() -> None:
    order = random.Random(1)
    with ranks(4) as group:
        for schedule in (each for each in schedules(4) if not each.slots):
            edges = (0, *sorted(order.randrange(5000) for _ in range(schedule.pieces - 1)), 5000)
            vectors = random_vectors(4, 5000)
            expected = interpret(schedule, [each.numpy() for each in vectors], edges)
            for rank, result in enumerate(group.carry_out(schedule, vectors, edges)):
                assert result.numpy().tobytes() == expected[rank].tobytes(), schedule


@pytest.mark.parametrize("dtype", sorted(SUMMED, key=str), ids=str)
def test_every_dtype_has_the_bits_of_the_executor_in_python(dtype: torch.dtype) -> None:
    length = 3001
    vectors = random_vectors(3, length, dtype)
    made = [ALL_REDUCE[name](3) for name in ALL_REDUCE]

    def program(runtime: Runtime) -> list[Tensor]:
        results = []
        for schedule in made:
            vector = vectors[runtime.rank].clone()
            execute_in_python(runtime.transport, vector, schedule, Group((0, 1, 2)), 1)
            results.append(vector)
        return results

    expected = run_ranks(3, program)
    with ranks(3) as group:
        for number, schedule in enumerate(made):
            for rank, result in enumerate(group.carry_out(schedule, vectors)):
                assert same(result, expected[rank][number])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Every value plus many others; only the payload of what is not a number may differ."""
    every = torch.arange(1 << 16).to(torch.int16).view(dtype)
    own = every.repeat(80)
    arrived = torch.cat([every.roll(811 * turn * turn + turn) for turn in range(80)])
    with ranks(2, tcp_pair) as group:
        one, other = group.carry_out(ALL_REDUCE["butterfly"](2), [own, arrived])
    for result, expected in ((one, own + arrived), (other, arrived + own)):
        unknown = expected.isnan()
        assert torch.equal(result.isnan(), unknown)
        assert same(result[~unknown], expected[~unknown])


class Trickle:
    """Socket pairs whose bytes come a few at a time, cut anywhere."""

    def __init__(self, order: random.Random) -> None:
        self.order = order
        self.threads: list[threading.Thread] = []
        self.middle: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        one, near = socket.socketpair()
        other, far = socket.socketpair()
        self.middle += [near, far]
        for source, target in ((near, far), (far, near)):
            self.threads.append(threading.Thread(target=self._pass_on, args=(source, target)))
            self.threads[-1].start()
        return one, other

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self.order.randrange(1, 30)):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self.threads:
            thread.join()
        for each in self.middle:
            each.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_elements_may_arrive_in_parts(dtype: torch.dtype) -> None:
    trickle = Trickle(random.Random(3))
    with ranks(4, trickle.pair) as group:
        for schedule in schedules(4):
            vectors = random_vectors(4, 41, dtype)
            whole = [sum_of(schedule, each) for each in played(schedule, vectors)]
            for result, expected in zip(group.carry_out(schedule, vectors), whole, strict=True):
                assert same(result, expected), schedule
    trickle.close()


def test_a_rank_may_be_ahead_by_many_jobs() -> None:
    """Rank 0 broadcasts again and again before rank 1 has begun the first."""
    schedule = next(each for each in schedules(2) if each.name == "broadcast")
    with ranks(2, tcp_pair) as group:
        for number in range(50):
            vector = torch.full((10,), float(number))
            finish(group.job(plan(schedule, 0, vector), 0, vector))
        for number in range(50):
            vector = torch.zeros(10)
            finish(group.job(plan(schedule, 1, vector), 1, vector))
            assert vector.eq(number).all()


# --- what ends a job, and what interrupts it ---------------------------------------------------


def one_job(
    group: Ranks, rank: int = 0, length: int = 100, news: int = -1, patience: int = -1
) -> Job:
    vector = torch.ones(length)
    return group.job(plan(RING, rank, vector), rank, vector, news=news, patience=patience)


RING = ALL_REDUCE["ring"](2)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda group: group.job(plan(RING, 1, torch.ones(99)), 1, torch.ones(99)), "396 bytes"),
        (lambda group: different(group, torch.ones(100, dtype=torch.int32)), "torch.int32"),
        (lambda group: different(group, torch.ones(100), edges=(0, 1, 100)), "schedule"),
        (lambda group: different(group, torch.ones(100), ALL_REDUCE["butterfly"](2)), "schedule"),
        (lambda group: different(group, torch.ones(100), lane=8), "tag 8"),
    ],
    ids=["bytes", "dtype", "edges", "schedule", "tag"],
)
def test_ranks_that_do_not_agree_say_so(other: Callable[[Ranks], Job], words: str) -> None:
    with ranks(2, tcp_pair) as group:
        own, theirs = one_job(group, patience=0), other(group)
        statuses = {LOOK}
        while MISMATCH not in statuses:
            statuses = {own.run(), theirs.run()}
            assert statuses <= {LOOK, MISMATCH}
        assert own.run() == MISMATCH
        assert words in own.mismatch()
        assert "400 bytes of torch.float32, tag 7, number 0" in own.mismatch()


def different(
    group: Ranks,
    vector: Tensor,
    schedule: Schedule = RING,
    edges: tuple[int, ...] | None = None,
    lane: int = LANE,
) -> Job:
    return group.job(plan(schedule, 1, vector, edges), 1, vector, lane, patience=0)


def test_a_rank_that_has_left_out_a_job_is_told() -> None:
    with ranks(2, tcp_pair) as group:
        in_threads([lambda rank=rank: finish(one_job(group, rank)) for rank in (0, 1)])  # type: ignore[misc]
        group.wires[1][0].state.out.jobs = 0
        own, other = one_job(group, 0, patience=0), one_job(group, 1, patience=0)
        statuses: list[int] = []
        while MISMATCH not in statuses:
            statuses = [own.run(), other.run()]
        assert "number 0" in own.mismatch()


def test_a_stranger_is_no_collective() -> None:
    with ranks(2) as group:
        job = one_job(group, patience=0)
        group.wires[1][0].connection.sendall(b"GET / HTTP/1.1\r\nHost: orchestra\r\n\r\n")
        assert run_to_the_end(job) == MISMATCH
        assert job.mismatch() == "it sends what is no collective"


def run_to_the_end(job: Job) -> int:
    while (status := job.run()) == LOOK:
        pass
    return status


@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("sent", [0, 20, 32, 50, 32 + 200], ids=str)
def test_the_end_of_a_wire_says_whose_it_is(sent: int, is_reset: bool) -> None:
    """Whether nothing has come, or half a frame, or half an element."""
    with ranks(3, tcp_pair) as group:
        memory, schedule = torch.ones(450), ALL_REDUCE["parallel"](3)
        parts = plan(schedule, 0, memory)
        job = group.job(parts, 0, memory)
        other = group.wires[2][0].connection
        other.sendall((bytes_that_begin(schedule, memory) + bytes(600))[:sent])
        if is_reset:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
        assert run_to_the_end(job) == ENDED
        assert parts.peers[job.where] == 2
        assert group.wires[0][2].arrived[0] in (0, max(sent - 32, 0))


def bytes_that_begin(schedule: Schedule, memory: Tensor) -> bytes:
    table = plan(schedule, 0, memory).table
    code = DTYPES.index(memory.dtype)
    return struct.pack("=IIIIQQ", executor.MAGIC, code, LANE, 0, memory.nbytes, table)


def test_news_interrupts_and_the_job_goes_on() -> None:
    with ranks(2, tcp_pair) as group:
        news = os.eventfd(0)
        try:
            job = one_job(group, news=news)
            os.eventfd_write(news, 1)
            assert job.run() == LOOK
            assert job.run() == LOOK, "it has not been read"
            os.eventfd_read(news)
            in_threads([lambda: finish(job), lambda: finish(one_job(group, 1))])
        finally:
            os.close(news)


def test_patience_ends_and_the_job_goes_on() -> None:
    with ranks(2, tcp_pair) as group:
        job = one_job(group, patience=1)
        assert [job.run() for _ in range(3)] == [LOOK] * 3
        waited, moving = job.seconds
        assert waited > 0
        assert moving == 0
        in_threads([lambda: finish(job), lambda: finish(one_job(group, 1))])


def test_time_in_the_middle_of_a_transfer_is_not_waiting() -> None:
    with ranks(2, tcp_pair) as group:
        job = one_job(group, patience=1)
        group.wires[1][0].connection.sendall(bytes_that_begin(RING, torch.ones(100)) + bytes(10))
        while job.seconds[1] == 0:
            assert job.run() == LOOK
        arrived, seconds = group.wires[0][1].arrived
        assert arrived == 10
        assert seconds == job.seconds[1]


def test_a_signal_interrupts_and_its_handler_runs() -> None:
    """As Ctrl-C: from the main thread, which is blocked without a limit."""
    noted, returned = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: noted.set())
    main = threading.get_ident()

    def send_again_and_again() -> None:
        # One that comes before the call blocks interrupts nothing.
        while not returned.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            os.sched_yield()

    try:
        with ranks(2, tcp_pair) as group:
            job = one_job(group)
            sender = threading.Thread(target=send_again_and_again)
            sender.start()
            status = job.run()
            returned.set()
            sender.join()
            assert status == LOOK
            assert noted.is_set()
            in_threads([lambda: finish(job), lambda: finish(one_job(group, 1))])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_interpreter_is_free_while_a_job_waits() -> None:
    """Both ends are threads of this process: neither could go on if the other held a lock."""
    with ranks(2) as group:
        vectors = random_vectors(2, 100_000)
        expected = vectors[0] + vectors[1]
        for result in group.carry_out(RING, vectors):
            assert same(result, expected)


def test_other_dtypes_are_copied() -> None:
    schedule = next(each for each in schedules(2) if each.name == "broadcast")
    with ranks(2) as group:
        for dtype in DTYPES:
            sent = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype)
            results = group.carry_out(schedule, [sent, torch.zeros_like(sent)])
            assert all(same(result, sent) for result in results)


def test_the_table_tells_schedules_and_edges_apart() -> None:
    # A hierarchy of one node is a ring.
    different = [each for each in schedules(4) if each is not hierarchical((4,))]
    made = [plan_of(schedule, 0, schedule.edges(64), 4) for schedule in different]
    cut = [plan_of(RING, 0, edges, 4) for edges in ((0, 1, 64), (0, 2, 64))]
    tables = [each.table for each in (*made, *cut)]
    assert len(set(tables)) == len(tables)
    whole, half = plan_of(RING, 0, (0, 32, 64), 4), plan_of(RING, 0, (0, 32, 64), 4, 1, 2)
    assert whole.table == half.table  # ranks may take unlike rounds at a time
    for schedule in schedules(4):
        assert len({plan_of(schedule, r, schedule.edges(64), 4).table for r in range(4)}) == 1


@pytest.mark.parametrize("schedule", schedules(4), ids=lambda each: each.name)
def test_ranks_may_take_unlike_rounds_at_a_time(schedule: Schedule) -> None:
    """One rank takes all rounds in one job, the second each by itself, the others in two parts."""
    rounds = len(list(schedule.rounds()))
    cuts = [[0, rounds], [*range(rounds + 1)], *[[0, rounds // 2, rounds]] * 2]
    vectors = random_vectors(4, 53, torch.float32)
    expected = played(schedule, vectors)
    with ranks(4, tcp_pair) as group:
        for _ in range(2):  # frames count collectives
            memories = [memory_before(schedule, rank, each) for rank, each in enumerate(vectors)]

            def run(rank: int, memories: Sequence[Tensor] = memories) -> None:
                memory = memories[rank]
                length = memory.numel() // schedule.pieces if schedule.slots else memory.numel()
                for first, end in pairwise(cuts[rank]):
                    part = plan_of(schedule, rank, schedule.edges(length), 4, first, end)
                    if part.peers:
                        finish(group.job(part, rank, memory))

            in_threads([lambda rank=rank: run(rank) for rank in range(4)])  # type: ignore[misc]
            assert all(same(one, other) for one, other in zip(memories, expected, strict=True))


def test_a_plan_of_numbers() -> None:
    rows = plan_of(RING, 1, (0, 2, 5), 4).rows
    assert rows[["first", "end", "peer", "sends", "adds"]].tolist() == [
        (8, 20, 0, 1, 0),
        (0, 8, 0, 0, 1),
        (0, 8, 0, 1, 0),
        (8, 20, 0, 0, 0),
    ]
    assert isinstance(rows, np.ndarray)


def test_a_compiled_part_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PLACE_BYTES", executor._PLACE_BYTES + 8)
    executor._is_current.cache_clear()
    with pytest.raises(InputError, match="is of another version: install Orchestra again"):
        executor.is_there()
