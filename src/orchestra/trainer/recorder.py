"""What one rank writes down: its steps, its seconds by purpose, and what it could not foresee."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from orchestra.errors import InputError
from orchestra.records.exports import Scalars
from orchestra.records.report import MAX_SOURCES, Counters, CounterSeries
from orchestra.settings.base import setting, to_plain
from orchestra.settings.reading import read_bytes, read_json
from orchestra.trainer.checkpoints import writing
from orchestra.worker.interception import HookedCall, HookedFlow, Interceptor
from orchestra.worker.worker import Worker

T = TypeVar("T")

# `orchestra watch` and the trackers read the file as it grows.
FLUSH_SECONDS = 1.0
SECONDS = ("compute", "communicate", "wait")


@dataclass
class Spent:
    """Seconds of the main flow by purpose, and the bytes that it sent."""

    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0
    bytes_sent: int = 0

    @staticmethod
    def by(worker: Worker) -> Spent:
        """Return all that the main flow of `worker` has spent so far."""
        traffic = worker.transport.traffic
        return Spent(
            worker.compute.seconds,
            # torch.distributed's collectives pass by the transport, so the worker counts them
            traffic.seconds_communicating + worker.measures.native_seconds,
            traffic.seconds_waiting,
            worker.transport.bytes_sent + worker.measures.native_bytes,
        )

    def plus(self, other: Spent, sign: int = 1) -> Spent:
        """Return the sum of both, or the difference with `sign` -1."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Spent(*(own + sign * more for own, more in pairs))


@dataclass
class Totals:
    """Figures of the run so far, while the stopwatch ran; kept in checkpoints."""

    elapsed: float = 0.0
    spent: Spent = field(default_factory=Spent)
    samples: int = setting(0, "that this rank has read", low=0)
    loss: float | None = None


