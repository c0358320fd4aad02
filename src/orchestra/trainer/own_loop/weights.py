"""What a gradient weighs in an average: the samples behind it, here and on all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orchestra.data import loaders
from orchestra.errors import InputError
from orchestra.trainer.own_loop.passes import Count
from orchestra.trainer.own_loop.rank import OwnRank


class SampleWeights:
    """The weights of the batch, or group, that was handed out last.

    Attributes:
        share: this worker's of the samples behind its gradient; 1 where that is not averaged.
        turns: the sum of the digests of all turns in which batches were dealt out.
    """

    def __init__(self, rank: OwnRank) -> None:
        self._rank = rank
        self._samples: int | None = 0  # of the batch, or group, if they are known
        self.share = 1.0
        self.turns = 0

    def take(self, parts: Sequence[loaders.WorkerBatch], *, averaged: bool) -> Count | None:
        """Return the weights of the next gradient, if the samples behind it are known.

        Where gradients are `averaged`, and the parts do not come with the samples of all workers,
        this is collective over the workers.
        """
        known = all(part.samples is not None for part in parts)
        samples = sum(part.samples or 0 for part in parts)
        totals = [part.total for part in parts if part.total is not None]
        if len(totals) == len(parts):
            total = sum(totals)
        else:
            turn = sum(part.turn_digest for part in parts)
            self.turns += turn
            total = self._sum_counts(samples, turn) if averaged else samples
        self._samples = samples if known else None
        self.share = samples / max(total, 1) if averaged else 1.0
        return Count(samples, total, total) if known else None

    def end(self) -> None:
        """Collective over the workers, where `take` is: refuse that batches of others go on."""
        self._sum_counts(0, 0)

    def _sum_counts(self, samples: int, turn: int) -> int:
        """Return the samples of all workers in this step, if all have this digest of its `turn`."""
        rank = self._rank
        total, turns = rank.sum_over_workers(torch.tensor([samples, turn])).tolist()
        if turns != turn * len(rank.worker.workers):
            raise InputError(loaders.UNLIKE)
        return int(total)

    def weigh(self, count: int, *, averaged: bool) -> tuple[int, int]:
        """Let the gradient weigh `count`; return what it weighs here, and on all workers.

        Collective over the workers where gradients are `averaged`.
        """
        # A repeated batch has no samples, and must not count
        own = 0 if self._samples == 0 else count
        total = int(self._rank.sum_over_workers(torch.tensor([own]))) if averaged else own
        self.share = own / total if averaged and total else float(not averaged)
        return own, total
