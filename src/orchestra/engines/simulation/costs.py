"""What computation costs in virtual time, and where the figures come from. Imports without torch.

How long work takes was measured by a calibration, or is assumed from counted operations.
Computation is done for real, and charged as this says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from orchestra.cluster.calibration import Calibration, TaskCosts, read_calibration
from orchestra.cluster.nodes import Line, Overhead
from orchestra.cluster.units import FLOPS as UNIT
from orchestra.engines.simulation.kernel import Flow, Kernel
from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.records.files import cache_folder
from orchestra.trainer.settings import AUTO, NONE, Run

if TYPE_CHECKING:
    from torch import nn

    from orchestra.tasks.task import Task
    from orchestra.worker.batches import Batch
    from orchestra.worker.layout import Layout
    from orchestra.worker.runtime import Work

T = TypeVar("T")

FLOPS = 20e9
"""Floating-point operations a second that a core of speed 1 is assumed to do."""
SERIAL = 0.05
"""Part of a gradient's operations that further threads are assumed not to shorten."""


@dataclass(frozen=True)
class CostSource:
    """What a run is simulated with: nothing measured at all, or a machine's figures for its task.

    `text` says which, for the record, and `doubts` why its seconds are not to be trusted.
    """

    text: str
    calibration: Calibration | None = None
    task: TaskCosts | None = None
    doubts: tuple[str, ...] = ()


def own_calibration() -> Path:
    """Return the path at which the figures of this machine are kept.

    Raises:
        InputError: the user has no place to keep anything.
    """
    try:
        return cache_folder() / "calibration.json"
    except RuntimeError:
        raise InputError("calibration: no home folder; set ORCHESTRA_CACHE to a folder") from None


def key_of(task: str, optimizer: Optimizer, precision: str) -> tuple[str, str, str]:
    """Return what decides how long a step takes; learning rates do not."""
    arguments = {name: value for name, value in optimizer.arguments.items() if name != "lr"}
    groups = tuple(group.match for group in optimizer.groups)
    text = repr(replace(optimizer, arguments=arguments)) + (f" by {groups}" if groups else "")
    return task, text, precision


def cost_source_of(run: Run) -> CostSource:
    """Find the figures that `run` asks for with `calibration`; with auto the machine's own.

    Raises:
        InputError: a file that is not there, damaged, or without the task of the run.
    """
    training = run.training
    assumed = f"assumed: {UNIT.write(FLOPS)} a core, {SERIAL:.0%} of a gradient on one thread"
    if training.calibration == NONE:
        return CostSource(assumed)
    own = training.calibration == AUTO
    path = own_calibration() if own else Path(training.calibration)
    if own and not path.exists():
        return CostSource(f"{assumed}; this machine is not calibrated")
    calibration = read_calibration(path)
    task = calibration.task(*key_of(run.task, training.optimizer, training.precision))
    if task is not None:
        machine = f"{calibration.machine.get('processor')}, {calibration.cores} cores"
        quality = calibration.quality_of(task)
        text = f"calibrated: {machine}, {quality.measured_at}; {quality}"
        if calibration.in_memory is None:
            text += "; shared memory assumed: the file does not hold it"
        return CostSource(text, calibration, task, quality.doubts)
    if own:
        return CostSource(f"{assumed}; this machine's calibration does not hold the task")
    raise InputError(
        f"calibration: {path} does not hold {run.task} with {training.optimizer!r} in "
        f"{training.precision}; add it with orchestra calibrate --task '{run.task}' "
        f"--optimizer '{training.optimizer!r}' --out {path}"
    )


class Costs(Protocol):
    """How long a piece of work takes on a node whose speed is 1."""

    @property
    def flops(self) -> float:
        """Floating-point operations a second of one thread in a gradient."""

    def seconds(self, work: Work, threads: int = 1) -> float:
        """Return the seconds with `threads` threads, always above 0."""

    def ready(self, slot: int) -> float:
        """Return the part of a gradient's seconds that has passed when `slot` has its gradient."""

    def needed(self, slot: int) -> float:
        """Return the part of a gradient's seconds that has passed when forward needs `slot`."""


