"""A slice of the parameters as a server holds it: pushes become updates, updates become answers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from orchestra.coordinator.events import Instruction
from orchestra.errors import PeerLost, RunFailed
from orchestra.parameter_server.how import Application, Correction, SliceRange, WorkerMemory
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    QuietPoint,
    Request,
    encode_reply,
)
from orchestra.parameter_server.placement import Part
from orchestra.parameter_server.state import Decision, ServerState, Update
from orchestra.transports.protocol import Handle, ReceiveHandle, Transport
from orchestra.transports.tags import Tag

Charge = Callable[[str, int, Callable[[], Any]], Any]


def finish_sending(under_way: dict[int, list[Handle]]) -> None:
    """Wait for the sends to each worker, then forget them; a lost worker's are left out."""
    for handles in under_way.values():
        with contextlib.suppress(PeerLost):
            for handle in handles:
                handle.wait()
    under_way.clear()


@dataclass(eq=False)
class Neighbour:
    """The worker on the rank of a server, which shares memory with it.

    The server copies values to where that worker wants them: `into`, `into_parts` by the part's
    number. `answer` is that to its push, and `parts` are those whose values it was given, until
    somebody takes them.
    """

    rank: int
    into: Tensor | None = None
    into_parts: dict[int, Tensor] = field(default_factory=dict)
    answer: Answer | None = None
    parts: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Landing:
    """Memory for the next push of a worker, and the receives of its parts."""

    gradient: Tensor
    receives: list[ReceiveHandle]


