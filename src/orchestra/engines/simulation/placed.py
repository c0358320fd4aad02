"""A plan between ranks of a cluster: on which links its messages cross, and what they cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from orchestra.engines.simulation.evaluate import (
    FREED,
    KIND,
    PAIR,
    REDUCES,
    Floats,
    Integers,
    Rows,
    evaluate,
)
from orchestra.engines.simulation.fluid import Resource
from orchestra.engines.simulation.network import Net, Port
from orchestra.engines.simulation.plan import HEADER, CollectivePlan, NodeStage
from orchestra.transports.collective import StepKind

# Attributes of an Enum are slow to look up.
SEND, TAKE, FREE, ADD = StepKind.SEND, StepKind.TAKE, StepKind.FREE, StepKind.ADD
BARRIER: Literal["barrier"] = "barrier"
ChargedStep = tuple[StepKind | Literal["barrier"], int, int, int, float, float]
"""A step of `CollectivePlan.steps` with its costs: kind, number, peer, bytes, seconds and more
seconds.

A plain tuple, as hot loops unpack it. The fields by kind:

- SEND: the bytes are those of the message with its header; the sender computes for `seconds` until
  the first byte leaves, and for `more seconds` until the last one has.
- TAKE: the same bytes; the receiver computes for `seconds`.
- ADD: the rank computes for `seconds`; number and peer are -1 where no message belongs to it.
- FREE: only number and peer are used.
- BARRIER: number is the barrier's, and peer how many ranks meet there; each computes for `seconds`
  before it, and goes on `more seconds` after the last arrival.
"""
SEVERAL = -1
"""In place of a rank's place, where several ranks send on a link, or receive."""
NO_PIECE = -1
"""In place of the ends of a piece, where a rank sends none in a round."""

Ranks = tuple[int, ...]

MAX_STEPS_KEPT = 1 << 16
"""The steps of all ranks are kept for schedules with so many messages at most."""


@dataclass(frozen=True)
class Ends:
    """When each rank ends its part, where its time went, and its links then (`evaluate.RANK`)."""

    clock: Floats
    waiting: Floats
    communicating: Floats
    links: NDArray[Any]


