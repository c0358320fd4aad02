"""Replicas averaged in pairs by background flows, while the main flows compute gradients."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from orchestra.exchange.agreement import wait_for_workers
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

NOBODY = -1


class _Word(enum.IntEnum):
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
        self._tell(Tag.HAND_OVER, _Word.GIVE, rank)

    def take(self) -> int:
        """Have the parameters back; how many averages were made of them meanwhile."""
        if self._flow is None or self._held:
            return 0
        self._tell(Tag.PAIR, _Word.TAKE)
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
            self._tell(Tag.HAND_OVER, _Word.END)
            self._flow.wait()
            self._flow = None

    def _tell(self, tag: int, *words: int) -> None:
        self._worker.transport.send(torch.tensor(words), self._worker.rank, tag).wait()

    def _run(self, transport: Transport) -> None:
        """The background flow: average while the main flow computes."""
        try:
            while True:
                given = transport.receive(transport.rank, Tag.HAND_OVER).wait().tolist()
                if given[0] == _Word.END:
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
            if request.wait()[0] == _Word.TAKE:
                return averages
            self._answer(transport, request.source)
            averages += 1

    def _ask(self, transport: Transport, partner: int) -> None:
        arriving = transport.receive(partner, Tag.PAIR_MEAN, self._other)
        # The request comes last: who reads it has all of x.
        sending = transport.send(self._x, partner, Tag.PAIR_VALUES)
        transport.send(torch.tensor([_Word.ASK]), partner, Tag.PAIR).wait()
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
