"""PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): gradients of low rank."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from orchestra.compression.base import Compressor, Context, Contexts, Tensors, torch
from orchestra.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class PowerSGD(Compressor):
    """M ~ P Q^T of rank r for the gradient M [n, m] of each matrix, by one step of power iteration.

        P <- sum_w M_w Q;   P <- an orthonormal basis of its columns;   Q <- sum_w M_w^T P

    P Q^T takes the place of the sum of all M_w. Q is kept for the next step (warm start), and the
    residual M_w - P (M_w^T P)^T as well. Both factors add, so any all-reduce sums them, in two
    rounds. Tensors of more dimensions count as matrices of shape[0] rows. Those that are vectors,
    or would not shrink to 1/min_rate, are summed as they are. The paper orthogonalizes by
    Gram-Schmidt; here a QR decomposition does, which spans the same space.
    """

    adds = True
    passes = (1.6, 3.5)
    shares_memory = True

    rank: int = setting(4, "r: columns of the factors; more are more exact", low=1, high=4096)
    _: KW_ONLY
    min_rate: float = setting(
        2.0, "tensors that would not shrink to 1/min_rate stay whole", low=1, high=1e9
    )
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    def _shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the n and m of a tensor that is compressed; None for one that is not."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        shrinks = rows * columns >= self.min_rate * self.rank * (rows + columns)
        return (rows, columns) if shrinks else None

    def memory(self, tensor: Tensor, first: int) -> list[Tensor]:
        """Make Q^T, at first random and the same on every worker."""
        shape = self._shape(tensor.shape)
        if shape is None:
            return []
        context = Context(tuple(tensor.shape), first, 0, 0, 1)
        random = context.random(shared=True).standard_normal((self.rank, shape[1]), "float32")
        return [torch.from_numpy(random).to(tensor)]

    def rounds(self, tensors: Tensors, residuals: Tensors, contexts: Contexts) -> Iterator[Tensor]:
        low_rank: list[tuple[int, Tensor, Tensor]] = []  # its number, M and Q^T
        whole: list[int] = []
        for number, (values, each) in enumerate(zip(tensors, contexts, strict=True)):
            shape = self._shape(each.shape)
            if shape is None:
                whole.append(number)
            else:
                low_rank.append((number, values.view(shape), each.memory[0]))

        # Both factors stand transposed: BLAS takes a fifth of the time then.
        p = [q @ matrix.T for _, matrix, q in low_rank]
        factors, uncompressed = yield from _summed(p, [tensors[number] for number in whole])
        for number, total in zip(whole, uncompressed, strict=True):
            tensors[number].copy_(total)
            if residuals:
                residuals[number].zero_()
        if not low_rank:
            return

        # In float32 at least: QR has no 16 bits.
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        p = [torch.linalg.qr(each.T.to(wide)).Q.to(each.dtype) for each in factors]
        q = [basis.T @ matrix for (_, matrix, _), basis in zip(low_rank, p, strict=True)]
        for (number, matrix, _), basis, own in zip(low_rank, p, q, strict=True):
            if residuals:
                # M_w - P (M_w^T P)^T is what this worker has not sent, taken before Q is summed.
                # torch's hook subtracts the average of all workers, so that residuals grow by what
                # workers disagree on.
                torch.addmm(matrix, basis, own, alpha=-1, out=residuals[number].view_as(matrix))
        q, _ = yield from _summed(q, [])
        for (_, matrix, last), basis, total in zip(low_rank, p, q, strict=True):
            # The warm start of the next step's power iteration.
            last.copy_(total)
            torch.mm(basis, total, out=matrix)


def _summed(
    one: list[Tensor], other: list[Tensor]
) -> Generator[Tensor, None, tuple[list[Tensor], list[Tensor]]]:
    """Give all tensors as one vector; when it is summed, return them cut as they were."""
    parts = [*one, *other]
    flat = torch.cat([part.reshape(-1) for part in parts])
    yield flat
    cut = flat.split([part.numel() for part in parts])
    sums = [each.view(part.shape) for each, part in zip(cut, parts, strict=True)]
    return sums[: len(one)], sums[len(one) :]
