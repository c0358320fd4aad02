"""A step that all workers leave after, agreed on while each goes at its own pace."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable

import torch

from orchestra.errors import PeerLost
from orchestra.transports.protocol import Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

LEASE = 4
"""Steps that a worker goes on without asking. More cost less, and a wish takes longer."""

Judge = Callable[[int, int, list[float]], bool]
"""judge(step, rank, report): take in a worker's report; True to wish for a common step now."""


class Word(enum.IntEnum):
    """What a message of the control flows says; most carry a number of a step."""

    RENEW = 0  # my main flow has done that many steps, and asks for more
    GRANT = 1  # it may go up to that step
    WISH = 2  # let us leave at a common step
    REPORT = 3  # of a worker's step, for the judge
    REQUEST = 4  # promise a step that you will not go beyond
    PROMISE = 5  # this one
    ANNOUNCE = 6  # everyone leaves after that step
    SETTLE = 7  # I wait until all reports have been judged, or: they have
    END = 8  # I have finished, after so many steps
    BYE = 9  # all have finished


class CommonStep:
    """Finds, when anyone wishes for it, a step that no worker has passed, for all to leave after.

    Each rank has a control flow, which answers while the main flow computes or is blocked. It
    grants the main flow a lease, a step up to which it goes without asking. On a wish the flow
    of the chief asks all flows for a promise, which is that lease, and announces the largest.
    A main flow at the end of its lease waits until the announcement, if a promise was given.
    So nobody has passed the step announced, and nobody waits for a main flow: there is no
    deadlock, whatever main flows wait for among themselves. Without a wish it costs a message
    to oneself every few steps.

    All workers take part; the first one is the chief. `steps` is how many steps this one has done;
    `level` keeps apart those that exist at the same time. Reports go to the chief, whose `judge`
    may wish for everyone.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        steps: int = 0,
        level: int = 0,
        judge: Judge | None = None,
    ) -> None:
        self._transport = worker.transport
        self._chief = worker.workers.ranks[0]
        self._tag = Tag.COMMON_STEP + 2 * level
        self._steps = steps
        self._lease = steps + LEASE
        self._final = False
        self._wished = False
        self._judge = judge
        self._flow: Task[None] | None = None
        ranks = set(worker.workers.ranks)
        if len(ranks) > 1:
            control = _Control(ranks, self._chief, self._tag, self._lease, judge)
            self._flow = worker.transport.spawn(control.run)

    def reached(self, steps: int, *, wish: bool) -> bool:
        """After step number `steps` of this worker: whether it is the common one.

        With `wish` this worker wants one to be found. A worker alone has its wish at once.
        """
        self._steps = steps
        if self._flow is None:
            self._wished = self._wished or wish
            return self._wished
        if wish and not self._wished:
            self._wished = True
            self._tell(self._chief, Word.WISH)
        if steps >= self._lease and not self._final:
            self._lease, self._final = self._renew(steps)
        return self._final and steps >= self._lease

    def report(self, steps: int, *values: float) -> None:
        """Tell the chief's judge what this worker saw in its step."""
        if self._flow is not None:
            self._tell(self._chief, Word.REPORT, steps, *values)
        elif self._judge is not None:
            self._wished = self._judge(steps, self._transport.rank, list(values)) or self._wished

    def settle(self) -> None:
        """Collective over the workers, after a step of all: every report has been judged."""
        if self._flow is not None:
            self._tell(self._chief, Word.SETTLE)
            self._transport.receive(self._chief, self._tag + 1).wait()

    def close(self) -> None:
        """Collective over the workers: end the control flow."""
        if self._flow is not None:
            self._tell(self._chief, Word.END, self._steps)
            self._flow.wait()
            self._flow = None

    def _renew(self, steps: int) -> tuple[int, bool]:
        """The new lease, and whether it ends at the common step."""
        own = self._transport.rank
        self._tell(own, Word.RENEW, steps)
        word, number = self._transport.receive(own, self._tag + 1).wait().tolist()
        if word == Word.END:
            assert self._flow is not None
            self._flow.wait()  # raises what the control flow raised
        return int(number), word == Word.ANNOUNCE

    def _tell(self, rank: int, word: Word, *values: float) -> None:
        _send(self._transport, rank, self._tag, word, *values)


