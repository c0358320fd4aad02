"""A worker's side: push slices of the gradient, pull slices of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.state import Answer, Push
from orchestra.parameter_server.wire import (
    Kind,
    decode_answer,
    decode_pause,
    decode_work,
    encode_push,
    request,
)
from orchestra.schedules.work_queue import Kind as WorkKind
from orchestra.schedules.work_queue import WorkInHand, WorkItem, WorkQueue
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag


@dataclass(frozen=True)
class Home:
    """A server as its workers know it."""

    rank: int
    slice: Slice


class Client:
    """Pushes to every server and waits for every answer.

    Where batches come from a queue, each answer brings what this worker does next, which `work`
    holds and `take` gives.
    """

    def __init__(
        self, transport: Transport, homes: Sequence[Home], queue: WorkQueue | None = None
    ) -> None:
        self.homes = homes
        self.clock = 0  # the step that this worker has behind it
        self.work = None if queue is None else WorkInHand(queue, transport.rank)
        self._told_to_wait = False
        self._waits = 0  # how often this worker was told to wait for work
        self._transport = transport

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""
        return {"clock": self.clock}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.clock = saved["clock"]

    def take(self) -> WorkItem:
        """What this worker does next; the one before is done."""
        assert self.work is not None
        if self._told_to_wait:
            self._waits += 1
            self.work.item = self._wait_for_work()
        item = self.work.take()
        self._told_to_wait = item.kind is WorkKind.WAIT
        return item

    def skip(self, values: Tensor) -> None:
        """A push of nothing for the last item; `values`, flat, are pulled."""
        assert self.work is not None
        item = self.work.item
        self.push(
            values,
            values,  # a server answers when it has read all of them
            samples=0,
            step_samples=item.samples,
            loss=0.0,
            stop=False,
            rates=(),
            used=[False] * (1 + max(n for home in self.homes for n in home.slice.tensors)),
            position=item.start,
        )

    def _wait_for_work(self) -> WorkItem:
        server = self.homes[0].rank
        self._transport.send(request(Kind.WAIT, self._waits), server, Tag.REQUEST).wait()
        return decode_work(self._transport.receive(server, Tag.ANSWER).wait())

    def push(
        self,
        gradient: Tensor,
        into: Tensor,
        *,
        samples: int,
        step_samples: int,
        loss: float,
        stop: bool,
        rates: tuple[float, ...],
        used: Sequence[bool],
        position: int | None = None,
        report: tuple[float, ...] = (),
    ) -> list[Answer]:
        """Push flat `gradient`, pull flat `into`; the servers' answers, in their order."""
        pushes = []
        for home in self.homes:
            flags = tuple(map(used.__getitem__, home.slice.tensors))
            push = Push(
                self._transport.rank, self.clock + 1, samples, step_samples, loss, stop,
                rates, flags, position, report,
            )  # fmt: skip
            pushes.append(push)
        answers = self._exchange(pushes, gradient, into)
        self.clock = answers[0].clock
        if self.work is not None:
            assert answers[0].work is not None
            self.work.item = answers[0].work
        return answers

    def _exchange(self, pushes: Sequence[Push], gradient: Tensor, into: Tensor) -> list[Answer]:
        sending = []
        arriving = []
        for home, push in zip(self.homes, pushes, strict=True):
            first, end = home.slice.first, home.slice.end
            head = self._transport.receive(home.rank, Tag.ANSWER)
            body = self._transport.receive(home.rank, Tag.VALUES, into[first:end])
            arriving.append((head, body))
            # The request comes last: a server that reads it has the whole gradient, and never
            # waits for the rest of one whose worker was suspended in mid-message.
            sending.append(self._transport.send(gradient[first:end], home.rank, Tag.GRADIENT))
            sending.append(self._transport.send(encode_push(push), home.rank, Tag.REQUEST))
        answers = []
        for head, body in arriving:
            answers.append(decode_answer(self._transport.rank, head.wait()))
            body.wait()
        for handle in sending:
            handle.wait()  # all has gone: a server answers what it has read to the end
        return answers

    def pause(self, step: int) -> bool:
        """Push no more until every worker has paused too; whether none has left."""
        for home in self.homes:
            self._transport.send(request(Kind.PAUSE, step), home.rank, Tag.REQUEST).wait()
        answers = [self._transport.receive(home.rank, Tag.ANSWER).wait() for home in self.homes]
        return all(decode_pause(answer).complete for answer in answers)

    def leave(self) -> None:
        """Tell every server that this worker has finished."""
        for home in self.homes:
            self._transport.send(request(Kind.LEAVE, self.clock), home.rank, Tag.REQUEST).wait()
