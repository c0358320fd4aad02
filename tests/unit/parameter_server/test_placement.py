"""Which server owns what: slices that cover everything, balanced, with cuts where they may be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.parameter_server.placement import (
    GRAIN,
    MOST_PARTS,
    Slice,
    cut_into_parts,
    parts_by_links,
    place,
)

ALIGNMENT = 16  # elements: where tensors of float32 begin
SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=12)
SERVERS = st.integers(1, 9)


def laid_out(sizes: list[int]) -> tuple[list[tuple[int, int]], int]:
    """(offset, elements) of tensors of these sizes, and the length of the flat vector."""
    spans, offset = [], 0
    for elements in sizes:
        spans.append((offset, elements))
        offset += -(-elements // ALIGNMENT) * ALIGNMENT
    return spans, offset


def assert_covers(slices: tuple[Slice, ...], spans: list[tuple[int, int]], size: int) -> None:
    """Contiguous, from 0 to `size`, and each element of each tensor in exactly one piece."""
    assert slices[0].first == 0
    assert slices[-1].end == size
    assert all(one.end == other.first for one, other in itertools.pairwise(slices))
    owned = [
        (piece.tensor, element)
        for part in slices
        for piece in part.pieces
        for element in range(piece.first, piece.end)
        if part.first <= element < part.end
    ]
    assert owned == [
        (index, offset + i)
        for index, (offset, elements) in enumerate(spans)
        for i in range(elements)
    ]


@given(SIZES, SERVERS)
def test_divisible_tensors_are_balanced_to_the_grain(sizes: list[int], servers: int) -> None:
    spans, size = laid_out(sizes)
    slices = place(spans, size, servers, divisible=True)
    assert len(slices) == servers
    assert_covers(slices, spans, size)
    for part in slices:
        assert abs((part.end - part.first) - size / servers) < GRAIN


@given(SIZES, SERVERS)
def test_a_cut_inside_a_tensor_is_a_multiple_of_the_grain(sizes: list[int], servers: int) -> None:
    spans, size = laid_out(sizes)
    for part in place(spans, size, servers, divisible=True):
        for piece in part.pieces:
            assert (piece.first - spans[piece.tensor][0]) % GRAIN == 0


@given(SIZES, SERVERS)
def test_whole_tensors_are_never_cut(sizes: list[int], servers: int) -> None:
    spans, size = laid_out(sizes)
    slices = place(spans, size, servers, divisible=False)
    assert len(slices) == servers
    assert_covers(slices, spans, size)
    for part in slices:
        for piece in part.pieces:
            offset, elements = spans[piece.tensor]
            assert (piece.first, piece.end) == (offset, offset + elements)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.integers(1, 5))
def test_the_largest_slice_of_whole_tensors_is_minimal(sizes: list[int], servers: int) -> None:
    spans, size = laid_out(sizes)
    slices = place(spans, size, servers, divisible=False)
    edges = [offset for offset, _ in spans] + [size]
    best = min(
        max(end - first for first, end in itertools.pairwise((0, *cuts, size)))
        for cuts in itertools.combinations_with_replacement(edges, servers - 1)
    )
    assert max(part.end - part.first for part in slices) == best


def test_more_servers_than_tensors() -> None:
    spans, size = laid_out([5, 70])
    slices = place(spans, size, 4, divisible=False)
    assert [(part.first, part.end) for part in slices] == [(0, 16), (16, 96), (96, 96), (96, 96)]
    assert [len(part.pieces) for part in slices] == [1, 1, 0, 0]


def test_a_large_tensor_is_cut_where_that_is_allowed_and_kept_where_not() -> None:
    spans, size = laid_out([16, 1000, 16])
    cut = place(spans, size, 2, divisible=True)
    assert [(part.first, part.end) for part in cut] == [(0, 528), (528, 1040)]
    whole = place(spans, size, 2, divisible=False)
    assert [(part.first, part.end) for part in whole] == [(0, 1024), (1024, 1040)]


WEIGHTS = st.lists(st.sampled_from([0.25, 1.0, 1.0, 3.5]), min_size=1, max_size=6)


@given(SIZES, WEIGHTS)
def test_slices_are_as_large_as_their_weights_say(sizes: list[int], weights: list[float]) -> None:
    spans, size = laid_out(sizes)
    slices = place(spans, size, len(weights), divisible=True, weights=weights)
    assert_covers(slices, spans, size)
    for part, weight in zip(slices, weights, strict=True):
        assert abs((part.end - part.first) - size * weight / sum(weights)) <= GRAIN


@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), WEIGHTS.filter(lambda w: len(w) < 4))
def test_the_largest_weighted_slice_of_whole_tensors_is_minimal(
    sizes: list[int], weights: list[float]
) -> None:
    def largest(cuts: tuple[int, ...]) -> float:
        ends = itertools.pairwise((0, *cuts, size))
        return max(
            (end - first) / weight for (first, end), weight in zip(ends, weights, strict=True)
        )

    spans, size = laid_out(sizes)
    slices = place(spans, size, len(weights), divisible=False, weights=weights)
    assert_covers(slices, spans, size)
    edges = [offset for offset, _ in spans] + [size]
    cuts = itertools.combinations_with_replacement(edges, len(weights) - 1)
    room = 4 * max(weights)  # capacities are whole elements of the largest weight
    assert largest(tuple(part.first for part in slices[1:])) <= min(map(largest, cuts)) + room


def test_parts_by_links_end_together_or_are_none() -> None:
    assert parts_by_links([4e8, 1e8], fixed_load=0.0, load_per_share=3.0) == pytest.approx(
        (0.8, 0.2)
    )
    parts = parts_by_links([1e9, 1e8, 1e9], fixed_load=1.0, load_per_share=2.0)
    assert parts == pytest.approx((0.5, 0.0, 0.5)), "the slow link is busy with its worker's"
    parts = parts_by_links([1e9, 8e8, 1e9], fixed_load=1.0, load_per_share=2.0)
    seconds = [(1 + 2 * part) / link for part, link in zip(parts, [1e9, 8e8, 1e9], strict=True)]
    assert seconds == pytest.approx([seconds[0]] * 3)
    assert sum(parts) == pytest.approx(1)
    assert parts_by_links([4.0, 1.0, 3.0], 0.0, 1.0, min_share=0.25) == pytest.approx(
        (3 / 7, 0.25, 9 / 28)
    )
    assert parts_by_links([4.0, 1.0], 0.0, 1.0, min_share=0.5) == pytest.approx((0.5, 0.5))


@given(SIZES, SERVERS, st.integers(1, 50), st.integers(0, 50))
def test_parts_cover_a_slice_within_their_bounds(
    sizes: list[int], servers: int, least: int, further: int
) -> None:
    """Each part but the last of a slice has its share of all, and is too short without its end."""
    spans, size = laid_out(sizes)
    slices = place(spans, size, servers, divisible=True)
    most = least + further
    parts = cut_into_parts(slices, least, most)
    share = min(most, max(least, size / MOST_PARTS))
    for number, owned in enumerate(slices):
        own = [part for part in parts if part.place == number]
        if not owned.pieces:
            assert own == []
            continue
        assert [part.number for part in own] == [*range(len(own))]
        assert (own[0].first, own[-1].end) == (owned.first, owned.end)
        assert all(one.end == other.first for one, other in itertools.pairwise(own))
        for part in own[:-1]:
            assert part.end - part.first >= share
            last = owned.pieces[part.pieces[1] - 1]
            assert last.first - part.first < share + 1


def test_a_large_model_has_few_parts() -> None:
    spans = [(i * 64, 64) for i in range(4096)]
    whole = place(spans, 4096 * 64, 1, divisible=True)
    assert len(cut_into_parts(whole, 64, 1 << 20)) == MOST_PARTS
    slices = place(spans, 4096 * 64, 16, divisible=True)
    assert len(cut_into_parts(slices, 64, 1 << 20)) == MOST_PARTS
    assert len(cut_into_parts(whole, 64, 1024)) == 4096 * 64 // 1024  # a bucket is the most
