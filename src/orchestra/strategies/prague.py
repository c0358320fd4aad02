"""Averages in groups that a generator forms, each worker at its own pace (Prague)."""

from __future__ import annotations

import enum
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from orchestra import exchange
from orchestra.errors import PeerLost
from orchestra.settings import MAX_RANKS, MAX_SEED, MAX_STEPS, setting
from orchestra.strategies.base import Replicas, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import Traits, WorkMode
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept
    from orchestra.transports.protocol import Pending, Transport
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class Prague(Replicas):
    """Average parameters with a group of workers after each step.

    Prague (Luo et al., ASPLOS 2020), called Ripples in arXiv:1909.08029. Worker i, at its own pace:

        x_i <- x_i - gamma g_i;  then, with a group G that has i as a member, for all k in G:
        x_k <- 1/|G| sum_{j in G} x_j

    The second is a partial all-reduce, P-Reduce. Its matrix F^G is doubly stochastic, so it keeps
    the mean of the replicas. Groups that share a worker are averaged one after the other. A group
    generator on the first worker's rank forms them: a worker asks it after its local step, and
    waits for the other members of its group.

    smart    The answer is the group that the worker is scheduled in (Group Buffer). If there is
             none, all workers that are in no group are divided into groups at random (Global
             Division), so that no two groups are in conflict.
    random   Each request forms a group of the worker and others drawn at random. The worker
             averages with it, and before with those formed with it by others meanwhile.

    The number of its requests shows how fast a worker is: one that is `threshold` or more behind
    the worker that asks is left out of the groups formed now. It is in one when it asks itself.

    The optimizer stays with the worker; no gradient is stale. The final parameters are the exact
    mean. Groups have at most `group_size` members, and all workers if there are no more.

    Only the paper's abstract was at hand: who is idle, how a division divides, that the filter
    serves both generators, and the defaults are readings of ours. Inter-Intra synchronization and
    static schedules are not here.
    """

    use = "for some slow workers among many, without a server: groups average by all-reduce"
    variants = (("Prague(3)", use),)

    group_size: int = setting(3, "workers in a group, at most", low=2, high=MAX_RANKS)
    _: KW_ONLY
    generator: Literal["smart", "random"] = setting(
        "smart", "smart: divides all idle workers at once; random: a group for each request"
    )
    threshold: int | None = setting(
        8, "requests a worker in a group may be behind; none: any", low=1, high=MAX_STEPS
    )
    seed: int = setting(0, "of the choice of groups", low=0, high=MAX_SEED)

    def traits(self, work: WorkMode = "shared") -> Traits:
        """Groups do not depend on the number of a worker's step."""
        return self._free_traits(work)

    def member(self, worker: Worker) -> PragueMember:
        return PragueMember(self, worker, worker.local_optimizer(), GroupAverage(worker, self))


@dataclass(eq=False)
class PragueMember(ReplicaMember[Prague]):
    """A worker that averages its parameters in groups after each of its steps."""

    groups: GroupAverage

    def open(self, *, fresh: bool) -> None:
        """Begin to form groups, on the first worker."""
        super().open(fresh=fresh)
        self.groups.open()

    def update(self) -> None:
        """Take the optimizer's step, then average in groups."""
        worker = self.worker
        worker.clip()
        worker.update_locally(self.optimizer)
        self.groups.average()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def settle(self, rest: Rest) -> None:
        """Wait until all groups have been averaged."""
        if rest.reason.ends:
            self.groups.leave()
        else:
            self.groups.settle()

    def rest(self, rest: Rest) -> Kept:
        kept = super().rest(rest)
        if rest.reason.ends:
            self.groups.close()
            self.worker.snapshots.renew(self.worker.step.consumed, self.worker.parameters)
        return kept


@dataclass(eq=False)
class Scheduled:
    """A group, and those of its members who do not know of it yet."""

    members: tuple[int, ...]
    missing: set[int]


