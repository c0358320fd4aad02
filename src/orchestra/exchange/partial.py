"""The average gradient over the workers that were first, in every step anew."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from orchestra.exchange.average import Collective, note_buffer
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

LEAVE = -1
"""In place of a step: this worker's main flow has finished."""


class Outcome(enum.IntEnum):
    """What a step's average is to a worker."""

    TOOK_PART = 0  # its gradient is in it, and the average is in the place of the gradient
    LATE = 1  # without its gradient; the average follows
    FAILED = 2


class PartialAverage:
    """Replaces the gradient by the mean over the `needed` workers that had theirs first.

    Backup workers (Chen et al., 2016), without a server: of all workers some are one too many, so
    that the slowest of a step hold up nobody. A worker that has its gradient tells the first
    worker; as soon as enough have, that one tells everybody who they are, and all ranks carry out
    the collective. The others take part in it with zeros, from a background flow, while they
    still compute: so every worker gets every average, with the same bits. A late worker drops its
    gradient, takes the averages that it missed in their order, and computes none for steps whose
    average is there already. Until it does, they wait in its memory.

    The order in which the workers are heard of is all that depends on chance.
    """

    def __init__(self, worker: Worker, collective: Collective, needed: int) -> None:
        self._worker = worker
        self._collective = collective
        self._needed = needed
        self._first = worker.workers.ranks[0]
        self._step = 0
        self._left = 0
        self._outcome: Handle | None = None
        self._flow = worker.transport.spawn(self._take_part)

    def is_late(self) -> bool:
        """Whether the average of the step that begins is there already."""
        self._outcome = self._worker.transport.receive(self._worker.rank, Tag.DONE)
        return self._outcome.done()

    def finish(self) -> None:
        """Hand in the gradient; replace it by the average."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        gradients.collect_rest(step.weight)
        gradients.fill_tail(worker.rank, step.weight, step.loss, step.stop)
        self._tell(self._step, step.samples)
        self.take()

    def take(self) -> None:
        """Get the average of this step, made with a gradient of this worker or without."""
        worker, gradients, step = self._worker, self._worker.gradients, self._worker.step
        handle = self._outcome or worker.transport.receive(worker.rank, Tag.DONE)
        self._outcome = None
        outcome, samples = handle.wait().tolist()
        if outcome == Outcome.FAILED:
            self._flow.wait()
        if outcome == Outcome.LATE:
            worker.transport.receive(worker.rank, Tag.AVERAGE, gradients.storage).wait()
            worker.measures.dropped += step.samples > 0
        factor = step.total_samples / samples
        if factor != 1.0:
            gradients.vector.mul_(factor)
        loss, step.losses, step.stop = gradients.publish()
        step.loss = loss * factor
        step.agreed = True
        self._step += 1

    def close(self) -> None:
        """Collective: every worker has taken its last step; end the background flows."""
        self._tell(LEAVE, 0)
        self._flow.wait()

    def _tell(self, step: int, samples: int) -> None:
        message = torch.tensor([step, samples])
        self._worker.transport.send(message, self._first, Tag.ARRIVED).wait()

    def _take_part(self, transport: Transport) -> None:
        """In the background, carry out one collective after another, late or not.

        The main flow may be busy with a gradient meanwhile, and finds each outcome in the order
        of the steps: messages to its own rank are the queue between the two, on every engine.
        """
        storage, own = self._worker.gradients.storage, self._worker.workers.index(transport.rank)
        stand_in, step = torch.empty_like(storage), 0
        try:
            while (chosen := self._next_choice(transport, step)).any():
                values = storage if chosen[own] else stand_in.zero_()
                buffer = self._collective.begin(transport, values).wait()
                note_buffer(self._worker, buffer + stand_in.nbytes)
                outcome = Outcome.TOOK_PART if chosen[own] else Outcome.LATE
                report = torch.tensor([outcome, int(chosen.sum())])
                transport.send(report, transport.rank, Tag.DONE)
                if outcome is Outcome.LATE:
                    transport.send(values, transport.rank, Tag.AVERAGE)
                step += 1
        except BaseException:
            transport.send(torch.tensor([Outcome.FAILED, 0]), transport.rank, Tag.DONE)
            raise

    def _next_choice(self, transport: Transport, step: int) -> Tensor:
        """Return the samples of each worker that takes part in `step`, 0 for others; all 0 at the
        end."""
        if transport.rank != self._first:
            return transport.receive(self._first, Tag.CHOSEN).wait()
        chosen = self._choose(transport, step)
        for other in self._worker.workers.ranks[1:]:
            transport.send(chosen, other, Tag.CHOSEN).wait()
        return chosen

    def _choose(self, transport: Transport, step: int) -> Tensor:
        """On the first worker: wait until enough have a gradient of `step`, or nobody is left."""
        workers = self._worker.workers
        chosen, heard = torch.zeros(len(workers), dtype=torch.int64), 0
        while int(chosen.count_nonzero()) < self._needed and heard < len(workers):
            handle = transport.receive(None, Tag.ARRIVED)
            arrived_for, samples = handle.wait().tolist()
            if arrived_for == step:
                heard += 1
                chosen[workers.index(handle.source)] = samples
            elif arrived_for == LEAVE:
                self._left += 1
                if self._left == len(workers):
                    break
        return chosen
