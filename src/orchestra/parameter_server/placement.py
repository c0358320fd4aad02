"""Which server owns which part of the flat parameter vector."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

GRAIN = 64
"""Elements of a tensor between two places where it may be cut.

A kernel updates whole runs of elements in vector registers and the rest one by one, with other
last bits: a cut at a multiple of every kernel's run leaves each element in its own kind.
"""

MOST_PARTS = 32
"""Parts of a large model, so that 3 % of it are left to exchange after backward. More would cost a
server time for each, and a simulation a message for each."""

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
        """The tensor of each piece."""
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


def cut_into_parts(slices: Sequence[Slice], least: int, most: int) -> list[Part]:
    """Cut `slices` into runs of whole pieces, some `MOST_PARTS` together.

    A run ends with its slice, or with the first piece that takes it to a share of all elements,
    which is `least` elements for small models, and `most` for very large ones.
    """
    parts = []
    limit = min(most, max(least, -(-(slices[-1].end - slices[0].first) // MOST_PARTS)))
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
    spans: Sequence[tuple[int, int]],
    size: int,
    servers: int,
    *,
    divisible: bool,
    weights: Sequence[float] = (),
) -> tuple[Slice, ...]:
    """Cut a flat vector of `size` elements into one contiguous slice a server, balanced.

    `spans` are (offset, elements) of the tensors, in order. With `divisible` a tensor may be cut
    (at multiples of 64 of its elements); without, the largest slice of whole tensors is as small
    as it can be. With `weights`, one for each server, slices are in proportion to them, and it is
    the largest over its weight. A server may own nothing where there are more servers than tensors.
    """
    return _place(tuple(spans), size, tuple(weights) or (1.0,) * servers, divisible)


@functools.lru_cache(maxsize=256)  # all ranks of a simulation ask for the same
def _place(
    spans: Spans, size: int, weights: tuple[float, ...], divisible: bool
) -> tuple[Slice, ...]:
    edges = [*(offset for offset, _ in spans), size]
    # Exact fractions: every rank, and a resumed run, has to cut at the same elements.
    exact = list(map(Fraction, weights))
    if divisible:
        before = accumulate(exact[:-1], initial=Fraction(0))
        cuts = [_next_cut(edges, math.ceil(size * part / sum(exact))) for part in before]
    else:
        cuts = _cuts_between_tensors(edges, [weight / max(exact) for weight in exact])
    return tuple(
        Slice(first, end, tuple(_pieces(spans, first, end)), number)
        for number, (first, end) in enumerate(pairwise([*cuts, size]))
    )


def parts_by_links(
    bandwidths: Sequence[float], fixed_load: float, load_per_share: float, min_share: float = 0.0
) -> tuple[float, ...]:
    """Return the part of the parameters of each server such that the slowest link ends soonest.

    In a step the link of server k, of `bandwidths[k]` bytes/s, carries in each direction
    `fixed_load` models whatever the server has, and `load_per_share` times its part s_k. The
    seconds (fixed_load + load_per_share s_k) / B_k are made as equal as parts from
    `min_share` on allow. The sum of the parts is 1.
    """
    there = sorted(range(len(bandwidths)), key=lambda server: -bandwidths[server])
    left = 1.0
    while True:  # all links of servers with more than `min_share` end together
        whole = math.fsum(bandwidths[server] for server in there)
        seconds = (load_per_share * left + fixed_load * len(there)) / whole
        least = fixed_load + load_per_share * min_share
        if seconds * bandwidths[there[-1]] >= least or len(there) == 1:
            break
        # The slowest link among them cannot carry even the least part in that time.
        there.pop()
        left -= min_share
    parts = {
        server: (seconds * bandwidths[server] - fixed_load) / load_per_share for server in there
    }
    return tuple(parts.get(server, min_share) for server in range(len(bandwidths)))


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
    # `wanted` rounded up to a multiple of GRAIN from the tensor's start.
    return min(edges[after], start - (start - wanted) // GRAIN * GRAIN)


def _cuts_between_tensors(edges: Sequence[int], weights: Sequence[Fraction]) -> list[int]:
    """Find where each server's run of whole tensors begins, so that the largest run is minimal.

    The size of a run is divided by its server's weight; the largest weight is 1.
    """
    size = edges[-1]

    def cuts_for(capacity: int) -> list[int]:
        """Return where each server begins with room for `capacity`, and where the last one ends."""
        cuts = [0]
        for weight in weights:
            room = cuts[-1] + int(capacity * weight)
            # As many whole tensors as fit: no other choice lets the servers behind it end further.
            cuts.append(edges[bisect_right(edges, room) - 1])
        return cuts

    # More room never ends earlier, so that the least capacity can be searched by halves.
    enough = bisect_left(range(size), True, key=lambda capacity: cuts_for(capacity)[-1] == size)
    return cuts_for(enough)[:-1]
