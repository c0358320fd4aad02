"""Replicas averaged by two or by a group, while other workers compute.

`PairwiseAverage` is that of AD-PSGD; `GroupGenerator` and `GroupAverage` are those of Prague.
"""

from __future__ import annotations

import contextlib
import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import wait_for_workers
from orchestra.exchange.average import note_buffer
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

NOBODY = -1


class _PairWord(enum.IntEnum):
    """What a message to a flow says."""

    GIVE = 0  # from the main flow: x is yours, average it with that worker first
    TAKE = 1  # from the main flow: let me have x
    ASK = 2  # from another flow: average with my x, which I have sent before
    END = 3  # from the main flow


class PairwiseAverage:
    """This worker's x, which belongs in turn to the main flow and to a background flow.

    While the flow has it, the flow of an active worker (an even one) asks that of a passive
    worker (an odd one) to replace both their x by the mean, and that of a passive one answers.
    Active flows wait for passive ones, passive flows for main flows that compute, and those
    for nobody: there is no deadlock.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.active = worker.workers.index(worker.rank) % 2 == 0  # it asks; the others answer
        self._x = torch.empty_like(worker.parameters)
        self._other = torch.empty_like(worker.parameters)
        self._held = True  # by the main flow
        self._replies: dict[int, Handle] = {}
        self._flow: Task[None] | None = None
        if len(worker.workers) > 1:
            self._flow = worker.transport.spawn(self._run)

    def give(self, partner: int | None = None) -> None:
        """Let the flow have the parameters, and average them with the worker number `partner`."""
        if self._flow is None or not self._held:
            return
        self._held = False
        self._copy(self._worker.parameters, self._x)
        rank = NOBODY if partner is None else self._worker.workers.ranks[partner]
        self._tell(Tag.HAND_OVER, _PairWord.GIVE, rank)

    def take(self) -> int:
        """Have the parameters back; how many averages were made of them meanwhile."""
        if self._flow is None or self._held:
            return 0
        self._tell(Tag.PAIR, _PairWord.TAKE)
        averages = int(self._worker.transport.receive(self._worker.rank, Tag.TAKEN).wait())
        if averages < 0:
            self._flow.wait()  # raises what the flow raised
        self._held = True
        self._copy(self._x, self._worker.parameters)
        return averages

    def _copy(self, values: Tensor, into: Tensor) -> None:
        work = Work("encode", values.numel())
        self._worker.compute.run(work, lambda: into.copy_(values))

    def settle(self) -> None:
        """Collective over the workers: have the parameters, when nobody averages any more."""
        if self._flow is None:
            return
        if self.active:
            self.take()
        else:
            self.give()  # goes on answering those who are not yet here
        wait_for_workers(self._worker)
        self.take()

    def close(self) -> None:
        """After `settle`: end the flow."""
        if self._flow is not None:
            self._tell(Tag.HAND_OVER, _PairWord.END)
            self._flow.wait()
            self._flow = None

    def _tell(self, tag: int, *words: int) -> None:
        self._worker.transport.send(torch.tensor(words), self._worker.rank, tag).wait()

    def _run(self, transport: Transport) -> None:
        """The background flow: average while the main flow computes."""
        try:
            while True:
                given = transport.receive(transport.rank, Tag.HAND_OVER).wait().tolist()
                if given[0] == _PairWord.END:
                    return
                averages = self._serve(transport, given[1])
                transport.send(torch.tensor([averages]), transport.rank, Tag.TAKEN).wait()
        except BaseException:
            transport.send(torch.tensor([-1]), transport.rank, Tag.TAKEN)
            raise

    def _serve(self, transport: Transport, partner: int) -> int:
        """Average until the main flow takes x; how many averages were made."""
        averages = 0
        if partner != NOBODY:
            self._ask(transport, partner)
            averages += 1
        while True:
            request = transport.receive(None, Tag.PAIR)
            if request.wait()[0] == _PairWord.TAKE:
                return averages
            self._answer(transport, request.source)
            averages += 1

    def _ask(self, transport: Transport, partner: int) -> None:
        arriving = transport.receive(partner, Tag.PAIR_MEAN, self._other)
        # The request comes last: who reads it has all of x.
        sending = transport.send(self._x, partner, Tag.PAIR_VALUES)
        transport.send(torch.tensor([_PairWord.ASK]), partner, Tag.PAIR).wait()
        sending.wait()
        arriving.wait()
        self._average()

    def _answer(self, transport: Transport, asker: int) -> None:
        transport.receive(asker, Tag.PAIR_VALUES, self._other).wait()
        if asker in self._replies:
            self._replies.pop(asker).wait()
        # From a copy, so that nobody waits for a slow asker.
        self._replies[asker] = transport.send(self._x.clone(), asker, Tag.PAIR_MEAN)
        self._average()

    def _average(self) -> None:
        """Both sides do this, and get the same bits."""
        work = Work("mix", self._x.numel())
        self._worker.compute.run(work, lambda: self._x.add_(self._other).mul_(0.5))


Scheme = Literal["smart", "random"]


@dataclass(eq=False)
class Scheduled:
    """A group, and those of its members who do not know of it yet."""

    members: tuple[int, ...]
    missing: set[int]


class GroupGenerator:
    """Forms groups of workers, and puts them in order. Pure: no messages, no clock.

    A worker performs the groups of an answer in their order, and asks again once it has done so.
    All members of two groups have them in the same order, that in which they were formed. So no
    worker is averaged in two groups at a time, and workers never wait for each other in a circle.

    Args:
        workers: their ranks.
        size: members of a group, at most.
        scheme: "random": each request forms a group. "smart": a request is answered with the group
            that the worker is scheduled in; if there is none, all idle workers are divided.
        threshold: a worker that has asked so many times less than the one that asks now is in no
            group formed now; None: nobody is left out.
        seed: of all draws.

    Attributes:
        requests: how often each worker has asked.
        draws: how often chance has decided.
    """

    def __init__(
        self, workers: Sequence[int], size: int, scheme: Scheme, threshold: int | None, seed: int
    ) -> None:
        self.requests = dict.fromkeys(workers, 0)
        self.draws = 0
        self._size, self._scheme, self._threshold, self._seed = size, scheme, threshold, seed
        self._active = set(workers)
        self._resting: set[int] = set()
        self._buffer: dict[int, list[Scheduled]] = {worker: [] for worker in workers}

    def ask(self, worker: int) -> list[tuple[int, ...]]:
        """The groups that `worker` performs now, one after the other; maybe none."""
        if self._scheme == "random":
            self._draw(worker)
        elif not self._buffer[worker]:
            self._divide(worker)
        self.requests[worker] += 1
        return self._take(worker)

    def leave(self, worker: int) -> list[tuple[int, ...]]:
        """`worker` is in no group any more, once it has performed these."""
        self._active.discard(worker)
        if not self._active:
            self._active, self._resting = self._resting, set()
        return self._take(worker)

    def rest(self, worker: int) -> list[tuple[int, ...]]:
        """The same, until all have left or rest: from there on it is in groups again."""
        self._resting.add(worker)
        return self.leave(worker)

    def _take(self, worker: int) -> list[tuple[int, ...]]:
        """Return all groups of `worker` that it does not know yet: it has performed the others."""
        groups = list(self._buffer[worker])
        for group in groups:
            group.missing.discard(worker)
            if not group.missing:
                for member in group.members:
                    self._buffer[member].remove(group)
        return [group.members for group in groups]

    def _divide(self, worker: int) -> None:
        """Global division: groups of all that are idle, as large and as equal as can be."""
        idle = [other for other in self._candidates(worker) if not self._buffer[other]]
        self._chance().shuffle(idle)
        divided = iter([worker, *idle])
        count = -(-(len(idle) + 1) // self._size)
        smaller, rest = divmod(len(idle) + 1, count)
        for number in range(count):
            self._schedule(islice(divided, smaller + (number < rest)))

    def _draw(self, worker: int) -> None:
        others = self._candidates(worker)
        self._schedule([worker, *self._chance().sample(others, min(self._size - 1, len(others)))])

    def _candidates(self, worker: int) -> list[int]:
        """All others that may be in a group which is formed for `worker`."""
        requests, threshold = self.requests, self._threshold
        return [
            other
            for other in requests
            if other in self._active
            and other != worker
            and (threshold is None or requests[worker] - requests[other] < threshold)
        ]

    def _chance(self) -> random.Random:
        self.draws += 1
        return random.Random(f"{self._seed}-{self.draws}")

    def _schedule(self, workers: Iterator[int] | Sequence[int]) -> None:
        """A group of one is none."""
        members = tuple(sorted(workers))
        if len(members) > 1:
            group = Scheduled(members, set(members))
            for member in members:
                self._buffer[member].append(group)


class _GroupWord(enum.IntEnum):
    """What a worker tells the generator; each is answered with the groups to perform."""

    ASK = 0  # my step is done
    REST = 1  # I come to a quiet point
    LEAVE = 2  # I take no further step


class GroupAverage:
    """Averages this worker's parameters in groups, formed by a generator beside the first worker.

    A checkpoint keeps of it what the groups to come depend on: the draws and the requests.
    """

    def __init__(
        self, worker: Worker, size: int, scheme: Scheme, threshold: int | None, seed: int
    ) -> None:
        self._worker = worker
        self._holder = worker.workers.ranks[0]
        self._alone = len(worker.workers) == 1
        self._generator = GroupGenerator(worker.workers.ranks, size, scheme, threshold, seed)
        self._flow: Task[None] | None = None
        if worker.rank == self._holder and not self._alone:
            self._flow = worker.transport.spawn(self._serve)

    def average(self) -> None:
        """After a step: ask, and average with each group of the answer; waits for its members."""
        self._perform(_GroupWord.ASK)

    def settle(self) -> None:
        """Collective over the workers: return when all groups have been averaged."""
        self._perform(_GroupWord.REST)
        wait_for_workers(self._worker)

    def leave(self) -> None:
        """Average with those who wait for this worker; nobody does afterwards."""
        self._perform(_GroupWord.LEAVE)

    def close(self) -> None:
        """After `leave`: wait until all have left."""
        if self._flow is not None:
            self._flow.wait()

    def _perform(self, word: _GroupWord) -> None:
        if self._alone:
            return
        transport = self._worker.transport
        transport.send(torch.tensor([word]), self._holder, Tag.GROUP_REQUEST).wait()
        answer = iter(transport.receive(self._holder, Tag.GROUP).wait().tolist())
        while size := next(answer):
            self._reduce(tuple(islice(answer, size)))

    def _reduce(self, ranks: tuple[int, ...]) -> None:
        """P-Reduce: the members' x become their mean.

        Each member performs its groups one after the other, so that messages of one group do not
        overtake those of another: one tag is enough.
        """
        worker = self._worker
        x = worker.parameters
        worker.compute.run(Work("mix", x.numel()), lambda: x.mul_(1 / len(ranks)))
        note_buffer(worker, all_reduce(worker.transport, x, "ring", Group(ranks), Tag.GROUP_VALUES))

    def _serve(self, transport: Transport) -> None:
        """In the background of the first worker, answer at once until all workers have left."""
        generator = self._generator
        answers = {
            _GroupWord.ASK: generator.ask,
            _GroupWord.REST: generator.rest,
            _GroupWord.LEAVE: generator.leave,
        }
        there = set(self._worker.workers.ranks) - transport.lost()
        while there:
            request = transport.receive(None, Tag.GROUP_REQUEST)
            try:
                word, worker = _GroupWord(int(request.wait())), request.source
            except PeerLost as lost:
                there.discard(lost.rank)
                generator.leave(lost.rank)
                continue
            if word is _GroupWord.LEAVE:
                there.discard(worker)
            numbers = [number for group in answers[word](worker) for number in (len(group), *group)]
            with contextlib.suppress(PeerLost):
                transport.send(torch.tensor([*numbers, 0]), worker, Tag.GROUP).wait()

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps, at a quiet point: there the flow only waits."""
        generator = self._generator
        return {"draws": generator.draws, "requests": list(generator.requests.values())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        generator = self._generator
        generator.draws = saved["draws"]
        generator.requests = dict(zip(generator.requests, saved["requests"], strict=True))
