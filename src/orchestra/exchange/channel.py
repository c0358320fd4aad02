"""A worker's end of parameter servers: push the gradient, pull parameters, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from orchestra.compression.base import Compressor
from orchestra.coordinator.batches import HeldWork, WorkInHand
from orchestra.coordinator.events import Instruction, Take, Wait, instruction_of
from orchestra.coordinator.rest import Reason, Rest
from orchestra.exchange.compression import CompressionState, SliceCodec
from orchestra.optimizers.state import restore
from orchestra.parameter_server.beside import ServerBeside
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    Request,
    decode_answer,
    decode_quiet_point,
    encode_request,
)
from orchestra.parameter_server.placement import Slice
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


class ServerChannel:
    """Pushes to the server of each slice, and waits for every answer.

    Where workers take batches from a queue, in which they have `queue_shares` of a step, each
    answer brings what this worker does next: `work` holds it, and `take` returns it. With a
    `compressor` pushes travel compressed, and `compression` keeps what they have left out. The
    server `beside` this worker takes pushes without messages.
    """

    def __init__(
        self,
        worker: Worker,
        slices: Sequence[Slice],
        queue_shares: tuple[float, ...] | None = None,
        compressor: Compressor | None = None,
        beside: ServerBeside | None = None,
    ) -> None:
        self.worker = worker
        self.slices = slices
        self._beside = beside
        self.clock = 0  # the step that this worker has behind it
        self.work: WorkInHand | None = None
        self.compression: CompressionState | None = None
        self._codec: SliceCodec | None = None
        self._waits = 0  # answers that held no work
        self._is_pushing = False  # a server has not answered yet
        self._has_to_wait = False
        queue = None if queue_shares is None else worker.make_queue(queue_shares)
        if queue is not None:
            self.work = WorkInHand(queue, worker.rank)
        if compressor is not None:
            self.compression = CompressionState.of(worker, compressor)
            self._codec = SliceCodec(worker, compressor)

    # A step

    def collect(self) -> None:
        """Gather the gradient into the flat vector."""
        self.worker.gradients.collect_rest(1.0)

    def push(self, *, into: Tensor) -> list[Answer]:
        """Push the gradient of this step; pull flat `into`; return the servers' answers."""
        step, gradients, kept = self.worker.step, self.worker.gradients, self.compression
        if kept is not None and step.samples and not kept.used.is_meta:
            flags = kept.used.new_tensor(gradients.used)
            kept.note_used(flags)
            gradients.used = [flag > 0 for flag in flags.tolist()]
        push = Push(
            self.worker.rank, self.clock + 1, step.samples, step.total_samples, step.loss,
            step.stop, step.rates, tuple(gradients.used), step.position, step.report,
            step.options,
        )  # fmt: skip
        answers = self.exchange(push, gradients.vector, into)
        for part, answer in zip(self.slices, answers, strict=True):
            # What any worker has used is used on all: each optimizer passes over the same ones.
            for piece, used in zip(part.pieces, answer.used, strict=True):
                gradients.used[piece.tensor] = used
        return answers

    def exchange(self, push: Push, gradient: Tensor, into: Tensor) -> list[Answer]:
        """Push flat `gradient`, pull flat `into`; return the servers' answers, in their order.

        `push` tells of the whole gradient; its `used` has one entry for each tensor of the model.
        """
        vectors = [(gradient, into)]
        if len(self.slices) > 1:
            spans = [slice(part.first, part.end) for part in self.slices]
            vectors = [(gradient[span], into[span]) for span in spans]
        if self._codec is not None:
            assert self.compression is not None
            payloads = self._codec.encode_push(self.slices, self.compression, push, gradient)
            vectors = [(payload, out) for payload, (_, out) in zip(payloads, vectors, strict=True)]
        return self._tell(push, vectors)

    def _tell(
        self, push: Push, vectors: Sequence[tuple[Tensor | None, Tensor | None]]
    ) -> list[Answer]:
        """Tell each server of `push`; it gets the first of its two vectors, and fills the other."""
        # Messages leave before the server beside this worker has something to do.
        self._is_pushing = True
        places = sorted(range(len(self.slices)), key=self._is_beside)
        waits = {place: self._push_to(place, push, *vectors[place]) for place in places}
        answers = [waits[place]() for place in range(len(self.slices))]
        # Every server counts the same pushes, so that all clocks are equal.
        self.clock = answers[0].clock
        if self.work is not None:
            assert answers[0].work is not None
            self.work.give(answers[0].work)
        self._is_pushing = False
        return answers

    def _is_beside(self, place: int) -> bool:
        """Return whether the server of the slice at `place` takes pushes without messages."""
        return self._beside is not None and self.slices[place].rank == self.worker.rank

    def _push_to(
        self, place: int, push: Push, gradient: Tensor | None, into: Tensor | None
    ) -> Callable[[], Answer]:
        """Push to the server of the slice at `place`; return what waits for its answer."""
        used = tuple(map(push.used.__getitem__, self.slices[place].tensors))
        request = Request(push.worker, Kind.PUSH, push._replace(used=used))
        if self._beside is not None and self._is_beside(place):
            return self._beside.push(self.worker.transport, request, gradient, into)
        wait = self._ask(place, request, gradient, into)
        return lambda: decode_answer(push.worker, wait())

    def _ask(
        self,
        place: int,
        request: Request,
        gradient: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Send `request` to the server of the slice at `place`, and receive values in `into`.

        Returns a function that waits for the head of the reply.
        """
        rank, message = self.slices[place].rank, encode_request(request)
        return self._post(rank, message, gradient, Tag.ANSWER, Tag.VALUES, into)

    def _post(
        self,
        rank: int,
        message: Tensor,
        gradient: Tensor | None,
        head: Tag | None,
        values: Tag,
        into: Tensor | None,
    ) -> Callable[[], Tensor]:
        """Send `message` to `rank`, and receive the `head` of the reply, and `values` in `into`.

        Returns a function that waits for the first of the two.
        """
        transport = self.worker.transport
        # Receives are posted before the request, so that values land in place, without a copy.
        arriving = []
        if head is not None:
            arriving.append(transport.receive(rank, head))
        if into is not None:
            arriving.append(transport.receive(rank, values, into))
        # The request comes last: a server that reads it has the whole gradient, and never waits
        # for the rest of one whose worker was suspended in mid-message.
        sending = []
        if gradient is not None:
            sending.append(transport.send(gradient, rank, Tag.GRADIENT, more=True))
        sending.append(transport.send(message, rank, Tag.REQUEST))

        def wait() -> Tensor:
            # Sends first: no answer comes before its request has gone.
            for handle in sending:
                handle.wait()
            first, *_ = [handle.wait() for handle in arriving]
            return first

        return wait

    # Work from the queue

    def take(self) -> Instruction:
        """Return the next instruction; the one before is done."""
        assert self.work is not None
        if self._has_to_wait:
            self._waits += 1
            # The first server holds the coordinator.
            wait = self._ask(0, Request(self.worker.rank, Kind.WAIT, step=self._waits))
            self.work.give(instruction_of(wait().tolist()))
        instruction = self.work.take()
        self._has_to_wait = isinstance(instruction, Wait)
        return instruction

    def held_work(self) -> HeldWork | None:
        """Return what this worker holds of the queue; None if the plan deals out batches."""
        return None if self.work is None else self.work.held(pushed=self._is_pushing)

    def skip(self, values: Tensor) -> None:
        """Push nothing for the last batch, and pull flat `values`."""
        assert self.work is not None
        item, rank = self.work.next, self.worker.rank
        assert isinstance(item, Take)
        used = (False,) * (1 + max(number for part in self.slices for number in part.tensors))
        nothing = Push(rank, self.clock + 1, 0, item.samples, 0.0, False, (), used, item.start)
        self.exchange(nothing, values, values)  # a server answers when it has read all of them

    # Between steps

    def open(self) -> None:
        """Begin what goes on while the worker computes, unless it goes on already."""

    def rest(self, rest: Rest) -> bool:
        """Wait until every push is applied and every worker is here; at the end, leave.

        Return False if some workers have left.
        """
        complete = True
        # All are at the end of the run when it ends, and servers see them leave.
        if rest.reason is not Reason.END:
            complete = self.pause(rest)
        if rest.reason.ends:
            self.leave()
        return complete

    def pause(self, rest: Rest) -> bool:
        """Push no more until every worker has paused too. True if none has left."""
        request = Request(self.worker.rank, Kind.PAUSE, step=rest.code)
        waits = [self._ask(place, request) for place in range(len(self.slices))]
        points = [decode_quiet_point(wait()) for wait in waits]
        return all(point.complete for point in points)

    def leave(self) -> None:
        """Push no more."""
        message = encode_request(Request(self.worker.rank, Kind.LEAVE, step=self.clock))
        for part in self.slices:
            self.worker.transport.send(message, part.rank, Tag.REQUEST).wait()

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, at rest."""
        state = {"clock": self.clock, "compression": self.compression}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        self.clock = saved["clock"]
        if self.compression is not None:
            restore(self.compression, saved["compression"])
