"""Averages of replicas in groups that one rank, the group generator, forms as workers ask."""

from __future__ import annotations

import contextlib
import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from orchestra.collectives import Group, all_reduce
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import wait_for_workers
from orchestra.exchange.average import note_buffer
from orchestra.transports.protocol import Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

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


class _Word(enum.IntEnum):
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
        self._perform(_Word.ASK)

    def settle(self) -> None:
        """Collective over the workers: return when all groups have been averaged."""
        self._perform(_Word.REST)
        wait_for_workers(self._worker)

    def leave(self) -> None:
        """Average with those who wait for this worker; nobody does afterwards."""
        self._perform(_Word.LEAVE)

    def close(self) -> None:
        """After `leave`: wait until all have left."""
        if self._flow is not None:
            self._flow.wait()

    def _perform(self, word: _Word) -> None:
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
            _Word.ASK: generator.ask,
            _Word.REST: generator.rest,
            _Word.LEAVE: generator.leave,
        }
        there = set(self._worker.workers.ranks) - transport.lost()
        while there:
            request = transport.receive(None, Tag.GROUP_REQUEST)
            try:
                word, worker = _Word(int(request.wait())), request.source
            except PeerLost as lost:
                there.discard(lost.rank)
                generator.leave(lost.rank)
                continue
            if word is _Word.LEAVE:
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