@dataclass(eq=False)
class HeldSlice:
    """A slice of the parameters on a server: `state` decides when, `application` says how.

    `charge(kind, amount, function)` runs and charges computation; `corrections` change each push
    before it is applied; `clip` clips an averaged gradient together with the other servers;
    `on_update` is called with the samples consumed and the new values; `decode` makes the gradient
    of a push from the payload that has arrived. Pushes come in `parts`, or whole if `parts` is
    empty. With `apply_per_part` they are weighted, and a part is added up, applied and answered as
    soon as all workers have pushed it. Nothing is sent to the `neighbour`, if it is set.
    """

    state: ServerState
    application: Application
    charge: Charge
    _: KW_ONLY
    corrections: Sequence[Correction] = ()
    clip: Callable[[Transport, Tensor], None] | None = None
    on_update: Callable[[int, Tensor], None] | None = None
    decode: Callable[[Push, Tensor], Tensor] | None = None
    parts: Sequence[Part] = ()
    apply_per_part: bool = False
    neighbour: Neighbour | None = None

    def __post_init__(self) -> None:
        # Both need the whole gradient of a push.
        assert not (self.apply_per_part and (self.corrections or self.clip))
        self.values = self.application.values
        self._whole = SliceRange(0, self.values.numel(), slice(None))
        start = self.parts[0].first if self.parts else 0
        self._spans = [
            SliceRange(part.first - start, part.end - start, slice(*part.pieces))
            for part in self.parts
        ]
        self._gradients: dict[tuple[int, int], Tensor] = {}  # of pushes, by worker and clock
        self._clocks: dict[int, int] = {}  # of the last push of each worker
        self._memory: dict[int, WorkerMemory] = defaultdict(WorkerMemory)
        self._needs_given = any(correction.needs_given for correction in self.corrections)
        self._sending: dict[int, list[Handle]] = {}
        self._landing: dict[int, Landing] = {}  # of each worker's next push
        # Parts that not all workers have pushed, by number and worker
        self._arrived: dict[int, dict[int, tuple[Push, Tensor]]] = defaultdict(dict)
        if self._needs_given:
            self.all_have_read()

    def take(self, transport: Transport, request: Request, gradient: Tensor | None) -> Decision:
        """Carry out a request, and apply the updates that follow from it."""
        if request.kind is Kind.PUSH:
            assert request.push is not None
            self._clocks[request.worker] = request.push.clock
            if gradient is not None:
                gradient = gradient.to(self.values.device)
                if self.decode is not None:
                    gradient = self.decode(request.push, gradient)
                self._gradients[request.worker, request.push.clock] = gradient
        decision = self.state.take(request)
        if request.kind in (Kind.LEAVE, Kind.LOST):
            landing = self._landing.pop(request.worker, None)
            for receive in () if landing is None else landing.receives:
                receive.withdraw()  # else it would take what is for the server of a later phase
        if request.kind is Kind.LOST:
            pending = {push.clock for push in self.state.pending if push.worker == request.worker}
            for worker, clock in list(self._gradients):
                if worker == request.worker and clock not in pending:
                    del self._gradients[worker, clock]
        for update in decision.apply:
            self._update(transport, update)
        return decision

    @property
    def _lands_in_place(self) -> bool:
        """True if a push is as large as the slice, and its parts are put together."""
        return self.decode is None and not self.apply_per_part

    def expect_pushes(self, transport: Transport) -> None:
        """Post the receives of the next push of each worker.

        What is here before its receive is posted has to be copied.
        """
        for worker in sorted(self.state.live - self._landing.keys()):
            if self._lands_in_place and not self._is_neighbour(worker):
                self._expect(transport, worker, torch.empty_like(self.values))

    def _expect(self, transport: Transport, worker: int, gradient: Tensor) -> None:
        receives = [
            transport.receive(worker, Tag.GRADIENT, gradient[first:end])
            for first, end, _ in self._spans or [self._whole]
        ]
        self._landing[worker] = Landing(gradient, receives)

    def receive(self, transport: Transport, worker: int) -> Tensor | None:
        """Return the gradient of a worker's push, which was sent before the request.

        Return None if the worker is lost.
        """
        if not self._lands_in_place:
            return transport.receive(worker, Tag.GRADIENT).wait()
        landing = self._landing.pop(worker, None)
        if landing is None:
            return None
        for receive in landing.receives:
            receive.wait()
        # The next push lands in the same memory: it comes after the answer to this one.
        is_kept = self._needs_given or self.state.when.answers_on_arrival
        gradient = landing.gradient
        self._expect(transport, worker, torch.empty_like(gradient) if is_kept else gradient)
        return gradient

    def take_part(self, transport: Transport, request: Request, gradient: Tensor) -> None:
        """Take the next part of a worker's push."""
        assert request.push is not None
        worker, push, number = request.worker, request.push, request.step
        span = self._spans[number]
        gradient = gradient.to(self.values.device)
        arrived = self._arrived[number]
        arrived[worker] = push, gradient
        # A part can only be lost together with the step, since no worker of a synchronous server
        # may be lost.
        if self.state.live <= arrived.keys():
            del self._arrived[number]
            # In rank order, so that the sum has the same bits whichever worker comes first.
            self._apply_part(span, [arrived[worker] for worker in sorted(arrived)])
            values = self.application.answer[span.first : span.end]
            for worker in sorted(arrived):  # nobody changes them before all workers have them
                if self._is_neighbour(worker):
                    self._give_part(number, values)
                    continue
                handle = transport.send(values, worker, Tag.VALUES)
                self._sending.setdefault(worker, []).append(handle)

    def _apply_part(self, span: SliceRange, arrived: Sequence[tuple[Push, Tensor]]) -> None:
        size, gradient = span.end - span.first, arrived[0][1]
        pushes = [push for push, _ in arrived]
        if len(arrived) > 1:
            gradient = self.application.total[span.first : span.end]

            def add_up() -> None:
                gradient.zero_()
                for _, each in arrived:
                    gradient.add_(each)

            self.charge("mix", len(arrived) * size, add_up)

        def apply() -> None:
            if self._makes_step(sum(push.samples for push in pushes)):
                used = tuple(map(any, zip(*(push.used for push in pushes), strict=True)))
                self.application.apply(gradient, span, pushes[0], used, 1)

        self.charge("update", size, apply)

    def reply(self, transport: Transport, decision: Decision) -> None:
        """Send the workers their messages: answers with the values, work, and the quiet point.

        This rank's own worker gets its work and the quiet point last: so all that was sent is
        counted when that worker goes on.
        """
        for answer in decision.answers:
            self._answer(transport, answer)
        told: list[tuple[int, Instruction | QuietPoint]] = [*decision.work]
        if decision.quiet is not None:
            told += [(worker, decision.quiet) for worker in sorted(self.state.live)]
        for worker, content in sorted(told, key=lambda each: each[0] == transport.rank):
            handle = transport.send(encode_reply(content), worker, Tag.ANSWER)
            self._sending[worker] = [handle]

    def copy_unless_read_only(self, gradient: Tensor) -> Tensor:
        """Return the neighbour's `gradient`, or a copy where it may be changed before it is
        applied, or applied after the answer."""
        read_only = (
            self.state.when.applies_singly
            and not self.application.answers_with_gradient
            and not any(correction.changes_gradient for correction in self.corrections)
        )
        # What has to be decoded is changed into something else.
        if read_only or self.decode is not None:
            return gradient
        copied: Tensor = self.charge("encode", gradient.numel(), gradient.clone)
        return copied

    def _is_neighbour(self, worker: int) -> bool:
        return self.neighbour is not None and worker == self.neighbour.rank

    def _give_part(self, number: int, values: Tensor) -> None:
        neighbour = self.neighbour
        assert neighbour is not None
        into = neighbour.into_parts.pop(number)
        self.charge("encode", values.numel(), lambda: into.copy_(values))
        neighbour.parts.add(number)

    def _give(self, answer: Answer) -> None:
        """Give the neighbour an answer, and the values where it wants them."""
        neighbour = self.neighbour
        assert neighbour is not None
        into, neighbour.into, neighbour.answer = neighbour.into, None, answer
        if into is None:  # each part has brought its values
            return
        values = self.application.answer
        if self.application.answers_with_gradient or self._needs_given:
            values = self.copy_answer(answer.worker)
        else:
            self._gradients.pop((answer.worker, self._clocks[answer.worker]), None)
        self.charge("encode", values.numel(), lambda: into.copy_(values))

    def _answer(self, transport: Transport, answer: Answer) -> None:
        if self._is_neighbour(answer.worker):
            self._give(answer)
            return
        worker, head = answer.worker, encode_reply(answer)
        if self.apply_per_part:  # each part has brought its values
            self._sending[worker] = [transport.send(head, worker, Tag.ANSWER)]
            return
        values, buffer = self._values_for(worker)
        handles = [transport.send(head, worker, Tag.ANSWER, more=True)]
        # The first layers first: the next forward pass needs them first.
        for first, end, _ in reversed(self._spans or [self._whole]):
            part, copy = values[first:end], None if buffer is None else buffer[first:end]
            handles.append(transport.send(part, worker, Tag.VALUES, buffer=copy))
        self._sending[worker] = handles

    def finish_sending(self) -> None:
        """Wait until all that was sent has left; a worker that is lost meanwhile is left out."""
        finish_sending(self._sending)

    def _values_for(self, worker: int) -> tuple[Tensor, Tensor | None]:
        """Return what a worker is answered with, and a buffer for it if it may change meanwhile."""
        if self.application.answers_with_gradient or self._needs_given:
            return self.copy_answer(worker), None
        # `send` copies into the buffer what has not left: a slow worker holds up nobody.
        self.charge("encode", self.values.numel(), lambda: None)
        return self.application.answer, self._take_memory(worker)

    def copy_answer(self, worker: int) -> Tensor:
        """Return what a worker is answered with, which no later update changes."""
        copy = self._take_memory(worker)
        if not self.application.answers_with_gradient:
            self.charge("encode", copy.numel(), lambda: copy.copy_(self.application.answer))
        if self._needs_given:
            # Without a further copy: the worker's next gradient comes in a new buffer.
            self._memory[worker].given = copy
        return copy

    def _take_memory(self, worker: int) -> Tensor:
        """Take memory for an answer: that of the worker's gradient, once it has been applied."""
        if self.state.when.answers_on_arrival:
            return torch.empty_like(self.values)
        return self._gradients.pop((worker, self._clocks[worker]))

    def _update(self, transport: Transport, update: Update) -> None:
        """Apply `update`, from the gradients of its pushes."""
        elements, count = self.values.numel(), len(update.pushes)
        if not self.apply_per_part:
            gradients = [self._gradients[push.worker, push.clock] for push in update.pushes]
            average = None
            if count > 1:
                add_up = partial(self._add_up, update, gradients)
                average = self.charge("mix", 2 * count * elements, add_up)
            apply = partial(self._apply, transport, update, gradients, average)
            self.charge("update", elements, apply)
        if self.state.when.answers_on_arrival:
            for push in update.pushes:
                del self._gradients[push.worker, push.clock]
        if self.on_update is not None:
            self.on_update(self.state.consumed, self.values)

    def _add_up(self, update: Update, gradients: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Correct each push, and form their average, weighted by samples.

        Returns the average and the divisor of its learning rates.
        """
        total = self.application.total.zero_()
        if not update.samples:
            return total, 1.0
        divisors = list(map(self._correct, update.pushes, gradients))
        for push, gradient, divisor in zip(update.pushes, gradients, divisors, strict=True):
            weight = push.samples / update.samples * (min(divisors) / divisor)
            total.add_(gradient.mul_(weight))
        return total, min(divisors)

    def _apply(
        self,
        transport: Transport,
        update: Update,
        gradients: Sequence[Tensor],
        average: tuple[Tensor, float] | None,
    ) -> None:
        """Apply the average, or the one push."""
        push = update.pushes[0]
        if not self._makes_step(update.samples):
            return
        gradient, divisor = average or (gradients[0], self._correct(push, gradients[0]))
        if self.clip is not None:
            self.clip(transport, gradient)
        self.application.apply(gradient, self._whole, push, update.used, divisor)

    def _makes_step(self, samples: int) -> bool:
        """Return whether pushes of so many samples make a step: without data, moments and weight
        decay leave the values alone."""
        return bool(samples) or self.application.applies_empty_pushes

    def _correct(self, push: Push, gradient: Tensor) -> float:
        """Apply the corrections to `gradient`; return the divisor of its learning rates.

        Raises:
            RunFailed: a correction returned no such number.
        """
        product = 1.0
        for correction in self.corrections:
            memory = self._memory[push.worker]
            divisor: Any = correction.correct(push, gradient, self.values, memory)
            is_number = isinstance(divisor, Real)
            if not (is_number and divisor > 0):
                found = divisor if is_number else type(divisor).__name__
                raise RunFailed(
                    f"{type(correction).__name__}.correct() has to return what the learning rates "
                    f"are divided by, a number above 0; it returned {found}"
                )
            product *= divisor
        return product

    def all_have_read(self) -> None:
        """At a quiet point: every worker was given the values as they are now."""
        self.state.all_have_read()
        if self._needs_given:
            given = self.values.clone()
            for worker in self.state.live:
                self._memory[worker].given = given

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        return {
            "values": self.values,
            "version": self.state.version,
            "consumed": self.state.consumed,
            "clocks": {str(worker): clock for worker, clock in self.state.clocks.items()},
            "read": {str(worker): version for worker, version in self.state.read.items()},
            "dropped": self.state.dropped,
            "application": self.application,
            "memory": {
                str(worker): {"given": memory.given, "own": dict(memory.own)}
                for worker, memory in self._memory.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.application.load_state_dict(saved["application"])
        device = self.values.device
        for worker, memory in saved["memory"].items():
            given, own = memory["given"], memory["own"]
            given = None if given is None else given.to(device)
            kept = WorkerMemory(given, {name: value.to(device) for name, value in own.items()})
            self._memory[int(worker)] = kept
        self.values.copy_(saved["values"])
        self.state.version = saved["version"]
        self.state.consumed = saved["consumed"]
        self.state.clocks = {int(worker): clock for worker, clock in saved["clocks"].items()}
        self.state.newest = max(self.state.clocks.values(), default=0)
        self.state.read = {int(worker): version for worker, version in saved["read"].items()}
        self.state.dropped = saved["dropped"]
