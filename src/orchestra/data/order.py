"""The global order: one endless stream of samples that every rank knows."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


class GlobalOrder:
    """Epoch after epoch, each a permutation of its own of all samples.

    The order follows from the seed alone. It draws nothing from the global generators, and any
    place of the stream can be read at any time.

    Args:
        samples: samples in the dataset, at least 1.
        seed: at least 0.
    """

    def __init__(self, samples: int, seed: int) -> None:
        assert samples > 0
        assert seed >= 0
        self.samples = samples
        self.seed = seed
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.long)

    def indices(self, start: int, stop: int) -> Tensor:
        """The samples at positions `start` to `stop` of the stream, which may straddle epochs."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.samples)
            count = min(stop - start, self.samples - offset)
            parts.append(self._of_epoch(epoch)[offset : offset + count])
            start += count
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # A SeedSequence mixes the two numbers, so that seeds 0, 1, 2 ... share no epochs.
            mixed = numpy.random.SeedSequence((self.seed, epoch)).generate_state(1, numpy.uint64)
            generator = torch.Generator().manual_seed(int(mixed[0]))
            self._permutation = torch.randperm(self.samples, generator=generator)
            self._epoch = epoch
        return self._permutation
