"""The gradients of a model in one flat vector, which travels: whole, or unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from orchestra.errors import InputError
from orchestra.worker.carried import CarriedBuffers
from orchestra.worker.layout import Layout, ShardUnit, UnitMemory, shard_size

STOP, LOSS, LOSSES = 0, 1, 2  # places in the tail; the flag of each tensor stands at its end
DIGEST_BITS = 16
CACHED_BYTES = 1 << 21
"""Of a vector that a core still has in its caches after one pass over it."""


class Gradients:
    """The gradient of every trainable parameter as a view of one flat vector.

    `storage` is [layout.size + carried.size + 2 + ranks + tensors]: the gradient, then what is
    summed with it, `beside`: the buffers of the first worker, and the tail. That tells how many
    ranks want to stop, the weighted loss, the loss of each rank in a place of its own, and for each
    tensor how many ranks used it. A tensor that no rank used keeps
    `grad = None`, as on a single machine, so that weight decay and momentum leave it alone.
    With `compares`, each rank also sets the bits of its `digest` in the tail, and those that it has
    not at other places; `alike` then says whether all ranks have the same.
    `square` is |g|^2 of this rank's own gradient of the step, where `measures_square` is set.

    `on_backward()` is called in every backward, before any slot counts as ready; `on_ready(first,
    end)` in a step's last one, when slots from `first` to before `end` have their gradients.
    """

    measures_square = False
    square = 0.0
    last_backward = True  # of a step; those before it only accumulate
    on_ready: Callable[[int, int], None] | None = None
    on_backward: Callable[[], None] | None = None

    digest = 0  # below 2 ** DIGEST_BITS
    alike = True

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        ranks: int,
        carried: CarriedBuffers,
        *,
        compares: bool = False,
    ) -> None:
        by_name = dict(module.named_parameters())
        self.layout, self.carried = layout, carried
        self.parameters = [by_name[slot.name] for slot in layout.slots]
        digest = 2 * DIGEST_BITS * compares
        self._digest = slice(LOSSES + ranks, LOSSES + ranks + digest)  # its place in the tail
        self._allocate(tail=LOSSES + ranks + digest + len(layout.slots))
        self.used = [False] * len(layout.slots)
        self._collected = [False] * len(layout.slots)
        self._in_place = False
        self._own_tail = np.zeros(len(self.tail))
        # Hooks of the nodes that accumulate come after all hooks of the parameters, as in
        # DistributedDataParallel: what a user's hook makes of a gradient is what is exchanged.
        # Autograd forgets a node that nobody keeps.
        self._nodes = [get_gradient_edge(parameter).node for parameter in self.parameters]
        self._hooks = [node.register_hook(self._hook(i)) for i, node in enumerate(self._nodes)]

    def _allocate(self, tail: int) -> None:
        self.storage = self.layout.allocate(extra=self.carried.size + tail)
        self.vector, self.beside = self.storage.tensor_split([self.layout.size])
        self.tail = self.beside[self.carried.size :]
        self.views = self.layout.views(self.storage)

    def _hook(self, index: int) -> Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]:
        def mark(_: Sequence[Tensor], gradient: Sequence[Tensor | None]) -> None:
            if gradient[0] is None:  # of this pass: a function of the user's own gave none
                return
            if self.on_backward is not None:
                self.on_backward()
            self.used[index] = True
            if self.on_ready is not None and self.last_backward:
                self.on_ready(index, index + 1)

        return mark

    def bucket(self, unit: ShardUnit) -> Tensor:
        """Return the memory in which the gradients of `unit` are summed, flat."""
        return self.storage[unit.first : unit.end]

    def own(self, unit: ShardUnit) -> Tensor:
        """Return the elements of `unit` whose sum this worker owns, flat."""
        return self.vector[unit.owned_start : unit.owned_start + unit.owned_length]

    def keep_own(self, unit: ShardUnit) -> None:
        """After the sum of `unit`: what is not `own` may be freed."""

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Begin a step: drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """Begin a step of a loop that clears gradients by itself."""
        self.used = [False] * len(self.used)
        self.await_collection()

    def await_collection(self) -> None:
        """Expect further gradients before the next exchange, whatever was collected."""
        self._collected = [False] * len(self.used)
        self._in_place = False
        self.square = 0.0

    def collect(self, index: int, scale: float) -> None:
        """Bring slot `index`, times `scale`, from where autograd put it into the flat vector."""
        if self._collected[index]:
            raise InputError(
                f"parameter {self.layout.slots[index].name!r} received its gradient twice in one "
                "backward pass (reentrant checkpointing does that): set overlap to false"
            )
        self._collected[index] = True
        parameter, view = self.parameters[index], self.views[index]
        # Each slot is written once: the copy and the scaling are one pass.
        if parameter.grad is None:  # or no longer: the user has cleared it since
            view.zero_()
            self.used[index] = False
        elif parameter.grad.data_ptr() == view.data_ptr():
            view.mul_(scale)
        elif scale == 1.0:
            view.copy_(parameter.grad)
        else:
            torch.mul(parameter.grad, scale, out=view)
        parameter.grad = view
        if self.measures_square and scale:
            self.square += float(view.double().square().sum()) / scale**2

    @torch.no_grad()  # else `backward(create_graph=True)` would record it
    def collect_each(self, first: int, end: int, scale: float) -> None:
        """`collect` for the slots from `first` to before `end`."""
        for index in range(first, end):
            self.collect(index, scale)

    @torch.no_grad()
    def collect_rest(self, scale: float = 1.0) -> None:
        """`collect` for every slot that was not yet collected in this step."""
        # A pass over a vector that no cache holds takes longer than an operation for each slot.
        scales_apart = scale != 1.0 and self.vector.nbytes > CACHED_BYTES
        if any(self._collected) or scales_apart or not self._collect_all(scale):
            for index, collected in enumerate(self._collected):
                if not collected:
                    self.collect(index, scale)

    def leave_in_place(self) -> None:
        """Leave gradients where autograd put them, for an optimizer on this rank alone.

        The copy into the flat vector would take as long as the optimizer's step.
        `current` makes it.
        """
        self._in_place = True
        if self.measures_square:
            self.collect_rest()
        for parameter, used in zip(self.parameters, self.used, strict=True):
            if not used:
                parameter.grad = None

    def current(self) -> Tensor:
        """Return the flat vector, with gradients that were left in place."""
        if self._in_place:
            self.collect_rest()
        return self.vector

    def _collect_all(self, scale: float) -> bool:
        """`collect` for all slots at once; False: some have no gradient, or the square is wanted.

        The caches know little of this after a backward pass, so that few operations take less time.
        """
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(own) < len(self.views) or self.measures_square:
            return False
        with torch.no_grad():
            torch._foreach_copy_(self.views, own)  # some of which may be the views themselves
            if scale != 1.0:
                self.vector.mul_(scale)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self._collected = [True] * len(self.used)
        return True

    @torch.no_grad()
    def take_users(self) -> None:
        """Bring what a user has put in place of complete gradients into the flat vector.

        Changes in place need no copy.
        """
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if (grad := parameter.grad) is None and self.used[index]:
                self.used[index] = False
                view.zero_()
            elif grad is not None and grad is not view:
                self.used[index] = True
                parameter.grad = view.copy_(grad)

    def fill_tail(self, rank: int, weight: float, loss: float, stop: bool) -> None:
        """Write what travels with the gradient of `rank`."""
        values = self._own_tail
        values.fill(0.0)
        values[STOP] = stop
        if weight:
            values[LOSS] = weight * loss
            values[LOSSES + rank] = loss
            # A rank without samples has used nothing, and has no loss.
            values[-len(self.used) :] = self.used
        if self._digest.start < self._digest.stop:
            bits = np.unpackbits(np.array([self.digest], dtype=">u2").view(np.uint8))
            values[self._digest] = (*bits, *(1 - bits))
        # Assembled in NumPy, since single elements of a tensor are slow to write.
        self.tail.copy_(torch.from_numpy(values))

    def carry_buffers(self, *, gives: bool) -> None:
        """Let the module's buffers travel with the gradient, if this rank is to give them."""
        self.carried.put(self.beside[: self.carried.size], gives=gives)

    def take_buffers(self) -> None:
        """After an exchange: take the buffers of the rank that gave them."""
        self.carried.take(self.beside[: self.carried.size])

    def publish(self) -> tuple[float, tuple[float, ...], bool]:
        """After an exchange: what any rank used is used, and the rest has no gradient.

        Returns the mean loss, the loss of each rank, and whether one wants to stop.
        """
        tail = self.tail.tolist()
        counts = tail[self._digest]
        # Sums of ones tell 0 from more than 0 in any precision
        self.alike = not any(map(min, counts[:DIGEST_BITS], counts[DIGEST_BITS:]))
        self.used = [count > 0 for count in tail[-len(self.used) :]]
        if not all(self.used) or not all(self._collected):  # else all of it is in place
            self.forget_unused()
        return tail[LOSS], tuple(tail[LOSSES : self._digest.start]), tail[STOP] > 0

    def forget_unused(self) -> None:
        """Set `grad` to None where no worker has used a parameter."""
        for parameter, view, used in zip(self.parameters, self.views, self.used, strict=True):
            parameter.grad = view if used else None