def _send(transport: Transport, rank: int, tag: int, *values: float) -> None:
    transport.send(torch.tensor(values, dtype=torch.float64), rank, tag).wait()


class _Control:
    """The control flow of one rank; that of the chief also gathers and announces."""

    def __init__(
        self, ranks: set[int], chief: int, tag: int, lease: int, judge: Judge | None
    ) -> None:
        self._ranks = ranks
        self._chief = chief
        self._tag = tag
        self._lease = lease
        self._judge = judge
        self._promised = False
        self._asked = False  # the main flow waits for an answer
        self._common: int | None = None
        self._done = False
        self._requested = False  # from here on of the chief alone
        self._announced = False
        self._promises: dict[int, int] = {}
        self._ended: set[int] = set()
        self._settled: set[int] = set()

    def run(self, transport: Transport) -> None:
        """Answer until everyone has finished."""
        self._transport = transport
        try:
            while not self._done:
                self._answer_next()
        except BaseException:
            _send(transport, transport.rank, self._tag + 1, Word.END, 0)
            raise

    def _answer_next(self) -> None:
        handle = self._transport.receive(None, self._tag)
        try:
            word, *values = handle.wait().tolist()
        except PeerLost as lost:
            if lost.rank == self._chief:
                raise
            self._end(lost.rank)
        else:
            self._take(Word(int(word)), handle.source, values)

    def _take(self, word: Word, source: int, values: list[float]) -> None:
        match word:
            case Word.RENEW:
                self._renew(int(values[0]))
            case Word.REQUEST:
                self._promised = True
                self._tell(self._chief, Word.PROMISE, self._lease)
            case Word.ANNOUNCE:
                self._common = int(values[0])
                if self._asked:
                    self._grant()
            case Word.BYE:
                self._done = True
            case Word.WISH:
                self._request()
            case Word.REPORT:
                assert self._judge is not None
                if self._judge(int(values[0]), source, values[1:]):
                    self._request()
            case Word.PROMISE:
                self._promises[source] = int(values[0])
                self._announce()
            case Word.SETTLE:
                self._settled.add(source)
                self._settle()
            case Word.END:
                self._promises[source] = int(values[0])
                self._end(source)

    def _renew(self, steps: int) -> None:
        if self._promised:
            self._asked = True
            if self._common is not None:
                self._grant()
            return
        self._lease = steps + LEASE
        _send(self._transport, self._transport.rank, self._tag + 1, Word.GRANT, self._lease)

    def _grant(self) -> None:
        assert self._common is not None
        own = self._transport.rank
        _send(self._transport, own, self._tag + 1, Word.ANNOUNCE, self._common)

    # The chief's part

    def _request(self) -> None:
        if not self._requested:
            self._requested = True
            self._tell_all(Word.REQUEST)

    def _announce(self) -> None:
        everyone = self._promises.keys() | self._ended >= self._ranks
        if self._promises and everyone and not self._announced:
            self._announced = True
            self._tell_all(Word.ANNOUNCE, max(self._promises.values()))

    def _settle(self) -> None:
        if self._settled and self._settled | self._ended >= self._ranks:
            for rank in sorted(self._settled):
                with contextlib.suppress(PeerLost):
                    _send(self._transport, rank, self._tag + 1, Word.SETTLE)
            self._settled.clear()

    def _end(self, rank: int) -> None:
        if self._transport.rank != self._chief:
            return
        self._ended.add(rank)
        self._announce()
        self._settle()
        if self._ended >= self._ranks:
            self._tell_all(Word.BYE)

    def _tell_all(self, word: Word, *values: float) -> None:
        for rank in sorted(self._ranks):
            self._tell(rank, word, *values)

    def _tell(self, rank: int, word: Word, *values: float) -> None:
        with contextlib.suppress(PeerLost):
            _send(self._transport, rank, self._tag, word, *values)
