"""One strategy first, another later: when it switches, and what goes over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import by_turns, some
from tests.support.own_loops import distributed, in_order, mean_square
from tests.support.stops import stop_at
from tests.support.tasks_for_tests import Weight
from tests.support.threads import FreeCompute, run_ranks
from tests.support.training import (
    TASKS,
    Case,
    Trained,
    distance,
    equal,
    single_process,
    train_threads,
)

from orchestra.data import DataPlan
from orchestra.data.feed import Feed, open_samples
from orchestra.errors import InputError
from orchestra.exchange import Kept, hand_over
from orchestra.optimizers.settings import StepDecay
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.gossip import Gossip
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.pairwise_averaging import PairwiseAveraging
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.phases import Phases
from orchestra.strategies.single import Single
from orchestra.strategies.stochastic_gradient_push import StochasticGradientPush
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import (
    AfterDecay,
    AfterFraction,
    AfterSteps,
    LossStable,
    NoiseScale,
    NoiseState,
    Straggler,
)
from orchestra.tasks import load_task
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker

MOMENTUM = "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"
ADAM = "Adam(lr=0.01)"
ASYNCHRONOUS = ParameterServer(consistency="asynchronous")
BESIDE = ParameterServer(placement="beside")


def switched_at(result: Trained) -> set[int | None]:
    return {report.switched_at_step for report in result.reports}


def test_a_steadily_falling_loss_never_switches(tmp_path: Path) -> None:
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=LossStable())
    result = train_threads(strategy, 2, tmp_path, "scripted(ratio=0.98)")
    assert switched_at(result) == {None}
    assert [len(module.seen) for module in result.modules] == [25, 25]
    assert all(not report.staleness for report in result.reports)


@pytest.mark.parametrize(
    ("rule", "plateau", "step"),
    some(
        [
            (LossStable(), 12, 17),  # six equal losses: those of the steps 12 to 17
            (LossStable(source="max"), 12, 17),
            (LossStable(threshold=0.021), 12, 16),  # one of five changes may be 0.1
            (LossStable(threshold=0.021, floor=10.0), 12, 6),  # changes are relative to the floor
            (LossStable(window=2), 7, 8),
            (LossStable(window=3, every=3), 9, 18),  # three equal means: steps 10 to 18
            (LossStable(window=2, every="epoch"), 9, 24),  # epochs of 6 steps: 13 to 18, 19 to 24
        ]
    ),
)
def test_a_plateau_switches_at_the_step_that_the_rule_gives(
    rule: LossStable, plateau: int, step: int, tmp_path: Path
) -> None:
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=rule)
    task = f"scripted(plateau={plateau}, samples=144)"
    result = train_threads(strategy, 3, tmp_path, task, epochs=6)
    assert switched_at(result) == {step}
    staleness = [int(value) for report in result.reports for value in report.staleness]
    assert max(staleness) > 0
    before = [line for line in result.lines(0) if "staleness" not in line]
    assert len(before) == step
    assert len(result.lines(2)) == step  # from there on it serves


@pytest.mark.parametrize("then", [ASYNCHRONOUS, BESIDE, ParameterServer(servers=2)])
@pytest.mark.parametrize("steps", some([1, 9]))
def test_parameters_are_continuous(then: Any, steps: int, tmp_path: Path) -> None:
    """Switching at the very end leaves the bits of the first phase alone."""
    task = f"images(samples={steps * 4 * 8})"
    alone = train_threads(AllReduce(), 4, tmp_path / "alone", task, optimizer=MOMENTUM)
    strategy = Switch(AllReduce(), then, when=AfterSteps(steps))
    result = train_threads(strategy, 4, tmp_path / "switch", task, optimizer=MOMENTUM)
    assert switched_at(result) == {steps}
    for state in (result.final, *result.replicas):
        assert equal(state, alone.final)


@pytest.mark.parametrize(("optimizer", "moments"), by_turns([MOMENTUM, ADAM], ["kept", "averaged"]))
@pytest.mark.parametrize(
    "phases",
    [
        (AllReduce(), BESIDE),
        (AllReduce(), ParameterServer(placement="beside", servers=2)),
        (AllReduce("parallel"), AllReduce("ring")),
        (ParameterServer(placement="beside", returns="gradients"), AllReduce()),
    ],
    ids=["server", "servers", "all-reduce", "from gradients"],
)
def test_with_its_moments_a_synchronous_run_goes_on_as_if_nothing_was(
    phases: tuple[Any, Any], moments: Any, optimizer: str, tmp_path: Path
) -> None:
    task = "images(samples=240)"
    options: dict[str, Any] = {"optimizer": optimizer, "snapshots": 5}
    alone = train_threads(AllReduce(), 2, tmp_path / "alone", task, **options)
    strategy = Switch(*phases, when=AfterSteps(7), moments=moments)
    result = train_threads(strategy, 2, tmp_path / "switch", task, **options)
    assert equal(result.final, alone.final)
    assert curve(result) == curve(alone)


def curve(result: Trained) -> list[tuple[int, dict[str, float]]]:
    leader = next(report.leader for report in result.reports if report.leader is not None)
    return [(point.samples, point.metrics) for point in leader.curve]


def test_the_last_point_of_a_phase_is_not_taken_again_after_it(tmp_path: Path) -> None:
    """Up to 120 samples a third phase changes nothing, though its first worker has been silent."""
    task, options = "images(samples=240)", {"batch_size": 4, "snapshots": 10}
    server = Switch(AllReduce(), ParameterServer(), when=AfterSteps(6), moments="reset")
    third = Switch(server, AllReduce(), when=AfterSteps(12), moments="reset")
    two = curve(train_threads(server, 3, tmp_path / "two", task, **options))
    three = curve(train_threads(third, 3, tmp_path / "three", task, **options))
    assert [samples for samples, _ in three[:5]] == [24, 48, 72, 96, 120]
    assert three[:5] == two[:5]


@pytest.mark.parametrize("first", [ParameterServer(), ParameterServer(returns="gradients")])
@pytest.mark.parametrize("then", [AllReduce(), ASYNCHRONOUS])
def test_a_former_server_has_no_moments_to_keep(first: Any, then: Any, tmp_path: Path) -> None:
    for moments in ("kept", "averaged"):
        with pytest.raises(InputError, match=f"cannot be {moments}: set moments='reset'"):
            Switch(first, then, moments=moments).roles(3)
    strategy = Switch(first, then, when=AfterSteps(7), moments="reset")
    result = train_threads(strategy, 3, tmp_path, "images(samples=240)", optimizer=MOMENTUM)
    assert all(equal(replica, result.final) for replica in result.replicas)
    assert switched_at(result) == {7}, "the former server counts as the others do"


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
def test_moments_can_be_reset(optimizer: str, tmp_path: Path) -> None:
    task = "images(samples=240, dtype='float64')"
    strategy = Switch(AllReduce(), BESIDE, when=AfterSteps(7), moments="reset")
    result = train_threads(strategy, 2, tmp_path, task, optimizer=optimizer)
    assert distance(result.final, single_process(Case(task, optimizer, 16, reset_after=7))) < 1e-9
    assert distance(result.final, single_process(Case(task, optimizer, 16))) > 1e-6


def test_the_learning_rate_can_be_divided(tmp_path: Path) -> None:
    """By the number of workers of the second phase: here two of three ranks."""
    task = "images(samples=240, dtype='float64')"
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=AfterSteps(7), learning_rate="divided")
    result = train_threads(strategy, 3, tmp_path / "roles", task, optimizer=MOMENTUM)
    rates = [line["rates"] for line in result.lines(0)]
    assert rates[:7] == [[0.05]] * 7
    assert rates[7:]
    assert all(rate == [0.025] for rate in rates[7:])
    strategy = Switch(AllReduce(), BESIDE, when=AfterSteps(7), learning_rate="divided")
    result = train_threads(strategy, 2, tmp_path / "beside", task, optimizer=MOMENTUM)
    assert distance(result.final, single_process(Case(task, MOMENTUM, 16, divide_after=7))) < 1e-9


def test_averaged_moments_are_the_mean_over_the_workers() -> None:
    def program(runtime: Runtime) -> tuple[float, float]:
        spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
        spec = OptimizerSpec(spec.cls, spec.arguments, ((frozenset({"weight"}), {}),))
        worker = Worker(runtime, Weight(), spec)
        optimizer = worker.local_optimizer()
        state = optimizer.state[worker.gradients.parameters[0]]
        state["momentum_buffer"] = torch.full((130,), float(runtime.rank), dtype=torch.float64)
        hand_over(worker, Kept(optimizer=optimizer), "kept")
        kept = float(worker.inherited["weight"]["momentum_buffer"].mean())
        hand_over(worker, Kept(optimizer=optimizer), "averaged")
        return float(worker.inherited["weight"]["momentum_buffer"].mean()), kept

    assert run_ranks(4, program) == [(1.5, 0.0), (1.5, 1.0), (1.5, 2.0), (1.5, 3.0)]


@pytest.mark.parametrize(
    ("first", "then", "ranks", "serving"),
    [
        (AllReduce(), ASYNCHRONOUS, 4, (set(), {3})),
        (AllReduce(), ParameterServer(servers=2), 5, (set(), {3, 4})),
        (ParameterServer(servers=2), AllReduce(), 4, ({2, 3}, set())),
        (ParameterServer(), ASYNCHRONOUS, 4, ({3}, {3})),
        (Switch(AllReduce(), BESIDE, when=AfterSteps(2)), ASYNCHRONOUS, 3, (set(), {2})),
    ],
    ids=["worker to server", "two servers", "server to worker", "server stays", "three phases"],
)
def test_roles_change_and_every_sample_is_used_once(
    first: Any, then: Any, ranks: int, serving: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    strategy = Switch(first, then, when=AfterSteps(5), moments="reset")
    result = train_threads(strategy, ranks, tmp_path, "scripted(samples=403)")
    seen = [sample for module in result.modules for batch in module.seen for sample in batch]
    assert sorted(seen) == list(range(403))
    assert sum(report.samples for report in result.reports) == 403
    workers_before = {rank for rank in range(ranks) if result.modules[rank].seen} - serving[0]
    assert workers_before >= set(range(ranks)) - serving[0]
    for rank in range(ranks):
        steps = 5 * (rank not in serving[0])
        assert (len(result.modules[rank].seen) == steps) == (rank in serving[1])


@pytest.mark.parametrize("left", some([1, 2, 11]))
@pytest.mark.parametrize("when", [2, 3, 99])
@pytest.mark.parametrize("first", [AllReduce(), ParameterServer()], ids=["ring", "server"])
def test_the_last_batch_may_be_smaller_in_either_phase(
    first: Any, when: int, left: int, tmp_path: Path
) -> None:
    strategy = Switch(first, ASYNCHRONOUS, when=AfterSteps(when), moments="reset")
    task = f"images(samples={3 * 8 * 3 + left}, model='normalised')"
    result = train_threads(strategy, 4, tmp_path, task)
    assert sum(report.samples for report in result.reports) == 3 * 8 * 3 + left
    assert (switched_at(result) == {None}) == (when == 99)


APART: list[Any] = [
    ASYNCHRONOUS,
    ParameterServer(consistency="asynchronous", placement="beside"),
    Gossip(),
    StochasticGradientPush(overlap=1),
    PairwiseAveraging(),
    LocalSGD(3),
    Switch(AllReduce(), Gossip(), when=AfterSteps(3)),
]


def test_a_server_learns_at_the_switch_how_many_steps_the_workers_took(tmp_path: Path) -> None:
    strategy = Switch(ASYNCHRONOUS, AllReduce(), when=AfterSteps(5), moments="reset")
    task = "scripted(samples=403)"
    assert switched_at(train_threads(strategy, 4, tmp_path, task, work="equal")) == {5}


@pytest.mark.parametrize(
    ("first", "then"), some(by_turns(APART, [AllReduce(), ParameterServer(), *APART[:2]]))
)
def test_phases_whose_workers_go_apart_may_come_first(
    first: Any, then: Any, tmp_path: Path
) -> None:
    """Counted steps are everybody's; every sample is used once, and all parameters are agreed."""
    strategy = Switch(first, then, when=AfterSteps(5), moments="reset")
    result = train_threads(strategy, 4, tmp_path, "scripted(samples=403)", batch_size=8)
    assert switched_at(result) == {5}
    seen = [sample for module in result.modules for batch in module.seen for sample in batch]
    assert sorted(seen) == list(range(403))
    agreed = [replica["weight"] for replica in result.replicas]
    assert all(weight.equal(result.final["weight"]) for weight in agreed)


