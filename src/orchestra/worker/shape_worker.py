"""The worker of a run of shapes: no value is computed, and all ranks share what has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from orchestra.optimizers.spec import OptimizerSpec
from orchestra.worker.batches import Batch
from orchestra.worker.gradients import LOSSES, Gradients
from orchestra.worker.layout import Layout, buffer_places
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.shapes import Shape
from orchestra.worker.worker import Step, Worker


class SharedShapes:
    """What the workers of all ranks have in common: `module`, on the meta device, and its vectors.

    `optimizer` is never stepped but once, so that it has moments that can be handed over.
    """

    def __init__(self, module: nn.Module, spec: OptimizerSpec, ranks: int) -> None:
        self.module = module
        self.layout = Layout.of_module(module)
        self.parameters = Shape.flat(self.layout.size, self.layout.dtype)
        tail = LOSSES + ranks + len(self.layout.slots)
        self.storage = Shape.flat(self.layout.size + tail, self.layout.dtype)
        by_name = dict(module.named_parameters())
        self.named = {slot.name: by_name[slot.name] for slot in self.layout.slots}
        self.buffers = _one_of_each_dtype(module)
        self.stop_at: int | None = None
        self.newest_step = 0
        self._spec = spec

    @cached_property
    def views(self) -> list[Tensor]:
        """The gradient of each parameter."""
        return self.layout.views(self.storage)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """An optimizer of all parameters."""
        return self._spec.build(self.named)

    @cached_property
    def moments(self) -> torch.optim.Optimizer:
        """`optimizer`, after a step."""
        for parameter in self.named.values():
            parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        return self.optimizer

    def stops(self, step: int, wish: bool) -> bool:
        """Whether all ranks stop after their `step`: one that none has begun when one wishes to."""
        self.newest_step = max(self.newest_step, step)
        if self.stop_at is None and wish:
            self.stop_at = self.newest_step + 1
        return self.stop_at is not None and step >= self.stop_at


def _one_of_each_dtype(module: nn.Module) -> list[tuple[str, Tensor]]:
    """As many elements as the buffers of `module` have: they are only sent together."""
    elements: dict[torch.dtype, int] = {}
    for _, owner, attribute in buffer_places(module):
        buffer = getattr(owner, attribute)
        elements[buffer.dtype] = elements.get(buffer.dtype, 0) + buffer.numel()
    return [(str(dtype), Shape.flat(count, dtype)) for dtype, count in elements.items()]


class ShapeGradients(Gradients):
    """Gradients that are there as soon as backward has come past them."""

    def __init__(self, shared: SharedShapes) -> None:
        self.layout = shared.layout
        self.parameters = list(shared.named.values())
        self.storage = shared.storage
        self.vector = self.storage[: self.layout.size]
        self.tail = self.storage[self.layout.size :]
        self.used = [True] * len(self.layout.slots)
        self.measures_square = False
        self.square = 0.0
        self.last_backward = True
        self._shared = shared
        self._on_ready: Callable[[int, int], None] | None = None
        self._stop = False

    @property
    def views(self) -> list[Tensor]:  # type: ignore[override]
        return self._shared.views

    def clear(self) -> None: ...

    def forget(self) -> None: ...

    def await_collection(self) -> None: ...

    def collect(self, index: int, scale: float) -> None: ...

    def collect_rest(self, scale: float = 1.0) -> None: ...

    def forget_unused(self) -> None: ...

    def pass_backward(self) -> None:
        """All slots are ready, in their order."""
        if self._on_ready is not None:
            self._on_ready(0, len(self.used))

    def fill_tail(self, rank: int, weight: float, loss: float, stop: bool) -> None:
        self._stop = stop

    def publish(self) -> tuple[float, tuple[float, ...], bool]:
        """All wish to stop after the same step, so that nobody has to be told."""
        return 0.0, (), self._stop


class ShapeWorker(Worker):
    """A worker that charges for all that another one does, and does none of it."""

    def __init__(
        self, runtime: Runtime, shared: SharedShapes, optimizer: OptimizerSpec, **options: Any
    ) -> None:
        self._shared = shared
        self._steps = 0
        super().__init__(runtime, shared.module, optimizer, **options)
        self.agrees = True

    def _lay_out(self, module: nn.Module) -> None:
        self.module = module
        self.layout = self._shared.layout
        self.parameters = self._shared.parameters
        self.gradients = ShapeGradients(self._shared)

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        return self._shared.buffers

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._steps += 1
        step.stop = self._shared.stops(self._steps, wish=step.stop)

    def backward(self, batch: Batch | None) -> None:
        if batch is not None:
            assert isinstance(self.gradients, ShapeGradients)
            work = Work("gradient", self.step.samples)
            self.compute.run(work, self.gradients.pass_backward)

    def named_parameters(self) -> dict[str, Tensor]:
        return dict(self._shared.named)

    def local_optimizer(self) -> torch.optim.Optimizer:
        return self._shared.optimizer

    def update_locally(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._shared.moments is optimizer
        self.compute.run(Work("update", self.layout.size), lambda: None)
