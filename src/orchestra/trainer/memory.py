"""A rank's memory by formula, and models that are built without memory for them."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from orchestra.optimizers.spec import OptimizerSpec
from orchestra.trainer.checkpoints import writing
from orchestra.trainer.settings import Run
from orchestra.worker.layout import Layout, bucket_edges

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
    and one under way. Micro-batches but the last add to whole gradients.

    Args:
        layout: of what the rank trains.
    """
    training = run.training
    footprint = run.strategy.footprint(rank, training.ranks)
    others = sizes["parameters"] - sizes["trained"]
    parameters = footprint.parameters * sizes["trained"]
    parameters += others if footprint.windows else footprint.parameters * others
    gradients = footprint.gradients * sizes["trained"]
    if footprint.windows and training.accumulation > 1:
        gradients += sizes["trained"]
    kept = {
        "parameters": parameters,
        "gradients": gradients,
        f"state of {training.optimizer.name}": footprint.optimizer * sizes["state"],
        "further copies": footprint.copies * sizes["trained"],
        "buckets in use": footprint.windows * _two_largest(layout, training.bucket_megabytes),
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
