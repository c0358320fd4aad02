"""Collectives in the memory that ranks of one node share, in virtual time.

Which rounds of a schedule these are, transports/host.py decides. Each rank shows its elements,
forms its share of the sums, and takes the results, with a barrier after each of the first two. Long
vectors go through chunk by chunk. Of their barriers only the first and the last one are carried
out; what happens in between, the other barriers included, takes its time in one go.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.cluster.nodes import MemoryCosts
from orchestra.engines.simulation.kernel import Events
from orchestra.engines.simulation.network import Port
from orchestra.errors import PeerLost
from orchestra.schedules import Schedule
from orchestra.schedules.sums import Rounds, Stage, local_stages, rounds_of
from orchestra.transports.collective import StepKind, cuts_in_memory, steps_of
from orchestra.transports.framing import header_bytes
from orchestra.transports.protocol import CollectiveCall, Traffic
from orchestra.transports.shared_memory import CHUNK_BYTES, SMALL_BYTES

Call = Callable[[], object]


class Phase(NamedTuple):
    """Processor seconds of a rank, and then those that pass between the arrival of the last rank at
    a barrier and that all go on; None: there is no barrier."""

    seconds: float
    wake: float | None


@dataclass(frozen=True, eq=False)
class NodeStage:
    """Rounds that the ranks at `places`, all of one node, carry out among themselves.

    `stage` says what each of them does; None: all of them do the whole of an all-reduce.
    """

    places: tuple[int, ...]
    rounds: Rounds
    stage: Stage | None

    def phases(
        self, place: int, cuts: Sequence[int], itemsize: int, costs: MemoryCosts
    ) -> Sequence[Phase]:
        """Return what the rank at `place` does with a vector whose pieces begin at `cuts`."""
        shown, formed, taken, whole = (
            costs.copy * itemsize * elements for elements in self._elements(place, cuts)
        )
        barrier = costs.barrier * (len(self.places) - 1)
        if cuts[-1] * itemsize <= SMALL_BYTES:
            begin = Phase(costs.collective + shown + barrier, costs.wake)
            return begin, Phase(whole, None)
        chunks = ceil(cuts[-1] * itemsize / CHUNK_BYTES)
        # A pipeline: only the first chunk's showing and the last one's taking overlap with nothing.
        # Those between are charged in one go, and not with an event for each barrier
        # (docs/decisions/0082-shared-memory-in-virtual-time.md).
        first, last = shown / chunks, taken / chunks
        between = shown - first + formed + taken - last + chunks * barrier
        return (
            Phase(costs.collective + first + barrier, costs.wake),
            Phase(between, chunks * costs.wake),
            Phase(last, None),
        )

    def _elements(self, place: int, cuts: Sequence[int]) -> tuple[float, float, float, float]:
        """Return the elements that it shows, reads for its share of the sums, and takes, and those
        that it reads where each rank adds up everything by itself."""
        ranks, length = len(self.places), cuts[-1]
        stage = self.stage
        if stage is None:
            return length, length, length, ranks * length
        shown, taken = (
            sum(cuts[end] - cuts[first] for first, end in pieces[place])
            for pieces in (stage.shown, stage.taken)
        )
        formed = stage.shared.read(cuts) / ranks + stage.alone[place].read(cuts)
        return shown, formed, taken, stage.whole[place].read(cuts)


@dataclass(frozen=True, eq=False)
class NodeStages:
    """The stages of a schedule between ranks that are on known nodes.

    Attributes:
        sections: of each place that has stages, the rounds in their order: stages and others.
        numbers: of each stage, from 0 on.
    """

    sections: Mapping[int, Sequence[NodeStage | Rounds]] = field(default_factory=dict)
    numbers: Mapping[NodeStage, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sections)

    def hold(self, rounds: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which transfers, given by round and source, go through memory."""
        held = np.zeros((rounds.max(initial=-1) + 1, places.max(initial=-1) + 1), dtype=np.bool_)
        for place, sections in self.sections.items():
            for section in sections:
                if isinstance(section, NodeStage):
                    held[slice(*section.rounds), place : place + 1] = True
        return held[rounds, places]


@functools.lru_cache(maxsize=64)
def node_stages(schedule: Schedule, hosts: tuple[Hashable, ...]) -> NodeStages:
    """Return the stages of `schedule`, where ranks with equal `hosts` share memory.

    With no `hosts` nobody does.
    """
    places_of: dict[Hashable, list[int]] = defaultdict(list)
    for place, host in enumerate(hosts):
        places_of[host].append(place)
    sections: dict[int, Sequence[NodeStage | Rounds]] = {}
    numbers: dict[NodeStage, int] = {}
    for places in _with_rounds_of_their_own(schedule, list(places_of.values())):
        found: list[NodeStage | Rounds] = []
        if schedule.all_reduce and len(places) == schedule.ranks:
            everything = 0, len(rounds_of(schedule))
            found.append(NodeStage(tuple(places), everything, None))
        else:
            for part in local_stages(schedule, frozenset(places)):
                if isinstance(part, Stage):
                    found.append(NodeStage(part.ranks, part.rounds, part))
                else:
                    found.append(part)
        stages = [part for part in found if isinstance(part, NodeStage)]
        for stage in stages:
            numbers[stage] = len(numbers)
        for place in places if stages else ():
            sections[place] = [
                part for part in found if isinstance(part, tuple) or place in part.places
            ]
    return NodeStages(sections, numbers)


