"""Tensors and workers without values, for runs that only find out the time.

A `Shape` is a tensor on torch's `meta` device whose most frequent operations are left out: what
an operation gives has a dtype and a shape, and no value that could differ, so that one object
serves for all tensors of a kind, on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from orchestra.errors import InputError
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.worker.batches import Batch
from orchestra.worker.carried import CarriedBuffers
from orchestra.worker.gathering import Gathering
from orchestra.worker.gradients import LOSSES, Gradients
from orchestra.worker.layout import Layout, ShardUnit, buffer_places
from orchestra.worker.runtime import Runtime, Work
from orchestra.worker.worker import Step, Worker


class NoValues(InputError):
    """Somebody asked for what a tensor holds."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(
            "tensors: shapes: something in the strategy reads the value of a tensor, which a run "
            "of shapes does not have: set tensors to real"
        )


def _same(self: Shape, *_: object, **__: object) -> Shape:
    """Return the shape itself: operations that change values leave it as it is."""
    return self


def _unknown(self: Shape, *_: object, **__: object) -> NoReturn:
    raise NoValues


class Shape(Tensor):
    """Dtype and shape of a contiguous tensor; `flat(n)` makes one of n elements."""

    @staticmethod
    def flat(elements: int, dtype: torch.dtype = torch.float32) -> Shape:
        return _shape(torch.empty(elements, dtype=dtype, device="meta"))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # One object stands for all tensors of a dtype and shape.
        if func in _LIKE and isinstance(args[0], Shape) and not kwargs:
            return args[0]
        if func is torch.cat and all(tensor.dim() == 1 for tensor in args[0]):
            return Shape.flat(sum(map(len, args[0])), args[0][0].dtype)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    # What is asked for often, and does not change

    @cached_property
    def _parts(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(super().size())

    @cached_property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            kind: torch.dtype = torch._C.TensorBase.dtype.__get__(self)  # type: ignore[attr-defined]
        return kind

    @cached_property
    def itemsize(self) -> int:  # type: ignore[override]
        return self.dtype.itemsize

    @cached_property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._size * self.dtype.itemsize

    @cached_property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    is_meta = True
    is_cuda = False

    def numel(self) -> int:
        return self._size

    def element_size(self) -> int:
        return self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice | int):
            return super().__getitem__(place)
        # Slices are kept: a strategy asks for the same ones in each step, on all ranks.
        key = (place.start, place.stop, place.step) if isinstance(place, slice) else place
        if key not in self._parts:
            self._parts[key] = super().__getitem__(place)
        return self._parts[key]

    def __setitem__(self, *_: Any) -> None:
        """Do nothing: there are no values to set."""

    def reshape(self, *shape: Any) -> Any:
        return self if shape == (-1,) and self.dim() == 1 else super().reshape(*shape)

    def view(self, *shape: Any) -> Any:
        return self if shape == (-1,) and self.dim() == 1 else super().view(*shape)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself for any device; other conversions as usual."""
        if args and isinstance(args[0], torch.device) and len(args) == 1 and not kwargs:
            return self
        return super().to(*args, **kwargs)

    @cached_property
    def _doubled(self) -> Shape:
        return self if self.dtype == torch.float64 else _shape(super().double())

    def double(self, *_: Any, **__: Any) -> Tensor:
        return self._doubled

    # In place, and with a number or a tensor of as many elements

    def _with(self, other: Any) -> Any:
        """Return the shape of an operation on this and `other`: the one of more dimensions."""
        if isinstance(other, Tensor) and other.dim() > self.dim():
            return other
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _with
    add_ = sub_ = mul_ = div_ = copy_ = zero_ = fill_ = lerp_ = addcmul_ = addcdiv_ = sqrt_ = _same
    clone = detach = contiguous = requires_grad_ = cpu = square = sqrt = flip = _same

    # There is none

    item = tolist = numpy = __float__ = __int__ = __bool__ = __index__ = _unknown

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Shape({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, _: Any) -> Self:
        return self


_LIKE = frozenset({torch.empty_like, torch.zeros_like, torch.ones_like})


def _shape(tensor: Tensor) -> Shape:
    return tensor.as_subclass(Shape)


class SharedShapes:
    """What the workers of all ranks have in common: `module`, on the meta device, and its vectors.

    `optimizer` is never stepped but once, so that it has moments that can be handed over.
    """

    def __init__(self, module: nn.Module, spec: OptimizerSpec, ranks: int) -> None:
        self.module = module
        self.layout = Layout.of_module(module)
        self.parameters = Shape.flat(self.layout.size, self.layout.dtype)
        by_name = dict(module.named_parameters())
        self.named = {slot.name: by_name[slot.name] for slot in self.layout.slots}
        elements = Counter[torch.dtype]()  # of all buffers of a dtype, which are sent together
        for _, owner, attribute in buffer_places(module):
            buffer = getattr(owner, attribute)
            elements[buffer.dtype] += buffer.numel()
        self.buffers: list[tuple[str, Tensor]] = [
            (str(dtype), Shape.flat(count, dtype)) for dtype, count in elements.items()
        ]
        dtype, tail = self.layout.dtype, LOSSES + ranks + len(self.layout.slots)
        self.carried = CarriedBuffers(lambda: self.buffers, dtype)
        self.storage = Shape.flat(self.layout.size + self.carried.size + tail, dtype)
        self.stop_at: int | None = None
        self.newest_step = 0
        self.spec = spec

    @cached_property
    def views(self) -> list[Tensor]:
        return self.layout.views(self.storage)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.spec.build(self.named)

    @cached_property
    def moments(self) -> torch.optim.Optimizer:
        """The optimizer after one step, so that it has moments to hand over."""
        for parameter in self.named.values():
            parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        return self.optimizer

    def stops(self, step: int, wish: bool) -> bool:
        """Return whether all ranks stop after `step`: the first that none had begun at the wish."""
        self.newest_step = max(self.newest_step, step)
        if self.stop_at is None and wish:
            self.stop_at = self.newest_step + 1
        return self.stop_at is not None and step >= self.stop_at


class ShapeGradients(Gradients):
    """Gradients that are there as soon as backward has come past them."""

    def __init__(self, shared: SharedShapes) -> None:
        self.layout = shared.layout
        self.parameters = list(shared.named.values())
        self.storage = shared.storage
        self.vector = self.storage[: self.layout.size]
        self.beside = self.storage[self.layout.size :]
        self.used = [True] * len(self.layout.slots)
        self._shared = shared
        self._stop = False

    @property
    def views(self) -> list[Tensor]:  # type: ignore[override]
        return self._shared.views

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: there are no values to move."""

    clear = forget = await_collection = collect = collect_each = _nothing
    collect_rest = forget_unused = leave_in_place = carry_buffers = take_buffers = _nothing

    def current(self) -> Tensor:
        return self.vector

    def pass_backward(self) -> None:
        """Report all slots as ready, in their order."""
        if self.on_ready is not None:
            self.on_ready(0, len(self.used))

    def fill_tail(self, rank: int, weight: float, loss: float, stop: bool) -> None:
        self._stop = stop

    def publish(self) -> tuple[float, tuple[float, ...], bool]:
        """Return no losses, and the wish to stop, which all have after the same step."""
        return 0.0, (), self._stop


