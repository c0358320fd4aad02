"""The rows of a schedule give its sums in any order of arrival, and cannot deadlock.

All ranks are played here, one element at a time, over connections that hold a single element. A
move that is possible stays possible until it is made: no other move takes its element, its place
in a connection, or what its rule waits for. So all orders of moves end alike, and larger
connections only allow more: where one order ends with all rows done, no order gets stuck.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.all_schedules import RANKS, lengths, schedules
from tests.support.interpreter import interpret, memories_before, sum_of_slots
from tests.support.lab import in_lab, some

from orchestra.schedules import Schedule
from orchestra.schedules.rows import Rows, rows_of
from orchestra.schedules.table import table_of

Place = tuple[int, int, bool]
"""A rank, its peer, and whether it sends: a connection, in one direction, at one of its ends."""


class Player:
    """One rank: its memory, its rows, and the element that each row has come to."""

    def __init__(self, memory: NDArray[np.float32], rows: Rows) -> None:
        self.memory = memory
        self.rows: list[Any] = rows.tolist()
        self.at = [row[0] for row in self.rows]

    def limit(self, number: int) -> int:
        """Return the element before which row `number` has to stop, as executor.c does."""
        limit: int
        _, limit, _, sends, *_ = self.rows[number]
        for earlier in range(number):
            _, end, _, sent, *_ = self.rows[earlier]
            # What this row has still to move meets what the earlier one has still to move.
            if not (sends and sent) and self.at[earlier] < limit and end > self.at[number]:
                limit = max(self.at[earlier], self.at[number])
        return limit


class Play:
    """All ranks of a collective, and what is on its way between them."""

    def __init__(
        self, schedule: Schedule, vectors: Sequence[NDArray[np.float32]], edges: Sequence[int]
    ) -> None:
        self.players = [
            Player(memory, rows_of(table_of(schedule).parts(rank), edges))
            for rank, memory in enumerate(memories_before(schedule, vectors))
        ]
        self.wires: dict[tuple[int, int], deque[np.float32]] = {}
        # Each direction of a connection takes its rows in order.
        self.rows: dict[Place, deque[int]] = {}
        for rank, player in enumerate(self.players):
            for number, (_, _, peer, sends, *_) in enumerate(player.rows):
                self.rows.setdefault((rank, peer, bool(sends)), deque()).append(number)

    def finish(self, order: random.Random, room: int) -> None:
        """Move all that can be moved, in some order, where connections hold `room` elements."""
        places = list(self.rows)
        while any(self.rows.values()):
            order.shuffle(places)
            moved = [self.move(place, room) for place in places]
            assert any(moved), "deadlock"

    def move(self, place: Place, room: int) -> bool:
        """Move one element; return whether that was possible."""
        rank, peer, sends = place
        queue, player = self.rows[place], self.players[rank]
        if not queue or player.at[queue[0]] == player.limit(queue[0]):
            return False
        number = queue[0]
        at = player.at[number]
        wire = self.wires.setdefault((rank, peer) if sends else (peer, rank), deque())
        if sends:
            if len(wire) == room:
                return False
            wire.append(player.memory[at])
        else:
            if not wire:
                return False
            arrived = wire.popleft()
            player.memory[at] = player.memory[at] + arrived if player.rows[number][4] else arrived
        player.at[number] += 1
        if player.at[number] == player.rows[number][1]:
            queue.popleft()
        return True


def edges_of(schedule: Schedule, order: random.Random) -> Iterator[tuple[int, ...]]:
    """Even edges, with and without empty pieces; some that lie anywhere."""
    for length in lengths(schedule.ranks):
        if length <= 2 * schedule.ranks:
            yield schedule.edges(length)
    if not schedule.slots:
        for _ in range(2):
            cuts = [order.randrange(12) for _ in range(schedule.pieces - 1)]
            yield (0, *sorted(cuts), 12)


@pytest.mark.parametrize("ranks", some([*RANKS[:9], *in_lab(RANKS[9:])]))
def test_rows_give_the_bits_of_the_rounds_and_never_get_stuck(ranks: int) -> None:
    order, draw = random.Random(ranks), np.random.default_rng(ranks)
    for schedule in schedules(ranks):
        for edges in edges_of(schedule, order):
            length = edges[-1] // schedule.pieces if schedule.slots else edges[-1]
            vectors = list(draw.standard_normal((ranks, length)).astype(np.float32))
            play = Play(schedule, vectors, edges)
            play.finish(order, room=1)
            results = [sum_of_slots(schedule, player.memory) for player in play.players]
            for result, expected in zip(results, interpret(schedule, vectors, edges), strict=True):
                assert result.tobytes() == expected.tobytes()


def test_a_move_that_is_possible_stays_possible() -> None:
    """The premise of playing one order only: checked over the moves of a whole play."""
    for ranks in (3, 4, 6):
        for schedule in schedules(ranks):
            draw, order = np.random.default_rng(ranks), random.Random(ranks)
            vectors = list(draw.standard_normal((ranks, 5)).astype(np.float32))
            play, before = Play(schedule, vectors, schedule.edges(5)), set[Place]()
            while any(play.rows.values()):
                possible = {place for place in play.rows if can_move(play, place)}
                assert before <= possible
                moved = order.choice(sorted(possible))
                assert play.move(moved, room=1)
                before = possible - {moved}


def can_move(play: Play, place: Place) -> bool:
    rank, peer, sends = place
    player, queue = play.players[rank], play.rows[place]
    wire = play.wires.get((rank, peer) if sends else (peer, rank), ())
    free = not wire if sends else bool(wire)
    return bool(queue) and free and player.at[queue[0]] < player.limit(queue[0])


@pytest.mark.parametrize("ranks", RANKS)
def test_both_ends_of_a_connection_have_the_same_rows(ranks: int) -> None:
    for schedule in schedules(ranks):
        edges = schedule.edges(ranks + 1)
        sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
        received: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank in range(ranks):
            for first, end, peer, sends, adds, *_ in rows_of(
                table_of(schedule).parts(rank), edges
            ).tolist():
                assert first < end
                assert not (sends and adds)
                ends = (rank, peer) if sends else (peer, rank)
                (sent if sends else received).setdefault(ends, []).append((first, end))
        assert sent == received


def test_rows_of_a_ring() -> None:
    """Rank 0 of three: what it adds it passes on, and then what it copies but for the last."""
    schedule = next(each for each in schedules(3) if each.name == "ring")
    rows = rows_of(table_of(schedule).parts(0), (0, 2, 4, 6))
    names = ("peer", "first", "end", "sends", "adds")
    assert [tuple(int(row[name]) for name in names) for row in rows] == [
        (1, 0, 2, 1, 0),
        (2, 4, 6, 0, 1),
        (1, 4, 6, 1, 0),
        (2, 2, 4, 0, 1),
        (1, 2, 4, 1, 0),
        (2, 0, 2, 0, 0),
        (1, 0, 2, 1, 0),
        (2, 4, 6, 0, 0),
    ]