class ShardedGradients(Gradients):
    """Gradients that are whole only until the workers have summed them, unit by unit.

    `vector` has the sums of the elements that this worker owns: shape [shard_size(units)].
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        ranks: int,
        carried: CarriedBuffers,
        units: Sequence[ShardUnit],
    ) -> None:
        self._units = units
        self._unit_of = [unit for unit in units for _ in range(unit.first_slot, unit.end_slot)]
        super().__init__(module, layout, ranks, carried)

    def _allocate(self, tail: int) -> None:
        layout = self.layout
        self._memory = UnitMemory(layout, self._units)
        self.views = self._memory.views
        self.vector = torch.zeros(shard_size(self._units), dtype=layout.dtype, device=layout.device)
        size = self.carried.size + tail
        self.beside = torch.zeros(size, dtype=layout.dtype, device=layout.device)
        self.tail = self.beside[self.carried.size :]

    def bucket(self, unit: ShardUnit) -> Tensor:
        return self._memory.hold(unit)

    def own(self, unit: ShardUnit) -> Tensor:
        return self.vector[unit.shard]

    def keep_own(self, unit: ShardUnit) -> None:
        self.own(unit).copy_(self._memory.parts[unit.number][unit.owned])
        for parameter in self.parameters[unit.first_slot : unit.end_slot]:
            parameter.grad = None
        self._memory.free(unit)

    def collect(self, index: int, scale: float) -> None:
        self._memory.hold(self._unit_of[index])
        super().collect(index, scale)

    def _collect_all(self, scale: float) -> bool:
        return False  # one after the other, as memory comes

    def forget_unused(self) -> None:
        """Do nothing: gradients are in `vector` alone."""