class ShapeWorker(Worker):
    """A worker that charges for all that another one does, and does none of it."""

    parameters_equal = True

    def __init__(self, runtime: Runtime, shared: SharedShapes, **options: Any) -> None:
        self._shared, self._steps = shared, 0
        super().__init__(runtime, shared.module, shared.spec, **options)

    def _lay_out(self, module: nn.Module) -> None:
        self.module = module
        self.layout = self._shared.layout
        self.parameters = self._shared.parameters
        self.gradients = ShapeGradients(self._shared)

    def lay_out_gradients(self, units: Sequence[ShardUnit] | None) -> None:
        """Do nothing: shapes have no memory to save."""

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        return self._shared.buffers

    def move_parameters(self, vector: Tensor) -> Tensor:
        return vector

    def begin_step(self, step: Step) -> None:
        super().begin_step(step)
        self._steps += 1
        step.stop = self._shared.stops(self._steps, wish=step.stop)

    def backward(self, batch: Batch | None) -> None:
        if batch is not None:
            self.compute.run(Work("gradient", self.step.samples), self._pass)

    def _pass(self) -> None:
        assert isinstance(self.gradients, ShapeGradients)
        if isinstance(self.arriving, Gathering):
            self.arriving.follow(self.accumulation - 1)
            self.arriving.begin_pass(last=True)
        if self.arriving is not None:
            self.arriving.await_for(0)
        self.gradients.pass_backward()

    def local_optimizer(self) -> torch.optim.Optimizer:
        return self._shared.optimizer

    def update_locally(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._shared.moments is optimizer
        self.compute.run(Work("update", self.layout.size), lambda: None)