def _with_rounds_of_their_own(
    schedule: Schedule, groups: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Return those of `groups` that have a round with transfers among themselves alone."""
    group_of = np.zeros(schedule.ranks, dtype=np.int64)
    for number, places in enumerate(groups):
        group_of[places] = number
    found = np.zeros(len(groups), dtype=np.bool_)
    if 0 < len(groups) < schedule.ranks:
        for transfers in rounds_of(schedule):
            source, target = group_of[transfers[:, 0]], group_of[transfers[:, 1]]
            within = np.zeros_like(found)
            within[source[source == target]] = True
            within[np.concatenate([source, target])[np.tile(source != target, 2)]] = False
            found |= within
    return [places for places, is_found in zip(groups, found, strict=True) if is_found]


class Barriers:
    """Barriers in virtual time: who waits at one goes on when all have arrived."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._there: dict[Hashable, list[tuple[int, float, Call]]] = defaultdict(list)

    def arrive(
        self, key: Hashable, count: int, place: int, time: float, wake: float, then: Call
    ) -> None:
        """Let `place` wait from `time` on until `count` have arrived at the barrier `key`.

        All go on, in the order of their places, `wake` seconds after the last one's time.
        """
        there = self._there[key]
        there.append((place, time, then))
        if len(there) == count:
            del self._there[key]
            self._events.call_at(max(time for _, time, _ in there) + wake, _go_on, there)


def _go_on(there: list[tuple[int, float, Call]]) -> None:
    for _, _, then in sorted(there, key=lambda each: each[0]):
        then()


def carry_out(
    stage: Stage, call: CollectiveCall, port: Port, barriers: Barriers, traffic: Traffic
) -> None:
    """Let the present flow, of the rank of `port`, do its part of a stage of `call`.

    Raises:
        PeerLost: one of the others is gone.
    """
    vector, ranks, cuts = call.vector, call.group.ranks, cuts_in_memory(call)
    place = ranks.index(port.rank)
    together = NodeStage(stage.ranks, stage.rounds, stage)
    key = tuple(ranks[each] for each in stage.ranks), call.tag, stage.rounds
    shown = port.net.shown.setdefault(key, {})
    shown[place] = vector
    port.keep_order()
    port.spend(port.warm_up(), traffic)
    costs = port.net.overhead.in_memory
    for part, (seconds, wake) in enumerate(together.phases(place, cuts, vector.itemsize, costs)):
        port.spend(seconds, traffic)
        if wake is not None:
            _wait(port, barriers, (key, part), key[0], wake, traffic)
        if part == 0 and key in port.net.shown:  # the first to go on sees to the values of all
            _form(stage, port.net.shown.pop(key), cuts)
    for kind, _, peer, first, end, _ in steps_of(call, port.rank, *stage.rounds):
        if kind is StepKind.SEND:
            size = (end - first) * vector.itemsize + header_bytes(1)
            port.bytes_sent += size
            port.meter.count(ranks[peer], size)


def _wait(
    port: Port,
    barriers: Barriers,
    key: Hashable,
    ranks: Sequence[int],
    wake: float,
    traffic: Traffic,
) -> None:
    passed: list[bool] = []
    kernel, gone = port.net.kernel, port.mailbox.gone
    others = tuple(rank for rank in ranks if rank != port.rank)

    def go_on() -> None:
        passed.append(True)
        port.wake(go_on)

    barriers.arrive(key, len(ranks), ranks.index(port.rank), kernel.here(), wake, go_on)
    traffic.seconds_waiting += port.sleep_until(
        lambda: bool(passed) or not gone.keys().isdisjoint(others),
        lambda: (others, "to add up in shared memory"),
        go_on,
    )
    if not passed:
        lost = next(rank for rank in others if rank in gone)
        raise PeerLost(lost, gone[lost])


def _form(stage: Stage, vectors: Mapping[int, Tensor], cuts: Sequence[int]) -> None:
    """Give each rank's vector the values that `stage` leaves it with."""
    if next(iter(vectors.values())).is_meta:
        return  # shapes only
    with torch.no_grad():
        # Copies, since sums of one rank read the vectors of the others as they were.
        results = {place: vector.clone() for place, vector in vectors.items()}
        for place, result in results.items():
            stage.whole[place].form(vectors, result, cuts, 0, cuts[-1])
        for place, vector in vectors.items():
            vector.copy_(results[place])
