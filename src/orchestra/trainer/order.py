"""The order of a run: what its ranks could not foresee, recorded and repeated.

Of all that a program learns from its engine, only this depends on chance: which message a receive
from any source took, whether something was done yet, what the clock said, who was lost, and
whether the user wants to stop. It is recorded in order for each flow of a rank. Given the same
answers, a program does the same again, on any engine: no parameter or gradient is needed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestra.errors import InputError
from orchestra.settings.base import from_plain, to_plain
from orchestra.trainer.checkpoints import writing
from orchestra.worker.interception import Flow, Interceptor, Operation

T = TypeVar("T")
NOBODY = -1
"""A tag that no message has."""

RANKS = "seconds", "stop"
"""Questions that belong to the rank, whichever flow asks."""


class Ended(InputError):
    """A program asks for more than was recorded: it is not the one that was recorded."""


@dataclass
class FlowOrder:
    """The answers that one flow got, in the order in which it asked.

    Attributes:
        sources: of each receive from any source, who sent what it took; -1: it never completed.
        done: of each question whether an operation or a flow was done.
        now: of each look at the clock.
        lost: the ranks known to be gone, of each question for them.
    """

    sources: list[int] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    now: list[float] = field(default_factory=list)
    lost: list[list[int]] = field(default_factory=list)


@dataclass
class Order:
    """The answers that one rank got. A flow is named by the number of its start: "main.0".

    Attributes:
        seconds: of each look at the seconds that the rank has computed.
        stop: of each question whether the user wants to stop.
        first_step: steps that had been done before: 0, unless the run was resumed.
        shares: the weights of the ranks' parts that were measured, if they were.
    """

    flows: dict[str, FlowOrder] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    stop: list[bool] = field(default_factory=list)
    first_step: int = 0
    shares: list[float] = field(default_factory=list)

    def answers(self, flow: str, what: str) -> list[Any]:
        """Return the answers to the question `what` of a flow; a new flow begins with none."""
        holder = self if what in RANKS else self.flows.setdefault(flow, FlowOrder())
        found: list[Any] = getattr(holder, what)
        return found


@dataclass(eq=False)
class Recording(Interceptor):
    """Writes the answers that the rank gets into `order`."""

    order: Order

    def begin(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        if operation.flow is not None:
            self.order.flows.setdefault(operation.flow.name, FlowOrder())
        if operation.kind == "receive" and operation.peer is None:
            sources = self.order.answers(flow.name, "sources")
            # In the order of the receives, in which a repeat asks; `wait` knows who sent
            operation.marks[self] = len(sources)
            sources.append(-1)
        return proceed()

    def wait(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        result = proceed()
        if self in operation.marks:
            self.order.flows[flow.name].sources[operation.marks[self]] = operation.source
        return result

    def ask(
        self, flow: Flow, what: str, proceed: Callable[[], T], operation: Operation | None = None
    ) -> T:
        if what == "memory":
            raise InputError(
                "record_order: what a rank reads in memory that others write to cannot be written "
                "down: leave record_order out, or choose another strategy than Hogwild"
            )
        answer = proceed()
        # JSON has no sets, and equal orders have to make equal files
        kept = sorted(answer) if isinstance(answer, frozenset) else answer
        self.order.answers(flow.name, what).append(kept)
        return answer


@dataclass(eq=False)
class Repeating(Interceptor):
    """Gives `rank` the answers of `order` again."""

    rank: int
    order: Order
    _given: dict[tuple[str, str], Iterator[Any]] = field(default_factory=dict, init=False)

    def begin(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        """Let a receive from any source take what it took then, if it ever was completed."""
        if operation.kind == "receive" and operation.peer is None:
            taken = self._next(flow, "sources")
            # A receive that was never completed waits for a message that nobody sends.
            operation.peer = taken if taken >= 0 else self.rank
            operation.tag = operation.tag if taken >= 0 else NOBODY
        return proceed()

    def ask(
        self, flow: Flow, what: str, proceed: Callable[[], T], operation: Operation | None = None
    ) -> T:
        """Give the recorded answer; wait until an operation that was done then is done."""
        answer = self._next(flow, what)
        if what == "done" and answer and operation is not None and operation.begun is not None:
            # What follows takes it for done; in the repeat it may be done later than then
            operation.begun.wait()
        return frozenset(answer) if what == "lost" else answer  # type: ignore[return-value]

    def _next(self, flow: Flow, what: str) -> Any:
        key = ("" if what in RANKS else flow.name), what
        if key not in self._given:
            self._given[key] = iter(self.order.answers(flow.name, what))
        try:
            return next(self._given[key])
        except StopIteration:
            raise Ended(
                f"the record of the order ends: rank {self.rank}, flow {flow.name}, asked for "
                f"{what!r} once more than in the run; was it made with another version of the "
                "program, or was the run cut short?"
            ) from None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"order-rank-{rank}.json.gz"


def write_order(folder: Path, rank: int, order: Order) -> None:
    """Keep the order of a rank with the records of its run."""
    path = _file(folder, rank)
    with writing(path):
        # gzip writes the time into a file unless told otherwise; equal orders make equal files.
        path.write_bytes(gzip.compress(json.dumps(to_plain(order)).encode(), mtime=0))


def read_order(folder: Path, rank: int) -> Order:
    """Return the order of a rank that `folder` keeps.

    Raises:
        InputError: there is none, it is damaged, or it begins in the midst of a run.
    """
    path = _file(folder, rank)
    try:
        order: Order = from_plain(Order, json.loads(gzip.decompress(path.read_bytes())))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: a run is recorded with --record-order, and a rank that was killed "
            "leaves nothing"
        ) from None
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise InputError(f"{path} is damaged ({error}); record the run again") from None
    if order.first_step:
        raise InputError(
            f"{path}: the run was resumed after step {order.first_step}, and what came before is "
            "not in the record; record it in one piece"
        )
    return order
