"""What every compressor states: whether its payloads add, their bytes, and how to make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar

from orchestra.settings import Settings, setting
from orchestra.settings.notation import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import torch as torch
    from torch import Tensor

    from orchestra.compression import packing as packing
else:  # for all compressors, which are settings, and load without them
    np, torch = LazyModule("numpy"), LazyModule("torch")
    packing = LazyModule("orchestra.compression.packing")


@dataclass(frozen=True)
class Context:
    """What a compressor may know of the tensor at hand, beside its values.

    Attributes:
        shape: of the tensor, which itself is passed flat.
        first: the element of the flat gradient at which it begins; it tells tensors apart.
        step: counts how often the tensor was compressed in this phase; the same on all workers.
        rank: of the worker whose values these are.
        workers: how many values are added up, each weighted by its part of the samples.
        memory: what `Compressor.memory` gave for the tensor on this worker.
    """

    shape: tuple[int, ...]
    first: int
    step: int
    rank: int
    workers: int
    memory: Sequence[Tensor] = field(default=())

    def random(self, *, shared: bool) -> np.random.Generator:
        """Return a generator for this tensor and step; `shared`: the same on every worker.

        They depend on nothing else, so that a checkpoint has no generator to keep.
        """
        key = self.step, self.first, 0 if shared else 1 + self.rank
        return np.random.Generator(np.random.SFC64(key))  # the fastest there is


Tensors = Sequence["Tensor"]
Contexts = Sequence[Context]


@dataclass(frozen=True, repr=False)
class Compressor(Settings, ABC):
    """From tensors to payloads that take fewer bytes, and back; tensor by tensor.

    All methods get values in the units of the sum: each worker's gradient is multiplied by its part
    of the step's samples before. `error_feedback` (Seide et al., Interspeech 2014; Karimireddy et
    al., ICML 2019) compresses p = g + e in place of g, and keeps the residual e = p - (what was
    sent) for the next step. So with it a compressor has to be a contraction, E|e|^2 < |p|^2, or
    residuals grow; one that is not is refused. The same holds for CHOCO-SGD, which sets it.
    """

    # Payloads may be summed before they are decoded, by any all-reduce. Otherwise they are bytes,
    # and everybody gets those of all workers.
    adds: ClassVar[bool] = False
    # What a simulation charges for encoding, and for decoding the payload of one worker (or for
    # each later round): multiples of one pass over the tensor, own += 0.5 other; measured by
    # `python -m benchmarks.compression`.
    passes: ClassVar[tuple[float, float]] = (1.0, 1.0)
    copies: ClassVar[float] = 0.0  # vectors of all parameters that `memory` takes, about
    shares_memory: ClassVar[bool] = False  # `memory` is the same on all workers
    brings_momentum: ClassVar[bool] = False  # the optimizer has to be SGD without momentum

    _: KW_ONLY
    error_feedback: bool = setting(False, "send in later steps what was left out in this one")

    @property
    def decodable_alone(self) -> bool:
        """True if a server can decode a payload without the others; then it is an `Encoder`."""
        return False

    @property
    def footprint(self) -> float:
        """Vectors of all parameters that it keeps between steps."""
        return self.copies + self.error_feedback

    def memory(self, tensor: Tensor, first: int) -> list[Tensor]:
        """Make what is kept for `tensor` (in its shape) from step to step, and in checkpoints."""
        return []

    @abstractmethod
    def rounds(self, tensors: Tensors, residuals: Tensors, contexts: Contexts) -> Iterator[Tensor]:
        """For payloads that add: yield flat vectors to be summed over the workers.

        Each has become the sum, in its place, when the next one is asked for.

        In the end `tensors`, each flat and in its place, are the sums over the workers.
        `residuals` (none without error feedback) become what this worker has left out.
        """


@dataclass(frozen=True, repr=False)
class Encoder(Compressor):
    """A compressor whose payloads travel once."""

    sized: ClassVar[bool] = True  # the bytes of a payload depend on its shape and the step alone
    whole: ClassVar[bool] = False  # element by element: several tensors may pass as one

    @property
    def decodable_alone(self) -> bool:
        return True

    @abstractmethod
    def size(self, elements: int, itemsize: int, step: int) -> int:
        """Return the bytes of the payload of `elements` elements, each of `itemsize` bytes."""

    @abstractmethod
    def encode(self, values: Tensor, context: Context) -> Tensor:
        """Return the payload of flat `values`: flat; of uint8 if payloads do not add."""

    @abstractmethod
    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        """Add alpha times what `payload` stands for to `out`."""

    def combine(self, payloads: Sequence[Tensor], out: Tensor, context: Context) -> None:
        """Set `out` to the sum over the workers, from their payloads in the order of the ranks.

        Where payloads add, there is one: their sum.
        """
        out.zero_()
        for payload in payloads:
            self.add(payload, out, context)

    def encode_all(self, tensors: Tensors, residuals: Tensors, contexts: Contexts) -> list[Tensor]:
        """Return the payloads of all tensors; set `residuals`, if any, to what these leave out."""
        payloads = [self.encode(each, c) for each, c in zip(tensors, contexts, strict=True)]
        for number, residual in enumerate(residuals):
            residual.copy_(tensors[number])
            # e = p - what this worker has sent, as the others decode it.
            self.add(payloads[number], residual, contexts[number], alpha=-1.0)
        return payloads

    def rounds(self, tensors: Tensors, residuals: Tensors, contexts: Contexts) -> Iterator[Tensor]:
        payloads = self.encode_all(tensors, residuals, contexts)
        sizes = [payload.numel() for payload in payloads]
        flat = torch.cat(payloads) if len(payloads) > 1 else payloads[0]
        yield flat
        for values, payload, each in zip(tensors, flat.split(sizes), contexts, strict=True):
            self.combine([payload], values, each)
