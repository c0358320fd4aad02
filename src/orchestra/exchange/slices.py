"""The slices of a worker's flat vectors: who owns which, and the parameters in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from orchestra.exchange.consensus import Learnt
from orchestra.parameter_server.placement import Piece, Slice
from orchestra.parameter_server.placement import place as place_slices
from orchestra.parameter_server.server import Server
from orchestra.worker.layout import Layout
from orchestra.worker.worker import Worker


def slices_of(
    worker: Worker, servers: Sequence[int], *, updates: bool, weights: Sequence[float] = ()
) -> list[Slice]:
    """Cut the parameters over the ranks in `servers`, balanced by bytes, or by `weights`. Where the
    servers update, a tensor is cut only if the optimizer works element by element."""
    layout, divisible = worker.layout, worker.optimizer.elementwise or not updates
    spans = [(slot.offset, slot.size) for slot in layout.slots]
    slices = place_slices(spans, layout.size, len(servers), divisible=divisible, weights=weights)
    return [replace(part, rank=rank) for rank, part in zip(servers, slices, strict=True)]


def views_of_pieces(
    layout: Layout, pieces: Sequence[Piece], vector: Tensor, first: int
) -> dict[str, tuple[Tensor, int]]:
    """Return the parts of parameters in a vector that begins at element `first` of the layout.

    By name, each with the element of the parameter at which it begins: one that is there whole in
    its shape, a cut one flat.
    """
    tensors = {}
    for piece in pieces:
        slot = layout.slots[piece.tensor]
        tensor = vector[piece.first - first : piece.end - first]
        if piece.end - piece.first == slot.size:
            tensor = tensor.view(slot.shape)
        tensors[slot.name] = (tensor, piece.first - slot.offset)
    return tensors


def learnt_slices(worker: Worker, slices: Sequence[Slice], server: Server | None) -> list[Learnt]:
    """Return the slices of the model, each owned by its server."""
    learnt = []
    for part in slices:
        values = worker.parameters[part.first : part.end]
        if part.rank == worker.rank:
            assert server is not None
            values = server.own.values
        weight = float(part.rank == worker.rank)
        learnt.append(Learnt(part.first, values, weight, owner=part.rank))
    return learnt
