"""A step that all workers leave after, agreed on while each goes at its own pace.

What the workers report of their steps is put together, for a rule that asks for such a step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.schedules.work_queue import Report
from orchestra.transports.protocol import Task, Transport, send_unless_lost
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Step, Worker

LEASE = 4
"""Steps that a worker goes on without asking. More cost less, and a wish takes longer."""

Observe = Callable[[Step], bool]
"""Take note of a step as all workers know it together; True to wish for a common step now."""


class _MessageKind(enum.IntEnum):
    """The kinds of messages of the control flows; most carry a number of a step."""

    RENEW = 0  # my main flow has done that many steps, and asks for more
    GRANT = 1  # it may go up to that step
    WISH = 2  # let us leave at a common step
    REPORT = 3  # of a worker's step, to be observed
    REQUEST = 4  # promise a step that you will not go beyond
    PROMISE = 5  # this one
    ANNOUNCE = 6  # everyone leaves after that step
    SETTLE = 7  # I wait until all reports have been observed, or: they have
    END = 8  # I have finished, after so many steps
    BYE = 9  # all have finished


class CommonStep:
    """Finds, when anyone wishes for it, a step that no worker has passed, for all to leave after.

    Each rank has a control flow, which answers while the main flow computes or is blocked. It
    grants the main flow a lease, a step up to which it goes without asking. On a wish the flow
    of the leader asks all flows for a promise, which is that lease, and announces the largest.
    A main flow at the end of its lease waits until the announcement, if a promise was given.
    So nobody has passed the step announced, and nobody waits for a main flow: there is no
    deadlock, whatever main flows wait for among themselves. Without a wish it costs a message
    to oneself every few steps.

    All workers take part; the first one is the leader. `steps` is how many steps this one has done;
    `level` keeps apart those that exist at the same time. The leader puts the reports of a step
    together for `observe`, which may wish for everyone.
    """

    def __init__(
        self, worker: Worker, *, steps: int = 0, level: int = 0, observe: Observe | None = None
    ) -> None:
        self._transport = worker.transport
        self._leader = worker.workers.ranks[0]
        self._tag = Tag.COMMON_STEP + 2 * level
        self._steps = steps
        self._lease = steps + LEASE
        self._final = False
        self._wished = False
        self._reports = _Reports(worker, observe or (lambda step: False))
        self._flow: Task[None] | None = None
        if len(worker.workers) > 1:
            ranks = set(worker.workers.ranks)
            control = _Control(ranks, self._leader, self._tag, self._lease, self._reports)
            self._flow = worker.transport.spawn(control.run)

    def reached(self, steps: int, *, wish: bool) -> bool:
        """Return whether step number `steps` of this worker, which is over, is the common one.

        With `wish` this worker wants one to be found. A worker alone has its wish at once.
        """
        self._steps = steps
        if self._flow is None:
            self._wished = self._wished or wish
            return self._wished
        if wish and not self._wished:
            self._wished = True
            self._tell(self._leader, _MessageKind.WISH)
        if steps >= self._lease and not self._final:
            own = self._transport.rank
            self._tell(own, _MessageKind.RENEW, steps)
            kind, number = self._transport.receive(own, self._tag + 1).wait().tolist()
            if kind == _MessageKind.END:
                self._flow.wait()  # raises what the control flow raised
            self._lease, self._final = int(number), kind == _MessageKind.ANNOUNCE
        return self._final and steps >= self._lease

    def report(self, steps: int, *values: float) -> None:
        """Tell the leader what this worker saw in its step: the fields of a `Step`."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.REPORT, steps, *values)
        elif self._reports.add(steps, self._transport.rank, list(values)):
            self._wished = True

    def settle(self) -> None:
        """Collective over the workers, after a step of all: wait until reports are observed."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.SETTLE)
            self._transport.receive(self._leader, self._tag + 1).wait()

    def close(self) -> None:
        """Collective over the workers: end the control flow."""
        if self._flow is not None:
            self._tell(self._leader, _MessageKind.END, self._steps)
            self._flow.wait()
            self._flow = None

    def _tell(self, rank: int, kind: _MessageKind, *values: float) -> None:
        self._transport.send(_message(kind, *values), rank, self._tag).wait()


def _message(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class _Control:
    """The control flow of one rank; that of the leader also gathers and announces."""

    def __init__(
        self, ranks: set[int], leader: int, tag: int, lease: int, reports: _Reports
    ) -> None:
        self._ranks, self._leader, self._tag, self._lease = ranks, leader, tag, lease
        self._promised = False
        self._asked = False  # the main flow waits for an answer
        self._common: int | None = None
        self._reports = reports  # from here on of the leader alone
        self._requested = False
        self._announced = False
        self._promises: dict[int, int] = {}
        self._ended: set[int] = set()
        self._settled: set[int] = set()

    def run(self, transport: Transport) -> None:
        """Answer until everyone has finished."""
        self._transport = transport
        try:
            while self._answer_next():
                pass
        except BaseException:
            # A main flow that waits for a grant learns of the failure by this, and raises it.
            self._tell_main(_MessageKind.END, 0)
            raise

    def _answer_next(self) -> bool:
        """Answer a message, or note a loss; False once all have finished."""
        handle = self._transport.receive(None, self._tag)
        try:
            kind, *values = handle.wait().tolist()
        except PeerLost as lost:
            # Without the leader nobody announces a step.
            if lost.rank == self._leader:
                raise
            self._end(lost.rank)
        else:
            known = _MessageKind(int(kind))
            self._take(known, handle.source, values)
            return known is not _MessageKind.BYE
        return True

    def _take(self, kind: _MessageKind, source: int, values: list[float]) -> None:
        number = int(values[0]) if values else 0
        match kind:
            # A promise holds: the main flow stops at its lease until the common step is known.
            case _MessageKind.RENEW if self._promised:
                self._asked = True
                self._grant()
            case _MessageKind.RENEW:
                self._lease = number + LEASE
                self._tell_main(_MessageKind.GRANT, self._lease)
            case _MessageKind.REQUEST:
                self._promised = True
                self._tell(self._leader, _MessageKind.PROMISE, self._lease)
            case _MessageKind.ANNOUNCE:
                self._common = number
                self._grant()
            case _MessageKind.WISH:
                self._request()
            case _MessageKind.REPORT:
                if self._reports.add(number, source, values[1:]):
                    self._request()
            case _MessageKind.PROMISE:
                self._promises[source] = number
                self._announce()
            case _MessageKind.SETTLE:
                self._settled.add(source)
                self._settle()
            case _MessageKind.END:
                self._promises[source] = number
                self._end(source)

    def _grant(self) -> None:
        if self._asked and self._common is not None:
            self._tell_main(_MessageKind.ANNOUNCE, self._common)

    def _tell_main(self, kind: _MessageKind, number: int) -> None:
        to = self._transport.rank, self._tag + 1
        self._transport.send(_message(kind, number), *to).wait()

    # The leader's part

    def _request(self) -> None:
        if not self._requested:
            self._requested = True
            self._tell_all(_MessageKind.REQUEST)

    def _announce(self) -> None:
        everyone = self._promises.keys() | self._ended >= self._ranks
        if self._promises and everyone and not self._announced:
            self._announced = True
            # Nobody is beyond its promise, so nobody has passed the largest one.
            self._tell_all(_MessageKind.ANNOUNCE, max(self._promises.values()))

    def _settle(self) -> None:
        if self._settled and self._settled | self._ended >= self._ranks:
            for rank in sorted(self._settled):
                settled = _message(_MessageKind.SETTLE)
                send_unless_lost(self._transport, settled, rank, self._tag + 1)
            self._settled.clear()

    def _end(self, rank: int) -> None:
        if self._transport.rank != self._leader:
            return
        self._ended.add(rank)
        self._announce()
        self._settle()
        if self._ended >= self._ranks:
            self._tell_all(_MessageKind.BYE)

    def _tell_all(self, kind: _MessageKind, *values: float) -> None:
        for rank in sorted(self._ranks):
            self._tell(rank, kind, *values)

    def _tell(self, rank: int, kind: _MessageKind, *values: float) -> None:
        send_unless_lost(self._transport, _message(kind, *values), rank, self._tag)


class _Reports:
    """Puts the reports of all workers on a step together, for `observe`."""

    def __init__(self, worker: Worker, observe: Observe) -> None:
        self._worker = worker
        self._observe = observe
        self._of_step: dict[int, dict[int, list[float]]] = {}

    def add(self, step: int, rank: int, report: list[float]) -> bool:
        """Return whether, with this report of `rank`, all are to leave."""
        there = self._of_step.setdefault(step, {})
        there[rank] = report
        # Not all are there yet; nobody waits for a lost worker.
        if set(self._worker.workers.ranks) - self._worker.transport.lost() - there.keys():
            return False
        del self._of_step[step]
        reports = [there[rank] for rank in sorted(there)]
        samples, losses, seconds, rates, epochs, fractions, own, mean = zip(*reports, strict=True)
        counts = tuple(map(int, samples))
        together = _together(counts, losses, seconds, min(rates), min(epochs), min(fractions))
        together.squares, together.square = own, mean[0]
        return self._observe(together)


def step_of_round(reports: Sequence[Report], seconds: tuple[float, ...]) -> Step:
    """Make one step of a round of batches, before whose end all samples are done."""
    counts = tuple(report.stop - report.start for report in reports)
    losses = tuple(report.loss for report in reports)
    rates, epochs, fractions = zip(*((r.rate, r.epoch, r.fraction) for r in reports), strict=True)
    return _together(counts, losses, seconds, min(rates), max(epochs), max(fractions))


def _together(
    counts: tuple[int, ...],
    losses: tuple[float, ...],
    seconds: tuple[float, ...],
    rate: float,
    epoch: float,
    fraction: float,
) -> Step:
    """Return the step of all workers that have had `counts` samples each."""
    samples = sum(counts)
    total = sum(count * loss for count, loss in zip(counts, losses, strict=True))
    return Step(
        samples=samples,
        total_samples=samples,
        loss=total / samples if samples else 0.0,
        losses=losses,
        seconds=seconds,
        rates=(rate,),
        epoch=epoch,
        fraction=fraction,
        counts=counts,
    )


def counted(position: int, budget: int | None) -> Step:
    """Make a step with what rules that count know of the round that ends at `position`."""
    assert budget is not None, "an open end has no fractions"
    return Step(planned=position, fraction=position / budget)


def own_seconds(worker: Worker) -> float:
    """Return the seconds that `worker` has needed so far, without waiting for others."""
    traffic = worker.transport.traffic
    return worker.compute.seconds + traffic.seconds_communicating + traffic.seconds_in_background
