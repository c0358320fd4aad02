"""What a strategy works with: a module with flat parameters and gradients, and the runtime."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from orchestra.collectives import Group
from orchestra.coordinator.batches import BatchQueue, QueuedWork
from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec, install_moments, set_rates
from orchestra.records.following import is_logged
from orchestra.worker.batches import Batch, split_batch, tensors_of
from orchestra.worker.gradients import Gradients, ShardedGradients
from orchestra.worker.layout import FlatModel, ShardUnit
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.snapshots import Snapshots


@dataclass
class Step:
    """The step under way, as far as this rank knows it.

    Attributes:
        samples: of this rank in this step.
        total_samples: of all workers in this step.
        consumed: samples of the whole cluster so far, this step included.
        epoch: passes over the data set so far, as a fraction.
        rates: the learning rate of each parameter group.
        options: of the groups, those that a user has changed since the start.
        loss: this rank's own; the sample-weighted mean over the workers once they agree.
        losses: the loss of each rank once they agree, 0 for a rank without data.
        stop: whether the user asked this rank to stop; any rank, once they agree.
        loss_is_global: whether `loss`, `losses` and `stop` are those of the whole cluster.
        rescale: what the scale of its gradients was multiplied by since the last exchange.
        staleness: of this step's push at each server, in updates.
        planned: samples consumed once every worker has done this step.
        fraction: `planned` over the budget, 0 where there is no budget.
        seconds: what each worker needed for this step, without waiting; empty unless a rule of
            `Switch` gathers it, like the next three.
        counts: the samples of each worker in this step.
        squares: |g|^2 of each worker's gradient.
        square: |g|^2 of the mean gradient.
        position: where this rank's samples begin in the global order; None if they did not come
            from a queue.
        report: what this rank reports to the holder of the queue, for a rule that ends the phase.
        agreed: whether all workers have equal parameters after this step, which have been apart.
    """

    samples: int = 0
    total_samples: int = 0
    consumed: int = 0
    epoch: float = 0.0
    rates: tuple[float, ...] = ()
    options: str = ""
    loss: float = 0.0
    losses: tuple[float, ...] = ()
    stop: bool = False
    loss_is_global: bool = False
    rescale: float = 1.0
    staleness: tuple[int, ...] = ()
    planned: int = 0
    fraction: float = 0.0
    seconds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    squares: tuple[float, ...] = ()
    square: float = 0.0
    position: int | None = None
    report: tuple[float, ...] = ()
    agreed: bool = False

    @property
    def weight(self) -> float:
        """This rank's part of the samples of the step."""
        return self.samples / self.total_samples if self.total_samples else 0.0


@dataclass
class Measures:
    """The figures that strategies report about themselves, apart from the transport's counters.

    `staleness`: how many updates had each staleness. `decisions`: which strategy was to go on, and
    why, as records have them.
    """

    staleness: dict[str, int] = field(default_factory=dict)
    dropped: int = 0  # gradients of this worker that came too late to be applied
    peak_buffer_bytes: int = 0
    native_bytes: int = 0
    native_seconds: float = 0.0
    switched_at_step: int | None = None
    switched_at_sample: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def count_staleness(self, updates: Iterable[int]) -> None:
        """Count updates, given the staleness of each."""
        for staleness in map(str, updates):
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1


QueueOf = Callable[[int, tuple[float, ...]], BatchQueue | None]
"""queue_of(start, shares): the samples from `start` on, for ranks with these shares of a step."""


@functools.cache
def _all_of(ranks: int) -> Group:
    return Group(tuple(range(ranks)))