class GroupGenerator(ABC):
    """Forms groups of workers, and puts them in order. Pure: no messages, no clock.

    A worker performs the groups of an answer in their order, and asks again once it has done so.
    All members of two groups have them in the same order, that in which they were formed. So no
    worker is averaged in two groups at a time, and workers never wait for each other in a circle.

    Args:
        workers: their ranks.
        prague: the settings: size of groups, threshold and seed.

    Attributes:
        requests: how often each worker has asked.
        draws: how often chance has decided.
    """

    def __init__(self, workers: Sequence[int], prague: Prague) -> None:
        self.prague = prague
        self.requests = dict.fromkeys(workers, 0)
        self.draws = 0
        self._active = set(workers)
        self._resting: set[int] = set()
        self._buffer: dict[int, list[Scheduled]] = {worker: [] for worker in workers}

    def ask(self, worker: int) -> list[tuple[int, ...]]:
        """Return the groups that `worker` performs now, one after the other; maybe none."""
        self._form(worker)
        # Counted after the draw: the filter compares with the requests before this one.
        self.requests[worker] += 1
        return self._take(worker)

    def leave(self, worker: int) -> list[tuple[int, ...]]:
        """Put `worker` into no further group; return those that it has still to perform."""
        self._active.discard(worker)
        if not self._active:
            self._active, self._resting = self._resting, set()
        return self._take(worker)

    def rest(self, worker: int) -> list[tuple[int, ...]]:
        """Like `leave`, until all have left or rest: from there on it is in groups again."""
        self._resting.add(worker)
        return self.leave(worker)

    def _take(self, worker: int) -> list[tuple[int, ...]]:
        """Return all groups of `worker` that it does not know yet: it has performed the others."""
        groups = list(self._buffer[worker])
        for group in groups:
            group.missing.discard(worker)
            # All members know of it, so that nobody has to be told any more.
            if not group.missing:
                for member in group.members:
                    self._buffer[member].remove(group)
        return [group.members for group in groups]

    @abstractmethod
    def _form(self, worker: int) -> None:
        """Form groups for a request of `worker`."""

    def _candidates(self, worker: int) -> list[int]:
        """Return all others that may be in a group which is formed for `worker`."""
        least = -math.inf
        if self.prague.threshold is not None:
            least = self.requests[worker] - self.prague.threshold
        others = (other for other in self.requests if other in self._active and other != worker)
        return [other for other in others if self.requests[other] > least]

    def _chance(self) -> random.Random:
        self.draws += 1
        # Seeded by its number: a checkpoint only keeps how many draws there were.
        return random.Random(f"{self.prague.seed}-{self.draws}")

    def _schedule(self, workers: Iterator[int] | Sequence[int]) -> None:
        """Schedule a group, unless it has only one member."""
        members = tuple(sorted(workers))
        if len(members) > 1:
            group = Scheduled(members, set(members))
            for member in members:
                self._buffer[member].append(group)