class CalibratedCosts(Costs):
    """How long work takes on the machine that was calibrated.

    Args:
        accumulation: micro-batches that a worker's batch is split into.
    """

    def __init__(self, calibration: Calibration, task: TaskCosts, *, accumulation: int = 1) -> None:
        self._work, self._task = calibration.work, task
        self._accumulation = accumulation
        self._parameters = {parameter.name: parameter for parameter in task.parameters}
        self._ready = [parameter.ready for parameter in task.parameters]
        self._turn = sum(parameter.forward for parameter in task.parameters)
        forward = accumulate((p.forward for p in reversed(task.parameters)), initial=0.0)
        self._needed = list(forward)[-2::-1]  # the last parameter is that of the first layer

    @property
    def flops(self) -> float:
        return self._task.flops

    @functools.cache  # noqa: B019 - lives as long as the simulation
    def seconds(self, work: Work, threads: int = 1) -> float:
        """See `Costs`. Work that is the same for every task was measured with one thread."""
        match work.kind:
            case "gradient":
                parts = self._accumulation
                # Each micro-batch by its own size: small ones take longer for a sample.
                return parts * self._task.seconds("gradient", work.amount / parts, threads)
            case "forward" | "backward":
                share = self._share(work.kind, work.parameters)
                return self._task.seconds("gradient", work.amount, threads) * share
            case "update" | "step":
                return self._task.seconds(work.kind, work.amount, threads)
            case kind:
                return self._work.get(kind, self._work["mix"]).at(work.amount)

    def ready(self, slot: int) -> float:
        # Of several micro-batches the last one counts.
        """What part of a gradient's seconds has passed when `slot` has its gradient.

        Of several micro-batches the last one counts.
        """
        return (self._accumulation - 1 + self._ready[slot]) / self._accumulation

    def needed(self, slot: int) -> float:
        # Of several micro-batches the first one counts.
        """What part of a gradient's seconds has passed when the forward pass needs `slot`.

        Of several micro-batches the first one counts.
        """
        return self._needed[slot] / self._accumulation

    @functools.cache  # noqa: B019 - lives as long as the simulation
    def _share(self, kind: str, names: tuple[str, ...]) -> float:
        """Return the part of a gradient's seconds that a pass of a stage's parameters takes."""
        if kind == "forward":
            share, whole = sum(self._parameters[name].forward for name in names), self._turn
        else:
            share, whole = sum(self._backward[name] for name in names), 1 - self._turn
        return share or whole * len(names) / len(self._parameters)

    @functools.cached_property
    def _backward(self) -> dict[str, float]:
        """Each parameter's part of backward: from the gradient before its own to its own."""
        before, found = self._turn, {}
        for parameter in sorted(self._parameters.values(), key=lambda p: p.ready):
            found[parameter.name] = max(parameter.ready - before, 0.0)
            before = max(before, parameter.ready)
        return found


BYTES = 5e9
"""Bytes a second that it is assumed to read or write."""
START = 20e-6
"""Seconds that any piece of work is assumed to take at least."""

OVERHEAD = Overhead(
    send=Line(20e-6, 1 / BYTES),
    receive=Line(20e-6, 1 / BYTES),
    add=1 / BYTES,
    buffer=1 << 17,
    wire=1538 / 1448,
)


class AssumedCosts:
    """Costs of training `task` with batches of its own, by its operations and its elements.

    Two thirds of a gradient's operations are taken for the backward pass, in which every
    parameter takes a time in proportion to its elements, the last one first. n threads take
    SERIAL + (1 - SERIAL) / n of the seconds of one (G. Amdahl, AFIPS 30, 1967): 4 are 3.5 times as
    fast, 16 are 9 times. All other work goes by the bytes that it moves, whatever the threads.
    """

    flops = FLOPS

    def __init__(self, sample_flops: float, layout: Layout, stages: int) -> None:
        self._sample_seconds, self._stages = sample_flops / FLOPS, stages
        elements = [slot.size for slot in layout.slots]  # the last parameter first, as in backward
        whole = sum(elements)  # the forward pass takes the first third
        self._ready = [1 / 3 + 2 / 3 * done / whole for done in accumulate(elements)]
        self._needed = [1 / 3 - done / whole / 3 for done in accumulate(elements)]

    def seconds(self, work: Work, threads: int = 1) -> float:
        gradient = work.amount * self._sample_seconds * (SERIAL + (1 - SERIAL) / threads)
        match work.kind:
            case "gradient":
                return START + gradient
            case "forward":
                return START + gradient / 3 / self._stages
            case "backward":
                return START + gradient * 2 / 3 / self._stages
            case _:
                return START + 3 * 4 * work.amount / BYTES  # two operands and a result

    def ready(self, slot: int) -> float:
        return self._ready[slot]

    def needed(self, slot: int) -> float:
        return max(self._needed[slot], 0.0)


def assumed_costs(run: Run) -> AssumedCosts:
    """Make costs from the operations of the task's gradient, as it says or counted on a batch."""
    from orchestra.tasks.task import load_task
    from orchestra.trainer.setup import meta_model
    from orchestra.worker.layout import Layout

    task = load_task(run.task)
    module = task.model() if run.training.tensors == "real" else meta_model(task)
    flops = _operations(run, task, module)
    stages = getattr(run.strategy, "stages", None) or run.training.ranks
    return AssumedCosts(flops, Layout.of_module(module), stages)


def sample_operations(run: Run) -> float:
    """Return the floating-point operations that a sample's gradient counts as.

    Raises:
        InputError: without values they cannot be counted.
    """
    from orchestra.tasks.task import load_task
    from orchestra.trainer.setup import meta_model

    task = load_task(run.task)
    module = task.model() if run.training.tensors == "real" else meta_model(task)
    return _operations(run, task, module)


