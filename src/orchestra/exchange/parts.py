"""Pushes and pulls in parts, while a worker computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from orchestra.parameter_server.client import Client
from orchestra.parameter_server.placement import Part, Slice, cut_into_parts
from orchestra.parameter_server.state import Answer, Push
from orchestra.parameter_server.wire import Kind, Request, encode_request
from orchestra.transports.collective import Background
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

PART_BYTES = 1 << 20
"""Of a part, at least, if buckets are not smaller: what is left to be exchanged after backward is a
part, not a bucket. P3 has 200 KB, BytePS (Jiang et al., OSDI 2020) up to 4 MB."""


def parts_of(worker: Worker, slices: Sequence[Slice]) -> list[Part]:
    """The parts in which gradients are pushed, the same on all ranks; none: slice by slice.

    As with all-reduce, a model of one bucket is not worth it. What clips needs the whole gradient first. In a loop of the user's own, which may change it
    before the update, and look at the parameters, nothing leaves or arrives before.
    """
    one_bucket = worker.layout.bytes <= worker.bucket_bytes or not worker.overlap
    whole = worker.own_loop or worker.clip_norm is not None
    if one_bucket or whole or not all(part.pieces for part in slices):
        return []
    limit = min(worker.bucket_bytes, PART_BYTES) // worker.layout.dtype.itemsize
    return cut_into_parts(slices, limit)


class PartsClient:
    """Pushes each part of the gradient as soon as backward has filled it; pulls values by parts.

    Parts are pushed by the background flow of `worker`, in their order, each with a request behind
    it; the push itself, which only tells of the gradient, follows when backward is over. Another
    flow takes in the values. With `early` servers send those of a part once all workers have pushed
    it, else once they have applied the push, those of the first layers first (P3: Jayarajan et al.,
    MLSys 2019). With `averages` they are averaged gradients, which replace the worker's own.
    """

    def __init__(
        self, worker: Worker, client: Client, parts: Sequence[Part], *, early: bool, averages: bool
    ) -> None:
        self._worker = worker
        self._client = client
        self._parts = parts
        self._early = early
        self._there = [False] * len(worker.layout.slots)  # slots that have their gradient
        self._next = 0  # the first part that was not pushed yet
        self._pushed: Task[None] | None = None  # the last part that was
        own = worker.gradients.vector
        self._into = own if averages else torch.empty_like(worker.parameters)
        self._averages = averages
        self._pulls = Background(worker.transport)
        self._pulling: list[Task[Tensor]] = []
        worker.gradients.on_ready = self._slots_are_ready

    def push(self, push: Push) -> list[Answer]:
        """Push what is left of the gradient; what is pulled becomes the parameters."""
        worker = self._worker
        while self._next < len(self._parts):
            self._push_next()
        assert self._pushed is not None
        self._pushed.wait()
        self._next, self._there = 0, [False] * len(self._there)
        if not self._early:
            self._pull()
        answers = self._client.push(push)
        for pulled in self._pulling:
            pulled.wait()
        self._pulling.clear()
        if not self._averages:
            self._into = worker.move_parameters(self._into)
        return answers

    def close(self) -> None:
        """Nothing goes on in the background any more."""
        self._worker.gradients.on_ready = None
        self._worker.transport.end_background()
        self._pulls.end()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """In backward: collect them, and push the parts that are complete, in their order."""
        worker = self._worker
        for slot in range(first, end):
            worker.gradients.collect(slot, 1.0)
            self._there[slot] = True
        while self._next < len(self._parts):
            tensors = self._parts[self._next].tensors
            if not all(self._there[tensors.start : tensors.stop]):
                return
            worker.compute.reached(tensors[-1])
            self._push_next()

    def _push_next(self) -> None:
        worker, step, part = self._worker, self._worker.step, self._parts[self._next]
        if self._early and not self._pulling:
            self._pull()
        used = tuple(worker.gradients.used[part.tensors.start : part.tensors.stop])
        push = Push(
            worker.rank, self._client.clock + 1, step.samples, step.total_samples, 0.0, False,
            step.rates, used,
        )  # fmt: skip
        request = encode_request(Request(worker.rank, Kind.PART, push, part.number))
        gradient = worker.gradients.vector[part.first : part.end]
        to = self._client.slices[part.place].rank

        def send(transport: Transport) -> None:
            sending = [
                transport.send(gradient, to, Tag.GRADIENT),
                transport.send(request, to, Tag.REQUEST),  # last: who reads it has all of the part
            ]
            for handle in sending:
                handle.wait()

        self._pushed = worker.transport.in_background(send)
        self._next += 1

    def _pull(self) -> None:
        """Begin to receive the values of all parts, in the order in which they are sent."""
        order = self._parts if self._early else self._parts[::-1]
        arriving: list[Handle] = []

        def post(into: Tensor, transport: Transport) -> None:
            for part in order:
                there = into[part.first : part.end]
                rank = self._client.slices[part.place].rank
                arriving.append(transport.receive(rank, Tag.VALUES, there))

        def wait(number: int, transport: Transport) -> Tensor:
            return arriving[number].wait()

        self._pulls.begin(partial(post, self._into))
        self._pulling = [self._pulls.begin(partial(wait, number)) for number in range(len(order))]
