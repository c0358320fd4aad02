"""Measure a step of a task on one worker, in the loop that every rank runs."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from orchestra.calibration.timing import (
    FIRST_STEPS,
    LEAST,
    MOST,
    Conditions,
    Profile,
    TimeBudget,
    curve_of,
    repeat,
    rounds,
    train_profiled,
    trimmed_mean,
)
from orchestra.cluster.calibration import Parameter, TaskCosts, Timing
from orchestra.collectives import Group, all_reduce
from orchestra.data.feed import open_samples
from orchestra.engines.simulation.costs import key_of
from orchestra.optimizers.settings import Optimizer
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.parameter_server.placement import place
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.single import Single
from orchestra.tasks.task import Task, load_task
from orchestra.trainer.settings import Run, Training
from orchestra.transports.tags import Tag
from orchestra.worker.layout import Layout
from orchestra.worker.runtime import RankActivity, Runtime

SLICES = (1, 2, 4, 8)
"""Numbers of servers over which parameters are divided to measure the optimizer."""
EXCHANGED = 65_536  # the bytes of an exchange that takes turns with steps
ROUNDS = 3  # times that each size of a batch is measured; the middle one counts
OTHERS = 4
"""Further processes in which a gradient is measured, one after the other: a virtual machine may be
a third slower for some seconds."""


@dataclass(frozen=True)
class Workload:
    """A task to be calibrated, with batches around `batch_sizes`, of one worker."""

    task: str
    optimizer: Optimizer
    precision: str = "float32"
    batch_sizes: tuple[int, ...] = (32,)
    seconds: float = 0.5  # for each figure, where there is so much time
    threads: tuple[int, ...] = (1,)  # numbers that it is measured with: 1, and more
    until: float = math.inf  # when it has to be done, by the clock of a `TimeBudget`
    folder: str | None = None  # for what is trained; the launcher's, since ranks may be killed
    share: float = 1.0  # of a core that a rank has, less than 1 under a quota
    around: bool = True  # whether smaller and larger batches than those are measured, too

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of its figures in a calibration."""
        return key_of(self.task, self.optimizer, self.precision)

    def due(self, until: float) -> Workload:
        return replace(self, until=until)

    @property
    def batch_size(self) -> int:
        return self.batch_sizes[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes to measure: those asked for, a quarter and half of the smallest (a
        micro-batch of four), and twice and four times the largest (one process in place of four).
        """
        least, most = min(self.batch_sizes), max(self.batch_sizes)
        around = (least // 4, least // 2, 2 * most, 4 * most) if self.around else ()
        wanted = {*self.batch_sizes, *around}
        return tuple(sorted(size for size in wanted if size > 0))


def measure_task(runtime: Runtime, order: Workload) -> tuple[TaskCosts, Conditions] | None:
    """Measure the costs of a task on rank 0 of two. The other rank answers messages."""
    torch.set_num_threads(1)
    if runtime.rank > 0:
        # The other rank decides which exchange is the last
        while not _exchange(runtime):
            pass
        return None
    meter = _Meter(runtime, order)
    kept, task = meter.kept, meter.task
    module = task.model()
    elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    timings = []
    with kept.watched(1):
        updates = _updates(module, order, kept, meter.budget)
        timings.append(meter.timing(1, elements, updates))
    cold = meter.cold()
    parameters = _parameters(task, module, order, meter.budget.share())
    for threads in order.threads[1:]:
        # All cores are needed for Single(), the counts between for a better curve only
        if meter.budget.over and threads < order.threads[-1]:
            kept.left_out.append(f"steps with {threads} threads")
            continue
        torch.set_num_threads(threads)
        with kept.watched(threads):
            timings.append(meter.timing(threads, elements, {}))
    batch = open_samples(task.train, 0, task.collate).read(0, order.batch_size)
    # Counted once: it intercepts every operation, and is far too slow to be timed
    with FlopCounterMode(display=False) as counter:
        task.loss(module, batch).backward()
    costs = TaskCosts(
        *order.key,
        batch_size=order.batch_size,
        cold=cold,
        shared_speed=1.0,
        refill=0.0,
        sample_flops=float(counter.get_total_flops()) / order.batch_size,
        timings=tuple(timings),
        parameters=parameters,
    )
    return costs, kept


def measure_gradient(runtime: Runtime, order: Workload) -> tuple[list[float], Conditions]:
    """Measure a gradient of the batch asked for, with one thread, on the only rank."""
    torch.set_num_threads(1)
    meter = _Meter(runtime, order)
    runtime.reporter.activity(RankActivity.TRAINING)
    meter.budget = TimeBudget(order.until, 1)
    with meter.kept.watched(1):
        return meter.steps(1, order.batch_size)["gradient"], meter.kept


def _exchange(runtime: Runtime, last: float = 0.0) -> bool:
    """Make an all-reduce of both ranks; return whether it is the last one."""
    vector = torch.zeros(EXCHANGED // 4)
    vector[0] = last
    all_reduce(runtime.transport, vector, "ring", Group((0, 1)), Tag.GRADIENTS)
    return bool(vector[0])


class _Meter:
    """Makes short trainings of one task on one worker, with batches of several sizes."""

    def __init__(self, runtime: Runtime, order: Workload) -> None:
        self._runtime, self._order, self._done = runtime, order, 0
        # Nothing is judged: evaluations would take time from the figures
        self.task = replace(load_task(order.task), test=None, validation=None)
        self.kept = Conditions(share=order.share)
        figures = ROUNDS * len(order.threads) * len(order.sizes)
        # And those of `cold`, `_parameters` and `_updates`
        self.budget = TimeBudget(order.until, figures + 2 * ROUNDS + 1 + 1 + len(SLICES))
        self._each: dict[tuple[int, int], float] = {}  # seconds of a step, by threads and size

    def timing(self, threads: int, elements: int, slices: Mapping[int, float]) -> Timing:
        """Return the timings with `threads` threads. `slices` has, by number of elements, the
        part of a whole update's seconds that such a slice takes.

        The requested batch size is measured before the others, which are left out where time is
        short.
        """
        found: dict[int, list[dict[str, list[float]]]] = defaultdict(list)
        asked = self._order.batch_size
        # If time is short, the batch that was asked for is there
        sizes = sorted(self._order.sizes, key=lambda size: (size != asked, size))
        # In turns, so that seconds in which the machine is slower are not one size's alone
        for turn, size in itertools.product(range(ROUNDS), sizes):
            if not (self.budget.over and found):
                found[size].append(self.steps(threads, size))
            elif turn == 0:
                self.kept.left_out.append(f"a gradient of {size} sample{'s' * (size > 1)}")
            self._done += 1
            self._runtime.reporter.progress(step=self._done, samples=0)
        gradient, step = (
            {size: _middle([each[part] for each in turns]) for size, turns in found.items()}
            for part in ("gradient", "step")
        )
        update = _middle([each["update"] for turns in found.values() for each in turns])
        # Slices are measured apart, and scaled to what an update takes inside a step
        whole = trimmed_mean(update)
        updates = {size: [whole * part] for size, part in slices.items()} | {elements: update}
        return Timing(threads, *(curve_of(x, trimmed_mean) for x in (gradient, updates, step)))

    def cold(self) -> float:
        """Return the surplus of a step followed by an exchange over both of them measured alone."""
        size, runtime = self._order.batch_size, self._runtime
        if self.budget.over:
            self.kept.left_out.append("what steps and exchanges in turn take more")
            _exchange(runtime, last=1.0)
            return 0.0
        more = []
        for _ in range(ROUNDS):
            alone = self.steps(1, size)["whole"]
            in_turn = self.steps(1, size, lambda: _exchange(runtime))["whole"]
            more.append(trimmed_mean(in_turn) - trimmed_mean(alone))
        seconds, most = self._order.seconds / 2, self.budget.share()
        exchanges = repeat(
            lambda: _exchange(runtime), seconds, Conditions(), most
        )  # waits for a peer
        _exchange(runtime, last=1.0)
        self._done += 1
        # Gradients and messages evict each other from the caches; measured separately, both would
        # be too cheap.
        return max(statistics.median(more) - statistics.median(exchanges), 0.0)

    def steps(
        self, threads: int, size: int, exchange: Callable[[], object] = lambda: None
    ) -> dict[str, list[float]]:
        """Return the seconds of the parts of a step, by their names: processor seconds of one
        thread, seconds that pass of more. As many steps are made as fit into the time, or as few as
        it took to find that out.
        """
        # What other programs take can be told from one thread's seconds, not from those of several
        clock = time.thread_time if threads == 1 else time.perf_counter
        # The step of one rank of several, which collects its gradient; with more threads that of
        # one process, which does not
        strategy: Strategy = AllReduce() if threads == 1 else Single()
        most, began = self.budget.share(), time.perf_counter()
        each = self._each.get((threads, size))
        if each is None:
            times = self._train(strategy, size, FIRST_STEPS + 2, Profile(clock, exchange))
            passed = time.perf_counter() - began
            each = self._each[threads, size] = passed / (FIRST_STEPS + 2)
            # A short training tells what a step takes; with no time left it is the result
            most -= passed
            if most < (FIRST_STEPS + 3) * each:
                return times
        fit = int(min(most / each, MOST)) - FIRST_STEPS
        wanted = max(int(self._order.seconds / each), LEAST // ROUNDS)
        steps = FIRST_STEPS + min(wanted, max(fit, 2))
        began, ran = time.perf_counter(), time.thread_time()
        times = self._train(strategy, size, steps, Profile(clock, exchange))
        if threads == 1:
            self.kept.passed += time.perf_counter() - began
            self.kept.ran += time.thread_time() - ran
        return times

    def _train(
        self, strategy: Strategy, size: int, steps: int, profile: Profile
    ) -> dict[str, list[float]]:
        order = self._order
        training = Training(
            ranks=1, batch_size=size, steps=steps, snapshots=0, trace_steps=0,
            optimizer=order.optimizer, precision=order.precision,  # type: ignore[arg-type]
            # Whether the loss is finite does not matter here: the seconds are the same
            stop_on_nonfinite=False,
        )  # fmt: skip
        run = Run("calibration", task=order.task, strategy=strategy, training=training)
        # Data that is loaded already
        runtime = replace(self._runtime, share=lambda make: self.task)
        train_profiled(runtime, run, profile, self._done, order.folder)
        # Memory is taken for the first time in the first ones
        return {part: times[len(times) // 3 :] for part, times in profile.steps().items()}


def _middle(turns: Sequence[list[float]]) -> list[float]:
    """Return the durations of the turn with the middle mean."""
    return sorted(turns, key=trimmed_mean)[len(turns) // 2]


def _updates(
    module: nn.Module, order: Workload, kept: Conditions, budget: TimeBudget
) -> dict[int, float]:
    """Return the part of an update's seconds that slices of servers take, by their elements."""
    layout = Layout.of_module(module)
    names = [slot.name for slot in layout.slots]
    spec = OptimizerSpec.from_settings(order.optimizer, names)
    spans = [(slot.offset, slot.size) for slot in layout.slots]
    times: dict[int, float] = {}
    # Other optimizers need whole tensors, which servers are given
    for servers in SLICES if spec.elementwise else ():
        part = place(spans, layout.size, servers, divisible=spec.elementwise)[0]
        tensors = {names[p.tensor]: torch.zeros(p.end - p.first) for p in part.pieces}
        elements = sum(tensor.numel() for tensor in tensors.values())
        for tensor in tensors.values():
            tensor.grad = torch.randn_like(tensor)
        step = spec.build(tensors).step
        repeats = repeat(step, order.seconds / 4, kept, budget.share())
        times[elements] = statistics.median(repeats)
    # Relative to the whole: measured alone, updates are faster than inside a step
    most = max(times, default=0)
    return {elements: seconds / times[most] for elements, seconds in times.items() if elements}


def _parameters(
    task: Task, module: nn.Module, order: Workload, most: float
) -> tuple[Parameter, ...]:
    """Measure how the seconds of a gradient are distributed over the layers, at the requested
    batch size.
    """
    batch = open_samples(task.train, 0, task.collate).read(0, order.batch_size)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    slots = {id(parameter): slot for slot, parameter in enumerate(named.values())}
    entered: list[tuple[int, float]] = []
    marks: dict[int, float] = {}
    for layer in module.modules():
        # By identity: tied weights have one slot, and several names
        own = [slots[id(p)] for p in layer.parameters(recurse=False) if id(p) in slots]
        if own:
            layer.register_forward_pre_hook(
                lambda *_, slot=own[0]: entered.append((slot, time.thread_time()))
            )
    for slot, parameter in enumerate(named.values()):
        # The moment at which a bucket with this tensor could leave
        parameter.register_post_accumulate_grad_hook(
            lambda _, slot=slot: marks.update({slot: time.thread_time()})
        )

    def once() -> tuple[list[float], list[float]]:
        """Return the parts of a gradient: in each layer's forward, and until each one is ready."""
        module.zero_grad()
        entered.clear()
        marks.clear()
        began = time.thread_time()
        loss = task.loss(module, batch)
        turned = time.thread_time()
        loss.backward()
        whole = time.thread_time() - began
        forward = [0.0] * len(named)
        # A layer lasts until the next one begins; what lies before the first is counted to it
        starts = [began, *(at for _, at in entered[1:]), turned]
        for (slot, _), (begin, end) in zip(entered, itertools.pairwise(starts), strict=False):
            forward[slot] += (end - begin) / whole
        # Tensors that the loss does not depend on get no gradient
        ends = (marks.get(slot, began + whole) for slot in slots.values())
        return forward, [(end - began) / whole for end in ends]

    passes = [once() for _ in rounds(order.seconds, most, 12, 200)]
    # The first ones warm up
    counted = zip(*passes[min(FIRST_STEPS, len(passes) - 1) :], strict=True)
    forward, ready = (
        [statistics.median(of_one) for of_one in zip(*rows, strict=True)] for rows in counted
    )
    return tuple(
        Parameter(name, p.numel(), turn, min(end, 1.0))
        for (name, p), turn, end in zip(named.items(), forward, ready, strict=True)
    )
