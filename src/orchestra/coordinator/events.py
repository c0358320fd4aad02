"""What the coordinator hears of, and what it tells workers to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestra.coordinator.rest import Rest

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
    """The user of the worker wishes to stop."""

    worker: int


class Lost(NamedTuple):
    """The worker has left, or was lost: other workers take the batches that it has not done."""

    worker: int


class Rested(NamedTuple):
    """All workers have come to rest, with nothing in flight."""


Event = Started | Free | Done | Wish | Lost | Rested


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


Instruction = Take | Wait | RestAt | Finish


def numbers_of(instruction: Instruction) -> tuple[int, int, int, int]:
    """Encode an instruction for a message."""
    if isinstance(instruction, Take):
        return (0, *instruction, 0)
    if isinstance(instruction, RestAt):
        return (1, instruction.at, instruction.at, instruction.rest.code)
    if isinstance(instruction, Finish):
        return (2, instruction.at, instruction.at, 0)
    return (3, 0, 0, 0)


def instruction_of(numbers: Sequence[float]) -> Instruction:
    """Decode an instruction."""
    kind, start, stop, code = map(int, numbers)
    if kind == 0:
        return Take(start, stop)
    if kind == 1:
        return RestAt(start, Rest.of(code))
    return Finish(start) if kind == 2 else Wait()
