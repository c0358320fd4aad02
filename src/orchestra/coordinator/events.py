"""What the coordinator hears of, what it tells workers to do, and how messages say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from orchestra.coordinator.rest import Reason, Rest

# Events. Tuples: there are several for each push, and a dataclass takes five times as long to make.


class Started(NamedTuple):
    """The worker computes the last batch that it was given, and asks for the next one ahead."""

    worker: int


class Free(NamedTuple):
    """The worker has done all its batches, and asks what it does next."""

    worker: int


class Done(NamedTuple):
    """The worker's batch, the samples [start, stop), is part of the model: it cannot be lost.

    The other fields are the report for rules that end a phase; `loss` is None without such a rule.
    """

    worker: int
    start: int
    stop: int
    loss: float | None = None
    seconds: float = 0.0
    rate: float = 0.0
    epoch: float = 0.0
    fraction: float = 0.0


class Wish(NamedTuple):
    """The worker, or its user, wishes that all workers rest."""

    worker: int


class Lost(NamedTuple):
    """The worker has left, or was lost: other workers take the batches that it has not done."""

    worker: int


class Rested(NamedTuple):
    """All workers have come to rest, with nothing in flight."""


class Settle(NamedTuple):
    """The worker waits until the rules that watch the phase know its reports."""

    worker: int


class Ended(NamedTuple):
    """The worker has left: it takes no more batches, or no step after the first `steps`."""

    worker: int
    steps: int | None = None


class Reported(NamedTuple):
    """The worker has done step number `step`. The other fields are the report for rules.

    `square` is |g|^2 of its own gradient, `mean_square` that of the average of all.
    """

    worker: int
    step: int
    samples: int
    loss: float
    seconds: float
    rate: float
    epoch: float
    fraction: float
    square: float
    mean_square: float


class Renew(NamedTuple):
    """The worker has done `steps` steps, and asks how far it may go on."""

    worker: int
    steps: int


class AskPromise(NamedTuple):
    """The leader asks for a step that the worker will not pass."""

    leader: int


class Promised(NamedTuple):
    """The worker does not pass step number `step` before the fence is announced."""

    worker: int
    step: int


class Announced(NamedTuple):
    """The leader has found a fence: all rest after step number `step`; see `RestAfter`."""

    leader: int
    step: int
    transition: int | None = None


class Dismissed(NamedTuple):
    """The leader knows that all workers have left."""

    leader: int


Event = (
    Started | Free | Done | Wish | Lost | Rested | Settle | Ended
    | Reported | Renew | AskPromise | Promised | Announced | Dismissed
)  # fmt: skip


# Instructions


class Take(NamedTuple):
    """Compute the gradient of the samples [start, stop) of the global order."""

    start: int
    stop: int

    @property
    def samples(self) -> int:
        """The samples in the batch."""
        return self.stop - self.start


class Wait(NamedTuple):
    """Ask again once you are free: others hold the last batches, which come back if they are lost.

    The coordinator answers the second question as soon as there is something else to do.
    """


class RestAt(NamedTuple):
    """Come to rest with all others; all samples before `at` are handed out."""

    at: int
    rest: Rest


class Finish(NamedTuple):
    """Leave: all samples of the run are handed out, and `at` is their number."""

    at: int


class Settled(NamedTuple):
    """Go on: the rules that watch the phase know all reports."""


class Grant(NamedTuple):
    """Go on up to step number `step`, then ask again."""

    step: int


class RestAfter(NamedTuple):
    """Come to rest with all others after step number `step`.

    The phase ends by the `transition` of that number; None: the run stops.
    """

    step: int
    transition: int | None = None

    @property
    def rest(self) -> Rest:
        """The rest that follows."""
        number = self.transition
        return Rest(Reason.STOP) if number is None else Rest(Reason.PHASE, number)


Instruction = Take | Wait | RestAt | Finish | Settled | Grant | RestAfter


# Messages

_SENT: Sequence[Any] = (
    Started, Free, Done, Wish, Settle, Ended,
    Reported, Renew, AskPromise, Promised, Announced, Dismissed,
)  # fmt: skip
"""The events that messages tell of; each begins with the place of its kind here."""

_FENCING: Sequence[Any] = (Settled, Grant, RestAfter)
"""Instructions that are sent as they are, by their numbers from 4 on."""

_FIELDS = [
    [float if hint in (float, float | None) else int for hint in get_type_hints(kind).values()][1:]
    for kind in _SENT
]
"""The types of each kind's fields, without the rank, which is known from the message itself."""


def numbers_of_events(*events: Event) -> list[float]:
    """Encode events of one rank for a message; only the last one may end with None."""
    numbers: list[float] = []
    for event in events:
        fields = [number for number in event[1:] if number is not None]
        numbers += [_SENT.index(type(event)), *fields]
    return numbers


def events_of(rank: int, numbers: list[float]) -> list[Event]:
    """Decode a message of `rank`."""
    events = []
    while numbers:
        kind, end = int(numbers[0]), 1 + len(_FIELDS[int(numbers[0])])
        fields = zip(_FIELDS[kind], numbers[1:end], strict=False)
        events.append(_SENT[kind](rank, *(make(number) for make, number in fields)))
        numbers = numbers[end:]
    return events


def numbers_of(instruction: Instruction) -> tuple[int, ...]:
    """Encode an instruction for a message. Those of a queue take four numbers."""
    if isinstance(instruction, Take):
        return (0, *instruction, 0)
    if isinstance(instruction, RestAt):
        return (1, instruction.at, instruction.at, instruction.rest.code)
    if isinstance(instruction, Finish):
        return (2, instruction.at, instruction.at, 0)
    if isinstance(instruction, Wait):
        return (3, 0, 0, 0)
    numbers = [number for number in instruction if number is not None]
    return (4 + _FENCING.index(type(instruction)), *numbers)


def instruction_of(numbers: Sequence[float]) -> Instruction:
    """Decode an instruction."""
    kind, *fields = map(int, numbers)
    if kind == 0:
        return Take(*fields[:2])
    if kind == 1:
        return RestAt(fields[0], Rest.of(fields[2]))
    if kind == 2:
        return Finish(fields[0])
    return Wait() if kind == 3 else _FENCING[kind - 4](*fields)