@pytest.mark.parametrize(
    ("first", "then"),
    some(
        [
            *some(
                [(first, then) for then in (AllReduce(), ASYNCHRONOUS) for first in APART], every=3
            ),
            *(pytest.param(first, Gossip(), marks=pytest.mark.lab) for first in APART),
        ]
    ),
)
def test_where_losses_are_not_shared_one_worker_judges_for_all(
    first: Any, then: Any, tmp_path: Path
) -> None:
    """All switch at one step, a little later than the loss was stable: from step 12 on."""
    rule = LossStable(window=3)
    strategy = Switch(first, then, when=rule, moments="reset")
    task = "scripted(plateau=12, samples=4803)"
    result = train_threads(strategy, 4, tmp_path, task, batch_size=8)
    workers = first.roles(4).workers
    (step,) = switched_at(result)
    assert step is not None
    assert 14 <= step < 4803 / 8 / 4
    assert sum(len(result.modules[rank].seen) for rank in workers) >= step * len(workers)
    seen = [sample for module in result.modules for batch in module.seen for sample in batch]
    assert sorted(seen) == list(range(4803))


def test_a_chain_of_phases_returns_to_where_it_began(tmp_path: Path) -> None:
    inner = Switch(Gossip(), ASYNCHRONOUS, when=AfterSteps(4), moments="reset")
    for number, strategy in enumerate((
        Switch(Switch(AllReduce(), inner, when=AfterSteps(3)), AllReduce(), when=AfterSteps(12),
               moments="reset"),
        Switch(AllReduce(), Switch(inner, AllReduce(), when=AfterSteps(9), moments="reset"),
               when=AfterSteps(3)),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        result = train_threads(strategy, 3, folder, "scripted(samples=403)")
        seen = [sample for module in result.modules for batch in module.seen for sample in batch]
        assert sorted(seen) == list(range(403))
        lines = [line for rank in range(3) for line in result.lines(rank)]
        apart = [line for line in lines if "staleness" in line]
        # Rounds 8 to 12, of two workers, begin after seven steps of three.
        assert sorted(line["position"] for line in apart) == list(range(168, 248, 8))


def test_moments_that_differ_cannot_be_kept_where_they_have_to_be_equal(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="moments='averaged' or 'reset'"):
        Switch(Gossip(), AllReduce()).roles(3)
    strategy = Switch(Gossip(), AllReduce(), when=AfterSteps(7), moments="averaged")
    result = train_threads(strategy, 3, tmp_path, "images(samples=240)", optimizer=MOMENTUM)
    assert all(equal(replica, result.final) for replica in result.replicas)


def test_the_learning_rate_can_be_multiplied_again(tmp_path: Path) -> None:
    inner = Switch(AllReduce(), Gossip(), when=AfterSteps(3), learning_rate="divided")
    strategy = Switch(
        inner, AllReduce(), when=AfterSteps(6), learning_rate="multiplied", moments="averaged"
    )
    result = train_threads(strategy, 2, tmp_path, "images(samples=240)", optimizer=MOMENTUM)
    rates = [line["rates"] for line in result.lines(0)]
    assert rates[:9] == [[0.05]] * 3 + [[0.025]] * 3 + [[0.05]] * 3


@pytest.mark.parametrize(
    ("first", "at"), some(some([(first, at) for at in (3, 10) for first in APART], every=3))
)
def test_a_run_is_stopped_and_resumed_before_its_switch_or_after(
    first: Any, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> Trained:
        strategy = Switch(first, AllReduce(), when=AfterSteps(14), moments="reset")
        return train_threads(strategy, 4, tmp_path, "scripted(samples=4803)")

    with monkeypatch.context() as stopping:
        stop_at(stopping, at)
        stopped = train()
    assert any(report.stopped for report in stopped.reports)
    resumed = train()
    seen = [
        sample
        for result in (stopped, resumed)
        for module in result.modules
        for batch in module.seen
        for sample in batch
    ]
    assert sorted(seen) == list(range(4803))
    assert {resumed.reports[rank].switched_at_step for rank in first.roles(4).workers} == {14}
    assert sum(report.samples for report in resumed.reports) == 4803


def slow_down(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Rank 1 computes three times as long as the others, in some `steps` of the run."""
    begin, before_update = Phases.__init__, Phases.before_update

    def begun(phases: Phases, strategy: Any, worker: Worker, saved: Any = None) -> None:
        worker.compute = FreeCompute()
        begin(phases, strategy, worker, saved)

    def slowed(phases: Phases) -> None:
        worker = phases.worker
        slow = worker.rank == 1 and worker.step.planned // 24 in steps
        worker.compute.seconds += 3.0 if slow else 1.0  # type: ignore[misc]
        before_update(phases)

    monkeypatch.setattr(Phases, "__init__", begun)
    monkeypatch.setattr(Phases, "before_update", slowed)


@pytest.mark.parametrize("first", [AllReduce(), Gossip()], ids=repr)
def test_a_straggler_ends_a_phase_and_its_recovery_the_next(
    first: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = Switch(
        PairwiseAveraging(), first, when=Straggler(window=3, present=False), moments="reset"
    )
    slow_down(monkeypatch, range(10, 40))
    strategy = Switch(first, back, when=Straggler(window=3), moments="reset")
    result = train_threads(strategy, 3, tmp_path, "scripted(samples=3200)")
    apart = [line["step"] for line in result.lines(0) if "staleness" in line]
    assert 11 <= apart[0] <= 13 + 3 * 4
    lines = [line for rank in range(3) for line in result.lines(rank)]
    last = max(line["position"] for line in lines if "staleness" in line)
    assert 40 <= last // 24 < 130
    assert apart == list(range(apart[0], apart[-1] + 1))


@pytest.mark.parametrize(
    ("strategy", "last"),
    [
        (Switch(AllReduce(), Switch(Gossip(), AllReduce(), when=AfterSteps(4), moments="reset"),
                when=AfterSteps(3), moments="reset"), 7),
        (Switch(Switch(AllReduce(), Gossip(), when=AfterSteps(3)), LocalSGD(2),
                when=AfterSteps(5), moments="reset"), 5),
    ],
)  # fmt: skip
def test_the_step_of_a_switch_counts_from_the_start_of_the_run(
    strategy: Any, last: int, tmp_path: Path
) -> None:
    result = train_threads(strategy, 2, tmp_path, "scripted(samples=320)")
    assert switched_at(result) == {last}


def test_rules_of_counts_and_rates_switch_at_their_step_in_any_phase(tmp_path: Path) -> None:
    schedule = StepDecay(at=(0.5,))
    for first in (AllReduce(), Gossip(), ASYNCHRONOUS):
        for number, (rule, step) in enumerate(
            [(AfterFraction(0.25), 5), (AfterSteps(3) & AfterFraction(0.25), 5)]
        ):
            strategy = Switch(first, AllReduce(), when=rule, moments="reset")
            folder = tmp_path / repr(first) / str(number)
            ranks = 3 if first is ASYNCHRONOUS else 2
            result = train_threads(strategy, ranks, folder, "scripted(samples=320)")
            assert result.reports[0].switched_at_step == step
    strategy = Switch(AllReduce(), Gossip(), when=AfterDecay())
    result = train_threads(
        strategy, 2, tmp_path / "decay", "scripted(samples=320)", schedule=schedule
    )
    assert result.reports[0].switched_at_step == 11  # the first step at the lower rate


@dataclass(frozen=True, repr=False)
class Noted(NoiseScale):
    """Notes what it is told of each step; never fires."""

    log: str = ""

    def observe(self, state: NoiseState, step: Step) -> bool:
        NOTED.setdefault(self.log, []).append(step)
        return super().observe(state, step) and False


NOTED: dict[str, list[Step]] = {}


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_a_rule_learns_the_squares_of_gradients_before_and_after_averaging(
    clip_norm: float | None, tmp_path: Path
) -> None:
    """In float64, with equal parameters: the average is that of the workers' gradients."""
    log = f"squares {clip_norm}"
    task = "images(samples=240, dtype='float64')"
    strategy = Switch(AllReduce(), Gossip(), when=Noted(log=log))
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.0)", "clip_norm": clip_norm}
    train_threads(strategy, 3, tmp_path, task, **options)
    steps = NOTED[log]
    loaded = load_task(TASKS + task)
    module = loaded.model()
    plan = DataPlan(0, 240, 24, (1.0,) * 3)
    samples = open_samples(loaded.train, 0, loaded.collate)
    assert len(steps) == plan.steps
    for number, step in enumerate(steps):
        gradients = []
        for rank in range(3):
            module.zero_grad()
            loaded.loss(module, Feed(samples, plan, rank).next(number)[0]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))  # type: ignore[union-attr]
        own = [float(gradient.square().sum()) for gradient in gradients]
        assert step.squares == pytest.approx(own, rel=1e-12)
        assert step.square == pytest.approx(float(sum(gradients).div(3).square().sum()), rel=1e-12)  # type: ignore[union-attr]
        assert step.counts == (8, 8, 8)


def test_the_noise_scale_needs_averaged_gradients() -> None:
    for first in (Gossip(), AllReduce(shard="optimizer"), ParameterServer()):
        with pytest.raises(InputError, match="needs whole averaged gradients"):
            Switch(first, AllReduce(), when=AfterSteps(5) & NoiseScale())


def test_switch_and_server_do_not_both_divide_the_learning_rate() -> None:
    server = ParameterServer(consistency="asynchronous", learning_rate="divided")
    for then in (server, Switch(server, AllReduce(), moments="reset")):
        with pytest.raises(InputError, match="would both divide the learning rate"):
            Switch(AllReduce("ring"), then, learning_rate="divided")
    Switch(AllReduce("ring"), server)
    Switch(AllReduce("ring"), ASYNCHRONOUS, learning_rate="divided")


def test_phases_have_to_agree_on_the_processes() -> None:
    with pytest.raises(InputError, match="different numbers of processes"):
        Switch(AllReduce(), Single()).roles(3)
    with pytest.raises(InputError, match="leave no worker"):
        Switch(AllReduce(), ParameterServer(servers=3)).roles(3)


def test_a_loop_that_keeps_its_loss_is_refused_where_a_phase_watches_it() -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    inner = "Switch(AllReduce(), AllReduce('tree'), when=LossStable())"
    with pytest.raises(InputError, match="watches the training loss"):
        distributed(loop, f"Switch({inner}, AllReduce(), when=AfterSteps(9))", lambda: in_order(12))
