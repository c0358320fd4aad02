"""What goes wrong in a cluster does to a simulated run what it does to real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import in_lab, some
from tests.support.patient_push import CIRCLE
from tests.support.simulated import FREE, Second, cluster, run_ranks, simulated
from tests.support.training import settings, step_lines

from orchestra.cluster import Cluster
from orchestra.cluster.faults import Death, Delay, Fault, LinkCut, LinkSlow, Pause, SlowDown
from orchestra.cluster.file import cluster_text
from orchestra.cluster.nodes import Overhead, Sharing
from orchestra.engines.simulation.simulate import Simulation, SimulationOutcome
from orchestra.errors import PeerLost, RunFailed
from orchestra.records.record import RunRecord
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.elastic_averaging import ElasticAveraging
from orchestra.strategies.gossip import Gossip
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.prague import Prague
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.stochastic_gradient_push import StochasticGradientPush
from orchestra.worker.runtime import RankActivity, Runtime, SilentReporter, Work

MEGABYTE = torch.zeros(250_000)
WAY = 1e6 / 125e6  # seconds that it takes on a link of 1 Gbit/s
LATENCY = 100e-6  # of two links
BUFFERED = replace(FREE, buffer=1 << 40)


def lan(*faults: Fault, nodes: int = 4) -> Cluster:
    return replace(cluster(f"lan_1gbit(nodes={nodes})"), faults=faults)


def ends(outcome: SimulationOutcome) -> list[Any]:
    assert outcome.failure is None, outcome.failure
    return list(outcome.results)


# Computing


def compute(units: int) -> Callable[[Runtime], float]:
    """A program of so many seconds, one after the other; when it ends."""

    def program(runtime: Runtime) -> float:
        for _ in range(units):
            runtime.compute.run(Work("gradient", 1), lambda: None)
        return runtime.transport.now()

    return program


def test_a_node_that_slows_down_and_recovers() -> None:
    """One second at full speed, four at a quarter, and the rest."""
    slow = SlowDown(node="worker-1", factor=4, at=1, until=5)
    assert ends(run_ranks(2, compute(4), lan(slow))) == pytest.approx([4, 7])


def test_slow_downs_at_the_same_time_multiply() -> None:
    slow = [SlowDown(node="worker-0", factor=2, at=0), SlowDown(node="worker-0", factor=3, at=0)]
    assert ends(run_ranks(1, compute(2), lan(*slow))) == pytest.approx([12])


def test_a_rank_that_is_stopped_for_a_while() -> None:
    paused = Pause("rank 1", at=1.5, seconds=2)
    assert ends(run_ranks(3, compute(4), lan(paused))) == pytest.approx([4, 6, 4])


def test_a_rank_that_is_stopped_leaves_its_core_to_others() -> None:
    one_core = replace(cluster("one_host(cores=1)"), faults=(Pause("rank 0", at=0, seconds=2),))
    assert ends(run_ranks(2, compute(2), one_core)) == pytest.approx([4, 2])


@pytest.mark.parametrize(("begin", "expected"), [(0.0, [4.0, 2.0]), (0.5, [4.25, 2.25])])
def test_a_rank_that_is_stopped_gives_up_its_turn(begin: float, expected: list[float]) -> None:
    """On one core, where threads take turns of a quarter of a second."""
    fault = Pause("rank 0", at=begin, seconds=2)
    one_core = replace(cluster("one_host(cores=1)"), faults=(fault,))
    turns = Sharing(time_slice=0.25, refill=0.0, speed=1.0)
    outcome = Simulation(one_core, 2, Second(), FREE, SilentReporter(), sharing=turns).run(
        compute(2)
    )
    assert ends(outcome) == pytest.approx(expected)


# Messages


def one_message(runtime: Runtime) -> float:
    """From rank 0 to rank 1; when each of them is through."""
    if runtime.rank == 0:
        runtime.transport.send(MEGABYTE, 1, tag=1).wait()
    elif runtime.rank == 1:
        runtime.transport.receive(0, tag=1).wait()
    return runtime.transport.now()


@pytest.mark.parametrize(
    ("fault", "later"),
    [
        (None, 0.0),
        (LinkCut(of="worker-0", at=0.001, until=1.001), 1.0),
        (LinkCut(of="worker-1", at=0.001, until=1.001), 1.0),
        (LinkSlow(of="worker-1", factor=5, at=0), 4 * WAY),
        (Delay(source="rank 0", seconds=2, at=0), 2.0),
        (Delay(target="worker-1", seconds=2, at=0, until=1), 2.0),
        (Delay(source="rank 1", seconds=2, at=0), 0.0),
        (LinkCut(of="worker-2", at=0), 0.0),
    ],
)
def test_what_is_wrong_with_a_link_delays_a_message(fault: Fault | None, later: float) -> None:
    there = lan() if fault is None else lan(fault)
    usual = ends(run_ranks(2, one_message, lan()))
    assert usual[1] == pytest.approx(WAY + LATENCY, rel=1e-3)  # it has a header, too
    assert ends(run_ranks(2, one_message, there))[1] == pytest.approx(usual[1] + later, rel=1e-3)


def test_a_message_does_not_overtake_a_delayed_one() -> None:
    late = Delay(source="worker-0", seconds=5, at=0, until=1)

    def program(runtime: Runtime) -> list[float]:
        transport = runtime.transport
        if runtime.rank == 0:
            transport.send(torch.tensor([1.0]), 1, tag=1)
            compute(2)(runtime)
            transport.send(torch.tensor([2.0]), 1, tag=1)
            return []
        return [
            *(transport.receive(0, tag=1).wait().item() for _ in range(2)),
            round(transport.now(), 3),
        ]

    outcome = run_ranks(2, program, lan(late), overhead=BUFFERED)
    assert ends(outcome)[1] == [1.0, 2.0, 5.0]


@pytest.mark.parametrize(("overhead", "sent_at"), [(FREE, 2.5), (BUFFERED, 1.0)])
def test_a_stopped_rank_takes_in_nothing(overhead: Overhead, sent_at: float) -> None:
    """Its peer waits for it, unless the message fits into what the system buffers."""
    stopped = Pause("rank 1", at=0.5, seconds=2)

    def program(runtime: Runtime) -> float:
        if runtime.rank == 0:
            compute(1)(runtime)
        return one_message(runtime)

    first, second = ends(run_ranks(2, program, lan(stopped), overhead=overhead))
    assert first == pytest.approx(sent_at, abs=0.01)
    assert second == pytest.approx(2.5, abs=0.01)


# Ranks that are gone, or seem to be


def listening(runtime: Runtime) -> str:
    """All but rank 0 may be lost; rank 0 hears from each of the others once a second, for 8 s."""
    runtime.reporter.expendable(runtime.rank > 0)
    if runtime.rank > 0:
        for _ in range(8):
            compute(1)(runtime)
            runtime.transport.send(torch.ones(1), 0, tag=3)
        return ""
    heard = dict.fromkeys(range(1, runtime.ranks), 0)
    lost = ""
    while sum(heard.values()) < 8 * (runtime.ranks - 1) - 8 * bool(lost):
        try:
            receive = runtime.transport.receive(None, tag=3)
            receive.wait()
            heard[receive.source] += 1
        except PeerLost as error:
            lost = f"rank {error.rank} at {runtime.transport.now():.4f}: {error.reason}"
            heard[error.rank] = 0
    return lost


def test_a_run_goes_on_without_a_rank_that_it_can_spare() -> None:
    outcome = run_ranks(3, listening, lan(Death("rank 2", at=3.25)), overhead=BUFFERED)
    assert ends(outcome)[0] == "rank 2 at 3.2501: its connection closed"
    assert outcome.left_out == {2: "was killed by SIGKILL"}
    assert outcome.notices == ("rank 2 on worker-2 was killed by SIGKILL; going on without it",)


def test_a_node_takes_all_its_ranks_with_it() -> None:
    there = replace(lan(Death("worker-1", at=0.5), nodes=2), placement="spread")

    def program(runtime: Runtime) -> float:
        runtime.reporter.expendable(runtime.rank in (1, 3))
        return compute(2)(runtime)

    outcome = run_ranks(4, program, there)
    assert ends(outcome) == [2.0, None, 2.0, None]
    assert sorted(outcome.left_out) == [1, 3]


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_death_that_cannot_be_spared_ends_the_run_by_name(others_wait: bool) -> None:
    def program(runtime: Runtime) -> None:
        if runtime.rank != 1 and others_wait:
            runtime.transport.receive(1, tag=1).wait()
        compute(9)(runtime)

    outcome = run_ranks(3, program, lan(Death("rank 1", at=2)))
    assert outcome.failure == "rank 1 on worker-1 was killed by SIGKILL"


def test_who_cannot_go_on_after_a_death_says_of_whom() -> None:
    def program(runtime: Runtime) -> None:
        runtime.reporter.expendable(runtime.rank == 1)
        if runtime.rank == 0:
            runtime.transport.receive(1, tag=1).wait()
        compute(9)(runtime)

    failure = run_ranks(2, program, lan(Death("rank 1", at=2))).failure
    assert failure is not None
    assert failure.startswith(
        "rank 1 on worker-1 was killed by SIGKILL; rank 0 on worker-0 could not go on: rank 1 "
    )


def test_a_message_that_a_death_cuts_off_never_arrives() -> None:
    """Its receiver learns of the death, and of nothing that the dead rank had not delivered."""

    def program(runtime: Runtime) -> list[float]:
        runtime.reporter.expendable(runtime.rank == 1)
        transport = runtime.transport
        if runtime.rank == 1:
            for value in range(4):
                transport.send(torch.full_like(MEGABYTE, float(value)), 0, tag=1)
            compute(9)(runtime)
        found: list[float] = []
        try:
            while True:
                found.append(transport.receive(1, tag=1).wait()[0].item())
        except PeerLost:
            return found

    dies = Death("rank 1", at=LATENCY + 2.5 * WAY)
    assert ends(run_ranks(2, program, lan(dies), overhead=BUFFERED))[0] == [0.0, 1.0]


def test_who_adds_up_natively_learns_of_a_death() -> None:
    """torch.distributed has connections of its own, which end with the rank, too."""

    def program(runtime: Runtime) -> int | None:
        runtime.reporter.expendable(runtime.rank == 1)
        compute(9 if runtime.rank == 1 else 1)(runtime)
        try:
            runtime.transport.native_all_reduce(torch.ones(4)).wait()
        except PeerLost as lost:
            return lost.rank
        return None

    assert ends(run_ranks(2, program, lan(Death("rank 1", at=2)))) == [1, None]


@pytest.mark.parametrize(
    ("overhead", "expected"),
    [(FREE, ["0.002", "1.002", "2.002"]), (BUFFERED, ["1.000", "2.000"])],
    ids=["in need of the receiver", "buffered"],
)
def test_whoever_sends_to_a_dead_rank_learns_of_it(overhead: Overhead, expected: list[str]) -> None:
    def program(runtime: Runtime) -> list[str]:
        runtime.reporter.expendable(runtime.rank == 1)
        told = []
        for _ in range(3):
            try:
                if runtime.rank == 0:
                    runtime.transport.send(MEGABYTE, 1, tag=1).wait()
            except PeerLost:
                told.append(f"{runtime.transport.now():.3f}")
            compute(1)(runtime)
        return told

    outcome = run_ranks(2, program, lan(Death("rank 1", at=0.002)), overhead=overhead)
    assert ends(outcome)[0] == expected


def test_a_long_stop_of_a_rank_that_all_need_ends_the_run() -> None:
    outcome = run_ranks(2, compute(20), lan(Pause("rank 1", at=1, seconds=9)))
    assert outcome.failure == "rank 1 on worker-1 is stopped (by SIGSTOP or its terminal)"


def test_a_long_stop_of_one_that_can_be_spared_is_told_and_forgiven() -> None:
    outcome = run_ranks(3, listening, lan(Pause("worker-2", at=2, seconds=4.2)), overhead=BUFFERED)
    assert ends(outcome)[0] == ""
    assert outcome.left_out == {}
    assert outcome.notices == (
        "rank 2 on worker-2 is stopped; going on without it",
        "rank 2 on worker-2 is back",
    )


def test_a_rank_that_is_still_stopped_at_the_end_is_left_out() -> None:
    def program(runtime: Runtime) -> None:
        runtime.reporter.expendable(runtime.rank == 1)
        compute(4)(runtime)
        runtime.reporter.activity(RankActivity.LEAVING)

    outcome = run_ranks(2, program, lan(Pause("rank 1", at=1, seconds=1000)))
    assert outcome.failure is None
    assert outcome.left_out == {1: "was still stopped at the end"}


def test_a_rank_behind_a_cut_link_is_given_up_after_the_patience() -> None:
    outcome = run_ranks(3, listening, lan(LinkCut(of="worker-2", at=2.5)), overhead=BUFFERED)
    assert ends(outcome)[0].startswith("rank 2 at 6")
    assert outcome.left_out == {2: "does not respond: no sign of life for 60 s"}


def test_ranks_that_wait_across_a_cut_are_given_up() -> None:
    outcome = run_ranks(2, one_message, lan(LinkCut(of="worker-1", at=0)))
    assert outcome.failure == "rank 1 on worker-1 does not respond: no sign of life for 60 s"


def test_a_slow_message_is_no_reason_to_give_up() -> None:
    """It moves, all the time, and takes longer than the patience."""
    faults = [LinkSlow(of="worker-1", factor=50_000, at=0), Pause("rank 2", at=0, seconds=2)]
    outcome = run_ranks(3, one_message, lan(*faults, LinkCut(of="worker-3", at=0)))
    assert ends(outcome)[1] == pytest.approx(400, rel=1e-2)


# Strategies

ASYNCHRONOUS = ParameterServer(consistency="asynchronous")
BOUNDED = ParameterServer(consistency="bounded", staleness=1)
IN_PARTS: dict[str, Any] = {"bucket_megabytes": 0.01}  # of pushes, or of an all-reduce
REPLICATED = ParameterServer(servers=2, consistency="asynchronous", replicas=1)


class Trained:
    """A simulated training, and the same with something wrong half-way."""

    def __init__(self, strategy: Strategy, folder: Path, ranks: int = 4, **training: Any) -> None:
        self.run = settings(strategy, ranks, "digits_in_one_thread()", steps=20, **training)
        self.folder = folder
        self.usual = self._train("usual", lan())
        assert self.usual.time.training is not None
        self.half = self.usual.time.training / 2

    def with_faults(self, *faults: Fault) -> RunRecord:
        return self._train("with faults", lan(*faults))

    def _train(self, name: str, there: Cluster) -> RunRecord:
        file = self.folder / f"{name}.yaml"
        file.write_text(cluster_text(there))
        return simulated(self.run, self.folder / name, on=str(file))


@pytest.mark.parametrize(
    ("strategy", "training"),
    some([(ASYNCHRONOUS, {}), (BOUNDED, {}), (BOUNDED, IN_PARTS), (ElasticAveraging(4), {})]),
    ids=["asynchronous", "bounded", "bounded in parts", "elastic"],
)
def test_a_run_goes_on_without_a_dead_worker(
    strategy: Strategy, training: dict[str, Any], tmp_path: Path
) -> None:
    """As tests/system/engines/test_failures.py has it of real processes."""
    trained = Trained(strategy, tmp_path, **training)
    record = trained.with_faults(Death("rank 1", at=trained.half))
    assert record.ending.left_out == {"1": "was killed by SIGKILL"}
    assert list(record.ending.notices) == [
        "rank 1 on worker-1 was killed by SIGKILL; going on without it"
    ]
    assert record.ending.status == "completed"
    assert record.learned.steps > trained.usual.learned.steps, (
        "the others do what it would have done"
    )
    assert record.time.training is not None
    # Two do the second half of three, and may fall into step and wait for each other every time.
    assert trained.half < record.time.training < (1 + 1.2 * 3 / 2) * trained.half


@pytest.mark.parametrize(
    ("strategy", "victim"),
    some(some([(AllReduce(), 1), (AllReduce("native"), 2), (Gossip(), 3), (ParameterServer(), 3),
          (ParameterServer(placement="beside"), 2), (Prague(), 0), (Prague(2), 3)])),
    ids=["ring", "native", "gossip", "server", "worker", "generator of groups",
         "member of a group"],
)  # fmt: skip
def test_a_dead_rank_that_all_need_ends_the_run_by_name(
    strategy: Strategy, victim: int, tmp_path: Path
) -> None:
    trained = Trained(strategy, tmp_path, **IN_PARTS)
    with pytest.raises(RunFailed) as failed:
        trained.with_faults(Death(f"rank {victim}", at=trained.half))
    assert str(failed.value) == f"rank {victim} on worker-{victim} was killed by SIGKILL"


def test_a_replica_takes_the_place_of_a_dead_server(tmp_path: Path) -> None:
    trained = Trained(REPLICATED, tmp_path)
    record = trained.with_faults(Death("rank 3", at=trained.half))
    assert record.ending.left_out == {"3": "was killed by SIGKILL"}
    assert "rank 2 serves the slice of rank 3, without a replica" in record.ending.notices
    assert record.learned.samples == trained.usual.learned.samples


@pytest.mark.parametrize(
    "strategy",
    [
        AllReduce(),
        pytest.param(AllReduce("native"), marks=pytest.mark.lab),
        *in_lab([ParameterServer(), Gossip(), LocalSGD(4)]),
    ],
    ids=["ring", "native", "server", "gossip", "local"],
)
def test_what_passes_changes_times_and_no_synchronous_result(
    strategy: Strategy, tmp_path: Path
) -> None:
    trained = Trained(strategy, tmp_path)
    at = trained.half
    for fault, least, most in [
        (LinkCut(of="worker-1", at=at, until=at + 1), 0.99, 1.05),
        (Pause("rank 1", at=at, seconds=1), 0.99, 1.05),
        (Delay(source="rank 1", seconds=0.5, at=at, until=at + 0.1), 0.49, 0.7),
        (SlowDown(node="worker-1", factor=10, at=at), 0.1 * at, 20 * at),
    ]:
        record = trained.with_faults(fault)
        assert record.learned.parameters_sha256 == trained.usual.learned.parameters_sha256
        assert record.traffic.sent == trained.usual.traffic.sent
        assert record.time.training is not None
        assert least < record.time.training - 2 * at < most, fault


@pytest.mark.parametrize(
    ("first", "training"),
    [
        *in_lab([("AllReduce('ring')", {}), ("AllReduce('ring')", {"bucket_megabytes": 0.0005})]),
        (
            "AllReduce('ring')",
            {"bucket_megabytes": 0.0005, "tensors": "shapes", "engine": "simulation"},
        ),
        ("ParameterServer()", {}),
    ],
)
def test_a_slow_link_makes_a_straggler(
    first: str, training: dict[str, Any], tmp_path: Path
) -> None:
    """In the second half of 20 steps; in the first, and with equal links, there is none."""
    when = "when=Straggler(window=3), moments='reset'"
    strategy = parse(f"Switch({first}, Gossip(), {when})", STRATEGIES, where="test")
    trained = Trained(strategy, tmp_path, **training)
    assert trained.usual.switching.at_step is None
    slow = trained.with_faults(LinkSlow(of="worker-1", factor=50, at=trained.half))
    assert slow.switching.at_step is not None
    assert slow.switching.at_step >= 10


@pytest.mark.parametrize(("overlap", "exchanges"), [(0, "every_tau_steps"), (3, "every_step")])
def test_receivers_of_a_stopped_peer_advance_by_the_overlap(
    overlap: int, exchanges: Any, tmp_path: Path
) -> None:
    """Push-sum in a circle, as test_push_sum.py has it of real processes."""
    push = StochasticGradientPush(CIRCLE, overlap=overlap, exchanges=exchanges)
    trained = Trained(push, tmp_path, ranks=3, work="equal")
    record = trained.with_faults(Pause("rank 1", at=trained.half, seconds=2))
    ended = [[line["seconds"] for line in step_lines(record.folder, rank)] for rank in range(3)]
    done = [sum(time < 2 for time in times) for times in ended]
    assert done[2] - done[1] - overlap in (0, 1)  # the mass of the next step was sent, or not
    assert done[0] == done[2] + 1 + overlap, "a blocked step has sent its mass"
    assert [len(times) for times in ended] == [20, 20, 20]
