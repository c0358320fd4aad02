"""A worker pushes its gradient, and pulls values, in parts while it computes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orchestra.coordinator.rest import Rest
from orchestra.exchange.channel import ServerChannel
from orchestra.exchange.servers import ServerRules
from orchestra.parameter_server.beside import ServerBeside
from orchestra.parameter_server.messages import Answer, Kind, Push, Request, encode_request
from orchestra.parameter_server.placement import Part, Slice, cut_into_parts
from orchestra.transports.protocol import Handle, Pending, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

PART_BYTES = 1 << 20
"""Least bytes of a part, unless buckets are smaller: what is left to exchange after backward.

P3 has 200 KB, BytePS (Jiang et al., OSDI 2020) up to 4 MB.
"""

UNDER_WAY = 2
"""Parts that a worker sends to a server at a time: the next does not wait out a latency."""

PULLS, PUSHES = 1, 2
"""Lanes of background flows: the first one takes in values; those from `PUSHES` on push, to one
server each, so that no server waits while another one is busy."""


def parts_of(worker: Worker, slices: Sequence[Slice]) -> list[Part]:
    """Return the parts in which gradients are pushed, the same on all ranks. Empty: by slices.

    As with all-reduce, a model of one bucket is not worth it. What clips needs the whole gradient
    first. In a loop of the user's own, which may change it before the update, and look at the
    parameters, nothing leaves or arrives before.
    """
    one_bucket = worker.layout.bytes <= worker.bucket_bytes or not worker.overlap
    whole = worker.own_loop or worker.clip_norm is not None
    if one_bucket or whole or not all(part.pieces for part in slices):
        return []
    itemsize = worker.layout.dtype.itemsize
    most = worker.bucket_bytes // itemsize
    return cut_into_parts(slices, min(most, PART_BYTES // itemsize), most)


class PartedChannel(ServerChannel):
    """Pushes each part of the gradient as soon as backward has filled it; pulls values by parts.

    Background flows of `worker`, one for each server, push parts in their order. The push itself,
    which only tells of the gradient, follows when backward is over. Another flow takes in the
    values, while the next forward pass begins with the layers that are there.

    Where servers `apply_per_part`, gradients are weighted here, a request follows each part, and
    servers send the values of a part once all workers have pushed it. Other servers send values
    once they have applied the push, those of the first layers first (P3: Jayarajan et al., MLSys
    2019). Averages, where servers return such, replace the gradients.
    """

    def __init__(
        self,
        worker: Worker,
        slices: Sequence[Slice],
        rules: ServerRules,
        beside: ServerBeside | None = None,
    ) -> None:
        assert rules.compression is None
        super().__init__(worker, slices, rules.queue_shares, beside=beside)
        self._parts = rules.parts
        self._apply_per_part = rules.apply_per_part
        self._averages = not rules.application.holds_model
        self._there = [False] * len(worker.layout.slots)  # slots that have their gradient
        self._next = 0  # the first part that was not pushed yet
        self._pushed: dict[int, Pending[None]] = {}  # the last part that was, by server
        self._leaving: dict[int, deque[list[Handle]]] = defaultdict(deque)  # parts, by server
        self._into: Tensor | None = None  # takes in values; None unless open
        self._pulling: dict[int, Pending[Any]] = {}  # by part, unless its values are there
        self._missing = 0  # parts before this one are not known to be there

    def open(self) -> None:
        """Begin to push in backward, unless that goes on already."""
        if self._into is not None:
            return
        self._into = self.worker.gradients.vector
        if not self._averages:
            # A second vector: autograd may still need the old values while the new ones arrive.
            self._into = torch.empty_like(self.worker.parameters)
        self.worker.gradients.on_ready = self._slots_are_ready

    def collect(self) -> None:
        """Gather the gradient into the flat vector, weighted if servers add it up by parts."""
        self.worker.gradients.collect_rest(self._weight)

    @property
    def _weight(self) -> float:
        """The factor by which gradients are multiplied before they are pushed."""
        return self.worker.step.weight if self._apply_per_part else 1.0

    def exchange(self, push: Push, gradient: Tensor, into: Tensor) -> list[Answer]:
        """Push what is left of the gradient; return the servers' answers.

        Values become the parameters when they arrive, as averages do the gradients.
        """
        worker = self.worker
        self._settle()
        while self._next < len(self._parts):
            self._push_next()
        for pushed in self._pushed.values():
            pushed.wait()
        self._next, self._there = 0, [False] * len(self._there)
        assert self._into is not None
        vectors: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self.slices)
        if not self._apply_per_part:
            self._pull()
            # No part of the slice that is here has been pushed before.
            vectors = [
                (gradient[part.first : part.end], self._into[part.first : part.end])
                if self._is_beside(place)
                else (None, None)
                for place, part in enumerate(self.slices)
            ]
        answers = self._tell(push, vectors)
        self._missing = len(self._parts)
        if self._averages:
            self._settle()
        else:
            # The vectors change places, without a copy.
            self._into = worker.move_parameters(self._into)
            worker.arriving = self
        return answers

    def await_for(self, slot: int) -> None:
        """Called in forward: wait for the values of the parameter `slot`, and of all after it."""
        while self._missing and self._parts[self._missing - 1].tensors.stop > slot:
            self._missing -= 1
            needed = self._parts[self._missing].tensors.stop - 1
            if self._missing in self._pulling:
                self.worker.compute.wait_before_using(needed, self._pulling[self._missing].wait)

    def _settle(self) -> None:
        """Wait until all values are there."""
        while self._missing:
            self._missing -= 1
            if self._missing in self._pulling:
                self._pulling[self._missing].wait()
        self.worker.arriving = None

    def pause(self, rest: Rest) -> bool:
        """Take in all values; then push no more until every worker has paused too."""
        self._settle()
        return super().pause(rest)

    def leave(self) -> None:
        """Wait for what is under way, end the background flows, and push no more."""
        self._settle()
        self.worker.gradients.on_ready = None
        self.worker.transport.end_background()
        super().leave()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """Called in backward: collect slots, and push parts that are complete, in their order."""
        worker = self.worker
        worker.gradients.collect_each(first, end, self._weight)
        self._there[first:end] = [True] * (end - first)
        while self._next < len(self._parts):
            tensors = self._parts[self._next].tensors
            if not all(self._there[tensors.start : tensors.stop]):
                return
            # In virtual time a part is there when backward has come to its last tensor.
            worker.compute.advance_to(tensors[-1])
            self._push_next()

    def _push_next(self) -> None:
        worker, part = self.worker, self._parts[self._next]
        if not self._next:
            self._settle()  # a server takes the next push in where it sends the values from
        # Servers answer parts as they come: receives are posted before the first push.
        if self._apply_per_part and not self._next:
            self._pull()
        self._next += 1
        beside = self._beside if self._is_beside(part.place) else None
        if beside is not None and not self._apply_per_part:
            return  # the server finds it where it is
        gradient = worker.gradients.vector[part.first : part.end]
        to, leaving = self.slices[part.place].rank, self._leaving[part.place]
        request = self._request_for(part) if self._apply_per_part else None

        def hand_over(transport: Transport) -> None:
            assert beside is not None
            assert request is not None
            assert self._into is not None
            beside.push_part(transport, request, gradient, self._into[part.first : part.end])

        def send(transport: Transport) -> None:
            asks = request is not None  # else the push itself asks, behind all parts
            handles = [transport.send(gradient, to, Tag.GRADIENT, more=asks)]
            if request is not None:
                handles.append(transport.send(encode_request(request), to, Tag.REQUEST))
            leaving.append(handles)
            while len(leaving) > UNDER_WAY:
                for handle in leaving.popleft():
                    handle.wait()

        push_part = send if beside is None else hand_over
        self._pushed[part.place] = worker.transport.in_background(push_part, PUSHES + part.place)

    def _request_for(self, part: Part) -> Request:
        """Return the request that follows `part`, with what the server has to know to apply it."""
        worker, step = self.worker, self.worker.step
        used = tuple(worker.gradients.used[part.tensors.start : part.tensors.stop])
        push = Push(
            worker.rank, self.clock + 1, step.samples, step.total_samples, 0.0, False,
            step.rates, used,
        )  # fmt: skip
        return Request(worker.rank, Kind.PART, push, part.number)

    def _pull(self) -> None:
        """Begin to receive the values of all parts, in the order in which they are sent."""
        parts, into, begin = self._parts, self._into, self.worker.transport.in_background
        assert into is not None
        # Parts begin with the last layer. A server that applies parts answers in the order of
        # pushes; others answer when they have all, beginning with the layers that forward needs
        # first.
        numbers = range(len(parts)) if self._apply_per_part else range(len(parts))[::-1]
        order = [number for number in numbers if not self._is_beside(parts[number].place)]
        arriving: dict[int, Handle] = {}

        def post(transport: Transport) -> None:
            for number in order:
                there = into[parts[number].first : parts[number].end]
                rank = self.slices[parts[number].place].rank
                arriving[number] = transport.receive(rank, Tag.VALUES, there)

        def wait(number: int, transport: Transport) -> Tensor:
            return arriving[number].wait()

        begin(post, PULLS)
        self._pulling = {number: begin(partial(wait, number), PULLS) for number in order}
        if self._beside is not None and self._apply_per_part:
            self._pulling |= {
                number: self._beside.part(self.worker.transport, parts[number].number)
                for number in numbers
                if number not in self._pulling
            }
