"""The set-up of a rank: its worker, its memory by formula, a warm-up, and measured speeds."""

from __future__ import annotations

import copy
import functools
import mmap
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from orchestra.collectives import Group, all_reduce
from orchestra.data.feed import epoch_samples
from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.optimizers.state import undisturbed
from orchestra.strategies.base import ModelPart, roles_of
from orchestra.tasks.task import Task, load_task
from orchestra.trainer.checkpoints import writing
from orchestra.trainer.settings import Run, Training
from orchestra.transports.tags import Tag
from orchestra.worker.batches import Batch, batch_samples, to_device
from orchestra.worker.gathering import ShardedWorker
from orchestra.worker.layout import Layout, Share, bucket_edges, buffer_places
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.shapes import ShapeWorker, SharedShapes
from orchestra.worker.snapshots import Contribution, ModelRange, Places, Snapshots
from orchestra.worker.worker import Worker

Extents = dict[str, tuple[int, int]]
Read = Callable[[], Batch]
GRADIENTS = 7
"""Gradients that each rank computes to measure its speed; their median seconds count."""


def budget_of(task: Task, training: Training) -> tuple[int, int]:
    """Return the samples of an epoch, and of the whole run."""
    if training.steps is not None:
        budget = training.steps * training.ranks * training.batch_size
        try:
            # A stream without a length counts as one epoch, so that `steps` can be used with it.
            return epoch_samples(task.train), budget
        except InputError:
            return budget, budget
    assert training.epochs is not None
    samples = epoch_samples(task.train)
    return samples, samples * training.epochs


def device_of(training: Training, runtime: Runtime) -> torch.device:
    """Return the device of this rank's model. Raises InputError: there is no such device."""
    available = torch.cuda.is_available()
    if training.device == "cuda" and not available:
        raise InputError("device: cuda was asked for, but torch sees no GPU here; use cpu or auto")
    if training.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", runtime.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # random states and libraries refer to the current one
    return device


def make_worker(
    runtime: Runtime,
    run: Run,
    task: Task,
    module: nn.Module,
    held: ModelPart | Share | None,
    budget: int,
) -> Worker:
    """Return the worker of this rank, which trains what it has `held` of `module`; None: all."""
    # From the whole model: names in parameter groups, and snapshots that are due, are those of the
    # whole, also where this rank has a part of it.
    spec = _optimizer(run, module)
    options = _worker_options(runtime, run.training, task, budget, Layout.of_module(module))
    if isinstance(held, ModelPart):
        options["snapshots"].places = _places_of(held, module)
        kept = {id(parameter) for parameter in held.module.parameters()}
        for parameter in module.parameters():  # the memory of all others is free
            if id(parameter) not in kept:
                parameter.data = parameter.new_empty(0)
        module = held.module
    elif held is not None:
        return ShardedWorker(runtime, module, spec, share=held, **options)
    return Worker(runtime, module, spec, **options)


def _optimizer(run: Run, module: nn.Module) -> OptimizerSpec:
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not names:
        raise InputError(f"task: {run.task}: its model has no parameters that are to be trained")
    spec = OptimizerSpec.from_settings(run.training.optimizer, names)
    capturable = any({**spec.arguments, **group}.get("capturable") for _, group in spec.groups)
    if capturable and next(module.parameters()).device.type == "cpu":
        raise InputError(
            "optimizer.capturable: is for GPUs, and the model is on the CPU; leave it out"
        )
    return spec


def _worker_options(
    runtime: Runtime, training: Training, task: Task, budget: int, layout: Layout
) -> dict[str, Any]:
    snapshots = Snapshots(training.snapshots_due(budget, layout.bytes), runtime.transport.now)
    return {
        "loss": task.loss,
        "precision": training.precision,
        "clip_norm": training.clip_norm,
        "accumulation": training.accumulation,
        "budget_ranks": training.ranks,
        "bucket_bytes": int(training.bucket_megabytes * 1e6),
        "overlap": training.overlap,
        "snapshots": snapshots,
    }