def _operations(run: Run, task: Task, module: nn.Module) -> float:
    return task.sample_flops or _counted(run, task, module)


def _counted(run: Run, task: Task, module: nn.Module) -> float:
    """Count the operations of a sample's gradient."""
    from torch.utils.flop_counter import FlopCounterMode

    from orchestra.optimizers.state import undisturbed

    batch = first_batch(run, task, module)
    try:
        with undisturbed(), FlopCounterMode(display=False) as counter:
            loss = task.loss(module, batch)
            if loss.requires_grad:
                loss.backward()
    except (NotImplementedError, RuntimeError) as error:
        if run.training.tensors == "real":
            raise
        raise InputError(
            f"tensors: shapes: the operations of {run.task} cannot be counted without values "
            f"({error}); give Task.sample_flops, or set tensors to real"
        ) from error
    whole: float = counter.get_total_flops() / run.training.batch_size
    return whole


def first_batch(run: Run, task: Task, module: nn.Module) -> Batch:
    """Return the first batch of a worker, on the device of `module`."""
    from orchestra.data.feed import open_samples
    from orchestra.worker.batches import map_tensors

    samples = open_samples(task.train, run.seed, task.collate)
    device = next(module.parameters()).device
    return map_tensors(samples.read(0, run.training.batch_size), lambda tensor: tensor.to(device))


@dataclass
class _Gradient:
    """The gradient under way: all of its seconds, those that are left, and its flow."""

    whole: float
    left: float
    flow: Flow | None = None


class SimulatedCompute:
    """One rank's; `jitter` gives the factor of the piece of work that begins in a flow.

    The rank's main flow computes with `threads`, others with one. `on_step` is called at the
    beginning of each step. What surrounds its gradient takes time, but does not count as
    computation, as it does not on processes.
    """

    def __init__(
        self,
        kernel: Kernel,
        costs: Costs,
        jitter: Callable[[Flow], float],
        on_step: Callable[[], None],
        threads: int,
    ) -> None:
        self._seconds = self.main_seconds = 0.0
        self._kernel, self._costs, self._jitter = kernel, costs, jitter
        self._on_step, self._threads = on_step, threads
        self._gradient = _Gradient(0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Charged so far, to all flows of the rank."""
        self._kernel.catch_up_with_own()
        return self._seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Run `function`, and let virtual time pass.

        Raises:
            ValueError: the cost model says that it takes no time.
        """
        if work.kind == "gradient":
            self._gather()
        flow = self._kernel.current
        seconds = self._costs.seconds(work, self._threads if flow.main else 1)
        if not seconds > 0:
            raise ValueError(f"{work} takes {seconds} s: the simulation has no figure for it")
        began = self._kernel.here()
        seconds *= self._jitter(flow)
        gradient = _Gradient(seconds, seconds, flow)
        if work.kind == "gradient":
            self._gradient = gradient
        result = function()
        seconds, gradient.flow = gradient.left, None
        flow.processor.spend(seconds)
        if work.kind == "step":
            self._on_step()
        elif self._gradient.flow is not flow:  # else a bucket is encoded: the gradient counts it
            self._seconds += self._kernel.here() - began
            if flow.main:
                self.main_seconds += self._kernel.here() - began
        return result

    def _gather(self) -> None:
        """Begin a gradient only when its time has come for all, and not ahead of the others.

        The work of ranks around their gradients is short. If the ranks do it right after one
        another, its code and data stay in the caches; a gradient would push them out.
        """
        self._kernel.catch_up()

    def advance_to(self, slot: int) -> None:
        """Inside a gradient: let time pass up to where `slot` is ready."""
        self._pass(self._costs.ready(slot))

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        """Inside a gradient: let time pass up to where the forward pass needs `slot`; wait."""
        self._pass(self._costs.needed(slot))
        began = self._kernel.here()
        wait()
        # `run` counts all until the gradient's end, the wait included.
        self._seconds -= self._kernel.here() - began
        self.main_seconds -= self._kernel.here() - began

    def _pass(self, part: float) -> None:
        gradient = self._gradient
        left = gradient.whole * (1 - part)
        if left < gradient.left:
            self._kernel.current.processor.spend(gradient.left - left)
            gradient.left = left


class ChargedCompute(SimulatedCompute):
    """Of a run without values: an update would only change these, so it is left out."""

    def run(self, work: Work, function: Callable[[], T]) -> T:
        """Let virtual time pass; see `SimulatedCompute`."""
        done: Callable[[], Any] = (lambda: None) if work.kind == "update" else function
        result: T = super().run(work, done)
        return result

    def _gather(self) -> None:
        """Gradients are only charged here: they leave the caches as they are."""