class Recorder:
    """JSON lines of one rank's steps, in the file `path`; without one, sums over the run alone.

    The main figures of each step go to `scalars`, too, if given. `steps` were done before the run
    was resumed; this rank has `kept` so many of them in its file (None: all). The stopwatch
    runs between `resume` and `pause`: set-up, checkpoints and evaluation are not measured. `series`
    has counters to compare ranks by, since the run began or resumed.
    """

    def __init__(
        self,
        worker: Worker,
        path: Path | None,
        totals: Totals,
        steps: int = 0,
        scalars: Scalars | None = None,
        *,
        kept: int | None = None,
    ) -> None:
        self.totals = totals
        self._worker = worker
        self._scalars = scalars
        self._path = path
        self._lines: list[str] = []
        self._runs = False
        self._started_at = self._flushed_at = 0.0
        self._spent_before = self._spent_last = Spent()
        self._seconds_last = totals.elapsed
        self.series = CounterSeries()
        self._steps = steps
        self._reading = self._read_last = 0.0  # seconds
        self._decided = 0  # decisions that are written down
        if path is not None and not keep_first(path, steps if kept is None else kept) and kept:
            worker.runtime.reporter.notice(
                f"{path}: the steps before the checkpoint are missing; records begin at step "
                f"{steps + 1}"
            )

    def move(self, worker: Worker) -> None:
        """Go on with another `worker` of this rank, while the stopwatch stands."""
        self._worker = worker

    def go_on_from(self, steps: int, elapsed: float) -> None:
        """Go on with a run that other ranks have brought so far, while the stopwatch stands."""
        self._steps = steps
        self.totals.elapsed = self._seconds_last = elapsed

    def go_back_to(self, steps: int, samples: int) -> None:
        """Forget all steps but the first `steps`, for which this rank has read `samples`."""
        if steps < self._steps:
            self._steps, self.totals.samples = steps, samples
            if self._path is not None:
                self.flush()
                keep_first(self._path, steps)

    def resume(self) -> None:
        """Start the stopwatch, or let it go on."""
        self._runs = True
        self._started_at = self._flushed_at = self._worker.transport.now()
        # The counters go on while the stopwatch stands; what they grew by meanwhile is left out
        self._spent_before = self._spent_last = Spent.by(self._worker)
        # Of a resumed run the decisions before stand in the file already
        self._decided = len(self._worker.measures.decisions)
        self._worker.runtime.stopwatch(True)
        self._keep_counters(self.totals.elapsed, self._spent_before)

    def pause(self) -> None:
        """Stop the stopwatch, if it runs."""
        if not self._runs:
            return
        self.totals.elapsed = self.elapsed()
        self._runs = False
        spent = Spent.by(self._worker)
        self._keep_counters(self.totals.elapsed, spent)
        self.totals.spent = self.totals.spent.plus(spent.plus(self._spent_before, -1))
        self._worker.runtime.stopwatch(False)
        self.flush()

    def elapsed(self) -> float:
        """Return the seconds on the stopwatch."""
        if not self._runs:
            return self.totals.elapsed
        return self.totals.elapsed + self._worker.transport.now() - self._started_at

    def read(self, batch: Callable[[], T]) -> T:
        """Return the batch that `batch` reads; its seconds count as waiting for input."""
        began = self._worker.transport.now()
        result = batch()
        self._reading += self._worker.transport.now() - began
        return result

    def observe(self) -> None:
        """Note that something was done, if not a step."""
        seconds = self.elapsed()
        if self.series.due(seconds):
            self._keep_counters(seconds, Spent.by(self._worker))

    def _keep_counters(self, seconds: float, spent: Spent) -> None:
        arrived = self._worker.transport.arrived()
        # A server of a thousand workers would report a thousand pairs at each moment
        if len(arrived) > MAX_SOURCES:
            arrived = {}
        spent = self.totals.spent.plus(spent.plus(self._spent_before, -1))
        self.series.add(
            Counters(
                seconds,
                self._steps,
                self.totals.samples,
                self._worker.compute.main_seconds,
                self._reading,
                spent.communicate + spent.wait,
                tuple((source, *numbers) for source, numbers in arrived.items()),
            )
        )

    def step(self, number: int) -> None:
        """Write down step `number`, just finished."""
        step = self._worker.step
        self.totals.samples += step.samples
        self._steps = number
        if self._path is None:
            self.observe()
            return
        self.totals.loss = step.loss
        spent = Spent.by(self._worker)
        passed = vars(spent.plus(self._spent_last, -1))
        self._spent_last = spent
        seconds = self.elapsed()
        if self.series.due(seconds):
            self._keep_counters(seconds, spent)
        line: dict[str, Any] = {
            "step": number,
            # Microseconds: more digits would double the file, and are noise
            "seconds": round(seconds, 6),
            "samples": step.samples,
            "consumed": step.consumed,
            "loss": step.loss,
            "rates": step.rates,
            **{name: round(passed[name], 6) for name in SECONDS},
            "input": round(self._reading - self._read_last, 6),
            "bytes_sent": passed["bytes_sent"],
        }
        self._read_last = self._reading
        if step.staleness:
            line["staleness"] = step.staleness
        if (switched := self._worker.measures.switched_at_step) is not None:
            line["switched_at_step"] = switched
        decisions = self._worker.measures.decisions
        # At most one decision lies between two steps
        if len(decisions) > self._decided:
            line["decision"], self._decided = decisions[-1], len(decisions)
        if step.position is not None:
            line["position"] = step.position
        logged, self._worker.logged = self._worker.logged, {}
        if logged:
            line["logged"] = logged
        self._lines.append(json.dumps(line) + "\n")
        if self._scalars is not None:
            self._scalars.add(number, self._figures(line))
        if self._worker.transport.now() - self._flushed_at > FLUSH_SECONDS:
            self.flush()

    def _figures(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures of the step that `line` is of."""
        step, seconds = self._worker.step, line["seconds"]
        passed, self._seconds_last = seconds - self._seconds_last, seconds
        figures = {"loss": step.loss}
        figures |= {f"learning rate/{group}": rate for group, rate in enumerate(step.rates)}
        # A simulated step may take no time
        if passed > 0:
            figures["samples per second"] = step.samples / passed
        if step.staleness:
            figures["staleness"] = max(step.staleness)
        figures |= {f"logged/{name}": value for name, value in line.get("logged", {}).items()}
        return figures

    def close(self) -> None:
        """Bring what was written down to disk, and write no more."""
        self.flush()
        self._path = None
        del self._worker

    def flush(self) -> None:
        """Bring what was written down to disk."""
        if self._path is None:
            return
        with writing(self._path), self._path.open("a") as file:
            file.writelines(self._lines)
            if self._scalars is not None:
                self._scalars.flush()
        self._lines.clear()
        self._flushed_at = self._worker.transport.now()


def keep_first(path: Path, steps: int) -> list[bytes]:
    """Drop what a run wrote after the checkpoint that it resumes from, and any damaged line; return
    the lines that are kept."""
    lines, kept = [], []
    with suppress(FileNotFoundError):
        lines = read_bytes(path).splitlines(keepends=True)
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if json.loads(line)["step"] <= steps:
                kept.append(line)
    with writing(path):
        path.write_bytes(b"".join(kept))
    return kept


# The order of a run: what its ranks could not foresee, recorded and repeated.
#
# Of all that a program learns from its engine, only this depends on chance: which message a receive
# from any source took, whether something was done yet, what the clock said, who was lost, which
# flow of a rank came first to what they share, and whether the user wants to stop. It is recorded
# in order for each flow of a rank. Given the same answers, a program does the same again, on any
# engine: no parameter or gradient is needed.

NOBODY = -1
"""A tag that no message has."""

RANKS = "seconds", "stop"
"""Questions that belong to the rank, whichever flow asks."""


class OrderEnded(InputError):
    """A program asks for more than was recorded: it is not the one that was recorded."""


@dataclass
class FlowOrder:
    """The answers that one flow got, in the order in which it asked."""

    sources: list[int] = field(default_factory=list)
    """Of each receive from any source, who sent what it took; -1: it never completed."""
    done: list[bool] = field(default_factory=list)  # was an operation or a flow done?
    now: list[float] = field(default_factory=list)  # of each look at the clock
    lost: list[list[int]] = field(default_factory=list)  # the ranks known to be gone
    turns: list[int] = field(default_factory=list)  # that it took at what flows share


@dataclass
class Order:
    """The answers that one rank got. A flow is named by the number of its start: "main.0"."""

    flows: dict[str, FlowOrder] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # that the rank has computed, at each look
    stop: list[bool] = field(default_factory=list)  # does the user want to stop?
    first_step: int = 0  # steps that had been done before: 0, unless the run was resumed
    shares: list[float] = field(default_factory=list)  # of the ranks' parts, if they were measured

    def answers(self, flow: str, what: str) -> list[Any]:
        """Return the answers to the question `what` of a flow; a new flow begins with none."""
        holder = self if what in RANKS else self.flows.setdefault(flow, FlowOrder())
        found: list[Any] = getattr(holder, what)
        return found


@dataclass(eq=False)
class Recording(Interceptor):
    """Writes the answers that the rank gets into `order`."""

    order: Order

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        if operation.flow is not None:
            self.order.flows.setdefault(operation.flow.name, FlowOrder())
        if operation.kind == "receive" and operation.peer is None:
            sources = self.order.answers(flow.name, "sources")
            # In the order of the receives, in which a repeat asks; `wait` knows who sent
            operation.marks[self] = len(sources)
            sources.append(-1)
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        result = proceed()
        if self in operation.marks:
            self.order.flows[flow.name].sources[operation.marks[self]] = operation.source
        return result

    def ask(
        self,
        flow: HookedFlow,
        what: str,
        proceed: Callable[[], T],
        operation: HookedCall | None = None,
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

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        """Let a receive from any source take what it took then, if it ever was completed."""
        if operation.kind == "receive" and operation.peer is None:
            taken = self._next(flow, "sources")
            # A receive that was never completed waits for a message that nobody sends.
            operation.peer = taken if taken >= 0 else self.rank
            operation.tag = operation.tag if taken >= 0 else NOBODY
        return proceed()

    def ask(
        self,
        flow: HookedFlow,
        what: str,
        proceed: Callable[[], T],
        operation: HookedCall | None = None,
    ) -> T:
        """Give the recorded answer; wait until an operation that was done then is done."""
        answer = self._next(flow, what)
        if what == "done" and answer and operation is not None and operation.begun is not None:
            # What follows takes it for done; in the repeat it may be done later than then
            operation.begun.wait()
        return frozenset(answer) if what == "lost" else answer  # type: ignore[return-value]

    def _next(self, flow: HookedFlow, what: str) -> Any:
        key = ("" if what in RANKS else flow.name), what
        if key not in self._given:
            self._given[key] = iter(self.order.answers(flow.name, what))
        try:
            return next(self._given[key])
        except StopIteration:
            raise OrderEnded(
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
    """Return the order of a rank that `folder` keeps. Raises InputError: it is missing or damaged,
    or it begins in the midst of a run."""
    path = _file(folder, rank)
    try:
        order: Order = read_json(path, Order)
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: a run is recorded with --record-order, and a rank that was killed "
            "leaves nothing"
        ) from None
    except InputError as error:
        raise InputError(f"{error}; record the run again") from None
    if order.first_step:
        raise InputError(
            f"{path}: the run was resumed after step {order.first_step}, and what came before is "
            "not in the record; record it in one piece"
        )
    return order
