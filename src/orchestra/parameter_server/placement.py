"""Which server owns which part of the flat parameter vector."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

GRAIN = 64
"""Elements of a tensor between two places where it may be cut.

A kernel updates whole runs of elements in vector registers and the rest one by one, with other
last bits: a cut at a multiple of every kernel's run leaves each element in its own kind.
"""


Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A tensor, or a part of one, inside a slice: elements [first, end) of the flat vector."""

    tensor: int
    first: int
    end: int


@dataclass(frozen=True)
class Slice:
    """Elements [first, end) of the flat vector, owned by the server on `rank`.

    `place` numbers the servers from 0 in place of that.
    """

    first: int
    end: int
    pieces: tuple[Piece, ...]
    rank: int

    @functools.cached_property
    def tensors(self) -> tuple[int, ...]:
        """Of each piece, its tensor."""
        return tuple(piece.tensor for piece in self.pieces)


@dataclass(frozen=True)
class Part:
    """Elements [first, end) of the flat vector, which travel as one message.

    It is number `number` of the slice at `place`, and has its `pieces` from the first to before
    the end, which belong to the `tensors` in this range.
    """

    place: int
    number: int
    first: int
    end: int
    pieces: tuple[int, int]
    tensors: range


def cut_into_parts(slices: Sequence[Slice], limit: int) -> list[Part]:
    """Cut `slices` into runs of whole pieces that have `limit` elements or little more."""
    parts = []
    for place, part in enumerate(slices):
        edges = [(0, part.first)]
        for index, piece in enumerate(part.pieces[1:], start=1):
            if piece.first - edges[-1][1] >= limit:
                edges.append((index, piece.first))
        edges.append((len(part.pieces), part.end))
        for number, ((index, first), (after, end)) in enumerate(pairwise(edges)):
            if after > index:
                tensors = range(part.pieces[index].tensor, part.pieces[after - 1].tensor + 1)
                parts.append(Part(place, number, first, end, (index, after), tensors))
    return parts


def place(
    spans: Sequence[tuple[int, int]], size: int, servers: int, *, divisible: bool
) -> tuple[Slice, ...]:
    """Cut a flat vector of `size` elements into one contiguous slice a server, balanced.

    `spans` are (offset, elements) of the tensors, in order. With `divisible` a tensor may be cut
    (at multiples of 64 of its elements); without, the largest slice of whole tensors is as small
    as it can be. A server may own nothing where there are more servers than tensors.
    """
    return _place(tuple(spans), size, servers, divisible)


@functools.lru_cache(maxsize=256)  # all ranks of a simulation ask for the same
def _place(spans: Spans, size: int, servers: int, divisible: bool) -> tuple[Slice, ...]:
    edges = [*(offset for offset, _ in spans), size]
    if divisible:
        cuts = [_next_cut(edges, -(-size * k // servers)) for k in range(servers)]
    else:
        cuts = _cuts_between_tensors(edges, servers)
    return tuple(
        Slice(first, end, tuple(_pieces(spans, first, end)), number)
        for number, (first, end) in enumerate(pairwise([*cuts, size]))
    )


def _pieces(spans: Spans, first: int, end: int) -> Iterator[Piece]:
    for index, (offset, elements) in enumerate(spans):
        if max(first, offset) < min(end, offset + elements):
            yield Piece(index, max(first, offset), min(end, offset + elements))


def _next_cut(edges: Sequence[int], wanted: int) -> int:
    """Find the first place at `wanted` or after it where the vector may be cut."""
    after = bisect_right(edges, wanted)
    if after == len(edges):
        return edges[-1]
    start = edges[after - 1]
    return min(edges[after], start - (start - wanted) // GRAIN * GRAIN)


def _cuts_between_tensors(edges: Sequence[int], servers: int) -> list[int]:
    """Find where each server's run of whole tensors begins, the largest run being minimal."""
    size = edges[-1]

    def cuts_for(capacity: int) -> list[int]:
        cuts = []
        start = 0
        while start < size:
            cuts.append(start)
            start = edges[bisect_right(edges, start + capacity) - 1]
        return cuts

    largest_tensor = max(end - first for first, end in pairwise(edges))
    capacities = range(largest_tensor, size)
    enough = bisect_left(capacities, True, key=lambda c: len(cuts_for(c)) <= servers)
    cuts = cuts_for(largest_tensor + enough)
    return cuts + [size] * (servers - len(cuts))
