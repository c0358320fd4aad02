"""Threads that share cores take turns, a slice each, and keep a core that they still need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from tests.support.laboratory import sleep
from tests.support.simulated import FREE, Second, cluster

from orchestra.cluster.nodes import Line, Sharing
from orchestra.engines.simulation.fluid import Fluid, Resource
from orchestra.engines.simulation.kernel import Kernel
from orchestra.engines.simulation.processor import Cores, Thread
from orchestra.engines.simulation.simulate import Simulation
from orchestra.worker.runtime import Runtime, SilentReporter, Work


def ends(
    pieces: Sequence[Sequence[int]],
    time_slice: float,
    cores: int = 2,
    speed: float = 1.0,
    refill: float = 0.0,
) -> list[float]:
    """When each rank has done its pieces of work, of so many seconds each, one after the other."""

    def program(runtime: Runtime) -> float:
        for seconds in pieces[runtime.rank]:
            runtime.compute.run(Work("gradient", seconds), lambda: None)
        return runtime.transport.now()

    on = cluster(f"one_host(cores={cores}, speed={speed})")
    sharing = Sharing(1.0, time_slice, refill)
    outcome = Simulation(on, len(pieces), Second(), FREE, SilentReporter(), sharing=sharing).run(
        program
    )
    assert outcome.failure is None
    return list(outcome.results)


def test_who_finds_no_core_waits_for_one() -> None:
    """Shared evenly at every instant, all three would end after one and a half times the time."""
    assert ends([[2], [2], [2]], time_slice=10) == pytest.approx([2, 2, 4])
    assert ends([[2], [2]], time_slice=1) == pytest.approx([2, 2])


def test_a_slice_ends_where_somebody_waits() -> None:
    assert ends([[4], [1], [2]], time_slice=2, cores=1) == pytest.approx([7, 3, 5])
    assert ends([[4], [4]], time_slice=1, cores=1) == pytest.approx([7, 8])


def test_pieces_that_follow_at_once_are_one_turn() -> None:
    assert ends([[1, 1, 1], [1]], time_slice=10, cores=1) == pytest.approx([3, 4])
    assert ends([[1, 1, 1], [1]], time_slice=2, cores=1) == pytest.approx([4, 3])


def test_a_long_turn_ends_when_somebody_comes() -> None:
    """Rank 0 had the core for longer than a slice when rank 1, which waited for it, comes back."""

    def program(runtime: Runtime) -> float:
        import torch

        if runtime.rank == 0:
            runtime.transport.send(torch.zeros(1), 1, tag=1)
            runtime.compute.run(Work("gradient", 10), lambda: None)
        else:
            runtime.transport.receive(0, tag=1).wait()
            runtime.compute.run(Work("gradient", 1), lambda: None)
        return runtime.transport.now()

    on = cluster('one_host(cores=1, latency="5 s")')
    messages = dataclasses.replace(FREE, receive=Line(1e-6, 0.0))
    outcome = Simulation(
        on, 2, Second(), messages, SilentReporter(), sharing=Sharing(1.0, 2.0)
    ).run(program)
    assert outcome.results == pytest.approx((11, 6), rel=1e-4)


def test_a_core_that_another_thread_had_has_to_be_filled_again() -> None:
    assert ends([[2], [2], [2]], time_slice=10, refill=0.5) == pytest.approx([2, 2, 4.5])
    # Half of each slice but the first fills caches: 1, then 0.5 and the last 0.5 for one; the
    # other has 0.5, 0.5 and the last second.
    assert ends([[2], [2]], time_slice=1, cores=1, refill=0.5) == pytest.approx([5.0, 6.5])
    assert ends([[2, 2], [2, 2]], time_slice=1, refill=0.5) == pytest.approx([4, 4])
    # A slow node fills them as slowly as it computes everything else.
    assert ends([[2], [2], [2]], time_slice=20, speed=0.5, refill=0.5) == pytest.approx([4, 4, 9])


def test_turns_are_taken_at_the_speed_of_the_node() -> None:
    assert ends([[2], [2], [2]], time_slice=10, speed=2) == pytest.approx([1, 1, 2])


def test_cores_that_all_compute_are_slower() -> None:
    def program(runtime: Runtime) -> float:
        runtime.compute.run(Work("gradient", 1 + runtime.rank), lambda: None)
        return runtime.transport.now()

    on, sharing = cluster("one_host(cores=2)"), Sharing(0.5, 10.0)
    outcome = Simulation(on, 2, Second(), FREE, SilentReporter(), sharing=sharing).run(program)
    assert outcome.results == pytest.approx((2.0, 3.0))  # half as fast until one is alone


def test_a_thread_that_is_held_starts_nothing() -> None:
    """Nor does it keep others from its core; let go, it does what was asked of it meanwhile."""
    kernel = Kernel()
    fluid = Fluid(kernel)
    cores = Cores(kernel, fluid, 1, time_slice=10, refill=0)
    own, both = [Resource(name, 1.0) for name in ("one", "other")], Resource("cores", 1.0)
    held, other = (Thread(kernel, fluid, (each, both), lambda: False, cores) for each in own)
    ended: dict[str, float] = {}

    def begin() -> None:
        held.hold()
        held.start(1, lambda: ended.update(held=kernel.now()))
        other.start(2, lambda: ended.update(other=kernel.now()))
        kernel.at(5, held.let_go)

    kernel.at(0, begin)
    kernel.start(0, lambda: sleep(kernel, 9), other, main=True)
    kernel.run()
    assert ended == {"other": 2, "held": 6}