class Worker(FlatModel):
    """One rank's module, data share and connections, engine and strategy apart.

    `parameters` and `gradients.vector` are flat: shape [layout.size], dtype of the model. Where
    `parameters_equal` is set they are known to be equal on all ranks. `transport` is that of the
    main flow. Values of the parameters that are still `arriving` are awaited by the next forward
    pass. `observe` is called now and then by a rank that only serves. Where `steps_may_be_void`, by
    a loop of the user's own or by the loss of a rank, `undo_exchange` takes back what the last
    exchange has changed, until its step is made.
    """

    parameters_equal = False
    _told_if_compiled = False
    observe: Callable[[], None] = staticmethod(lambda: None)
    undo_exchange: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        optimizer: OptimizerSpec,
        *,
        loss: Callable[[nn.Module, Batch], Tensor] | None = None,
        accumulation: int = 1,
        precision: str = "float32",
        clip_norm: float | None = None,
        budget_ranks: int | None = None,
        bucket_bytes: int = 25_000_000,
        overlap: bool = True,
        snapshots: Snapshots | None = None,
        own_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.runtime, self.rank = runtime, runtime.rank
        self.transport, self.compute = runtime.transport, runtime.compute
        self.reporter = runtime.reporter
        self._own_optimizer = own_optimizer
        self.steps_may_be_void = self.own_loop
        self.survives_losses = False  # the strategy, or one before it, goes on without some ranks
        self._lay_out(module)
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.overlap = overlap
        self.budget_ranks = budget_ranks or runtime.ranks  # `Single` is given more than it runs
        self.bucket_bytes = bucket_bytes
        self.step = Step()
        self.measures = Measures()
        self.logged: dict[str, float] = {}  # since the last step that was recorded
        self.snapshots = snapshots or Snapshots((), runtime.transport.now)
        self.rate_scale = 1.0
        self.inherited: Mapping[str, Mapping[str, Any]] = {}
        self.queue_of: QueueOf | None = None
        self.source: QueuedWork | None = None  # of this worker's batches; None if by the plan
        self.check_loss: Callable[[float], None] = lambda _: None  # this rank's own, when it is new
        self.workers = _all_of(runtime.ranks)
        self.phase = 0  # how many have ended so far; the same on all ranks
        self.arriving: Arriving | None = None
        self._loss = loss
        self.accumulation = accumulation
        self._precision = precision

    def _lay_out(self, module: nn.Module) -> None:
        super().__init__(module)
        self.gradients = Gradients(
            module, self.layout, self.runtime.ranks, self.carried(), compares=self.own_loop
        )

    def lay_out_gradients(self, units: Sequence[ShardUnit] | None) -> None:
        """From now on gradients of `units` have memory until they are summed; None: always."""
        self.gradients.close()
        given = self.module, self.layout, self.runtime.ranks, self.carried()
        self.gradients = Gradients(*given) if units is None else ShardedGradients(*given, units)

    @property
    def everyone(self) -> Group:
        """The group of all ranks, without lost ones that the run can do without."""
        # Where it cannot, a rank that knows of a loss already is not to leave the others waiting in
        # a collective of another group.
        gone = self.transport.lost() if self.survives_losses else frozenset()
        everyone = _all_of(self.runtime.ranks)
        return Group(tuple(r for r in everyone.ranks if r not in gone)) if gone else everyone

    @property
    def own_loop(self) -> bool:
        """True if a loop of the user's own drives this worker, with an optimizer of its own."""
        return self._own_optimizer is not None

    @property
    def work(self) -> Literal["shared", "equal"]:
        """The setting `work` in the phase under way: "shared" if there is a queue of batches."""
        return "equal" if self.queue_of is None else "shared"

    def make_queue(self, shares: tuple[float, ...]) -> BatchQueue | None:
        """Make a queue of what is left of the data, for ranks with these shares of a step. None
        where each worker gets a part of its own in place of it."""
        return None if self.queue_of is None else self.queue_of(self.step.consumed, shares)

    def set_workers(self, ranks: Sequence[int]) -> None:
        """Set the ranks that have data from now on."""
        self.workers = Group(tuple(ranks))

    def begin_phase(self, workers: Sequence[int]) -> None:
        """Collective over all ranks, with nothing in flight: from now on `workers` have data."""
        self.set_workers(workers)
        self.phase += 1

    def move_parameters(self, vector: Tensor) -> Tensor:
        """Make the parameters views of `vector`, flat, with its values: nothing is copied.

        Returns the vector that they were views of. Not in a loop of the user's own, which may hold
        views of it.
        """
        assert not self.own_loop
        before, self.parameters = self.parameters, vector
        views = self.layout.views(vector)
        for parameter, view in zip(self.gradients.parameters, views, strict=True):
            # The parameters stay the same objects, to which hooks and optimizers refer.
            parameter.data = view
        return before

    def wishes_to_rest(self) -> bool:
        """Return whether all are to come to rest: to stop, or for ranks to join."""
        return self.reporter.stop_requested() or self.reporter.newcomers_wait()

    def begin_step(self, step: Step) -> None:
        """Take over what the trainer knows of the step that begins."""
        step.stop = self.wishes_to_rest()
        self.step = step
        self.set_rates(step.rates)
        # Stands for what a worker does around the gradient, which on real engines takes its time.
        self.compute.run(Work("step", step.samples), lambda: None)

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rates of the step, scaled by `rate_scale`."""
        self.step.rates = tuple(rate * self.rate_scale for rate in rates)

    def rates_in(self, first: int, end: int) -> Iterator[tuple[slice, float]]:
        """Yield the step's learning rate for each part of the flat vector's `first` to `end`.

        Both lie between tensors. Slices count from `first`; what no group has gets the rate 0.
        """
        rates, group_of = self.step.rates, self.optimizer.group_of
        if len(set(rates)) == 1:
            yield slice(0, end - first), rates[0]
            return
        for slot in self.layout.slots:
            if first <= slot.offset < end:
                begin, group = slot.offset - first, group_of.get(slot.name)
                yield slice(begin, begin + slot.size), 0.0 if group is None else rates[group]

    def backward(self, batch: Batch | None) -> None:
        """Compute the gradient of the mean loss over `batch`; it stays where autograd puts it."""
        self.gradients.clear()
        if batch is not None:
            work = Work("gradient", self.step.samples)
            self.step.loss = self.compute.run(work, lambda: self._accumulate(batch))
            self.check_loss(self.step.loss)

    def micro_batches(self, batch: Batch) -> list[tuple[Batch, int]]:
        """Split `batch` for accumulation; return each part with its number of samples."""
        return split_batch(batch, self.accumulation) if self.accumulation > 1 else [(batch, 1)]

    def _accumulate(self, batch: Batch) -> float:
        parts = self.micro_batches(batch)
        total = sum(samples for _, samples in parts)
        mean = 0.0
        for number, (part, samples) in enumerate(parts, start=1):
            self.gradients.last_backward = number == len(parts)
            loss = self.loss_of(self.module, part)
            share = samples / total
            (loss if share == 1.0 else loss * share).backward()
            mean += share * float(loss.detach())
        return mean

    def loss_of(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of `module` over `batch`, computed in the run's precision."""
        assert self._loss is not None
        if self.arriving is None or module is not self.module:
            with self.casting():
                return self._loss(module, batch)
        self.tell_if_compiled()
        with self.casting(), AwaitParameters(self.gradients.parameters, self.arriving):
            loss = self._loss(module, batch)
        # All that are left: nobody waits for parameters after the forward pass.
        self.arriving.await_for(0)
        return loss

    def tell_if_compiled(self) -> None:
        """Give a notice, once, if torch.compile was called for the module or a part of it.

        A forward pass whose operations await or gather parameters is always an eager one.
        """
        told, self._told_if_compiled = self._told_if_compiled, True
        modules = () if told or self.rank != self.workers.ranks[0] else self.module.modules()
        # By name, as torch._dynamo takes long to import.
        if any(m._compiled_call_impl or type(m).__name__ == "OptimizedModule" for m in modules):
            self.reporter.notice(
                "torch.compile has no effect on this model: its parameters arrive while the "
                "forward pass runs, eagerly (with servers, overlap: false avoids it)"
            )

    def casting(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a forward pass has the run's precision."""
        if self._precision == "bf16":
            return torch.autocast(self.layout.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def log(self, **values: SupportsFloat) -> None:
        """Record numbers of the strategy's own for the step under way: `worker.log(drift=0.3)`.

        They go into the step's line in `steps-rank-N.jsonl`, to trackers, and into figures of the
        report. Between two steps they go into the line of the next one. The last value of a name
        counts. A tensor must have one element. Loops of the user's own, runs of shapes and ranks
        without data write no such lines, so nothing is recorded there.

        Raises `InputError` for what is no finite number, and for a name that is no identifier.
        """
        for name, value in () if self.own_loop else values.items():
            number: Any = value
            if isinstance(value, Tensor):
                if value.is_meta:
                    continue
                number = value.item() if value.numel() == 1 else None
            if not is_logged({name: number}):
                found = number if isinstance(number, float) else type(value).__name__
                raise InputError(
                    f"worker.log: {name!r} is {found}: log finite numbers, or tensors of one "
                    "element, by identifiers of at most 100 characters"
                )
            # A new dict each time, since a background flow may log while a step is written down
            self.logged = {**self.logged, name: float(number)}

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the trainable parameters by name, in the layout's order."""
        names = (slot.name for slot in self.layout.slots)
        return dict(zip(names, self.gradients.parameters, strict=True))

    def local_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of all parameters on this rank: the user's own, or a new one."""
        parameters = self.named_parameters()
        optimizer = self._own_optimizer
        if optimizer is None:
            optimizer = self.optimizer.build(parameters)
        parts = {name: (parameter, 0) for name, parameter in parameters.items()}
        install_moments(optimizer, parts, self.inherited)
        return optimizer

    def update_locally(self, optimizer: torch.optim.Optimizer) -> None:
        """Take one step of `optimizer` at the step's learning rates."""
        set_rates(optimizer, self.step.rates)
        self.compute.run(Work("update", self.layout.size), optimizer.step)

    def offer_equal_parameters(self) -> None:
        """Offer the parameters to snapshots, from the first worker alone, since all have them."""
        if self.rank == self.workers.ranks[0]:
            self.snapshots.offer(self.step.consumed, self.parameters)

    def clip(self) -> None:
        """Clip the gradient on this rank to the global norm that was asked for, if any."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.gradients.parameters, self.clip_norm)


# A forward pass that begins with the layers whose parameters are there


class Arriving(Protocol):
    """Values of the parameters that are on their way."""

    def await_for(self, slot: int) -> None:
        """Return when those of the parameter `slot` of the layout, and of all after it, are there:
        a forward pass needs the last ones first."""


class AwaitParameters(TorchDispatchMode):
    """While it is active, an operation on one of `parameters` first waits for its values.

    It sees every operation of torch, whichever module a parameter belongs to: hooks on modules
    would miss one that is used by another module, as attention uses its projections.
    """

    def __init__(self, parameters: Sequence[Tensor], arriving: Arriving) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = {id(parameter): slot for slot, parameter in enumerate(parameters)}
        self._arriving = arriving
        # Slots are in reverse of the forward pass: who waits for one waits for all after it.
        self._needed = len(parameters)  # those from here on are there

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for tensor in tensors_of(args):
            slot = self._slots.get(id(tensor), self._needed)
            if slot < self._needed:
                self._arriving.await_for(slot)
                self._needed = slot
        return func(*args, **(kwargs or {}))