class ShapesRun:
    """A run of shapes as all of its ranks share it: they agree from the start.

    Nothing is read, evaluated, written or put into checkpoints; of snapshots it is known when they
    are taken, which the `parts` of all ranks tell. Raises InputError: the model cannot be made
    without values.
    """

    def __init__(self, run: Run) -> None:
        training = replace(  # which samples a rank has changes nothing
            run.training, sharding=None, trace_steps=0, record_order=False, tensorboard=False
        )
        self.run = replace(run, training=training)
        self.task = load_task(run.task)
        module = meta_model(self.task)
        ranks = len(roles_of(run.strategy, training.ranks).shares)
        self.shapes = SharedShapes(module, _optimizer(run, module), ranks)
        self.parts: list[Contribution] = []

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes of the model."""
        return sizes_of(self.shapes.module, self.shapes.spec)

    def worker(self, runtime: Runtime, budget: int) -> Worker:
        """Return the worker of one rank."""
        options = _worker_options(runtime, self.run.training, self.task, budget, self.shapes.layout)
        return ShapeWorker(runtime, self.shapes, **options)


class Unread:
    """Samples that nobody looks at: their places."""

    def read(self, start: int, stop: int) -> range:
        return range(start, stop)


def meta_model(task: Task) -> nn.Module:
    """Return the model of `task`, without values."""
    try:
        with torch.device("meta"):
            module = task.model()
        return module.to("meta")
    except (NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"tensors: shapes: the model cannot be made without values ({error}); set tensors to "
            "real"
        ) from error


def warm_up(worker: Worker, read: Read, updated: float) -> None:
    """Compute once, before the stopwatch starts, so that no step has the costs of a first one.

    A forward and a backward pass on a copy of the model, with a micro-batch of what `read` gives,
    and an update of the part of the parameters that this rank updates: `updated`, from 0 to 1.
    Random streams stay as they are.
    """
    with undisturbed():
        batch, _ = worker.micro_batches(to_device(read(), worker.layout.device))[0]
        module = copy.deepcopy(worker.module)
        loss = worker.loss_of(module, batch)
        if loss.requires_grad:
            loss.backward()
        left, own = updated * worker.layout.size, {}
        for name, parameter in module.named_parameters():
            if left > 0:
                own[name] = parameter
                left -= parameter.numel()
        if own:
            worker.optimizer.build(own).step()


def measured_speeds(runtime: Runtime, worker: Worker, read: Read) -> tuple[float, ...]:
    """Collective over all ranks: return the gradients a second of each one, measured all at once.

    They are of the batch that `read` gives, on a copy of the model; random streams stay as they
    are. All ranks return the same figures.
    """
    everyone = Group(tuple(range(runtime.ranks)))
    # All begin at the same time, so that ranks of one host share its cores as in training.
    speeds = torch.zeros(runtime.ranks, dtype=torch.float64)
    all_reduce(runtime.transport, speeds, "butterfly", everyone, Tag.AGREE)  # all are there
    speeds[runtime.rank] = 1 / median(_seconds(runtime, worker, read))
    all_reduce(runtime.transport, speeds, "butterfly", everyone, Tag.AGREE)
    return tuple(speeds.tolist())


def _seconds(runtime: Runtime, worker: Worker, read: Read) -> list[float]:
    now, device, seconds = runtime.transport.now, worker.layout.device, []
    with undisturbed():
        module, batch = copy.deepcopy(worker.module), to_device(read(), device)
        work = Work("gradient", batch_samples(batch))

        def gradient() -> None:
            for part, _ in worker.micro_batches(batch):
                worker.loss_of(module, part).backward()
            if device.type == "cuda":
                # Kernels run asynchronously: the host would be measured alone.
                torch.cuda.synchronize(device)

        for _ in range(GRADIENTS):
            began = now()
            runtime.compute.run(work, gradient)
            seconds.append(now() - began)
    return seconds


# Where each rank has a part of the model


def _places_of(part: ModelPart, whole: nn.Module) -> Places:
    """Return where in the vectors of `whole` the tensors lie that `part` answers for."""
    return {
        kind: _places(extents(part.module), extents(whole), part.owned)
        for kind, extents in (("parameters", _slots), ("buffers", _buffers))
    }


def stage_ranges(part: ModelPart, whole: nn.Module) -> Sequence[ModelRange]:
    """Return where the parameters of `part` lie in those of the `whole` model."""
    slots = _slots(part.module)
    return _places(slots, _slots(whole), frozenset(slots))


def _slots(module: nn.Module) -> Extents:
    """Return the first element and end of each trainable parameter, with the gap behind it."""
    layout = Layout.of_module(module)
    edges = [*(slot.offset for slot in layout.slots), layout.size]
    return dict(zip((slot.name for slot in layout.slots), pairwise(edges), strict=True))


def _buffers(module: nn.Module) -> Extents:
    named = [(name, getattr(owner, leaf).numel()) for name, owner, leaf in buffer_places(module)]
    edges = [0, *accumulate(size for _, size in named)]
    return dict(zip((name for name, _ in named), pairwise(edges), strict=True))


def _places(part: Extents, whole: Extents, owned: frozenset[str]) -> Sequence[ModelRange]:
    """Return one place for each run of tensors that lie side by side in both."""
    places: list[ModelRange] = []
    for name, (first, end) in part.items():
        if name not in owned or name not in whole:
            continue
        offset = whole[name][0]
        last = places[-1] if places else None
        if last is not None and (last.end, last.offset + last.end - last.first) == (first, offset):
            places[-1] = ModelRange(last.first, end, last.offset)
        else:
            places.append(ModelRange(first, end, offset))
    return places


# Memory by formula, and models that are built without memory for them

Sizes = Counter[str]
"""The bytes of `parameters` (with buffers), of those `trained`, of the optimizer's `state`."""