class SmartGenerator(GroupGenerator):
    """Answer with the group that a worker is scheduled in (Group Buffer, Global Division)."""

    def _form(self, worker: int) -> None:
        """Unless `worker` is in a group, divide all idle workers into groups of nearly one size."""
        if self._buffer[worker]:
            return
        idle = [other for other in self._candidates(worker) if not self._buffer[other]]
        self._chance().shuffle(idle)
        divided = iter([worker, *idle])
        count = -(-(len(idle) + 1) // self.prague.group_size)
        # Sizes differ by one at most. The worker that asks comes first: it is in a largest group.
        smaller, rest = divmod(len(idle) + 1, count)
        for number in range(count):
            self._schedule(islice(divided, smaller + (number < rest)))


class RandomGenerator(GroupGenerator):
    """Answer each request with a new group of the worker and others drawn at random."""

    def _form(self, worker: int) -> None:
        others = self._candidates(worker)
        count = min(self.prague.group_size - 1, len(others))
        self._schedule([worker, *self._chance().sample(others, count)])


class _GroupRequest(enum.IntEnum):
    """What a worker asks of the generator; each is answered with the groups to perform."""

    ASK = 0  # my step is done
    REST = 1  # I come to a quiet point
    LEAVE = 2  # I take no further step


class GroupAverage:
    """Averages this worker's parameters in groups. A generator on the first worker's rank forms
    the groups.

    A checkpoint keeps of it what the groups to come depend on: the draws and the requests.
    """

    def __init__(self, worker: Worker, prague: Prague) -> None:
        self._worker = worker
        self._holder = worker.workers.ranks[0]
        self._alone = len(worker.workers) == 1
        kind = SmartGenerator if prague.generator == "smart" else RandomGenerator
        self._generator = kind(worker.workers.ranks, prague)
        self._flow: Pending[None] | None = None

    def open(self) -> None:
        """Begin to form groups on the first worker, unless that goes on."""
        if self._flow is None and self._worker.rank == self._holder and not self._alone:
            self._flow = self._worker.transport.spawn(self._serve)

    def average(self) -> None:
        """Ask after a step, and average with each group of the answer: wait for its members."""
        self._perform(_GroupRequest.ASK)

    def settle(self) -> None:
        """Collective over the workers: return when all groups have been averaged."""
        self._perform(_GroupRequest.REST)
        exchange.wait_for_workers(self._worker)

    def leave(self) -> None:
        """Average with those who wait for this worker; nobody does afterwards."""
        self._perform(_GroupRequest.LEAVE)

    def close(self) -> None:
        """After `leave`: wait until all have left."""
        if self._flow is not None:
            self._flow.wait()

    def _perform(self, request: _GroupRequest) -> None:
        if self._alone:
            return
        transport = self._worker.transport
        transport.send(torch.tensor([request]), self._holder, Tag.GROUP_REQUEST).wait()
        answer = iter(transport.receive(self._holder, Tag.GROUP).wait().tolist())
        while size := next(answer):
            self._reduce(tuple(islice(answer, size)))

    def _reduce(self, ranks: tuple[int, ...]) -> None:
        """P-Reduce: replace the members' x by their mean.

        Each member performs its groups one after the other, so that messages of one group do not
        overtake those of another: one tag is enough.
        """
        worker = self._worker
        x = worker.parameters
        exchange.charge(worker, "mix", x.numel(), lambda: x.mul_(1 / len(ranks)))
        exchange.note_buffer(worker, exchange.ring_sum(worker, x, Tag.GROUP_VALUES, ranks))

    def _serve(self, transport: Transport) -> None:
        """In the background of the first worker, answer at once until all workers have left."""
        generator = self._generator
        answers = {
            _GroupRequest.ASK: generator.ask,
            _GroupRequest.REST: generator.rest,
            _GroupRequest.LEAVE: generator.leave,
        }
        there = set(self._worker.workers.ranks) - transport.lost()
        while there:
            message = transport.receive(None, Tag.GROUP_REQUEST)
            try:
                request, worker = _GroupRequest(int(message.wait())), message.source
            except PeerLost as lost:
                there.discard(lost.rank)
                # The run ends by name: nobody is put into groups with it meanwhile.
                generator.leave(lost.rank)
                continue
            if request is _GroupRequest.LEAVE:
                there.discard(worker)
            groups = answers[request](worker)
            numbers = [number for group in groups for number in (len(group), *group)]
            with suppress(PeerLost):
                # At once, before the other members are there: a worker waits inside the all-reduce,
                # where the watcher sees for whom.
                transport.send(torch.tensor([*numbers, 0]), worker, Tag.GROUP).wait()

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, at a quiet point: there the flow only waits."""
        generator = self._generator
        return {"draws": generator.draws, "requests": list(generator.requests.values())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        generator = self._generator
        generator.draws = saved["draws"]
        generator.requests = dict(zip(generator.requests, saved["requests"], strict=True))
