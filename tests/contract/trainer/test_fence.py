"""A fence is found, whoever wishes for it, at whatever pace the others go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulated import run_ranks as simulate
from tests.support.tasks_for_tests import Weight
from tests.support.threads import run_ranks
from tests.support.waiting import wait_until

from orchestra.coordinator.fence import LEASE
from orchestra.coordinator.rest import Reason, Rest
from orchestra.exchange import Fence, wait_for_everyone
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker

TOKEN = 99
STOP = Rest(Reason.STOP)


def make_worker(runtime: Runtime) -> Worker:
    return Worker(runtime, Weight(), OptimizerSpec(torch.optim.SGD, {"lr": 0.1}))


def wait_for_neighbour(runtime: Runtime, ranks: int) -> None:
    """Exchange a message on a one-way circle, so that no rank is `ranks` steps ahead."""
    runtime.transport.send(torch.zeros(1), (runtime.rank + 1) % ranks, TOKEN)
    runtime.transport.receive((runtime.rank - 1) % ranks, TOKEN).wait()


@dataclass
class Case:
    """Each rank does `steps`; rank r wishes at `wishes[r]`, if that is there.

    With `tied` each waits in every step for its neighbour on a one-way circle.
    """

    ranks: int
    wishes: dict[int, int]
    tied: bool
    steps: int = 40
    held: dict[int, threading.Event] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def run(self) -> list[int]:
        """The step that each rank left after."""
        return run_ranks(self.ranks, self._run)

    def _run(self, runtime: Runtime) -> int:
        worker = make_worker(runtime)
        fence = Fence(worker)
        own, left = runtime.rank, 0
        for step in range(1, self.steps + 1):
            if own in self.held and step > 2:
                assert self.held[own].wait(60)
            self._work(runtime)
            left = self.done[own] = step
            rest = fence.reached(wish=step >= self.wishes.get(own, self.steps + 1))
            if rest is not None:
                assert rest == STOP
                break
        worker.transport.send(torch.tensor([left]), (own + 1) % self.ranks, TOKEN + 1)
        worker.transport.receive((own - 1) % self.ranks, TOKEN + 1).wait()
        fence.close()
        return left

    def _work(self, runtime: Runtime) -> None:
        if self.tied:
            wait_for_neighbour(runtime, self.ranks)


cases = st.builds(
    Case,
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 3), st.integers(1, 45), max_size=3),
    st.booleans(),
)


@given(cases)
def test_all_leave_after_the_same_step(case: Case) -> None:
    left = case.run()
    assert len(set(left)) == 1
    mine = {rank: step for rank, step in case.wishes.items() if rank < case.ranks}
    first = min([*mine.values(), case.steps])
    assert first <= left[0] <= case.steps
    if case.tied and case.ranks > 1:
        assert left[0] <= first + 4 * LEASE + case.ranks
    if case.ranks == 1:
        assert left[0] == first


def test_nobody_passes_the_step_while_another_is_slow() -> None:
    """Rank 1 is held at its third step; rank 0 stops at its promise, not before."""
    slow = threading.Event()
    case = Case(3, {0: 10}, tied=False, held={1: slow})
    results: list[list[int]] = []
    run = threading.Thread(target=lambda: results.append(case.run()), daemon=True)
    run.start()
    try:
        wait_until(lambda: case.done.get(0, 0) >= 10, "rank 0 to wish")
        wait_until(lambda: case.done.get(1, 0) >= 2, "rank 1 to be held")
        assert case.done[1] == 2
    finally:
        slow.set()
        run.join(60)
    (left,) = results
    assert len(set(left)) == 1
    assert left[0] >= 10


def test_without_a_wish_it_costs_a_message_to_oneself_every_few_steps() -> None:
    def program(runtime: Runtime) -> tuple[int, int, int]:
        worker = make_worker(runtime)
        fence = Fence(worker)
        before = runtime.transport.traffic.messages_sent
        assert not any(fence.reached(wish=False) for _ in range(100))
        sent = runtime.transport.traffic.messages_sent - before
        return sent, runtime.transport.bytes_sent, LEASE

    # closed by nobody: the transport ends the flows
    for sent, crossed, lease in run_ranks(2, program):
        assert sent == 100 // lease
        assert crossed == 0


def test_after_settling_all_reports_have_been_observed() -> None:
    heard: list[float] = []

    def observe(step: Step) -> None:
        assert len(set(step.losses)) == 1
        heard.append(step.loss)

    def program(runtime: Runtime) -> list[int]:
        worker = make_worker(runtime)
        fence = Fence(worker, observe)
        known = []
        for step in range(1, 31):
            seen = (1, step, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0)
            assert fence.reached(wish=False, seen=seen) is None
            if step % 10 == 0:
                fence.settle()
                known.append(sum(number <= step for number in heard))
        fence.close()
        return known

    for ranks in (2, 4):
        heard.clear()
        assert run_ranks(ranks, program) == [[10, 20, 30]] * ranks


def test_a_rule_that_fails_ends_the_run_with_its_error() -> None:
    """The main flows wait for an instruction that will not come."""

    def observe(step: Step) -> int:
        raise ValueError("no such rule")

    def program(runtime: Runtime) -> None:
        fence = Fence(make_worker(runtime), observe)
        fence.reached(wish=False, seen=(1, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0))
        fence.settle()

    with pytest.raises(ValueError, match="no such rule"):
        run_ranks(2, program)
    failure = simulate(2, program).failure
    assert failure is not None
    assert "no such rule" in str(failure)


def test_everyone_is_observed_together_and_what_ends_the_phase_is_told_to_all() -> None:
    heard: list[tuple[float, ...]] = []

    def observe(step: Step) -> int | None:
        heard.append(step.losses)
        assert step.counts == (0, 1, 2)
        assert step.loss == pytest.approx((step.losses[1] + 2 * step.losses[2]) / 3)
        return 4 if step.losses[2] > 8.5 else None

    def program(runtime: Runtime) -> int:
        worker = make_worker(runtime)
        fence = Fence(worker, observe)
        for step in range(1, 200):
            wait_for_neighbour(runtime, 3)  # or one has done all before the others begin
            report = (runtime.rank, step + runtime.rank, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0)
            if (rest := fence.reached(wish=False, seen=report)) is not None:
                assert rest == Rest(Reason.PHASE, 4)
                break
        fence.close()
        return step

    left = run_ranks(3, program)
    assert len(set(left)) == 1
    assert 7 <= left[0] < 199
    assert heard == [(k, k + 1, k + 2) for k in range(1, left[0] + 1)]


@pytest.mark.parametrize("steps", [2**24 + 1, 2**31 - 1])
def test_a_count_of_steps_reaches_everyone_as_it_is(steps: int) -> None:
    def program(runtime: Runtime) -> int:
        return wait_for_everyone(make_worker(runtime), steps if runtime.rank == 1 else 0)

    assert run_ranks(3, program) == [steps] * 3