def sizes_of(module: nn.Module, spec: OptimizerSpec) -> Sizes:
    """Return the sizes of a model, or of the part that a rank trains; tensors need no values."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    sizes = Counter(
        parameters=_bytes([*module.parameters(), *module.buffers()]),
        trained=_bytes(trained.values()),
    )
    try:
        sizes["state"] = _state_bytes(spec, trained, "meta")
    except RuntimeError:
        # An optimizer that reads numbers, as Adafactor does, cannot run on the meta device; one
        # tensor at a time, as there may be no room for all.
        sizes["state"] = sum(_state_bytes(spec, {n: p}, "cpu") for n, p in trained.items())
    return sizes


def kept_bytes(run: Run, rank: int, sizes: Sizes, layout: Layout) -> Counter[str]:
    """Return the bytes that `rank` keeps, by purpose; without activations and kernels' workspaces.

    Where buckets have memory only while they are in use, two have it at a time: one that is used,
    and one under way. Micro-batches but the last add to whole gradients. `layout`: of what the rank
    trains.
    """
    training = run.training
    footprint = run.strategy.traits(training.work).memory(rank, training.ranks)
    others = sizes["parameters"] - sizes["trained"]
    parameters = footprint.parameters * sizes["trained"]
    parameters += others if footprint.buckets_in_flight else footprint.parameters * others
    gradients = footprint.gradients * sizes["trained"]
    if footprint.buckets_in_flight and training.accumulation > 1:
        gradients += sizes["trained"]
    kept = {
        "parameters": parameters,
        "gradients": gradients,
        f"state of {training.optimizer.name}": footprint.optimizer * sizes["state"],
        "further copies": footprint.copies * sizes["trained"],
        "buckets in use": footprint.buckets_in_flight
        * _two_largest(layout, training.bucket_megabytes),
    }
    return Counter({name: round(size) for name, size in kept.items()})


def _two_largest(layout: Layout, megabytes: float) -> int:
    """Return the bytes of the two largest buckets, or of the only one."""
    edges = [offset for _, offset in bucket_edges(layout, int(megabytes * 1e6))]
    sizes = [end - first for first, end in pairwise(edges)]
    return sum(sorted(sizes)[-2:]) * layout.dtype.itemsize


def _state_bytes(spec: OptimizerSpec, trained: dict[str, nn.Parameter], device: str) -> int:
    """Return the bytes of the optimizer's state after a step."""
    parameters = {
        name: nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device))
        for name, p in trained.items()
    }
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = spec.build(parameters)
    optimizer.step()
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes(value for value in values if isinstance(value, Tensor))


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# A model without memory for it


_ONE_AT_A_TIME = threading.Lock()  # torch calls hooks of all threads


@contextmanager
def in_files(folder: Path) -> Iterator[None]:
    """Put the parameters of modules that are made inside into nameless files of `folder`.

    Their initial values are drawn there, to the same bits. The kernel keeps as much of them in
    memory as there is room for. Parameters on other devices than the CPU stay there.
    """
    mapped: list[mmap.mmap] = []
    places: set[int] = set()

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if (
            # Parameters that are tied, or registered again, lie in a file already.
            parameter is None
            or isinstance(parameter, nn.UninitializedParameter)
            or parameter.device.type != "cpu"
            or not parameter.numel()
            or parameter.data_ptr() in places
        ):
            return
        with writing(folder), tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(parameter.nbytes)
            # The mapping has a descriptor of its own; the file, without a name, goes with it.
            memory = mmap.mmap(file.fileno(), parameter.nbytes)
        # Of a shared mapping this drops the pages from the process; the file keeps what was drawn.
        if mapped and hasattr(mmap, "MADV_DONTNEED"):
            mapped[-1].madvise(mmap.MADV_DONTNEED)
        values = torch.frombuffer(memory, dtype=parameter.dtype).view(parameter.shape)
        with torch.no_grad():
            values.copy_(parameter)
        parameter.data = values
        mapped.append(memory)
        places.add(parameter.data_ptr())

    with _ONE_AT_A_TIME:
        hook = register_module_parameter_registration_hook(register)
        try:
            yield
        finally:
            hook.remove()
