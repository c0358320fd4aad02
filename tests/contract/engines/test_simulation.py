"""The simulation runs what real processes run, to the same bits, and always in the same way."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support import simulated as costs
from tests.support.lab import some
from tests.support.laboratory import sleep
from tests.support.simulated import Second, run_ranks, simulated
from tests.support.strategy_table import SIZES, TABLE, Row, with_sizes
from tests.support.training import settings, step_lines, train_processes

from orchestra.cluster.nodes import Line
from orchestra.collectives import Group, all_reduce
from orchestra.data import Contiguous
from orchestra.engines.simulation.contexts import GreenletContext, ThreadContext
from orchestra.engines.simulation.kernel import Deadlock, Flow, Kernel
from orchestra.engines.simulation.world import World
from orchestra.errors import InputError, RunFailed
from orchestra.records.record import RunRecord
from orchestra.strategies.all_reduce import AllReduce, AllReduceMember
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.worker.runtime import RankActivity, Runtime, SilentReporter, Work
from orchestra.worker.worker import Worker

ON_TIME = ("partial all-reduce", "backup workers")  # what they drop depends on time
SYNCHRONOUS = [
    row
    for row in TABLE
    if isinstance(row.strategy, str) and row.build().traits().lockstep and row.label not in ON_TIME
]


@dataclass(frozen=True)
class Doubling(AllReduce):
    """All-reduce, after which every other step counts twice."""

    def member(self, worker: Worker) -> Any:
        return DoublingMember(**vars(super().member(worker)))


class DoublingMember(AllReduceMember):
    def update(self) -> None:
        if self.worker.step.consumed // 10 % 2:
            self.worker.gradients.vector.mul_(2)
        super().update()


def check_equal(real: RunRecord, virtual: RunRecord) -> None:
    """The same training, to the last bit and byte."""
    assert virtual.learned.parameters_sha256 == real.learned.parameters_sha256
    assert (virtual.traffic.sent, virtual.learned.steps) == (real.traffic.sent, real.learned.steps)
    assert virtual.learned.metrics == real.learned.metrics
    for rank in range(virtual.asked.ranks):
        lines = (
            [step_lines(record.folder, rank) for record in (real, virtual)]
            if (real.folder / f"steps-rank-{rank}.jsonl").exists()
            else [[], []]
        )
        kept = ("step", "samples", "consumed", "loss", "rates")
        one, other = ([{key: line[key] for key in kept} for line in part] for part in lines)
        assert one == other


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.label, marks=pytest.mark.lab if row.variant else ())
        for row in SYNCHRONOUS
    ],
)
def test_synchronous_strategies_equal_real_processes(row: Row, ranks: int, tmp_path: Path) -> None:
    """With dropout, momentum, and a last batch that is not for all."""
    if ranks < row.smallest or ranks not in row.sizes:
        pytest.skip("does not run on so many")
    task = "digits_in_one_thread(dropout=0.2)"
    optimizer = "SGD(lr=0.05, momentum=0.9)"
    run = settings(row.build(), ranks, task, steps=5, batch_size=7, optimizer=optimizer)
    real = train_processes(run, tmp_path / "real")
    virtual = simulated(run, tmp_path / "virtual")
    if "native" in row.label:  # its order of summation is the backend's own
        assert virtual.traffic.sent == real.traffic.sent
        assert virtual.learned.loss == pytest.approx(real.learned.loss, rel=1e-3)
    else:
        check_equal(real, virtual)


@pytest.mark.parametrize(
    ("strategy", "task"),
    some(
        [
            (AllReduce(), "images(model='normalised', samples=37)"),
            (ParameterServer(placement="beside"), "images(model='normalised', samples=37)"),
            (Doubling(), "images(samples=50)"),
            (AllReduce("tree"), "stream()"),
            (AllReduce(), "drawing()"),
        ]
    ),
    ids=["BatchNorm", "BatchNorm on servers", "defined here", "a stream", "NumPy and Python"],
)
def test_what_a_rank_has_of_its_own_stays_its_own(strategy: Any, task: str, tmp_path: Path) -> None:
    run = settings(strategy, 3, task, steps=6, batch_size=5)
    real = train_processes(run, tmp_path / "real")
    check_equal(real, simulated(run, tmp_path / "virtual"))


ALIKE = [
    replace(row, variant=row.variant or row in SYNCHRONOUS[1:] or number % 2 == 1)
    for number, row in enumerate(row for row in TABLE if isinstance(row.strategy, str))
]
"""Of those whose result does not depend on time one is enough, of the others every second one:
`test_who_computes_ahead_of_the_others_changes_nothing` has the others."""


@pytest.mark.parametrize(("row", "ranks"), some(with_sizes(ALIKE)))
def test_the_same_seed_and_cluster_give_the_same_record(
    row: Row, ranks: int, tmp_path: Path
) -> None:
    strategy = row.build()
    run = settings(strategy, ranks, "digits_in_one_thread()", steps=4, snapshots=2)
    texts = []
    for name in ("one", "other"):
        record = simulated(run, tmp_path / name, on="stragglers(nodes=4)")
        summary = record.summary()
        assert summary.pop("wall_seconds") > 0
        lines = [
            step_lines(record.folder, rank) for rank in range(len(strategy.roles(ranks).shares))
        ]
        texts.append(json.dumps([summary, lines]))
    assert texts[0] == texts[1]


def test_jitter_changes_times_and_no_synchronous_result(tmp_path: Path) -> None:
    run = settings(AllReduce(), 4, "images()", steps=6)
    calm = simulated(run, tmp_path / "calm")
    rough = simulated(run, tmp_path / "rough", on="stragglers(nodes=4)")
    assert rough.learned.parameters_sha256 == calm.learned.parameters_sha256
    assert calm.time.training is not None
    assert rough.time.training is not None
    assert rough.time.training > calm.time.training


@pytest.mark.parametrize(
    "on", [pytest.param("lan_1gbit(nodes=4)", marks=pytest.mark.lab), "stragglers(nodes=4)"]
)
@pytest.mark.parametrize(
    "row",
    some(
        [
            pytest.param(
                row, id=row.label, marks=pytest.mark.lab if row.variant or number % 2 == 0 else ()
            )
            for number, row in enumerate(TABLE)
        ]
    ),
)
def test_who_computes_ahead_of_the_others_changes_nothing(
    row: Row, on: str, tmp_path: Path
) -> None:
    """A flow with a core for itself does not wait for them until it has to do with them."""
    run = settings(row.build(), 4, "digits_in_one_thread(dropout=0.2)", steps=4, snapshots=2)
    ahead = simulated(run, tmp_path / "ahead", on=on)
    with mock.patch.object(World, "_has_room", return_value=False):
        together = simulated(run, tmp_path / "together", on=on)
    check_equal(together, ahead)
    assert ahead.time.training == pytest.approx(together.time.training, rel=1e-9)
    assert ahead.updates.staleness == together.updates.staleness


# Failures of programs


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def program(runtime: Runtime) -> None:
        other = 1 - runtime.rank
        runtime.transport.receive(other, tag=5).wait()

    failure = run_ranks(2, program).failure
    assert failure == (
        "the run hangs: rank 0 waits for rank 1 (to receive, tag 5), "
        "rank 1 waits for rank 0 (to receive, tag 5)"
    )


def test_a_hang_names_the_flow_that_waits_and_no_idle_one() -> None:
    def program(runtime: Runtime) -> None:
        transport = runtime.transport
        idle = transport.spawn(lambda own: own.receive(None, tag=1).wait())
        other = transport.spawn(lambda own: own.receive(1 - runtime.rank, tag=5).wait())
        transport.spawn(lambda own: own.receive(None, tag=2).wait())
        (other if runtime.rank else transport.receive(1, tag=7)).wait()
        idle.wait()

    assert run_ranks(2, program).failure == (
        "the run hangs: rank 0 waits for rank 1 (to receive, tag 7), "
        "rank 1 waits for rank 0 (to receive, tag 5)"
    )


def test_a_rank_that_fails_is_named_and_the_others_leave() -> None:
    def program(runtime: Runtime) -> None:
        if runtime.rank == 1:
            raise OverflowError("too much")
        runtime.transport.receive(1, tag=5).wait()

    before = threading.active_count()
    failure = run_ranks(3, program).failure
    assert failure is not None
    assert failure.startswith("rank 1 failed: OverflowError: too much\nTraceback")
    assert threading.active_count() == before


def test_what_the_user_got_wrong_is_bad_input(tmp_path: Path) -> None:
    run = settings(AllReduce(), 2, "images()", steps=2, target=None)
    with pytest.raises(InputError, match="cluster: unknown"):
        simulated(run, tmp_path, on="lan_2gbit")


@pytest.mark.parametrize(("sample", "rank"), [(40, 0), (60, 1)])
def test_the_rank_whose_own_loss_is_not_a_number_ends_the_run(
    sample: int, rank: int, tmp_path: Path
) -> None:
    """Not one that sees the average: the first worker has the first half of the samples."""
    run = settings(AllReduce(), 2, f"nan_at({sample})", steps=6, sharding=Contiguous())
    with pytest.raises(RunFailed, match=f"^rank {rank} .*failed: the loss became nan at step"):
        simulated(run, tmp_path)


# Time


def test_work_takes_what_the_costs_say_and_messages_their_way() -> None:
    def program(runtime: Runtime) -> float:
        compute, transport = runtime.compute, runtime.transport
        compute.run(Work("gradient", 2 + runtime.rank), lambda: None)
        if runtime.rank == 0:
            transport.send(torch.zeros(1_250_000), 1, tag=1).wait()
        else:
            transport.receive(0, tag=1).wait()
        return transport.now()

    sender, receiver = run_ranks(2, program).results
    way = 100e-6 + (5_000_000 + 27) / 125e6  # 50 us of each link; and a header
    assert sender == pytest.approx(2 + way, rel=1e-9)
    assert receiver == pytest.approx(max(3.0, 2 + way), rel=1e-9)


def test_a_message_of_a_rank_to_itself_takes_what_surrounds_it_at_both_ends() -> None:
    def program(runtime: Runtime) -> float:
        runtime.transport.send(torch.zeros(1000), 0, 7)
        runtime.transport.receive(0, 7).wait()
        return runtime.transport.now()

    overhead = replace(costs.FREE, local=Line(0.5, 1e-3), handling=0.125)
    assert run_ranks(1, program, overhead=overhead).results == (0.5 + 4.0 + 0.25,)


def test_ranks_that_share_cores_slow_each_other() -> None:
    def program(runtime: Runtime) -> float:
        runtime.compute.run(Work("gradient", 1), lambda: None)
        return runtime.transport.now()

    four_on_two = run_ranks(4, program, on="one_host(cores=2)").results
    assert four_on_two == pytest.approx([2.0] * 4)
    assert run_ranks(2, program, on="one_host(cores=2)").results == pytest.approx([1.0] * 2)


def test_a_bucket_leaves_while_backward_goes_on() -> None:
    """Three slots of a second each, the last one first, and a message of each takes a second."""

    def program(runtime: Runtime) -> float:
        def backward() -> None:
            for slot in (2, 1, 0):
                runtime.compute.advance_to(slot)
                times.append(runtime.transport.now())

        times: list[float] = []
        runtime.compute.run(Work("gradient", 4), backward)
        assert times == pytest.approx([4 / 3, 8 / 3, 4.0])
        return runtime.transport.now()

    from tests.support.simulated import FREE, cluster

    from orchestra.engines.simulation.simulate import Simulation

    (end,) = (
        Simulation(cluster("one_host"), 1, Second(3), FREE, SilentReporter()).run(program).results
    )
    assert end == pytest.approx(4.0)


def test_collectives_sum() -> None:
    def program(runtime: Runtime) -> list[float]:
        vector = torch.arange(5.0) + runtime.rank
        all_reduce(runtime.transport, vector, "ring", Group((0, 1, 2)), tag=1)
        return list(vector.tolist())

    assert run_ranks(3, program).results == ([3.0, 6.0, 9.0, 12.0, 15.0],) * 3


# The kernel


FREE: Any = None
"""A processor on which nothing is computed."""


@pytest.fixture(params=[ThreadContext, GreenletContext])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """One whose flows run on threads, or on greenlets."""
    return Kernel(contexts=request.param)


def test_events_happen_in_the_order_of_time_and_then_of_their_making(kernel: Kernel) -> None:
    seen = []

    def flow(name: str, naps: list[float]) -> Any:
        def live() -> None:
            for nap in naps:
                sleep(kernel, nap)
                seen.append((kernel.now(), name))

        return live

    kernel.start(0, flow("a", [1.0, 1.0]), FREE, main=True)
    kernel.start(1, flow("b", [2.0, 0.5]), FREE, main=True)
    kernel.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "a"), (2.5, "b")]


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the cores of a thread")
def test_who_goes_on_where_another_stopped_may_use_all_cores() -> None:
    every = os.sched_getaffinity(0)
    seen = []

    def program(runtime: Runtime) -> None:
        for _ in range(3):
            all_reduce(runtime.transport, torch.ones(2), "ring", Group((0, 1, 2)), 0)
            seen.append(os.sched_getaffinity(0))

    assert run_ranks(3, program).failure is None
    assert seen == [every] * 9
    assert os.sched_getaffinity(0) == every


def test_what_ranks_do_around_their_gradients_comes_together() -> None:
    order: list[tuple[str, int]] = []

    def program(runtime: Runtime) -> None:
        for kind in ("update", "gradient", "update"):
            note = functools.partial(order.append, (kind, runtime.rank))
            runtime.compute.run(Work(kind, 1), note)

    assert run_ranks(2, program).failure is None
    first, rest = order[:2], order[2:]
    assert first == [("update", 0), ("update", 1)]
    assert rest == [(kind, rank) for rank in (0, 1) for kind in ("gradient", "update")]


def test_garbage_is_not_sought_among_what_lives_as_long_as_the_run() -> None:
    thresholds = gc.get_threshold()
    frozen = []

    def program(runtime: Runtime) -> None:
        frozen.append(gc.get_freeze_count())
        runtime.reporter.activity(RankActivity.TRAINING)
        frozen.append(gc.get_freeze_count())

    assert run_ranks(1, program).failure is None
    assert frozen[0] == 0 < frozen[1]
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_a_cancelled_event_does_not_happen(kernel: Kernel) -> None:
    seen: list[int] = []
    kernel.at(1.0, lambda: seen.append(1)).cancel()
    kernel.start(0, lambda: sleep(kernel, 2.0), FREE, main=True)
    kernel.run()
    assert seen == []


def test_nothing_due_and_somebody_parked_is_a_deadlock(kernel: Kernel) -> None:
    kernel.start(0, kernel.park, FREE, main=True)
    with pytest.raises(Deadlock):
        kernel.run()
    kernel.abort("over")
    assert not kernel.flows


def test_an_abort_unwinds_all_that_is_parked_or_has_not_begun(kernel: Kernel) -> None:
    unwound = []

    def wait(name: str) -> None:
        try:
            kernel.park()
        finally:
            unwound.append(name)

    def fail() -> None:
        kernel.start(0, lambda: wait("never begins"), FREE)
        kernel.fail(ValueError("ended"))
        kernel.park()

    kernel.start(0, lambda: wait("parked"), FREE, main=True)
    kernel.start(1, fail, FREE, main=True)
    with pytest.raises(ValueError, match="ended"):
        kernel.run()
    kernel.abort("over")
    assert (unwound, kernel.flows) == (["parked"], [])


def test_ctrl_c_ends_a_run_while_a_flow_runs(kernel: Kernel) -> None:
    unwound = []

    def go_on_for_ever(rank: int) -> None:
        try:
            while True:
                sleep(kernel, 1.0)
                if kernel.now() == 3.0 and rank == 0:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        finally:
            unwound.append(rank)

    for rank in range(3):
        kernel.start(rank, functools.partial(go_on_for_ever, rank), FREE, main=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            kernel.run()
    finally:
        signal.signal(signal.SIGINT, before)
    kernel.abort("over")
    assert (sorted(unwound), kernel.flows) == ([0, 1, 2], [])


def test_what_fails_at_the_end_of_a_flow_ends_the_run(kernel: Kernel) -> None:
    def fail(_: Flow) -> None:
        raise ValueError("at the end")

    kernel.start(0, lambda: sleep(kernel, 1.0), FREE, main=True).on_end.append(fail)
    kernel.start(1, lambda: sleep(kernel, 2.0), FREE, main=True)
    with pytest.raises(ValueError, match="at the end"):
        kernel.run()
    kernel.abort("over")
    assert not kernel.flows


def test_each_of_hundreds_of_flows_begins_another_and_waits_for_its_end(kernel: Kernel) -> None:
    """Which would not fit on one stack."""
    ended = []

    def live(rank: int) -> None:
        other = kernel.start(rank, lambda: sleep(kernel, 1.0 + rank), FREE)
        kernel.join(other)
        ended.append((kernel.now(), rank))

    for rank in range(600):
        kernel.start(rank, functools.partial(live, rank), FREE, main=True)
    kernel.run()
    assert ended == [(1.0 + rank, rank) for rank in range(600)]