class PlacedPlan:
    """The messages of `plan` between `ranks`, on the links of `net`.

    `group` is a number for the same ranks on the same net.

    Attributes:
        contention_free: whether no link is shared by several pairs at a time, as far as the
            schedule tells.
        private: whether it is contention-free, and no rank outside can send over its links, except
            to one of its ranks: then its times can be evaluated at once.
        keeps_partners: whether no two pairs use a link, one after the other.
    """

    def __init__(self, net: Net, ranks: Ranks, plan: CollectivePlan, group: int) -> None:
        self.net, self.group, self.ranks, self.plan = net, group, ranks, plan
        self.place = {rank: place for place, rank in enumerate(ranks)}
        self._host = np.array([net.hosts[rank] for rank in ranks])  # equal: they share memory
        self.streams = {  # of each pair of places
            (source, target): net.stream(ranks[source], ranks[target])
            for source, target in plan.streamed
        }
        # By place, the bytes that the rank there sends to each other rank, by its slot.
        self.sent: list[dict[int, int]] = [{} for _ in ranks]
        for (source, target), size in plan.pairs.items():
            self.sent[source][net.members[ranks[target]]] = size
        # Those that it gets from each, and the seconds that they cross links of their own.
        self.arriving: list[dict[int, tuple[int, float]]] = [{} for _ in ranks]
        # With the only place that sends on it, and that receives; or `SEVERAL`.
        self.links: dict[Resource, tuple[int, int]] = {}
        self.wire_bytes: dict[Resource, float] = {}  # that cross each link
        for (source, target), stream in self.streams.items():
            size = plan.pairs.get((source, target), 0)
            on_wire = stream.on_wire(size, None)
            self.arriving[target][ranks[source]] = size, on_wire / stream.bandwidth
            ends = source, target
            for link in stream.route.resources:
                self.links[link] = _common(self.links.get(link, ends), ends)
                self.wire_bytes[link] = self.wire_bytes.get(link, 0.0) + on_wire
        self.contention_free = (
            not plan.stages
            and plan.sends_one_at_a_time
            and all(ends != (SEVERAL, SEVERAL) for ends in self.links.values())
        )
        self.private = self.contention_free and (
            len(ranks) == len(net.nodes)
            or (
                not any(stream.route.crosses_trunks for stream in self.streams.values())
                and not {net.nodes[rank] for rank in ranks}
                & {node for rank, node in enumerate(net.nodes) if rank not in self.place}
            )
        )
        self.keeps_partners = all(SEVERAL not in ends for ends in self.links.values())
        self.starts_slowly = any(stream.route.slow_start for stream in self.streams.values())
        # Processor seconds of each rank before all of it.
        self.beginning = net.overhead.collective if self.links or not plan.stages else 0.0
        self._steps: dict[int, Sequence[ChargedStep]] = {}

    def near(self, rank: int) -> frozenset[int]:
        """Return the places of ranks that share memory with `rank`, its own included."""
        return frozenset(np.flatnonzero(self._host == self.net.hosts[rank]).tolist())

    def shares_fairly(self, place: int) -> bool:
        """Return whether messages of the rank at `place` get even shares of links.

        Random ones could not be evaluated over arrays. Outside of the stopwatch nothing is
        drawn, so that runs with and without an evaluation agree.
        """
        return self.contention_free or not self.net.ports[self.ranks[place]].meter.running

    def count(self, index: int, port: Port, times: int, *, arriving: bool) -> None:
        """Count on `port`, of the rank at place `index`, what it has sent, and what arrived."""
        port.bytes_sent += times * self.plan.bytes_sent[index]
        port.meter.count_all(self.sent[index], times)
        for source, (size, seconds) in self.arriving[index].items() if arriving else ():
            port.mailbox.count(source, times * size, times * seconds)

    def steps(self, index: int) -> Sequence[ChargedStep]:
        """What the rank at place `index` does, message by message, and what it computes for it."""
        steps = self._steps.get(index)
        if steps is None:
            steps = tuple(self._charged(index))
            if sum(self.plan.messages_sent) <= MAX_STEPS_KEPT:
                self._steps[index] = steps
        return steps

    def _charged(self, index: int) -> Iterator[ChargedStep]:
        plan, stages = self.plan, self.plan.stages
        for section in stages.sections.get(index, [(0, None)]):
            if isinstance(section, NodeStage):
                cuts = (0, plan.length) if plan.schedule.slots else plan.cuts
                costs = self.net.overhead.in_memory
                phases = section.phases(index, cuts, plan.itemsize, costs)
                for part, (seconds, wake) in enumerate(phases):
                    if wake is None:
                        yield ADD, -1, -1, 0, seconds, 0.0
                    else:
                        number = len(phases) * stages.numbers[section] + part
                        yield BARRIER, number, len(section.places), 0, seconds, wake
            else:
                yield from self._messages(index, *section)
        if plan.added_slots_bytes:
            yield ADD, -1, -1, 0, self.net.overhead.add * plan.added_slots_bytes, 0.0

    def _messages(self, index: int, begin: int, stop: int | None) -> Iterator[ChargedStep]:
        plan, overhead = self.plan, self.net.overhead
        for kind, number, peer, first, end, _ in plan.steps(index, begin, stop):
            frame_bytes = (end - first) * plan.itemsize + HEADER
            near = peer >= 0 and self._host[index] == self._host[peer]
            if kind is SEND:
                cost = self.net.transfer_cost(frame_bytes, near)
                yield kind, number, peer, frame_bytes, cost.send_setup, cost.send_rest
            elif kind is TAKE:
                receiving = self.net.transfer_cost(frame_bytes, near).receiving
                yield kind, number, peer, frame_bytes, receiving, 0.0
            elif kind is ADD:
                yield kind, number, peer, 0, overhead.add * (end - first) * plan.itemsize, 0.0
            elif kind is FREE and not self.net.transfer_cost(frame_bytes, near).is_buffered:
                yield kind, number, peer, 0, 0.0, 0.0

    def ends(
        self,
        arrivals: Floats,
        rates: Floats,
        ranks: NDArray[Any],
        slowed: float,
    ) -> Ends:
        """Evaluate all rounds.

        Args:
            arrivals: by place, when each rank arrives.
            rates: seconds of a core of speed 1 that it computes in a second.
            ranks: their state (`evaluate.RANK`), which is changed in place. Its links are read; its
                clocks and waits are set here.
            slowed: how many times as long as alone messages cross the links.
        """
        ranks["clock"], ranks["waiting"], ranks["slowness"] = arrivals, 0.0, 1 / rates
        rows = self.rows if slowed == 1.0 else self.rows.slowed(slowed)
        evaluate(rows, ranks)
        last = self.net.overhead.add * self.plan.added_slots_bytes / rates
        clock, waiting = ranks["clock"] + last, ranks["waiting"].copy()
        return Ends(clock, waiting, clock - arrivals - waiting, ranks)

    @functools.cached_property
    def rows(self) -> Rows:
        """The messages as columns, with what each costs, and its way."""
        plan, table = self.plan, self.plan.table
        near = self._host[table.source] == self._host[table.target]
        kinds, kind_of = self._kinds(plan.elements, near)
        codes = table.source.astype(np.int64) * len(self.ranks) + table.target
        routes, route_of = self._routes(codes, plan.both_ways)
        # The receiver adds to what it sends itself, once that has left (as in `butterfly`).
        pieces = np.stack([table.first, table.end], axis=1).astype(np.int64)
        own = np.full((table.rounds * len(self.ranks), 2), NO_PIECE)
        own[plan.place_of(table.source)] = pieces
        freed = (own[plan.place_of(table.target)] == pieces).all(axis=1)
        return Rows(
            len(self.ranks),
            table.begin,
            table.source,
            table.target,
            (REDUCES * table.reduces + FREED * (table.reduces & freed)).astype(np.uint8),
            kind_of,
            route_of,
            kinds,
            routes,
        )

    def _kinds(
        self, elements: Integers, near: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[np.uint16]]:
        """Return the kinds of messages, and that of the last message of each transfer."""
        plan, overhead = self.plan, self.net.overhead
        codes, kind_of = np.unique(2 * elements + near, return_inverse=True)
        kinds = np.zeros(len(codes) + 2, KIND)  # the last two: messages of a whole segment

        def kind(elements: int, near: bool, whole: int) -> tuple[float | int, ...]:
            payload = elements * plan.itemsize
            *seconds, is_buffered = self.net.transfer_cost(payload + HEADER, near)
            sizes = payload + HEADER, not is_buffered, whole, len(codes) + near, 0
            return *seconds, overhead.add * payload, *sizes

        for number, code in enumerate(codes.tolist()):
            whole, rest = divmod(code // 2 - 1, plan.segment)
            kinds[number] = kind(rest + 1, bool(code % 2), whole)
        for is_near in (False, True):
            kinds[len(codes) + is_near] = kind(plan.segment, is_near, 0)
        assert len(kinds) <= 1 << 16, "too many unlike messages"
        return kinds, kind_of.astype(np.uint16)

    def _routes(
        self, codes: Integers, both_ways: NDArray[np.bool_]
    ) -> tuple[NDArray[Any], NDArray[np.uint32]]:
        """Return the distinct routes (`evaluate.PAIR`), and the number of each transfer's route.

        The `codes` of the transfers are source * ranks + target; `both_ways` are `Load.both_ways`.
        """
        places = sorted(self.streams)  # of source and target
        columns = [
            (stream.route.latency, stream.on_wire(1, both) / stream.bandwidth)
            for stream in (self.streams[pair] for pair in places)
            for both in (False, True)
        ]
        routes, numbers = np.unique(np.array(columns, PAIR), return_inverse=True)
        known = np.array([source * len(self.ranks) + target for source, target in places])
        route_of = numbers[2 * np.searchsorted(known, codes) + both_ways]
        return routes, route_of.astype(np.uint32)


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    sender, receiver = (a if a == b else SEVERAL for a, b in zip(one, other, strict=True))
    return sender, receiver
